"""Prompts as embeddings: `prompt_embeds` of `/v1/completions`, after vLLM, and `input_embeds` of
`/generate`, after SGLang.

vLLM takes base64 of what torch.save writes, [tokens, hidden]; .npy and safetensors are taken too. SGLang
takes rows of numbers. Both are decoded in slices that yield to the loop, into memory that is counted.
"""

from __future__ import annotations

import asyncio
import secrets
from binascii import Error as Base64Error
from binascii import a2b_base64
from typing import NamedTuple

import msgspec
import numpy as np

from app.api.request.sampling import MAX_CHOICES, check_count, truncation
from app.api.request.schema import CompletionBody, NativeBody, refuse
from app.api.request.tensor import Dense, TensorError, read_tensor
from app.engine.job import Job
from app.service import Loaded
from app.text.numbers import slow_numbers
from core.errors import ContextExceeded, field_error, unsupported
from core.types import Floats, frozen

PIECE = 2**16
"""Characters of base64, or numbers, that are read in one turn of the loop: about 0.1 ms."""

SLOW = 100
"""Decoding time of a number with a three-digit exponent, relative to other numbers."""

PLACEHOLDER = 0
"""The token id that stands for an embedding, as in vLLM."""


class EmbeddedPrompts(NamedTuple):
    """Prompts as embeddings, float32 [tokens, hidden] each, and whether the field has one and not a list."""

    prompts: list[Floats]
    single: bool


def embedded(job: Job, rows: Floats, param: str) -> Job:
    """`job` with a prompt of embeddings. Its prefixes are shared with no other request, and not kept."""
    root = msgspec.structs.replace(job.root, own=secrets.token_hex(16))
    ids = np.full(len(rows), PLACEHOLDER, np.int32)
    return msgspec.structs.replace(
        job, prompt=ids, embeds=rows, root=root, prompt_param=param, truncate_prompt=None, keep=None
    )


# -- completions -----------------------------------------------------------------------------------

_NO_TOKENS = "such a prompt has no tokens. Leave it out"
_OF_TEXT = dict.fromkeys(("echo", "return_prompt_text", "prompt_logprobs", "suffix"), _NO_TOKENS)
"""Fields about a prompt's tokens. vLLM refuses these with embeddings too."""


async def prompt_embeds(body: CompletionBody, loaded: Loaded) -> list[Floats]:
    """The prompts that come as embeddings; none where the field is unset. Raises `RequestError` for bytes
    that are no dense tensor of finite numbers of the model's size, and for fields that need tokens."""
    sent = body.prompt_embeds or []
    if not sent:
        return []
    refuse(body, _OF_TEXT, "prompt_embeds")
    if isinstance(sent, str):
        return [await _tensor(sent, body, loaded, "prompt_embeds")]
    check_count(len(sent), MAX_CHOICES, "prompts", "prompt_embeds")
    return [await _tensor(each, body, loaded, f"prompt_embeds[{i}]") for i, each in enumerate(sent)]


async def _tensor(text: str, body: CompletionBody, loaded: Loaded, param: str) -> Floats:
    try:
        tensor = read_tensor(await _bytes(text))
    except (Base64Error, UnicodeEncodeError):
        raise field_error(param, "is not base64") from None
    except TensorError as error:
        raise field_error(param, f"was not taken: {error}") from None
    most = truncation(body, loaded.card.context_length) or tensor.rows
    first = 0 if body.truncation_side == "right" else max(tensor.rows - most, 0)
    rows = min(most, tensor.rows)
    _check_size(rows, tensor.columns, loaded, param)
    return await _floats(tensor, first, first + rows, param)


async def _bytes(text: str) -> bytes:
    data, found = text.encode("ascii"), bytearray()
    for at in range(0, len(data), PIECE):
        found += a2b_base64(data[at : at + PIECE], strict_mode=True)
        await asyncio.sleep(0)
    return bytes(found)


async def _floats(tensor: Dense, first: int, last: int, param: str) -> Floats:
    rows = np.empty((last - first, tensor.columns), np.float32)
    step = max(PIECE // tensor.columns, 1)
    for at in range(first, last, step):
        part = tensor.floats(at, min(at + step, last))
        _check_finite(part, param)
        rows[at - first : at - first + len(part)] = part
        await asyncio.sleep(0)
    return frozen(rows)


# -- native ----------------------------------------------------------------------------------------


async def input_embeds(body: NativeBody, loaded: Loaded) -> EmbeddedPrompts | None:
    """The prompts that come as rows of numbers; None where the field is unset. Raises `RequestError` for
    anything else in it, and for fields that need tokens."""
    raw, param = bytes(body.input_embeds), "input_embeds"
    if raw in (b"", b"null"):
        return None
    if body.session_params is not None:
        raise unsupported("session_params", _NO_TOKENS, param)
    if body.return_logprob and body.logprob_start_len not in (None, -1):
        raise unsupported("logprob_start_len", _NO_TOKENS, param)
    _check_counts(raw, loaded.card.hidden_size, param)
    await asyncio.sleep(0)
    items = _items(raw, param)
    if bytes(_items(items[0], f"{param}[0]")[0]).startswith(b"["):
        check_count(len(items), MAX_CHOICES, "prompts", param)
        lists = [(_items(each, f"{param}[{i}]"), f"{param}[{i}]") for i, each in enumerate(items)]
        return EmbeddedPrompts([await _rows(rows, loaded, name) for rows, name in lists], False)
    return EmbeddedPrompts([await _rows(items, loaded, param)], True)


def _check_counts(raw: bytes, columns: int, param: str) -> None:
    """A long body has as many commas and lists as rows need: 8 MB of `[],` would be 3 million objects.
    A short one gets a more precise error later."""
    if len(raw) <= PIECE:
        return
    numbers, lists = raw.count(b",") + 1, raw.count(b"[")
    rows = numbers // columns
    if rows * columns != numbers or not rows < lists <= 2 * rows + 1:
        raise field_error(
            param, f"has {numbers} numbers in {lists} lists; this model's embeddings have {columns} each"
        )


def _items(raw: bytes | msgspec.Raw, param: str) -> list[msgspec.Raw]:
    """The items of a list, not decoded: as Python objects 8 MB of numbers would be 130 MB."""
    try:
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except msgspec.DecodeError:
        items = []
    if not items:
        raise field_error(
            param, "is not what was expected: a list of rows of numbers, or a list of such lists"
        )
    return items


async def _rows(items: list[msgspec.Raw], loaded: Loaded, param: str) -> Floats:
    columns = loaded.card.hidden_size
    _check_size(len(items), columns, loaded, param)
    rows = np.empty((len(items), columns), np.float32)
    read = 0
    for i, item in enumerate(items):
        rows[i] = _row(bytes(item), columns, f"{param}[{i}]")
        read += columns + SLOW * slow_numbers(bytes(item))
        if read > PIECE // 8:  # of text, which takes that much longer
            read = 0
            await asyncio.sleep(0)
    return frozen(rows)


def _row(text: bytes, columns: int, param: str) -> Floats:
    count = text.count(b",") + 1  # before any is read
    if count != columns:
        raise field_error(param, f"has {count} numbers; this model's embeddings have {columns} each")
    try:
        numbers = msgspec.json.decode(text, type=list[float])
    except msgspec.DecodeError:
        raise field_error(param, f"is not a list of {columns} finite numbers") from None
    with np.errstate(over="ignore"):  # what float32 does not hold is refused below
        row = np.array(numbers, np.float32)
    _check_finite(row, param)
    return row


# -- both ------------------------------------------------------------------------------------------


def _check_size(rows: int, columns: int, loaded: Loaded, param: str) -> None:
    """Check the size before memory is allocated, which is counted until the request's task ends."""
    card = loaded.card
    card.check_task("generate")
    if columns != card.hidden_size:
        raise field_error(
            param, f"has rows of {columns} numbers; this model's embeddings have {card.hidden_size} each"
        )
    if rows > card.context_length:
        raise ContextExceeded(card.context_length, rows, 0, param)
    loaded.numbers.hold(rows * columns)


def _check_finite(rows: Floats, param: str) -> None:
    if not np.isfinite(rows).all():
        raise field_error(param, "has numbers that are not finite in float32")
