"""Compares `python -m kvlab.hf features` with kvpress, whose results tests/fixtures/make_press_fixtures.py recorded."""

import json

import numpy
import pytest
from hf_fixture import ROOT, CommandTest

from kvlab import Trace
from kvlab.hf.features import output_projection, part

safetensors = pytest.importorskip("safetensors.numpy")

FIXTURE = json.loads((ROOT / "tests/data/policies/presses.json").read_text())
SETTINGS = FIXTURE["settings"]


def random_tensors(prompt):
    sampled = {name: numpy.array(prompt[name]) / prompt["unit"] for name in ("q", "k", "v", "o_proj")}
    return sampled | {"inv_freq": numpy.array(prompt["inv_freq"])}


def captured_tensors(prompt):
    trace, layer = Trace(ROOT / "traces/samples/tiny-story"), prompt["layer"]
    tensors = {name: part(trace, layer, name) for name in "qkv"} | {"inv_freq": trace.inv_freq}
    return tensors | {"o_proj": output_projection(trace, ROOT / "engine/models/tiny", layer)}


class PressesTest(CommandTest):
    """Provides a prompt as a trace of one layer, and a checkpoint with the output projection of this layer."""

    name, tensors = "random", staticmethod(random_tensors)

    def setUp(self):
        self.prompt, self.path = FIXTURE[self.name], self.at / self.id()
        tokens = self.prompt["prompt"]
        tensors = {name: values.astype(numpy.float32) for name, values in self.tensors(self.prompt).items()}
        parts = {name: tensors[name][None, :, :tokens] for name in "qkv"}
        self.group = parts["q"].shape[1] // parts["k"].shape[1]
        Trace.from_arrays(**parts, config={"inv_freq": tensors["inv_freq"]}, prompt_tokens=tokens, out=self.path)
        (self.at / "model").mkdir(exist_ok=True)
        weights = {"model.layers.0.self_attn.o_proj.weight": tensors["o_proj"]}
        safetensors.save_file(weights, self.at / "model" / "model.safetensors")

    def feature(self, name, *arguments):
        self.assertEqual(self.run_main("features", self.path, "--feature", name, *arguments), (0, ""))
        trace = Trace(self.path)
        return numpy.stack([trace.feature(name, 0, head) for head in range(trace.kv_heads)])

    def compare(self, ours, name, first=0):
        theirs = numpy.array(self.prompt["features"][name])
        self.assertEqual(ours.shape, theirs.shape)
        worst = numpy.abs(ours / theirs - 1)[:, first:].max()
        self.assertLess(worst, 1e-5)

    def test_lagkv(self):
        ours = self.feature("lagkv", "--lag", SETTINGS["lag"], "--sinks", SETTINGS["sinks"])
        self.assertTrue(numpy.array_equal(ours, numpy.array(self.prompt["features"]["lagkv"], dtype=numpy.float32)))

    def test_expected_attention(self):
        arguments = ["--future", SETTINGS["future"], "--sinks", SETTINGS["sinks"]]
        # The first tokens are not compared, because kvpress gives them the largest score and kvlab protects them.
        self.compare(self.feature("expected_attention", *arguments), "expected_attention", SETTINGS["sinks"])

    def test_value_out_norm1(self):
        ours = self.feature("value_out_norm1", "--model", self.at / "model")
        self.compare(ours / self.group, "value_out_norm1")  # kvpress takes the mean over the group, and kvlab the sum


class CapturedPressesTest(PressesTest):
    name, tensors = "captured", staticmethod(captured_tensors)
