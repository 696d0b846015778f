"""Tests that progress bars are shown only on a terminal and only if tqdm is installed."""

from __future__ import annotations

import importlib.util
import io
import sys
import time

import pytest

from kvlab._progress import shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work() -> None:
    with shown(True, "replay") as report:
        for fraction in (0.2, 0.5):
            time.sleep(0.3)
            if report is not None:
                report(fraction)


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    work()
    assert "replay:  50%" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_short_work_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with shown(True, "replay") as report:
        if report is not None:
            report(1.0)
    assert sys.stderr.getvalue().strip() == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize("without", ["terminal", "tqdm"])
def test_other_outputs_show_no_bar(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO() if without == "terminal" else Terminal())
    if without == "tqdm":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tqdm" else find(name))
    work()
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_requested_tokens() -> None:
    def report(fraction: float) -> None:
        pass

    with shown(report, "replay") as mine:
        assert mine is report
    for nothing in (False, None):
        with shown(nothing, "replay") as mine:
            assert mine is None
