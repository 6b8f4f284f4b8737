"""Which attention backend serves: as named, the best available, or refused with the reason."""

from __future__ import annotations

import pytest
import torch

from core.errors import ConfigError
from gpu.attention.backend import AttentionConfig, Phase
from gpu.attention.flashinfer_xqa import check_xqa
from gpu.attention.registry import check_cpu_backends, parse_backends
from gpu.attention.selector import choose
from gpu.device import CudaFacts, cuda_facts

HOPPER = CudaFacts("", "NVIDIA H200", (9, 0), 132)


def test_backends_are_chosen_by_phase() -> None:
    assert parse_backends("") == {"prefill": "auto", "decode": "auto"}
    assert parse_backends("decode=b, prefill=a") == {"prefill": "a", "decode": "b"}
    assert parse_backends("prefill=a") == {"prefill": "a", "decode": "auto"}
    assert parse_backends("a") == {"prefill": "a", "decode": "a"}
    for wrong in ("prefill=", "verify=triton", "prefill=a,b"):
        with pytest.raises(ConfigError, match="prefill=NAME,decode=NAME"):
            parse_backends(wrong)
    check_cpu_backends("")
    check_cpu_backends("prefill=torch")
    check_cpu_backends("prefill=torch,decode=cpu")
    with pytest.raises(ConfigError, match="prefill=cpu needs a GPU"):
        check_cpu_backends("cpu")
    with pytest.raises(ConfigError, match="needs a GPU"):
        check_cpu_backends("decode=triton")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_is_not_named_is_the_best_available(phase: Phase, device: torch.device) -> None:
    gpu = cuda_facts() if device.type == "cuda" else HOPPER
    config = AttentionConfig(4, 2, 64, (0,), 16, 8, torch.float32, device, gpu, 0.1)
    assert "Triton" in type(choose(phase, "auto", config)).__name__


def test_a_refused_backend_says_why() -> None:
    ada = CudaFacts("", "NVIDIA L4", (8, 9), 58)
    config = AttentionConfig(4, 2, 64, (0,), 16, 8, torch.float32, torch.device("cpu"), ada, 0.1)
    for name, changed, reason in (
        ("triton", config._replace(page_size=48), "no power of two"),
        ("triton", config._replace(head_dim=512), "wider than 256"),
        ("triton", config._replace(head_dim=704, values=640), "wider than 512 . 64"),
        ("flashinfer", config._replace(head_dim=576, values=512), "MLA has latents"),
        ("torch", config, "that of --device cpu"),
        ("fastest", config, "no such backend"),
    ):
        with pytest.raises(ConfigError, match=f"decode={name} is refused: .*{reason}"):
            choose("decode", name, changed)
    for phase, kernel in (("prefill", "FA3"), ("decode", "XQA")):
        reasons = f"flashinfer is not installed|{kernel} is supported on compute capability 9.0 alone"
        with pytest.raises(ConfigError, match=f"is refused: ({reasons})"):
            choose(phase, "flashinfer", config)


def test_what_xqa_is_not_made_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.attention.flashinfer_fa3.find_spec", lambda name: name)
    config = AttentionConfig(32, 8, 128, (0,), 16, 8, torch.bfloat16, torch.device("cuda"), HOPPER, 0.1)
    check_xqa(config)
    for changed, reason in (
        (config._replace(page_size=1), "pages of 16, 32, 64, 128 tokens, not of 1"),
        (config._replace(head_dim=72), "multiples of 16 up to 256, not of 72"),
        (config._replace(kv_heads=8, heads=1024), "at most 64 query heads to a KV head, not 128"),
        (config._replace(dtype=torch.float32), "in bfloat16 and float16, not in torch.float32"),
        (config._replace(cap=30.0), "no soft cap"),
        (config._replace(kv_scales=(1.0, 1.0)), "one scale for K and V"),
        (config._replace(sinks=True), "XQA is run without attention sinks"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_xqa(changed)
