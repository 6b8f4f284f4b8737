"""Names that dashboards depend on, and the format that scrapers parse."""

from __future__ import annotations

import re

from app.http.prometheus import escape
from tests.app.conftest import Server

LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? (\S+)')

NAMES = {
    *("loom_info", "loom_ready", "loom_start_progress", "loom_start_time_seconds", "loom_step_seconds"),
    "loom_device_seconds_total",
    *("loom_requests_running", "loom_requests_waiting", "loom_tokens_waiting", "loom_steps_in_flight"),
    *("loom_steps_total", "loom_retractions_total", "loom_requests_finished_total", "loom_loop_lag_seconds"),
    *("loom_prompt_tokens_total", "loom_output_tokens_total", "loom_cached_tokens_total"),
    *("loom_cache_pages", "loom_cache_pages_free", "loom_cache_pages_cached", "loom_cache_pages_protected"),
    *("loom_cache_nodes", "loom_cache_evicted_pages_total", "loom_cache_usage_ratio", "loom_cache_hit_ratio"),
    *("loom_cache_queried_tokens_total", "loom_cache_hit_tokens_total"),
    *("loom_cache_pages_pinned", "loom_cache_pins"),
    *("loom_time_to_first_token_seconds", "loom_inter_token_latency_seconds"),
    *("loom_e2e_request_latency_seconds", "loom_queue_time_seconds"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"),
    *("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:prompt_tokens_cached_total", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total"),
    *("vllm:prefix_cache_hits_total", "vllm:cache_config_info", "vllm:time_to_first_token_seconds"),
    *("vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"),
    "vllm:request_queue_time_seconds",
    *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_retracted_reqs_total"),
    *("sglang:num_requests_total", "sglang:num_aborted_requests_total", "sglang:prompt_tokens_total"),
    *("sglang:generation_tokens_total", "sglang:cached_tokens_total", "sglang:token_usage"),
    *("sglang:num_used_tokens", "sglang:max_total_num_tokens", "sglang:cache_hit_rate"),
    *("sglang:cache_config_info", "sglang:time_to_first_token_seconds"),
    *(
        "sglang:inter_token_latency_seconds",
        "sglang:e2e_request_latency_seconds",
        "sglang:queue_time_seconds",
    ),
}


async def test_metrics(server: Server) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with server.http.get("/metrics", headers=accept) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    assert text.endswith("\n")
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    assert set(typed) == NAMES
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            assert (match[1] + (match[2] or "")) not in values, "a sample appears twice"
            values[match[1] + (match[2] or "")] = float(match[3])
    labels = '{model_name="org/tiny",engine="0"'
    assert values[f"loom_requests_waiting{labels}}}"] == 2
    assert values[f"vllm:kv_cache_usage_perc{labels}}}"] == 0.25
    assert values[f'vllm:cache_config_info{labels},block_size="16",num_gpu_blocks="100"}}'] == 1
    assert values[f'sglang:cache_config_info{labels},page_size="16",num_pages="100"}}'] == 1
    assert values[f'loom_requests_finished_total{labels},finished_reason="stop"}}'] == 4
    name = "loom_time_to_first_token_seconds"
    buckets = [values[f'{name}_bucket{labels},le="{le}"}}'] for le in ("0.1", "1", "+Inf")]
    assert buckets == [3, 5, 6]
    assert values[f"{name}_count{labels}}}"] == 6 and values[f"{name}_sum{labels}}}"] == 4.5


def test_labels_are_escaped() -> None:
    assert escape('a"b\\c\nd') == 'a\\"b\\\\c\\nd'
