"""Saved states of linear attention: which prefixes of the tree have one.

A prefix's keys and values can be read from any token on, but the state of a layer with linear attention only
from where it was saved: a prefix is of use up to a node with a checkpoint.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from core.cache.hold import Hold
from core.cache.node import RadixNode
from core.cache.pages import IntegrityError

GAIN = 128
"""Tokens that a checkpoint has to spare somebody. One takes as much memory as the keys and values of a
thousand tokens or two."""

INTERVAL = 64
"""Minimum of tokens between the checkpoints of an answer: at most this many of a text are computed again with
its next turn. Saving costs the copy of a state, which each of these tokens reads and writes anyway."""

SPARE = 256
"""Multiple of tokens at which a prompt has spare checkpoints: behind its last multiple of 256, of 512, of
1,024 and so on, for prompts that begin alike and diverge where nobody has before, mostly not far from its
end. Evenly spaced by 1,024 they were so many that they evicted each other: of Mooncake's trace half as much
was found."""

TAIL = 8
"""Last tokens of a prompt that are not counted on: a chat template may write them otherwise with the next
turn, as Qwen's do with `<think>`."""

PENDING = 2
"""Checkpoints of an answer that is under way. Where it ends is known once later steps are planned, which may
have passed the last of them."""


class Checkpoints:
    """Checkpoints 1 ... `total`: each is free, belongs to a node, or is pending for a prefix that a running
    request will add to the tree. If none is free, the least recently used one of a node is taken; the node
    keeps its pages.

    A checkpoint can be read by the steps after the one that saves it. Until then it is `fresh`, and no
    request starts from it. Owner: event loop, through `CacheManager`.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._made: dict[RadixNode, int] = {}
        """The step that each node's checkpoint was made for."""
        self._order: OrderedDict[RadixNode, None] = OrderedDict()
        """Nodes with a checkpoint, the least recently used first."""
        self._spare: OrderedDict[RadixNode, None] = OrderedDict()
        """Nodes whose checkpoints are taken before all others."""
        self._step = 0

    def next_step(self) -> None:
        """Begin the planning of another step."""
        self._step += 1

    def usable(self, node: RadixNode) -> RadixNode:
        """The nearest node, at or above `node`, that a request can start from; the top has the state before
        the first token."""
        while node.parent is not None and not (node.checkpoint and self._made[node] < self._step):
            node = node.parent
        return node

    def fresh(self, node: RadixNode) -> RadixNode | None:
        """The nearest node with a checkpoint, `node` or an ancestor, if the step being planned saves it."""
        while node.parent is not None and not node.checkpoint:
            node = node.parent
        return node if node.checkpoint and self._made[node] == self._step else None

    def touch(self, node: RadixNode) -> None:
        """Mark the node's checkpoint, if it has one, as just used."""
        if node.checkpoint:
            self._spare.pop(node, None)
            self._order[node] = None
            self._order.move_to_end(node)

    def add(self, node: RadixNode, spare: bool) -> int:
        """A checkpoint for `node`, whose state the step being planned has to save; 0: it has one, or there
        is none. `spare`: it gives way first."""
        if node.checkpoint or not (number := self._take()):
            self.touch(node)
            return 0
        self._attach(node, number, self._step)
        if spare:
            self._demote(node)
        else:
            self._supersede(node)
        return number

    def _supersede(self, node: RadixNode) -> None:
        """Checkpoints above `node` are taken first, up to where another text branches off: a prompt that
        shares as much continues from `node`."""
        above = node.parent
        while above is not None and len(above.children) == 1:
            if above.checkpoint:
                self._demote(above)
            above = above.parent

    def _demote(self, node: RadixNode) -> None:
        if self._order.pop(node, self) is None:
            self._spare[node] = None

    def pend(self, hold: Hold, tokens: int) -> int:
        """A checkpoint for the state behind `tokens` tokens that are not in the tree yet; 0: there is
        none."""
        pending = hold.pending
        if len(pending) == PENDING or (pending and not self._free):
            number = pending.pop(0)[1]
        elif not (number := self._take()):
            return 0
        pending.append((tokens, number))
        return number

    def settle(self, hold: Hold, node: RadixNode | None) -> None:
        """End the pending checkpoints of `hold`: the last one goes to `node` if there is one, the others are
        free."""
        if node is not None and not node.checkpoint:
            # A step that was planned before saves it: nobody has to wait for that.
            self._attach(node, hold.pending.pop()[1], self._step - 1)
            self._supersede(node)
        self._free += [number for _, number in hold.pending]
        hold.pending = []

    def drop(self, node: RadixNode) -> None:
        """Free the node's checkpoint, if it has one."""
        if node.checkpoint:
            del self._made[node]
            self._order.pop(node, None)
            self._spare.pop(node, None)
            self._free.append(node.checkpoint)
            node.checkpoint = 0

    def _attach(self, node: RadixNode, number: int, step: int) -> None:
        node.checkpoint = number
        self._made[node] = step
        self.touch(node)

    def _take(self) -> int:
        if not self._free and self._made:
            self.drop(next(iter(self._spare or self._order)))
        return self._free.pop() if self._free else 0

    def check(self, nodes: Iterable[RadixNode], holds: Iterable[Hold]) -> None:
        """Raise `IntegrityError` unless each number has one owner, among `nodes`, all of the tree, and
        `holds`."""
        owners = {node for node in nodes if node.checkpoint}
        if not owners == self._made.keys() == self._order.keys() | self._spare.keys():
            raise IntegrityError(f"{len(owners)} nodes have checkpoints, {len(self._made)} are known")
        numbers = Counter(self._free)
        numbers.update(node.checkpoint for node in owners)
        numbers.update(number for hold in holds for _, number in hold.pending)
        if numbers != Counter(range(1, self.total + 1)):
            raise IntegrityError(f"checkpoints are lost or have two owners: {sorted(numbers.elements())}")
