"""Types that every room shares. Imports nothing of ours."""

from __future__ import annotations

import hashlib
import secrets
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
NDArray64 = NDArray[np.int64]
Floats = NDArray[np.float32]

Array = TypeVar("Array", bound=NDArray[Any])


def frozen(array: Array) -> Array:
    """Make `array` read-only, as everything is that crosses threads: a write on one side would be a race."""
    array.setflags(write=False)
    return array


NO_TOKENS: Ints = frozen(np.zeros(0, np.int32))

NO_LIMIT = 2**31 - 1
"""A limit that no position reaches."""

NAN_TOKEN = -1
"""Token of a row whose logits were not finite."""

LogprobsMode = Literal["raw_logprobs", "masked_logprobs", "processed_logprobs"]
"""The distribution whose log-probabilities are reported for sampled tokens: the model's; the model's among
the tokens that a grammar allows; the one that the token was chosen from, after the grammar, a logit
processor, biases, penalties, temperature and filters. The first and the last are vLLM's words."""


class PromptLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of prompt tokens `start` ... `start + n - 1` of one chunk.

    `values` [n]; `ranks` [n], 1 for the most likely token of the vocabulary; `top_ids`, `top_values`
    [n, k], those that the request named after the most likely.
    """

    start: int
    values: Floats
    ranks: Ints
    top_ids: Ints
    top_values: Floats


class FinishReason(Enum):
    """Why a request ended. The HTTP spelling is the value."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Finish(msgspec.Struct, frozen=True):
    """The end of one request.

    `matched` is the stop token id, stop string or regex that ended it; `message` says what went
    wrong when the reason is ABORT or ERROR and it was not the client that asked for it.
    """

    reason: FinishReason
    matched: int | str | None = None
    message: str | None = None


_HASH_KEY: Final = secrets.token_bytes(32)


class RootKey(msgspec.Struct, frozen=True):
    """Namespace of equal tokens in the radix tree: another adapter, tenant or salt has another."""

    adapter: str = ""
    tenant: str = ""
    salt: str = ""
    own: str = ""
    """Key of one job alone whose prompt has embeddings: its tokens do not identify it. Clients cannot set
    it."""

    def namespace(self) -> int:
        """A hash, an int64 that is not 0, with a key of this process: nobody outside can find keys of equal
        hash."""
        return _namespace(self)


@lru_cache
def _namespace(root: RootKey) -> int:
    words = msgspec.msgpack.encode(root)
    digest = hashlib.blake2b(words, digest_size=8, key=_HASH_KEY).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


PLAIN_ROOT = RootKey()
"""The base model, no salt."""
