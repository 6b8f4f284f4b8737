"""Which architectures are served: how to read their config and which class runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from core.errors import ModelError
from core.models import read
from core.models.fields import Config, Fields
from core.models.spec import ModelSpec


class Family(msgspec.Struct, frozen=True):
    """`model` is the dotted path `module:class` of the executing class; `core` never imports it."""

    read: Callable[[Fields], ModelSpec]
    model: str


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(read.llama, "gpu.models.llama:Llama"),
    "MistralForCausalLM": Family(read.mistral, "gpu.models.llama:Llama"),
    "Qwen2ForCausalLM": Family(read.qwen2, "gpu.models.qwen:Qwen"),
    "Qwen3ForCausalLM": Family(read.qwen3, "gpu.models.qwen:Qwen"),
    "Qwen3MoeForCausalLM": Family(read.qwen3_moe, "gpu.models.qwen_moe:QwenMoe"),
}


def family_of(architecture: str) -> Family:
    """The entry for a checkpoint's class name; an unknown one raises `ModelError` with the list."""
    if architecture not in FAMILIES:
        raise ModelError(
            f"Architecture {architecture} is not supported. Supported: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[architecture]


def read_spec(config: Config, generation: Config | None = None) -> ModelSpec:
    """`ModelSpec` of a config.json, with end-of-sequence ids of a generation_config.json added.

    Raises `ModelError` naming the field that is missing, wrong or not supported.
    """
    fields = Fields(config)
    spec = family_of(read.architecture_of(fields)).read(fields)
    extra = Fields(generation or {}, "generation_config.json").ids("eos_token_id")
    # Chat checkpoints name the end of a turn only in the generation config; the config's own id stays.
    return msgspec.structs.replace(spec, eos=tuple(dict.fromkeys((*spec.eos, *extra))))
