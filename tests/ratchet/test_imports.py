"""Allowed imports between packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs import tree
from tests.rigs.tree import ROOMS, files, limits, module, name


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_imports_only_what_is_allowed(room: str) -> None:
    allowed = {room, *sys.stdlib_module_names, *limits()["imports"][room]}
    forbidden = [
        f"{name(path)}: {target}"
        for path in files(room)
        for target, _ in tree.imports(path)
        if target.split(".")[0] not in allowed and name(path) != limits()["imports"]["composition_root"]
    ]
    assert forbidden == []


def test_core_touches_no_files_sockets_or_clocks() -> None:
    """Only `env.py` reads environment and files, and only `clock.py` the time."""
    outside = {"os", "socket", "time", "asyncio", "subprocess", "pathlib", "logging"}
    found = {
        f"{name(path)}: {target}"
        for path in files("core")
        for target, _ in tree.imports(path)
        if target.split(".")[0] in outside
    }
    assert found == {"core/env.py: os", "core/env.py: pathlib", "core/clock.py: time"}


def test_deferred_imports_are_the_listed_ones() -> None:
    found = sorted(
        f"{name(path)}: {target}"
        for room in ROOMS
        for path in files(room)
        for target, deferred in tree.imports(path)
        if deferred
    )
    assert found == sorted(limits()["imports"]["deferred"])


@pytest.mark.parametrize("room", ROOMS)
def test_subpackages_form_no_cycle(room: str) -> None:
    """Checked between the subpackages of a package, at any depth, and its top-level modules; deferred and
    typing-only imports count."""
    modules = {module(path): path for path in files(room)}
    unit_of = {name: unit(room, name, path) for name, path in modules.items()}
    edges: dict[str, set[str]] = {each: set() for each in unit_of.values()}
    for name_, path in modules.items():
        for target, _ in tree.imports(path):
            other = unit_of.get(target) or unit_of.get(target.rpartition(".")[0])
            if other is not None and other != unit_of[name_]:
                edges[unit_of[name_]].add(other)
    order: list[str] = []
    while left := set(edges) - set(order):
        free = sorted(each for each in left if edges[each] <= set(order))
        assert free, f"a cycle among { {each: sorted(edges[each] & left) for each in sorted(left)} }"
        order += free


def unit(room: str, name: str, path: Path) -> str:
    """The subpackage of a module; the module itself if it is at the top level."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return name if package == room else package


def test_nothing_imports_bench_or_tests() -> None:
    found = [
        f"{name(path)}: {target}"
        for room in ROOMS
        for path in files(room)
        for target, _ in tree.imports(path)
        if target.split(".")[0] in ("bench", "tests")
    ]
    assert found == []


def test_no_file_imports_a_test_or_a_conftest() -> None:
    """Code shared by tests is in `tests/rigs`."""
    found = []
    for path in (*files("tests"), *files("bench")):
        for node in ast.walk(tree.parse(path)):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = "." * node.level + (node.module or "")
                imported = [f"{origin}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in imported:
                parts = target.split(".")
                if parts[0] in ("tests", "") and any(re.match(r"test_|conftest$", part) for part in parts):
                    found.append(f"{name(path)}: {target}")
    assert found == []


def run(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tree.ROOT)


def test_core_runs_without_torch() -> None:
    run(
        "import sys, pkgutil, importlib, core\n"
        "for m in pkgutil.walk_packages(core.__path__, 'core.'): importlib.import_module(m.name)\n"
        "assert not {'torch', 'aiohttp', 'transformers'} & set(sys.modules)"
    )


def test_the_command_line_needs_no_heavy_library() -> None:
    """Checks imports instead of time, which varies by machine."""
    run(
        "import sys, app.cli, app.settings\n"
        "app.settings.make_parser().format_help()\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'tokenizers', 'uvloop', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


def test_http_imports_neither_torch_nor_opentelemetry() -> None:
    run(
        "import sys, app.api.routes, app.engine.submit\n"
        "assert not {'torch', 'opentelemetry'} & set(sys.modules)"
    )


def test_the_helper_process_compiles_grammars_without_torch() -> None:
    """Importing torch takes a second and 200 MB, at each start and after each constraint that is refused."""
    run("import sys, gpu.grammar.trial\nassert not {'torch', 'xgrammar'} & set(sys.modules)")
