"""Prefixes that clients ask to keep: `prompt_cache_key` and Anthropic's `cache_control`, through a real
scheduler and cache, with usage that is true."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from app.api.anthropic.cache import kept
from app.api.anthropic.schema import MessagesBody
from app.engine.job import Keep
from app.text.tokenizer import Tokenizer
from core.errors import RequestError
from core.stats import CacheStatistics
from tests.rigs.operator import make_loaded
from tests.rigs.server import CARD, Server, Start
from tests.rigs.step_loop import VOCAB, Bench
from tests.rigs.tokenizer import JoinTemplate

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES_URL = "/v1/messages"
LONG = "All work and no play makes Jack a dull boy. "
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
PAGE = 4


class Real(Server):
    """A server over a real engine with a fake device. Its pool has 128 pages, of which one owner may pin
    32."""

    def __init__(self, server: Server, bench: Bench) -> None:
        super().__init__(server.url, server.port, server.service, server.engine, server.http)
        self.bench = bench

    @property
    def cache(self) -> CacheStatistics:
        return self.bench.scheduler.statistics().cache

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await super().ask(path, {"ignore_eos": True, **body})


@pytest.fixture
async def real(start: Start) -> AsyncIterator[Real]:
    server = await start()
    tokenizer = Tokenizer.load(None, VOCAB, [2])
    bench = Bench(tokenizer)
    card = msgspec.structs.replace(CARD, vocab_size=VOCAB)
    server.service.ready(make_loaded(card, tokenizer, JoinTemplate(), bench.submitter))
    yield Real(server, bench)
    bench.scheduler.check_integrity()
    bench.engine.close()
    tokenizer.close()


def block(text: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({} if mark is None else {"cache_control": mark})


def request(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}),
        (COMPLETIONS, {"prompt": LONG, "max_tokens": 4}),
        (RESPONSES, {"input": LONG, "max_output_tokens": 4}),
    ],
)
async def test_a_key_pins_the_prompt_and_a_second_request_reads_it(
    real: Real, path: str, body: dict[str, Any]
) -> None:
    await real.ask(path, body)
    assert (real.cache.pins, real.cache.pinned) == (0, 0)
    answer = await real.ask(path, {**body, "prompt_cache_key": "k"})
    used = answer["usage"]
    total = used.get("prompt_tokens", used.get("input_tokens"))
    assert (real.cache.pins, real.cache.pinned) == (1, total // PAGE)
    details = used.get("prompt_tokens_details", used.get("input_tokens_details"))
    assert details["cached_tokens"] == (total - 1) // PAGE * PAGE


async def test_pinned_prompts_outlive_others(real: Real) -> None:
    first = {"prompt": LONG, "max_tokens": 4}
    await real.ask(COMPLETIONS, {**first, "prompt_cache_key": "k"})
    for i in range(12):
        await real.ask(COMPLETIONS, {"prompt": f"{i}{LONG}{LONG}", "max_tokens": 4})
    assert real.cache.evicted_pages > 0
    answer = await real.ask(COMPLETIONS, first)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(LONG) - 1) // PAGE * PAGE


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 300.0),
        ({"prompt_cache_retention": "in_memory"}, 300.0),
        ({"prompt_cache_retention": "1h"}, 3600.0),
        ({"prompt_cache_retention": "24h"}, 86_400.0),
    ],
)
async def test_how_long_and_for_whom(server: Server, fields: dict[str, Any], seconds: float) -> None:
    await server.post(COMPLETIONS, {"prompt": "a", "prompt_cache_key": "k", **fields})
    assert server.engine.runs[-1].job.keep == Keep(owner="k", marks=((None, seconds),))
    await server.post(COMPLETIONS, {"prompt": "a", "prompt_cache_key": "k", "cache_salt": "t", **fields})
    own = server.engine.runs[-1].job
    assert own.keep is not None
    assert own.keep.owner == own.root.salt != ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"prompt_cache_key": "k" * 1000}, "prompt_cache_key"),
        ({"prompt_cache_retention": "forever"}, "prompt_cache_retention"),
    ],
)
async def test_what_is_no_key_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    assert (await server.refused(COMPLETIONS, {"prompt": "a", **fields}))["param"] == param


async def test_no_key_asks_for_nothing(server: Server) -> None:
    await server.post(COMPLETIONS, {"prompt": "a", "prompt_cache_key": "", "prompt_cache_retention": None})
    assert server.engine.runs[-1].job.keep is None


# -- Anthropic -------------------------------------------------------------------------------------


async def test_usage_tells_what_was_read_and_what_was_pinned(real: Real) -> None:
    body = request(
        system=[block(LONG, HOUR)],
        messages=[{"role": "user", "content": [block("What does Jack do?", MARK)]}],
    )
    first = (await real.ask(MESSAGES_URL, body))["usage"]
    assert real.cache.pins == 2
    made = first["cache_creation"]
    hour, minutes = made["ephemeral_1h_input_tokens"], made["ephemeral_5m_input_tokens"]
    assert len(LONG) - PAGE < hour <= len(LONG) + len("system: \nuser: ") + PAGE
    assert minutes > 0
    assert first["cache_creation_input_tokens"] == hour + minutes
    assert first["cache_read_input_tokens"] == 0
    total = sum(first[name] for name in first if name.endswith("input_tokens"))
    assert first["input_tokens"] == total % PAGE, "whole pages are pinned"
    assert real.cache.pinned == (hour + minutes) // PAGE

    again = (await real.ask(MESSAGES_URL, body))["usage"]
    assert again["cache_read_input_tokens"] == (total - 1) // PAGE * PAGE
    assert sum(again[name] for name in again if name.endswith("input_tokens")) == total
    assert real.cache.pins == 2, "used again, not pinned twice"


async def test_a_prompt_is_kept_without_an_answer(real: Real) -> None:
    body = request(system=[block(LONG, HOUR)])
    first = await real.ask(MESSAGES_URL, {**body, "max_tokens": 0})
    assert (first["content"], first["stop_reason"]) == ([], "max_tokens")
    made = first["usage"]["cache_creation_input_tokens"]
    assert made > 0 and real.cache.pins == 1
    assert (await real.ask(MESSAGES_URL, body))["usage"]["cache_read_input_tokens"] >= made


async def test_a_growing_conversation_keeps_one_pin(real: Real) -> None:
    messages: list[dict[str, Any]] = []
    read = 0
    for turn in range(3):
        messages = [*messages, {"role": "user", "content": [block(f"{turn}: What now, Jack?", MARK)]}]
        used = (await real.ask(MESSAGES_URL, request(messages=messages)))["usage"]
        assert used["cache_read_input_tokens"] >= read
        assert used["cache_creation_input_tokens"] > 0
        read = used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
        read -= len("assistant: ") + PAGE  # the answer is another than what is sent back here
        messages = [*messages, {"role": "assistant", "content": "ok"}]
    assert real.cache.pins == 1


async def test_unmarked_nothing_is_created(real: Real) -> None:
    used = (await real.ask(MESSAGES_URL, request()))["usage"]
    assert used["cache_creation_input_tokens"] == 0
    assert real.cache.pins == 0


def places(body: dict[str, Any], prompt: str) -> dict[float, str | None]:
    """The text that is kept, by seconds."""
    keep = kept(msgspec.convert(request(**body), MessagesBody), prompt)
    return {
        seconds: None if at is None else prompt[:at] for at, seconds in (() if keep is None else keep.marks)
    }


PROMPT = "system: one\ntwo\ntools: 1\nuser: first\nassistant: second\nuser: third\nfourth\nassistant: "
TOOL = {"name": "f", "input_schema": {}, "cache_control": HOUR}
CONVERSATION = [
    {"role": "user", "content": [block("first", HOUR)]},
    {"role": "assistant", "content": "second"},
    {"role": "user", "content": [block("third", MARK), block("fourth")]},
]
PLAIN = [{"role": message["role"], "content": [block("first")]} for message in CONVERSATION[:1]]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"cache_control": MARK}, {300.0: None}),
        ({"system": [block("one", MARK), block("two")]}, {300.0: "system: one"}),
        ({"system": [block("one", MARK), block("two", HOUR)], "messages": PLAIN}, None),
        ({"system": [block("one"), block("two")], "tools": [TOOL], "messages": PLAIN}, "messages"),
        ({"system": "one\ntwo", "messages": CONVERSATION}, "both"),
    ],
)
def test_where_a_mark_stands(body: dict[str, Any], expected: Any) -> None:
    begun = "system: one\ntwo\ntools: 1\nuser: "
    told = {
        None: {300.0: "system: one", 3600.0: begun},
        "messages": {3600.0: begun},
        "both": {3600.0: begun + "first", 300.0: begun + "first\nassistant: second\nuser: third"},
    }
    assert places(body, PROMPT) == (expected if isinstance(expected, dict) else told[expected])


def test_of_equal_time_the_last_mark_counts() -> None:
    messages = [
        {"role": "user", "content": [block("first", MARK)]},
        {"role": "user", "content": [block("third", MARK)]},
    ]
    assert places({"messages": messages, "tools": [{**TOOL, "cache_control": MARK}]}, PROMPT) == {300.0: None}


def test_a_mark_inside_a_result_ends_with_it() -> None:
    inside = {"type": "tool_result", "tool_use_id": "t", "content": [block("first", MARK)]}
    messages = [{"role": "user", "content": [inside, block("third")]}]
    assert places({"messages": messages}, PROMPT) == {300.0: "system: one\ntwo\ntools: 1\nuser: first"}


class Searched(str):
    """Counts how often it is looked through."""

    __slots__ = ("looks",)

    def find(self, *args: Any) -> int:
        self.looks = getattr(self, "looks", 0) + 1
        return super().find(*args)


def test_texts_that_a_template_changed_are_not_all_looked_for() -> None:
    messages = [{"role": "user", "content": f"changed {i}"} for i in range(1000)]
    messages += [{"role": "user", "content": [block("third", MARK)]}, {"role": "user", "content": "fourth"}]
    prompt = Searched(PROMPT)
    assert places({"messages": messages}, prompt) == {300.0: ""}
    assert prompt.looks < 50


def test_the_user_is_whose_share_it_is() -> None:
    body = request(cache_control=MARK, metadata={"user_id": "u" * 999})
    keep = kept(msgspec.convert(body, MessagesBody), "p")
    assert keep is not None
    assert keep.owner == "u" * 256


@pytest.mark.parametrize(
    ("mark", "param"),
    [
        ("ephemeral", "cache_control.type"),
        ({}, "cache_control.type"),
        ({"type": "persistent"}, "cache_control.type"),
        ({"type": "ephemeral", "ttl": "2h"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": 5}, "cache_control.ttl"),
    ],
)
def test_a_mark_that_is_none_is_named(mark: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        places({"system": [{"type": "text", "text": "a", "cache_control": mark}]}, "a")
    assert caught.value.param == f"system[0].{param}"
    with pytest.raises(RequestError) as caught:
        places({"cache_control": mark}, "a")
    assert caught.value.param == param
