"""Configs of draft models for speculative decoding: EAGLE, EAGLE-3 (and 3.1), DFlash.

They come as the authors of the method publish them, as SpecForge and vLLM write them, or in the wrapper of
vLLM's Speculators. A draft model serves one target: what does not fit is refused here with both numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from core.errors import ModelError
from core.models import read
from core.models.fields import Config, Fields
from core.models.spec import ModelSpec, RopeSpec

Algorithm = Literal["eagle", "eagle3", "dflash", "mtp"]
Reader = Callable[[Fields], ModelSpec]

_WHERE = "config.json of the draft model"

_ARCHITECTURES: Mapping[str, tuple[Algorithm, Reader]] = {
    "LlamaForCausalLM": ("eagle", read.llama),  # the config of EAGLE's own repository is a plain Llama's
    "LlamaForCausalLMEagle": ("eagle", read.llama),
    "EagleLlamaForCausalLM": ("eagle", read.llama),
    "LlamaForCausalLMEagle3": ("eagle3", read.llama),
    "Eagle3LlamaForCausalLM": ("eagle3", read.llama),
    "Eagle3Qwen3ForCausalLM": ("eagle3", read.qwen3),
    "DFlashDraftModel": ("dflash", read.qwen3),
}

_SPECULATORS: Mapping[tuple[str, str], str] = {
    ("eagle", "llama"): "EagleLlamaForCausalLM",
    ("eagle3", "llama"): "Eagle3LlamaForCausalLM",
    ("eagle3", "qwen3"): "Eagle3Qwen3ForCausalLM",
    ("dflash", "qwen3"): "DFlashDraftModel",
}
"""Type of a Speculators checkpoint and of its layers, to the architecture that vLLM runs it as."""

_REFUSED: Mapping[str, str] = {
    "mask_hidden": "P-EAGLE",
    "pard_token": "P-EAGLE",
    "markov_rank": "DSpark",
    "markov_head_type": "DSpark",
    "enable_confidence_head": "DSpark",
    "confidence_head_with_markov": "DSpark",
    "sample_from_anchor": "DSpark",
    "selector_rank": "DFlash 2",
    "conv_kernel_size": "DFlash 2",
    "add_para_norm": "HASS",
    "layernorms": "HASS",
    "eagle_aux_layer_bands": "banded auxiliary layers",
    "attention_sink_bias": "attention sinks",
    "add_swa_attention_sink_bias": "attention sinks",
}
"""Fields of variants that are not implemented: where one is set, the draft would run and guess badly."""


class DraftSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model that reads hidden states of its target."""

    algorithm: Algorithm
    decoder: ModelSpec
    """Spec of the draft's own layers; its vocabulary is the target's."""
    draft_vocab: int
    """Tokens the draft can propose."""
    target_hidden: int
    aux_layers: tuple[int, ...] = ()
    """Layers of the target whose inputs the draft reads, in its order."""
    final: bool = False
    """The draft reads the target's hidden states behind its last norm instead."""
    tokens: int = 0
    """How many tokens the checkpoint says to draft, 0: it does not say."""
    own: frozenset[str] = frozenset()
    """Which of embed_tokens.weight, lm_head.weight, d2t and fc.bias the checkpoint has; without them
    embedding and head are the target's. As read from a config: those it must have."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual begins with the normed hidden state."""
    norm_before_fc: bool = False
    """EAGLE-3: one norm over all auxiliary states."""
    fc_norm: bool = False
    """EAGLE-3.1: a norm for each auxiliary state."""
    norm_output: bool = False
    """EAGLE-3.1: the next draft step reads the hidden state behind the last norm."""
    block_size: int = 0
    """DFlash: tokens of a block, of which the first is the last one that is known."""
    mask_token: int = -1
    """DFlash: id that stands for a token to be drafted."""
    causal: bool = True
    """DFlash: tokens of a block see only those before them."""
    prefix: str = ""
    """MTP: how names of its tensors begin in the target's checkpoint."""
    names: Mapping[str, str] = {}
    """MTP: prefixes of our names, and what replaces them in the checkpoint. The first match counts."""


def read_draft(config: Config, target: ModelSpec) -> DraftSpec:
    """`DraftSpec` of a draft model's config.json, for `target`. Raises `ModelError` for a variant that is not
    supported, and for a draft that was made for another target."""
    fields = Fields(_unwrapped(config), _WHERE)
    _refuse_variants(config)
    algorithm, reader = _kind(fields)
    if not target.causal or target.task != "generate":
        raise ModelError(f"{target.architecture} generates no text: a draft model has nothing to do there.")
    if target.transformers:
        raise ModelError(
            f"{target.architecture} runs through transformers, which does not keep the hidden states that an "
            f"{algorithm} head reads. --speculative-algorithm ngram and a small model draft for it."
        )
    if target.table_scale != 1.0:
        raise ModelError(
            f"{target.architecture} scales its embeddings, which an {algorithm} head would read unscaled. "
            "--speculative-algorithm ngram and a small model draft for it."
        )
    decoder = msgspec.structs.replace(reader(fields), tied=False)
    if decoder.vocab_size != target.vocab_size:
        raise fields.wrong("vocab_size", f"the target's ({target.vocab_size})")
    spec = _SPECS[algorithm](fields, decoder, target)
    name = "target_hidden_size" if fields.has("target_hidden_size") else "hidden_size"
    if spec.target_hidden != target.hidden:
        raise fields.wrong(name, f"the target's ({target.hidden})")
    if spec.draft_vocab > decoder.vocab_size:
        raise fields.wrong("draft_vocab_size", f"at most vocab_size ({decoder.vocab_size})")
    return msgspec.structs.replace(spec, tokens=_tokens(fields), own=_needed(spec))


def algorithm_of(config: Config) -> Algorithm | Literal["draft-model"]:
    """How a checkpoint drafts, by its config.json: a head as its architecture says, any other model as a
    small one. The config of EAGLE's own heads is a plain Llama's of one layer."""
    fields = Fields(_unwrapped(config), _WHERE)
    name = read.architecture_of(fields)
    if name == "LlamaForCausalLM" and not fields.has("draft_vocab_size"):
        return "eagle" if fields.size("num_hidden_layers", 0) == 1 else "draft-model"
    return _kind(fields)[0] if name in _ARCHITECTURES else "draft-model"


def _kind(fields: Fields) -> tuple[Algorithm, Reader]:
    name = read.architecture_of(fields)
    if name == "LlamaForCausalLM" and fields.has("draft_vocab_size"):
        name = "LlamaForCausalLMEagle3"
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"{_WHERE}: the architecture {name} is not supported. Supported: {', '.join(_ARCHITECTURES)}."
        )
    return _ARCHITECTURES[name]


def _unwrapped(config: Config) -> Config:
    """The config as vLLM and SpecForge write it, of one in the Speculators wrapper."""
    fields = Fields(config, _WHERE)
    if not fields.has("speculators_model_type"):
        return config
    kind, layers = fields.text("speculators_model_type", ""), fields.group("transformer_layer_config")
    model = Fields(layers, f"{_WHERE}: transformer_layer_config").text("model_type", "llama")
    if (kind, model) not in _SPECULATORS:
        known = ", ".join(f"{kind} with {model}" for kind, model in _SPECULATORS)
        raise ModelError(
            f"{_WHERE}: speculators_model_type {kind} with layers of {model} is not supported. "
            f"Supported: {known}."
        )
    told = {name: value for name, value in config.items() if value is not None}
    found = {"norm_before_residual": True, **layers, **told, "architectures": [_SPECULATORS[kind, model]]}
    if kind == "dflash":
        # Layers without a window are never causal here; those with one are where this field says so.
        causal = False if fields.flag("sliding_window_non_causal", True) else None
        found["dflash_config"] = {"mask_token_id": config.get("mask_token_id"), "causal": causal}
    return found


def _refuse_variants(config: Config) -> None:
    for group in (config, Fields(config, _WHERE).group("dflash_config")):
        for name, variant in _REFUSED.items():
            if group.get(name) not in (None, False):
                raise ModelError(f"{_WHERE}: {name} is of {variant}, which is not supported.")


def _eagle(fields: Fields, decoder: ModelSpec, target: ModelSpec) -> DraftSpec:
    return DraftSpec(
        algorithm="eagle",
        decoder=decoder,
        draft_vocab=decoder.vocab_size,
        target_hidden=decoder.hidden,
        final=True,
    )


def _eagle3(fields: Fields, decoder: ModelSpec, target: ModelSpec) -> DraftSpec:
    nested = Fields(fields.group("eagle_config"), f"{_WHERE}: eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.wrong("use_aux_hidden_state", "true")
    name = "eagle_aux_hidden_state_layer_ids"
    # vLLM and Speculators number the inputs of layers; SpecForge, which nests the field, their outputs.
    layers = _layers(fields, name) or _layers(nested, name, 1)
    if fields.has("mask_token_id"):
        raise ModelError(f"{_WHERE}: mask_token_id is of P-EAGLE, which is not supported.")
    return DraftSpec(
        algorithm="eagle3",
        decoder=decoder,
        draft_vocab=fields.size("draft_vocab_size", decoder.vocab_size),
        target_hidden=fields.size("target_hidden_size", decoder.hidden),
        aux_layers=_within(layers or (2, target.layers // 2, target.layers - 3), target),
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fields.flag("norm_before_fc"),
        fc_norm=fields.flag("fc_norm"),
        norm_output=fields.flag("norm_output"),
    )


def _dflash(fields: Fields, decoder: ModelSpec, target: ModelSpec) -> DraftSpec:
    block = Fields(fields.group("dflash_config"), f"{_WHERE}: dflash_config")
    if not block.flag("use_aux_hidden_state", True):
        raise block.wrong("use_aux_hidden_state", "true")
    if not fields.flag("is_neox_style", True):
        raise fields.wrong("is_neox_style", "true: interleaved RoPE is not supported")
    if fields.size("num_target_layers", target.layers) != target.layers:
        raise fields.wrong("num_target_layers", f"the target's ({target.layers})")
    layers = _layers(fields, "aux_hidden_state_layer_ids") or _layers(block, "target_layer_ids", 1)
    if not layers:
        raise block.wrong("target_layer_ids", "a list of the target's layers")
    size = fields.size("block_size", _tokens(fields) + 1)
    if size < 2:
        raise fields.wrong("block_size", "at least 2")
    mask = block.count("mask_token_id", -1)
    if not 0 <= mask < target.vocab_size:
        raise block.wrong("mask_token_id", f"a token below the target's vocab_size ({target.vocab_size})")
    decoder = msgspec.structs.replace(decoder, rope=_target_rope(fields, decoder.rope, target.rope))
    decoder, sliding = _windows(fields, block, decoder)
    return DraftSpec(
        algorithm="dflash",
        decoder=decoder,
        draft_vocab=fields.size("draft_vocab_size", decoder.vocab_size),
        target_hidden=fields.size("target_hidden_size", decoder.hidden),
        aux_layers=_within(layers, target),
        block_size=size,
        mask_token=mask,
        causal=fields.flag("is_causal", block.flag("causal", sliding)),
    )


_SPECS: Mapping[Algorithm, Callable[[Fields, ModelSpec, ModelSpec], DraftSpec]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "dflash": _dflash,
}


def _layers(fields: Fields, name: str, shift: int = 0) -> tuple[int, ...]:
    """Numbers of layers, each plus `shift`; none when absent."""
    found: list[int] = []
    for layer in fields.array(name):
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise fields.wrong(name, "a list of layers")
        found.append(layer + shift)
    return tuple(found)


def _within(layers: tuple[int, ...], target: ModelSpec) -> tuple[int, ...]:
    """`layers`, if the target has them all."""
    if not all(0 <= layer < target.layers for layer in layers):
        raise ModelError(
            f"{_WHERE}: the draft model reads the inputs of layers {', '.join(map(str, layers))} (from 0), "
            f"but the target has {target.layers} layers."
        )
    return layers


def _target_rope(fields: Fields, own: RopeSpec, target: RopeSpec) -> RopeSpec:
    """The target's RoPE. A draft whose KV was made with another one is quietly useless."""
    if not any(fields.has(name) for name in ("rope_theta", "rope_scaling", "rope_parameters")):
        return target
    for name in RopeSpec.__struct_fields__:
        mine, its = getattr(own, name), getattr(target, name)
        if mine != its:
            raise ModelError(
                f"{_WHERE}: the RoPE must be the target's: {name} is {mine}, the target's {its}."
            )
    return own


def _windows(fields: Fields, block: Fields, decoder: ModelSpec) -> tuple[ModelSpec, bool]:
    """The decoder with its sliding windows, and whether `layer_types` asks for them: such layers are causal
    unless the config says otherwise."""
    kinds = fields.array("layer_types")
    listed = frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    sliding = listed if kinds else decoder.window_layers
    told = fields.has("is_causal") or block.has("causal")
    if sliding and len(sliding) < decoder.layers and not told:
        raise fields.wrong(
            "layer_types", "of one kind, where neither is_causal nor dflash_config.causal is set"
        )
    layers = sliding or frozenset(range(decoder.layers if block.flag("use_swa") else 0))
    window = 0
    if layers:
        own = block.has("swa_window_size")
        window = block.size("swa_window_size") if own else fields.size("sliding_window")
    return msgspec.structs.replace(decoder, sliding_window=window, window_layers=layers), bool(sliding)


def _tokens(fields: Fields) -> int:
    methods = Fields(fields.group("speculators_config"), _WHERE).array("proposal_methods")
    if not methods or not isinstance(methods[0], Mapping):
        return 0
    where = f"{_WHERE}: speculators_config.proposal_methods"
    return Fields(methods[0], where).count("speculative_tokens", 0)


def _needed(spec: DraftSpec) -> frozenset[str]:
    """Names of the tensors that the target cannot lend."""
    decoder = spec.decoder
    reduced = spec.draft_vocab != decoder.vocab_size
    other = decoder.hidden != spec.target_hidden
    names = {"embed_tokens.weight": other, "lm_head.weight": other or reduced, "d2t": reduced}
    return frozenset(name for name, needed in names.items() if needed)
