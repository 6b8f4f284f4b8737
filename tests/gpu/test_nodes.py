"""Nodes: how they meet, what they exchange, and one failure that ends all. Here they are threads of one
process; `tests/e2e/test_nodes.py` has processes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from core.command import Command, CommandDone
from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.errors import ConfigError, EngineFailed
from core.plan import Chunk, NewSlot, PageWrites, StepFailure, StepPlan, StepResult
from core.request import SamplingParams
from core.types import NO_TOKENS
from gpu.build import Beside, build_executor, spec_of
from gpu.executor import LocalExecutor
from gpu.nodes.channel import Channel, NodeLost
from gpu.nodes.gloo import gloo_ranks
from gpu.nodes.join import Nodes, join, listen
from gpu.nodes.nccl import interface_of
from gpu.nodes.wire import REMOTE_GRAMMAR, message_of, pack, plan_of, step_of, unpack
from gpu.ranks import Rank
from gpu.runner import ModelRunner
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.driver import Driver
from tests.rigs.nodes import Pair, at_once, joined, parallels
from tests.rigs.runner import GREEDY
from tests.rigs.wait import PATIENCE

T = TypeVar("T")

PROMPTS = [[int(i * 37 % 241) + 3 for i in range(n)] for n in (40, 23, 150, 40)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.9, seed=5, max_tokens=30, presence_penalty=0.5),
    SamplingParams(temperature=0.7, top_p=0.8, seed=6, max_tokens=7),
    SamplingParams(temperature=0.0, max_tokens=9),
]
SCHEDULE = ScheduleConfig(step_tokens=64, max_running=4, prefill_weight=0)


@pytest.fixture(autouse=True)
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' tokens, in each step."""
    monkeypatch.setattr("gpu.executor.COMPARED", 1)


# -- what they say -----------------------------------------------------------------------------------


def test_a_plan_is_the_same_behind_its_way() -> None:
    params = SamplingParams(seed=2**62, stop_ids=frozenset({2}), logit_bias=((7, 0.5),))
    grammar: Any = object()
    embeds = np.ones((2, 3), np.float32)
    plan = StepPlan(
        7,
        ints([3, 1]),
        (Chunk(1, 0, ints([5, 6]), True, embeds=embeds), Chunk(2, 4, NO_TOKENS, False)),
        (
            NewSlot(1, params, ints([5, 6]), NO_TOKENS, 0, grammar),
            NewSlot(2, params, ints([1]), NO_TOKENS, 0),
        ),
        PageWrites(ints([1]), ints([0]), ints([9])),
        query_length=3,
    )
    message = message_of(pack(step_of(plan)))
    found = plan_of(message)  # type: ignore[arg-type]
    assert [new.grammar for new in found.new_slots] == [REMOTE_GRAMMAR, None]
    assert pack(step_of(found)) == pack(step_of(plan))
    assert found.chunks[0].embeds is not None and found.chunks[0].embeds.tolist() == embeds.tolist()
    assert found.new_slots[0].params == params


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 9,
        pack({"type": "Step"}),
        pack({"type": "StepDone", "step": 1, "tokens": ["|O", [1], b""]}),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        message_of(data)


def test_objects_do_not_travel() -> None:
    with pytest.raises(TypeError, match="object does not travel"):
        pack(object())
    with pytest.raises(ValueError):
        unpack(pack(1), bool)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with listen("127.0.0.1", 0) as listener:
        theirs.close()
        ours.close()
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    channel = Channel(ours, "the other")
    with theirs:
        yield channel, theirs
    channel.close()


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\x04\0\0\0abcd", b"\x04\0\0"])
def test_a_stranger_is_noticed(ends: tuple[Channel, socket.socket], junk: bytes) -> None:
    channel, stranger = ends
    stranger.sendall(junk)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(NodeLost, match=r"the other (does not speak|has closed)"):
        channel.receive(PATIENCE, 2**20)


def test_a_connection_that_is_hung_up_ends_who_waits(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.receive)
        channel.hang_up()
        with pytest.raises(NodeLost):
            waiting.result(PATIENCE)
    assert other.recv(1) == b""


# -- how they meet -----------------------------------------------------------------------------------


def test_nodes_that_differ_are_refused_on_both_with_both_values() -> None:
    facts = [{"--tp": "2", "--model": "a"}, {"--tp": "4", "--model": "a"}]
    works = [partial(join, own, fact) for own, fact in zip(parallels(2, 2), facts, strict=True)]
    for each in at_once(works):
        with pytest.raises(ConfigError, match="--tp is 2 on node 0 and 4 on node 1"):
            each.result()


def test_a_number_that_two_nodes_have_is_refused() -> None:
    zero, one, _ = parallels(3, 3)
    for each in at_once([partial(join, own, {}) for own in (zero, one, one)]):
        with pytest.raises(ConfigError, match="--node-rank 1 is given to two nodes"):
            each.result()


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.nodes.join.JOIN_SECONDS", 1.0)
    with pytest.raises(ConfigError, match=r"--nnodes 3: 1 are here after 1 s\. Missing: --node-rank 1, 2"):
        join(parallels(3, 3)[0], {})


def test_an_address_that_cannot_be_had_is_named() -> None:
    (zero, _) = parallels(2, 2)
    with listen("127.0.0.1", 0) as taken:
        zero, _ = parallels(2, 2, taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--dist-init-addr {zero.dist_init_addr}: .*in use"):
            join(zero, {})
    with pytest.raises(ConfigError, match="all interfaces"):
        listen("0", 0)


def test_strangers_do_not_keep_nodes_from_meeting() -> None:
    zero, one = parallels(2, 2)
    host, port = zero.dist_init_addr.split(":")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, zero, {})
        with socket.socket() as early:
            while early.connect_ex((host, int(port))):
                pass  # node 0 does not listen yet
            early.sendall(os.urandom(999))
        store = PrefixStore("loom/0", TCPStore(host, int(port), wait_for_workers=False))
        where = int(store.get("channel").split()[0])
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\x7f", os.urandom(999)):
            with socket.create_connection((host, where)) as stranger:
                stranger.sendall(junk)
        nodes = [join(one, {}), first.result(PATIENCE)]
    found = at_once([partial(each.least, value) for each, value in zip(nodes, (5, 3), strict=True)])
    assert [each.result() for each in found] == [3, 3]
    leave(nodes)


def test_the_reason_of_a_node_that_cannot_load_reaches_the_others() -> None:
    zero, one = joined(2, 2)
    with pytest.raises(ConfigError, match="too little"), one.loading():
        raise ConfigError("too little memory")
    with pytest.raises(ConfigError, match=r"node 1 at 127\.0\.0\.1: too little memory"):
        zero.least(1)
    leave([zero])


def leave(nodes: list[Nodes]) -> None:
    for each in nodes:
        for channel in each.channels:
            channel.close()


def test_an_address_has_an_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None


# -- what they exchange ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Rank]]:
    """Four, in two nodes."""
    nodes = joined(4, 2)
    yield [
        rank for each in at_once([partial(gloo_ranks, each) for each in nodes]) for rank in each.result()[1]
    ]
    leave(nodes)


def on_each(ranks: list[Rank], work: Callable[[Rank], T]) -> list[T]:
    return [each.result() for each in at_once([partial(work, rank) for rank in ranks])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_the_order_of_ranks(ranks: list[Rank], dtype: torch.dtype) -> None:
    parts = [torch.randn(5, 7, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    for found in on_each(ranks, lambda rank: rank.reduce_sum(parts[rank.shard.rank])):
        assert torch.equal(found, total.to(dtype))


def test_parts_are_gathered_in_the_order_of_ranks(ranks: list[Rank]) -> None:
    for found in on_each(ranks, lambda rank: rank.gather(torch.full((2, 1), float(rank.shard.rank)))):
        assert found.tolist() == [[0, 1, 2, 3]] * 2


def test_rank_0_decides(ranks: list[Rank]) -> None:
    assert on_each(ranks, lambda rank: rank.first(lambda: rank.shard.rank + 5, int)) == [5] * 4
    assert on_each(ranks, lambda rank: rank.late(0.0)) == [True] * 4
    for found in on_each(ranks, lambda rank: rank.first(lambda: torch.ones(3), torch.Tensor)):
        assert found.tolist() == [1, 1, 1]


def test_where_rank_0_raises_so_do_all(ranks: list[Rank]) -> None:
    def work(rank: Rank) -> str:
        try:
            rank.first(lambda: {}["nothing"], int)
        except (KeyError, RuntimeError) as error:
            return type(error).__name__
        return "none"

    assert on_each(ranks, work) == ["KeyError", *["RuntimeError"] * 3]


def test_an_abort_ends_a_wait() -> None:
    nodes = joined(2, 2)
    (group, (first,)), (_, (second,)) = (
        each.result() for each in at_once([partial(gloo_ranks, each) for each in nodes])
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.reduce_sum, torch.zeros(1))
        group.abort("it raised")
        with pytest.raises(EngineFailed, match="another rank has ended: it raised"):
            waiting.result(PATIENCE)
    second.reduce_sum(torch.zeros(1))  # or the first one's exchange would never end
    leave(nodes)


# -- node 0 plans, the others run --------------------------------------------------------------------


def pair_of(path: Path, tp: int = 2, start: bool = True) -> Pair:
    """Node 0 and node 1 of a checkpoint."""

    def build(nodes: Nodes) -> LocalExecutor:
        beside = Beside(parallel=nodes.parallel, nodes=nodes)
        cache, config = CacheConfig(page_size=4, kv_tokens=4096), ModelConfig(device="cpu")
        return build_executor(spec_of(path), path, config, cache, SCHEDULE, lambda stage, share: None, beside)

    pair = Pair(build, tp)
    if start:
        pair.start()
    return pair


def failure(pair: Pair) -> str:
    """The failure of node 0's executor, once there is one; both are closed then."""
    arrived = threading.Event()
    pair.first.start(arrived.set)
    assert arrived.wait(PATIENCE)
    (found,) = pair.first.results()
    assert isinstance(found, StepFailure)
    pair.first.close()
    with pytest.raises(EngineFailed):
        pair.ended.result(PATIENCE)
    pair.second.close()  # a process would be gone
    return found.reason


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("llama", tmp_path_factory.mktemp("model")).path


@pytest.mark.parametrize("tp", [2, 4])
def test_text_is_that_of_one_process(model: Path, tp: int) -> None:
    cache, config = CacheConfig(page_size=4, kv_tokens=4096), ModelConfig(device="cpu")
    alone = build_executor(spec_of(model), model, config, cache, SCHEDULE, lambda stage, share: None)
    pair = pair_of(model, tp)
    found = []
    for executor in (alone, pair.first):
        executor.prepare(lambda share: None)
        driver = Driver(executor, SCHEDULE)
        found.append(driver.run(PROMPTS, PARAMS))
        driver.close()
    pair.ended.result(PATIENCE)
    for one, two in zip(*found, strict=True):
        assert two.tokens == one.tokens
        assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def plan(step: int) -> StepPlan:
    new = (NewSlot(1, GREEDY, ints([5, 6]), NO_TOKENS, 0),)
    pages = PageWrites(ints([1]), ints([0]), ints([1]))
    return StepPlan(step, NO_TOKENS, (Chunk(1, 0, ints([5, 6]), True),), new, pages)


def test_a_node_that_closes_ends_all(model: Path) -> None:
    pair = pair_of(model)
    pair.first.prepare(lambda share: None)
    pair.nodes[1].channels[0].hang_up()
    assert "node 1 at 127.0.0.1 has closed the connection" in failure(pair)


def test_a_rank_of_another_node_that_fails_ends_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(model)
    pair.first.prepare(lambda share: None)

    def fail(command: Command) -> None:
        raise MemoryError("it is full")

    runner: Any = pair.second._workers[0]._runner  # type: ignore[attr-defined]
    monkeypatch.setattr(runner, "carry_out", fail)
    pair.first.command(Command(id=1, action="sleep"))
    assert "node 1 at 127.0.0.1: MemoryError: it is full" in failure(pair)


def test_a_command_that_one_node_alone_refuses_ends_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(model)
    pair.first.prepare(lambda share: None)
    runner: Any = pair.second._workers[0]._runner  # type: ignore[attr-defined]
    monkeypatch.setattr(runner, "carry_out", lambda command: CommandDone(command.id, "there is no file"))
    pair.first.command(Command(id=1, action="sleep"))
    assert "a command was carried out by some ranks alone: there is no file" in failure(pair)


def test_an_adapter_that_one_node_alone_refuses_ends_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(model)
    pair.first.prepare(lambda share: None)
    for executor, error in ((pair.first, None), (pair.second, "there is no file.")):
        runner: Any = executor._workers[0]._runner  # type: ignore[attr-defined]
        monkeypatch.setattr(runner, "carry_out", lambda command, error=error: CommandDone(command.id, error))
    answers: list[object] = []
    arrived = threading.Event()
    pair.first.start(arrived.set)
    pair.first.command(Command(id=1, action="adapter_read"))
    assert arrived.wait(PATIENCE)
    answers += pair.first.results()
    assert answers == [CommandDone(1, "there is no file. Others could: it must lie on every node.")]
    pair.first.close()
    pair.ended.result(PATIENCE)


class Wrong(NamedTuple):
    """A step that has another result than it had."""

    result: StepResult

    @property
    def step(self) -> int:
        return self.result.step

    def wait(self) -> StepResult:
        return StepResult(self.result.step, self.result.tokens + 1)


def test_nodes_that_sample_other_tokens_end_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(model)
    pair.first.prepare(lambda share: None)
    runner: Any = pair.second._workers[0]._runner  # type: ignore[attr-defined]
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda plan: Wrong(launch(plan).wait()))
    pair.first.submit(plan(0))
    assert "rank 0 sampled" in failure(pair)


def test_a_node_that_cannot_prepare_ends_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ModelRunner, progress: object) -> None:
        if self is second:
            raise MemoryError("no graphs")

    second: Any = None
    monkeypatch.setattr(ModelRunner, "prepare", fail)
    pair = pair_of(model, start=False)
    second = pair.second._workers[0]._runner  # type: ignore[attr-defined]
    pair.start()
    with pytest.raises(EngineFailed, match=r"node 1 at .*: MemoryError: no graphs"):
        pair.first.prepare(lambda share: None)
    with pytest.raises(EngineFailed):
        pair.ended.result(PATIENCE)
