"""Jinja2 with limits: what a chat template may do before it is stopped.

A template comes with the model and is not trusted. Jinja2's immutable sandbox keeps it
from reaching Python; nothing there keeps it from running for ever or from filling the memory, and
a thread cannot be killed. So the template is compiled with checks where work is made:

    loops                  every turn looks at the clock (`_TimedLoop`)
    calls, filters, tests  look at the clock; their arguments cannot ask for huge results, and cannot be
                           nested so that they are never printed or compared to the end
    lazy items of filters  each looks at the clock (`Sandbox._timed`)
    + * % ** ~             are refused when the result would be too large
    output, set blocks     are added up before they are joined
    all values created     are added up too, also those that were freed

Between two checks only native code over values of bounded size runs, so a template stops within
tens of milliseconds of its deadline.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import datetime
from functools import partial, wraps
from itertools import chain
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from app.text.operations import (
    ITERATED,
    MAX_CHARS,
    MAX_ITEMS,
    PASSED,
    READ_TESTS,
    bounded,
    check_arguments,
    check_operands,
    listed,
    refuse,
)

MAX_MADE = 2**29
"""Bytes of all texts and lists that one rendering creates, which bounds what it holds: without it, one held
1.8 GB after a second. 64 times the largest body that a server takes by default."""

_DROPPED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters that no chat template uses and whose time or size has no simple bound."""
_DROPPED_METHODS = frozenset(("encode", "expandtabs", "from_bytes", "translate"))
"""Methods that no chat template uses and whose time or size has no simple bound."""


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
                refuse("all that it makes")
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
            finalize=bounded,  # every value on its way into the output
            optimized=False,  # constant folding would run filters while compiling, with no budget
        )
        self.budget = Budget()
        setattr(self, "concat", self._joined)  # noqa: B010 - a hook that jinja2 types as a method
        for name in _DROPPED:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= {"tojson": _to_json, "indent": _indent}
        filters: dict[str, Any] = self.filters
        tests: dict[str, Any] = self.tests
        filters |= {name: self._guarded(name, call, name not in PASSED) for name, call in filters.items()}
        tests |= {name: self._guarded(name, call, name in READ_TESTS) for name, call in tests.items()}
        filters |= {
            _TIMED: partial(_TimedLoop, self.budget),
            _JOIN: self._join_values,
            _BOUNDED: bounded,
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
            if __obj.__name__ == "join":
                args = tuple(map(listed, args))
            check_arguments(__obj.__name__, owner, args, kwargs)
        if not isinstance(__obj, Macro):
            for argument in chain(args, kwargs.values()):
                bounded(argument)
        return __self.budget.charge(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _DROPPED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.tick()
        check_operands(operator, left, right)
        return self.budget.charge(super().call_binop(context, operator, left, right))

    def _guarded(self, name: str, call: Callable[..., Any], reads: bool) -> Callable[..., Any]:
        """A filter or test that looks at the clock and at its arguments; one that `reads` its value prints or
        compares it, or walks through it at once. `wraps` keeps the marks by which Jinja2 knows what to pass
        first."""
        passes = int(hasattr(call, "jinja_pass_arg"))

        @wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            first, value, others = args[:passes], args[passes], args[passes + 1 :]
            if reads and name in ITERATED:
                value = listed(value)
            if name in ITERATED and isinstance(value, _SIZED) and len(value) > MAX_ITEMS:
                refuse(f"what {name} goes through")
            for each in chain((value,) if reads else (), others, kwargs.values()):
                bounded(each)
            check_arguments(name, value, others, kwargs)
            made = call(*first, value, *others, **kwargs)
            return self._timed(made) if isinstance(made, Generator) else self.budget.charge(made)

        return guarded

    def _timed(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items that a filter makes one by one. Items that are lists are new (`batch`, `slice`)."""
        for item in items:
            self.budget.tick()
            yield self.budget.charge(item) if isinstance(item, list) else item

    def _joined(self, parts: Iterable[str]) -> str:
        """Joins the output of a template, macro or block."""
        pieces: list[str] = []
        total = 0
        for part in parts:
            total += len(part)
            if total > MAX_CHARS:
                refuse("the output")
            pieces.append(part)
        text: str = self.budget.charge("".join(pieces))
        return text

    def _join_values(self, values: list[Any]) -> str:
        """The `~` operator."""
        return self._joined(str(bounded(value)) for value in values)


_TIMED, _JOIN, _BOUNDED, _CHARGED = "loom turns", "loom join", "loom bounded", "loom made"
"""Names that no template can spell."""
_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
_SMALL = 32
"""Bytes of an item that `range`, `split` and the like fill a list with, such as a number."""


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
            case nodes.Getitem(arg=key) if not isinstance(key, nodes.Const):
                node.arg = _filter(key, _BOUNDED)  # errors print it
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

    def __repr__(self) -> str:
        return "<Namespace>"  # not its values, which may be nested without bounds


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} begins with an underscore")


# -- names that chat templates know ----------------------------------------------------------------


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))  # bounded, as all arguments


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
    """The filter `tojson`. Jinja2's own escapes HTML, which models were not trained on."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja2's filter, its size known before it is made."""
    per_line = len(width) if isinstance(width, str) else width
    if len(s) + (len(s.splitlines()) + 1) * per_line > MAX_CHARS:
        refuse("the result of indent()")
    return do_indent(s, width, first, blank)
