"""Thinking over HTTP: fields, counts, budgets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import openai
import pytest

from app.engine.failure import TIMED_OUT
from app.engine.job import Job, Piece
from app.engine.reasoning_budget import Watch, Watcher
from app.parsers.base import Event
from app.parsers.reading import Answer, Reading
from app.parsers.registry import REASONING
from app.text.tokenizer import Tokenizer
from core.errors import Aborted, ContextExceeded, Overloaded, TimedOut, Unavailable
from core.request.params import SEED_LIMIT
from core.types import Finish, FinishReason
from tests.rigs.requests import CHAT
from tests.rigs.server import Server, know
from tests.rigs.step_loop import GREEDY, PROMPT, Bench
from tests.rigs.tools import CALL, CLOSING, HI, WEATHER
from tests.rigs.wait import until

THOUGHT = ["<think>", "\n", "Let", " me", " think", ".\n", "</think>", "\n\n", "Yes", "."]


def told(events: list[str]) -> list[dict[str, Any]]:
    """The deltas of a stream with one choice."""
    assert events[-1] == "[DONE]"
    return [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]


def joined(deltas: list[dict[str, Any]], field: str) -> str:
    return "".join(delta.get(field) or "" for delta in deltas)


async def test_thinking_has_fields_of_its_own(server: Server) -> None:
    know(server, None, "think")
    server.engine.scripts = [THOUGHT, THOUGHT]
    _, answer = await server.post(CHAT, {"messages": HI})
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "Let me think.",
        "reasoning": "Let me think.",
    }
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert answer["usage"]["completion_tokens"] == len(THOUGHT)
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    events = await server.events(CHAT, body)
    deltas = told(events)
    assert joined(deltas, "reasoning_content") == joined(deltas, "reasoning") == "Let me think."
    assert all(("reasoning" in delta) == ("reasoning_content" in delta) for delta in deltas)
    assert joined(deltas, "content") == "Yes." and deltas[0]["role"] == "assistant"
    assert json.loads(events[-2])["usage"] == answer["usage"]


async def test_no_thinking_is_null(server: Server) -> None:
    know(server, None, "think")
    _, answer = await server.post(CHAT, {"messages": HI})
    message = answer["choices"][0]["message"]
    assert message["content"] == "Hello wörld 😀!" and message["reasoning_content"] is None
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("fields", "content"),
    [({"separate_reasoning": False}, "".join(THOUGHT)), ({"include_reasoning": False}, "Yes.")],
)
async def test_thinking_within_the_content_or_left_out(
    server: Server, fields: dict[str, bool], content: str
) -> None:
    know(server, None, "think")
    server.engine.scripts = [THOUGHT, THOUGHT]
    _, answer = await server.post(CHAT, {"messages": HI, **fields})
    message = answer["choices"][0]["message"]
    assert message["content"] == content and not {"reasoning", "reasoning_content"} & message.keys()
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    deltas = told(await server.events(CHAT, {"messages": HI, "stream": True, **fields}))
    assert joined(deltas, "content") == content and joined(deltas, "reasoning_content") == ""


async def test_a_thinking_that_length_ends_is_no_content(server: Server) -> None:
    know(server, None, "think")
    server.engine.scripts = [THOUGHT]
    _, answer = await server.post(CHAT, {"messages": HI, "max_tokens": 4})
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("", "Let me")


async def test_openai_client_sees_the_thinking(server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [[*THOUGHT, "\n", *CALL]]
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # some releases take no other
    async with (
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model="org/tiny", messages=HI, tools=[tool]) as stream,
    ):
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Yes." and message.reasoning_content == "Let me think."
    assert message.tool_calls[0].function.name == "weather"
    assert final.choices[0].finish_reason == "tool_calls"


async def test_a_prompt_that_opens_the_thinking(server: Server) -> None:
    know(server, None, "think")
    opened = [*HI, {"role": "assistant", "content": "<think>\n"}]
    server.engine.scripts = [THOUGHT[2:]]
    body = {"messages": opened, "continue_final_message": True}
    _, answer = await server.post(CHAT, body)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Yes.", "Let me think.")


async def test_effort_none_asks_the_template_for_no_thinking(server: Server) -> None:
    know(server, None, "think")
    await server.post(CHAT, {"messages": HI, "reasoning_effort": "none"})
    assert "enable_thinking=False" in server.engine.runs[-1].job.prompt
    assert "\nthinking=False" in server.engine.runs[-1].job.prompt  # as Granite's template has it
    fields = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    await server.post(CHAT, {"messages": HI, **fields})
    assert "enable_thinking=True" in server.engine.runs[-1].job.prompt


# -- budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_thinking_tokens", "thinking_token_budget"])
async def test_a_budget_ends_the_thinking_cleanly(server: Server, name: str, stream: bool) -> None:
    know(server, None, "think")
    server.engine.scripts = [["<think>", "\n", *["hm "] * 200], ["Yes", "."]]
    body = {"messages": HI, name: 4, "max_tokens": 100, "seed": 5}
    if stream:
        events = await server.events(
            CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        deltas, usage = told(events), json.loads(events[-2])["usage"]
        content, reasoning = joined(deltas, "content"), joined(deltas, "reasoning")
    else:
        _, answer = await server.post(CHAT, body)
        usage, message = answer["usage"], answer["choices"][0]["message"]
        content, reasoning = message["content"], message["reasoning"]
        assert answer["choices"][0]["finish_reason"] == "stop"
    assert (content, reasoning) == ("Yes.", "hm hm hm ")
    first, second = server.engine.runs
    spoken = 5 + len(CLOSING)  # the fake's tokens are words, its tokenizer's are bytes
    assert usage["prompt_tokens"] == len(first.prompt)
    assert usage["completion_tokens"] == spoken + 2
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4
    assert first.ended == [0] and second.job.id == first.job.id
    assert second.job.max_tokens == 100 - spoken and second.job.seed == 5
    said = [ord("<"), ord("\n"), *[ord("h")] * 3, *CLOSING.encode()]
    assert second.prompt.tolist() == [*first.prompt.tolist(), *said]
    assert not server.engine.live


async def test_a_thinking_within_its_budget_is_left_alone(server: Server) -> None:
    know(server, None, "think")
    server.engine.scripts = [THOUGHT]
    _, answer = await server.post(CHAT, {"messages": HI, "max_thinking_tokens": 6})
    assert answer["choices"][0]["message"]["content"] == "Yes." and len(server.engine.runs) == 1


async def test_no_budget_at_all_skips_the_thinking(server: Server) -> None:
    know(server, None, "think")
    _, answer = await server.post(CHAT, {"messages": HI, "max_thinking_tokens": 0})
    assert server.engine.runs[-1].job.prompt.endswith("assistant: <think>\n\n</think>\n\n")
    message = answer["choices"][0]["message"]
    assert message["content"] == "Hello wörld 😀!" and message["reasoning"] is None
    opened = {"role": "assistant", "content": "<think>\n"}
    body = {"messages": [*HI, opened], "continue_final_message": True, "max_thinking_tokens": 0}
    await server.post(CHAT, body)
    assert server.engine.runs[-1].job.prompt.endswith("assistant: <think>\n\n</think>\n\n")


@pytest.mark.parametrize("finish", [None, Finish(FinishReason.STOP)])
async def test_text_that_cannot_be_read_is_not_told_as_content(
    server: Server, monkeypatch: pytest.MonkeyPatch, finish: Finish | None
) -> None:
    def unread(*_: object) -> list[Event]:
        raise ValueError("secret")

    know(server, None, "think")
    server.engine.manual = True
    task = asyncio.create_task(server.events(CHAT, {"messages": HI, "stream": True}))
    await until(lambda: bool(server.engine.runs))
    [run] = server.engine.runs
    run.push(0, Piece("<think>a", [1]))
    monkeypatch.setattr(Answer, "feed", unread)
    run.push(0, Piece("b", [2], None, finish))
    *events, error, done = await task
    deltas = told([*events, done])
    assert joined(deltas, "reasoning_content") == "a" and joined(deltas, "content") == ""
    assert "could not read" in json.loads(error)["error"]["message"] and "secret" not in error
    assert not server.engine.live


async def test_each_choice_has_its_own_budget(server: Server) -> None:
    know(server, None, "think")
    think, straight = ["<think>", *["hm"] * 20], ["A", "n", "s"]
    server.engine.manual = True
    body = {"messages": HI, "max_thinking_tokens": 2, "n": 2, "seed": 1, "max_tokens": 50}
    task = asyncio.create_task(server.post(CHAT, body))
    await until(lambda: bool(server.engine.runs))
    [first] = server.engine.runs
    for at in range(3):
        first.push(0, Piece(think[at], [at]))
        first.push(1, Piece(straight[at], [at]))
    await until(lambda: len(server.engine.runs) == 2)
    second = server.engine.runs[1]
    assert first.ended == [0] and second.job.seed == 1 and second.job.n == 1
    assert second.job.id != first.job.id
    second.push(0, Piece("Yes", [9], None, Finish(FinishReason.STOP)))
    first.push(1, Piece("wer", [9], None, Finish(FinishReason.STOP)))
    _, answer = await task
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert contents == ["Yes", "Answer"]
    assert [choice["message"]["reasoning"] for choice in answer["choices"]] == ["hmhm", None]


async def test_constraints_begin_behind_a_cut(server: Server) -> None:
    know(server, "hermes", "think")
    server.engine.scripts = [["<think>", *["hm "] * 20], [CALL]]
    body = {"messages": HI, "tools": [WEATHER], "tool_choice": "required", "max_thinking_tokens": 3}
    _, answer = await server.post(CHAT, body)
    first, second = (json.loads(run.job.grammar.text)["format"] for run in server.engine.runs)
    assert first["type"] == "sequence" and second == first["elements"][1]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_logprobs_go_on_across_a_cut(server: Server) -> None:
    know(server, None, "think")
    server.engine.scripts = [["<think>", *["hm "] * 20], ["Yes"]]
    body = {"messages": HI, "max_thinking_tokens": 2, "logprobs": True, "return_token_ids": True}
    _, answer = await server.post(CHAT, body)
    [choice] = answer["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == 3 + len(CLOSING) + 1
    assert choice["logprobs"]["content"][3]["logprob"] == 0.0


async def test_what_happens_where_nothing_can_follow(server: Server) -> None:
    know(server, None, "think")
    think = ["<think>", *["hm "] * 50]
    server.engine.scripts = [think]
    _, answer = await server.post(CHAT, {"messages": HI, "max_thinking_tokens": 3, "max_tokens": 10})
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["reasoning"] == "hm hm hm "
    start = server.engine.start
    for error, status in (
        (Overloaded("full"), 500),
        (ContextExceeded(1, 1, 1), 200),
        (Aborted(), 200),
        (TimedOut(TIMED_OUT), 408),
        (Unavailable("down"), 503),
    ):
        server.engine.scripts = [think]
        begun: list[bool] = []

        async def once(job: Any, sink: Any, error: Exception = error, begun: list[bool] = begun) -> Any:
            if begun:
                raise error
            begun.append(True)
            return await start(job, sink)

        server.engine.start = once  # type: ignore[method-assign]
        code, answer = await server.post(CHAT, {"messages": HI, "max_thinking_tokens": 3})
        assert code == status, answer
        if isinstance(error, Aborted):
            assert answer["choices"][0]["finish_reason"] == "abort"
    assert not server.engine.live


@pytest.mark.parametrize(("limit", "made"), [(3 + len(CLOSING), 4), (4 + len(CLOSING), 4 + len(CLOSING))])
async def test_the_end_of_a_thinking_counts_as_its_tokens(server: Server, limit: int, made: int) -> None:
    know(server, None, "think")
    server.engine.scripts = [["<think>", *["hm "] * 50]]
    body = {"messages": HI, "max_thinking_tokens": 3, "max_tokens": limit, "return_token_ids": True}
    _, answer = await server.post(CHAT, body)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["reasoning"].startswith("hm hm hm ")
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == made


async def test_the_largest_seed_goes_on_across_a_cut(server: Server) -> None:
    know(server, None, "think")
    server.engine.scripts = [["<think>", *["hm "] * 20], ["Yes"], ["Yes"]]
    body = {"messages": HI, "max_thinking_tokens": 3, "n": 2, "seed": SEED_LIMIT - 1}
    await server.ask(CHAT, body)
    assert [run.job.seed for run in server.engine.runs[1:]] == [SEED_LIMIT - 1, 0]


async def test_a_client_that_leaves_during_a_cut_frees_everything(server: Server) -> None:
    know(server, None, "think")
    server.engine.manual = True
    for late in (False, True):
        server.engine.runs.clear()
        body = {"messages": HI, "max_thinking_tokens": 1, "stream": True}
        task = asyncio.create_task(server.events(CHAT, body))
        await until(lambda: bool(server.engine.runs))
        [first] = server.engine.runs
        first.push(0, Piece("<think>", [1]))
        server.engine.gate = None if late else asyncio.Event()
        first.push(0, Piece("hm", [2]))
        if late:
            await until(lambda: len(server.engine.runs) == 2)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not server.engine.live)
        server.engine.gate = None
    assert len(server.engine.runs) == 2 and server.engine.runs[1].aborted


async def test_budgets_that_cannot_be(server: Server) -> None:
    know(server, None, "think")
    for name in ("max_thinking_tokens", "thinking_token_budget"):
        assert (await server.refused(CHAT, {"messages": HI, name: -1}))["param"] == name
    know(server, None, None)
    for name in ("max_thinking_tokens", "thinking_token_budget"):
        status, answer = await server.post(CHAT, {"messages": HI, name: 5})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, name, "unsupported")
    assert not server.engine.runs


async def test_an_abort_by_id_ends_it(server: Server) -> None:
    know(server, None, "think")
    server.engine.manual = True
    task = asyncio.create_task(server.post(CHAT, {"messages": HI, "rid": "r", "max_thinking_tokens": 2}))
    await until(lambda: bool(server.engine.runs))
    for text in ("<think>", "a", "b"):
        server.engine.runs[0].push(0, Piece(text, [1]))
    await until(lambda: len(server.engine.runs) == 2)
    assert np.array_equal(server.engine.runs[1].prompt[-len(CLOSING) :], list(CLOSING.encode()))
    await server.post("/abort_request", {"rid": "r"})
    _, answer = await task
    assert answer["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("message", [None, "gone"])
@pytest.mark.parametrize("turns", range(2, 14))
async def test_an_abort_is_not_lost_in_a_cut(tokenizer: Tokenizer, turns: int, message: str | None) -> None:
    """Few tokens follow, in whichever turn of the loop the abort comes."""
    bench, pieces = Bench(tokenizer), list[Piece]()
    watch = Watch(reading=Reading(reasoning=REASONING["think"], inside=True), budget=4)
    job = Job(id="a", prompt=PROMPT, sampling=GREEDY, max_tokens=400, ignore_eos=True)
    run = await Watcher(bench.submitter, tokenizer, watch).start(job, lambda _, piece: pieces.append(piece))
    for _ in range(turns):
        await asyncio.sleep(0)
    before = len(pieces)
    assert bench.submitter.abort_all(message) == 1
    await run.wait()
    finish = pieces[-1].finish
    assert finish is not None and (finish.reason, finish.message) == (FinishReason.ABORT, message)
    assert sum(len(piece.tokens) for piece in pieces[before:]) < 10
    await until(lambda: bench.submitter.idle)
    bench.engine.close()
