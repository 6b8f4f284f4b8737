"""GGUF files: their metadata as a Hugging Face config, their tensors dequantised.

Names and rope layout follow llama.cpp's convert_hf_to_gguf.py, undone.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderTensor, dequantize

from core.errors import ModelError
from core.models.gguf import FACTORS, check_parts, gguf_config, gguf_facts, gguf_parts
from gpu.quant import mxfp4, q4
from gpu.quant.rows import FileRows
from gpu.weights.files import Progress, Task, run_tasks
from gpu.weights.fill import Filler

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
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
"""A layer's names in the file and ours, with {} for the number of an expert where a tensor holds the matrices
of all."""

_GEMMA = {"ffn_norm": "pre_feedforward_layernorm"}
_GROUPED = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
}
_LINEAR = {
    "attn_gate": "linear_attn.in_proj_z",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "ssm_a": "linear_attn.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_MIXED = {
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
}
_OWN: Mapping[str, Mapping[str, str]] = {
    "deepseek2": _GROUPED | _LATENT,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "glm4moe": _GROUPED,
    "gpt-oss": {"attn_sinks.weight": "self_attn.sinks"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen35": _LINEAR,
    "qwen35moe": _LINEAR,
    "qwen3next": _LINEAR | _MIXED,
}
"""Names by architecture that differ from `_LAYER` or come besides; some names are whole, with their end."""

_PERMUTED = ("granite", "llama", "smollm3")
"""Architectures whose q and k are in the order of interleaved rope."""

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
"""A layer's tensor: its layer, and its name there."""

_SLAB = 2**18
"""Numbers that are dequantised at once: some 5 MiB in passing, in each of the reading threads."""

_RUN = 16
"""Tensors per task of the reading threads."""

_SHORT = 1024
"""Entries of an array that may be of layers, and is read."""


class _Reader(GGUFReader):  # type: ignore[misc]
    """Steps over long arrays, of which the library makes one of numpy's for each entry: the vocabulary of
    the default model took 2.0 s of the 2.02 to open it."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        item, count, end = raw_type, 0, orig_offs + 12
        if raw_type == GGUFValueType.ARRAY:
            item, count = struct.unpack_from("<IQ", self.data, orig_offs)
        few = count <= _SHORT and item not in (GGUFValueType.STRING, GGUFValueType.ARRAY)
        if raw_type != GGUFValueType.ARRAY or few:
            found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return found
        if item == GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", self.data, end)[0]
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[item]).itemsize
        return end - orig_offs, [], [], [raw_type, item]


def _open(path: Path) -> tuple[dict[str, Any], list[ReaderTensor]]:
    """Metadata without its long arrays, and the tensors, mapped: of all files of a split one, whose first is
    `path`. Raises `ModelError`."""
    parts = gguf_parts(path.name)
    (fields, tensors), *others = (_open_one(path.with_name(part)) for part in parts)
    check_parts(parts, fields)
    return fields, tensors + [tensor for _, more in others for tensor in more]


def _open_one(path: Path) -> tuple[dict[str, Any], list[ReaderTensor]]:
    if not path.is_file():
        raise ModelError(f"{path} is missing.")
    try:
        reader = _Reader(path)
        return {field.name: field.contents() for field in reader.fields.values()}, reader.tensors
    except (ValueError, IndexError, KeyError, OverflowError, OSError, struct.error) as error:
        raise ModelError(f"{path} is truncated or not a GGUF file ({error}): fetch it again.") from error


def config_from_gguf(path: Path) -> dict[str, Any]:
    """The file's metadata as the config.json of the same model. Raises `ModelError`."""
    return gguf_config(gguf_facts(*_open(path)))


def hf_name(name: str, kind: str) -> str:
    """Checkpoint name of a GGUF tensor, in a file of an architecture. Unknown names stay as they are, so that
    the filler reports them."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    if (place := _BLOCK.fullmatch(name)) is None:
        return name
    layer, own = place.groups()
    names = {**_LAYER, **_OWN.get(kind, {})}
    stem, _, suffix = own.rpartition(".")
    if own in names:
        return f"model.layers.{layer}.{names[own]}"
    return f"model.layers.{layer}.{names[stem]}.{suffix}" if stem in names else name


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * dim, ...] from llama.cpp's interleaved rope order to two halves per head."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


class _Matrix(NamedTuple):
    """A matrix [outputs, inputs] of a file, or some of its outputs (`gpu.weights.fill.Coarse`).

    rows    [outputs, ...] as they lie in the mapped file, uint8 where they are quantised, in the order of a
            checkpoint
    """

    name: str
    kind: GGMLQuantizationType
    rows: np.ndarray[Any, np.dtype[np.uint8]]
    inputs: int

    def part(self, dim: int, start: int, size: int) -> _Matrix:
        """The `size` outputs from `start` on; `dim` is 0."""
        return self._replace(rows=self.rows[start : start + size])

    def slabs(self) -> Iterator[tuple[int, _Matrix]]:
        """Yield the matrix in blocks of outputs, each with the index of its first output."""
        step = max(_SLAB // self.inputs, 1)
        for first in range(0, len(self.rows), step):
            slab = self.part(0, first, step)
            yield first, slab
            _release(slab.rows)

    def floats(self) -> torch.Tensor:
        """float32 [outputs, inputs]. Raises `ModelError` for an unknown format."""
        # The library takes 16 rows at a time, whatever their length, and views of a `memmap` are slow: 2**18
        # numbers of Q4_K took 2.05 ms. As one long row of a plain array they take 0.65.
        rows, step = np.asarray(self.rows), max(_SLAB // self.inputs, 1)
        values = np.empty((len(rows), self.inputs), np.float32)
        try:
            for first in range(0, len(rows), step):
                own = rows[first : first + step].reshape(1, -1)
                values[first : first + step] = dequantize(own, self.kind).reshape(-1, self.inputs)
        except (RuntimeError, ValueError) as error:  # a format that is unknown, or without a dequantisation
            raise ModelError(f"Cannot dequantise {self.name} of the GGUF file: {error}.") from error
        return torch.from_numpy(values)

    def nibbles(self) -> q4.Numbers:
        """Return the numbers and scales of a matrix in one of `q4.FORMATS`."""
        return q4.read(self.kind.name, np.asarray(self.rows))


class _Rows(NamedTuple):
    """Rows of a tensor in the mapped file, or made of those of several, for one tensor of a checkpoint.

    kind    their format
    rows    as they lie in the file, [outputs, ...] but for vectors
    shape   of the checkpoint's tensor
    """

    kind: GGMLQuantizationType
    rows: Any
    shape: tuple[int, ...]


Order = Callable[[int], torch.Tensor]
"""For a number of rows, the index of the file's row that comes to each place."""


class _Joined(NamedTuple):
    """A checkpoint's tensor that a file has in parts, or otherwise.

    beside  the further parts, by their names in the layer
    make    the tensor, of the floats of all parts
    """

    beside: tuple[str, ...]
    make: Callable[..., torch.Tensor]


class _Layout(NamedTuple):
    """Layout of a file's tensors.

    tensors  by name
    orders   of a layer's tensors, by their names there, whose rows are not in a checkpoint's order
    joined   of a layer's tensors, those that are not read as they are, by the first part's whole name there
    """

    tensors: Mapping[str, ReaderTensor]
    orders: Mapping[str, Order]
    joined: Mapping[str, _Joined]

    def rows(self, name: str, tensor: ReaderTensor) -> Iterator[tuple[str, _Rows]]:
        """Convert a tensor of the file to the checkpoint's tensor `name`."""
        shape, kind = tuple(reversed(tensor.shape.tolist())), tensor.tensor_type
        *_, own = tensor.name.split(".", 2)
        if (joined := self.joined.get(own)) is not None:
            floats = self._join(tensor.name.removesuffix(own), own, joined)
            yield name, _Rows(GGMLQuantizationType.F32, floats.numpy(), tuple(floats.shape))
            return
        if any(own in each.beside for each in self.joined.values()):
            return
        if own == "ffn_gate_inp_shexp.weight":  # a vector in the file
            shape = (1, shape[-1])
        if "{}" in name:
            parts = ("gate", "up") if "gate_up" in name else ("",)
            size = shape[1] // len(parts)
            for (expert, rows), (i, part) in itertools.product(enumerate(tensor.data), enumerate(parts)):
                half = _Rows(kind, rows[i * size : (i + 1) * size], (size, *shape[2:]))
                yield name.replace("{}", str(expert)).replace("gate_up", part), half
            return
        rows, order = tensor.data, self.orders.get(own.rpartition(".")[0])
        yield name, _Rows(kind, rows if order is None else rows[order(len(rows)).numpy()], shape)

    def _join(self, layer: str, own: str, joined: _Joined) -> torch.Tensor:
        names = [layer + part for part in (own, *joined.beside)]
        if missing := [name for name in names if name not in self.tensors]:
            raise ModelError(f"The GGUF file has {names[0]} and lacks {', '.join(missing)}.")
        return joined.make(*(_floats(self.tensors[name]) for name in names)).contiguous()


def _floats(tensor: ReaderTensor) -> torch.Tensor:
    shape = tuple(reversed(tensor.shape.tolist()))
    rows = tensor.data.reshape(math.prod(shape[:-1]), -1)
    return _Matrix(tensor.name, tensor.tensor_type, rows, shape[-1]).floats().reshape(shape)


def _layout(tensors: list[ReaderTensor], fields: Mapping[str, Any]) -> _Layout:
    kind = str(fields.get("general.architecture"))
    orders: Mapping[str, Order] = {}
    joined: Mapping[str, _Joined] = {}
    if kind in _PERMUTED:
        heads = fields[f"{kind}.attention.head_count"]
        by_name = {"attn_q": heads, "attn_k": fields.get(f"{kind}.attention.head_count_kv", heads)}
        orders = {name: partial(_unpermuted, count) for name, count in by_name.items()}
    elif kind == "deepseek2":
        joined = {"attn_k_b.weight": _Joined(("attn_v_b.weight",), _key_values)}
    elif kind in ("qwen3next", "qwen35", "qwen35moe"):
        sizes = ("group_count", "time_step_rank", "state_size")
        linear = _Heads(*(fields[f"{kind}.ssm.{size}"] for size in sizes))
        orders, joined = linear.mixed() if kind == "qwen3next" else linear.tiled()
    return _Layout({tensor.name: tensor for tensor in tensors}, orders, joined)


def _unpermuted(heads: int, rows: int) -> torch.Tensor:
    return unpermute(torch.arange(rows), heads)


def _key_values(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """kv_b_proj [heads * both, rank] of what makes keys [heads, rank, dim] and values [heads, dim, rank]."""
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


class _Heads(NamedTuple):
    """Numbers of heads of linear attention, and the size of one of keys. Several of values, neighbours in a
    checkpoint, share one of keys."""

    keys: int
    values: int
    key_dim: int

    def mixed(self) -> tuple[Mapping[str, Order], Mapping[str, _Joined]]:
        """Convert Qwen3-Next's, whose checkpoints have q, k, v and z of one key head after the other."""
        joined = {"attn_qkv.weight": _Joined(("attn_gate.weight",), self._mix)}
        return {}, joined | {
            "ssm_a": _Joined((), lambda decay: (-decay).log()),
            "ssm_conv1d.weight": _Joined((), lambda kernel: kernel.unsqueeze(1)),
        }

    def tiled(self) -> tuple[Mapping[str, Order], Mapping[str, _Joined]]:
        """The orders of Qwen3.5: value heads that share a key head are as far apart as there are key
        heads."""
        orders = dict.fromkeys(("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt"), self._grouped)
        return {**orders, "attn_qkv": self._behind}, {
            "ssm_a": _Joined((), lambda decay: (-decay[self._grouped(len(decay))]).log()),
            "ssm_conv1d.weight": _Joined((), lambda kernel: kernel[self._behind(len(kernel))].unsqueeze(1)),
            "ssm_out.weight": _Joined((), lambda out: out[:, self._grouped(out.shape[1])]),
        }

    def _grouped(self, rows: int) -> torch.Tensor:
        """`Order` of values."""
        return torch.arange(rows).view(self.values // self.keys, self.keys, -1).transpose(0, 1).flatten()

    def _behind(self, rows: int) -> torch.Tensor:
        """`Order` of queries and keys, which are as they are, and values behind them."""
        first = 2 * self.keys * self.key_dim
        return torch.cat([torch.arange(first), first + self._grouped(rows - first)])

    def _mix(self, qkv: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """in_proj_qkvz: z has as many rows as there are of values."""
        keys = (len(qkv) - len(z)) // 2
        parts = (*torch.split(qkv, [keys, keys, len(z)]), z)
        return torch.cat([part.view(self.keys, -1, qkv.shape[1]) for part in parts], 1).flatten(0, 1)


def table_of_gguf(path: Path) -> FileRows:
    """The embedding of a file, or of one of a split one's, left there. Raises `ModelError`."""
    for file in map(path.with_name, gguf_parts(path.name)):
        _, tensors = _open_one(file)
        found = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
        if found is not None:
            return _file_rows(file, found)
    raise ModelError(f"{path} has no token_embd.weight.")


def _file_rows(path: Path, tensor: ReaderTensor) -> FileRows:
    name, kind, (inputs, rows) = tensor.name, tensor.tensor_type, tensor.shape.tolist()

    def restore(read: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
        return _Matrix(name, kind, read, inputs).floats().numpy()

    return FileRows(path, int(tensor.data_offset), int(tensor.n_bytes) // rows, (rows, inputs), restore)


def q4_layers_of_gguf(path: Path, fused: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the names of layers that the file has in a 4-bit format of `gpu.quant.q4`. A tensor stacked of
    several layers (`fused`) counts for each of them. Raises `ModelError`."""
    fields, tensors = _open(path)
    layout, kind, found = _layout(tensors, fields), str(fields.get("general.architecture")), set()
    for tensor in tensors:
        own = tensor.name.split(".", 2)[-1]
        if own in layout.joined or tensor.tensor_type.name not in q4.FORMATS:
            continue
        name = hf_name(tensor.name, kind).removesuffix(".weight")
        before, _, last = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else fused.get(last, ())
        experts = range(int(tensor.shape[-1]) if "{}" in name else 1)
        for each in (name, *(f"{before}.{part}" for part in parts)):
            found |= {each.replace("{}", str(expert)) for expert in experts}
    return frozenset(found)


def fill_from_gguf(filler: Filler, path: Path, device: torch.device, progress: Progress) -> None:
    """Dequantise every tensor into its place. Raises `ModelError` for a file that cannot be read."""
    fields, found = _open(path)
    tensors = [tensor for tensor in found if tensor.name not in FACTORS]
    layout = _layout(tensors, fields)
    kind = str(fields.get("general.architecture"))
    named = [(hf_name(tensor.name, kind), tensor) for tensor in tensors]
    tasks = [_reader(filler, named[first : first + _RUN], layout) for first in range(0, len(named), _RUN)]
    run_tasks(tasks, len(tensors), device, progress)


def _release(read: np.ndarray[Any, Any]) -> None:
    """Take the pages of what was read of the mapped file out of the process's memory: or the whole file would
    lie there beside the weights. Nothing for a copy."""
    mapped: Any = read
    while isinstance(mapped, np.ndarray):
        whole, mapped = mapped, mapped.base
    if isinstance(mapped, mmap.mmap) and hasattr(mapped, "madvise"):
        first = read.ctypes.data - whole.ctypes.data
        page = first // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, page, first + read.nbytes - page)


def _reader(filler: Filler, named: list[tuple[str, ReaderTensor]], layout: _Layout) -> Task:
    def read(tick: Callable[[], None]) -> None:
        for name, tensor in named:
            try:
                found = [*layout.rows(name, tensor)]
            except (RuntimeError, IndexError, TypeError, ValueError) as error:  # not as its metadata say
                raise ModelError(f"Cannot read {tensor.name} of the GGUF file: {error}.") from error
            for place, rows in found:
                _put(filler, place, tensor.name, rows)
            _release(tensor.data)
            tick()

    return read


def _put(filler: Filler, name: str, source: str, found: _Rows) -> None:
    """Fill the place of `name`; `source` is what the file calls the tensor."""
    kind, rows, shape = found
    if kind == GGMLQuantizationType.MXFP4 and filler.takes_mxfp4(name):
        numbers, scale = mxfp4.from_blocks(torch.from_numpy(np.array(rows)))
        mxfp4.check(source, scale)
        for part, tensor in ((name, numbers), (f"{name}_scale", scale)):
            if filler.wants(part, tensor.shape):
                filler.put(part, tensor)
        return
    if not filler.wants(name, shape):
        return
    outputs, inputs = shape if len(shape) == 2 else (1, math.prod(shape))
    matrix = _Matrix(source, kind, rows.reshape(outputs, -1), inputs)
    if len(shape) == 2:
        filler.put_coarse(name, matrix)
    else:
        filler.put(name, matrix.floats().reshape(shape))
