"""`/v1/score` over a fake engine and over a real one, and the routes that are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from app.api.pooling.score import WINDOW, ScoreBody, _scores, score_answer
from app.offline import LLM
from bench.chaos.tiny import dummy_model
from core.errors import RequestError
from core.request.params import MAX_LOGPROBS
from tests.rigs.engine import CONTEXT
from tests.rigs.server import Server
from tests.rigs.tokenizer import BOS, VOCAB

ASKED: dict[str, Any] = {"query": "Is it? ", "items": ["yes", "no!"], "label_token_ids": [10, 50]}
REFUSED = ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/classify", "/classify"]


def told(token: int) -> float:
    """The fake's probability of a token."""
    return math.exp(-token / 100)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_are_the_labels_probabilities(server: Server, path: str) -> None:
    body = await server.ask(path, {**ASKED, "model": "org/tiny", "unknown": 1})
    assert body["object"] == "scoring"
    assert body["model"] == "org/tiny"
    assert np.allclose(body["scores"], [[told(10), told(50)]] * 2)
    tokens = len("Is it? yes") + len("Is it? no!") + 2
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
    assert body["usage"]["completion_tokens"] == 0
    # What counts against the limits of an API key: an item's prompt once, and a token behind it.
    assert sum(len(run.prompt) for run in server.engine.runs) == tokens + len(ASKED["items"])


@pytest.mark.parametrize("field", ["rid", "request_id"])
async def test_the_clients_id_is_that_of_the_jobs(server: Server, field: str) -> None:
    """An abort by the client's id reaches the jobs."""
    await server.ask("/v1/score", {**ASKED, field: "mine"})
    assert {run.job.id.partition("-")[0] for run in server.engine.runs} == {"mine"}


async def test_softmax_shares_among_the_labels(server: Server) -> None:
    _, body = await server.post("/v1/score", {**ASKED, "apply_softmax": True})
    total = told(10) + told(50)
    assert np.allclose(body["scores"], [[told(10) / total, told(50) / total]] * 2)


@pytest.mark.parametrize(
    ("sent", "prompts"),
    [
        ({"query": "q", "items": ["a", "b"]}, [[BOS, *b"qa"], [BOS, *b"qb"]]),
        ({"query": "q", "items": "ab"}, [[BOS, *b"qab"]]),
        ({"query": "q", "items": ["a", "b"], "item_first": True}, [[BOS, *b"aq"], [BOS, *b"bq"]]),
        ({"query": [1, 2], "items": [[3], [4, 5]]}, [[1, 2, 3], [1, 2, 4, 5]]),
        ({"query": [1, 2], "items": [[3], [4, 5]], "item_first": True}, [[3, 1, 2], [4, 5, 1, 2]]),
        ({"query": [1, 2], "items": [3, 4]}, [[1, 2, 3, 4]]),
        ({"query": "", "items": ["a"]}, [[BOS, *b"a"]]),
    ],
)
async def test_prompts_are_joined(server: Server, sent: dict[str, Any], prompts: list[list[int]]) -> None:
    await server.ask("/v1/score", {**sent, "label_token_ids": [7, 9]})
    ran = [run.prompt.tolist() for run in server.engine.runs]
    assert ran == [[*prompt, 7] for prompt in prompts]
    for run in server.engine.runs:
        assert (run.params.max_tokens, run.params.prompt_logprob_ids) == (0, (7, 9))


async def test_many_are_run_a_window_at_a_time(server: Server) -> None:
    items, labels = WINDOW + 3, 2
    sent = {"query": "q", "items": [str(i) for i in range(items)], "label_token_ids": list(range(labels))}
    _, body = await server.post("/v1/score", sent)
    assert [len(row) for row in body["scores"]] == [labels] * items
    assert np.allclose(body["scores"][3], [told(label) for label in range(labels)])
    many = [i % VOCAB for i in range(2 * MAX_LOGPROBS + 3)]
    _, body = await server.post("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": many})
    assert np.allclose(body["scores"], [list(map(told, many))])
    assert not server.engine.live


async def test_salt_and_priority_reach_the_engine(server: Server) -> None:
    await server.post("/v1/score", {**ASKED, "cache_salt": "tenant", "priority": 4})
    job = server.engine.runs[0].job
    assert "tenant" in job.root.salt
    assert job.priority == 4


async def test_cached_tokens_count_once_an_item(server: Server) -> None:
    server.engine.cached = 5
    _, body = await server.post("/v1/score", ASKED)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 10


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": None}, "query"),
        ({"items": None}, "items"),
        ({"items": []}, "items"),
        ({"items": ""}, "items"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [VOCAB]}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids"),
        ({"items": ["a", 1]}, "items[1]"),
        ({"items": [[1]]}, "items[0]"),
        ({"query": [1], "items": [[2], [VOCAB]]}, "items[1]"),
        ({"query": [VOCAB], "items": [[2]]}, "query"),
        ({"query": [], "items": [[1], []]}, "items[1]"),
        ({"items": ["a", "b" * CONTEXT]}, "items[1]"),
        ({"items": ["a"] * 1025}, "items"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 300}, "cache_salt"),
        ({"apply_softmax": "yes"}, "apply_softmax"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ],
)
async def test_errors_name_the_field(server: Server, change: dict[str, Any], param: str) -> None:
    status, body = await server.post("/v1/score", {**ASKED, **change})
    assert status == 400
    assert body["error"]["param"] == param


async def test_another_model_is_not_here(server: Server) -> None:
    status, body = await server.post("/v1/score", {**ASKED, "model": "other"})
    assert status == 404
    assert body["error"]["code"] == "model_not_found"


async def test_pairs_of_texts_need_a_cross_encoder(server: Server) -> None:
    status, body = await server.post("/v1/score", {"text_1": "a", "text_2": ["b"]})
    assert status == 400
    assert body["error"]["code"] == "unsupported_model"
    assert body["error"]["param"] == "model"
    assert "cross-encoder" in body["error"]["message"]


@pytest.mark.parametrize("path", REFUSED)
async def test_routes_of_other_models_say_what_they_need(server: Server, path: str) -> None:
    status, body = await server.post(path, {"model": "org/tiny", "input": "x"})
    assert status == 400
    assert body["error"]["code"] == "unsupported_model"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("This model generates text. ")


# -- the real engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = dummy_model(tmp_path_factory.mktemp("dummy"))
    with LLM(str(model), device="cpu", load_format="dummy", kv_tokens=4096) as loaded:
        yield loaded


def score(llm: LLM, **fields: Any) -> dict[str, Any]:
    body = msgspec.convert(fields, ScoreBody)
    return llm._wait(score_answer(body, llm._live.loaded))


def likely(llm: LLM, prompt: list[int]) -> dict[int, float]:
    """The probabilities of the 20 likeliest next tokens, by the route that generates."""
    asked = {
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 20,
        "return_tokens_as_token_ids": True,
    }
    answer: Any = llm.submit("/v1/completions", msgspec.json.encode(asked)).result()
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return {int(name.removeprefix("token_id:")): math.exp(value) for name, value in top.items()}


def test_scores_are_what_generation_says(llm: LLM) -> None:
    query, items = list(range(40, 90)), [[7, 8], [100] * 17, []]
    labels = [token for item in items for token in list(likely(llm, query + item))[:3]]
    answer = score(llm, query=query, items=items, label_token_ids=labels)
    for item, row in zip(items, answer["scores"], strict=True):
        wanted = likely(llm, query + item)
        known = [(label, value) for label, value in zip(labels, row, strict=True) if label in wanted]
        assert len(known) >= 3
        assert np.allclose([value for _, value in known], [wanted[label] for label, _ in known], rtol=1e-4)


def test_all_labels_together_are_certain(llm: LLM) -> None:
    answer = score(llm, query="one ", items=["two", "three"], label_token_ids=list(range(300)))
    assert np.allclose([sum(row) for row in answer["scores"]], 1.0, atol=1e-4)


def test_a_bad_item_ends_the_others_too(llm: LLM) -> None:
    with pytest.raises(RequestError) as error:
        score(llm, query="a", items=["b", "c" * 5000], label_token_ids=[1])
    assert error.value.param == "items[1]"
    assert score(llm, query="a", items=["b"], label_token_ids=[1])["scores"][0][0] > 0


@pytest.mark.parametrize("softmax", [True, False])
def test_impossible_labels_have_no_share(softmax: bool) -> None:
    assert _scores([-math.inf, -math.inf], softmax) == [0.0, 0.0]
    assert _scores([0.0, -math.inf], softmax) == [1.0, 0.0]
