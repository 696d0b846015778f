"""Tests that the Python code in the docs runs unchanged, from the root of the checkout."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

PAGES = ["README.md", "docs/guides/python.md", "docs/guides/deploy-in-transformers.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page(page: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("pandas", "pyarrow"):
        pytest.importorskip(needed)
    pytest.importorskip("matplotlib").use("agg")
    if "transformers" in page:
        pytest.importorskip("transformers")
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    monkeypatch.chdir(tmp_path)  # type: ignore[arg-type]
    for name in ("traces", "policies", "engine", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)  # type: ignore[operator]
    script = tmp_path / "example.py"  # type: ignore[operator]
    script.write_text("\n".join(blocks))
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(script.read_text(), str(script), "exec"), names)
