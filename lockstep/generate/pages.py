"""Which sequence uses which page of the key-value cache."""

from __future__ import annotations

import itertools
from collections import OrderedDict

ROOT = 0
"""The chain before a sequence's first page."""

PageContent = tuple[int, tuple[int, ...]]
"""The chain that a page continues, and the tokens whose keys it contains."""


class PageAllocator:
    """Allocates pages, counts their references, and finds full pages again by content.

    A full page is identified by the chain of pages before it and its own tokens, so equal contents are found exactly.
    A known page without references keeps its contents until its space is needed, least recently used first; it counts
    as free.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[PageContent, tuple[int, int]] = {}
        self._content_of: dict[int, PageContent] = {}
        self._chains = itertools.count(ROOT + 1)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._evictable)

    def allocate(self) -> int:
        """A page with one reference, to be filled. Raises IndexError if none is free: check `num_free` first."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._evictable.popitem(last=False) if self._evictable else (-1, None)
            if page < 0:
                raise IndexError("no free page")
            self._unregister(page)
        self.ref_counts[page] = 1
        return page

    def share(self, chain: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """(page, chain after it) of a known full page, with one more reference; None if it is not known."""
        found = self._page_of.get((chain, tokens))
        if found is not None:
            page = found[0]
            if self.ref_counts[page] == 0:
                del self._evictable[page]
            self.ref_counts[page] += 1
        return found

    def register(self, page: int, chain: int, tokens: tuple[int, ...]) -> int:
        """Makes a full page findable; returns the chain after it. A second page of equal content stays unknown."""
        found = self._page_of.get((chain, tokens))
        if found is not None:
            return found[1]
        after = next(self._chains)
        self._page_of[chain, tokens] = (page, after)
        self._content_of[page] = (chain, tokens)
        return after

    def release(self, page: int) -> None:
        """Drops one reference."""
        if self.ref_counts[page] <= 0:
            raise ValueError(f"page {page} is released more often than it was held")
        self.ref_counts[page] -= 1
        if self.ref_counts[page] == 0:
            if page in self._content_of:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def unregister(self, page: int) -> None:
        """Makes a page that is in use impossible to find again, since its contents are of no use."""
        if page in self._content_of:
            self._unregister(page)

    def reset(self) -> None:
        """Frees and forgets every page: the weights have changed, or a step failed before it filled its pages."""
        self.ref_counts = [0] * self.num_pages
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._evictable.clear()
        self._page_of.clear()
        self._content_of.clear()

    def _unregister(self, page: int) -> None:
        del self._page_of[self._content_of.pop(page)]
