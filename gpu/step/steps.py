"""Which launch a plan takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np

from core.plan import StepPlan
from core.types import Ints
from gpu.state.entry import CASCADE_ROWS, shared_keys
from gpu.step.sampling import Key, sampling_keys
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

    def samples(self, count: int) -> int:
        """Padded rows of the sampling that holds `count`."""
        return fit(self._rows, count)

    def all(self) -> Iterator[Forward | Key]:
        """Every one, largest first: the memory that it leaves to the pool serves those behind it."""
        for mixed, sizes in ((True, self._mixed), (False, self._rows)):
            for size, deep in product(reversed(sizes), (False, True)):
                if deep and (not mixed or size > DEEP_TOKENS):
                    continue
                yield Forward(size, mixed, deep=deep)
                if size >= CASCADE_ROWS:
                    yield Forward(size, mixed, shared=True, deep=deep)
        for rows in reversed(self._rows):
            yield from sampling_keys(rows)


def sampling_slots(plan: StepPlan) -> Ints:
    """Slots that get a token in `plan`, in its order."""
    ends = [chunk.slot for chunk in plan.chunks if chunk.samples]
    return np.concatenate([plan.decode_slots, np.array(ends, np.int32)]) if ends else plan.decode_slots
