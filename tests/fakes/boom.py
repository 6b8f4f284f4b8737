"""Logit processors that take the device down: what an operator's code, or a broken GPU, can do."""

from __future__ import annotations

import threading
from typing import Any

import torch

AFTER = 3
"""Tokens of the row that are still made."""


def fault(logits: torch.Tensor, output_ids: list[int], params: dict[str, Any]) -> None:
    """On a GPU a device-side assertion, after which nothing runs there; on a CPU an exception that no
    handler of ordinary errors takes."""
    if len(output_ids) < AFTER:
        return
    if logits.is_cuda:
        beyond = torch.full((1,), logits.numel() * 1000, device=logits.device)
        logits.index_select(0, beyond)
    else:
        raise SystemExit("the device is gone")


def hang(logits: torch.Tensor, output_ids: list[int], params: dict[str, Any]) -> None:
    """A step that never ends."""
    if len(output_ids) >= AFTER:
        threading.Event().wait()
