"""From inputs to vectors: shared by embeddings, rerank, classify and scores."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from app.api.request.hidden import joined
from app.api.request.prompts import Prompt, check_prompt, split_prompts
from app.api.request.sampling import MAX_CHOICES, check_count, priority, request_id, root_key, truncation
from app.api.request.schema import Int
from app.engine.job import Job, Run
from app.http.delivery import Collector, running
from app.http.tenant import tenant
from app.service import Loaded
from core.errors import ContextExceeded, EngineFailed, field_error
from core.models import Pooling, PoolingSpec
from core.request import SamplingParams
from core.request.params import Hidden
from core.types import Floats, Ints

WINDOW = 128
"""Inputs in the engine at once: enough to fill steps. Without a bound, 2,048 of a long context's length would
hold 1 GB of ids."""

SLICE = 2**16
"""Numbers scaled in one turn of the loop: about 0.2 ms."""

_HIDDEN: Mapping[Pooling, Hidden] = {"first": "first", "last": "last", "mean": "sum"}


class PoolBody(msgspec.Struct, kw_only=True):
    """Fields of all pooling routes."""

    model: str | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    rid: str | None = None
    request_id: str | None = None
    user: str | None = None


class Input(msgspec.Struct, frozen=True):
    """One text, or pair of texts, as tokens."""

    ids: Ints
    param: str
    """The field that errors name."""
    second: int = 0
    """Index of the first token of a pair's second segment; 0: there is one segment."""


class Counts(msgspec.Struct, kw_only=True):
    """Tokens of an answer's prompts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0

    def usage(self) -> dict[str, object]:
        """`usage` in the answers of all pooling routes."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Pooled(Counts):
    """The vectors of the inputs, in order: float32 [width] each, or [n, width] with one for every token."""

    id: str
    vectors: list[Floats]


# -- inputs ----------------------------------------------------------------------------------------


def cut(ids: Ints, most: int, special: frozenset[int], side: str | None = None) -> Ints:
    """The first `most` tokens (`left`: the last). Special tokens at both ends are kept: vectors are taken
    there."""
    if len(ids) <= most:
        return ids
    ends = int(len(ids) > 0 and int(ids[-1]) in special)
    if most <= ends:
        return ids[:most]
    if side != "left":
        return np.concatenate([ids[: most - ends], ids[len(ids) - ends :]])
    begins = int(int(ids[0]) in special and most > 1)
    return np.concatenate([ids[:begins], ids[len(ids) - most + begins :]])


async def encode(
    prompt: Prompt,
    param: str,
    body: PoolBody,
    loaded: Loaded,
    add_special: bool = True,
    most: int | None = None,
) -> Input:
    """One text or list of ids, truncated to `most` tokens. Raises `RequestError` naming `param`."""
    checked = check_prompt(prompt, loaded.card.vocab_size, param)
    if isinstance(checked, str):
        text = checked.lower() if loaded.card.pooling.lowercase else checked
        ids = await loaded.tokenizer.encode_async(text, add_special, param)
        if add_special and loaded.tokenizer.added_eos:
            ids = np.append(ids, np.array(loaded.tokenizer.added_eos, np.int32))
    else:
        ids = checked
    await asyncio.sleep(0)  # ids and short texts do not suspend: a long list would hold the loop
    if most is not None:
        ids = cut(ids, most, loaded.tokenizer.special_ids)
    return fitting(Input(ids, param), body, loaded)


async def encode_all(
    value: str | list[Any] | None, param: str, body: PoolBody, loaded: Loaded, add_special: bool = True
) -> tuple[list[Input], bool]:
    """One or several texts or lists of ids, and whether `value` is one that is not in a list. Raises
    `RequestError` naming the field."""
    if not value:
        raise field_error(param, "must not be empty")
    prompts, single = split_prompts(value, param)
    check_count(len(prompts), MAX_CHOICES, "inputs", param)
    inputs = [
        await encode(prompt, param if single else f"{param}[{i}]", body, loaded, add_special)
        for i, prompt in enumerate(prompts)
    ]
    return inputs, single


def fitting(input: Input, body: PoolBody, loaded: Loaded) -> Input:
    """The input, truncated if the client wants that. Raises `ContextExceeded` if it is too long."""
    most = truncation(body, loaded.card.context_length)
    if most is not None:
        ids = cut(input.ids, most, loaded.tokenizer.special_ids, body.truncation_side)
        second = input.second
        if second and body.truncation_side == "left":
            second = max(second - (len(input.ids) - len(ids)), 1)
        input = msgspec.structs.replace(input, ids=ids, second=second)
    if len(input.ids) > loaded.card.context_length:
        raise ContextExceeded(loaded.card.context_length, len(input.ids), 0, input.param)
    return input


# -- through the engine ----------------------------------------------------------------------------


async def run_pooled(
    inputs: Sequence[Input], body: PoolBody, prefix: str, loaded: Loaded, every: bool = False
) -> Pooled:
    """A vector for each input, pooled as the checkpoint says, or one for `every` token."""
    hidden: Hidden = "all" if every else _HIDDEN[loaded.card.pooling.kind]
    base = base_job(body, prefix, loaded)
    done = Pooled(base.id, [])
    async for run in finished_runs(_jobs(inputs, base, hidden), loaded):
        done.vectors.append(_vector(run, hidden))
        done.prompt_tokens += len(run.prompt)
        done.cached_tokens += run.cached
    return done


def base_job(body: PoolBody, prefix: str, loaded: Loaded) -> Job:
    """The jobs of a request, which generate nothing, without their prompts and sampling parameters."""
    return Job(
        id=request_id(body, prefix),
        prompt="",
        max_tokens=0,
        seed=0,
        ignore_eos=True,
        priority=priority(body.priority),
        root=root_key(loaded, body.cache_salt, body.extra_key),
        owner=tenant(),
    )


async def finished_runs(jobs: Iterator[Job], loaded: Loaded) -> AsyncIterator[Run]:
    """The finished run of each job, in order. At most `WINDOW` jobs are in the engine at once."""
    while part := list(islice(jobs, WINDOW)):
        collector = Collector(len(part))
        async with running(loaded.engine, part, collector.take) as runs:
            await collector.finished()
        for run in runs:
            yield run


def _jobs(inputs: Sequence[Input], base: Job, hidden: Hidden) -> Iterator[Job]:
    """A job for each input, made lazily."""
    for i, input in enumerate(inputs):
        yield msgspec.structs.replace(
            base,
            id=f"{base.id}-{i}" if len(inputs) > 1 else base.id,
            prompt=input.ids,
            sampling=SamplingParams(temperature=0.0, hidden=hidden, pair=input.second),
            prompt_param=input.param,
            continues=i > 0,  # part of an answer that has begun: accepted while draining
        )


def _vector(run: Run, hidden: Hidden) -> Floats:
    found = joined(run, 0)
    if hidden == "sum":
        found = (found.sum(axis=0, keepdims=True) / len(run.prompt)).astype(np.float32)
    if hidden != "all":
        found = found.reshape(-1)
    if not np.isfinite(found).all():
        raise EngineFailed("The model produced values that are not finite.")
    return found


# -- vectors ---------------------------------------------------------------------------------------


async def unit(
    vectors: Sequence[Floats], pooling: PoolingSpec, dimensions: int | None = None
) -> list[Floats]:
    """Vectors truncated to `dimensions`, then normalized to length 1 if the model does that; in slices."""
    if dimensions is not None:
        vectors = [vector[..., :dimensions] for vector in vectors]
    if not pooling.normalize:
        return list(vectors)
    made = []
    for vector in vectors:
        rows = np.atleast_2d(vector)
        scaled = np.empty_like(rows)
        step = SLICE // rows.shape[1] + 1
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            scaled[at : at + step] = part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)
            await asyncio.sleep(0)
        made.append(scaled.reshape(vector.shape))
    return made


def activated(
    logits: Floats, pooling: PoolingSpec, use_activation: bool | None, activation: bool | None
) -> Floats:
    """Scores of the classes, float32 [n]: the logits themselves if `use_activation` is False, or if that is
    unset and `activation`, its older name, is False."""
    wanted = activation if use_activation is None else use_activation
    if wanted is False or pooling.activation == "none":
        return logits
    values = logits.astype(np.float64)
    if pooling.activation == "sigmoid":
        scores = 0.5 * (1.0 + np.tanh(0.5 * values))
    else:
        weights = np.exp(values - values.max())
        scores = weights / weights.sum()
    return np.asarray(scores, np.float32)


def base64_of(vector: Floats) -> str:
    """A vector as little-endian float32 in base64, which OpenAI's clients request by default."""
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
