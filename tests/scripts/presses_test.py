"""Tests tools/columns.py against kvpress, by tests/fixtures/make_press_fixtures.py: presses_test.py KVLAB."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

try:
    import numpy
    import xxhash  # noqa: F401
except ImportError as missing:
    print(f"skipped: {sys.executable} cannot import {missing.name}; KVLAB_HF_PYTHON may name a Python that can")
    sys.exit(0)

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import columns  # noqa: E402

FIXTURE = json.loads((ROOT / "tests/data/policies/presses.json").read_text())
SETTINGS = FIXTURE["settings"]


def one(value):
    return numpy.array([value], dtype=numpy.float32)


def random_tensors(prompt):
    drawn = {name: numpy.array(prompt[name]) / prompt["unit"] for name in ("q", "k", "v", "o_proj")}
    return drawn | {"inv_freq": numpy.array(prompt["inv_freq"])}


def captured_tensors(prompt):
    trace, layer = columns.Trace(ROOT / "traces/samples/tiny-story"), prompt["layer"]
    tensors = {part: trace.part(layer, part) for part in "qkv"} | {"inv_freq": trace.fixed.read("inv_freq")}
    return tensors | {"o_proj": columns.output_projections(trace, ROOT / "engine/models/tiny")(layer)}


class PressesTest(unittest.TestCase):
    """A prompt as a trace of one layer, with its output projection as a checkpoint."""

    name, tensors = "random", staticmethod(random_tensors)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.at, self.prompt = pathlib.Path(folder.name), FIXTURE[self.name]
        tokens = self.prompt["prompt"]
        tensors = {name: values.astype(numpy.float32) for name, values in self.tensors(self.prompt).items()}
        parts = {part: numpy.ascontiguousarray(tensors[part][:, :tokens]) for part in "qkv"}
        heads, _, size = parts["q"].shape
        self.group = heads // len(parts["k"])
        self.write("shard-00000", {f"layers.0.{part}": values for part, values in parts.items()})
        fixed = {"inv_freq": tensors["inv_freq"], "rope_factor": one(1), "softmax_scale": one(size**-0.5)}
        self.write("tokens", fixed)
        manifest = {
            "format": 2,
            "config": {"layers": 1, "query_heads": heads, "kv_heads": len(parts["k"]), "head_size": size},
            "tokens": tokens,
            "segments": [{"start": 0, "tokens": tokens, "kind": "prompt"}],
            "shards": [{"file": "shard-00000.safetensors"}],
        }
        (self.at / "manifest.json").write_text(json.dumps(manifest))
        (self.at / "model").mkdir()
        self.write("model/model", {"model.layers.0.self_attn.o_proj.weight": tensors["o_proj"]})

    def write(self, name, tensors):
        (self.at / f"{name}.safetensors").write_bytes(columns.safetensors_bytes(tensors))

    def column(self, name, *arguments):
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(columns.main([str(self.at), "--column", name, *map(str, arguments)]), 0)
        return columns.Tensors(self.at / f"column-{name}.safetensors").read(f"layers.0.column.{name}")

    def compare(self, ours, name, first=0):
        theirs = numpy.array(self.prompt["columns"][name])
        self.assertEqual(ours.shape, theirs.shape)
        worst = numpy.abs(ours / theirs - 1)[:, first:].max()
        self.assertLess(worst, 1e-5)

    def test_lagkv(self):
        ours = self.column("lagkv", "--lag", SETTINGS["lag"], "--sinks", SETTINGS["sinks"])
        self.assertTrue(numpy.array_equal(ours, numpy.array(self.prompt["columns"]["lagkv"], dtype=numpy.float32)))

    def test_expected_attention(self):
        arguments = ["--future", SETTINGS["future"], "--sinks", SETTINGS["sinks"]]
        # The first tokens: kvpress gives them a number that none exceeds, here the guard holds them.
        self.compare(self.column("expected_attention", *arguments), "expected_attention", SETTINGS["sinks"])

    def test_value_out_norm1(self):
        ours = self.column("value_out_norm1", "--model", self.at / "model")
        self.compare(ours / self.group, "value_out_norm1")  # kvpress: the group's mean, here its sum


class CapturedPressesTest(PressesTest):
    name, tensors = "captured", staticmethod(captured_tensors)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
