"""Hugging Face configs to `ModelSpec`, one small function per family.

Defaults are those of the family's config class in transformers: a published config may leave out
whatever equals them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from core.errors import ModelError
from core.models.fields import Fields
from core.models.quant import SERVED, fp8_scaling, read_integers, read_mxfp4
from core.models.rope import read_rope, read_ropes
from core.models.spec import W8A8, ClampedGate, Int4, ModelSpec, MoeSpec

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_RENAMED_ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh", "gelu_python": "gelu", "swish": "silu"}
"""Other names that transformers has for the same functions."""
MOST_LAYERS = 10_000
"""A config that says more is broken, and sets of its layers would take all memory."""
DTYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING = "full_attention", "sliding_attention"


class Defaults(NamedTuple):
    """A family's defaults for what its config leaves out. `head_dim` 0: hidden_size / num_attention_heads."""

    max_position: int
    head_dim: int = 0
    norm_eps: float = 1e-6
    theta: float = 10000.0
    tied: bool = False


def llama(fields: Fields) -> ModelSpec:
    """LlamaForCausalLM: one switch puts a bias on all four attention projections."""
    return _llama(fields, Defaults(2048))


def _llama(fields: Fields, defaults: Defaults) -> ModelSpec:
    bias = fields.flag("attention_bias")
    return common(fields, defaults, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def granite(fields: Fields) -> ModelSpec:
    """GraniteForCausalLM: Llama with four multipliers."""
    return msgspec.structs.replace(
        llama(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logits_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def smollm3(fields: Fields) -> ModelSpec:
    """SmolLM3ForCausalLM: Llama in which every fourth layer does not rotate. A window is for those alone."""
    spec = _llama(fields, Defaults(32768, theta=2000000.0, tied=True))
    rotates = fields.array("no_rope_layers")  # 1 where a layer rotates, despite the name
    if not rotates:
        interval = fields.size("no_rope_layer_interval", 4)
        rotates = [int((i + 1) % interval != 0) for i in range(spec.layers)]
    if len(rotates) != spec.layers:
        raise fields.wrong("no_rope_layers", f"one entry per layer ({spec.layers})")
    still = frozenset(i for i, one in enumerate(rotates) if not one)
    if fields.flag("use_sliding_window") and fields.has("sliding_window"):
        spec = _slide(spec, fields.size("sliding_window"), still)
    return msgspec.structs.replace(spec, nope_layers=still)


def phi3(fields: Fields) -> ModelSpec:
    """Phi3ForCausalLM, of Phi-3 and Phi-4: a checkpoint fuses q, k and v, and gate and up."""
    spec = common(fields, Defaults(4096, norm_eps=1e-5))
    if not fields.has("sliding_window"):
        return spec
    return _slide(spec, fields.size("sliding_window"), frozenset(range(spec.layers)))


def mixtral(fields: Fields) -> ModelSpec:
    """MixtralForCausalLM: every MLP is sparse, and the chosen experts' weights sum to 1."""
    spec = common(fields, Defaults(131072, norm_eps=1e-5, theta=1000000.0))
    every = frozenset(range(spec.layers))
    if fields.has("sliding_window"):
        spec = _slide(spec, fields.size("sliding_window"), every)
    moe = MoeSpec(
        experts=_experts(fields, 8),
        per_token=fields.size("num_experts_per_tok", 2),
        intermediate=spec.intermediate,
        norm_topk=True,
        layers=every,
    )
    return with_experts(fields, spec, moe)


_GPT_OSS: Mapping[str, object] = {
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_GPT_OSS_ROPE: Mapping[str, object] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def gpt_oss(fields: Fields) -> ModelSpec:
    """GptOssForCausalLM: sinks, a window in every second layer, experts with biases and a clamped gate."""
    fields = fields.over(_GPT_OSS)
    if not fields.has("rope_scaling") and not fields.has("rope_parameters"):
        fields = fields.over({"rope_parameters": _GPT_OSS_ROPE})
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.wrong("hidden_act", "silu, which its experts clamp")
    bias = fields.flag("attention_bias", True)
    defaults = Defaults(131072, head_dim=64, norm_eps=1e-5, theta=150000.0)
    spec = common(fields, defaults, qkv_bias=bias, out_bias=bias, sinks=True)
    moe = MoeSpec(
        experts=_experts(fields, 128),
        per_token=fields.size("num_experts_per_tok"),
        intermediate=spec.intermediate,
        norm_topk=True,  # the softmax is over the chosen ones
        layers=frozenset(range(spec.layers)),
        bias=True,
        clamped=ClampedGate(alpha=fields.number("swiglu_alpha"), limit=fields.number("swiglu_limit")),
        stacked=True,
    )
    return with_experts(fields, _slide_mostly(fields, spec, 2), moe)


def olmo2(fields: Fields) -> ModelSpec:
    """Olmo2ForCausalLM: norms behind attention and MLP, and over all heads of queries or keys together."""
    return _olmo(fields, 10000.0)


def olmo3(fields: Fields) -> ModelSpec:
    """Olmo3ForCausalLM: OLMo 2 in which three layers of four slide. Only the others' rope is scaled."""
    # transformers 4 reads it for all layers; 5 forgets it for those that slide.
    theta = fields.number("rope_theta", 500000.0)
    positions = fields.size("max_position_embeddings", 2048)
    rope, window_rope = read_ropes(fields, positions, (theta, theta))
    spec = _olmo(fields, theta, rope=rope, window_rope=None if window_rope == rope else window_rope)
    return _slide_mostly(fields, spec, 4)


def _olmo(fields: Fields, theta: float, **facts: Any) -> ModelSpec:
    bias = fields.flag("attention_bias")
    defaults = Defaults(2048, norm_eps=1e-5, theta=theta)
    return common(fields, defaults, qkv_bias=bias, out_bias=bias, qk_norm="all", norms="behind", **facts)


_GEMMA: Mapping[str, object] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_GEMMA_2: Mapping[str, object] = {
    **_GEMMA,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
    "vocab_size": 256000,
}
_GEMMA_3: Mapping[str, object] = {**_GEMMA, "max_position_embeddings": 131072, "vocab_size": 262208}
"""Defaults for what the configs leave out; many of Gemma 3 leave out even the number of heads."""


def gemma2(fields: Fields) -> ModelSpec:
    """Gemma2ForCausalLM: attention and MLP between norms, soft caps, a window in every second layer."""
    fields = fields.over(_GEMMA_2)
    cap = _cap(fields, "attn_logit_softcapping")
    return _slide_mostly(fields, _gemma(fields, attention_cap=cap), 2)


def gemma3(fields: Fields) -> ModelSpec:
    """Gemma3ForCausalLM, and the language model of Gemma3ForConditionalGeneration: Gemma 2 with normed heads
    and without caps. Five layers of six slide, with a rope of their own."""
    fields = fields.over(_GEMMA_3)
    if fields.has("attn_logit_softcapping"):  # transformers reads over it
        raise fields.wrong("attn_logit_softcapping", "null")
    positions = fields.size("max_position_embeddings")
    thetas = fields.number("rope_theta", 1e6), fields.number("rope_local_base_freq", 1e4)
    rope, window_rope = read_ropes(fields, positions, thetas)
    if rope.kind == "linear":  # the positions are those with scaling, not those before it
        rope = msgspec.structs.replace(rope, original_max=int(positions / rope.factor))
    spec = _gemma(fields, qk_norm="head", rope=rope, window_rope=window_rope)
    return _slide_mostly(fields, spec, fields.size("sliding_window_pattern", 6))


def _gemma(fields: Fields, **facts: Any) -> ModelSpec:
    if fields.flag("use_bidirectional_attention"):
        raise fields.wrong("use_bidirectional_attention", "false")
    bias = fields.flag("attention_bias")
    spec = common(fields, Defaults(8192), qkv_bias=bias, out_bias=bias, **facts)
    return msgspec.structs.replace(
        spec,
        activation=activation_of(fields, "hidden_activation"),
        norms="both",
        norm_offset=1.0,
        table_scale=math.sqrt(spec.hidden),
        attention_scale=1.0 / math.sqrt(fields.number("query_pre_attn_scalar")),
        logits_cap=_cap(fields, "final_logit_softcapping"),
    )


def _cap(fields: Fields, name: str) -> float:
    return fields.number(name) if fields.has(name) else 0.0


def mistral(fields: Fields) -> ModelSpec:
    """MistralForCausalLM: every layer slides; null means no window, absent means 4096."""
    spec = common(fields, Defaults(131072))
    if fields.null("sliding_window"):
        return spec
    return _slide(spec, fields.size("sliding_window", 4096), frozenset(range(spec.layers)))


def qwen2(fields: Fields) -> ModelSpec:
    """Qwen2ForCausalLM: biases on q, k and v only."""
    return _qwen_window(fields, common(fields, Defaults(32768), qkv_bias=True))


def qwen2_moe(fields: Fields) -> ModelSpec:
    """Qwen2MoeForCausalLM: a shared expert; of windows, where they are on, every second layer has one."""
    bias = fields.flag("qkv_bias", True)
    spec = common(fields, Defaults(32768), qkv_bias=bias)
    if fields.flag("use_sliding_window"):
        first = fields.count("max_window_layers", 28)
        kinds = _layer_types(fields, spec) or [
            SLIDING if i % 2 == 0 and i < first else FULL for i in range(spec.layers)
        ]
        spec = _slide(spec, fields.size("sliding_window", 4096), _sliding(kinds))
    return with_qwen_experts(fields, spec, 60)


def with_qwen_experts(fields: Fields, spec: ModelSpec, experts: int) -> ModelSpec:
    """`spec` with routed experts, by default so many, beside one for all tokens."""
    moe = MoeSpec(
        experts=_experts(fields, experts),
        per_token=fields.size("num_experts_per_tok", 4),
        intermediate=fields.size("moe_intermediate_size", 1408),
        norm_topk=fields.flag("norm_topk_prob"),
        layers=_sparse_layers(fields, spec),
        shared=fields.size("shared_expert_intermediate_size", 5632),
    )
    return with_experts(fields, spec, moe)


def qwen3(fields: Fields) -> ModelSpec:
    """Qwen3ForCausalLM: normed query and key heads, head_dim 128 unless given."""
    bias = fields.flag("attention_bias")
    spec = common(fields, Defaults(32768, head_dim=128), qkv_bias=bias, out_bias=bias, qk_norm="head")
    return _qwen_window(fields, spec)


def qwen3_moe(fields: Fields) -> ModelSpec:
    """Qwen3MoeForCausalLM: Qwen3 with routed experts, without a shared one."""
    bias = fields.flag("attention_bias")
    spec = common(fields, Defaults(32768), qkv_bias=bias, out_bias=bias, qk_norm="head")
    if fields.flag("use_sliding_window"):
        spec = _slide(spec, fields.size("sliding_window", 4096), frozenset(range(spec.layers)))
    moe = MoeSpec(
        experts=_experts(fields, 128),
        per_token=fields.size("num_experts_per_tok", 8),
        intermediate=fields.size("moe_intermediate_size", 768),
        norm_topk=fields.flag("norm_topk_prob"),
        layers=_sparse_layers(fields, spec),
    )
    return with_experts(fields, spec, moe)


def _sparse_layers(fields: Fields, spec: ModelSpec) -> frozenset[int]:
    """The sparse layers of Qwen's models: layer i where (i + 1) divides by the step and no list says
    dense."""
    step = fields.size("decoder_sparse_step", 1)
    dense = set(fields.integers("mlp_only_layers"))
    return frozenset(i for i in range(spec.layers) if i not in dense and (i + 1) % step == 0)


def _experts(fields: Fields, default: int) -> int:
    # transformers 5 renamed num_experts to num_local_experts and reads both.
    return fields.size("num_experts" if fields.has("num_experts") else "num_local_experts", default)


def with_experts(fields: Fields, spec: ModelSpec, moe: MoeSpec) -> ModelSpec:
    """`spec` with these experts. Raises `ModelError` where a token would have more than there are."""
    if moe.per_token > moe.experts:
        raise fields.wrong("num_experts_per_tok", f"at most the number of experts ({moe.experts})")
    return msgspec.structs.replace(spec, moe=moe)


def common(fields: Fields, defaults: Defaults, **facts: Any) -> ModelSpec:
    """A spec from the fields that all families spell alike, with further `facts`."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if not fields.has("head_dim") and not defaults.head_dim and hidden % heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({heads})")
    if (layers := fields.size("num_hidden_layers")) > MOST_LAYERS:
        raise fields.wrong("num_hidden_layers", f"at most {MOST_LAYERS:,}")
    positions = fields.size("max_position_embeddings", defaults.max_position)
    if "rope" not in facts:
        facts["rope"] = read_rope(fields, positions, defaults.theta)
    stored, share = _stored_integers(fields), fields.group("quantization_config").get("q4_share")
    return ModelSpec(
        architecture=architecture_of(fields),
        vocab_size=fields.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.size("head_dim", defaults.head_dim or hidden // heads),
        intermediate=fields.size("intermediate_size"),
        activation=activation_of(fields, "hidden_act", "silu"),
        norm_eps=fields.number("rms_norm_eps", defaults.norm_eps),
        tied=fields.flag("tie_word_embeddings", defaults.tied),
        max_position=positions,
        dtype=dtype_of(fields),
        stored_fp8=fp8_scaling(fields.group("quantization_config")),
        stored_int4=stored if isinstance(stored, Int4) else None,
        stored_w8a8=stored if isinstance(stored, W8A8) else None,
        stored_mxfp4=read_mxfp4(fields.group("quantization_config")),
        stored_gguf=_is_gguf(fields),
        q4_share=share if isinstance(share, float) else 0.0,
        **facts,
    )


def _stored_integers(fields: Fields) -> Int4 | W8A8 | None:
    if not fields.has("quantization_config") or _is_gguf(fields):
        return None
    config = fields.group("quantization_config")
    return None if read_mxfp4(config) else read_integers(config)


def _is_gguf(fields: Fields) -> bool:
    """Whether it is the config of a .gguf file whose matrices are quantised (`core.models.gguf`)."""
    return fields.group("quantization_config").get("quant_method") == "gguf"


def refuse_quantised(fields: Fields, int4: bool = True, mxfp4: bool = False) -> None:
    """Raise `ModelError` for safetensors that are quantised to what cannot be read. `int4`, `mxfp4`: 4 bits
    are served so of this architecture; 8 bits are of all."""
    where, name = "config.json: quantization_config", architecture_of(fields)
    if not mxfp4 and read_mxfp4(fields.group("quantization_config")):
        raise ModelError(f"{where}: quant_method 'mxfp4' is not served of {name}. {SERVED}")
    found = _stored_integers(fields)
    if isinstance(found, Int4) and not int4:
        raise ModelError(
            f"{where}: {found.format} is not served of {name}: encoders and gpt-oss (but for mxfp4) are "
            "not supported in 4 bits. Use an FP8 or the unquantised checkpoint."
        )


def activation_of(fields: Fields, name: str, default: str = "") -> str:
    """The MLP's activation, by its `name` in the config."""
    activation = fields.text(name, default)
    activation = _RENAMED_ACTIVATIONS.get(activation, activation)
    if activation not in ACTIVATIONS:
        raise fields.wrong(name, "one of " + ", ".join(ACTIVATIONS))
    return activation


def dtype_of(fields: Fields) -> str:
    """The checkpoint's dtype, under its old or its new name."""
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(name, "float32")
    if dtype not in DTYPES:
        raise fields.wrong(name, "one of " + ", ".join(DTYPES))
    return dtype


def architecture_of(fields: Fields) -> str:
    """The class name a checkpoint gives itself."""
    names = fields.array("architectures")
    if not names or not isinstance(names[0], str):
        raise fields.wrong("architectures", "a list with the model's class name")
    return names[0]


def _slide(spec: ModelSpec, window: int, layers: frozenset[int]) -> ModelSpec:
    return msgspec.structs.replace(spec, sliding_window=window, window_layers=layers)


def _slide_mostly(fields: Fields, spec: ModelSpec, period: int) -> ModelSpec:
    """The layers that `layer_types` names slide; without it all but every one in `period`."""
    kinds = _layer_types(fields, spec) or [SLIDING if (i + 1) % period else FULL for i in range(spec.layers)]
    if fields.null("sliding_window"):
        raise fields.wrong("sliding_window", "a positive integer")
    return _slide(spec, fields.size("sliding_window", 4096), _sliding(kinds))


def _layer_types(fields: Fields, spec: ModelSpec) -> list[object]:
    """What each layer attends to, FULL or SLIDING; empty where the config does not list it."""
    kinds = fields.array("layer_types")
    if kinds and len(kinds) != spec.layers:
        raise fields.wrong("layer_types", f"one entry per layer ({spec.layers})")
    if not all(kind in (FULL, SLIDING) for kind in kinds):
        raise fields.wrong("layer_types", f"a list of {FULL} and {SLIDING}")
    return kinds


def _sliding(kinds: Sequence[object]) -> frozenset[int]:
    return frozenset(i for i, kind in enumerate(kinds) if kind == SLIDING)


def _qwen_window(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Dense Qwen: off by default; the layers from `max_window_layers` on, or those `layer_types` names."""
    if not fields.flag("use_sliding_window"):
        return spec
    window = fields.size("sliding_window", 4096)
    if kinds := _layer_types(fields, spec):
        return _slide(spec, window, _sliding(kinds))
    first = fields.count("max_window_layers", 28)
    return _slide(spec, window, frozenset(range(first, spec.layers)))
