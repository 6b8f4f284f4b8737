"""The log: one line a record, in text or JSON, and a reader that sleeps holds nobody up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

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
logs.set_up("info", sys.argv[1])
log = logging.getLogger("flood")
for i in range(5000):
    log.info("line %d %s", i, "x" * 60)
print("through", flush=True)
sys.stdin.read()
log.info("line last")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_that_nobody_reads_are_dropped_and_counted(form: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COUNTED, form],
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
    written = [line for line in text.splitlines() if "flood" in line and "dropped" not in line]
    assert dropped and len(written) + sum(dropped) == 5001
    if form == "json":
        assert {type(json.loads(line)) for line in text.splitlines()} == {dict}


FULL = """
import logging, resource, sys
from app import logs
logs.set_up("info")
log, limits = logging.getLogger("t"), resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
log.info("lost")
logs.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
log.info("first after it")
"""


def test_a_full_disk_costs_lines_and_not_the_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as file:
        subprocess.run([sys.executable, "-c", FULL], cwd=ROOT, stderr=file, timeout=PATIENCE, check=True)
        file.seek(0)
        text = file.read()
    assert "1 lines were dropped: stderr was full or not read" in text
    assert text.endswith("t: first after it\n")


def test_every_line_before_the_exit_is_written() -> None:
    script = FLOOD + "logging.getLogger('t').error('last')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stderr.count(" flood: line ") == 5000 and done.stderr.endswith("t: last\n")


def test_the_error_that_ends_a_command_stands_behind_its_log() -> None:
    script = """
from app import cli
from core.errors import ConfigError

def fail(words):
    for i in range(5000):
        log.info("line %d", i)
    raise ConfigError("wrong")

cli._run = fail
cli.main([])
"""
    lines = logged("text", script, status=2)
    assert len(lines) == 5001 and lines[-1] == "loom: error: wrong"


def test_lines_behind_a_flush_are_written() -> None:
    flushed = ["log.info('line')", "logs.flush()"] * 3
    lines = logged("text", "from app import logs", *flushed, "log.info('last')")
    assert [line.split()[-1] for line in lines] == ["line", "line", "line", "last"]


def test_a_message_cannot_start_a_line_of_its_own() -> None:
    (line,) = logged("text", r"log.info('a\nb\x1b[1m\u2028\x85c')")
    assert "a\\nb\\x1b[1m\\u2028\\x85c" in line and line.isprintable()


def test_a_line_begins_with_its_date() -> None:
    (line,) = logged("text", "log.warning('here')")
    stamp, _, rest = line.partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp) and rest == "W t: here"
    assert abs(datetime.now(UTC) - datetime.fromisoformat(stamp)) < timedelta(minutes=5)


def test_json_has_a_line_a_record_whatever_is_in_it() -> None:
    message = 'a\nb\x1b[1m\u2028\x85c"}{'
    failing = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('caught')"
    plain = f"log.info({message!r}, extra={{'fields': {{'status': 404}}}})"
    first, second, third = map(json.loads, logged("json", plain, failing, "log.info('%s', 5)"))
    assert first["message"] == message and first["status"] == 404
    assert (first["level"], first["logger"]) == ("info", "t")
    assert datetime.fromisoformat(first["time"]).tzinfo is UTC
    assert "ZeroDivisionError" in second["exception"] and second["level"] == "error"
    assert third["message"] == "5" and "exception" not in third


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_are_ascii_and_one_a_record(form: str) -> None:
    for line in logged(form, "for i in range(0x3000): log.info('<%s>', chr(i))"):
        assert line.isascii() or form == "text"
        assert line.isprintable()


def logged(form: str, *statements: str, status: int = 0) -> list[str]:
    """Lines on stderr of a process that runs statements with `log` and exits with `status`."""
    script = "\n".join(
        [
            "import logging, sys",
            "from app.logs import set_up",
            "set_up('info', sys.argv[1])",
            "log = logging.getLogger('t')",
            *statements,
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", script, form], cwd=ROOT, capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == status
    return done.stderr.decode().removesuffix("\n").split("\n")
