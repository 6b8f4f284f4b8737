"""Tensors in mapped files to a device, at the speed of the bus."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Fills its first argument, a model's place, with its second. From any reading thread."""

STAGE_BYTES = 16 * 2**20
"""Size of a pinned buffer: several milliseconds of a thread's copying, 300 µs of a PCIe 5 bus."""


class Stage(threading.local):
    """Two pinned buffers in turn: while one is on the bus, the next piece is copied into the other.

        mapped pages ──memcpy, converting──► buffer 0, 1 ──DMA──► device

    A copy to the device straight from mapped memory goes through one buffer of the driver and waits for
    it: a quarter of what the bus can do. On a CPU the buffers are plain memory, and only tests use them.

    Every thread that uses it has buffers of its own.
    """

    def __init__(self, device: torch.device, size: int = STAGE_BYTES) -> None:
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._events = [torch.Event(device) for _ in range(2)] if pinned else []
        for event in self._events:
            event.record()
        self._next = 0

    def copy(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill `place`, contiguous on the device, with `tensor` of the same shape in host memory, in
        place's dtype. On a GPU it is done when the stream is."""
        target, source = place.view(-1), tensor.reshape(-1)
        step = len(self._buffers[0]) // target.element_size()
        for first in range(0, len(target), step):
            part = source[first : first + step]
            which = self._next
            self._next = 1 - which
            if self._events:
                self._events[which].synchronize()
            buffer = self._buffers[which].view(target.dtype)[: len(part)]
            if part.dtype == buffer.dtype:
                # Not torch's copy: it splits over all cores, in each of the reading threads.
                buffer.view(torch.uint8).numpy()[:] = part.view(torch.uint8).numpy()
            else:
                buffer.copy_(part)
            target[first : first + step].copy_(buffer, non_blocking=True)
            if self._events:
                self._events[which].record()


def readers(device: torch.device) -> int:
    """Threads that read for a device: page faults of one overlap copies of another. On a CPU more gave
    nothing on two cores; a GPU's bus takes what eight can copy."""
    return 8 if device.type == "cuda" else 4


def copier(device: torch.device) -> Copy:
    """How weights get to `device`. Done for a GPU once it is synchronised."""
    return Stage(device).copy if device.type == "cuda" else _copy


def _copy(place: torch.Tensor, tensor: torch.Tensor) -> None:
    place.copy_(tensor)
