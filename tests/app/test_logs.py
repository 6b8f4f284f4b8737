"""The log: one line a record, and a reader that sleeps holds nobody up."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.rigs.tree import ROOT
from tests.rigs.wait import PATIENCE

FLOOD = """
import logging, sys
from app.logs import set_up
set_up("info")
for i in range(5000):
    logging.getLogger("flood").info("line %d %s", i, "x" * 60)
print("through", flush=True)
"""


def test_a_pipe_that_nobody_reads_does_not_stop_the_writer() -> None:
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", FLOOD],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=write,
            timeout=PATIENCE,
            check=True,
        )
    finally:
        os.close(write)
        os.close(read)
    assert done.stdout == b"through\n"


COUNTED = """
import logging, sys
from app import logs
logs.KEPT = 100
logs.set_up("info")
log = logging.getLogger("flood")
for i in range(5000):
    log.info("line %d %s", i, "x" * 60)
print("through", flush=True)
sys.stdin.read()
log.info("line last")
"""


def test_lines_that_nobody_reads_are_dropped_and_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COUNTED],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None and child.stderr is not None and child.stdin is not None
        assert child.stdout.readline() == "through\n"
        child.stdin.close()
        text = child.stderr.read()
    dropped = [int(count) for count in re.findall(r"(\d+) lines were dropped", text)]
    assert dropped and text.count(" flood: line ") + sum(dropped) == 5001


def test_every_line_before_the_exit_is_written() -> None:
    script = FLOOD + "logging.getLogger('t').error('last')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stderr.count(" flood: line ") == 5000 and done.stderr.endswith("t: last\n")


def test_a_message_cannot_start_a_line_of_its_own() -> None:
    lines = [
        "import logging",
        "from app.logs import set_up",
        "set_up('info')",
        r"logging.getLogger('t').info('a\nb\x1b[1m')",
    ]
    script = "\n".join(lines)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stderr.count("\n") == 1
    assert "a\\nb\\x1b[1m" in done.stderr
