"""Bodies to jobs: the fields that every generating route shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from app.api.request.prompts import check_ids
from app.api.request.schema import ExtensionFields, Generation, NativeSampling, RepetitionDetection
from app.engine.adapters import DISABLED
from app.engine.job import Keep, TextOptions
from app.http.body import check_depth
from app.http.tenant import permit
from app.ids import random_hex
from app.service import SERVED, Loaded, ModelCard, Phase, Service
from app.text.repetition import MAX_LENGTH, Repetition
from core.adapters import AdapterInfo
from core.errors import NotFound, RequestError, Unavailable, field_error, unsupported
from core.request import SamplingParams
from core.request.params import MAX_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from core.types import RootKey

MAX_N = 128
MAX_CHOICES = 2048
"""Prompts times n of one request: the largest batch that lm-eval and batch clients send is 1,024.
Checked before anything is allocated."""
MAX_NAME = 256
"""Length of a request id or cache salt."""
PRIORITY_LIMIT = 2**31
RETENTION = {"in_memory": 300.0, "in-memory": 300.0, "5m": 300.0, "1h": 3600.0, "24h": 86_400.0}
"""Seconds that a prompt is kept: OpenAI's values (its clients spell the first one both ways) and
Anthropic's."""
MAX_BAD_WORDS = 128
"""Number of bad words: each may become two sequences that are looked for at every token."""
MAX_PARAMS = 2**16
"""Characters of a logit processor's parameters: decoded on the launch thread, at some 5 ns each."""


def ready(service: Service, model: str | None, lora_path: str | None = None) -> Loaded:
    """The model, for a request that wants tokens. No name means the only model there is."""
    loaded = available(service, model, lora_path)
    loaded.card.check_task("generate")
    return loaded


def available(service: Service, model: str | None, lora_path: str | None = None) -> Loaded:
    """The model, for any request, whatever the model was made for."""
    return selected(accepting(service), model, lora_path)


def accepting(service: Service) -> Loaded:
    """The model, for a request that names none. Raises `Unavailable` unless requests are taken."""
    loaded = service.loaded
    if service.health.phase is not Phase.READY:
        raise Unavailable(service.health.reason or "The server is shutting down.")
    return loaded


def current(service: Service, model: str | None, lora_path: str | None = None) -> Loaded:
    """The model, for a request that runs nothing: it is answered while the server drains too."""
    return selected(service.loaded, model, lora_path)


def selected(loaded: Loaded, model: str | None, lora_path: str | None = None) -> Loaded:
    """The model with the adapter that a request names, if any: `model` is unset, `SERVED`, one of the served
    names, an adapter, or `name:adapter`; `lora_path` is an adapter. Raises `NotFound` for another model, and
    `RequestError` for another adapter. Those that the API key may not use are treated as absent."""
    names = (*loaded.card.names, SERVED)
    adapter = None
    if model and model not in names:
        own = next((model[len(name) + 1 :] for name in names if model.startswith(f"{name}:")), model)
        adapter = _adapter(loaded, own)
        if adapter is None:
            raise _no_model(model)
    if lora_path:
        if not loaded.adapters.enabled:
            raise unsupported("lora_path", DISABLED)
        if adapter is not None and adapter.name != lora_path:
            raise field_error("lora_path", f"names another adapter than 'model': '{adapter.name}'")
        adapter = _adapter(loaded, lora_path)
        if adapter is None:
            raise field_error("lora_path", f"names no loaded adapter: '{lora_path[:200]}'", "model_not_found")
    if adapter is None:
        _check_allowed(loaded, model)
        return loaded
    card = msgspec.structs.replace(loaded.card, name=adapter.name)
    return msgspec.structs.replace(loaded, card=card, adapter=adapter)


def _adapter(loaded: Loaded, name: str) -> AdapterInfo | None:
    found = loaded.adapters.find(name)
    return found if found is not None and permit().terms.allows(found.name) else None


def _no_model(name: str) -> NotFound:
    return NotFound(f"The model '{name[:200]}' does not exist.", "model", "model_not_found")


def _check_allowed(loaded: Loaded, name: str | None) -> None:
    """Raise `NotFound` for a name of the model, or none, where the API key allows no such name."""
    allowed = served_names(loaded)
    if not allowed or (name in loaded.card.names and name not in allowed):
        raise _no_model(name or SERVED)


def served_names(loaded: Loaded) -> list[str]:
    """The model's names that the current request's API key may use."""
    return [name for name in loaded.card.names if permit().terms.allows(name)]


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
    body: Generation | NativeSampling, card: ModelCard, prefix: str = "", **extra: int | str | tuple[int, ...]
) -> SamplingParams:
    """Fields that are set, over the model's defaults. `extra` are the fields whose names differ by route.

    Ranges are checked by the engine (`core.request.params.check`), once all fields are known.
    """
    fields: dict[str, object] = {**processor_fields(body, prefix), **extra}
    for name in _PLAIN:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    if fields.get("top_k") == -1:  # how the other servers spell "the whole vocabulary"
        fields["top_k"] = 0
    if wants_states(body):
        fields.setdefault("hidden", "output")
    fields |= requested_fields(body)
    if body.logit_bias:
        fields["logit_bias"] = _bias(body.logit_bias, prefix)
    if body.stop_token_ids:
        check_count(len(body.stop_token_ids), MAX_STOP_IDS, "ids", prefix + "stop_token_ids")
        check_ids(body.stop_token_ids, card.vocab_size, prefix + "stop_token_ids")
        fields["stop_ids"] = frozenset(body.stop_token_ids)
    named = getattr(body, "logprob_token_ids", None)
    if named:
        if fields.get("logprobs", -1) == -1:
            raise field_error("logprob_token_ids", "needs 'logprobs'")
        check_count(len(named), MAX_LOGPROBS, "ids", "logprob_token_ids")
        fields["logprob_ids"] = tuple(named)
    return msgspec.structs.replace(card.sampling, **fields)


def check_count(count: int, most: int, what: str, param: str) -> None:
    """Refuse more than `most` before any is looked at: a million token ids took 0.2 s of the loop."""
    if count > most:
        raise field_error(param, f"takes at most {most} {what}, got {count}")


def check_length(text: str | None, param: str) -> None:
    """Raise `RequestError` for a name of more than `MAX_NAME` characters."""
    if text is not None and len(text) > MAX_NAME:
        raise field_error(param, f"is longer than {MAX_NAME} characters")


_REPORTED = (("entropy", "return_entropy"), ("support", "return_sampling_mask"))
"""Values reported for each token besides log-probabilities: our name and SGLang's request field."""


def requested_fields(body: ExtensionFields) -> dict[str, bool]:
    """The `_REPORTED` values that `body` requests. Raises `RequestError` where the answer has no place for
    them (SGLang)."""
    found: dict[str, bool] = {}
    for name, param in _REPORTED:
        if getattr(body, param):
            if isinstance(body, Generation) and not getattr(body, "return_meta_info", None):
                raise field_error(param, "requires 'return_meta_info' to be true: it is reported there")
            found[name] = True
    return found


def wants_states(body: ExtensionFields) -> bool:
    """`return_hidden_states`. Raises `RequestError` if they are requested in a stream of chunks."""
    wanted = body.return_hidden_states
    if not (any(wanted) if isinstance(wanted, list) else wanted):
        return False
    if isinstance(body, Generation) and body.stream:
        param = "return_hidden_states"
        raise field_error(param, "is not available with 'stream' here; /generate has both", "unsupported")
    return True


def allowed_ids(body: ExtensionFields, vocab_size: int, prefix: str = "") -> tuple[int, ...] | None:
    """`allowed_token_ids`: these and no others."""
    if (ids := body.allowed_token_ids) is None:
        return None
    param = prefix + "allowed_token_ids"
    if not ids:
        raise field_error(param, "must not be empty: no token would be left")
    if len(ids) > vocab_size:
        raise field_error(param, f"takes at most the {vocab_size} ids that there are")
    check_ids(ids, vocab_size, param)
    return tuple(ids)


def bad_words(body: ExtensionFields, prefix: str = "") -> tuple[str, ...]:
    """`bad_words`, checked before any is encoded."""
    words, param = body.bad_words or [], prefix + "bad_words"
    if len(words) > MAX_BAD_WORDS:
        raise field_error(param, f"takes at most {MAX_BAD_WORDS} texts")
    if any(not word.strip() or len(word) > MAX_NAME for word in words):
        raise field_error(param, f"takes texts of 1 to {MAX_NAME} characters")
    return tuple(words)


def stream_interval(body: Generation | NativeSampling, prefix: str = "") -> int:
    """The least number of tokens in an event of a choice, except its first and last."""
    value = body.stream_interval
    if value is not None and value < 1:
        raise field_error(prefix + "stream_interval", "must be at least 1")
    return value or 1


_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs_mode",
)


def processor_fields(body: ExtensionFields, prefix: str = "") -> dict[str, str]:
    """The logit processor that a body names, and its parameters. The engine checks the name."""
    if not body.custom_logit_processor:
        return {}
    param = prefix + "custom_params"
    check_depth(body.custom_params, param)
    params = msgspec.json.encode(body.custom_params or {}).decode()
    if len(params) > MAX_PARAMS:
        raise field_error(param, f"is longer than {MAX_PARAMS} characters of JSON")
    return {"processor": body.custom_logit_processor, "processor_params": params}


def _bias(bias: Mapping[str, float], prefix: str) -> tuple[tuple[int, float], ...]:
    param = prefix + "logit_bias"
    if len(bias) > MAX_BIAS:  # before they are read: 2 million keys took 1.6 s of the loop
        raise field_error(param, f"takes at most {MAX_BIAS} entries")
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        if len(key) > 10 or not key.isascii() or not key.isdigit():
            raise field_error(param, f"has key '{key[:20]}', which is not a token id")
        pairs[int(key)] = value
    return tuple(pairs.items())


def text_options(body: Generation | NativeSampling) -> TextOptions:
    """Stop strings and how text is made of tokens. The engine checks the stop strings."""
    return TextOptions(
        stop=_listed(body.stop),
        stop_regex=_listed(body.stop_regex),
        include_stop=bool(body.no_stop_trim) or bool(getattr(body, "include_stop_str_in_output", False)),
        skip_special_tokens=body.skip_special_tokens is not False,
        repetition=_repetition(getattr(body, "repetition_detection", None)),
    )


def _repetition(sent: RepetitionDetection | None) -> Repetition | None:
    if sent is None:
        return None
    longest, count = sent.max_pattern_size or 0, sent.min_count or 0
    shortest = sent.min_pattern_size or 1
    if longest <= 0 and count <= 0:
        return None
    param = "repetition_detection"
    if not 1 <= shortest <= longest <= MAX_LENGTH:
        raise RequestError(
            f"'{param}' needs sizes 1 <= min_pattern_size <= max_pattern_size <= {MAX_LENGTH}.",
            f"{param}.max_pattern_size",
        )
    if count < 2:
        raise field_error(f"{param}.min_count", "must be at least 2")
    return Repetition(shortest, longest, count)


def _listed(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def root_key(loaded: Loaded, cache_salt: str | None, extra_key: str | None) -> RootKey:
    """The adapter that the request has selected, and the root of the prefix cache: one for each adapter and
    tenant, or the tenants that share one, and within it one for each salt."""
    check_length(cache_salt, "cache_salt")
    check_length(extra_key, "extra_key")
    # With the length in front no salt and key can spell another pair.
    salt = f"{len(cache_salt or '')}:{cache_salt or ''}{extra_key or ''}" if cache_salt or extra_key else ""
    adapter = "" if loaded.adapter is None else loaded.adapter.id
    return RootKey(adapter=adapter, tenant=permit().terms.namespace, salt=salt)


def keep(key: str | None, retention: str | None, root: RootKey) -> Keep | None:
    """Prompt caching as `prompt_cache_key` and `prompt_cache_retention` request it. The prompt counts
    against the share of a tenant: the API key's, else the salt's, else that of `prompt_cache_key`."""
    if retention is not None and retention not in RETENTION:
        raise field_error("prompt_cache_retention", f"must be one of {', '.join(RETENTION)}")
    if not key and retention is None:
        return None
    check_length(key, "prompt_cache_key")
    seconds = RETENTION[retention or "in_memory"]
    return Keep(owner=root.tenant or root.salt or key or "", marks=((None, seconds),))


def priority(value: int | None) -> int:
    """The priority of a request, at most what the API key allows; a larger one runs sooner."""
    highest = permit().terms.priority
    if value is None:
        return highest or 0
    if not -PRIORITY_LIMIT <= value < PRIORITY_LIMIT:
        raise field_error("priority", "must fit 32 bits")
    if highest is not None and value > highest:
        raise field_error("priority", f"must be at most {highest} with this API key")
    return value


def job_id(sent: str | None, made: str, param: str = "rid") -> str:
    """The client's id for a request, or ours."""
    check_length(sent, param)
    return sent or made


class Identified(Protocol):
    """The fields of a body that name its request."""

    rid: str | None
    request_id: str | None


def request_id(body: Identified, prefix: str) -> str:
    """The client's own id, or `prefix` and random digits."""
    param = "rid" if body.rid else "request_id"
    return job_id(body.rid or body.request_id, f"{prefix}-{random_hex(32)}", param)


class Truncation(Protocol):
    """The fields of a body that truncate its prompt."""

    truncate_prompt_tokens: int | None
    truncation_side: str | None


def truncation(body: Truncation, context_length: int) -> int | None:
    """How many of the prompt's tokens to keep; -1 means what the model can hold."""
    if body.truncation_side not in (None, "left", "right"):
        raise field_error("truncation_side", "must be 'left' or 'right'")
    value = body.truncate_prompt_tokens
    if value is None:
        return None
    if value == -1:
        return context_length
    if value < 1:
        raise field_error("truncate_prompt_tokens", "must be at least 1, or -1")
    return value
