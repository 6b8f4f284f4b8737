"""`python -m app check-config` prints a file that a start with it would understand in the same way."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from app.cli import main
from app.commands.check_config import lines
from app.settings import make_parser, parse, parse_with


def test_what_is_printed_is_a_file_with_the_same_settings(tmp_path: Path) -> None:
    argv = [
        *[
            "--model",
            '/a"b',
            "--lora",
            "x=/x",
            '{"name":"y","path":"/y"}',
            "--max-num-seqs",
            "3",
            "--no-radix-cache",
        ],
        *[
            "--speculative-algorithm",
            "ngram",
            "--order",
            "lpm",
            "--itl-target",
            "12.5",
            "--chat-template",
            "ü",
        ],
    ]
    config, given = parse_with(make_parser(), argv)
    file = tmp_path / "all.toml"
    file.write_text("\n".join(lines(config, given)))
    assert parse(["--config", str(file)]) == config


def test_it_says_where_each_value_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 3")
    monkeypatch.setenv("LOOM_PORT", "9")
    printed = lines(*parse_with(make_parser(), ["--tp-size", "2", "--config", str(file)]))
    assert f"max-running = 3  # {file}: max-num-seqs" in printed
    assert "port = 9  # LOOM_PORT" in printed
    assert "tp = 2  # --tp-size" in printed
    assert 'host = "127.0.0.1"' in printed


def test_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_API_KEY", "secret,other")
    text = "\n".join(lines(*parse_with(make_parser(), [])))
    assert "secret" not in text and "# api-key: 2, not shown  # LOOM_API_KEY" in text
    assert "api_key" not in tomllib.loads(text)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ([], 0),
        (["--prot", "3"], 2),
        (["--speculative-eagle-topk", "2"], 2),
        (["--config", "nowhere.toml"], 2),
    ],
)
def test_the_exit_code_says_whether_they_fit(argv: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check-config", *argv])
    assert ended.value.code == code
