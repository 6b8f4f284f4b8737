"""Loading and unloading of adapters while requests run."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from app.engine.adapters import Adapters
from app.engine.job import Job, Piece
from app.http.delivery import Collector, running
from app.text.tokenizer import Tokenizer
from core.adapters import LINEAR, AdapterLimits, adapter_limits, adapters_at_start
from core.config import LoraConfig
from core.errors import ConfigError, EngineFailed, NotFound, RequestError
from core.plan import StepFailure
from core.types import FinishReason, RootKey
from tests.rigs.executor import oracle
from tests.rigs.step_loop import GREEDY, PROMPT, VOCAB, Bench, key, load
from tests.rigs.wait import settle

LIMITS = AdapterLimits(places=2, max_rank=8, host=3)


@pytest.fixture
async def bench(tokenizer: Tokenizer, root: Path) -> Bench:
    return Bench(tokenizer, eager=False, adapters=LIMITS, roots=(root,))


# -- life --------------------------------------------------------------------------------------------


async def test_adapters_answer_side_by_side(bench: Bench, root: Path) -> None:
    a, b = await load(bench, root, "a"), await load(bench, root, "b")
    await bench.start("base", 12)
    await bench.start("a", 12, root=key(a))
    await bench.start("b", 12, root=key(b))
    await bench.work()
    for id, adapter in (("base", ""), ("a", a.id), ("b", b.id)):
        assert bench.tokens(f"{id}-0") == oracle(PROMPT.tolist(), 12, VOCAB, adapter=adapter)


async def test_unloading_waits_for_requests_and_refuses_new_ones(bench: Bench, root: Path) -> None:
    a = await load(bench, root, "a")
    await bench.start("running", 30, root=key(a))
    await settle()
    bench.executor.complete(len(bench.executor.pending))
    await bench.start("queued", 4, root=key(a))
    unloading = asyncio.ensure_future(bench.adapters.unload("a"))
    await settle()
    assert bench.adapters.find("a") is None and not unloading.done()
    with pytest.raises(NotFound, match="unloaded"):
        await bench.start("late", 4, root=key(a))
    await bench.work()
    await unloading
    assert bench.tokens("queued-0") == oracle(PROMPT.tolist(), 4, VOCAB, adapter=a.id)
    assert bench.executor.host == {} and bench.engine.places.taken == 0


@pytest.mark.parametrize("at", range(4))
async def test_unloading_between_the_prompts_of_a_request_refuses_all_of_it(
    bench: Bench, root: Path, at: int
) -> None:
    """`at` turns after it came, when some of its prompts run."""
    a = await load(bench, root, "a")
    jobs = [
        Job(id=f"r{i}", prompt="x" * 5000, truncate_prompt=8, sampling=GREEDY, max_tokens=4, root=key(a), n=2)
        for i in range(3)
    ]

    async def ask() -> list[Piece]:
        collector = Collector(6)
        async with running(bench.submitter, jobs, collector.take):
            return await collector.collect()

    asked = asyncio.ensure_future(ask())
    while len(bench.submitter._runs) < at and not asked.done():
        await asyncio.sleep(0)
    unloading = asyncio.ensure_future(bench.adapters.unload("a"))
    await settle()
    while not unloading.done():
        bench.executor.complete(len(bench.executor.pending))
        await asyncio.sleep(0.001)
    if at < 3:
        with pytest.raises(NotFound, match="unloaded"):
            await asked
    else:
        assert len(await asked) == 6
    await bench.work()
    assert bench.executor.host == {} and bench.engine.places.taken == 0


async def test_a_name_is_reused_while_its_first_adapter_drains(bench: Bench, root: Path) -> None:
    first = await load(bench, root, "a")
    await bench.start("first", 20, root=key(first))
    unloading = asyncio.ensure_future(bench.adapters.unload("a"))
    await settle()
    second = await bench.adapters.load("a", str(root / "b"))
    assert second.id != first.id
    await bench.start("second", 20, root=key(second))
    await bench.work()
    await unloading
    for id, info in (("first", first), ("second", second)):
        assert bench.tokens(f"{id}-0") == oracle(PROMPT.tolist(), 20, VOCAB, adapter=info.id)
    assert [each.id for each in bench.adapters.listed] == [second.id]


async def test_statistics_name_running_and_waiting_adapters(bench: Bench, root: Path) -> None:
    """There are two places: the third waits, until its request has ended."""

    def named() -> list[list[str]]:
        now = bench.engine.load()
        return [bench.adapters.names(ids) for ids in (now.running_adapters, now.waiting_adapters)]

    for info in [await load(bench, root, name) for name in "cba"]:
        await bench.start(info.name, 30, root=key(info))
    assert named() == [[], ["a", "b", "c"]]
    for _ in range(4):
        await bench.complete()
    assert named() == [["b", "c"], ["a"]]
    statistics = bench.adapters.statistics()
    assert statistics is not None and (statistics.taken, statistics.host, statistics.loaded) == (2, 3, 3)
    await bench.work()
    assert named() == [[], []]


async def test_an_abort_lets_unloading_end(bench: Bench, root: Path) -> None:
    a = await load(bench, root, "a")
    run = await bench.start("a", 400, root=key(a))
    await settle()
    unloading = asyncio.ensure_future(bench.adapters.unload("a"))
    await settle()
    run.abort()
    await bench.work()
    await unloading


async def test_a_client_that_leaves_does_not_stop_loading_or_unloading(bench: Bench, root: Path) -> None:
    bench.executor.holds = True
    loading = asyncio.ensure_future(load(bench, root, "a"))
    while not bench.executor.commands:
        await asyncio.sleep(0.001)
    loading.cancel()
    await settle()
    with pytest.raises(RequestError, match="loaded already"):
        await load(bench, root, "a")
    bench.executor.carry_out()
    await settle()
    assert [each.name for each in bench.adapters.listed] == ["a"]
    bench.executor.holds = False
    info = bench.adapters.listed[0]
    await bench.start("r", 8, root=key(info))
    unloading = asyncio.ensure_future(bench.adapters.unload("a"))
    await settle()
    unloading.cancel()
    await bench.work()
    await settle()
    assert bench.executor.host == {}


async def test_a_request_that_is_cancelled_while_encoded_is_not_counted(bench: Bench, root: Path) -> None:
    a = await load(bench, root, "a")
    for _ in range(3):
        starting = asyncio.ensure_future(
            bench.start("r", 8, root=key(a), prompt="x" * 5000, truncate_prompt=8)
        )
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    await bench.adapters.unload("a")


async def test_more_adapters_than_host_memory_are_read_again(bench: Bench, root: Path) -> None:
    infos = [await load(bench, root, name) for name in "abcdef"]
    assert len(bench.executor.host) == LIMITS.host
    for index, info in enumerate(infos * 2):
        await bench.start(f"r{index}", 6, root=key(info))
    await bench.work()
    for index, info in enumerate(infos * 2):
        assert bench.tokens(f"r{index}-0") == oracle(PROMPT.tolist(), 6, VOCAB, adapter=info.id)


async def test_pinned_adapters_stay(bench: Bench, root: Path) -> None:
    pinned = await load(bench, root, "a", pinned=True)
    others = [await load(bench, root, name) for name in "bcdef"]
    for index, info in enumerate([pinned, *others]):
        await bench.start(f"r{index}", 4, root=key(info))
    await bench.work()
    assert pinned.id in bench.executor.host and pinned.id in bench.executor.placed.values()
    with pytest.raises(RequestError, match="pinned"):
        await load(bench, root, "g", pinned=True)
    await bench.adapters.unload("a")
    await load(bench, root, "g", pinned=True)


async def test_an_adapter_that_is_gone_ends_its_requests_only(bench: Bench, root: Path) -> None:
    infos = [await load(bench, root, name) for name in "abcd"]
    bench.executor.broken[infos[0].path] = "the file is gone"
    await bench.start("lost", 6, root=key(infos[0]))
    await bench.start("base", 6)
    await bench.start("b", 6, root=key(infos[1]))
    await bench.work()
    finish = bench.pieces["lost-0"][-1].finish
    assert finish is not None and finish.reason is FinishReason.ERROR
    assert finish.message is not None and "the file is gone" in finish.message
    assert bench.reason("base-0") is bench.reason("b-0") is FinishReason.LENGTH
    bench.executor.broken.clear()
    await bench.start("again", 6, root=key(infos[0]))
    await bench.work()
    assert bench.reason("again-0") is FinishReason.LENGTH


async def test_a_lost_engine_ends_loading(bench: Bench, root: Path) -> None:
    bench.executor.holds = True
    loading = asyncio.ensure_future(load(bench, root, "a"))
    while not bench.executor.commands:
        await asyncio.sleep(0.001)
    bench.executor.done.put(StepFailure(0, "lost"))
    bench.engine.wake()
    with pytest.raises(EngineFailed):
        await loading


@pytest.mark.parametrize("seed", range(12))
async def test_loads_unloads_aborts_and_traffic_at_random(
    tokenizer: Tokenizer, root: Path, seed: int
) -> None:
    rng = random.Random(seed)
    limits = AdapterLimits(places=rng.randrange(1, 4), max_rank=8, host=rng.randrange(1, 4))
    bench = Bench(tokenizer, eager=False, depth=rng.randrange(3), adapters=limits, roots=(root,), rows=4)
    tasks: list[asyncio.Task[object]] = []
    sent: dict[str, str] = {}
    for turn in range(300):
        listed = bench.adapters.listed
        match rng.randrange(8):
            case 0:
                name = rng.choice("abcdefgh")
                tasks.append(asyncio.ensure_future(bench.adapters.load(name, str(root / name))))
            case 1 if listed:
                tasks.append(asyncio.ensure_future(bench.adapters.unload(rng.choice(listed).name)))
            case 2 if sent:
                bench.submitter.abort([rng.choice(list(sent))])
            case 3:
                if tasks:
                    rng.choice(tasks).cancel()
            case 4:
                bench.engine.retract_all()
            case _:
                id, info = f"r{turn}", rng.choice([None, *listed])
                adapter = "" if info is None else info.id
                await bench.start(id, rng.randrange(1, 20), root=RootKey(adapter=adapter))
                sent[id] = adapter
        if rng.random() < 0.7 and bench.executor.pending:
            bench.executor.complete()
        await settle()
        bench.scheduler.check_integrity()
    await bench.work()
    await asyncio.gather(*tasks, return_exceptions=True)
    for info in bench.adapters.listed:
        await bench.adapters.unload(info.name)
    await settle()
    assert bench.executor.host == {} and bench.engine.places.taken == 0
    for id, adapter in sent.items():
        if bench.reason(f"{id}-0") is FinishReason.LENGTH:
            tokens = bench.tokens(f"{id}-0")
            assert tokens == oracle(PROMPT.tolist(), len(tokens), VOCAB, adapter=adapter)


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "..", ".a", "a b", "a,b", "a\n", "x" * 257, "a\\b"])
async def test_names_that_are_refused(bench: Bench, root: Path, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        await bench.adapters.load(name, str(root / "a"))
    assert caught.value.param == "lora_name"


async def test_paths_are_confined_to_the_roots(bench: Bench, root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    paths = [outside, root / ".." / "outside", root / "link", "/", "", "\0", root / "loop", "x" * 10_000]
    for path in paths:
        with pytest.raises(RequestError, match=r"outside of the directories|is no directory") as caught:
            await bench.adapters.load("x", str(path))
        assert caught.value.param == "lora_path"
    with pytest.raises(RequestError, match="no directory"):
        await bench.adapters.load("x", str(root / "missing"))
    assert not bench.executor.commands


async def test_what_the_executor_refuses_is_told(bench: Bench, root: Path) -> None:
    bench.executor.broken[str((root / "a").resolve())] = "rank 64 is more than --max-lora-rank 8"
    with pytest.raises(RequestError, match="rank 64") as caught:
        await load(bench, root, "a")
    assert caught.value.param == "lora_path"
    bench.executor.broken.clear()
    await load(bench, root, "a")
    assert len(bench.executor.host) == 1


async def test_taken_names_and_unknown_ones(bench: Bench, root: Path) -> None:
    await load(bench, root, "a")
    with pytest.raises(RequestError, match="loaded already"):
        await load(bench, root, "a")
    with pytest.raises(RequestError, match="the model itself"):
        Adapters(bench.replicas, LIMITS, ("a",))._check("a", False)
    with pytest.raises(NotFound):
        await bench.adapters.unload("b")


async def test_without_adapters_the_flag_is_named(tokenizer: Tokenizer, root: Path) -> None:
    bench = Bench(tokenizer)
    with pytest.raises(RequestError, match="--enable-lora"):
        await load(bench, root, "a")
    with pytest.raises(RequestError, match="--enable-lora"):
        await bench.adapters.unload("a")


# -- settings --------------------------------------------------------------------------------------------


def test_adapters_of_the_start() -> None:
    texts = ("a=/x/a=b", "/x/b/", '{"lora_name": "c", "lora_path": "/x/c", "pinned": true}')
    found = adapters_at_start(
        LoraConfig(lora=(*texts, '{"name": "d", "path": "/x/d", "base_model_name": "m"}'))
    )
    told = [(each.name, each.path, each.pinned) for each in found]
    assert told == [("a", "/x/a=b", False), ("b", "/x/b/", False), ("c", "/x/c", True), ("d", "/x/d", False)]


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": ("a:b=/x",)},
        {"lora": ("=/x",)},
        {"lora": ("a=",)},
        {"lora": ("{",)},
        {"lora": ("a=/x", "a=/y")},
        {"lora": ('{"name": "a", "path": "/x", "pinned": true}',), "max_loras_per_batch": 1},
    ],
)
def test_settings_that_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        adapters_at_start(LoraConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "targets"),
    [
        ({"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"]}, ("q_proj", "up_proj")),
        ({"target_modules": ["v_proj", "lm_head"]}, ("v_proj", "lm_head")),
        ({"target_modules": "all-linear"}, LINEAR),
        ({"target_modules": ["q_proj", "gate_up_proj"]}, ("q_proj", "gate_proj", "up_proj")),
        ({"target_modules": ["qkv_proj"]}, ("q_proj", "k_proj", "v_proj")),
        ({"target_modules": ["q_proj", "w1"]}, LINEAR),
        ({"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, LINEAR),
        ({}, LINEAR),
    ],
)
def test_targets_are_those_of_the_adapters_at_the_start(
    file: dict[str, object], targets: tuple[str, ...]
) -> None:
    limits = adapter_limits(LoraConfig(lora=("a=/a",)), [file])
    assert limits is not None and limits.targets == targets


def test_room_follows_from_flags_and_adapters() -> None:
    assert adapter_limits(LoraConfig(), []) is None
    plain = adapter_limits(LoraConfig(enable_lora=True), [])
    assert plain is not None and (plain.places, plain.host, plain.max_rank) == (8, 8, 16)
    files = [{"r": 4, "rank_pattern": {"q_proj": 32}, "target_modules": ["q_proj", "v_proj"]}, {"r": 8}]
    two = adapter_limits(LoraConfig(lora=("a=/a", "b=/b"), max_loras_per_batch=1), files[:1])
    assert two is not None
    assert (two.places, two.host, two.max_rank, two.targets) == (1, 2, 32, ("q_proj", "v_proj"))
    given = adapter_limits(
        LoraConfig(enable_lora=True, max_lora_rank=64, lora_target_modules=("all",)), files
    )
    assert given is not None and given.max_rank == 64 and "lm_head" in given.targets
    fused = adapter_limits(LoraConfig(enable_lora=True, lora_target_modules=("qkv_proj", "o_proj")), [])
    assert fused is not None and fused.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(ConfigError, match="--lora-target-modules"):
        adapter_limits(LoraConfig(enable_lora=True, lora_target_modules=("x",)), [])
    with pytest.raises(ConfigError, match="--max-loaded-loras"):
        adapter_limits(LoraConfig(lora=("a=/a", "b=/b"), max_loaded_loras=1), [])
