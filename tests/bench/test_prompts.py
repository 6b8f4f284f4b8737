from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.load.prompts import Source
from bench.load.words import WORDS
from bench.load.workloads import SCENARIOS, Workload


def body(work: Workload, index: int, turn: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Source(work, "m").request(index, turn).body)
    return found


def test_a_request_is_a_function_of_seed_name_and_index() -> None:
    work = Workload(name="a", input_len=50, seed=3)
    prompt = body(work, 7)["prompt"]
    assert prompt == body(work, 7)["prompt"]  # equal in another process
    others = [
        body(work, 8),
        body(Workload(name="b", input_len=50, seed=3), 7),
        body(Workload(name="a", seed=4), 7),
    ]
    assert all(other["prompt"][:50] != prompt for other in others)


def test_ids_are_uniform_over_the_inclusive_range() -> None:
    work = Workload(input_len=20_000, vocab_low=10, vocab_high=19)
    counts = np.bincount(body(work, 0)["prompt"], minlength=20)
    assert counts[:10].sum() == 0
    # 2,000 expected each, standard deviation 42: five of them are not exceeded by a uniform generator.
    assert np.abs(counts[10:] - 2_000).max() < 5 * 42


def test_the_body_of_a_table_scenario() -> None:
    found = body(SCENARIOS["c32"], 0)
    prompt = found.pop("prompt")
    assert found == {
        "model": "m",
        "max_tokens": 256,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert len(prompt) == 1024 and min(prompt) >= 1_000 and max(prompt) <= 90_000


def test_a_group_shares_only_its_prefix() -> None:
    work = Workload(input_len=40, prefix_len=30, prefix_groups=2)
    a, b, c = (body(work, i)["prompt"] for i in (0, 2, 1))
    assert a[:30] == b[:30] and a[30:] != b[30:]
    assert a[:30] != c[:30]
    assert len(a) == 40


def test_the_shared_scenario_has_one_prefix() -> None:
    prompts = [body(SCENARIOS["shared"], i)["prompt"] for i in range(3)]
    assert prompts[0][:2048] == prompts[1][:2048] == prompts[2][:2048]
    assert len({tuple(prompt[2048:]) for prompt in prompts}) == 3


def test_warm_up_prompts_share_no_prefix_with_measured_ones() -> None:
    source = Source(SCENARIOS["shared"], "m")
    warm = json.loads(source.warm(0).body)["prompt"]
    assert len(warm) == 2176 and warm[:16] != body(SCENARIOS["shared"], 0)["prompt"][:16]


def test_chat256_gives_every_second_request_penalties() -> None:
    even, odd = body(SCENARIOS["chat256"], 0), body(SCENARIOS["chat256"], 1)
    assert "presence_penalty" not in even and odd["presence_penalty"] and odd["frequency_penalty"]
    assert even["temperature"] == 0.7 and even["top_p"] == 0.9 and even["ignore_eos"] and even["stop"]
    words = even["messages"][0]["content"].split()
    assert len(words) == 1024 and set(words) <= set(WORDS)


def test_a_conversation_carries_its_history() -> None:
    source = Source(Workload(input_len=5, turns=2, endpoint="chat", prompt_kind="text"), "m")
    first = source.request(0, 0)
    history = [{"role": "user", "content": source.user(first)}, {"role": "assistant", "content": "yes"}]
    messages = json.loads(source.request(0, 1, history).body)["messages"]
    assert messages[:2] == history and messages[0] == json.loads(first.body)["messages"][0]
    assert messages[2]["role"] == "user" and messages[2]["content"] != messages[0]["content"]


def test_a_prefix_makes_no_prompt_of_a_trace_longer(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lengths = (4, 10, 30)
    path.write_text(
        "".join(f'{{"timestamp": 0, "input_length": {n}, "output_length": 1}}\n' for n in lengths)
    )
    work = Workload(trace=str(path), requests=0, prefix_len=10)
    prompts = [body(work, index)["prompt"] for index in range(3)]
    assert tuple(map(len, prompts)) == lengths
    assert prompts[2][:10] == prompts[1] and prompts[1][:4] == prompts[0]


def test_a_trace_gives_lengths_arrivals_and_shared_pages(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [5, 6]}\n'
        '{"timestamp": 4000, "input_length": 600, "output_length": 4, "hash_ids": [5, 7]}\n'
    )
    work = Workload(trace=str(path), trace_speed=2.0, requests=0)
    source = Source(work, "m")
    a, b = (json.loads(source.request(i).body) for i in (0, 1))
    assert [len(a["prompt"]), len(b["prompt"]), a["max_tokens"], b["max_tokens"]] == [1000, 600, 3, 4]
    assert a["prompt"][:512] == b["prompt"][:512] and a["prompt"][512:600] != b["prompt"][512:]
    arrivals = source.arrivals()
    assert arrivals is not None and arrivals.tolist() == [0.0, 2.0]
    assert len(source) == 2
    closed = Source(Workload(trace=str(path), trace_speed=0.0, requests=1, max_input_len=7), "m")
    assert closed.arrivals() is None and len(closed) == 1
    assert len(json.loads(closed.request(0).body)["prompt"]) == 7


@pytest.mark.parametrize("line", ['{"text": "one two three"}', '{"turns": ["one two three", "x"]}'])
def test_a_dataset_gives_its_texts_cut_to_length(tmp_path: Path, line: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(line + "\n")
    whole = Workload(dataset=str(path), prompt_kind="text", input_len=0)
    cut = Workload(dataset=str(path), prompt_kind="text", input_len=2)
    assert (body(whole, 0)["prompt"], body(cut, 0)["prompt"]) == ("one two three", "one two")


def test_json64_is_plain64_with_a_schema() -> None:
    plain, held = body(SCENARIOS["plain64"], 0), body(SCENARIOS["json64"], 0)
    assert "response_format" not in plain
    schema = held.pop("response_format")["json_schema"]["schema"]
    assert schema["minItems"] * 10 > SCENARIOS["json64"].output_len  # it cannot end before max_tokens
    assert held | {"prompt": 0} == plain | {"prompt": 0}
