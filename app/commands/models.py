"""`python -m app models`: which architectures are served."""

from __future__ import annotations

from core.models.registry import served

_INT4 = ("awq", "gptq", "w4a16")


def run() -> int:
    """Print a line for each. Returns the exit code."""
    print("\n".join(lines()))
    return 0


def lines() -> list[str]:
    """A table: what `architectures` of a config.json says, what it is served for, whose layers run it, from
    which files. Which others transformers can run is only known once their config is tried."""
    rows = [("ARCHITECTURE", "TASK", "LAYERS", "WEIGHTS")]
    for each in served():
        weights = ["safetensors", *["fp8"] * each.fp8, *_INT4 * each.int4, *["mxfp4"] * each.mxfp4]
        weights += ["gguf"] * each.gguf
        rows.append((each.architecture, each.task, "native", ", ".join(weights)))
    rows.append(("other ...ForCausalLM", "generate", "transformers", "safetensors"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
