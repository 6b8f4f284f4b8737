"""Hybrids: how checkpoints hold them, what is refused, and states through the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
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
from gpu.kv.states import StatePool
from gpu.memory import with_states
from gpu.weights import load_model
from tests.rigs import drafters, mtp, tiny_model
from tests.rigs.draft_jobs import FEW, Engines, engines_of, jobs, same
from tests.rigs.drafting import Drafts
from tests.rigs.driver import Driver, serve
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


def test_trees_are_refused(sparse: Tiny) -> None:
    trees = SpeculativeConfig(algorithm="mtp", num_steps=2, eagle_topk=2, num_draft_tokens=4)
    with pytest.raises(ConfigError, match="--speculative-eagle-topk 2: Qwen3_5MoeForCausalLM has linear att"):
        _build(sparse, CacheConfig(kv_tokens=512), Beside(Drafting(trees, sparse.path)))


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


def test_memory_of_pending_drafts_is_counted(sparse: Tiny) -> None:
    spec = spec_of(sparse.path)
    assert spec.linear is not None
    pool = StatePool(spec.linear, 3, 0, torch.bfloat16, torch.device("cpu"), drafts=2)
    assert pool.pending is not None
    held = sum(each.nbytes for each in pool.pending if each.dtype != torch.int32)
    assert held == 3 * StatePool.pending_bytes(spec.linear, 2, torch.bfloat16)
    (none, entry), (slots, each) = (with_states(spec, torch.bfloat16, 8, 2**30, drafts) for drafts in (0, 2))
    assert (none, slots) == (10, 10)
    assert each == entry + held // 3


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
    config = ScheduleConfig(overlap_depth=depth, conservativeness=0.01, prefill_weight=0.0)
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


# -- with drafts -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engines_of(mtp.build("qwen3-next", tmp_path_factory.mktemp("next")).path) as made:
        yield made


@pytest.mark.parametrize(
    ("depth", "overlap", "right", "retract"),
    [(1, 0, 1.0, False), (3, 1, 0.7, False), (2, 2, 0.0, False), (3, 2, 0.9, True)],
)
async def test_drafts_change_no_text(
    drafted: Engines, depth: int, overlap: int, right: float, retract: bool
) -> None:
    plain = await drafted.plain(jobs(FEW))
    engine = drafted.make(Drafts(depth, right), overlap)
    for answer in await engine.answers(jobs(FEW), retract=retract):
        same(answer, plain[answer.run.id])
    most = max(engine.runner.most.values())
    assert most == 1 + depth if right else most < 1 + depth
    assert (engine.scheduler.counters.retractions > 5) == retract


@pytest.mark.parametrize("own", [True, False])
async def test_guesses_change_no_text(drafted: Engines, tmp_path: Path, own: bool) -> None:
    """Drafts come from the model's own layer, or from a head."""
    plain = await drafted.plain(jobs(FEW))
    make = drafters.mtp(drafted.path) if own else drafters.head("eagle", tmp_path)
    engine = drafted.make(Drafts(2, 0.0, make), 1)
    for answer in await engine.answers(jobs(FEW)):
        same(answer, plain[answer.run.id])
    assert any(plan.drafts and plan.chunks for plan in engine.runner.plans), "no prompt beside drafts"


@pytest.mark.parametrize(
    ("algorithm", "overlap", "tokens"), [("ngram", 0, 160), ("mtp", 1, 200), ("ngram --tp 2", 2, 240)]
)
def test_turns_start_from_states_that_drafts_passed(
    drafted: Engines, monkeypatch: pytest.MonkeyPatch, algorithm: str, overlap: int, tokens: int
) -> None:
    """Answers are of two tokens, which prompt lookup often guesses right; in 160 tokens rows are
    preempted."""
    monkeypatch.setattr(manager, "GAIN", 4)
    monkeypatch.setattr(manager, "INTERVAL", 16)
    params = SamplingParams(seed=3, max_tokens=30, logprobs=0, logit_bias=((5, 50.0), (6, 50.0)))
    found = []
    for flags in ("--kv-tokens 640", f"--kv-tokens {tokens} --speculative-algorithm {algorithm}"):
        driver = serve(drafted.path, f"{flags} --overlap-depth {overlap}")
        first = driver.run([A, B, C], [params] * 3)
        on = [[*prompt, *answer.tokens, 11] for prompt, answer in zip((A, B, C), first, strict=True)]
        found.append([*first, *driver.run(on, [params] * 3)])
        driver.close()
    for plain, other in zip(*found, strict=True):
        assert other.tokens == plain.tokens
        assert other.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    counters, drafts = driver.scheduler.counters, driver.drafts
    assert drafts.drafted > 300 if algorithm == "mtp" else drafts.accepted > 50
    # Of the first turn what B and C have of A; of the second what they answered, up to a multiple of 16.
    assert counters.retractions if tokens == 160 else counters.cached_tokens >= 2 * 28 + 150
