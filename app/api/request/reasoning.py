"""The limit of thinking tokens: its fields, and how routes that do not parse the text apply it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from app.api.request.schema import ChatBody, ExtensionFields
from app.engine.job import Generator, Job, Run, Sink
from app.engine.reasoning_budget import Watch, Watcher
from app.parsers.grammar import Wanted, constraint
from app.parsers.reading import Reading
from app.parsers.registry import ReasoningFamily
from app.service import Loaded
from core.errors import RequestError, field_error
from core.types import Ints

SEEN = 512
"""Number of last ids of a prompt that are read to see whether its reasoning is open."""

_NAMES = ("max_thinking_tokens", "thinking_token_budget")
"""SGLang's and vLLM's names of the field."""


def thinking_budget(body: ExtensionFields, loaded: Loaded, prefix: str = "") -> int | None:
    """Tokens that the thinking may take. Raises `RequestError` where the model does not think."""
    name = next((name for name in _NAMES if getattr(body, name) is not None), None)
    if name is None:
        return None
    budget: int = getattr(body, name)
    if loaded.reasoning is None:
        name = prefix + name
        raise RequestError(f"'{name}': this model is not known to think.", name, "unsupported")
    if budget < 0:
        raise field_error(prefix + name, "must not be negative")
    return budget


def thinking_fields(wanted: bool, budget: int | None, loaded: Loaded) -> tuple[int | None, dict[str, Any]]:
    """The reasoning budget in tokens and the template arguments that turn reasoning on or off. None and empty
    for a model without reasoning."""
    if loaded.reasoning is None:
        return None, {}
    return budget if wanted else 0, {"enable_thinking": wanted}


def unthinking(body: ChatBody, family: ReasoningFamily) -> bool:
    """Whether the request wants no thinking of a model whose template cannot ask for that."""
    return family.channels and body.reasoning_effort == "none"


def shown(prompt: str | Ints, loaded: Loaded) -> str:
    """The end of a prompt as text, special tokens too."""
    return prompt if isinstance(prompt, str) else loaded.tokenizer.decode(prompt[-SEEN:].tolist(), False)


async def without_thinking(
    prompt: str | Ints, family: ReasoningFamily, loaded: Loaded, calls: bool = False
) -> str | Ints:
    """The prompt with empty reasoning, already closed. `calls`: see `ReasoningFamily.closing`."""
    text = shown(prompt, loaded)
    skipped = family.skipped(text, calls)
    if isinstance(prompt, str):
        return skipped
    same = 0
    while text[same : same + 1] == skipped[same : same + 1] != "":
        same += 1
    rest = skipped[same:]
    return np.concatenate([prompt, await loaded.tokenizer.encode_async(rest, False)]) if rest else prompt


def constrained(job: Job, prompt: str, wanted: Wanted, watch: Watch) -> tuple[Job, Watch]:
    """The job with one grammar for all constraints, and the watch with the grammar for after a cut.
    `prompt` is the job's prompt as text."""
    reading = watch.reading
    family = reading.reasoning
    tools = reading.tools
    if family is not None and family.answering(prompt) and wanted.calls == "auto":
        wanted, tools = msgspec.structs.replace(wanted, calls="none"), None
    closed = family is None or family.closed(prompt)
    over = family is not None and (closed or watch.budget is not None)
    grammar = after = constraint(msgspec.structs.replace(wanted, over=over), tools, family)
    if not closed:
        thinking = msgspec.structs.replace(wanted, thinking="open" if reading.inside else "possible")
        grammar = constraint(thinking, tools, family)
    text = job.text
    if any(each is not None and each.special for each in (reading.tools, family)):
        text = msgspec.structs.replace(text, skip_special_tokens=False)  # the marks are such tokens
    job = msgspec.structs.replace(job, grammar=grammar, text=text)
    return job, msgspec.structs.replace(watch, after=after)


class ThinkingLimit:
    """A `Generator` over the engine: its jobs think for at most so many tokens, and a constraint holds for
    what follows the thinking, as in chat. The text keeps its marks. Owner: event loop."""

    def __init__(self, loaded: Loaded, budget: int) -> None:
        """The model must be one that thinks."""
        self._loaded = loaded
        self._budget = budget

    async def start(self, job: Job, sink: Sink) -> Run:
        """See `Generator.start`."""
        loaded, family = self._loaded, self._loaded.reasoning
        assert family is not None
        if self._budget == 0:
            prompt = await without_thinking(job.prompt, family, loaded)
            return await loaded.engine.start(msgspec.structs.replace(job, prompt=prompt), sink)
        text = shown(job.prompt, loaded)
        reading = Reading(reasoning=family, inside=family.opened(text))
        watch = Watch(reading=reading, budget=self._budget)
        job, watch = constrained(job, text, Wanted(answer=job.grammar), watch)
        return await Watcher(loaded.engine, loaded.tokenizer, watch).start(job, sink)


def limited_thinking(loaded: Loaded, budget: int | None) -> Generator:
    """The engine, with a limit of thinking tokens if one is requested."""
    return loaded.engine if budget is None else ThinkingLimit(loaded, budget)
