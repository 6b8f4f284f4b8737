"""What Python and torch keep per thread, entered by every thread that touches a device.

Inference mode and the current device are thread-local and not inherited: a thread that forgets one
builds autograd graphs or launches on device 0, silently. So there is one way in, and every step
asserts that it was taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def device_thread(device: torch.device) -> Iterator[None]:
    """Make the calling thread fit to run steps on `device` until the block ends."""
    with torch.inference_mode():
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


def assert_device_thread(device: torch.device) -> None:
    """Raise where the calling thread has not entered `device_thread(device)`. Under 1 µs on a CPU."""
    if not torch.is_inference_mode_enabled():
        raise RuntimeError("a step ran on a thread that did not enter device_thread()")
    if device.type == "cuda" and torch.cuda.current_device() != (device.index or 0):
        raise RuntimeError(f"a step for {device} ran on cuda:{torch.cuda.current_device()}")
