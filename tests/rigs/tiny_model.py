"""Tiny random checkpoints of every model family, created with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

VOCAB = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Far above the usual 0.02, so that logits differ by more than rounding and greedy outputs are stable.
    "initializer_range": 0.3,
}


def _rope(kind: str, **more: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [1.5 + i for i in range(6)]}
"""Factors for half of the 12 dimensions that are rotated of a head of 16."""
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 16,
}

_GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
"""Experts in groups, as DeepSeek has them."""

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
"""Attention over latents, all sizes different."""

_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 20,
    "final_logit_softcapping": 6.0,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-bias": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", {**_LLAMA3, "head_dim": 24}),
    "llama-linear": ("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 48}),
    "llama-yarn": ("Llama", _YARN),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-window": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 20, "pad_token_id": 0},
    ),
    "phi3": ("Phi3", {"sliding_window": 24, "pad_token_id": 0}),
    "phi3-longrope": (
        "Phi3",
        {
            **_rope("longrope", original_max_position_embeddings=16, partial_rotary_factor=0.75, **_FACTORS),
            "original_max_position_embeddings": 16,
            "pad_token_id": 0,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.125,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-yarn": (
        "Olmo2",
        {
            **_YARN,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 20,
            "rope_parameters": {
                "full_attention": _YARN["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma2": ("Gemma2", {**_GEMMA, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 4.0}),
    "gemma3": (
        "Gemma3",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "head_dim": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "initializer_range": 0.2,  # experts' sums of such numbers are rounded to less than others'
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 20,
            "swiglu_limit": 2.0,
            "pad_token_id": 0,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 32, "num_hidden_layers": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **_MOE,
            "num_experts": 4,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 20,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": ("Qwen3Moe", _MOE),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **_GROUPED,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "glm4-moe-one-group": (
        "Glm4Moe",
        {**_GROUPED, "head_dim": 16, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**_GROUPED, **_LATENT, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**_GROUPED, **_LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_GROUPED,
            **_LATENT,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.3),
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        # An epsilon that shows: norms of latents have their own.
        {**_GROUPED, **_LATENT, "rope_interleave": False, "attention_bias": True, "rms_norm_eps": 0.01},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**_GROUPED, **_LATENT, "mlp_layer_types": ["sparse", "dense"]}),
    # Sizes divisible by 128, for FP8 in blocks.
    "qwen3-moe-wide": (
        "Qwen3Moe",
        {
            **_MOE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "head_dim": 32,
            "num_key_value_heads": 4,
            "mlp_only_layers": [0],
        },
    ),
}
"""Name to (family, changes to `_SIZES`)."""

_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    # With more a float32 computation differs from one in float64 by over 1e-4, transformers' own too.
    "initializer_range": 0.05,
}
VARIANTS |= {
    "qwen3-next": (
        "Qwen3Next",
        {
            **_LINEAR,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1, 2],
        },
    ),
    "qwen3.5": ("Qwen3_5", {**_LINEAR, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **_LINEAR,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
}
"""Hybrids."""

UNLISTED: dict[str, tuple[str, dict[str, Any]]] = {
    # Attention and MLP in parallel behind one norm, scaled logits, RoPE only in sliding-window layers.
    "cohere2": ("Cohere2", {"sliding_window": 20, "sliding_window_pattern": 2}),
    # A table of positions, no rope; products stored transposed, tensors under a prefix of its own.
    "gpt2": ("GPT2", {}),
    # One product for queries, keys and values, a part of each head rotated, a head of another name.
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": 4}),
    # Layer norms and products with biases, a window in every layer.
    "starcoder2": ("Starcoder2", {"sliding_window": 24}),
    # Neighbouring dimensions rotate together.
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    # Numbers without a dimension, of its activation.
    "apertus": ("Apertus", {"head_dim": 16, "pad_token_id": 0}),
    # Experts, which transformers stacks and a checkpoint keeps apart.
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}),
}
"""Architectures without a family, which run through transformers, in the form of `VARIANTS`."""

FEW_EXPERTS: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": 4}
"""Changes to `qwen3-moe`, whose experts are slow on a CPU: one layer of each kind."""


class Tiny(NamedTuple):
    """A saved checkpoint and the transformers model it was saved from, fp32."""

    path: Path
    reference: transformers.PreTrainedModel


def build(name: str, directory: Path, max_shard_size: str = "1GB", **more: Any) -> Tiny:
    """Create variant `name` and save it under `directory`; `more` are further changes to its config. The
    weights are deterministic."""
    family, changes = {**VARIANTS, **UNLISTED}[name]
    kind = f"{family}Text" if family in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") else family
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **changes, **more})
    torch.manual_seed(7)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{head}")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            # transformers initialises norms with one and biases with zero, which would hide swapped ones.
            if key.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
                weight.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                weight.normal_(0.0, 0.2)
            elif key.endswith("sinks"):  # beside which scores are not nothing
                weight.normal_(1.0, 1.0)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return Tiny(directory, model)


HEADLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaModel": ("Llama", {}),
    "MistralModel": ("Mistral", {"sliding_window": 24}),
    "Qwen2Model": ("Qwen2", {}),
    "Qwen3Model": ("Qwen3", {"head_dim": 16}),
    "LlamaForSequenceClassification": ("Llama", {"num_labels": 1}),
    "Qwen2ForSequenceClassification": ("Qwen2", {"num_labels": 3}),
    "Qwen3ForSequenceClassification": ("Qwen3", {"head_dim": 16, "num_labels": 2}),
    "BertModel": ("Bert", {}),
    "RobertaModel": ("Roberta", {"pad_token_id": 1}),
    "XLMRobertaModel": ("XLMRoberta", {"pad_token_id": 1}),
    "BertForSequenceClassification": ("Bert", {"num_labels": 1}),
    "RobertaForSequenceClassification": ("Roberta", {"num_labels": 3, "pad_token_id": 1}),
    "XLMRobertaForSequenceClassification": ("XLMRoberta", {"num_labels": 1, "pad_token_id": 1}),
}
"""Architecture to (family, changes to `_SIZES`): checkpoints of embedding and classification models."""


def build_headless(architecture: str, directory: Path) -> Tiny:
    """Build one of `HEADLESS`."""
    family, changes = HEADLESS[architecture]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, "pad_token_id": 0, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.lower().endswith(("norm.weight", "layernorm.weight")):
                weight.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                weight.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    return Tiny(directory, model)


def greedy(model: transformers.PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """Output of transformers' greedy generate for `prompt`, ignoring EOS."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [len(tokens), vocab] of a sequence."""
    return model(torch.tensor([tokens])).logits[0]
