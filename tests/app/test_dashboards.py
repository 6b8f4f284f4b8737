"""Dashboards find what they query: those of vLLM and SGLang, the scrape of llm-d, and our own."""

from __future__ import annotations

import json
import re

import pytest

from tests.rigs.metrics import samples
from tests.rigs.server import Server
from tests.rigs.tree import ROOT

VLLM = """
    e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
    time_to_first_token_seconds_bucket time_to_first_token_seconds_sum time_to_first_token_seconds_count
    inter_token_latency_seconds_bucket inter_token_latency_seconds_sum inter_token_latency_seconds_count
    request_time_per_output_token_seconds_bucket request_queue_time_seconds_sum
    request_prefill_time_seconds_sum request_decode_time_seconds_sum request_inference_time_seconds_sum
    request_prompt_tokens_bucket request_prompt_tokens_sum request_generation_tokens_bucket
    request_generation_tokens_sum request_max_num_generation_tokens_sum request_params_n_bucket
    request_params_max_tokens_bucket iteration_tokens_total_bucket prompt_tokens_total generation_tokens_total
    prompt_tokens_cached_total prompt_tokens_by_source_total request_success_total prefix_cache_queries_total
    prefix_cache_hits_total num_preemptions_total num_requests_running num_requests_waiting
    num_requests_waiting_by_reason kv_cache_usage_perc spec_decode_num_drafts_total
    spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
    spec_decode_num_accepted_tokens_per_pos_total engine_sleep_state
"""

SGLANG = """
    e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum time_to_first_token_seconds_bucket
    time_to_first_token_seconds_sum inter_token_latency_seconds_bucket time_per_output_token_seconds_bucket
    queue_time_seconds_bucket per_stage_req_latency_seconds_bucket num_running_reqs num_queue_reqs
    num_used_tokens max_total_num_tokens token_usage gen_throughput cache_hit_rate prompt_tokens_total
    generation_tokens_total cached_tokens_total num_requests_total num_aborted_requests_total
    num_retracted_reqs num_retracted_requests_total spec_accept_length spec_accept_rate utilization
    lora_pool_slots_used lora_pool_slots_total lora_pool_utilization startup_time_seconds page_size num_pages
"""

LLM_D = """
    vllm:num_requests_waiting vllm:num_requests_running vllm:kv_cache_usage_perc vllm:cache_config_info
    vllm:lora_requests_info sglang:num_queue_reqs sglang:num_running_reqs sglang:token_usage
    sglang:cache_config_info
"""

LABELS = {
    "vllm:request_success_total": {"finished_reason"},
    "vllm:num_requests_waiting_by_reason": {"reason"},
    "vllm:prompt_tokens_by_source_total": {"source"},
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": {"position"},
    "vllm:engine_sleep_state": {"sleep_state"},
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "sglang:cached_tokens_total": {"cache_source"},
    "sglang:per_stage_req_latency_seconds_bucket": {"stage", "le"},
    "sglang:cache_config_info": {"page_size", "num_pages"},
}
"""Labels that queries select or group by, besides `model_name` and `engine`."""

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
async def series(featured: Server) -> Series:
    return samples(await featured.text("/metrics"))


@pytest.mark.parametrize(
    "names",
    [
        {"http_requests_total", *(f"vllm:{name}" for name in VLLM.split())},
        {f"sglang:{name}" for name in SGLANG.split()},
        set(LLM_D.split()),
    ],
    ids=["vllm", "sglang", "llm-d"],
)
def test_other_engines_dashboards_have_every_series(series: Series, names: set[str]) -> None:
    labels: dict[str, set[str]] = {}
    for name, own in series:
        labels.setdefault(name, set()).update(key for key, _ in own)
    assert sorted(names - set(labels)) == []
    for name in names - {"http_requests_total"}:
        found, wanted = labels[name], {"model_name", "engine", *LABELS.get(name, ())}
        assert found >= wanted, name
    observed = {name: sum(series[key] for key in series if key[0] == name) for name in names}
    assert [
        name for name in sorted(names) if name.endswith(("_bucket", "_count")) and not observed[name]
    ] == []


# -- our own -----------------------------------------------------------------------------------------

LOOM = json.loads((ROOT / "configs/grafana/loom.json").read_text())
PANELS = [panel for panel in LOOM["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_of_our_dashboard_has_series_with_its_labels(series: Series, panel: dict) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        query, legend = target["expr"], target["legendFormat"]
        names = set(re.findall(r"\b(?:loom|vllm|sglang)[:_]\w+", query))
        assert names
        labels = set(re.findall(r"[{,](\w+)[!=]~?", query)) | set(re.findall(r"{{(\w+)}}", legend))
        for group in re.findall(r"\bby \(([^)]*)\)", query):
            labels |= set(group.replace(" ", "").split(","))
        shared = labels & {"model_name", "engine", "handler"}
        for name in names:
            found = [{key for key, _ in own} for each, own in series if each == name]
            assert found, name
            assert all(own >= shared for own in found), name
        everything = {key for name, own in series if name in names for key, _ in own}
        assert labels <= everything, query


TOPICS = """
    time_to_first_token_seconds inter_token_latency_seconds queue_time_seconds output_tokens_total
    requests_running requests_waiting step_tokens cache_hit_tokens_total cache_usage_ratio retractions_total
    accepted_tokens_total adapters_placed http_requests_total
"""


@pytest.mark.parametrize("topic", TOPICS.split())
def test_our_dashboard_shows(topic: str) -> None:
    assert any(f"loom_{topic}" in target["expr"] for panel in PANELS for target in panel["targets"])


def test_panels_of_our_dashboard_do_not_overlap() -> None:
    ids = [panel["id"] for panel in LOOM["panels"]]
    assert len(ids) == len(set(ids))
    cells: list[tuple[int, int]] = []
    for panel in LOOM["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells += [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]
    assert len(cells) == len(set(cells))
