"""What layers ask of a device: one decoder, two sets of operations.

`base` is the protocol, `plain` is torch (the CPU, and the reference), `fused` is Triton over a captured
step. `fused` is imported by whoever has a GPU and by nobody else: Triton is not installed elsewhere.
"""

from gpu.ops.base import Experts, Ops, Part, PendingExperts, Rotation
from gpu.ops.plain import TorchOps

__all__ = ["Experts", "Ops", "Part", "PendingExperts", "Rotation", "TorchOps"]
