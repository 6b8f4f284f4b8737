"""LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

A tensor is named after the matrix that it changes, or after a fused module (`FUSED`), whose matrices share
one A. Experts' come in one of four forms:

    experts.3.gate_proj      2-D, one expert's; also w1, w3, w2 for gate, up, down
    experts.gate_proj        3-D, [experts, rank, inputs] and [experts, outputs, rank]; also w1, w3, w2
    experts.gate_up_proj     3-D, gate over up with one A; of any 3-D one [1, ...] is shared by all experts
    experts.base_layer       2-D, gate over up: A [experts * rank, inputs], B [outputs, rank * experts]; the
    experts                  down projection likewise: PEFT's `target_parameters`
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from core.adapters import FUSED
from core.env import read_object
from core.errors import ModelError
from gpu.lora import LoraMatrix, LoraShape
from gpu.shard import Slice
from gpu.weights.files import open_file

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?P<table>embedding_)?(?P<factor>[AB])(?:\.default)?(?:\.weight)?"
)

_EXPERT = re.compile(r"(?P<experts>.+\.experts)(?:\.(?P<number>\d+))?(?:\.(?P<part>[^.]+))?")

_PARTS: Mapping[str, tuple[str, ...]] = {
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
    "w1": ("gate_proj",),
    "w3": ("up_proj",),
    "w2": ("down_proj",),
    "gate_up_proj": FUSED["gate_up_proj"],
}
"""Parts that the names below `experts` stand for."""

_FLAT: Mapping[str | None, tuple[str, ...]] = {
    "base_layer": _PARTS["gate_up_proj"],
    None: _PARTS["down_proj"],
}
"""Parts that the names of `target_parameters` below `experts` stand for."""

_WHOLE = ("modules_to_save", "embed_tokens.weight", "lm_head.weight", "base_layer.weight")

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that took their own start out of the base model's weights."""

_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_REPEATED = re.compile(r"[*+{]|(?<![(*+?}])\?")
_MOST_REPEATED = 3
_LITERAL = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
"""What may hold signs of a pattern without meaning them."""
_MOST_CHOICES, _LEAST_CHOICES = 4096, 64
"""Ways through the alternatives of all groups: each may be tried with each other, in a millisecond for all.
With each repetition, which may be tried with all of them at every length, an eighth, but not less than the
least: that takes 0.1 s with three."""
_LONGEST_PATTERN = 256
_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))


class _Config(msgspec.Struct):
    """The fields of adapter_config.json that matter."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: Any = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None
    init_lora_weights: Any = True
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    def refusal(self) -> str | None:
        """Why this cannot be served, if so."""
        start = self.init_lora_weights
        reasons = {
            f"peft_type is {self.peft_type}, only LORA is supported": self.peft_type != "LORA",
            "use_dora: DoRA is not supported": self.use_dora,
            f"bias is {self.bias}: adapters with bias are not supported": self.bias != "none"
            or self.lora_bias,
            f"modules_to_save ({self.modules_to_save}) is not supported": bool(self.modules_to_save),
            "trainable_token_indices is not supported": bool(self.trainable_token_indices),
            "layer_replication is not supported": bool(self.layer_replication),
            "alora_invocation_tokens: activated LoRA is not supported": bool(self.alora_invocation_tokens),
            "fan_in_fan_out is not supported": self.fan_in_fan_out,
            f"init_lora_weights {start!r} has changed the base model; convert it to plain LoRA": isinstance(
                start, str
            )
            and start.lower().startswith(_CHANGES_BASE),
            f"r is {self.r}, it must be at least 1": min([self.r, *self.rank_pattern.values()]) < 1,
        }
        return next((reason for reason, true in reasons.items() if true), None)

    def scale(self, module: str, rank: int) -> float:
        """What B A of a module is multiplied by. Raises `ModelError` where its rank is not as declared."""
        declared = _match(self.rank_pattern, module, self.r)
        if rank != declared:
            raise ModelError(f"{module} has rank {rank}, its adapter_config.json says {declared}")
        alpha: float = _match(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _match(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first pattern that is the module's name or its end. A pattern is a regular expression
    by somebody unknown: those that could take for ever are refused."""
    for pattern, value in patterns.items():
        if (
            len(pattern) > _LONGEST_PATTERN
            or _REPEATED_GROUP.search(pattern)
            or (repeated := len(_REPEATED.findall(pattern))) > _MOST_REPEATED
            or _choices(pattern) > max(_MOST_CHOICES >> 3 * repeated, _LEAST_CHOICES)
        ):
            raise ModelError(f"the pattern {pattern[:_LONGEST_PATTERN]!r} repeats too much")
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ModelError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    return otherwise


def _choices(pattern: str) -> int:
    """Ways through the alternatives of a pattern."""
    groups = [(0, 1)]
    """For each open group: ways through earlier alternatives, and through this one."""
    for sign in _LITERAL.sub("x", pattern):
        earlier, ways = groups[-1]
        if sign == "(":
            groups.append((0, 1))
        elif sign == "|":
            groups[-1] = (earlier + ways, 1)
        elif sign == ")" and len(groups) > 1:
            groups.pop()
            before, beside = groups[-1]
            groups[-1] = (before, beside * (earlier + ways))
    return sum(groups[0])


class _Place(NamedTuple):
    """What a tensor's module is here: matrix `matrix` of all, from its part `first` on `parts` of them, of
    expert `expert` or, -1, of all; `flat` is the form of `target_parameters`."""

    matrix: int
    first: int
    parts: int = 1
    expert: int = -1
    flat: bool = False


def read_adapter(
    directory: Path,
    shapes: Sequence[LoraShape],
    targets: Sequence[str],
    into: Sequence[LoraMatrix],
    vocab_size: int,
) -> None:
    """Read the adapter in `directory` into host memory `into`, [1, ...] for each of `shapes`, of which it may
    change `targets`. What it leaves as it is becomes zero. `vocab_size`: of the model.

    Raises `ModelError` with the reason where it cannot be served; `into` holds anything then. The reason does
    not name the directory: clients see it, of adapters that they did not load too.
    """
    try:
        _check_tokens(directory, vocab_size)
        _Reader(_read_config(directory), shapes, targets, into).read(directory)
    except (ArithmeticError, LookupError, ModelError, OSError, TypeError, ValueError) as refused:
        reason = str(refused).replace(f"{directory}/", "").rstrip(".")
        raise ModelError(f"The adapter is refused: {reason}.") from refused


def _check_tokens(directory: Path, vocab_size: int) -> None:
    """Raise `ModelError` for tokens beyond the model's, which a tokenizer saved beside the adapter tells."""
    for token, id in (read_object(directory / "added_tokens.json") or {}).items():
        if not isinstance(id, int) or id >= vocab_size:
            raise ModelError(f"its added_tokens.json has {token!r}: added tokens are not supported")


def _read_config(directory: Path) -> _Config:
    found = read_object(directory / "adapter_config.json")
    if found is None:
        raise ModelError("it has no adapter_config.json, which PEFT writes beside the weights")
    try:
        config = msgspec.convert(found, _Config)
    except msgspec.ValidationError as error:
        raise ModelError(f"its adapter_config.json is not as PEFT writes it: {error}") from error
    if reason := config.refusal():
        raise ModelError(reason)
    return config


class _Reader:
    """Reads the factors of one adapter."""

    def __init__(
        self, config: _Config, shapes: Sequence[LoraShape], targets: Sequence[str], into: Sequence[LoraMatrix]
    ) -> None:
        self._config, self._shapes, self._targets, self._into = config, shapes, targets, into
        self._places = {
            name: _Place(matrix, part)
            for matrix, shape in enumerate(shapes)
            for part, name in enumerate(shape.parts)
        }
        for matrix, shape in enumerate(shapes):
            self._places |= _fused(matrix, list(shape.parts))
        self._changed: dict[tuple[int, int, int], str] = {}
        """The module that changes a part of a matrix, by matrix, part and expert (-1: all experts)."""

    def read(self, directory: Path) -> None:
        """Fill all matrices."""
        path = directory / "adapter_model.safetensors"
        if not path.is_file() and (directory / "adapter_model.bin").is_file():
            raise ModelError("only adapter_model.safetensors is read: convert its adapter_model.bin")
        for lora in self._into:
            for tensor in lora[:3]:
                tensor.zero_()
        with open_file(path) as file:
            pairs = _pairs(list(file.keys()))
            for module, (a, b) in pairs.items():
                place = self._find(module)
                self._claim(module, place)
                try:
                    self._put(module, place, file.get_tensor(a), file.get_tensor(b))
                except SafetensorError as error:
                    raise ModelError(f"{module} cannot be read: {error}") from error

    def _find(self, module: str) -> _Place:
        """Where a module's factors belong."""
        # Without the base's prefix, or within a model that sees images too.
        for name in (module, f"model.{module}", module.replace("language_model.", "")):
            if (place := self._places.get(name)) is not None:
                return self._allowed(name, place)
            found = _EXPERT.fullmatch(name)
            if found is None:
                continue
            experts, number, part = found.groups()
            parts = _PARTS.get(part) if part is not None else None
            flat = number is None and part in _FLAT
            if flat:
                parts = _FLAT[part]
            place = None if parts is None else self._places.get(f"{experts}.{parts[0]}")
            if parts is None or place is None:
                continue
            expert = -1 if number is None else int(number)
            if expert >= self._shapes[place.matrix].experts:
                raise ModelError(f"{module} is of an expert that the model does not have")
            for each in parts:
                self._allowed(f"{experts}.{each}", place)
            return _Place(place.matrix, place.first, len(parts), expert, flat)
        raise self._strange(module)

    def _allowed(self, name: str, place: _Place) -> _Place:
        last = name.rpartition(".")[2]
        if not set(FUSED.get(last, (last,))).issubset(self._targets):
            raise self._strange(name)
        return place

    def _claim(self, module: str, place: _Place) -> None:
        """Record that `module` changes the matrices at `place`. Raises `ModelError` if another module changes
        one of them too, since only the last one would count."""
        for part in range(place.first, place.first + place.parts):
            other = self._changed.setdefault((place.matrix, part, place.expert), module)
            if other != module:
                raise ModelError(f"it changes {other} and {module}, which have a matrix in common")

    def _strange(self, module: str) -> ModelError:
        targets = ", ".join(self._targets)
        return ModelError(
            f"it changes {module}, which is none of {targets} of this model (see --lora-target-modules)"
        )

    def _put(self, module: str, place: _Place, a: Tensor, b: Tensor) -> None:
        """Copy a module's factors `a` and `b`, of any form, to where they belong."""
        shape, lora = self._shapes[place.matrix], self._into[place.matrix]
        slices = [shape.slice(name) for name in shape.parts][place.first : place.first + place.parts]
        outputs, inputs = sum(own.shape[0] for own in slices), slices[0].shape[1]
        if place.flat:
            a, b = _unflatten(a, b, shape.experts, (inputs, outputs))
        if odd := {a.dtype, b.dtype}.difference(_DTYPES):
            raise ModelError(f"{module} is {odd.pop()}, factors have 16, 32 or 64 bits of a float")
        rank = a.shape[-2] if a.dim() > 1 else 0
        for factor, size in ((a, (rank, inputs)), (b, (outputs, rank))):
            of_all = shape.experts and place.expert < 0
            if tuple(factor.shape) in ([(1, *size), (shape.experts, *size)] if of_all else [size]):
                continue
            raise ModelError(
                f"{module} has factors {list(a.shape)} and {list(b.shape)}, the model's matrix is "
                f"[{outputs}, {inputs}]"
            )
        if rank > lora.rank:
            raise ModelError(f"{module} has rank {rank}, --max-lora-rank is {lora.rank}")
        scale = self._config.scale(_parameter(module) if place.flat else module, rank)
        b = b.float() * scale
        # Either end tells, in a hundredth of the time that every element's own answer takes.
        if not all(math.isfinite(end) for factor in (a, b) for end in torch.aminmax(factor)):
            raise ModelError(f"{module} has values that are not finite")
        self._store(place, slices, a, b)
        lora.ranks.clamp_(min=rank)

    def _store(self, place: _Place, slices: Sequence[Slice], a: Tensor, b: Tensor) -> None:
        """Copy checked factors, of which this rank holds `slices`, to their parts of the matrix."""
        lora, rank = self._into[place.matrix], a.shape[-2]
        into_a, into_b = lora.a[0], lora.b[0]
        if place.expert >= 0:
            into_a, into_b = into_a[place.expert], into_b[place.expert]
        first = sum(lora.parts[: place.first])
        each = torch.split(b, [own.shape[0] for own in slices], dim=-2)
        for part, (own, own_b) in enumerate(zip(slices, each, strict=True), place.first):
            own_a, own_b = _part(own, a, own_b)
            into_a[..., part * lora.rank : part * lora.rank + rank, : own_a.shape[-1]] = own_a
            into_b[..., first : first + own_b.shape[-2], :rank] = own_b
            first += lora.parts[part]


def _fused(matrix: int, names: Sequence[str]) -> dict[str, _Place]:
    """Return the places of the fused modules whose matrices are neighbours in `names`."""
    found: dict[str, _Place] = {}
    for first, name in enumerate(names):
        head = name.rpartition(".")[0]
        for whole, parts in FUSED.items():
            if names[first : first + len(parts)] == [f"{head}.{part}" for part in parts]:
                found[f"{head}.{whole}"] = _Place(matrix, first, len(parts))
    return found


def _part(own: Slice, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What a rank that holds `own` of a matrix needs of its factors: rows of B for outputs, columns of A for
    inputs."""
    if own.dim == 0:
        return a, b.narrow(-2, own.start, own.size)
    return a.narrow(-1, own.start, own.size), b


def _pairs(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Names of A and B of each module. Raises `ModelError` for one that is neither, or alone."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(_odd(name))
        if found.setdefault(match["module"], {}).setdefault(match["factor"], name) is not name:
            raise ModelError(f"it has {name} twice")
    if not found:
        raise ModelError("it has no weights")
    if alone := [module for module, both in found.items() if len(both) < 2]:
        raise ModelError(f"{alone[0]} has one factor of two")
    return {module: (both["A"], both["B"]) for module, both in found.items()}


def _odd(name: str) -> str:
    """Why a tensor that is no factor is refused."""
    if "lora_magnitude_vector" in name:
        return f"{name}: DoRA is not supported"
    if name.endswith("bias"):
        return f"{name}: adapters with bias are not supported"
    if "modules_to_save" in name or name.endswith(_WHOLE):
        return f"{name} is a whole matrix: modules_to_save and added tokens are not supported"
    return f"{name} is no weight of LoRA"


def _parameter(module: str) -> str:
    """The parameter of experts that a flat module changes, which `rank_pattern` and `alpha_pattern`
    name. Where gate_proj and up_proj were asked for PEFT writes both patterns: together these have twice the
    rank and alpha."""
    inner = module.endswith(".base_layer")
    return f"{module.removesuffix('.base_layer')}.{'gate_up_proj' if inner else 'down_proj'}"


def _unflatten(a: Tensor, b: Tensor, experts: int, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[experts, rank, inputs] and [experts, outputs, rank] of what `target_parameters` gives, for experts of
    `sizes` inputs and outputs. PEFT may take a weight [experts, outputs, inputs] for its transpose: where the
    factors fit only so, they change places."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] % experts or a.shape[0] != b.shape[1]:
        return a, b
    first = a.view(experts, -1, a.shape[1])
    second = b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    if (a.shape[1], b.shape[0]) != sizes and (b.shape[0], a.shape[1]) == sizes:
        first, second = second.transpose(1, 2), first.transpose(1, 2)
    return first, second
