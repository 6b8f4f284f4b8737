"""Qwen2 and Qwen3, dense: biases and head norms are facts of the spec."""

from __future__ import annotations

from gpu.models.decoder import Decoder


class Qwen(Decoder):
    """Qwen2ForCausalLM, Qwen3ForCausalLM."""

    __slots__ = ()
