"""Names that dashboards depend on, and the format that scrapers parse."""

from __future__ import annotations

import re

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from app.http.keys import SERVICE
from tests.rigs.metrics import samples
from tests.rigs.server import Server

TYPES = {
    "gauge": """
        loom_info loom_ready loom_start_progress loom_start_time_seconds loom_step_seconds
        loom_requests_running loom_requests_waiting loom_tokens_waiting loom_steps_in_flight
        loom_loop_lag_seconds loom_cache_pages loom_cache_pages_free loom_cache_pages_cached
        loom_cache_pages_protected loom_cache_nodes loom_cache_usage_ratio loom_cache_hit_ratio
        loom_cache_pages_pinned loom_cache_pins loom_stream_interval
        vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
        vllm:cache_config_info
        sglang:num_running_reqs sglang:num_queue_reqs sglang:token_usage sglang:num_used_tokens
        sglang:max_total_num_tokens sglang:cache_hit_rate sglang:cache_config_info
        loom_startup_seconds loom_requests_retracted loom_output_tokens_per_second
        loom_device_busy_ratio loom_cache_page_tokens
        vllm:num_requests_waiting_by_reason vllm:engine_sleep_state
        sglang:startup_time_seconds sglang:num_retracted_reqs sglang:gen_throughput sglang:utilization
        sglang:page_size sglang:num_pages
    """,
    "counter": """
        loom_device_seconds_total loom_steps_total loom_requests_refused_total loom_retractions_total
        loom_requests_finished_total loom_prompt_tokens_total loom_output_tokens_total
        loom_cached_tokens_total loom_cache_evicted_pages_total loom_cache_queried_tokens_total
        loom_cache_hit_tokens_total
        vllm:num_preemptions_total vllm:request_success_total vllm:prompt_tokens_total
        vllm:generation_tokens_total vllm:prompt_tokens_cached_total vllm:prefix_cache_queries_total
        vllm:prefix_cache_hits_total
        sglang:num_retracted_reqs_total sglang:num_requests_total sglang:num_aborted_requests_total
        sglang:prompt_tokens_total sglang:generation_tokens_total sglang:cached_tokens_total
        loom_http_requests_total http_requests_total
        vllm:prompt_tokens_by_source_total sglang:num_retracted_requests_total
    """,
    "histogram": """
        loom_time_to_first_token_seconds loom_inter_token_latency_seconds
        loom_e2e_request_latency_seconds loom_queue_time_seconds
        vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds
        vllm:e2e_request_latency_seconds vllm:request_queue_time_seconds
        sglang:time_to_first_token_seconds sglang:inter_token_latency_seconds
        sglang:e2e_request_latency_seconds sglang:queue_time_seconds
        loom_prefill_time_seconds loom_decode_time_seconds loom_inference_time_seconds
        loom_time_per_output_token_seconds loom_request_prompt_tokens loom_request_output_tokens
        loom_request_longest_output_tokens loom_request_max_tokens loom_request_choices loom_step_tokens
        vllm:request_prefill_time_seconds vllm:request_decode_time_seconds
        vllm:request_inference_time_seconds vllm:request_time_per_output_token_seconds
        vllm:request_prompt_tokens vllm:request_generation_tokens
        vllm:request_max_num_generation_tokens vllm:request_params_max_tokens vllm:request_params_n
        vllm:iteration_tokens_total
        sglang:time_per_output_token_seconds sglang:per_stage_req_latency_seconds
    """,
}
"""Metrics of every server."""

FEATURES = {
    "gauge": """
        loom_accept_length loom_accept_ratio sglang:spec_accept_length sglang:spec_accept_rate
        loom_adapters_loaded loom_adapters_host loom_adapters_placed loom_adapter_places
        loom_adapter_places_usage_ratio vllm:lora_requests_info
        sglang:lora_pool_slots_used sglang:lora_pool_slots_total sglang:lora_pool_utilization
    """,
    "counter": """
        loom_drafts_total loom_draft_tokens_total loom_accepted_tokens_total
        loom_accepted_tokens_per_position_total
        vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total
        vllm:spec_decode_num_accepted_tokens_total vllm:spec_decode_num_accepted_tokens_per_pos_total
    """,
}
"""Metrics of speculative decoding and adapters."""


def types(*tables: dict[str, str]) -> dict[str, str]:
    """Type by name."""
    return {name: kind for table in tables for kind, names in table.items() for name in names.split()}


def typed(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))


async def test_metrics(server: Server) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with server.http.get("/metrics", headers=accept) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    assert text.endswith("\n")
    assert typed(text) == types(TYPES)
    assert set(re.findall(r"^# HELP (\S+) .+\.$", text, re.M)) == set(typed(text))
    values = samples(text)
    model = {"model_name": "org/tiny", "engine": "0"}

    def value(name: str, **labels: str) -> float:
        return values[name, frozenset({**model, **labels}.items())]

    assert value("loom_requests_waiting") == 2
    assert value("vllm:kv_cache_usage_perc") == 0.25
    assert value("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert value("sglang:cache_config_info", page_size="16", num_pages="100") == 1
    assert value("loom_requests_finished_total", finished_reason="stop") == 4
    assert value("sglang:cached_tokens_total", cache_source="device") == 250
    assert value("vllm:prompt_tokens_by_source_total", source="local_compute") == 750
    assert value("sglang:gen_throughput") == 25.0
    assert value("vllm:engine_sleep_state", sleep_state="awake") == 1
    name = "loom_time_to_first_token_seconds"
    assert [value(f"{name}_bucket", le=bound) for bound in ("0.1", "1", "+Inf")] == [3, 5, 6]
    assert value(f"{name}_count") == 6 and value(f"{name}_sum") == 4.5


async def test_features_add_names_and_change_none(featured: Server) -> None:
    assert typed(await featured.text("/metrics")) == types(TYPES, FEATURES)


async def test_another_parser_reads_the_same(featured: Server) -> None:
    text = await featured.text("/metrics")
    read = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {(s.name, frozenset(s.labels.items())): s.value for s in read} == samples(text)


async def test_answers_are_counted_by_route_and_not_by_path(server: Server) -> None:
    for path in ("/debug/requests/a", "/debug/requests/b", "/.env", "/wp-login.php", "/a?b=c"):
        async with server.http.get(path) as response:
            assert response.status == 404
    async with server.http.request("PROPFIND", "/pot") as response:
        assert response.status == 404
    async with server.http.get("/v1/completions") as response:
        assert response.status == 405
    async with server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}) as response:
        assert response.status == 200
    values = samples(await server.text("/metrics"))
    counts = {labels: n for (name, labels), n in values.items() if name == "loom_http_requests_total"}
    assert {
        tuple(dict(labels).get(key, "") for key in ("handler", "method", "status")): n
        for labels, n in counts.items()
    } == {
        ("/debug/requests/{id}", "GET", "404"): 2,
        ("none", "GET", "404"): 3,
        ("none", "GET", "405"): 1,
        ("none", "other", "404"): 1,
        ("/v1/completions", "POST", "200"): 1,
    }
    classes = {labels: n for (name, labels), n in values.items() if name == "http_requests_total"}
    assert classes[frozenset({("handler", "none"), ("method", "GET"), ("status", "4xx")})] == 4


async def test_labels_are_escaped(server: Server) -> None:
    service = server.app[SERVICE]
    card = msgspec.structs.replace(service.loaded.card, name='a"b\\c\nd')
    service.ready(msgspec.structs.replace(service.loaded, card=card))
    assert 'model_name="a\\"b\\\\c\\nd"' in await server.text("/metrics")
