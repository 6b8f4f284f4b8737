"""A step plan while it is being made."""

from __future__ import annotations

import numpy as np

from core.plan import Chunk, NewSlot, PageWrites, Save, StepPlan
from core.plan.plan import NO_WRITES
from core.request import Request
from core.schedule.ledger import InFlightChunk, InFlightStep
from core.schedule.speculation import Grant
from core.schedule.table import SlotTable
from core.types import Ints, NDArray64, frozen

NO_SLOTS: NDArray64 = np.zeros(0, np.int64)


class PlanBuilder:
    """Gathers rows, new slots and page writes; `build` freezes them.

    Owner: event loop. Lives for one call of `Scheduler.plan`.
    """

    def __init__(self, room: int, samples: int, now: float, grant: Grant, max_chunks: int = 0) -> None:
        """`grant` is that of a step without decode rows. `max_chunks` 0: as many as there is room for."""
        self._max_chunks = max_chunks
        self.samples = samples
        """Rows of logits that decode rows can have."""
        self.now = now
        self.room = room
        """Tokens the step can still take."""
        self._decode: list[Request] = []
        self.decode_slots: NDArray64 = NO_SLOTS
        """Slots of the rows that decode in this step."""
        self.decode_tokens = 0
        """Tokens of these rows: each row's last token, and all drafts."""
        self.prompt_tokens = 0
        self.pairs = 0.0
        """Pairs of a query and a key in the attention of prompt tokens."""
        self.prompts = 0
        """Prompts that are not complete, here and in the queue."""
        self.grant = grant
        """Drafts of the decode rows."""
        self._common = 0
        self._chunks: list[tuple[Request, Chunk]] = []
        self._new: list[NewSlot] = []
        self._writes: list[tuple[Ints, Ints, Ints]] = []
        self._saves: dict[int, Save] = {}
        """Saves by checkpoint. With few checkpoints a later save of a step may reuse the checkpoint of an
        earlier one: only the last may be written."""

    @property
    def full(self) -> bool:
        """Whether there is room for one chunk at most, of any size."""
        return self.room <= 0 or len(self._chunks) + 1 == self._max_chunks

    def __bool__(self) -> bool:
        return bool(self._decode or self._chunks)

    def decode(self, requests: list[Request], slots: NDArray64, common: int, grant: Grant) -> None:
        """A row for each of `slots`, whose first `common` tokens are in the same pages, with the drafts of
        `grant`."""
        self._decode, self.decode_slots, self._common, self.grant = requests, slots, common, grant
        self.decode_tokens = len(slots) + grant.drafts
        self.room -= self.decode_tokens

    def chunk(self, request: Request, chunk: Chunk) -> None:
        self._chunks.append((request, chunk))
        self.room -= len(chunk.tokens)
        self.prompt_tokens += len(chunk.tokens)
        self.pairs += len(chunk.tokens) * (chunk.start + len(chunk.tokens) / 2)
        if len(self._chunks) == self._max_chunks:
            self.room = 0

    def longest(self) -> int:
        """Tokens of the longest prompt that has a chunk, without those that were cached."""
        return max((request.to_compute for request, _ in self._chunks), default=0)

    def new_slot(self, slot: NewSlot, pages: list[int]) -> None:
        """A slot's first step, with the page-table row it starts from."""
        self._new.append(slot)
        n = len(pages)
        self.write(np.full(n, slot.slot, np.int32), np.arange(n, dtype=np.int32), np.asarray(pages, np.int32))

    def write(self, slots: Ints, indices: Ints, pages: Ints) -> None:
        self._writes.append((slots, indices, pages))

    def save(self, slot: int, tokens: int, checkpoint: int) -> None:
        """Keep the slot's states behind `tokens` tokens; checkpoint 0: do not."""
        if checkpoint:
            self._saves[checkpoint] = Save(slot, tokens, checkpoint)

    def build(self, step: int, table: SlotTable) -> tuple[StepPlan, InFlightStep]:
        """The frozen plan, and its record for the ledger."""
        plan = StepPlan(
            step=step,
            decode_slots=frozen(self.decode_slots.astype(np.int32)),
            chunks=tuple(chunk for _, chunk in self._chunks),
            new_slots=tuple(self._new),
            page_writes=self._page_writes(),
            common=self._common,
            keys=int(table.most[self.decode_slots].max(initial=0)),
            query_length=self.grant.query_length,
            drafts=self.grant.drafts,
            proposes=self.grant.proposes,
            adapters=table.has_adapter(self.decode_slots)
            or table.has_adapter(np.asarray([chunk.slot for _, chunk in self._chunks], np.int64)),
            saves=tuple(self._saves.values()),
        )
        rows, slots = self._decode, self.decode_slots
        sampling = [r for r, c in self._chunks if c.samples]
        if sampling:
            rows = rows + sampling
            slots = np.concatenate([slots, np.asarray([r.slot for r in sampling], np.int64)])
        table.in_flight[slots] += 1
        notable = [
            InFlightChunk(r, c.slot, int(table.epoch[c.slot]), _ends_without_token(r, c))
            for r, c in self._chunks
            if c.logprobs >= 0 or c.hidden != "none" or c.experts or _ends_without_token(r, c)
        ]
        for chunk in notable:
            table.in_flight[chunk.slot] += 1
        decoding = len(self._decode)
        return plan, InFlightStep(
            step, rows, slots, table.epoch[slots], notable, decoding, self.prompt_tokens, self.grant
        )

    def _page_writes(self) -> PageWrites:
        if not self._writes:
            return NO_WRITES
        slots, indices, pages = (np.concatenate(column) for column in zip(*self._writes, strict=True))
        return PageWrites(frozen(slots), frozen(indices), frozen(pages))


def _ends_without_token(request: Request, chunk: Chunk) -> bool:
    return not chunk.samples and chunk.start + len(chunk.tokens) == request.num_tokens
