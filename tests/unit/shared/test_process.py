"""Cores that a container's CPU limit leaves, in both versions of control groups."""

import os
from pathlib import Path

import pytest

from shared.process import usable_cores


@pytest.mark.parametrize(("limit", "cores"), [("max", 64), ("6400000", 64), ("400000", 4), ("250000", 2), ("50000", 1)])
def test_a_limit_of_version_2(limit: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu.max").write_text(f"{limit} 100000\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("limit", "cores"), [("-1", 64), ("400000", 4), ("50000", 1)])
def test_a_limit_of_version_1(limit: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{limit}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_without_control_groups_all_cores_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
