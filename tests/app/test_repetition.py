"""Detection of endless repetition: against a look at all of the text, and through the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from app.engine.job import Piece, TextOptions
from app.http.delivery import IntervalSink
from app.text.repetition import Repetition, RepetitionScanner
from app.text.tokenizer import Tokenizer
from core.types import Finish, FinishReason
from tests.rigs.executor import oracle
from tests.rigs.step_loop import VOCAB, Bench
from tests.rigs.wait import settle


def repeats(tokens: Sequence[int], asked: Repetition) -> bool:
    """The definition, looked up."""
    for n in range(asked.shortest, asked.longest + 1):
        tail = tokens[-n * asked.count :]
        if len(tail) == n * asked.count and all(tail[i] == tail[i % n] for i in range(len(tail))):
            return True
    return False


@pytest.mark.parametrize("asked", [Repetition(1, 4, 3), Repetition(2, 3, 2), Repetition(5, 5, 2)])
def test_it_sees_what_a_full_search_sees(asked: Repetition) -> None:
    rng = random.Random(repr(asked))
    seen = 0
    for _ in range(300):
        scanner, tokens = RepetitionScanner(asked), []
        for _ in range(40):
            tokens.append(rng.randrange(3))
            found = scanner.feed(tokens[-1])
            assert found == repeats(tokens, asked), tokens
            seen += found
    assert seen > 20


async def test_the_engine_ends_the_request() -> None:
    tokenizer = Tokenizer.load(None, VOCAB, [2])
    bench = Bench(tokenizer)
    text = oracle([5], 400, VOCAB)
    at = next(i for i in range(1, 400) if text[i] == text[i - 1])
    asked = TextOptions(repetition=Repetition(1, 1, 2), stop=("never said",))
    run = await bench.start("a", 400, prompt=np.array([5], np.int32), text=asked)
    await run.wait()
    await settle()
    assert bench.tokens("a-0") == text[: at + 1]
    assert bench.pieces["a-0"][-1].finish == Finish(FinishReason.STOP, "repetition_detected")
    assert "".join(piece.text for piece in bench.pieces["a-0"]) == tokenizer.decode(text[: at + 1])
    assert bench.submitter.idle
    bench.scheduler.check_integrity()
    bench.engine.close()
    tokenizer.close()


class TestSpaced:
    def pieces(self, every: int, tokens: int, finish: bool = True) -> list[Piece]:
        seen: list[Piece] = []
        sink = IntervalSink(lambda index, piece: seen.append(piece), every)
        for i in range(tokens):
            end = Finish(FinishReason.LENGTH) if finish and i == tokens - 1 else None
            sink.take(0, Piece(str(i), [i], None, end))
        return seen

    def test_the_first_goes_at_once_the_others_together(self) -> None:
        assert [piece.tokens for piece in self.pieces(3, 8)] == [[0], [1, 2, 3], [4, 5, 6], [7]]
        assert [piece.text for piece in self.pieces(3, 8)] == ["0", "123", "456", "7"]

    def test_the_end_takes_along_what_is_held(self) -> None:
        pieces = self.pieces(10, 4)
        assert [piece.tokens for piece in pieces] == [[0], [1, 2, 3]]
        assert pieces[-1].finish is not None

    def test_without_an_end_it_is_held(self) -> None:
        assert [piece.tokens for piece in self.pieces(3, 3, finish=False)] == [[0]]
