"""Claims of `SECURITY.md` about the sources, and that the tests it names exist."""

from __future__ import annotations

import ast
import re

from tests.rigs import tree
from tests.rigs.tree import ROOMS, files, name

SECURITY = tree.ROOT / "SECURITY.md"


def names_of(path: str) -> set[str]:
    parsed = ast.parse((tree.ROOT / path).read_text())
    return {function.name for function in tree.functions(parsed)}


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SECURITY.read_text())
    assert len(named) > 25
    assert [f"{path}::{test}" for path, test in named if test not in names_of(path)] == []


def test_every_vulnerability_class_names_a_test() -> None:
    """Each row of the table ends with a test's name."""
    table = SECURITY.read_text().partition("| class | advisories |")[2].splitlines()
    rows = [line for line in table[2:] if line.startswith("| ")]
    assert len(rows) > 20
    assert [row[:60] for row in rows if not re.search(r"::test_\w+` \|$", row)] == []


def test_nothing_runs_what_it_reads() -> None:
    """No module or call that executes data from files or sockets."""
    modules = {
        "pickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "yaml",
        "zmq",
        "multiprocessing",
    }
    calls = {"eval", "exec", "compile", "__import__"}
    found = [
        f"{name(path)}: {target}"
        for room in ROOMS
        for path in files(room)
        for target, _ in tree.imports(path)
        if target.split(".")[0] in modules
    ]
    found += [
        f"{name(path)}: {node.func.id}"
        for room in ROOMS
        for path in files(room)
        for node in ast.walk(tree.parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls
    ]
    # Bytes only: between the server and its helper, because `send` and `recv` would pickle, and to routers.
    assert found == ["app/engine/kv_events.py: zmq", "app/helper/wire.py: multiprocessing.connection"]
    assert tree.count(r"_pyobj\(|_serialized\(", *ROOMS) == 0
    assert tree.count(r"onnection\.(?:send|recv)\(", "app/helper") == 0
    assert tree.count(r"torch\.load\(|trust_remote_code=True|shell=True|allow_pickle=True", *ROOMS) == 0


def test_nothing_is_fetched_for_clients() -> None:
    """Other hosts are contacted only to fetch the model at start, and by the nodes of one group."""
    clients = ("urllib.request", "http.client", "requests", "httpx", "huggingface_hub", "ftplib", "smtplib")
    found = {
        f"{name(path)}: {target}"
        for room in ROOMS
        for path in files(room)
        for target, _ in tree.imports(path)
        if target.startswith(clients)
    }
    assert found == {"app/checkpoint/checkpoint.py: huggingface_hub"}
    connects = r"ClientSession\(|create_connection\(|open_connection\("
    found = {place: tree.count(connects, place) for place in ("gpu/nodes", "app/commands")}
    assert found == {"gpu/nodes": 1, "app/commands": 1}  # the command `chat` is a client, no server
    assert tree.count(connects, *ROOMS) == 2
