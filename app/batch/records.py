"""Files and batches as OpenAI's API shows them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ACTIVE: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""Statuses of batches that have not ended: these continue after a restart."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file. `filename` is the client's and is not used on our disk."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    status_details: str | None = None
    expires_at: int | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a whole batch was rejected; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's list of a batch's errors."""

    data: list[BatchError]
    object: str = "list"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch; a change makes a new record."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    object: str = "batch"
    model: str | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    usage: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None

    @property
    def active(self) -> bool:
        return self.status in ACTIVE

    @property
    def output_id(self) -> str:
        """Its output file's id, derived from its own so that a restart finds the same file."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def error_id(self) -> str:
        return f"file-{self.id.removeprefix('batch_')}-errors"


class Usage(msgspec.Struct):
    """Tokens of the answered lines, summed over their `usage`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, usage: UsagePart) -> None:
        """Add the usage of one more answer."""
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
        self.reasoning_tokens += (usage.completion_tokens_details or {}).get("reasoning_tokens") or 0

    def shown(self) -> dict[str, Any]:
        """A batch's `usage`, whose names differ from an answer's."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class UsagePart(msgspec.Struct):
    """`usage` of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, int | None] | None = None
    completion_tokens_details: dict[str, int | None] | None = None
