"""The layer for multi-token prediction in a target's own checkpoint, as its draft model.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains one layer more, which predicts the token after the next of
the target's last hidden state and the next token's embedding. Embedding and head are the target's: what
checkpoints carry of them at this layer are copies. The layer of a hybrid attends, as the fewest of its target
do, and has names of its own (vLLM, qwen3_next_mtp.py and qwen3_5_mtp.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from msgspec.structs import replace

from core.errors import ConfigError
from core.models.draft import DraftSpec
from core.models.spec import W8A8, Int4, ModelSpec

FIRST = "model.layers.0."
"""Prefix of the names of a draft model's only layer."""

_HYBRID = "mtp."
"""Prefix of the MTP tensors in a hybrid's checkpoint."""
_NAMES: Mapping[str, str] = {
    f"{FIRST}enorm.": f"{_HYBRID}pre_fc_norm_embedding.",
    f"{FIRST}hnorm.": f"{_HYBRID}pre_fc_norm_hidden.",
    f"{FIRST}eh_proj.": f"{_HYBRID}fc.",
    f"{FIRST}shared_head.norm.": f"{_HYBRID}norm.",
    FIRST: f"{_HYBRID}layers.0.",
}


def further_layers(target: ModelSpec, gguf: bool) -> tuple[str, ...]:
    """Return the prefixes of tensors of MTP layers, which follow the last layer of `target`."""
    if target.linear is not None and not gguf:
        return (_HYBRID,)
    layers = range(target.layers, target.layers + target.more_layers)
    return tuple(f"{begin}.{layer}." for begin in ("model.layers", "blk") for layer in layers)


def mtp_draft(target: ModelSpec) -> DraftSpec:
    """`DraftSpec` of the layer behind the last of `target`, whose matrices are held as the target's. Raises
    `ConfigError` where its config has none, or several."""
    hybrid = target.linear is not None
    if target.more_layers != 1:
        has = f"{target.more_layers} layers" if target.more_layers else "no layer"
        field = "mtp_num_hidden_layers" if hybrid else "num_nextn_predict_layers"
        raise ConfigError(
            f"--speculative-algorithm mtp: {target.architecture} has {has} for multi-token prediction "
            f"({field} of its config.json), and 1 can draft. Use ngram or draft-model."
        )
    prefix = _HYBRID if hybrid else f"model.layers.{target.layers}."
    names = _NAMES if hybrid else {FIRST: prefix}
    moe, layer = target.moe, names[FIRST]
    if moe is not None:
        moe = replace(moe, layers=frozenset({0}))
    int4, w8a8 = _of_layer(target.int4, target, layer), _of_layer(target.w8a8, target, layer)
    decoder = replace(target, layers=1, more_layers=0, tied=False, linear=None, moe=moe, int4=int4, w8a8=w8a8)
    return DraftSpec(
        algorithm="mtp",
        decoder=decoder,
        draft_vocab=target.vocab_size,
        target_hidden=target.hidden,
        final=True,
        prefix=prefix,
        names=names,
    )


Held = TypeVar("Held", Int4, W8A8)


def _of_layer(held: Held | None, target: ModelSpec, prefix: str) -> Held | None:
    """Return how the weights of the layer with this `prefix` are quantised. None where the checkpoint excepts
    it, as many do: it then has the dtype of the computation, and memory is counted so."""
    if held is None:
        return None
    held = replace(held, renamed=(FIRST, prefix))
    largest = "mlp.experts.0.up_proj" if target.moe else "mlp.up_proj"
    return held if held.has(FIRST + largest) else None
