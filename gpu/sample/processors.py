"""Logit processors: the operator's own functions on the logits of the requests that name them.

They are registered when the server starts, by `--logit-processor`. A request gives a name and
parameters; code from a request is never run.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from core.errors import ConfigError
from core.plan import NewSlot
from core.types import NAN_TOKEN, Ints
from gpu.ranks import Rank

log = logging.getLogger(__name__)

Processor = Callable[[torch.Tensor, list[int], dict[str, Any]], None]
"""`process(logits, output_ids, params)` changes one row's `logits`, float32 [vocab], in place.

`output_ids` are the row's tokens so far and not to be changed. `params` is what the request sent, one
object for the request's whole run: a processor may keep things in it, but a request that was retracted
gets a fresh one with its former output. It runs on the launch thread, so that a slow one delays every
row of the step, and on a GPU one that reads values back (`.item()`) makes all wait for the device. With
overlap it is called once more after a request's last token.
"""

_ENTRY = re.compile(r"\s*([\w.-]{1,64})=([\w.]+):(\w+)\s*", re.ASCII)


def load_processors(text: str) -> dict[str, Processor]:
    """Import `NAME=package.module:callable`, separated by commas. Raises `ConfigError` for one that is
    spelled otherwise, named twice, not there, or not callable."""
    found: dict[str, Processor] = {}
    for entry in filter(str.strip, text.split(",")):
        parts = _ENTRY.fullmatch(entry)
        if parts is None:
            raise ConfigError(f"--logit-processor takes NAME=package.module:callable, not {entry.strip()!r}.")
        name, module, attribute = parts.groups()
        if name in found:
            raise ConfigError(f"--logit-processor names {name!r} twice.")
        try:
            process = getattr(importlib.import_module(module), attribute)
        except (ImportError, SyntaxError, AttributeError) as error:
            raise ConfigError(f"--logit-processor {name}: {error}.") from error
        if not callable(process):
            raise ConfigError(f"--logit-processor {name}: {module}:{attribute} is not callable.")
        found[name] = process
    return found


def shared(process: Processor, rank: Rank) -> Processor:
    """`process`, run by rank 0 alone: its logits are those of all ranks."""

    def run(logits: torch.Tensor, output_ids: list[int], params: dict[str, Any]) -> None:
        def changed() -> torch.Tensor:
            process(logits, output_ids, params)
            return logits.clone()

        logits.copy_(rank.first(changed, torch.Tensor))

    return run


class _Row:
    """A slot's processor and what it is called with."""

    __slots__ = ("name", "output", "params", "process")

    def __init__(self, name: str, process: Processor, params: dict[str, Any], output: list[int]) -> None:
        self.name = name
        self.process = process
        self.params = params
        self.output = output


class Processed(NamedTuple):
    """Rows of a step that were processed, and why, for those whose processor raised."""

    rows: Mapping[int, _Row] = MappingProxyType({})
    failed: Mapping[int, str] = MappingProxyType({})

    def accept(self, tokens: Ints) -> None:
        """Remember the sampled `tokens` int32 [n] of the step, -1 being none. On the waiter thread: a step
        with such rows is settled before the next one's processors run (`gpu.step.launched.LaunchedStep`)."""
        for i, row in self.rows.items():
            if tokens[i] != NAN_TOKEN:
                row.output.append(int(tokens[i]))


NONE_PROCESSED = Processed()


class Processors:
    """Which slot wants which processor. Owner: launch thread."""

    def __init__(self, known: Mapping[str, Processor]) -> None:
        self._known = known
        self._by_slot: dict[int, _Row] = {}

    def apply(self, new_slots: Iterable[NewSlot]) -> None:
        """Take over slots. A name that is not registered raises `KeyError`: the edge has checked it."""
        for new in new_slots:
            self._by_slot.pop(new.slot, None)
            if name := new.params.processor:
                params = json.loads(new.params.processor_params or "{}")
                self._by_slot[new.slot] = _Row(name, self._known[name], params, new.output.tolist())

    def run(self, logits: torch.Tensor, slots: Ints) -> Processed:
        """Process the rows of `logits` float32 [n, vocab] whose `slots` [n] want it, in place. The logits of
        a row whose processor raised are NaN, so that it has no token."""
        rows = {i: row for i, slot in enumerate(slots.tolist()) if (row := self._by_slot.get(slot))}
        failed: dict[int, str] = {}
        for i, row in rows.items():
            try:
                row.process(logits[i], row.output, row.params)
            except Exception as error:  # the operator's code: other rows of the step go on
                log.exception("logit processor %s failed", row.name)
                failed[i] = f"The logit processor '{row.name}' failed: {type(error).__name__}."
                logits[i].fill_(torch.nan)
                # With overlap one more step of this row is on its way, whose token is not read.
                del self._by_slot[int(slots[i])]
        return Processed(rows, failed)
