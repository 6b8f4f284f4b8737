"""Flags from elsewhere than the command line: `LOOM_*` variables and the file of `--config`.

Each entry becomes the words that would be written on a command line, so that names, translations and errors
are the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from app.aliases import IGNORED, SWITCHES
from app.flags import ALL, Given, Parser, closest, flag
from core.env import PREFIX, flag_variables
from core.errors import ConfigError

_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def gather(parser: Parser, argv: Sequence[str]) -> Given:
    """All given values: those of the command line over those of variables over those of the file. Exits with
    2 and one line for a wrong one; raises `ConfigError` for a file that cannot be read."""
    words, variables = parser.read(argv), _from_variables(parser)
    path = words.values.get("config") or variables.values.get("config")
    layers = [_from_file(parser, path)] if path else []
    given = Given({}, {})
    for layer in (*layers, variables, words):
        given.update(layer)
    return given


def _from_variables(parser: Parser) -> Given:
    given = Given({}, {})
    for variable, text in flag_variables().items():
        name = variable.removeprefix(PREFIX).lower()
        if (action := parser.fields.get(name)) is None:
            # No note on others: Kubernetes sets LOOM_SERVICE_HOST and more for a service named loom.
            if flag(name) not in ALL and (meant := closest(name, parser.fields)):
                meant = PREFIX + meant.upper()
                print(f"loom: note: {variable} sets nothing. Did you mean {meant}?", file=sys.stderr)
            continue
        if name == "port" and text.startswith("tcp://"):
            parser.refuse(
                variable,
                f"{text} is what Kubernetes sets for a service named loom. Give the service another name, or "
                "the pod enableServiceLinks: false",
            )
        words = _words(parser, flag(name), _value(parser, variable, text, action))
        given.update(parser.read(words, variable))
    return given


def _value(parser: Parser, variable: str, text: str, action: argparse.Action) -> Any:
    """The value of a variable's text: on or off, several values separated by commas, or one."""
    if isinstance(action, argparse.BooleanOptionalAction):
        if (switch := _SWITCH.get(text.lower())) is None:
            parser.refuse(variable, f"must be 1 or 0, got {text!r}")
        return switch
    if action.nargs == "+" and not text.startswith("{"):
        return text.split(",")
    return text


def _from_file(parser: Parser, path: str) -> Given:
    given = Given({}, {})
    for key, value in _entries(path).items():
        label = f"{path}: {key}"
        if key == "config":
            parser.refuse(label, "a file cannot name another one")
        if key in ("help", "version"):
            parser.refuse(label, "belongs on the command line")
        if isinstance(value, list) and None in value:
            parser.refuse(label, "an entry of the list is empty")
        given.update(parser.read(_words(parser, flag(key), value), label))
    return given


def _entries(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    try:
        content = file.read_bytes()
        match file.suffix:
            case ".toml":
                return tomllib.loads(content.decode("utf-8-sig"))
            case ".yaml" | ".yml":
                return msgspec.yaml.decode(content, type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror or error}.") from error
    except (ValueError, msgspec.DecodeError) as error:
        kind, reason = file.suffix[1:].upper(), " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not a {kind} file of flags: {reason}.") from error
    raise ConfigError(f"--config {path}: the name must end in .toml, .yaml or .yml.")


def _words(parser: Parser, name: str, value: Any) -> list[str]:
    """`value` for the flag `name` as on a command line. An unknown name is the parser's to refuse."""
    if value is None and name in parser.names | ALL:
        return []
    if value is False and (off := f"--no-{name[2:]}") in parser.names:
        return [off]
    if value is False and name in SWITCHES.keys() | IGNORED.keys():  # of SGLang and vLLM, which are off then
        return []
    if value is True:
        return [name]
    values = value if isinstance(value, list) else [value]
    return [f"{name}={json.dumps(each) if isinstance(each, dict) else each}" for each in values]
