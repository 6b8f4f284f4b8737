"""Random adapters and the rows that use them. Shared by timings and tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.kernels.inputs import scalar
from gpu.lora import LoraMatrix, LoraRows
from gpu.state.view import StepView


def blank_rows(rows: int, places: int, device: torch.device) -> LoraRows:
    """Lists of `rows` rows, not filled."""
    sizes = (rows, rows, places + 1)
    return LoraRows(*(torch.full((size,), -99, dtype=torch.int32, device=device) for size in sizes))


def lora_rows(used: Sequence[int], places: int, device: torch.device, padding: int = 0) -> LoraRows:
    """The list of rows that use the places `used`, -1 for none, with `padding` rows behind them."""
    each = torch.tensor([*used, *[-1] * padding], dtype=torch.int32)
    key = torch.where(each < 0, places, each)
    counts = torch.bincount(key, minlength=places + 1)[:places]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    return LoraRows(*(part.to(device) for part in (each, key.argsort(stable=True).int(), starts)))


def lora_matrix(
    ranks: Sequence[int],
    inputs: int,
    parts: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    rank: int = 0,
    experts: tuple[int, int] | None = None,
) -> LoraMatrix:
    """A place for each of `ranks`, padded to `rank` (default: the largest) with zeros; deltas have about the
    magnitude of the inputs. `experts`: of how many A and B are, 1 where all experts share it."""
    rank = rank or max(ranks)
    places, outputs = len(ranks), sum(parts)
    many = (1, 1) if experts is None else experts
    a = torch.randn(places, many[0], len(parts), rank, inputs, device=device) * inputs**-0.5
    b = torch.randn(places, many[1], outputs, rank, device=device) * rank**-0.5
    for place, own in enumerate(ranks):
        a[place, :, :, own:] = 0
        b[place, ..., own:] = 0
    a, b = a.flatten(2, 3).to(dtype), b.to(dtype)
    if experts is None:
        a, b = a[:, 0], b[:, 0]
    else:  # of one that all share, as many views
        a, b = (each.expand(-1, max(many), -1, -1) for each in (a, b))
    return LoraMatrix(a, b, torch.tensor(ranks, dtype=torch.int32, device=device), parts)


def slots_view(
    decode: Sequence[int], chunks: Sequence[tuple[int, int]], tokens: int, room: int, device: torch.device
) -> StepView:
    """A view of `tokens` tokens that only says which slots they have: a token of each slot of
    `decode`, then as many of each slot of `chunks` as stand beside it; `room` for chunks."""
    known = sum(count for _, count in chunks)
    firsts = [len(decode)]
    for _, count in chunks:
        firsts.append(firsts[-1] + count)
    firsts += [len(decode) + known] * (room - len(chunks))

    def ints(values: Sequence[int], size: int) -> Tensor:
        return torch.tensor([*values, *[0] * (size - len(values))], dtype=torch.int32, device=device)

    none = scalar(0, device)
    return StepView(
        tokens=tokens,
        max_decode=tokens,
        max_chunks=room,
        counts=ints([len(decode) + known, len(decode), len(chunks), 0], 4),
        ids=none,
        positions=none,
        kv_slot_mapping=none,
        page_table=none,
        decode_slots=ints(decode, tokens),
        decode_lengths=none,
        chunk_slots=ints([slot for slot, _ in chunks], room),
        chunk_starts=none,
        chunk_firsts=ints(firsts, room + 1),
        common=none,
    )
