"""Adapters of several replicas: loaded on all or on none, placed where their requests are."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from app.text.tokenizer import Tokenizer
from core.adapters import AdapterInfo, AdapterLimits
from core.errors import RequestError
from core.request import Request, SamplingParams
from core.types import FinishReason, RootKey
from tests.rigs.executor import oracle
from tests.rigs.step_loop import PROMPT, VOCAB, Bench, key, load
from tests.rigs.wait import settle

LIMITS = AdapterLimits(places=2, max_rank=8, host=3)


@pytest.fixture(params=[2, 3])
async def bench(request: pytest.FixtureRequest, tokenizer: Tokenizer, root: Path) -> Bench:
    return Bench(tokenizer, eager=False, replicas=request.param, adapters=LIMITS, roots=(root,))


async def test_every_replica_runs_an_adapter_that_is_loaded_once(bench: Bench, root: Path) -> None:
    a = await load(bench, root, "a")
    for replica in range(len(bench.engines)):
        await bench.start(f"r{replica}", 12, root=key(a), replica=replica)
    await bench.work()
    for replica in range(len(bench.engines)):
        assert bench.tokens(f"r{replica}-0") == oracle(PROMPT.tolist(), 12, VOCAB, adapter=a.id)
        told = bench.adapters.statistics(replica)
        assert told is not None and (told.taken, told.host, told.loaded) == (1, 1, 1)


async def test_places_are_taken_only_where_requests_are(bench: Bench, root: Path) -> None:
    a = await load(bench, root, "a")
    await bench.start("r", 4, root=key(a), replica=1)
    await bench.work()
    assert [engine.places.taken for engine in bench.engines][:2] == [0, 1]


async def test_unloading_waits_for_requests_of_all_replicas(bench: Bench, root: Path) -> None:
    a = await load(bench, root, "a")
    last = len(bench.engines) - 1
    await bench.start("short", 2, root=key(a), replica=0)
    run = await bench.start("long", 60, root=key(a), replica=last)
    await settle()
    unloading = asyncio.ensure_future(bench.adapters.unload("a"))
    for _ in range(10):
        for executor in bench.executors:
            executor.complete(min(len(executor.pending), 1))
        await settle()
    assert bench.engines[0].idle and not unloading.done() and bench.executors[0].host
    run.abort()
    await bench.work()
    await unloading
    assert all(executor.host == {} for executor in bench.executors)
    assert all(engine.places.taken == 0 for engine in bench.engines)


async def test_what_one_replica_refuses_is_loaded_nowhere(bench: Bench, root: Path) -> None:
    bench.executors[-1].broken[str(root / "a")] = "no memory for it"
    with pytest.raises(RequestError, match="no memory for it") as refused:
        await load(bench, root, "a")
    assert refused.value.param == "lora_path" and f"Replica {len(bench.engines) - 1}" in refused.value.message
    assert all(executor.host == {} for executor in bench.executors) and not bench.adapters.listed
    bench.executors[-1].broken.clear()
    a = await load(bench, root, "a")
    await bench.start("r", 4, root=key(a), replica=len(bench.engines) - 1)
    await bench.work()


async def test_what_all_refuse_is_refused_as_by_one(bench: Bench, root: Path) -> None:
    for executor in bench.executors:
        executor.broken[str(root / "a")] = "no adapter"
    with pytest.raises(RequestError, match=r"^no adapter"):
        await load(bench, root, "a")


async def test_a_copy_that_fails_ends_the_requests_of_its_replica_alone(bench: Bench, root: Path) -> None:
    a = await load(bench, root, "a")
    for name in "bcd":  # of four three stay in host memory
        await load(bench, root, name)
    bench.executors[1].broken[str(root / "a")] = "the file is gone"
    await bench.start("good", 8, root=key(a), replica=0)
    await bench.start("bad", 8, root=key(a), replica=1)
    await bench.work()
    assert bench.tokens("good-0") == oracle(PROMPT.tolist(), 8, VOCAB, adapter=a.id)
    assert bench.reason("bad-0") is FinishReason.ERROR
    await bench.adapters.unload("a")


async def test_pinned_ones_keep_their_place_on_all(bench: Bench, root: Path) -> None:
    pinned = await load(bench, root, "a", pinned=True)
    others = [await load(bench, root, name) for name in "bcde"]
    for replica in range(len(bench.engines)):
        await bench.start(f"p{replica}", 2, root=key(pinned), replica=replica)
        for info in others:
            await bench.start(f"{info.name}{replica}", 2, root=key(info), replica=replica)
    await bench.work()
    assert all(pinned.id in executor.host for executor in bench.executors)
    request = Request("again", PROMPT, SamplingParams(), root=key(pinned))
    assert all(engine.places.find(request) is not None for engine in bench.engines)


@pytest.mark.parametrize("seed", range(5))
async def test_random_jobs_loads_and_unloads(bench: Bench, root: Path, seed: int) -> None:
    """Every job is answered as by its own adapter, and nothing is left in the end."""
    rng = random.Random(seed)
    names, loaded = list("abcdefgh"), {name: await load(bench, root, name) for name in "abcde"}
    unloads: list[asyncio.Future[AdapterInfo]] = []
    jobs: dict[str, tuple[int, str]] = {}
    for i in range(60):
        if loaded and rng.random() < 0.1:
            name = rng.choice(list(loaded))
            del loaded[name]
            unloads.append(asyncio.ensure_future(bench.adapters.unload(name)))
        if rng.random() < 0.1 and (free := [name for name in names if name not in loaded]):
            name = rng.choice(free)
            loading = asyncio.ensure_future(load(bench, root, name))
            while not loading.done():  # a device may be busy
                await bench.complete()
            loaded[name] = loading.result()
        await settle()
        info = rng.choice([None, *loaded.values()])
        length = rng.randint(1, 12)
        await bench.start(f"r{i}", length, root=RootKey() if info is None else key(info))
        jobs[f"r{i}"] = (length, "" if info is None else info.id)
        for executor in bench.executors:
            executor.complete(min(rng.randint(0, 3), len(executor.pending)))
        await settle()
    unloads += [asyncio.ensure_future(bench.adapters.unload(name)) for name in loaded]
    await settle()
    await bench.work()
    await asyncio.gather(*unloads)
    for id, (length, adapter) in jobs.items():
        assert bench.tokens(f"{id}-0") == oracle(PROMPT.tolist(), length, VOCAB, adapter=adapter)
    assert all(executor.host == {} for executor in bench.executors)
    assert all(engine.places.taken == 0 for engine in bench.engines)
