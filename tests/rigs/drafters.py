"""Drafters of tiny models over a CPU's runner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from core.env import read_json
from core.models import DraftSpec, ModelSpec, read_draft
from core.models.mtp import mtp_draft
from gpu.attention import torch_attention
from gpu.build import spec_of
from gpu.draft import kernels as draft_kernels
from gpu.draft.block import BlockDrafter
from gpu.draft.build import chained
from gpu.draft.chain import Chain
from gpu.draft.drafter import Drafter
from gpu.draft.model import DraftMachine
from gpu.draft.ngram import NgramDrafter
from gpu.draft.tree import Tree
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel
from gpu.models.draft import BlockModel
from gpu.models.small import SmallModel
from gpu.ops.plain import TorchOps
from gpu.state.tables import SlotTables
from gpu.state.view import StepView
from gpu.weights import load_draft, load_model
from tests.rigs import draft_heads
from tests.rigs.drafting import SAMPLES
from tests.rigs.ngram import lookup
from tests.rigs.runner import CPU, Rig

Make = Callable[[Rig, SlotTables], Drafter]


def ngram(depth: int) -> Make:
    """Looks up single tokens: random texts repeat nothing longer, but for answers that are told again."""
    return lambda rig, tables: NgramDrafter(tables, 256, depth, lookup(3, 1, 2000))


def head(
    name: str,
    directory: Path,
    machine: Callable[[ModelSpec], DraftMachine] | None = None,
    samples: int = SAMPLES,
    tree: Tree | None = None,
) -> Make:
    """A drafter of one of the formats of `draft_heads`, which this writes; run by a CPU's machine or another,
    for steps of up to `samples` samples."""
    path = draft_heads.write(name, directory)
    config = read_json(path / "config.json") or {}
    return _reading_states(path, partial(read_draft, config), machine, samples, tree)


def mtp(path: Path, tree: Tree | None = None) -> Make:
    """The layer for multi-token prediction of the target's own checkpoint."""
    return _reading_states(path, mtp_draft, None, SAMPLES, tree)


def _reading_states(
    path: Path,
    read: Callable[[ModelSpec], DraftSpec],
    machine: Callable[[ModelSpec], DraftMachine] | None,
    samples: int,
    tree: Tree | None,
) -> Make:
    """A drafter that `read` describes, for a target whose states it reads, from the checkpoint at `path`."""

    def make(rig: Rig, tables: SlotTables) -> Drafter:
        spec = read(rig.spec)
        aux = spec.aux_layers or (() if spec.final else None)

        run = (machine or cpu_machine)(spec.decoder)

        def block(target: CausalModel) -> BlockModel:
            found = load_draft(spec, path, target, torch.float32, CPU)
            assert isinstance(found, BlockModel)
            return found

        def chain(target: CausalModel) -> Chain:
            found = load_draft(spec, path, target, torch.float32, CPU)
            assert isinstance(found, Chain)
            return found

        if spec.block_size:
            return BlockDrafter(block, run, tables, aux, samples)
        return chained(chain, run, tables, aux, samples, tree)

    return make


def small(path: Path, tree: Tree | None = None) -> Make:
    """A model of its own, say the target once more, whose drafts are all right."""

    def make(rig: Rig, tables: SlotTables) -> Drafter:
        def load(target: CausalModel) -> Chain:
            model = load_model(spec_of(path), path, torch.float32, CPU)
            model.seal()
            return SmallModel(model)

        return chained(load, cpu_machine(spec_of(path)), tables, None, SAMPLES, tree)

    return make


def cpu_machine(spec: ModelSpec) -> DraftMachine:
    """A CPU's machine for the layers of `spec`."""
    attention = torch_attention(spec)
    heads = spec.kv_shape

    def make_pool(pool: KvPool) -> KvPool:
        return KvPool(spec.kv_layers, pool.num_pages, pool.page_size, heads, torch.float32, CPU)

    def ops(pool: KvPool) -> Callable[[StepView], TorchOps]:
        return lambda view: TorchOps(view, attention)

    return DraftMachine(attention, ops, make_pool, draft_kernels)
