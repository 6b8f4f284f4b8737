"""A node other than 0: it runs what node 0 plans, on its own ranks."""

from __future__ import annotations

import logging
import threading

from core.command import CommandDone
from core.errors import EngineFailed
from core.plan import StepFailure
from core.types import NO_TOKENS
from gpu.executor import LocalExecutor, compared
from gpu.nodes.channel import Channel, NodeLost
from gpu.nodes.wire import CommandMessage, CommandReply, End, Failed, Ready, Step, StepDone, plan_of
from gpu.worker import Item, Progress

log = logging.getLogger(__name__)


class Follower:
    """Between node 0's channel and the executor of this process. Owner: the thread that calls `run`."""

    def __init__(self, executor: LocalExecutor, channel: Channel) -> None:
        self._executor, self._channel = executor, channel
        self._arrived = threading.Event()
        self._closed = False
        self._failure = ""
        self._submitted = self._answered = 0
        self._sender = threading.Thread(target=self._answer, name="loom-answer", daemon=True)

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._submitted > self._answered

    def run(self, progress: Progress = lambda share: None) -> None:
        """Prepare the ranks, then run what comes, until node 0 ends it. Raises `EngineFailed` where a rank or
        node 0 is lost: threads may wait for either then, and the process has to end."""
        try:
            self._executor.prepare(progress)
            self._channel.send(Ready())
            self._executor.start(self._arrived.set)
            self._sender.start()
            self._follow()
            self._executor.close()
            self._end_answers()
            self._sender.join()
        except NodeLost as lost:
            raise EngineFailed(self._failure or str(lost)) from lost
        except EngineFailed as failed:
            self._channel.send(Failed(str(failed)))
            raise
        finally:
            self._end_answers()
            self._channel.hang_up()
            self._channel.close()
        if self._failure:
            raise EngineFailed(self._failure)

    def _end_answers(self) -> None:
        """No result follows those that have arrived."""
        self._closed = True
        self._arrived.set()

    def _follow(self) -> None:
        """Carry out what node 0 sends, until the end."""
        while not isinstance(message := self._channel.receive(), End):
            match message:
                case Step():
                    self._submitted += 1
                    self._executor.submit(plan_of(message))
                case CommandMessage(command):
                    self._executor.command(command)
                case Failed(reason):
                    raise NodeLost(f"node 0: {reason}")
                case other:
                    raise NodeLost(f"node 0 sent {type(other).__name__}")

    def _answer(self) -> None:
        """Sending thread: tell node 0 what has ended."""
        try:
            closed = False
            while not closed:
                self._arrived.wait()
                self._arrived.clear()
                closed = self._closed  # before the last results are fetched
                for item in self._executor.results():
                    self._tell(item)
        except NodeLost as lost:
            log.info("%s", lost)  # the other thread finds the same

    def _tell(self, item: Item) -> None:
        match item:
            case StepFailure(_, reason):
                self._failure = reason
                self._channel.send(Failed(reason))
                self._channel.hang_up()
            case CommandDone():
                self._channel.send(CommandReply(item))
            case _:
                self._answered += 1
                tokens = item.tokens if compared(item.step) else NO_TOKENS
                self._channel.send(StepDone(item.step, tokens))
