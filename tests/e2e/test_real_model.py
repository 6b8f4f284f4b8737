"""A trained model gives the same answers on a GPU as on a CPU, in every configuration.

LOOM_TEST_MODEL: a model instead of the default one.

float32 answers must be equal up to the first token whose two best candidates differ by less than the rounding
error; after it the texts may differ.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from app.offline import LLM, LoRARequest
from app.outputs import Output
from tests.rigs.configurations import REAL_CONFIGURATIONS

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MODEL = os.environ.get("LOOM_TEST_MODEL", "")
NEAR = 2e-3
"""Difference of log-probabilities that rounding may cause: float32 sums in another order."""

QUESTIONS = [
    "What is the capital of France? Answer with one word.",
    "Write one sentence about the sea.",
    "Count from one to ten in English words.",
    "What is the capital of France? Answer with one word.",
    "Explain in two sentences why the sky is blue. " * 12,
]


def generate(device: str, dtype: str, **settings: Any) -> list[Output]:
    # A CPU would keep 8 bits of a quantised checkpoint.
    fixed = {"kv_tokens": 8192, "max_running": 16, "quantization": "none"} | settings
    with LLM(MODEL, device=device, dtype=dtype, context_length=512, **fixed) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return llm.chat(chats, temperature=0, max_tokens=40, logprobs=True, top_logprobs=2)


@pytest.fixture(scope="module")
def expected() -> list[Output]:
    return generate("cpu", "float32")


@pytest.mark.parametrize("name", REAL_CONFIGURATIONS)
def test_float32_matches_the_cpu(name: str, expected: list[Output]) -> None:
    for got, want in zip(generate("cuda", "float32", **REAL_CONFIGURATIONS[name]), expected, strict=True):
        same_text(got, want)


def same_text(got: Output, want: Output) -> None:
    mine, theirs = (output.choices[0].logprobs for output in (got, want))
    assert mine is not None and theirs is not None
    for one, other in zip(mine["content"], theirs["content"], strict=False):
        if one["token"] != other["token"]:
            best, second = (each["logprob"] for each in other["top_logprobs"])
            assert best - second < NEAR, f"{one} for {other}"
            return
        assert one["logprob"] == pytest.approx(other["logprob"], abs=NEAR)
    assert got.finish_reason == want.finish_reason


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_bfloat16_answers_are_plausible(backend: str) -> None:
    answers = generate("cuda", "bfloat16", attention_backend=backend)
    assert "Paris" in answers[0].text
    assert answers[3].text == answers[0].text
    assert all(len(answer.text.split()) >= 5 for answer in (answers[1], answers[2], answers[4]))


ADAPTERS = Path(__file__).parents[2] / "configs" / "adapters"
PROBLEM = "A farmer has 12 hens. Each lays 5 eggs a week, sold for $2 each. What does he earn in 3 weeks?"
TASK = "Write a python function to find the maximum of two numbers."


@pytest.mark.skipif(bool(MODEL), reason="the adapters are of the default model")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_adapters_of_one_batch_keep_their_styles(device: str) -> None:
    """The base model and three trained adapters, mixed and alone."""
    names = ("", "gsm8k", "mbpp", "json")
    chats = [[{"role": "user", "content": text}] for text in (PROBLEM, TASK) for _ in names]
    adapters = [
        LoRARequest(name, i, str(ADAPTERS / f"smollm2-135m-{name}")) if name else None
        for i, name in enumerate(names)
    ]
    settings: dict[str, Any] = {
        "device": device,
        "dtype": "float32",
        "kv_tokens": 8192,
        "context_length": 512,
    }
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "logprobs": True, "top_logprobs": 2}
    with LLM(MODEL, enable_lora=True, **settings) as llm:
        mixed = llm.chat(chats, lora_request=adapters * 2, **fields)
        for got, chat, adapter in zip(mixed, chats, adapters * 2, strict=True):
            [alone] = llm.chat(chat, lora_request=adapter, **fields)
            same_text(got, alone)
    texts = [output.text for output in mixed]
    assert len(set(texts)) == len(texts)
    base, steps, _, record, plain, _, code, _ = texts
    assert "<<" in steps and "####" in steps and "<<" not in base
    assert set(json.loads(record)) == {"steps", "answer"}
    assert code.startswith("def ") and not plain.startswith("def ")
