"""Logit processors: some with predictable effects, and some that break the device, as an operator's code or a
faulty GPU can."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import torch

from gpu.sample.processors import Processor

AFTER = 3
"""Tokens of the row before the fault."""


def fault(logits: torch.Tensor, output_ids: list[int], params: dict[str, Any]) -> None:
    """Fail: on a GPU by a device-side assertion, after which the device is unusable; on a CPU by an exception
    that is not an `Exception`."""
    if len(output_ids) < AFTER:
        return
    if logits.is_cuda:
        beyond = torch.full((1,), logits.numel() * 1000, device=logits.device)
        logits.index_select(0, beyond)
    else:
        raise SystemExit("the device is gone")


def hang(logits: torch.Tensor, output_ids: list[int], params: dict[str, Any]) -> None:
    """A step that hangs."""
    if len(output_ids) >= AFTER:
        threading.Event().wait()


def slow(logits: torch.Tensor, output_ids: list[int], params: dict[str, Any]) -> None:
    """Make each step 5 ms longer, so that 1,500 tokens take longer than a watchdog's limit of 1 s."""
    time.sleep(0.005)


def only(logits: torch.Tensor, output: list[int], params: dict[str, Any]) -> None:
    """Allow only one token: the request's `token` plus the number of output tokens."""
    keep = params.get("token", 0) + len(output)
    value = logits[keep].clone()
    logits.fill_(-math.inf)
    logits[keep] = value


def remember(logits: torch.Tensor, output: list[int], params: dict[str, Any]) -> None:
    """Record the outputs in `params`, in the order of the steps."""
    seen = params.setdefault("seen", [])
    seen.append(list(output))
    logits[len(seen)] = 100.0


def broken(logits: torch.Tensor, output: list[int], params: dict[str, Any]) -> None:
    raise ValueError("a secret of the operator's")


NOT_CALLABLE = 1
KNOWN: dict[str, Processor] = {"only": only, "remember": remember, "broken": broken}
