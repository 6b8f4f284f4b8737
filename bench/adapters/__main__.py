"""Trains LoRA adapters for a model on the reference answers of public sets, on a clock.

    python -m bench.adapters --model FILE.gguf --data DIR --out DIR [--names gsm8k json] [--minutes 5]

`--data` holds gsm8k_test.jsonl and mbpp.jsonl as published. The loss is that of the answers' tokens within
the model's chat template. The last questions of each set are held out: losses and examples are of questions
that no adapter was trained with.

Writes to `--out`, for each adapter, PREFIX-NAME/adapter_config.json and adapter_model.safetensors, as PEFT
saves them (bfloat16), and README.md.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from app.checkpoint.checkpoint import resolve
from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer
from bench.adapters.recipes import RECIPES, Example, Recipe, read_examples
from bench.adapters.train import Adapter, held_out_loss, train
from bench.heads.target import Target
from core.config import ModelConfig


class Result(NamedTuple):
    """Result of one adapter, on the held-out questions."""

    rows: tuple[int, int]
    """Numbers of rows to train with, and held out."""
    loss: tuple[float, float]
    """Loss of the base model, and with the adapter."""
    epochs: float
    bytes: int
    question: str
    answers: tuple[str, str]
    """Answers of the base model, and with the adapter."""


def card(name: str, recipe: Recipe, result: Result, base: str) -> str:
    """README.md of an adapter."""
    before, after = result.loss
    known, held = result.rows
    quoted = "\n\n".join(
        f"{who}:\n\n```\n{text}\n```"
        for who, text in zip(
            ("Question", "Base model", "With the adapter"), (result.question, *result.answers), strict=True
        )
    )
    return f"""# {name}: a LoRA adapter for {base}

It {recipe.style}. Made by `python -m bench.adapters` for tests and as an example.

Data: {recipe.source}: {known} questions to train with, {result.epochs:.1f} epochs.
Loss per token of the answers to the last {held} questions, which were held out:
{before:.3f} for the base model, {after:.3f} with the adapter ({after / before - 1:+.0%}).

A question that was held out, greedily answered:

{quoted}
"""


def main() -> None:
    """Train the adapters one after the other; print a table."""
    args = arguments()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    checkpoint = resolve(ModelConfig(model=str(args.model)), lambda text: None)
    # Half the bytes of float32, and several times as fast on processors with AVX512-BF16.
    target = Target(args.model, torch.bfloat16, device)
    tokenizer = Tokenizer.load(
        checkpoint.tokenizer, target.spec.vocab_size, checkpoint.eos_ids, checkpoint.bos_id
    )
    template = ChatTemplate.load(checkpoint.tokenizer, None, tokenizer.special_tokens)

    def say(example: Example) -> str:
        prompt = example.row.ids[: example.row.start]
        ids = target.answer([prompt], [0.0], args.answer, tokenizer.eos_ids, math.inf)[0]
        return tokenizer.decode(ids).strip()

    results = {}
    for name in args.names:
        recipe = RECIPES[name]
        examples = read_examples(args.data, recipe, tokenizer, template, args.length)
        count = max(round(len(examples) * args.held_out), 1)
        known, held = [each.row for each in examples[:-count]], [each.row for each in examples[-count:]]
        shown = examples[-count]
        target.delta = None
        before, plain = held_out_loss(target, held, args.batch), say(shown)
        print(f"== {name}: {len(known)} rows to train with, {count} held out, loss {before:.3f}", flush=True)
        adapter = Adapter(target.spec, recipe.config).to(device)
        directory = args.out / f"{args.prefix}{name}"
        deadline = time.monotonic() + 60 * args.minutes
        epochs = train(adapter, target, known, recipe.rate, args.batch, deadline)
        size = adapter.save(directory, args.base)
        adapter.load(directory)
        after = held_out_loss(target, held, args.batch)
        result = Result(
            (len(known), count), (before, after), epochs, size, shown.question, (plain, say(shown))
        )
        (directory / "README.md").write_text(card(name, recipe, result, args.base))
        results[name] = result
    tokenizer.close()
    template.close()
    print(table(results))


def table(results: Mapping[str, Result]) -> str:
    """Losses and sizes, then the answers."""
    heads = "".join(f"{name:>10}" for name in ("train", "held out", "epochs", "before", "after", "change"))
    lines = [f"{'adapter':10}{heads}{'bytes':>12}"]
    lines += [
        f"{name:10}{each.rows[0]:10}{each.rows[1]:10}{each.epochs:10.1f}{each.loss[0]:10.3f}{each.loss[1]:10.3f}"
        f"{each.loss[1] / each.loss[0] - 1:10.0%}{each.bytes:12,}"
        for name, each in results.items()
    ]
    for name, each in results.items():
        lines += [
            f"\n== {name}: {each.question}",
            f"-- base\n{each.answers[0]}",
            f"-- {name}\n{each.answers[1]}",
        ]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.adapters", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True, help="directory with the sets' files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, for each adapter")
    parser.add_argument(
        "--base", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="in adapter_config.json"
    )
    parser.add_argument("--prefix", default="smollm2-135m-", help="of the directories' names")
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of question and answer; longer are left out"
    )
    parser.add_argument("--answer", type=int, default=100, help="tokens of an example's answer, at most")
    parser.add_argument("--batch", type=int, default=1536, help="padded tokens of a training step")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the questions, the last ones")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
