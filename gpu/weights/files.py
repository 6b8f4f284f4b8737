"""Safetensors: one file, or shards named by an index. Read through mmap by a few threads."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from core.env import read_object
from core.errors import ModelError
from core.models import Int4
from core.models.quant import MXFP4_GROUP
from gpu.quant import mxfp4
from gpu.quant.mxfp4 import restore
from gpu.quant.rows import FileRows, Restore
from gpu.quant.scaled import EIGHT_BITS
from gpu.thread import device_thread
from gpu.weights.experts import Stack
from gpu.weights.fill import Filler
from gpu.weights.fp8 import SCALES, as_place_scale, dequantise, is_scale
from gpu.weights.int4 import beside, is_beside, layer_of, read_packed
from gpu.weights.stage import readers

_SLAB = 2**22
"""Numbers of two tables that are compared at once."""

_RUN = 32
"""Tensors per task: a model of one file still spreads over the threads."""

Progress = Callable[[float], None]
"""Called with the share done, 0 to 1, from any thread."""

Task = Callable[[Callable[[], None]], None]
"""Reads some tensors; calls its argument after each."""


def fill_from_safetensors(
    filler: Filler,
    directory: Path,
    device: torch.device,
    progress: Progress,
    int4: Int4 | None = None,
    within: str = "",
) -> None:
    """Fill from a Hugging Face directory, whose weights of 4 bits lie as `int4` says, with the tensors whose
    names begin as `within`. Raises `ModelError` naming the file that is missing, truncated or not in the
    format."""
    found = names_by_file(directory)
    files = {path: [name for name in names if name.startswith(within)] for path, names in found.items()}
    holders = {name: path for path, names in files.items() for name in names}
    tasks = [
        _reader(filler, path, names[first : first + _RUN], holders, int4)
        for path, names in files.items()
        for first in range(0, len(names), _RUN)
    ]
    run_tasks(tasks, sum(map(len, files.values())), device, progress)


def run_tasks(tasks: list[Task], total: int, device: torch.device, progress: Progress) -> None:
    """Run tasks, each given a function to call per tensor done, on the reading threads.

    The first error cancels what has not begun and is raised.
    """
    done = iter(range(1, total + 1))

    def tick() -> None:
        progress(next(done, total) / total)

    def run(task: Task) -> None:
        with device_thread(device):
            task(tick)

    with ThreadPoolExecutor(readers(device), "loom-load") as pool:
        futures = [pool.submit(run, task) for task in tasks]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _reader(
    filler: Filler, path: Path, names: list[str], holders: Mapping[str, Path], int4: Int4 | None
) -> Task:
    """Reads `names` of the file at `path`; `holders` says where every other tensor is."""

    def read(tick: Callable[[], None]) -> None:
        with open_file(path) as file:
            shard = _Shard(path, file, holders)
            for name in names:
                try:
                    if (stack := filler.stack(name)) is not None:
                        _read_experts(filler, shard, name, stack)
                    elif int4 is None or not _read_int4(filler, shard, name, int4):
                        _read(filler, shard, name)
                except SafetensorError as error:
                    raise ModelError(f"{path}: cannot read {name}: {error}. Fetch it again.") from error
                tick()

    return read


class _Shard(NamedTuple):
    """An open file of a checkpoint; `holders` says where every tensor is."""

    path: Path
    file: safe_open
    holders: Mapping[str, Path]

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor in this file."""
        found: list[int] = self.file.get_slice(name).get_shape()
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor that may lie in another file. Most do not: opening a file for each of the 18,432 matrices
        of a Qwen3-30B-A3B would parse its header as often."""
        here = self.holders[name] == self.path
        with nullcontext(self.file) if here else open_file(self.holders[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _read(filler: Filler, shard: _Shard, name: str) -> None:
    if not is_scale(name) and filler.wants(name, shard.shape(name)):
        tensor = shard.tensor(name)
        if tensor.dtype in EIGHT_BITS:
            _put_scaled(filler, name, tensor, _scale(name, shard))
        else:
            filler.put(name, tensor)


def _read_int4(filler: Filler, shard: _Shard, name: str, int4: Int4) -> bool:
    """Read the layer whose numbers the tensor `name` has, with what lies beside them. False for a tensor that
    has nothing to do with 4 bits."""
    if not (layer := layer_of(int4, name)):
        # AutoGPTQ writes zeros where a layer has no bias.
        surplus = name.endswith(".bias") and filler.whole(name) is None
        return is_beside(int4, name) or (surplus and not shard.tensor(name).any())
    weight = f"{layer}.weight"
    if (shape := filler.whole(weight)) is None:
        filler.wants(weight, ())  # which takes note of it
        return True
    names = [name, *(each for each in beside(int4, layer) if each in shard.holders)]
    tensors = {each.rpartition(".")[2]: shard.tensor(each) for each in names}
    filler.put_coarse(weight, read_packed(int4, layer, shape, tensors))
    return True


def _read_experts(filler: Filler, shard: _Shard, name: str, stack: Stack) -> None:
    """Read the tensor `name` of all experts of a layer. Numbers in MXFP4 are restored with their scales where
    no place takes them as they lie."""
    shape = shard.shape(name)
    first = stack.place(0, "gate" if stack.fused else "down")
    restored = stack.packed and not filler.takes_mxfp4(first)
    if restored and stack.kind == "_scales":
        return
    if not stack.fits(shape):
        filler.wants(name, shape)  # which takes note of it
        return
    count, *own = shape
    outline = torch.empty([own[0], own[1] * MXFP4_GROUP] if restored else own, device="meta")
    outlines = [stack.parts(expert, outline) for expert in range(count)]
    wanted = [filler.wants(part, view.shape) for each in outlines for part, view in each.items()]
    if all(wanted):
        scales = _scales_of(name, shape, shard) if restored else None
        _put_experts(filler, name, stack, shard.tensor(name), scales)


def _put_experts(
    filler: Filler, name: str, stack: Stack, tensor: torch.Tensor, scales: torch.Tensor | None
) -> None:
    """Fill the places of all that the tensor `name` has: numbers that come with `scales` restored."""
    if stack.packed != (tensor.dtype == torch.uint8) or tensor.dtype in EIGHT_BITS:
        raise ModelError(f"{name} is {tensor.dtype}: stacked experts are read in 16 or 32 bits and in MXFP4.")
    if stack.kind == "_scales":
        mxfp4.check(name, tensor)
    for expert, each in enumerate(tensor):
        one = each if scales is None else restore(each.flatten(1), scales[expert])
        for part, view in stack.parts(expert, one).items():
            filler.put(part, view.contiguous())


def _scales_of(name: str, shape: list[int], shard: _Shard) -> torch.Tensor:
    """The scales of MXFP4 numbers of that `shape`, which may lie in another shard."""
    own = name.removesuffix("_blocks") + "_scales"
    scales = shard.tensor(own) if own in shard.holders else None
    if scales is None or list(scales.shape) != shape[:-1] or scales.dtype != torch.uint8:
        found = "missing" if scales is None else f"{list(scales.shape)}, {scales.dtype}"
        raise ModelError(f"{name} is MXFP4 and needs {own} {shape[:-1]}, torch.uint8, which is {found}.")
    return scales


def _put_scaled(filler: Filler, name: str, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Put a scaled weight. It is copied as it is if its place has the same dtype and kind of scale, and
    dequantised otherwise."""
    shape = filler.scale_shape(name, weight.dtype)
    kept = None if shape is None else as_place_scale(scale, shape)
    if kept is not None:
        filler.put(name, weight, kept)
    else:
        filler.put(name, dequantise(name, weight, scale))


def _scale(name: str, shard: _Shard) -> torch.Tensor:
    """The scale of a weight of 8 bits, which may lie in another shard."""
    for suffix in SCALES:
        if name + suffix in shard.holders:
            return shard.tensor(name + suffix)
    raise ModelError(f"{name} has 8 bits and no scale: neither {' nor '.join(name + s for s in SCALES)}.")


def open_file(path: Path) -> safe_open:
    """Map a file; its header must agree with its size."""
    if not path.is_file():
        raise ModelError(f"{path} is missing: fetch the checkpoint again.")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path} is truncated or not a safetensors file ({error}): fetch it again."
        ) from error


class Located(NamedTuple):
    """A tensor of a checkpoint: the file that has it, and its name."""

    path: Path
    name: str


def find_table(files: Mapping[Path, list[str]], end: str) -> Located | None:
    """The one tensor outside of layers whose name ends with `end`; None where there is none, or several."""
    found = [
        Located(path, name)
        for path, names in files.items()
        for name in names
        if name.endswith(end) and ".layers." not in name
    ]
    return found[0] if len(found) == 1 else None


def equal_tables(one: Located, other: Located) -> bool:
    """Whether two tensors have the same numbers, read a slab of rows at a time. Raises `ModelError`."""
    with open_file(one.path) as first, open_file(other.path) as second:
        try:
            left, right = first.get_slice(one.name), second.get_slice(other.name)
        except SafetensorError as error:
            raise ModelError(f"{one.path}, {other.path}: {error}: fetch them again.") from error
        if not (shape := left.get_shape()) or shape != right.get_shape():
            return False
        step = max(_SLAB // max(math.prod(shape[1:]), 1), 1)
        slabs = (slice(row, row + step) for row in range(0, shape[0], step))
        return all(torch.equal(left[rows].float(), right[rows].float()) for rows in slabs)


def table_in_files(directory: Path) -> FileRows | None:
    """The embedding of a Hugging Face directory, left in its file; None where it is quantised. Raises
    `ModelError`."""
    if (found := find_table(names_by_file(directory), "embed_tokens.weight")) is None:
        return None
    path, name = found
    with open_file(path) as checked:  # its header is not to be trusted before
        if name not in set(checked.keys()):
            raise ModelError(f"{path} lacks {name}, which the index says that it has: fetch it again.")
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(size))[name]
    (rows, inputs), (first, last) = entry["shape"], entry["data_offsets"]
    restore = _RESTORED.get(entry["dtype"])
    if restore is None:
        return None
    return FileRows(path, 8 + size + first, (last - first) // rows, (rows, inputs), restore)


_RESTORED: Mapping[str, Restore] = {
    "F32": lambda read: read.view(np.float32),
    "F16": lambda read: read.view(np.float16),
    "BF16": lambda read: (read.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
}


def names_by_file(directory: Path) -> dict[Path, list[str]]:
    """Tensor names of every file of a checkpoint."""
    index = directory / "model.safetensors.index.json"
    content = read_object(index)
    if content is None:
        single = directory / "model.safetensors"
        if not single.is_file():
            advice = "only safetensors and .gguf weights are read"
            if any(directory.glob("*.safetensors")):
                advice = "fetch the index, which names its *.safetensors"
            elif any(directory.glob("*.bin")):
                advice += ": convert its pytorch_model.bin"
            raise ModelError(
                f"{directory} has no model.safetensors and no model.safetensors.index.json; {advice}."
            )
        with open_file(single) as file:
            return {single: list(file.keys())}
    names = content.get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{index} is not an index of shards: it has no weight_map.")
    files: dict[Path, list[str]] = {}
    for name, shard in names.items():
        files.setdefault(directory / str(shard), []).append(name)
    # All of them before the first is read: a missing last shard should not cost the others' time.
    if gone := [path.name for path in files if not path.is_file()]:
        raise ModelError(
            f"{directory} lacks {', '.join(sorted(gone))}, named by {index.name}: fetch it again."
        )
    return files
