"""A GPU is taken where there is one; one that is asked for is refused with the reason where there is none."""

from __future__ import annotations

import pytest
import torch

from core.config import ParallelConfig
from core.errors import ConfigError
from gpu.device import CudaFacts, check_gpus, choose_device, cuda_facts

H200 = CudaFacts("", "NVIDIA H200", (9, 0), 132)
OLD = CudaFacts("Tesla T4 has compute capability 7.5, the kernels need 8.0 or newer")


def test_a_gpu_is_taken_where_there_is_one() -> None:
    assert choose_device("auto", H200) == torch.device("cuda", 0)
    assert choose_device("auto", OLD) == torch.device("cpu")
    assert choose_device("cuda", H200) == torch.device("cuda", 0)
    assert choose_device("cpu", H200) == torch.device("cpu")
    assert choose_device("auto", H200, 3) == torch.device("cuda", 3)


def test_cuda_says_why_not() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: Tesla T4 has .* 7\.5.*--device cpu"):
        choose_device("cuda", OLD)


@pytest.mark.parametrize(("gpus", "fits"), [(0, True), (2, False), (5, False), (6, True)])
def test_every_replica_needs_its_gpu(monkeypatch: pytest.MonkeyPatch, gpus: int, fits: bool) -> None:
    """Without any GPU the reason for that is told."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    parallel = ParallelConfig(dp=3, base_gpu_id=1, gpu_id_step=2)
    if fits:
        check_gpus(parallel)
    else:
        with pytest.raises(ConfigError, match=rf"--dp 3 .* up to number 5, the last one here is {gpus - 1}"):
            check_gpus(parallel)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_this_host_says_what_is_missing() -> None:
    assert cuda_facts().reason
