"""What a client asked for, as integers."""

from core.request.params import SamplingParams
from core.request.request import Request, State

__all__ = ["Request", "SamplingParams", "State"]
