"""`/rerank`, pairs of texts in `/score`, and `/v1/classify`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from core.models import PoolingSpec
from core.types import Ints
from tests.rigs.embeddings import ids, last
from tests.rigs.server import Server, serves
from tests.rigs.tokenizer import BOS, EOS

RERANK = "/v1/rerank"
ASKED: dict[str, Any] = {"query": "what?", "documents": ["bb", {"text": "dddd"}, "ccc"]}
RANKS = PoolingSpec(kind="first", labels=("r",), activation="sigmoid", normalize=False)


def length(prompt: Ints, pair: int) -> list[float]:
    """A head that likes long documents."""
    return [float(len(prompt) - pair)]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.fixture
def ranker(server: Server) -> Server:
    serves(server, task="classify", pooling=RANKS)
    server.engine.head = length
    return server


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_best_first(ranker: Server, path: str) -> None:
    answer = await ranker.ask(path, ASKED)
    assert [each["index"] for each in answer["results"]] == [1, 2, 0]
    assert [each["document"] for each in answer["results"]] == [{"text": t} for t in ("dddd", "ccc", "bb")]
    scores = [each["relevance_score"] for each in answer["results"]]
    np.testing.assert_allclose(scores, [sigmoid(5), sigmoid(4), sigmoid(3)], rtol=1e-6)
    pair = [BOS, *b"what?", EOS, *b"bb", EOS]
    assert ranker.engine.runs[0].prompt.tolist() == pair
    assert ranker.engine.runs[0].params.pair == 7
    assert answer["usage"]["total_tokens"] == 3 * 8 + 9


async def test_how_many_and_without_their_texts(ranker: Server) -> None:
    _, answer = await ranker.post(RERANK, {**ASKED, "top_n": 1, "return_documents": False})
    assert [sorted(each) for each in answer["results"]] == [["index", "relevance_score"]]
    _, answer = await ranker.post(RERANK, {**ASKED, "use_activation": False, "top_n": 9})
    assert [each["relevance_score"] for each in answer["results"]] == [5.0, 4.0, 3.0]


async def test_an_instruction_stands_before_the_query(ranker: Server) -> None:
    await ranker.post(RERANK, {**ASKED, "instruction": "Find it."})
    assert ranker.engine.runs[0].prompt.tolist()[1:15] == list(b"Find it.\nwhat?")


async def test_long_documents_are_cut_where_asked(ranker: Server) -> None:
    asked = {"query": "q", "documents": ["d" * 600]}
    assert (await ranker.refused(RERANK, asked))["param"] == "documents[0]"
    await ranker.post(RERANK, {**asked, "max_tokens_per_doc": 5})
    assert ranker.engine.runs[-1].prompt.tolist() == [BOS, 113, EOS, *b"ddddd", EOS]
    await ranker.post(RERANK, {**asked, "truncate_prompt_tokens": 20})
    assert len(ranker.engine.runs[-1].prompt) == 20


async def test_a_pair_that_is_cut_from_the_left_is_told_apart_where_it_was(ranker: Server) -> None:
    asked = {"query": "query", "documents": ["dd"], "truncation_side": "left"}
    for most, prompt, second in ((7, [BOS, *b"ry", EOS, *b"dd", EOS], 4), (4, [BOS, *b"dd", EOS], 1)):
        await ranker.post(RERANK, {**asked, "truncate_prompt_tokens": most})
        run = ranker.engine.runs[-1]
        assert (run.prompt.tolist(), run.params.pair) == (prompt, second)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": [{"title": "a"}]}, "documents"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ],
)
async def test_errors_name_the_field(ranker: Server, change: dict[str, Any], param: str) -> None:
    error = await ranker.refused(RERANK, {**ASKED, **change})
    assert error["param"].startswith(param)
    assert not ranker.engine.runs


async def test_models_for_embeddings_compare_vectors(server: Server) -> None:
    serves(server, task="embed", pooling=PoolingSpec(kind="last", normalize=False))
    _, answer = await server.post(RERANK, ASKED)
    want = {i: float(last(ids("what?")) @ last(ids(text))) for i, text in enumerate(("bb", "dddd", "ccc"))}
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(want[each["index"]], rel=1e-5)
    assert len(server.engine.runs) == 4  # the query once


async def test_models_for_embeddings_cut_documents_too(server: Server) -> None:
    serves(server, task="embed", pooling=PoolingSpec(kind="last"))
    asked = {"query": "what?", "documents": ["d" * 600, "what?"], "max_tokens_per_doc": 3}
    answer = await server.ask(RERANK, asked)
    made = [run.prompt.tolist() for run in server.engine.runs]
    assert made == [ids("what?"), ids("dd"), ids("wh")]  # also the document that is the query
    assert {each["index"] for each in answer["results"]} == {0, 1}


async def test_several_classes_are_no_rank(server: Server) -> None:
    serves(server, task="classify", pooling=PoolingSpec(labels=("a", "b"), activation="softmax"))
    status, answer = await server.post(RERANK, ASKED)
    assert (status, answer["error"]["code"]) == (400, "unsupported_model")
    assert "/v1/classify" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("sides", "scores"),
    [
        ({"text_1": "q", "text_2": ["a", "bb"]}, [2, 3]),
        ({"queries": ["q", "qq"], "documents": ["a", "bb"]}, [2, 3]),
        ({"data_1": "q", "data_2": "abc"}, [4]),
    ],
)
async def test_pairs(ranker: Server, sides: dict[str, Any], scores: list[int]) -> None:
    for path in ("/v1/score", "/score"):
        _, answer = await ranker.post(path, sides)
        assert answer["object"] == "list"
        got = [(each["object"], each["index"], each["score"]) for each in answer["data"]]
        assert got == [("score", i, pytest.approx(sigmoid(value))) for i, value in enumerate(scores)]


@pytest.mark.parametrize(
    ("sides", "param"),
    [
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ({"text_1": "a", "text_2": [""]}, "text_2"),
        ({"data_1": {"a": 1}, "data_2": "b"}, "data_1"),
    ],
)
async def test_pairs_that_are_none(ranker: Server, sides: dict[str, Any], param: str) -> None:
    assert (await ranker.refused("/v1/score", sides))["param"] == param


# -- classify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_classes(server: Server, path: str) -> None:
    serves(server, task="classify", pooling=PoolingSpec(labels=("bad", "good", "odd"), activation="softmax"))
    server.engine.head = lambda prompt, pair: [1.0, float(len(prompt)), 0.0]
    _, answer = await server.post(path, {"model": "org/tiny", "input": ["ab", "abcd"]})
    assert answer["object"] == "list" and answer["usage"]["prompt_tokens"] == 8
    for i, (each, n) in enumerate(zip(answer["data"], (3, 5), strict=True)):
        weights = np.exp([1.0, n, 0.0])
        assert (each["index"], each["label"], each["num_classes"]) == (i, "good", 3)
        np.testing.assert_allclose(each["probs"], weights / weights.sum(), rtol=1e-5)


async def test_one_class_and_raw_values(ranker: Server) -> None:
    _, answer = await ranker.post("/v1/classify", {"input": [1, 2, 3]})
    assert answer["data"][0] == {
        "index": 0,
        "label": "r",
        "probs": [pytest.approx(sigmoid(3))],
        "num_classes": 1,
    }
    _, answer = await ranker.post("/v1/classify", {"input": [1, 2, 3], "activation": False})
    assert answer["data"][0]["probs"] == [3.0]


async def test_large_logits_are_still_probabilities(ranker: Server) -> None:
    for value, want in ((1e4, 1.0), (-1e4, 0.0)):
        ranker.engine.head = lambda prompt, pair, value=value: [value]
        _, answer = await ranker.post("/v1/classify", {"input": "a"})
        assert answer["data"][0]["probs"] == [want]


async def test_classify_needs_input(ranker: Server) -> None:
    assert (await ranker.refused("/v1/classify", {"text": "a"}))["param"] == "input"
