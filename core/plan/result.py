"""The result of one step. Immutable."""

from __future__ import annotations

import msgspec

from core.types import Floats, Ints, PromptLogprobs


class Support(msgspec.Struct, frozen=True, gc=False):
    """The candidates of one token: the tokens `ids` [m], ascending, whose probability temperature, top_k,
    top_p and min_p left above 0; `chosen` is the log-probability of the token among them."""

    ids: Ints
    chosen: float


class RowLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of one sampled token, of the distribution that its `LogprobsMode` says.

    `top_ids`, `top_values` [k] are the k most likely, best first; empty for k = 0. After them come
    those that the request named. `entropy` is of the model's own distribution, in nats, and `support` the
    candidates left of it: a request may want these without log-probabilities.
    """

    chosen: float
    top_ids: Ints
    top_values: Floats
    entropy: float | None = None
    support: Support | None = None


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """Tokens of the rows that sampled, int32 [n], in plan order; -1 where logits were not finite, which is
    the last of its row. `counts` int32 [rows that sampled] says how many are each row's: 1 to `query_length`,
    0 for a row that is at its limit; None: one each. `drafted` int32 [rows that sampled] says how many drafts
    of each were verified, of which `counts` - 1 were accepted; None: no row may have drafts. `paths` int32
    [rows that sampled] says which, where drafts are trees: bit j - 1 is 1 if draft j was. `logprobs` maps
    an index in `tokens` to the token's log-probabilities, for the rows that report them; `failed` maps the
    index of the -1 of a row that cannot go on to the reason, for its client. `prompt_logprobs` maps a slot to
    those of its chunk. `hidden` maps a slot to the hidden states that its chunk or row returns, float32
    [n, width]: one row for a sum, else one for each token that was computed and accepted. `experts` does the
    same for the experts that a router chose, int32 [n, layers, experts per token], best first, zeros in
    layers without. `seconds` is the time the device spent on the step."""

    step: int
    tokens: Ints
    logprobs: dict[int, RowLogprobs] = {}
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    seconds: float = 0.0
    failed: dict[int, str] = {}
    hidden: dict[int, Floats] = {}
    experts: dict[int, Ints] = {}
    counts: Ints | None = None
    drafted: Ints | None = None
    paths: Ints | None = None


class StepFailure(msgspec.Struct, frozen=True, gc=False):
    """The executor is lost: this step raised and none follows. `reason` is for logs and clients."""

    step: int
    reason: str
