"""Command lines: flags made from the fields of config groups, their `--help`, and errors of one line.

Importing this must stay quick: `--help` and a mistyped flag should not wait for torch.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec.structs import FieldInfo, fields

from app.aliases import THEIRS, translate
from app.process import VERSION, invocation
from core.config import COMMON, Config
from core.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

BAD_USAGE = 2
"""Exit code for errors that the operator can fix: argparse's own, and ours for `ConfigError`."""

ALIKE = 0.75
"""Similarity (difflib's ratio) from which one name counts as another one mistyped."""


class Group(NamedTuple):
    """Flags under one heading of `--help`: one for each field, or for those in `names`."""

    title: str
    kind: type[msgspec.Struct]
    names: Sequence[str] = ()


class FileFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of every command."""

    config: Annotated[
        str,
        "TOML or YAML file of flags by name, without the dashes; flags of the command line win over LOOM_* "
        "variables, and these over the file",
        "FILE",
    ] = ""


class NoFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of a command that takes none."""


class Given(NamedTuple):
    """Values by field, and by field what the operator wrote: `--max-num-seqs`, `LOOM_PORT`, `FILE: port`."""

    values: dict[str, Any]
    origins: dict[str, str]

    def update(self, other: Given) -> None:
        """Take what is in `other`, also over what is here."""
        self.values.update(other.values)
        self.origins.update(other.origins)


ALL = frozenset(
    "--" + each.encode_name.replace("_", "-") for group in fields(Config) for each in fields(group.type)
)
"""The flags of every setting, also of those that a command does without."""


class Parser(argparse.ArgumentParser):
    """The flags of one command: `own`, then the common ones of `groups`, then the others by group.

    Reports a wrong flag in one line instead of a page of usage.
    """

    _renamed: Mapping[str, str] = MappingProxyType({})
    _label = ""

    def __init__(
        self,
        command: str,
        description: str,
        groups: Sequence[Group],
        own: type[msgspec.Struct] = FileFlags,
        epilog: str = "",
    ) -> None:
        usage = "%(prog)s [MODEL] [flags]" if command else "%(prog)s [COMMAND [MODEL]] [flags]"
        super().__init__(
            prog=invocation(command),
            usage=usage if groups else "%(prog)s",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        known = {field.name: (field, hint) for group in groups for field, hint in _fields(group)}
        known |= {field.name: (field, hint) for field, hint in _fields(Group("", own))}
        special = [name for name in own.__struct_fields__ if name != "config"]
        first = self.add_argument_group("common flags")
        for name in (*special, *COMMON, "config"):
            if name in known:
                _add_flag(first, *known[name])
        for group in groups:
            section = self.add_argument_group(f"{group.title} flags")
            for field, hint in _fields(group):
                if field.name not in COMMON:
                    _add_flag(section, field, hint)
        rest = self.add_argument_group("other flags")
        rest.add_argument("-h", "--help", action="help", help="show this text and exit")
        rest.add_argument("--version", action="version", version=f"loom {VERSION}", help="show it and exit")

    @property
    def fields(self) -> dict[str, argparse.Action]:
        """The flags that set something, by field."""
        return {each.dest: each for each in self._actions if each.dest not in ("help", "version")}

    @property
    def names(self) -> frozenset[str]:
        """All flags that are accepted, those of SGLang and vLLM too."""
        return THEIRS | self._option_string_actions.keys()

    def read(self, words: Sequence[str], label: str = "") -> Given:
        """The given values. Flags of SGLang and vLLM are translated (`app/aliases.py`). `label` says in
        errors where the words are from, if not from the command line."""
        self._label, self._renamed = label, {}
        try:
            done = translate(words)
        except ConfigError as error:
            self.error(str(error))
        self._renamed = done.renamed
        parsed, unknown = self.parse_known_args(done.flags)
        if unknown:
            if label and unknown[0].partition("=")[0] in ALL:
                return Given({}, {})  # one file or environment may be for several commands
            meant = did_you_mean(unknown[0].partition("=")[0], self.names)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        values = {name: value for name, value in vars(parsed).items() if value is not None}
        where = f"{label}: " if label else ""
        for notice in done.notices:
            print(f"loom: note: {where}{notice}", file=sys.stderr)
        return Given(values, {name: label or done.renamed.get(flag(name), flag(name)) for name in values})

    def filled(self, given: Given, kind: type[T]) -> T:
        """A settings group with the given values. Exits if a value is wrong or a required one is missing."""
        known = fields(kind)
        for field in known:
            if field.required and field.encode_name not in given.values:
                self.refuse(flag(field.encode_name), "is required")
        own = {name: given.values[name] for each in known if (name := each.encode_name) in given.values}
        try:
            return msgspec.convert(own, kind)
        except msgspec.ValidationError as error:
            name = str(error).rpartition("$.")[2].rstrip("`").partition("[")[0]
            limit = str(error).partition(" - at")[0]
            self.refuse(given.origins[name], f"{limit}, got {own[name]}")

    def refuse(self, origin: str, what: str) -> NoReturn:
        """Exit with one line about a value, which was written as `origin`."""
        self._label = ""
        self.error(f"argument {origin}: {what}" if origin.startswith("-") else f"{origin}: {what}")

    def error(self, message: str) -> NoReturn:
        """Exit with one line, which names a flag as it was written."""
        for ours, theirs in self._renamed.items():
            message = message.replace(f"argument {ours}:", f"argument {theirs}:")
        where = f"{self._label}: " if self._label else ""
        self.exit(BAD_USAGE, f"loom: error: {where}{message} (see {self.prog} --help)\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that names the most similar of the known words; empty if none is."""
    found = closest(word, known)
    return f". Did you mean {found}?" if found else ""


def closest(word: str, known: Iterable[str]) -> str:
    """The most similar of the known words; empty if none is similar."""
    return next(iter(difflib.get_close_matches(word, sorted(known), n=1, cutoff=ALIKE)), "")


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _fields(group: Group) -> list[tuple[FieldInfo, Any]]:
    hints = get_type_hints(group.kind, include_extras=True)
    chosen = group.names or group.kind.__struct_fields__
    return [(field, hints[field.name]) for field in fields(group.kind) if field.name in chosen]


def _add_flag(section: Any, field: FieldInfo, hint: Any) -> None:
    kind, text, *rest = get_args(hint)
    if several := get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    how: dict[str, Any]
    if kind is bool:
        how = {"action": argparse.BooleanOptionalAction, "default": None}
    elif get_origin(kind) is Literal:
        how = {"choices": get_args(kind)}
    else:
        unit = next(each for each in rest if isinstance(each, str))
        how = {"type": kind, "metavar": unit}
    if several:
        how |= {"nargs": "+", "action": "extend"}
    shown = f"{text} ({_default(field.default)})".replace("%", "%%")
    section.add_argument(flag(field.encode_name), dest=field.encode_name, help=shown, **how)


def _default(value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return "required"
    named = {True: "on", False: "off"} if isinstance(value, bool) else {"": "empty", (): "none"}
    return f"default: {named.get(value, value)}"
