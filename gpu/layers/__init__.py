"""The parts of a decoder. Plain objects that hold tensors: inference needs no module tree.

Each says which checkpoint names fill it through `places(prefix)`, a map from name to the exact
view that the named tensor is copied into; the views of a model cover its parameters once. Then
`seal()` says that the weights are final.
"""

from gpu.layers.attention import Attention
from gpu.layers.linear import Linear
from gpu.layers.mlp import Mlp
from gpu.layers.moe import SparseMlp
from gpu.layers.norm import RmsNorm
from gpu.layers.rope import Rope

__all__ = ["Attention", "Linear", "Mlp", "RmsNorm", "Rope", "SparseMlp"]
