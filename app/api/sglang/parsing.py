"""SGLang's two routes that read texts generated elsewhere with this server's parsers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from app.aliases import VALUES
from app.api.request.routing import Routes
from app.api.request.sampling import check_count, current
from app.api.request.tools import check_tools
from app.parsers.base import Event, Message, assemble
from app.parsers.reading import Reading
from app.parsers.registry import REASONING, TOOLS
from app.service import Loaded
from core.errors import field_error

ROUTES = Routes()

MAX_TEXT = 2**19
"""Characters of a text: no answer is longer, and 10,000 calls are put together in 25 ms."""

SLICE = 16 * 1024
"""Characters read in one turn of the loop."""

Family = TypeVar("Family")


class CallsBody(msgspec.Struct, kw_only=True):
    """`/parse_function_call`. Without `tool_call_parser` the server's own."""

    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_call_parser: str | None = None


class ReasoningBody(msgspec.Struct, kw_only=True):
    """`/separate_reasoning`. Without `reasoning_parser` the server's own."""

    text: str | None = None
    reasoning_parser: str | None = None


@ROUTES.post(
    CallsBody, "/parse_function_call", example="text tool_call_parser", has="normal_text calls", model=current
)
async def parse_calls(request: web.Request, body: CallsBody, loaded: Loaded) -> object:
    """The calls in a text, and what is left of it."""
    family = _family(body.tool_call_parser, "tool_call_parser", TOOLS, VALUES["--tool-parser"], loaded.tools)
    tools = check_tools(body.tools)
    names = {tool.name: i for i, tool in enumerate(tools)}
    schemas = {tool.name: tool.schema for tool in tools}
    read = await _read(body.text, Reading(tools=family, names=frozenset(names), schemas=schemas))
    calls = [
        {"tool_index": names.get(call.name, -1), "name": call.name, "parameters": call.arguments}
        for call in read.calls
    ]
    return {"normal_text": read.content, "calls": calls}


@ROUTES.post(
    ReasoningBody,
    "/separate_reasoning",
    example="text reasoning_parser",
    has="reasoning_text text",
    model=current,
)
async def separate_reasoning(request: web.Request, body: ReasoningBody, loaded: Loaded) -> object:
    """The thinking in a text, and the answer after it."""
    family = _family(
        body.reasoning_parser, "reasoning_parser", REASONING, VALUES["--reasoning-parser"], loaded.reasoning
    )
    # Most templates open the thinking in the prompt: an end without a begin is one, too.
    inside = body.text is not None and family.begin not in body.text and family.end in body.text
    read = await _read(body.text, Reading(reasoning=family, inside=inside))
    return {"reasoning_text": read.reasoning, "text": read.content}


def _family(
    name: str | None,
    param: str,
    families: Mapping[str, Family],
    aliases: Mapping[str, str],
    own: Family | None,
) -> Family:
    if name is None:
        if own is None:
            raise field_error(param, "is missing, and this model's own is not known")
        return own
    found = families.get(aliases.get(name, name))
    if found is None:
        raise field_error(param, f"must be one of {', '.join(families)}")
    return found


async def _read(text: str | None, reading: Reading) -> Message:
    if text is None:
        raise field_error("text", "is missing")
    check_count(len(text), MAX_TEXT, "characters", "text")
    answer = reading.answer()
    events: list[Event] = []
    for start in range(0, len(text), SLICE):
        events += answer.feed(text[start : start + SLICE])
        await asyncio.sleep(0)
    return assemble(events + answer.finish())
