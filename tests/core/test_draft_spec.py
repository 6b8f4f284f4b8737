"""Configs of draft models: every public format, and what is said of one that does not fit its target."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import ModelError
from core.models import DraftSpec, ModelSpec, read_draft, read_spec
from tests.rigs import draft_heads
from tests.rigs.draft_heads import DRAFT_VOCAB, HIDDEN, MASK, VOCAB

CONFIGS = draft_heads.CONFIGS


def target(**changes: object) -> ModelSpec:
    layers = {**CONFIGS["eagle"], "num_hidden_layers": 6, "architectures": ["Qwen2ForCausalLM"]}
    return read_spec({**layers, **changes})


def spec(name: str, **changes: Any) -> DraftSpec:
    return read_draft({**CONFIGS[name], **changes}, target())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_format_is_read(name: str) -> None:
    got = spec(name)
    assert got.algorithm == name.split("-")[0].removesuffix(".1")
    assert got.aux_layers == draft_heads.AUX.get(name, ())
    assert got.final == (got.algorithm == "eagle")
    assert got.tokens == (5 if "speculators" in name else 0)
    assert got.target_hidden == HIDDEN
    assert not got.decoder.tied


def test_an_eagle3_head_names_its_vocabulary_and_norms() -> None:
    got = spec("eagle3")
    assert got.draft_vocab == DRAFT_VOCAB
    assert got.own == {"lm_head.weight", "d2t"}
    assert not (got.norm_before_residual or got.norm_before_fc or got.fc_norm or got.norm_output)
    assert spec("eagle3-vllm").norm_before_residual and spec("eagle3-vllm").norm_before_fc
    assert spec("eagle3.1").fc_norm and spec("eagle3.1").norm_output
    assert spec("eagle3.1").draft_vocab == VOCAB and not spec("eagle3.1").own
    assert spec("eagle3", architectures=["LlamaForCausalLM"]).algorithm == "eagle3"


def test_speculators_norms_the_residual_unless_told_otherwise() -> None:
    config = {
        key: value for key, value in CONFIGS["eagle3-speculators"].items() if key != "norm_before_residual"
    }
    assert read_draft(config, target()).norm_before_residual
    assert not spec("eagle3-speculators", norm_before_residual=False).norm_before_residual


def test_a_head_does_not_draft_for_scaled_embeddings() -> None:
    for name in CONFIGS:
        with pytest.raises(ModelError, match="Gemma2ForCausalLM scales its embeddings, which an"):
            read_draft(CONFIGS[name], target(architectures=["Gemma2ForCausalLM"]))


def test_a_wider_draft_brings_embedding_and_head() -> None:
    got = spec("eagle3.1", hidden_size=128, target_hidden_size=HIDDEN)
    assert got.own == {"embed_tokens.weight", "lm_head.weight"}


def test_a_dflash_block_is_read() -> None:
    got = spec("dflash")
    assert (got.block_size, got.mask_token, got.causal) == (draft_heads.BLOCK, MASK, False)
    assert got.decoder.qk_norm and got.decoder.window(0) == 0
    assert spec("dflash-bias").causal and spec("dflash-bias").decoder.qkv_bias
    wrapped = {**CONFIGS["dflash-speculators"], "block_size": None}
    assert read_draft(wrapped, target()).block_size == 6


def test_dflash_windows() -> None:
    block = CONFIGS["dflash"]["dflash_config"]
    every = {**block, "use_swa": True, "swa_window_size": 9}
    got = spec("dflash", dflash_config=every)
    assert ([got.decoder.window(i) for i in range(2)], got.causal) == ([9, 9], False)
    got = spec("dflash", layer_types=["sliding_attention"] * 2, sliding_window=7)
    assert ([got.decoder.window(i) for i in range(2)], got.causal) == ([7, 7], True)
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
    got = spec("dflash", dflash_config={**block, "causal": False}, **mixed)
    assert ([got.decoder.window(i) for i in range(2)], got.causal) == ([7, 0], False)
    with pytest.raises(ModelError, match="layer_types must be of one kind"):
        spec("dflash", **mixed)
    with pytest.raises(ModelError, match="sliding_window must be a positive integer, it is missing"):
        spec("dflash", dflash_config={**block, "use_swa": True})


def test_windows_of_speculators_are_causal_where_it_says_so() -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7}
    assert not spec("dflash-speculators", **sliding).causal
    assert spec("dflash-speculators", **sliding, sliding_window_non_causal=False).causal
    assert not spec("dflash-speculators", sliding_window_non_causal=False).causal


def test_a_null_beside_the_layers_of_speculators_is_nothing() -> None:
    got = spec("dflash-speculators", target_hidden_size=None, torch_dtype=None, hidden_act=None)
    assert (got.target_hidden, got.decoder.dtype, got.decoder.activation) == (HIDDEN, "float32", "silu")


def test_a_dflash_head_without_rope_has_its_targets() -> None:
    config = {key: value for key, value in CONFIGS["dflash"].items() if key != "rope_theta"}
    other = target(rope_theta=5e5)
    assert read_draft(config, other).decoder.rope == other.rope


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("eagle", {"vocab_size": 300}, r"vocab_size must be the target's \(256\), got 300"),
        ("eagle", {"hidden_size": 128}, r"hidden_size must be the target's \(64\), got 128"),
        ("eagle3", {"target_hidden_size": 80}, r"target_hidden_size must be the target's \(64\), got 80"),
        (
            "eagle3",
            {"draft_vocab_size": 512},
            r"draft_vocab_size must be at most vocab_size \(256\), got 512",
        ),
        ("eagle3-vllm", {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "layers 1, 2, 6 .* has 6 layers"),
        ("eagle3-vllm", {"eagle_aux_hidden_state_layer_ids": [-1]}, "layers -1 .* has 6 layers"),
        ("eagle3-vllm", {"eagle_aux_hidden_state_layer_ids": ["1"]}, "must be a list of layers, got"),
        ("dflash", {"num_target_layers": 36}, r"num_target_layers must be the target's \(6\), got 36"),
        ("dflash", {"rope_theta": 1e6}, r"theta is 1000000\.0, the target's 10000\.0"),
        (
            "dflash",
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "RoPE must be the target's: kind is linear, the target's none",
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 256, "target_layer_ids": [1]}},
            r"mask_token_id must be a token below the target's vocab_size \(256\), got 256",
        ),
        ("dflash", {"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id must be .* it is missing"),
        ("dflash", {"dflash_config": {"mask_token_id": 1}}, "target_layer_ids must be .* it is missing"),
        ("dflash", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [5]}}, "layers 6 .* has 6"),
        ("dflash", {"block_size": 1}, "block_size must be at least 2, got 1"),
    ],
)
def test_a_draft_of_another_target_is_refused_with_both_numbers(
    name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        spec(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("eagle3", {"mask_token_id": 5}, "mask_token_id is of P-EAGLE"),
        ("eagle3", {"pard_token": 5}, "pard_token is of P-EAGLE"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
        ("eagle", {"add_para_norm": True}, "add_para_norm is of HASS"),
        ("eagle-speculators", {"layernorms": True}, "layernorms is of HASS"),
        ("dflash", {"markov_rank": 256}, "markov_rank is of DSpark"),
        ("dflash", {"enable_confidence_head": True}, "enable_confidence_head is of DSpark"),
        ("dflash-speculators", {"sample_from_anchor": True}, "sample_from_anchor is of DSpark"),
        ("dflash", {"is_neox_style": False}, "interleaved RoPE"),
        (
            "dflash",
            {"dflash_config": {"attention_sink_bias": True}},
            "attention_sink_bias is of attention sinks",
        ),
        ("dflash", {"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel is not supported"),
        ("eagle3", {"architectures": ["PeagleLlamaForCausalLM"]}, "PeagleLlamaForCausalLM is not supported"),
        ("eagle3-speculators", {"speculators_model_type": "peagle"}, "peagle with layers of llama is not"),
        ("dflash-speculators", {"speculators_model_type": "dspark"}, "dspark with layers of qwen3 is not"),
    ],
)
def test_variants_that_are_not_implemented_are_refused_by_name(
    name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        spec(name, **changes)


def test_an_encoder_has_no_draft() -> None:
    encoder = read_spec({**CONFIGS["eagle"], "architectures": ["BertModel"], "hidden_act": "gelu"})
    with pytest.raises(ModelError, match="BertModel generates no text"):
        read_draft(CONFIGS["eagle"], encoder)


def test_default_layers_need_a_target_of_three() -> None:
    with pytest.raises(ModelError, match=r"layers 2, 1, -1 .* has 2 layers"):
        read_draft(CONFIGS["eagle3"], target(num_hidden_layers=2))
