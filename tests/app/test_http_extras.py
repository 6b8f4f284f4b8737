"""Extras of answers that clients of SGLang and vLLM ask for, and thinking kept short where text is told as
it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.engine.job import Piece
from core.types import Finish, FinishReason
from tests.rigs.server import Server, know
from tests.rigs.tools import CLOSING
from tests.rigs.wait import until

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]
THOUGHT = ["<think>", *["hm "] * 20]


# -- usage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "prompts"), [(CHAT, {"messages": HI}, 1), (COMPLETIONS, {"prompt": ["a", "b"]}, 2)]
)
@pytest.mark.parametrize("thinks", [False, True])
async def test_where_cached_tokens_came_from(
    server: Server, path: str, body: dict[str, Any], prompts: int, thinks: bool
) -> None:
    if thinks:
        know(server, None, "think")
    server.engine.cached = 1
    wanted = {"cached_tokens_details": {"device": prompts, "host": 0}}
    asked = {**body, "max_tokens": 2, "return_cached_tokens_details": True}
    assert (await server.ask(path, asked))["sglext"] == wanted
    usage = {"include_usage": True}
    events = await server.events(path, {**asked, "stream": True, "stream_options": usage})
    told = [json.loads(event) for event in events[:-1]]
    assert (told[-2]["choices"], told[-2]["sglext"]) == ([], wanted)
    assert told[-1]["usage"] and not any("sglext" in each for each in [*told[:-2], told[-1]])
    events = await server.events(path, {**asked, "stream": True})
    assert json.loads(events[-2])["sglext"] == wanted
    assert "sglext" not in await server.ask(path, {**asked, "return_cached_tokens_details": False})


async def test_meta_info_of_every_choice(server: Server) -> None:
    asked = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 2, "rid": "r", "return_meta_info": True}
    answer = await server.ask(COMPLETIONS, asked)
    metas = [choice["meta_info"] for choice in answer["choices"]]
    assert metas[3] == {
        "id": "r",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 0,
    }
    assert [meta["prompt_tokens"] for meta in metas] == [2, 2, 3, 3]
    chat = {"messages": HI, "max_tokens": 2, "logprobs": True, "return_meta_info": True}
    (choice,) = (await server.ask(CHAT, chat))["choices"]
    said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert choice["meta_info"]["output_token_logprobs"] == [[said[0], 72, None], [said[1], 108, None]]
    assert (await server.refused(CHAT, {**chat, "stream": True}))["param"] == "return_meta_info"


# -- where tokens stand ------------------------------------------------------------------------------


async def test_render_tells_where_tokens_stand(server: Server) -> None:
    asked = {"prompt": ["ä b", [5, 6]], "return_token_offsets": True}
    status, _ = await server.post(COMPLETIONS + "/render", asked)
    assert status == 400  # texts and ids do not mix
    (told,) = await server.ask(COMPLETIONS + "/render", {**asked, "prompt": ["ä b"]})
    assert told["token_offsets"] == [[0, 0], [0, 1], [0, 1], [1, 2], [2, 3]]
    assert len(told["token_ids"]) == 5
    (told,) = await server.ask(COMPLETIONS + "/render", {**asked, "prompt": [5, 6]})
    assert told["token_offsets"] is None
    told = await server.ask(CHAT + "/render", {"messages": HI, "return_token_offsets": True})
    assert told["token_offsets"] == [[i, i + 1] for i in range(len(told["prompt"]))]


# -- log-probabilities of named tokens in the prompt -------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_named_tokens_of_the_prompt(server: Server, streamed: bool) -> None:
    """The fake says which token an entry belongs to: 97 is the best of "a", 98 of "b"."""
    asked = {
        "text": "ab",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "token_ids_logprob": [3],
        "sampling_params": {"max_new_tokens": 1},
        "stream": streamed,
    }
    if streamed:
        meta = json.loads((await server.events(GENERATE, asked))[-2])["meta_info"]
    else:
        meta = (await server.ask(GENERATE, asked))["meta_info"]
    assert server.engine.runs[-1].params.prompt_logprob_ids == (3,)
    tops, named = meta["input_top_logprobs"], meta["input_token_ids_logprobs"]
    assert tops[0] is None and named[0] is None
    assert [[entry[1] for entry in each] for each in tops[1:]] == [[97], [98]]
    assert [[entry[1] for entry in each] for each in named[1:]] == [[3], [3]]


# -- a bound on thinking -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "hi", "max_thinking_tokens": 2},
        {"text": ["hi"], "sampling_params": {"thinking_token_budget": 2, "max_new_tokens": 50}},
        {"input_ids": [5, 6], "max_thinking_tokens": 2},
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_generate_cuts_a_thinking(server: Server, fields: dict[str, Any], streamed: bool) -> None:
    know(server, None, "think")
    server.engine.scripts = [THOUGHT, ["Yes"]]
    if streamed:
        answer = json.loads((await server.events(GENERATE, {**fields, "stream": True}))[-2])
    else:
        answer = await server.ask(GENERATE, fields)
        answer = answer[0] if isinstance(answer, list) else answer
    assert answer["text"] == f"<think>hm hm {CLOSING}Yes"
    assert answer["meta_info"]["completion_tokens"] == 3 + len(CLOSING) + 1 == len(answer["output_ids"])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


async def test_completions_cut_a_thinking_that_the_prompt_has_begun(server: Server) -> None:
    know(server, None, "think")
    server.engine.scripts = [THOUGHT[1:], ["Yes"], ["No"]]
    asked = {"prompt": ["a<think>", "b"], "thinking_token_budget": 2, "echo": True, "max_tokens": 50}
    answer = await server.ask(COMPLETIONS, asked)
    texts = [choice["text"] for choice in answer["choices"]]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert sorted(texts) in ([f"a<think>hm hm {CLOSING}Yes", "bNo"], [f"a<think>hm hm {CLOSING}No", "bYes"])


async def test_no_thinking_at_all(server: Server) -> None:
    know(server, None, "think")
    skipped = "<think>\n\n</think>\n\n"
    for prompt in ("a", "a<think>", "a<think>\n", "a" + skipped):
        await server.ask(COMPLETIONS, {"prompt": prompt, "max_thinking_tokens": 0, "max_tokens": 1})
        assert server.engine.runs[-1].job.prompt == "a" + skipped
        ids = list(prompt.encode())
        await server.ask(GENERATE, {"input_ids": ids, "max_thinking_tokens": 0})
        assert bytes(server.engine.runs[-1].prompt.tolist()).decode() == "a" + skipped
        await server.ask(CHAT, {"messages": HI, "input_ids": ids, "max_thinking_tokens": 0})
        assert bytes(server.engine.runs[-1].prompt.tolist()).decode() == "a" + skipped


async def test_a_constraint_holds_behind_a_thinking_that_is_bounded(server: Server) -> None:
    know(server, None, "think")
    server.engine.scripts = [THOUGHT, ["aa"]]
    await server.ask(GENERATE, {"text": "a", "regex": "a+", "max_thinking_tokens": 2})
    first, second = (run.job.grammar for run in server.engine.runs)
    assert first.kind == "structural_tag" and (second.kind, second.text) == ("regex", "a+")
    await server.ask(GENERATE, {"text": "a", "regex": "a+"})
    assert server.engine.runs[-1].job.grammar.kind == "regex"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (GENERATE, {"text": "a", "max_thinking_tokens": 5}, "max_thinking_tokens"),
        (
            GENERATE,
            {"text": "a", "sampling_params": {"thinking_token_budget": 5}},
            "sampling_params.thinking_token_budget",
        ),
        (COMPLETIONS, {"prompt": "a", "thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
async def test_a_bound_for_a_model_that_does_not_think(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = await server.post(path, body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "unsupported")
    know(server, None, "think")
    negative = json.loads(json.dumps(body).replace(": 5", ": -5"))
    assert (await server.refused(path, negative))["param"] == param
    assert not server.engine.runs


async def test_a_job_that_is_aborted_before_it_has_begun_has_no_hidden_state(server: Server) -> None:
    server.engine.manual = True
    hidden = {"messages": HI, "return_hidden_states": True, "rid": "r"}
    task = asyncio.create_task(server.post(CHAT, hidden))
    await until(lambda: bool(server.engine.runs))
    run = server.engine.runs[-1]
    run.hidden = lambda index: []  # type: ignore[method-assign]
    run.push(0, Piece("", [], None, Finish(FinishReason.ABORT)))
    status, answer = await task
    assert status == 200 and answer["choices"][0]["hidden_states"] is None
