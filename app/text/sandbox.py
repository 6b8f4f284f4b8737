"""Jinja2 with limits: what a chat template may do before it is stopped.

A template comes with the model and is not trusted. Jinja2's immutable sandbox keeps it
from reaching Python; nothing there keeps it from running for ever or from filling the memory, and
a thread cannot be killed. So the template is compiled with checks where work is made:

    loops                  every turn looks at the clock (`_TimedLoop`)
    calls, filters, tests  look at the clock; their arguments cannot ask for huge results
    + * % ** ~             are refused when the result would be too large
    output, set blocks     are added up before they are joined
    all values created     are added up too, also those that were freed

Between two checks only native code over values of bounded size runs, so a template stops within
tens of milliseconds of its deadline.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial, wraps
from itertools import chain
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARS = 32 * 2**20
"""In one string a template makes, its output among them; a request body has no more."""
MAX_ITEMS = 250_000
"""In one list it makes, and values seen when a nested one is printed or compared (50 ms)."""
MAX_DEPTH = 1_000
"""Of a nested value."""
MAX_ARGUMENT = 100_000
"""Of numbers given to filters and string methods: widths, counts, precisions."""
MAX_BITS = 4_096
"""In whole numbers."""
MAX_WORK = 10**9
"""Length of a string times that of a string argument: what `strip` may compare."""

MAX_MADE = 2**29
"""Bytes of all texts and lists that one rendering creates, which bounds what it holds: without it, one held
1.8 GB after a second. 64 times the largest body that a server takes by default."""

_DROPPED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters that no chat template uses and whose time or size has no simple bound."""


class OutOfTime(TemplateError):
    """The template passed its deadline."""


class Budget(threading.local):
    """The time and memory that the rendering on this thread may still use.

    The thread's own processor time counts, so no template fails because the machine is busy.
    """

    def __init__(self) -> None:
        self._deadline = 0.0
        self._due = 0.0
        self._left = 0

    def start(self, seconds: float) -> None:
        """Called before each rendering."""
        self._deadline = time.thread_time() + seconds
        self._due = time.monotonic() + seconds
        self._left = MAX_MADE

    def charge(self, value: Any) -> Any:
        """Deduct the size of the new `value`, and return it."""
        if isinstance(value, _SIZED):
            self._left -= sys.getsizeof(value)
            if not isinstance(value, str | bytes):
                self._left -= _SMALL * len(value)
            if self._left < 0:
                _refuse("all that it makes")
        return value

    def tick(self) -> None:
        """Raise `OutOfTime` past the deadline. The wall clock (0.07 µs) says when it can have come,
        the thread's own (1.3 µs here) whether it has."""
        now = time.monotonic()
        if now < self._due:
            return
        left = self._deadline - time.thread_time()
        if left <= 0:
            raise OutOfTime("the chat template ran for too long")
        self._due = now + left


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2 as `transformers` configures it for chat templates, with the limits above.

    Templates of one sandbox may render on several threads; each has its own budget. A rendering
    raises `TemplateError`, or what Python raises for what the template does (`TypeError`, ...).
    """

    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_bounded,  # every value on its way into the output
            optimized=False,  # constant folding would run filters while compiling, with no budget
        )
        self.budget = Budget()
        setattr(self, "concat", self._joined)  # noqa: B010 - a hook that jinja2 types as a method
        for name in _DROPPED:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= {"tojson": _to_json, "indent": _indent}
        tables: tuple[dict[str, Any], ...] = (self.filters, self.tests)
        for table in tables:
            table |= {name: self._guarded(name, call) for name, call in table.items()}
        self.filters |= {
            _TIMED: partial(_TimedLoop, self.budget),
            _JOIN: self._join_values,
            _BOUNDED: _bounded,
            _CHARGED: self.budget.charge,
        }
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _now,
            "namespace": _SafeNamespace,
            "dict": _SafeDict(),
        }

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        _Checks().visit(source)
        return super()._generate(source, name, filename, defer_init)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.tick()
        # `str.format` arrives wrapped by Jinja2's own sandbox.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | dict | int | float):
            _check_arguments(__obj.__name__, owner, args, kwargs)
        return __self.budget.charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.tick()
        _check_operands(operator, left, right)
        return self.budget.charge(super().call_binop(context, operator, left, right))

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test that looks at the clock and at its arguments. `wraps` keeps the marks by
        which Jinja2 knows what to pass first."""
        passes = hasattr(call, "jinja_pass_arg")

        @wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            values = args[1:] if passes else args
            if values:
                _check_arguments(name, values[0], values[1:], kwargs)
            return self.budget.charge(call(*args, **kwargs))

        return guarded

    def _joined(self, parts: Iterable[str]) -> str:
        """Joins the output of a template, macro or block."""
        pieces: list[str] = []
        total = 0
        for part in parts:
            total += len(part)
            if total > MAX_CHARS:
                _refuse("the output")
            pieces.append(part)
        text: str = self.budget.charge("".join(pieces))
        return text

    def _join_values(self, values: list[Any]) -> str:
        """The `~` operator."""
        return self._joined(str(_bounded(value)) for value in values)


_TIMED, _JOIN, _BOUNDED, _CHARGED = "loom turns", "loom join", "loom bounded", "loom made"
"""No template can spell these."""
_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
_SMALL = 32
"""Bytes of a number, say: what `range`, `split` and the like fill a list with."""


class _Checks(NodeTransformer):
    """Puts the checks that no hook of Jinja2 reaches into a parsed template."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _filter(node.iter, _TIMED)
            case nodes.Compare():
                node.expr = _filter(node.expr, _BOUNDED)
                for operand in node.ops:
                    operand.expr = _filter(operand.expr, _BOUNDED)
            case nodes.Concat():
                return _filter(nodes.List(node.nodes, lineno=node.lineno), _JOIN)
            case nodes.Getitem(arg=nodes.Slice()):
                return _filter(node, _CHARGED)
            case nodes.Tuple(ctx="load"):
                return _filter(node, _BOUNDED)
        return node


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _TimedLoop:
    """The items of a loop; checks the deadline before each."""

    __slots__ = ("_budget", "_items")

    def __init__(self, budget: Budget, items: Any) -> None:
        self._budget = budget
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        tick = self._budget.tick
        for item in self._items:
            tick()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # TypeError is what Jinja2 expects of what has no length


class _Generation(Extension):
    """`{% generation %}` marks an assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 - Jinja2's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _SafeNamespace(Namespace):
    """`namespace()` that refuses names which begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} begins with an underscore")


# -- limits of operations -------------------------------------------------------------------


def _refuse(what: str) -> NoReturn:
    raise SecurityError(f"{what} is larger than a chat template may make")


def _check_arguments(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of a filter or method whose result or work could be out of proportion."""
    for argument in chain(args, kwargs.values()):
        _check_argument(name, value, argument)
    if name in ("format", "format_map"):
        _check_format(str(value))
    elif name == "replace" and isinstance(value, str) and len(args) >= 2:
        _check_replace(value, str(args[0]), str(args[1]))
    elif name in _WALKED:
        _check_walk(value, args)
    elif name in _COMPARED or name in _ORDER_TESTS:
        for argument in chain((value,), args):
            _bounded(argument)
    elif name == "sum":
        _check_sum(kwargs.get("start", args[1] if len(args) > 1 else 0))


def _check_argument(name: str, value: Any, argument: Any) -> None:
    if isinstance(argument, int) and abs(argument) > MAX_ARGUMENT and name not in _PLAIN:
        _refuse(f"the argument {name}(... {argument!r:.20} ...)")
    if isinstance(argument, str) and isinstance(value, str) and len(value) * len(argument) > MAX_WORK:
        _refuse(f"the work of {name}()")


def _check_walk(value: Any, args: tuple[Any, ...]) -> None:
    glue = value if isinstance(value, str) else next(iter(args), "")
    items = args[0] if isinstance(value, str) and args else value
    _bounded(items, len(glue) if isinstance(glue, str) else 0)


def _check_replace(value: str, old: str, new: str) -> None:
    if len(value) + value.count(old) * len(new) > MAX_CHARS:
        _refuse("the result of replace()")


def _check_sum(start: object) -> None:
    if not isinstance(start, int | float):
        raise SecurityError("sum() adds numbers only")


_WALKED = frozenset(("join", "tojson", "string", "e", "escape", "forceescape", "replace", "urlencode"))
"""Filters and methods that print nested values."""
_COMPARED = frozenset(("sort", "dictsort", "unique", "groupby", "min", "max", "index", "count", "in"))
"""Filters and methods that compare nested values."""
_ORDER_TESTS = frozenset(
    ("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", ">", "ge", ">=")
)
_PLAIN = _ORDER_TESTS | frozenset(("d", "default", "in", "get", "index", "count", "divisibleby"))
"""May be given any number: it is only compared or passed through."""

_LONG_FIELD = re.compile(r"\d{5}|\*|\{[^{}]*\{")


def _check_format(text: str) -> None:
    """Widths of five digits, or that are themselves arguments."""
    if _LONG_FIELD.search(text):
        _refuse("a width in a format")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_numbers(operator, left, right)
    elif operator == "*":
        _check_repetition(left, right)
        _check_repetition(right, left)
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        if len(left) + len(right) > (MAX_CHARS if isinstance(left, str) else MAX_ITEMS):
            _refuse("a sum")
    elif operator == "%" and isinstance(left, str | bytes):
        _check_format(str(left))
        _bounded(right)


def _check_numbers(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() + right.bit_length()
    if operator == "**":
        bits = left.bit_length() * max(right, 1)
    if operator in ("**", "*") and bits > MAX_BITS:
        _refuse("a number")


def _check_repetition(value: Any, times: Any) -> None:
    if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
        limit = MAX_CHARS if isinstance(value, str | bytes) else MAX_ITEMS
        if len(value) * max(times, 0) > limit:
            _refuse("a repetition")


def nested(value: object) -> Iterator[tuple[int, object]]:
    """A value and all values inside it, with their depth from 1; of dictionaries the keys too."""
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


def _bounded(value: Any, per_item: int = 0) -> Any:
    """`value`, unless it is nested so that printing or comparing it would not end in time: a list
    of itself twice, forty times over, takes no memory until it is printed."""
    if not isinstance(value, _CONTAINERS):
        return value
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
                    _refuse("a value")
                deeper += item
                if isinstance(item, dict):
                    deeper += item.values()
        if seen + len(deeper) > MAX_ITEMS or chars > MAX_CHARS or depth > MAX_DEPTH:
            _refuse("a value")
        level = deeper
    return value


# -- names that chat templates know ----------------------------------------------------------------


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form[:1_000])


class _SafeDict:
    """`dict(...)` and `dict.fromkeys(...)`, and no way from there to the class."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own escapes HTML, which models were not trained on."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja2's filter, its size known before it is made."""
    per_line = len(width) if isinstance(width, str) else width
    if len(s) + (len(s.splitlines()) + 1) * per_line > MAX_CHARS:
        _refuse("the result of indent()")
    return do_indent(s, width, first, blank)
