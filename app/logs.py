"""Logging: one line a record, nothing a client sent can start a new one."""

from __future__ import annotations

import logging


class OneLine(logging.Formatter):
    """Escapes control characters of the message; tracebacks keep their lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def set_up(level: str) -> None:
    """Send everything to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("asyncio", "urllib3", "filelock", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
