"""Several ranks on a CPU, each with a part of the model, say what one rank says."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from app.engine.job import Piece
from app.engine.loop import Engine
from app.engine.replicas import Replicas
from app.engine.submit import LiveRun, Submitter
from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from core.adapters import TARGETS
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.command import Command, CommandDone
from core.config import CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig, SpeculativeConfig
from core.errors import ConfigError
from core.plan import Chunk, NewSlot, PageWrites, StepFailure, StepPlan, StepResult
from core.request import SamplingParams
from core.schedule.scheduler import Scheduler
from core.types import NO_TOKENS
from gpu.build import NO_DRAFTS, NOTHING_BESIDE, Beside, Drafting, build_executor, spec_of
from gpu.executor import LocalExecutor
from gpu.grammar import Compiler
from gpu.nodes.join import Nodes
from gpu.runner import ModelRunner
from tests.rigs import draft_heads, gguf_file, lora, tiny_model
from tests.rigs.arrays import ints
from tests.rigs.draft_jobs import FEW, STOP, jobs, same
from tests.rigs.drafting import Answer as Told
from tests.rigs.driver import Answer, Driver
from tests.rigs.nodes import Pair
from tests.rigs.runner import GREEDY
from tests.rigs.tiny_model import VOCAB
from tests.rigs.wait import PATIENCE

HERE = "tests.rigs.processors"
PROMPT = ints(range(3, 13))
PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (40, 23, 150, 40)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs_start=0, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=5, max_tokens=18, presence_penalty=0.5),
    SamplingParams(temperature=0.7, top_p=0.8, seed=6, max_tokens=7),
    SamplingParams(temperature=0.0, max_tokens=9),
]


@pytest.fixture(autouse=True)
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' tokens, in each step."""
    monkeypatch.setattr("gpu.executor.COMPARED", 1)


def build(
    path: Path, tp: int, schedule: ScheduleConfig, beside: Beside = NOTHING_BESIDE, nodes: int = 1
) -> LocalExecutor:
    """The executor of all ranks, or of node 0 of two."""
    config = ModelConfig(
        device="cpu", quantization="none", logit_processor=f"only={HERE}:only,broken={HERE}:broken"
    )
    cache = CacheConfig(page_size=4, kv_tokens=4096)

    def of(parallel: ParallelConfig, nodes: Nodes | None = None) -> LocalExecutor:
        own = beside._replace(parallel=parallel, nodes=nodes)
        return build_executor(spec_of(path), path, config, cache, schedule, lambda stage, share: None, own)

    if nodes == 1:
        made = of(ParallelConfig(tp=tp))
    else:
        pair = Pair(lambda each: of(each.parallel, each), tp)
        pair.start()
        made = pair.first
    made.prepare(lambda share: None)
    return made


def answers(path: Path, tp: int, depth: int = 1) -> list[Answer]:
    """Twice: the second time prefixes are cached."""
    schedule = ScheduleConfig(step_tokens=64, max_running=4, overlap_depth=depth)
    driver = Driver(build(path, tp, schedule), schedule)
    found = [answer for _ in range(2) for answer in driver.run(PROMPTS, PARAMS)]
    driver.close()
    return found


@pytest.mark.parametrize(
    ("name", "tp", "more"),
    [
        ("llama", 2, {}),
        ("llama", 4, {"vocab_size": 253}),
        ("llama-tied-bias", 2, {"vocab_size": 251}),
        ("qwen2", 4, {}),
        ("qwen3", 2, {}),
        ("qwen2-moe", 2, {}),
        ("phi3", 2, {}),
        ("granite", 2, {}),
        ("olmo2-yarn", 2, {}),
        ("olmo3", 4, {}),
        ("gemma2", 2, {"num_hidden_layers": 2}),
        ("glm4-moe", 2, {}),
        ("deepseek-v2", 4, {}),
        ("deepseek-v3", 2, {}),
        ("qwen3-moe-mixed", 2, {}),
        ("qwen3-moe", 4, {}),
        ("gpt-oss", 2, {"num_hidden_layers": 2}),
        ("qwen3-next", 2, {}),
        ("qwen3.5", 2, {}),
    ],
)
def test_text_is_that_of_one_rank(name: str, tp: int, more: dict[str, int], tmp_path: Path) -> None:
    path = tiny_model.build(name, tmp_path, **more).path
    for one, several in zip(answers(path, 1), answers(path, tp), strict=True):
        assert several.tokens == one.tokens
        assert several.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_text_of_a_gguf(tmp_path: Path) -> None:
    made = tiny_model.build("llama", tmp_path / "model")
    path = gguf_file.write(tmp_path / "model.gguf", "llama", made.reference, quantise=True)
    assert [each.tokens for each in answers(path, 2)] == [each.tokens for each in answers(path, 1)]


@pytest.mark.parametrize("architecture", ["LlamaModel", "Qwen2ForSequenceClassification"])
def test_models_that_embed_and_classify(architecture: str, tmp_path: Path) -> None:
    path = tiny_model.build_headless(architecture, tmp_path).path
    plan = StepPlan(
        0,
        NO_TOKENS,
        (Chunk(1, 0, PROMPT, False, hidden="last"),),
        (NewSlot(1, GREEDY, PROMPT, NO_TOKENS, 0),),
        PageWrites(ints([1] * 3), ints(range(3)), ints(range(1, 4))),
    )
    (one,), (two,) = (play(build(path, tp, ScheduleConfig()), plan) for tp in (1, 2))
    np.testing.assert_allclose(two.hidden[1], one.hidden[1], atol=1e-4)


def test_ranks_share_the_hosts_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each has its part of the weights and of the heads: as many tokens as on one rank, where nothing is
    copied."""
    path = tiny_model.build("qwen3-moe", tmp_path).path
    monkeypatch.setattr("gpu.build.free_bytes", lambda device: 8 * 2**20)

    def tokens(tp: int) -> int:
        config, schedule = ModelConfig(device="cpu"), ScheduleConfig(max_running=512)
        cache, beside = CacheConfig(page_size=4), Beside(parallel=ParallelConfig(tp=tp))
        made = build_executor(spec_of(path), path, config, cache, schedule, lambda stage, share: None, beside)
        return 4 * made.capabilities.num_pages

    one, two, four = (tokens(tp) for tp in (1, 2, 4))
    assert two == pytest.approx(one, rel=0.05)
    assert four == pytest.approx(one / 2, rel=0.05)  # two ranks for each KV head


def test_sizes_that_do_not_divide_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path).path
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--tp 3 does not divide num_attention_heads \(4\)"):
        build(path, 3, ScheduleConfig())


# -- everything that a request may ask for -----------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """All 256 tokens are bytes."""
    return Tokenizer.load(None, VOCAB, [STOP])


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Compiler]:
    compiler = Compiler(tokenizer.token_table(VOCAB), HelperProcess())
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with the layers that the heads of `draft_heads` are for. One has experts, which are slow on a
    CPU."""
    more = {"num_hidden_layers": 6, "mlp_only_layers": [0, 1, 2, 4, 5]}
    return tiny_model.build("qwen3-moe-mixed", tmp_path_factory.mktemp("moe"), **more).path


class Serving(NamedTuple):
    """An engine that answers jobs over a checkpoint."""

    path: Path
    tokenizer: Tokenizer
    grammars: Compiler

    async def answers(
        self, tp: int, drafting: Drafting = NO_DRAFTS, overlap: int = 1, nodes: int = 1
    ) -> list[Told]:
        """Answers to a job of each kind, all at once."""
        schedule = ScheduleConfig(step_tokens=64, max_running=8, overlap_depth=overlap)
        executor = build(self.path, tp, schedule, Beside(drafting), nodes)
        caps = executor.capabilities
        scheduler = Scheduler(caps, CacheManager(caps.num_pages, caps.page_size), schedule, monotonic)
        engine = Engine(scheduler, executor, overlap, monotonic)
        submitter = Submitter(Replicas([engine]), self.tokenizer, monotonic, self.grammars)
        engine.start(asyncio.get_running_loop())
        found = []
        for job in jobs(FEW):
            pieces: list[Piece] = []
            run = await submitter.start(job, lambda index, piece, into=pieces: into.append(piece))  # type: ignore[misc]
            assert isinstance(run, LiveRun)
            found.append(Told(run, pieces))
        for told in found:
            await told.run.wait()
        await engine.quiet()
        engine.check_integrity()
        engine.close()
        assert engine.failure is None
        return found


@pytest.fixture(scope="module")
def one(moe: Path, tokenizer: Tokenizer, grammars: Compiler) -> list[Told]:
    """Answers of one rank, without drafts."""
    return asyncio.run(Serving(moe, tokenizer, grammars).answers(1))


HEADS = ("eagle", "eagle3", "dflash")


CASES = [
    (2, "none", 0),
    (4, "none", 2),
    (2, "ngram", 1),
    (2, "eagle", 2),
    (2, "eagle3", 1),
    (2, "dflash", 1),
    (2, "draft-model", 0),
]
"""Ranks, what drafts, and how far ahead steps are planned."""


@pytest.mark.parametrize("case", CASES)
async def test_whatever_a_request_asks_for(
    one: list[Told],
    moe: Path,
    tokenizer: Tokenizer,
    grammars: Compiler,
    tmp_path: Path,
    case: tuple[int, str, int],
) -> None:
    """Grammars, processors, log-probabilities, hidden states, with drafts and without."""
    tp, algorithm, overlap = case
    serving = Serving(moe, tokenizer, grammars)
    path = draft_heads.write(algorithm, tmp_path) if algorithm in HEADS else moe
    drafting = Drafting(SpeculativeConfig(algorithm=algorithm), path)  # type: ignore[arg-type]
    for told, want in zip(await serving.answers(tp, drafting, overlap), one, strict=True):
        same(told, want)


async def test_whatever_a_request_asks_for_on_two_nodes(
    one: list[Told], moe: Path, tokenizer: Tokenizer, grammars: Compiler
) -> None:
    drafting = Drafting(SpeculativeConfig(algorithm="ngram"))
    serving = Serving(moe, tokenizer, grammars)
    for told, want in zip(await serving.answers(2, drafting, nodes=2), one, strict=True):
        same(told, want)


async def test_drafts_that_end_on_rank_0_end_on_all(
    one: list[Told],
    moe: Path,
    tokenizer: Tokenizer,
    grammars: Compiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts end where masks along them take too long, by rank 0's clock: here always."""
    monkeypatch.setattr("gpu.grammar.matchers.MOST_SECONDS", -1.0)
    serving = Serving(moe, tokenizer, grammars)
    drafting = Drafting(SpeculativeConfig(algorithm="draft-model"), moe)
    for told, want in zip(await serving.answers(2, drafting), one, strict=True):
        same(told, want)


ADAPTERS = ("", "a", "b", "c", "d")


class Adapted:
    """Adapters of a checkpoint, and what each says on one rank."""

    def __init__(self, moe: Path, directory: Path) -> None:
        self._moe, self._directory = moe, directory
        for seed, name in enumerate(ADAPTERS[1:], 1):
            made = lora.adapter_for(moe, TARGETS, rank=2 * seed, seed=seed)
            lora.save(made, directory / name, rank=2 * seed)
        self.one = self.tokens(1, NO_DRAFTS)
        assert len(set(map(tuple, self.one))) == len(ADAPTERS)

    def tokens(self, tp: int, drafting: Drafting, nodes: int = 1) -> list[list[int]]:
        """Tokens of two requests for each adapter."""
        schedule = ScheduleConfig(step_tokens=64, max_running=6)
        driver = Driver(build(self._moe, tp, schedule, Beside(drafting, lora.LIMITS), nodes), schedule)
        for name in ADAPTERS[1:]:
            driver.load(name, self._directory / name)
        params = SamplingParams(temperature=0.0, max_tokens=12)
        found = driver.run(PROMPTS[:1] * 10, [params] * 10, adapters=ADAPTERS * 2)
        driver.close()
        return [answer.tokens for answer in found]


@pytest.fixture(scope="module")
def adapted(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(moe, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(
    ("tp", "drafting"), [(2, NO_DRAFTS), (4, Drafting(SpeculativeConfig(algorithm="ngram")))]
)
def test_adapters_say_what_they_say_on_one_rank(adapted: Adapted, tp: int, drafting: Drafting) -> None:
    """Adapters change attention, MLPs, experts, the embedding and the head; there are more than places."""
    assert adapted.tokens(tp, drafting) == adapted.one


def test_adapters_on_two_nodes(adapted: Adapted) -> None:
    assert adapted.tokens(2, NO_DRAFTS, nodes=2) == adapted.one


# -- what ends ranks, and what changes between steps --------------------------------------------------


def prefill(step: int) -> StepPlan:
    """The prompt in slot 1 on pages 1 to 3; yields its first token."""
    writes = PageWrites(ints([1] * 3), ints(range(3)), ints(range(1, 4)))
    new = NewSlot(1, GREEDY, PROMPT, NO_TOKENS, 0)
    return StepPlan(step, NO_TOKENS, (Chunk(1, 0, PROMPT, True),), (new,), writes)


def play(executor: LocalExecutor, *work: StepPlan | Command) -> list[Any]:
    """The answers to all of it, one after the other, and the executor closed."""
    arrived = threading.Semaphore(0)
    executor.start(arrived.release)
    found: list[Any] = []
    for item in work:
        if isinstance(item, Command):
            executor.command(item)
        else:
            executor.submit(item)
        while not (answers := executor.results()):
            assert arrived.acquire(timeout=PATIENCE), "no answer"
        found += answers
    executor.close()
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path


def test_commands_change_all_ranks(llama: Path, tmp_path: Path) -> None:
    """Weights of another checkpoint, and of the same again; sleep and wake."""
    other = tiny_model.build("llama", tmp_path).reference
    changed = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    changed["lm_head.weight"] = changed["lm_head.weight"].roll(1, 0)  # over the ranks' border
    other.save_pretrained(tmp_path, state_dict=changed)
    work = [
        prefill(0),
        Command(id=1, action="load_weights", path=str(tmp_path)),
        prefill(1),
        Command(id=2, action="sleep", tags=("weights", "kv_cache")),
        Command(id=3, action="wake", tags=("weights", "kv_cache")),
        prefill(2),
        Command(id=4, action="load_weights", path=str(tmp_path / "nowhere")),
        prefill(3),
    ]
    first, loaded, second, *slept, third, refused, fourth = play(build(llama, 2, ScheduleConfig()), *work)
    assert [loaded, *slept] == [CommandDone(1), CommandDone(2), CommandDone(3)]
    token = int(first.tokens[0])
    assert [int(each.tokens[0]) for each in (second, third, fourth)] == [(token + 1) % VOCAB] * 3
    assert refused.error is not None


def test_one_rank_records_for_all(llama: Path, tmp_path: Path) -> None:
    done = play(
        build(llama, 2, ScheduleConfig()),
        Command(id=1, action="profile_start"),
        prefill(0),
        Command(id=2, action="profile_stop", path=str(tmp_path / "trace.json")),
    )
    assert done[0] == CommandDone(1) and done[2] == CommandDone(2)
    assert (tmp_path / "trace.json").stat().st_size


def fails(*args: object) -> None:
    raise RuntimeError("rank lost")


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_rank_that_raises_between_exchanges_ends_all(
    llama: Path, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have come to a sum that it never gives to."""
    executor = build(llama, 4, ScheduleConfig())
    runner = executor._workers[lost]._runner
    assert isinstance(runner, ModelRunner)
    monkeypatch.setattr(runner._machine.attention, "attend", fails)
    found = play(executor, prefill(0))
    assert found == [StepFailure(0, "RuntimeError: rank lost")]
    assert not any(thread.is_alive() for worker in executor._workers for thread in worker._threads)


def test_a_rank_that_hangs_holds_nobody_for_ever(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing ends the ranks that wait for it; a server is ended by its watchdog."""
    monkeypatch.setattr("gpu.worker.JOIN_SECONDS", 0.2)
    executor, hang = build(llama, 2, ScheduleConfig()), threading.Event()
    runner = executor._workers[1]._runner
    assert isinstance(runner, ModelRunner)
    monkeypatch.setattr(runner._machine.attention, "attend", lambda *args: hang.wait(PATIENCE))
    executor.start(lambda: None)
    executor.submit(prefill(0))
    executor.close()
    waiting, hanging = (worker._threads[0] for worker in executor._workers)
    waiting.join(PATIENCE)
    assert not waiting.is_alive() and hanging.is_alive()
    hang.set()
    hanging.join(PATIENCE)


def test_ranks_that_sample_different_tokens_fail(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.executor.COMPARED", 2)
    executor = build(llama, 2, ScheduleConfig())
    for step in (0, 1):
        executor._post(0, StepResult(step, ints([5, 6]), failed={0: "its grammar"}))
        executor._post(1, StepResult(step, ints([7, 6 + step])))
    first, failure = executor.results()
    assert first.step == 0 and failure.step == 1
    assert "rank 0 sampled" in failure.reason and "rank 1" in failure.reason


def test_one_clock_says_how_much_is_measured_at_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that measured different steps would wait for each other for ever."""
    asked = set()

    def now() -> float:
        asked.add(threading.current_thread().name)
        return math.inf

    monkeypatch.setattr("gpu.ranks.monotonic", now)
    schedule = ScheduleConfig(max_running=16, itl_target=50.0)
    made = build(llama, 2, schedule, Beside(Drafting(SpeculativeConfig(algorithm="ngram"))))
    made.close()
    assert asked == {"loom-launch-0"}
    costs, chunks = made.capabilities.costs, made.capabilities.chunk_costs
    assert costs is not None and chunks is not None, "drafts and chunks were measured"
