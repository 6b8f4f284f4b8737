"""The operations of layers: one decoder, two sets of them.

`base` is the protocol, `plain` is torch (the CPU, and the reference), `fused` is Triton over a captured
step. `fused` is imported on a GPU alone: Triton is not installed elsewhere.
"""

from gpu.ops.base import Ops, Part, PendingExperts, Rotation
from gpu.ops.plain import TorchOps

__all__ = ["Ops", "Part", "PendingExperts", "Rotation", "TorchOps"]
