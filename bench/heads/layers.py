"""Parts of draft heads. The parameters' names are those of the checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.heads.data import Batch
from bench.heads.target import Rotation, Seen, Target


class Size(NamedTuple):
    """Size of a head."""

    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    aux: tuple[int, ...]
    """Layers of the target whose inputs the head reads."""
    draft_vocab: int = 0
    """Tokens that the head can propose, the most frequent ones; 0: all, with the target's output matrix."""
    block: int = 0
    """Tokens of a block, the first of which is known."""


class Pair(NamedTuple):
    """Keys and values [..., kv_heads, d]."""

    k: Tensor
    v: Tensor


class Head(nn.Module, ABC):
    """A draft head over a target, whose embedding and, unless it has its own, output matrix it uses."""

    architecture: str
    model_type: str

    def __init__(self, target: Target, size: Size) -> None:
        super().__init__()
        self.size = size
        self.fc = Fusion(target, size)
        # In a tuple, so that the module does not hold what belongs to the target.
        self._target = (target,)

    @property
    def target(self) -> Target:
        return self._target[0]

    @abstractmethod
    def loss(self, batch: Batch, seen: Seen) -> Tensor:
        """The loss over the answers of a batch, a float32 scalar."""

    @abstractmethod
    def drafts(self, batch: Batch, seen: Seen, count: int) -> Tensor:
        """int64 [B, T, count]: what the head proposes where position t holds the last known token. Draft i is
        exact where all before it are right (see `bench.heads.evaluate`)."""

    def config(self) -> dict[str, Any]:
        """config.json of the checkpoint."""
        spec, size = self.target.spec, self.size
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": spec.hidden,
            "intermediate_size": size.intermediate,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "head_dim": spec.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": spec.norm_eps,
            "rope_theta": spec.rope.theta,
            "max_position_embeddings": spec.max_position,
            "vocab_size": spec.vocab_size,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


class RmsNorm(nn.Module):
    """RMS norm over the last dimension, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps) * self.weight).to(
            x.dtype
        )


class Fusion(nn.Linear):
    """The projection of the target's states, trained on scaled inputs.

    Their dimensions differ up to a hundredfold in size. Adam moves every weight by about the same amount, so
    that without scales a step would turn the large ones over and not touch the small ones.
    """

    def __init__(self, target: Target, size: Size) -> None:
        super().__init__(len(size.aux) * target.spec.hidden, target.spec.hidden, bias=False)
        self.register_buffer("scale", torch.ones(self.in_features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.get_buffer("scale").to(x.dtype))

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> None:
        """Take the scales from states [n, inputs]."""
        self.get_buffer("scale").copy_(x.float().square().mean(0).rsqrt().clamp(max=1e3))

    @torch.no_grad()
    def fold(self) -> None:
        """Multiply the scales into the weights, as the checkpoint has them."""
        self.weight *= self.get_buffer("scale")
        self.get_buffer("scale").fill_(1)


class Attention(nn.Module):
    """Projections of attention, with Qwen3's norms of queries and keys if `norms`."""

    def __init__(self, target: Target, size: Size, inputs: int, norms: bool) -> None:
        super().__init__()
        spec = target.spec
        self._dim = spec.head_dim
        self.q_proj = nn.Linear(inputs, size.heads * self._dim, bias=False)
        self.k_proj = nn.Linear(inputs, size.kv_heads * self._dim, bias=False)
        self.v_proj = nn.Linear(inputs, size.kv_heads * self._dim, bias=False)
        self.o_proj = nn.Linear(size.heads * self._dim, spec.hidden, bias=False)
        if norms:
            self.q_norm = RmsNorm(self._dim, spec.norm_eps)
            self.k_norm = RmsNorm(self._dim, spec.norm_eps)
        self._norms = norms

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._dim)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotated queries [..., heads, d] of x [..., inputs]."""
        q = self._split(self.q_proj(x))
        return rotation(self.q_norm(q) if self._norms else q)

    def pair(self, x: Tensor, rotation: Rotation) -> Pair:
        """Rotated keys, and values, of x [..., inputs]."""
        k = self._split(self.k_proj(x))
        v = self._split(self.v_proj(x))
        return Pair(rotation(self.k_norm(k) if self._norms else k), v)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


def attend(q: Tensor, context: Pair, visible: Tensor, own: Pair) -> Tensor:
    """Attention of groups of queries over keys of their sequence and keys of their group.

    q [B, G, n, heads, d]; context [B, T, kv_heads, d], of which group g sees those of bool `visible` [B or 1,
    G, T]; own [B, G, m, kv_heads, d], all seen by the group (m may be 0). Returns [B, G, n, heads * d].
    """
    width = context.k.shape[1]
    grouped = q.view(*q.shape[:3], context.k.shape[2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    shared = torch.einsum("bgnkrd,btkd->bkrgnt", grouped, context.k)
    shared = shared.masked_fill(~visible[:, None, None, :, None], float("-inf"))
    apart = torch.einsum("bgnkrd,bgmkd->bkrgnm", grouped, own.k)
    weights = torch.cat([shared, apart], -1).softmax(-1, torch.float32).to(context.v.dtype)
    found = torch.einsum("bkrgnt,btkd->bgnkrd", weights[..., :width], context.v)
    return (found + torch.einsum("bkrgnm,bgmkd->bgnkrd", weights[..., width:], own.v)).flatten(3)


def soft_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy [n] of logits [n, vocab] against the distribution of the logits `wanted` [n, vocab]."""
    return F.cross_entropy(logits.float(), wanted.float().softmax(-1), reduction="none")
