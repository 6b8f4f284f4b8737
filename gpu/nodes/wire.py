"""What nodes say to each other: msgpack of the records below, checked against their types. Nothing is
unpickled.

Grammars are not sent with a plan. Only rank 0 runs grammar matchers; the other ranks need to know which slots
have one (`gpu.grammar.ranks`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Struct

from core.command import Command, CommandDone
from core.plan import StepPlan
from core.types import NO_TOKENS, Ints

T = TypeVar("T")

DTYPES = ("|u1", "|b1", "<i4", "<i8", "<f4", "<f8")
"""Dtypes of arrays that travel."""


class Hello(Struct, frozen=True, tag=True):
    """The first message of a node: the `token` that it found in the store, and what must be equal on all
    nodes, by the name that errors say."""

    token: str
    node: int
    facts: dict[str, str]


class Welcome(Struct, frozen=True, tag=True):
    """Node 0's answer once all have come; with a `refusal` the nodes end."""

    refusal: str = ""


class Least(Struct, frozen=True, tag=True):
    """A node's number; node 0 answers with the least of all."""

    value: int


class Ready(Struct, frozen=True, tag=True):
    """The ranks of a node can launch steps."""


class Step(Struct, frozen=True, tag=True):
    """A plan, without the grammars of the slots `masked`."""

    plan: StepPlan
    masked: tuple[int, ...] = ()


class CommandMessage(Struct, frozen=True, tag=True):
    """A command, to be carried out behind the plans sent so far."""

    command: Command


class StepDone(Struct, frozen=True, tag=True):
    """The ranks of a node have ended a step. `tokens` int32 [n]: what they sampled, where that is
    compared."""

    step: int
    tokens: Ints = NO_TOKENS


class CommandReply(Struct, frozen=True, tag=True):
    """They have carried out a command."""

    done: CommandDone


class Failed(Struct, frozen=True, tag=True):
    """A node is lost; nothing follows."""

    reason: str


class End(Struct, frozen=True, tag=True):
    """No plan follows: the node finishes those it has, and ends."""


Message = Hello | Welcome | Least | Ready | Step | CommandMessage | StepDone | CommandReply | Failed | End


class RemoteGrammar:
    """Stands in place of a grammar whose matchers are on node 0."""

    warnings: tuple[str, ...] = ()

    def matcher(self) -> Any:
        raise AssertionError("rank 0 alone has matchers")


REMOTE_GRAMMAR = RemoteGrammar()


class Array(NamedTuple):
    """An array on its way."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def step_of(plan: StepPlan) -> Step:
    """The message of a plan."""
    masked = tuple(new.slot for new in plan.new_slots if new.grammar is not None)
    if not masked:
        return Step(plan)
    new_slots = tuple(msgspec.structs.replace(new, grammar=None) for new in plan.new_slots)
    return Step(msgspec.structs.replace(plan, new_slots=new_slots), masked)


def plan_of(step: Step) -> StepPlan:
    """The plan of a message."""
    if not step.masked:
        return step.plan
    new_slots = tuple(
        msgspec.structs.replace(new, grammar=REMOTE_GRAMMAR) if new.slot in step.masked else new
        for new in step.plan.new_slots
    )
    return msgspec.structs.replace(step.plan, new_slots=new_slots)


def pack(value: object) -> bytes:
    """Numbers, texts, containers of them, records, arrays and tensors of a CPU as msgpack."""
    return _ENCODER.encode(value)


def unpack(data: bytes | bytearray, kind: type[T]) -> T:
    """A value of that type. Raises `ValueError` for anything else."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decoded)


def message_of(data: bytes | bytearray) -> Message:
    """What `pack` made of a message. Raises `ValueError` for what is none."""
    message: Message = _MESSAGES.decode(data)
    return message


def _encoded(value: object) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.numpy(force=True)
    if isinstance(value, np.ndarray) and value.dtype.str in DTYPES:
        return Array(value.dtype.str, value.shape, value.tobytes())
    raise TypeError(f"{type(value).__name__} does not travel between nodes")


def _decoded(kind: type, value: Any) -> Any:
    """A copy, because torch wants arrays that may be written to."""
    dtype, shape, data = msgspec.convert(value, Array)
    if dtype not in DTYPES:
        raise ValueError(f"arrays of {dtype!r} do not travel between nodes")
    array = np.frombuffer(bytearray(data), dtype).reshape(shape)
    return torch.from_numpy(array) if kind is torch.Tensor else array


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_MESSAGES = msgspec.msgpack.Decoder(Message, dec_hook=_decoded)
