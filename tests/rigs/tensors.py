"""Tensors as clients send them."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray


def npy(array: NDArray[np.generic]) -> bytes:
    """numpy's own format."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def tensor(array: NDArray[np.generic]) -> str:
    """The same as `prompt_embeds` takes it."""
    return base64.b64encode(npy(array)).decode()
