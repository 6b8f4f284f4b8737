"""Settings under which outputs on a GPU must match those on a CPU, for tiny models and for a trained one."""

from __future__ import annotations

from typing import Any

TINY_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "depth 0": {"overlap_depth": 0},
    "depth 2": {"overlap_depth": 2},
    "small chunks": {"step_tokens": 16},
    "prefill first": {"prefill_first": True},
    "no cache": {"radix": False},
    "retraction": {"kv_tokens": 208, "conservativeness": 0.01},
    "page 1": {"page_size": 1},
    "page 64": {"page_size": 64},
    "plain launches": {"cuda_graphs": False},
}


REAL_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no overlap": {"overlap_depth": 0},
    "two steps ahead": {"overlap_depth": 2},
    "chunks of 32": {"step_tokens": 32, "max_running": 8},
    "no cache": {"radix_cache": False},
    "retraction": {"kv_tokens": 512, "conservativeness": 0.01},
    "plain launches": {"cuda_graphs": False},
    "pages of 64": {"page_size": 64},
}
