"""Constrained output: grammars are compiled beside the HTTP server and stepped beside the sampler."""

from gpu.grammar.compiler import Compiler
from gpu.grammar.matchers import Masks, Matchers
from gpu.grammar.schema import Refused

__all__ = ["Compiler", "Masks", "Matchers", "Refused"]
