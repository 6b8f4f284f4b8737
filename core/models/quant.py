"""Which quantised checkpoints can be read: 8-bit floats with a scale per tensor, channel or block, 8-bit
integers with a scale per tensor or channel, and 4-bit integers with a scale per group of inputs or per
channel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from core.errors import ModelError
from core.models.fields import Config
from core.models.spec import W8A8, Fp8, Int4, Mxfp4

BLOCK = 128
"""Rows and columns that share a scale in block-scaled checkpoints (DeepSeek V3, Qwen3-FP8)."""


def is_readable_fp8(config: Config) -> bool:
    """Whether a `quantization_config` is FP8 (e4m3) as `gpu.weights.fp8` reads it."""
    match config.get("quant_method"):
        case "fp8":
            return config.get("weight_block_size") in (None, [BLOCK, BLOCK])
        case "fbgemm_fp8":
            return True
        case "compressed-tensors":
            groups = config.get("config_groups")
            return isinstance(groups, Mapping) and bool(groups) and all(map(_is_fp8, groups.values()))
        case _:
            return False


def fp8_scaling(config: Config) -> Fp8:
    """How weights that are `is_readable_fp8` are scaled: one scale for a whole tensor is one for each of its
    outputs, too. "" for any other config."""
    if not is_readable_fp8(config):
        return ""
    groups = config.get("config_groups")
    if config.get("quant_method") == "compressed-tensors" and isinstance(groups, Mapping):
        return "blocks" if any(each["weights"]["strategy"] == "block" for each in groups.values()) else "rows"
    return "blocks" if config.get("weight_block_size") is not None else "rows"


def _is_fp8(group: object) -> bool:
    """Whether a group of compressed-tensors (one scheme and the layers it is for) is FP8."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        return False
    if weights.get("strategy") == "block":
        return weights.get("block_structure") in (None, [BLOCK, BLOCK])
    return weights.get("strategy") in ("tensor", "channel")


MXFP4_GROUP = 32
"""Inputs that share a scale in MXFP4."""

GROUPS = (32, 64, 128)
"""Inputs that share a scale in 4-bit checkpoints."""

SERVED = (
    "Served are FP8 (fp8, fbgemm_fp8, compressed-tensors), int8 (compressed-tensors int-quantized, W8A8) and "
    "4 bits (awq, gptq, compressed-tensors pack-quantized, mxfp4 of gpt-oss). Use one of these, the "
    "unquantised checkpoint or a .gguf file."
)
"""Said where a checkpoint is quantised otherwise."""


class _Scheme:
    """The fields of a quantisation scheme. What is not served raises `ModelError` with the field's name."""

    def __init__(self, config: Config, where: str = "quantization_config") -> None:
        self._config, self._where = config, where

    def want(self, name: str, *served: object, absent: object = None) -> object:
        """The field, which must be one of `served`; `absent` where it is missing or null."""
        found = self._config.get(name)
        found = absent if found is None else found
        if not any(found == each and type(found) is type(each) for each in served):
            raise self.wrong(name, found, " or ".join(repr(each) for each in served))
        return found

    def wrong(self, name: str, found: object, served: str) -> ModelError:
        """The error for a field of the value `found`."""
        return ModelError(
            f"config.json: {self._where}: {name} {found!r} is not served, {served} is. {SERVED}"
        )

    def group(self) -> int:
        """Inputs that share a scale, 0: all of an output."""
        size = self.want("group_size", *GROUPS, -1)
        assert isinstance(size, int)
        return max(size, 0)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names; none where it is missing."""
        found = self._config.get(name) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.wrong(name, found, "a list of names")
        return tuple(found)

    def patterns(self, name: str) -> tuple[str, ...]:
        """A list of names and regular expressions; none where it is missing."""
        found = self.names(name)
        self._compile(name, found)
        return found

    def _compile(self, name: str, expressions: Iterable[str]) -> None:
        for each in expressions:
            try:
                re.compile(each)
            except re.error as error:
                raise self.wrong(name, each, f"a regular expression ({error})") from error

    def skipped(self, name: str) -> tuple[str, ...]:
        """GPTQModel's rules by name, of which those alone are served that except layers ("-:"): expressions
        behind "re:"."""
        found = self._config.get(name) or {}
        if not isinstance(found, Mapping) or not all(each.startswith("-:") for each in found):
            raise self.wrong(name, found, "an object of rules that begin with '-:'")
        expressions = [each.removeprefix("-:") for each in found]
        self._compile(name, expressions)
        return tuple(f"re:{each}" for each in expressions)

    def inside(self, name: str, absent: Config | None = None) -> _Scheme:
        """The fields of the object `name`; `absent` where it is missing."""
        found = self._config.get(name)
        found = absent if found is None else found
        if not isinstance(found, Mapping):
            raise self.wrong(name, found, "an object")
        return _Scheme(found, f"{self._where}: {name}")

    def inner(self) -> list[_Scheme]:
        """The fields of every object in here."""
        return [self.inside(name) for name in self._config]


def _awq(scheme: _Scheme) -> Int4:
    scheme.want("bits", 4)
    scheme.want("version", "gemm", "GEMM", absent="gemm")
    scheme.want("zero_point", True, absent=True)
    return Int4(format="awq", group=scheme.group(), plain=scheme.names("modules_to_not_convert"))


def _gptq(scheme: _Scheme) -> Int4:
    scheme.want("bits", 4)
    if scheme.want("desc_act", False, True, absent=False):
        raise scheme.wrong(
            "desc_act",
            True,
            "false (groups of neighbouring inputs: others would have to be gathered in every product)",
        )
    scheme.want("lm_head", False, absent=False)
    scheme.want("is_marlin_format", False, absent=False)
    scheme.want("pack_dtype", "int32", absent="int32")
    scheme.want("modules_in_block_to_quantize", None)
    kind = scheme.want("checkpoint_format", "gptq", "gptq_v2", absent="gptq")
    plain = scheme.skipped("dynamic")
    return Int4(format="gptq_v2" if kind == "gptq_v2" else "gptq", group=scheme.group(), plain=plain)


def _layers(scheme: _Scheme) -> tuple[list[_Scheme], tuple[str, ...]]:
    """The groups of compressed-tensors, each of all linear layers, and the layers that are not quantised."""
    scheme.want("kv_cache_scheme", None)
    scheme.want("transform_config", {}, absent={})
    scheme.inside("sparsity_config", {}).want("format", "dense", absent="dense")
    groups = scheme.inside("config_groups").inner()
    for one in groups:
        one.want("targets", ["Linear"], absent=["Linear"])
        one.want("output_activations", None)
    return groups, scheme.patterns("ignore")


def _int_quantized(scheme: _Scheme) -> W8A8:
    groups, ignored = _layers(scheme)
    if not groups:
        raise scheme.wrong("config_groups", {}, "a group of layers")
    for one in groups:
        one.want("format", None, "int-quantized")
        weights, rows = one.inside("weights"), one.inside("input_activations")
        for each in (weights, rows):
            each.want("num_bits", 8)
            each.want("type", "int", absent="int")
            each.want("symmetric", True, absent=True)
        weights.want("strategy", "channel", "tensor", absent="tensor")
        weights.want("actorder", None, "weight", "static", False)
        rows.want("dynamic", True)
        rows.want("strategy", "token")
    return W8A8(plain=ignored)


def _pack_quantized(scheme: _Scheme) -> Int4:
    groups, ignored = _layers(scheme)
    found: set[tuple[int, bool]] = set()
    for one in groups:
        one.want("format", None, "pack-quantized")
        one.want("input_activations", None)
        weights = one.inside("weights")
        weights.want("num_bits", 4)
        weights.want("type", "int", absent="int")
        weights.want("actorder", None, "weight", "static", False)
        strategy = weights.want("strategy", "group", "channel", absent="group")
        symmetric = weights.want("symmetric", True, False, absent=True)
        found.add((weights.group() if strategy == "group" else 0, bool(symmetric)))
    if len(found) != 1:
        raise scheme.wrong(
            "config_groups", sorted(found), "one group_size and one value of symmetric for all layers"
        )
    if not any("lm_head" in each for each in ignored):
        raise scheme.wrong("ignore", list(ignored), "a list with 'lm_head', which stays as it is,")
    ((group, symmetric),) = found
    return Int4(format="pack-quantized", group=group, symmetric=symmetric, plain=ignored)


def _compressed_tensors(scheme: _Scheme) -> Int4 | W8A8:
    kind = scheme.want("format", "pack-quantized", "int-quantized")
    return _pack_quantized(scheme) if kind == "pack-quantized" else _int_quantized(scheme)


_INTEGERS: Mapping[object, Callable[[_Scheme], Int4 | W8A8]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
}


def read_integers(config: Config) -> Int4 | W8A8 | None:
    """How weights of 4 or 8 bits of a `quantization_config` lie in the files; None for FP8. Raises
    `ModelError` naming the field that is not served and what is."""
    if is_readable_fp8(config):
        return None
    scheme = _Scheme(config)
    method = scheme.want("quant_method", *_INTEGERS, "fp8", "fbgemm_fp8")
    if method not in _INTEGERS:
        raise scheme.wrong("weight_block_size", config.get("weight_block_size"), f"{[BLOCK, BLOCK]} or null")
    return _INTEGERS[method](scheme)


def read_mxfp4(config: Config) -> Mxfp4 | None:
    """Which experts of a `quantization_config` are MXFP4; None for any other method. Raises `ModelError`."""
    if config.get("quant_method") != "mxfp4":
        return None
    return Mxfp4(plain=_Scheme(config).patterns("modules_to_not_convert"))
