"""Which architectures are served: how to read their config and which class runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from core.errors import ModelError
from core.models import pooled, read
from core.models.fields import Config, Fields
from core.models.spec import ModelSpec, PoolingSpec


class Family(msgspec.Struct, frozen=True):
    """`model` is the dotted path `module:class` of the executing class; `core` never imports it."""

    read: Callable[[Fields], ModelSpec]
    model: str
    base: str = "model."
    """Prefix of the base model's tensors. A checkpoint that was saved without a head leaves it out."""
    unused: tuple[str, ...] = ()
    """Prefixes of tensors that checkpoints carry and that nothing here needs."""


_BERT = "gpu.models.bert:Bert"
_POOLERS = ("pooler.", "bert.pooler.", "roberta.pooler.", "cls.", "lm_head.")

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(read.llama, "gpu.models.llama:Llama"),
    "MistralForCausalLM": Family(read.mistral, "gpu.models.llama:Llama"),
    "Qwen2ForCausalLM": Family(read.qwen2, "gpu.models.qwen:Qwen"),
    "Qwen3ForCausalLM": Family(read.qwen3, "gpu.models.qwen:Qwen"),
    "Qwen3MoeForCausalLM": Family(read.qwen3_moe, "gpu.models.qwen_moe:QwenMoe"),
    **{
        name + suffix: Family(task(reader), f"gpu.models.heads:{model}")
        for name, reader in (
            ("Llama", read.llama),
            ("Mistral", read.mistral),
            ("Qwen2", read.qwen2),
            ("Qwen3", read.qwen3),
        )
        for suffix, task, model in (
            ("Model", pooled.embedder, "Embedder"),
            ("ForSequenceClassification", pooled.classifier, "Classifier"),
        )
    },
    "BertModel": Family(pooled.bert, _BERT, "bert.", _POOLERS),
    "RobertaModel": Family(pooled.roberta, _BERT, "roberta.", _POOLERS),
    "XLMRobertaModel": Family(pooled.roberta, _BERT, "roberta.", _POOLERS),
    "BertForSequenceClassification": Family(pooled.bert_classifier, _BERT, "bert."),
    "RobertaForSequenceClassification": Family(
        pooled.roberta_classifier, _BERT, "roberta.", ("roberta.pooler.",)
    ),
    "XLMRobertaForSequenceClassification": Family(
        pooled.roberta_classifier, _BERT, "roberta.", ("roberta.pooler.",)
    ),
}


def family_of(architecture: str) -> Family:
    """The entry for a checkpoint's class name; an unknown one raises `ModelError` with the list."""
    if architecture not in FAMILIES:
        raise ModelError(
            f"Architecture {architecture} is not supported. Supported: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[architecture]


def check_supported(config: Config, embeds: bool = False) -> None:
    """Raise `ModelError` for a config.json whose architecture or quantisation is not supported, before its
    weights are looked for. `embeds`: it lies in a sentence-transformers directory."""
    fields = Fields(pooled.headless(config) if embeds else config)
    family_of(read.architecture_of(fields))
    read.refuse_quantised(fields)


def read_spec(
    config: Config, generation: Config | None = None, pooling: PoolingSpec | None = None
) -> ModelSpec:
    """`ModelSpec` of a config.json, with end-of-sequence ids of a generation_config.json added, and
    with the pooling that a sentence-transformers directory asks for: what such a directory holds makes
    embeddings, whatever head its config names.

    Raises `ModelError` naming the field that is missing, wrong or not supported.
    """
    if pooling is not None:
        config = pooled.headless(config)
    fields = Fields(config)
    spec = family_of(read.architecture_of(fields)).read(fields)
    if pooling is not None and spec.task == "embed":
        spec = msgspec.structs.replace(spec, pooling=pooling)
    extra = Fields(generation or {}, "generation_config.json").ids("eos_token_id")
    # Chat checkpoints name the end of a turn only in the generation config; the config's own id stays.
    return msgspec.structs.replace(spec, eos=tuple(dict.fromkeys((*spec.eos, *extra))))
