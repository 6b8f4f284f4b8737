"""Which launch a plan takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec
import numpy as np
import torch

from core.plan import StepPlan
from core.types import Ints
from gpu.grammar.matchers import Masks
from gpu.sample.params import COUNTED, FILTERED
from gpu.state.entry import CASCADE_ROWS, shared_keys
from gpu.step.early import Early, Stops
from gpu.step.flight import Mark
from gpu.step.shapes import decode_sizes, fit, mixed_sizes

DEEP_TOKENS = 256
DEEP_KEYS = 1024
"""Up to so many tokens of a step, and from so many keys before one of its chunks on, its queries are too few
to keep every processor busy. By interpolation: with the keys cut a layer's attention takes 9 us on an H200
for 128 tokens behind none and 22 behind 2,048, whole 8 and 36."""

# Structs, not tuples: as keys of one table, equal fields must not make two kinds equal.


class Forward(msgspec.Struct, frozen=True):
    """A forward of `tokens` padded tokens; one that is not `mixed` holds decode rows only, one that is
    `shared` attends apart to the keys that these have in common, which takes launches of its own, and one
    that is `deep` cuts the keys of its chunks, which takes more."""

    tokens: int
    mixed: bool
    shared: bool = False
    deep: bool = False


class Sampling(msgspec.Struct, frozen=True):
    """A sampling of `rows` padded rows. `rich` has everything that a graph can do: masks, penalties,
    filters; a row that wants none of these leaves their kernels at once."""

    rows: int
    filtered: bool
    rich: bool


class Steps:
    """The sizes of a runner, for steps of up to `max_rows` rows and `max_tokens` tokens."""

    __slots__ = ("_mixed", "_rows")

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._rows = decode_sizes(max_rows)
        self._mixed = mixed_sizes(max_tokens)

    def forward(self, plan: StepPlan) -> Forward:
        """The smallest forward that holds a plan."""
        shared = shared_keys(plan) > 0
        if plan.chunks:
            size = fit(self._mixed, plan.num_tokens)
            deep = size <= DEEP_TOKENS and max(chunk.start for chunk in plan.chunks) >= DEEP_KEYS
            return Forward(size, True, shared, deep)
        return Forward(fit(self._rows, max(plan.num_tokens, 1)), False, shared)

    def sampling(self, plan: StepPlan, needs: int, masked: bool) -> Sampling:
        """The smallest sampling that holds a plan; what its rows want are flags of `gpu.sample.params`."""
        rich = masked or bool(needs & COUNTED)
        return Sampling(fit(self._rows, plan.num_samples), rich or bool(needs & FILTERED), rich)

    def all(self) -> Iterator[Forward | Sampling]:
        """Every one, largest first: the memory that it leaves to the pool serves those behind it."""
        for mixed, sizes in ((True, self._mixed), (False, self._rows)):
            for size, deep in product(reversed(sizes), (False, True)):
                if deep and (not mixed or size > DEEP_TOKENS):
                    continue
                yield Forward(size, mixed, deep=deep)
                if size >= CASCADE_ROWS:
                    yield Forward(size, mixed, shared=True, deep=deep)
        for rows in reversed(self._rows):
            yield Sampling(rows, filtered=True, rich=True)
            yield Sampling(rows, filtered=True, rich=False)
            yield Sampling(rows, filtered=False, rich=False)


def sampling_slots(plan: StepPlan) -> Ints:
    """Slots that get a token in `plan`, in its order."""
    ends = [chunk.slot for chunk in plan.chunks if chunk.samples]
    return np.concatenate([plan.decode_slots, np.array(ends, np.int32)]) if ends else plan.decode_slots


class MaskStage:
    """Grammar masks on their way to the device, in memory that it reads in place.

        which  int32 [rows]         a sampling row's mask, -1 for none
        bits   int32 [rows, words]  of each constrained row, and one for all that may not take the same

    There is one set, so a write waits until the last step that reads it has ended. Masks of grammars are
    filled when it has, and what stays the same from step to step, as "none" does, is not written again.

    Owner: launch thread.
    """

    __slots__ = ("_bits", "_early", "_which", "bits", "early", "reader", "which")

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        self.early = Early()
        self.which = torch.full((rows,), -1, dtype=torch.int32)
        self.bits = torch.zeros(rows, words, dtype=torch.int32)
        if device.type == "cuda":
            self.which, self.bits = self.which.pin_memory(), self.bits.pin_memory()
        self._which: Ints = self.which.numpy()
        self._bits: Ints = self.bits.numpy()
        self._early: Sequence[tuple[int, Stops]] | None = ()
        """What stands there, unless a grammar's masks do."""
        self.reader: Mark | None = None
        """The end of the last step that reads what stands there."""

    def write(self, masks: Masks | None, early: Sequence[tuple[int, Stops]] = ()) -> None:
        """Make these the masks of the next rich sampling. Rows that are `early` may take any token but
        those beside them; where a grammar allows nothing else, it may."""
        if masks is None and early == self._early:
            return
        if self.reader is not None:
            self.reader.wait()
        self._early = early if masks is None else None
        self._which.fill(-1)
        count = 0
        if masks is not None:
            count, width = len(masks.rows), masks.bits.shape[1]
            self._which[masks.rows] = np.arange(count)
            self._bits[:count, :width] = masks.bits
            self._bits[:count, width:] = 0
        shared: dict[Stops, int] = {}
        for row, stops in early:
            at = int(self._which[row])
            if at >= 0:
                forbid(self._bits[at], stops)
                continue
            if stops not in shared:
                shared[stops] = count
                self._bits[count] = -1
                forbid(self._bits[count], stops)
                count += 1
            self._which[row] = shared[stops]


def forbid(bits: Ints, tokens: Stops) -> None:
    """Clear `tokens` in a mask, int32 [words], unless nothing would be left."""
    inside = [token for token in tokens if token >> 5 < len(bits)]
    words = np.array([token >> 5 for token in inside], np.int64)
    before = bits[words]
    np.bitwise_and.at(bits, words, np.array([~(1 << (token & 31)) for token in inside]).astype(np.int32))
    if not bits.any():
        bits[words] = before
