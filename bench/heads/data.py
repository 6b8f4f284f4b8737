"""Prompts of the public sets, their split, and batches of answered prompts."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer

MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
"""Categories of MT-bench, which Spec-Bench contains."""


class Prompt(NamedTuple):
    """One question, as the model reads it."""

    category: str
    text: str
    ids: list[int]


class Answered(NamedTuple):
    """A prompt's tokens with those of an answer behind them."""

    category: str
    start: int
    """Tokens of the prompt: the position of the answer's first token."""
    ids: list[int]


class Batch(NamedTuple):
    """Answered prompts, padded at their right."""

    ids: Tensor
    """int64 [B, T]."""
    start: Tensor
    """int64 [B]: position of each answer's first token."""
    length: Tensor
    """int64 [B]: tokens of prompt and answer."""


def question_of(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Category and text of a line of Spec-Bench, MT-bench, GSM8K, HumanEval or MBPP; None for others."""
    if "turns" in record:
        category = record["category"]
        return "mt-bench" if category in MT_BENCH else category, record["turns"][0]
    if "question" in record and "answer" in record:
        return "gsm8k", record["question"]
    if "entry_point" in record:
        return "humaneval", f"Complete this Python function:\n\n```python\n{record['prompt']}```"
    if "test_list" in record:
        tests = "\n".join(record["test_list"])
        return "mbpp", f"{record['text']} Your code should pass these tests:\n\n{tests}"
    return None


def records(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines of all .jsonl and .jsonl.gz files of `directory`."""
    for path in sorted(directory.glob("*.jsonl")) + sorted(directory.glob("*.jsonl.gz")):
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            yield from map(json.loads, lines)


def questions(directory: Path) -> list[tuple[str, str]]:
    """Category and text of each distinct question in the files of `directory`. A question of several sets has
    the category that Spec-Bench gives it."""
    found: dict[str, str] = {}
    for record in records(directory):
        if (question := question_of(record)) is not None:
            category, text = question
            if found.get(text, "gsm8k") == "gsm8k":
                found[text] = category
    return [(category, text) for text, category in found.items()]


def read_prompts(directory: Path, tokenizer: Tokenizer, template: ChatTemplate, most: int) -> list[Prompt]:
    """The questions as prompts of a chat, those of at most `most` tokens."""
    prompts = []
    for category, text in questions(directory):
        rendered = template.render([{"role": "user", "content": text}])
        ids = tokenizer.encode(rendered, add_special=False).tolist()
        if len(ids) <= most:
            prompts.append(Prompt(category, text, ids))
    return prompts


def split(prompts: Sequence[Prompt], share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train with, and those held out: `share` of each category, at least one."""
    order = random.Random(seed)
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    train, held = [], []
    for group in groups.values():
        order.shuffle(group)
        count = max(round(share * len(group)), 1)
        held += group[:count]
        train += group[count:]
    return train, held


def batches(rows: Sequence[Answered], tokens: int, order: random.Random) -> list[list[Answered]]:
    """All rows once, in any order: batches of similar lengths and at most `tokens` padded tokens, or of one
    row."""
    groups: list[list[Answered]] = []
    # Longest first, so that a batch's first row is its longest.
    for row in sorted(rows, key=lambda row: (-(len(row.ids) // 32), order.random())):
        if not groups or (len(groups[-1]) + 1) * (len(groups[-1][0].ids) | 31) > tokens:
            groups.append([])
        groups[-1].append(row)
    order.shuffle(groups)
    return groups


def pad(rows: Sequence[Answered], device: torch.device) -> Batch:
    """Rows as one batch, zeros behind their ends."""
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows])
    start = torch.tensor([row.start for row in rows])
    length = torch.tensor([len(row.ids) for row in rows])
    return Batch(ids.to(device), start.to(device), length.to(device))
