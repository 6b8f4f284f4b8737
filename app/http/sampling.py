"""Bodies to jobs: the fields that every generating route shares."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from app.health import Phase
from app.http.body import check_depth
from app.http.prompts import check_ids
from app.http.schema import Generation, NativeSampling, Refused
from app.job import TextOptions
from app.service import Loaded, Service
from core.errors import NotFound, RequestError, Unavailable
from core.request import SamplingParams
from core.request.params import MAX_BIAS
from core.types import RootKey

MAX_N = 128
MAX_CHOICES = 2048
"""Prompts times n of one request: the largest batch that lm-eval and batch clients send is 1,024.
Checked before anything is allocated."""
MAX_NAME = 256
"""Length of a request id or cache salt."""
PRIORITY_LIMIT = 2**31
MAX_PARAMS = 2**16
"""Of a logit processor: decoded on the launch thread, at some 5 ns a character."""


def ready(service: Service, model: str | None) -> Loaded:
    """The model, for a request that wants tokens. No name means the only model there is."""
    loaded = service.loaded
    if service.health.phase is not Phase.READY:
        raise Unavailable(service.health.reason or "The server is shutting down.")
    check_model(loaded, model)
    return loaded


def check_model(loaded: Loaded, model: str | None) -> None:
    """Raise `NotFound` unless `model` is unset or the one served."""
    if model and model != loaded.card.name:
        raise NotFound(f"The model '{model[:200]}' does not exist.", "model", "model_not_found")


def choices(n: int | None, prompts: int = 1, prefix: str = "") -> int:
    """`n`, checked before anything is made n times."""
    n = 1 if n is None else n
    if not 1 <= n <= MAX_N:
        raise RequestError(f"'n' must be between 1 and {MAX_N}, got {n}.", prefix + "n")
    if n * prompts > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompts with n={n} ask for more than {MAX_CHOICES} completions.",
            prefix + ("n" if n > 1 else "prompt"),
        )
    return n


def sampling_params(
    body: Generation | NativeSampling, vocab_size: int, prefix: str = "", **extra: int | str
) -> SamplingParams:
    """Fields that are set, over the defaults. `extra` are the fields whose names differ by route.

    Ranges are the engine's to check (`core.request.params.check`), once everything is known.
    """
    fields: dict[str, object] = {**processor_fields(body, prefix), **extra}
    for name in _PLAIN:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    if fields.get("top_k") == -1:  # how the other servers spell "the whole vocabulary"
        fields["top_k"] = 0
    if body.logit_bias:
        fields["logit_bias"] = _bias(body.logit_bias, prefix)
    if body.stop_token_ids:
        check_ids(body.stop_token_ids, vocab_size, prefix + "stop_token_ids")
        fields["stop_ids"] = frozenset(body.stop_token_ids)
    return msgspec.structs.replace(SamplingParams(), **fields)


_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def processor_fields(body: Refused, prefix: str = "") -> dict[str, str]:
    """The logit processor that a body names, and what it is called with. Whether there is one of that
    name is the engine's to say."""
    if not body.custom_logit_processor:
        return {}
    param = prefix + "custom_params"
    check_depth(body.custom_params, param)
    params = msgspec.json.encode(body.custom_params or {}).decode()
    if len(params) > MAX_PARAMS:
        raise RequestError(f"'{param}' is longer than {MAX_PARAMS} characters of JSON.", param)
    return {"processor": body.custom_logit_processor, "processor_params": params}


def _bias(bias: Mapping[str, float], prefix: str) -> tuple[tuple[int, float], ...]:
    param = prefix + "logit_bias"
    if len(bias) > MAX_BIAS:  # before they are read: 2 million keys took 1.6 s of the loop
        raise RequestError(f"'{param}' takes at most {MAX_BIAS} entries.", param)
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        if len(key) > 10 or not key.isascii() or not key.isdigit():
            raise RequestError(f"'{param}' has key '{key[:20]}', which is not a token id.", param)
        pairs[int(key)] = value
    return tuple(pairs.items())


def text_options(body: Generation | NativeSampling) -> TextOptions:
    """Stops and how to print. Whether the stops can be matched is the engine's to check."""
    return TextOptions(
        stop=_listed(body.stop),
        stop_regex=_listed(body.stop_regex),
        include_stop=bool(body.no_stop_trim) or bool(getattr(body, "include_stop_str_in_output", False)),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _listed(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def root_key(cache_salt: str | None, extra_key: str | None) -> RootKey:
    """What keeps this tenant's prefixes apart."""
    for param, value in (("cache_salt", cache_salt), ("extra_key", extra_key)):
        if value is not None and len(value) > MAX_NAME:
            raise RequestError(f"'{param}' is longer than {MAX_NAME} characters.", param)
    # A pair of strings without a separator would let one salt spell another's pair.
    salt = f"{len(cache_salt or '')}:{cache_salt or ''}{extra_key or ''}" if cache_salt or extra_key else ""
    return RootKey(salt=salt)


def priority(value: int | None) -> int:
    """Larger is sooner."""
    if value is None:
        return 0
    if not -PRIORITY_LIMIT <= value < PRIORITY_LIMIT:
        raise RequestError("'priority' must fit 32 bits.", "priority")
    return value


def job_id(sent: str | None, made: str, param: str = "rid") -> str:
    """The client's id for a request, or ours."""
    if not sent:
        return made
    if len(sent) > MAX_NAME:
        raise RequestError(f"'{param}' is longer than {MAX_NAME} characters.", param)
    return sent


def truncation(body: Generation, context_length: int) -> int | None:
    """How many of the prompt's last tokens to keep; -1 means what the model can hold."""
    value = body.truncate_prompt_tokens
    if value is None:
        return None
    if body.truncation_side not in (None, "left"):
        raise RequestError("'truncation_side' must be 'left'.", "truncation_side")
    if value == -1:
        return context_length
    if value < 1:
        raise RequestError("'truncate_prompt_tokens' must be at least 1, or -1.", "truncate_prompt_tokens")
    return value
