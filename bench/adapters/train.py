"""Adapters in plain PyTorch on a frozen target: training on a clock, and PEFT's files."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bench.heads.data import Answered, batches, pad
from bench.heads.target import Target
from bench.heads.train import schedule
from core.models import ModelSpec

WARMUP = 10
"""Steps until the highest learning rate."""
REPORT = 20.0
"""Seconds between two lines of losses."""


class Lora(nn.Module):
    """The factors of one module, as PEFT initialises them: B A is zero."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = scale
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """[..., outputs] of x [..., inputs], in x's dtype."""
        return F.linear(F.linear(x, self.a.to(x.dtype)), (self.b * self.scale).to(x.dtype))


class Adapter(nn.Module):
    """The factors of all modules that `config`, an adapter_config.json, names."""

    def __init__(self, spec: ModelSpec, config: Mapping[str, Any]) -> None:
        super().__init__()
        q, kv = spec.q_size, spec.kv_size
        self._products = {
            "qkv": (spec.hidden, "self_attn", {"q_proj": q, "k_proj": kv, "v_proj": kv}),
            "out": (q, "self_attn", {"o_proj": spec.hidden}),
            "gate_up": (spec.hidden, "mlp", dict.fromkeys(("gate_proj", "up_proj"), spec.intermediate)),
            "down": (spec.intermediate, "mlp", {"down_proj": spec.hidden}),
        }
        self.config = config
        made: dict[str, Lora] = {}
        for number in range(spec.layers):
            for inputs, block, parts in self._products.values():
                for name in sorted(parts.keys() & set(config["target_modules"])):
                    rank = config.get("rank_pattern", {}).get(name, config["r"])
                    alpha = config.get("alpha_pattern", {}).get(name, config["lora_alpha"])
                    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
                    made[f"{number}.{block}.{name}"] = Lora(inputs, parts[name], rank, scale)
        self._loras = made
        self.factors = nn.ModuleList(made.values())

    def delta(self, number: int, product: str, x: Tensor) -> Tensor | None:
        """The adapter's addition to a product of a layer, as `bench.heads.target.Delta`."""
        _, block, parts = self._products[product]
        loras = [self._loras.get(f"{number}.{block}.{name}") for name in parts]
        if not any(loras):
            return None
        found = [
            x.new_zeros(*x.shape[:-1], size) if lora is None else lora(x)
            for lora, size in zip(loras, parts.values(), strict=True)
        ]
        return torch.cat(found, -1)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by PEFT's names."""
        return {
            f"base_model.model.model.layers.{key}.lora_{factor}.weight": tensor
            for key, lora in self._loras.items()
            for factor, tensor in (("A", lora.a), ("B", lora.b))
        }

    def save(self, directory: Path, base: str) -> int:
        """Write both files as PEFT does, in bfloat16. Returns the bytes of the weights' file."""
        directory.mkdir(parents=True, exist_ok=True)
        fields = {
            "base_model_name_or_path": base,
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "bias": "none",
            "lora_dropout": 0.0,
            **self.config,
        }
        (directory / "adapter_config.json").write_text(json.dumps(fields, indent=1) + "\n")
        path = directory / "adapter_model.safetensors"
        tensors = {name: x.detach().to(torch.bfloat16).cpu() for name, x in self.tensors().items()}
        save_file(tensors, path, metadata={"format": "pt"})
        return path.stat().st_size

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Take what `save` wrote."""
        saved = load_file(directory / "adapter_model.safetensors")
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])


def loss_of(target: Target, rows: Sequence[Answered]) -> tuple[Tensor, int]:
    """The sum of the answers' cross entropies, and their tokens."""
    batch = pad(rows, target.device)
    at = torch.arange(batch.ids.shape[1] - 1, device=target.device)
    told = (at >= batch.start[:, None] - 1) & (at < batch.length[:, None] - 1)
    wanted = batch.ids[:, 1:][told]
    logits = target.logits(target.forward(batch.ids).final[:, :-1][told])
    return F.cross_entropy(logits.float(), wanted, reduction="sum"), len(wanted)


@torch.no_grad()
def held_out_loss(target: Target, rows: Sequence[Answered], tokens: int) -> float:
    """The mean over all tokens of the rows' answers."""
    found = [loss_of(target, group) for group in batches(rows, tokens, random.Random(0))]
    return sum(float(loss) for loss, _ in found) / sum(count for _, count in found)


def train(
    adapter: Adapter, target: Target, rows: Sequence[Answered], rate: float, tokens: int, deadline: float
) -> float:
    """Train until `deadline` (`time.monotonic`) in batches of at most `tokens` padded tokens. Returns the
    epochs; the target keeps the adapter."""
    order = random.Random(0)
    target.delta = adapter.delta
    optimiser = torch.optim.AdamW(adapter.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    begun = reported = time.monotonic()
    step, epochs, total, count = 0, 0.0, 0.0, 0
    while True:
        queue = batches(rows, tokens, order)
        for group in queue:
            now = time.monotonic()
            if now >= deadline:
                return epochs
            if now - reported > REPORT:
                print(
                    f"{now - begun:6.0f} s  step {step}  epoch {epochs:.2f}  loss {total / count:.3f}",
                    flush=True,
                )
                reported, total, count = now, 0.0, 0
            for settings in optimiser.param_groups:
                settings["lr"] = rate * schedule(step, (now - begun) / (deadline - begun), WARMUP)
            loss, told = loss_of(target, group)
            optimiser.zero_grad(set_to_none=True)
            torch.autograd.backward(loss / told)
            nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
            optimiser.step()
            total, count = total + float(loss.detach()), count + told
            step, epochs = step + 1, epochs + 1 / len(queue)
