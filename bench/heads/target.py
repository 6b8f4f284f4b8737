"""The target in plain PyTorch: hidden states of whole sequences, and answers of many prompts at once.

Whole batches in a few large products, without pages and graphs: training wants the states of every position
of a sequence, which a serving engine does not keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import ModelError
from core.models import ModelSpec
from gpu.build import spec_of
from gpu.layers.rope import frequencies
from gpu.weights.load import load_model

LOOK = 16
"""Steps of generation between two looks at the device: for rows that ended, and at the clock."""
PREFILL = 32_768
"""Padded prompt tokens of one forward."""
BUCKET = 64
"""Attention over a cache covers a multiple of this many positions."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer: from its number, q [B, T, heads, d] and k, v [B, T, kv_heads, d] to [B, T, heads,
d]."""

Delta = Callable[[int, str, Tensor], Tensor | None]
"""Addition to a product of a layer: from the layer's number, the product's name ("qkv", "out", "gate_up",
"down") and its input [..., in] to what is added to the product [..., out], or None for nothing."""


class Rotation(NamedTuple):
    """cos and sin, float32, each [..., d]."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate heads [..., heads, d], in halves as Llama does."""
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return (x * self.cos.unsqueeze(-2) + turned * self.sin.unsqueeze(-2)).to(x.dtype)


class Seen(NamedTuple):
    """Results of a forward: inputs of layers [B, T, hidden] by their numbers, and the states after the last
    norm [B, T, hidden]."""

    inputs: dict[int, Tensor]
    final: Tensor

    def join(self, layers: Sequence[int]) -> Tensor:
        """[B, T, len(layers) * hidden]."""
        return torch.cat([self.inputs[layer] for layer in layers], -1)


class _Layer(NamedTuple):
    before: Tensor
    qkv: Tensor
    out: Tensor
    after: Tensor
    gate_up: Tensor
    down: Tensor


class Target:
    """A dense model of the Llama family."""

    def __init__(self, source: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `ModelError`, also for a model that has more than the plain Llama layer."""
        self.spec = spec = spec_of(source)
        biases = spec.qkv_bias or spec.out_bias or spec.mlp_bias
        if spec.moe or biases or spec.qk_norm or spec.norms != "before" or spec.window_layers:
            raise ModelError(f"{source} is not of plain Llama layers, the only ones that bench.heads has.")
        if spec.rope.kind == "dynamic" or spec.rope.partial != 1:
            raise ModelError(f"bench.heads does not have the rope of {source}.")
        self.device = device
        self.delta: Delta | None = None
        # Copies: autograd takes no tensors that were made for inference.
        places = load_model(spec, source, dtype, device).places()
        weights = {name: place.clone() for name, place in places.items()}
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = self.embedding if spec.tied else weights["lm_head.weight"]
        self._exact_head = self.head.float()
        self.norm = weights["model.norm.weight"]

        def layer(prefix: str) -> _Layer:
            def join(*names: str) -> Tensor:
                return torch.cat([weights[f"{prefix}{name}.weight"] for name in names])

            return _Layer(
                join("input_layernorm"),
                join("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                join("self_attn.o_proj"),
                join("post_attention_layernorm"),
                join("mlp.gate_proj", "mlp.up_proj"),
                join("mlp.down_proj"),
            )

        self._layers = [layer(f"model.layers.{i}.") for i in range(spec.layers)]
        self._frequencies = frequencies(spec.rope, spec.head_dim).to(device)

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotation of int positions [...]."""
        return rotation(self.spec, self._frequencies, positions)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., hidden] of ids [...]."""
        return F.embedding(ids, self.embedding)

    def logits(self, final: Tensor) -> Tensor:
        """[..., vocab] in the model's dtype."""
        return F.linear(final, self.head)

    @torch.no_grad()
    def see(self, ids: Tensor, inputs: Collection[int] = ()) -> Seen:
        """`forward` without gradients."""
        return self.forward(ids, inputs)

    def forward(self, ids: Tensor, inputs: Collection[int] = ()) -> Seen:
        """A causal forward of ids [B, T] from position 0. Pads belong at the right, where nothing sees
        them."""

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        kept = {}
        x = self.embed(ids)
        rotation = self.rotation(torch.arange(ids.shape[1], device=self.device))
        for number in range(self.spec.layers):
            if number in inputs:
                kept[number] = x
            x = self._layer(number, x, rotation, attend)
        return Seen(kept, self._normed(x, self.norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def _layer(self, number: int, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        spec, layer = self.spec, self._layers[number]

        def product(name: str, x: Tensor) -> Tensor:
            y = F.linear(x, getattr(layer, name))
            more = None if self.delta is None else self.delta(number, name, x)
            return y if more is None else y + more

        sizes = [spec.q_size, spec.kv_size, spec.kv_size]
        parts = torch.split(product("qkv", self._normed(x, layer.before)), sizes, -1)
        q, k, v = (part.view(*x.shape[:-1], -1, spec.head_dim) for part in parts)
        x = x + product("out", attend(number, rotation(q), rotation(k), v).flatten(-2))
        gate, up = product("gate_up", self._normed(x, layer.after)).chunk(2, -1)
        return x + product("down", F.silu(gate) * up)

    # -- answers -----------------------------------------------------------------------------------

    @torch.no_grad()
    def answer(
        self,
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        limit: int,
        ends: Collection[int],
        deadline: float,
    ) -> list[list[int]]:
        """Answers of at most `limit` tokens, their end token included. At `deadline` (`time.monotonic`) they
        are cut where they are."""
        width = max(map(len, prompts))
        cache = _Cache(self.spec, prompts, -(-(width + limit) // BUCKET) * BUCKET, self)
        heat = torch.tensor(temperatures, device=self.device)[:, None]
        stop = torch.tensor(sorted(ends), device=self.device)
        said = torch.zeros(len(prompts), limit, dtype=torch.int64, device=self.device)
        where = torch.arange(len(prompts), device=self.device)
        token = self._choose(self._prefill(prompts, cache), heat)
        said[:, 0] = token
        for step in range(1, limit):
            if step % LOOK == 0:
                going = ~torch.isin(said[where, :step], stop).any(1)
                count = int(going.sum())
                if count == 0 or time.monotonic() > deadline:
                    break
                if count < 0.75 * len(going):
                    where, token, heat = where[going], token[going], heat[going]
                    cache.keep(going)
            token = self._choose(self._step(token, cache, width + step - 1), heat)
            said[where, step] = token
        else:
            step = limit
        return [_ended(row, ends) for row in said[:, :step].tolist()]

    def _choose(self, final: Tensor, heat: Tensor) -> Tensor:
        # The largest of logits + T * Gumbel noise is a sample at temperature T, and the best token at 0.
        # In float32 as in the server: logits of 16 bits have ties.
        logits = F.linear(final.float(), self._exact_head)
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        return logits.sub_(noise.mul_(heat)).argmax(-1)

    def _prefill(self, prompts: Sequence[list[int]], cache: _Cache) -> Tensor:
        """Fill the cache with the prompts; states [B, hidden] of their last tokens."""
        rows = max(PREFILL // cache.width, 1)
        parts = [slice(first, first + rows) for first in range(0, len(prompts), rows)]
        return torch.cat([self._prefill_part(prompts[part], cache, part) for part in parts])

    def _prefill_part(self, prompts: Sequence[list[int]], cache: _Cache, part: slice) -> Tensor:
        width, pads = cache.width, cache.pads[part, None]
        columns = torch.arange(width, device=self.device)
        # A pad sees itself: a row of the softmax without any key is not a number.
        visible = (columns >= pads)[:, None] & (columns[:, None] >= columns)
        visible = (visible | torch.eye(width, dtype=torch.bool, device=self.device))[:, None]

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = q.shape[2] // k.shape[2]
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            cache.keys[number][part, :, :width] = k
            cache.values[number][part, :, :width] = v
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)

        ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts], device=self.device)
        x = self.embed(ids)
        rotation = self.rotation((columns - pads).clamp(min=0))
        for number in range(self.spec.layers):
            x = self._layer(number, x, rotation, attend)
        return self._normed(x[:, -1], self.norm)

    def _step(self, token: Tensor, cache: _Cache, column: int) -> Tensor:
        """States [B, hidden] of one more token of each row, written to `column` of the cache."""
        cache.mask[:, column] = 0
        span = -(-(column + 1) // BUCKET) * BUCKET
        mask = cache.mask[:, None, None, :span]

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[number], cache.values[number]
            keys[:, :, column], values[:, :, column] = k[:, 0], v[:, 0]
            # The query heads of a KV head are as many queries over the same keys.
            grouped = q.view(len(q), k.shape[2], -1, q.shape[-1])
            keys, values = keys[:, :, :span], values[:, :, :span]
            found = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            return found.flatten(1, 2)[:, None]

        x = self.embed(token[:, None])
        rotation = self.rotation((column - cache.pads)[:, None])
        for number in range(self.spec.layers):
            x = self._layer(number, x, rotation, attend)
        return self._normed(x[:, 0], self.norm)


class _Cache:
    """Keys and values [B, kv_heads, span, d] of each layer; prompts end at column `width`."""

    def __init__(self, spec: ModelSpec, prompts: Sequence[list[int]], span: int, target: Target) -> None:
        device, dtype = target.device, target.embedding.dtype
        shape = (len(prompts), spec.kv_heads, span, spec.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.layers)]
        self.width = max(map(len, prompts))
        self.pads = torch.tensor([self.width - len(row) for row in prompts], device=device)
        columns = torch.arange(span, device=device)
        hidden = (columns < self.pads[:, None]) | (columns >= self.width)
        mask = torch.zeros(len(prompts), span, dtype=dtype, device=device)
        self.mask = mask.masked_fill_(hidden, float("-inf"))

    def keep(self, rows: Tensor) -> None:
        """Drop the rows that are not marked in bool [B]."""
        self.pads, self.mask = self.pads[rows], self.mask[rows]
        for layer in range(len(self.keys)):
            self.keys[layer] = self.keys[layer][rows]
            self.values[layer] = self.values[layer][rows]


def rotation(spec: ModelSpec, steps: Tensor, positions: Tensor) -> Rotation:
    """Rotation at int positions [...], for frequencies [d / 2]."""
    angles = (positions[..., None] * steps).repeat(*[1] * positions.dim(), 2)
    return Rotation(angles.cos() * spec.rope.attention_factor, angles.sin() * spec.rope.attention_factor)


def _ended(ids: list[int], ends: Collection[int]) -> list[int]:
    at = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: at + 1]
