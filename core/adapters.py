"""LoRA adapters: what is loaded, and how many fit where."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from core.config import LoraConfig
from core.errors import ConfigError

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer, those of experts included."""

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused modules and the matrices whose rows they stack, in order. Phi-3 has only these."""

HEAD = "lm_head"
TARGETS = (*LINEAR, "embed_tokens", HEAD)
"""Everything that an adapter may change."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter."""

    id: str = ""
    """Unique for each load: one that is loaded again under the same name has another, and so other prefixes
    in the cache. Empty before."""
    name: str
    path: str
    pinned: bool = False
    """Stays in host memory and on the device once it is there."""


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Room for adapters."""

    places: int
    """On the device: distinct adapters of running requests."""
    max_rank: int
    host: int
    """Adapters in host memory."""
    targets: tuple[str, ...] = LINEAR
    """The `TARGETS` that adapters may change: an adapter with others is refused."""


LEAST_RANK = 16
"""Largest rank, where neither a flag nor an adapter says another."""

NAME = re.compile(r"(?!\.)[^\s:/\\,\x00-\x1f]{1,256}")
"""Names of adapters: part of `base:adapter`, of URLs and of a list in `/metrics`."""

NAMING = "a name has 1 to 256 characters, no blank, ':', '/', '\\' or ',', and no '.' in front"


class _Written(msgspec.Struct, frozen=True):
    """An adapter as vLLM's and SGLang's flags take it in JSON."""

    name: str = ""
    path: str = ""
    lora_name: str = ""
    lora_path: str = ""
    pinned: bool = False


def adapters_at_start(config: LoraConfig) -> list[AdapterInfo]:
    """What `--lora` names: `NAME=PATH`, a path whose last part is the name, or a JSON object. Raises
    `ConfigError`."""
    found = [_adapter(text) for text in config.lora]
    for at, adapter in enumerate(found):
        if not NAME.fullmatch(adapter.name) or not adapter.path:
            raise ConfigError(f"--lora {config.lora[at]}: it takes NAME=PATH, and {NAMING}")
        if any(adapter.name == other.name for other in found[:at]):
            raise ConfigError(f"--lora names {adapter.name!r} twice")
    if sum(adapter.pinned for adapter in found) >= config.max_loras_per_batch:
        raise ConfigError(
            f"--max-loras-per-batch {config.max_loras_per_batch} must be more than the pinned adapters, "
            "or no other could run"
        )
    return found


def _adapter(text: str) -> AdapterInfo:
    if text.startswith("{"):
        try:
            read = msgspec.json.decode(text, type=_Written)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--lora {text}: {error}") from None
        return AdapterInfo(
            name=read.name or read.lora_name, path=read.path or read.lora_path, pinned=read.pinned
        )
    name, equals, path = text.partition("=")
    if not equals:
        name, path = text.rstrip("/").rpartition("/")[2], text
    return AdapterInfo(name=name, path=path)


def adapter_limits(config: LoraConfig, files: Sequence[Mapping[str, Any]]) -> AdapterLimits | None:
    """Room for adapters; None where there are to be none. `files` are the adapter_config.json of those at the
    start: what no flag says of rank and targets is the most that these need. Raises `ConfigError`."""
    if not (config.enable_lora or config.lora):
        return None
    host = config.max_loaded_loras or max(config.max_loras_per_batch, len(config.lora))
    if host < len(config.lora):
        raise ConfigError(f"--max-loaded-loras {host} is less than the {len(config.lora)} of --lora")
    ranks = (rank for file in files for rank in _ranks(file))
    return AdapterLimits(
        places=config.max_loras_per_batch,
        max_rank=config.max_lora_rank or max(ranks, default=LEAST_RANK),
        host=host,
        targets=_targets(config.lora_target_modules, files),
    )


def _ranks(file: Mapping[str, Any]) -> Iterable[int]:
    patterns = file.get("rank_pattern")
    named = patterns.values() if isinstance(patterns, dict) else ()
    return (rank for rank in (file.get("r"), *named) if isinstance(rank, int) and rank > 0)


def _targets(named: Sequence[str], files: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The matrices that adapters may change, in the order of `TARGETS`."""
    known = (*TARGETS, *FUSED)
    if unknown := [name for name in named if name not in (*known, "all")]:
        raise ConfigError(f"--lora-target-modules takes all, or {', '.join(known)}, not {unknown[0]}")
    if "all" in named:
        return TARGETS
    if named:
        asked = _parts(named)
        return tuple(target for target in TARGETS if target in asked)
    wanted: set[str] = set().union(*map(_changed, files)) if files else set(LINEAR)
    return tuple(target for target in TARGETS if target in wanted) or LINEAR


def _parts(names: Iterable[str]) -> set[str]:
    """Return the names, with fused modules replaced by their matrices."""
    return {part for name in names for part in FUSED.get(name, (name,))}


def _changed(file: Mapping[str, Any]) -> set[str]:
    """The `TARGETS` that an adapter changes, or more."""
    modules = file.get("target_modules")
    listed = modules if isinstance(modules, list) else [""]
    names = _parts(str(name).rpartition(".")[2] for name in listed)
    found = names.intersection(TARGETS)
    if names.difference(TARGETS) or file.get("target_parameters"):
        found |= set(LINEAR)  # a pattern, `all-linear`, or experts by other names
    return found
