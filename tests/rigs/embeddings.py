"""Expected embeddings of the fake engine."""

from __future__ import annotations

import numpy as np

from tests.rigs.engine import WIDTH, state
from tests.rigs.tokenizer import BOS


def ids(text: str) -> list[int]:
    return [BOS, *text.encode()]


def last(tokens: list[int], dimensions: int = WIDTH) -> np.ndarray:
    """The fake engine's hidden state of the last token, normalised."""
    found = state(tokens[-1], len(tokens) - 1)[:dimensions]
    return found / np.linalg.norm(found)
