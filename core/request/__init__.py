"""A client's request, as integers."""

from core.request.params import SamplingParams
from core.request.pinning import Pinning
from core.request.request import Request, State

__all__ = ["Pinning", "Request", "SamplingParams", "State"]
