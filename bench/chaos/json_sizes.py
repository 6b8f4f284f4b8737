"""Records the largest JSON that is decoded or encoded in one call, during which the GIL is held."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec


class JsonSizes:
    """Bytes of the largest JSON decoded in any thread, and of the largest encoded in an event loop's
    thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set the recorded sizes to 0."""
        self.largest = self.largest_encoded = 0

    def record_decoded(self, data: Any) -> None:
        """Record the size of `data`, which is about to be decoded."""
        self.largest = max(self.largest, len(data))

    def record_encoded(self, data: bytes) -> bytes:
        """Record the size of the encoded `data` if it was encoded on an event loop."""
        if asyncio._get_running_loop() is not None:
            self.largest_encoded = max(self.largest_encoded, len(data))
        return data

    def install(self) -> None:
        """Wrap decoders and encoders. Those that exist already are not recorded."""
        sizes, plain, loads = self, msgspec.json.Decoder, json.loads
        encoder, encode = msgspec.json.Encoder, msgspec.json.encode

        class Decoder:
            """`msgspec.json.Decoder` that records sizes."""

            def __init__(self, *arguments: Any, **named: Any) -> None:
                self._decoder = plain(*arguments, **named)
                self.type = self._decoder.type

            def __class_getitem__(cls, item: object) -> type:
                return cls

            def decode(self, data: Any) -> Any:
                sizes.record_decoded(data)
                return self._decoder.decode(data)

            def decode_lines(self, data: Any) -> Any:
                sizes.record_decoded(data)
                return self._decoder.decode_lines(data)

        class Encoder:
            """`msgspec.json.Encoder` that records sizes."""

            def __init__(self, *arguments: Any, **named: Any) -> None:
                self._encode = encoder(*arguments, **named).encode

            def encode(self, value: Any) -> bytes:
                return sizes.record_encoded(self._encode(value))

        def encoded(value: Any, **named: Any) -> bytes:
            return sizes.record_encoded(encode(value, **named))

        def decode(data: Any, **named: Any) -> Any:
            sizes.record_decoded(data)
            return plain(**named).decode(data)

        def recorded(data: Any, **named: Any) -> Any:
            sizes.record_decoded(data)
            return loads(data, **named)

        setattr(msgspec.json, "Decoder", Decoder)  # noqa: B010 - a stub's class cannot be assigned to
        setattr(msgspec.json, "decode", decode)  # noqa: B010
        setattr(msgspec.json, "Encoder", Encoder)  # noqa: B010
        setattr(msgspec.json, "encode", encoded)  # noqa: B010
        setattr(json, "loads", recorded)  # noqa: B010
