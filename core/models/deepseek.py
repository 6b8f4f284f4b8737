"""Configs of DeepSeek and of those that took over its routing of experts. Defaults as in `read`."""

from __future__ import annotations

import msgspec

from core.models.fields import Config, Fields
from core.models.read import Defaults, common, with_experts
from core.models.spec import ModelSpec, MoeSpec, Scores

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


def _with_groups(fields: Fields, spec: ModelSpec, scores: Scores) -> ModelSpec:
    """`spec` with routed and shared experts in all layers behind the first few. `fields` have all that these
    are read from."""
    experts, groups, open_groups = map(fields.size, ("n_routed_experts", "n_group", "topk_group"))
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
    more = fields.count("num_nextn_predict_layers", 0)
    return msgspec.structs.replace(with_experts(fields, spec, moe), more_layers=more)
