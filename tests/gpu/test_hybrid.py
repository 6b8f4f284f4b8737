"""Hybrids: how checkpoints hold them, what is refused, and states through the whole engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import CacheConfig, ModelConfig, ScheduleConfig, SpeculativeConfig
from core.errors import ConfigError
from gpu.build import Beside, Drafting, build_executor, spec_of
from gpu.executor import LocalExecutor
from gpu.weights import load_model
from tests.rigs import tiny_model
from tests.rigs.tiny_model import Tiny


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build("qwen3.5-moe", tmp_path_factory.mktemp("sparse"))


def test_stacked_experts_and_heads_that_draft(sparse: Tiny, tmp_path: Path) -> None:
    """Checkpoints of Qwen3.5 stack the experts, name the language model and have an MTP head and a tower."""
    stored = load_file(sparse.path / "model.safetensors")
    found: dict[str, torch.Tensor] = {"mtp.fc.weight": torch.zeros(1), "model.visual.x": torch.zeros(1)}
    for name, tensor in stored.items():
        if ".experts." not in name:
            found[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(4):
        own = f"layers.{layer}.mlp.experts."
        named = {name.split(own)[1]: tensor for name, tensor in stored.items() if own in name}
        gate_up = [torch.cat([named[f"{i}.{part}_proj.weight"] for part in ("gate", "up")]) for i in range(4)]
        down = [named[f"{i}.down_proj.weight"] for i in range(4)]
        found[f"model.language_model.{own}gate_up_proj"] = torch.stack(gate_up)
        found[f"model.language_model.{own}down_proj"] = torch.stack(down)
    save_file(found, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((sparse.path / "config.json").read_text())
    spec, cpu = spec_of(sparse.path), torch.device("cpu")
    own, theirs = (load_model(spec, path, torch.float32, cpu).places() for path in (sparse.path, tmp_path))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in own.items())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"algorithm": "ngram"}, "--speculative-algorithm ngram: Qwen3_5MoeForCausalLM has linear attention"),
        ({"algorithm": "eagle"}, "--speculative-algorithm eagle: Qwen3_5MoeForCausalLM has linear attention"),
    ],
)
def test_speculation_is_refused(sparse: Tiny, settings: dict[str, str], named: str) -> None:
    drafting = Drafting(SpeculativeConfig(algorithm=settings["algorithm"]), sparse.path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=named):
        _build(sparse, CacheConfig(kv_tokens=512), Beside(drafting))


def test_fp8_pages_are_refused(sparse: Tiny) -> None:
    with pytest.raises(ConfigError, match="--kv-dtype fp8: Qwen3_5MoeForCausalLM has linear attention"):
        _build(sparse, CacheConfig(kv_dtype="fp8"), Beside())


def test_memory_is_divided_between_pages_and_checkpoints(sparse: Tiny) -> None:
    made = _build(sparse, CacheConfig(kv_tokens=4096), Beside()).capabilities
    assert made.num_pages == 257
    assert made.checkpoints is not None and 1 <= made.checkpoints < 257
    assert any("state checkpoints" in phrase for phrase in made.memory)
    without = _build(sparse, CacheConfig(kv_tokens=4096, radix_cache=False), Beside()).capabilities
    assert without.checkpoints == 0


def _build(tiny: Tiny, cache: CacheConfig, beside: Beside) -> LocalExecutor:
    return build_executor(
        spec_of(tiny.path), tiny.path, ModelConfig(), cache, ScheduleConfig(), lambda *_: None, beside
    )
