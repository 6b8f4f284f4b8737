"""Beam search: the likeliest continuations as a whole, not token by token.

It knows numbers only; `app/search.py` runs it on the engine. The search is vLLM's, so that its clients get
the same answers: `n` beams; of each the 2n best tokens go on; one that continues with an end of text is
complete and leaves its place to another; the score is the sum of log-probabilities over (tokens of prompt
and output, without that end) ** `length_penalty`. Log-probabilities are the model's own, as with vLLM's
default `raw_logprobs`: a temperature does not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.plan import RowLogprobs
from core.types import Ints


class Rules(NamedTuple):
    """What a search is held to. `prompt` and `limit` are tokens: the prompt's, the most that follow."""

    width: int
    prompt: int
    limit: int
    penalty: float
    ends: frozenset[int]
    told: int
    """Log-probabilities per token that the client wants, as `SamplingParams.logprobs`."""


class Live(NamedTuple):
    """A beam of this round: which one of the last round it continues, with what, and its sum since."""

    parent: int
    token: int
    total: float
    row: RowLogprobs | None


class Ended(NamedTuple):
    """A beam that is complete: `last` continues beam `parent` of the round before `round`."""

    score: float
    round: int
    last: Live


class Found(NamedTuple):
    """One continuation. `end` is the end of text that follows `tokens`, None where the length ended it."""

    tokens: list[int]
    rows: list[RowLogprobs | None]
    end: Live | None


class Beams:
    """The search itself: rows of log-probabilities in, continuations out. Owner: event loop.

    Kept as one list of live beams per round, so that a round costs the same however long the beams are.
    """

    __slots__ = ("_ended", "_rounds", "_rules")

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._rounds: list[list[Live]] = []
        self._ended: list[Ended] = []

    @property
    def live(self) -> list[Live]:
        """The beams to run next, best first."""
        return self._rounds[-1] if self._rounds else [Live(0, -1, 0.0, None)]

    @property
    def finished(self) -> bool:
        """Whether no further round would change what `best` says."""
        return len(self._rounds) == self._rules.limit or not self.live or self._settled()

    def grow(self, rows: Sequence[RowLogprobs]) -> None:
        """One round: `rows[i]` is what may follow live beam i. Ties go to the better beam, then to the token
        that the sampler ranks first."""
        rules, k = self._rules, 2 * self._rules.width
        sums = np.array([beam.total for beam in self.live])
        ids = np.stack([row.top_ids[:k] for row in rows])
        totals = sums[:, None] + np.stack([row.top_values[:k] for row in rows]).astype(np.float64)
        ends = np.isin(ids, list(rules.ends))
        ended = [self._beam(ids, totals, int(at), rows) for at in np.flatnonzero(ends)]
        order = np.argsort(-totals.ravel(), kind="stable")
        order = order[~ends.ravel()[order]][: rules.width]
        going = [self._beam(ids, totals, int(at), rows) for at in order]
        length = rules.prompt + len(self._rounds)
        done = [Ended(self._score(beam.total, length), len(self._rounds), beam) for beam in ended]
        self._ended = sorted(self._ended + done, key=_by_score, reverse=True)[: rules.width]
        self._rounds.append(going)

    def best(self) -> list[Found]:
        """The complete beams and those that are left, best first; of equal ones those that were complete
        sooner."""
        rules, last = self._rules, len(self._rounds) - 1
        left = []
        for beam in self.live if last >= 0 else ():
            length = rules.prompt + last + 1
            left.append(Ended(self._score(beam.total, length), last, beam))
        chosen = sorted(self._ended + left, key=_by_score, reverse=True)[: rules.width]
        return [self._found(each) for each in chosen]

    def _beam(self, ids: Ints, totals: NDArray[np.float64], at: int, rows: Sequence[RowLogprobs]) -> Live:
        parent, rank = divmod(at, ids.shape[1])
        row, told = None, self._rules.told
        if told >= 0:  # a copy of what is told: the whole row would be held otherwise
            of = rows[parent]
            row = RowLogprobs(
                float(of.top_values[rank]), of.top_ids[:told].copy(), of.top_values[:told].copy()
            )
        return Live(parent, int(ids[parent, rank]), float(totals[parent, rank]), row)

    def _score(self, total: float, length: int) -> float:
        score: float = total / length**self._rules.penalty
        return score

    def _settled(self) -> bool:
        """A live beam's sum can only fall, so its score is bounded by the length that suits it best: the
        longest one where a penalty above 0 divides by it."""
        rules = self._rules
        if len(self._ended) < rules.width:
            return False
        length = rules.prompt + (rules.limit if rules.penalty > 0 else len(self._rounds))
        return self._ended[-1].score >= self._score(self.live[0].total, length)

    def _found(self, ended: Ended) -> Found:
        end = ended.last if ended.last.token in self._rules.ends else None
        path: list[Live] = []
        beam, at = ended.last, ended.round
        while True:
            path.append(beam)
            at -= 1
            if at < 0:
                break
            beam = self._rounds[at][beam.parent]
        path.reverse()
        if end is not None:
            path.pop()
        return Found([each.token for each in path], [each.row for each in path], end)


def _by_score(ended: Ended) -> float:
    return ended.score
