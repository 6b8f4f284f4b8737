"""Counts bytes of JSON that are decoded or encoded at once: no other thread has the GIL meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec


class Decoding:
    """The largest text that any thread decoded, and that a loop's thread encoded."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing was seen."""
        self.largest = self.largest_encoded = 0

    def see(self, data: Any) -> None:
        """Count `data`, which is decoded: work that no limit has seen yet, whatever the thread."""
        self.largest = max(self.largest, len(data))

    def made(self, data: bytes) -> bytes:
        """Count `data`, which was encoded, if this thread runs a loop."""
        if asyncio._get_running_loop() is not None:
            self.largest_encoded = max(self.largest_encoded, len(data))
        return data

    def install(self) -> None:
        """Put counters in front of decoders and encoders. What exists already is not counted."""
        counts, plain, loads = self, msgspec.json.Decoder, json.loads
        encoder, encode = msgspec.json.Encoder, msgspec.json.encode

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

        class Encoder:
            """`msgspec.json.Encoder` that counts."""

            def __init__(self, *arguments: Any, **named: Any) -> None:
                self._encode = encoder(*arguments, **named).encode

            def encode(self, value: Any) -> bytes:
                return counts.made(self._encode(value))

        def encoded(value: Any, **named: Any) -> bytes:
            return counts.made(encode(value, **named))

        def decode(data: Any, **named: Any) -> Any:
            counts.see(data)
            return plain(**named).decode(data)

        def counted(data: Any, **named: Any) -> Any:
            counts.see(data)
            return loads(data, **named)

        setattr(msgspec.json, "Decoder", Decoder)  # noqa: B010 - a stub's class cannot be assigned to
        setattr(msgspec.json, "decode", decode)  # noqa: B010
        setattr(msgspec.json, "Encoder", Encoder)  # noqa: B010
        setattr(msgspec.json, "encode", encoded)  # noqa: B010
        setattr(json, "loads", counted)  # noqa: B010
