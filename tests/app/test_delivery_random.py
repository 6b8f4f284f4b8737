"""Answers that start, stop and are aborted at random, delivered late: each is whole, in order and once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from app.engine.backlog import Backlog
from app.engine.job import TextOptions
from app.engine.submit import LiveRun
from app.text.tokenizer import Tokenizer
from core.request import Request
from core.types import Finish, FinishReason
from tests.rigs.executor import oracle
from tests.rigs.step_loop import GREEDY, VOCAB, Bench

TURNS = 300
ANSWERS = 60


class Asked(NamedTuple):
    """A job, what its tokens would be, and its stop string."""

    run: LiveRun
    tokens: list[int]
    stop: str
    logprobs: bool


def check_lines(backlog: Backlog) -> None:
    """Each row is in exactly one line. Lines are sorted by arrival; `_last` has the rows that have ended."""
    rows = {}
    for line in (backlog._first, backlog._last, backlog._due):
        assert [row.due for row in line.values()] == sorted(row.due for row in line.values())
        assert all(row.line is line and row.request is request for request, row in line.items())
        assert not rows.keys() & line.keys()
        rows |= line
    held = {row.request: row for row in backlog._held if row.line is None}
    assert backlog._rows == rows | held
    assert all((row.finish is not None) == (row.line is backlog._last) for row in backlog._rows.values())


def late(backlog: Backlog, rng: random.Random, share: float) -> None:
    """Deliver only a share of the slices, and check the lines after each."""
    deliver, stopped, seen = backlog.deliver, backlog._stopped, list[Request]()

    def count_stop(request: Request, finish: Finish) -> None:
        seen.append(request)
        stopped(request, finish)

    def deliver_some() -> None:
        if rng.random() < share:
            before = len(backlog._streams)
            seen.clear()
            deliver()
            assert before - len(backlog._streams) - len(seen) <= backlog.ends
            check_lines(backlog)

    backlog._stopped, backlog.deliver = count_stop, deliver_some  # type: ignore[method-assign]


async def ask(bench: Bench, tokenizer: Tokenizer, rng: random.Random, id: str) -> Asked:
    letters = range(65, 91)  # no half characters, which the answer would complete
    prompt = np.array(rng.choices(letters, k=rng.randrange(1, 30)), np.int32)
    tokens = oracle(prompt.tolist(), rng.choice((1, 1, 2, 9, 90)), VOCAB)
    text, at = tokenizer.decode(tokens), rng.randrange(90)
    stop = text[at : at + 2] if rng.random() < 0.4 else ""
    stop = stop if stop.isascii() else ""  # U+FFFD in the whole text may be a character that is cut in two
    logprobs = rng.choice((-1, -1, 0, 128))
    run = await bench.start(
        id,
        len(tokens),
        prompt=prompt,
        n=rng.choice((1, 1, 2, 9)),
        sampling=msgspec.structs.replace(GREEDY, logprobs=logprobs),
        text=TextOptions(stop=(stop,) if stop else ()),
        single_tokens=rng.random() < 0.2,
    )
    return Asked(run, tokens, stop, logprobs >= 0)


@pytest.mark.parametrize("seed", range(24))
async def test_answers_are_whole_in_order_and_once(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        tokenizer,
        depth=rng.randrange(3),
        eager=False,
        drafts=rng.choice((0, 3, 7)),
        rows=rng.choice((4, 40, 200)),
        pages=rng.choice((400, 3000)),
        replicas=rng.choice((1, 2)),
    )
    undo: list[Callable[[], None]] = []
    for engine in bench.engines:
        backlog = engine._backlog
        undo.append(partial(setattr, backlog, "deliver", backlog.deliver))
        late(backlog, rng, rng.choice((0.02, 0.2, 1.0)))
    asked: dict[str, Asked] = {}
    aborted = set[str]()
    for turn in range(TURNS):
        if len(asked) < ANSWERS and rng.random() < 0.3:
            asked[f"{turn}"] = await ask(bench, tokenizer, rng, f"{turn}")
        if asked and rng.random() < 0.05:
            aborted.add(id := rng.choice(list(asked)))
            asked[id].run.abort()
        if rng.random() < 0.05:
            rng.choice(bench.engines).set_stream_interval(rng.choice((1, 3, 40)))
        for executor in bench.executors:
            if executor.pending:
                executor.complete()
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    for restore in undo:
        restore()
    await bench.work()
    for id, each in asked.items():
        text = tokenizer.decode(each.tokens)
        for choice in range(each.run.choices):
            name = f"{id}-{choice}"
            tokens, pieces = bench.tokens(name), bench.pieces[name]
            assert tokens == each.tokens[: len(tokens)]
            assert not each.logprobs or sum(len(piece.logprobs or ()) for piece in pieces) == len(tokens)
            if bench.reason(name) is FinishReason.ABORT:
                assert id in aborted
                continue
            found = each.stop in text if each.stop else False
            assert bench.reason(name) is (FinishReason.STOP if found else FinishReason.LENGTH)
            told = "".join(piece.text for piece in pieces)
            assert told == (text[: text.index(each.stop)] if found else text)
            assert found or tokens == each.tokens
    assert all(engine._backlog.empty and not engine._backlog._streams for engine in bench.engines)
