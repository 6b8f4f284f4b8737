"""Integrity check of the KV cache: walks everything and trusts no counter."""

from __future__ import annotations

from collections import Counter

import numpy as np

from core.cache.hold import Hold
from core.cache.key import WIDTH
from core.cache.node import Edge, RadixNode
from core.cache.pages import IntegrityError, PageAllocator
from core.cache.pins import Pins
from core.cache.radix import RadixTree


def check(tree: RadixTree, pages: PageAllocator, pins: Pins, holds: list[Hold], page_size: int) -> None:
    """Raise `IntegrityError` at the first thing that is wrong. `holds`: all that are alive."""
    pages.check()
    nodes = list(tree.walk())
    pins.check(nodes)
    for node in nodes:
        _check_node(tree, node, page_size * WIDTH)
    _check_holds(tree, holds)
    _check_locks(tree, nodes, holds)
    _check_counters(tree, nodes)
    tree.check_queue()
    _check_pages(nodes, pages, holds)


def _name(node: RadixNode) -> str:
    return f"node with pages {node.pages.tolist()}" if len(node.pages) else f"root {node.edge!r}"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)


def _check_node(tree: RadixTree, node: RadixNode, step: int) -> None:
    """Check one node and its edges. A node is described only if it is wrong: describing all of 12,000 took
    0.1 s of an idle loop."""
    wrong = _root_fault(node) if node.parent is tree.top else _fault(node, step)
    if wrong:
        raise IntegrityError(f"{_name(node)}: {wrong}")
    for edge, child in node.children.items():
        if wrong := _child_fault(node, edge, child):
            raise IntegrityError(f"{_name(child)}: {wrong}")


def _root_fault(node: RadixNode) -> str:
    if node.key or len(node.pages):
        return "a root has no key and no pages"
    return "" if node.children or node.locks else "empty and not held"


def _fault(node: RadixNode, step: int) -> str:
    if not len(node.pages):
        return "no pages"
    if len(node.key) != len(node.pages) * step:
        return "key is not aligned to its pages"
    return "" if node.edge == node.key[:step] else "filed under another page than its first"


def _child_fault(node: RadixNode, edge: Edge, child: RadixNode) -> str:
    if edge != child.edge:
        return "its parent files it under another key"
    if child.parent is not node:
        return "its parent is another node"
    return "more important than its parent" if child.priority > node.priority else ""


def _check_holds(tree: RadixTree, holds: list[Hold]) -> None:
    for hold in holds:
        _require(hold.shared >= 0, "a released hold is still listed")
        _require(hold.shared <= len(hold.pages), f"hold shares {hold.shared} of {len(hold.pages)} pages")
        canonical = tree.pages(hold.node).tolist()
        _require(
            len(canonical) == hold.shared,
            f"hold shares {hold.shared} pages, its node ends after {len(canonical)}",
        )
        own = [mine for mine, theirs in zip(hold.pages, canonical, strict=False) if mine != theirs]
        _require(own == hold.duplicates, f"hold has duplicates {hold.duplicates}, should be {own}")


def _check_locks(tree: RadixTree, nodes: list[RadixNode], holds: list[Hold]) -> None:
    present = {id(node) for node in nodes} | {id(tree.top)}
    due: Counter[int] = Counter()
    for hold in holds:
        for node in hold.node.path():
            _require(id(node) in present, f"{_name(node)}: held but not in the tree")
            due[id(node)] += 1
    for node in [*nodes, tree.top]:
        held = due[id(node)]
        if node.locks != held:
            raise IntegrityError(f"{_name(node)}: {node.locks} locks for {held} holds at or below it")


def _check_counters(tree: RadixTree, nodes: list[RadixNode]) -> None:
    evictable = sum(len(node.pages) for node in nodes if not node.locks)
    protected = sum(len(node.pages) for node in nodes if node.locks)
    with_pages = sum(len(node.pages) > 0 for node in nodes)
    counted = (tree.evictable, tree.protected, tree.nodes)
    _require(
        counted == (evictable, protected, with_pages),
        f"(evictable, protected, nodes) counted {counted}, are {(evictable, protected, with_pages)}",
    )


def _check_pages(nodes: list[RadixNode], pages: PageAllocator, holds: list[Hold]) -> None:
    """Check that every usable page is free, in the tree, or private to one hold, exactly once, and page 0
    never."""
    parts = [pages.snapshot(), *(node.pages for node in nodes)]
    parts += [np.array(hold.pages[hold.shared :] + hold.duplicates, np.int32) for hold in holds]
    seen = np.concatenate(parts)
    wrong = seen[(seen < 1) | (seen > pages.total)]
    _require(not wrong.size, f"pages {wrong.tolist()} are outside 1 to {pages.total}")
    times = np.bincount(seen, minlength=pages.total + 1)
    times[0] = 1
    lost, twice = np.flatnonzero(times == 0), np.flatnonzero(times > 1)
    _require(not lost.size, f"pages {lost.tolist()} are lost: not free, not cached, not held")
    _require(not twice.size, f"pages {twice.tolist()} have two owners")
