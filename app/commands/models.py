"""`python -m app models`: which architectures are served."""

from __future__ import annotations

from collections.abc import Mapping

from core.models.registry import served

_EIGHT_BITS = ("fp8", "int8")
_INT4 = ("awq", "gptq", "w4a16")

FORMATS: Mapping[str, tuple[str, str]] = {
    "DeepseekV2ForCausalLM": ("deepseek_v3", "-"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "think"),
    "Gemma2ForCausalLM": ("-", "-"),
    "Gemma3ForCausalLM": ("functiongemma", "-"),
    "Gemma3ForConditionalGeneration": ("-", "-"),
    "Glm4MoeForCausalLM": ("glm", "think"),
    "Glm4MoeLiteForCausalLM": ("glm", "think"),
    "GptOssForCausalLM": ("harmony", "harmony"),
    "GraniteForCausalLM": ("granite", "granite"),
    "LlamaForCausalLM": ("llama3", "-"),
    "MistralForCausalLM": ("mistral", "mistral"),
    "MixtralForCausalLM": ("mistral", "-"),
    "Olmo2ForCausalLM": ("-", "-"),
    "Olmo3ForCausalLM": ("olmo3", "think"),
    "Phi3ForCausalLM": ("phi4_mini_json", "-"),
    "Qwen2ForCausalLM": ("hermes", "-"),
    "Qwen2MoeForCausalLM": ("hermes", "-"),
    "Qwen3ForCausalLM": ("hermes", "think"),
    "Qwen3MoeForCausalLM": ("hermes", "think"),
    "Qwen3NextForCausalLM": ("hermes", "think"),
    "Qwen3_5ForCausalLM": ("qwen3_coder", "think"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_coder", "think"),
    "Qwen3_5MoeForCausalLM": ("qwen3_coder", "think"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_coder", "think"),
    "SmolLM3ForCausalLM": ("hermes", "think"),
}
"""Formats of tool calls and of reasoning that chat models of an architecture mostly write. A start takes them
from the checkpoint's chat template instead (`--tool-parser auto`, `--reasoning-parser auto`)."""


def run() -> int:
    """Print a line for each. Returns the exit code."""
    print("\n".join(lines()))
    return 0


def lines() -> list[str]:
    """A table: what `architectures` of a config.json says, what it is served for, whose layers run it, how
    its chat models write, and from which files. Which others transformers can run is only known once their
    config is tried."""
    rows = [("ARCHITECTURE", "TASK", "LAYERS", "TOOLS", "REASONING", "WEIGHTS")]
    for each in served():
        weights = ["safetensors", *_EIGHT_BITS * each.eight_bits, *_INT4 * each.int4, *["mxfp4"] * each.mxfp4]
        weights += ["gguf"] * each.gguf
        formats = FORMATS[each.architecture] if each.task == "generate" else ("-", "-")
        rows.append((each.architecture, each.task, "native", *formats, ", ".join(weights)))
    rows.append(("other ...ForCausalLM", "generate", "transformers", "-", "-", "safetensors"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
