"""What `gpu.draft.chain` and `gpu.draft.block` do around the forwards of a draft model: the kernels of both,
and those of a CPU.

A draft step has a few numbers for each row, and a launch takes longer than their arithmetic: each of these is
one or two launches. On a GPU they are `gpu.kernels.sampling.drafts`.

`view`, `samples`, `live` and `chosen` are those of `gpu.draft.drafter.StepOutcome`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gpu.sample.noise import bits, exponential, row_keys
from gpu.sample.rows import Rows
from gpu.sample.select import argmax
from gpu.sample.torch_kernels import perturb as perturb
from gpu.state.draft_rows import DraftRows
from gpu.state.view import StepView
from gpu.step.buffers import Samples


class DraftKernels(Protocol):
    """See the module. None waits for the device; `pdl` is programmatic dependent launch."""

    def follow(
        self,
        view: StepView,
        samples: Samples,
        live: Tensor,
        chosen: Tensor,
        rows: DraftRows,
        behind: Tensor | None,
        *,
        pdl: bool = False,
    ) -> tuple[StepView, Tensor]:
        """Close the gaps of a step's rows (`gpu.state.draft_rows.Gaps`).

        Returns the view that the draft model reads, with decode rows' tokens where it has them and, if it is
        shifted, each token's successor in its place; `behind` int32 [chunks] stands behind chunks, unless it
        is negative. And of each of the first samples the index int32 [rows] of its row's last accepted token.
        """
        ...

    def keep(
        self,
        states: tuple[Tensor, Tensor],
        at: Tensor | None,
        out: tuple[Tensor, Tensor],
        *,
        pdl: bool = False,
    ) -> None:
        """Copy rows `at` int32 [n] of both `states` [any, width] to the first of `out`; None: all rows."""
        ...

    def start(
        self, view: StepView, samples: Samples, rows: DraftRows, first: int = 0, *, pdl: bool = False
    ) -> None:
        """Begin the drafts of a step's rows that sample, from `first` on: write how many each gets, and
        `rows` for the forward of its last token or block. A row has pages for its whole query if it is a
        decode row, else for its tokens. A forward without a page stores in the dump."""
        ...

    def draw(
        self, logits: Tensor, token_ids: Tensor | None, rows: DraftRows, made: int, *, pdl: bool = False
    ) -> None:
        """Draw each row's drafts behind `made` others from `logits` float32 [rows * draws, draft vocabulary],
        whose ids are the target's `token_ids`. Write them and their survival to the tables and, unless they
        are a block's, `rows` for the forward of the one.

        It is drawn as the target's token at its position will be, by the same noise of the same ids, but from
        the whole vocabulary: top_k, top_p and min_p cost passes over the logits, and a wrong guess little.
        """
        ...

    def perturb(self, logits: Tensor, rows: Rows, names: Tensor | None = None, *, pdl: bool = False) -> None:
        """Divide the `logits` of rows that draw by their temperature and add their noise: the best of them
        are then those that the race of `choose` has ahead. `names` int64 [vocab] are the ids whose noise it
        is, None: their own."""
        ...


def follow(
    view: StepView,
    samples: Samples,
    live: Tensor,
    chosen: Tensor,
    rows: DraftRows,
    behind: Tensor | None,
    *,
    pdl: bool = False,
) -> tuple[StepView, Tensor]:
    """See `DraftKernels.follow`."""
    ids, count = view.ids, len(rows.ends)
    accepted = rows.tables.length[samples.slots[:count].long()] + 1 - samples.positions[:count]
    last = (samples.rows[:count] + accepted - 1).clamp(0, max(len(ids) - 1, 0))
    if rows.shifted:
        at, ids = samples.rows[: int(live)].long(), torch.cat([ids[1:], ids.new_zeros(1)])
        ids[at] = chosen[: len(at)].clamp(min=0).to(ids.dtype)
        if behind is not None:
            known = behind >= 0
            ids[view.chunk_firsts[1:][known].long() - 1] = behind[known]
    return _close(view, samples, rows)._replace(ids=ids), last


def _close(view: StepView, samples: Samples, rows: DraftRows) -> StepView:
    """`view` with its decode rows' tokens where the draft model has them; counts what is in their gaps."""
    (skipped, taken), tables, most = rows.gaps, rows.tables, view.max_decode
    own, before = int(samples.drafts.rows), samples.drafts.before
    slots, positions = samples.slots[:own].long(), samples.positions[:own]
    missed = (skipped[slots] + positions - 1 - taken[slots]).clamp(min=0)
    missed[int(view.num_decode - before[own]) :] = 0
    skipped[slots], taken[slots] = missed, tables.length[slots]
    owners = view.decode_slots.long()
    gap = skipped[owners]
    held, mapping = view.positions.clone(), view.kv_slot_mapping.clone()
    held[:most] -= gap
    cells = tables.page_table[owners, held[:most] // rows.page_size] * rows.page_size
    cells += held[:most] % rows.page_size
    mapping[:most] = torch.where((gap > 0) & (mapping[:most] > 0), cells, mapping[:most])
    return view._replace(positions=held, kv_slot_mapping=mapping, decode_lengths=view.decode_lengths - gap)


def keep(
    states: tuple[Tensor, Tensor], at: Tensor | None, out: tuple[Tensor, Tensor], *, pdl: bool = False
) -> None:
    """See `DraftKernels.keep`."""
    for found, into in zip(states, out, strict=True):
        found = found if at is None else found.index_select(0, at)
        into[: len(found)] = found


def start(view: StepView, samples: Samples, rows: DraftRows, first: int = 0, *, pdl: bool = False) -> None:
    """See `DraftKernels.start`."""
    tables, block, own = rows.tables, rows.block, rows.view
    slots, lengths, ends = _rows(view, samples, rows, first)
    live = (samples.drafts.rows - first).clamp(0, len(ends))
    own.counts.copy_(live * torch.tensor([block.tokens, block.tokens, 0, block.draws]))
    rows.ends.copy_(ends)
    drafts = torch.where(slots > 0, (ends - lengths + rows.reach).clamp(0, rows.most), 0)
    tables.drafts[slots, 0] = drafts.to(torch.int32)
    gap, each = rows.gaps.skipped[slots], torch.arange(block.tokens, dtype=torch.int32)
    ids = torch.where(each > 0, block.mask, tables.last_token[slots][:, None])
    own.decode_slots.copy_(slots.repeat_interleave(block.tokens))
    _forward(rows, ids.flatten(), ((lengths - gap)[:, None] + each).flatten())
    if not block.causal:
        seen = (torch.minimum(lengths + block.tokens, ends) - gap).clamp(min=1)
        own.decode_lengths.copy_(seen.repeat_interleave(block.tokens))
    rows.slots.copy_(slots.repeat_interleave(block.draws))
    rows.positions.copy_((lengths[:, None] + 1 + each[: block.draws]).flatten())


def _rows(view: StepView, samples: Samples, rows: DraftRows, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots (0 for padding), lengths and ends [rows] of a step's rows that sample, from `first` on."""
    tables, size, end = rows.tables, rows.page_size, first + len(rows.ends)
    slots, positions = samples.slots[first:end], samples.positions[first:end]
    own, before = samples.drafts.rows, samples.drafts.before
    at = torch.arange(first, end)
    slots = torch.where(at < own, slots, 0).long()
    decode = view.num_decode - before[own.long()]
    query = tables.max_drafts[slots].clamp(max=tables.most_drafts)
    held = positions + torch.where(at < decode, query, 0)
    ends = torch.minimum(tables.limit[slots], (held + size - 1) // size * size)
    return slots, tables.length[slots], torch.where(slots > 0, ends, 0)


def _forward(rows: DraftRows, ids: Tensor, position: Tensor) -> None:
    """Write the forward of tokens `ids` of the rows at `position`, [rows * tokens] each."""
    view, size = rows.view, rows.page_size
    slots, ends = view.decode_slots.long(), rows.ends.repeat_interleave(rows.block.tokens)
    held = torch.minimum(position, ends.clamp(min=1) - 1)
    cells = rows.tables.page_table[slots, held // size] * size + held % size
    view.ids.copy_(torch.where(slots > 0, ids, 0))
    view.positions.copy_(held)
    view.decode_lengths.copy_(held + 1)
    view.kv_slot_mapping.copy_(torch.where(position < ends, cells, 0))


def draw(logits: Tensor, token_ids: Tensor | None, rows: DraftRows, made: int, *, pdl: bool = False) -> None:
    """See `DraftKernels.draw`: a token at a time."""
    tables, draws = rows.tables, rows.block.draws
    live = int(rows.view.counts[3])
    slots = rows.slots[:live].long()
    ids = torch.arange(logits.shape[1], dtype=torch.int32) if token_ids is None else token_ids.int()
    tokens, shares = torch.zeros_like(rows.slots), torch.zeros(len(rows.slots))
    seeds, positions = tables.seed[slots].numpy(), rows.positions[:live].numpy()
    keys = row_keys(seeds, positions.astype(np.int64))
    for row, temperature in enumerate(tables.temperature[slots].tolist()):
        best = int(logits[row].argmax())  # NaN wins the argmax
        if not (high := logits[row, best]).isfinite():
            continue
        weights = ((logits[row] - high) / max(temperature or 1.0, 1e-6)).exp_()
        if temperature > 0:
            best = int(argmax(weights / exponential(bits(keys[row], ids))))
        tokens[row], shares[row] = ids[best], weights[best] / weights.sum()
    known = tables.survival[slots[::draws], made - 1] if made else torch.ones(live // draws)
    for j in range(draws):
        known = known * shares[j:live:draws]
        tables.survival[slots[::draws], made + j] = known
        tables.drafts[slots[::draws], 1 + made + j] = tokens[j:live:draws]
    if rows.block.tokens == 1:
        slots = rows.slots.long()
        position = tables.length[slots] + made + 1
        _forward(rows, tokens, position - int(rows.shifted) - rows.gaps.skipped[slots])
        rows.positions.copy_(position + 1)
