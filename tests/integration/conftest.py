"""What the tests of a gateway share: a toy model, and a gateway over a stub that serves it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import gateway_toys
from tests.integration.gateway_bench import Bench, running


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateway_toys.write_model(tmp_path_factory.mktemp("toy"), gateway_toys.byte_level())


@pytest.fixture
async def bench(toy_folder: Path) -> AsyncIterator[Bench]:
    async with running(toy_folder) as made:
        yield made
