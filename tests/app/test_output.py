"""A stream: however a step's tokens come, text, counts, log-probabilities and finish are the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.job import Piece
from app.engine.output import Stream
from app.text.detokenizer import Detokenizer
from app.text.repetition import Repetition, RepetitionScanner
from app.text.stops import StopScanner
from app.text.tokenizer import Tokenizer
from core.plan import RowLogprobs
from core.types import NO_TOKENS, Finish, FinishReason
from tests.rigs import vocabularies

LENGTH = Finish(FinishReason.LENGTH)
EMPTY = np.zeros(0, np.float32)


class Told(NamedTuple):
    """The pieces that a stream sent: the tokens of each, and their concatenated contents."""

    pieces: list[list[int]]
    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None
    count: int


def told(
    tokenizer: Tokenizer, steps: Sequence[list[int]], options: dict[str, object], single: bool = False
) -> Told:
    pieces: list[Piece] = []

    def take(index: int, piece: Piece) -> None:
        pieces.append(piece)

    stops = StopScanner(["ab", "é!"]) if options["stops"] else None
    repetition = RepetitionScanner(Repetition(1, 3, 3)) if options["repetition"] else None
    stream = Stream(0, take, take, Detokenizer(tokenizer, []), stops, repetition, single)
    finish, at = None, 0
    for tokens in steps:
        rows = [RowLogprobs(-float(at + i), NO_TOKENS, EMPTY) for i in range(len(tokens))]
        at += len(tokens)
        finish = stream.feed(tokens, rows if options["logprobs"] else None)
        if finish is not None:
            break
    else:
        stream.end(LENGTH)
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert finish is None or pieces[-1].finish == finish
    return Told(
        [piece.tokens for piece in pieces],
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        [row.chosen for piece in pieces for row in piece.logprobs or ()],
        pieces[-1].finish,
        stream.count,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(vocabularies.byte_level(), {})


OPTIONS = st.fixed_dictionaries({name: st.booleans() for name in ("stops", "repetition", "logprobs")})


@given(text=st.text("abé!x ", max_size=24), cuts=st.lists(st.integers(1, 5)), options=OPTIONS)
def test_tokens_of_one_step_come_as_they_do_one_by_one(
    tokenizer: Tokenizer, text: str, cuts: list[int], options: dict[str, object]
) -> None:
    ids = list(text.encode())  # of this vocabulary
    ends = [*accumulate(cuts), len(ids)]
    steps = [step for a, b in pairwise([0, *ends]) if (step := ids[a : min(b, len(ids))])]
    alone = told(tokenizer, [[token] for token in ids], options)
    together = told(tokenizer, steps, options)
    assert together[1:] == alone[1:]
    assert len(together.pieces) <= len(steps) + 1, "a piece for each step, and the last one"
    assert told(tokenizer, steps, options, single=True) == alone


@pytest.mark.parametrize("reason", FinishReason)
def test_only_an_answer_that_is_whole_ends_by_a_stop_in_its_last_text(
    tokenizer: Tokenizer, reason: FinishReason
) -> None:
    """The stop string is U+FFFD, as which half a character at the end of the output is decoded."""
    pieces: list[Piece] = []
    half = next(id for id, raw in enumerate(tokenizer.vocabulary.raw) if raw == b"\xc3")

    def take(index: int, piece: Piece) -> None:
        pieces.append(piece)

    stream = Stream(0, take, take, Detokenizer(tokenizer, []), StopScanner(["\ufffd"]))
    assert stream.feed([half]) is None
    told = stream.end(Finish(reason))
    whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert told == pieces[-1].finish == (Finish(FinishReason.STOP, "\ufffd") if whole else Finish(reason))
