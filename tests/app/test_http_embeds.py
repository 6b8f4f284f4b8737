"""Prompts of embeddings: what reaches the engine, what is told of them, and what is refused before that."""

from __future__ import annotations

import base64
import io
import pickle
import zipfile
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from app.api.request.embeds import embedded
from app.engine.job import Job
from app.service import Loaded, NumberBudget
from app.text.tokenizer import Tokenizer
from core.types import Floats, RootKey
from tests.rigs.engine import CONTEXT, WIDTH
from tests.rigs.server import CARD, Server
from tests.rigs.step_loop import VOCAB, Bench
from tests.rigs.tensors import tensor

COMPLETIONS, GENERATE, CHAT = "/v1/completions", "/generate", "/v1/chat/completions"


def rows(n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(n, WIDTH)).astype(np.float32)


def completion(*tensors: str, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 2, "prompt_embeds": tensors[0] if len(tensors) == 1 else list(tensors), **more}


def native(value: Any, **more: Any) -> dict[str, Any]:
    return {"input_embeds": value, "sampling_params": {"max_new_tokens": 2}, **more}


def jobs(server: Server) -> list[Job]:
    return [run.job for run in server.engine.runs]


def is_of(job: Job, array: Floats) -> None:
    """The job's prompt is `array`, as placeholders under a key of its own."""
    assert job.embeds is not None and not job.embeds.flags.writeable
    np.testing.assert_array_equal(job.embeds, array)
    assert job.prompt.tolist() == [0] * len(array)  # type: ignore[union-attr]
    assert job.root.own and job.keep is None


# -- completions -----------------------------------------------------------------------------------


async def test_a_tensor_is_a_prompt(server: Server) -> None:
    answer = await server.ask(COMPLETIONS, completion(tensor(rows(5)), prompt_cache_key="k"))
    (job,) = jobs(server)
    is_of(job, rows(5))
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["choices"][0]["text"]


async def test_tensors_come_before_texts(server: Server) -> None:
    body = completion(
        tensor(rows(5)),
        tensor(rows(3, 1).astype(np.float16)),
        prompt=["a", "bc"],
        n=2,
        add_special_tokens=False,
        return_token_ids=True,
        cache_salt="s",
    )
    answer = await server.ask(COMPLETIONS, body)
    first, second, third, fourth = jobs(server)
    is_of(first, rows(5))
    is_of(second, rows(3, 1).astype(np.float16).astype(np.float32))
    assert (third.prompt, fourth.prompt) == ("a", "bc")
    assert third.embeds is None and third.root == RootKey(salt=fourth.root.salt)
    assert len({job.root.own for job in jobs(server)}) == 3
    assert len({job.id for job in jobs(server)}) == 4
    told = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert told == [None] * 4 + [[97]] * 2 + [[98, 99]] * 2
    assert answer["usage"]["prompt_tokens"] == 5 + 3 + 1 + 2


async def test_a_stream(server: Server) -> None:
    events = await server.events(COMPLETIONS, completion(tensor(rows(5)), stream=True))
    assert events[-1] == "[DONE]"
    is_of(jobs(server)[0], rows(5))


@pytest.mark.parametrize(
    ("side", "kept"), [(None, slice(2, 5)), ("left", slice(2, 5)), ("right", slice(0, 3))]
)
async def test_a_prompt_is_cut_at_either_end(server: Server, side: str | None, kept: slice) -> None:
    body = completion(tensor(rows(5)), truncate_prompt_tokens=3, truncation_side=side)
    await server.ask(COMPLETIONS, body)
    is_of(jobs(server)[0], rows(5)[kept])


async def test_what_is_too_long_may_be_cut_to_fit(server: Server) -> None:
    long = tensor(rows(CONTEXT + 9))
    await server.ask(COMPLETIONS, completion(long, truncate_prompt_tokens=CONTEXT - 2))
    error = await server.refused(COMPLETIONS, completion(long))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt_embeds"
    assert len(jobs(server)) == 1


async def test_long_prompts_are_read_in_pieces(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.api.request.embeds.PIECE", 64)
    await server.ask(COMPLETIONS, completion(tensor(rows(400))))
    await server.ask(GENERATE, native(rows(400).tolist()))
    for job in jobs(server):
        is_of(job, rows(400))


def bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", bytes(2**22))
    return out.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (completion("%%%"), "prompt_embeds"),
        (completion("AAA"), "prompt_embeds"),
        (completion("AA==AAAA"), "prompt_embeds"),
        (completion("ÄÄÄÄ"), "prompt_embeds"),
        (completion(tensor(rows(2)), "AAAA"), "prompt_embeds[1]"),
        (completion(encoded(bomb())), "prompt_embeds"),
        (completion(encoded(pickle.dumps([1]))), "prompt_embeds"),
        (completion(tensor(np.ones((2, WIDTH + 1), np.float32))), "prompt_embeds"),
        (completion(tensor(np.full((2, WIDTH), np.nan, np.float32))), "prompt_embeds"),
        (completion(tensor(np.full((2, WIDTH), np.inf, np.float16))), "prompt_embeds"),
        (completion(tensor(rows(CONTEXT + 1))), "prompt_embeds"),
        (completion(tensor(rows(CONTEXT - 1))), "prompt_embeds"),  # no room for two tokens
        (completion(tensor(rows(2)), tensor(rows(CONTEXT - 1))), "prompt_embeds[1]"),
        (completion(*["AAAA"] * 3000), "prompt_embeds"),
        (completion(tensor(rows(2)), echo=True), "echo"),
        (completion(tensor(rows(2)), prompt_logprobs=0), "prompt_logprobs"),
        (completion(tensor(rows(2)), return_prompt_text=True), "return_prompt_text"),
        (completion(tensor(rows(2)), suffix="x"), "suffix"),
        (completion(tensor(rows(2)), use_beam_search=True), "prompt_embeds"),
        (completion(tensor(rows(2)), input_embeds=[[1.0]]), "input_embeds"),
        (completion(""), "prompt"),
    ],
)
async def test_completions_refuse(server: Server, body: dict[str, Any], param: str) -> None:
    status, answer = await server.post(COMPLETIONS, body)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert not server.engine.live


# -- native ----------------------------------------------------------------------------------------


async def test_rows_are_a_prompt(server: Server) -> None:
    answer = await server.ask(GENERATE, native(rows(5).tolist()))
    is_of(jobs(server)[0], rows(5))
    assert answer["meta_info"]["prompt_tokens"] == 5


async def test_lists_of_rows_are_prompts(server: Server) -> None:
    answers = await server.ask(GENERATE, native([rows(5).tolist(), rows(3, 1).tolist()], rid=["a", "b"]))
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [5, 3]
    for job, array, id in zip(jobs(server), (rows(5), rows(3, 1)), "ab", strict=True):
        is_of(job, array)
        assert job.id == id


@pytest.mark.parametrize(("value", "listed"), [([[1, 2, 3, 4.5]], False), ([[[1, 2, 3, 4.5]]], True)])
async def test_one_prompt_or_a_list_of_one(server: Server, value: Any, listed: bool) -> None:
    assert isinstance(await server.ask(GENERATE, native(value)), list) is listed
    is_of(jobs(server)[0], np.array([[1, 2, 3, 4.5]], np.float32))


async def test_white_space_and_logprobs_of_the_output(server: Server) -> None:
    text = b'{"input_embeds": \n [ \n [1 , 2,\n 3, 4 ] ,\t[5,6,7,8e0]\n] , "return_logprob": true}'
    status, answer = await server.post(GENERATE, data=text)
    assert status == 200
    assert answer["meta_info"]["output_token_logprobs"]
    is_of(jobs(server)[0], np.arange(1, 9, dtype=np.float32).reshape(2, 4))


ROW = [0.5] * WIDTH


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("x", "input_embeds"),
        (5, "input_embeds"),
        ({}, "input_embeds"),
        ([], "input_embeds"),
        ([5], "input_embeds[0]"),
        ([[]], "input_embeds[0]"),
        ([[[]]], "input_embeds[0][0]"),
        ([[ROW, 5]], "input_embeds[0][1]"),
        ([ROW, ROW[1:]], "input_embeds[1]"),
        ([ROW, [*ROW, 1]], "input_embeds[1]"),
        ([[True] * WIDTH], "input_embeds[0]"),
        ([["1"] * WIDTH], "input_embeds[0]"),
        ([[None] * WIDTH], "input_embeds[0]"),
        ([ROW, [ROW]], "input_embeds[1]"),
        ([[1e39] * WIDTH], "input_embeds[0]"),
        ([ROW] * (CONTEXT + 1), "input_embeds"),
        ([[ROW]] * 2500, "input_embeds"),
        ([[[[0.5] * WIDTH]]], "input_embeds[0][0]"),
    ],
)
async def test_rows_that_are_none(server: Server, value: Any, param: str) -> None:
    status, answer = await server.post(GENERATE, native(value))
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert not server.engine.runs


@pytest.mark.parametrize(
    "item", [b"[]", b"0", b"[0]", b"[[]]", b"[[0,0,0,0]]", b"[0,0,0,0,0]", b"[0,0],[0,0]"]
)
async def test_long_bodies_of_anything_else_cost_little(server: Server, item: bytes) -> None:
    """They are refused as they came: an error of one of their rows would have read the others."""
    for first in (b"", b"[0,0,0,0],", b"[[0,0,0,0]],"):
        text = b'{"input_embeds": [' + first + b",".join([item] * 50_000) + b"]}"
        status, answer = await server.post(GENERATE, data=text)
        assert status == 400 and answer["error"]["param"] == "input_embeds", answer


async def test_no_room_for_an_answer(server: Server) -> None:
    error = await server.refused(GENERATE, native([ROW] * (CONTEXT - 1)))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "input_embeds"


async def test_numbers_no_float_holds(server: Server) -> None:
    for number in (b"1e999", b"-1e400", b"9" * 500):
        text = b'{"input_embeds": [[' + b",".join([number] * WIDTH) + b"]]}"
        status, answer = await server.post(GENERATE, data=text)
        assert status == 400 and answer["error"]["param"] == "input_embeds[0]", answer
    status, answer = await server.post(GENERATE, data=b'{"input_embeds": [[NaN, 1, 2, 3]]}')
    assert status == 400


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"text": "a"}, "text"),
        ({"input_ids": [5]}, "text"),
        ({"session_params": {"id": "a"}}, "session_params"),
        ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
async def test_what_needs_tokens_is_refused(server: Server, more: dict[str, Any], param: str) -> None:
    assert (await server.refused(GENERATE, native([ROW], **more)))["param"] == param
    assert not server.engine.runs


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "prompt_embeds": "AAAA"}, "prompt_embeds"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "input_embeds": [ROW]}, "input_embeds"),
        (GENERATE, {"text": "a", "sampling_params": {"input_embeds": [ROW]}}, "sampling_params.input_embeds"),
        ("/v1/completions/render", completion(tensor(rows(2)), prompt="a"), "prompt_embeds"),
    ],
)
async def test_elsewhere_they_are_refused_by_name(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    error = await server.refused(path, body)
    assert error["param"] == param
    assert "not supported" in error["message"]


async def test_the_memory_they_take_is_counted(server: Server) -> None:
    server.service.ready(_with(server, NumberBudget(WIDTH * 8)))
    server.engine.manual = True
    async with server.http.post(GENERATE, json=native([ROW] * 8, stream=True, rid="a")) as first:
        await server.engine.started.wait()
        for path, body in ((GENERATE, native([ROW])), (COMPLETIONS, completion(tensor(rows(1))))):
            status, answer = await server.post(path, body)
            assert status == 429, answer
        server.engine.abort(["a"])
        await first.read()
    server.engine.manual = False
    await server.ask(GENERATE, native([ROW]))


async def test_an_encoder_takes_none(server: Server) -> None:
    loaded = server.service.loaded
    card = msgspec.structs.replace(CARD, task="embed")
    server.service.ready(msgspec.structs.replace(loaded, card=card))
    assert (await server.refused(GENERATE, native([ROW])))["code"] == "unsupported_model"


def _with(server: Server, numbers: NumberBudget) -> Loaded:
    return msgspec.structs.replace(server.service.loaded, numbers=numbers)


# -- further down ----------------------------------------------------------------------------------


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    tokenizer = Tokenizer.load(None, VOCAB, [2])
    made = Bench(tokenizer)
    yield made
    made.engine.close()
    tokenizer.close()


async def test_every_choice_has_the_rows_and_plans_carry_them(bench: Bench) -> None:
    made = embedded(Job(id="x", prompt=""), rows(70), "prompt_embeds")
    run = await bench.start("x", 3, n=2, prompt=made.prompt, embeds=made.embeds, root=made.root)
    await run.wait()
    assert all(request.embeds is made.embeds for request in run.requests)
    chunks = [chunk for plan in bench.executor.plans for chunk in plan.chunks]
    sent = {(c.start, len(c.tokens)): c.embeds for c in chunks}
    for (start, n), part in sent.items():
        np.testing.assert_array_equal(part, rows(70)[start : start + n])
    assert min(start for start, _ in sent) == 0
    assert run.requests[1].cached > 0  # the job's own key: its choices share


def test_a_root_no_client_can_spell() -> None:
    """Another job cannot have the key either: it is drawn."""
    keys = {embedded(Job(id="x", prompt=""), rows(1), "p").root for _ in range(3)}
    assert len(keys) == 3
    assert all(key.own and key != RootKey(salt=key.own) for key in keys)
