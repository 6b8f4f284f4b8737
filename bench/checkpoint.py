"""Writes a checkpoint of random weights: `python -m bench.checkpoint --model configs/models/qwen3-8b --out
DIR`.

To measure loading from files (16 GB in shards for an 8B model) without a download. The weights are those of
`--load-format dummy` on the same device.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu.build import spec_of
from gpu.layers.linear import Places
from gpu.weights.load import load_model

SHARD = 4 << 30
"""Maximum bytes of a file, unless a single tensor is larger."""


def shards(places: Places, most: int) -> Iterator[dict[str, Tensor]]:
    """Split `places` into shards of at most `most` bytes, in order."""
    held: dict[str, Tensor] = {}
    size = 0
    for name, place in places.items():
        if held and size + place.nbytes > most:
            yield held
            held, size = {}, 0
        held[name] = place
        size += place.nbytes
    if held:
        yield held


def write_checkpoint(model: Path, out: Path, dtype: torch.dtype, device: torch.device, most: int) -> int:
    """Write a directory for `--model`. Returns the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    for each in model.iterdir():
        if each.is_file():
            shutil.copy(each, out / each.name)
    parts = list(shards(load_model(spec_of(model), None, dtype, device).places(), most))
    index: dict[str, str] = {}
    total = 0
    for at, part in enumerate(parts, 1):
        name = f"model-{at:05}-of-{len(parts):05}.safetensors"
        save_file({key: place.cpu().contiguous() for key, place in part.items()}, out / name)
        index |= dict.fromkeys(part, name)
        total += sum(place.nbytes for place in part.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(content, indent=1) + "\n")
    return total


def main() -> None:
    """Write the checkpoint and print its size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total = write_checkpoint(args.model, args.out, getattr(torch, args.dtype), device, SHARD)
    print(f"{total / 1e9:.2f} GB in {args.out}")


if __name__ == "__main__":
    main()
