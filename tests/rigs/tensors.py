"""Tensors in the formats of requests."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray


def npy(array: NDArray[np.generic]) -> bytes:
    """`.npy`."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def tensor(array: NDArray[np.generic]) -> str:
    """base64 of `.npy`, for `prompt_embeds`."""
    return base64.b64encode(npy(array)).decode()
