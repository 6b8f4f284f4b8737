"""Command line to settings. Flags are made from the fields of the config groups.

Importing this must stay quick: `--help` and a mistyped flag should not wait for torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec

from core.config import CacheConfig, Config, ModelConfig, ScheduleConfig, ServeConfig
from core.errors import ConfigError

GROUPS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("model", ModelConfig),
    ("cache", CacheConfig),
    ("schedule", ScheduleConfig),
    ("serve", ServeConfig),
)

BAD_USAGE = 2
"""Exit code for everything the operator can mend: argparse's own, and ours for `ConfigError`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until told to stop; exits with 0 after a drain, 2 for what the operator must change,
    1 when the engine failed."""
    config = parse(sys.argv[1:] if argv is None else argv)
    from app.server import run  # deferred: it brings torch

    try:
        code = run(config)
    except ConfigError as error:
        print(f"loom: error: {error}", file=sys.stderr)
        code = BAD_USAGE
    raise SystemExit(code)


def parse(argv: Sequence[str]) -> Config:
    """Settings of a command line. Exits with 2 and one line for a flag that is wrong."""
    parser = make_parser()
    flags = argv[1:] if argv[:1] == ["serve"] else argv
    given = vars(parser.parse_args(flags))
    groups: dict[str, msgspec.Struct] = {}
    for name, group in GROUPS:
        own = {f: given[f] for f in group.__struct_fields__ if given[f] is not None}
        try:
            groups[name] = msgspec.convert(own, group)
        except msgspec.ValidationError as error:
            field = str(error).rpartition("$.")[2].rstrip("`")
            parser.error(f"argument {_flag(field)}: {str(error).partition(' - at')[0]}, got {own.get(field)}")
    config = msgspec.convert(groups, Config)
    if config.cache.page_size & (config.cache.page_size - 1):
        parser.error(f"argument --page-size: must be a power of two, got {config.cache.page_size}")
    return config


class Parser(argparse.ArgumentParser):
    """Answers a wrong flag with one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"loom: error: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
    """One flag a field, `--no-flag` for those that are on by default."""
    parser = Parser(
        prog="python -m app",
        description="Serve a language model over an OpenAI-compatible HTTP API.",
        allow_abbrev=False,
    )
    for name, group in GROUPS:
        section = parser.add_argument_group(name)
        hints = get_type_hints(group, include_extras=True)
        for field in msgspec.structs.fields(group):
            _add_flag(section, field.name, hints[field.name], field.default)
    parser.add_argument(
        "--disable-radix-cache",
        dest="radix_cache",
        action="store_false",
        default=None,
        help=argparse.SUPPRESS,
    )
    return parser


def _add_flag(section: Any, name: str, hint: Any, default: object) -> None:
    kind, meta = get_args(hint)
    text = f"{meta.description} (default: {default})" if default not in ("", False) else meta.description
    if kind is bool:
        section.add_argument(
            _flag(name), dest=name, action=argparse.BooleanOptionalAction, default=None, help=text
        )
    elif get_origin(kind) is Literal:
        section.add_argument(_flag(name), dest=name, choices=get_args(kind), help=text.replace("%", "%%"))
    else:
        section.add_argument(_flag(name), dest=name, type=kind, metavar=kind.__name__.upper(), help=text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
