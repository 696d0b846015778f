"""Runs the experiments that need the Python package, up to their pages, on a few tokens of the bundled model."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.skipif(not os.environ.get("KVLAB_COMMAND"), reason="KVLAB_COMMAND is not set")
def test_plans_write_their_page(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "plans.md"
    words = ["--kvlab", os.environ["KVLAB_COMMAND"], "--model", ROOT / "engine/models/tiny", "--quick", "--tokens", 200, "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools/experiments/plans.py", *map(str, words), "--out", page], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in page.read_text().splitlines() if line.split(" | ")[1:2] in (["none"], ["prompt"])]
    assert len(rows) == 9
    for row in rows:
        cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
        assert 0.5 < float(cells[5]) < 2  # the ratio of the measured KL and the predicted one
        assert float(cells[9]) < 1.1  # the plan's KL relative to that of the best single format


@pytest.mark.skipif(not os.environ.get("KVLAB_COMMAND"), reason="KVLAB_COMMAND is not set")
def test_the_cache_of_transformers_loses_what_kvlab_says(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("optimum.quanto")
    page = tmp_path / "engines.md"
    words = ["--kvlab", os.environ["KVLAB_COMMAND"], "--model", ROOT / "engine/models/tiny", "--quick", "--tokens", 160, "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools/experiments/transformers_cache.py", *map(str, words), "--out", page],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| `int")]
    assert [row[0] for row in rows] == ["`int4_g64`", "`int2_g64`"]
    for row in rows:
        assert 0.8 < float(row[4]) < 1.25  # KL in transformers relative to kvlab's
