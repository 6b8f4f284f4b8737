"""Which sizes a plan's launches have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import product
from typing import Protocol

import msgspec
from msgspec.structs import replace

from core.adapters import HEAD, AdapterLimits
from core.plan import StepPlan
from gpu.state.entry import CASCADE_ROWS, shared_keys
from gpu.step.sampling import Key, sampling_keys
from gpu.step.shapes import decode_sizes, fit, mixed_sizes, query_sizes

DEEP_TOKENS = 256
DEEP_KEYS = 1024
"""Up to so many tokens of a step, and from so many keys before one of its chunks on, its queries are too few
to keep every processor busy. By interpolation: with the keys cut a layer's attention takes 9 us on an H200
for 128 tokens behind none and 22 behind 2,048, whole 8 and 36."""

DEEP_ROWS = 4
DEEP_ROW_KEYS = 4096
"""A step of up to so many tokens, all of decode rows, is deep where one of them sees more keys: all
multiprocessors read them then, not those of a few clusters (`gpu.kernels.attention.cluster_decode`)."""

# Structs, not tuples: as keys of one table, equal fields must not make two kinds equal.


class Forward(msgspec.Struct, frozen=True):
    """A forward of `tokens` padded tokens: at most `decode` of decode rows, and those of `chunks` chunks, of
    which at most `samples` are sampled from. One that is `shared` attends apart to the keys that the decode
    rows have in common, which takes launches of its own, and one that is `deep` cuts the keys of its chunks,
    or those of its few decode rows, which takes more. With `query` above 1 a decode row has at most so many
    tokens, which share one pass over its keys. In a step without `adapters` no row has one."""

    tokens: int
    decode: int
    chunks: int
    samples: int
    shared: bool = False
    deep: bool = False
    query: int = 1
    adapters: bool = False


class StepSizes(Protocol):
    """Which sizes steps have."""

    def forward(self, plan: StepPlan) -> Forward:
        """The forward that holds a plan."""
        ...

    def samples(self, count: int) -> int:
        """Rows of the sampling that holds `count`."""
        ...

    def all(self) -> Iterator[Forward | Key]:
        """Every size that is made ahead of serving, largest first: the memory that it leaves to the pool
        serves those behind it."""
        ...


class PaddedSizes:
    """`StepSizes` of graphs: few, for steps of up to `max_samples` samples, which bound the tokens of decode
    rows, `max_tokens` tokens and `max_chunks` chunks. Where decode rows may have drafts, up to `most_drafts`
    each, graphs of chunks are made for the longest rows alone: shorter ones read no more keys in them. With
    `adapters`, which may change these targets, all are made a second time."""

    def __init__(
        self,
        max_samples: int,
        max_tokens: int,
        max_chunks: int,
        most_drafts: int = 0,
        adapters: AdapterLimits | None = None,
    ) -> None:
        self._samples = decode_sizes(max_samples)
        self._mixed = mixed_sizes(max_tokens)
        self._chunks = max_chunks
        self._queries = query_sizes(most_drafts)
        self._adapters = adapters

    def forward(self, plan: StepPlan) -> Forward:
        """See `StepSizes.forward`: the smallest."""
        key = self._plain(plan)
        return replace(key, adapters=True) if plan.adapters else key

    def _plain(self, plan: StepPlan) -> Forward:
        """The sizes of a step without adapters."""
        shared = shared_keys(plan) > 0
        if plan.chunks:
            size = fit(self._mixed, plan.num_tokens)
            deep = size <= DEEP_TOKENS and max(chunk.start for chunk in plan.chunks) >= DEEP_KEYS
            return self._sized(size, True, self._queries[-1], shared, deep)
        longest = min(plan.query_length, 1 + plan.drafts)
        query = next((size for size in self._queries if size >= longest), 1)
        size = fit(self._samples, max(plan.num_tokens, 1))
        deep = size <= DEEP_ROWS and plan.keys > DEEP_ROW_KEYS
        return self._sized(size, False, query, shared, deep)

    def samples(self, count: int) -> int:
        """See `StepSizes.samples`: the fewest."""
        return fit(self._samples, count)

    def all(self) -> Iterator[Forward | Key]:
        """See `StepSizes.all`."""
        for key in self._all_plain():
            yield key
            if self._adapters is not None:
                yield replace(key, adapters=True)
        for samples in reversed(self._samples):
            yield from sampling_keys(samples, self._adapters is not None and HEAD in self._adapters.targets)

    def _all_plain(self) -> Iterator[Forward]:
        """All sizes of steps without adapters."""
        for mixed, sizes in ((True, self._mixed), (False, self._samples)):
            for size, deep in product(reversed(sizes), (False, True)):
                if deep and size > (DEEP_TOKENS if mixed else DEEP_ROWS):
                    continue
                for query in self._queries[-1:] if mixed else self._longest_in(size):
                    yield self._sized(size, mixed, query, deep=deep)
                    if size >= CASCADE_ROWS:
                        yield self._sized(size, mixed, query, shared=True, deep=deep)

    def _longest_in(self, tokens: int) -> list[int]:
        """Sizes of the longest row of a step of up to so many tokens."""
        return self._queries[: bisect_left(self._queries, tokens) + 1]

    def _sized(
        self, tokens: int, mixed: bool, query: int, shared: bool = False, deep: bool = False
    ) -> Forward:
        samples = min(tokens, self._samples[-1])
        return Forward(tokens, samples, self._chunks if mixed else 0, samples, shared, deep, query)


class ExactSizes:
    """`StepSizes` of steps that are not captured: the plan's own."""

    def forward(self, plan: StepPlan) -> Forward:
        """See `StepSizes.forward`."""
        decode = len(plan.decode_slots) + plan.drafts
        query = min(plan.query_length, 1 + plan.drafts)
        chunks, samples = len(plan.chunks), plan.num_samples
        return Forward(plan.num_tokens, decode, chunks, samples, query=query, adapters=plan.adapters)

    def samples(self, count: int) -> int:
        """See `StepSizes.samples`."""
        return count

    def all(self) -> Iterator[Forward | Key]:
        """See `StepSizes.all`: none."""
        return iter(())
