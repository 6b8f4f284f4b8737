"""A model of two layers that needs only a config file, and a free port."""

from __future__ import annotations

import json
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def dummy_model(directory: Path) -> Path:
    """A directory that `--load-format dummy` can serve."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "template.jinja").write_text(TEMPLATE)
    return directory


def flags(model: Path) -> list[str]:
    """Serve the dummy model with a small pool."""
    return [
        *("--model", str(model), "--load-format", "dummy"),
        *("--chat-template", str(model / "template.jinja")),
        *("--kv-tokens", "16384", "--device", "cpu"),
    ]


def free_port() -> int:
    """A port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
