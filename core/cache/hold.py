"""The pages of one running request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.cache.node import RadixNode


class Hold:
    """A request's page-table row and what of it belongs to the tree.

        pages:   0 ........... shared ............ len(pages)
                 | in the tree  |  private to the request   |

    Pages below `shared` are kept alive by the lock on `node`; a page in that range that lost the
    race to an equal one already in the tree is in `duplicates` and stays private.

    Owner: event loop, through `CacheManager`.
    """

    __slots__ = ("duplicates", "node", "pages", "shared")

    def __init__(self, node: RadixNode, pages: list[int], shared: int) -> None:
        self.node = node
        self.pages = pages
        self.shared = shared
        self.duplicates: list[int] = []
