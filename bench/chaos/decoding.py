"""Counts bytes that are decoded from JSON on the event loop: work that no limit has seen yet."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec


class Decoding:
    """The largest text that was decoded while a loop ran in the thread that did it."""

    def __init__(self) -> None:
        self.largest = 0

    def see(self, data: Any) -> None:
        """Count `data` if this thread runs a loop."""
        if asyncio._get_running_loop() is not None and len(data) > self.largest:
            self.largest = len(data)

    def install(self) -> None:
        """Put counters in front of the decoders. What exists already is not counted."""
        counts, plain, loads = self, msgspec.json.Decoder, json.loads

        class Decoder:
            """`msgspec.json.Decoder` that counts."""

            def __init__(self, *arguments: Any, **named: Any) -> None:
                self._decoder = plain(*arguments, **named)
                self.type = self._decoder.type

            def __class_getitem__(cls, item: object) -> type:
                return cls

            def decode(self, data: Any) -> Any:
                counts.see(data)
                return self._decoder.decode(data)

            def decode_lines(self, data: Any) -> Any:
                counts.see(data)
                return self._decoder.decode_lines(data)

        def decode(data: Any, **named: Any) -> Any:
            counts.see(data)
            return plain(**named).decode(data)

        def counted(data: Any, **named: Any) -> Any:
            counts.see(data)
            return loads(data, **named)

        setattr(msgspec.json, "Decoder", Decoder)  # noqa: B010 - a stub's class cannot be assigned to
        setattr(msgspec.json, "decode", decode)  # noqa: B010
        setattr(json, "loads", counted)  # noqa: B010
