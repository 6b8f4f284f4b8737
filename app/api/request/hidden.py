"""`return_hidden_states`, after SGLang: the output of the model's last norm for each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.engine.job import Job, Run
from app.service import Loaded
from core.errors import EngineFailed, RequestError
from core.types import Floats


def check_states(runs: Sequence[Run], jobs: Sequence[Job], loaded: Loaded) -> None:
    """Raise `RequestError` where prompts and what may follow are more than an answer should hold. Called once
    the jobs run: only then it is known how long prompts are."""
    kind = jobs[0].sampling.hidden
    if kind != "none":
        read = [len(run.prompt) if kind == "all" else 1 for run in runs]
        tokens = sum(run.choices * (run.params.max_tokens + n) for run, n in zip(runs, read, strict=True))
        check_numbers(tokens, loaded, "return_hidden_states")


def states(run: Run, choice: int, tokens: int) -> list[Floats]:
    """SGLang's list: the prompt's states as one list of lists, then one list for each of the `tokens` but
    the last, which the model never read. Without those of tokens after a stop string; fewer if it ended
    before."""
    if not run.hidden(choice):
        return [np.zeros((0, 0), np.float32)]
    rows = joined(run, choice)[: len(run.prompt) + max(tokens - 1, 0)]
    return [rows[: len(run.prompt)], *rows[len(run.prompt) :]]


def last_state(run: Run, choice: int, tokens: int) -> list[float] | None:
    """The state that made the last of a complete choice's `tokens`, [hidden]; None where it was ended
    before there was any."""
    if not run.hidden(choice):
        return None
    at = len(run.prompt) - 1 + max(tokens - 1, 0) - run.hidden_from(choice)
    state: list[float] = joined(run, choice)[: at + 1][-1].tolist()
    return state


MAX_NUMBERS = 2**22
"""Numbers in an answer with a vector for every token: 80 MB of JSON."""


def joined(run: Run, choice: int) -> Floats:
    """All hidden states that steps gave of one choice, float32 [n, width]."""
    given = run.hidden(choice)
    if not given:
        raise EngineFailed("The device gave no hidden states.")
    return np.concatenate(given)


def check_numbers(tokens: int, loaded: Loaded, param: str) -> None:
    """Raise `RequestError` for hidden states that no answer should hold, `Overloaded` where all answers
    together hold too many; these count until the current task ends."""
    width = max(loaded.card.hidden_size, 1)
    if tokens * width > MAX_NUMBERS:
        raise RequestError(
            f"The hidden states of {tokens} tokens are {tokens * width} numbers; an answer holds at most "
            f"{MAX_NUMBERS}, which are {MAX_NUMBERS // width} tokens of this model.",
            param,
        )
    loaded.numbers.hold(tokens * width)
