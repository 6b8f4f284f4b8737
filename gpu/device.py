"""Which device runs the model, why another one cannot, and a CPU's memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from core.config import ParallelConfig
from core.errors import ConfigError

LEAST_CAPABILITY = (8, 0)
"""bfloat16 in the tensor cores, and asynchronous copies: what every kernel here is written for."""

LEAST_FP8 = (8, 9)
"""The first with float8 numbers."""

HOPPER = (9, 0)
"""The first with programmatic dependent launch, and with FP8 products scaled by row in cuBLAS."""


class CudaFacts(NamedTuple):
    """What this host has. `reason` says why there is no usable GPU; the rest is then unset."""

    reason: str = ""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    processors: int = 0


def cuda_facts(gpu: int = 0) -> CudaFacts:
    """Look at one GPU of this host."""
    if torch.version.cuda is None:
        return CudaFacts("this build of torch has no CUDA: install one from PyPI")
    if not torch.cuda.is_available():
        return CudaFacts("torch finds no GPU: look at nvidia-smi and at CUDA_VISIBLE_DEVICES")
    found = torch.cuda.get_device_properties(gpu)
    capability = (found.major, found.minor)
    if capability < LEAST_CAPABILITY:
        return CudaFacts(
            f"{found.name} has compute capability {found.major}.{found.minor}, "
            f"the kernels need {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer"
        )
    if find_spec("triton") is None:
        return CudaFacts("triton is not installed: pip install 'loom-serve[cuda]'")
    return CudaFacts("", found.name, capability, found.multi_processor_count)


def check_gpus(parallel: ParallelConfig) -> None:
    """Raises `ConfigError` where the host has GPUs, but not those of every replica."""
    found, last = torch.cuda.device_count(), parallel.gpu(parallel.dp - 1, parallel.local_ranks - 1)
    if 0 < found <= last:
        raise ConfigError(
            f"--tp {parallel.tp} and --dp {parallel.dp} with --base-gpu-id {parallel.base_gpu_id} and "
            f"--gpu-id-step {parallel.gpu_id_step} need GPUs up to number {last}, the last one here is "
            f"{found - 1}."
        )


def choose_device(wanted: str, facts: CudaFacts, gpu: int = 0) -> torch.device:
    """The device for `--device`: auto, cpu or cuda. Raises `ConfigError` with the reason where `--device
    cuda` finds no usable GPU.

    auto is a GPU where there is one that the kernels run on: measured and tested on an H200.
    """
    if wanted == "cpu" or (wanted == "auto" and facts.reason):
        return torch.device("cpu")
    if facts.reason:
        raise ConfigError(f"--device cuda: {facts.reason}. --device cpu runs without one.")
    return torch.device("cuda", gpu)


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has products of bfloat16 (AVX-512, AMX), which it would do in float32 otherwise."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros."""
    size: int = math.prod(shape)
    if device.type == "cpu" and size:
        # numpy takes zero pages from the system untouched; torch.zeros writes them, and 4 GiB of
        # that were 10 s of every start and memory that may never be needed.
        storage = np.zeros(size * dtype.itemsize, np.uint8)
        return torch.from_numpy(storage).view(dtype).view(*shape)
    return torch.zeros(shape, dtype=dtype, device=device)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""

_LARGE = 2 * 2**20
"""Bytes of a matrix that has a mapping of its own while weights are loaded."""

_SMALL = 128 * 2**10
"""Bytes that may stay free at the end of a heap meanwhile, glibc's own default. A reading thread's heap keeps
them when the thread ends: `return_freed` passes them over, and four threads had 50 MiB."""

_USUAL = 32 * 2**20
"""Bytes that may stay free at the end of a heap afterwards, for activations: the most that glibc itself would
adapt to."""


@contextmanager
def loading(device: torch.device) -> Iterator[None]:
    """Load weights in the block. On a CPU matrices get mappings, which go back to the system whole when they
    are freed: from the heap, packing each into a slightly larger one left up to 400 MiB of holes for 1.5 GiB
    of weights. At the end what was freed goes back, too. Nothing where the allocator is not glibc's."""
    libc = ctypes.CDLL(None)
    if device.type != "cpu" or not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
    libc.mallopt(_M_TRIM_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _USUAL)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _USUAL)
        return_freed()


def return_freed() -> None:
    """Give the system what was freed and is still the allocator's, where that is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
