"""Workload parameters, and the named scenarios."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A reproducible set of requests and how they are sent.

    Request i is a pure function of (seed, name, i), so it does not matter which client process
    sends it, and two scenarios never share a prompt by accident. Without `rate` and without a
    trace the loop is closed: `concurrency` callers, each sends its next request when the last ends.
    """

    name: str = "custom"
    endpoint: str = "completions"
    """`completions` or `chat`."""
    prompt_kind: str = "ids"
    """`ids`: token ids drawn uniformly; `text`: words, about one token each."""
    input_len: int = 512
    """Tokens (words) of the whole prompt, shared prefix included. With a dataset: at most, 0 is all."""
    output_len: int = 128
    concurrency: int = 16
    requests: int = 64
    """Requests, or conversations when `turns` > 1. With a trace: at most, 0 is all."""
    prefix_len: int = 0
    """Tokens of the prefix that all requests of a group share."""
    prefix_groups: int = 1
    turns: int = 1
    """Turns of each conversation; its history contains the real answers."""
    rate: float = 0.0
    """Arrivals per second (open loop); 0 is a closed loop."""
    burstiness: float = 1.0
    trace: str = ""
    trace_speed: float = 1.0
    """2 replays twice as fast; 0 keeps the trace's lengths but sends in a closed loop."""
    max_input_len: int = 0
    """Truncate a trace's prompts to this length; 0: do not truncate."""
    max_output_len: int = 0
    dataset: str = ""
    """JSON lines (optionally .xz) with a text, prompt, question or turns field."""
    vocab_low: int = 1_000
    vocab_high: int = 90_000
    """Token ids are drawn from vocab_low..vocab_high, both included."""
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    penalties: bool = False
    """Every second request has presence and frequency penalties."""
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    """JSON schema of every answer, whose shortest instance should be longer than `output_len`."""
    ignore_eos: bool = True
    headline: str = "out_tok_s"
    """The result field by which servers are compared."""

    def __post_init__(self) -> None:
        for name in ("requests", "input_len", "prefix_len", "max_input_len", "max_output_len", "rate"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative")
        for name in ("output_len", "concurrency", "prefix_groups", "turns"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1")
        _require(
            self.trace_speed >= 0 and self.burstiness > 0,
            "trace_speed must not be negative, burstiness must be positive",
        )
        _require(0 <= self.vocab_low <= self.vocab_high, "vocab_low must not exceed vocab_high")
        _require(self.requests > 0 or bool(self.trace), "requests must be at least 1")
        if not self.trace and not self.dataset:
            _require(self.input_len > 0, "input_len must be at least 1")
            _require(
                self.prefix_len <= self.input_len, "prefix_len must not exceed input_len, which includes it"
            )
        if self.prompt_kind == "ids":
            _require(self.endpoint != "chat", "the chat endpoint needs prompt_kind text")
            _require(self.turns == 1, "turns above 1 need prompt_kind text")
            _require(not self.dataset, "a dataset needs prompt_kind text")
        _require(not (self.trace and self.dataset), "trace and dataset exclude each other")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _six() -> list[Workload]:
    return [
        Workload(name="lat1", input_len=128, output_len=256, concurrency=1, requests=3),
        Workload(name="c32", input_len=1_024, output_len=256, concurrency=32, requests=96),
        Workload(name="c256", input_len=1_024, output_len=256, concurrency=256, requests=768),
        Workload(
            name="prefill",
            input_len=4_096,
            output_len=8,
            concurrency=32,
            requests=128,
            headline="tot_tok_s",
        ),
        Workload(
            name="shared",
            input_len=2_176,
            prefix_len=2_048,
            output_len=128,
            concurrency=128,
            requests=512,
        ),
        Workload(name="short512", input_len=64, output_len=64, concurrency=512, requests=2_048),
    ]


CHAT256 = Workload(
    name="chat256",
    endpoint="chat",
    prompt_kind="text",
    input_len=1_024,
    output_len=256,
    concurrency=256,
    requests=768,
    temperature=0.7,
    top_p=0.9,
    penalties=True,
    stop=("\u2402 never said \u2403",),
)

ROWS = json.dumps(
    {
        "type": "array",
        "minItems": 1_000,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "kind": {"enum": ["road", "rail", "river", "other"]},
                "length_km": {"type": "number", "minimum": 0},
                "stops": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            },
            "required": ["name", "kind", "length_km"],
            "additionalProperties": False,
        },
    }
)
"""A list of at least 1,000 items: longer than any answer."""

TURNS48 = Workload(
    name="turns48",
    endpoint="chat",
    prompt_kind="text",
    input_len=600,
    output_len=96,
    concurrency=48,
    requests=48,
    turns=6,
)
"""48 users with conversations of six turns. Each turn adds 600 words to a history that is cached."""
LONG12K = Workload(name="long12k", input_len=12_000, output_len=256, concurrency=16, requests=32)

PLAIN64 = Workload(
    name="plain64", input_len=256, output_len=256, concurrency=64, requests=192, temperature=1.0
)
JSON64 = msgspec.structs.replace(PLAIN64, name="json64", json_schema=ROWS)
"""`plain64` with a JSON schema on every row, to measure the cost of masks. Needs the model's tokenizer."""

TABLE: tuple[str, ...] = tuple(row.name for row in _six())
"""The six scenarios that servers are compared by, in the order of the table."""

SCENARIOS: Mapping[str, Workload] = MappingProxyType(
    {row.name: row for row in [*_six(), CHAT256, TURNS48, LONG12K, PLAIN64, JSON64]}
)


def named(names: str) -> list[Workload]:
    """Scenarios of a comma-separated list; `table` stands for the six. One that is named again has other
    prompts, which the server has not cached. ValueError on an unknown one."""
    chosen: list[Workload] = []
    for name in (part.strip() for part in names.split(",") if part.strip()):
        if name != "table" and name not in SCENARIOS:
            raise ValueError(f"unknown scenario {name}: choose from table, {', '.join(SCENARIOS)}")
        chosen += [SCENARIOS[one] for one in (TABLE if name == "table" else (name,))]
    if not chosen:
        raise ValueError("no scenario named")
    before: Counter[str] = Counter()
    for at, one in enumerate(chosen):
        chosen[at] = msgspec.structs.replace(one, seed=one.seed + before[one.name])
        before[one.name] += 1
    return chosen


def scaled(workload: Workload, factor: float) -> Workload:
    """The workload with `requests` and `concurrency` multiplied by `factor`, at least one each."""
    return msgspec.structs.replace(
        workload,
        requests=max(1, round(workload.requests * factor)) if workload.requests else 0,
        concurrency=max(1, round(workload.concurrency * factor)),
    )
