"""Views as graphs have them, with garbage behind what is true."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu.state.view import StepView
from tests.rigs.attention import PAGE
from tests.rigs.tiny_model import VOCAB

PAGES = 16
"""Pages of a slot."""


def padded(exact: StepView, tokens: int) -> StepView:
    """`exact` with garbage behind its true tokens, rows and chunks."""

    def fill(true: torch.Tensor, size: int, high: int) -> torch.Tensor:
        rest = torch.randint(0, high, (size - len(true),))
        return torch.cat([true, rest]).int()

    live, decode, chunks, _ = exact.counts.tolist()
    space = chunks + 1 if chunks else 0
    most = min(decode + 2, tokens) if chunks else tokens
    firsts = exact.chunk_firsts if chunks else ints_of([live])
    return StepView(
        tokens=tokens,
        max_decode=most,
        max_chunks=space,
        counts=exact.counts.clone(),
        ids=fill(exact.ids, tokens, VOCAB),
        positions=fill(exact.positions, tokens, PAGE * PAGES),
        kv_slot_mapping=torch.cat([exact.kv_slot_mapping, torch.zeros(tokens - live)]).int(),
        page_table=exact.page_table,
        decode_slots=fill(exact.decode_slots, most, 1),
        decode_lengths=fill(exact.decode_lengths, most, 2),
        chunk_slots=fill(exact.chunk_slots, space, 1),
        chunk_starts=fill(exact.chunk_starts, space, 1),
        chunk_firsts=fill(firsts, space + 1, 1),
        common=ints_of([0]),
    )


def ints_of(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
