"""Messages to prompt text, through the model's chat template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from app.text import harmony
from app.text.hermes import parsed_arguments, tools_as_text
from app.text.operations import nested
from app.text.sandbox import OutOfTime, Sandbox
from core.errors import ModelError, RequestError

Message = Mapping[str, Any]

TIME_LIMIT = 1.0
"""Seconds of processor time for one prompt. The slowest honest one measured, 1,000 messages with
Qwen3's template, takes 0.04 s."""

INLINE_CHARS = 8_192
INLINE_TIME = 0.0005
"""Short conversations render on the loop (eight messages: 0.1 to 0.3 ms with the templates of Qwen3,
Llama 3.1 and DeepSeek-V3); one that is not done in half a millisecond is started anew in a pool
thread, so that no template can hold the loop."""

PROBE_TIME = 0.1
"""Time limit of each of the seven to fourteen renderings that probe a template at the start."""

THREADS = 2
MAX_SOURCE = 1 << 20
"""Characters of a template; the longest in use have 20,000."""

RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))
"""Names that template arguments cannot set: they have fields of their own."""

_FAILURES = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""Errors of a template: its own, or for messages that it does not support."""
_TOO_MUCH = (RecursionError, MemoryError)

_PROBE, _CALLED = "a probe of what the template reads", "a probe of what it reads of calls"
_ASKED: tuple[Message, ...] = ({"role": "user", "content": "?"},)
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": _PROBE,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "a"}},
            "required": ["a"],
        },
    },
}
_END_OF_MESSAGE = "<<the last message goes on here>>"


class ChatTemplate:
    """The template of one model, compiled once.

    Owner: event loop. Rendering is pure, so `render_async` may use a pool thread.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are the names (`bos_token`, ...) that templates use. None for `source`
        makes every rendering a `RequestError`. Raises `ModelError` for what does not compile."""
        self._sandbox: Sandbox = Sandbox()
        self.special_tokens = dict(special_tokens or {})
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="template")
        self.source = source or ""
        """The template's text; empty without one."""
        self._template = self._compile(source) if source is not None else None
        self._takes_parts = False
        """The template reads content as a list of parts only."""
        self._thinks_in_parts = False
        """The template reads reasoning as a part of the content (Mistral)."""
        self._arguments_as_objects = True
        self._empty_content: str | None = ""
        self._shows_system = self._shows_calls = True
        self.shows_tools = True
        """The template renders tools. Otherwise they are put into the messages."""
        if self._template is not None:
            self._probe()

    @classmethod
    def load(
        cls,
        directory: Path | None,
        override: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> ChatTemplate:
        """Template of a tokenizer's directory, or `override` in its place. Raises `ModelError`."""
        source = override
        if source is None and directory is not None:
            source = read_template(directory)
        try:
            return cls(source, special_tokens)
        except ModelError as error:
            raise ModelError(f"{error} Name another with --chat-template.") from error

    @property
    def drops_calls(self) -> bool:
        """Whether it renders tools but not the assistant's calls (Granite 3.3): they go into the content."""
        return self.shows_tools and not self._shows_calls

    def close(self) -> None:
        """Stop the pool threads, after what they are rendering. Idempotent."""
        self._pool.shutdown()

    def render(self, messages: Sequence[Message], /, **options: Any) -> str:
        """Prompt text of a conversation.

        Messages are as `check_messages` leaves them: their `content` is text, or None. Options are `tools`,
        `add_generation_prompt` (default True), `continue_final_message` (default False; it leaves the last
        message open for the model to go on with, and excludes the other) and further names for the template.
        Raises `RequestError` naming `messages` or an option.
        """
        return self._prompt(messages, options, TIME_LIMIT)

    async def render_async(self, messages: Sequence[Message], /, **options: Any) -> str:
        """Like `render`, at most about half a millisecond of it on the loop."""
        if _chars((messages, options), INLINE_CHARS) <= INLINE_CHARS:
            try:
                return self._prompt(messages, options, INLINE_TIME)
            except _OutOfInlineTime:
                pass
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self._prompt, messages, options, TIME_LIMIT
        )

    # -- rendering ---------------------------------------------------------------------------------

    def _prompt(self, messages: Sequence[Message], options: Mapping[str, Any], seconds: float) -> str:
        text = self._render(self._context(messages, **options), seconds)
        if not options.get("continue_final_message"):
            return text
        at = text.rfind(_END_OF_MESSAGE)
        if at < 0:
            raise RequestError(
                "continue_final_message: the chat template does not show the last message's content.",
                "continue_final_message",
            )
        # A template that trims has taken the space behind the mark, and would the text's own.
        return text[:at] if text[at:].startswith(_END_OF_MESSAGE + " ") else text[:at].rstrip()

    def _render(self, context: dict[str, Any], seconds: float) -> str:
        assert self._template is not None
        self._sandbox.budget.start(seconds)
        try:
            return _rendered(self._template, context)
        except OutOfTime as error:
            if seconds < TIME_LIMIT:
                raise _OutOfInlineTime from error
            raise RequestError(
                f"The chat template did not finish within {TIME_LIMIT:g} s for these messages.", "messages"
            ) from error
        except SecurityError as error:
            raise RequestError(f"The chat template was stopped: {_reason(error)}.", "messages") from error
        except _FAILURES as error:
            raise RequestError(
                f"The chat template refuses these messages: {_reason(error)}", "messages"
            ) from error
        except _TOO_MUCH as error:
            raise RequestError(
                "The chat template nests too deeply for these messages.", "messages"
            ) from error

    def _context(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **arguments: Any,
    ) -> dict[str, Any]:
        """The template's variables. Raises `RequestError` for what can be refused before rendering."""
        if self._template is None:
            raise RequestError(
                "This model has no chat template. Use /v1/completions, or have the operator set one "
                "with --chat-template."
            )
        taken = RESERVED | self._sandbox.globals.keys() | self.special_tokens.keys()
        if wrong := next((name for name in arguments if name in taken), None):
            raise RequestError(f"chat_template_kwargs must not set {wrong!r}.", "chat_template_kwargs")
        if not self.shows_tools and (tools or not self._shows_calls):
            messages, tools = tools_as_text(messages, tools, self._shows_system), None
        if harmony.MARK in self.source:
            messages, tools, arguments = harmony.adapted(messages, tools, arguments)
        plain = [self._message(message) for message in messages]
        if continue_final_message:
            plain[-1] = _with_end_marked(plain[-1])
        return {
            **self.special_tokens,
            **arguments,
            "messages": plain,
            "tools": list(tools) if tools else None,
            "documents": arguments.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }

    # -- messages as the template wants them -------------------------------------------------------

    def _message(self, message: Message) -> dict[str, Any]:
        plain = dict(message)
        content = plain.get("content")
        calls = plain.get("tool_calls")
        if self._thinks_in_parts and (thought := plain.get("reasoning_content")):
            said = [{"type": "text", "text": content}] if content or not calls else []
            plain["content"] = [{"type": "thinking", "thinking": thought}, *said]
        elif not content and calls:
            plain["content"] = self._empty_content
        elif self._takes_parts:
            plain["content"] = [{"type": "text", "text": content}]
        if calls:
            plain["tool_calls"] = [_with_arguments(call, self._arguments_as_objects) for call in calls]
        return plain

    def _probe(self) -> None:
        """Find out by rendering which forms of content, system messages, tools and tool arguments the
        template supports. Its source does not say so without following every variable."""
        text = self._try([{"role": "user", "content": _PROBE}])
        parts = self._try([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        # A template that only prints its content shows the list itself.
        shows_list = "'text'" in parts or '"text"' in parts
        self._takes_parts = _PROBE not in text and _PROBE in parts and not shows_list
        thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": _PROBE}]}
        if not shows_list and _PROBE in (shown := self._try([*_ASKED, thought])):
            self._thinks_in_parts = "thinking'" not in shown and 'thinking"' not in shown
        self._shows_system = _PROBE in self._try([{"role": "system", "content": _PROBE}, *_ASKED])
        self.shows_tools = not self._try(_ASKED) or _PROBE in self._try(_ASKED, [_TOOL])
        # Most write tool arguments with `tojson`, a few paste the text that they expect. Most add the content
        # of a message with calls to the prompt; a few (DeepSeek-V3) render calls only where it is None, or
        # nothing at all without tools (Hermes 3).
        forms = product((None, [_TOOL]), (True, False), ("", None))
        for tools, objects, content in forms:
            arguments = {_CALLED: 1} if objects else json.dumps({_CALLED: 1})
            call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
            called = {"role": "assistant", "content": content, "tool_calls": [call]}
            if _CALLED in self._try([*_ASKED, called], tools):
                self._arguments_as_objects, self._empty_content = objects, content
                break
        else:
            self._shows_calls = False

    def _try(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        context = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}
        try:
            return self._render({**self.special_tokens, **context}, min(PROBE_TIME, TIME_LIMIT))
        except (RequestError, _OutOfInlineTime):
            return ""

    def _compile(self, source: str) -> Template:
        if len(source) > MAX_SOURCE:
            raise ModelError(
                f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are read."
            )
        try:
            return self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template does not compile: {error.message} (line {error.lineno})."
            ) from error
        except (*_FAILURES, *_TOO_MUCH, SyntaxError) as error:
            raise ModelError(f"the chat template does not compile: {_reason(error)}.") from error


class _OutOfInlineTime(Exception):
    """Not finished within `INLINE_TIME`."""


def _rendered(template: Template, context: dict[str, Any]) -> str:
    """The template's text. `Template.render` would do the same, and write tracebacks that name the template's
    lines: those are in cycles with their own errors, so that everything a stopped template had made (0.4 GB
    each time) would stay until a garbage collection, and a server collects seldom."""
    return template.environment.concat(template.root_render_func(template.new_context(context)))


def read_template(directory: Path) -> str | None:
    """Chat template of a tokenizer's directory: chat_template.jinja, chat_template.json, or
    tokenizer_config.json, where several may have names and `default` is taken. None without one.
    Raises `ModelError`."""
    jinja = directory / "chat_template.jinja"
    try:
        if jinja.is_file():
            return jinja.read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            path = directory / name
            content = json.loads(path.read_bytes()) if path.is_file() else {}
            found = content.get("chat_template") if isinstance(content, dict) else None
            if isinstance(found, list):
                named = {
                    entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)
                }
                found = named.get("default")
            if isinstance(found, str):
                return found
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the chat template in {directory}: {error}.") from error
    return None


def _with_arguments(call: Message, as_object: bool) -> Message:
    """A tool call with its arguments as an object or as the text of one, where they are either."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, Mapping) and not as_object:
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and as_object:
        parsed = parsed_arguments(arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _with_end_marked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a mark where its text ends, to cut the prompt there."""
    content = message.get("content")
    if isinstance(content, list) and content:
        last = {**content[-1], "text": content[-1]["text"] + _END_OF_MESSAGE + " "}
        return {**message, "content": [*content[:-1], last]}
    if isinstance(content, str):
        return {**message, "content": content + _END_OF_MESSAGE + " "}
    raise RequestError("continue_final_message needs a last message with text.", "continue_final_message")


def _chars(value: object, limit: int) -> int:
    """Characters in the strings of a nested value, counted no further than past `limit`; every value counts
    as a few more."""
    total = 0
    for _, item in nested(value):
        total += 8 + (len(item) if isinstance(item, str) else 0)
        if total > limit:
            break
    return total


def _reason(error: BaseException) -> str:
    """First 300 characters of what went wrong, on one line, without a full stop at the end. What a template
    says may quote half a character, which has no bytes."""
    text = " ".join(str(error).encode(errors="replace").decode().split()) or type(error).__name__
    return text[:300].rstrip(".")
