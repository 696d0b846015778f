"""Tests that the notebooks run from the first cell to the last, and that they are stored without outputs."""

from __future__ import annotations

import json
import pathlib

import pytest
from conftest import ROOT

NEEDS = {
    "compare_my_policy_on_my_model": ("torch", "transformers"),
    "deploy_in_generate": ("torch", "transformers"),
    "pictures_for_a_lecture": (),
}
FOLDER = ROOT / "tools" / "python" / "notebooks"


def test_every_notebook_is_tested() -> None:
    assert sorted(NEEDS) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NEEDS)
def test_outputs_are_stripped(name: str) -> None:
    book = json.loads((FOLDER / f"{name}.ipynb").read_text())
    for cell in book["cells"]:
        assert cell["metadata"] == {} and not cell.get("outputs") and cell.get("execution_count") is None, cell["id"]


@pytest.mark.parametrize("name", NEEDS)
def test_a_notebook_runs(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    papermill = pytest.importorskip("papermill")
    for module in (*NEEDS[name], "pandas", "matplotlib", "ipykernel"):
        pytest.importorskip(module)
    if name == "deploy_in_generate":
        pytest.importorskip("torch", "2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elsewhere = tmp_path / "elsewhere"  # outside the checkout, because the package contains a notebook's files
    elsewhere.mkdir()
    papermill.execute_notebook(
        FOLDER / f"{name}.ipynb", tmp_path / "run.ipynb", cwd=elsewhere, kernel_name="python3", progress_bar=False
    )
