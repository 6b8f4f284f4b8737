"""Draft statistics of a server with speculative decoding; without it a server has none.

The whole app runs over a fake device whose numbers of drafts are random."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from app.engine.job import DraftCounts
from app.engine.loop import BACKLOG
from app.text.tokenizer import Tokenizer
from core.plan import StepResult
from tests.rigs.executor import oracle
from tests.rigs.metrics import samples
from tests.rigs.requests import CHAT, COMPLETIONS
from tests.rigs.server import Server, Start, know
from tests.rigs.step_loop import PROMPT, VOCAB, Bench
from tests.rigs.tools import HI
from tests.rigs.wait import settle

BODY: dict[str, Any] = {"prompt": PROMPT.tolist(), "max_tokens": 60, "temperature": 0, "ignore_eos": True}
NATIVE: dict[str, Any] = {
    "input_ids": PROMPT.tolist(),
    "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True},
}
MODEL = {"model_name": "org/tiny", "engine": "0"}


class Stack:
    """A server over a fake device, and what the device reported."""

    def __init__(self, server: Server, bench: Bench) -> None:
        self.server, self.bench = server, bench
        self.results: list[StepResult] = []
        arrived = bench.executor.results

        def results() -> list[Any]:
            found = arrived()
            self.results += [each for each in found if isinstance(each, StepResult)]
            return found

        bench.executor.results = results  # type: ignore[method-assign]

    def counts(self) -> DraftCounts:
        """Draft counts of all steps."""
        steps = drafted = accepted = 0
        for result in self.results:
            assert result.drafted is not None
            made = [1] * len(result.drafted) if result.counts is None else result.counts.tolist()
            for drafts, count in zip(result.drafted.tolist(), made, strict=True):
                steps += drafts > 0
                drafted += drafts
                accepted += max(count - 1, 0)
        return DraftCounts(steps, drafted, accepted)

    async def get(self, path: str) -> Any:
        async with self.server.http.get(path) as response:
            assert response.status == 200
            return await response.json()

    async def metrics(self) -> dict[Any, float]:
        async with self.server.http.get("/metrics") as response:
            return samples(await response.text())


Make = Callable[[int], Awaitable[Stack]]


@pytest.fixture
async def make(start: Start, tokenizer: Tokenizer) -> Make:
    async def stack(drafts: int) -> Stack:
        server, bench = await start(), Bench(tokenizer, drafts=drafts)
        loaded = server.service.loaded
        server.service.ready(msgspec.structs.replace(loaded, tokenizer=tokenizer, engine=bench.submitter))
        return Stack(server, bench)

    return stack


def details(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["usage"]["completion_tokens_details"]
    return found


async def test_usage_tells_drafts(make: Make) -> None:
    stack = await make(3)
    _, answer = await stack.server.post(COMPLETIONS, BODY)
    _, drafted, accepted = stack.counts()
    assert accepted > 0 and drafted > accepted
    assert details(answer) == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
    }
    rows = sum(result.counts is None or result.counts[0] > 0 for result in stack.results)
    assert answer["usage"]["completion_tokens"] == 60 == rows + accepted


async def test_choices_are_added_up(make: Make) -> None:
    stack = await make(3)
    _, answer = await stack.server.post(COMPLETIONS, {**BODY, "n": 4})
    _, drafted, accepted = stack.counts()
    told = details(answer)
    assert told["accepted_prediction_tokens"] == accepted
    assert told["rejected_prediction_tokens"] == drafted - accepted


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_what_is_delivered(make: Make, stream: bool, tokenizer: Tokenizer) -> None:
    """A stop in the middle of a step cuts accepted drafts off."""
    stack = await make(3)
    text = tokenizer.decode(oracle(PROMPT.tolist(), 60, VOCAB))
    body = {**BODY, "stop": [text[30:33]], "stream": stream, "stream_options": {"include_usage": True}}
    if stream:
        *_, last, done = await stack.server.events(COMPLETIONS, body)
        assert done == "[DONE]"
        answer = json.loads(last)
    else:
        _, answer = await stack.server.post(COMPLETIONS, {**body, "stream_options": None})
    usage, told = answer["usage"], details(answer)
    left, delivered, late = usage["completion_tokens"], 0, 0
    for result in stack.results:
        made = 1 if result.counts is None else int(result.counts[0])
        late += not left and made > 0
        delivered += min(max(made - 1, 0), left)
        left = max(left - made, 0)
    assert usage["completion_tokens"] < 60 and delivered < stack.counts().accepted
    assert 1 < late < BACKLOG, "steps behind the stop"
    assert told["accepted_prediction_tokens"] == delivered
    assert sum(told.values()) <= stack.counts().drafted


@pytest.mark.parametrize("stream", [False, True])
async def test_generate_tells_them_as_sglang_does(make: Make, stream: bool) -> None:
    stack = await make(3)
    if stream:
        *events, _ = await stack.server.events("/generate", {**NATIVE, "stream": True})
        metas = [json.loads(event)["meta_info"] for event in events]
        assert not any(name.startswith("spec_") for meta in metas[:-1] for name in meta)
        meta = metas[-1]
    else:
        _, answer = await stack.server.post("/generate", NATIVE)
        meta = answer["meta_info"]
    steps, drafted, accepted = stack.counts()
    told = {name: value for name, value in meta.items() if name.startswith("spec_")}
    assert told == {
        "spec_accept_rate": accepted / drafted,
        "spec_accept_length": (steps + accepted) / steps,
        "spec_accept_token_num": accepted,
        "spec_draft_token_num": drafted,
        "spec_verify_ct": steps,
    }


async def test_meta_info_of_a_chat_is_each_choices_own(make: Make) -> None:
    stack = await make(3)
    body = {**BODY, "n": 2, "return_meta_info": True}
    _, answer = await stack.server.post(COMPLETIONS, body)
    metas = [choice["meta_info"] for choice in answer["choices"]]
    assert sum(meta["spec_verify_ct"] for meta in metas) == stack.counts().steps
    assert sum(meta["spec_draft_token_num"] for meta in metas) == stack.counts().drafted


async def test_an_answer_too_short_for_drafts(make: Make) -> None:
    stack = await make(3)
    _, answer = await stack.server.post("/generate", {**NATIVE, "sampling_params": {"max_new_tokens": 1}})
    told = {name: value for name, value in answer["meta_info"].items() if name.startswith("spec_")}
    assert len(told) == 5 and not any(told.values())


async def test_metrics(make: Make) -> None:
    stack = await make(3)
    before = await stack.metrics()
    await stack.server.post(COMPLETIONS, {**BODY, "n": 3})
    values, counts = await stack.metrics(), stack.counts()

    def value(name: str, **labels: str) -> float:
        return values[name, frozenset({**MODEL, **labels}.items())]

    assert value("vllm:spec_decode_num_drafts_total") == counts.steps
    assert value("vllm:spec_decode_num_draft_tokens_total") == counts.drafted
    assert value("vllm:spec_decode_num_accepted_tokens_total") == counts.accepted
    positions = [
        value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(at)) for at in range(3)
    ]
    assert sum(positions) == counts.accepted
    assert counts.steps >= positions[0] >= positions[1] >= positions[2] > 0
    assert value("sglang:spec_accept_length") == (counts.steps + counts.accepted) / counts.steps
    assert value("sglang:spec_accept_rate") == counts.accepted / counts.drafted
    assert before.keys() - values.keys() == set(), "they are there from the start"
    info = await stack.get("/server_info")
    assert info["internal_states"][0]["avg_spec_accept_length"] == value("sglang:spec_accept_length")


async def test_the_timeline(make: Make) -> None:
    stack = await make(3)
    _, answer = await stack.server.post(COMPLETIONS, {**BODY, "request_id": "r"})
    told = (await stack.get(f"/debug/requests/{answer['id']}"))["choices"][0]
    counts = stack.counts()
    assert (told["verify_steps"], told["drafted_tokens"], told["accepted_tokens"]) == counts


async def test_without_speculation_nothing_tells_of_it(make: Make) -> None:
    stack = await make(0)
    _, answer = await stack.server.post(COMPLETIONS, {**BODY, "return_meta_info": True})
    assert details(answer) == {"reasoning_tokens": 0}
    assert sorted(answer["choices"][0]["meta_info"]) == [
        "cached_tokens", "completion_tokens", "finish_reason", "id", "prompt_tokens",
    ]  # fmt: skip
    _, native = await stack.server.post("/generate", NATIVE)
    assert sorted(native["meta_info"]) == sorted(answer["choices"][0]["meta_info"])
    assert not [name for name, _ in await stack.metrics() if "spec_" in name or "draft" in name]
    (state,) = (await stack.get("/server_info"))["internal_states"]
    assert not [name for name in state if "spec" in name or "draft" in name]
    told = (await stack.get(f"/debug/requests/{answer['id']}"))["choices"][0]
    assert not [name for name in told if "draft" in name or "verify" in name or "accept" in name]


async def test_both_halves_of_an_answer_whose_thinking_was_cut(server: Server) -> None:
    know(server, None, "think")
    server.engine.drafts = DraftCounts(4, 12, 5)
    server.engine.scripts = [["<think>", "\n", "Let", " me", " think", ".\n", "</think>"], ["Yes"]]
    _, answer = await server.post(CHAT, {"messages": HI, "max_thinking_tokens": 3})
    assert answer["choices"][0]["message"]["content"] == "Yes"
    told = details(answer)
    assert (told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]) == (10, 14)


async def drive(bench: Bench) -> None:
    """Complete the steps one by one, each after everything due was delivered."""
    bench.executor.eager = False
    while True:
        await settle()
        if bench.executor.pending:
            bench.executor.complete()


@pytest.mark.parametrize("drafts", [0, 3])
async def test_a_stream_says_the_same_however_many_steps_are_an_event(
    make: Make, tokenizer: Tokenizer, drafts: int
) -> None:
    """Text, log-probabilities, finishes and usage of several choices, one with a stop string; 60 tokens cross
    pages of 4 and every interval. Only the number of events differs."""
    text = tokenizer.decode(oracle(PROMPT.tolist(), 60, VOCAB))
    stopped = {"stop": [text[30:33]], "n": 2}
    heard: list[dict[int, Any]] = []
    events: list[int] = []
    for interval in (1, 2, 3):
        stack = await make(drafts)
        stack.bench.engine.set_stream_interval(interval)
        device = asyncio.create_task(drive(stack.bench))
        told: dict[int, Any] = {}
        for at, more in enumerate(({"n": 3}, {"logprobs": 0}, stopped)):
            body = {**BODY, **more, "stream": True, "stream_options": {"include_usage": True}}
            *chunks, last, done = await stack.server.events(COMPLETIONS, body)
            assert done == "[DONE]"
            told[10 * at + 9] = json.loads(last)["usage"]["completion_tokens"]
            for chunk in map(json.loads, chunks):
                for choice in chunk["choices"]:
                    mine = told.setdefault(10 * at + choice["index"], ["", [], []])
                    mine[0] += choice["text"]
                    mine[1] += (choice["logprobs"] or {}).get("tokens", [])
                    mine[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
            events.append(len(chunks))
        heard.append(told)
        device.cancel()
    assert heard[0] == heard[1] == heard[2]
    assert heard[0][9] == 180 and heard[0][20][2] == ["stop"] and len(heard[0][10][1]) == 60
    assert events[0] > events[3] > events[6]
