"""Prometheus text from the published statistics, written by hand.

Every figure appears under its own `loom_` name; those that dashboards and autoscalers of vLLM and
SGLang look for appear under those names too, since they fail silently without. Names are frozen by a
test. Computed at scrape only, from frozen snapshots: some load generators scrape every 333 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from app.service import Loaded, Phase, Service
from core.stats import EngineStatistics, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One value of a family; `labels` are further ones."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()


class Family(NamedTuple):
    """One figure under all its names. `kind` is Prometheus' type."""

    kind: str
    help: str
    names: tuple[str, ...]
    samples: tuple[Sample, ...]


class Distribution(NamedTuple):
    """One histogram under all its names."""

    help: str
    names: tuple[str, ...]
    histogram: Histogram


def escape(value: str) -> str:
    """A label's value."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def exposition(service: Service, version: str) -> str:
    """All of `/metrics`. Before the model is loaded: only what is known of the start."""
    lines: list[str] = []
    for family in _process(service, version):
        _write(lines, family, "")
    if service.health.phase in (Phase.READY, Phase.DRAINING):
        loaded = service.loaded
        statistics = loaded.engine.statistics()
        labels = f'model_name="{escape(loaded.card.name)}",engine="0"'
        for family in _families(statistics, loaded):
            _write(lines, family, labels)
        for distribution in _distributions(statistics):
            _write_histogram(lines, distribution, labels)
    lines.append("")
    return "\n".join(lines)


def _process(service: Service, version: str) -> Iterator[Family]:
    health = service.health
    yield Family("gauge", "Version of the server.", ("loom_info",), (Sample(1, (("version", version),)),))
    yield Family(
        "gauge", "1 when requests are taken.", ("loom_ready",), (Sample(health.phase is Phase.READY),)
    )
    yield Family("gauge", "How far the start is.", ("loom_start_progress",), (Sample(health.progress),))
    yield Family(
        "gauge",
        "When the process started, in Unix seconds.",
        ("loom_start_time_seconds",),
        (Sample(service.started_at),),
    )


def _families(s: EngineStatistics, loaded: Loaded) -> Iterator[Family]:
    yield from _queue(s)
    yield from _tokens(s)
    yield from _cache(s, loaded)
    yield Family(
        "gauge", "Device seconds of the last step.", ("loom_step_seconds",), (Sample(s.step_seconds),)
    )
    yield Family(
        "counter", "Device seconds of all steps.", ("loom_device_seconds_total",), (Sample(s.device_seconds),)
    )
    yield Family(
        "gauge",
        "Highest delay of the event loop lately, in seconds.",
        ("loom_loop_lag_seconds",),
        (Sample(s.loop_lag),),
    )


def _queue(s: EngineStatistics) -> Iterator[Family]:
    q = s.scheduler
    yield _gauge(
        "Requests that run.",
        q.running,
        "loom_requests_running",
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
    )
    yield _gauge(
        "Requests that wait.",
        q.waiting,
        "loom_requests_waiting",
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
    )
    yield _gauge("Prompt tokens that wait.", q.waiting_tokens, "loom_tokens_waiting")
    yield _gauge("Steps submitted and not applied.", q.in_flight, "loom_steps_in_flight")
    yield _counter("Steps applied.", q.steps, "loom_steps_total")
    yield _counter(
        "Requests that gave their pages up and went back to the queue.",
        q.retractions,
        "loom_retractions_total",
        "vllm:num_preemptions_total",
        "sglang:num_retracted_reqs_total",
    )
    ended = sorted(q.finished.items())
    yield Family(
        "counter",
        "Requests ended, by reason.",
        ("loom_requests_finished_total", "vllm:request_success_total"),
        tuple(Sample(count, (("finished_reason", reason),)) for reason, count in ended),
    )
    yield _counter("Requests ended.", sum(q.finished.values()), "sglang:num_requests_total")
    yield _counter("Requests aborted.", q.finished.get("abort", 0), "sglang:num_aborted_requests_total")


def _tokens(s: EngineStatistics) -> Iterator[Family]:
    q = s.scheduler
    yield _counter(
        "Prompt tokens.",
        q.prompt_tokens,
        "loom_prompt_tokens_total",
        "vllm:prompt_tokens_total",
        "sglang:prompt_tokens_total",
    )
    yield _counter(
        "Generated tokens.",
        q.output_tokens,
        "loom_output_tokens_total",
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
    )
    yield _counter(
        "Prompt tokens found in the cache.",
        q.cached_tokens,
        "loom_cached_tokens_total",
        "vllm:prompt_tokens_cached_total",
        "sglang:cached_tokens_total",
    )


def _cache(s: EngineStatistics, loaded: Loaded) -> Iterator[Family]:
    c = s.scheduler.cache
    used = c.total - c.free - c.cached
    size = str(c.page_size)
    yield _gauge("Pages in the pool.", c.total, "loom_cache_pages")
    yield _gauge("Free pages.", c.free, "loom_cache_pages_free")
    yield _gauge("Pages only the cache holds.", c.cached, "loom_cache_pages_cached")
    yield _gauge("Cached pages under running requests.", c.protected, "loom_cache_pages_protected")
    yield _gauge("Cached pages kept because a client asked for it.", c.pinned, "loom_cache_pages_pinned")
    yield _gauge("Prefixes kept because a client asked for it.", c.pins, "loom_cache_pins")
    yield _gauge("Nodes of the radix tree.", c.nodes, "loom_cache_nodes")
    yield _counter("Pages evicted.", c.evicted_pages, "loom_cache_evicted_pages_total")
    yield _gauge(
        "Share of the pool that running requests hold.",
        used / c.total if c.total else 0.0,
        "loom_cache_usage_ratio",
        "vllm:kv_cache_usage_perc",
        "sglang:token_usage",
    )
    yield _gauge("Tokens that running requests hold.", used * c.page_size, "sglang:num_used_tokens")
    yield _gauge("Tokens the pool can hold.", c.total * c.page_size, "sglang:max_total_num_tokens")
    yield _counter(
        "Tokens looked up in the cache.",
        c.queried_tokens,
        "loom_cache_queried_tokens_total",
        "vllm:prefix_cache_queries_total",
    )
    yield _counter(
        "Tokens found in the cache.",
        c.hit_tokens,
        "loom_cache_hit_tokens_total",
        "vllm:prefix_cache_hits_total",
    )
    yield _gauge(
        "Share of looked-up tokens that were found.",
        c.hit_tokens / c.queried_tokens if c.queried_tokens else 0.0,
        "loom_cache_hit_ratio",
        "sglang:cache_hit_rate",
    )
    pages = str(c.total)
    yield Family(
        "gauge",
        "Shape of the KV pool.",
        ("vllm:cache_config_info",),
        (Sample(1, (("block_size", size), ("num_gpu_blocks", pages))),),
    )
    yield Family(
        "gauge",
        "Shape of the KV pool.",
        ("sglang:cache_config_info",),
        (Sample(1, (("page_size", size), ("num_pages", pages))),),
    )


def _distributions(s: EngineStatistics) -> Iterator[Distribution]:
    for what, name, histogram in (
        ("Seconds from arrival to the first token.", "time_to_first_token_seconds", s.ttft),
        ("Seconds between tokens.", "inter_token_latency_seconds", s.inter_token),
        ("Seconds from arrival to the end.", "e2e_request_latency_seconds", s.end_to_end),
    ):
        yield Distribution(what, (f"loom_{name}", f"vllm:{name}", f"sglang:{name}"), histogram)
    yield Distribution(
        "Seconds from arrival to the first step.",
        ("loom_queue_time_seconds", "vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
        s.queue,
    )


def _gauge(help: str, value: float, *names: str) -> Family:
    return Family("gauge", help, names, (Sample(value),))


def _counter(help: str, value: float, *names: str) -> Family:
    return Family("counter", help, names, (Sample(value),))


def _write(lines: list[str], family: Family, labels: str) -> None:
    for name in family.names:
        lines.append(f"# HELP {name} {family.help}")
        lines.append(f"# TYPE {name} {family.kind}")
        for value, more in family.samples:
            own = ",".join(f'{key}="{escape(text)}"' for key, text in more)
            every = ",".join(part for part in (labels, own) if part)
            lines.append(f"{name}{{{every}}} {_number(value)}" if every else f"{name} {_number(value)}")


def _write_histogram(lines: list[str], distribution: Distribution, labels: str) -> None:
    histogram = distribution.histogram
    running = list(accumulate(histogram.counts))
    count = running[-1] if running else 0
    for name in distribution.names:
        lines.append(f"# HELP {name} {distribution.help}")
        lines.append(f"# TYPE {name} histogram")
        for bound, below in zip(histogram.bounds, running, strict=False):
            lines.append(f'{name}_bucket{{{labels},le="{_number(bound)}"}} {below}')
        lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {count}')
        lines.append(f"{name}_sum{{{labels}}} {_number(histogram.total)}")
        lines.append(f"{name}_count{{{labels}}} {count}")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
