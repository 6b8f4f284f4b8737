"""Drafts that are trees: both sets of kernels lay out, accept and move what a walk from node to node says."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.kernels.inputs import Heads, error, pages
from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.request import SamplingParams
from gpu.kernels.attention.decode import decode_workspace, paged_decode
from gpu.kernels.attention.decode_config import DecodeConfig
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.sampling import kernels as triton_kernels
from gpu.kernels.step import begin_step as triton_begin
from gpu.sample import torch_kernels
from gpu.sample.penalties import Counts
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.step.begin import begin_step
from gpu.step.buffers import HiddenShape, StepBuffers
from gpu.step.rings import Entries, Rings
from gpu.step.steps import Forward
from tests.rigs.arrays import ints

ROWS, NODES, PAGE, PAGES, VOCAB, TOKENS = 5, 6, 4, 8, 4, 48
LIMITS = Limits(ROWS, ROWS, TOKENS, 64, PAGES, samples=TOKENS, drafts=NODES, trees=True)
KERNELS = {"torch": (begin_step, torch_kernels), "triton": (triton_begin, triton_kernels)}


class Tree(NamedTuple):
    """Nodes from 1 on: the parent of each (0: the row's last token) and its token."""

    parents: list[int]
    ids: list[int]

    @classmethod
    def random(cls, rng: np.random.Generator, nodes: int) -> Tree:
        """A tree of few different tokens, so that many are right, siblings among them."""
        parents = [int(rng.integers(max(node - 3, 0), node)) for node in range(1, nodes + 1)]
        return cls(parents, rng.integers(0, VOCAB, nodes).tolist())

    def path(self, node: int) -> list[int]:
        """Nodes on the way to `node`, itself included."""
        found: list[int] = []
        while node:
            found, node = [node, *found], self.parents[node - 1]
        return found

    def mask(self, node: int) -> int:
        """See `SlotTables.ancestors`."""
        return sum(1 << (node - each) for each in self.path(node)) | -1 << node

    def accepted(self, chosen: list[int]) -> list[int]:
        """The path of so many nodes as `chosen` has tokens, by what was chosen at each."""
        node, found = 0, list[int]()
        for child in range(1, len(chosen)):
            if self.parents[child - 1] == node and self.ids[child - 1] == chosen[node]:
                node, found = child, [*found, child]
        return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_step_of_trees(kernels: str, seed: int, device: torch.device) -> None:
    begin, run = KERNELS[kernels]
    if kernels == "torch" and device.type != "cpu":
        pytest.skip("a CPU's")
    rng = np.random.default_rng(seed)
    tables = SlotTables(ROWS, PAGES, device, NODES, trees=True)
    assert tables.ancestors is not None
    buffers = StepBuffers(tables, LIMITS, HiddenShape(8, torch.float32))
    rings, counts = Rings(Entries(LIMITS, 3, device), device), Counts(ROWS, VOCAB, device)
    params = SamplingParams(frequency_penalty=1.0)
    slots = list(range(1, ROWS + 1))
    lengths = {slot: int(rng.integers(1, 12)) for slot in slots}
    limits = {slot: lengths[slot] + int(rng.integers(1, 12)) for slot in slots}
    new = tuple(NewSlot(s, params, ints([]), ints([]), lengths[s], limit=limits[s]) for s in slots)
    table = rng.permutation(ROWS * PAGES).reshape(ROWS, PAGES) + 1
    cells = [(slot, at, table[slot - 1, at]) for slot in slots for at in range(PAGES)]
    rows = slots[:-1]
    trees = {slot: Tree.random(rng, NODES) for slot in rows}
    chunk = Chunk(slots[-1], lengths[slots[-1]], ints([1, 2, 3]), True)
    plan = StepPlan(
        0, ints(rows), (chunk,), new, PageWrites(*ints(cells).T), query_length=1 + NODES, drafts=99
    )
    for slot, tree in trees.items():
        tables.drafts[slot] = torch.tensor([NODES, *tree.ids])
        tables.ancestors[slot] = torch.tensor([tree.mask(node) for node in range(1, NODES + 1)])
    ticket, view = rings.write(plan), buffers.view(Forward(TOKENS, TOKENS, ROWS, TOKENS, query=1 + NODES))
    assert view.ancestors is not None
    begin(rings.entries, tables, view, buffers.samples, page_size=PAGE)

    given = [min(NODES, limits[slot] - lengths[slot] - 1) for slot in rows]
    assert len(set(given)) > 1, "all rows have the same"
    nodes = [(slot, node) for slot, count in zip(rows, given, strict=True) for node in range(count + 1)]
    decoding = len(nodes)
    depths = [len(trees[slot].path(node)) for slot, node in nodes]
    at = [lengths[slot] + depth for (slot, _), depth in zip(nodes, depths, strict=True)]
    held = [lengths[slot] + node for slot, node in nodes]
    stored = [
        int(table[slot - 1, c // PAGE]) * PAGE + c % PAGE for (slot, _), c in zip(nodes, held, strict=True)
    ]
    assert view.positions[:decoding].tolist() == at
    assert view.decode_lengths[:decoding].tolist() == [each + 1 for each in held]
    assert view.kv_slot_mapping[:decoding].tolist() == stored
    assert view.ancestors[:decoding].tolist() == [trees[slot].mask(node) for slot, node in nodes]
    assert (view.ancestors[decoding:] == -1).all()
    order = [i for i, (_, node) in enumerate(nodes) if not node] + [decoding + 2]
    order += [i for i, (_, node) in enumerate(nodes) if node]
    positions = [lengths[chunk.slot] + 3 if i >= decoding else at[i] + 1 for i in order]
    samples = buffers.samples.first(len(order))
    assert (samples.rows.tolist(), samples.positions.tolist()) == (order, positions)

    padded = buffers.rows.first(len(order) + 3)
    logits = torch.zeros(len(order) + 3, VOCAB, device=device)
    run.penalise(logits, padded, counts)
    for sample, i in enumerate(order):
        before = (
            []
            if i >= decoding
            else [trees[nodes[i][0]].ids[each - 1] for each in trees[nodes[i][0]].path(nodes[i][1])]
        )
        assert (-logits[sample]).tolist() == np.bincount(before, minlength=VOCAB).tolist()

    chosen = dict(zip(order, rng.integers(0, VOCAB, len(order)).tolist(), strict=True))
    for i, (slot, node) in enumerate(nodes):
        children = [child for child, parent in enumerate(trees[slot].parents, 1) if parent == node]
        if children and rng.random() < 0.8:
            chosen[i] = trees[slot].ids[children[-1] - 1]
    tokens = torch.tensor([*(chosen[i] for i in order), 0, 0, 0], device=device)
    run.accept(tokens, padded, rings.cursor, rings.answers, counts)
    ids, entries = (
        view.ids.tolist(),
        torch.arange(2 * 500 * 3, dtype=torch.int32, device=device).view(2, 500, 3),
    )
    kept = entries.clone()
    run.move_paths(entries, padded, view.kv_slot_mapping)
    run.move_paths(buffers.begun()[0].unsqueeze(2), padded)
    answer, wanted, deep = rings.read(ticket), list[int](), 0
    first, paths = 0, list[int]()
    for slot, count in zip(rows, given, strict=True):
        path = trees[slot].accepted([chosen[first + node] for node in range(count + 1)])
        made = [chosen[first + node] for node in [0, *path]]
        wanted += made
        paths.append(sum(1 << (node - 1) for node in path))
        assert (int(tables.length[slot]), int(tables.last_token[slot])) == (
            lengths[slot] + len(path) + 1,
            made[-1],
        )
        for depth, node in enumerate(path, 1):
            to, found = first + depth, first + node
            assert (int(view.ids[to]), int(view.positions[to])) == (ids[found], lengths[slot] + depth)
            assert torch.equal(entries[:, stored[to]], kept[:, stored[found]])
            deep += node > depth
        first += count + 1
    assert deep, "nothing was to be moved"
    assert answer.tokens.tolist() == [*wanted, chosen[decoding + 2]]
    assert answer.paths is not None and answer.paths.tolist() == [*paths, 0]
    assert answer.drafted is not None and answer.drafted.tolist() == [*given, 0]
    others = sorted({*range(500)} - {*stored})
    assert torch.equal(entries[:, others], kept[:, others])

    running = [slot for slot in rows if int(tables.length[slot]) < limits[slot]]
    lengths = tables.length[running].tolist()
    rings.write(StepPlan(1, ints(running)))
    view = buffers.view(Forward(ROWS, ROWS, 0, ROWS))
    assert view.ancestors is not None
    view.ancestors.fill_(-3)  # as other trees would have left them
    begin(rings.entries, tables, view, buffers.samples, page_size=PAGE)
    assert view.positions[: len(running)].tolist() == lengths
    assert (view.ancestors == -1).all(), "a plain step sees an earlier step's trees"


@pytest.mark.parametrize(("queries", "window"), [(1, 0), (1, 8), (4, 0), (4, 8), (8, 0), (8, 20)])
def test_a_token_sees_its_ancestors(
    queries: int, window: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    rng, heads, rows = np.random.default_rng(queries), Heads(4, 2, 32), [(70, 7), (41, 1), (33, 4), (130, 7)]
    kept = pages([before + tokens for before, tokens in rows], 16, heads, dtype, device)
    trees = [Tree.random(rng, tokens - 1) for _, tokens in rows]
    nodes = [(row, node) for row, (_, tokens) in enumerate(rows) for node in range(tokens)]
    slots = kept.slots[[row for row, _ in nodes]]
    lengths = torch.tensor([rows[row][0] + node + 1 for row, node in nodes], device=device)
    masks = torch.tensor([trees[row].mask(node) for row, node in nodes], dtype=torch.int32, device=device)
    q = torch.randn(len(nodes), heads.q, heads.dim, device=device).to(dtype)
    config = DecodeConfig(32, 4, 2, 5, queries=queries)
    plan = plan_decode(slots, lengths, config, longest=8, window=window, ancestors=masks)
    space = decode_workspace(len(nodes), heads.q, heads.kv, heads.dim, config, device)
    scale = heads.dim**-0.5
    layer = kept.layer(16, scale)
    found = paged_decode(q, layer, plan, space, config, window=window, ancestors=masks).view_as(q)
    for i, (row, node) in enumerate(nodes):
        before, path = rows[row][0], trees[row].path(node)
        seen = range(max(before + len(path) + 1 - window, 0) if window else 0, before + 1)
        at = torch.tensor([*seen, *(before + each for each in path)], device=device)
        cells = kept.table[slots[i], at // 16].long() * 16 + at % 16
        k, v = (side[cells].float().repeat_interleave(2, 1) for side in (kept.k, kept.v))
        scores: Tensor = torch.einsum("hd,nhd->hn", q[i].float(), k) * scale
        assert error(found[i], torch.einsum("hn,nhd->hd", scores.softmax(-1), v)) < tolerance
