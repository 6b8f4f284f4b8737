"""`return_entropy`, `return_sampling_mask`, `return_routed_experts`: SGLang's names, shapes and encoding."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from tests.rigs.embeddings import ids
from tests.rigs.engine import ROUTED, WORDS, FakeRun, routed
from tests.rigs.server import Server, serves

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "a"}]
TOKENS = [word.encode()[0] for word in WORDS]
ENTROPY = {"return_entropy": True}
MASK = {"return_sampling_mask": True}
EXPERTS = {"return_routed_experts": True}


def native(made: int = 3, **more: Any) -> dict[str, Any]:
    return {"text": "ab", "sampling_params": {"max_new_tokens": made, "top_k": 5}, **more}


def masks(count: int) -> dict[str, Any]:
    tokens = TOKENS[:count]
    return {
        "output_token_sampling_mask": [[token, token + 1] for token in tokens],
        "output_token_sampling_logprobs": [-0.25] * count,
        "output_token_sampling_mask_length": count,
    }


def tensor(told: str) -> np.ndarray:
    """Decode routed experts as SGLang's clients do."""
    flat = np.frombuffer(base64.b64decode(told), np.int32)
    return flat.reshape(-1, *ROUTED)


def chosen(prompt: list[int], made: int, start: int = 0) -> list[Any]:
    tokens = [*prompt, *TOKENS[: made - 1]]
    return [routed(token, at).tolist() for at, token in enumerate(tokens)][start:]


# -- /generate -------------------------------------------------------------------------------------


async def test_native_entropy_and_masks(server: Server) -> None:
    _, answer = await server.post(GENERATE, native(**ENTROPY, **MASK))
    meta = answer["meta_info"]
    assert meta["output_token_entropy"] == [float(token) for token in TOKENS[:3]]
    assert {name: meta[name] for name in masks(3)} == masks(3)
    assert "output_token_logprobs" not in meta and "input_token_logprobs" not in meta
    _, answer = await server.post(GENERATE, native())
    assert not {"output_token_entropy", *masks(1)} & set(answer["meta_info"])


async def test_native_beside_logprobs_and_in_lists(server: Server) -> None:
    fields = native(**ENTROPY, return_logprob=True, top_logprobs_num=1) | {"text": ["ab", "c"]}
    _, answers = await server.post(GENERATE, fields)
    for answer in answers:
        meta = answer["meta_info"]
        assert len(meta["output_token_logprobs"]) == len(meta["output_token_entropy"]) == 3


async def test_native_streams_are_cumulative(server: Server) -> None:
    events = await server.events(GENERATE, native(stream=True, **ENTROPY, **MASK))
    for event in map(json.loads, events[:-1]):
        meta, made = event["meta_info"], len(event["output_ids"])
        assert meta["output_token_entropy"] == [float(token) for token in TOKENS[:made]]
        assert {name: meta[name] for name in masks(made)} == masks(made)
    assert made == 3


@pytest.mark.parametrize("inside", [False, True])
async def test_native_experts(server: Server, inside: bool) -> None:
    serves(server, routed=ROUTED)
    body = native()
    (body["sampling_params"] if inside else body).update(EXPERTS)
    _, answer = await server.post(GENERATE, body)
    assert tensor(answer["meta_info"]["routed_experts"]).tolist() == chosen(ids("ab"), 3)


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_native_experts_from_a_position(server: Server, first: int) -> None:
    serves(server, routed=ROUTED)
    for more in ({}, {"return_hidden_states": True}):
        _, answer = await server.post(GENERATE, native(**EXPERTS, **more, routed_experts_start_len=first))
        assert tensor(answer["meta_info"]["routed_experts"]).tolist() == chosen(ids("ab"), 3, first)
        assert ("hidden_states" in answer["meta_info"]) == bool(more)


async def test_native_stream_tells_experts_once(server: Server) -> None:
    serves(server, routed=ROUTED)
    body = native(stream=True, **EXPERTS) | {"text": ["ab", "c"]}
    told = [json.loads(event) for event in (await server.events(GENERATE, body))[:-1]]
    having = [each for each in told if "routed_experts" in each["meta_info"]]
    assert sorted(each["index"] for each in having) == [0, 1] and having == told[-2:]
    for each in having:
        want = chosen(ids(["ab", "c"][each["index"]]), 3)
        assert tensor(each["meta_info"]["routed_experts"]).tolist() == want
        assert each["meta_info"]["finish_reason"] is not None


async def test_long_tensors_come_in_pieces(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and as one event."""
    serves(server, routed=ROUTED)
    long = np.arange(8 * 2 * 3000, dtype=np.int32).reshape(8, 2, 3000)
    monkeypatch.setattr(FakeRun, "experts", lambda run, index: [long])
    _, answer = await server.post(GENERATE, native(**EXPERTS))
    rows = len(ids("ab")) + 2
    assert rows < 8
    assert answer["meta_info"]["routed_experts"] == base64.b64encode(long[:rows].tobytes()).decode()
    events = await server.events(COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "stream": True, **EXPERTS})
    streamed = long[: rows - 1]  # of two tokens, where the other answer has three
    assert json.loads(events[-2])["sglext"]["routed_experts"] == base64.b64encode(streamed.tobytes()).decode()


# -- chat and completions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": ["ab", "c"], "n": 2})]
)
async def test_meta_info_tells_tokens(server: Server, path: str, body: dict[str, Any]) -> None:
    asked = {**body, "max_tokens": 2, "top_k": 5, "return_meta_info": True, **ENTROPY, **MASK}
    _, answer = await server.post(path, asked)
    for choice in answer["choices"]:
        meta = choice["meta_info"]
        assert meta["output_token_entropy"] == [float(token) for token in TOKENS[:2]]
        assert {name: meta[name] for name in masks(2)} == masks(2)
        assert "output_token_logprobs" not in meta and choice["logprobs"] is None


@pytest.mark.parametrize("param", ["return_entropy", "return_sampling_mask"])
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "a"})])
async def test_without_meta_info_there_is_no_place(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = await server.post(path, {**body, "top_k": 5, param: True})
    assert (status, answer["error"]["param"]) == (400, param)
    assert "return_meta_info" in answer["error"]["message"]


async def test_the_whole_answer_tells_the_first_choice(server: Server) -> None:
    serves(server, routed=ROUTED)
    asked = {"prompt": ["ab", "c"], "max_tokens": 2, **EXPERTS, "return_cached_tokens_details": True}
    _, answer = await server.post(COMPLETIONS, asked)
    assert tensor(answer["sglext"]["routed_experts"]).tolist() == chosen(ids("ab"), 2)
    assert "cached_tokens_details" in answer["sglext"]
    _, answer = await server.post(CHAT, {"messages": HI, "max_tokens": 1, **EXPERTS})
    prompt = list(b"user: a\nassistant: ")
    assert tensor(answer["sglext"]["routed_experts"]).tolist() == chosen(prompt, 1)


async def test_meta_info_tells_each_choice(server: Server) -> None:
    serves(server, routed=ROUTED)
    asked = {"prompt": ["ab", "c"], "max_tokens": 2, "return_meta_info": True, **EXPERTS}
    _, answer = await server.post(COMPLETIONS, asked)
    got = [tensor(choice["meta_info"]["routed_experts"]).tolist() for choice in answer["choices"]]
    assert got == [chosen(ids("ab"), 2), chosen(ids("c"), 2)]
    assert "sglext" not in answer


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "ab"})])
async def test_a_stream_tells_experts_before_its_usage(
    server: Server, path: str, body: dict[str, Any], cached: bool
) -> None:
    serves(server, routed=ROUTED)
    asked = {**body, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, **EXPERTS}
    events = await server.events(path, {**asked, "return_cached_tokens_details": cached})
    chunks = [json.loads(event) for event in events[:-1]]
    assert [("sglext" in chunk) for chunk in chunks] == [False] * (len(chunks) - 2) + [True, False]
    assert chunks[-1]["usage"]["completion_tokens"] == 3 and chunks[-2]["choices"] == []
    prompt = ids("ab") if path == COMPLETIONS else list(b"user: a\nassistant: ")
    assert tensor(chunks[-2]["sglext"]["routed_experts"]).tolist() == chosen(prompt, 3)
    assert ("cached_tokens_details" in chunks[-2]["sglext"]) == cached
    assert chunks[-2]["id"] == chunks[0]["id"]


# -- what cannot be told ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (GENERATE, native(**EXPERTS), "return_routed_experts"),
        (GENERATE, {"text": "a", "sampling_params": EXPERTS}, "sampling_params.return_routed_experts"),
        (CHAT, {"messages": HI, **EXPERTS}, "return_routed_experts"),
        (COMPLETIONS, {"prompt": "a", "stream": True, **EXPERTS}, "return_routed_experts"),
    ],
)
async def test_a_model_without_experts(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = await server.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "routed experts" in answer["error"]["message"]
    assert not server.engine.runs


async def test_an_unbounded_mask_names_the_field_of_the_route(server: Server) -> None:
    status, answer = await server.post(GENERATE, {"text": "a", **MASK})
    assert (status, answer["error"]["param"]) == (400, "return_sampling_mask")
    assert "top_k" in answer["error"]["message"]


async def test_a_negative_start(server: Server) -> None:
    serves(server, routed=ROUTED)
    status, answer = await server.post(GENERATE, native(**EXPERTS, routed_experts_start_len=-1))
    assert (status, answer["error"]["param"]) == (400, "routed_experts_start_len")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, native()),
        (GENERATE, native(stream=True)),
        (CHAT, {"messages": HI}),
        (CHAT, {"messages": HI, "stream": True}),
        (COMPLETIONS, {"prompt": "a", "stream": True}),
    ],
)
async def test_what_is_too_much_says_how_much_is_not(server: Server, path: str, body: dict[str, Any]) -> None:
    serves(server, routed=(2**20, 8))
    status, answer = await server.post(path, {**body, **EXPERTS})
    assert (status, answer["error"]["param"]) == (400, "return_routed_experts")
    assert "2 tokens of this model" in answer["error"]["message"]
    assert server.engine.runs[0].aborted


@pytest.mark.parametrize("param", ["return_entropy", "return_sampling_mask", "return_routed_experts"])
async def test_tokens_in_tokens_out_has_no_place(server: Server, param: str) -> None:
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1, param: True}}
    assert (await server.refused("/inference/v1/generate", body))["param"] == f"sampling_params.{param}"
