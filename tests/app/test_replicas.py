"""Several replicas behind one submitter: which of them takes a job, and what reaches all of them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from app.engine.job import BeamOptions
from app.engine.operator import Operator, PauseMode
from app.engine.replicas import SLACK
from app.engine.watchdog import Watchdog
from app.text.tokenizer import Tokenizer
from core.config import LoadBalance
from core.errors import EngineFailed, RequestError, Unavailable
from core.types import FinishReason, RootKey
from tests.rigs.executor import oracle
from tests.rigs.step_loop import VOCAB, Bench
from tests.rigs.wait import settle

ROWS = 4
BALANCES: list[LoadBalance] = ["cached-prefix", "shortest-queue", "round-robin", "fewest-tokens"]


def prompt(first: int, length: int) -> np.ndarray:
    """A prompt that shares no page with one of another `first`."""
    return (np.arange(length, dtype=np.int32) + 37 * first) % 290 + 3


def running(bench: Bench) -> list[int]:
    return [load.running + load.waiting for load in (engine.load() for engine in bench.engines)]


# -- choice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("balance", BALANCES)
async def test_every_job_is_answered_as_by_one_replica(
    tokenizer: Tokenizer, count: int, balance: LoadBalance
) -> None:
    bench = Bench(tokenizer, eager=False, replicas=count, balance=balance)
    prompts = {f"r{i}": prompt(i % 4, 5 + i) for i in range(12)}
    for id, ids in prompts.items():
        await bench.start(id, 6, prompt=ids)
    assert all(running(bench)) and sum(running(bench)) == 12
    await bench.work()
    for id, ids in prompts.items():
        assert bench.tokens(f"{id}-0") == oracle(ids.tolist(), 6, VOCAB)


async def test_round_robin_takes_turns(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, replicas=3, balance="round-robin")
    seen = []
    for i in range(6):
        await bench.start(f"r{i}", 4, prompt=prompt(i, 4 + 20 * i))
        seen.append(running(bench))
    assert seen[2] == [1, 1, 1] and seen[5] == [2, 2, 2]
    await bench.work()


async def test_the_shortest_queue_counts_requests_and_fewest_tokens_tokens(tokenizer: Tokenizer) -> None:
    queue = Bench(tokenizer, eager=False, replicas=2, balance="shortest-queue")
    tokens = Bench(tokenizer, eager=False, replicas=2, balance="fewest-tokens")
    for bench in (queue, tokens):
        await bench.start("long", 4, prompt=prompt(0, 200))
        for i in range(5):
            await bench.start(f"short{i}", 4, prompt=prompt(i + 1, 8))
    assert sorted(running(queue)) == [3, 3]
    assert sorted(running(tokens)) == [1, 5]
    for bench in (queue, tokens):
        await bench.work()


async def test_a_job_follows_its_prefix_while_that_saves_work(tokenizer: Tokenizer) -> None:
    """Until the replica has as much more to do as it has cached, and then the others have a turn."""
    bench = Bench(tokenizer, eager=False, replicas=2)
    ids = prompt(0, 100)
    first = await bench.start("first", 4, prompt=ids)
    await bench.work()
    home = bench.engines.index(first.engine)
    homes = []
    for i in range(3):  # 108 tokens each
        run = await bench.start(f"next{i}", 4, prompt=np.append(ids, prompt(i + 1, 8)))
        homes.append(bench.engines.index(run.engine))
    assert homes == [home, 1 - home, home]
    other = await bench.start("salted", 4, prompt=ids, root=RootKey(salt="other"))
    assert other.cached == 0
    await bench.work()


async def test_idle_replicas_share_what_nobody_has_cached(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, replicas=2)
    homes = []
    for i in range(6):
        run = await bench.start(f"r{i}", 4, prompt=prompt(i, 20))
        await run.wait()
        await settle()
        homes.append(bench.engines.index(run.engine))
    assert homes == [0, 1] * 3
    again = await bench.start("again", 4, prompt=prompt(3, 20))
    await again.wait()
    assert bench.engines.index(again.engine) == homes[3] and again.cached == 16


async def test_looking_for_a_prefix_refreshes_nothing(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, replicas=2)
    await (await bench.start("a", 4, prompt=prompt(0, 40))).wait()
    await settle()
    before = [(node.last_access, node.hits, node.locks) for node in bench.scheduler.cache._tree.walk()]
    assert before and bench.engine.cached(RootKey(), prompt(0, 40)) == 40
    after = [(node.last_access, node.hits, node.locks) for node in bench.scheduler.cache._tree.walk()]
    assert after == before


async def test_of_replicas_loaded_alike_the_one_with_fewer_requests_takes_a_job(tokenizer: Tokenizer) -> None:
    """A slot is what a short job waits for: with 20 tokens more in it, the first has two slots left."""
    bench = Bench(tokenizer, eager=False, replicas=2, rows=6)
    for i in range(2):
        await bench.start(f"long{i}", 4, prompt=prompt(i, 100), replica=0)
    for i in range(4):
        await bench.start(f"short{i}", 4, prompt=prompt(10 + i, 45), replica=1)
    first, second = (engine.workload() for engine in bench.engines)
    assert second.tokens < first.tokens < (1 + SLACK) * second.tokens
    run = await bench.start("next", 4, prompt=prompt(20, 8))
    assert bench.engines.index(run.engine) == 0
    await bench.work()


async def test_no_job_waits_for_a_slot_while_another_replica_has_one(tokenizer: Tokenizer) -> None:
    """Though that one has far more to do; only where half of its prompt is cached does a job wait."""
    bench = Bench(tokenizer, eager=False, replicas=2, rows=ROWS)
    for i in range(ROWS - 1):
        await bench.start(f"long{i}", 4, prompt=prompt(i, 100), replica=0)
    for i in range(ROWS):
        await bench.start(f"short{i}", 4, prompt=prompt(10 + i, 8), replica=1)
    run = await bench.start("free", 4, prompt=prompt(20, 8))
    assert bench.engines.index(run.engine) == 0
    await bench.work()
    for i in range(ROWS):
        await bench.start(f"again{i}", 4, prompt=prompt(30 + i, 8), replica=0)
    for words, home in ((8, 0), (200, 1)):
        run = await bench.start(f"cached{words}", 4, prompt=np.append(prompt(0, 100), prompt(40, words)))
        assert bench.engines.index(run.engine) == home
    await bench.work()


async def test_where_all_replicas_have_the_common_part_no_job_waits(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, replicas=2, rows=ROWS, pages=1000)
    system = prompt(0, 41)
    for at in range(2):
        await bench.start(f"seed{at}", 2, prompt=system, replica=at)
    await bench.work()
    for i in range(2):
        await bench.start(f"long{i}", 40, prompt=prompt(10 + i, 200), replica=0)
    for i in range(ROWS):
        await bench.start(f"short{i}", 40, prompt=prompt(20 + i, 12), replica=1)
    run = await bench.start("next", 4, prompt=np.append(system, prompt(40, 5)))
    assert bench.engines.index(run.engine) == 0
    many = await bench.start("many", 4, prompt=prompt(41, 5), n=2)  # one slot is left
    assert bench.engines.index(many.engine) == 1
    await bench.work()


async def test_a_replica_without_pages_has_no_free_slot(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, replicas=2, rows=16, pages=200)
    for i in range(12):
        await bench.start(f"long{i}", 100, prompt=prompt(i, 200), replica=0)
    for i in range(16):
        await bench.start(f"short{i}", 30, prompt=prompt(30 + i, 8), replica=1)
    for _ in range(4):
        await settle()
        for executor in bench.executors:
            executor.complete(min(1, len(executor.pending)))
    run = await bench.start("next", 4, prompt=prompt(100, 8))
    assert bench.engines.index(run.engine) == 1  # the other has 2,000 tokens in its line
    await bench.work()


async def test_where_all_are_full_the_shortest_line_takes_a_job(tokenizer: Tokenizer) -> None:
    """Running requests do not count by the pages they hold: those that hold more end sooner."""
    bench = Bench(tokenizer, eager=False, replicas=2, rows=ROWS)
    for i in range(ROWS):
        await bench.start(f"old{i}", 40, prompt=prompt(i, 60), replica=0)
        await bench.start(f"young{i}", 40, prompt=prompt(10 + i, 8), replica=1)
    while any(engine.workload().waiting for engine in bench.engines):
        await settle()
        for executor in bench.executors:
            executor.complete(len(executor.pending))
    await bench.start("first", 4, prompt=prompt(20, 8), replica=1)
    homes = []
    for i in range(3):
        run = await bench.start(f"next{i}", 4, prompt=prompt(30 + i, 8))
        homes.append(bench.engines.index(run.engine))
    assert homes[0] == 0 and sorted(homes[1:]) == [0, 1]
    await bench.work()


async def test_where_all_are_full_a_cached_prefix_is_worth_its_tokens(tokenizer: Tokenizer) -> None:
    """The cached prefix is not worth the whole line, though it is half of the prompt."""
    bench = Bench(tokenizer, eager=False, replicas=2, rows=ROWS, pages=1000)
    await bench.start("seed", 2, prompt=prompt(0, 9), replica=0)
    await bench.work()
    for i in range(ROWS):
        await bench.start(f"a{i}", 40, prompt=prompt(10 + i, 60), replica=0)
        await bench.start(f"b{i}", 40, prompt=prompt(20 + i, 60), replica=1)
    homes = []
    for i in range(20):
        run = await bench.start(f"next{i}", 4, prompt=np.append(prompt(0, 9), prompt(40 + i, 5)))
        homes.append(bench.engines.index(run.engine))
    assert 4 <= homes.count(1) <= 10
    await bench.work()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_random_jobs_go_where_the_rule_says(tokenizer: Tokenizer, count: int, seed: int) -> None:
    """No replica costs less, none is without work while others pile it up, and all answer."""
    rng = random.Random(seed)
    bench = Bench(tokenizer, eager=False, replicas=count, rows=ROWS)
    jobs, homes = {}, [0] * count
    for i in range(80):
        ids = np.append(prompt(rng.randrange(4), rng.choice((4, 60, 100))), prompt(i, rng.randint(1, 30)))
        states = [engine.workload() for engine in bench.engines]
        cached = [engine.cached(RootKey(), ids) for engine in bench.engines]
        ready = [at for at in range(count) if states[at].free]
        loads = [state.tokens if ready else state.waiting for state in states]
        run = await bench.start(f"r{i}", rng.randint(1, 12), prompt=ids)
        home = bench.engines.index(run.engine)
        known = max((cached[at] for at in ready), default=0)
        rich = [at for at in range(count) if at not in ready and 2 * (cached[at] - known) >= len(ids)]
        like = [*ready, *rich] if ready else range(count)
        assert home in like
        floor = (1 + SLACK) * min(loads)
        costs = {at: max(loads[at], floor) - cached[at] for at in like}
        assert costs[home] == min(costs.values())
        homes[home] += 1
        jobs[f"r{i}"] = (ids, run)
        for executor in rng.sample(bench.executors, rng.randint(0, count)):
            executor.complete(min(rng.randint(0, 3), len(executor.pending)))
        await settle()
    await bench.work()
    assert min(homes) > 0
    for id, (ids, run) in jobs.items():
        assert bench.tokens(f"{id}-0") == oracle(ids.tolist(), run.params.max_tokens, VOCAB)


@pytest.mark.parametrize("balance", BALANCES)
async def test_a_job_may_name_its_replica(tokenizer: Tokenizer, balance: LoadBalance) -> None:
    bench = Bench(tokenizer, eager=False, replicas=3, balance=balance)
    for i in range(3):
        await bench.start(f"r{i}", 4, replica=2, n=2)
    assert running(bench) == [0, 0, 6]
    for wrong in (-1, 3):
        with pytest.raises(RequestError, match="must be 0 to 2") as refused:
            await bench.start("wrong", 4, replica=wrong)
        assert refused.value.param == "data_parallel_rank"
    await bench.work()


async def test_choices_and_beams_of_a_job_stay_together(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, replicas=2, balance="round-robin")
    await bench.start("choices", 6, n=4)
    assert running(bench) == [4, 0]
    run = await bench.start("beams", 6, n=3, beam=BeamOptions())
    assert run.engine is bench.engines[1]
    assert running(bench) == [4, 1]
    run.abort()
    await bench.work()


async def test_what_continues_an_answer_goes_where_its_prefix_is(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, replicas=2, balance="round-robin")
    first = await bench.start("a", 4, prompt=prompt(0, 40))
    await first.wait()
    await settle()
    for i in range(3):
        run = await bench.start(f"more{i}", 4, prompt=prompt(0, 40), continues=True)
        await run.wait()
        await settle()
        assert run.engine is first.engine


# -- all of them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["step", "raise", "hang"])
async def test_a_replica_that_fails_ends_the_requests_of_all(tokenizer: Tokenizer, how: str) -> None:
    bench = Bench(tokenizer, eager=False, replicas=3, fail_at=5 if how == "step" else -1)
    reasons: list[str] = []
    bench.replicas.on_failure = reasons.append
    for i in range(6):
        await bench.start(f"r{i}", 30, replica=i % 3)
    await settle()
    bench.executors[2].complete()
    await settle()
    if how == "raise":
        bench.schedulers[1].apply = lambda result: 1 / 0  # type: ignore[method-assign, assignment]
    if how == "hang":
        bench.engines[1].hang("no step came back")
    for _ in range(8):
        bench.executors[1].complete(len(bench.executors[1].pending))
        await settle()
    assert len(reasons) == 1 and bench.replicas.failure == reasons[0]
    assert bench.replicas.hung == (how == "hang")
    for i in range(6):
        last = bench.pieces[f"r{i}-0"][-1].finish
        assert last is not None and (last.reason, last.message) == (FinishReason.ERROR, reasons[0])
    with pytest.raises(Unavailable, match="has failed"):
        await bench.start("late", 4, replica=0)
    bench.replicas.close()


async def test_a_flush_empties_all_or_none(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, replicas=2)
    for replica in (0, 1):
        await bench.start(f"r{replica}", 4, replica=replica)
    await bench.work()
    await bench.start("late", 8, replica=1)
    assert not bench.submitter.flush()
    assert bench.engines[0].load().cache.cached
    await bench.work()
    assert bench.submitter.flush()
    assert not any(engine.load().cache.cached for engine in bench.engines)


async def test_an_abort_reaches_all_jobs_of_a_request(tokenizer: Tokenizer) -> None:
    """Prompts, and answers that go on after a cut; and none of another request."""
    bench = Bench(tokenizer, eager=False, rows=8)
    names = "a-0", "a-1-12", "a", "ab-0", "b-a-0", "a-x"
    for name in names:
        await bench.start(name, 200)
    assert bench.submitter.abort(["a", "c"]) == 3
    assert bench.submitter.abort(["a"], tenant="another") == 0
    await settle()
    assert list(bench.pieces) == [f"{name}-0" for name in names[:3]]
    assert all(bench.reason(f"{name}-0") is FinishReason.ABORT for name in names[:3])
    assert bench.submitter.abort_all() == 3
    await bench.work()


async def test_an_abort_reaches_jobs_on_every_replica(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, replicas=3)
    for i in range(6):
        await bench.start(f"r{i}", 200, replica=i % 3)
    assert bench.submitter.abort(["r4"])
    await settle()
    assert bench.reason("r4-0") is FinishReason.ABORT
    assert bench.submitter.abort_all() == 5
    await bench.work()
    assert {bench.reason(f"r{i}-0") for i in range(6)} == {FinishReason.ABORT}
    assert bench.submitter.idle


# -- the operator --------------------------------------------------------------------------------------


class Operated:
    """Replicas whose devices go on by themselves, and their operator."""

    def __init__(self, tokenizer: Tokenizer, traces: Path, count: int = 3) -> None:
        self.bench = Bench(tokenizer, replicas=count)
        self.operator = Operator(self.bench.replicas, traces, "first")

    def commands(self) -> list[list[tuple[str, str]]]:
        return [[(each.action, each.path) for each in executor.commands] for executor in self.bench.executors]

    async def answers(self) -> None:
        """Every replica answers as alone."""
        for replica in range(len(self.bench.engines)):
            ids = prompt(replica, 20)
            await (await self.bench.start(f"check{replica}", 6, prompt=ids, replica=replica)).wait()
            await settle()
            assert self.bench.tokens(f"check{replica}-0")[-6:] == oracle(ids.tolist(), 6, VOCAB)


@pytest.fixture
async def operated(tokenizer: Tokenizer, tmp_path: Path) -> Operated:
    return Operated(tokenizer, tmp_path / "traces")


@pytest.mark.parametrize("mode", ["keep", "retract", "abort"])
async def test_a_pause_holds_every_replica(operated: Operated, mode: PauseMode) -> None:
    bench, operator = operated.bench, operated.operator
    for executor in bench.executors:
        executor.eager = False
    for i in range(3):
        await bench.start(f"r{i}", 9, prompt=prompt(i, 20), replica=i)
    await settle()
    pausing = asyncio.create_task(operator.pause(mode))
    for executor in bench.executors:
        await settle()
        assert not pausing.done()
        executor.complete(len(executor.pending))
    await pausing
    await bench.start("late", 4, replica=1)
    await settle()
    assert not any(executor.pending for executor in bench.executors) and operator.paused
    await operator.resume()
    await settle()
    await bench.work()
    for i in range(3):
        if mode == "abort":
            assert bench.reason(f"r{i}-0") is FinishReason.ABORT
        else:
            assert bench.tokens(f"r{i}-0") == oracle(prompt(i, 20).tolist(), 9, VOCAB)
    assert len(bench.tokens("late-0")) == 4


async def test_weights_and_sleep_reach_every_replica(operated: Operated) -> None:
    await operated.answers()
    await operated.operator.load_weights("second")
    assert not any(engine.load().cache.cached for engine in operated.bench.engines)
    await operated.answers()
    await operated.operator.sleep()
    assert operated.operator.paused
    await operated.operator.wake()
    await operated.answers()
    each = [("load_weights", "second"), ("sleep", ""), ("wake", "")]
    assert operated.commands() == [each] * 3


@pytest.mark.parametrize(
    ("name", "undone"),
    [
        ("load_weights", [("load_weights", "second"), ("load_weights", "first")]),
        ("sleep", [("sleep", ""), ("wake", "")]),
        ("wake", [("sleep", ""), ("wake", ""), ("sleep", "")]),
    ],
)
async def test_what_one_replica_refuses_is_undone_on_the_others(
    operated: Operated, name: str, undone: list[tuple[str, str]]
) -> None:
    bench, operator = operated.bench, operated.operator
    if name == "wake":
        await operator.sleep()
    bench.executors[1].refuse = "it is full"
    with pytest.raises(RequestError, match=r"Replica 1 refused.*it is full"):
        await {"load_weights": lambda: operator.load_weights("second"), "sleep": operator.sleep,
               "wake": operator.wake}[name]()  # fmt: skip
    bench.executors[1].refuse = None
    assert operated.commands() == [undone, undone[:-1], undone]
    assert operator.paused == (name == "wake")
    assert operator.asleep == ({"weights", "kv_cache"} if name == "wake" else frozenset())
    await operator.wake()
    await operated.answers()


async def test_what_all_refuse_is_refused_as_by_one(operated: Operated) -> None:
    for executor in operated.bench.executors:
        executor.refuse = "not the same model"
    with pytest.raises(RequestError, match=r"^not the same model"):
        await operated.operator.load_weights("second")
    assert operated.commands() == [[("load_weights", "second")]] * 3


async def test_replicas_that_stay_unequal_end(operated: Operated) -> None:
    bench = operated.bench
    bench.executors[0].holds = True
    bench.executors[1].refuse = "it is full"
    loading = asyncio.create_task(operated.operator.load_weights("second"))
    await settle()
    bench.executors[0].carry_out()
    bench.executors[0].holds, bench.executors[0].refuse = False, "the old file is gone"
    with pytest.raises(EngineFailed, match="replicas differ"):
        await loading
    assert bench.replicas.failure is not None and all(engine.failure for engine in bench.engines)


async def test_a_failure_answers_who_waits_for_another_replica(operated: Operated) -> None:
    bench = operated.bench
    bench.executors[0].holds = True
    loading = asyncio.create_task(operated.operator.load_weights("second"))
    await settle()
    assert not loading.done()
    bench.engines[2].fail("the device was lost")
    with pytest.raises(EngineFailed, match="the device was lost"):
        await loading


async def test_a_profile_is_of_the_first_replica(operated: Operated) -> None:
    await operated.operator.start_profile()
    path = await operated.operator.stop_profile()
    assert operated.commands() == [[("profile_start", ""), ("profile_stop", str(path))], [], []]


async def test_slowed_down_every_replica_waits_between_steps(operated: Operated) -> None:
    bench = operated.bench
    operated.operator.slow_down(60)
    for replica in range(3):
        await bench.start(f"r{replica}", 12, replica=replica)
    await settle()
    assert [engine.load().steps for engine in bench.engines] == [1, 1, 1]
    operated.operator.slow_down(0)
    await settle()
    assert all(len(bench.tokens(f"r{replica}-0")) == 12 for replica in range(3))


# -- the watchdog --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stuck", [0, 2])
async def test_a_replica_that_hangs_is_found_beside_others_that_work(
    tokenizer: Tokenizer, stuck: int
) -> None:
    bench, now = Bench(tokenizer, eager=False, replicas=3), 0.0
    watchdogs = [Watchdog(engine, 8.0, lambda: now) for engine in bench.engines]
    for i in range(3):
        await bench.start(f"r{i}", 100, replica=i)
    await settle()
    for round in range(40):
        for number, executor in enumerate(bench.executors):
            if (number != stuck or round < 3) and executor.pending:
                executor.complete()
        await settle()
        now += 2.0
        for watchdog in watchdogs:
            watchdog.check()
        if bench.replicas.failure:
            break
    assert round < 3 + 8 and bench.replicas.hung
    assert {bench.reason(f"r{i}-0") for i in range(3)} == {FinishReason.ERROR}
    bench.replicas.close()
