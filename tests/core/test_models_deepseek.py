"""Configs with experts in groups: those of published models, and what is said of a wrong field."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from core.errors import ConfigError, ModelError
from core.models import LatentSpec, read_spec
from core.models.mtp import mtp_draft
from core.models.spec import W8A8

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
"""Config of zai-org/GLM-4.6 on the hub; the next two differ from it as there."""
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
    assert got.moe.exact_router, "which float32 logits of tiny models do not show"
    assert (got.moe.shared, got.moe.shared_gate, got.moe.groups) == (1536, False, 1)
    assert got.num_parameters() == pytest.approx(353e9, rel=0.01)  # without the layer behind the last


def test_a_config_of_glm_4_5_air() -> None:
    got, larger = read_spec(GLM_4_5_AIR), read_spec(GLM_4_5)
    assert (got.qk_norm, larger.context_length) == ("", 131072)
    assert got.num_parameters() == pytest.approx(107e9, rel=0.01)


DEEPSEEK_V2_LITE: dict[str, object] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
"""Config of deepseek-ai/DeepSeek-V2-Lite on the hub; the next one is that of deepseek-ai/DeepSeek-V3."""
DEEPSEEK_V3: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
KIMI_K2: dict[str, object] = {
    **DEEPSEEK_V3, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "seq_aux": True, "topk_group": 1,
    "vocab_size": 163840,
}  # fmt: skip
"""Config of moonshotai/Kimi-K2-Instruct: DeepSeek V3's but for these."""


def test_a_config_of_deepseek_v2_lite() -> None:
    got = read_spec(DEEPSEEK_V2_LITE)
    assert got.latent == LatentSpec(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    assert (got.heads, got.kv_shape, got.rope_dim, got.context_length) == (16, (1, 576, 512), 64, 163840)
    assert got.rope.attention_factor == 1.0
    assert got.softmax_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert got.moe is not None and got.moe.layers == set(range(1, 27)) and got.more_layers == 0
    assert (got.moe.scores, got.moe.groups, got.moe.shared, got.moe.norm_topk) == ("softmax", 1, 2816, False)
    assert got.num_parameters() == pytest.approx(15.7e9, rel=0.01)


def test_a_config_of_deepseek_v3() -> None:
    got = read_spec(DEEPSEEK_V3)
    assert got.latent is not None and (got.latent.q_rank, got.latent.interleaved) == (1536, True)
    assert got.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert got.moe is not None and (got.moe.groups, got.moe.top_groups, got.moe.scale) == (8, 4, 2.5)
    assert (got.stored_fp8, got.more_layers, got.context_length) == ("blocks", 1, 163840)
    assert got.num_parameters() == pytest.approx(671e9, rel=0.01)


def test_the_layer_that_drafts_for_deepseek_v3() -> None:
    target = read_spec(DEEPSEEK_V3)
    held = W8A8(plain=("lm_head", "model.layers.0.mlp.up_proj", "model.layers.61.mlp.up_proj", "re:.*gate$"))
    got = mtp_draft(replace(target, w8a8=held))
    own = got.decoder
    assert (got.prefix, got.final, own.layers, own.window_layers) == (
        "model.layers.61.",
        True,
        1,
        frozenset(),
    )
    assert own.moe is not None and (own.moe.layers, own.moe.experts) == ({0}, 256)
    assert (own.kv_shape, own.latent) == (target.kv_shape, target.latent)
    assert own.softmax_scale == target.softmax_scale
    assert own.w8a8 is not None
    found = [own.w8a8.has(f"model.layers.0.{name}") for name in ("mlp.up_proj", "mlp.down_proj", "mlp.gate")]
    assert found == [False, True, False]
    excepted = W8A8(plain=(r"re:.*\.layers\.61\..*",))
    assert mtp_draft(replace(target, w8a8=excepted)).decoder.w8a8 is None
    assert own.num_parameters() - own.table_parameters() == pytest.approx(11.5e9, rel=0.01)
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM has no layer for multi-token prediction"):
        mtp_draft(read_spec(KIMI_K2))


def test_a_config_of_kimi_k2() -> None:
    got = read_spec(KIMI_K2)
    assert (got.heads, got.kv_shape, got.context_length) == (64, (1, 576, 512), 131072)
    assert got.moe is not None and (got.moe.experts, got.moe.groups, got.more_layers) == (384, 1, 0)
    assert got.num_parameters() == pytest.approx(1.026e12, rel=0.01)


def test_a_config_of_glm_4_7_flash() -> None:
    """The config has transformers' defaults, which are that model's."""
    sizes = {"hidden_size": 2048, "intermediate_size": 10240, "num_attention_heads": 20, "vocab_size": 154880}
    config = {"architectures": ["Glm4MoeLiteForCausalLM"], "num_hidden_layers": 47, **sizes}
    got = read_spec(config)
    assert got.latent == LatentSpec(kv_rank=512, rope_dim=64, nope_dim=192, value_dim=256, q_rank=768)
    assert got.moe is not None and got.moe.layers == set(range(1, 47)) and got.more_layers == 1
    assert (got.rope.partial, got.norm_eps, got.context_length) == (1.0, 1e-5, 202752)
    assert got.num_parameters() == pytest.approx(30e9, rel=0.03)
    with pytest.raises(ModelError, match="mlp_layer_types must be a list of dense and sparse, one per layer"):
        read_spec({**config, "mlp_layer_types": ["dense"]})
    with pytest.raises(ModelError, match="mlp_layer_types must be a list of dense and sparse, one per layer"):
        read_spec({**config, "mlp_layer_types": [["dense"]] * 47})


def test_scores_are_scaled_whatever_stretches_rope() -> None:
    """Scores are scaled by mscale_all_dim, as in transformers; 0 is none."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
    by = (0.1 * math.log(40) + 1) ** 2
    for scaling, scores in (
        ({**yarn, "mscale_all_dim": 0}, 1.0),
        ({**yarn, "mscale_all_dim": 1.0}, by),
        ({"type": "linear", "factor": 40, "mscale_all_dim": 1.0}, by),
        ({"type": "linear", "factor": 40}, 1.0),
    ):
        got = read_spec({**DEEPSEEK_V3, "rope_scaling": scaling})
        assert got.softmax_scale == pytest.approx(192**-0.5 * scores), scaling
    assert read_spec({**DEEPSEEK_V3, "rope_scaling": {**yarn, "mscale_all_dim": 0}}).rope.attention_factor > 1
    with pytest.raises(ModelError, match="mscale_all_dim must be a positive number"):
        read_spec({**DEEPSEEK_V3, "rope_scaling": {**yarn, "mscale_all_dim": -1}})


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func must be sigmoid"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method must be noaux_tc"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        (DEEPSEEK_V3, {"kv_lora_rank": "512"}, "kv_lora_rank"),
        (DEEPSEEK_V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func must be softmax"),
        (DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy"),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob must be false"),
        (DEEPSEEK_V2_LITE, {"mlp_bias": True}, "mlp_bias must be false"),
        (DEEPSEEK_V3, {"num_nextn_predict_layers": 2**40}, "num_nextn_predict_layers must be at most 10,000"),
    ],
)
def test_errors_of_deepseek_name_the_field(
    config: dict[str, object], changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        read_spec({**config, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 3}, "n_group must be a divisor of n_routed_experts"),
        ({"n_group": 160}, "n_group must be"),
        ({"n_group": 8, "topk_group": 9}, "topk_group must be at most n_group"),
        ({"n_group": 40, "topk_group": 1}, "num_experts_per_tok must be at most .* groups .4."),
        ({"routed_scaling_factor": "2.5"}, "routed_scaling_factor"),
    ],
)
def test_errors_of_glm_4_5_name_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_spec({**GLM_4_5, **changes})
