"""The source tree as syntax trees, for `tests/ratchet`."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core", "app", "gpu")
Function = ast.FunctionDef | ast.AsyncFunctionDef
FORKS = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.match_case,
)


@cache
def limits() -> dict[str, Any]:
    return tomllib.loads((ROOT / "tests/ratchet/limits.toml").read_text())


@cache
def files(room: str) -> tuple[Path, ...]:
    """Python files of a package, without those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{room}/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return tuple(ROOT / name for name in sorted(listed) if (ROOT / name).exists())


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module(path: Path) -> str:
    dotted = name(path).removesuffix(".py").replace("/", ".")
    return dotted.removesuffix(".__init__")


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node


def length(node: Function | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def branches(function: Function) -> int:
    """Cyclomatic complexity; nested functions are counted separately."""
    count = 1
    stack: list[ast.AST] = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        if isinstance(node, Function):
            continue
        if isinstance(node, FORKS):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        stack.extend(ast.iter_child_nodes(node))
    return count


def parameters(function: Function) -> int:
    args = function.args
    listed = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return sum(arg.arg not in ("self", "cls") for arg in listed)


def attributes(cls: ast.ClassDef) -> int:
    """Names assigned on `self` anywhere in the class."""
    found = {
        target.attr
        for node in ast.walk(cls)
        for target in _targets(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
    return len(found)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        flat: list[ast.expr] = []
        for target in node.targets:
            flat += target.elts if isinstance(target, ast.Tuple) else [target]
        return flat
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """(module, deferred) for every import of a file, including typing-only ones."""
    tree = parse(path)
    inside = {
        id(child) for function in functions(tree) for child in ast.walk(function) if child is not function
    }
    found = []
    for node in ast.walk(tree):
        deferred = id(node) in inside
        if isinstance(node, ast.Import):
            found += [(alias.name, deferred) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, deferred))
    return tuple(found)


def count(pattern: str, *rooms: str) -> int:
    """Number of source lines of the packages that match a regular expression."""
    found = re.compile(pattern)
    return sum(
        bool(found.search(line))
        for room in rooms
        for path in files(room)
        for line in path.read_text().splitlines()
    )
