"""Configs of hybrids with linear attention."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import ConfigError, ModelError
from core.models import read_spec

QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
"""Config of Qwen/Qwen3-Next-80B-A3B-Instruct on the hub."""

_ROPE = {
    "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
_LINEAR = {
    "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06, "rope_parameters": _ROPE, "vocab_size": 248320, "attention_bias": False,
    "dtype": "bfloat16", "eos_token_id": 248044,
}  # fmt: skip
QWEN3_5_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "tie_word_embeddings": False, "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
    "text_config": {
        **_LINEAR, "hidden_size": 4096, "intermediate_size": 12288, "model_type": "qwen3_5_text",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "num_hidden_layers": 32, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Config of Qwen/Qwen3.5-9B, its vision tower shortened; the next is that of Qwen/Qwen3.6-35B-A3B."""
QWEN3_6_35B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        **_LINEAR, "hidden_size": 2048, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "shared_expert_intermediate_size": 512, "output_router_logits": False,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    },
}  # fmt: skip


def test_a_config_of_qwen3_next() -> None:
    got = read_spec(QWEN3_NEXT)
    assert got.linear is not None and got.moe is not None
    assert (got.kv_layers, len(got.linear.layers), got.linear.mixed) == (12, 36, True)
    assert [layer in got.linear.layers for layer in range(8)] == [True, True, True, False] * 2
    assert [got.place(layer) for layer in range(8)] == [0, 1, 2, 0, 3, 4, 5, 1]
    assert (got.linear.channels, got.linear.value_size) == (8192, 4096)
    assert (got.rope.partial, got.rope.theta, got.norm_offset) == (0.25, 1e7, 1.0)
    assert (got.moe.experts, got.moe.per_token, got.moe.shared, got.moe.norm_topk) == (512, 10, 512, True)
    assert got.output_gate
    # Published of Qwen3-Coder-Next, which has these sizes.
    assert got.num_parameters() == pytest.approx(79_674_391_296, rel=1e-3)


def test_configs_of_qwen3_5_are_those_of_its_language_model() -> None:
    dense, sparse = read_spec(QWEN3_5_9B), read_spec(QWEN3_6_35B)
    assert dense.linear is not None and sparse.linear is not None and sparse.moe is not None
    assert (dense.architecture, dense.kv_layers, dense.linear.mixed) == (
        "Qwen3_5ForConditionalGeneration", 8, False,
    )  # fmt: skip
    assert (dense.hidden, dense.heads, dense.dtype, dense.rope.theta) == (4096, 16, "bfloat16", 1e7)
    assert (sparse.moe.experts, sparse.moe.per_token, sparse.kv_layers) == (256, 8, 10)
    assert sparse.num_parameters() == pytest.approx(34.66e9, rel=1e-2)
    alone = read_spec({**QWEN3_5_9B["text_config"], "architectures": ["Qwen3_5ForCausalLM"]})
    assert alone.linear == dense.linear


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 48}, "layer_types"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
        ({"full_attention_interval": 1}, "layer_types"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
    ],
)
def test_errors_name_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_spec({**QWEN3_NEXT, **changes})


def test_ranks_divide_heads() -> None:
    one = read_spec(QWEN3_NEXT).shard(4).linear
    assert one is not None and (one.key_heads, one.value_heads, one.channels) == (4, 8, 2048)
    with pytest.raises(ConfigError, match=r"--tp 3 does not divide .*linear_num_key_heads \(16\)"):
        read_spec(QWEN3_NEXT).shard(3)
