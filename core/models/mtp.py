"""The layer for multi-token prediction in a target's own checkpoint, as its draft model.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains one layer more, which predicts the token after the next of
the target's last hidden state and the next token's embedding. Embedding and head are the target's: what
checkpoints carry of them at this layer are copies.
"""

from __future__ import annotations

from msgspec.structs import replace

from core.errors import ConfigError
from core.models.draft import DraftSpec
from core.models.spec import W8A8, ModelSpec

FIRST = "model.layers.0."
"""How names of a draft model's only layer begin here."""


def mtp_draft(target: ModelSpec) -> DraftSpec:
    """`DraftSpec` of the layer behind the last of `target`, whose matrices are held as the target's. Raises
    `ConfigError` where its config has none, or several."""
    if target.more_layers != 1:
        has = f"{target.more_layers} layers" if target.more_layers else "no layer"
        raise ConfigError(
            f"--speculative-algorithm mtp: {target.architecture} has {has} for multi-token prediction "
            "(num_nextn_predict_layers of its config.json), and 1 can draft. Use ngram or draft-model."
        )
    prefix = f"model.layers.{target.layers}."
    moe, w8a8 = target.moe, target.w8a8
    if moe is not None:
        moe = replace(moe, layers=frozenset({0}))
    if w8a8 is not None:
        w8a8 = _of_layer(w8a8, prefix)
    decoder = replace(target, layers=1, more_layers=0, tied=False, moe=moe, w8a8=w8a8)
    return DraftSpec(
        algorithm="mtp",
        decoder=decoder,
        draft_vocab=target.vocab_size,
        target_hidden=target.hidden,
        final=True,
        prefix=prefix,
    )


def _of_layer(w8a8: W8A8, prefix: str) -> W8A8:
    """What it says of the layer whose names begin with `prefix`, of layer 0."""
    kept = [each for each in w8a8.plain if each.startswith((prefix, "re:"))]
    return W8A8(plain=tuple(each.replace(prefix, FIRST) for each in kept))
