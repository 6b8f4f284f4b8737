"""Answers that the default model generates under schemas, validated by jsonschema."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections import Counter
from decimal import Decimal
from typing import Any

import jsonschema

from app.compose import Live, load
from app.engine.job import Job, Piece
from bench.structured.schemas import Case, cases
from core.config import Config, ModelConfig, ScheduleConfig
from core.errors import RequestError
from core.grammar import GrammarSpec
from core.request import SamplingParams
from core.types import Finish, FinishReason


async def generate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers of the default model under schemas of the data set, validated by jsonschema."""
    live = started(16)
    tally: Counter[str] = Counter()
    try:
        gate = asyncio.Semaphore(16)
        chosen = await _chosen(live, arguments)
        await asyncio.gather(
            *(_write(live, gate, i, case, arguments.tokens, tally) for i, case in enumerate(chosen))
        )
    finally:
        live.close()
    return {
        "model": "SmolLM2-135M-Instruct, fp32, CPU, temperature 0.7",
        "max_tokens": arguments.tokens,
        **{name: tally[name] for name in ("schemas", "finished", "cut", "valid", "invalid", "failed")},
    }


async def _chosen(live: Live, arguments: argparse.Namespace) -> list[Case]:
    """Schemas that compile and have a valid instance of moderate length, so that the model can finish."""
    assert live.grammars is not None
    chosen: list[Case] = []
    for case in cases(arguments.data):
        sizes = [len(json.dumps(value)) for value, valid in case.tests if valid]
        schema = json.dumps(case.schema, ensure_ascii=False)
        if not sizes or min(sizes) > 250 or len(schema) > 1_500:
            continue
        with contextlib.suppress(RequestError):
            await live.grammars.compile(GrammarSpec("json_schema", schema))
            chosen.append(case)
        if len(chosen) == arguments.generate:
            break
    return chosen


async def _write(
    live: Live, gate: asyncio.Semaphore, i: int, case: Case, tokens: int, tally: Counter[str]
) -> None:
    schema = json.dumps(case.schema, ensure_ascii=False)
    turn = {"role": "user", "content": f"Write one short example, as JSON, for this schema:\n{schema}"}
    job = Job(
        id=f"case-{i}",
        prompt=await live.loaded.template.render_async([turn], add_generation_prompt=True),
        sampling=SamplingParams(temperature=0.7),
        max_tokens=tokens,
        seed=i,
        grammar=GrammarSpec("json_schema", schema),
    )
    pieces: list[str] = []
    ends: list[Finish] = []

    def sink(index: int, piece: Piece) -> None:
        pieces.append(piece.text)
        if piece.finish is not None:
            ends.append(piece.finish)

    async with gate:
        run = await live.loaded.engine.start(job, sink)
        await run.wait()
    tally["schemas"] += 1
    if ends[0].reason is FinishReason.STOP:
        tally["finished"] += 1
        tally["valid" if _valid("".join(pieces), case) else "invalid"] += 1
    else:
        tally["cut" if ends[0].reason is FinishReason.LENGTH else "failed"] += 1


def _valid(text: str, case: Case) -> bool:
    """Validate with jsonschema, in decimals: in binary floats 152.08 is not a multiple of 0.01."""
    schema = json.loads(json.dumps(case.schema), parse_float=Decimal)
    validator = jsonschema.validators.validator_for(schema)
    try:
        validator(schema).validate(json.loads(text, parse_float=Decimal))
    except (ValueError, jsonschema.ValidationError) as error:
        print("INVALID", case.path, text[:200], error)
        return False
    return True


def started(rows: int) -> Live:
    """The default model for `rows` requests at once, started on the running loop."""
    model, schedule = ModelConfig(offline=True, context_length=2048), ScheduleConfig(max_running=rows)
    live = load(Config(model=model, schedule=schedule), lambda stage, share: None)
    live.replicas.start(asyncio.get_running_loop())
    return live
