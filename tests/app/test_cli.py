"""Flags are the config's fields; a wrong one is one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

from app.cli import main
from app.process import VERSION
from app.settings import COMMANDS, GROUPS, GenerateFlags, make_parser, parse, parse_generate
from bench.chaos.tiny import ROOT
from core.config import Config
from tests.rigs.usage import usage_error


def test_no_flags_are_the_defaults() -> None:
    assert parse([]) == Config()


def test_every_field_is_a_flag_with_help() -> None:
    text = " ".join(make_parser().format_help().split())
    for group in GROUPS:
        for field in msgspec.structs.fields(group.kind):
            assert f"--{field.encode_name.replace('_', '-')}" in text


def test_help_begins_with_ten_flags_and_shows_every_default_and_unit() -> None:
    sections = make_parser().format_help().split(" flags:\n")
    assert sections[0].endswith("common")
    assert sections[1].count("\n  --") == 9 and sections[1].startswith("  --model ")
    for section in sections[1:-1]:
        for entry in section.split("\n  --")[1:]:
            assert re.search(r"\((default:|required)", entry), entry
    numbers = [action for action in make_parser().fields.values() if action.type in (int, float)]
    assert numbers and all(str(action.metavar).isupper() for action in numbers)
    text = " ".join(make_parser().format_help().split())
    assert "0: what fits in memory (default: 0)" in text
    assert "--log-level {debug,info,warning,error} what is logged (default: info)" in text
    assert "reuse the KV of equal prefixes (default: on)" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"loom {VERSION}\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--modle", "m"], "Did you mean --model?"),
        (["--max-num-seq=3"], "Did you mean --max-num-seqs?"),
        (["-port", "3"], "Did you mean --port?"),
        (["genrate"], "Did you mean generate?"),
        (["org/name"], "python -m app serve org/name"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_likely_one(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meant in usage_error(capsys, main, words)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert ("--model MODEL" in shown) == (command != "models") and "--help" in shown
    assert f"\n  {command} " in make_parser().format_help()


@pytest.mark.parametrize(
    ("started", "shown"), [("/usr/bin/loom", "loom"), ("/site-packages/app/__main__.py", "python -m app")]
)
def test_texts_name_the_program_as_it_was_started(
    started: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [started, "generate", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith(f"usage: {shown} generate [MODEL]")
    with pytest.raises(SystemExit):
        main(["org/name"])
    assert f"{shown} serve org/name (see {shown} --help)" in capsys.readouterr().err
    assert f"commands ({shown} COMMAND --help)" in make_parser().format_help()


def test_the_script_of_an_installation_is_this_main() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert EntryPoint("loom", scripts["loom"], "console_scripts").load() is main


def test_a_word_like_none_gets_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean" not in usage_error(capsys, main, ["--zzz"])


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
        (["--mem-fraction", "2"], "--mem-fraction"),
        (["--ssl-keyfile", "key.pem"], "needs --ssl-certfile"),
    ],
)
def test_a_wrong_flag_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in usage_error(capsys, parse, arguments)


def test_generate_has_the_flags_of_the_engine_and_its_own() -> None:
    config, flags = parse_generate(
        ["--input", "i", "--output", "o", "--page-size", "32", "--tool-parser", "none", "--no-radix-cache"]
    )
    assert flags == GenerateFlags(input="i", output="o")
    assert (config.cache.page_size, config.cache.radix_cache, config.serve.tool_parser) == (32, False, "none")


@pytest.mark.parametrize("more", [["--port", "1"], ["--concurrency", "-1"], ["--page-size", "24"]])
def test_generate_refuses_what_has_no_meaning(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert more[0] in usage_error(capsys, parse_generate, ["--input", "i", "--output", "o", *more])


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
    error = usage_error(capsys, main, ["--model", "none"])
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
