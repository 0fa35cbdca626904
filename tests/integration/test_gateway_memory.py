"""What ends is freed at once, by its references: between two collections of garbage many thousand requests may end."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.integration.gateway_bench import Bench
from tests.integration.stub_scheduler import Play


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """Nothing is collected; afterwards there is what would have been."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


async def test_no_request_leaves_anything_to_the_collector(bench: Bench, garbage: list[object]) -> None:
    play = Play(bench.ids("one, two, three and four"))
    bench.stub.script = lambda submit, sampling: play
    for fields in ({}, {"n": 3}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"stop": ["three"]}, {"max_tokens": 10**6}):
        await bench.complete(**fields)
        await bench.complete(stream=True, **fields)
        body = {"prompt": "x", "stream": True, "resumable": True, **fields}
        async with bench.client.post("/v1/completions", json=body) as response:
            await response.read()
    await bench.chat()
    await bench.chat(stream=True)
    await bench.post("/v1/responses", {"input": "hi"})
    await bench.post("/v1/responses", {"input": "hi", "stream": True})
    play = Play(bench.ids("x" * 100), delay_s=0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await bench.complete(max_tokens=100)
    await bench.until_idle()
    await asyncio.sleep(0.1)
    gc.collect()
    ours = Counter(type(each).__name__ for each in garbage if type(each).__module__.split(".")[0] in ("gateway", "shared"))
    assert not ours
