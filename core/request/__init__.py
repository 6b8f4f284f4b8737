"""A client's request, as integers."""

from core.request.params import SamplingParams
from core.request.request import Pinning, Request, State

__all__ = ["Pinning", "Request", "SamplingParams", "State"]
