"""Sizes that a GPU step is padded to, so that graphs are few and cuBLAS meets no size for the first time while serving.

cuBLAS loads a kernel at its first use, and loading waits for all that the device still has to do.
"""


def bucket_sizes(max_rows: int) -> list[int]:
    """Rows of the graphs: dense where padding would cost most, at most 64 apart."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, *range(320, max_rows + 64, 64)]
    return sorted({min(size, max_rows) for size in sizes})


def first_sizes(max_rows: int) -> list[int]:
    """The sizes a worker starts with."""
    return sorted({min(size, max_rows) for size in (1, 4, 16, 64, 128, 256, 512, 768, max_rows)})


def padded_rows(rows: int, max_rows: int) -> int:
    """The smallest of first_sizes that holds so many rows."""
    return next(size for size in first_sizes(max_rows) if size >= rows)
