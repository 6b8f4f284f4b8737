"""Hybrids: how checkpoints hold them, what is refused, and states through the whole engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.cache import manager
from core.config import CacheConfig, ModelConfig, ScheduleConfig, SpeculativeConfig
from core.errors import ConfigError
from core.executor import Capabilities
from core.request import SamplingParams
from gpu.build import Beside, Drafting, build_executor, spec_of
from gpu.executor import LocalExecutor
from gpu.weights import load_model
from tests.rigs import tiny_model
from tests.rigs.driver import Driver
from tests.rigs.runner import Rig
from tests.rigs.tiny_model import Tiny

A = [int(i * 37 % 251) + 3 for i in range(40)]
B = [*A[:30], *(int(i * 53 % 241) + 5 for i in range(31))]
C = [*A[:30], 9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build("qwen3.5", tmp_path_factory.mktemp("dense"))


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
        ({"algorithm": "mtp"}, "--speculative-algorithm mtp: Qwen3_5MoeForCausalLM has linear attention"),
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


@pytest.mark.parametrize(("tokens", "depth", "checkpoints"), [(512, 1, 12), (160, 2, 4), (160, 0, 1)])
def test_texts_are_the_same_from_checkpoints_and_after_preemption(
    dense: Tiny, monkeypatch: pytest.MonkeyPatch, tokens: int, depth: int, checkpoints: int
) -> None:
    """Prompts that are equal, that go on a former text, and that leave it in the middle; steps of 24 tokens
    cut them."""
    monkeypatch.setattr(manager, "GAIN", 4)
    monkeypatch.setattr(manager, "INTERVAL", 8)
    alone = Rig(dense.path, page_size=4)
    texts = {}
    for slot, prompt in ((1, A), (2, B), (3, C)):
        texts[slot] = alone.generate(slot, prompt, 30)
    on = [*A, *texts[1], 11, 12, 13]
    texts[4] = alone.generate(4, on, 30)
    rig = Rig(dense.path, page_size=4, rows=4, tokens=tokens, checkpoints=checkpoints)
    capabilities = Capabilities(
        num_pages=tokens // 4 + 1, page_size=4, max_rows=4, context_length=160,
        vocab_size=rig.spec.vocab_size, max_step_tokens=24, checkpoints=checkpoints,
    )  # fmt: skip
    config = ScheduleConfig(overlap_depth=depth, conservativeness=0.01)
    driver = Driver(LocalExecutor([rig.runner], capabilities), config)
    params = [SamplingParams(temperature=0.0, max_tokens=30)] * 3
    first = driver.run([A, B, C], params)
    second = driver.run([on, A, B], params)
    counters = driver.scheduler.counters
    driver.close()
    assert [answer.tokens for answer in first] == [texts[1], texts[2], texts[3]]
    assert [answer.tokens for answer in second] == [texts[4], texts[1], texts[2]]
    assert (counters.retractions > 0) == (tokens < 512)
    if (
        tokens == 512
    ):  # an equal prompt but for its last page, and a turn but for what is behind a multiple of 8
        assert counters.cached_tokens >= 28 + 64 + 36 + 60
