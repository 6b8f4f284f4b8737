"""`/v1/embeddings`, `/pooling` and `/encode`: which states become which numbers, in which spelling."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from app.api.answers import ANSWERS
from app.api.pooling.common import SLICE, cut, unit
from app.engine.job import Piece
from app.http.reply import PIECE, pieces
from core.models import PoolingSpec
from core.types import Finish, FinishReason
from tests.rigs.embeddings import ids, last
from tests.rigs.engine import WIDTH, state
from tests.rigs.server import CARD, Server, serves
from tests.rigs.tokenizer import BOS
from tests.rigs.wait import until

EMBEDDINGS = "/v1/embeddings"


def mean(tokens: list[int]) -> np.ndarray:
    return np.mean([state(token, at) for at, token in enumerate(tokens)], axis=0)


def numbers(answer: dict[str, Any]) -> list[np.ndarray]:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [np.array(each["embedding"]) for each in answer["data"]]


@pytest.mark.parametrize(
    ("sent", "prompts"),
    [
        ("abc", [ids("abc")]),
        (["abc", "z"], [ids("abc"), ids("z")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[4, 5], [6]], [[4, 5], [6]]),
    ],
)
async def test_every_spelling_of_input(server: Server, sent: Any, prompts: list[list[int]]) -> None:
    answer = await server.ask(EMBEDDINGS, {"model": "org/tiny", "input": sent, "user": "u"})
    assert (answer["object"], answer["model"]) == ("list", "org/tiny")
    for got, prompt in zip(numbers(answer), prompts, strict=True):
        np.testing.assert_allclose(got, last(prompt), rtol=1e-6)
    total = sum(map(len, prompts))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == total
    assert all(run.params.hidden == "last" and run.params.max_tokens == 0 for run in server.engine.runs)


async def test_messages_are_rendered(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    _, answer = await server.post(EMBEDDINGS, asked)
    text = b"user: hi\n"
    np.testing.assert_allclose(numbers(answer)[0], last(list(text)), rtol=1e-6)


async def test_a_long_list_keeps_its_order(server: Server) -> None:
    texts = [f"text {i}" for i in range(256)]
    _, answer = await server.post(EMBEDDINGS, {"input": texts})
    for got, text in zip(numbers(answer), texts, strict=True):
        np.testing.assert_allclose(got, last(ids(text)), rtol=1e-6)


async def test_means(server: Server) -> None:
    serves(server, task="embed", pooling=PoolingSpec(kind="mean", normalize=False))
    _, answer = await server.post(EMBEDDINGS, {"input": "abcd"})
    np.testing.assert_allclose(numbers(answer)[0], mean(ids("abcd")), rtol=1e-6)


async def test_first_tokens(server: Server) -> None:
    serves(server, task="embed", pooling=PoolingSpec(kind="first", normalize=False))
    _, answer = await server.post(EMBEDDINGS, {"input": "abcd"})
    np.testing.assert_allclose(numbers(answer)[0], state(BOS, 0), rtol=1e-6)


async def test_dimensions_cut_and_scale(server: Server) -> None:
    _, answer = await server.post(EMBEDDINGS, {"input": "abc", "dimensions": 2})
    np.testing.assert_allclose(numbers(answer)[0], last(ids("abc"), 2), rtol=1e-6)


async def test_base64_is_float32(server: Server) -> None:
    _, answer = await server.post(EMBEDDINGS, {"input": ["abc", "d"], "encoding_format": "base64"})
    for each, text in zip(answer["data"], ("abc", "d"), strict=True):
        got = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
        np.testing.assert_allclose(got, last(ids(text)), rtol=1e-6)


async def test_the_official_client(client: openai.AsyncOpenAI) -> None:
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = await client.embeddings.create(model="org/tiny", input=["abc", "z"], **more)
        got = answer.data[1].embedding
        if isinstance(got, str):
            got = np.frombuffer(base64.b64decode(got), "<f4")
        np.testing.assert_allclose(got, last(ids("z")), rtol=1e-6)
        assert answer.usage.prompt_tokens == 6
    cut = await client.embeddings.create(model="org/tiny", input="abc", dimensions=3)
    assert len(cut.data[0].embedding) == 3


async def test_truncation(server: Server) -> None:
    long = "x" * 600
    for more, want in (
        ({"truncate_prompt_tokens": 3}, [BOS, 97, 98]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [BOS, 99, 100]),
    ):
        await server.post(EMBEDDINGS, {"input": "abcd", **more})
        assert server.engine.runs[-1].prompt.tolist() == want
    await server.ask(EMBEDDINGS, {"input": long, "truncate_prompt_tokens": -1})
    assert len(server.engine.runs[-1].prompt) == CARD.context_length


async def test_texts_are_in_lower_case_where_the_model_reads_them_so(server: Server) -> None:
    serves(server, task="embed", pooling=PoolingSpec(lowercase=True))
    await server.post(EMBEDDINGS, {"input": ["Ab", "CD"]})
    assert [run.prompt.tolist() for run in server.engine.runs] == [ids("ab"), ids("cd")]


def test_special_tokens_survive_a_cut() -> None:
    """A vector is read at one of them."""
    special = frozenset({1, 2})
    tokens = np.array([1, 10, 11, 12, 13, 2], np.int32)
    assert cut(tokens, 4, special).tolist() == [1, 10, 11, 2]
    assert cut(tokens, 4, special, "left").tolist() == [1, 12, 13, 2]
    assert cut(tokens, 6, special) is tokens
    assert cut(tokens, 1, special).tolist() == [1]
    assert cut(tokens[1:5], 2, special).tolist() == [10, 11]
    assert cut(tokens[1:5], 2, special, "left").tolist() == [12, 13]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", 3]}, "input[1]"),
        ({"input": [[1], [9999]]}, "input[1]"),
        ({"input": ["a", "x" * 600]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "top"}, "truncation_side"),
        ({"input": "a", "priority": 2**40}, "priority"),
        ({"input": "a", "lora_path": "x"}, "lora_path"),
    ],
)
async def test_errors_name_the_field(server: Server, body: dict[str, Any], param: str) -> None:
    error = await server.refused(EMBEDDINGS, body)
    assert error["param"] == param


async def test_values_that_are_not_finite_are_no_vector(server: Server) -> None:
    serves(server, task="embed", pooling=PoolingSpec(kind="last"))
    server.engine.head = lambda prompt, pair: [float("nan")]
    status, answer = await server.post(EMBEDDINGS, {"input": "a"})
    assert status == 500
    assert "not finite" in answer["error"]["message"]


async def test_a_failing_input_ends_the_others(server: Server) -> None:
    server.engine.manual = True
    running = asyncio.ensure_future(server.post(EMBEDDINGS, {"input": ["a", "b"], "request_id": "q"}))
    await until(lambda: len(server.engine.runs) == 2)
    server.engine.runs[1].push(0, Piece("", [], None, server.engine.failure))
    status, _ = await running
    assert status == 500
    assert server.engine.runs[0].aborted
    assert [run.job.id for run in server.engine.runs] == ["q-0", "q-1"]


# -- aliases ---------------------------------------------------------------------------------------


async def test_pooling_tells_a_vector_or_all_of_them(server: Server) -> None:
    _, answer = await server.post("/pooling", {"input": ["abc", "d"]})
    assert [each["object"] for each in answer["data"]] == ["pooling"] * 2
    np.testing.assert_allclose(answer["data"][1]["data"], last(ids("d")), rtol=1e-6)
    _, answer = await server.post("/pooling", {"input": "abc", "task": "token_embed"})
    rows = np.array(answer["data"][0]["data"])
    assert rows.shape == (4, WIDTH)
    np.testing.assert_allclose(rows[-1], last(ids("abc")), rtol=1e-6)


async def test_pooling_scores_of_a_head(server: Server) -> None:
    serves(server, task="classify", pooling=PoolingSpec(labels=("a", "b"), activation="softmax"))
    server.engine.head = lambda prompt, pair: [0.0, float(len(prompt))]
    _, answer = await server.post("/pooling", {"input": "abc", "use_activation": False})
    assert answer["data"][0]["data"] == [0.0, 4.0]
    _, answer = await server.post("/pooling", {"input": "abc"})
    np.testing.assert_allclose(answer["data"][0]["data"], [1 / (1 + np.e**4), 1 / (1 + np.e**-4)], rtol=1e-5)
    status, answer = await server.post("/pooling", {"input": "abc", "task": "embed"})
    assert (status, answer["error"]["code"]) == (400, "unsupported_model")


async def test_states_of_all_tokens_are_bounded(server: Server) -> None:
    serves(server, hidden_size=2**21)
    error = await server.refused("/pooling", {"input": "abc", "task": "token_embed"})
    assert "at most 4194304" in error["message"]
    assert not server.engine.runs


async def test_encode_after_sglang(server: Server) -> None:
    _, one = await server.post("/encode", {"text": "abc", "rid": "r"})
    np.testing.assert_allclose(one["embedding"], last(ids("abc")), rtol=1e-6)
    assert one["meta_info"] == {
        "id": "r",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": 4,
    }
    _, two = await server.post("/encode", {"input_ids": [[1, 2], [3]]})
    np.testing.assert_allclose(two[1]["embedding"], last([3]), rtol=1e-6)
    serves(server, task="classify", pooling=PoolingSpec(labels=("r",), activation="sigmoid", normalize=False))
    server.engine.head = lambda prompt, pair: [-7.5]
    _, reward = await server.post("/encode", {"text": "abc"})
    assert reward["embedding"] == [-7.5]  # a reward is told as it is


async def test_a_batch_line_makes_embeddings(server: Server) -> None:
    answer: Any = await ANSWERS["/v1/embeddings"](b'{"input": "abc"}', server.service.loaded)
    whole = msgspec.json.decode(msgspec.json.encode(answer))
    np.testing.assert_allclose(whole["data"][0]["embedding"], last(ids("abc")), rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {"input": ["a", "b"]}),
        ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [1, 2]}),
    ],
)
async def test_half_an_answer_is_none(server: Server, path: str, body: dict[str, Any]) -> None:
    server.engine.manual = True
    asked = asyncio.create_task(server.post(path, body))
    await until(lambda: len(server.engine.runs) == 2)
    server.engine.runs[1].abort()
    server.engine.runs[0].push(0, Piece("", [], None, Finish(FinishReason.LENGTH)))
    status, answer = await asked
    assert (status, answer["error"]["code"]) == (400, "request_aborted")


async def test_an_answer_that_has_begun_is_made_to_its_end(server: Server) -> None:
    await server.post(EMBEDDINGS, {"input": ["a", "b", "c"]})
    await server.post("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [1, 2]})
    begun = [run.job.continues for run in server.engine.runs]  # taken while draining too
    assert begun == [False, True, True, False, True]


def test_long_answers_are_made_in_pieces() -> None:
    vectors = [np.arange(5000, dtype=np.float32), np.ones((300, 3000), np.float32)]
    answer = {"a": [], "data": [{"e": vector, "i": 1} for vector in vectors], "none": None, "[]": [{}]}
    made = list(pieces(answer))
    plain = {**answer, "data": [{"e": vector.tolist(), "i": 1} for vector in vectors]}
    assert b"".join(made) == msgspec.json.encode(plain)
    row = len(msgspec.json.encode(vectors[0].tolist()))
    assert max(map(len, made)) < PIECE + row
    assert b"".join(pieces([])) == b"[]"


async def test_an_answer_of_many_pieces_arrives_whole(server: Server) -> None:
    status, answer = await server.post(EMBEDDINGS, {"input": [[i % 200 + 3] for i in range(2048)]})
    assert (status, len(answer["data"])) == (200, 2048)
    np.testing.assert_allclose(numbers(answer)[-1], last([2047 % 200 + 3]), rtol=1e-6)


async def test_every_row_of_a_long_matrix_has_length_one() -> None:
    rows = np.arange(1, 3 * SLICE + 1, dtype=np.float32).reshape(-1, 64)
    (scaled,) = await unit([rows], PoolingSpec())
    np.testing.assert_allclose(scaled, rows / np.linalg.norm(rows, axis=1, keepdims=True), rtol=1e-6)


# -- the other way round ---------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["embed", "classify"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"text": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}),
    ],
)
async def test_these_models_generate_nothing(server: Server, task: str, path: str, body: Any) -> None:
    serves(server, task=task)
    error = await server.refused(path, body)
    assert error["code"] == "unsupported_model"
    assert "generates text" in error["message"]
    assert not server.engine.runs


async def test_their_health_is_found_out_without_a_token(server: Server) -> None:
    serves(server, task="embed")
    async with server.http.get("/health_generate") as answer:
        assert answer.status == 200
    assert server.engine.runs[0].params.max_tokens == 0
    assert (await server.get("/model_info"))["is_generation"] is False


async def test_heads_make_no_embeddings(server: Server) -> None:
    serves(server, task="classify")
    assert (await server.refused(EMBEDDINGS, {"input": "a"}))["code"] == "unsupported_model"
