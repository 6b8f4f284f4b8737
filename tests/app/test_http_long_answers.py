"""Long answers: log-probabilities of many tokens are put into words off the loop, and told in full."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec
import pytest

from app.http.aside import MANY
from app.http.reply import FREED, NUMBERS, SLICE, encode_long, free_soon
from tests.rigs.server import Server

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
TOKENS = "/inference/v1/generate"
LONG = "".join(chr(97 + i % 26) for i in range(MANY + 150))

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "echo": (COMPLETIONS, {"prompt": LONG, "echo": True, "logprobs": 2, "max_tokens": 2}),
    "prompt_logprobs": (COMPLETIONS, {"prompt": LONG, "prompt_logprobs": 2, "max_tokens": 2}),
    "two choices": (COMPLETIONS, {"prompt": LONG, "prompt_logprobs": 1, "max_tokens": 2, "n": 2}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": LONG}], "prompt_logprobs": 2, "max_tokens": 2}),
    "native": (
        NATIVE,
        {
            "text": LONG,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
            "sampling_params": {"max_new_tokens": 2},
        },
    ),
    "tokens": (
        TOKENS,
        {"token_ids": list(LONG.encode()), "sampling_params": {"prompt_logprobs": 2, "max_tokens": 2}},
    ),
}


@pytest.fixture
def spelled(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that put tokens into words, one entry a token."""
    threads: list[int] = []
    tokenizer = server.service.loaded.tokenizer
    text = tokenizer.token_text

    def token_text(id: int) -> str:
        threads.append(threading.get_ident())
        return text(id)

    monkeypatch.setattr(tokenizer, "token_text", token_text)
    return threads


def told(answers: list[dict[str, Any]]) -> list[Any]:
    """The log-probabilities of prompts, wherever a dialect puts them."""
    found: list[Any] = []
    for answer in answers:
        for holder in (answer, *answer.get("choices", ()), answer.get("meta_info", {})):
            listed = (holder.get(name) for name in ("prompt_logprobs", "input_top_logprobs"))
            found += filter(None, listed)
            logprobs = holder.get("logprobs")
            if logprobs and len(logprobs.get("tokens", ())) > MANY:
                found.append({name: listed[: len(LONG)] for name, listed in logprobs.items()})
    return found


@pytest.mark.parametrize("name", BODIES)
async def test_many_log_probabilities_are_no_work_of_the_loop(
    server: Server, spelled: list[int], name: str
) -> None:
    path, body = BODIES[name]
    whole = await server.ask(path, body)
    (first, *others) = told([whole])
    assert all(other == first for other in others)
    assert len(first["tokens"] if isinstance(first, dict) else first) >= len(LONG) - 1
    assert len(spelled) > MANY and threading.get_ident() not in spelled
    if name == "tokens":
        return  # a stream does not tell them
    spelled.clear()
    events = await server.events(path, {**body, "stream": True})
    streamed = told([json.loads(event) for event in events if event != "[DONE]"])
    assert streamed == [first, *others]
    assert len(spelled) > MANY and threading.get_ident() not in spelled


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hi", "logprobs": 128, "max_tokens": 40}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 128}),
        (COMPLETIONS, {"prompt": LONG[:40], "echo": True, "logprobs": 128, "max_tokens": 0}),
        (COMPLETIONS, {"prompt": LONG[:40], "echo": True, "logprobs": 128, "max_tokens": 0, "stream": True}),
    ],
)
async def test_many_alternatives_of_few_tokens_are_none_either(
    server: Server, spelled: list[int], path: str, body: dict[str, Any]
) -> None:
    async with server.http.post(path, json={"max_tokens": 40, **body}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    assert len(spelled) > 39 * 128 and threading.get_ident() not in spelled


@pytest.mark.parametrize("count", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE])
def test_slices_joined_are_the_whole(count: int) -> None:
    value = {
        "numbers": list(range(count)),
        "objects": [{"a": i, "b": [float("nan"), None]} for i in range(count)],
        "inside": [{"listed": [list(range(count))] * 2}],
        "none": None,
    }
    assert encode_long(value) == msgspec.json.encode(value)


async def test_long_lists_are_freed_over_several_turns_of_the_loop() -> None:
    """Freeing the log-probabilities of 128 answers in one go held the GIL for 22 ms."""
    short, inner, outer = [1], list(range(2 * FREED + 1)), [list(range(SLICE + 1))] * 2
    free_soon({"short": short, "inside": [{"a": inner}], "outer": outer})
    left = []
    while any(outer):
        await asyncio.sleep(0)
        left.append(len(inner))
    assert left[:3] == [FREED + 1, 1, 0]
    assert short == [1]


async def test_an_answer_is_freed_once_it_was_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[object] = []
    monkeypatch.setattr("app.http.reply.free_soon", freed.append)
    monkeypatch.setattr("app.http.reply.PIECE", 1024)
    status, answer = await server.post(*BODIES["echo"])
    assert (status, freed) == (200, [answer])


async def test_ids_of_a_long_text_are_encoded_in_pieces(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = msgspec.json.encode

    def counted(value: object) -> bytes:
        sizes.append(len(encode(value)))
        return encode(value)

    monkeypatch.setattr("app.http.reply.msgspec.json.encode", counted)
    text = "word " * 20_000
    status, answer = await server.post("/tokenize", {"prompt": text})
    assert status == 200 and answer["tokens"][1:] == list(text.encode()) and answer["count"] == len(text) + 1
    assert max(sizes) < 6 * NUMBERS
