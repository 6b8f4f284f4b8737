"""Speculation: how many drafts a step verifies, and whether its drafter proposes any."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

from core.executor import Capabilities
from core.plan import StepResult
from core.schedule.acceptance import Acceptance, Verified
from core.schedule.step_times import StepTimes

ALLOWANCE: Final = 0.002
"""Share of the time that drafting may lose, to learn whether it pays."""
FIRST_CREDIT: Final = 2.0
"""Plain steps that drafting may lose when it begins."""
MOST_CREDIT: Final = 4.0
"""Minimum of the account's cap, in plain steps: gains up to the cap are kept against later losses."""
STEPS_OF_CREDIT: Final = 8.0
"""Minimum of the same cap in drafting steps: results come late, and the steps in flight have been paid for by
then."""
MARGIN: Final = 1.03
"""Gain from which on drafting begins."""
LOSS: Final = 0.97
"""Gain at which drafting ends: estimates of few rows err by more than the account lets them."""
PROBE: Final = 16
"""Minimum number of drafts in a step that tries whether they are accepted again; half as many as there are
rows."""
REVIEW: Final = 8
"""Steps between two reviews of what drafts gain. A review takes the loop 0.1 ms, a small model's step 0.5."""
REST: Final = 64
"""Steps between two reviews while no drafts are verified, and so little changes."""

CHUNK: Final = 256
"""When drafts beside prompts are chosen, prompt tokens are rounded up to a multiple of this, so that one
choice serves many steps until the next review."""


class Grant(NamedTuple):
    """Drafts that the decode rows of a step may verify: `drafts` in total, at most `longest` for each of the
    `able` rows. If it `proposes`, the drafter writes the next drafts after the step."""

    drafts: int = 0
    longest: int = 0
    able: int = 0
    proposes: bool = False

    @property
    def query_length(self) -> int:
        """Maximum tokens of a row's query."""
        return 1 + self.longest if self.drafts else 1


NO_DRAFTS: Final = Grant()


class Costs(NamedTuple):
    """`StepCosts` by their number of tokens (`verify`) and rows (`draft`), in seconds, and the sizes that
    were measured, to which others are padded. Lists: each step looks some up, which takes arrays four times
    as long."""

    verify: list[float]
    draft: list[float]
    sizes: Sequence[int]


NOT_MEASURED: Final = Costs([], [], ())


def costs_of(capabilities: Capabilities) -> Costs:
    """Costs of all sizes of steps that an executor can run."""
    if (measured := capabilities.costs) is None:
        return NOT_MEASURED
    verify: list[float] = measured.verify.upto(capabilities.max_step_tokens).tolist()
    draft: list[float] = measured.draft.upto(capabilities.max_rows).tolist()
    return Costs(verify, draft, measured.verify.sizes)


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

    What steps take beyond measured costs, such as attention's reads of KV or the host, is averaged for those
    with drafts and for those without (`StepTimes`): the difference is part of what drafts cost.

    Without measured costs as many drafts are verified as there may be.

    Owner: event loop.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self.most = most = capabilities.max_drafts
        self._costs = costs_of(capabilities)
        self._on = True
        self._proposed = False
        """The last step's drafter proposed."""
        self._account = FIRST_CREDIT
        self._prompts = 0
        """Prompt tokens of the last step."""
        self._times = StepTimes()
        self._cap = MOST_CREDIT
        self._trial = 0.0
        """Price of the trial step that was considered last."""
        self.acceptance = Acceptance(most)
        self._verified: list[Verified] = []
        self._steps = 0
        """Steps since the last review."""
        self._choices: dict[tuple[int, ...], tuple[int, float]] = {}
        """Results of `_best` since the last review, by its arguments."""
        self._trials: dict[tuple[int, int, int], tuple[Grant, float]] = {}
        """Results of `_trial_of` since the last review, by its arguments."""

    def grant(self, rows: int, able: int, room: int) -> Grant:
        """Drafts of a step of `rows` rows: `able` of them may have some, at most `room` in total."""
        most = min(self.most * able, room)
        if most <= 0:
            return self.without_rows() if able else NO_DRAFTS
        if self._costs is NOT_MEASURED:
            return Grant(most if self._proposed else 0, self.most, able, proposes=True)
        trial, price = self._trial_of(rows, able, most)
        self._trial = price
        if not self._affords(price):
            return NO_DRAFTS
        drafts, gain = self._choose(rows, able, most)
        if not self._switch(gain, price):
            return trial._replace(proposes=False) if self._proposed else trial._replace(drafts=0)
        if self._prompts:
            prompts = -(-self._prompts // CHUNK) * CHUNK
            drafts, beside = self._choose(rows, able, most, prompts, gain)
            if beside <= 1.0:
                return NO_DRAFTS
        return Grant(drafts if self._proposed else 0, self.most, able, proposes=self._account >= price)

    def _trial_of(self, rows: int, able: int, most: int) -> tuple[Grant, float]:
        """The grant of a step that tries drafts, and its price as of the last review."""
        key = (rows, able, most)
        if (found := self._trials.get(key)) is None:
            trial = Grant(min(most, max(self.most, PROBE, rows // 2)), self.most, able, proposes=True)
            found = self._trials[key] = trial, self._price(trial, rows, 0)
        return found

    def _affords(self, price: float) -> bool:
        """Whether a step may have drafts: those that were proposed are paid for."""
        return not self._times.due and self._account >= (0.0 if self._proposed else price)

    def _switch(self, gain: float, price: float) -> bool:
        """Whether drafting is on, now that it is expected to gain `gain`. When it ends, the account keeps at
        most the price of one try."""
        was, self._on = self._on, gain > (LOSS if self._on else MARGIN)
        if was and not self._on:
            self._account = min(self._account, price)
        return self._on

    def without_rows(self) -> Grant:
        """The grant of a step in which no row can verify drafts. It may propose some for the next step."""
        return Grant(longest=self.most, proposes=self.most > 0 and self._on)

    def _choose(
        self, rows: int, able: int, most: int, prompts: int = 0, usual: float = 1.0
    ) -> tuple[int, float]:
        """`_best`, as of the last review."""
        key = (rows, able, most, prompts)
        if (found := self._choices.get(key)) is None:
            found = self._choices[key] = self._best(rows, able, most, prompts, usual)
        return found

    def _best(
        self, rows: int, able: int, most: int, prompts: int = 0, usual: float = 1.0
    ) -> tuple[int, float]:
        """The number of drafts, at most `most`, that make the most tokens a second, and how many times those
        of a plain step. Beside `prompts` prompt tokens a draft is worth its share of a step without any,
        which makes `usual` times the tokens of a plain one."""
        verify, sizes = self._costs.verify, self._costs.sizes
        first = min(rows + prompts, len(verify) - 1 - most)
        plain, fixed = self._plain(rows), self._costs.draft[rows] + self._times.more - verify[first]
        ready, accepted = self.acceptance.expected(able)
        # Padding is free: the best fill a graph, or have all drafts of a position, or are the most there are.
        tries = {size - first for size in sizes[bisect(sizes, first) : bisect(sizes, first + most)]}
        tries |= {min(max(int(count), 1), most) for count in ready[1:]} | {most}
        best, most_gained, j = 0, 0.0, 0
        for drafts in sorted(tries):
            while j < self.most and ready[j + 1] < drafts:
                j += 1
            made = accepted[j]
            if j < self.most:
                made += (accepted[j + 1] - made) * (drafts - ready[j]) / (ready[j + 1] - ready[j])
            added = (verify[first + drafts] + fixed) / plain
            gain = 1.0 + made / (rows * usual) - added if prompts else (1.0 + made / rows) / (1.0 + added)
            if gain > most_gained:
                best, most_gained = drafts, gain
        return best, most_gained

    def _plain(self, rows: int) -> float:
        """Seconds of a step of `rows` rows without drafts."""
        return self._costs.verify[rows] + self._times.plain

    def _price(self, grant: Grant, rows: int, prompts: int) -> float:
        """Cost of drafts beside `rows` rows and `prompts` prompt tokens, in plain steps."""
        first = min(rows + prompts, len(self._costs.verify) - 1 - grant.drafts)
        more = (
            self._costs.verify[first + grant.drafts]
            - self._costs.verify[first]
            + self._costs.draft[rows] * grant.proposes
        )
        return max(more + self._times.more * bool(grant.drafts), 0.0) / self._plain(rows)

    def spend(self, grant: Grant, rows: int, prompts: int) -> None:
        """A step of `rows` rows and `prompts` prompt tokens was planned with `grant`."""
        self._proposed, self._prompts = grant.proposes, prompts
        if self._costs is NOT_MEASURED or not rows:
            return
        self._times.planned(grant.drafts > 0)
        price = self._price(grant, rows, prompts) if grant.drafts or grant.proposes else 0.0
        # The cap must cover the price of a trial step, or drafting could never start again.
        self._cap = max(MOST_CREDIT, STEPS_OF_CREDIT * price, self._trial)
        self._account = min(self._account + ALLOWANCE, self._cap) - price

    def learn(self, grant: Grant, rows: int, prompts: int, result: StepResult, busy_at: float = 0.0) -> None:
        """The result of a step that was planned so; it came at `busy_at`, while the next step was in flight.
        0: none was."""
        period = self._times.period(busy_at)
        if self._costs is NOT_MEASURED or not rows:
            return
        if prompts:
            self._times.interrupted()
        elif result.seconds:
            known = self._costs.verify[rows + grant.drafts] + self._costs.draft[rows] * grant.proposes
            self._times.learn(grant.drafts > 0, rows, known, period, result.seconds)
        if grant.drafts and result.counts is not None and result.drafted is not None:
            taken = result.counts[:rows] - 1
            paths = None if result.paths is None else result.paths[:rows]
            self._verified.append(Verified(grant.drafts, grant.able, taken, result.drafted[:rows], paths))
            self._account = min(self._account + float(taken.sum()) / rows, self._cap)
        self._steps += 1
        # What a try found counts at once.
        if self._steps >= ((REVIEW if self._on else 1) if self._verified else REST):
            self._review()

    def _review(self) -> None:
        """Learn from the steps since the last review."""
        self.acceptance.fade(self._steps)
        if self._verified:
            self.acceptance.count(self._verified)
        self._steps, self._verified = 0, []
        self._choices.clear()
        self._trials.clear()
