"""GGUF files: their metadata as a Hugging Face config, their tensors dequantised.

Names and rope layout follow llama.cpp's convert_hf_to_gguf.py, undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from core.errors import ModelError
from gpu.weights.files import Progress, Task, run_tasks
from gpu.weights.fill import Filler
from gpu.weights.gguf_file import GgufFile, GgufTensor

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_ROPE_FREQS = "rope_freqs.weight"
"""Llama 3's scaling as a tensor of divisors; it goes into the config instead."""


_RUN = 16
"""Tensors per task of the reading threads."""


def config_from_gguf(path: Path) -> dict[str, object]:
    """The file's metadata as the config.json of the same model."""
    file = GgufFile(path)
    arch = str(file.facts.get("general.architecture"))
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{path.name}: GGUF architecture {arch} is not supported. Supported: {', '.join(ARCHITECTURES)}."
        )

    def fact(name: str, default: float | None = None) -> float:
        """A number among the facts of the architecture."""
        value = file.facts.get(f"{arch}.{name}", default)
        if value is None or isinstance(value, str):
            raise ModelError(f"{path.name}: {arch}.{name} must be a number, got {value!r}.")
        return value

    tensors = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path.name} holds no token_embd.weight.")
    hidden, heads = fact("embedding_length"), fact("attention.head_count")
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv", heads),
        "head_dim": int(fact("attention.key_length", hidden // max(heads, 1))),
        "max_position_embeddings": fact("context_length"),
        # Stored as float32: 1e-5 reads back as 9.99999975e-06.
        "rms_norm_eps": round(fact("attention.layer_norm_rms_epsilon"), 10),
        "rope_theta": fact("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(file, arch, fact),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "dtype": "float32",
        "bos_token_id": file.facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.facts.get("tokenizer.ggml.eos_token_id"),
    }


def _scaling(file: GgufFile, arch: str, fact: Callable[..., float]) -> dict[str, object] | None:
    """Rope scaling in Hugging Face's words."""
    for tensor in file.tensors:
        if tensor.name == _ROPE_FREQS:
            # The divisors of Llama 3.1 to 3.3; all of them use these bands, and the largest is the factor.
            return {
                "rope_type": "llama3",
                "factor": float(file.rows(tensor, tensor.shape[-1] * 4).view(np.float32).max()),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    kind = file.facts.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, object] = {"rope_type": kind, "factor": fact("rope.scaling.factor")}
    if original := fact("rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    return scaling


def hf_name(name: str) -> str | None:
    """Checkpoint name of a GGUF tensor; None for one that is no weight. Unknown names stay as they
    are, so that the books of the filler show them."""
    if name == _ROPE_FREQS:
        return None
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{suffix}"
    return name


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * dim, ...] from llama.cpp's interleaved rope order to two halves per head."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def fill_from_gguf(filler: Filler, path: Path, device: torch.device, progress: Progress) -> None:
    """Dequantise every tensor into its place. Raises `ModelError` for a file that cannot be read."""
    file = GgufFile(path)
    permuted: dict[str, int] = {}
    if file.facts.get("general.architecture") == "llama":
        heads = int(file.facts["llama.attention.head_count"])
        permuted = {"attn_q": heads, "attn_k": int(file.facts.get("llama.attention.head_count_kv", heads))}
    tensors = [tensor for tensor in file.tensors if hf_name(tensor.name) is not None]
    tasks = [
        _reader(filler, file, tensors[first : first + _RUN], permuted)
        for first in range(0, len(tensors), _RUN)
    ]
    run_tasks(tasks, len(tensors), device, progress)


def _reader(filler: Filler, file: GgufFile, tensors: list[GgufTensor], permuted: Mapping[str, int]) -> Task:
    # The package of the quantisation formats, imported only where a .gguf file is read.
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    def values(tensor: GgufTensor) -> torch.Tensor:
        try:
            kind = GGMLQuantizationType(tensor.kind)
            block, size = GGML_QUANT_SIZES[kind]
            found = dequantize(file.rows(tensor, tensor.shape[-1] // block * size), kind)
        except (RuntimeError, ValueError, KeyError) as error:  # an unknown format is a RuntimeError
            raise ModelError(f"Cannot dequantise {tensor.name} of the GGUF file: {error}.") from error
        # A copy where nothing was dequantised: torch takes no read-only memory.
        return torch.from_numpy(np.array(found, np.float32, copy=None if found.flags.writeable else True))

    def read(tick: Callable[[], None]) -> None:
        for tensor in tensors:
            name = hf_name(tensor.name)
            if name is not None and filler.wants(name, tensor.shape):
                weight = values(tensor).reshape(tensor.shape)
                heads = permuted.get(tensor.name.split(".")[-2])
                filler.put(name, weight if heads is None else unpermute(weight, heads))
            tick()

    return read
