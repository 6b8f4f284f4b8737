"""Events of the prefix cache over ZMQ: the messages, what was missed, and that they tell what is cached."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq.asyncio

from app.compose import load
from app.engine.kv_events import Publisher
from app.engine.operator import Operator
from app.offline import LLM
from app.settings import parse
from app.text.tokenizer import Tokenizer
from bench.chaos.tiny import dummy_model
from core.cache.events import CacheEvent, CacheEvents, Cleared, Removed, Stored
from core.config import CacheConfig, Config
from core.errors import ConfigError
from core.kv_events import KvEventsConfig, endpoint_of, kv_events
from core.types import RootKey
from tests.rigs.kv_events import Subscriber, cached
from tests.rigs.step_loop import Bench
from tests.rigs.usage import usage_error
from tests.rigs.wait import PATIENCE, settle

FREE = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
STORED = Stored(RootKey(adapter="id"), 2**64 - 1, [7, 8], np.arange(8, dtype=np.int64))

Make = Callable[..., Publisher]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes publishers; all of them are closed after the test."""
    made: list[Publisher] = []

    def make(replica: int = 0, **fields: Any) -> Publisher:
        made.append(Publisher(KvEventsConfig(**{**FREE, **fields}), replica))
        return made[-1]

    yield make
    for each in made:
        each.close()


def start(publisher: Publisher, events: CacheEvents | None = None) -> None:
    publisher.start(asyncio.get_running_loop(), events or CacheEvents(2), lambda id: None)


def put(publisher: Publisher, *events: CacheEvent) -> None:
    publisher.put(events, {"id": "sql"}.get)


# -- the messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("listens", [True, False])
async def test_messages_are_vllms(make: Make, listens: bool) -> None:
    """Messages are vLLM's also where the router listens and the server connects."""
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"kv@pod@")
    try:
        if listens:
            publisher = make(2, topic="kv@pod@model")
            socket.connect(publisher.endpoint)
        else:
            port = socket.bind_to_random_port("tcp://127.0.0.1") - 2
            publisher = make(2, topic="kv@pod@model", endpoint=f"tcp://localhost:{port}")
        start(publisher)
        async with asyncio.timeout(PATIENCE):
            put(publisher, STORED, Removed([7]), Cleared())
            while not await socket.poll(20):  # the subscription takes a while to arrive
                put(publisher, STORED, Removed([7]), Cleared())
            put(publisher, Stored(RootKey(), None, [9], np.arange(4, dtype=np.int64)))
            (topic, first, payload) = await socket.recv_multipart()
            *_, (_, last, final) = [
                await socket.recv_multipart()
                for _ in range(publisher.number - 1 - int.from_bytes(first, "big"))
            ]
    finally:
        socket.close(linger=0)
    assert topic == b"kv@pod@model" and len(first) == 8
    assert int.from_bytes(last, "big") == publisher.number - 1
    ts, events, replica = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float) and replica == 2
    stored = {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": 2**64 - 1,
        "token_ids": [0, 1, 2, 3, 4, 5, 6, 7],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "sql",
    }
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
    assert events == [stored, removed, {"type": "AllBlocksCleared"}]
    assert msgspec.msgpack.decode(final)[1][0] == stored | {
        "block_hashes": [9],
        "parent_block_hash": None,
        "token_ids": [0, 1, 2, 3],
        "lora_name": None,
    }


async def test_what_was_missed_can_be_asked_for(make: Make) -> None:
    publisher = make(buffer_steps=3)
    start(publisher)
    for _ in range(5):
        put(publisher, Removed([]))
    subscriber = Subscriber(publisher)
    try:
        for wrong in ((b"",), (b"", b"1"), (b"x", bytes(8)), (b"", bytes(8), b"")):
            await subscriber.send(*wrong)  # none is answered, and none ends the thread
        assert await subscriber.ask(3) == [3, 4]
        assert await subscriber.ask(5) == []
        put(publisher, Removed([]))
        assert await subscriber.ask(0) == [3, 4, 5], "the last three"
    finally:
        subscriber.close()


async def test_a_batch_too_many_leaves_a_gap_in_the_numbers(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = make(max_queue_size=1)
    for _ in range(3):
        put(publisher, Removed([]))
    start(publisher)
    subscriber = Subscriber(publisher)
    try:
        assert await subscriber.ask(0) == [0]
        put(publisher, Removed([]))
        assert await subscriber.ask(0) == [0, 3]
    finally:
        subscriber.close()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "cache events from number 1 on are dropped: too many wait to be sent"
    ]


# -- what they tell ----------------------------------------------------------------------------------


async def test_a_router_knows_what_is_cached(make: Make, tokenizer: Tokenizer) -> None:
    """Through evictions, preemption, new weights and a flush; also one that joins late."""
    bench, publisher, rng = Bench(tokenizer, events=True, pages=60, eager=False), make(), random.Random(1)
    start(publisher, bench.events[0])
    operator = Operator(bench.replicas, Path(), "model")
    subscribers = [Subscriber(publisher)]
    cache = bench.scheduler.cache

    async def compare() -> None:
        for each in subscribers:
            await each.catch_up()
            assert each.follower.prefixes == cached(cache)

    async def work(steps: int) -> None:
        for _ in range(steps):
            await bench.complete()

    try:
        for round in range(12):
            for i in range(4):
                prompt = np.array(
                    [3 + rng.randrange(3)] * 20 + [rng.randrange(3, 9) for _ in range(9)], np.int32
                )
                await bench.start(f"{round} {i}", 12, prompt=prompt)
            await work(3)
            await compare()
            if round == 4:
                bench.engine.retract_all()
            if round == 6:
                subscribers.append(Subscriber(publisher))
            await work(40)
            assert bench.replicas.idle
            await compare()
        assert bench.scheduler.statistics().retractions and cache.statistics().evicted_pages
        assert len(subscribers[0].follower) and subscribers[0].heard
        updating = asyncio.create_task(operator.load_weights("other"))
        await work(3)
        await updating
        assert not cached(cache)
        await compare()
        await bench.start("again", 4, prompt=np.arange(3, 40, dtype=np.int32))
        await work(20)
        await compare()
        assert len(subscribers[1].follower) and bench.replicas.flush()
        await compare()
        assert not len(subscribers[1].follower)
    finally:
        for each in subscribers:
            each.close()
        bench.engine.close()


async def test_salted_prefixes_are_not_told_and_those_of_keys_are(make: Make, tokenizer: Tokenizer) -> None:
    bench, publisher = Bench(tokenizer, events=True), make()
    start(publisher, bench.events[0])
    subscriber = Subscriber(publisher)
    prompt = np.arange(3, 23, dtype=np.int32)
    try:
        for id, root in {"salt": RootKey(salt="s"), "own": RootKey(own="o")}.items():
            await (await bench.start(id, 8, prompt=prompt, root=root)).wait()
            await subscriber.catch_up()
            assert not len(subscriber.follower) and not subscriber.number
        for tenant in ("a", "b"):
            await (await bench.start(tenant, 1, prompt=prompt, root=RootKey(tenant=tenant))).wait()
        await settle()
        await subscriber.catch_up()
        assert set(subscriber.follower.prefixes.values()) == {2} and len(subscriber.follower) == 10
    finally:
        subscriber.close()
        bench.engine.close()


async def test_the_engine_publishes(tmp_path: Path) -> None:
    """A model, from the flag to the messages."""
    model = dummy_model(tmp_path)
    flag = msgspec.json.encode({"publisher": "zmq", **FREE}).decode()
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "kv_events_config": flag}
    with LLM(str(model), chat_template=str(model / "template.jinja"), kv_tokens=512, **options) as llm:
        ((publisher, _),) = llm._live.publishers
        subscriber = Subscriber(publisher)
        try:
            for prompts in (["a" * 40, "a" * 60], ["b" * 100]):
                await asyncio.to_thread(llm.generate, prompts, max_tokens=8, ignore_eos=True)
                cache = llm._live.replicas.engines[0]._scheduler.cache
                async with asyncio.timeout(PATIENCE):
                    while subscriber.follower.prefixes != cached(cache):
                        await subscriber.catch_up()
            assert len(subscriber.follower) > 6
        finally:
            subscriber.close()
    assert not publisher._thread.is_alive()


# -- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "publishes"),
    [
        ("", False),
        ('{"enable_kv_cache_events": true}', True),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', False),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', False),
        ('{"publisher": "zmq", "topic": "kv-events"}', True),
        ("{}", False),
    ],
)
def test_what_turns_it_on(text: str, publishes: bool) -> None:
    settings = kv_events(CacheConfig(kv_events_config=text), 1)
    assert (settings is not None) == publishes
    assert settings is None or settings.endpoint == "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"endpoints": "x"}', r"enable_kv_cache_events, publisher, endpoint, .*topic.*endpoints"),
        ("[]", "JSON object"),
        ("{", "JSON object"),
        ('{"publisher": "nats"}', "nats"),
        ('{"publisher": "zmq", "hwm": 0}', "hwm"),
        ('{"publisher": "zmq", "endpoint": "localhost:5557"}', "tcp://ADDRESS:PORT"),
        ('{"publisher": "zmq", "replay_endpoint": "tcp://*:70000"}', "1 to 65535"),
        ('{"publisher": "zmq", "endpoint": "tcp://*:65535"}', "65536.*replica 1"),
    ],
)
def test_wrong_settings_end_the_start(text: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=named):
        kv_events(CacheConfig(kv_events_config=text), 2)
    assert "--kv-events-config" in usage_error(capsys, parse, ["--dp", "2", "--kv-events-config", text])


def test_it_needs_the_prefix_cache_the_extra_and_a_free_port(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = '{"publisher": "zmq"}'
    with pytest.raises(ConfigError, match="--no-radix-cache"):
        kv_events(CacheConfig(kv_events_config=on, radix_cache=False), 1)
    taken = make().endpoint
    for fields in ({"endpoint": taken}, {"replay_endpoint": taken}):
        with pytest.raises(ConfigError, match=f"{taken}: Address already in use"):
            make(**fields)
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "app.engine.kv_events")
    with pytest.raises(ConfigError, match=r"loom-serve\[kv-events\]"):
        load(Config(cache=CacheConfig(kv_events_config=on)), lambda stage, share: None)


def test_replicas_have_ports_one_after_the_other() -> None:
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of("tcp://[::1]:5557", 3) == "tcp://[::1]:5560"
    assert [endpoint_of("ipc:///tmp/a", n) for n in (0, 1)] == ["ipc:///tmp/a", "ipc:///tmp/a_dp1"]
