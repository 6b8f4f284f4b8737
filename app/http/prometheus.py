"""`/metrics` in Prometheus' text format.

Every metric has a `loom_` name; those that dashboards and autoscalers of vLLM and SGLang need appear under
their names too. Names are fixed by a test. Computed only when scraped, from frozen snapshots: some load
generators scrape every 333 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from app.service import Loaded, Phase, Service
from core.stats import DraftStatistics, EngineStatistics, Histogram, SchedulerStatistics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Not OpenMetrics: it renames metrics with a colon, which breaks dashboards."""


ALIASES: Mapping[str, tuple[str, ...]] = {
    "loom_requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "loom_requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "loom_requests_finished_total": ("vllm:request_success_total",),
    "loom_retractions_total": ("vllm:num_preemptions_total", "sglang:num_retracted_reqs_total"),
    "loom_prompt_tokens_total": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "loom_output_tokens_total": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "loom_cached_tokens_total": ("vllm:prompt_tokens_cached_total", "sglang:cached_tokens_total"),
    "loom_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    "loom_cache_queried_tokens_total": ("vllm:prefix_cache_queries_total",),
    "loom_cache_hit_tokens_total": ("vllm:prefix_cache_hits_total",),
    "loom_cache_hit_ratio": ("sglang:cache_hit_rate",),
    **{
        f"loom_{name}": (f"vllm:{name}", f"sglang:{name}")
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
        )
    },
    "loom_adapters_placed": ("sglang:lora_pool_slots_used",),
    "loom_adapter_places": ("sglang:lora_pool_slots_total",),
    "loom_drafts_total": ("vllm:spec_decode_num_drafts_total",),
    "loom_draft_tokens_total": ("vllm:spec_decode_num_draft_tokens_total",),
    "loom_accepted_tokens_total": ("vllm:spec_decode_num_accepted_tokens_total",),
    "loom_accepted_tokens_per_position_total": ("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
    "loom_accept_length": ("sglang:spec_accept_length",),
    "loom_accept_ratio": ("sglang:spec_accept_rate",),
    "loom_queue_time_seconds": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
}
"""Further names of metrics."""


class Figure(NamedTuple):
    """One figure. `labels` names those that it has besides the replica's; a sample is their values and what
    the family's `add_metric` takes for one."""

    family: Callable[..., Any]
    name: str
    help: str
    samples: Sequence[tuple[tuple[str, ...], tuple[Any, ...]]]
    labels: tuple[str, ...] = ()


Labelled = tuple[dict[str, str], Figure]
"""A figure with the labels of its replica."""


def metrics(replicas: Sequence[Labelled]) -> Iterator[Metric]:
    """The family of each name of one figure, with the samples of every replica."""
    labels, first = replicas[0]
    for name in (first.name, *ALIASES.get(first.name, ())):
        family = first.family(name, first.help, labels=[*labels, *first.labels])
        for labels, figure in replicas:
            for own, value in figure.samples:
                family.add_metric([*labels.values(), *own], *value)
        yield family


class Scrape:
    """`prometheus_client`'s collector for one scrape. Before the model is loaded it has the metrics of the
    process only.

    Made on the event loop, where the statistics are read; `collect` may run in any thread.
    """

    def __init__(self, service: Service, version: str) -> None:
        self._figures: list[tuple[Labelled, ...]] = [(({}, each),) for each in _process(service, version)]
        if service.health.phase in (Phase.READY, Phase.DRAINING):
            replicas = enumerate(service.loaded.engine.statistics())
            figures = [_replica(service.loaded, number, each) for number, each in replicas]
            self._figures += zip(*figures, strict=True)

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        for replicas in self._figures:
            yield from metrics(replicas)


async def exposition(service: Service, version: str) -> bytes:
    """All of `/metrics`. Formatted in a thread: it takes 1.4 ms, longer than the loop may be held."""
    return await asyncio.to_thread(generate_latest, Scrape(service, version))


def _process(service: Service, version: str) -> Iterator[Figure]:
    health = service.health
    yield _gauge("loom_info", "Version of the server.", 1, version=version)
    yield _gauge("loom_ready", "1 when requests are accepted.", health.phase is Phase.READY)
    yield _gauge("loom_start_progress", "Progress of startup, 0 to 1.", health.progress)
    yield _gauge("loom_start_time_seconds", "Start time of the process, in Unix seconds.", service.started_at)


def _replica(loaded: Loaded, number: int, s: EngineStatistics) -> Iterator[Labelled]:
    labels = {"model_name": loaded.card.name, "engine": str(number)}
    for figure in (*_engine(s), *_adapters(loaded, number, s.scheduler)):
        yield labels, figure


def _engine(s: EngineStatistics) -> Iterator[Figure]:
    yield from _queue(s)
    yield from _tokens(s)
    yield from _cache(s)
    yield _gauge("loom_step_seconds", "Device seconds of the last step.", s.step_seconds)
    yield _counter("loom_device_seconds_total", "Device seconds of all steps.", s.device_seconds)
    yield _gauge("loom_loop_lag_seconds", "Highest recent delay of the event loop, in seconds.", s.loop_lag)
    yield from _latencies(s)
    if s.drafts is not None:
        yield from _drafts(s.drafts)


def _queue(s: EngineStatistics) -> Iterator[Figure]:
    q = s.scheduler
    yield _gauge("loom_requests_running", "Running requests.", q.running)
    yield _gauge("loom_requests_waiting", "Waiting requests.", q.waiting)
    yield _gauge("loom_tokens_waiting", "Prompt tokens of waiting requests.", q.waiting_tokens)
    yield _gauge("loom_steps_in_flight", "Steps submitted and not applied.", q.in_flight)
    yield _counter("loom_steps_total", "Steps applied.", q.steps)
    yield _counter("loom_retractions_total", "Preemptions.", q.retractions)
    finished = [((reason,), (count,)) for reason, count in sorted(q.finished.items())]
    name = "loom_requests_finished_total"
    yield Figure(CounterMetricFamily, name, "Requests ended, by reason.", finished, ("finished_reason",))
    yield _counter("sglang:num_requests_total", "Requests ended.", sum(q.finished.values()))
    yield _counter("sglang:num_aborted_requests_total", "Requests aborted.", q.finished.get("abort", 0))


def _tokens(s: EngineStatistics) -> Iterator[Figure]:
    q = s.scheduler
    yield _counter("loom_prompt_tokens_total", "Prompt tokens.", q.prompt_tokens)
    yield _counter("loom_output_tokens_total", "Generated tokens.", q.output_tokens)
    yield _counter("loom_cached_tokens_total", "Prompt tokens found in the cache.", q.cached_tokens)


def _cache(s: EngineStatistics) -> Iterator[Figure]:
    c = s.scheduler.cache
    used = c.total - c.free - c.cached
    yield _gauge("loom_cache_pages", "Pages in the pool.", c.total)
    yield _gauge("loom_cache_pages_free", "Free pages.", c.free)
    yield _gauge("loom_cache_pages_cached", "Pages held by the prefix cache only.", c.cached)
    yield _gauge("loom_cache_pages_protected", "Cached pages that running requests use.", c.protected)
    yield _gauge("loom_cache_pages_pinned", "Cached pages that clients pinned.", c.pinned)
    yield _gauge("loom_cache_pins", "Prefixes that clients pinned.", c.pins)
    yield _gauge("loom_cache_nodes", "Nodes of the radix tree.", c.nodes)
    yield _counter("loom_cache_evicted_pages_total", "Pages evicted.", c.evicted_pages)
    yield _gauge(
        "loom_cache_usage_ratio",
        "Share of the pool that running requests hold.",
        used / c.total if c.total else 0.0,
    )
    yield _gauge("sglang:num_used_tokens", "Tokens that running requests hold.", used * c.page_size)
    yield _gauge("sglang:max_total_num_tokens", "Tokens the pool can hold.", c.total * c.page_size)
    yield _counter("loom_cache_queried_tokens_total", "Tokens looked up in the cache.", c.queried_tokens)
    yield _counter("loom_cache_hit_tokens_total", "Tokens found in the cache.", c.hit_tokens)
    yield _gauge(
        "loom_cache_hit_ratio",
        "Hit rate of the prefix cache, by tokens.",
        c.hit_tokens / c.queried_tokens if c.queried_tokens else 0.0,
    )
    shape = "Shape of the KV pool."
    pages, size = str(c.total), str(c.page_size)
    yield _gauge("vllm:cache_config_info", shape, 1, block_size=size, num_gpu_blocks=pages)
    yield _gauge("sglang:cache_config_info", shape, 1, page_size=size, num_pages=pages)


def _latencies(s: EngineStatistics) -> Iterator[Figure]:
    yield _histogram("loom_time_to_first_token_seconds", "Seconds from arrival to the first token.", s.ttft)
    yield _histogram("loom_inter_token_latency_seconds", "Seconds between tokens.", s.inter_token)
    yield _histogram("loom_e2e_request_latency_seconds", "Seconds from arrival to the end.", s.end_to_end)
    yield _histogram("loom_queue_time_seconds", "Seconds from arrival to the first step.", s.queue)


def _drafts(d: DraftStatistics) -> Iterator[Figure]:
    yield _counter("loom_drafts_total", "Rows of steps that verified drafts.", d.rows)
    yield _counter("loom_draft_tokens_total", "Draft tokens verified.", d.drafted)
    text = "Draft tokens equal to what was sampled, also those behind a stop."
    yield _counter("loom_accepted_tokens_total", text, d.accepted)
    name, text = "loom_accepted_tokens_per_position_total", "Accepted draft tokens, by position in their row."
    positions = [((str(position),), (count,)) for position, count in enumerate(d.per_position)]
    yield Figure(CounterMetricFamily, name, text, positions, ("position",))
    yield _gauge("loom_accept_length", "Mean tokens of a row with drafts, since the start.", d.length)
    yield _gauge("loom_accept_ratio", "Share of the drafts accepted, since the start.", d.rate)


def _adapters(loaded: Loaded, number: int, s: SchedulerStatistics) -> Iterator[Figure]:
    if loaded.adapters is None or (a := loaded.adapters.statistics(number)) is None:
        return
    yield _gauge("loom_adapters_loaded", "Loaded LoRA adapters.", a.loaded)
    yield _gauge("loom_adapters_host", "LoRA adapters in host memory.", a.host)
    yield _gauge("loom_adapters_placed", "LoRA adapters on the device.", a.taken)
    yield _gauge("loom_adapter_places", "LoRA adapters that fit on the device.", a.places)
    # After vLLM: the value is the time, so that of several label sets the latest can be told.
    yield _gauge(
        "vllm:lora_requests_info",
        "LoRA adapters of requests.",
        time.time(),
        max_lora=str(a.places),
        running_lora_adapters=",".join(loaded.adapters.names(s.running_adapters)),
        waiting_lora_adapters=",".join(loaded.adapters.names(s.waiting_adapters)),
    )


def _gauge(name: str, help: str, value: float, **labels: str) -> Figure:
    return Figure(GaugeMetricFamily, name, help, [(tuple(labels.values()), (value,))], tuple(labels))


def _counter(name: str, help: str, value: float) -> Figure:
    return Figure(CounterMetricFamily, name, help, [((), (value,))])


def _histogram(name: str, help: str, histogram: Histogram) -> Figure:
    bounds = (*(f"{bound:g}" for bound in histogram.bounds), "+Inf")
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return Figure(HistogramMetricFamily, name, help, [((), (buckets, histogram.total))])
