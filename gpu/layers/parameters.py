"""Parameters of one model, allocated under the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from core.env import usable_cpus
from core.models import Held
from gpu.layers.linear import Linear, Places
from gpu.lora import Adaptable, LoraShape
from gpu.quant import int4, q4
from gpu.shard import ALONE, Shard, Slice, Split, slice_of
from gpu.thread import device_thread

WORDS = {torch.int16: int4.WORD, torch.int32: q4.WORD}
"""Numbers in a word of matrices of 4 bits, by its dtype."""


class Parameters:
    """What the layers of one model allocate while it is built.

    `places` maps each name of a checkpoint to the exact view that the named tensor is copied into; the
    views cover the parameters once. Each of several ranks allocates its part, and `slices` say which part of
    the named tensor belongs there, where it is not all of it.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, shard: Shard = ALONE) -> None:
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self.seals: list[Callable[[], None]] = []
        """Functions that lay weights out for the device once they are final."""
        self.adaptable: list[Adaptable] = []
        """What adapters may change."""
        self.q4_layers: Container[str] = ()
        """Names of layers that the checkpoint has in 4 bits. On a CPU they keep them; others get 8 bits."""
        self.places: Places = {}
        self.slices: dict[str, Slice] = {}

    def seal(self) -> None:
        """Lay all weights out for the device. On a CPU in several threads: FBGEMM packs a matrix in one, and
        takes 8 s for those of a 1.5B."""
        self.places.clear()  # they would keep the former layout alive
        if self.device.type != "cpu":
            for seal in self.seals:
                seal()
            return
        with ThreadPoolExecutor(usable_cpus(), "loom-seal") as pool:
            list(pool.map(self._seal, self.seals))

    def _seal(self, seal: Callable[[], None]) -> None:
        with device_thread(self.device):
            seal()

    def tensor(
        self,
        name: str,
        *shape: int,
        split: Split | None = None,
        copies: int = 1,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor of its own, uninitialised, of the rank's `shape`; without a `dtype` in the model's."""
        found = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.place(name, found, split, copies)
        return found

    def linear(
        self,
        prefix: str,
        inputs: int,
        parts: Mapping[str, int],
        bias: bool = False,
        held: Held = "",
        split: Split | None = None,
    ) -> Linear:
        """See `Linear`. `prefix` stands before the names of its parts. Sizes are those of the rank, whose
        matrix is the part by `split`; None: each rank has all of it."""
        partial = split is not None and split.dim == 1
        held = self.held(held, [prefix + part for part in parts], inputs)
        linear = Linear(
            inputs, parts, self.dtype, self.device, bias and not (partial and self.shard.rank), held
        )
        self.seals.append(linear.seal)
        self._place_parts(linear, prefix, split)
        if partial and bias and self.shard.rank:
            for name, size in parts.items():
                self.pass_over(f"{prefix}{name}.bias", size)
        names = {prefix + name: size for name, size in parts.items()}
        slices = {name: self.slices[f"{name}.weight"] for name in names if f"{name}.weight" in self.slices}
        self.adaptable.append(Adaptable(LoraShape(names, inputs, slices=slices), linear.adapt))
        return linear

    def held(self, held: Held, parts: Sequence[str], inputs: int) -> Held:
        """Return the format of a matrix stacked of `parts`, where `held` is asked for. It is quantised, or in
        4 bits, only if all parts are."""
        if held == "int8" and inputs % q4.GROUP == 0 and all(part in self.q4_layers for part in parts):
            return "q4"
        return held if isinstance(held, str) or all(map(held.has, parts)) else ""

    def _place_parts(self, linear: Linear, prefix: str, split: Split | None) -> None:
        views = linear.places(prefix)
        for name, view in views.items():
            part, _, kind = name.removeprefix(prefix).rpartition(".")
            copies = 1 if split is None else split.copies.get(part, 1)
            if kind == "bias" or linear.matrix.weight.dtype not in WORDS:
                self.place(name, view, split, copies)
            elif kind == "weight":
                self.place_words(name, view, views[f"{name}_scale"], split, copies)

    def pass_over(self, name: str, *shape: int) -> None:
        """Take nothing of the tensor `name`, which has that `shape`: a bias that another rank adds to the sum
        of all, or a table that stays in its file."""
        self.places[name] = torch.empty(0, *shape[1:], dtype=self.dtype, device=self.device)
        self.slices[name] = Slice(0, 0, 0, shape)

    def rename(self, name: str, other: str) -> None:
        """Fill what the tensor `name` would with the tensor `other`."""
        self.places[other] = self.places.pop(name)
        if name in self.slices:
            self.slices[other] = self.slices.pop(name)

    def place_words(
        self, name: str, words: torch.Tensor, scale: torch.Tensor, split: Split | None = None, copies: int = 1
    ) -> None:
        """Fill `words` and their `scale` [outputs, groups, 2] (`gpu.quant.int4`, `gpu.quant.q4`) with the
        rank's part of the matrix `name`. What it has of both is said of the weights that they stand for."""
        self.places |= {name: words, f"{name}_scale": scale}
        if split is not None and self.shard.ranks > 1:
            shape = len(words), words.shape[1] * WORDS[words.dtype]
            self.slices[name] = slice_of(self.shard, shape, split, copies)

    def place(self, name: str, view: torch.Tensor, split: Split | None = None, copies: int = 1) -> None:
        """Fill `view` with the rank's part of the tensor `name`: all of it without `split`, or where the
        tensor does not have the side that is divided."""
        if split is not None and split.dim < view.dim() and self.shard.ranks > 1:
            own = self.slices[name] = slice_of(self.shard, tuple(view.shape), split, copies)
            view = view.narrow(own.dim, 0, own.size)
        self.places[name] = view
