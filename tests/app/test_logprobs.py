"""Log-probabilities through all layers, from HTTP to the model and back, against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
import torch
from aiohttp.test_utils import TestClient, TestServer

from app.api.routes import make_app
from app.compose import load
from app.service import Service
from app.text.tokenizer import Tokenizer
from core.config import CacheConfig, Config, ModelConfig, ScheduleConfig, ServeConfig
from tests.rigs import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEP = 600
"""Tokens of a step: a chunk is scored in three pieces, and the longest prompts take many chunks."""
LENGTHS = [1, 255, 256, 257, 1500, 5000]
NEAR = 2e-3
"""Tolerance of log-probabilities in float32, from sums in another order."""


class Scores(NamedTuple):
    """Log-probabilities of a prompt by transformers, [n, vocab]; row p is the distribution of token p + 1."""

    prompt: list[int]
    raw: np.ndarray

    def check(self, position: int, value: float) -> None:
        """`value` is the log-probability of the prompt's token at `position`."""
        assert value == pytest.approx(self.raw[position - 1, self.prompt[position]], abs=NEAR), position

    def check_rank(self, position: int, token: int, rank: int) -> None:
        """`rank` is `token`'s at `position`, but for those so near that rounding decides."""
        row = self.raw[position - 1]
        better = int((row > row[token] + NEAR).sum())
        near = int((np.abs(row - row[token]) <= NEAR).sum())
        assert better + 1 <= rank <= better + near, position


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tiny_model.Tiny:
    sizes = {"max_position_embeddings": 6000, "num_hidden_layers": 1, "hidden_size": 32}
    made = tiny_model.build("llama", tmp_path_factory.mktemp("long"), **sizes)
    Tokenizer.load(None, tiny_model.VOCAB, ())._core.save(str(made.path / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def scores(tiny: tiny_model.Tiny) -> dict[int, Scores]:
    """Scores of a prompt of each length, no two of which begin alike."""
    found = {}
    for length in LENGTHS:
        seeded = torch.Generator().manual_seed(length)
        ids = torch.randint(3, tiny_model.VOCAB, (length,), generator=seeded).tolist()
        found[length] = Scores(ids, tiny_model.logits(tiny.reference, ids).log_softmax(-1).numpy())
    return found


@pytest.fixture(scope="module")
def settings(tiny: tiny_model.Tiny, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config(
        model=ModelConfig(model=str(tiny.path), device="cpu", served_model_name=("first", "second")),
        cache=CacheConfig(kv_tokens=16384),
        schedule=ScheduleConfig(step_tokens=STEP),
        serve=ServeConfig(
            data_dir=str(tmp_path_factory.mktemp("data")),
            return_tokens_as_token_ids=True,
            force_include_usage=True,
        ),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(settings: Config) -> AsyncIterator[TestClient[Any, Any]]:
    torch.set_num_threads(1)
    live = load(settings, lambda stage, share: None)
    service = Service({})
    live.replicas.start(asyncio.get_running_loop())
    service.ready(live.loaded)
    async with TestClient(TestServer(make_app(service, settings.serve))) as client:
        yield client
    live.close()


Client = TestClient[Any, Any]


async def post(client: Client, path: str, body: dict[str, object]) -> dict[str, Any]:
    async with client.post(path, json={"temperature": 0, **body}) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def echoed(client: Client, scores: Scores) -> None:
    """`echo` with `logprobs`: the prompt's, then those of what was generated."""
    body = {"prompt": scores.prompt, "max_tokens": 1, "echo": True, "logprobs": 2}
    (choice,) = (await post(client, "/v1/completions", body))["choices"]
    told = choice["logprobs"]
    assert [len(values) for values in told.values()] == [len(scores.prompt) + 1] * 4
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    for at, value in enumerate(told["token_logprobs"][1:-1], 1):
        scores.check(at, value)
    best = scores.raw.max(axis=1)
    assert [max(top.values()) for top in told["top_logprobs"][1:]] == pytest.approx(best.tolist(), abs=NEAR)


async def listed(client: Client, scores: Scores) -> None:
    """vLLM's `prompt_logprobs`: each position's token has a rank, among the best or not."""
    body = {"prompt": scores.prompt, "max_tokens": 1, "prompt_logprobs": 1}
    (choice,) = (await post(client, "/v1/completions", body))["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(scores.prompt) - 1
    for at, ranked in enumerate(others, 1):
        scores.check(at, ranked[str(scores.prompt[at])]["logprob"])
        for token, entry in ranked.items():
            scores.check_rank(at, int(token), entry["rank"])


async def native(client: Client, scores: Scores, start: int = 0) -> int:
    """SGLang's, from `logprob_start_len` on; how much of the prompt was cached."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    body = {"input_ids": scores.prompt, "return_logprob": True, "logprob_start_len": start}
    meta = (await post(client, "/generate", {**body, "sampling_params": sampling}))["meta_info"]
    told = meta["input_token_logprobs"]
    assert [token for _, token, _ in told] == scores.prompt[start:]
    for at, (value, _, _) in enumerate(told, start):
        if at:
            scores.check(at, value)
        else:
            assert value is None
    return meta["cached_tokens"]


@pytest.mark.parametrize("length", LENGTHS)
async def test_every_position_is_told(client: Client, scores: dict[int, Scores], length: int) -> None:
    await echoed(client, scores[length])
    await listed(client, scores[length])
    await native(client, scores[length])


async def test_behind_a_cached_prefix(client: Client, scores: dict[int, Scores]) -> None:
    """Only what is before the first position asked for may come out of the cache."""
    for length in (257, 1500, 5000):
        prompt = scores[length].prompt
        await post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        for start in (1, length // 2, length - 1):
            cached = await native(client, scores[length], start)
            assert start - 16 <= cached + 1 <= start, (length, start)


async def test_side_by_side(client: Client, scores: dict[int, Scores]) -> None:
    """Chunks of several prompts share a step."""
    await asyncio.gather(*(ask(client, each) for each in scores.values() for ask in (echoed, listed, native)))


async def test_a_grammar_is_seen_by_default_in_generate_alone(
    client: Client, scores: dict[int, Scores]
) -> None:
    prompt, raw = scores[255].prompt, scores[255].raw[-1]
    digits = [ord(c) for c in "0123456789"]
    among = raw[digits] - np.logaddexp.reduce(raw[digits])

    async def told(path: str, body: dict[str, object]) -> dict[int, float]:
        answer = await post(client, path, body)
        if path == "/generate":
            (top,) = answer["meta_info"]["output_top_logprobs"]
            return {token: value for value, token, _ in top}
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        return {int(name.removeprefix("token_id:")): value for name, value in top.items()}

    def close(found: dict[int, float], want: np.ndarray, ids: list[int]) -> None:
        assert {token: found[token] for token in ids} == pytest.approx(
            dict(zip(ids, want.tolist(), strict=True)), abs=NEAR
        )

    sampling = {"max_new_tokens": 1, "temperature": 0, "regex": "[0-9]"}
    native = {
        "input_ids": prompt,
        "return_logprob": True,
        "top_logprobs_num": 10,
        "sampling_params": sampling,
    }
    openai = {
        "prompt": prompt,
        "max_tokens": 1,
        "logprobs": 10,
        "structured_outputs": {"regex": "[0-9]"},
    }
    best = np.argsort(-raw, kind="stable")[:10].tolist()
    close(await told("/generate", native), among, digits)
    close(
        await told("/generate", {**native, "sampling_params": {**sampling, "logprobs_mode": "raw_logprobs"}}),
        raw[best],
        best,
    )
    close(await told("/v1/completions", openai), raw[best], best)
    for mode in ("masked_logprobs", "processed_logprobs"):
        close(await told("/v1/completions", {**openai, "logprobs_mode": mode}), among, digits)


async def test_what_the_operator_chose_reaches_answers(client: Client) -> None:
    body: dict[str, object] = {"prompt": [97], "max_tokens": 1, "logprobs": 0, "model": "second"}
    answer = await post(client, "/v1/completions", body)
    assert answer["model"] == "first"
    (name,) = answer["choices"][0]["logprobs"]["tokens"]
    assert name.startswith("token_id:")
    answer = await post(client, "/v1/completions", {**body, "return_tokens_as_token_ids": False})
    assert not answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    for options in ({}, {"stream_options": {"include_usage": False}}):
        async with client.post("/v1/completions", json={**body, **options, "stream": True}) as response:
            *_, last, done, _ = (await response.text()).split("\n\n")
        assert done == "data: [DONE]" and '"usage":{"prompt_tokens":1,"completion_tokens":1' in last
