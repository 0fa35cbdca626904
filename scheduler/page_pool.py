"""Free, cached and held pages of one replica. Page 0 is reserved.

free: no owner, content meaningless   cached: no owner, content indexed, least recently used first   held: refs[page] owners
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from scheduler.prefix_index import UNKNOWN, PrefixIndex


class PagePool:
    __slots__ = ("cached", "free", "index", "num_pages", "refs")

    def __init__(self, num_pages: int, index: PrefixIndex) -> None:
        """num_pages: page 0 included."""
        self.num_pages = num_pages
        self.index = index
        self.refs = [0] * num_pages
        self.free = list(range(num_pages - 1, 0, -1))  # a stack
        self.cached: OrderedDict[int, None] = OrderedDict()

    @property
    def usable(self) -> int:
        return self.num_pages - 1

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def held(self) -> int:
        return self.usable - self.available

    def take(self) -> int:
        """One page for one owner, evicting the least recently used cached page if none is free. available must be > 0."""
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            self.index.forget(page)
        self.refs[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for indexed pages, held or cached."""
        for page in pages:
            if self.refs[page] == 0:
                del self.cached[page]
            self.refs[page] += 1

    def drop(self, pages: list[int]) -> None:
        """One owner less. The tail goes first, so it is evicted first and the shared head of a prompt stays longest."""
        refs, hash_of = self.refs, self.index.hash_of
        for page in reversed(pages):
            refs[page] -= 1
            if refs[page] == 0:
                if page in hash_of:
                    self.cached[page] = None
                else:
                    self.free.append(page)

    def num_unowned(self, pages: list[int]) -> int:
        """How many of these indexed pages are cached: sharing them makes so many pages unavailable."""
        refs = self.refs
        return sum(1 for page in pages if refs[page] == 0)

    def restore(self, inventory: Iterable[tuple[int, bytes]], trusted: Callable[[int, bytes], bool]) -> None:
        """Index the pages a worker still holds. The pool must be unused. What is not believed the worker must forget."""
        self.index.news = {}
        for page, page_hash in inventory:
            if not 0 < page < self.num_pages:
                continue
            new = page not in self.index.hash_of and page_hash not in self.index.page_of
            if new and any(page_hash) and trusted(page, page_hash):
                self.index.restore(page, page_hash)
                self.cached[page] = None
            elif page not in self.index.hash_of:
                self.index.news[page] = UNKNOWN
        self.free = [page for page in range(self.num_pages - 1, 0, -1) if page not in self.cached]
