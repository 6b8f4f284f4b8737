"""Computes figures from records, and formats them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.load.pool import Outcome
from bench.load.records import Record
from bench.load.workloads import Workload

Result = dict[str, Any]
"""One scenario's figures, as they are written to the JSON file."""

_POINTS = (50, 90, 95, 99)
_KINDS = ("ttft", "tpot", "itl", "e2e")
BUSY = 0.8
"""Busy share of a core above which a client process may distort its measurements."""


def summary(work: Workload, outcome: Outcome, goals: dict[str, float], conditions: Result) -> Result:
    """All figures of one run. Only successful requests count in throughput and latency.

    The wall time is from the first send to the last end, failed requests included. `ttft_ms`,
    `tpot_ms`, `itl_ms`, `e2e_ms` are medians; `percentiles` has the rest. `cached_share` is None
    when the server does not report cached tokens. `goals`: ms by kind, see `parse_goals`.
    """
    good = [record for record in outcome.records if record.bad is None]
    wall = span(outcome.records)
    latency = {f"{kind}_ms": percentiles(1000 * x for x in samples(good, kind)) for kind in _KINDS}
    late = percentiles(1000 * (record.sent - record.planned) for record in outcome.records)
    return {
        "name": work.name,
        **_rates(good, wall, goals),
        "headline": work.headline,
        **{kind: points and points["p50"] for kind, points in latency.items()},
        "percentiles": latency,
        "ok": len(good),
        "bad": len(outcome.records) - len(good),
        "failures": failures(outcome.records),
        **_counts(good),
        "wall_s": round(wall, 4),
        "late_ms": late and late["p99"],
        "client_cpu": round(outcome.cpu, 3),
        "interrupted": outcome.interrupted,
        "lost_processes": outcome.lost,
        "workload": {
            **msgspec.to_builtins(work),
            "trace": Path(work.trace).name,
            "dataset": Path(work.dataset).name,
        },
        "conditions": conditions,
    }


def _rates(good: list[Record], wall: float, goals: dict[str, float]) -> Result:
    per_second = 1 / wall if wall else 0.0
    out = sum(record.out for record in good)
    within = sum(meets(record, goals) for record in good)
    return {
        "out_tok_s": round(out * per_second, 3),
        "tot_tok_s": round((out + sum(record.prompt for record in good)) * per_second, 3),
        "req_s": round(len(good) * per_second, 4),
        "goodput_req_s": round(within * per_second, 4) if goals else None,
        "goodput_goals_ms": goals or None,
    }


def _counts(good: list[Record]) -> Result:
    out = sum(record.out for record in good)
    events = sum(len(record.times) for record in good)
    reporting = [record for record in good if record.cached is not None]
    prompt = sum(record.prompt for record in reporting)
    return {
        "cached_share": round(sum(record.cached or 0 for record in reporting) / prompt, 4)
        if prompt
        else None,
        "events_per_token": round(events / out, 4) if out else None,
        "out_tokens": out,
        "prompt_tokens": sum(record.prompt for record in good),
        "without_usage": sum(not record.usage for record in good),
        "finish": dict(Counter(record.finish or "none" for record in good)),
    }


def span(records: Iterable[Record]) -> float:
    """Seconds from the first send to the last end; 0 without records."""
    pairs = [(record.sent, record.end) for record in records]
    return max(end for _, end in pairs) - min(sent for sent, _ in pairs) if pairs else 0.0


def samples(records: Iterable[Record], kind: str) -> list[float]:
    """All samples of `ttft`, `tpot`, `itl` or `e2e`, in seconds."""
    if kind == "itl":
        return [gap for record in records for gap in np.diff(record.times).tolist()]
    value: Callable[[Record], float | None] = _VALUE[kind]
    return [found for record in records if (found := value(record)) is not None]


_VALUE: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
    "e2e": lambda record: record.e2e,
}


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """mean, p50, p90, p95, p99 (linear between order statistics); None without values."""
    array = np.fromiter(values, float)
    if not len(array):
        return None
    named = zip(_POINTS, np.percentile(array, _POINTS).tolist(), strict=True)
    return {"mean": round(float(array.mean()), 4)} | {f"p{point}": round(value, 4) for point, value in named}


def meets(record: Record, goals: dict[str, float]) -> bool:
    """Whether this request meets every goal (ms); a missing figure counts as met."""
    return all(1000 * (_VALUE[kind](record) or 0.0) <= limit for kind, limit in goals.items())


def parse_goals(text: str) -> dict[str, float]:
    """`ttft:500,tpot:50` to milliseconds by kind (ttft, tpot, e2e). ValueError otherwise."""
    goals: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        kind, _, limit = part.partition(":")
        if kind not in _VALUE:
            raise ValueError(f"--goodput: unknown metric {kind!r}, choose from {', '.join(_VALUE)}")
        goals[kind] = float(limit)
    return goals


def failures(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Count and first example by reason, most frequent first."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.bad is not None:
            entry = found.setdefault(record.bad, {"count": 0, "example": record.detail})
            entry["count"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["count"]))


def block(result: Result) -> str:
    """All figures of one scenario, as text."""
    share, ratio = result["cached_share"], result["events_per_token"]
    lines = [
        f"{result['name']}: {result['ok']} ok, {result['bad']} bad in {result['wall_s']:,.2f} s",
        f"  output {result['out_tok_s']:,.1f} tok/s   total {result['tot_tok_s']:,.1f} tok/s   "
        f"{result['req_s']:,.2f} req/s",
        f"  cached {'not reported' if share is None else f'{share:.1%}'}   events per token "
        f"{'-' if ratio is None else f'{ratio:.3f}'}   client cpu {result['client_cpu']:.0%}",
        f"  {'ms':<6}{'mean':>12}{'p50':>12}{'p90':>12}{'p95':>12}{'p99':>12}",
    ]
    if result["goodput_req_s"] is not None:
        lines.insert(
            2, f"  goodput {result['goodput_req_s']:,.2f} req/s within {result['goodput_goals_ms']} ms"
        )
    for kind in _KINDS:
        points = result["percentiles"][f"{kind}_ms"]
        if points:
            lines.append(f"  {kind:<6}" + "".join(f"{value:>12,.2f}" for value in points.values()))
    lines += [f"  bad: {n['count']} x {kind}: {n['example']}" for kind, n in result["failures"].items()]
    return "\n".join(lines + [f"  warning: {text}" for text in warnings(result)])


def warnings(result: Result) -> list[str]:
    """Reasons to doubt these figures."""
    checks = {
        f"a client process was busy {result['client_cpu']:.0%} of the time: use more --processes": result[
            "client_cpu"
        ]
        > BUSY,
        f"{result['late_ms']} ms late at p99: the client could not keep the rate": (result["late_ms"] or 0)
        > 10,
        f"{result['without_usage']} answers without usage: tokens are counted events": result[
            "without_usage"
        ],
        "interrupted: unfinished requests are not in these figures": result["interrupted"],
        f"{result['lost_processes']} client processes died": result["lost_processes"],
    }
    return [text for text, holds in checks.items() if holds]


def table(results: list[Result]) -> str:
    """One line per scenario, medians."""
    head = (
        "scenario",
        "out tok/s",
        "tot tok/s",
        "ttft ms",
        "tpot ms",
        "itl ms",
        "ok",
        "bad",
        "cached",
        "ev/tok",
    )
    rows = [head]
    for result in results:
        figures = [result[k] for k in ("out_tok_s", "tot_tok_s", "ttft_ms", "tpot_ms", "itl_ms")]
        tail = [result["cached_share"], result["events_per_token"]]
        rows.append(
            (
                result["name"],
                *("-" if x is None else f"{x:,.2f}" for x in figures),
                str(result["ok"]),
                str(result["bad"]),
                *("-" if x is None else f"{x:.3f}" for x in tail),
            )
        )
    return align(rows)


def align(rows: Iterable[tuple[str, ...]]) -> str:
    """A text table: the first column aligned left, the others right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
