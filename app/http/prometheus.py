"""`/metrics` in Prometheus' text format.

Every metric has a `loom_` name; those that dashboards and autoscalers of vLLM and SGLang need appear under
their names too. Names are fixed by a test. Computed only when scraped, from frozen snapshots: some load
generators scrape every 333 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from app.http.keys import RequestCounts
from app.http.limits import Account
from app.service import Loaded, Phase, Service
from core.stats import DraftStatistics, EngineStatistics, Histogram, Histograms, SchedulerStatistics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Not OpenMetrics: it renames metrics with a colon, which breaks dashboards."""

Kind = Literal["gauge", "counter", "histogram"]

_FAMILIES: Mapping[Kind, Callable[..., Any]] = MappingProxyType(
    {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
)

ALIASES: Mapping[str, tuple[str, ...]] = {
    "loom_startup_seconds": ("sglang:startup_time_seconds",),
    "loom_requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "loom_requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "loom_requests_retracted": ("sglang:num_retracted_reqs",),
    "loom_requests_finished_total": ("vllm:request_success_total",),
    "loom_retractions_total": (
        "vllm:num_preemptions_total",
        "sglang:num_retracted_requests_total",
        "sglang:num_retracted_reqs_total",
    ),
    "loom_prompt_tokens_total": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "loom_output_tokens_total": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "loom_output_tokens_per_second": ("sglang:gen_throughput",),
    "loom_cached_tokens_total": ("vllm:prompt_tokens_cached_total",),
    "loom_cache_pages": ("sglang:num_pages",),
    "loom_cache_page_tokens": ("sglang:page_size",),
    "loom_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    "loom_cache_queried_tokens_total": ("vllm:prefix_cache_queries_total",),
    "loom_cache_hit_tokens_total": ("vllm:prefix_cache_hits_total",),
    "loom_cache_hit_ratio": ("sglang:cache_hit_rate",),
    "loom_device_busy_ratio": ("sglang:utilization",),
    "loom_time_to_first_token_seconds": (
        "vllm:time_to_first_token_seconds",
        "sglang:time_to_first_token_seconds",
    ),
    "loom_inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "sglang:inter_token_latency_seconds",
    ),
    "loom_e2e_request_latency_seconds": (
        "vllm:e2e_request_latency_seconds",
        "sglang:e2e_request_latency_seconds",
    ),
    "loom_queue_time_seconds": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    "loom_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "loom_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "loom_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    # SGLang exports it no more, but its documentation and inference-perf still look for it.
    "loom_time_per_output_token_seconds": (
        "vllm:request_time_per_output_token_seconds",
        "sglang:time_per_output_token_seconds",
    ),
    "loom_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "loom_request_output_tokens": ("vllm:request_generation_tokens",),
    "loom_request_longest_output_tokens": ("vllm:request_max_num_generation_tokens",),
    "loom_request_max_tokens": ("vllm:request_params_max_tokens",),
    "loom_request_choices": ("vllm:request_params_n",),
    "loom_step_tokens": ("vllm:iteration_tokens_total",),
    "loom_adapters_placed": ("sglang:lora_pool_slots_used",),
    "loom_adapter_places": ("sglang:lora_pool_slots_total",),
    "loom_adapter_places_usage_ratio": ("sglang:lora_pool_utilization",),
    "loom_drafts_total": ("vllm:spec_decode_num_drafts_total",),
    "loom_draft_tokens_total": ("vllm:spec_decode_num_draft_tokens_total",),
    "loom_accepted_tokens_total": ("vllm:spec_decode_num_accepted_tokens_total",),
    "loom_accepted_tokens_per_position_total": ("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
    "loom_accept_length": ("sglang:spec_accept_length",),
    "loom_accept_ratio": ("sglang:spec_accept_rate",),
}
"""Further names of metrics."""


class Figure(NamedTuple):
    """One figure. `labels` names those that it has besides the replica's; a sample is their values and its
    own."""

    kind: Kind
    name: str
    help: str
    samples: Sequence[tuple[tuple[str, ...], float | Histogram]]
    labels: tuple[str, ...] = ()


Labelled = tuple[Mapping[str, str], Figure]
"""A figure with the labels of its replica."""


class Scrape:
    """`prometheus_client`'s collector for one scrape. Before the model is loaded it has the metrics of the
    process only.

    Made on the event loop, where the statistics are read; `collect` may run in any thread.
    """

    def __init__(
        self, service: Service, requests: RequestCounts, accounts: Sequence[Account], version: str
    ) -> None:
        process = (*_process(service, version), *_http(requests), *_keys(accounts))
        self._figures: list[tuple[Labelled, ...]] = [(({}, each),) for each in process]
        if service.health.phase in (Phase.READY, Phase.DRAINING):
            replicas = enumerate(service.loaded.engine.statistics())
            figures = [_replica(service, number, each) for number, each in replicas]
            self._figures += zip(*figures, strict=True)

    def collect(self) -> Iterator[Metric]:
        """All metrics, each with the samples of every replica."""
        for replicas in self._figures:
            yield from metrics(replicas)


async def exposition(
    service: Service, requests: RequestCounts, accounts: Sequence[Account], version: str
) -> bytes:
    """All of `/metrics`. Formatted in a thread: it takes longer than the loop may be held."""
    return await asyncio.to_thread(generate_latest, Scrape(service, requests, accounts, version))


def metrics(replicas: Sequence[Labelled]) -> Iterator[Metric]:
    """The family of each name of one figure, with the samples of every replica."""
    shared, first = replicas[0]
    for name in (first.name, *ALIASES.get(first.name, ())):
        family = _FAMILIES[first.kind](name, first.help, labels=[*shared, *first.labels])
        for labels, figure in replicas:
            for own, sample in figure.samples:
                family.add_metric([*labels.values(), *own], *_values(sample))
        yield family


def _values(sample: float | Histogram) -> tuple[Any, ...]:
    """The arguments of `add_metric` for a sample."""
    if not isinstance(sample, Histogram):
        return (sample,)
    bounds = (*(f"{bound:g}" for bound in sample.bounds), "+Inf")
    return list(zip(bounds, accumulate(sample.counts), strict=True)), sample.total


# -- the figures -----------------------------------------------------------------------------------


def _process(service: Service, version: str) -> Iterator[Figure]:
    health = service.health
    yield _gauge("loom_info", "Version of the server.", 1, version=version)
    yield _gauge("loom_ready", "1 when requests are accepted.", health.phase is Phase.READY)
    yield _gauge("loom_start_progress", "Progress of the current stage of startup, 0 to 1.", health.progress)
    yield _gauge("loom_start_time_seconds", "Start time of the process, in Unix seconds.", service.started_at)


def _http(requests: RequestCounts) -> Iterator[Figure]:
    text, labels = "Answers by route pattern, method and status.", ("handler", "method", "status")
    counts = [((handler, method, str(status)), n) for (handler, method, status), n in requests.items()]
    yield Figure("counter", "loom_http_requests_total", text, counts, labels)
    # The name and the labels of prometheus-fastapi-instrumentator, which counts for vLLM and SGLang.
    classes: Counter[tuple[str, ...]] = Counter()
    for (handler, method, status), n in requests.items():
        classes[handler, method, f"{status // 100}xx"] += n
    yield Figure("counter", "http_requests_total", text, list(classes.items()), labels)


def _keys(accounts: Sequence[Account]) -> Iterator[Figure]:
    """Usage counters of the keys in --api-keys-file, labelled with the names of their tables."""
    named = [each for each in accounts if each.terms.name]
    figures: tuple[tuple[str, str, Callable[[Account], int]], ...] = (
        ("loom_key_requests_total", "Requests that were admitted, by API key.", lambda a: a.requests),
        ("loom_key_limited_total", "Requests over a limit, by API key.", lambda a: a.limited),
        ("loom_key_prompt_tokens_total", "Prompt tokens, by API key.", lambda a: a.prompt_tokens),
        ("loom_key_output_tokens_total", "Generated tokens, by API key.", lambda a: a.output_tokens),
    )
    for name, text, value in figures if named else ():
        yield _by("key", "counter", name, text, {each.terms.name: value(each) for each in named})


def _replica(service: Service, number: int, s: EngineStatistics) -> Iterator[Labelled]:
    loaded = service.loaded
    labels = {"model_name": loaded.card.name, "engine": str(number)}
    for figure in (*_engine(s), *_adapters(loaded, number, s.scheduler), *_state(service)):
        yield labels, figure


def _state(service: Service) -> Iterator[Figure]:
    yield _gauge("loom_startup_seconds", "Seconds from the start until ready.", service.startup_seconds)
    asleep = service.loaded.operator.asleep
    # vLLM's states: the weights come back with the wake-up, so that `discard_all` never holds.
    states = {"awake": not asleep, "weights_offloaded": "weights" in asleep, "discard_all": False}
    yield _by("sleep_state", "gauge", "vllm:engine_sleep_state", "1 for what holds.", states)


def _engine(s: EngineStatistics) -> Iterator[Figure]:
    yield from _queue(s)
    yield from _tokens(s)
    yield from _cache(s)
    yield _gauge("loom_step_seconds", "Device seconds of the last step.", s.step_seconds)
    yield _counter("loom_device_seconds_total", "Device seconds of all steps.", s.device_seconds)
    yield _gauge("loom_device_busy_ratio", "Share of the last second that the device was in a step.", s.busy)
    yield _gauge("loom_loop_lag_seconds", "Highest recent delay of the event loop, in seconds.", s.loop_lag)
    yield _gauge("loom_stream_interval", "Steps whose tokens are one event of a stream.", s.stream_interval)
    yield from _latencies(s.histograms)
    yield from _sizes(s.histograms)
    if s.drafts is not None:
        yield from _drafts(s.drafts)


def _queue(s: EngineStatistics) -> Iterator[Figure]:
    q = s.scheduler
    yield _gauge("loom_requests_running", "Running requests.", q.running)
    yield _gauge("loom_requests_waiting", "Waiting requests.", q.waiting)
    yield _gauge("loom_requests_retracted", "Waiting requests that were preempted.", q.retracted)
    reasons = {"capacity": q.waiting, "deferred": 0}  # nothing else is waited for
    name = "vllm:num_requests_waiting_by_reason"
    yield _by("reason", "gauge", name, "Waiting requests, by reason.", reasons)
    yield _gauge("loom_tokens_waiting", "Prompt tokens of waiting requests.", q.waiting_tokens)
    yield _gauge("loom_steps_in_flight", "Steps submitted and not applied.", q.in_flight)
    yield _counter("loom_steps_total", "Steps applied.", q.steps)
    yield _counter("loom_retractions_total", "Preemptions.", q.retractions)
    name, finished = "loom_requests_finished_total", dict(sorted(s.finished.items()))
    yield _by("finished_reason", "counter", name, "Requests ended, by reason.", finished)
    name, refused = "loom_requests_refused_total", dict(sorted(q.refused.items()))
    yield _by("reason", "counter", name, "Requests that were not queued, by reason.", refused)
    yield _counter("sglang:num_requests_total", "Requests ended.", sum(s.finished.values()))
    yield _counter("sglang:num_aborted_requests_total", "Requests aborted.", s.finished.get("abort", 0))


def _tokens(s: EngineStatistics) -> Iterator[Figure]:
    q = s.scheduler
    yield _counter("loom_prompt_tokens_total", "Prompt tokens.", q.prompt_tokens)
    yield _counter("loom_output_tokens_total", "Generated tokens.", q.output_tokens)
    text = "Prompt tokens found in the cache."
    yield _counter("loom_cached_tokens_total", text, q.cached_tokens)
    yield _counter("sglang:cached_tokens_total", text, q.cached_tokens, cache_source="device")
    sources = {
        "local_compute": q.prompt_tokens - q.cached_tokens,
        "local_cache_hit": q.cached_tokens,
        "external_kv_transfer": 0,
    }
    name = "vllm:prompt_tokens_by_source_total"
    yield _by("source", "counter", name, "Prompt tokens, by where their KV is from.", sources)
    text = "Generated tokens per second, over the last second."
    yield _gauge("loom_output_tokens_per_second", text, s.output_rate)


def _cache(s: EngineStatistics) -> Iterator[Figure]:
    c = s.scheduler.cache
    used = c.total - c.free - c.cached
    yield _gauge("loom_cache_pages", "Pages in the pool.", c.total)
    yield _gauge("loom_cache_page_tokens", "Tokens of a page.", c.page_size)
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


def _latencies(h: Histograms) -> Iterator[Figure]:
    yield _histogram("loom_time_to_first_token_seconds", "Seconds from arrival to the first token.", h.ttft)
    yield _histogram(
        "loom_inter_token_latency_seconds",
        "Seconds between two deliveries of a request's tokens.",
        h.inter_token,
    )
    yield _histogram("loom_e2e_request_latency_seconds", "Seconds from arrival to the end.", h.end_to_end)
    yield _histogram("loom_queue_time_seconds", "Seconds from arrival to the first step.", h.queue)
    text = "Seconds from the first step to the first token, or to the end of what generates none."
    yield _histogram("loom_prefill_time_seconds", text, h.prefill)
    yield _histogram("loom_decode_time_seconds", "Seconds from the first token to the end.", h.decode)
    yield _histogram("loom_inference_time_seconds", "Seconds from the first step to the end.", h.inference)
    text = "Mean seconds between the tokens of a request."
    yield _histogram("loom_time_per_output_token_seconds", text, h.per_token)
    text = "Seconds of a request in each stage, under SGLang's names of them."
    stages = {"prefill_waiting": h.queue, "prefill_forward": h.prefill, "decode_forward": h.decode}
    copies = {stage: _copied(each) for stage, each in stages.items()}
    yield _by("stage", "histogram", "sglang:per_stage_req_latency_seconds", text, copies)


def _sizes(h: Histograms) -> Iterator[Figure]:
    yield _histogram("loom_request_prompt_tokens", "Prompt tokens of a request.", h.prompt_tokens)
    yield _histogram("loom_request_output_tokens", "Generated tokens of a request.", h.output_tokens)
    text = "Generated tokens of the longest choice of a request with 'n'."
    yield _histogram("loom_request_longest_output_tokens", text, h.longest)
    yield _histogram("loom_request_max_tokens", "Tokens that a request may generate.", h.max_tokens)
    yield _histogram("loom_request_choices", "Choices of a request: its 'n'.", h.choices)
    yield _histogram("loom_step_tokens", "Prompt and generated tokens of a step.", h.step_tokens)


def _drafts(d: DraftStatistics) -> Iterator[Figure]:
    yield _counter("loom_drafts_total", "Rows of steps that verified drafts.", d.rows)
    yield _counter("loom_draft_tokens_total", "Draft tokens verified.", d.drafted)
    text = "Draft tokens equal to what was sampled, also those behind a stop."
    yield _counter("loom_accepted_tokens_total", text, d.accepted)
    name, text = "loom_accepted_tokens_per_position_total", "Accepted draft tokens, by position in their row."
    positions = {str(position): count for position, count in enumerate(d.per_position)}
    yield _by("position", "counter", name, text, positions)
    yield _gauge("loom_accept_length", "Mean tokens of a row with drafts, since the start.", d.length)
    yield _gauge("loom_accept_ratio", "Share of the drafts accepted, since the start.", d.rate)


def _adapters(loaded: Loaded, number: int, s: SchedulerStatistics) -> Iterator[Figure]:
    if (a := loaded.adapters.statistics(number)) is None:
        return
    yield _gauge("loom_adapters_loaded", "Loaded LoRA adapters.", a.loaded)
    yield _gauge("loom_adapters_host", "LoRA adapters in host memory.", a.host)
    yield _gauge("loom_adapters_placed", "LoRA adapters on the device.", a.taken)
    yield _gauge("loom_adapter_places", "LoRA adapters that fit on the device.", a.places)
    used = a.taken / a.places if a.places else 0.0
    yield _gauge("loom_adapter_places_usage_ratio", "Share of the places for adapters that are taken.", used)
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
    return Figure("gauge", name, help, [(tuple(labels.values()), value)], tuple(labels))


def _counter(name: str, help: str, value: float, **labels: str) -> Figure:
    return Figure("counter", name, help, [(tuple(labels.values()), value)], tuple(labels))


def _by(label: str, kind: Kind, name: str, help: str, values: Mapping[str, float | Histogram]) -> Figure:
    """A figure with a sample for each value of one label."""
    return Figure(kind, name, help, [((each,), sample) for each, sample in values.items()], (label,))


def _histogram(name: str, help: str, histogram: Histogram) -> Figure:
    return Figure("histogram", name, help, [((), _copied(histogram))])


def _copied(histogram: Histogram) -> Histogram:
    """A copy: the thread that formats it must not see counts and sum of two moments."""
    return Histogram(histogram.bounds, list(histogram.counts), histogram.total)
