"""vLLM's smaller routes: conversations side by side, scores, tokens in and tokens out and back to text."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from app.engine.job import Piece
from core.errors import Overloaded
from tests.rigs.server import Server, know
from tests.rigs.tools import CALL, WEATHER
from tests.rigs.wait import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
INFERENCE = "/inference/v1/generate"
HI = [{"role": "user", "content": "hi"}]
HO = [{"role": "user", "content": "ho ho"}]
SAID = "Hello wörld 😀!"


# -- conversations side by side ----------------------------------------------------------------------


async def test_a_batch_has_a_choice_for_each_conversation(server: Server) -> None:
    server.engine.cached = 3
    body = {"messages": [HI, HO], "max_tokens": 5, "request_id": "b", "return_token_ids": True}
    answer = await server.ask(CHAT + "/batch", body)
    assert (answer["id"], answer["object"]) == ("b", "chat.completion")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [SAID, SAID]
    prompts = [list(f"user: {text}\nassistant: ".encode()) for text in ("hi", "ho ho")]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts
    used = answer["usage"]
    read = sum(map(len, prompts))
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (read, 10, read + 10)
    assert used["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_one_that_fails_ends_the_others(server: Server) -> None:
    server.engine.manual = True
    task = asyncio.create_task(server.post(CHAT + "/batch", {"messages": [HI, HO]}))
    await until(lambda: len(server.engine.runs) == 2)
    server.engine.runs[1].push(0, Piece("", [], None, server.engine.failure))
    status, answer = await task
    assert status == 500 and answer["error"]["message"]
    assert all(run.aborted or not run.open for run in server.engine.runs)
    server.engine.refusal = Overloaded("full")
    assert (await server.post(CHAT + "/batch", {"messages": [HI, HO]}))[0] == 429


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": HI}, "messages"),
        ({"messages": [HI, []]}, "messages[1]"),
        ({"messages": [HI, [{"role": ""}]]}, "messages[1][0].role"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"input_ids": [1]}, "input_ids"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_what_is_wrong_with_a_batch(server: Server, fields: dict[str, Any], param: str) -> None:
    assert (await server.refused(CHAT + "/batch", {"messages": [HI], **fields}))["param"].startswith(param)


# -- scores ------------------------------------------------------------------------------------------


async def test_generative_scores(server: Server) -> None:
    body = {"query": "Is it? ", "items": ["y", "nn"], "label_token_ids": [10, 50], "request_id": "g"}
    answer = await server.ask("/generative_scoring", body)
    assert (answer["id"], answer["object"], answer["model"]) == ("generative-scoring-g", "list", "org/tiny")
    a, b = math.exp(-0.1), math.exp(-0.5)
    assert [each["score"] for each in answer["data"]] == [pytest.approx(a / (a + b))] * 2
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(0, "score"), (1, "score")]
    assert answer["usage"]["prompt_tokens"] == 2 * (1 + len("Is it? ")) + 3
    first = server.engine.runs[0].prompt.tolist()
    assert first == [256, *b"Is it? ", *b"y", 10], "encoded apart, and one beginning"
    await server.ask("/generative_scoring", {**body, "item_first": True, "add_special_tokens": False})
    assert server.engine.runs[-2].prompt.tolist() == [*b"y", *b"Is it? ", 10]
    answer = await server.ask("/generative_scoring", {**body, "apply_softmax": False, "query": [5]})
    assert answer["data"][0]["score"] == pytest.approx(a)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"items": []}, "items"),
        ({"items": ["a", [5]]}, "items[1]"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [9999]}, "label_token_ids"),
    ],
)
async def test_what_is_wrong_with_a_score(server: Server, fields: dict[str, Any], param: str) -> None:
    body = {"query": "q", "items": ["a"], "label_token_ids": [1], **fields}
    assert (await server.refused("/generative_scoring", body))["param"] == param


# -- tokens in, tokens out ---------------------------------------------------------------------------


async def test_tokens_in_tokens_out(server: Server) -> None:
    body = {
        "request_id": "t",
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 2, "n": 2, "logprobs": 1, "prompt_logprobs": 0, "seed": 3},
        "return_token_ids": True,
    }
    answer = await server.ask(INFERENCE, body)
    assert (answer["request_id"], answer["output_mode"]) == ("t", "tokens")
    assert answer["prompt_token_ids"] == [5, 6] and len(answer["prompt_logprobs"]) == 2
    assert [choice["token_ids"] for choice in answer["choices"]] == [[72, 108]] * 2
    first = answer["choices"][0]
    assert first["finish_reason"] == "length" and "text" not in first
    (entry, _) = first["logprobs"]["content"]
    assert entry == {
        "token_id": 72,
        "logprob": pytest.approx(-0.72),
        "top_logprobs": [{"token_id": 72, "logprob": 0.0}],
    }
    assert answer["usage"]["total_tokens"] == 6
    plain = {"token_ids": [5], "output_mode": "text"}
    answer = await server.ask(INFERENCE, plain)
    assert answer["choices"][0]["text"] == SAID and "prompt_token_ids" not in answer
    assert server.engine.runs[-1].job.max_tokens is None, "unset is all that fits"


async def test_tokens_as_a_stream(server: Server) -> None:
    body = {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 3, "logprobs": 0},
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events = await server.events(INFERENCE, body)
    assert events[-1] == "[DONE]"
    told = [json.loads(event) for event in events[:-1]]
    assert [each.get("prompt_token_ids") for each in told] == [[5, 6], *[None] * (len(told) - 1)]
    choices = [choice for each in told for choice in each["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == [72, 108, 32]
    assert [choice["finish_reason"] for choice in choices] == [None] * 3 + ["length"]
    assert all(choice["logprobs"]["content"] for choice in choices[:3])
    assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens"] == 3
    events = await server.events(INFERENCE, {"token_ids": [5], "stream": True, "output_mode": "text"})
    told = [json.loads(event) for event in events[:-1]]
    assert "".join(choice["text"] for each in told for choice in each["choices"]) == SAID


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [9999]}, "token_ids"),
        ({"token_ids": "x"}, "token_ids"),
        ({"features": {"a": 1}}, "features"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": 9999}}, "token_ids"),
        ({"sampling_params": {"lora_path": "x"}}, "sampling_params.lora_path"),
        ({"sampling_params": {"thinking_token_budget": 1}}, "sampling_params.thinking_token_budget"),
        ({"output_mode": "song"}, "output_mode"),
    ],
)
async def test_what_is_wrong_with_tokens(server: Server, fields: dict[str, Any], param: str) -> None:
    for streamed in (False, True):
        status, answer = await server.post(INFERENCE, {"token_ids": [5], "stream": streamed, **fields})
        assert (status, answer["error"]["param"]) == (400, param), answer


# -- and back ----------------------------------------------------------------------------------------


async def test_there_and_back_again(server: Server) -> None:
    """render, generate and derender give what the one route gives."""
    know(server, "hermes", "think")
    asked = {"messages": HI, "tools": [WEATHER], "max_completion_tokens": 200, "temperature": 0.5, "rid": "r"}
    asked |= {"logprobs": True, "top_logprobs": 1, "tool_choice": "required"}
    asked |= {"cache_salt": "salt", "extra_key": "key", "priority": 3}
    script = ["<think>\nhm\n</think>\n\n", *CALL]
    server.engine.scripts = [script, script]
    whole = await server.ask(CHAT, asked)
    rendered = await server.ask(CHAT + "/render", asked)
    generated = await server.ask(INFERENCE, rendered)
    direct, apart = (run.job for run in server.engine.runs)
    assert apart.sampling == direct.sampling and apart.max_tokens == direct.max_tokens
    assert (apart.root, apart.priority) == (direct.root, direct.priority)
    assert apart.grammar is not None and direct.grammar is not None
    assert (apart.grammar.kind, apart.grammar.text) == (direct.grammar.kind, direct.grammar.text)
    # The fake's tokens are the first byte of what they say, so the text itself is made of tokens here.
    text = "".join(script)
    made = {**generated, "choices": [{**generated["choices"][0], "token_ids": [*text.encode(), 257]}]}
    back = await server.ask(
        CHAT + "/derender",
        {"generate_response": made, "chat_request": asked, "prompt_token_ids": rendered["token_ids"]},
    )
    (ours,), (theirs,) = whole["choices"], back["choices"]
    for call in (ours["message"]["tool_calls"][0], theirs["message"]["tool_calls"][0]):
        call.pop("id")
    assert theirs["message"] == ours["message"] and theirs["finish_reason"] == "tool_calls"
    assert theirs["logprobs"] == ours["logprobs"]
    assert back["id"] == "r" and back["object"] == "chat.completion"
    assert back["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


async def test_tokens_may_be_named_by_vllms_word_for_their_ids(server: Server) -> None:
    """The names of tokens are those of vLLM's `/inference/v1/generate`, in OpenAI's shape of
    log-probabilities."""
    best = [
        {"token": "token_id:72", "logprob": -0.5, "bytes": None},
        {"token": "token_id:257", "logprob": -2.0},
    ]
    content = [{"token": "token_id:72", "logprob": -0.5, "bytes": None, "top_logprobs": best}]
    made = {"choices": [{"token_ids": [72], "finish_reason": "stop", "logprobs": {"content": content}}]}
    answer = await server.ask(CHAT + "/derender", {"generate_response": made})
    (told,) = answer["choices"][0]["logprobs"]["content"]
    assert (told["token"], told["bytes"], told["logprob"]) == ("H", [72], -0.5)
    assert [each["token"] for each in told["top_logprobs"]] == ["H", "</s>"]
    for token in (
        "H",
        "token_id:",
        "token_id:x",
        "token_id:-1",
        "token_id:9999",
        "token_id:" + "9" * 40,
        None,
    ):
        content[0]["token"] = token
        status, answer = await server.post(CHAT + "/derender", {"generate_response": made})
        assert status == 400 and answer["error"]["param"].startswith("generate_response"), answer


async def test_derendering_without_the_request(server: Server) -> None:
    made = {"choices": [{"index": 0, "token_ids": [*b"Hi!", 257], "finish_reason": "stop"}]}
    answer = await server.ask(CHAT + "/derender", {"generate_response": made, "prompt_tokens": 7})
    assert answer["choices"][0]["message"]["content"] == "Hi!"
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}


async def test_completions_back_from_tokens(server: Server) -> None:
    rendered = await server.ask(COMPLETIONS + "/render", {"prompt": ["a", "b"], "n": 2})
    made = [await server.ask(INFERENCE, each) for each in rendered]
    assert all(run.job.max_tokens == 16 and run.job.n == 2 for run in server.engine.runs)
    body = {"generate_responses": made, "prompt_token_ids": [each["token_ids"] for each in rendered]}
    answer = await server.ask(COMPLETIONS + "/derender", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 64)


CHOICE = {"token_ids": [1], "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {}, "generate_response"),
        (CHAT, {"generate_response": {"choices": []}}, "generate_response"),
        (CHAT, {"generate_response": {"choices": [{"token_ids": [9999]}]}}, "generate_response"),
        (CHAT, {"generate_response": {"choices": [{"token_ids": [1] * 600}]}}, "generate_response"),
        (
            CHAT,
            {
                "generate_response": {
                    "choices": [{**CHOICE, "logprobs": {"content": [{"token_id": -1, "logprob": 0}]}}]
                }
            },
            "generate_response.choices[0].logprobs.content[0]",
        ),
        (CHAT, {"generate_response": {"choices": [CHOICE]}, "chat_request": {}}, "messages"),
        (CHAT, {"generate_response": {"choices": [CHOICE]}, "stream": True}, "stream"),
        (COMPLETIONS, {}, "generate_responses"),
        (COMPLETIONS, {"generate_responses": [{}]}, "generate_responses"),
        (
            COMPLETIONS,
            {"generate_responses": [{"choices": [CHOICE]}], "prompt_tokens": [1, 2]},
            "prompt_tokens",
        ),
    ],
)
async def test_what_is_wrong_with_what_was_made(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    assert (await server.refused(path + "/derender", fields))["param"] == param
