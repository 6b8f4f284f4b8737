"""Copies tensors into parameters and checks that each is filled once and of the right shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from core.errors import ModelError
from gpu.layers.linear import Places
from gpu.layers.parameters import WORDS
from gpu.quant import int8, q4
from gpu.quant.scaled import EIGHT_BITS, FP8
from gpu.shard import Slices
from gpu.weights.experts import Stack, stack_of
from gpu.weights.fp8 import store
from gpu.weights.int4 import Packed
from gpu.weights.int4 import store as store_int4
from gpu.weights.stage import Copy

_NOT_WEIGHTS = ("rotary_emb.inv_freq", "embeddings.position_ids")
"""Suffixes of tensors that old checkpoints carry and that are computed here."""

_IF_TIED = " If the embedding is the head: --hf-overrides '{\"tie_word_embeddings\": true}'."

_SHOWN = 6
"""Names listed of each kind of fault: enough to see the pattern, short enough for one line."""


class Names(NamedTuple):
    """How a checkpoint's names become those of places.

    aliases    beginnings, and how places begin instead
    renamed    parts, and what stands there instead
    fused      matrices that are stacked along the output, and what they are apart, in order; those that have
               a place of their own as they are do not count
    stacked    experts lie as `gpu.weights.experts` has them
    by_expert  as `fused`, of tensors that have such a matrix for each expert
    """

    aliases: Mapping[str, str] = MappingProxyType({})
    renamed: Mapping[str, str] = MappingProxyType({})
    fused: Mapping[str, Sequence[str]] = MappingProxyType({})
    stacked: bool = False
    by_expert: Mapping[str, Sequence[str]] = MappingProxyType({})


class Coarse(Protocol):
    """A quantised matrix [outputs, inputs] as a checkpoint has it, of which never all is dequantised."""

    def part(self, dim: int, start: int, size: int) -> Coarse:
        """The `size` outputs (dim 0) from `start` on."""
        ...

    def slabs(self) -> Iterator[tuple[int, Coarse]]:
        """Yield the matrix in blocks of outputs, each with the index of its first output."""
        ...

    def floats(self) -> torch.Tensor:
        """float32 [outputs, inputs]."""
        ...


@runtime_checkable
class Q4Matrix(Coarse, Protocol):
    """A quantised matrix that `gpu.quant.q4` can store without changing its numbers."""

    def part(self, dim: int, start: int, size: int) -> Q4Matrix:
        """See `Coarse.part`."""
        ...

    def slabs(self) -> Iterator[tuple[int, Q4Matrix]]:
        """See `Coarse.slabs`."""
        ...

    def nibbles(self) -> q4.Numbers:
        """Return its numbers, scales and offsets."""
        ...


class Filler:
    """Copies named tensors into a model's places, and records what does not match.

    `wants` and `put` may be called from several threads: each name by one, and the records
    are dictionary and list appends. `finish` comes after all of them.
    """

    def __init__(
        self,
        places: Places,
        copy: Copy,
        base: str = "",
        unused: tuple[str, ...] = (),
        names: Names | None = None,
        slices: Slices = MappingProxyType({}),
    ) -> None:
        """`copy` is how a tensor gets into its place, `base` what a checkpoint may leave out before a
        place's name, `unused` are beginnings of names that belong to nothing here. A place takes that part of
        a tensor named in `slices`; the rest of a mapped file is not read."""
        self._places, self._slices = places, slices
        self._names = names or Names()
        self._copy = copy
        self._base = base
        self._unused = unused
        self._filled: dict[str, None] = {}
        self._misshapen: list[str] = []
        self._unexpected: list[str] = []
        self.skipped: list[str] = []
        """Tensors of the checkpoint that belong to nothing here."""
        self.quantised: list[str] = []
        """Matrices quantised while loading: their places have 8 bits, and they had none or other scales."""

    def stack(self, name: str) -> Stack | None:
        """What `name` has of all experts, where it does."""
        return stack_of(name) if self._names.stacked else None

    def takes_mxfp4(self, name: str) -> bool:
        """Whether the place of an expert's matrix takes numbers in MXFP4 as they lie."""
        place = self._places.get(self._place_name(name))
        return place is not None and place.dtype == torch.uint8

    def wants(self, name: str, shape: Sequence[int]) -> bool:
        """Whether to read the tensor `name`; one of an unexpected name or shape is recorded."""
        if parts := self._parts(name):
            return self._wants_fused(name, parts, tuple(shape))
        own, name = name, self._place_name(name)
        place = self._places.get(name)
        if place is None:
            # A tied head may be stored as well: `load_model` warns where it is not the embedding.
            if own.startswith(self._unused):
                self.skipped.append(own)
            elif name != "lm_head.weight" and not own.endswith(_NOT_WEIGHTS):
                self._unexpected.append(own)
            return False
        if tuple(shape) != (wanted := self._whole(name)):
            self._misshapen.append(f"{name} {list(shape)} instead of {list(wanted)}")
            self._filled[name] = None
            return False
        return True

    def _wants_fused(self, name: str, parts: Sequence[str], shape: tuple[int, ...]) -> bool:
        """`wants` of a tensor that is `parts`."""
        if any(part not in self._places for part in parts):
            self._unexpected.append(name)
            return False
        wanted = self.whole(name)
        assert wanted is not None
        if len(shape) == 1 + len(wanted) and len(parts) % shape[0] == 0:  # stacked
            shape = (shape[0] * shape[1], *shape[2:])
        if shape != wanted:
            self._misshapen.append(f"{name} {list(shape)} instead of {list(wanted)}")
            self._filled |= dict.fromkeys(parts)
            return False
        return True

    def whole(self, name: str) -> tuple[int, ...] | None:
        """The shape that the checkpoint's weight `name` must have; None where it belongs to nothing here."""
        parts = self._parts(name) or [self._place_name(name)]
        if any(part not in self._places for part in parts):
            return None
        rows, (_, *rest) = sum(self._whole(part)[0] for part in parts), self._whole(parts[0])
        return (rows, *rest)

    def _parts(self, name: str) -> list[str]:
        """The places of a fused matrix; none of any other."""
        for whole, parts in self._names.fused.items():
            if f".{whole}." in name and self._place_name(name) not in self._places:
                return [self._place_name(name.replace(f".{whole}.", f".{part}.")) for part in parts]
        for whole, parts in self._names.by_expert.items():
            if name.endswith(f".{whole}"):
                experts = self._place_name(name.removesuffix(whole)) + "experts"
                return list(self._parts_of(experts, parts))
        return []

    def _parts_of(self, experts: str, parts: Sequence[str]) -> Iterator[str]:
        """The places of `parts`, one expert after the other."""
        for expert in itertools.count():
            names = [f"{experts}.{expert}.{part}.weight" for part in parts]
            if names[0] not in self._places:
                return
            yield from names

    def scale_shape(self, name: str, dtype: torch.dtype) -> tuple[int, ...] | None:
        """The shape of the scale of `name`, which is wanted and of `dtype`, e4m3 or int8, where its place
        takes the weight as it is; for a fused matrix only where it has a scale for each output."""
        parts = self._parts(name) or [self._place_name(name)]
        if any(self._places[part].dtype != dtype for part in parts):
            return None
        shapes = [self._whole(part + "_scale") for part in parts]
        if len(parts) == 1:
            return shapes[0]
        return (sum(rows for (rows,) in shapes),) if all(len(shape) == 1 for shape in shapes) else None

    def put(self, name: str, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Copy `tensor` into the place of `name`, converting its dtype. Once per name.

        `scale`, of `scale_shape`, comes with a tensor of 8 bits for a place that has them; any other tensor
        is quantised on its way there.
        """
        if parts := self._parts(name):
            first = 0
            if tensor.dim() > self._places[parts[0]].dim():  # one of each expert
                tensor = tensor.flatten(0, 1)
            for part in parts:
                last = first + self._whole(part)[0]
                self._put(part, tensor[first:last], None if scale is None else scale[first:last])
                first = last
        else:
            self._put(self._place_name(name), tensor, scale)

    def put_coarse(self, name: str, matrix: Coarse) -> None:
        """`put` of a quantised weight as the checkpoint has it. Where its place has other numbers it is
        dequantised, some rows at a time."""
        first = 0
        for part in self._parts(name) or [self._place_name(name)]:
            size = self._whole(part)[0]
            own = matrix.part(0, first, size)
            dtype = self._places[part].dtype
            if dtype == torch.int16 and isinstance(own, Packed):
                self._put_words(part, own)
            elif dtype == torch.int32 and isinstance(own, Q4Matrix):
                self._put_q4(part, own)
            elif dtype == FP8:  # a scale may be of rows of several slabs
                self._put(part, torch.cat([slab.floats() for _, slab in own.slabs()]), None)
            else:
                self._put_slabs(part, own)
            first += size

    def _claim(self, name: str) -> torch.Tensor:
        """The place `name`, which counts as filled from now on, and so does that of its scale."""
        if name in self._filled:
            raise ModelError(f"The checkpoint holds {name} twice.")
        place = self._places[name]
        scaled = place.dtype in EIGHT_BITS or place.dtype in WORDS
        self._filled |= dict.fromkeys((name, f"{name}_scale") if scaled else (name,))
        return place

    def _put_slabs(self, name: str, matrix: Coarse) -> None:
        """`put_coarse` into the place `name`, in the dtype of the computation or of 8 bits."""
        part, place = self._slices.get(name), self._claim(name)
        for first, slab in matrix.slabs() if len(place) else ():  # of nothing is dequantised
            rows, at = slab.floats(), first
            if part is not None and part.dim == 1:
                rows = part.of(rows)
            elif part is not None:
                low, high = (
                    min(max(each - first, 0), len(rows)) for each in (part.start, part.start + part.size)
                )
                rows, at = rows[low:high], first + low - part.start
            if not len(rows):
                continue
            own = slice(at, at + len(rows))
            if place.dtype == torch.int8:
                int8.store(place[own], self._places[name + "_scale"][own], rows)
            else:
                self._copy(place[own], rows)

    def _put_q4(self, name: str, matrix: Q4Matrix) -> None:
        """`put_coarse` into the place `name`, whose format is that of `gpu.quant.q4`."""
        place, scale = self._claim(name), self._places[name + "_scale"]
        part = self._slices.get(name)
        if part is not None and part.dim == 0:
            matrix = matrix.part(0, part.start, part.size)
        for first, slab in matrix.slabs() if len(place) else ():
            numbers, scales = slab.nibbles()
            if part is not None and part.dim == 1:
                last = part.start + part.size
                numbers = numbers[:, part.start : last]
                scales = scales[:, part.start // q4.GROUP : last // q4.GROUP]
            own = slice(first, first + len(numbers))
            q4.store(place[own], scale[own], q4.Numbers(numbers, scales))

    def _put_words(self, name: str, packed: Packed) -> None:
        """`put_coarse` into the place `name`."""
        place = self._claim(name)
        if (part := self._slices.get(name)) is not None:
            packed = packed.part(part.dim, part.start, part.size)
        store_int4(place, self._places[name + "_scale"], packed, self._copy)

    def _put(self, name: str, tensor: torch.Tensor, scale: torch.Tensor | None) -> None:
        """`put` into the place `name`."""
        place = self._claim(name)
        if place.dtype in WORDS:
            raise ModelError(
                f"{name} is not quantised, and quantization_config does not except it: --quantization none "
                "runs the whole checkpoint in 16 bits."
            )
        if (part := self._slices.get(name)) is not None:
            tensor = part.of(tensor)
        if place.dtype in EIGHT_BITS:
            scales = self._places[name + "_scale"]
            if scale is not None and (part := self._slices.get(name + "_scale")) is not None:
                scale = part.of(scale)
            if scale is None:
                store(place, scales, tensor, self._copy)
                self.quantised.append(name)
            else:
                self._copy(place, tensor)
                self._copy(scales, scale)
        else:
            self._copy(place, tensor)

    def _whole(self, name: str) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor for a place."""
        if (part := self._slices.get(name)) is not None:
            return part.shape
        shape = tuple(self._places[name].shape)
        each = WORDS.get(self._places[name].dtype)
        return shape if each is None else (*shape[:-1], shape[-1] * each)

    def _place_name(self, name: str) -> str:
        """The place's name for a checkpoint's: one saved without a head leaves the base's prefix out."""
        for alias, begin in self._names.aliases.items():
            if name.startswith(alias):
                name = begin + name.removeprefix(alias)
        for theirs, ours in self._names.renamed.items():
            name = name.replace(theirs, ours)
        return self._base + name if name not in self._places and self._base + name in self._places else name

    def finish(self, source: str) -> None:
        """Raise one `ModelError` for all mismatches. `source` names the checkpoint."""
        missing = [name for name in self._places if name not in self._filled]
        faults = [
            _list("missing", missing),
            _list("not part of this architecture", sorted(self._unexpected)),
            _list("of the wrong shape", sorted(self._misshapen)),
        ]
        if any(faults):
            tied = _IF_TIED if missing == ["lm_head.weight"] else ""
            raise ModelError(f"{source} does not match its config: {'; '.join(filter(None, faults))}.{tied}")


def _list(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensors {kind}: {', '.join(names[:_SHOWN])}{more}"
