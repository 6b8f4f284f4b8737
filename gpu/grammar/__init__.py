"""Constrained output: grammars are compiled beside the HTTP server and stepped beside the sampler.

The compiler's helper process imports this package, so it must not import torch, which takes a second: what
steps grammars is in `gpu.grammar.matchers`.
"""

from gpu.grammar.compiler import Compiler
from gpu.grammar.schema import Refused

__all__ = ["Compiler", "Refused"]
