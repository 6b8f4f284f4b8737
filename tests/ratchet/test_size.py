"""Limits on the size of files, functions and classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs import tree
from tests.rigs.tree import ROOMS, files, limits, name

ALL = [path for room in ROOMS for path in files(room)]


def bounds(path: Path) -> dict[str, int]:
    size = limits()["size"]
    room = "kernels" if name(path).startswith("gpu/kernels/") else name(path).split("/")[0]
    return {**size[room], **size.get(name(path), {})}


@pytest.mark.parametrize("path", ALL, ids=name)
def test_sizes(path: Path) -> None:
    limit, parsed = bounds(path), tree.parse(path)
    over = []
    lines = len(path.read_text().splitlines())
    if lines > limit["file"]:
        over.append(f"{lines} lines")
    for function in tree.functions(parsed):
        for what, value in (
            ("function", tree.length(function)),
            ("branches", tree.branches(function)),
            ("parameters", tree.parameters(function)),
        ):
            if value > limit[what] and not (what == "parameters" and _is_decorated(function)):
                over.append(f"{function.name}: {value} {what}")
    for cls in tree.classes(parsed):
        for what, value in (("class", tree.length(cls)), ("attributes", tree.attributes(cls))):
            if value > limit[what]:
                over.append(f"{cls.name}: {value} {what}")
    assert over == []


def _is_decorated(function: tree.Function) -> bool:
    return bool(function.decorator_list)  # a jitted kernel cannot take a record


@pytest.mark.parametrize("path", ALL, ids=name)
def test_everything_public_is_documented(path: Path) -> None:
    """Modules, public classes and public functions; methods need no docstring."""
    import ast

    parsed = tree.parse(path)
    undocumented = [] if ast.get_docstring(parsed) else ["module"]
    for node in parsed.body:
        public = isinstance(node, tree.Function | ast.ClassDef) and not node.name.startswith("_")
        if public and not ast.get_docstring(node):
            undocumented.append(node.name)
    assert undocumented == []


def test_tight_limits_name_files_that_exist() -> None:
    assert [p for p in limits()["size"] if p.endswith(".py") and not (tree.ROOT / p).exists()] == []
