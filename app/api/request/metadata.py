"""`metadata` of batches and responses."""

from __future__ import annotations

from core.errors import field_error

MAX_METADATA = 16
MAX_KEY, MAX_VALUE = 64, 512
"""OpenAI's limits, all three. Each event of a response repeats them: 16,000 pairs held the loop for 9 ms."""


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise `RequestError` for too many pairs, or too long ones."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise field_error("metadata", f"takes at most {MAX_METADATA} pairs")
    if any(len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in metadata.items()):
        raise field_error(
            "metadata", f"takes keys of at most {MAX_KEY} and values of at most {MAX_VALUE} characters"
        )
