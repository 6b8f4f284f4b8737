"""A wave of requests at a server: its speed, and how many drafts were accepted."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop

from bench.flags import lowest
from bench.load import server
from bench.load.client import Client, Target
from bench.load.prompts import PreparedRequest, Source, changed
from bench.load.records import Record
from bench.load.report import span
from bench.load.workloads import Workload
from bench.spec.cases import DATA, Case
from bench.spec.simulate import seed_for

DATA_WORDS = 1_000
"""Words in a prompt of data: its tokens, with the answer, fit into a context of 2,048."""
DATA_REQUESTS = 16
"""Minimum number of requests in a wave of data: answers differ in how well they are drafted."""
DATA_ROUNDS = 4
"""Requests per client in a wave of real prompts. With one request per client, start-up and the tail with few
running streams took half of the time of a small model's wave, and speed-ups of one case varied from 0.71 to
1.22."""
_COUNTS = ("drafts", "draft_tokens", "accepted_tokens")
_SAMPLE = re.compile(r"^vllm:spec_decode_num_(\w+)_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Sizes(NamedTuple):
    """Tokens of prompts and answers, and the highest token id of random prompts."""

    input_len: int
    output_len: int
    vocab_high: int


class Drafts(NamedTuple):
    """Rows that verified drafts, those drafts, the accepted ones, and the most of a row in one step."""

    rows: int
    drafted: int
    accepted: int
    most: int

    def since(self, before: Drafts) -> Drafts:
        """The counts since `before`."""
        rows, drafted, accepted, _ = before
        return Drafts(self.rows - rows, self.drafted - drafted, self.accepted - accepted, self.most)


NO_DRAFTS = Drafts(0, 0, 0, 0)


class Wave(NamedTuple):
    """Output tokens per second of the wave, p99 of the time between two events of a stream and median of the
    time per token of a stream."""

    tok_s: float
    itl_p99_ms: float
    tpot_ms: float
    drafts: Drafts


def workload(case: Case, sizes: Sizes, data: Path | None) -> Workload:
    """Requests of `case`. ValueError where it needs --data."""
    low = lowest(sizes.vocab_high)
    requests = max(DATA_ROUNDS * case.clients, DATA_REQUESTS) if case.data else case.clients
    common = Workload(
        name=case.name, requests=requests, concurrency=case.clients,
        output_len=sizes.output_len, temperature=case.temperature, vocab_low=low, vocab_high=sizes.vocab_high,
        input_len=sizes.input_len,
    )  # fmt: skip
    if not case.data:
        return common
    if data is None:
        raise ValueError(f"{case.name} needs --data")
    return msgspec.structs.replace(
        common, endpoint="chat", prompt_kind="text", dataset=str(data / DATA[case.data]),
        input_len=DATA_WORDS, ignore_eos=False,
    )  # fmt: skip


def run(url: str, case: Case, work: Workload, turn: int, seconds: float) -> Wave:
    """Send wave number `turn` of `case`, `case.clients` requests at once; equal turns have equal requests.
    Raises `TimeoutError` after `seconds`, `RuntimeError` if a request fails."""
    target = Target.of(url)
    source = Source(work, server.first_model(target))
    extra: dict[str, Any] = {}
    if case.accept:
        half = work.input_len + work.output_len // 2
        extra["seed"] = seed_for(case.accept, case.then, half)
    requests = [changed(source.request(turn * work.requests + i), extra) for i in range(work.requests)]
    before = drafts(url)
    records = uvloop.run(send(target, work, requests, seconds))
    return figures(records, drafts(url).since(before))


async def send(
    target: Target, work: Workload, requests: Sequence[PreparedRequest], seconds: float
) -> list[Record]:
    """Send all requests, `work.concurrency` at once. Raises `TimeoutError` after `seconds`."""
    client, running = Client(target, work.endpoint), asyncio.Semaphore(work.concurrency)

    async def one(request: PreparedRequest) -> Record:
        async with running:
            record, _ = await client.send(request)
            return record

    try:
        async with asyncio.timeout(seconds):
            return await asyncio.gather(*map(one, requests))
    finally:
        client.close()


def figures(records: Sequence[Record], drafts: Drafts = NO_DRAFTS) -> Wave:
    """Figures of the requests of a wave. Raises `RuntimeError` if one failed."""
    for record in records:
        if record.bad is not None:
            raise RuntimeError(f"a request failed: {record.bad} {record.detail}")
    gaps = np.concatenate([np.diff(record.times) for record in records])
    each = [tpot for record in records if (tpot := record.tpot) is not None]
    return Wave(
        sum(record.out for record in records) / span(records),
        float(np.percentile(gaps, 99)) * 1e3 if len(gaps) else 0.0,
        median(each) * 1e3 if each else 0.0,
        drafts,
    )


def drafts(url: str) -> Drafts:
    """Draft counters of the server's /metrics; zeros without speculation."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        found = _SAMPLE.findall(answer.read().decode())
    totals = {name: int(float(value)) for name, value in found}
    rows, drafted, accepted = (totals.get(name, 0) for name in _COUNTS)
    return Drafts(rows, drafted, accepted, sum(name == "accepted_tokens_per_pos" for name, _ in found))
