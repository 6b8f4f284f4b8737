"""Requests of every kind, and what they say with drafts and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.engine.job import Job, TextOptions
from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from core.grammar import GrammarCompiler, GrammarSpec
from core.plan import RowLogprobs
from core.request import SamplingParams
from core.types import RootKey
from gpu.grammar import Compiler
from gpu.step.machine import Machine
from tests.rigs.drafting import Answer, Drafting, Drafts
from tests.rigs.processors import KNOWN
from tests.rigs.runner import Rig
from tests.rigs.tiny_model import VOCAB

STOP = 3
"""A byte that no text has."""
TOKENS = 30
FEW = 14
GREEDY: dict[str, Any] = {"temperature": 0.0}
LETTERS = tuple(map(chr, range(97, 123)))

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": {},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "logprobs": {**GREEDY, "logprobs": 5, "logprob_ids": (7, 9), "entropy": True},
    "of what was drawn from": {"top_k": 9, "logprobs": 3, "logprobs_mode": "processed_logprobs"},
    "support": {"top_k": 5, "support": True},
    "repetition": {**GREEDY, "repetition_penalty": 1.7, "logprobs": 2},
    "penalties": {
        "frequency_penalty": 0.9, "presence_penalty": 0.6,
        "logprobs": 1, "logprobs_mode": "processed_logprobs",
    },
    "bias": {"logit_bias": ((11, 4.0), (12, -100.0)), "frequency_penalty": 1.5},
    "stop ids": {"stop_ids": frozenset(range(0, VOCAB, 12))},
    "min_tokens": {"stop_ids": frozenset(range(0, VOCAB, 3)), "min_tokens": 11, "logprobs": 0},
    "prompt_logprobs": {**GREEDY, "prompt_logprobs": 2, "logprobs": 2, "prompt_logprob_ids": (5,)},
    "prompt_logprobs from the middle": {"prompt_logprobs": 0, "prompt_logprobs_start": 20},
    "hidden": {"hidden": "all"},
    "experts": {**GREEDY, "experts_from": 5},
    "the sum of a prompt": {"hidden": "sum", "frequency_penalty": 0.5},
    "processor": {**GREEDY, "processor": "only", "processor_params": '{"token": 60}', "logprobs": 1},
    "processor that raises": {"processor": "broken"},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "stop strings": {"text": TextOptions(stop=LETTERS)},
    "stop strings, held back": {"text": TextOptions(stop=("never",), include_stop=True)},
    "grammar": {"grammar": GrammarSpec("regex", "[0-9]{5,20}")},
    "grammar, drawn": {
        "grammar": GrammarSpec("regex", "[a-z]*"),
        "sampling": SamplingParams(frequency_penalty=1.0, logprobs=2, logprobs_mode="masked_logprobs"),
    },
    "banned": {"allowed_ids": tuple(range(4, 200))},
    "hidden of the output": {"sampling": SamplingParams(hidden="output", logprobs=1)},
    "embeds": {"embeds": np.random.default_rng(1).normal(size=(19, 64)).astype(np.float32)},
    "no token": {"max_tokens": 0, "sampling": SamplingParams(prompt_logprobs=1)},
    "a state alone": {"max_tokens": 0, "sampling": SamplingParams(hidden="last")},
}
HOSTS_OWN = {"processor", "processor that raises"}
"""The host changes logits between their tokens: drafts are not for them."""


def jobs(tokens: int = TOKENS) -> list[Job]:
    """A job of each kind, with prompts of different lengths; most answers have `tokens` tokens."""
    found = {name: {"sampling": SamplingParams(**params)} for name, params in SAMPLING.items()} | OTHERS
    made = []
    for at, (name, more) in enumerate(found.items()):
        # A second byte of its own: the drafts' truth is found by the prompt.
        prompt = np.array([5, 100 + at, *(i * 31 % 250 + 4 for i in range(at * 17 % 90))], np.int32)
        if "embeds" in more:
            prompt = np.append(np.zeros(len(more["embeds"]), np.int32), prompt)
            more["root"] = RootKey(own=name)
        made.append(
            Job(id=name, prompt=prompt, seed=at, **{"max_tokens": tokens, "ignore_eos": True, **more})
        )
    return made


class Engines:
    """Engines over one model, and what they say without drafts."""

    def __init__(self, path: Path, tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
        self.path, self._given = path, (path, tokenizer, grammars)
        self._plain: dict[str, Answer] = {}
        self._texts: dict[bytes, Sequence[int]] = {}

    def make(
        self,
        drafts: Drafts,
        overlap: int,
        machine: Callable[[Rig], Machine] = lambda rig: rig.runner._machine,
    ) -> Drafting:
        """An engine of the CPU's own kernels, or of a `machine` with others."""
        path, tokenizer, grammars = self._given
        return Drafting(path, drafts, overlap, self._texts, tokenizer, grammars, KNOWN, machine)

    async def plain(self, jobs: Sequence[Job]) -> dict[str, Answer]:
        """The answers without drafts, by job: the same jobs every time."""
        if not self._plain:
            answers = await self.make(Drafts(0, 0.0), 0).answers(jobs)
            self._plain = {answer.run.id: answer for answer in answers}
            self._texts |= {answer.run.prompt.tobytes(): answer.tokens for answer in answers}
        return self._plain


@contextmanager
def engines_of(path: Path) -> Iterator[Engines]:
    """Engines with grammars, and a tokenizer whose tokens are bytes."""
    tokenizer = Tokenizer.load(None, VOCAB, [STOP])
    compiler = Compiler(tokenizer.token_table(VOCAB), HelperProcess())
    try:
        yield Engines(path, tokenizer, compiler)
    finally:
        compiler.close()


def same(got: Answer, want: Answer, close: float = 1e-4) -> None:
    """Numbers are up to `close`."""
    assert (got.text, got.tokens) == (want.text, want.tokens)
    assert got.finish == want.finish
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        same_logprobs(mine, theirs, close)
    assert len(got.run.prompt_logprobs()) > 0 or not want.run.prompt_logprobs()
    for name in ("values", "ranks", "top_ids", "top_values"):
        mine, theirs = (
            [getattr(each, name) for each in answer.run.prompt_logprobs()] for answer in (got, want)
        )
        if theirs:
            np.testing.assert_allclose(np.concatenate(mine), np.concatenate(theirs), atol=close)
    for mine, theirs in ((got.run.hidden(0), want.run.hidden(0)), (got.run.experts(0), want.run.experts(0))):
        assert bool(mine) == bool(theirs)
        if mine:
            states = [np.concatenate(each) for each in (mine, theirs)]
            if got.run.params.hidden == "sum":  # of each chunk
                states = [each.sum(0) for each in states]
            np.testing.assert_allclose(*states, atol=10 * close)


def same_logprobs(mine: RowLogprobs, theirs: RowLogprobs, close: float) -> None:
    assert mine.chosen == pytest.approx(theirs.chosen, abs=close)
    assert mine.top_ids.tolist() == theirs.top_ids.tolist()
    np.testing.assert_allclose(mine.top_values, theirs.top_values, atol=close)
    assert mine.entropy == pytest.approx(theirs.entropy, abs=close)
    assert (mine.support is None) == (theirs.support is None)
    if mine.support is not None and theirs.support is not None:
        assert mine.support.ids.tolist() == theirs.support.ids.tolist()
        assert mine.support.chosen == pytest.approx(theirs.support.chosen, abs=close)
