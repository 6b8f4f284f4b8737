"""Configs: fields that every family has, and one of a published checkpoint that several tests read."""

from __future__ import annotations

import json
from pathlib import Path

BASE: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1000,
}

ROOT = Path(__file__).parents[2]
GPT_OSS_20B: dict[str, object] = json.loads((ROOT / "configs/models/gpt-oss-20b/config.json").read_text())
"""openai/gpt-oss-20b's, as a test of circuit-tracer quotes it (decoderesearch, GitHub)."""
