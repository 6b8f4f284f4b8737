"""How each model family writes calls and reasoning, and which family a model is of.

A family is data: marks, the functions that read its calls, and how to write a grammar for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from app.parsers import formats, harmony, tagged
from app.parsers.calls import Format, Syntax
from app.parsers.gemma import FUNCTION_GEMMA, GEMMA_4, Marks, gemma
from app.parsers.pythonic import MARKS, OLMO, olmo, pythonic


class Quotes(NamedTuple):
    """Text around a value, by whether it is a string."""

    string: tuple[str, str]
    other: tuple[str, str] = ("", "")


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments one by one: each `begin` (`%s` is its name), value, `end`, `after`."""

    begin: str
    end: str = ""
    after: str = ""
    gap: str = ""
    """Text before `end`, where the value is no text."""
    separator: str = ""
    raw: bool = True
    """Strings without quotes; otherwise as in JSON, and true is True."""
    quotes: Quotes | None = None
    """Text around values, in place of `end`."""


class Writing(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written: `opening`, then each call as `begin` (`%s` is its name), arguments,
    `end`, with `separator` between two, then `closing`."""

    opening: str = ""
    begin: str
    end: str
    separator: str = ""
    closing: str = ""
    fields: Fields | None = None
    """How arguments are written; None: as one JSON object."""
    numbered: str = ""
    """Text after the call's number, which follows `begin`; empty: calls have no number."""
    last: bool = False
    """A call ends the answer: there is one at most."""

    def written(self, calls: Sequence[tuple[str, object]]) -> str | None:
        """Calls, each a name and arguments, as text; None where arguments are not written as JSON."""
        if self.fields is not None or self.numbered:
            return None
        each = [
            f"{self.begin % name}{made if isinstance(made, str) else json.dumps(made, ensure_ascii=False)}"
            for name, made in calls
        ]
        return f"{self.opening}{self.separator.join(one + self.end for one in each)}{self.closing}"


class ToolFamily(Syntax, frozen=True, kw_only=True):
    """One way to write calls."""

    name: str
    writing: Writing
    special: bool = False
    """Markers are special tokens, which are hidden unless asked for."""
    short_ids: bool = False
    """The template takes call ids of nine characters only."""
    channels: bool = False
    """Calls, reasoning and text are messages of their own (`app.parsers.harmony`)."""


class ReasoningFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One way to mark reasoning."""

    name: str
    begin: str
    end: str
    gap: str = ""
    """Text between the reasoning and the answer."""
    special: bool = False
    spellings: tuple[tuple[str, str], ...] = ()
    """Other marks that models write, each a begin and an end."""
    line: str = "\n"
    """Text between a mark and the reasoning."""
    channels: bool = False
    """See `ToolFamily.channels`."""
    sign: str = ""
    """Text in a template that indicates this family, if not the end mark."""

    @property
    def begins(self) -> tuple[str, ...]:
        """All marks that begin reasoning."""
        return (self.begin, *(begin for begin, _ in self.spellings))

    @property
    def ends(self) -> tuple[str, ...]:
        """All marks that end reasoning."""
        return (self.end, *(end for _, end in self.spellings))

    def opened(self, prompt: str) -> bool:
        """Whether the prompt ends inside reasoning that the template has begun."""
        return prompt.rstrip().endswith(self.begin)

    def closed(self, prompt: str) -> bool:
        """Whether the prompt ends with reasoning that the template has ended, or within an answer's text."""
        if self.channels:
            return self.answering(prompt) or prompt.endswith(self.begin + self.closing(True))
        return prompt.rstrip().endswith(self.end)

    def answering(self, prompt: str) -> bool:
        """Whether the prompt ends within the message of an answer's text."""
        return self.channels and harmony.FINAL in prompt.rpartition(harmony.START)[2]

    def closing(self, calls: bool) -> str:
        """Text that ends reasoning that is cut and begins the answer, which may be `calls` in that format."""
        return f"{self.line}{self.end}{self.gap}{harmony.FINAL if self.channels and not calls else ''}"

    def skipped(self, prompt: str, calls: bool = False) -> str:
        """The prompt with the reasoning ended before it has begun. `calls`: see `closing`."""
        if self.closed(prompt):
            return prompt
        opened = prompt.rstrip() if self.opened(prompt) else prompt + self.begin
        return opened + self.line + self.closing(calls)


_HERMES = ToolFamily(
    name="hermes",
    markers=(formats.HERMES[0],),
    calls=formats.hermes,
    lead="\n",
    writing=Writing(begin='<tool_call>\n{"name": "%s", "arguments": ', end="}\n</tool_call>", separator="\n"),
)
_LLAMA = ToolFamily(
    name="llama3",
    markers=(formats.LLAMA,),
    calls=formats.llama,
    bare=formats.llama,
    begins=formats.LLAMA_BEGINS,
    writing=Writing(begin='{"name": "%s", "parameters": ', end="}", separator="; "),
    special=True,
)
_MISTRAL = ToolFamily(
    name="mistral",
    markers=(formats.MISTRAL,),
    calls=formats.mistral,
    writing=Writing(
        opening="[TOOL_CALLS] [", begin='{"name": "%s", "arguments": ', end="}", separator=", ", closing="]"
    ),
    special=True,
    short_ids=True,
)
_MISTRAL_11 = msgspec.structs.replace(_MISTRAL, writing=Writing(begin="[TOOL_CALLS]%s[ARGS]", end=""))
_GRANITE = ToolFamily(
    name="granite",
    markers=formats.GRANITE,
    calls=formats.granite,
    writing=msgspec.structs.replace(_MISTRAL.writing, opening=f"{formats.GRANITE[0]}["),
    special=True,
)
_GRANITE_31 = msgspec.structs.replace(
    _GRANITE,
    markers=formats.GRANITE[::-1],
    writing=msgspec.structs.replace(_MISTRAL.writing, opening=f"{formats.GRANITE[1]}["),
)
_GRANITE_20B = ToolFamily(
    name="granite-20b-fc",
    markers=(formats.GRANITE_20B,),
    calls=formats.marked(formats.GRANITE_20B, formats.call),
    writing=Writing(begin='<function_call> {"name": "%s", "arguments": ', end="}", separator=" "),
)
_PHI = ToolFamily(
    name="phi4_mini_json",
    markers=formats.PHI[:2],
    calls=formats.phi,
    writing=msgspec.structs.replace(_MISTRAL.writing, opening=formats.PHI[0]),
    special=True,
)
_PHI_TOKENS = msgspec.structs.replace(
    _PHI,
    markers=formats.PHI[1::-1],
    writing=Writing(begin=f'{formats.PHI[1]}{{"name": "%s", "arguments": ', end=f"}}{formats.PHI[2]}"),
)
_DEEPSEEK = ToolFamily(
    name="deepseek_v3",
    markers=formats.DEEPSEEK,
    calls=formats.deepseek,
    writing=Writing(
        opening=formats.DEEPSEEK[0],
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        separator="\n",
        closing="<｜tool▁calls▁end｜>",
    ),
    special=True,
)
_DEEPSEEK_31 = msgspec.structs.replace(
    _DEEPSEEK,
    name="deepseek_v31",
    writing=Writing(
        opening=formats.DEEPSEEK[0],
        begin="<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
)
_PYTHONIC = ToolFamily(
    name="pythonic",
    markers=MARKS[:1],
    calls=formats.marked(MARKS[0], pythonic),
    bare=pythonic,
    begins=("[%s(",),
    writing=Writing(
        opening="[",
        begin="%s(",
        end=")",
        separator=", ",
        closing="]",
        fields=Fields(begin="%s=", separator=", ", raw=False),
    ),
    special=True,
)
_OLMO = ToolFamily(
    name="olmo3",
    markers=OLMO[:1],
    calls=olmo,
    writing=msgspec.structs.replace(_PYTHONIC.writing, opening=OLMO[0], separator="\n", closing=OLMO[1]),
    special=True,
)


def _tagged(name: str, tags: tagged.Tags, gap: str = "") -> ToolFamily:
    """A family that writes each call in an outer tag of its own."""
    return ToolFamily(
        name=name,
        markers=(tags.calls[0], tags.call[0]),
        calls=tagged.tagged(tags),
        lead="\n\n",
        writing=Writing(
            begin=f"{tags.calls[0]}\n{tags.call[0]}%s{tags.named}\n",
            end=f"{tags.call[1]}\n{tags.calls[1]}",
            separator="\n",
            fields=Fields(
                begin=f"{tags.argument[0]}%s{tags.named}{tags.line}",
                gap=gap,
                end=tags.argument[1],
                after="\n",
            ),
        ),
    )


def _invoked(
    name: str, tags: tagged.Tags, lead: str, fields: Fields, calls: Format | None = None
) -> ToolFamily:
    """A family that writes all calls in one outer tag."""
    return ToolFamily(
        name=name,
        markers=(tags.calls[0], tags.call[0]),
        calls=calls or tagged.tagged(tags),
        lead=lead,
        writing=Writing(
            opening=f"{tags.calls[0]}\n",
            begin=f"{tags.call[0]}%s{tags.named}\n",
            end=f"{tags.call[1]}\n",
            closing=tags.calls[1],
            fields=fields,
        ),
        special=True,
    )


def _dsml(name: str, tags: tagged.Tags) -> ToolFamily:
    begin, end = tags.argument
    quotes = Quotes(('true">', end), ('false">', end))
    fields = Fields(begin=f'{begin}%s" string="', quotes=quotes, after="\n")
    markers = tuple(dict.fromkeys((tags.calls[0], *tagged.DSML_MARKS)))
    return msgspec.structs.replace(_invoked(name, tags, "\n\n", fields, tagged.dsml), markers=markers)


_QWEN_CODER = _tagged("qwen3_coder", tagged.QWEN_CODER, gap="\n")
_SEED = msgspec.structs.replace(_tagged("seed_oss", tagged.SEED), special=True)
_MINIMAX = _invoked(
    "minimax_m2",
    tagged.MINIMAX,
    "\n",
    Fields(begin='<parameter name="%s">', end=tagged.MINIMAX.argument[1], after="\n"),
)
_DSML, _DSML_4 = _dsml("deepseek_v32", tagged.DSML), _dsml("deepseek_v4", tagged.DSML_4)
_GLM = ToolFamily(
    name="glm",
    markers=(tagged.TOOL_CALL[0],),
    calls=tagged.glm,
    lead="\n",
    writing=Writing(
        begin="<tool_call>%s\n",
        end="</tool_call>",
        separator="\n",
        fields=Fields(begin="<arg_key>%s</arg_key>\n<arg_value>", end="</arg_value>", after="\n"),
    ),
)
_GLM_47 = msgspec.structs.replace(
    _GLM,
    writing=Writing(
        begin="<tool_call>%s",
        end="</tool_call>",
        fields=Fields(begin="<arg_key>%s</arg_key><arg_value>", end="</arg_value>"),
    ),
)
_KIMI = ToolFamily(
    name="kimi_k2",
    markers=formats.KIMI,
    calls=formats.kimi,
    writing=Writing(
        opening=formats.KIMI[0],
        begin="<|tool_call_begin|>functions.%s:",
        numbered="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
    special=True,
)
_HARMONY = ToolFamily(
    name="harmony",
    markers=harmony.BEGINS,
    calls=harmony.call,
    bare=harmony.first_call,
    writing=Writing(
        begin=f"{harmony.CHANNEL}commentary to=functions.%s <|constrain|>json{harmony.MESSAGE}",
        end="",
        last=True,
    ),
    special=True,
    channels=True,
)


def _gemma(name: str, marks: Marks) -> ToolFamily:
    return ToolFamily(
        name=name,
        markers=(marks.begin,),
        calls=gemma(marks),
        writing=Writing(
            begin=f"{marks.begin}call:%s{{",
            end=f"}}{marks.end}",
            fields=Fields(begin="%s:", quotes=Quotes((marks.quote, marks.quote)), separator=","),
        ),
        special=True,
    )


_FUNCTION_GEMMA = _gemma("functiongemma", FUNCTION_GEMMA)
_GEMMA_4 = _gemma("gemma4", GEMMA_4)

_FAMILIES = (
    *(_HERMES, _LLAMA, _MISTRAL, _DEEPSEEK, _PYTHONIC, _QWEN_CODER, _GLM, _KIMI),
    *(_FUNCTION_GEMMA, _GEMMA_4, _GRANITE, _GRANITE_20B, _PHI, _OLMO, _DEEPSEEK_31, _DSML, _MINIMAX),
    *(_HARMONY, _SEED, _DSML_4),
)
TOOLS: Mapping[str, ToolFamily] = {family.name: family for family in _FAMILIES}
"""Families of tool calls by the name that `--tool-parser` takes."""

_THINK = ReasoningFamily(name="think", begin="<think>", end="</think>", gap="\n\n")
_SEED_THINK = ReasoningFamily(
    name="seed_oss", begin="<seed:think>", end="</seed:think>", gap="\n", special=True
)
_BRACKETS = ReasoningFamily(name="mistral", begin="[THINK]", end="[/THINK]", special=True)
# Granite 3.2 writes "is", and "'s" in some conversions; 3.3 writes <think>.
_GRANITE_THOUGHT = ReasoningFamily(
    name="granite",
    begin="Here is my thought process:",
    end="Here is my response:",
    gap="\n\n",
    spellings=(("Here's my thought process:", "Here's my response:"),),
)
_GEMMA_THOUGHT = ReasoningFamily(name="gemma4", begin="<|channel>thought", end="<channel|>", special=True)
_ANALYSIS = ReasoningFamily(
    name="harmony",
    begin=harmony.ANALYSIS,
    end=harmony.END,
    gap=harmony.ASSISTANT,
    line="",
    special=True,
    channels=True,
    sign=harmony.CHANNEL,
)

REASONING: Mapping[str, ReasoningFamily] = {
    family.name: family
    for family in (_THINK, _BRACKETS, _GRANITE_THOUGHT, _GEMMA_THOUGHT, _ANALYSIS, _SEED_THINK)
}
"""Families of reasoning by the name that `--reasoning-parser` takes."""


def tool_family(choice: str, template: str) -> ToolFamily | None:
    """The family that `choice` names, None for `none`; for `auto` the one that the chat template indicates,
    or without known marks Hermes', which a grammar can enforce on every model."""
    if choice == "none":
        return None
    family = _found(template) if choice == "auto" else TOOLS[choice]
    for plain, sign, variant in _VARIANTS:
        if family is plain and sign in template and (plain is not _DEEPSEEK or "```json" not in template):
            return variant
    return family


def reasoning_family(choice: str, template: str) -> ReasoningFamily | None:
    """As `tool_family`, for reasoning. A template that knows the end mark is for a model that writes it."""
    if choice != "auto":
        return REASONING.get(choice)
    return next((family for family in REASONING.values() if (family.sign or family.end) in template), None)


def _found(template: str) -> ToolFamily:
    return next((family for family, signs in _SIGNS if any(sign in template for sign in signs)), _HERMES)


_GRANITE_LISTS = "<tool_call> followed by a JSON list"
"""Text in the template of Granite 3.1."""
_VARIANTS = (
    (_MISTRAL, "[ARGS]", _MISTRAL_11),
    (_GRANITE, _GRANITE_LISTS, _GRANITE_31),
    (_PHI, formats.PHI[2], _PHI_TOKENS),
    (_DEEPSEEK, "<｜tool▁sep｜>", _DEEPSEEK_31),
    (_GLM, "</arg_key><arg_value>", _GLM_47),
    (_DSML, "tool_calls>", _DSML_4),
)
"""Family, a text of a template by which its model writes otherwise, and how."""
_SIGNS: tuple[tuple[ToolFamily, tuple[str, ...]], ...] = (
    (_HARMONY, (harmony.CHANNEL,)),
    # Tags inside the tag are other formats than JSON there: they come first.
    (_SEED, tagged.SEED.calls[:1]),
    (_QWEN_CODER, (tagged.QWEN_CODER.call[0],)),
    (_GLM, ("<arg_key>",)),
    (_KIMI, formats.KIMI[:1]),
    (_FUNCTION_GEMMA, FUNCTION_GEMMA[:1]),
    (_GEMMA_4, GEMMA_4[:1]),
    (_MINIMAX, tagged.MINIMAX.calls[:1]),
    (_DSML, ("｜DSML｜",)),
    (_OLMO, OLMO[:1]),
    (_PHI, (formats.PHI[0], "<|/tool|>")),
    (_GRANITE, (formats.GRANITE[0], _GRANITE_LISTS)),
    (_GRANITE_20B, (formats.GRANITE_20B,)),
    (_HERMES, ("<tool_call>",)),
    (_MISTRAL, ("[TOOL_CALLS]",)),
    (_DEEPSEEK, formats.DEEPSEEK[:1]),
    (_PYTHONIC, ("func_name1(", MARKS[0])),
    (_LLAMA, ("<|python_tag|>", '"parameters": dictionary of argument name')),
)
"""Family, and texts of a template that indicate it; the first match counts."""
