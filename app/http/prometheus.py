"""`/metrics` in Prometheus' text format, from the published statistics.

Every figure appears under its own `loom_` name; those that dashboards and autoscalers of vLLM and
SGLang look for appear under those names too, since they fail silently without. Names are frozen by a
test. Computed at scrape only, from frozen snapshots: some load generators scrape every 333 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from app.service import Phase, Service
from core.stats import EngineStatistics, Histogram

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Never OpenMetrics: it renames what has a colon, and dashboards break."""


class Figure(NamedTuple):
    """One figure under all its names. `labels` names those that it has besides the model's; a sample is
    their values and what the family's `add_metric` takes for one."""

    family: Callable[..., Any]
    help: str
    names: tuple[str, ...]
    samples: tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]
    labels: tuple[str, ...] = ()

    def metrics(self, labels: dict[str, str]) -> Iterator[Metric]:
        """The family of each name, every sample with `labels` too."""
        for name in self.names:
            family = self.family(name, self.help, labels=[*labels, *self.labels])
            for own, value in self.samples:
                family.add_metric([*labels.values(), *own], *value)
            yield family


class Scrape:
    """`prometheus_client`'s collector of one scrape. Before the model is loaded: only what is known of the
    start.

    Made on the event loop, where the statistics are read; `collect` may run in any thread.
    """

    def __init__(self, service: Service, version: str) -> None:
        self._figures: list[tuple[dict[str, str], list[Figure]]] = [({}, [*_process(service, version)])]
        if service.health.phase in (Phase.READY, Phase.DRAINING):
            loaded = service.loaded
            labels = {"model_name": loaded.card.name, "engine": "0"}
            self._figures.append((labels, [*_engine(loaded.engine.statistics())]))

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        for labels, figures in self._figures:
            for figure in figures:
                yield from figure.metrics(labels)


async def exposition(service: Service, version: str) -> bytes:
    """All of `/metrics`. The text is written in a thread: it takes 1.4 ms, several slices of the loop."""
    return await asyncio.to_thread(generate_latest, Scrape(service, version))


def _process(service: Service, version: str) -> Iterator[Figure]:
    health = service.health
    yield _gauge("Version of the server.", 1, "loom_info", version=version)
    yield _gauge("1 when requests are taken.", health.phase is Phase.READY, "loom_ready")
    yield _gauge("How far the start is.", health.progress, "loom_start_progress")
    yield _gauge("When the process started, in Unix seconds.", service.started_at, "loom_start_time_seconds")


def _engine(s: EngineStatistics) -> Iterator[Figure]:
    yield from _queue(s)
    yield from _tokens(s)
    yield from _cache(s)
    yield _gauge("Device seconds of the last step.", s.step_seconds, "loom_step_seconds")
    yield _counter("Device seconds of all steps.", s.device_seconds, "loom_device_seconds_total")
    yield _gauge("Highest delay of the event loop lately, in seconds.", s.loop_lag, "loom_loop_lag_seconds")
    yield from _latencies(s)


def _queue(s: EngineStatistics) -> Iterator[Figure]:
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
    yield Figure(
        CounterMetricFamily,
        "Requests ended, by reason.",
        ("loom_requests_finished_total", "vllm:request_success_total"),
        tuple(((reason,), (count,)) for reason, count in sorted(q.finished.items())),
        ("finished_reason",),
    )
    yield _counter("Requests ended.", sum(q.finished.values()), "sglang:num_requests_total")
    yield _counter("Requests aborted.", q.finished.get("abort", 0), "sglang:num_aborted_requests_total")


def _tokens(s: EngineStatistics) -> Iterator[Figure]:
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


def _cache(s: EngineStatistics) -> Iterator[Figure]:
    c = s.scheduler.cache
    used = c.total - c.free - c.cached
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
    shape = "Shape of the KV pool."
    pages, size = str(c.total), str(c.page_size)
    yield _gauge(shape, 1, "vllm:cache_config_info", block_size=size, num_gpu_blocks=pages)
    yield _gauge(shape, 1, "sglang:cache_config_info", page_size=size, num_pages=pages)


def _latencies(s: EngineStatistics) -> Iterator[Figure]:
    for help, name, histogram in (
        ("Seconds from arrival to the first token.", "time_to_first_token_seconds", s.ttft),
        ("Seconds between tokens.", "inter_token_latency_seconds", s.inter_token),
        ("Seconds from arrival to the end.", "e2e_request_latency_seconds", s.end_to_end),
    ):
        yield _histogram(help, histogram, f"loom_{name}", f"vllm:{name}", f"sglang:{name}")
    yield _histogram(
        "Seconds from arrival to the first step.",
        s.queue,
        "loom_queue_time_seconds",
        "vllm:request_queue_time_seconds",
        "sglang:queue_time_seconds",
    )


def _gauge(help: str, value: float, *names: str, **labels: str) -> Figure:
    return Figure(GaugeMetricFamily, help, names, ((tuple(labels.values()), (value,)),), tuple(labels))


def _counter(help: str, value: float, *names: str) -> Figure:
    return Figure(CounterMetricFamily, help, names, (((), (value,)),))


def _histogram(help: str, histogram: Histogram, *names: str) -> Figure:
    bounds = (*(f"{bound:g}" for bound in histogram.bounds), "+Inf")
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return Figure(HistogramMetricFamily, help, names, (((), (buckets, histogram.total)),))
