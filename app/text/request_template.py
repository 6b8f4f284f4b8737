"""Chat templates sent with a request: rendered in the helper process, which can be killed.

The sandbox looks at the clock between two operations; a single one over a text of 30 MB (`split`) holds the
GIL for half a second, and a thread cannot be stopped. The operator vouches for the model's own template,
which stays in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from app.text.template import ChatTemplate, Message
from core.errors import ModelError, RequestError, field_error
from core.helper import Exceeded, Helper, Task

SECONDS = 3.0
"""Wall time of one rendering, compiling included: three times what the sandbox lets honest ones take."""
MAX_SOURCE = 1 << 15
"""Characters; the longest in use have 20,000."""
KEPT = 16
"""Templates that the helper keeps compiled."""


class _Rendering(msgspec.Struct, frozen=True):
    """One rendering: a template, and the arguments of `ChatTemplate.render`."""

    source: str
    messages: Sequence[Any]
    options: dict[str, Any]


class _Answer(msgspec.Struct, frozen=True):
    """The prompt, or the fields of a `RequestError`."""

    text: str = ""
    wrong: str = ""
    param: str | None = None
    shows_tools: bool = True


class RequestTemplate:
    """A template of one request, over the model's special tokens. Owner: event loop."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], helper: Helper) -> None:
        """Raises `RequestError` naming `chat_template` for one that is too long."""
        if len(source) > MAX_SOURCE:
            raise field_error(
                "chat_template", f"has {len(source)} characters; at most {MAX_SOURCE} are taken"
            )
        self.drops_calls = False
        """See `ChatTemplate.drops_calls`. A request's own template has to render them."""
        self._source = source
        self._helper = helper
        self.shows_tools = True
        """See `ChatTemplate.shows_tools`; known once it was rendered."""
        self._task = Task(f"{__name__}:{Renderer.__name__}", msgspec.msgpack.encode(dict(special_tokens)))

    async def render_async(self, messages: Sequence[Message], /, **options: Any) -> str:
        """See `ChatTemplate.render`. Raises `RequestError` naming `chat_template` too, and
        `Overloaded`."""
        call = _Rendering(self._source, messages, options)
        try:
            payload = msgspec.msgpack.encode(call)
        except OverflowError:
            raise field_error("messages", "have a whole number of more than 64 bits") from None
        try:
            answer = await self._helper.run(self._task, payload, SECONDS)
        except Exceeded as error:
            raise field_error("chat_template", f"{error} with these messages") from error
        rendered = msgspec.msgpack.decode(answer, type=_Answer)
        if rendered.wrong:
            raise RequestError(rendered.wrong, rendered.param)
        self.shows_tools = rendered.shows_tools
        return rendered.text


class Renderer:
    """Runs in the helper process: `core.helper.Worker`."""

    def __init__(self, state: bytes) -> None:
        special = msgspec.msgpack.decode(state, type=dict[str, str])
        self._template = lru_cache(KEPT)(lambda source: ChatTemplate(source, special))

    def __call__(self, payload: bytes) -> bytes:
        """The msgpack of a `_Answer` for that of a `_Rendering`."""
        call = msgspec.msgpack.decode(payload, type=_Rendering)
        try:
            template = self._template(call.source)
            text = template.render(call.messages, **call.options)
            answer = _Answer(text=text, shows_tools=template.shows_tools)
        except RequestError as error:
            answer = _Answer(wrong=error.message, param=error.param)
        except ModelError as error:
            answer = _Answer(wrong=f"'chat_template': {error}", param="chat_template")
        try:
            return msgspec.msgpack.encode(answer)
        except UnicodeEncodeError:
            wrong = "'chat_template' makes text with a lone surrogate."
            return msgspec.msgpack.encode(_Answer(wrong=wrong, param="chat_template"))
