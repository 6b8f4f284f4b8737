"""Rules for tokens, named log-probabilities and pins on a real engine: the CPU's, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app.offline import LLM
from bench.chaos.tiny import dummy_model

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = dummy_model(tmp_path_factory.mktemp("dummy"))
    with LLM(str(model), device="cpu", load_format="dummy", kv_tokens=4096) as loaded:
        yield loaded


def test_only_allowed_tokens_are_taken(llm: LLM) -> None:
    outputs = llm.generate(["one", "two"], temperature=1.5, max_tokens=30, allowed_token_ids=[65, 66], seed=1)
    assert {token for output in outputs for token in output.token_ids} == {65, 66}
    assert all(output.finish_reason == "length" for output in outputs), "the end was not allowed"


def test_bad_words_do_not_come_about(llm: LLM) -> None:
    among: dict[str, Any] = {"allowed_token_ids": [97, 98], "max_tokens": 60, "seed": 2, "ignore_eos": True}
    assert "aba" in llm.generate("one", **among)[0].text
    text = llm.generate("one", **among, bad_words=["aba", "bbb"])[0].text
    assert len(text) == 60
    assert "aba" not in text
    assert "bbb" not in text


def test_rules_leave_other_requests_alone(llm: LLM) -> None:
    free = llm.generate("one", **GREEDY)[0].token_ids
    banned = llm.generate(["one", "one"], **GREEDY, allowed_token_ids=[70])
    assert [output.token_ids for output in banned] == [[70] * 12] * 2
    assert llm.generate("one", **GREEDY)[0].token_ids == free


def test_rules_and_a_grammar(llm: LLM) -> None:
    output = llm.generate("one", regex="[ab]{8}", bad_words=["a"], max_tokens=20)[0]
    assert output.text == "bbbbbbbb"


def test_named_log_probabilities_are_those_of_the_top(llm: LLM) -> None:
    output = llm.generate("one", **GREEDY, logprobs=3, return_tokens_as_token_ids=True)[0]
    top = output.choices[0].logprobs["top_logprobs"]
    third = [int(sorted(entry, key=entry.get)[0].removeprefix("token_id:")) for entry in top]
    asked = sorted(set(third))
    named = llm.generate(
        "one", **GREEDY, logprobs=0, logprob_token_ids=asked, return_tokens_as_token_ids=True
    )[0]
    told = named.choices[0].logprobs["top_logprobs"]
    for at, token in enumerate(third):
        name = f"token_id:{token}"
        assert told[at][name] == pytest.approx(top[at][name], abs=1e-5)
        assert {f"token_id:{one}" for one in asked} <= set(told[at])


def test_a_pinned_prompt_is_found_again(llm: LLM) -> None:
    prompt = "Once upon a time there was a page that nobody wanted to lose. " * 4
    llm.generate(prompt, max_tokens=2, prompt_cache_key="k")
    for i in range(40):
        llm.generate(f"{i}: {prompt}{prompt}", max_tokens=2)
    again = llm.generate(prompt, max_tokens=2)[0]
    assert again.usage["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 32
    plain = f"0: {prompt}{prompt}"
    assert llm.generate(plain, max_tokens=2)[0].usage["prompt_tokens_details"]["cached_tokens"] == 0
