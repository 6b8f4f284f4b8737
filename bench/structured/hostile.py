"""A stream beside clients that send grammars made to take long."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec

from app.compose import Live
from app.engine.job import Job, Piece
from bench.structured.answers import started
from bench.structured.masks import percentiles
from core.errors import RequestError
from core.grammar import GrammarSpec
from core.request import SamplingParams


def _wide(count: int) -> GrammarSpec:
    properties = {f"p{i}": {"type": "string"} for i in range(count)}
    return GrammarSpec("json_schema", json.dumps({"properties": properties}))


HOSTILE: list[GrammarSpec | None] = [
    GrammarSpec("regex", "((a{1,100}){1,100}){1,100}"),
    GrammarSpec("regex", r"(\w|\W){0,5000}"),
    GrammarSpec("regex", "a" * 1_000_000),
    GrammarSpec("regex", "(a|b)*a(a|b){200}"),
    GrammarSpec("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    GrammarSpec("json_schema", '{"anyOf":[{"$ref":"#"},{"type":"integer"}]}'),
    _wide(10_000),
    _wide(1_000),
    GrammarSpec("ebnf", 'start: e\ne: e e | "a" | e "b" e'),
    GrammarSpec(
        "ebnf", "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(300)) + 'r300: "y"'
    ),
    GrammarSpec("ebnf", 'start: ("a"{0,1000}){0,1000}'),
    GrammarSpec("choice", json.dumps([f"{i}" for i in range(20_000)])),
    GrammarSpec(
        "structural_tag",
        json.dumps({"format": {"type": "regex", "pattern": "((\\w|\\W){0,400}){0,400}"}}),
    ),
]


async def hostile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Inter-token latency of one stream beside two plain streams, and beside two clients that send
    hostile grammars while it runs."""
    live = started(4)
    tally: Counter[str] = Counter()
    gaps: dict[str, list[float]] = {"beside_plain": [], "beside_hostile": []}
    try:
        plain: list[GrammarSpec | None] = [None]
        for name, sources in (("beside_plain", plain), ("beside_hostile", HOSTILE)):
            over = asyncio.Event()
            others = [
                asyncio.ensure_future(_others(live, sources[i:] + sources[:i], over, f"{name}-{i}", tally))
                for i in (0, len(sources) // 2)
            ]
            gaps[name] = await _stream(live, name)
            over.set()
            await asyncio.gather(*others)
    finally:
        live.close()
    return {
        "model": "SmolLM2-135M-Instruct, fp32, CPU, three rows",
        **{f"gap_ms_{name}": percentiles(found, 1e3) for name, found in gaps.items()},
        "hostile_requests": dict(tally),
    }


async def _stream(live: Live, id: str, tokens: int = 600) -> list[float]:
    """Seconds between the tokens of one stream."""
    times: list[float] = []
    sampling = SamplingParams(temperature=0.0)
    job = Job(id=id, prompt="Once upon a time", sampling=sampling, max_tokens=tokens, ignore_eos=True)
    run = await live.loaded.engine.start(job, lambda index, piece: times.append(time.perf_counter()))
    await run.wait()
    return [after - before for before, after in pairwise(times)]


async def _others(
    live: Live, sources: list[GrammarSpec | None], over: asyncio.Event, id: str, tally: Counter[str]
) -> None:
    """Send one request after another until `over` is set."""
    count, pieces = 0, list[Piece]()
    while not over.is_set():
        grammar = sources[count % len(sources)]
        if grammar is not None and count >= len(sources):
            # Avoid the grammar cache, as a hostile client would.
            grammar = msgspec.structs.replace(grammar, text=grammar.text + " " * count)
        count += 1
        job = Job(id=f"{id}-{count}", prompt="Once", max_tokens=50, seed=1, grammar=grammar, ignore_eos=True)
        try:
            run = await live.loaded.engine.start(job, lambda index, piece: pieces.append(piece))
        except RequestError:
            tally["refused"] += 1
            continue
        await run.wait()
        finish = pieces[-1].finish
        if grammar is not None and finish is not None:
            tally[finish.reason.value] += 1
