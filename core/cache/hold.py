"""The pages of one running request."""

from __future__ import annotations

import msgspec

from core.cache.node import RadixNode


class Hold(msgspec.Struct, eq=False):
    """A request's page-table row, and how much of it is in the tree.

        pages:   0 ........... shared ............ len(pages)
                 | in the tree  |  private to the request   |

    Pages below `shared` are kept alive by the lock on `node`; a page in that range that lost the
    race to an equal one already in the tree is in `duplicates` and stays private.

    Owner: event loop, through `CacheManager`.
    """

    node: RadixNode
    pages: list[int]
    shared: int
    duplicates: list[int] = []
    marks: dict[int, bool] = {}
    """Numbers of tokens behind which the prompt's states are to be saved, ascending, and whether they are
    saved only where a checkpoint is to spare."""
    pending: list[tuple[int, int]] = []
    """Pending checkpoints of an answer under way: the number of tokens, and the checkpoint that is saved
    behind them."""
