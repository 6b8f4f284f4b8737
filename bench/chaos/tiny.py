"""A model of two layers that needs only a config file, and a free port."""

from __future__ import annotations

import contextlib
import json
import secrets
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
    """A free port below Linux's ephemeral ports, which begin at 32,768: the kernel could give one of those to
    a client before the server listens on it."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # not `random`: tests seed it alike in all workers
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
