"""Random adapters and the rows that use them. Shared by timings and tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.kernels.inputs import scalar
from core.adapters import AdapterLimits
from gpu.adapters.pool import AdapterLayout
from gpu.lora import LoraMatrix, LoraRows, LoraShape
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
    magnitude of the inputs. `experts`: of how many A and B are, 1 where all experts share it. Places lie as
    in a server's pool, with other bytes between their matrices."""
    rank = rank or max(ranks)
    places, outputs, many = len(ranks), sum(parts), (0, 0) if experts is None else experts
    shape = LoraShape({f"{part}.x": size for part, size in enumerate(parts)}, inputs, max(many))
    limits = AdapterLimits(places=places, max_rank=rank, host=1, targets=("x",))
    layout = AdapterLayout([shape], limits, dtype)
    (made,) = layout.views(torch.full((places, layout.bytes), 7, dtype=torch.uint8, device=device))
    count_a, count_b = ([each] if each else [] for each in many)
    made.a.copy_(torch.randn(places, *count_a, len(parts) * rank, inputs, device=device) * inputs**-0.5)
    made.b.copy_(torch.randn(places, *count_b, outputs, rank, device=device) * rank**-0.5)
    for place, own in enumerate(ranks):
        made.a[place].view(*made.a.shape[1:-2], len(parts), rank, inputs)[..., own:, :] = 0
        made.b[place, ..., own:] = 0
        made.ranks[place] = own
    return made


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
