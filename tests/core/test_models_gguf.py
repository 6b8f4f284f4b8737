"""Configs made from the metadata of .gguf files."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import ModelError
from core.models import read_spec
from core.models.gguf import GgufFacts, gguf_config

FIELDS: dict[str, Any] = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
}


TENSORS = {"token_embd.weight": (64, 100)} | {f"blk.{i}.attn_norm.weight": (64,) for i in range(62)}


def fields(kind: str, **more: Any) -> dict[str, Any]:
    own = {f"{kind}.{name}": value for name, value in (FIELDS | more).items()}
    return {"general.architecture": kind, **own}


def test_families_differ_in_what_they_have() -> None:
    shapes = TENSORS | {"output.weight": (64, 100), "blk.0.attn_q.bias": (64,)}
    qwen = gguf_config(GgufFacts(fields("qwen2"), shapes))
    assert qwen["architectures"] == ["Qwen2ForCausalLM"]
    assert (qwen["tie_word_embeddings"], qwen["attention_bias"], qwen["num_key_value_heads"]) == (
        False,
        True,
        4,
    )
    assert qwen["rms_norm_eps"] == 1e-6
    moe = {
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "attention.key_length": 32,
    }
    config = gguf_config(GgufFacts(fields("qwen3moe", **moe), shapes))
    assert (config["num_experts"], config["moe_intermediate_size"], config["head_dim"]) == (8, 32, 32)
    for kind, layers, divisor in (
        ("gemma2", 42, 32),
        ("gemma2", 46, 16),
        ("gemma3", 46, 32),
        ("gemma3", 62, 16),
    ):
        facts = GgufFacts(fields(kind, block_count=layers, **{"attention.key_length": 32}), shapes)
        gemma = gguf_config(facts)
        assert gemma["query_pre_attn_scalar"] == divisor
    assert "attn_logit_softcapping" not in gemma and "sliding_window" not in gemma


def test_rope_scalings() -> None:
    shapes = TENSORS
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    linear = gguf_config(GgufFacts(fields("llama", **scaled), shapes))
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    llama3 = gguf_config(GgufFacts(fields("llama"), shapes, factors={"rope_freqs.weight": (1.0, 32.0)}))[
        "rope_scaling"
    ]
    assert (llama3["rope_type"], llama3["factor"]) == ("llama3", 32.0)


def test_a_missing_field_is_named() -> None:
    incomplete = fields("llama")
    del incomplete["llama.block_count"]
    with pytest.raises(ModelError, match=r"llama\.block_count"):
        gguf_config(GgufFacts(incomplete, TENSORS))


def test_an_embedding_is_a_matrix() -> None:
    with pytest.raises(ModelError, match=r"lacks the matrix token_embd\.weight"):
        gguf_config(GgufFacts(fields("llama"), TENSORS | {"token_embd.weight": ()}))


def test_what_is_no_number_is_named() -> None:
    """Some architectures have arrays of sizes, one number a layer."""
    shapes = TENSORS
    for name, value in (("attention.head_count", [4, 2]), ("rope.freq_base", "x"), ("block_count", 0)):
        with pytest.raises(ModelError, match=rf"llama\.{name} of the \.gguf file must be a "):
            gguf_config(GgufFacts(fields("llama", **{name: value}), shapes))


LATENTS: dict[str, Any] = {
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "expert_count": 64,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}


@pytest.mark.parametrize(
    ("more", "router", "architecture", "groups"),
    [
        ({}, False, "DeepseekV2ForCausalLM", (1, 1)),
        ({"expert_count": 160}, False, "DeepseekV2ForCausalLM", (8, 3)),
        ({"expert_count": 256}, True, "DeepseekV3ForCausalLM", (8, 4)),
        ({"expert_count": 384, "expert_gating_func": 2}, True, "DeepseekV3ForCausalLM", (1, 1)),
        (
            {"expert_count": 256, "expert_group_count": 4, "expert_group_used_count": 2},
            True,
            "DeepseekV3ForCausalLM",
            (4, 2),
        ),
        ({"tokenizer.ggml.pre": "glm4"}, True, "Glm4MoeLiteForCausalLM", (1, 1)),
    ],
)
def test_what_files_of_deepseek_leave_out(
    more: dict[str, Any], router: bool, architecture: str, groups: tuple[int, int]
) -> None:
    """Older ones say neither how experts are scored nor their groups; which of the family it is none says."""
    bias = {"blk.1.exp_probs_b.bias": (64,)} if router else {}
    written = fields("deepseek2", **LATENTS | more) | {k: v for k, v in more.items() if k.startswith("tok")}
    spec = read_spec(gguf_config(GgufFacts(written, TENSORS | bias)))
    assert spec.moe is not None and spec.latent is not None
    assert (spec.architecture, (spec.moe.groups, spec.moe.top_groups)) == (architecture, groups)
    assert spec.moe.scores == ("sigmoid" if router else "softmax")
    assert (spec.latent.nope_dim, spec.latent.value_dim) == (16, 16)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attention.temperature_scale": 0.1}, r"deepseek2\.attention\.temperature_scale .* not supported"),
        ({"expert_gating_func": 3}, r"deepseek2\.expert_gating_func .* must be 1 or 2, got 3"),
        ({"expert_count": None}, r"lacks the field deepseek2\.expert_count"),
        ({"expert_group_count": "x"}, r"deepseek2\.expert_group_count .* a positive integer, got 'x'"),
        ({"block_count": 2**32 - 1}, r"deepseek2\.block_count .* is 4294967295, .* the file has 63 in all"),
    ],
)
def test_what_is_not_served_of_deepseek2_is_named(more: dict[str, Any], words: str) -> None:
    facts = GgufFacts(fields("deepseek2", **LATENTS | more), TENSORS)
    with pytest.raises(ModelError, match=words):
        gguf_config(facts)
