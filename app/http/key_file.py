"""The file of `--api-keys-file`: a table for each key, with what it allows."""

from __future__ import annotations

import hashlib
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from app.flags import closest
from core.errors import ConfigError

FLAG = "--api-keys-file"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_SECRET = ("key", "sha256", "cache_salt")
"""Fields whose values no message repeats."""

PerMinute = Annotated[int, Meta(ge=1, le=2**53)]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Permissions and limits of an API key. The defaults after `tenant` are those of a table."""

    name: str = ""
    """Name of the key's table; empty for keys of `--api-key`."""
    tenant: str = ""
    """Hex digest of the key, the owner of what is stored with it; empty where the server has no keys."""
    concurrency: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Requests at once; 0: no limit."""
    tokens_per_minute: PerMinute | None = None
    """Tokens of prompts and output together; None: no limit."""
    requests_per_minute: PerMinute | None = None
    """None: no limit."""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = 0
    """The highest that a request may ask for, and the default; None: any, and 0 is the default."""
    models: tuple[str, ...] | None = None
    """Names of models and adapters; None: all."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Keys with the same one share cached prefixes and drafts; None: it shares with no other key."""
    admin: bool = False
    """Whether it may change the server for everybody."""

    @property
    def namespace(self) -> str:
        """The namespace of the cached prefixes and drafts that it shares. No salt spells a digest."""
        return self.tenant if self.cache_salt is None else f"salt:{self.cache_salt}"

    def allows(self, model: str) -> bool:
        """Whether requests may name this model or adapter."""
        return self.models is None or model in self.models

    def differences(self, other: Terms) -> str:
        """Names of the fields that differ, separated by commas; never their values."""
        fields = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        return ", ".join("key" if name == "tenant" else name for name in fields)


OPEN = Terms(priority=None, admin=True)
"""Terms of a server without keys: everything is allowed."""

FIELDS = ("key", "sha256", *(name for name in Terms.__struct_fields__ if name not in ("name", "tenant")))
"""Fields of a table."""


def digest(key: str) -> str:
    """SHA-256 of a key as hex: what is kept and compared of it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read(path: str, others: Sequence[str] = ()) -> list[Terms]:
    """The keys of a file. `others` are those of `--api-key`, none of which may be in it too. Raises
    `ConfigError` with the table, the field, its limit and what to do; no message has a key."""
    tables = _tables(path)
    owners = {digest(key): "--api-key" for key in others if key}
    listed: list[Terms] = []
    for name, table in tables.items():
        terms = _terms(f"{FLAG} {path}: [keys.{name}]", name, table)
        if (owner := owners.setdefault(terms.tenant, f"[keys.{name}]")) != f"[keys.{name}]":
            raise ConfigError(
                f"{FLAG} {path}: [keys.{name}] has the same key as {owner}. Remove one of them."
            )
        listed.append(terms)
    return listed


def exposed(path: str) -> bool:
    """Whether users who are neither its owner nor in its group may read or change the file."""
    return bool(Path(path).expanduser().stat().st_mode & (stat.S_IROTH | stat.S_IWOTH))


def _tables(path: str) -> Mapping[str, Any]:
    try:
        content = tomllib.loads(Path(path).expanduser().read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {FLAG} {path}: {error.strerror or error}.") from error
    except ValueError as error:  # TOML's errors name lines and columns, and no values
        raise ConfigError(f"{FLAG} {path} is not a TOML file: {' '.join(str(error).split())}.") from error
    if unknown := sorted(content.keys() - {"keys"}):
        raise ConfigError(f"{FLAG} {path}: unknown table '{unknown[0]}'. {_meant(unknown[0], ['keys'])}")
    tables = content.get("keys")
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{FLAG} {path} defines no key. Add a table for each one, as [keys.alice].")
    for name, table in tables.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{FLAG} {path}: '{name[:64]}' is no name for a key: take 1 to 64 letters, digits, "
                "'.', '_' or '-'."
            )
        if not isinstance(table, dict):
            raise ConfigError(f"{FLAG} {path}: keys.{name} must be a table. Write it as [keys.{name}].")
    return tables


def _terms(where: str, name: str, table: Mapping[str, Any]) -> Terms:
    if unknown := sorted(table.keys() - set(FIELDS)):
        raise ConfigError(f"{where} has an unknown field '{unknown[0]}'. {_meant(unknown[0], FIELDS)}")
    fields = {key: value for key, value in table.items() if key not in ("key", "sha256")}
    try:
        return msgspec.convert({**fields, "name": name, "tenant": _tenant(where, table)}, Terms)
    except msgspec.ValidationError as error:
        raise ConfigError(_invalid(where, table, str(error))) from None


def _tenant(where: str, table: Mapping[str, Any]) -> str:
    match table:
        case {"key": _, "sha256": _}:
            raise ConfigError(f"{where} has 'key' and 'sha256'. Remove one of them.")
        case {"key": str(key)} if key.strip() and key == key.strip():  # as headers are read
            return digest(key)
        case {"key": _}:
            raise ConfigError(f"{where} key: must be a text that is not empty, without blanks around it.")
        case {"sha256": str(sha256)} if sha256.lower() == digest(""):  # a request without a key would match
            raise ConfigError(f"{where} sha256: is the digest of an empty text. Take that of the key.")
        case {"sha256": str(sha256)} if _DIGEST.fullmatch(sha256):
            return sha256.lower()
        case {"sha256": _}:
            raise ConfigError(
                f"{where} sha256: must be the 64 hex digits that 'printf %s KEY | sha256sum' prints."
            )
    raise ConfigError(f"{where} has no key. Add 'key' or 'sha256'.")


def _invalid(where: str, table: Mapping[str, Any], message: str) -> str:
    what, _, place = message.partition(" - at `$.")
    field = re.split(r"\W", place)[0]
    what = what.replace("`", "").replace(" | null", "")
    got = "" if field in _SECRET or ", got" in what else f", got {str(table[field])[:100]}"
    remedy = "" if field in ("priority", "admin") else ", or leave it out"
    return f"{where} {field}: {what[0].lower()}{what[1:]}{got}. Correct it{remedy}."


def _meant(word: str, known: Sequence[str]) -> str:
    meant = closest(word, known)
    return f"Did you mean '{meant}'?" if meant else f"Known: {', '.join(known)}."
