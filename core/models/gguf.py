"""Metadata of a .gguf file as a Hugging Face config, so that one reader knows every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.errors import ModelError

GGUF_ARCHITECTURES: Mapping[str, str] = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""By `general.architecture`, that of a config.json."""
MIXTRAL = "MixtralForCausalLM"
"""What a file of `llama` with experts is."""
READ_FROM_GGUF = frozenset({*GGUF_ARCHITECTURES.values(), MIXTRAL})
_MULTIPLIERS: Mapping[str, str] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Of Granite."""
_GEMMA: Mapping[str, str] = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}


_PLAIN = (None, 0, 1, 32)
"""Values of `general.file_type` of files in float32, float16 and bfloat16; the others are quantised."""


def gguf_config(
    fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factor: float = 1.0
) -> dict[str, Any]:
    """config.json of a .gguf file from its metadata and tensor shapes. Raises `ModelError`."""
    kind = str(fields.get("general.architecture", ""))
    if kind not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ModelError(f"the .gguf architecture {kind!r} is not supported; supported are {known}.")

    def want(name: str) -> Any:
        value = fields.get(f"{kind}.{name}")
        if value is None:
            raise ModelError(f"the .gguf file lacks the field {kind}.{name}.")
        return value

    heads, hidden = want("attention.head_count"), want("embedding_length")
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the .gguf file lacks the tensor token_embd.weight.")
    config: dict[str, Any] = {
        "architectures": [GGUF_ARCHITECTURES[kind]],
        "vocab_size": embedding[-1],
        "hidden_size": hidden,
        "intermediate_size": want("feed_forward_length"),
        "num_hidden_layers": want("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": fields.get(f"{kind}.attention.key_length") or hidden // heads,
        "max_position_embeddings": want("context_length"),
        # float32 in the file: 9.999999747e-06 is meant as 1e-05.
        "rms_norm_eps": float(f"{want('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(fields.get(f"{kind}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields, kind, rope_factor),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }
    if fields.get("general.file_type") not in _PLAIN:
        config["quantization_config"] = {"quant_method": "gguf"}
    config |= _of_kind(kind, fields, want, config)
    for name in ("bos", "eos"):
        if (token := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    return config


def _of_kind(
    kind: str, fields: Mapping[str, Any], want: Callable[[str], Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """What only some architectures have."""
    found: dict[str, Any] = {}
    if kind == "granite":
        found = {ours: fields.get(f"{kind}.{theirs}", 1.0) for theirs, ours in _MULTIPLIERS.items()}
    if kind in ("gemma2", "gemma3"):
        return _gemma(kind, fields, config)
    if not fields.get(f"{kind}.expert_count"):
        return found
    found["num_experts_per_tok"] = want("expert_used_count")
    if kind == "llama":
        return found | {"architectures": [MIXTRAL], "num_local_experts": want("expert_count")}
    found |= {
        "num_experts": want("expert_count"),
        "moe_intermediate_size": want("expert_feed_forward_length"),
        "norm_topk_prob": kind == "qwen3moe",
    }
    if kind == "qwen2moe":
        found["shared_expert_intermediate_size"] = want("expert_shared_feed_forward_length")
        found["qkv_bias"] = config["attention_bias"]
    return found


def _gemma(kind: str, fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    # No file says what scores are divided by. The largest differ, known by their layers as in llama.cpp.
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[kind]
    width = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    named = {ours: fields.get(f"{kind}.{theirs}") for theirs, ours in _GEMMA.items()}
    told = {name: value for name, value in named.items() if value is not None}
    return {"query_pre_attn_scalar": width, **told}


def _rope_scaling(fields: Mapping[str, Any], kind: str, rope_factor: float) -> dict[str, Any] | None:
    prefix = f"{kind}.rope.scaling."
    name, factor = fields.get(prefix + "type"), fields.get(prefix + "factor")
    original = fields.get(prefix + "original_context_length")
    if name in ("linear", "yarn") and factor:
        scaling: dict[str, Any] = {"rope_type": name, "factor": float(factor)}
        if original:
            scaling["original_max_position_embeddings"] = original
        return scaling
    if rope_factor > 1.0:
        # Llama 3.1 and later: the file holds the factor per frequency, whose largest is the
        # configured one; the other three values are the same in every released model.
        return {
            "rope_type": "llama3",
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original or 8192,
        }
    return None
