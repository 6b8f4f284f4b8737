"""How likely tokens are after a text: `/v1/score` after SGLang, `/generative_scoring` after vLLM."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, cast

import msgspec
import numpy as np
from aiohttp import web

from app.api.openai.stream import envelope
from app.api.pooling.common import WINDOW, Counts, base_job, finished_runs
from app.api.pooling.embeddings import VECTORS
from app.api.pooling.rerank import SIDES, PairBody, score_pairs
from app.api.request.prompts import Prompt, check_ids, split_prompts
from app.api.request.routing import Routes
from app.api.request.sampling import MAX_CHOICES, available, job_id
from app.api.request.schema import Int, refuse
from app.engine.job import Job, Run
from app.ids import random_hex
from app.service import Loaded
from core.errors import ContextExceeded, EngineFailed, RequestError, field_error
from core.request import SamplingParams
from core.request.params import MAX_LOGPROBS
from core.types import Ints

ROUTES = Routes()


class ScoreBody(PairBody, kw_only=True):
    """SGLang's form; or the fields of vLLM's, which is for cross-encoders."""

    query: str | list[Int] | None = None
    items: str | list[str | Int | list[Int]] | None = None
    label_token_ids: list[Int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class GenerativeBody(msgspec.Struct, kw_only=True):
    """`/generative_scoring`. Unset, `apply_softmax` and `add_special_tokens` are true."""

    model: str | None = None
    query: str | list[Int] | None = None
    items: list[str | list[Int]] | None = None
    label_token_ids: list[Int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    priority: Int | None = None
    request_id: str | None = None


class ScoreRequest(msgspec.Struct, frozen=True):
    """A checked body: texts or ids, and the label tokens. Prompts are joined one at a time: a long query
    copied for every item would take gigabytes."""

    query: Prompt
    items: list[Prompt]
    item_first: bool
    groups: list[tuple[int, ...]]
    """The labels, in order, as many in each group as one job scores."""
    base: Job

    @property
    def width(self) -> int:
        """Number of labels."""
        return sum(map(len, self.groups))

    def prompt(self, index: int) -> Prompt:
        """The query with one item."""
        query, item = cast(list[int], self.query), cast(list[int], self.items[index])  # or both are texts
        return item + query if self.item_first else query + item


class Scored(Counts):
    """Results so far. `logprobs`: of all labels of the first item, then of the next."""

    logprobs: list[float]


@ROUTES.post(
    ScoreBody,
    "/v1/score",
    "/score",
    example="query items label_token_ids",
    has="object model scores usage",
    runs=True,
    model=available,
)
async def score(request: web.Request, body: ScoreBody, loaded: Loaded) -> object:
    """The probability of each label token after the query and each item."""
    if body.items is None and any(getattr(body, name) is not None for name in chain(*SIDES)):
        return await score_pairs(body, loaded)
    loaded.card.check_task("generate")
    return await score_answer(body, loaded)


async def score_answer(body: ScoreBody, loaded: Loaded) -> dict[str, object]:
    """The answer. `scores[i][j]`: of label j after item i. Raises `RequestError` naming the field.

    An item's labels are scored by a prompt that generates nothing, up to `MAX_LOGPROBS` at once: their number
    is not limited by a top-k.
    """
    scoring = _check(body, loaded)
    scored = Scored([])
    step = WINDOW // len(scoring.groups)
    for start in range(0, len(scoring.items), step):
        await _score(scoring, range(start, min(start + step, len(scoring.items))), loaded, scored)
    width = scoring.width
    rows = [scored.logprobs[at : at + width] for at in range(0, len(scored.logprobs), width)]
    return {
        "object": "scoring",
        "model": loaded.card.name,
        "scores": [_scores(row, body.apply_softmax is True) for row in rows],
        "usage": scored.usage(),
    }


def _check(body: ScoreBody, loaded: Loaded) -> ScoreRequest:
    """Check everything that needs no tokenization."""
    for name in ("query", "items", "label_token_ids"):
        if getattr(body, name) is None or (name != "query" and not getattr(body, name)):
            raise field_error(name, "is missing or empty")
    assert body.query is not None and body.items and body.label_token_ids
    refuse(body, {"truncate_prompt_tokens": "items are scored whole"})
    labels, (items, _) = body.label_token_ids, split_prompts(body.items, "items")
    if len(items) * len(labels) > MAX_CHOICES:  # before anything is allocated
        raise RequestError(
            f"{len(items)} items with {len(labels)} labels are more than {MAX_CHOICES} scores.", "items"
        )
    check_ids(labels, loaded.card.vocab_size, "label_token_ids")
    _check_items(body.query, items, loaded.card.vocab_size)
    base = base_job(body, "score", loaded)
    groups = [tuple(labels[at : at + MAX_LOGPROBS]) for at in range(0, len(labels), MAX_LOGPROBS)]
    return ScoreRequest(body.query, items, body.item_first is True, groups, base)


def _check_items(query: Prompt, items: Sequence[Prompt], vocab_size: int) -> None:
    """Check that all are texts, or all are ids inside the vocabulary."""
    if isinstance(query, list):
        check_ids(query, vocab_size, "query")
    for i, item in enumerate(items):
        param = f"items[{i}]"
        if type(item) is not type(query):
            raise RequestError(f"'query' and '{param}' must both be texts or both be token ids.", param)
        if isinstance(item, list):
            check_ids(item, vocab_size, param)
        if not query and not item:
            raise RequestError(f"'query' and '{param}' must not both be empty.", param)


async def _score(scoring: ScoreRequest, items: range, loaded: Loaded, scored: Scored) -> None:
    """Add the log-probabilities of every label after `items`."""
    encoded: list[Ints] = []
    for i in items:
        ids = await _encode(scoring.prompt(i), f"items[{i}]", loaded)
        encoded.append(ids)
        await asyncio.sleep(0)  # short texts do not suspend: a long list would hold the loop
        scored.prompt_tokens += len(ids)
    async for run in finished_runs(_jobs(scoring, items, encoded), loaded):
        # Only an item's first group counts: the others find the pages of the first.
        if len(scored.logprobs) % scoring.width == 0:
            scored.cached_tokens += min(run.cached, len(run.prompt) - 1)
        scored.logprobs += _last_logprobs(run)


async def _encode(prompt: Prompt, param: str, loaded: Loaded) -> Ints:
    if isinstance(prompt, str):
        ids = await loaded.tokenizer.encode_async(prompt, True, param)
    else:
        ids = np.asarray(prompt, np.int32)
    if len(ids) + 1 > loaded.card.context_length:  # before anything runs, and with the right field
        raise ContextExceeded(loaded.card.context_length, len(ids), 1, param)
    return ids


def _jobs(scoring: ScoreRequest, items: range, encoded: Sequence[Ints]) -> Iterator[Job]:
    """A job for each item and group of labels, made lazily. Its last token is any: it makes the position that
    the labels are scored at."""
    for i, ids in zip(items, encoded, strict=True):
        for j, labels in enumerate(scoring.groups):
            yield msgspec.structs.replace(
                scoring.base,
                id=f"{scoring.base.id}-{i}-{j}",
                prompt=np.append(ids, np.int32(labels[0])),
                sampling=SamplingParams(
                    temperature=0.0,
                    prompt_logprobs=0,
                    prompt_logprobs_start=len(ids),
                    prompt_logprob_ids=labels,
                ),
                prompt_param=f"items[{i}]",
                continues=i + j > 0,  # part of an answer that has begun: accepted while draining
            )


def _last_logprobs(run: Run) -> list[float]:
    chunk = run.prompt_logprobs()[-1]
    values: list[float] = chunk.top_values[len(run.prompt) - 1 - chunk.start].tolist()
    if any(map(math.isnan, values)):
        raise EngineFailed("The model's logits were not finite.")
    return values


def _scores(logprobs: Sequence[float], softmax: bool) -> list[float]:
    """Probabilities among all tokens, or among the labels only."""
    highest = max(logprobs) if softmax else 0.0
    if math.isinf(highest):  # no label is possible
        return [0.0] * len(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    total = math.fsum(weights) if softmax else 1.0
    return [weight / total for weight in weights]


# -- vLLM's form -------------------------------------------------------------------------------------


@ROUTES.post(
    GenerativeBody, "/generative_scoring", needed="query items label_token_ids", has=VECTORS, runs=True
)
async def generative_scoring(request: web.Request, body: GenerativeBody, loaded: Loaded) -> object:
    """The probability of the first label after the query and each item."""
    id = job_id(body.request_id, random_hex(32), "request_id")
    answer: Any = await score_answer(await _in_tokens(body, loaded), loaded)
    data = [{"index": i, "object": "score", "score": row[0]} for i, row in enumerate(answer["scores"])]
    head = envelope(f"generative-scoring-{id}", "list", loaded.card.name)
    return {**head, "data": data, "usage": answer["usage"]}


async def _in_tokens(body: GenerativeBody, loaded: Loaded) -> ScoreBody:
    """vLLM joins tokens, not texts: query and items are encoded apart."""
    if body.query is None or not body.items:
        name = "query" if body.query is None else "items"
        raise field_error(name, "is missing or empty")
    if len(body.items) > MAX_CHOICES:
        raise field_error("items", f"takes at most {MAX_CHOICES} items")
    items: list[str | int | list[int]] = []
    for i, item in enumerate(split_prompts(body.items, "items")[0]):
        items.append(await _ids(item, False, f"items[{i}]", loaded))
        await asyncio.sleep(0)  # short texts do not suspend: a long list would hold the loop
    return ScoreBody(
        query=await _ids(body.query, body.add_special_tokens is not False, "query", loaded),
        items=items,
        label_token_ids=body.label_token_ids,
        apply_softmax=body.apply_softmax is not False,
        item_first=body.item_first,
        priority=body.priority,
        request_id=body.request_id,
    )


async def _ids(text: Prompt, special: bool, param: str, loaded: Loaded) -> list[int]:
    if isinstance(text, list):
        return text
    ids: list[int] = (await loaded.tokenizer.encode_async(text, special, param)).tolist()
    return ids
