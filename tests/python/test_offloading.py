"""Tests the offloading experiment: its page from a CSV, and its peers on the CPU with tiny models."""

import argparse
import csv
import json
import pathlib
import subprocess
import sys

import pytest

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "tools/experiments"
sys.path.insert(0, str(EXPERIMENTS))
import offloading  # noqa: E402

SHAPE = offloading.Shape.from_config(offloading.MODEL)
LINK, MEMORY = 50e9, 4e12


def step_at(share: float, where: str, batch: int, live: float, shape: offloading.Shape = SHAPE) -> float:
    """Seconds of a step that reaches `share` of its limit."""
    cache = batch * live * shape.token
    memory = (shape.layers + shape.head + cache) / MEMORY
    link = {"gpu": 0.0, "weights": shape.layers / LINK, "cache": cache / LINK}[where]
    return max(memory, link) / share


@pytest.fixture
def measured(tmp_path: pathlib.Path) -> pathlib.Path:
    """A CSV in which each system reaches a known share of its limit."""
    path = tmp_path / "offloading.csv"
    path.write_text(",".join(offloading.COLUMNS) + "\n")
    offloading.append_row(path, "limits", "link_to_gpu_bytes_per_second", LINK)
    offloading.append_row(path, "limits", "memory_copy_bytes_per_second", MEMORY / 2)
    offloading.append_row(path, "limits", "memory_read_bytes_per_second", MEMORY)
    live = 512 + 1024 / 2
    cells = [
        ("kvlab full", "gpu", 2, step_at(0.9, "gpu", 2, live)),
        ("kvlab h2o", "gpu", 8, step_at(0.8, "gpu", 8, 307)),
        ("flexgen", "gpu", 1, step_at(0.1, "gpu", 1, live, offloading.OPT_6_7B)),
        ("deepspeed", "weights", 16, step_at(0.5, "weights", 16, live)),
        ("transformers", "cache", 4, step_at(0.25, "cache", 4, live)),
    ]
    for system, where, batch, step in cells:
        cell = {"where": where, "batch": batch, "prompt": 512, "new": 1024}
        for repeat, factor in enumerate((1.1, 1, 0.9)):
            offloading.append_row(path, system, "step_seconds", step * factor, repeat=repeat, **cell)
        if system.startswith("kvlab"):
            offloading.append_row(path, system, "prompt_seconds", 0.03, prompt=512, new=1024)
        else:
            offloading.append_row(path, system, "prefill_seconds", 2, repeat=0, **cell)
    offloading.append_row(path, "kvlab h2o", "budget_tokens", 307, new=1024)
    offloading.append_row(path, "accelerate", "failed", note="ModuleNotFoundError: No module named 'accelerate'")
    return path


def test_shape_of_llama_2_7b() -> None:
    assert SHAPE.layers + SHAPE.head == 2 * (6738415616 - 32000 * 4096 - 65 * 4096)  # parameters without embeddings and norms
    assert SHAPE.token == 524288


def test_shares_and_factors(measured: pathlib.Path) -> None:
    results = offloading.Results(measured, SHAPE)
    assert (results.rates.link, results.rates.memory) == (LINK, MEMORY)
    wanted = {"kvlab full": (0.9, "GPU memory"), "kvlab h2o": (0.8, "GPU memory"), "flexgen": (0.1, "GPU memory"),
              "deepspeed": (0.5, "link"), "transformers": (0.25, "link")}  # fmt: skip
    for system, (share, what) in wanted.items():
        limit, reached, limited_by = results.limit(results.cells[system, 1024])
        assert reached == pytest.approx(share)
        assert limited_by == what
        assert limit * reached == pytest.approx(results.cells[system, 1024].decoded_per_second)
    for system in ("flexgen", "deepspeed", "transformers", "kvlab full"):
        ratio, policy, placement, engine = results.split(results.cells[system, 1024])
        assert ratio == pytest.approx(policy * placement * engine)
        assert engine == pytest.approx(0.8 / wanted[system][0])
    assert results.split(results.cells["kvlab full", 1024])[2] == pytest.approx(1)


def test_rows_of_kvlab(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = argparse.Namespace(out=tmp_path / "page.md", seconds=60, repeats=1)
    measurement = offloading.Measurement(arguments)
    found = {
        "decode": {"read_bytes_per_second": MEMORY},
        "evict": {
            "largest_full": {"batch": 2, "decode_seconds": 64.0},
            "configurations": [{"budget_tokens": 108, "largest_evicting": {"batch": 8, "decode_seconds": 32.0}}],
        },
    }
    monkeypatch.setattr(measurement, "bench", lambda what, *options: found[what])
    measurement.decoding()
    with open(measurement.csv, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["new"] == "32"]
    assert [(row["system"], row["metric"], float(row["value"]), row["batch"]) for row in rows] == [
        ("kvlab full", "step_seconds", 2, "2"),
        ("kvlab h2o", "step_seconds", 1, "8"),
        ("kvlab h2o", "budget_tokens", 108, ""),
    ]


def test_page_from_csv(measured: pathlib.Path, tmp_path: pathlib.Path) -> None:
    page = tmp_path / "offloading.md"
    command = [sys.executable, EXPERIMENTS / "offloading.py", "--page-only", "--out", page]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "| 1024 | kvlab, `h2o` at 20% | GPU | 8 | 0.24 |" in text
    assert "Accelerate, 32, 512, 1024 new tokens: ModuleNotFoundError: No module named 'accelerate'." in text
    assert "The lowest share is 80%" in " ".join(text.split()) and "not reached" not in text
    assert all(len(line) <= 120 or line.startswith("|") for line in text.splitlines())


def test_share_above_limit_is_refused(measured: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cell = {"where": "gpu", "batch": 1, "prompt": 512, "new": 32}
    offloading.append_row(measured, "accelerate", "step_seconds", 1e-4, repeat=0, **cell)
    offloading.append_row(measured, "accelerate", "prefill_seconds", 1, repeat=0, **cell)
    command = [sys.executable, EXPERIMENTS / "offloading.py", "--page-only", "--out", tmp_path / "offloading.md"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("offloading.py: accelerate, 32 new tokens") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("system, where", [("transformers", "cache"), ("accelerate", "gpu"), ("accelerate", "weights"), ("deepspeed", "weights")])
def test_peer_appends_its_measurements(tmp_path: pathlib.Path, system: str, where: str) -> None:
    torch = pytest.importorskip("torch")
    for package in ("transformers", system):
        pytest.importorskip(package)
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "vocab_size": 256}  # fmt: skip
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(json.loads(offloading.MODEL.read_text()) | tiny))
    path = tmp_path / "out.csv"
    path.write_text(",".join(offloading.COLUMNS) + "\n")
    cells = json.dumps([[6, 4, where], [12, 4, where]])
    command = [sys.executable, EXPERIMENTS / "offloading_peer.py", system, "--csv", path, "--model", config, "--cells", cells, "--prompt", 16, "--repeats", 2]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode and where == "cache" and not torch.cuda.is_available():
        pytest.skip("transformers' offloaded cache needs a GPU")
    assert done.returncode == 0, done.stderr[-2000:]
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for metric in ("prefill_seconds", "step_seconds"):
        own = [row for row in rows if row["metric"] == metric]
        assert [(row["batch"], row["new"], row["repeat"]) for row in own] == [("4", new, repeat) for repeat in "01" for new in ("6", "12")]
        assert all(float(row["value"]) > 0 for row in own)
    assert [row["note"].split()[0] for row in rows if row["metric"] == "version"] == [system]
