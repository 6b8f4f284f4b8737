"""`python -m app generate` as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.tiny import ROOT, flags
from tests.rigs.process import Ended, begin, run_to_end, take_ctrl_c
from tests.rigs.wait import PATIENCE


def generate(model: Path, source: Path, output: Path, *more: str) -> tuple[Ended, dict[str, Any]]:
    """Run `generate`. Returns the process, and the records of the output by custom_id."""
    ended = run_to_end("generate", "--input", str(source), "--output", str(output), *flags(model), *more)
    return ended, records(output)


def records(output: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({record["custom_id"] for record in found}) == len(found)
    return {record["custom_id"]: record for record in found}


def batch_line(id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": {"max_tokens": 3, **body}}


def test_lines_of_every_kind_and_a_second_run(model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True}
    texts = [
        json.dumps(batch_line("batch", prompt="a")),
        json.dumps({"prompt": "b", "max_tokens": 4, "ignore_eos": True, "custom_id": "plain"}),
        json.dumps(chat),
        "",
        "{oops",
        json.dumps({"nothing": 1}),
        json.dumps(batch_line("batch", prompt="twice")),
        json.dumps(batch_line("wrong", prompt="a", temperature=-1)),
    ]
    source.write_text("\n".join(texts))
    ended, found = generate(model, source, output)
    assert ended.returncode == 1, ended.stderr
    assert set(found) == {"batch", "plain", "line-3", "line-5", "line-6", "line-7", "wrong"}
    assert found["batch"]["response"]["body"]["object"] == "text_completion"
    assert found["plain"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert found["line-3"]["response"]["body"]["object"] == "chat.completion"
    assert found["line-5"]["error"]["code"] == "invalid_json_line"
    assert found["line-7"]["error"]["code"] == "duplicate_custom_id"
    assert found["wrong"]["response"]["status_code"] == 400
    assert "3 lines answered, 4 failed" in ended.stderr
    assert "Traceback" not in ended.stderr

    # One line added, one fixed, and an incomplete last record: answers are kept, missing and failed lines run
    # again, and a line with another model name is accepted.
    first = output.read_bytes().splitlines(keepends=True)
    good = [line for line in first if json.loads(line)["error"] is None and b'"status_code":200' in line]
    assert len(good) == 3
    output.write_bytes(b"".join(first) + b'{"id": "batch_req_1", "custom_id": "new"')
    texts[-1] = json.dumps(batch_line("wrong", prompt="a", temperature=0))
    source.write_text("\n".join([*texts, json.dumps(batch_line("new", prompt="c", model="gpt-4o-mini"))]))
    ended, found = generate(model, source, output, "--model-name", "any")
    assert ended.returncode == 1
    assert "4 lines that failed are tried again" in ended.stderr
    assert "5 lines answered, 3 failed" in ended.stderr
    assert output.read_bytes().startswith(b"".join(good))
    assert output.read_bytes().count(b"\n") == 8
    assert [found[id]["response"]["status_code"] for id in ("new", "wrong")] == [200, 200]
    assert not output.with_name("out.jsonl.retry").exists()


LOADS_FOR_EVER = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from app import offline
from app.cli import main

def load(*_):
    ThreadPoolExecutor(1).submit(threading.Event().wait)
    print("loading", flush=True)
    threading.Event().wait()

offline.load = load
main(sys.argv[1:])
"""


def test_ctrl_c_does_not_wait_for_a_model_that_loads(model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(batch_line("a", prompt="a")))
    command = ["generate", "--input", str(source), "--output", str(output), *flags(model)]
    process = subprocess.Popen(
        [sys.executable, "-c", LOADS_FOR_EVER, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_ctrl_c,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert errors == "interrupted: run the same command to continue\n"


def test_an_interrupted_run_resumes(model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [batch_line(f"l{i}", prompt=f"{i}", max_tokens=40, ignore_eos=True) for i in range(30)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["generate", "--input", str(source), "--output", str(output), *flags(model)]
    log = tmp_path / "log"
    process = begin(*command, "--concurrency", "1", log=log, own=True)
    try:
        while not output.exists() or output.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
    errors = log.read_text()
    assert code == 130, errors
    assert "Traceback" not in errors
    first = output.read_bytes()
    assert 3 <= first.count(b"\n") < 30
    ended, found = generate(model, source, output)
    assert ended.returncode == 0, ended.stderr
    assert output.read_bytes().startswith(first)
    assert set(found) == {f"l{i}" for i in range(30)}
    assert all(record["response"]["status_code"] == 200 for record in found.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--input"),
        (["--input", "nowhere.jsonl", "--output", "out"], "nowhere.jsonl"),
        (["--input", "x", "--output", "y", "--port", "1"], "--port"),
        (["--input", "x", "--output", "y", "--concurrency", "-1"], "--concurrency"),
    ],
)
def test_a_wrong_command_is_one_line_of_error(arguments: list[str], words: str, tmp_path: Path) -> None:
    ended = run_to_end("generate", *arguments)
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("loom: error:") and words in last
    assert "Traceback" not in ended.stderr


def test_files_that_would_be_lost_are_refused(model: Path, tmp_path: Path) -> None:
    source, notes = tmp_path / "in.jsonl", tmp_path / "notes"
    source.write_text('{"prompt": "a"}')
    notes.write_text("no newline")
    pipe, new = tmp_path / "pipe", tmp_path / "new"
    os.mkfifo(pipe)
    for given, output in ((source, source), (source, notes), (source, pipe), (pipe, new)):
        ended = run_to_end("generate", "--input", str(given), "--output", str(output), *flags(model))
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert (source.read_text(), notes.read_text()) == ('{"prompt": "a"}', "no newline")
