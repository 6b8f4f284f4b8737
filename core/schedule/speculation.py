"""Speculation: how many drafts a step verifies, and whether its drafter proposes any."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.executor import Capabilities
from core.plan import StepResult
from core.types import Ints

MEMORY: Final = 64
"""Drafts over which a position's acceptance is averaged: a step of many rows has as many."""
FADING: Final = 127 / 128
"""What a step leaves of the weight of all before it: what has not been tried for long is soon corrected."""
LEAST_WEIGHT: Final = 2.0
"""Drafts that the acceptance of the first position weighs at least; that of others fades away."""
FIRST_GUESS: Final = 0.7
"""Acceptance of a draft before any was verified."""
READINESS: Final = 1 / 8
"""Weight of a step's share of rows that had drafts."""
EXCESS: Final = 1 / 16
"""Weight of a step's seconds beyond the measured ones."""
MOST_EXCESS: Final = 4.0
"""Times the measured seconds: more is an accident, not attention."""
ALLOWANCE: Final = 0.004
"""Share of the time that drafting may lose, to learn whether it pays."""
FIRST_CREDIT: Final = 2.0
"""Plain steps that drafting may lose when it begins."""
MOST_CREDIT: Final = 4.0
"""Plain steps of gains that are kept against later losses, at least."""
STEPS_OF_CREDIT: Final = 8.0
"""Drafting steps that are: results come late, and as many as are in flight have been paid for by then."""
MARGIN: Final = 1.03
"""Gain from which on drafting begins."""
LOSS: Final = 0.97
"""Gain at which it ends: estimates of few rows err by more than the account lets them."""
PROBE: Final = 16
"""Drafts of a step that tries whether they are accepted again, at least; half as many as there are rows."""


class Grant(NamedTuple):
    """What the decode rows of a step may verify: `drafts` in all, `able` rows up to `longest` each. Behind a
    step that `proposes` the drafter writes the next ones."""

    drafts: int = 0
    longest: int = 0
    able: int = 0
    proposes: bool = False

    @property
    def query_length(self) -> int:
        """Tokens of a row's query at most."""
        return 1 + self.longest if self.drafts else 1


NO_DRAFTS: Final = Grant()


class DraftBudget:
    """Chooses how many drafts each step verifies: as many as make the most tokens a second.

    Two things are known, the costs that the executor measured, and from results how often the draft at each
    position of a row is accepted if all before it are. A step of R rows that verifies B drafts makes R tokens
    and those of the best B that are accepted, for what R + B tokens and the drafter cost; a plain step makes
    R. Beside prompts a draft is worth the time that its token takes otherwise, and costs what it adds to the
    step. Which rows get the drafts is the device's choice.

    Estimates err and acceptance changes, so drafting has an account, in plain steps: what it costs beyond
    plain steps is paid when it is planned, what it saves is credited when the tokens come. It stops when the
    account is empty, whatever estimates say. While it is off a share of the time (`ALLOWANCE`) flows into the
    account, and each time that pays for it, one step's drafts are proposed and verified in the next. If these
    are accepted they pay for the next try at once, and soon the estimate turns drafting on. So drafting never
    loses more than that share, what was in the account when acceptance fell, and the steps then in flight.

    Attention's reads of KV are not in measured costs. A row reads its KV once, with drafts or without, so
    they are alike for both: the seconds by which steps exceed the measured ones, averaged.

    Without measured costs as many drafts are verified as there may be.

    Owner: event loop.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self.most = most = capabilities.max_drafts
        self._costs = capabilities.costs
        self._on = True
        self._proposed = False
        """The last step's drafter proposed."""
        self._account = FIRST_CREDIT
        self._prompts = 0
        """Prompt tokens of the last step."""
        self._excess = 0.0
        """Seconds of a step beyond the measured ones."""
        self._cap = MOST_CREDIT
        self._least = np.where(np.arange(most) > 0, 0.0, LEAST_WEIGHT)
        self._tried = self._least.copy()
        self._accepted = self._least * FIRST_GUESS
        self._trees = False
        """Whether drafts are nodes of trees, each with an acceptance of its own."""
        self._ready = np.ones(most)
        """Share of rows that have a draft at each position."""
        if self._costs is not None:
            tokens = capabilities.max_step_tokens
            self._verify = self._costs.verify.upto(tokens)
            self._draft = self._costs.draft.upto(capabilities.max_rows)
            self._sizes = np.array(self._costs.verify.sizes)

    def survival(self) -> NDArray[np.float64]:
        """The probability [most] that a row's draft at each position and all before it are accepted, or of a
        tree all on its path. What was never tried is as likely as what is before it."""
        found, before, survives = np.empty(self.most), FIRST_GUESS, 1.0
        counts = zip(self._tried.tolist(), self._accepted.tolist(), strict=True)
        for j, (tried, accepted) in enumerate(counts):
            if self._trees and j:
                found[j] = survives = (accepted + survives * FIRST_GUESS) / (tried + 1.0)
                continue
            before = accepted / tried if j == 0 else (accepted + before) / (tried + 1.0)
            found[j] = survives = survives * before
        return found

    def grant(self, rows: int, able: int, room: int) -> Grant:
        """What a step of `rows` rows may verify, `able` of which may have drafts, `room` in all."""
        most = min(self.most * able, room)
        if most <= 0:
            return self.without_rows() if able else NO_DRAFTS
        if self._costs is None:
            return Grant(most if self._proposed else 0, self.most, able, proposes=True)
        trial = Grant(min(most, max(self.most, PROBE, rows // 2)), self.most, able, proposes=True)
        price = self._price(trial, rows, 0)
        if self._account < (0.0 if self._proposed else price):
            return NO_DRAFTS
        drafts, gain = self._best(rows, able, most)
        if not self._switch(gain, price):
            return trial._replace(proposes=False) if self._proposed else trial._replace(drafts=0)
        if self._prompts:
            drafts, beside = self._best(rows, able, most, self._prompts, gain)
            if beside <= 1.0:
                return NO_DRAFTS
        return Grant(drafts if self._proposed else 0, self.most, able, proposes=self._account >= price)

    def _switch(self, gain: float, price: float) -> bool:
        """Whether drafting is on, now that it is expected to bring `gain`. Where it ends one try is left."""
        was, self._on = self._on, gain > (LOSS if self._on else MARGIN)
        if was and not self._on:
            self._account = min(self._account, price)
        return self._on

    def without_rows(self) -> Grant:
        """What a step has in which no row can verify a draft: where drafting is on, the next one may."""
        return Grant(longest=self.most, proposes=self.most > 0 and self._on)

    def _best(
        self, rows: int, able: int, most: int, prompts: int = 0, usual: float = 1.0
    ) -> tuple[int, float]:
        """How many drafts, at most `most`, make the most tokens a second, and how many times those of a plain
        step. Beside `prompts` prompt tokens a draft is worth its share of a step without any, which makes
        `usual` times the tokens of a plain one."""
        first = min(rows + prompts, len(self._verify) - 1 - most)
        plain = self._plain(rows)
        ready = able * np.cumsum(self._ready)
        tokens = np.cumsum(able * self._ready * self.survival())
        low, high = np.searchsorted(self._sizes, (first, first + most), side="right")
        # Padding is free: the best fill a graph, or have all drafts of a position, or are the most there are.
        tries = np.concatenate([self._sizes[low:high] - first, ready.astype(np.int64).clip(1, most), [most]])
        made = np.interp(tries, np.append(0.0, ready), np.append(0.0, tokens))
        added = (self._verify[first + tries] - self._verify[first] + self._draft[rows]) / plain
        gains = (1.0 + made / rows) / (1.0 + added)
        if prompts:
            gains = 1.0 + made / (rows * usual) - added
        best = int(gains.argmax())
        return int(tries[best]), float(gains[best])

    def _plain(self, rows: int) -> float:
        """Seconds of a step of `rows` rows without drafts."""
        return float(self._verify[rows]) + self._excess

    def _price(self, grant: Grant, rows: int, prompts: int) -> float:
        """What drafts cost beside `rows` rows and `prompts` prompt tokens, in plain steps."""
        first = min(rows + prompts, len(self._verify) - 1 - grant.drafts)
        more = float(self._verify[first + grant.drafts] - self._verify[first])
        return (more + float(self._draft[rows]) * grant.proposes) / self._plain(rows)

    def spend(self, grant: Grant, rows: int, prompts: int) -> None:
        """A step of `rows` rows and `prompts` prompt tokens was planned with `grant`."""
        self._proposed, self._prompts = grant.proposes, prompts
        if self._costs is None or not rows:
            return
        price = self._price(grant, rows, prompts)
        self._cap = max(MOST_CREDIT, STEPS_OF_CREDIT * price)
        self._account = min(self._account + ALLOWANCE, self._cap) - price

    def learn(self, grant: Grant, rows: int, prompts: int, result: StepResult) -> None:
        """The result of a step that was planned so."""
        if self._costs is None or not rows:
            return
        if result.seconds and not prompts:
            known = float(self._verify[rows + grant.drafts] + self._draft[rows] * grant.proposes)
            beyond = min(max(result.seconds - known, 0.0), MOST_EXCESS * known)
            self._excess += (beyond - self._excess) * EXCESS
        fading = np.where(self._tried > self._least, FADING, 1.0)
        self._tried *= fading
        self._accepted *= fading
        if grant.drafts and result.counts is not None and result.drafted is not None:
            paths = None if result.paths is None else result.paths[:rows]
            self._count(grant, result.counts[:rows] - 1, result.drafted[:rows], paths)

    def _count(self, grant: Grant, taken: Ints, drafted: Ints, paths: Ints | None) -> None:
        """Of each row so many of its drafts were taken; of trees those on `paths`."""
        rows, self._trees = len(taken), paths is not None
        if paths is None:
            accepted = _reaching(taken, self.most)
            tried = accepted + np.bincount(taken[taken < drafted].clip(0), minlength=self.most)[: self.most]
        else:
            tried = _reaching(drafted, self.most)
            accepted = (paths[:, None] >> np.arange(self.most) & 1).sum(0).astype(np.float64)
        kept = MEMORY / (MEMORY + tried)
        self._tried = self._tried * kept + tried
        self._accepted = self._accepted * kept + accepted
        self._account = min(self._account + float(accepted.sum()) / rows, self._cap)
        # Where all were used there may have been more.
        short = drafted.sum() < grant.drafts
        shares = _reaching(drafted, self.most) / grant.able if short else 1.0
        self._ready += (shares - self._ready) * READINESS


def _reaching(counts: Ints, most: int) -> NDArray[np.float64]:
    """How many of `counts` are at least 1 ... `most`."""
    each = np.bincount(counts.clip(0, most), minlength=most + 1)
    found: NDArray[np.float64] = np.cumsum(each[::-1])[::-1][1:].astype(np.float64)
    return found
