"""Training on a clock, and checkpoints."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.heads.data import Answered, batches, pad
from bench.heads.dflash import DFlash
from bench.heads.eagle3 import Eagle3
from bench.heads.layers import Head, Size
from bench.heads.target import Target

RATE = 2e-3
"""Learning rate at its highest."""
WARMUP = 50
"""Steps until it is reached."""
SAMPLE = 32
"""Rows whose states give the scales of `Fusion`."""
REPORT = 10.0
"""Seconds between two lines of losses."""


def make_head(target: Target, size: Size, vocabulary: torch.Tensor, mask_token: int) -> Head:
    """An untrained head on the target's device: DFlash if `size` has a block, else EAGLE-3. `vocabulary`: the
    target's ids by falling frequency; `mask_token`: an id that no text has."""
    head = DFlash(target, size, mask_token) if size.block else Eagle3(target, size, vocabulary)
    return head.to(target.device)


def train(
    heads: Mapping[str, Head],
    target: Target,
    rows: Sequence[Answered],
    tokens: int,
    deadline: float,
    seed: int = 0,
) -> dict[str, float]:
    """Train all heads on the same forwards of the target until `deadline` (`time.monotonic`), in batches of
    at most `tokens` padded tokens. Returns steps, epochs, and each head's last mean loss."""
    order = random.Random(seed)
    inputs = {layer for head in heads.values() for layer in head.size.aux}
    optimisers = {
        name: torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
        for name, head in heads.items()
    }
    if rows:
        first = pad(order.sample(rows, min(SAMPLE, len(rows))), target.device)
        seen = target.see(first.ids, inputs)
        told = torch.arange(first.ids.shape[1], device=target.device) < first.length[:, None]
        told[:, 0] = False  # the first position's states are thousands of times as large
        for head in heads.values():
            head.fc.calibrate(seen.join(head.size.aux)[told])
    begun = reported = time.monotonic()
    sums = dict.fromkeys(heads, torch.zeros((), device=target.device))
    losses = dict.fromkeys(heads, math.nan)
    steps, since, epochs = 0, 0, 0.0
    while rows and time.monotonic() < deadline:
        queue = batches(rows, tokens, order)
        for group in queue:
            now = time.monotonic()
            if now - reported > REPORT or now >= deadline:
                losses = {name: float(total) / max(since, 1) for name, total in sums.items()}
                sums = dict.fromkeys(heads, torch.zeros((), device=target.device))
                shown = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
                print(f"{now - begun:6.0f} s  step {steps}  epoch {epochs:.2f}  {shown}", flush=True)
                reported, since = now, 0
            if now >= deadline:
                break
            rate = RATE * schedule(steps, (now - begun) / (deadline - begun))
            batch = pad(group, target.device)
            seen = target.see(batch.ids, inputs)
            for name, head in heads.items():
                optimiser = optimisers[name]
                for settings in optimiser.param_groups:
                    settings["lr"] = rate
                with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
                    loss = head.loss(batch, seen)
                optimiser.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                optimiser.step()
                sums[name] = sums[name] + loss.detach()
            steps += 1
            since += 1
            epochs += 1 / len(queue)
    return {"steps": steps, "epochs": round(epochs, 2), **{f"loss {name}": losses[name] for name in losses}}


def schedule(step: int, share: float, warmup: int = WARMUP) -> float:
    """Share of the highest rate after `share` of the time: `warmup` steps, then a cosine to 5%."""
    return min((step + 1) / warmup, 1.0) * (0.05 + 0.95 * (1 + math.cos(math.pi * min(share, 1))) / 2)


def save_head(head: Head, directory: Path) -> int:
    """Write config.json and model.safetensors (bfloat16). Returns the bytes of the weights' file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(head.config(), indent=1) + "\n")
    head.fc.fold()
    tensors = {
        name: value.detach()
        .to(torch.bfloat16 if value.is_floating_point() else value.dtype)
        .cpu()
        .contiguous()
        for name, value in head.state_dict().items()
    }
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path.stat().st_size


def load_weights(head: Head, directory: Path) -> Head:
    """Fill a head from what `save_head` wrote, and give it the target's dtype."""
    head.load_state_dict(load_file(directory / "model.safetensors"))
    return head.to(head.target.embedding.dtype).eval()
