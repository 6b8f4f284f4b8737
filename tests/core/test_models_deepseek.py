"""Configs with experts in groups: those of published models, and what is said of a wrong field."""

from __future__ import annotations

import pytest

from core.errors import ModelError
from core.models import read_spec

GLM_4_6: dict[str, object] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 202752, "model_type": "glm4_moe", "moe_intermediate_size": 1536,
    "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": True,
    "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip
"""As zai-org/GLM-4.6 has it on the hub; the next two differ from it as there."""
GLM_4_5 = {**GLM_4_6, "max_position_embeddings": 131072}
GLM_4_5_AIR = {
    **GLM_4_5,
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_hidden_layers": 46,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
}


def test_a_config_of_glm_4_6() -> None:
    got = read_spec(GLM_4_6)
    assert (got.rope.partial, got.rope.theta, got.context_length) == (0.5, 1e6, 202752)
    assert (got.qk_norm, got.qkv_bias, got.out_bias, got.more_layers) == ("head", True, False, 1)
    assert got.moe is not None and got.moe.layers == set(range(3, 92))
    assert (got.moe.scores, got.moe.scale, got.moe.norm_topk) == ("sigmoid", 2.5, True)
    assert (got.moe.shared, got.moe.shared_gate, got.moe.groups) == (1536, False, 1)
    assert got.num_parameters() == pytest.approx(353e9, rel=0.01)  # without the layer behind the last


def test_a_config_of_glm_4_5_air() -> None:
    got, larger = read_spec(GLM_4_5_AIR), read_spec(GLM_4_5)
    assert (got.qk_norm, larger.context_length) == ("", 131072)
    assert got.num_parameters() == pytest.approx(107e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 3}, "n_group must be a divisor of n_routed_experts"),
        ({"n_group": 160}, "n_group must be"),
        ({"n_group": 8, "topk_group": 9}, "topk_group must be at most n_group"),
        ({"n_group": 40, "topk_group": 1}, "num_experts_per_tok must be at most .* groups .4."),
        ({"routed_scaling_factor": "2.5"}, "routed_scaling_factor"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "experts"),
    ],
)
def test_errors_of_glm_4_5_name_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_spec({**GLM_4_5, **changes})
