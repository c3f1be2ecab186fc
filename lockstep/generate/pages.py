"""Allocates pages of the key-value cache to sequences, and finds full pages by content (the prefix cache)."""

from __future__ import annotations

import itertools
from collections import OrderedDict

ROOT = 0
"""The chain of a sequence without a full page."""

PageContent = tuple[int, tuple[int, ...]]
"""The chain of the pages before a page, and the tokens whose keys it contains."""


class PageAllocator:
    """Allocates pages, counts their references, and looks up full pages by content.

    The key of a full page is the chain of pages before it and its tokens: exact, not a hash. A registered page without
    references counts as free, but keeps its contents until it is evicted, least recently used first. At most
    `most_unused` of these keep their contents, if it is given.
    """

    def __init__(self, num_pages: int, most_unused: int | None = None):
        self.num_pages = num_pages
        self._most_unused = num_pages if most_unused is None else most_unused
        self.ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[PageContent, tuple[int, int]] = {}
        self._content_of: dict[int, PageContent] = {}
        self._chains = itertools.count(ROOT + 1)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._evictable)

    def new_root(self) -> int:
        """A chain that no page precedes, other than ROOT: pages after it are found from it alone."""
        return next(self._chains)

    def allocate(self) -> int:
        """An empty page with one reference. Raises IndexError if none is free: check `num_free` first."""
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
        """(page, chain after it) of a registered page, with one more reference; None if there is none."""
        match = self._page_of.get((chain, tokens))
        if match is not None:
            page = match[0]
            if self.ref_counts[page] == 0:
                del self._evictable[page]
            self.ref_counts[page] += 1
        return match

    def retain(self, page: int) -> None:
        """Adds a reference to a page that is in use."""
        self.ref_counts[page] += 1

    def register(self, page: int, chain: int, tokens: tuple[int, ...]) -> int:
        """Adds a full page to the lookup; returns the chain after it. A second page of equal content is not added."""
        match = self._page_of.get((chain, tokens))
        if match is not None:
            return match[1]
        after = next(self._chains)
        self._page_of[chain, tokens] = (page, after)
        self._content_of[page] = (chain, tokens)
        return after

    def release(self, page: int) -> None:
        """Drops one reference."""
        if self.ref_counts[page] <= 0:
            raise ValueError(f"page {page} has no reference to release")
        self.ref_counts[page] -= 1
        if self.ref_counts[page] == 0:
            if page not in self._content_of:
                self._free.append(page)
                return
            self._evictable[page] = None
            if len(self._evictable) > self._most_unused:
                oldest, _ = self._evictable.popitem(last=False)
                self._unregister(oldest)
                self._free.append(oldest)

    def unregister(self, page: int) -> None:
        """Removes a page that is in use from the lookup, since its contents are not valid."""
        if page in self._content_of:
            self._unregister(page)

    def reset(self) -> None:
        """Frees and unregisters every page: the weights have changed, or a step failed before it filled its pages."""
        self.ref_counts = [0] * self.num_pages
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._evictable.clear()
        self._page_of.clear()
        self._content_of.clear()

    def _unregister(self, page: int) -> None:
        del self._page_of[self._content_of.pop(page)]
