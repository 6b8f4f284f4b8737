"""Sampling parameters: validated once at the edge, frozen from then on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import msgspec

from core.errors import RequestError
from core.types import LogprobsMode

MAX_STOP_IDS = 256
MAX_BIAS = 1024
"""OpenAI takes 300 entries; vLLM and SGLang more. A bound keeps the device table finite."""
MAX_LOGPROBS = 128
"""OpenAI takes 20, lm-eval asks for up to 100."""
MAX_SUPPORT = 4096
"""Tokens of a sampling mask: SGLang's default bound."""
SEED_LIMIT = 2**63

Hidden = Literal["none", "first", "last", "sum", "output", "all"]
"""Which hidden states (after the last norm) are returned: the prompt's first token's, its last one's, the sum
over the prompt, those that output tokens were sampled from (`output`: the prompt's last one's and every
output token's that is computed), or every token's that is computed. Where the checkpoint has a head for
classes, `first` and `last` are what it says of that token."""

OF_CACHED: frozenset[Hidden] = frozenset({"none", "last", "output"})
"""Values of `Hidden` for which all but the last token of a prompt may come from the prefix cache."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling, in token ids.

    Sampling is a pure function of the logits, these values, the seed and the token's position.
    """

    max_tokens: int = 16
    """Tokens to generate; 0 runs the prompt only."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are masked before this many, unless a grammar allows nothing else."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """End the request; the model's own end-of-sequence ids are among them unless ignored."""
    seed: int = 0
    """Non-negative, below 2**63. The edge draws one for requests that name none."""
    logprobs: int = -1
    """-1: none; 0: the chosen token's; k: also the k most likely."""
    logprob_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported too, after the most likely ones."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    prompt_logprobs: int = -1
    """Like `logprobs`, for prompt tokens from `prompt_logprobs_start` on."""
    prompt_logprobs_start: int = 0
    prompt_logprob_ids: tuple[int, ...] = ()
    """Like `logprob_ids`, at every reported prompt position."""
    hidden: Hidden = "none"
    entropy: bool = False
    """Report the entropy of each token's distribution, as the model made it, before logits are changed."""
    support: bool = False
    """Report which tokens were left to choose from. Bounded: greedy, or with top_k."""
    experts_from: int = -1
    """First position for whose token the chosen experts are reported; -1: for none."""
    pair: int = 0
    """Position where the second text of a pair begins, for encoders; 0: there is one text."""
    processor: str = ""
    """Name of a logit processor that the operator registered; empty: none."""
    processor_params: str = ""
    """The arguments of the processor: a JSON object as text, so that this stays immutable; empty: none."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def biases(self) -> dict[int, float]:
        """What is added to the logits, by id; the bias of an id that is named twice is the sum."""
        found: dict[int, float] = {}
        for token, bias in self.logit_bias:
            found[token] = found.get(token, 0.0) + bias
        return found

    @property
    def held_stops(self) -> frozenset[int]:
        """Stop ids that min_tokens holds back."""
        return self.stop_ids if self.min_tokens > 0 else frozenset()

    @property
    def wants_logprobs(self) -> bool:
        """Every sampled token is reported with a `RowLogprobs`."""
        return self.logprobs >= 0 or self.entropy or self.support

    @property
    def read_from(self) -> int:
        """First position that has to be computed because its hidden state or experts are reported."""
        return max(self.experts_from, 0) if self.hidden in OF_CACHED else 0

    @property
    def penalised(self) -> bool:
        """Needs a row of token counts on the device."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 1e4),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),  # a smaller one is zero or denormal in float32
    ("top_k", 0, 2**31 - 1),
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("seed", 0, SEED_LIMIT - 1),
    ("logprobs", -1, MAX_LOGPROBS),
    ("prompt_logprobs", -1, MAX_LOGPROBS),
    ("prompt_logprobs_start", 0, 2**31 - 1),
)


def check(params: SamplingParams, vocab_size: int, processors: Collection[str] = ()) -> None:
    """Raise `RequestError` naming the first field that cannot be honoured. `processors` are the names of the
    registered logit processors."""
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if not low <= value <= high:  # nor NaN
            raise RequestError(f"{name} must be between {low:g} and {high:g}, got {value}.", name)
    if params.top_p == 0.0:
        raise RequestError("top_p must be greater than 0; use temperature 0 for greedy.", "top_p")
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens}).",
            "min_tokens",
        )
    _check_support(params)
    _check_bias(params.logit_bias, vocab_size)
    if len(params.stop_ids) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids takes at most {MAX_STOP_IDS} ids.", "stop_token_ids")
    _check_ids(params.stop_ids, vocab_size, "stop_token_ids")
    for ids in (params.logprob_ids, params.prompt_logprob_ids):
        if len(ids) > MAX_LOGPROBS:
            raise RequestError(f"logprob_token_ids takes at most {MAX_LOGPROBS} ids.", "logprob_token_ids")
        _check_ids(ids, vocab_size, "logprob_token_ids")
    if params.processor and params.processor not in processors:
        # What was sent is not repeated: other servers take code here, which can be long.
        raise RequestError(
            "custom_logit_processor must be the name of a processor registered at the server "
            f"({', '.join(sorted(processors)) or 'there is none: --logit-processor'}); code from a "
            "request is never run.",
            "custom_logit_processor",
            "unsupported",
        )


def check_starts(params: SamplingParams, prompt_tokens: int) -> None:
    """Raise `RequestError` if prompt positions are requested that lie behind the prompt's end."""
    if params.prompt_logprobs >= 0 and params.prompt_logprobs_start >= prompt_tokens:
        raise RequestError(
            f"logprob_start_len must be below the prompt's {prompt_tokens} tokens, got "
            f"{params.prompt_logprobs_start}; -1 asks for none of the prompt's.",
            "prompt_logprobs_start",
        )
    if params.experts_from > prompt_tokens:
        raise RequestError(
            f"routed_experts_start_len must be between 0 and the prompt's {prompt_tokens} tokens, "
            f"got {params.experts_from}.",
            "routed_experts_start_len",
        )


def _check_support(params: SamplingParams) -> None:
    if params.support and not params.greedy and not 0 < params.top_k <= MAX_SUPPORT:
        raise RequestError(
            "return_sampling_mask requires top_k=1 or temperature 0 for greedy sampling, or "
            f"1 < top_k <= {MAX_SUPPORT}: without top_k a mask could be the whole vocabulary.",
            "return_sampling_mask",
        )


def _check_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    if len(bias) > MAX_BIAS:
        raise RequestError(f"logit_bias takes at most {MAX_BIAS} entries.", "logit_bias")
    _check_ids((token for token, _ in bias), vocab_size, "logit_bias")
    if not all(-100.0 <= value <= 100.0 for _, value in bias):
        raise RequestError("logit_bias values must be between -100 and 100.", "logit_bias")


def _check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param} names token {token}; this model has ids 0 to {vocab_size - 1}.", param
            )
