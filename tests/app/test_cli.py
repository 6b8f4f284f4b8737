"""Flags are the config's fields; a wrong one is one line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from app.cli import GROUPS, GenerateFlags, main, make_parser, parse, parse_generate
from bench.chaos.tiny import ROOT
from core.config import Config


def test_no_flags_are_the_defaults() -> None:
    assert parse([]) == Config()
    assert parse(["serve"]) == Config()


def test_every_field_is_a_flag_with_help() -> None:
    text = " ".join(make_parser().format_help().split())
    for _, group in GROUPS:
        for field in msgspec.structs.fields(group):
            assert f"--{field.encode_name.replace('_', '-')}" in text


def test_flags_reach_their_groups() -> None:
    config = parse(
        ["--model", "m", "--page-size", "64", "--overlap-depth", "2", "--port", "0", "--prefill-first"]
    )
    assert (config.model.model, config.cache.page_size, config.serve.port) == ("m", 64, 0)
    assert (config.schedule.overlap_depth, config.schedule.prefill_first) == (2, True)
    assert parse(["--disable-radix-cache"]) == parse(["--no-radix-cache"])
    assert not parse(["--no-radix-cache"]).cache.radix_cache


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "x"], "--port"),
        (["--port", "-1"], "--port"),
        (["--page-size", "24"], "--page-size"),
        (["--order", "best"], "--order"),
        (["--modle", "m"], "--modle"),
        (["--mem-fraction", "2"], "--mem-fraction"),
    ],
)
def test_a_wrong_flag_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_generate_has_the_flags_of_the_engine_and_its_own() -> None:
    config, flags = parse_generate(
        ["--input", "i", "--output", "o", "--page-size", "32", "--tool-parser", "none", "--no-radix-cache"]
    )
    assert flags == GenerateFlags(input="i", output="o")
    assert (config.cache.page_size, config.cache.radix_cache, config.serve.tool_parser) == (32, False, "none")


@pytest.mark.parametrize("more", [["--port", "1"], ["--concurrency", "-1"], ["--page-size", "24"]])
def test_generate_refuses_what_has_no_meaning(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_generate(["--input", "i", "--output", "o", *more])
    assert ended.value.code == 2
    assert more[0] in capsys.readouterr().err


@pytest.mark.parametrize(("folder", "words"), [("none", "No such file"), ("full", "No space left")])
def test_a_temporary_folder_that_cannot_be_used_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: str,
    words: str,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    if folder == "full":
        device = os.open("/dev/full", os.O_WRONLY)
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering: os.fdopen(device, "wb", buffering))
    with pytest.raises(SystemExit) as ended:
        main(["--model", "none"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error and "TMPDIR" in error


@pytest.mark.parametrize("package", ["torch", "aiohttp", "uvloop", "msgspec"])
def test_a_package_that_is_missing_is_one_line(tmp_path: Path, package: str) -> None:
    script = (
        "import runpy, sys\n"
        f"sys.modules[{package!r}] = None\n"
        "sys.argv[1:] = ['--model', 'none']\n"
        "runpy.run_module('app', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert repr(package) in ended.stderr and "pip install" in ended.stderr
