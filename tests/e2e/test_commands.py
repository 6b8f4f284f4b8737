"""`python -m app chat`, `pull` and `doctor` as processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.commands.models import FORMATS
from app.parsers.registry import REASONING, TOOLS
from bench.chaos.tiny import ROOT, flags
from core.models.registry import FAMILIES, served
from tests.rigs.wait import PATIENCE


def run(*words: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *words],
        cwd=ROOT,
        input=typed,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE,
    )


def test_chat_starts_an_engine_of_its_own(model: Path) -> None:
    sampling = '{"max_tokens": 4, "temperature": 0, "ignore_eos": true}'
    done = run("chat", *flags(model), "--sampling", sampling, typed="a\n/new\na\n")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.removesuffix("\n").split("\n", 1)[0], done.stdout.removesuffix("\n")
    assert first and second == f"{first}\n{first}"


def test_a_wrong_field_of_chat_is_one_line(model: Path) -> None:
    done = run("chat", *flags(model), "--sampling", '{"tempreature": 0}', typed="a\n")
    assert done.returncode == 1
    assert done.stderr == "loom: error: --sampling: there is no parameter tempreature.\n"


def test_pull_says_where_a_model_lies_or_why_there_is_none(model: Path) -> None:
    done = run("pull", str(model), "--load-format", "dummy")
    assert done.returncode == 0 and str(model) in done.stdout
    done = run("pull", "nowhere")
    assert done.returncode == 2 and done.stderr.startswith("loom: error: there is no 'nowhere'")


def test_a_healthy_place_needs_no_doctor(model: Path, tmp_path: Path) -> None:
    done = run("doctor", *flags(model), "--port", "0", LOOM_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stdout
    for title in ("versions", "devices", "model", "port", "disk", "open files"):
        assert f"ok   {title}" in done.stdout
    assert "KV pool" in done.stdout and "FIX" not in done.stdout


def test_doctor_says_what_to_change(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        more = ["--kv-tokens", "9000000000", "--port", port, "--data-dir", str(tmp_path / "file")]
        done = run("doctor", *flags(model), *more, LOOM_CACHE=str(tmp_path))
    assert done.returncode == 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("FIX")]
    assert len(wrong) == 3
    assert "--kv-tokens" in wrong[0] and "--port" in wrong[1] and "--data-dir" in wrong[2]


def test_a_model_that_is_not_here_yet_is_no_fault(tmp_path: Path) -> None:
    done = run("doctor", "--port", "0", "--device", "cpu", LOOM_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "not fetched yet" in done.stdout and "python -m app pull" in done.stdout


HEAD = ["ARCHITECTURE", "TASK", "LAYERS", "TOOLS", "REASONING"]


def test_formats_of_models_are_those_of_parsers() -> None:
    """Each architecture that generates has a line, and no other."""
    assert set(FORMATS) == {each.architecture for each in served() if each.task == "generate"}
    for tools, reasoning in FORMATS.values():
        assert tools in {"-", *TOOLS} and reasoning in {"-", *REASONING}


def test_models_lists_what_is_served() -> None:
    done = run("models")
    head, *rows, others = [line.split(maxsplit=5) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr, head) == (0, "", [*HEAD, "WEIGHTS"])
    assert [row[0] for row in rows] == sorted(FAMILIES)
    table = {name: tuple(row) for name, *row in rows}
    fine = "safetensors, fp8, int8, awq, gptq, w4a16"
    assert table["Qwen3MoeForCausalLM"] == (
        *("generate", "native", "hermes", "think"),
        f"{fine}, gguf",
    )
    assert table["Phi3ForCausalLM"] == ("generate", "native", "phi4_mini_json", "-", f"{fine}, gguf")
    assert table["BertModel"] == ("embed", "native", "-", "-", "safetensors")
    assert table["Qwen2ForSequenceClassification"] == (
        *("classify", "native", "-", "-"),
        fine,
    )
    assert others[:5] == ["other", "...ForCausalLM", "generate", "transformers", "-"]
    assert others[5].split() == ["-", "safetensors"]
    assert run("models", "--port", "1").returncode == 2


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    command = [sys.executable, "-m", "app", "check-config"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_standard_files_that_the_caller_closed_are_opened(closed: int) -> None:
    """Else a socket gets the number, and libuv aborts the process when it closes it."""
    code = "import os; from app.process import open_standard_files as act; act(); os._exit(os.open('/', 0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, preexec_fn=lambda: os.close(closed))
    assert done.returncode > 2


def test_doctor_looks_for_the_directory_of_a_socket(model: Path, tmp_path: Path) -> None:
    done = run("doctor", *flags(model), "--uds", str(tmp_path / "no" / "s"))
    assert done.returncode != 0
    assert "its directory does not exist" in done.stdout + done.stderr
