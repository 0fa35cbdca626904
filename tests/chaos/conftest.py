"""The toy model of the chaos tests: a tokenizer without weights."""

from pathlib import Path

import pytest

from tests import gateway_toys


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gateway_toys.write_model(tmp_path_factory.mktemp("toy"), gateway_toys.byte_level())
