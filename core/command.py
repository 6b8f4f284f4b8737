"""Commands of an operator that a device carries out between two steps."""

from __future__ import annotations

from typing import Literal

import msgspec

Action = Literal[
    "profile_start",
    "profile_stop",
    "load_weights",
    "sleep",
    "wake",
    "adapter_read",
    "adapter_place",
    "adapter_drop",
]
BESIDE: tuple[Action, ...] = ("adapter_read", "adapter_place")
"""Actions that steps run beside."""
Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Carried out by the launch thread when the plans submitted before it are done.

    `path` is the checkpoint of `load_weights` and the file that `profile_stop` writes. `tags`: the memory
    that `sleep` releases and `wake` allocates again.

    `adapter_read` reads and checks the LoRA adapter at `path` into host memory under the id `adapter`,
    `adapter_place` copies it from there to the `place` on the device, and `adapter_drop` frees its host
    memory. The first two are not awaited by the plans behind them, which use neither until they are answered.
    """

    id: int
    action: Action
    path: str = ""
    tags: tuple[Tag, ...] = TAGS
    adapter: str = ""
    place: int = -1


class CommandDone(msgspec.Struct, frozen=True):
    """The result of a command. With an `error`, everything is as it was before."""

    id: int
    error: str | None = None
