"""Structured output through every layer: valid, independent of overlap depth and preemption, without an
effect on other requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest

from app.compose import Live, load
from app.engine.job import Job, Piece
from bench.chaos.tiny import flags
from core.config import CacheConfig, Config, ModelConfig, ScheduleConfig
from core.grammar import GrammarKind, GrammarSpec
from core.request import SamplingParams
from core.types import FinishReason
from tests.rigs.process import Process, serving
from tests.rigs.wait import PATIENCE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
PHONE = r"\+[0-9]{2} [0-9]{3,5}"
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "boolean"}}}
SOURCES: list[tuple[GrammarKind, Any]] = [
    ("json_schema", json.dumps(SCHEMA)),
    ("regex", PHONE),
    ("choice", '["yes","no","perhaps"]'),
    ("ebnf", 'root ::= "(" root ")" | "x"{1,3}'),
    ("structural_tag", json.dumps(TAG)),
]


# -- inside one process ----------------------------------------------------------------------------


def config(model: Path, kv_tokens: int = 16384, depth: int = 1) -> Config:
    return Config(
        model=ModelConfig(
            model=str(model), load_format="dummy", chat_template=str(model / "template.jinja"), offline=True
        ),
        cache=CacheConfig(kv_tokens=kv_tokens, page_size=4),
        schedule=ScheduleConfig(
            overlap_depth=depth, max_running=8, conservativeness=0.01, prefill_weight=0.0
        ),
    )


@asynccontextmanager
async def running(live: Live) -> AsyncIterator[Live]:
    live.replicas.start(asyncio.get_running_loop())
    try:
        yield live
    finally:
        live.close()


async def texts(live: Live, jobs: list[Job]) -> dict[str, list[str]]:
    """Run all jobs; the texts of their choices, or the finish reason of those that did not stop."""
    out: dict[str, list[str]] = {job.id: [""] * job.n for job in jobs}

    def sink(id: str, index: int, piece: Piece) -> None:
        out[id][index] += piece.text
        if piece.finish is not None and piece.finish.reason is not FinishReason.STOP:
            out[id][index] = f"{piece.finish.reason.value}: {piece.finish.message}"

    runs = [await live.loaded.engine.start(job, lambda i, p, id=job.id: sink(id, i, p)) for job in jobs]
    await asyncio.gather(*(run.wait() for run in runs))
    return out


def job(id: str, kind: GrammarKind, text: str, **changes: Any) -> Job:
    base = Job(
        id=id,
        prompt=f"prompt {id}",
        sampling=SamplingParams(temperature=1.0),
        max_tokens=170,
        seed=7,
        grammar=GrammarSpec(kind, text),
    )
    return msgspec.structs.replace(base, **changes)


def jobs() -> list[Job]:
    made = [job(f"{kind}-{i}", kind, text) for i in range(2) for kind, text in SOURCES]
    free = [
        msgspec.structs.replace(one, id=f"free-{i}", grammar=None, max_tokens=40, ignore_eos=True)
        for i, one in enumerate(made[:2])
    ]
    return made + free


async def test_text_does_not_depend_on_overlap_depth_or_preemption(model: Path) -> None:
    """The smallest pool holds three of twelve requests: most are preempted at least once."""
    seen = {}
    for name, depth, kv_tokens in (("0", 0, 16384), ("1", 1, 16384), ("2", 2, 16384), ("small", 1, 224)):
        settings = config(model, kv_tokens, depth)
        async with running(load(settings, lambda stage, share: None)) as live:
            seen[name] = await texts(live, jobs())
            retractions = live.replicas.engines[0].load().retractions
            assert (retractions > 0) == (name == "small")
    assert seen["0"] == seen["1"] == seen["2"] == seen["small"]
    for id, (text,) in seen["0"].items():
        check(id.rsplit("-", 1)[0], text)


def check(kind: str, text: str) -> None:
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "regex":
        assert re.fullmatch(PHONE, text), text
    elif kind == "choice":
        assert text in ("yes", "no", "perhaps")
    elif kind == "ebnf":
        inner = text.strip("()")
        assert inner in ("x", "xx", "xxx")
        assert text == "(" * text.count("(") + inner + ")" * text.count("(")
    elif kind == "structural_tag":
        assert json.loads(text) in (True, False)


@pytest.fixture
async def live(model: Path) -> AsyncIterator[Live]:
    settings = config(model)
    async with running(load(settings, lambda stage, share: None)) as opened:
        yield opened


async def test_each_choice_of_a_request_is_constrained(live: Live) -> None:
    out = await texts(live, [job("many", "regex", PHONE, n=6)])
    assert all(re.fullmatch(PHONE, text) for text in out["many"])
    assert len(set(out["many"])) > 1


async def test_a_grammar_end_overrides_ignore_eos_and_min_tokens(live: Live) -> None:
    min_tokens = SamplingParams(min_tokens=100)
    out = await texts(
        live,
        [
            job("eos", "choice", '["yes"]', ignore_eos=True),
            job("min", "choice", '["yes"]', sampling=min_tokens),
            job("both", "regex", "[a-z]*", ignore_eos=True, max_tokens=30),
        ],
    )
    assert out["eos"] == out["min"] == ["yes"]
    assert out["both"] == ["length: None"], "EOS is chosen only when no other token is allowed"


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Process]:
    with serving(*flags(model), "--offline") as opened:
        yield opened


@pytest.fixture
async def session(server: Process) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(PATIENCE)) as opened:
        await server.ready(opened)
        yield opened


async def chat(session: aiohttp.ClientSession, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 3, **fields}
    async with session.post("/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.json()


async def test_answers_match_their_constraints(session: aiohttp.ClientSession) -> None:
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True},
    }
    requests: list[tuple[str, dict[str, Any]]] = [
        ("json_schema", {"response_format": response_format}),
        ("regex", {"regex": PHONE}),
        ("regex", {"structured_outputs": {"regex": PHONE}, "temperature": 0}),
        ("choice", {"guided_choice": ["yes", "no", "perhaps"]}),
        ("ebnf", {"ebnf": 'root ::= "(" root ")" | "x"{1,3}'}),
        ("structural_tag", {"response_format": TAG}),
    ]
    answers = await asyncio.gather(*(chat(session, **fields) for _, fields in requests))
    for (kind, _), (status, body) in zip(requests, answers, strict=True):
        assert status == 200, body
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "stop", body
        check(kind, choice["message"]["content"])


async def test_streamed_text_is_cumulative_and_valid(session: aiohttp.ClientSession) -> None:
    # Enough tokens for the white space that random weights may generate.
    sampling = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 600}
    body = {"text": "hello", "stream": True, "sampling_params": sampling}
    async with session.post("/generate", json=body) as answer:
        assert answer.status == 200
        lines = (await answer.read()).decode().split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    last = events[-1]["text"]
    assert all(last.startswith(event["text"]) for event in events)
    check("json_schema", last)


async def test_a_required_tool_call_works_with_every_model(session: aiohttp.ClientSession) -> None:
    """This model has random weights and a template without tools. A truncated answer has a partial call."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        status, body = await chat(session, **fields)
        assert status == 200, body
        (whole,) = body["choices"]
        (call,) = whole["message"]["tool_calls"]
        assert (call["function"]["name"], whole["finish_reason"]) == ("weather", "tool_calls")
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
        lengths = range(1, body["usage"]["completion_tokens"])
        for _, cut in await asyncio.gather(*(chat(session, **fields, max_tokens=each) for each in lengths)):
            (half,) = cut["choices"]
            assert half["finish_reason"] == "length" and not half["message"]["content"], cut
            for call in half["message"].get("tool_calls", ()):
                assert whole["message"]["tool_calls"][0]["function"]["arguments"].startswith(
                    call["function"]["arguments"]
                )


async def test_errors_name_field_and_keyword(session: aiohttp.ClientSession) -> None:
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    status, body = await chat(
        session, response_format={"type": "json_schema", "json_schema": {"schema": bad}}
    )
    assert (status, body["error"]["param"]) == (400, "response_format")
    assert "'not' at #/properties/a" in body["error"]["message"]
    status, body = await chat(session, regex="(")
    assert (status, body["error"]["param"]) == (400, "regex")


async def test_a_grammar_that_fails_while_decoding_ends_only_its_request(
    session: aiohttp.ClientSession,
) -> None:
    """Small enough to compile, ambiguous enough to exceed the parser's limits after a token."""
    doubling = "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(300))
    broken, fine = await asyncio.gather(
        chat(session, ebnf=f'start: r0\n{doubling}r300: "y"', ignore_eos=True), chat(session, regex=PHONE)
    )
    assert (broken[0], broken[1]["error"]["code"]) == (400, "constraint_failed")
    assert "cannot continue under its grammar" in broken[1]["error"]["message"]
    assert fine[0] == 200
    check("regex", fine[1]["choices"][0]["message"]["content"])


async def test_streams_continue_beside_a_grammar_that_does_not_compile(
    session: aiohttp.ClientSession,
) -> None:
    """Requests must be answered during the five seconds of the other one's compile timeout."""
    # Each pattern is held against every other one: minutes, on any machine.
    wide = {"type": "object", "patternProperties": {f"^p{i}$": {"type": "string"} for i in range(3_000)}}
    hostile = asyncio.ensure_future(
        chat(session, response_format={"type": "json_schema", "json_schema": {"schema": wide}})
    )
    answered = 0
    while not hostile.done():
        body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "regex": "[a-z]*"}
        async with session.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
            answered += 1
        await asyncio.wait([hostile], timeout=0.2)
    status, body = hostile.result()
    assert status == 400
    assert "5 s" in body["error"]["message"]
    assert answered > 5
