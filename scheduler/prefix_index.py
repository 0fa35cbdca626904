"""Which page of one replica holds which prefix: page hash <-> page, and what the worker has not been told yet."""

from shared.pages import HASH_BYTES

UNKNOWN = bytes(HASH_BYTES)  # hash 0 means nothing: the content of the page is not known any more


class PrefixIndex:
    """A bijection between hashes and pages. Only pages whose content is written, or will be by a plan already built."""

    __slots__ = ("hash_of", "news", "page_of")

    def __init__(self) -> None:
        self.page_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.news: dict[int, bytes] = {}  # page -> its hash now, for the registrations of the next plan

    def __len__(self) -> int:
        return len(self.page_of)

    def add(self, page: int, page_hash: bytes) -> None:
        """Neither side may be known: an identical page keeps its own index entry, a page has one content."""
        assert page_hash not in self.page_of and page not in self.hash_of, f"{page = } is indexed twice"
        self.page_of[page_hash] = page
        self.hash_of[page] = page_hash
        self.news[page] = page_hash

    def restore(self, page: int, page_hash: bytes) -> None:
        """A page the worker itself reported: nothing has to be told."""
        self.page_of[page_hash] = page
        self.hash_of[page] = page_hash

    def forget(self, page: int) -> None:
        """The page gets another content; the worker's inventory must lose it before it is written."""
        del self.page_of[self.hash_of.pop(page)]
        self.news[page] = UNKNOWN

    def take_news(self) -> dict[int, bytes]:
        """Changes since the last plan; at most one per page, the last one."""
        news = self.news
        if news:
            self.news = {}
        return news

    def match(self, hashes: list[bytes], limit: int) -> list[int]:
        """Pages of the longest known prefix, at most limit of them."""
        pages: list[int] = []
        page_of = self.page_of
        for page_hash in hashes[:limit]:
            page = page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages
