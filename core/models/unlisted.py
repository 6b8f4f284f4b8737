"""Configs of architectures without a family here, which run through transformers.

What their fields mean only their class there knows: `gpu.models.transformers_check.settled` asks it.
"""

from __future__ import annotations

import msgspec

from core.errors import ModelError
from core.models.fields import Fields
from core.models.read import architecture_of, dtype_of
from core.models.spec import ModelSpec

GENERATES = ("ForCausalLM", "LMHeadModel")
"""Suffixes of the transformers classes that predict the next token."""

_IGNORED = (
    *("transformers_version", "_name_or_path"),
    *("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation"),
    *("num_labels", "id2label", "label2id"),
)
"""Fields that say nothing of the model. A checkpoint's own code (auto_map) is never run, and it chooses no
kernels."""


def decoder(fields: Fields) -> ModelSpec:
    """Any decoder, with sizes of 0 until they are settled. Raises `ModelError` for a config that is of
    something else, or quantised."""
    if fields.has("quantization_config"):
        raise ModelError(
            f"config.json: quantization_config: {architecture_of(fields)} runs through transformers, which "
            "needs the unquantised checkpoint."
        )
    if fields.flag("is_encoder_decoder"):
        raise fields.wrong("is_encoder_decoder", "false: of transformers only decoders are served")
    config = msgspec.json.encode(fields.without(*_IGNORED), order="deterministic").decode()
    return ModelSpec(
        architecture=architecture_of(fields),
        vocab_size=0,
        hidden=0,
        layers=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        intermediate=0,
        max_position=0,
        dtype=dtype_of(fields),
        transformers=config,
    )
