"""The arithmetic of draft models in plain torch, over a whole sequence at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from core.models import DraftSpec
from tests.rigs import draft_heads
from tests.rigs.draft_heads import HEADS, KV_HEADS, Tensors


class Naive:
    """A draft model's layers over a whole sequence, by the names of its checkpoint."""

    def __init__(self, name: str) -> None:
        aliases = {"midlayer.": "layers.0.", "model.": "", "transformer.": "layers.0.", "fusion_fc.": "fc."}
        self.weights: Tensors = {}
        for key, tensor in draft_heads.tensors(name).items():
            for begin, other in aliases.items():
                key = other + key.removeprefix(begin) if key.startswith(begin) else key
            self.weights[key] = tensor

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def heads(self, layer: int, of: str, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, heads, 16] of `x`, normed where the checkpoint says so and, but for values, rotated."""
        at = f"layers.{layer}.self_attn.{of}_"
        found = self.linear(f"{at}proj", x).view(len(x), -1, 16)
        if f"{at}norm.weight" in self.weights:
            found = self.norm(f"{at}norm", found)
        if of == "v":
            return found
        angles = positions[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = found.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Softmax over the keys that `seen` [queries, keys] allows."""
        k, v = (side.repeat_interleave(HEADS // KV_HEADS, 1) for side in (k, v))
        scores = q.transpose(0, 1) @ k.permute(1, 2, 0) / 4
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (shares @ v.transpose(0, 1)).transpose(0, 1).flatten(1)

    def layer(self, layer: int, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The output of a causal layer whose attention reads `x` and adds to `residual`."""
        n = len(x)
        q, k, v = (self.heads(layer, of, x, torch.arange(n)) for of in "qkv")
        found = self.attend(q, k, v, torch.ones(n, n, dtype=torch.bool).tril())
        return self.finish(layer, found, residual)

    def finish(self, layer: int, found: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        at = f"layers.{layer}."
        residual = residual + self.linear(f"{at}self_attn.o_proj", found)
        x = self.norm(f"{at}post_attention_layernorm", residual)
        gate, up = (self.linear(f"{at}mlp.{name}_proj", x) for name in ("gate", "up"))
        return residual + self.linear(f"{at}mlp.down_proj", F.silu(gate) * up)

    def eagle(self, embedding: torch.Tensor, hidden: torch.Tensor, layers: int) -> torch.Tensor:
        x = self.linear("fc", torch.cat([embedding, hidden], 1))
        x = self.layer(0, x, x)
        for i in range(1, layers):
            x = self.layer(i, self.norm(f"layers.{i}.input_layernorm", x), x)
        return x

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        if "input_norm.weight" in self.weights:
            aux = self.norm("input_norm", aux)
        if "fc_norm.0.weight" in self.weights:
            aux = torch.cat([self.norm(f"fc_norm.{i}", x) for i, x in enumerate(aux.chunk(3, 1))], 1)
        return self.linear("fc", aux)

    def eagle3(self, embedding: torch.Tensor, hidden: torch.Tensor, spec: DraftSpec) -> torch.Tensor:
        normed = self.norm("layers.0.hidden_norm", hidden)
        x = torch.cat([self.norm("layers.0.input_layernorm", embedding), normed], 1)
        x = self.layer(0, x, normed if spec.norm_before_residual else hidden)
        for i in range(1, spec.decoder.layers):
            x = self.layer(i, self.norm(f"layers.{i}.input_layernorm", x), x)
        return x

    def dflash(self, context: torch.Tensor, block: torch.Tensor, causal: bool) -> torch.Tensor:
        """The last hidden states of embedded `block` behind fused states `context`."""
        before, n = torch.arange(len(context)), len(block)
        at = len(context) + torch.arange(n)
        seen = torch.ones(n, len(context) + n, dtype=torch.bool)
        seen = seen.tril(len(context)) if causal else seen
        x = block
        for i in range(2):
            y = self.norm(f"layers.{i}.input_layernorm", x)
            k, v = (torch.cat([self.heads(i, of, context, before), self.heads(i, of, y, at)]) for of in "kv")
            x = self.finish(i, self.attend(self.heads(i, "q", y, at), k, v, seen), x)
        return self.norm("norm", x)
