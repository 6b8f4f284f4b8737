"""Prompts in all their spellings: a text, texts, token ids, lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from app.engine.job import Job
from app.service import Loaded
from core.errors import field_error
from core.types import Ints

Prompt = str | list[int]


def split_prompts(value: str | Sequence[str | int | list[int]], param: str) -> tuple[list[Prompt], bool]:
    """The prompts, and whether `value` is one prompt rather than a list of them.

    Raises `RequestError` for a mixed list, naming the first item of another type.
    """
    if isinstance(value, str):
        return [value], True
    kinds = set(map(type, value))
    if len(kinds) > 1:
        i = next(i for i, item in enumerate(value) if type(item) is not type(value[0]))
        raise field_error(
            f"{param}[{i}]", f"is of another type than '{param}[0]': texts, ids and lists of ids do not mix"
        )
    if kinds <= {int}:
        return [cast(list[int], value)], True
    return cast(list[Prompt], value), False


def split_ids(value: Sequence[int | list[int]], param: str) -> tuple[list[list[int]], bool]:
    """`split_prompts` for token ids alone."""
    lists, single = split_prompts(value, param)
    return cast(list[list[int]], lists), single


def check_prompt(prompt: Prompt, vocab_size: int, param: str) -> str | Ints:
    """One prompt, as a job takes it. Raises `RequestError` when empty or outside the vocabulary."""
    if not prompt:
        raise field_error(param, "must not be empty")
    return prompt if isinstance(prompt, str) else check_ids(prompt, vocab_size, param)


async def prompt_ids(job: Job, loaded: Loaded) -> Ints:
    """The prompt of a job without a suffix as token ids, int32 [n]."""
    if not isinstance(job.prompt, str):
        return job.prompt
    return await loaded.tokenizer.encode_async(job.prompt, job.add_special_tokens, job.prompt_param)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> Ints:
    """Token ids as int32 [n]; `RequestError` for an id outside the vocabulary."""
    array = np.asarray(ids, np.int64)
    if array.view(np.uint64).max(initial=0) >= vocab_size:  # negative ones too: as unsigned they are large
        at = next(at for at, id in enumerate(ids) if not 0 <= id < vocab_size)
        raise field_error(
            param, f"has token id {ids[at]} at position {at}; this model has ids 0 to {vocab_size - 1}"
        )
    return array.astype(np.int32)
