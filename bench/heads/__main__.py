"""Trains draft heads for a model from its own answers, on a clock.

    python -m bench.heads --model FILE.gguf --data DIR --out DIR [--minutes 5.5] [--heads eagle3]

`--data` holds the files of Spec-Bench, MT-bench, GSM8K, HumanEval and MBPP as published (.jsonl, .jsonl.gz).
A share of each category's prompts is held out. The model answers all prompts greedily, then those of the
training set again at the temperatures of `TEMPERATURES` in turn, for a third of the time; all heads are
trained on the same forwards; accepted lengths are those of the held-out prompts' greedy answers. Everything
stops by the clock.

Writes to `--out`: NAME/config.json and NAME/model.safetensors of each head, figures.json, and held_out.jsonl,
the prompts that no head was trained with, in MT-bench's format: measure speeds with these alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from app.checkpoint.checkpoint import resolve
from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer
from bench.heads.data import Answered, Prompt, read_prompts, split
from bench.heads.evaluate import Count, evaluate
from bench.heads.layers import Size
from bench.heads.target import Target
from bench.heads.train import load_weights, make_head, save_head, train
from bench.results import conditions
from core.config import ModelConfig

TEMPERATURES = (0.6, 1.0, 0.8)
"""Temperatures of the answers to train with, after the greedy ones."""
DRAFTS = (3, 5, 7)
"""Numbers of drafts per step in the evaluation."""
GENERATION, TRAINING = 0.25, 0.92
"""Shares of the time after which generation and training end."""
SHORTEST = 4
"""Tokens of an answer that is kept: a chain of drafts needs something to be compared with."""


class Limits(NamedTuple):
    """Limits of generation."""

    rows: int
    """Answers at once."""
    answer: int
    """Tokens of an answer."""
    tokens: int
    """Tokens of all answers to train with."""


def head_sizes(layers: int, heads: int, kv_heads: int) -> dict[str, Size]:
    """The heads that can be trained, for a target of `layers` layers and these heads.

    For SmolLM2-135M eagle3 and eagle3-vocab are just below 8 MB: the one uses the target's output matrix; the
    other has one of its own for fewer tokens, and a smaller layer. dflash has the paper's five layers, 38 MB.
    """
    middle = (2, layers // 2, layers - 3) if layers > 5 else tuple(range(1, layers))
    spread = tuple(sorted({2 + (layers - 5) * i // 3 for i in range(4)})) if layers > 5 else middle
    return {
        "eagle3": Size(1, heads, kv_heads, 896, middle),
        "eagle3-vocab": Size(1, 4, 2, 448, middle, draft_vocab=2560),
        "dflash": Size(5, heads, kv_heads, 1536, spread, block=8),
    }


def generate(
    target: Target,
    jobs: Sequence[tuple[Prompt, float]],
    ends: Collection[int],
    limits: Limits,
    deadline: float,
) -> list[Answered]:
    """Answers of prompts at their temperatures, those that were begun before `deadline`."""
    ordered = sorted(jobs, key=lambda job: len(job[0].ids))
    count = math.ceil(len(ordered) / limits.rows)
    found = []
    for i in range(count):
        part = ordered[i * len(ordered) // count : (i + 1) * len(ordered) // count]
        if time.monotonic() > deadline:
            break
        prompts, temperatures = [prompt.ids for prompt, _ in part], [heat for _, heat in part]
        answers = target.answer(prompts, temperatures, limits.answer, ends, deadline)
        found += [
            Answered(prompt.category, len(prompt.ids), prompt.ids + answer)
            for (prompt, _), answer in zip(part, answers, strict=True)
            if len(answer) >= SHORTEST
        ]
    return found


def answered_tokens(rows: Sequence[Answered]) -> int:
    """Tokens of the answers alone."""
    return sum(len(row.ids) - row.start for row in rows)


def training_rows(
    target: Target, prompts: list[Prompt], ends: Collection[int], limits: Limits, deadline: float
) -> list[Answered]:
    """Greedy answers, then sampled ones, until the deadline or the limit of tokens."""
    rows: list[Answered] = []
    turn = 0
    while prompts and time.monotonic() < deadline and answered_tokens(rows) < limits.tokens:
        heat = TEMPERATURES[(turn - 1) % len(TEMPERATURES)] if turn else 0.0
        rows += generate(target, [(prompt, heat) for prompt in prompts], ends, limits, deadline)
        print(f"answers at temperature {heat}: {answered_tokens(rows):,} tokens in all", flush=True)
        turn += 1
    return rows


def frequent(rows: Sequence[Answered], vocab: int) -> tuple[torch.Tensor, Counter[int]]:
    """All ids by falling frequency in the answers, int64 [vocab], and the counts in prompts and answers."""
    answers = Counter(token for row in rows for token in row.ids[row.start :])
    order = sorted(range(vocab), key=lambda token: (-answers[token], token))
    return torch.tensor(order), Counter(token for row in rows for token in row.ids)


def unused_token(counts: Counter[int], special: Collection[int], vocab: int) -> int:
    """An id that no text has, a special token if there is one: DFlash's mask."""
    unused = [token for token in range(vocab) if not counts[token]]
    return max((token for token in unused if token in special), default=unused[-1])


def table(figures: Mapping[str, Mapping[str, Mapping[int, Count]]]) -> str:
    """Accepted lengths by head and category, one column for each number of drafts."""
    lines = [f"{'accepted length':32}" + "".join(f"{f'K={k}':>8}" for k in DRAFTS) + "   tokens"]
    for head, categories in figures.items():
        for category, counts in categories.items():
            cells = "".join(f"{counts[k].length:8.2f}" for k in DRAFTS)
            lines.append(f"{head:14}{category:18}{cells}{counts[DRAFTS[0]].tokens:9,}")
    return "\n".join(lines)


def main() -> None:
    """Answer, train, evaluate; print a table."""
    begun = time.monotonic()
    args = arguments()
    figures: dict[str, Any] = {"conditions": conditions()}
    device = torch.device(args.device)
    if device.type == "cuda":
        # cuDNN's attention plans anew for each of the many lengths.
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(args.seed)
    seconds: dict[str, float] = {}

    def stage(name: str) -> None:
        seconds[name] = round(time.monotonic() - begun - sum(seconds.values()), 1)
        print(f"== {time.monotonic() - begun:5.0f} s  {name} done", flush=True)

    checkpoint = resolve(ModelConfig(model=str(args.model)), lambda text: None)
    target = Target(args.model, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    spec = target.spec
    tokenizer = Tokenizer.load(checkpoint.tokenizer, spec.vocab_size, checkpoint.eos_ids, checkpoint.bos_id)
    template = ChatTemplate.load(checkpoint.tokenizer, None, tokenizer.special_tokens)
    prompts = read_prompts(args.data, tokenizer, template, args.prompt)
    if args.prompts:
        prompts = random.Random(args.seed).sample(prompts, min(args.prompts, len(prompts)))
    known, held = split(prompts, args.held_out, args.seed)
    ends = tokenizer.eos_ids
    tokenizer.close()
    template.close()
    stage("loading")

    limit = 60 * args.minutes
    limits = Limits(args.rows, args.answer, args.tokens)
    held_rows = generate(target, [(prompt, 0.0) for prompt in held], ends, limits, begun + limit)
    rows = training_rows(target, known, ends, limits, begun + GENERATION * limit)
    vocabulary, counts = frequent(rows, spec.vocab_size)
    stage("answers")

    mask = unused_token(counts, tokenizer.special_ids, spec.vocab_size)
    sizes = head_sizes(spec.layers, spec.heads, spec.kv_heads)
    heads = {name: make_head(target, sizes[name], vocabulary, mask) for name in args.heads}
    try:
        trained = train(heads, target, rows, args.batch, begun + TRAINING * limit, args.seed)
    finally:
        size = {name: save_head(head, args.out / name) for name, head in heads.items()}
    stage("training")

    found = {
        name: evaluate(load_weights(head, args.out / name), target, held_rows, DRAFTS, args.batch)
        for name, head in heads.items()
    }
    stage("evaluation")
    figures |= {
        "seconds": seconds,
        "prompts": {"train": len(known), "held out": len(held)},
        "answer tokens": {"train": answered_tokens(rows), "held out": answered_tokens(held_rows)},
        "training": trained,
        "bytes": size,
        "accepted length": {
            name: {
                of: {str(k): round(each.length, 3) for k, each in by.items()} for of, by in categories.items()
            }
            for name, categories in found.items()
        },
    }
    if device.type == "cuda":
        figures["peak GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    (args.out / "held_out.jsonl").write_text(
        "".join(json.dumps({"category": each.category, "turns": [each.text]}) + "\n" for each in held)
    )
    print(json.dumps({key: figures[key] for key in ("seconds", "answer tokens", "training", "bytes")}))
    print(table(found))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.heads", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True, help="directory with the prompts' files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", nargs="+", default=["eagle3", "eagle3-vocab", "dflash"])
    parser.add_argument("--minutes", type=float, default=5.5, help="of the whole run")
    parser.add_argument("--tokens", type=int, default=6_000_000, help="of answers to train with, at most")
    parser.add_argument("--prompts", type=int, default=0, help="a sample of so many; 0: all")
    parser.add_argument(
        "--prompt", type=int, default=1024, help="tokens of a prompt; longer ones are left out"
    )
    parser.add_argument("--answer", type=int, default=384, help="tokens of an answer, at most")
    parser.add_argument("--rows", type=int, default=1536, help="answers generated at once")
    parser.add_argument("--batch", type=int, default=8192, help="padded tokens of a training step")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of prompts not trained with")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
