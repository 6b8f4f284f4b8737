"""Commands of an operator that a device carries out between two steps."""

from __future__ import annotations

from typing import Literal

import msgspec

Action = Literal["profile_start", "profile_stop", "load_weights", "sleep", "wake"]
Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Carried out by the launch thread when the plans submitted before it are done.

    `path` is the checkpoint of `load_weights` and the file that `profile_stop` writes. `tags`: the memory
    that `sleep` releases and `wake` allocates again.
    """

    id: int
    action: Action
    path: str = ""
    tags: tuple[Tag, ...] = TAGS


class CommandDone(msgspec.Struct, frozen=True):
    """The result of a command. With an `error`, everything is as it was before."""

    id: int
    error: str | None = None
