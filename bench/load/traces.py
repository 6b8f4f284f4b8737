"""Recorded traffic: arrival times, lengths of prompts and outputs, shared prefix pages."""

from __future__ import annotations

import csv
import datetime
import io
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec

PAGE = 512
"""Tokens behind one of Mooncake's hash ids."""


class Entry(msgspec.Struct, frozen=True):
    """One recorded request."""

    at: float
    """Seconds since the first one."""
    prompt: int
    out: int
    pages: tuple[int, ...] = ()
    """Equal ids are equal blocks of `PAGE` tokens; empty when the trace has none."""


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def load(path: str | Path, limit: int = 0) -> list[Entry]:
    """Read a trace, sorted by time, the first at 0; `limit` 0 is all of it.

    Two formats, distinguished by the first character: Mooncake's JSON lines (`timestamp` in ms,
    `input_length`, `output_length`, `hash_ids`) and Azure's CSV (`TIMESTAMP`, `ContextTokens`,
    `GeneratedTokens`). A name ending in `.xz` is decompressed. ValueError when neither fits.
    """
    with open_text(path) as file:
        head = file.read(1)
        lines = _rejoin(head, file)
        try:
            entries = sorted(_mooncake(lines) if head == "{" else _azure(lines), key=lambda e: e.at)
        except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is neither a Mooncake nor an Azure trace: {error}") from error
    if not entries:
        raise ValueError(f"{path} has no requests")
    first = entries[0].at
    kept = entries[:limit] if limit else entries
    return [msgspec.structs.replace(entry, at=entry.at - first) for entry in kept]


def open_text(path: str | Path) -> TextIO:
    """A text file, decompressed when its name ends in `.xz`."""
    if str(path).endswith(".xz"):
        return io.TextIOWrapper(lzma.open(path), encoding="utf-8", newline="")
    return Path(path).open(encoding="utf-8", newline="")


def _rejoin(head: str, rest: Iterable[str]) -> Iterator[str]:
    for line in rest:
        yield head + line
        head = ""


def _mooncake(lines: Iterable[str]) -> Iterator[Entry]:
    read = msgspec.json.Decoder(_Mooncake)
    for line in lines:
        if line.strip():
            row = read.decode(line)
            yield Entry(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _azure(lines: Iterable[str]) -> Iterator[Entry]:
    for row in csv.DictReader(lines):
        at = datetime.datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield Entry(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
