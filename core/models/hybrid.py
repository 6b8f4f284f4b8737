"""Configs of hybrids: most of their layers have linear attention, the others attend to keys and values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from core.models.fields import Fields
from core.models.read import FULL, MOST_LAYERS, Defaults, common, with_qwen_experts
from core.models.spec import LinearSpec, ModelSpec

LINEAR = "linear_attention"

_SIZES: Mapping[str, object] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}
_NEXT: Mapping[str, object] = {
    **_SIZES,
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
}
_MOE: Mapping[str, object] = {
    **_NEXT,
    "intermediate_size": 512,  # of no layer: all MLPs are sparse
    "num_experts_per_tok": 8,
}


def qwen3_next(fields: Fields) -> ModelSpec:
    """Qwen3NextForCausalLM: three layers of four have linear attention, nearly all MLPs experts."""
    fields = fields.over(_NEXT)
    return with_qwen_experts(fields, _hybrid(fields, mixed=True), 512)


def qwen3_5(fields: Fields) -> ModelSpec:
    """Qwen3_5ForCausalLM, and the language model of Qwen3_5ForConditionalGeneration: dense, with projections
    that are not mixed. Text has one position alone of those in an image's grid, so that its rope is plain."""
    return _hybrid(fields.over(_SIZES), mixed=False)


def qwen3_5_moe(fields: Fields) -> ModelSpec:
    """Qwen3_5MoeForCausalLM and the language model of Qwen3_5MoeForConditionalGeneration."""
    fields = fields.over(_MOE)
    return with_qwen_experts(fields, _hybrid(fields, mixed=False), 256)


def _hybrid(fields: Fields, mixed: bool) -> ModelSpec:
    bias = fields.flag("attention_bias")
    if not fields.flag("attn_output_gate", True):
        raise fields.wrong("attn_output_gate", "true")
    if fields.text("output_gate_type", "swish") not in ("swish", "silu"):
        raise fields.wrong("output_gate_type", "swish")
    if fields.text("mamba_ssm_dtype", "float32") != "float32":
        raise fields.wrong("mamba_ssm_dtype", "float32")
    spec = common(
        fields,
        Defaults(32768),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        norm_offset=1.0,
        output_gate=True,
    )
    linear = LinearSpec(
        layers=_linear_layers(fields, spec.layers),
        key_heads=fields.size("linear_num_key_heads"),
        value_heads=fields.size("linear_num_value_heads"),
        key_dim=fields.size("linear_key_head_dim"),
        value_dim=fields.size("linear_value_head_dim"),
        kernel=fields.size("linear_conv_kernel_dim"),
        mixed=mixed,
    )
    if linear.value_heads % linear.key_heads:
        raise fields.wrong(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads ({linear.key_heads})"
        )
    if linear.kernel < 2:
        raise fields.wrong("linear_conv_kernel_dim", "at least 2")
    # The config.json of Qwen3-Next has no field for its MTP layer, so the default is 1; a config that was
    # read from a .gguf file has the number.
    name = "mtp_num_hidden_layers" if fields.has("mtp_num_hidden_layers") else "num_nextn_predict_layers"
    if (more := fields.count(name, 1)) > MOST_LAYERS:
        raise fields.wrong(name, f"at most {MOST_LAYERS:,}")
    return msgspec.structs.replace(spec, linear=linear, more_layers=more)


def _linear_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Layers with linear attention: by `layer_types`, or all but every `full_attention_interval`th."""
    interval = fields.size("full_attention_interval", 4)
    kinds = fields.array("layer_types") or [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    if len(kinds) != layers or not all(kind in (FULL, LINEAR) for kind in kinds):
        raise fields.wrong("layer_types", f"a list of {FULL} and {LINEAR}, one entry per layer ({layers})")
    linear = frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR)
    if not 0 < len(linear) < layers:
        raise fields.wrong("layer_types", f"a list with both {FULL} and {LINEAR}")
    return linear
