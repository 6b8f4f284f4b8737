"""Tokens that a grammar forbids: their logits become minus infinity."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from gpu.grammar.matchers import Masks


def mask_logits(logits: Tensor, masks: Masks) -> None:
    """Forbid in the masked rows of `logits` float32 [n, vocab] what their bits do not allow, in place.

    Minus infinity is added, not assigned: whatever a bias of +100 did is undone, and a NaN stays
    visible (`gpu/sample/bias.py`). Vocabulary beyond the bits is forbidden.
    """
    vocab = logits.shape[1]
    for row, bits in zip(masks.rows, masks.bits, strict=True):
        allowed = np.unpackbits(bits.view(np.uint8), count=vocab, bitorder="little")
        floor = np.where(allowed, np.float32(0), np.float32(-np.inf))
        logits[row] += torch.from_numpy(floor).to(logits.device)


def allows_besides(masks: Masks, row: int, ids: Iterable[int]) -> bool:
    """Whether `row` of the step may take any token other than `ids`; True for a row without a mask.

    Stop ids are held down until min_tokens, but where a complete grammar allows nothing else, the
    end is the end.
    """
    if row not in masks.rows:
        return True
    bits = masks.bits[masks.rows.index(row)].copy()
    for token in ids:
        if token >> 5 < len(bits):
            bits[token >> 5] &= ~np.array(1 << (token & 31), np.uint32).view(np.int32)
    return bool(bits.any())
