"""Adapters of one rank: in the memory of the host, and at places of the device.

    file ──read──► arena, pinned ──copy on a side stream──► pool ◄── kernels of steps

Both are allocated once: pinning memory, and allocating a device's, may hold up its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from core.adapters import AdapterLimits
from core.command import Command
from core.errors import ConfigError
from gpu.adapters.pool import AdapterLayout
from gpu.lora import Adaptable, LoraMatrix
from gpu.thread import device_thread

PIECE = 16 << 20
"""Bytes copied to the device at a time, 0.3 ms: what steps copy, masks say, waits for no more than one piece,
where an adapter of experts has gigabytes."""

Read = Callable[[Path, Sequence[LoraMatrix]], None]
"""Reads the adapter in a directory into the matrices of one buffer of the arena. Raises `ModelError`."""


class AdapterTiers:
    """Owner: launch thread. What `start` returns may run on another one, beside steps."""

    def __init__(
        self, layout: AdapterLayout, limits: AdapterLimits, device: torch.device, read: Read
    ) -> None:
        self._layout, self._device, self._read = layout, device, read
        self._pool = torch.zeros(limits.places, layout.bytes, dtype=torch.uint8, device=device)
        self._arena = torch.empty(limits.host, layout.bytes, dtype=torch.uint8)
        self._free = list(range(limits.host))
        self._buffers: dict[str, int] = {}
        """Host buffers of the adapters that are there. Changed by single operations of a list and a
        dictionary, so that reading threads may, too."""
        self._stream: Any = None
        if device.type == "cuda":
            # Not torch's pinned memory: it rounds sizes up to powers of two.
            cuda: Any = torch.cuda
            torch.cuda.check_error(
                cuda.cudart().cudaHostRegister(self._arena.data_ptr(), self._arena.nbytes, 0)
            )
            # A stream of the prioritised pool: torch hands out the others in turn, so that after many
            # captures this one could be the one that is captured.
            self._stream = cuda.Stream(device, priority=-1)

    def bind(self, adaptable: Sequence[Adaptable]) -> None:
        """Let the adapters at all places change a model."""
        self._layout.bind(self._pool, adaptable)

    def start(self, command: Command) -> Callable[[], None]:
        """Begin `adapter_read` or `adapter_place` behind the steps launched so far; what is returned does the
        rest and returns when it is done. Raises `ConfigError`."""
        if command.action == "adapter_read":
            if not self._free:
                raise ConfigError(f"the host has room for {len(self._arena)} adapters (--max-loaded-loras)")
            buffer = self._free.pop()
            return lambda: self._fill(command.adapter, Path(command.path), buffer)
        buffer, place = self._find(command.adapter), command.place
        if not 0 <= place < len(self._pool):
            raise ConfigError(f"there is no place {place}, there are {len(self._pool)}")
        before = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        return lambda: self._copy(buffer, place, before)

    def drop(self, adapter: str) -> None:
        """Free the adapter's host memory, if it has any: another rank may have read it alone. Its place on
        the device stays as it is."""
        if (buffer := self._buffers.pop(adapter, None)) is not None:
            self._free.append(buffer)

    def close(self) -> None:
        """Unpin; nothing may be under way."""
        if self._stream is not None:
            cuda: Any = torch.cuda
            torch.cuda.check_error(cuda.cudart().cudaHostUnregister(self._arena.data_ptr()))
            self._stream = None

    def _find(self, adapter: str) -> int:
        buffer = self._buffers.get(adapter)
        if buffer is None:
            raise ConfigError(f"the adapter {adapter} is not in host memory")
        return buffer

    def _fill(self, adapter: str, path: Path, buffer: int) -> None:
        done = False
        try:
            with device_thread(self._device):
                if self._device.type == "cuda":
                    # This thread alone: others would take the cores of the threads that serve, and wait
                    # busily in between. On two busy cores a read of 87 MB took 0.6 s with one, and 4 to 20
                    # with two.
                    torch.set_num_threads(1)
                self._read(path, self._layout.views(self._arena[buffer : buffer + 1]))
            self._buffers[adapter] = buffer
            done = True
        finally:
            if not done:
                self._free.append(buffer)

    def _copy(self, buffer: int, place: int, before: Any) -> None:
        """Copy a buffer to a place behind the event `before`: steps that read what was there have ended."""
        with device_thread(self._device):
            if self._stream is None:
                self._pool[place].copy_(self._arena[buffer])
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(before)
                both = (torch.split(each, PIECE) for each in (self._pool[place], self._arena[buffer]))
                for into, piece in zip(*both, strict=True):
                    into.copy_(piece, non_blocking=True)
                    self._stream.synchronize()
