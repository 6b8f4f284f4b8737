"""Flags from `LOOM_*` variables and files: the same names, values and errors, and who wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.settings import parse, parse_generate
from bench.chaos.tiny import ROOT
from core.errors import ConfigError
from tests.rigs.usage import usage_error


def written(folder: Path, text: str, name: str = "serve.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_flags_win_over_variables_and_these_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "port = 1\nhost = 'file'\nmax-running = 5\napi-key = ['a', 'b']\n", "serve.toml")
    monkeypatch.setenv("LOOM_PORT", "2")
    monkeypatch.setenv("LOOM_HOST", "variable")
    monkeypatch.setenv("LOOM_API_KEY", "c,d")
    config = parse(["--config", path, "--port", "3"])
    assert (config.serve.port, config.serve.host, config.schedule.max_running) == (3, "variable", 5)
    assert config.serve.api_key == ("c", "d")  # not those of the file too


def test_the_file_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_CONFIG", written(tmp_path, "port: 4"))
    assert parse([]).serve.port == 4


@pytest.mark.parametrize(("name", "text"), [("a.toml", "port = 4"), ("a.yaml", "port: 4")])
def test_a_file_of_windows(name: str, text: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"\ufeff{text}\r\n", name)
    assert parse(["--config", path]).serve.port == 4


def test_a_file_of_vllm(tmp_path: Path) -> None:
    text = """
model: org/m
max-model-len: 32k
max_num_seqs: 64
gpu-memory-utilization: 0.8
enable-prefix-caching: false
enforce-eager: true
trust-remote-code: false
served-model-name: [a, b]
speculative-config: {method: ngram, num_speculative_tokens: 3}
lora-modules: [{name: sql, path: /adapters/sql}]
"""
    ours = (
        "--model org/m --context-length 32000 --max-running 64 --mem-fraction 0.8 --no-radix-cache "
        "--no-cuda-graphs --served-model-name a b --speculative-algorithm ngram "
        "--speculative-num-draft-tokens 4 --lora"
    )
    lora = '{"name": "sql", "path": "/adapters/sql"}'
    assert parse(["--config", written(tmp_path, text)]) == parse([*ours.split(), lora])


def test_a_file_of_sglang(tmp_path: Path) -> None:
    text = "model-path: org/m\ntp-size: 2\nmem-fraction-static: 0.8\ndisable-cuda-graph: true"
    ours = "--model org/m --tp 2 --mem-fraction 0.8 --no-cuda-graphs"
    assert parse(["--config", written(tmp_path, text)]) == parse(ours.split())


@pytest.mark.parametrize("path", sorted((ROOT / "configs/serve").iterdir()), ids=lambda path: path.name)
def test_our_own_files_are_right(path: Path) -> None:
    assert parse(["--config", str(path)])


@pytest.mark.parametrize(("text", "value"), [("0", False), ("off", False), ("1", True), ("TRUE", True)])
def test_switches_are_1_or_0(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_RADIX_CACHE", text)
    assert parse([]).cache.radix_cache is value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 3", ["prot", "Did you mean --port?"]),
        ("enforce-egaer: false", ["Did you mean --enforce-eager?"]),
        ("port: x", ["port", "'x'"]),
        ("port: false", ["port", "'False'"]),
        ("port: true", ["port", "expected one argument"]),
        ("port: 70000", ["port", "65535", "70000"]),
        ("max-num-seqs: -1", ["max-num-seqs", ">= 0", "-1"]),
        ("page-size: 24", ["page-size", "power of two"]),
        ("order: best", ["order", "fcfs"]),
        ("radix-cache: maybe", ["radix-cache", "maybe"]),
        ("speculative-config: {method: ngram, tokens: 3}", ["speculative-config", "tokens"]),
        ("api-key: ['']", ["api-key", "a key must not be empty"]),
        ("api-key: [a, null]", ["api-key", "an entry of the list is empty"]),
        ("config: other.yaml", ["a file cannot name another one"]),
        ("version: true", ["belongs on the command line"]),
    ],
)
def test_an_error_names_the_file_and_the_key(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    error = usage_error(capsys, parse, ["--config", path])
    assert all(word in error for word in (path, *words)), error


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "port: [1", "YAML"),
        ("a.yaml", "- port", "YAML"),
        ("a.toml", "port 1", "TOML"),
        ("a.toml", b"\xff".decode("latin-1"), "TOML"),
        ("a.json", "{}", ".toml, .yaml or .yml"),
    ],
)
def test_a_file_that_is_none(name: str, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        parse(["--config", written(tmp_path, text, name)])
    assert "\n" not in str(raised.value)


def test_no_file() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        parse(["--config", "nowhere.toml"])


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("LOOM_PORT", "x", "'x'"),
        ("LOOM_PORT", "70000", "65535"),
        ("LOOM_RADIX_CACHE", "maybe", "1 or 0"),
        ("LOOM_PORT", "tcp://10.0.0.1:80", "enableServiceLinks"),
        ("LOOM_API_KEY", "a,,b", "a key must not be empty"),
        ("LOOM_API_KEY", "a, b", "or have blanks around it"),
    ],
)
def test_an_error_names_the_variable(
    variable: str, text: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, text)
    error = usage_error(capsys, parse, [])
    assert error.startswith(f"loom: error: {variable}: ") and words in error


def test_an_empty_key_is_no_authentication_that_nobody_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The key is empty in `--api-key "$KEY"` where the variable is not set: the server took every request."""
    assert "argument --api-key: a key must not be empty" in usage_error(capsys, parse, ["--api-key", ""])


def test_a_mistyped_variable_is_noted_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOOM_MODLE", "m")
    monkeypatch.setenv("LOOM_SERVICE_HOST", "Kubernetes sets this")
    monkeypatch.setenv("LOOM_CACHE", "/cache")
    parse([])
    assert capsys.readouterr().err == "loom: note: LOOM_MODLE sets nothing. Did you mean LOOM_MODEL?\n"


def test_a_command_passes_over_the_flags_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_PORT", "1")
    path = written(tmp_path, "host: h\nuvicorn-log-level: info\ncontrol-routes: false\nmax-num-seqs: 3")
    config, _ = parse_generate(["--input", "i", "--output", "o", "--config", path])
    assert config.schedule.max_running == 3
