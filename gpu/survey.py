"""The devices of this host, in words for whoever chooses or repairs them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from core.config import ModelConfig, ParallelConfig
from gpu.device import check_gpus, choose_device, cuda_facts
from gpu.kernels.cpu.build import lack
from gpu.memory import GIB, available_bytes

DRIVER = Path("/proc/driver/nvidia/version")


def survey(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """A line for each device that a start would use, and why it would not use a GPU. Raises `ConfigError`
    where the devices that were asked for are not there."""
    check_gpus(parallel)
    facts, driver = cuda_facts(parallel.base_gpu_id), _driver()
    if choose_device(model.device, facts).type == "cpu":
        lines = [f"CPU with {torch.get_num_threads()} threads, {available_bytes() / GIB:.1f} GiB free"]
        if lacks := lack():
            lines.append(lacks)
        if facts.reason and model.device == "auto":
            there = f" (NVIDIA driver {driver} is there)" if driver else ""
            lines.append(f"no GPU: {facts.reason}{there}")
        return lines
    numbers = [parallel.gpu(n, r) for n in range(parallel.dp) for r in range(parallel.local_ranks)]
    lines = [f"NVIDIA driver {driver or 'unknown'}, CUDA {torch.version.cuda}"]
    for number in dict.fromkeys(numbers):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_properties(number).name
        lines.append(f"GPU {number}: {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    return lines


def _driver() -> str:
    try:
        found = re.search(r"\d+\.\d+[\d.]*", DRIVER.read_text())
    except OSError:
        return ""
    return found[0] if found else ""
