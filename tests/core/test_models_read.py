"""Configs to specs: every family, both spellings of rope, and what is said of a wrong field."""

from __future__ import annotations

import msgspec
import pytest

from core.errors import ModelError
from core.models import ClampedGate, ModelSpec, MoeSpec, RopeSpec, read_spec
from core.models.registry import FAMILIES
from tests.rigs.model_config import BASE, GPT_OSS_20B


def spec(architecture: str, **changes: object) -> ModelSpec:
    return read_spec({**BASE, "architectures": [architecture], **changes})


def test_llama_reads_sizes_and_defaults() -> None:
    got = spec("LlamaForCausalLM", torch_dtype="bfloat16")
    assert (got.heads, got.kv_heads, got.head_dim) == (4, 2, 16)
    assert got.dtype == "bfloat16"
    assert not (got.tied or got.qkv_bias or got.out_bias or got.qk_norm or got.moe or got.window(0))


def test_activations_have_other_names_in_transformers() -> None:
    assert spec("LlamaForCausalLM", hidden_act="swish").activation == "silu"
    assert spec("LlamaForCausalLM", hidden_act="gelu_new").activation == "gelu_pytorch_tanh"


def test_missing_kv_heads_means_one_per_head() -> None:
    assert spec("LlamaForCausalLM", num_key_value_heads=None).kv_heads == 4


def test_biases_differ_by_family() -> None:
    llama = spec("LlamaForCausalLM", attention_bias=True)
    qwen = spec("Qwen2ForCausalLM")
    assert (llama.qkv_bias, llama.out_bias) == (True, True)
    assert (qwen.qkv_bias, qwen.out_bias) == (True, False)


def test_qwen3_norms_heads_of_128() -> None:
    assert spec("Qwen3ForCausalLM").head_dim == 128
    assert spec("Qwen3ForCausalLM").qk_norm


def test_mistral_window_null_is_not_absent() -> None:
    assert spec("MistralForCausalLM", sliding_window=None).window(0) == 0
    assert spec("MistralForCausalLM").window(3) == 4096
    assert spec("MistralForCausalLM", sliding_window=8).window(0) == 8


def test_qwen_window_needs_its_switch() -> None:
    assert spec("Qwen2ForCausalLM", sliding_window=8, max_window_layers=0).window(3) == 0
    windowed = spec("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert [windowed.window(i) for i in range(4)] == [0, 0, 8, 8]
    named = spec(
        "Qwen3ForCausalLM",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    assert [named.window(i) for i in range(4)] == [8, 0, 8, 0]


def test_sparse_layers_follow_step_and_list() -> None:
    moe = spec("Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[3], num_local_experts=16)
    assert moe.moe is not None and moe.moe.experts == 16
    assert moe.moe.layers == {1}
    assert spec("LlamaForCausalLM").moe is None


MIXTRAL_8X7B: dict[str, object] = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
"""Config of mistralai/Mixtral-8x7B-v0.1 on the hub, as are the next two."""
PHI_4: dict[str, object] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "bos_token_id": 100257,
    "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17920,
    "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 100352,
}  # fmt: skip
SMOLLM3: dict[str, object] = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 65536, "mlp_bias": False,
    "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip


GRANITE: dict[str, object] = {
    "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
    "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8.0, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49159,
}  # fmt: skip
"""Config of ibm-granite/granite-3.3-2b-instruct on the hub."""


def test_a_config_of_granite() -> None:
    got = read_spec(GRANITE)
    assert (got.embedding_scale, got.residual_scale, got.logits_scale) == (12.0, 0.22, 0.125)
    assert got.softmax_scale == 1 / 64 and spec("LlamaForCausalLM").softmax_scale == 0.25
    assert got.num_parameters() == pytest.approx(2.534e9, rel=0.001)


QWEN15_MOE: dict[str, object] = {
    "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
    "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
"""Config of Qwen/Qwen1.5-MoE-A2.7B on the hub."""


def test_a_config_of_qwen15_moe() -> None:
    got = read_spec(QWEN15_MOE)
    assert got.moe is not None and (got.moe.experts, got.moe.shared) == (60, 5632) and got.qkv_bias
    assert got.num_parameters() == pytest.approx(14.316e9, rel=0.001)
    slides = read_spec({**QWEN15_MOE, "use_sliding_window": True})
    assert [slides.window(i) for i in (0, 1, 20, 22)] == [32768, 0, 32768, 0]
    with pytest.raises(ModelError, match="layer_types"):
        read_spec({**QWEN15_MOE, "use_sliding_window": True, "layer_types": ["full_attention"]})


OLMO_2: dict[str, object] = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": False, "vocab_size": 100352,
}  # fmt: skip
"""Config of allenai/OLMo-2-1124-7B-Instruct; the next is that of allenai/Olmo-3-7B-Instruct."""
OLMO_3: dict[str, object] = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "dtype": "bfloat16", "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "max_position_embeddings": 65536,
    "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "use_cache": False,
    "vocab_size": 100278,
}  # fmt: skip


def test_a_config_of_olmo_2() -> None:
    got = read_spec(OLMO_2)
    assert got.norms == "behind" and got.qk_norm == "all"
    assert not (got.qkv_bias or got.out_bias or got.window(0))
    assert (got.rope.kind, got.rope.theta, got.norm_eps, got.context_length) == ("none", 5e5, 1e-6, 4096)
    assert got.num_parameters() == pytest.approx(7.299e9, rel=0.001)


def test_a_config_of_olmo_3() -> None:
    got = read_spec(OLMO_3)
    assert got.norms == "behind" and got.qk_norm == "all" and got.context_length == 65536
    assert [got.window(i) for i in range(5)] == [4096, 4096, 4096, 0, 4096]
    assert (got.rope.kind, got.rope.factor, got.rope.original_max) == ("yarn", 8.0, 8192)
    assert got.window_rope == RopeSpec(theta=5e5)
    assert got.num_parameters() == pytest.approx(7.298e9, rel=0.001)
    without = {name: value for name, value in OLMO_3.items() if name not in ("layer_types", "rope_theta")}
    assert read_spec(without) == got
    slower = read_spec({**OLMO_3, "rope_theta": 1e6})
    assert slower.rope.theta == 1e6 and slower.window_rope == RopeSpec(theta=1e6)


def test_olmo_3_of_transformers_5_has_a_rope_for_each_type() -> None:
    scaling = OLMO_3["rope_scaling"]
    assert isinstance(scaling, dict)
    ropes = {
        "full_attention": {"rope_theta": 500000, **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
    }
    later = {name: value for name, value in OLMO_3.items() if not name.startswith("rope_")}
    assert read_spec({**later, "rope_parameters": ropes}) == read_spec(OLMO_3)
    assert read_spec({**OLMO_3, "rope_scaling": None}).window_rope is None  # one rotation for all layers


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 32}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_scaling: rope_type"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "2d"}}}, "rope_parameters: rope_type"),
    ],
)
def test_errors_of_olmo_3_name_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_spec({**OLMO_3, **changes})


GEMMA_2: dict[str, object] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "initializer_range": 0.02,
    "intermediate_size": 36864, "max_position_embeddings": 8192, "model_type": "gemma2",
    "num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16, "pad_token_id": 0,
    "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "sliding_window_size": 4096, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
"""Config of google/gemma-2-27b-it; the next are those of google/gemma-3-1b-it and gemma-3-4b-it."""
GEMMA_3: dict[str, object] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
GEMMA_3_4B: dict[str, object] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
        "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


def test_a_config_of_gemma_2() -> None:
    got = read_spec(GEMMA_2)
    assert got.norms == "both" and got.norm_offset == 1 and got.tied and not got.qk_norm
    assert (got.activation, got.attention_cap, got.logits_cap) == ("gelu_pytorch_tanh", 50.0, 30.0)
    assert (got.softmax_scale, got.table_scale) == (1 / 12, 4608**0.5)
    assert [got.window(i) for i in range(4)] == [4096, 0, 4096, 0] and got.window_rope is None
    assert got.num_parameters() == pytest.approx(27.227e9, rel=0.001)
    uncapped = read_spec({**GEMMA_2, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (uncapped.attention_cap, uncapped.logits_cap) == (0.0, 0.0)


def test_a_config_of_gemma_3() -> None:
    got = read_spec(GEMMA_3)
    assert got.norms == "both" and got.qk_norm == "head" and (got.attention_cap, got.logits_cap) == (0, 0)
    assert [i for i in range(26) if not got.window(i)] == [5, 11, 17, 23] and got.window(0) == 512
    assert (got.rope, got.window_rope) == (RopeSpec(theta=1e6), RopeSpec(theta=1e4))
    assert (got.context_length, got.softmax_scale) == (32768, 1 / 16)
    assert got.num_parameters() == pytest.approx(1.0e9, rel=0.001)
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
    later = {name: value for name, value in GEMMA_3.items() if name not in old}
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)]
    assert read_spec({**later, "rope_parameters": ropes, "layer_types": kinds}) == got


def test_a_config_of_gemma_3_with_a_vision_tower() -> None:
    got = read_spec(GEMMA_3_4B)
    assert (got.heads, got.kv_heads, got.head_dim, got.vocab_size) == (8, 4, 256, 262208)
    assert (got.layers, got.window(0), got.dtype, got.context_length) == (34, 1024, "bfloat16", 131072)
    assert (got.rope.kind, got.rope.factor, got.window_rope) == ("linear", 8.0, RopeSpec(theta=1e4))
    assert got.num_parameters() == pytest.approx(3.88e9, rel=0.001)


@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
def test_the_outer_config_says_whether_tables_are_tied(outer: bool | None, inner: bool | None) -> None:
    text = GEMMA_3_4B["text_config"]
    assert isinstance(text, dict)
    said = [{} if tied is None else {"tie_word_embeddings": tied} for tied in (outer, inner)]
    got = read_spec({**GEMMA_3_4B, **said[0], "text_config": {**text, **said[1]}})
    assert got.tied == (outer if outer is not None else inner is not False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"hidden_activation": "quick_gelu"}, "hidden_activation"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"rope_local_base_freq": "slow"}, "rope_local_base_freq"),
        ({"sliding_window": None}, "sliding_window"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_errors_of_gemma_3_name_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_spec({**GEMMA_3, **changes})


def test_a_config_of_mixtral() -> None:
    got = read_spec(MIXTRAL_8X7B)
    assert got.moe is not None and got.moe.layers == frozenset(range(32))
    assert (got.moe.experts, got.moe.per_token, got.moe.intermediate) == (8, 2, 14336)
    assert got.moe.norm_topk and not got.window(0)
    assert got.num_parameters() == pytest.approx(46.7e9, rel=0.001)


GPT_OSS_120B = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
"""openai/gpt-oss-120b's."""


def test_configs_of_gpt_oss() -> None:
    got = read_spec(GPT_OSS_20B)
    assert got.sinks and got.qkv_bias and got.out_bias and not got.tied
    assert [got.window(layer) for layer in (0, 1, 22, 23)] == [128, 0, 128, 0]
    assert got.moe == MoeSpec(
        experts=32,
        per_token=4,
        intermediate=2880,
        norm_topk=True,
        layers=frozenset(range(24)),
        bias=True,
        clamped=ClampedGate(alpha=1.702, limit=7.0),
        stacked=True,
    )
    assert (got.rope.kind, got.rope.theta, got.rope.factor) == ("yarn", 150000.0, 32.0)
    assert not got.rope.truncate and got.context_length == 131072
    assert got.stored_mxfp4 is not None and got.stored_mxfp4.has("model.layers.3.mlp.experts")
    assert got.num_parameters() == pytest.approx(20.9e9, rel=0.002)
    large = read_spec(GPT_OSS_120B)
    assert large.num_parameters() == pytest.approx(116.8e9, rel=0.001)
    assert large.window(34) == 128
    # What the class's defaults are.
    silent = (
        "layer_types", "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit", "head_dim",
        "attention_bias", "num_experts_per_tok", "quantization_config",
    )  # fmt: skip
    short = read_spec({name: value for name, value in GPT_OSS_20B.items() if name not in silent})
    assert short == msgspec.structs.replace(got, stored_mxfp4=None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be silu, which its experts clamp"),
        ({"sliding_window": None}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "awq is not served"),
        (
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["("]}},
            "modules_to_not_convert .* regular expression",
        ),
    ],
)
def test_errors_of_gpt_oss_name_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_spec({**GPT_OSS_20B, **changes})


def test_mxfp4_is_of_gpt_oss_alone() -> None:
    with pytest.raises(ModelError, match="'mxfp4' is not served of Qwen3MoeForCausalLM"):
        spec("Qwen3MoeForCausalLM", quantization_config={"quant_method": "mxfp4"})


@pytest.mark.parametrize("architecture", sorted(name for name, one in FAMILIES.items() if one.text_config))
@pytest.mark.parametrize("method", ["mxfp4", "bitsandbytes"])
def test_a_language_model_is_refused_as_one_without_a_tower(architecture: str, method: str) -> None:
    """Both are refused in the same words, whatever class the language model calls itself."""
    quantised = {**BASE, "quantization_config": {"quant_method": method}}
    with pytest.raises(ModelError, match=f"config.json: quantization_config: quant_method '{method}'") as top:
        read_spec({**quantised, "architectures": [architecture]})
    text = {**quantised, "architectures": ["GptOssForCausalLM"]}
    with pytest.raises(ModelError) as nested:
        read_spec({"architectures": [architecture], "text_config": text})
    assert str(nested.value) == str(top.value)


def test_a_config_of_phi_4() -> None:
    got = read_spec(PHI_4)
    assert (got.heads, got.kv_heads, got.head_dim, got.norm_eps) == (40, 10, 128, 1e-5)
    assert (got.rope.kind, got.rope.theta, got.window(0), got.context_length) == ("none", 250000, 0, 16384)
    assert got.num_parameters() == pytest.approx(14.66e9, rel=0.001)
    assert read_spec({**PHI_4, "sliding_window": 2047}).window(39) == 2047
    scaling = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    long = read_spec({**PHI_4, "rope_scaling": scaling, "original_max_position_embeddings": 4096})
    assert (long.rope.kind, long.rope.original_max, long.rope.long) == ("longrope", 4096, True)
    assert long.rope.attention_factor == pytest.approx(
        (1 + 1 / 6) ** 0.5
    )  # 4 times as long: log 4 / log 4096
    for wrong in ({"short_factor": None}, {"long_factor": [1.0, "2"]}, {"long_factor": [1.0] * 63}):
        with pytest.raises(ModelError, match="rope_scaling"):
            read_spec({**PHI_4, "rope_scaling": scaling | wrong})


def test_a_config_of_smollm3() -> None:
    got = read_spec(SMOLLM3)
    assert got.nope_layers == frozenset(range(3, 36, 4)) and got.tied and not got.window(3)
    assert got.num_parameters() == pytest.approx(3.075e9, rel=0.001)
    without = {name: value for name, value in SMOLLM3.items() if name != "no_rope_layers"}
    assert read_spec(without).nope_layers == got.nope_layers
    slides = read_spec({**SMOLLM3, "use_sliding_window": True, "sliding_window": 64})
    assert (slides.window(2), slides.window(3)) == (0, 64)
    with pytest.raises(ModelError, match="no_rope_layers"):
        read_spec({**SMOLLM3, "no_rope_layers": [1, 0]})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": YARN},
        {"rope_theta": 5e5, "rope_scaling": {**YARN, "type": "yarn"}},
        {"rope_parameters": {**YARN, "rope_theta": 5e5}},
        {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 5e5}}},
    ],
)
def test_rope_is_read_in_every_spelling(spelling: dict[str, object]) -> None:
    rope = spec("LlamaForCausalLM", **spelling).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max) == ("yarn", 5e5, 4.0, 250)
    assert rope.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 1000),
        ({"type": "linear", "factor": 2.5}, 2500),
        ({"type": "dynamic", "factor": 2.0}, 2000),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1000),
    ],
)
def test_context_counts_what_scaling_adds(scaling: dict[str, object] | None, context: int) -> None:
    assert spec("LlamaForCausalLM", rope_scaling=scaling).context_length == context


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers must be at most 10,000"),
        ({"head_dim": 10**400}, "head_dim must be a positive integer of at most 64 bits"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number that float32 can hold"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number that float32 can hold"),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps must be a positive number that float32 can hold"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, "rope_scaling: factor must be .* float32"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [10**400]}},
            "rope_scaling: short_factor must be a list of positive numbers",
        ),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": "swiglu"}, "hidden_act"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"rope_scaling": {"type": "su2"}}, "rope_scaling: type"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling: short_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            r"short_factor and long_factor of rope_scaling must have \d+ numbers",
        ),
        ({"head_dim": 7}, r"head_dim 7 and partial_rotary_factor 1 rotate 7 dimensions"),
        ({"head_dim": 16, "partial_rotary_factor": 0.45}, "partial_rotary_factor 0.45 rotate 7 dimensions"),
        ({"head_dim": 16, "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 rotate 24 dimensions"),
        ({"rope_scaling": 3}, "rope_scaling"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_errors_name_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        spec("LlamaForCausalLM", **changes)


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3NextForCausalLM"])
@pytest.mark.parametrize("layers", [[[1]], [{}], [None], ["0"], [True]], ids=str)
def test_dense_layers_are_integers(architecture: str, layers: list[object]) -> None:
    with pytest.raises(ModelError, match="mlp_only_layers must be a list of integers"):
        spec(architecture, mlp_only_layers=layers)


def test_window_layers_must_fit() -> None:
    with pytest.raises(ModelError, match="layer_types"):
        spec("Qwen3ForCausalLM", use_sliding_window=True, layer_types=["full_attention"])


def test_more_experts_per_token_than_experts() -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        spec("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=8)


def test_an_unknown_architecture_is_told_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"Qwen3OmniModel is not supported.*: Qwen3Model"):
        spec("Qwen3OmniModel")
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is not supported; the nearest"):
        spec("T5ForConditionalGeneration")
    with pytest.raises(ModelError, match="architectures"):
        read_spec(BASE)


def test_a_decoder_without_a_family_is_left_to_transformers() -> None:
    """With all of its config but what says nothing of the model: two that differ in it are the same."""
    own = spec(
        "GPT2LMHeadModel", transformers_version="5.0", auto_map={"AutoModel": "x.Y"}, torch_dtype="float16"
    )
    assert (own.implementation, own.dtype) == ("transformers", "float16")
    assert own == spec("GPT2LMHeadModel", torch_dtype="float16") != spec("GPT2LMHeadModel")
    assert spec("LlamaForCausalLM").implementation == "native"
    for wrong in ({"quantization_config": {"quant_method": "fp8"}}, {"is_encoder_decoder": True}):
        with pytest.raises(ModelError, match=next(iter(wrong))):
            spec("CohereForCausalLM", **wrong)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_parameters_are_counted(architecture: str) -> None:
    tied, free = (spec(architecture, tie_word_embeddings=tied) for tied in (True, False))
    head = 64 * 100 if free.task == "generate" else 0
    assert free.num_parameters() - tied.num_parameters() == head
