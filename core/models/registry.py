"""Which architectures are served: how to read their config and their tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from core.adapters import FUSED
from core.errors import ModelError
from core.models import deepseek, hybrid, pooled, read, unlisted
from core.models.fields import Config, Fields, nearest
from core.models.gguf import READ_FROM_GGUF
from core.models.rope import check_rotated
from core.models.spec import ModelSpec, PoolingSpec, Task


class Family(msgspec.Struct, frozen=True):
    """How a config is read, and which tensor names a checkpoint may omit or add."""

    read: Callable[[Fields], ModelSpec]
    base: str = "model."
    """Prefix of the base model's tensors. A checkpoint that was saved without a head leaves it out."""
    unused: tuple[str, ...] = ()
    """Prefixes of tensors that checkpoints carry and that nothing here needs."""
    renamed: Mapping[str, str] = {}
    """Parts of tensor names, and what stands here instead."""
    fused: Mapping[str, tuple[str, ...]] = {}
    """Matrices that a checkpoint stacks along the output, and what they are apart, in order."""
    by_expert: Mapping[str, tuple[str, ...]] = {}
    """Tensors with a matrix of each expert, and what such a matrix stacks along the output."""
    int4: bool = True
    """Whether checkpoints in 4 bits are served."""
    mxfp4: bool = False
    """Whether checkpoints whose experts are MXFP4 are served."""
    text_config: bool = False
    """Whether the language model's fields may lie in `text_config`, beside those of a vision encoder."""


_CLASSIFIES = "ForSequenceClassification"
_DECODERS = {"Llama": read.llama, "Mistral": read.mistral, "Qwen2": read.qwen2, "Qwen3": read.qwen3}
_VISION = ("vision_tower.", "multi_modal_projector.")
_LANGUAGE_MODEL = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_BESIDE_QWEN = ("model.visual.",)
"""Prefix of the vision encoder's tensors, which are not loaded."""
_QKV = {
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "conv1d": ("conv1d_q", "conv1d_k", "conv1d_v"),
}
"""Queries, keys and values of linear attention, which ranks divide apart."""
_EXPERTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
_W123 = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ENCODERS = {
    "Bert": (pooled.bert, "bert.", ()),
    "Roberta": (pooled.roberta, "roberta.", ("roberta.pooler.",)),
    "XLMRoberta": (pooled.roberta, "roberta.", ("roberta.pooler.",)),
}
_POOLERS = ("pooler.", "bert.pooler.", "roberta.pooler.", "cls.", "lm_head.")

FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": Family(deepseek.deepseek_v2),
    "DeepseekV3ForCausalLM": Family(deepseek.deepseek_v3),
    "Gemma2ForCausalLM": Family(read.gemma2),
    "Gemma3ForCausalLM": Family(read.gemma3),
    "Gemma3ForConditionalGeneration": Family(
        read.gemma3,
        unused=(*_VISION, *(f"model.{name}" for name in _VISION)),
        renamed=_LANGUAGE_MODEL,
        text_config=True,
    ),
    "GptOssForCausalLM": Family(read.gpt_oss, renamed={".mlp.router.": ".mlp.gate."}, int4=False, mxfp4=True),
    "Glm4MoeForCausalLM": Family(deepseek.glm4_moe),
    "Glm4MoeLiteForCausalLM": Family(deepseek.glm4_moe_lite),
    "GraniteForCausalLM": Family(read.granite),
    "MixtralForCausalLM": Family(
        read.mixtral,
        renamed={".block_sparse_moe.": ".mlp."}
        | {f".{theirs}.": f".{ours}." for theirs, ours in _W123.items()},
    ),
    "Olmo2ForCausalLM": Family(read.olmo2),
    "Olmo3ForCausalLM": Family(read.olmo3),
    "Phi3ForCausalLM": Family(read.phi3, fused=FUSED),
    "Qwen2MoeForCausalLM": Family(read.qwen2_moe),
    "Qwen3MoeForCausalLM": Family(read.qwen3_moe),
    "Qwen3NextForCausalLM": Family(hybrid.qwen3_next, unused=_BESIDE_QWEN, fused=_QKV, by_expert=_EXPERTS),
    **{
        f"Qwen3_5{kind}For{task}": Family(
            reader,
            unused=_BESIDE_QWEN,
            renamed=_LANGUAGE_MODEL,
            fused=_QKV,
            by_expert=_EXPERTS,
            text_config=True,
        )
        for kind, reader in (("", hybrid.qwen3_5), ("Moe", hybrid.qwen3_5_moe))
        for task in ("CausalLM", "ConditionalGeneration")
    },
    "SmolLM3ForCausalLM": Family(read.smollm3),
    **{name + "ForCausalLM": Family(reader) for name, reader in _DECODERS.items()},
    **{name + "Model": Family(pooled.embedder(reader)) for name, reader in _DECODERS.items()},
    **{name + _CLASSIFIES: Family(pooled.classifier(reader)) for name, reader in _DECODERS.items()},
    **{
        name + "Model": Family(reader, base, _POOLERS, int4=False)
        for name, (reader, base, _) in _ENCODERS.items()
    },
    **{
        name + _CLASSIFIES: Family(pooled.classifier(reader, "first"), base, unused, int4=False)
        for name, (reader, base, unused) in _ENCODERS.items()
    },
}

UNLISTED = Family(unlisted.decoder, int4=False)
"""Any decoder that transformers may have."""


class Served(NamedTuple):
    """An architecture, as `architectures` of a config.json names it, and what of it is served."""

    architecture: str
    task: Task
    eight_bits: bool
    """Also checkpoints in FP8 and in int8 (W8A8 of compressed-tensors), and both while loading
    (`--quantization`)."""
    int4: bool
    """Also checkpoints in 4 bits: AWQ, GPTQ, and W4A16 of compressed-tensors."""
    mxfp4: bool
    """Also checkpoints whose experts are MXFP4."""
    gguf: bool
    """Also .gguf files."""


def served() -> list[Served]:
    """All of them, by name."""
    return [
        Served(
            name,
            "classify" if name.endswith(_CLASSIFIES) else "embed" if name.endswith("Model") else "generate",
            eight_bits=name.removesuffix(_CLASSIFIES).removesuffix("Model") not in _ENCODERS,
            int4=family.int4,
            mxfp4=family.mxfp4,
            gguf=name in READ_FROM_GGUF,
        )
        for name, family in sorted(FAMILIES.items())
    ]


def family_of(architecture: str) -> Family:
    """The family of a checkpoint's class name. Raises `ModelError` that names the most similar one that is
    supported."""
    if architecture not in FAMILIES:
        raise unsupported(architecture)
    return FAMILIES[architecture]


def unsupported(architecture: str, reason: str = "") -> ModelError:
    """The error for an architecture that cannot be served, with the reason and the most similar one that
    can."""
    because = f": {reason}" if reason else ""
    return ModelError(
        f"Architecture {architecture} is not supported{because}; the nearest that is: "
        f"{nearest(architecture, FAMILIES)}. "
        "'python -m app models' lists all."
    )


def _by_our_names(plain: tuple[str, ...], family: Family) -> tuple[str, ...]:
    """Layers that are not quantised also by the names that they have here."""
    found = list(plain)
    for each in plain:
        for theirs, ours in family.renamed.items():
            each = each.replace(theirs, ours)
        stacked = [(whole, parts) for whole, parts in family.fused.items() if whole in each]
        found += [each, *(each.replace(whole, part) for whole, parts in stacked for part in parts)]
    return tuple(dict.fromkeys(found))


def _meant(plain: tuple[str, ...], family: Family) -> tuple[str, ...]:
    """Drop exceptions that match only our names: AWQ's `gate` of a Mixtral means its router, and must not
    match `gate_proj`, which the checkpoint calls `w1`."""
    pairs = family.renamed.items()
    return tuple(
        each for each in plain if not any(each in ours and each not in theirs for theirs, ours in pairs)
    )


def read_spec(config: Config, pooling: PoolingSpec | None = None) -> ModelSpec:
    """`ModelSpec` of a config.json, with the pooling of a sentence-transformers directory: a model in such a
    directory makes embeddings, whatever head its config names.

    Raises `ModelError` naming the field that is missing, wrong or not supported.
    """
    if pooling is not None:
        config = pooled.without_lm_head(config)
    fields = Fields(config)
    family = _family(fields, pooling is not None)
    if family.text_config and fields.has("text_config"):
        fields = fields.inside("text_config")
    if family is not UNLISTED:
        read.refuse_quantised(fields, family.int4, family.mxfp4)
    spec = family.read(fields)
    if spec.causal and family is not UNLISTED:
        check_rotated(spec)
    if (int4 := spec.stored_int4) is not None:
        plain = _meant(int4.plain, family) if int4.format == "awq" else int4.plain
        int4 = msgspec.structs.replace(int4, plain=_by_our_names(plain, family))
        spec = msgspec.structs.replace(spec, stored_int4=int4)
    if (w8a8 := spec.stored_w8a8) is not None:
        w8a8 = msgspec.structs.replace(w8a8, plain=_by_our_names(w8a8.plain, family))
        spec = msgspec.structs.replace(spec, stored_w8a8=w8a8)
    if pooling is not None and spec.task == "embed":
        return msgspec.structs.replace(spec, pooling=pooling)
    return spec


def _family(fields: Fields, embeds: bool) -> Family:
    """The family of a config, or `UNLISTED`."""
    architecture = read.architecture_of(fields)
    if architecture in FAMILIES or embeds or not architecture.endswith(unlisted.GENERATES):
        return family_of(architecture)
    return UNLISTED
