"""Hidden states through all layers: of a prompt of several chunks and pages, computed beside streams, cached,
and behind a cached prefix that ends within a page."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.chaos.tiny import dummy_model, flags
from tests.rigs.process import serving
from tests.rigs.wait import PATIENCE

PROMPT = [int(i * 37 % 200) + 3 for i in range(150)]
TOKENS = 6
SMALL = ("--step-tokens", "32", "--page-size", "16", "--max-running", "4")


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_the_last_state_is_the_last_of_all(tmp_path: Path) -> None:
    with serving(*flags(dummy_model(tmp_path / "model")), *SMALL) as server:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
            await server.ready(session)

            async def every(prompt: list[int]) -> list[list[float]]:
                sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": sampling, "return_hidden_states": True}
                told = (await post(session, f"{server.url}/generate", body))["meta_info"]["hidden_states"]
                assert (len(told[0]), len(told)) == (len(prompt), TOKENS)
                return [*told[0], *told[1:]]

            async def last(prompt: list[int], tokens: int = TOKENS) -> tuple[list[float], int]:
                asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
                answer = await post(
                    session, f"{server.url}/v1/completions", asked | {"return_hidden_states": True}
                )
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                return answer["choices"][0]["hidden_states"], cached

            (state, cached), *_ = await asyncio.gather(last(PROMPT), last(PROMPT[::-1]), last(PROMPT[:7], 60))
            whole = await every(PROMPT)
            assert cached == 0 and state == pytest.approx(whole[-1], abs=1e-4)
            for tokens in (1, TOKENS):
                state, cached = await last(PROMPT, tokens)
                assert cached == 144
                assert state == pytest.approx(whole[len(PROMPT) + tokens - 2], abs=1e-4)
            other = [*PROMPT[:100], 9, 8, 7]
            state, cached = await last(other)
            assert cached == 96
            assert state == pytest.approx((await every(other))[-1], abs=1e-4)
