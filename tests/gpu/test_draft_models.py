"""Draft models from tiny checkpoints with public names, against plain torch over a whole sequence at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from core.models import DraftSpec, read_draft
from gpu.build import spec_of
from gpu.models.base import CausalModel
from gpu.models.draft import ChainModel
from gpu.thread import device_thread
from gpu.weights import load_draft, load_model
from tests.rigs import draft_heads, tiny_model
from tests.rigs.draft_heads import HEADS, KV_HEADS, VOCAB, Pages, Tensors

CPU = torch.device("cpu")
CHAINS = [name for name in draft_heads.CONFIGS if "dflash" not in name]


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with device_thread(CPU):
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    path = tiny_model.build("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=6).path
    model = load_model(spec_of(path), path, torch.float32, CPU)
    with device_thread(CPU):
        model.seal()
    return model


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


def spec_for(name: str, target: CausalModel) -> DraftSpec:
    return read_draft(draft_heads.CONFIGS[name], target.spec)


def chain(name: str, target: CausalModel, path: Path) -> ChainModel:
    model = load_draft(spec_for(name, target), draft_heads.write(name, path), target, torch.float32, CPU)
    assert isinstance(model, ChainModel)
    return model


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_model_in_chunks_is_the_whole_sequence_at_once(
    name: str, target: CausalModel, tmp_path: Path
) -> None:
    model, naive = chain(name, target, tmp_path), Naive(name)
    spec, n = model.spec, 11
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (n,), generator=draw)
    aux = torch.randn(n, draft_heads.aux_width(spec), generator=draw)
    embedding = naive.weights.get("embed_tokens.weight", target.embedding)[ids]
    if spec.algorithm == "eagle":
        fused = aux
        out = following = naive.eagle(embedding, aux, spec.decoder.layers)
        logits = target.logits(out)
    else:
        fused = naive.fuse(aux)
        following = naive.eagle3(embedding, fused, spec)
        out = naive.norm("norm", following)
        following = out if spec.norm_output else following
        logits = naive.linear("lm_head", out)
    torch.testing.assert_close(model.fuse(aux), fused)
    pages = Pages.of(spec.decoder)
    for start, end in [(0, 5), (5, 6), (6, n)]:
        part = slice(start, end)
        ctx = pages.chunk(0, start, end - start)
        got, then = model.forward(ctx, ids[part], model.fuse(aux[part]))
        torch.testing.assert_close(model.logits(got), logits[part], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(then, following[part], rtol=1e-4, atol=1e-4)
