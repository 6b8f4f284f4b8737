"""Llama and Mistral: the shared decoder as it is. Mistral's window is a fact of its spec."""

from __future__ import annotations

from gpu.models.decoder import Decoder


class Llama(Decoder):
    """LlamaForCausalLM, MistralForCausalLM."""

    __slots__ = ()
