"""A subscriber to the events of a prefix cache, over real sockets."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import numpy as np
import zmq.asyncio

from app.engine.kv_events import END, Publisher
from core.cache.manager import CacheManager
from tests.rigs.follower import Follower
from tests.rigs.wait import PATIENCE


class Subscriber:
    """Follows a `Publisher` as a router does: by what is published, and where that has a gap by asking.

    `follower` knows everything before batch `number`. Call `close`.
    """

    def __init__(self, publisher: Publisher, topic: str = "") -> None:
        self.follower = Follower()
        self.number = 0
        self.heard = 0
        """Batches that were not asked for."""
        self._publisher = publisher
        context = zmq.asyncio.Context.instance()
        self._published = context.socket(zmq.SUB)
        self._published.subscribe(topic.encode())
        self._published.connect(publisher.endpoint)
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(publisher.replay_endpoint)

    def close(self) -> None:
        """Close the sockets."""
        self._published.close(linger=0)
        self._replay.close(linger=0)

    async def catch_up(self) -> None:
        """Until all batches that were published are known."""
        await asyncio.sleep(0)  # those of this turn of the loop are published at its end
        async with asyncio.timeout(PATIENCE):
            while self.number < self._publisher.number:
                # A subscription takes a while to arrive: what came before it is asked for.
                if not await self._published.poll(50):
                    await self._fill()
                    continue
                _, frame, payload = await self._published.recv_multipart()
                if (number := int.from_bytes(frame, "big")) > self.number:
                    await self._fill()
                self.heard += self._take(number, payload)

    async def send(self, *frames: bytes) -> None:
        """Send to the socket that is asked."""
        await self._replay.send_multipart(frames)

    async def ask(self, first: int) -> list[int]:
        """Ask for everything from a number on. Returns the numbers of the answer."""
        return [number for number, _ in await self._asked(first)]

    async def _asked(self, first: int) -> list[tuple[int, bytes]]:
        await self.send(b"", first.to_bytes(8, "big"))
        told = []
        while True:
            _, number, payload = await self._replay.recv_multipart()
            if number == END:
                assert not payload
                return told
            told.append((int.from_bytes(number, "big"), payload))

    async def _fill(self) -> None:
        for number, payload in await self._asked(self.number):
            self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> bool:
        if number < self.number:
            return False  # known by an answer
        assert number == self.number, "a gap that nobody fills"
        self.number += 1
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
                parent, hashes = event["parent_block_hash"], event["block_hashes"]
                self.follower.stored(event["lora_name"] or "", parent, hashes, event["token_ids"])
            elif event["type"] == "BlockRemoved":
                self.follower.removed(event["block_hashes"])
            else:
                self.follower.cleared()
        return True


def cached(cache: CacheManager) -> Counter[tuple[int, ...]]:
    """The prefixes that end the pages of a cache, adapters aside."""
    found: Counter[tuple[int, ...]] = Counter()
    for node in cache._tree.walk():
        tokens = np.frombuffer(b"".join(each.key for each in node.path()[::-1]), np.int32).tolist()
        for page in range(len(node.pages)):
            found[tuple(tokens[: len(tokens) - page * cache.page_size])] += 1
    return found
