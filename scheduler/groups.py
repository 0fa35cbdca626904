"""Order of decode rows: rows that share leading pages stand together, so attention reads the shared pages once."""

from array import array
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.sequence import Sequence

MIN_SHARED_PAGES = 8  # sharing less is not worth a group


def num_shared(first: list[int], other: list[int], limit: int) -> int:
    """Leading pages both tables share, at most limit.

    Two bound sequences with the same page at one index have the same pages before it: while a page is held its hash
    names no other page, so both walked the same chain. That is why bisection works.
    """
    limit = min(limit, len(first), len(other))
    if limit == 0 or first[limit - 1] == other[limit - 1]:
        return limit
    low, high = 0, limit - 1  # low pages are shared, page number high is not
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def group_page(seq: "Sequence") -> int:
    """Sequences with the same one share at least MIN_SHARED_PAGES pages; 0: it has too few pages to share."""
    pages = seq.pages
    return pages[MIN_SHARED_PAGES - 1] if len(pages) >= MIN_SHARED_PAGES else 0


def arrange(decoding: Collection["Sequence"]) -> tuple[list["Sequence"], bytes]:
    """Rows in plan order, and the group_counts column."""
    keys = [seq.group_page for seq in decoding]
    shared_keys = {page for page, count in Counter(keys).items() if count > 1 and page}
    if not shared_keys:
        return list(decoding), b""
    groups: dict[int, list[Sequence]] = {page: [] for page in shared_keys}
    rest: list[Sequence] = []
    for seq, key in zip(decoding, keys, strict=True):
        groups.get(key, rest).append(seq)
    rows: list[Sequence] = []
    counts = array("i")
    for members in groups.values():
        first = members[0].pages
        shared = len(first)
        for seq in members:
            pages = seq.pages
            if len(pages) < shared or pages[shared - 1] != first[shared - 1]:
                shared = num_shared(first, pages, shared)
        rows.extend(members)
        counts.extend((len(members), shared))
    rows.extend(rest)
    return rows, counts.tobytes()
