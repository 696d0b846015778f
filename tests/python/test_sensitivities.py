"""Tests `python -m kvlab.hf sensitivities`."""

import json
import shutil
import unittest.mock

import numpy
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import safetensors.torch
from hf_fixture import FORCED, TINY, TOKENS, ModelTest, ids_of, kvlab, manifest_of

from kvlab import Trace, _kvlab
from kvlab.hf import sensitivities


def gradient_of(trace, layer):
    """The gradients of a layer from all files of a trace, [samples, heads, tokens, head_size]."""
    parts = []
    for entry in manifest_of(trace)["extras"]["grad"]["files"]:
        file = safetensors.torch.load_file(trace / entry["file"])
        parts.append(file[f"layers.{layer}.grad"].float() * file["grad_scale"])
    return torch.cat(parts, dim=2)


def contents(trace):
    return {path.name: path.read_bytes() for path in sorted(trace.iterdir()) if path.is_file()}


class SensitivitiesTest(ModelTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.long = cls.captured_by_kvlab("long", "--model", cls.tiny32, "--prompt-file", cls.text, *FORCED)
        short = ["--teacher-forced", "--prompt-tokens", 40, "--max-tokens", 70]
        cls.short = cls.captured_by_kvlab("short", "--model", cls.tiny32, "--prompt-file", cls.text, *short)

    def add(self, trace, *arguments):
        return self.run_main("sensitivities", trace, *arguments, "--device", "cpu")

    def copy(self, trace, name):
        shutil.copytree(trace, self.at / name)
        return self.at / name

    def rewritten(self, trace, name, dtype=torch.float32, **metadata):
        """A copy of a trace whose shards have another dtype or other metadata."""
        copy = self.copy(trace, name)
        for path in copy.glob("shard-*.safetensors"):
            with safetensors.safe_open(path, "pt") as file:
                said = file.metadata() | metadata
            tensors = safetensors.torch.load_file(path)
            tensors |= {part: x.to(dtype) for part, x in tensors.items() if part[-2:] in (".q", ".k", ".v")}
            safetensors.torch.save_file(tensors, path, said)
        (copy / "manifest.json").unlink()
        self.assertEqual(kvlab("trace", "seal", copy).returncode, 0)
        return copy

    def added(self, trace, name, *arguments, model=None):
        copy = self.copy(trace, name)
        code, errors = self.add(copy, "--model", model or self.tiny32, *arguments)
        self.assertEqual((code, errors), (0, ""))
        return copy

    def check_refused(self, words, trace, *arguments):
        """Checks the error message, and that the trace has not changed."""
        before = contents(trace)
        self.check_one_line(words, *self.add(trace, *arguments))
        self.assertEqual(contents(trace), before)

    def likelihood(self, ids, tokens, queries, layer, push):
        """Returns, for each sample, the sum of log p(tokens) in float64. `push` is added to the input of the layer's
        o_proj."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.tiny32, attn_implementation="eager").double()
        o_proj = model.model.layers[layer].self_attn.o_proj
        o_proj.register_forward_pre_hook(lambda _, given: (given[0] + push,))
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = (
                    lambda x, norm=module: norm.weight
                    * x
                    * x.square().mean(-1, True).add(norm.variance_epsilon).rsqrt()
                )
        # transformers computes norms and softmax in float32 even if the model is in float64, so both are replaced.
        softmax = unittest.mock.patch.object(torch.nn.functional, "softmax", lambda x, dim, **_: x.softmax(dim))
        with torch.no_grad(), softmax:
            hidden = model.model(input_ids=ids[None]).last_hidden_state[0, queries]
            log_p = model.get_output_embeddings()(hidden).log_softmax(-1)
        return log_p.gather(1, tokens.T).sum(0)

    def test_the_gradient_is_that_of_finite_differences(self):
        sampled_tokens = []
        kept = sensitivities.sensitivities
        self.addCleanup(setattr, sensitivities, "sensitivities", kept)
        sensitivities.sensitivities = lambda *given: sampled_tokens.append((given[3], kept(*given)))
        for queries, first in (("decode", 40), ("all", 0)):
            trace = self.added(self.short, f"differences-{queries}", "--samples", 3, "--queries", queries)
            positions, tokens = sampled_tokens.pop()
            self.assertEqual(manifest_of(trace)["extras"]["grad"]["span"], queries)
            self.assertEqual(positions.tolist(), list(range(first, 70)))
            self.assertEqual(len(tokens.unique(dim=0)), 3)
            ids = torch.tensor(ids_of(trace))
            rng = torch.Generator().manual_seed(5)
            for layer in range(4):
                gradient = gradient_of(trace, layer).double()  # [samples, heads, n, D]
                # The first direction changes all heads at all positions. Each of the others changes one head at one
                # position: one position is in the prompt, and two are decoded tokens.
                for head, position in ((None, None), (1, 3), (2, 55), (3, 69)):
                    direction = torch.zeros(4, 70, 64, dtype=torch.float64)
                    at = direction[head, position] if head is not None else direction
                    at.copy_(torch.randn(at.shape, generator=rng, dtype=torch.float64))
                    push = 1e-4 * direction.transpose(0, 1).reshape(70, 256)
                    up, down = (self.likelihood(ids, tokens, positions, layer, sign * push) for sign in (1, -1))
                    found = (gradient * direction).sum(dim=(1, 2, 3))
                    torch.testing.assert_close(found, (up - down) / 2e-4, rtol=1e-4, atol=1e-5)

    def test_the_files_are_parallel_to_the_shards(self):
        trace = self.added(self.long, "parallel", "--samples", 2, "--seed", 9)
        manifest, before = manifest_of(trace), manifest_of(self.long)
        grad = manifest["extras"].pop("grad")
        self.assertEqual(manifest, before)
        self.assertEqual(grad | {"files": []}, {"draws": 2, "seed": 9, "span": "decode", "files": []})
        self.assertEqual([path.name for path in trace.glob("*.part")], [])
        for index, (entry, shard) in enumerate(zip(grad["files"], manifest["shards"], strict=True)):
            path = trace / f"grad-{index:05}.safetensors"
            right = {"file": path.name, "xxh3": entry["xxh3"]}  # `trace verify` checks the checksum
            self.assertEqual(entry, right | {key: shard[key] for key in ("first", "tokens")})
            file = safetensors.torch.load_file(path)
            self.assertEqual(sorted(file), ["grad_scale"] + [f"layers.{layer}.grad" for layer in range(4)])
            self.assertEqual((file["grad_scale"].dtype, file["grad_scale"].shape), (torch.float32, (1,)))
            for layer in range(4):
                gradient = file[f"layers.{layer}.grad"]
                self.assertEqual((gradient.dtype, gradient.shape), (torch.float32, (2, 4, shard["tokens"], 64)))
                self.assertTrue(bool((gradient != 0).any()))
        # The output of the last layer for a token affects only the prediction at that token.
        touched = gradient_of(trace, 3).abs().sum(dim=(1, 3)) != 0
        self.assertEqual(touched.tolist(), [[position >= 512 for position in range(TOKENS)]] * 2)
        self.check_verifies(trace)
        again = self.added(self.long, "again", "--samples", 2, "--seed", 9)
        self.assertEqual(contents(trace), contents(again))
        other = self.added(self.long, "other", "--samples", 2, "--seed", 8)
        self.assertFalse(torch.equal(gradient_of(trace, 3), gradient_of(other, 3)))

    def test_narrow_dtypes_hold_the_same_gradient(self):
        wide = self.added(self.long, "wide", "--samples", 2)
        for dtype, tolerance in ((torch.float16, 1e-3), (torch.bfloat16, 5e-3)):
            name = str(dtype).removeprefix("torch.")
            config = json.dumps(manifest_of(wide)["config"] | {"dtype": name})
            narrow = self.added(self.rewritten(self.long, f"of-{name}", dtype, config=config), name, "--samples", 2)
            self.check_verifies(narrow)
            scales = set()
            for entry in manifest_of(narrow)["extras"]["grad"]["files"]:
                file = safetensors.torch.load_file(narrow / entry["file"])
                self.assertEqual(file["layers.0.grad"].dtype, dtype)
                scales.add(float(file["grad_scale"]))
            self.assertEqual(scales == {1.0}, dtype == torch.bfloat16)
            for layer in range(4):
                x, y = gradient_of(narrow, layer), gradient_of(wide, layer)
                self.assertLess(float((x - y).norm() / y.norm()), tolerance, (dtype, layer))

    def test_parts_that_bound_memory_do_not_change_the_result(self):
        whole = self.added(self.short, "whole", "--queries", "all")
        logits = sensitivities.LOGITS
        self.addCleanup(setattr, sensitivities, "LOGITS", logits)
        sensitivities.LOGITS = 1 << 13
        parts = self.added(self.short, "parts", "--queries", "all")
        for layer in range(4):
            torch.testing.assert_close(gradient_of(whole, layer), gradient_of(parts, layer), rtol=1e-4, atol=1e-4)

    def test_samples_follow_the_models_distribution(self):
        log_p = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().expand(3, 4)
        uniforms = torch.tensor([[0.0, 0.49, 0.51], [0.79, 0.81, 1.0]], dtype=torch.float64)
        self.assertEqual(sensitivities.sampled_tokens(log_p, uniforms).tolist(), [[0, 0, 2], [2, 3, 3]])

    def test_a_failure_does_not_change_the_trace(self):
        trace = self.copy(self.long, "fails")
        (trace / "grad-00001.safetensors").mkdir()
        self.check_refused("grad-00001.safetensors: exists and is not a regular file", trace, "--model", self.tiny32)

        with unittest.mock.patch.object(sensitivities, "through", side_effect=KeyboardInterrupt):
            self.check_refused("interrupted", trace, "--model", self.tiny32)

    def test_a_gradient_that_is_not_finite_is_refused(self):
        broken = self.at / "broken"
        shutil.copytree(self.tiny32, broken)
        weights = safetensors.torch.load_file(broken / "model.safetensors")
        weights["model.layers.2.mlp.down_proj.weight"][0] = float("nan")
        safetensors.torch.save_file(weights, broken / "model.safetensors", {"format": "pt"})
        trace = self.rewritten(self.short, "of-broken", weights_xxh3=_kvlab.weights_xxh3(str(broken)))
        self.check_refused("not finite", trace, "--model", broken)

    def test_traces_that_do_not_fit_are_refused(self):
        model = ["--model", self.tiny32]
        self.check_one_line("no-such-trace", *self.add(self.at / "no-such-trace", *model))
        self.check_refused("was captured from weights", self.short, "--model", TINY)
        self.check_refused("no-such-model", self.short, "--model", self.at / "no-such-model")
        rng = numpy.random.default_rng(1)
        nameless = self.at / "nameless"
        Trace.from_arrays(*(rng.normal(size=(1, 1, 9, 4)).astype("f4") for _ in "qkv"), prompt_tokens=5, out=nameless)
        self.check_refused("no weights_xxh3", nameless, *model)
        wider = self.at / "wider"
        shutil.copytree(self.tiny32, wider)
        config = json.loads((wider / "config.json").read_text())
        config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
        (wider / "config.json").write_text(json.dumps(config))
        self.check_refused("query_heads is 4", self.short, "--model", wider)
        prompt = [{"start": 0, "tokens": 70, "kind": "prompt"}]
        changes = (
            ("trace format 4", {"format": 4}),
            ("manifest.json", {"segments": None}),
            ("manifest.json: config", {"config": {}}),
            ("another trace", {"weights_xxh3": ""}),
            ("no decode segment", {"segments": prompt, "prompt_tokens": 70}),
            ("tokens.safetensors: is damaged: its XXH3-64", {"tokens_xxh3": "0" * 16}),
            ("69", {"shards": [manifest_of(self.short)["shards"][0] | {"tokens": 69}]}),
        )
        for number, (words, change) in enumerate(changes):
            with self.subTest(words):
                trace = self.copy(self.short, f"changed-{number}")
                (trace / "manifest.json").write_text(json.dumps(manifest_of(trace) | change))
                self.check_refused(words, trace, *model)
        (trace / "manifest.json").write_text("{")
        self.check_refused("manifest.json: is not valid JSON from byte 2 on", trace, *model)
        (trace / "manifest.json").unlink()
        self.check_refused("no manifest.json", trace, *model)

    def test_gradients_are_replaced_only_on_request(self):
        trace = self.added(self.short, "twice", "--samples", 2)
        self.check_refused("--replace", trace, "--model", self.tiny32)
        code, errors = self.add(trace, "--model", self.tiny32, "--replace", "--samples", 3)
        self.assertEqual((code, errors), (0, ""))
        self.assertEqual(gradient_of(trace, 0).shape[0], 3)

    def test_bad_options_are_refused(self):
        for words, *arguments in (
            ("--model", "--samples", 2),
            ("--samples", "--model", self.tiny32, "--samples", 0),
            ("from 1 to 64", "--model", self.tiny32, "--samples", 65),
            ("--seed", "--model", self.tiny32, "--seed", -1),
            ("--queries", "--model", self.tiny32, "--queries", "prompt"),
        ):
            self.check_refused(words, self.short, *arguments)
