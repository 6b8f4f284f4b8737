"""Configs of DeepSeek and of those that took over its routing of experts. Defaults as in `read`."""

from __future__ import annotations

import msgspec

from core.models.fields import Config, Fields
from core.models.read import MOST_LAYERS, Defaults, common, with_experts
from core.models.spec import LatentSpec, ModelSpec, MoeSpec, Scores

_GLM_4_5: Config = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}


def glm4_moe(fields: Fields) -> ModelSpec:
    """Glm4MoeForCausalLM, of GLM-4.5 and 4.6: a part of each head is rotated, experts are chosen as DeepSeek
    V3's."""
    fields = fields.over(_GLM_4_5)
    norm = "head" if fields.flag("use_qk_norm") else ""
    bias = fields.flag("attention_bias")
    spec = common(fields, Defaults(131072, norm_eps=1e-5), qkv_bias=bias, qk_norm=norm)
    return _with_groups(fields, spec, "sigmoid")


_GLM_4_7_FLASH: Config = {
    **_GLM_4_5,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "routed_scaling_factor": 1.8,
    "v_head_dim": 256,
}
_V2: Config = {
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1407,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,  # of both published models; transformers has no default
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
_V3: Config = {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


def glm4_moe_lite(fields: Fields) -> ModelSpec:
    """Glm4MoeLiteForCausalLM, of GLM-4.7-Flash: DeepSeek V3's attention, GLM-4.5's experts."""
    fields = fields.over(_GLM_4_7_FLASH)
    spec = _with_groups(fields, _with_latents(fields, Defaults(202752, 64, norm_eps=1e-5)), "sigmoid")
    kinds = fields.array("mlp_layer_types")
    if kinds and (len(kinds) != spec.layers or not all(kind in ("dense", "sparse") for kind in kinds)):
        raise fields.wrong("mlp_layer_types", f"a list of dense and sparse, one per layer ({spec.layers})")
    if not kinds or spec.moe is None:
        return spec
    sparse = frozenset(i for i, kind in enumerate(kinds) if kind == "sparse")
    return msgspec.structs.replace(spec, moe=msgspec.structs.replace(spec.moe, layers=sparse))


def deepseek_v2(fields: Fields) -> ModelSpec:
    """DeepseekV2ForCausalLM: latent attention; experts by a softmax, of all or of the best groups."""
    fields = fields.over(_V2)
    _only(fields, "scoring_func", "softmax")
    for name in ("norm_topk_prob", "mlp_bias"):  # transformers reads over the first
        if fields.flag(name):
            raise fields.wrong(name, "false")
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.wrong("topk_method", "greedy or group_limited_greedy")
    if method == "greedy":
        fields = Fields({**fields.without("n_group", "topk_group"), "n_group": 1, "topk_group": 1})
    return _with_groups(fields, _with_latents(fields, Defaults(2048, head_dim=64)), "softmax")


def deepseek_v3(fields: Fields) -> ModelSpec:
    """DeepseekV3ForCausalLM, of DeepSeek V3 and R1 and of Kimi K2: latent attention; experts by sigmoids."""
    fields = fields.over(_V3)
    _only(fields, "scoring_func", "sigmoid")
    _only(fields, "topk_method", "noaux_tc")
    return _with_groups(fields, _with_latents(fields, Defaults(4096, head_dim=64)), "sigmoid")


def _only(fields: Fields, name: str, served: str) -> None:
    if fields.text(name, served) != served:
        raise fields.wrong(name, served)


def _with_latents(fields: Fields, defaults: Defaults) -> ModelSpec:
    """The spec without its experts. There are no KV heads, whatever `num_key_value_heads` says."""
    if fields.size("moe_layer_freq", 1) != 1:
        raise fields.wrong("moe_layer_freq", "1")
    bias = fields.flag("attention_bias")
    own = Fields(fields.without("num_key_value_heads"))
    spec = common(own, defaults, qkv_bias=bias, out_bias=bias)
    latent = LatentSpec(
        kv_rank=fields.size("kv_lora_rank", 512),
        rope_dim=fields.size("qk_rope_head_dim", 64),
        nope_dim=fields.size("qk_nope_head_dim", 128),
        value_dim=fields.size("v_head_dim", 128),
        q_rank=0 if fields.null("q_lora_rank") else fields.size("q_lora_rank"),
        interleaved=fields.flag("rope_interleave", True),
    )
    if latent.rope_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "even")
    return msgspec.structs.replace(
        spec,
        kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_dim,
        attention_scale=latent.query_dim**-0.5 * spec.rope.scores_factor,
        latent=latent,
    )


def _with_groups(fields: Fields, spec: ModelSpec, scores: Scores) -> ModelSpec:
    """`spec` with routed and shared experts in all layers behind the first few. `fields` have all that these
    are read from."""
    experts, groups = fields.size("n_routed_experts"), fields.size("n_group", 1)
    open_groups = fields.size("topk_group", 1)
    if experts % groups or (scores == "sigmoid" and groups > 1 and experts == groups):
        raise fields.wrong(
            "n_group", f"a divisor of n_routed_experts ({experts}), of at least 2 experts each"
        )
    if open_groups > groups:
        raise fields.wrong("topk_group", f"at most n_group ({groups})")
    width = fields.size("moe_intermediate_size")
    moe = MoeSpec(
        experts=experts,
        per_token=fields.size("num_experts_per_tok"),
        intermediate=width,
        norm_topk=fields.flag("norm_topk_prob"),
        layers=frozenset(range(fields.count("first_k_dense_replace", 0), spec.layers)),
        shared=width * fields.count("n_shared_experts", 0),
        shared_gate=False,
        scores=scores,
        groups=groups,
        top_groups=open_groups,
        scale=fields.number("routed_scaling_factor"),
        exact_router=True,
    )
    if moe.per_token > experts // groups * open_groups:
        most = f"at most the experts of topk_group groups ({experts // groups * open_groups})"
        raise fields.wrong("num_experts_per_tok", most)
    if (more := fields.count("num_nextn_predict_layers", 0)) > MOST_LAYERS:
        raise fields.wrong("num_nextn_predict_layers", f"at most {MOST_LAYERS:,}")
    return msgspec.structs.replace(with_experts(fields, spec, moe), more_layers=more)
