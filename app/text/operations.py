"""Limits of what one operation of a chat template may read and make: `app/text/sandbox.py` applies them."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError

MAX_CHARS = 32 * 2**20
"""Maximum characters of a string that a template makes, its output included. A request body has no more."""
MAX_ITEMS = 250_000
"""Maximum items of a list that a template makes, and maximum values that are visited to print or compare a
nested value (50 ms)."""
MAX_DEPTH = 1_000
"""Maximum nesting depth of a value."""
MAX_ARGUMENT = 100_000
"""Largest number given to filters and string methods: widths, counts, precisions."""
MAX_BITS = 4_096
"""Maximum bits of an integer."""
MAX_SLOW = 2**20
"""Characters of a text for filters that take long over each: 0.2 s at most."""
MAX_FIELD = 9_999
"""Width of a field in a format."""
MAX_WORK = 10**9
"""Length of a string times that of a string argument: the comparisons that `strip` may make."""

MAX_PARTS = 16 * MAX_ITEMS
"""Items that a filter goes through, times the dots in a text that it is given: `sort(attribute="a.b.c")`
looks each part up in each item (1 s)."""


def refuse(what: str) -> NoReturn:
    """Raise `SecurityError`: `what` is too large."""
    raise SecurityError(f"{what} is larger than a chat template may make")


def check_arguments(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of a filter or method whose result or work could be out of proportion."""
    _check_length(name, value)
    for argument in chain(args, kwargs.values()):
        _check_argument(name, value, argument)
    if name in ("format", "format_map"):
        _check_format(str(value), [*args, *kwargs.values()])
    elif name == "replace" and isinstance(value, str) and len(args) >= 2:
        _check_replace(value, str(args[0]), str(args[1]))
    elif name in _WALKED:
        _check_walk(value, args)
    elif name in _COMPARED:  # methods: of filters and tests all that is read is bounded
        bounded(value)
    elif name == "sum":
        _check_sum(kwargs.get("start", args[1] if len(args) > 1 else 0))


def _check_length(name: str, value: Any) -> None:
    if name in _LONGEST and isinstance(value, str) and len(value) > _LONGEST[name]:
        refuse(f"what {name}() reads")


def _check_argument(name: str, value: Any, argument: Any) -> None:
    if isinstance(argument, int) and abs(argument) > MAX_ARGUMENT and name not in _PLAIN:
        refuse(f"the argument {name}(... {argument!r:.20} ...)")
    if isinstance(argument, str) and isinstance(value, str) and len(value) * len(argument) > MAX_WORK:
        refuse(f"the work of {name}()")
    if isinstance(argument, str) and name in ITERATED:
        items = len(value) if isinstance(value, (str, *_CONTAINERS)) else MAX_ITEMS
        if items * argument.count(".") > MAX_PARTS:
            refuse(f"the work of {name}()")


def _check_walk(value: Any, args: tuple[Any, ...]) -> None:
    glue = value if isinstance(value, str) else next(iter(args), "")
    items = args[0] if isinstance(value, str) and args else value
    bounded(items, len(glue) if isinstance(glue, str) else 0)


def _check_replace(value: str, old: str, new: str) -> None:
    if len(value) + value.count(old) * len(new) > MAX_CHARS:
        refuse("the result of replace()")


def _check_sum(start: object) -> None:
    if not isinstance(start, int | float):
        raise SecurityError("sum() adds numbers only")


_LAZY = frozenset(("batch", "items", "map", "reject", "rejectattr", "select", "selectattr", "slice"))
"""Filters that pass items on one by one, or lists of them."""
PASSED = _LAZY | frozenset(
    ("attr", "count", "d", "default", "first", "last", "length", "list", "random", "reverse")
)
"""Filters that do not read their value: it may be a whole conversation, in each turn of a loop."""
ITERATED = _LAZY | frozenset(
    ("dictsort", "groupby", "join", "list", "max", "min", "reverse", "sort", "sum", "unique")
)
"""Filters that go through the items of their value, characters of a text too."""
_WALKED = frozenset(("join", "tojson", "string", "e", "escape", "forceescape", "replace"))
"""Filters and methods whose result is as large as their value printed."""
_COMPARED = frozenset(("index", "count"))
"""Methods that compare nested values."""
_LONGEST = {"int": MAX_BITS} | dict.fromkeys(("title", "urlencode", "wordcount"), MAX_SLOW)
"""Characters of a text for filters that take 50 ns and more for each, or make a number of as many digits."""
_ORDER_TESTS = frozenset(
    ("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", ">", "ge", ">=")
)
READ_TESTS = _ORDER_TESTS | frozenset(("in", "lower", "upper"))
"""Tests that compare or print nested values."""
_PLAIN = _ORDER_TESTS | frozenset(("d", "default", "in", "get", "index", "count", "divisibleby"))
"""Filters, tests and methods that take any number: it is only compared or passed through."""

_LONG_FIELD = re.compile(r"\d{5}|\*|\{[^{}]*\{")


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Refuse widths of five digits or that are themselves arguments, and a result that may be too large,
    where each field may show any of the values."""
    longest = MAX_FIELD + max(map(_chars, values), default=0)
    if (text.count("%") + text.count("{")) * longest > MAX_CHARS:
        refuse("the result of a format")
    if _LONG_FIELD.search(text):
        refuse("a width in a format")


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse an operator whose result or work could be out of proportion."""
    if isinstance(left, int) and isinstance(right, int):
        _check_numbers(operator, left, right)
    elif operator == "*":
        _check_repetition(left, right)
        _check_repetition(right, left)
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        if len(left) + len(right) > (MAX_CHARS if isinstance(left, str) else MAX_ITEMS):
            refuse("a sum")
    elif operator == "%" and isinstance(left, str | bytes):
        _check_format(str(left), [right])


def _check_numbers(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() + right.bit_length()
    if operator == "**":
        bits = left.bit_length() * max(right, 1)
    if operator in ("**", "*") and bits > MAX_BITS:
        refuse("a number")


def _check_repetition(value: Any, times: Any) -> None:
    if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
        limit = MAX_CHARS if isinstance(value, str | bytes) else MAX_ITEMS
        if len(value) * max(times, 0) > limit:
            refuse("a repetition")


def nested(value: object) -> Iterator[tuple[int, object]]:
    """A value and all values inside it, keys of dictionaries included, with their depth from 1."""
    ahead: list[Iterator[object]] = [iter((value,))]
    while ahead:
        for item in ahead[-1]:
            yield len(ahead), item
            if isinstance(item, dict):
                ahead.append(chain(item.keys(), item.values()))
                break
            if isinstance(item, list | tuple | set | frozenset):
                ahead.append(iter(item))
                break
        else:
            ahead.pop()


_CONTAINERS = (list, tuple, dict, set, frozenset)


def listed(value: Any) -> Any:
    """Items that come one by one as a list, which can be bounded."""
    return list(value) if isinstance(value, Generator) else value


def bounded(value: Any, per_item: int = 0) -> Any:
    """`value`, unless it is nested so that printing or comparing it would not end in time: a list
    of itself twice, forty times over, takes no memory until it is printed."""
    _chars(value, per_item)
    return value


def _chars(value: Any, per_item: int = 0) -> int:
    """Characters of the texts in a value. Refuses what `bounded` does."""
    if not isinstance(value, _CONTAINERS):
        return len(value) if isinstance(value, str | bytes) else 0
    level: list[Any] = [value]
    seen = chars = depth = 0
    while level:  # all values of one depth after the other: a sixth of the time that each on its own takes
        depth, seen, chars = depth + 1, seen + len(level), chars + per_item * len(level)
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, _CONTAINERS):
                if seen + len(deeper) + len(item) > MAX_ITEMS:
                    refuse("a value")
                deeper += item
                if isinstance(item, dict):
                    deeper += item.values()
        if seen + len(deeper) > MAX_ITEMS or chars > MAX_CHARS or depth > MAX_DEPTH:
            refuse("a value")
        level = deeper
    return chars
