"""A node other than 0: no HTTP, only ranks, until node 0 ends it."""

from __future__ import annotations

import logging
import signal
import sys
from concurrent.futures import Future
from queue import SimpleQueue
from types import FrameType
from typing import NoReturn, Protocol

from app import logs
from app.compose import follow
from app.process import FAILED, begin, leave
from app.stages import Stages
from core.config import Config
from core.errors import EngineFailed

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
"""See `app.server`: the receiving thread is the loop's sibling here."""


def run(config: Config) -> NoReturn:
    """Run ranks until node 0 has ended, then end the process: with 0, or `FAILED` where the group is lost.
    Raises `ConfigError`.

    Service managers and torchrun signal all nodes at once, and node 0 then drains. So the first signal leaves
    this one running for node 0, and the second ends it.
    """
    logs.set_up(config.serve.log_level, config.serve.log_format)
    sys.setswitchinterval(SWITCH_SECONDS)
    ended: SimpleQueue[Future[None] | None] = SimpleQueue()
    node = _Node(config, ended)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, node.on_signal)
    begin(node.work, "loom-node").add_done_callback(ended.put)
    done = ended.get()
    if done is None:
        leave(FAILED if node.signals > 1 else 0)
    try:
        done.result()
    except EngineFailed as error:
        log.error("the group of nodes failed: %s", error)
        if node.ranks is not None and node.ranks.busy:
            logs.log_stacks()
        leave(FAILED)
    leave(0)


class Ranks(Protocol):
    """The ranks of this process (`gpu.nodes.follow.Follower`)."""

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        ...

    def run(self) -> None:
        """Run until node 0 has ended. Raises `EngineFailed`."""
        ...


class _Node:
    """Owner: `work` a thread, `on_signal` the main thread."""

    def __init__(self, config: Config, ended: SimpleQueue[Future[None] | None]) -> None:
        self._config, self._ended = config, ended
        self.ranks: Ranks | None = None
        self.signals = 0

    def work(self) -> None:
        self.ranks = follow(self._config, Stages())
        self.ranks.run()
        log.info("node 0 has ended")

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.ranks is None or self.signals > 1:
            self._ended.put(None)
        else:
            log.info("node 0 ends the group when it has drained; a second signal ends this node")
