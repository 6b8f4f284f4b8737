"""Tiny checkpoints of draft models, with the names and config keys that public ones have, and a way to run
them over pages of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from core.models import DraftSpec, ModelSpec
from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.request import SamplingParams
from gpu.attention import TorchAttention, torch_attention
from gpu.context import ForwardContext
from gpu.kv.pool import KvPool
from gpu.kv.states import StatePool
from gpu.ops.delta import gated_delta
from gpu.ops.plain import TorchOps
from gpu.state.recurrent import StepStates
from gpu.state.view import StepView
from tests.rigs.arrays import ints
from tests.rigs.views import Views

CPU = torch.device("cpu")
VOCAB, DRAFT_VOCAB, HIDDEN, WIDTH, HEADS, KV_HEADS = 256, 96, 64, 96, 4, 2

_LAYERS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

Tensors = dict[str, torch.Tensor]


def _wrapped(kind: str, layers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A config of vLLM's Speculators."""
    return {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "transformer_layer_config": dict(layers),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        **more,
    }


_REDUCED = {"draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": HIDDEN}
_QWEN3 = {**_LAYERS, "model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": False}
BLOCK, MASK = 4, 200

CONFIGS: dict[str, dict[str, Any]] = {
    "eagle": {**_LAYERS, "architectures": ["LlamaForCausalLM"]},
    "eagle-sglang": {**_LAYERS, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 2},
    "eagle-speculators": _wrapped("eagle", _LAYERS, layernorms=False, fusion_bias=False),
    "eagle3": {**_LAYERS, **_REDUCED, "architectures": ["LlamaForCausalLMEagle3"]},
    "eagle3-specforge": {
        **_LAYERS,
        **_REDUCED,
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3]},
    },
    "eagle3-vllm": {
        **_LAYERS,
        **_REDUCED,
        "architectures": ["Eagle3LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
        "norm_before_residual": True,
        "norm_before_fc": True,
    },
    "eagle3.1": {
        **_LAYERS,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCAB,
        "fc_norm": True,
        "norm_output": True,
    },
    "eagle3-speculators": _wrapped(
        "eagle3", _LAYERS, **_REDUCED, eagle_aux_hidden_state_layer_ids=[1, 3, 4], norm_before_residual=True
    ),
    "dflash": {
        **_QWEN3,
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "num_target_layers": 6,
        "layer_types": ["full_attention"] * 2,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3]},
    },
    "dflash-bias": {
        **_QWEN3,
        "architectures": ["DFlashDraftModel"],
        "attention_bias": True,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 4], "causal": True},
    },
    "dflash-speculators": _wrapped(
        "dflash",
        _QWEN3,
        draft_vocab_size=DRAFT_VOCAB,
        target_hidden_size=HIDDEN,
        block_size=BLOCK,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=[2, 4],
        sample_from_anchor=False,
    ),
}
"""By format."""

AUX: dict[str, tuple[int, ...]] = {
    "eagle3": (2, 3, 3),
    "eagle3-specforge": (1, 4),
    "eagle3-vllm": (1, 2, 5),
    "eagle3.1": (2, 3, 3),
    "eagle3-speculators": (1, 3, 4),
    "dflash": (2, 4),
    "dflash-bias": (1, 3, 5),
    "dflash-speculators": (2, 4),
}
"""Layers of the target whose inputs they read."""


def _layer(
    prefix: str, inputs: int = HIDDEN, qk_norm: bool = False, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * 16, KV_HEADS * 16
    norms = {f"self_attn.{of}_norm": (16,) for of in "qk"} if qk_norm else {}
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, inputs),
        "self_attn.k_proj": (kv, inputs),
        "self_attn.v_proj": (kv, inputs),
        "self_attn.o_proj": (HIDDEN, q),
        **norms,
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    biases = {f"{prefix}{name}.bias": shape[:1] for name, shape in shapes.items() if "_attn" in name and bias}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()} | {
        name: shape for name, shape in biases.items() if "norm" not in name
    }


def _eagle(first: str = "layers.0.", fc: str = "fc") -> dict[str, tuple[int, ...]]:
    shapes = _layer(first) | {f"{fc}.weight": (HIDDEN, 2 * HIDDEN), "embed_tokens.weight": (VOCAB, HIDDEN)}
    del shapes[f"{first}input_layernorm.weight"]
    return shapes


def _eagle3(first: str = "midlayer.", count: int = 3, vocab: int = DRAFT_VOCAB) -> dict[str, tuple[int, ...]]:
    return _layer(first, 2 * HIDDEN) | {
        f"{first}hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, count * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (vocab, HIDDEN),
    }


def _dflash(count: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    return {
        **_layer("layers.0.", qk_norm=True, bias=bias),
        **_layer("layers.1.", qk_norm=True, bias=bias),
        "fc.weight": (HIDDEN, count * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }


def _based(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name if name == "lm_head.weight" else f"model.{name}": shape for name, shape in shapes.items()}


_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "eagle": {**_eagle(), "fc.bias": (HIDDEN,)},
    "eagle-sglang": {**_eagle(), **_layer("layers.1.")},
    "eagle-speculators": _eagle("transformer.", "fusion_fc"),
    "eagle3": _eagle3(),
    "eagle3-specforge": _eagle3(count=2),
    "eagle3-vllm": _based(
        {
            **_eagle3("layers.0."),
            **_layer("layers.1."),
            "input_norm.weight": (3 * HIDDEN,),
            "embed_tokens.weight": (VOCAB, HIDDEN),
        }
    ),
    "eagle3.1": {**_eagle3(vocab=VOCAB), **{f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}},
    "eagle3-speculators": {**_eagle3("layers.0."), "embed_tokens.weight": (VOCAB, HIDDEN)},
    "dflash": _dflash(2),
    "dflash-bias": _dflash(3, bias=True),
    "dflash-speculators": {
        **_dflash(2),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    },
}


def tensors(name: str) -> Tensors:
    """Tensors of the checkpoint of a format, the same every time."""
    draw = torch.Generator().manual_seed(len(name))
    made: Tensors = {}
    for key, shape in _SHAPES[name].items():
        if len(shape) == 1 and key.endswith(".weight"):
            made[key] = 0.5 + torch.rand(shape, generator=draw)
        else:
            made[key] = 0.3 * torch.randn(shape, generator=draw)
    if made.get("lm_head.weight", torch.empty(VOCAB)).shape[0] == DRAFT_VOCAB:
        kept = torch.randperm(VOCAB, generator=draw)[:DRAFT_VOCAB].sort().values
        made["d2t"] = kept - torch.arange(DRAFT_VOCAB)
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
    return made


def write(name: str, directory: Path, **changes: torch.Tensor | None) -> Path:
    """Write the checkpoint of a format; `changes` replace, add or (None) remove tensors."""
    held = {key: tensor for key, tensor in (tensors(name) | changes).items() if tensor is not None}
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    return directory


class Pages(NamedTuple):
    """Runs chunks and blocks of slots over pages of a model's own."""

    views: Views
    attention: TorchAttention
    pool: KvPool
    seen: list[StepView]
    """The views of all contexts so far."""

    @classmethod
    def of(cls, spec: ModelSpec, page_size: int = 4) -> Pages:
        """Pages for the layers of `spec`."""
        attention = torch_attention(spec)
        pool = KvPool(spec.layers, 64, page_size, spec.kv_shape, torch.float32, CPU)
        if spec.linear is not None:
            pool.states = StatePool(spec.linear, 3, 0, torch.float32, CPU)
        attention.bind(pool)
        return cls(Views(2, 32, page_size, 256), attention, pool, [])

    def chunk(self, slot: int, start: int, count: int) -> ForwardContext:
        """Context for `count` tokens of a slot from `start` on."""
        return self._context(self._view(slot, start, count))

    def _view(self, slot: int, start: int, count: int) -> StepView:
        """View of a chunk. The pages of a slot lie backwards."""
        size = self.pool.page_size
        new = NewSlot(slot, SamplingParams(), ints([0] * count), ints([]), 0)
        last = range(-(-start // size), -(-(start + count) // size))
        cells = np.array([(slot, at, 63 - 31 * slot - at) for at in last], np.int32).reshape(-1, 3)
        cells.setflags(write=False)
        chunk = Chunk(slot, start, ints([0] * count), False)
        plan = StepPlan(1, ints([]), (chunk,), (new,) if start == 0 else (), PageWrites(*cells.T))
        return self.views.take(plan)

    def block(self, slot: int, start: int, count: int, causal: bool) -> ForwardContext:
        """Context for a block behind `start` tokens: rows that see each other, or those before them alone."""
        view = self._view(slot, start, count)
        return self._context(
            view._replace(
                max_decode=count,
                max_chunks=0,
                chunk_slots=view.chunk_slots[:0],
                chunk_starts=view.chunk_starts[:0],
                chunk_firsts=view.chunk_firsts[:1],
                counts=torch.tensor([count, count, 0, 0], dtype=torch.int32),
                decode_slots=torch.full((count,), slot, dtype=torch.int32),
                decode_lengths=view.positions + 1
                if causal
                else torch.full_like(view.positions, start + count),
            )
        )

    def _context(self, view: StepView) -> ForwardContext:
        self.attention.plan(view)
        self.seen.append(view)
        pool = self.pool.states
        states = None if pool is None else StepStates(pool, view, gated_delta)
        return ForwardContext(view.positions.long(), TorchOps(view, self.attention), states=states)


def aux_width(spec: DraftSpec) -> int:
    """Columns of the target's states that the draft reads."""
    return max(len(spec.aux_layers), 1) * spec.target_hidden
