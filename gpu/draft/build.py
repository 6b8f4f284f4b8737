"""From settings to what drafts: its sizes before anything is loaded, and the drafter itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from core.config import MAX_DRAFTS, CacheConfig, SpeculativeConfig
from core.env import read_object
from core.errors import ConfigError, ModelError
from core.models import DraftSpec, ModelSpec, read_draft
from core.models.mtp import mtp_draft
from gpu.draft.block import BlockDrafter
from gpu.draft.chain import Chain, ChainDrafter
from gpu.draft.drafter import Drafter
from gpu.draft.model import DraftMachine
from gpu.draft.ngram import LookUp, NgramDrafter, look_up
from gpu.draft.tree import Tree, TreeDrafter
from gpu.kv.pool import KvPool
from gpu.memory import weight_bytes
from gpu.models.base import CausalModel
from gpu.models.draft import BlockModel
from gpu.models.small import SmallModel
from gpu.state.history import history_bytes
from gpu.state.served import served_bytes
from gpu.state.tables import SlotTables
from gpu.weights import check_layer, load_draft, load_model

DRAFTS: Mapping[str, int] = {"ngram": 4, "eagle": 3, "eagle3": 3, "mtp": 3, "draft-model": 4}
"""Drafts of a row where neither a flag nor the checkpoint says; for MTP as many as in SGLang."""

Make = Callable[[SlotTables], Drafter]
SpecOf = Callable[[Path], ModelSpec]


class Draft(NamedTuple):
    """What drafts for a target.

    settings  with the algorithm known
    most      drafts of a row in one step
    spec      of the draft model, a head or a small model; None: there is none
    path      of its checkpoint, which is the target's own for MTP; None: random weights
    """

    settings: SpeculativeConfig
    most: int
    spec: DraftSpec | ModelSpec | None = None
    path: Path | None = None

    @property
    def tree(self) -> Tree | None:
        """How drafts branch; None: they do not."""
        steps, topk = self.settings.num_steps, self.settings.eagle_topk
        return Tree(steps, topk, self.settings.num_draft_tokens - 1) if topk > 1 else None

    @property
    def layers(self) -> ModelSpec | None:
        """The draft model's own layers."""
        return self.spec.decoder if isinstance(self.spec, DraftSpec) else self.spec

    @property
    def aux(self) -> tuple[int, ...] | None:
        """See `gpu.draft.drafter.Drafter.aux`."""
        return self.spec.aux_layers if isinstance(self.spec, DraftSpec) else None

    def page_bytes(self, cache: CacheConfig, dtype: torch.dtype) -> int:
        """Bytes of the draft model's KV in pages of `dtype`, of one page."""
        if (layers := self.layers) is None:
            return 0
        return KvPool.page_bytes(layers.kv_layers, cache.page_size, layers.kv_shape, dtype)

    def held_bytes(
        self, target: ModelSpec, sizes: tuple[int, int, int], samples: int, dtype: torch.dtype
    ) -> int:
        """Bytes that drafting takes on a device beside pages; `sizes` are rows, tokens of a step and of a
        text, `samples` those of a step."""
        rows, tokens, context = sizes
        layers = self.layers
        if layers is None:
            answers = served_bytes(rows + 1, self.settings.ngram_capacity)
            return history_bytes(rows + 1, context) + answers
        weights, kept = layers.num_parameters() * dtype.itemsize, 0
        vocab = layers.vocab_size
        if isinstance(self.spec, DraftSpec):
            aux = max(len(self.spec.aux_layers), 1)
            if self.spec.prefix:
                # Embedding and head are the target's; `eh_proj` reads two hidden states.
                own = layers.num_parameters() - layers.table_parameters()
                weights = weight_bytes(layers, own, 0, dtype) + 2 * layers.hidden**2 * dtype.itemsize
            else:
                # The first layer's projections read two hidden states, and `fc` those of the target.
                read = layers.q_size + 2 * layers.kv_size + aux * target.hidden
                weights += layers.hidden * read * dtype.itemsize
            kept = tokens * aux * target.hidden
            vocab = self.spec.draft_vocab
            rows = samples if self.spec.block_size else rows
        logits = rows * vocab * 4
        if self.tree is not None:
            logits += 2 * rows * self.tree.topk * vocab * 4
        return weights + (kept + 8 * tokens * layers.hidden) * dtype.itemsize + logits


def read_drafting(
    settings: SpeculativeConfig, path: Path | None, target: ModelSpec, dummy: bool, spec_of: SpecOf
) -> Draft | None:
    """What `settings`, whose algorithm is known, ask for; `path` is the draft model's, for MTP the target's.
    Raises `ConfigError` or `ModelError` for what cannot draft for the target."""
    algorithm, most = settings.algorithm, settings.max_drafts
    if algorithm == "none":
        return None
    check_target(settings, target)
    if algorithm == "ngram":
        return Draft(settings, most or DRAFTS[algorithm])
    assert path is not None, "checked with the settings"
    held = None if dummy else path
    if algorithm == "draft-model":
        own = _small_model(path, spec_of(path), target)
        return Draft(settings, most or DRAFTS[algorithm], own, held)
    if algorithm == "mtp":
        layer = mtp_draft(target)
        if held is not None:
            check_layer(held, layer.prefix)
        return Draft(settings, most or DRAFTS[algorithm], layer, held)
    config = read_object(path / "config.json")
    if config is None:
        raise ModelError(f"{path} has no config.json: a head is a directory with one and safetensors.")
    spec = read_draft(config, target)
    return Draft(settings, _most_drafts(spec, most, path), spec, held)


def check_target(settings: SpeculativeConfig, target: ModelSpec) -> None:
    """Raises `ConfigError` where nothing drafts for `target` as `settings` ask for, whatever the draft model
    is."""
    algorithm = settings.algorithm
    if not target.causal or target.task != "generate":
        raise ConfigError(f"--speculative-algorithm {algorithm}: {target.architecture} generates no text.")
    if settings.eagle_topk > 1:
        _check_tree(settings, target)
    if algorithm == "mtp":
        mtp_draft(target)
    elif target.latent is not None and algorithm not in ("ngram", "draft-model"):
        raise ConfigError(
            f"--speculative-algorithm {algorithm}: heads for {target.architecture}, whose attention has "
            "latents (MLA), are not supported. Use mtp, ngram or draft-model."
        )


def _most_drafts(spec: DraftSpec, asked: int, path: Path) -> int:
    """Maximum drafts of a row in a step: `asked`, or if that is 0, what the checkpoint says. Raises
    `ConfigError` for more than a block has."""
    if not spec.block_size:
        return asked or spec.tokens or DRAFTS[spec.algorithm]
    block = spec.block_size - 1
    if asked > block:
        raise ConfigError(f"{path}: blocks of {spec.block_size} tokens have {block} drafts, not {asked}.")
    return asked or min(block, MAX_DRAFTS)


def _check_tree(settings: SpeculativeConfig, target: ModelSpec) -> None:
    """Raises `ConfigError` where a draft would not see its own ancestors alone: linear attention sees all
    drafts before it, and a window hides those far above."""
    if target.linear is not None:
        raise ConfigError(
            f"--speculative-eagle-topk {settings.eagle_topk}: {target.architecture} has linear attention, "
            "which takes drafts one after the other: they are chains, not trees. Leave it out, or use 1."
        )
    windows = [target.window(layer) for layer in range(target.layers) if target.window(layer)]
    if windows and settings.num_steps >= min(windows):
        raise ConfigError(
            f"--speculative-num-steps {settings.num_steps} must be less than the {min(windows)} tokens that "
            f"{target.architecture}'s layers see, for trees (--speculative-eagle-topk above 1)."
        )


def _small_model(path: Path, own: ModelSpec, target: ModelSpec) -> ModelSpec:
    """`own`, of the model at `path`, if it makes text of the target's vocabulary."""
    if not own.causal or own.task != "generate":
        raise ModelError(f"{path}: {own.architecture} generates no text, so it cannot draft any.")
    if own.transformers or own.linear is not None:
        how = "runs through transformers" if own.transformers else "has linear attention"
        raise ModelError(f"{path}: {own.architecture} {how}, which drafts for no model.")
    if own.vocab_size != target.vocab_size:
        raise ModelError(
            f"{path}: the draft model's vocab_size ({own.vocab_size}) is not the target's "
            f"({target.vocab_size})."
        )
    return own


def pool_of(layers: ModelSpec, dtype: torch.dtype, device: torch.device) -> Callable[[KvPool], KvPool]:
    """Returns a function that allocates the draft model's KV pool, with the page count and page size of the
    target's pool."""
    heads = layers.kv_shape
    return lambda pool: KvPool(layers.kv_layers, pool.num_pages, pool.page_size, heads, dtype, device)


def make_drafter(
    draft: Draft,
    context: int,
    samples: int,
    dtype: torch.dtype,
    device: torch.device,
    machine: DraftMachine | None,
    look_up: LookUp = look_up,
) -> Make:
    """Makes the drafter of a runner whose steps have up to `samples` samples and whose texts `context`
    tokens. `machine` runs the draft model, if there is one."""
    if machine is None:
        return lambda tables: NgramDrafter(tables, context, draft.most, draft.settings, look_up)
    ready, spec, path = machine, draft.spec, draft.path

    def load_block(target: CausalModel) -> BlockModel:
        assert isinstance(spec, DraftSpec)
        head = load_draft(spec, path, target, dtype, device)
        assert isinstance(head, BlockModel)
        return head

    def load_chain(target: CausalModel) -> Chain:
        if isinstance(spec, DraftSpec):
            head = load_draft(spec, path, target, dtype, device)
            assert isinstance(head, Chain)
            return head
        assert spec is not None
        model = load_model(spec, path, dtype, device)
        model.seal()
        return SmallModel(model)

    if isinstance(spec, DraftSpec) and spec.block_size:
        return lambda tables: BlockDrafter(load_block, ready, tables, draft.aux, samples)
    return lambda tables: chained(load_chain, ready, tables, draft.aux, samples, draft.tree)


def chained(
    load: Callable[[CausalModel], Chain],
    machine: DraftMachine,
    tables: SlotTables,
    aux: tuple[int, ...] | None,
    samples: int,
    tree: Tree | None,
) -> Drafter:
    """A drafter that drafts one token after the other, as a `tree` or else a chain. See `ChainDrafter`."""
    if tree is None:
        return ChainDrafter(load, machine, tables, aux, samples)
    return TreeDrafter(load, machine, tables, aux, samples, tree)
