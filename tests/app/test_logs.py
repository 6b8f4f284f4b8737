"""The log: one line a record, and a reader that sleeps holds nobody up."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.patience import PATIENCE
from tests.ratchet.tree import ROOT

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
