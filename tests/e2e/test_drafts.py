"""Drafts through all layers: an answer streams in as many events as it took steps."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.chaos.tiny import dummy_model, flags
from tests.rigs.process import read_events, serving
from tests.rigs.wait import PATIENCE

BODY: dict[str, Any] = {
    "prompt": "ab" * 20,
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 1,
    "logit_bias": {"97": 100},  # one token for ever: every draft is accepted
}


async def test_the_tokens_of_a_step_are_one_event(tmp_path: Path) -> None:
    more = ["--speculative-algorithm", "ngram"]
    with serving(*flags(dummy_model(tmp_path / "model")), *more) as server:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
            await server.ready(session)
            url = f"{server.url}/v1/completions"
            async with session.post(url, json=BODY) as answer:
                whole = (await answer.json())["choices"][0]
            async with session.post(url, json=BODY | {"stream": True}) as answer:
                events = [event for event in await read_events(answer) if event != "[DONE]"]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        parts = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
        joined, expected = list(chain.from_iterable(parts)), whole["logprobs"][name]
        assert joined == (expected if name != "token_logprobs" else pytest.approx(expected))
        assert max(map(len, parts)) > 1
    assert len(choices) < 60
