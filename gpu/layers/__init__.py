"""The parts of a decoder. Plain objects that hold tensors: inference needs no module tree.

Each allocates its parameters through `Parameters`, under a prefix of checkpoint names.
"""

from gpu.layers.attention import Attention
from gpu.layers.delta import GatedDeltaNet
from gpu.layers.latent import LatentAttention
from gpu.layers.linear import Linear
from gpu.layers.mlp import Mlp
from gpu.layers.moe import SharedExpert, SparseMlp
from gpu.layers.norm import RmsNorm
from gpu.layers.parameters import Parameters
from gpu.layers.rope import Rope, unrotated

__all__ = [
    "Attention",
    "GatedDeltaNet",
    "LatentAttention",
    "Linear",
    "Mlp",
    "Parameters",
    "RmsNorm",
    "Rope",
    "SharedExpert",
    "SparseMlp",
    "unrotated",
]
