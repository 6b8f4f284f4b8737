"""The plan of one forward pass. Immutable and complete."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from core.grammar import CompiledGrammar
from core.request.params import Hidden, SamplingParams
from core.types import NO_LIMIT, NO_TOKENS, Floats, Ints

MASKED_DRAFTS: Final = 256
"""Drafts that all rows with grammars may have in a step: before it can sample, the host fills a mask for
each, in some 10 µs."""

MOST_SAVES: Final = 10
"""Checkpoints of a slot that a step can make."""


class NewSlot(msgspec.Struct, frozen=True, gc=False):
    """Everything the device must know of a slot from this step on.

    `prompt` [prompt_len] and `output` [output_len] are the request's tokens so far (output is not
    empty after a retraction); penalties count them, but for the first `embedded` of the prompt, which are
    placeholders for embeddings. `grammar` masks the slot's tokens; its matcher has to take `output` first.
    The slot's length starts at `cached`: tokens whose KV is in its pages already. No position from `limit`
    on is ever written: the device cuts a row's query there, to nothing if need be. Drafts are verified of
    a slot that `drafts`; those with grammars have at most `MASKED_DRAFTS` in all. They may come from texts of
    the same `namespace`; 0: from its own alone. `place` is that of its adapter on the device, -1 for the base
    model.

    With linear attention its state starts as that of `checkpoint`, which covers `cached` tokens; 0: as that
    before the first.
    """

    slot: int
    params: SamplingParams
    prompt: Ints
    output: Ints
    cached: int
    grammar: CompiledGrammar | None = None
    embedded: int = 0
    limit: int = NO_LIMIT
    drafts: bool = True
    namespace: int = 0
    place: int = -1
    checkpoint: int = 0

    @property
    def known(self) -> Ints:
        """The prompt's tokens without placeholders."""
        return self.prompt[self.embedded :]

    @property
    def count_row(self) -> int:
        """Its row of token counts, -1 for a request without penalties. Slot 0 has none."""
        return self.slot - 1 if self.params.penalised else -1


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """A run of known tokens of one slot, starting at position `start` (the slot's length).

    The last chunk of a prompt samples the next token; `samples` is False for the others and for
    requests without output. `logprobs` >= 0: prompt logprobs are reported of the tokens at
    positions max(start + 1, logprobs_start) ... start + len(tokens): each is the *target* of the
    position before it. `target` is the token after this chunk, -1 when the chunk ends the prompt.
    `logprob_ids` are tokens whose log-probabilities are reported besides the most likely.

    `hidden` says which of this chunk's hidden states the step returns, of those from position
    `hidden_start` on; a decode row returns its own where its slot's parameters say `all`. `pair` is the
    position where the second text of a pair begins, 0 for one text. `experts`: the step returns the experts
    that tokens from `hidden_start` on were routed to, as decode rows do whose slot's parameters say so.

    `embeds` float32 [at most len(tokens), hidden] is what the first tokens are embedded to, whatever their
    ids.
    """

    slot: int
    start: int
    tokens: Ints
    samples: bool
    logprobs: int = -1
    logprobs_start: int = 0
    target: int = -1
    hidden: Hidden = "none"
    hidden_start: int = 0
    pair: int = 0
    logprob_ids: tuple[int, ...] = ()
    embeds: Floats | None = None
    experts: bool = False


class Save(msgspec.Struct, frozen=True, gc=False):
    """Keep the state of linear attention that `slot` has behind its first `tokens` tokens, the last of which
    is one of the step's, as `checkpoint`. While drafts are in flight any of several steps may be the one that
    passes it, and each is told. A state behind a rejected draft is saved over when the right token comes."""

    slot: int
    tokens: int
    checkpoint: int


class PageWrites(msgspec.Struct, frozen=True, gc=False):
    """Page-table cells to set before the forward: table[slots[i], indices[i]] = pages[i]."""

    slots: Ints = NO_TOKENS
    indices: Ints = NO_TOKENS
    pages: Ints = NO_TOKENS


NO_WRITES = PageWrites()


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One forward pass: the launch thread needs nothing else.

    Rows in order: first `decode_slots`, then `chunks`. Token ids of decode rows are absent on purpose: a
    row's input is the last token sampled into its slot's cell, which may not exist yet when the plan is
    made. Its position is the slot's length on the device.

    A decode row's query is that token and the drafts that the device has for it: at most `query_length`
    tokens, for which the row has pages, and at most `drafts` drafts in all rows together.

    Where the step `proposes`, the drafter proposes drafts behind it, for each row that samples; a step allows
    drafts only if the one before it did.

    The first `common` tokens of all decode rows are the same and in the same, whole pages. No decode row sees
    more than `keys` keys.

    `saves` has at most `MOST_SAVES` of a slot. Slots of later plans can start from what they keep.

    `adapters`: at least one row's slot has an adapter.

    `new_slots` and `page_writes` are applied before the forward, in that order. Rows that sample:
    all decode rows, then the chunks with `samples`, in order. Every token of a decode row's query is sampled
    from, and the last one of a chunk.
    """

    step: int
    decode_slots: Ints
    chunks: tuple[Chunk, ...] = ()
    new_slots: tuple[NewSlot, ...] = ()
    page_writes: PageWrites = NO_WRITES
    common: int = 0
    keys: int = 0
    query_length: int = 1
    drafts: int = 0
    proposes: bool = False
    adapters: bool = False
    saves: tuple[Save, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Upper bound: a decode row may have fewer drafts than the plan allows."""
        return len(self.decode_slots) + self.drafts + sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def num_samples(self) -> int:
        """Rows of logits, upper bound."""
        return len(self.decode_slots) + self.drafts + sum(chunk.samples for chunk in self.chunks)

    @property
    def sampling_slots(self) -> Ints:
        """Slots of the rows that sample, in their order."""
        ends = [chunk.slot for chunk in self.chunks if chunk.samples]
        return np.concatenate([self.decode_slots, np.array(ends, np.int32)]) if ends else self.decode_slots
