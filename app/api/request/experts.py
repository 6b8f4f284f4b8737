"""`return_routed_experts`, after SGLang: which experts each token was routed to, layer by layer.

    base64 of int32 [tokens, layers, experts per token]

`tokens` are those of prompt and output from `routed_experts_start_len` on, but the last, which the model
never read; `layers` are all there are, with zeros in those without experts; the experts of a token are in
the order of their weights. `/generate` returns them in `meta_info.routed_experts`, chat and completions in
`sglext.routed_experts` of the whole answer (of its first choice), or with `return_meta_info` in each
choice's; a stream sends them once, at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.api.request.schema import ExtensionFields
from app.engine.job import Job, Run
from app.service import Loaded, ModelCard
from core.errors import RequestError, field_error

MAX_CHOSEN = 2**24
"""Expert ids in an answer: 85 MiB of base64, which are 43,000 tokens of 48 layers with 8 experts each."""


def experts_start(body: ExtensionFields, card: ModelCard, prefix: str = "") -> int:
    """First position whose experts are returned, -1 if none are requested. The engine checks that the prompt
    is as long. Raises `RequestError` if the model has no experts."""
    if not body.return_routed_experts:
        return -1
    if not any(card.routed):
        param = prefix + "return_routed_experts"
        raise field_error(
            param,
            "needs a model with routed experts, which this one does not have: leave it out",
            "unsupported",
        )
    start = body.routed_experts_start_len or 0
    if start < 0:
        param = prefix + "routed_experts_start_len"
        raise field_error(param, "must not be negative")
    return start


def check_experts(runs: Sequence[Run], jobs: Sequence[Job], loaded: Loaded) -> None:
    """Raise `RequestError` for more than an answer should hold, `Overloaded` where all answers together hold
    too much. Called once the jobs run: only then it is known how long prompts are."""
    start, (layers, each) = jobs[0].sampling.experts_from, loaded.card.routed
    if start < 0:
        return
    tokens = sum(run.choices * (run.params.max_tokens + len(run.prompt) - start) for run in runs)
    if tokens * layers * each > MAX_CHOSEN:
        raise RequestError(
            f"The experts of {tokens} tokens are {tokens * layers * each} numbers; an answer holds at most "
            f"{MAX_CHOSEN}, which are {MAX_CHOSEN // (layers * each)} tokens of this model.",
            "return_routed_experts",
        )
    loaded.numbers.hold(tokens * layers * each)


def experts(run: Run, choice: int, tokens: int) -> bytes | None:
    """The experts of a complete choice with this many output tokens; None if not requested."""
    params = run.params
    if params.experts_from < 0:
        return None
    given = run.experts(choice)
    if not given:
        return b""
    stop = len(run.prompt) + max(tokens - 1, 0) - params.read_from
    rows = np.concatenate(given)[params.experts_from - params.read_from : stop]
    return rows.astype("<i4", copy=False).tobytes()
