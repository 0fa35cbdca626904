"""Every public bug report that concerns HTTP or sampling has a test on a scripted stub and one on the real model."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
STUB = (TESTS / "integration", TESTS / "unit" / "gateway")
REAL = (TESTS / "e2e",)
BOTH = ["B04", "B10", "B11", "B13", "B16", "B17", "B19", "B20", "B22", "B23", "B25", "B26", "B29", "B31", "B32", "B34"]
# Spares. On the stub only: what needs a scheduler that misbehaves, or a tokenizer that the real model has not.
SPARES = ["S01", "S04", "S05", "S07", "S10", "S11", "S14", "S16", "S17", "S19", "S26", "S28", "S32", "S37", "S56", "S64"]
SPARES += ["S70", "S71"]
STUB_ONLY = ["S02", "S13", "S20", "S23", "S29", "S40", "S58"]


def cases_of(folders: tuple[Path, ...]) -> dict[str, list[str]]:
    """Case -> the tests that carry its number: test_s10_s11_... counts for both."""
    found: dict[str, list[str]] = {}
    for file in (file for folder in folders for file in sorted(folder.glob("test_*.py"))):
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE):
            numbers = re.match(r"test((?:_[bs]\d\d)+)", name)
            for case in numbers[1].upper().split("_")[1:] if numbers else []:
                found.setdefault(case, []).append(f"{file.name}::{name}")
    return found


@pytest.mark.parametrize("case", BOTH + SPARES)
def test_a_case_is_tested_on_the_stub_and_on_the_real_model(case: str) -> None:
    assert case in cases_of(STUB), "no test on the stub carries its number"
    assert case in cases_of(REAL), "no test on the real model carries its number"


@pytest.mark.parametrize("case", STUB_ONLY)
def test_a_case_is_tested_on_the_stub(case: str) -> None:
    assert case in cases_of(STUB)
