"""Copies between host and device that the launch thread does not wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of `values` on `device`. Pinned on its way: a copy from other memory waits for the device."""
    dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
    held = torch.empty(values.shape, dtype=dtype, pin_memory=device.type == "cuda")
    held.numpy()[...] = values
    return held.to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A host tensor that holds `tensor` once the device has passed this point; on a CPU `tensor` itself."""
    if not tensor.is_cuda:
        return tensor
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return held.copy_(tensor, non_blocking=True)
