"""`return_hidden_states`: SGLang's shapes, whole and streamed, and no more than an answer should hold."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.rigs.embeddings import ids
from tests.rigs.engine import WORDS, FakeRun, state
from tests.rigs.server import Server, serves

GENERATE = "/generate"


def wanted(prompt: list[int], made: int) -> list[Any]:
    """The prompt's states in one list, then one of each token but the last."""
    tokens = [*prompt, *(word.encode()[0] for word in WORDS[: made - 1])]
    states = [state(token, at).tolist() for at, token in enumerate(tokens)]
    return [states[: len(prompt)], *states[len(prompt) :]]


def asked(**more: Any) -> dict[str, Any]:
    return {"text": "ab", "sampling_params": {"max_new_tokens": 3}, "return_hidden_states": True, **more}


async def test_native(server: Server) -> None:
    _, answer = await server.post(GENERATE, asked())
    assert answer["meta_info"]["hidden_states"] == wanted(ids("ab"), 3)
    assert answer["meta_info"]["completion_tokens"] == 3
    _, answer = await server.post(GENERATE, asked(return_hidden_states=False))
    assert "hidden_states" not in answer["meta_info"]


async def test_native_in_its_sampling_parameters(server: Server) -> None:
    fields = {"sampling_params": {"max_new_tokens": 3, "return_hidden_states": True}}
    _, answer = await server.post(GENERATE, {"text": "ab", **fields})
    assert answer["meta_info"]["hidden_states"] == wanted(ids("ab"), 3)


async def test_native_lists(server: Server) -> None:
    fields = {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 2, "n": 2}}
    _, answers = await server.post(GENERATE, asked(**fields, return_hidden_states=[True, True]))
    got = [answer["meta_info"]["hidden_states"] for answer in answers]
    assert got == [wanted(ids(text), 2) for text in ("ab", "ab", "c", "c")]


async def test_native_prompt_alone_and_with_logprobs(server: Server) -> None:
    fields = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    _, answer = await server.post(GENERATE, asked(**fields))
    assert answer["meta_info"]["hidden_states"] == wanted(ids("ab"), 1)
    assert "output_token_logprobs" in answer["meta_info"]


async def test_native_stream_tells_them_in_a_last_event(server: Server) -> None:
    events = await server.events(GENERATE, asked(stream=True))
    assert events[-1] == "[DONE]"
    told = [json.loads(event) for event in events[:-1]]
    assert [("hidden_states" in each["meta_info"]) for each in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["meta_info"]["hidden_states"] == wanted(ids("ab"), 3)
    assert told[-1]["text"] == told[-2]["text"]
    assert told[-1]["meta_info"]["finish_reason"] == told[-2]["meta_info"]["finish_reason"]


async def test_chat_and_completions_tell_the_last(server: Server) -> None:
    _, answer = await server.post(
        "/v1/completions", {"prompt": ["ab", "c"], "max_tokens": 2, "return_hidden_states": True}
    )
    got = [choice["hidden_states"] for choice in answer["choices"]]
    assert got == [wanted(ids("ab"), 2)[-1], wanted(ids("c"), 2)[-1]]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "return_hidden_states": True}
    _, answer = await server.post("/v1/chat/completions", chat)
    text = b"user: a\nassistant: "
    assert answer["choices"][0]["hidden_states"] == state(text[-1], len(text) - 1).tolist()


async def test_the_last_of_a_long_prompt_is_one_vector(server: Server) -> None:
    """A limit counts what is held: those of the output, not of the prompt."""
    serves(server, hidden_size=2**20)
    asked = {"prompt": "a prompt of more than four tokens", "max_tokens": 3, "return_hidden_states": True}
    status, answer = await server.post("/v1/completions", asked)
    assert (status, answer["choices"][0]["hidden_states"]) == (200, wanted(ids(asked["prompt"]), 3)[-1])
    assert server.engine.runs[0].params.hidden == "output"
    status, answer = await server.post("/v1/completions", asked | {"max_tokens": 4})
    assert (status, answer["error"]["param"]) == (400, "return_hidden_states")
    assert "5 tokens" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_chunks_have_none(server: Server, path: str, body: dict[str, Any]) -> None:
    error = await server.refused(path, {**body, "stream": True, "return_hidden_states": True})
    assert error["param"] == "return_hidden_states"


async def test_responses_have_none(server: Server) -> None:
    status, answer = await server.post("/v1/responses", {"input": "a", "return_hidden_states": True})
    assert (status, answer["error"]["param"]) == (400, "return_hidden_states")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_too_much_says_how_much_is_not(server: Server, stream: bool) -> None:
    serves(server, hidden_size=2**20)
    error = await server.refused(GENERATE, asked(stream=stream))
    assert error["param"] == "return_hidden_states"
    assert "6 tokens" in error["message"] and "4 tokens of this model" in error["message"]
    assert server.engine.runs[0].aborted
    await server.ask(GENERATE, asked(sampling_params={"max_new_tokens": 1}))


async def test_an_answer_that_was_ended_early_has_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRun, "hidden", lambda run, index: [])
    _, answer = await server.post(GENERATE, asked())
    assert answer["meta_info"]["hidden_states"] == [[]]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "return_hidden_states": True}
    _, answer = await server.post("/v1/chat/completions", chat)
    assert answer["choices"][0]["hidden_states"] is None


async def test_all_answers_together_hold_no_more_than_memory_allows(server: Server) -> None:
    """Whoever reads slowly holds what was made for it; others are told to come back."""
    numbers = server.service.loaded.numbers
    read = asyncio.Event()

    async def slow_reader() -> None:
        numbers.hold(2**28)
        await read.wait()

    reader = asyncio.create_task(slow_reader())
    await asyncio.sleep(0)
    status, answer = await server.post(GENERATE, asked())
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    await server.ask(GENERATE, asked(return_hidden_states=False))
    read.set()
    await reader
    await server.ask(GENERATE, asked())
