"""Attention kernels on a GPU: random shapes, poisoned caches, padding rows, groups, windows, CUDA graphs."""

import random

import pytest
import torch

from tests import kernel_checks as checks
from tests.kernel_reference import paged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BF16 = torch.bfloat16
HEADS = [(4, 4), (8, 4), (12, 4), (32, 8), (5, 1), (14, 2), (8, 1), (16, 1)]


@pytest.mark.parametrize("head", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("page", [16, 32, 64])
def test_decode_shapes(head: int, page: int) -> None:
    generator = random.Random(head * 100 + page)
    for number in range(2):
        q_heads, kv_heads = generator.choice(HEADS)
        edges = [1, 0, page - 1, page, page + 1, 2 * page, 63, 64, 65, 127, 128, 129]
        lengths = edges + [generator.randint(1, 5000) for _ in range(8)]
        generator.shuffle(lengths)
        checks.check_decode(
            lengths, q_heads, kv_heads, head, page, BF16, "cuda", target=generator.choice([8, 300, 2000]), seed=number
        )


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", [8, 5000])
def test_decode_one_long_row_among_short_ones(dtype: torch.dtype, target: int) -> None:
    checks.check_decode([3, 20000, 1, 700], 8, 2, 64, 16, dtype, "cuda", target=target)


@pytest.mark.parametrize("window", [31, 32, 100, 128])
def test_decode_window(window: int) -> None:
    lengths = [window - 1, window, window + 1, 2 * window, 5 * window + 3, 1]
    checks.check_decode(lengths, 8, 2, 128, 16, BF16, "cuda", window=window, target=40)


def test_decode_soft_cap() -> None:
    checks.check_decode([1000, 50, 17], 8, 4, 256, 16, BF16, "cuda", soft_cap=2.0, target=40)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head", "page"), [(32, 8, 128, 16), (12, 4, 80, 32), (5, 1, 64, 64), (4, 4, 256, 16)]
)
def test_decode_groups(q_heads: int, kv_heads: int, head: int, page: int) -> None:
    groups = [(2, 3), (70, 17), (5, 1), (3, 0)]
    generator = random.Random(head)
    lengths = [pages * page + generator.randint(1, 300) for rows, pages in groups for _ in range(rows)] + [77, 0, 0, 1500]
    for target in (8, 500):
        checks.check_decode(lengths, q_heads, kv_heads, head, page, BF16, "cuda", groups=groups, target=target)


def test_decode_addresses_past_two_gigabytes() -> None:
    """The pool holds 2^32 elements and only its last pages are live."""
    pages = 2**32 // (8 * 16 * 128) - 60
    checks.check_decode([300, 17, 500], 32, 8, 128, 16, BF16, "cuda", groups=None, spare_pages=pages)
    checks.check_prefill([(300, 40), (0, 17)], 32, 8, 128, 16, BF16, "cuda", spare_pages=pages)


@pytest.mark.parametrize("head", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("page", [16, 32, 64])
def test_prefill_shapes(head: int, page: int) -> None:
    generator = random.Random(head * 100 + page + 1)
    for number in range(1):
        q_heads, kv_heads = generator.choice(HEADS)
        rows = [(0, 1), (page, 1), (page - 1, page + 2), (0, generator.randint(1, 600)), (generator.randint(0, 900), 129)]
        rows.append((generator.randint(0, 2000), generator.randint(1, 1500)))
        generator.shuffle(rows)
        checks.check_prefill(rows, q_heads, kv_heads, head, page, BF16, "cuda", seed=number)


@pytest.mark.parametrize("new", [1, 2, 127, 128, 129, 4096])
def test_prefill_chunks(new: int) -> None:
    checks.check_prefill([(0, new), (77, new)], 8, 2, 128, 16, BF16, "cuda")


@pytest.mark.parametrize(
    "rows", [[(2000, 1500), (300, 20), (0, 700)], [(9000, 9000), (40, 1)], [(1024, 64), (31, 64), (640, 33)]]
)
@pytest.mark.parametrize("page", [16, 64])
def test_prefill_of_copied_keys(rows: list[tuple[int, int]], page: int) -> None:
    checks.check_prefill_of_copies(rows, 8, 2, 128, page, BF16, "cuda")


@pytest.mark.parametrize("window", [16, 127, 128, 129, 1000])
def test_prefill_window(window: int) -> None:
    checks.check_prefill([(0, 700), (900, 300), (window, 5)], 8, 2, 128, 16, BF16, "cuda", window)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_prefill_soft_cap(dtype: torch.dtype) -> None:
    checks.check_prefill([(100, 300)], 8, 4, 128, 16, dtype, "cuda", soft_cap=2.0)


def test_prefill_of_many_rows() -> None:
    checks.check_prefill([(row % 50, 1 + row % 7) for row in range(300)], 4, 1, 64, 16, BF16, "cuda")


def test_decode_graph_equals_eager() -> None:
    """One graph per bucket, replayed for other lengths; padding rows change nothing."""
    from gpu_worker.kernels import decode_schedule
    from gpu_worker.kernels.attention_decode import attention_decode

    case = paged([400, 900, 33, 0, 0, 0, 0, 0], 8, 128, 16, BF16, "cuda")
    q = torch.randn((8, 32, 128), device="cuda", dtype=BF16)
    space = decode_schedule.allocate(8, 32, 8, 128, "cuda")
    out = torch.zeros_like(q)

    def step() -> None:
        decode_schedule.schedule_decode(space, case.context_lens, case.row_slots, 16, 32, 8)
        attention_decode(q, case.k_cache, case.v_cache, case.page_table, space, 0.1, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([400, 900, 33], [1, 2, 3], [399, 16, 17]):
        case.context_lens[:3] = torch.tensor(lengths, dtype=torch.int32)
        graph.replay()
        captured = out.clone()
        out.fill_(float("nan"))
        step()
        assert torch.equal(captured[:3], out[:3])
        assert out[3:].isnan().all()


@pytest.mark.parametrize("window", [0, 300])
def test_float8_pages(window: int) -> None:
    checks.check_decode([3, 5000, 1, 700, 0], 32, 8, 128, 16, BF16, "cuda", window=window, target=40, float8=True)
    checks.check_prefill([(0, 700), (900, 300), (40, 5)], 32, 8, 128, 16, BF16, "cuda", window, float8=True)


def test_float8_pages_shared_and_copied() -> None:
    checks.check_decode([700] * 40, 32, 8, 128, 16, BF16, "cuda", groups=[(37, 40)], target=40, float8=True)
    checks.check_prefill_of_copies([(0, 700), (700, 600), (50, 3), (33, 32)], 8, 2, 128, 16, BF16, "cuda", float8=True)
