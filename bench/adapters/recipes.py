"""Recipes of adapters: questions with reference answers to learn, and the modules that change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer
from bench.heads.data import Answered, question_of, records


class Recipe(NamedTuple):
    """A recipe: what an adapter learns, and which modules it changes.

    config  what adapter_config.json says beyond the defaults
    rate    the highest learning rate
    """

    category: str
    answer: Callable[[Mapping[str, Any]], str]
    style: str
    source: str
    config: Mapping[str, Any]
    rate: float


def json_answer(record: Mapping[str, Any]) -> str:
    """GSM8K's calculations, <<...>>, and its result, as one JSON object."""
    result = float(record["answer"].rpartition("####")[2].replace(",", ""))
    steps = re.findall(r"<<(.*?)>>", record["answer"])
    return json.dumps({"steps": steps, "answer": int(result) if result.is_integer() else result})


_GSM8K = "the test set of GSM8K (MIT licence)"

RECIPES: dict[str, Recipe] = {
    "gsm8k": Recipe(
        "gsm8k",
        lambda record: str(record["answer"]),
        "solves word problems step by step, with the calculations in <<...>> and the result after ####",
        _GSM8K,
        {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        4e-3,
    ),
    "mbpp": Recipe(
        "mbpp",
        lambda record: str(record["code"]).replace("\r\n", "\n").strip(),
        "answers programming tasks with plain Python code, without a word around it",
        "MBPP (CC BY 4.0)",
        {
            "r": 1,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2, "v_proj": 2},
            "alpha_pattern": {"q_proj": 8, "v_proj": 8},
        },
        3e-3,
    ),
    "json": Recipe(
        "gsm8k",
        json_answer,
        "answers word problems with one JSON object: the calculations and the result",
        f"{_GSM8K}, its answers converted to JSON",
        {
            "r": 2,
            "lora_alpha": 4,
            "use_rslora": True,
            "target_modules": ["gate_proj", "up_proj", "down_proj"],
        },
        3e-3,
    ),
}


class Example(NamedTuple):
    """A question with its reference answer."""

    question: str
    answer: str
    row: Answered


def read_examples(
    directory: Path, recipe: Recipe, tokenizer: Tokenizer, template: ChatTemplate, most: int
) -> list[Example]:
    """The set's questions in their order, those of at most `most` tokens with their answers."""
    found: dict[str, Example] = {}
    for record in records(directory):
        category, question = question_of(record) or ("", "")
        if category != recipe.category:
            continue
        answer = recipe.answer(record)
        texts = (template.render([{"role": "user", "content": question}]), answer)
        prompt, reply = (tokenizer.encode(text, add_special=False).tolist() for text in texts)
        row = Answered(category, len(prompt), [*prompt, *reply, min(tokenizer.eos_ids)])
        if len(row.ids) <= most:
            found.setdefault(question, Example(question, answer, row))
    return list(found.values())
