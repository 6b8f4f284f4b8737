"""How a sentence-transformers directory pools: its modules.json and what that names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from core.errors import ModelError
from core.models.fields import Fields
from core.models.spec import Pooling, PoolingSpec

_MODES: dict[str, Pooling] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
_FLAGS: dict[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Fields of older files, one of them true, and how newer ones spell it."""

_TOKENIZING = "sentence_bert_config.json"


Read = Callable[[str], object]
"""JSON of a file by its place in the directory, None without the file."""


def sentence_pooling(read: Read) -> PoolingSpec | None:
    """The pooling of a directory, None for one that is not sentence-transformers'.

    Raises `ModelError` for a module or a mode that is not supported: without it the vectors would be
    others than the model's.
    """
    modules = read("modules.json")
    if modules is None:
        return None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError("modules.json must hold a list of modules.")
    found = PoolingSpec(kind="mean", normalize=False)
    for module in modules:
        name, path = str(module.get("type")).rpartition(".")[2], module.get("path")
        place = f"{path}/" if path else ""
        match name:
            case "Transformer":
                fields = Fields(_object(read, place + _TOKENIZING), _TOKENIZING)
                most, lower = fields.count("max_seq_length", 0), fields.flag("do_lower_case")
                found = msgspec.structs.replace(found, max_tokens=most, lowercase=lower)
            case "Pooling":
                found = msgspec.structs.replace(found, kind=_kind(read, f"{place}config.json"))
            case "Normalize":
                found = msgspec.structs.replace(found, normalize=True)
            case _:
                raise ModelError(
                    f"modules.json: the module {name} is not supported. "
                    "Supported: Transformer, Pooling, Normalize."
                )
    return found


def _kind(read: Read, path: str) -> Pooling:
    content = _object(read, path)
    named = content.get("pooling_mode")
    modes = [named] if named else [mode for flag, mode in _FLAGS.items() if content.get(flag) is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{path}: pooling {' and '.join(map(str, modes)) or 'of no kind'} is not supported. "
            f"Supported: {', '.join(_MODES)}, one of them."
        )
    return _MODES[modes[0]]


def _object(read: Read, path: str) -> dict[str, Any]:
    content = read(path)
    if content is not None and not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content or {}
