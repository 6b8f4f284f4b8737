"""A GPU is taken where there is one; one that is asked for is refused with the reason where there is none."""

from __future__ import annotations

import pytest
import torch

from core.errors import ConfigError
from gpu.device import CudaFacts, choose_device, cuda_facts

H200 = CudaFacts("", "NVIDIA H200", (9, 0), 132)
OLD = CudaFacts("Tesla T4 has compute capability 7.5, the kernels need 8.0 or newer")


def test_a_gpu_is_taken_where_there_is_one() -> None:
    assert choose_device("auto", H200) == torch.device("cuda", 0)
    assert choose_device("auto", OLD) == torch.device("cpu")
    assert choose_device("cuda", H200) == torch.device("cuda", 0)
    assert choose_device("cpu", H200) == torch.device("cpu")


def test_cuda_says_why_not() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: Tesla T4 has .* 7\.5.*--device cpu"):
        choose_device("cuda", OLD)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_this_host_says_what_is_missing() -> None:
    assert cuda_facts().reason
