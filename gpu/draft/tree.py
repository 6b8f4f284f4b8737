"""Drafts that branch, as in EAGLE-2: each draft gets its best successors, and the best few of these go on.

    states ─► best successors ─► the best of them ─► forward ─► best successors of each ─► ...
                    └──────────────────┴─── all of them: the likeliest are the tree

How likely a draft is to be reached is the product of the probabilities on its path. So a parent is at least
as likely as its children, and any number of the likeliest drafts is a tree.

The draft model's entries of a tree lie behind those of its row's text, one behind the other, in pages that
the row has for its next step's query. When that step's tokens are taken in, they are written over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpu.draft.chain import Chain, ChainDrafter
from gpu.draft.drafter import StepOutcome
from gpu.draft.model import DraftMachine
from gpu.models.base import CausalModel
from gpu.sample.rows import Rows
from gpu.state.draft_rows import DraftRows
from gpu.state.tables import SlotTables
from gpu.state.view import StepView


class Tree(NamedTuple):
    """How a tree grows: `steps` times, each draft that goes on has `topk` successors, of which `topk` in all
    go on; the `nodes` likeliest of all are drafts."""

    steps: int
    topk: int
    nodes: int


class _Level(NamedTuple):
    """Drafts of the same depth that go on, [rows, any] each: their index among all candidates (-1: the row's
    last token), the probability of their path, where their entries lie behind that of the last token, and
    what they see of those before (`SlotTables.ancestors`)."""

    at: Tensor
    share: Tensor
    place: Tensor
    ancestors: Tensor


class TreeDrafter(ChainDrafter):
    """`gpu.draft.drafter.Drafter` over a `Chain`, of drafts that are trees."""

    def __init__(
        self,
        load: Callable[[CausalModel], Chain],
        machine: DraftMachine,
        tables: SlotTables,
        aux: tuple[int, ...] | None,
        samples: int,
        tree: Tree,
    ) -> None:
        """See `ChainDrafter`. `tables` has room for `tree.nodes` drafts of a row and as many as go on."""
        super().__init__(load, machine, tables, aux, samples)
        self._tree = tree

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        """See `Drafter.propose`."""
        model, machine, (steps, topk, _) = self._ready(), self._machine, self._tree
        assert self._states is not None
        row, (states, hidden) = self._rows.first(rows), (each[:rows] for each in self._states)
        machine.kernels.start(outcome.view, outcome.samples, row, pdl=machine.pdl)
        if not model.shifted:
            states, hidden = model.forward(self._context(row.view), row.view.ids, hidden)
        root = torch.full((rows, 1), -1, device=states.device)
        level = _Level(root, torch.ones_like(root, dtype=torch.float32), root, root)
        ids, shares, parents, count = list[Tensor](), list[Tensor](), list[Tensor](), 0
        for depth in range(steps):
            found, share = self._successors_of(states, level, row, depth)
            ids.append(found)
            shares.append(share)
            parents.append(level.at.repeat_interleave(topk, 1))
            if depth + 1 == steps:
                break
            taken = share.topk(topk, dim=1).indices
            own, place = taken // topk, depth * topk + torch.arange(topk, device=taken.device)
            ancestors = level.ancestors.gather(1, own) << place - level.place.gather(1, own) | 1
            view, inside = self._view_of(row, found.gather(1, taken), depth, place, ancestors)
            at = own + torch.arange(rows, device=own.device)[:, None] * level.at.shape[1]
            states, hidden = model.forward(self._context(view), view.ids, hidden[at.flatten()])
            share = share.gather(1, taken) * inside
            level = _Level(count + taken, share, place.expand(rows, -1), ancestors)
            count += found.shape[1]
        self._write(row, torch.cat(ids, 1), torch.cat(shares, 1), torch.cat(parents, 1))

    def _successors_of(
        self, states: Tensor, level: _Level, row: DraftRows, depth: int
    ) -> tuple[Tensor, Tensor]:
        """The best successors int64 [rows, any] of all drafts of `level`, `topk` of each, and the probability
        that each is reached. They are drawn as the target's tokens will be, by the noise of their
        position: what wins the target's draw is likely among the best of the draft's."""
        model, topk, tables = self._ready(), self._tree.topk, self._tables
        logits = model.logits(states)
        times = len(logits) // len(row.ends)
        slots = row.view.decode_slots.repeat_interleave(times)
        drawn = Rows(slots, tables.length[slots] + 1 + depth, row.view.num_tokens * times, tables)
        self._machine.kernels.perturb(logits, drawn, model.token_ids, pdl=self._machine.pdl)
        best = logits.topk(topk, dim=1)
        share = (best.values - logits.logsumexp(1, keepdim=True)).exp().nan_to_num(0.0)
        ids = best.indices if model.token_ids is None else model.token_ids[best.indices]
        return ids.view(len(row.ends), -1), (level.share.view(-1, 1) * share).view(len(row.ends), -1)

    def _view_of(
        self, row: DraftRows, ids: Tensor, depth: int, place: Tensor, ancestors: Tensor
    ) -> tuple[StepView, Tensor]:
        """The forward of drafts `ids` [rows, n] behind `depth` others each, whose entries lie at `place` [n];
        and which of them have a page [rows, n]. The others' entries go to the dump."""
        tables, size, count = self._tables, row.page_size, ids.numel()
        slots = row.view.decode_slots.long()[:, None]
        first = tables.length[slots] + 1 - int(row.shifted) - row.gaps.skipped[slots]
        last = row.ends[:, None].clamp(min=1) - 1
        cell, position = first + place, torch.minimum(first + depth, last).expand_as(ids)
        inside, held = cell <= last, torch.minimum(cell, last)
        cells = torch.where(inside, tables.page_table[slots, held // size] * size + held % size, 0)
        ints = torch.stack([ids, position, cells, slots.expand_as(ids), held + 1, ancestors])
        own, positions, mapping, slots, lengths, seen = ints.to(torch.int32).view(6, -1)
        view = row.view._replace(
            tokens=count, max_decode=count, counts=row.view.counts * len(place), ids=own,
            positions=positions, kv_slot_mapping=mapping, decode_slots=slots, decode_lengths=lengths,
            ancestors=seen,
        )  # fmt: skip
        return view, inside

    def _write(self, row: DraftRows, ids: Tensor, shares: Tensor, parents: Tensor) -> None:
        """Make the likeliest of the candidates [rows, any] drafts, the likeliest first."""
        tables, (steps, _, nodes) = self._tables, self._tree
        assert tables.ancestors is not None
        slots = row.view.decode_slots.long()
        # Among equals the earlier is first, a parent before its child.
        order = shares.sort(dim=1, descending=True, stable=True).indices
        number = order.argsort(1) + 1
        parents = torch.where(parents < 0, 0, number.gather(1, parents.clamp(min=0)))
        order = order[:, :nodes]
        parents, at = parents.gather(1, order), torch.arange(1, nodes + 1, device=order.device)
        seen, node = (-1 << at).expand_as(order), at.expand_as(order)
        for _ in range(steps):
            seen = seen | torch.where(node > 0, 1 << at - node, 0)
            node = torch.where(node > 0, parents.gather(1, (node - 1).clamp(min=0)), 0)
        tables.ancestors[slots, :nodes] = seen.to(torch.int32)
        tables.survival[slots, :nodes] = shares.gather(1, order)
        tables.drafts[slots, 1 : 1 + nodes] = ids.gather(1, order).to(torch.int32)
        tables.drafts[slots, 0] = torch.where(tables.drafts[slots, 0] > 0, nodes, 0).to(torch.int32)
