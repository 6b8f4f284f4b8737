"""Whether an architecture can run through transformers, and its spec.

Its class is made on the meta device, without memory, and run once. What its layers ask of attention must be
what `gpu.attention` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from core.errors import ModelError
from core.models import ModelSpec
from gpu.models.transformers_model import BUILDING, TransformersModel, build, said

PROBE = "loom_probe"

TOKENS = 4

_HARMLESS = ("position_ids", "cache_position", "use_cache", "output_attentions", "is_causal", "dropout")
"""Attention options that are ignored: queries and keys are rotated before they are passed."""

_REFUSED_ROPE = ("dynamic", "longrope")
"""Kinds whose rotation of a token depends on the longest text of its step."""


class Call(NamedTuple):
    """What a layer asked of attention.

    sizes    heads, KV heads, dimensions of a key and of a value
    mask     what its mask is made by; None without one
    options  by name
    """

    layer: int
    sizes: tuple[int, int, int, int]
    mask: Callable[..., Tensor] | None
    options: Mapping[str, Any]


Refuse = Callable[[str], ModelError]
"""Makes the error of a reason."""


@lru_cache(maxsize=8)
def settled(spec: ModelSpec) -> ModelSpec:
    """`spec` as `core.models.read_spec` leaves it, with all that its class says. Raises `ModelError` with the
    reason where it cannot be served."""

    def refuse(reason: str) -> ModelError:
        return ModelError(f"{spec.architecture} cannot run through transformers: {reason}.")

    # In a dtype for which products of grouped experts know their shapes.
    model = build(spec, torch.bfloat16, torch.device("meta"), PROBE)
    positions = _positions(model, refuse)
    calls = _calls(model, refuse)
    heads, kv_heads, dim, values = _same(calls, lambda call: call.sizes, "heads", refuse)
    if dim != values:
        raise refuse(f"its keys have {dim} dimensions and its values {values} (MLA)")
    windows = _windows(calls, positions, refuse)
    scale = _same(calls, lambda call: call.options.get("scaling"), "scaling", refuse)
    cap = _same(calls, lambda call: call.options.get("softcap"), "softcap", refuse)
    table, experts = model.get_input_embeddings().weight, _has_experts(model)
    known = msgspec.structs.replace(
        spec,
        vocab_size=model.config.vocab_size,
        hidden=table.shape[1],
        intermediate=_widest(model.config, table.shape[1], experts),
        uncaptured=experts,  # the host groups tokens by them where no kernel does
        layers=len(calls),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        max_position=positions,
        sliding_window=max(windows),
        window_layers=frozenset(layer for layer, window in enumerate(windows) if window),
        attention_scale=scale or 1.0 / math.sqrt(dim),
        attention_cap=cap or 0.0,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    _check_head(known, refuse)
    return known


def _positions(model: Any, refuse: Refuse) -> int:
    """How many positions the class has; keys and values must be all that a text leaves behind."""
    config = model.config
    if getattr(model, "_is_stateful", False):
        raise refuse("its layers keep a state besides keys and values (recurrent, linear or hybrid)")
    if rope := _rope_kinds(config) & set(_REFUSED_ROPE):
        raise refuse(f"rope of type {', '.join(sorted(rope))} rotates a token by the longest text beside it")
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise refuse(f"max_position_embeddings must be a number of tokens, at least 1, not {positions!r}")
    return positions


def _has_experts(model: Any) -> bool:
    """Routed ones: stacked, or in a list of that name."""
    listed = any(name.endswith(".experts") for name, _ in model.named_modules())
    return listed or any(weight.dim() == 3 for weight in model.parameters())


def _widest(config: Any, hidden: int, experts: bool) -> int:
    """What a token of the widest MLP holds, for the memory of a step: of experts, those it is routed to."""
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    if not experts:
        return width
    routed = getattr(config, "num_experts_per_tok", None) or 8
    return max(width, routed * ((getattr(config, "moe_intermediate_size", None) or width) + hidden))


def _rope_kinds(config: Any) -> set[str]:
    """All kinds of rope that a config names: for each kind of layer, or for all."""
    told = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    groups = [told, *(each for each in told.values() if isinstance(each, Mapping))]
    return {kind for group in groups for kind in (group.get("rope_type"), group.get("type")) if kind}


def _calls(model: Any, refuse: Refuse) -> list[Call]:
    """What a forward of a few tokens asks of attention: once a layer, in order."""
    calls: list[Call] = []
    for module in model.modules():
        module.loom_calls = calls
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.inference_mode():
            # With a mask the class looks for no packed texts, for which it would read positions.
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except BUILDING as error:
        raise refuse(f"its forward does not run without data, on the meta device ({said(error)})") from error
    layers: int = model.config.num_hidden_layers
    if (found := [call.layer for call in calls]) != list(range(layers)):
        once = sum(found.count(layer) == 1 for layer in range(layers))
        raise refuse(
            f"{once} of its {layers} layers attend exactly once through the attention interface, and all "
            "must, in order; recurrent and linear layers, encoders and older classes do not"
        )
    return calls


class _Mask(Tensor):
    """Stands for a mask, and says what it is made by."""

    made: Callable[..., Tensor]


def _mask(*, mask_function: Callable[..., Tensor], **options: object) -> Tensor:
    mask = torch.empty(1, 1, TOKENS, TOKENS, device="meta").as_subclass(_Mask)
    mask.made = mask_function
    return mask


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **options: Any
) -> tuple[Tensor, None]:
    made = getattr(attention_mask, "made", None)  # of a mask that was changed since: none
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        made = None
    sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
    module.loom_calls.append(Call(getattr(module, "layer_idx", -1), sizes, made, options))
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _mask)


def _same(calls: list[Call], what: Callable[[Call], Any], name: str, refuse: Refuse) -> Any:
    """The value that `what` has for all layers."""
    first, *others = {what(call): None for call in calls}
    if others:
        raise refuse(f"its layers differ in {name}: {first} and {others[0]}")
    return first


def _windows(calls: list[Call], positions: int, refuse: Refuse) -> list[int]:
    """The sliding window of each layer; see `ModelSpec.window`."""
    by_mask = {call.mask: _window(call, positions, refuse) for call in calls}  # layers share masks
    windows = [by_mask[call.mask] for call in calls]
    if len(several := sorted(set(windows) - {0})) > 1:
        raise refuse(f"its layers have sliding windows of {', '.join(map(str, several))}")
    for call, window in zip(calls, windows, strict=True):
        _check_options(call, window, positions, refuse)
    return windows


def _window(call: Call, most: int, refuse: Refuse) -> int:
    """Positions that a layer sees, by its mask; 0: all before and itself."""
    if (mask := call.mask) is None:
        raise refuse(f"layer {call.layer} attends without a mask that is causal alone")
    other = refuse(f"the mask of layer {call.layer} is neither causal nor a sliding window (chunked, say)")
    at, zero = torch.arange(most), torch.tensor(0)

    def seen(query: int) -> Tensor:
        try:
            return mask(zero, zero, torch.tensor(query), at).expand(most)
        except BUILDING as error:
            raise other from error

    window = int(seen(most - 1).sum())
    for query in {most - 1, most // 2, most // 3, min(window, most - 1), 0}:
        if not torch.equal(seen(query), (at <= query) & (at > query - window)):
            raise other
    return 0 if window == most else window


def _check_options(call: Call, window: int, positions: int, refuse: Refuse) -> None:
    """Nothing is asked of attention that is left out here; the `window` of the mask is the one that is named,
    if one is."""
    told = call.options.get("sliding_window")
    if told is not None and min(told, positions) != (window or positions):
        raise refuse(f"layer {call.layer} has a mask of {window} tokens and a sliding_window of {told}")
    known = (*_HARMLESS, "scaling", "sliding_window", "softcap")
    for name, value in call.options.items():
        if name not in known and value is not None and value is not False:
            what = "attention sinks" if name == "s_aux" else f"the option {name}"
            raise refuse(f"layer {call.layer} asks for {what} of attention")


def _check_head(spec: ModelSpec, refuse: Refuse) -> None:
    """Check that the model's head runs by itself, and that each tensor has a place."""
    device = torch.device("meta")
    try:
        model = TransformersModel(spec, torch.bfloat16, device)
        logits = model.logits(torch.empty(TOKENS, spec.hidden, dtype=torch.bfloat16, device=device))
    except BUILDING as error:
        raise refuse(f"its head does not run by itself ({said(error)})") from error
    if logits.shape != (TOKENS, spec.vocab_size):
        raise refuse(f"its head makes logits of {tuple(logits.shape)}")
