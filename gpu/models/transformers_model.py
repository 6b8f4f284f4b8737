"""Decoders without a family here: transformers' own class, with the paged attention of this package.

    tokens of a step [n] ─► layers of the class, as one sequence [1, n] ─► hidden states ─► its head
                                │ q, k, v [1, heads, n, head_dim], once a layer
                                └► `ctx.ops.attend`: pages, prefixes, windows

The class computes all but attention; its own masks and caches are not used. What
does not fit is refused before weights are read (`gpu.models.transformers_check`) and, as far as that needs
numbers, before the first request (`TransformersModel.verify`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from core.errors import ModelError
from core.models import ModelSpec, unsupported
from gpu.context import ForwardContext
from gpu.layers.linear import Places
from gpu.models.base import CausalModel
from gpu.ops.base import Ops, Rotation

ATTENTION = "loom_paged"
"""Name of this package's attention in transformers' registry. It has no entry among the mask functions, so
that no mask is built."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer: queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim] to
[n, heads * head_dim]."""

BUILDING = (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What a class of transformers raises for an input that it was not made for."""

TRIED = 12
"""Tokens that `verify` runs."""

SAME = 0.01
"""Relative difference of rows that are computed alike, in products of the same shape: it was 0."""

ALIKE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Relative difference of logits by two ways to attend. In bfloat16 it was 5% in the 36 layers of a Qwen3-8B
of random weights on an H100, and 4% in 120 layers on a CPU."""


class Attending:
    """How the layers of one model attend now. Its attention modules hold it as `loom_attending`."""

    attend: Attend


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: object
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [1, heads, n, head_dim] to [1, n, heads, head_dim]. Masks and
    `options` were compared with the spec when the class was checked."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    found = module.loom_attending.attend(module.layer_idx, q, k, v)
    return found.view(1, *q.shape), None


AttentionInterface.register(ATTENTION, _attention)


def build(spec: ModelSpec, dtype: torch.dtype, device: torch.device, attention: str = ATTENTION) -> Any:
    """The class's model, whose weights are uninitialised. Raises `ModelError` for a class that transformers
    does not have."""
    config = json.loads(spec.transformers)
    kind = config.get("model_type", "")
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    if name != spec.architecture:
        raise unsupported(
            spec.architecture,
            f"transformers {transformers_version} knows no causal language model of this name, and for "
            f"model_type {kind!r} {name or 'none at all'}",
        )
    try:
        made = CONFIG_MAPPING[kind].from_dict(config)
        made.use_cache = False
        with torch.device(device), no_init_weights():  # they are overwritten
            model = AutoModelForCausalLM.from_config(
                made, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
            model.tie_weights()
    except Exception as error:  # configs and classes of transformers raise many kinds
        raise ModelError(
            f"{spec.architecture} cannot run through transformers {transformers_version}: it cannot be made "
            f"of this config.json with the attention of this server ({said(error)})."
        ) from error
    return model.eval().requires_grad_(False)


def said(error: BaseException) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _GivenStates(torch.nn.Module):
    """Stands where a head's base model does: what it is given are the hidden states."""

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **options: object
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        found = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)
        found.router_logits = None  # heads of experts pass it on
        return found

    @property
    def decoder(self) -> _GivenStates:
        """The module that OPT's head calls, inside its base model."""
        return self


class TransformersModel(CausalModel):
    """`CausalModel` of an architecture's class in transformers."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self._whole = model = build(spec, dtype, device)
        self._attending = attending = Attending()
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.loom_attending = attending
        self._base: Any = model.base_model
        self._table: Any = model.get_input_embeddings()
        self.embedding = self._table.weight
        # The class's own forward behind other hidden states: whatever it does to logits, it does.
        self._headed = copy.copy(model)
        self._headed._modules = dict(model._modules)
        setattr(self._headed, model.base_model_prefix, _GivenStates())
        self._parameters.places |= checkpoint_places(model)
        shape = (1, 1, spec.head_dim)
        self._unturned = [make(shape, dtype=dtype, device=device) for make in (torch.ones, torch.zeros)]

    def forward(self, ctx: ForwardContext, ids: Tensor) -> Tensor:
        """See `CausalModel.forward`."""
        n, heads = len(ids), (self.spec.heads, self.spec.kv_heads)
        # The class has rotated queries and keys, where it does.
        rotation = Rotation(*(x.expand(n, -1, -1).contiguous() for x in self._unturned))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ctx.ops.attend(layer, torch.cat([q, k, v], 1).flatten(1), heads, rotation, None)

        # Padding may have any position, which a table of them does not.
        positions = ctx.positions.long().clamp(0, self.spec.max_position - 1)
        if ctx.embedded is None:
            hidden = self._run(attend, positions, input_ids=ids.long()[None])
        else:
            embeds = self._table(ids.long())
            embeds.index_copy_(0, ctx.embedded.rows, ctx.embedded.values.to(embeds.dtype))
            hidden = self._run(attend, positions, inputs_embeds=embeds[None])
        if ctx.tail is not None:
            ctx.tail[0].copy_(hidden)
        return hidden if ctx.wanted is None else hidden.index_select(0, ctx.wanted)

    def _run(self, attend: Attend, positions: Tensor, **inputs: Tensor) -> Tensor:
        """Hidden states [n, hidden] of the class's layers, whose attention is `attend`."""
        self._attending.attend = attend
        found = self._base(**inputs, position_ids=positions[None], use_cache=False)
        hidden: Tensor = found[0][0]
        return hidden

    def logits(self, hidden: Tensor, ops: Ops | None = None) -> Tensor:
        """See `CausalModel.logits`."""
        found: Tensor = self._headed(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return found.float()

    def verify(self) -> None:
        """Run a few tokens in three ways, once the weights are there. Raises `ModelError` for a class whose
        tokens know of each other by anything but attention, whose positions are not those it is given, or
        whose own attention finds something else: all of these would serve wrong text."""
        count = min(TRIED, self.spec.max_position)
        ids = torch.arange(count, device=self.embedding.device) * 37 % self.spec.vocab_size
        positions = torch.arange(count, device=ids.device)
        # Two tokens keep what they are and where they are in the text, among others and in another order.
        moved, places = ids.flip(0).add(1) % self.spec.vocab_size, positions.flip(0)
        for old, new in ((0, count - 2), (count - 1, 0)):
            moved[new], places[new] = ids[old], positions[old]
        apart = self._run(_alone, positions, input_ids=ids[None])
        if not _off(apart, self._run(_alone, positions, inputs_embeds=self._table(ids)[None])).max() <= SAME:
            raise self._unfit("computes something else of a token's embedding than of the token")
        again = self._run(_alone, places, input_ids=moved[None])
        if not _off(apart[[0, -1]], again[[count - 2, 0]]).max() <= SAME:
            raise self._unfit(
                "lets tokens of a step change each other, or their positions, outside of attention"
            )
        paged = self.logits(self._run(self._plainly, positions, input_ids=ids[None]))
        config = self._whole.config
        config._attn_implementation = "eager"
        try:
            own = self._whole(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        except BUILDING as error:
            raise self._unfit(f"does not run with its own attention ({said(error)})") from error
        finally:
            config._attn_implementation = ATTENTION
        # The median over rows: a row may differ where rounding routes its token to another expert.
        if not _off(paged, own.float()).median() <= ALIKE[self.embedding.dtype]:
            raise self._unfit("finds other logits with its own attention than with that of this server")

    def _unfit(self, what: str) -> ModelError:
        return ModelError(f"{self.spec.architecture} cannot run through transformers: its class {what}.")

    def _plainly(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention to the tokens of the call alone, as the spec says."""
        spec, n = self.spec, len(q)
        k, v = (x.repeat_interleave(spec.heads // spec.kv_heads, 1).transpose(0, 1).float() for x in (k, v))
        scores = q.transpose(0, 1).float() @ k.transpose(1, 2) * spec.softmax_scale
        if cap := spec.attention_cap:
            scores = (scores / cap).tanh() * cap
        seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        if window := spec.window(layer):
            seen = seen.triu(1 - window)
        scores = scores.masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ v).to(q.dtype).transpose(0, 1).flatten(1)

    @property
    def ignored(self) -> re.Pattern[str]:
        """Names of tensors that checkpoints carry and the class has no use for."""
        tied = [f"^{re.escape(name)}$" for name in getattr(self._whole, "all_tied_weights_keys", None) or ()]
        return re.compile(
            "|".join([*(self._whole._keys_to_ignore_on_load_unexpected or ()), *tied]) or r"(?!)"
        )

    @property
    def prefix(self) -> str:
        """Prefix of the base model's tensor names. A checkpoint that was saved without a head lacks it."""
        return f"{self._whole.base_model_prefix}."


def _off(one: Tensor, other: Tensor) -> Tensor:
    """How far rows [n, size] are from those of `other`, relative to their length."""
    off: Tensor = (one - other).float().norm(dim=-1) / other.float().norm(dim=-1).clamp(min=1e-20)
    return off


def _alone(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No attention: of each token its own query, key and value, so that where it is and what it is shows."""
    times = q.shape[1] // k.shape[1]
    return (q + (k + v).repeat_interleave(times, 1)).flatten(1)


class _View(torch.Tensor):
    """A tensor of which no copy is made to lay it out anew."""

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        return self


def checkpoint_places(model: PreTrainedModel) -> Places:
    """What each tensor of a checkpoint fills. transformers stacks matrices that checkpoints keep apart, as
    those of experts: what it does to save them, done to views of its weights, gives a view for each name.

    Raises `ModelError` where a checkpoint's tensor is no part of a weight as it lies.
    """
    own: dict[str, Tensor] = {}
    known: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:  # the second name of a tied one
            known.add(id(tensor))
            own[name] = tensor.detach().as_subclass(_View)
    stored = {tensor.untyped_storage()._cdata for tensor in own.values()}
    places = {}
    for name, view in revert_weight_conversion(model, dict(own)).items():
        place = view.as_subclass(torch.Tensor)
        if place.untyped_storage()._cdata not in stored or not place.is_contiguous():
            raise ModelError(
                f"{type(model).__name__} cannot run through transformers: {name} lies there in another order "
                "than in a checkpoint."
            )
        places[name] = place
    return places
