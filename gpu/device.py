"""Which device runs the model, and why another one cannot."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

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
