"""Compares `python -m kvlab.hf features` with a second implementation of the formulas, which goes token by token."""

import math
import shutil

import numpy
from hf_fixture import ROOT, CommandTest, kvlab

from kvlab import Trace
from kvlab.hf.features import group, part
from kvlab._trace import mapped_tensors

PROMPT, LAYER, HEAD = 573, 2, 1  # tokens in the sample trace's prompt; the layer and the KV head that are checked


def dot(a, b):
    return math.fsum(float(x) * float(y) for x, y in zip(a, b))


def unit(x):
    length = math.sqrt(dot(x, x))
    return [float(v) / length for v in x]


class FeaturesTest(CommandTest):
    def setUp(self):
        self.path = self.at / self.id()
        shutil.copytree(ROOT / "traces/samples/tiny-story", self.path)

    def add(self, name, *arguments):
        self.assertEqual(self.run_main("features", self.path, "--feature", name, *arguments), (0, ""))
        trace = Trace(self.path)
        return trace, trace.feature(name, LAYER, HEAD)

    def check_refused(self, words, *arguments):
        before = {path.name: path.read_bytes() for path in self.path.iterdir()}
        self.check_one_line(words, *self.run_main("features", *arguments))
        self.assertEqual({path.name: path.read_bytes() for path in self.path.iterdir()}, before)

    def test_lagkv(self):
        lag, sinks = 100, 4
        trace, feature = self.add("lagkv", "--lag", lag)
        k, v = (part(trace, LAYER, name)[HEAD].astype(float) for name in "kv")
        for f, frequency in enumerate(trace.inv_freq.astype(float)):  # rotates the dimensions f and f + half
            half = len(trace.inv_freq)
            turned = (k[:, f] + 1j * k[:, f + half]) * numpy.exp(1j * frequency * numpy.arange(trace.tokens))
            k[:, f], k[:, f + half] = turned.real, turned.imag
        partitions = (PROMPT - sinks) // lag  # the prompt's tokens are one append
        for p in range(partitions - 1):
            first, end = sinks + p * lag, sinks + (p + 1) * lag
            sums = numpy.zeros(lag)
            for states in (k, v):
                low = [min(float(states[t][d]) for t in range(end, end + lag)) for d in range(trace.head_size)]
                high = [max(float(states[t][d]) for t in range(end, end + lag)) for d in range(trace.head_size)]
                spreads = []
                for t in range(first, first + lag):
                    place = [(float(states[t][d]) - low[d]) / (high[d] - low[d]) for d in range(trace.head_size)]
                    mean = math.fsum(place) / trace.head_size
                    spreads.append(math.sqrt(math.fsum((x - mean) ** 2 for x in place) / (trace.head_size - 1)))
                max_spread = max(spreads)
                total = math.fsum(math.exp(s - max_spread) for s in spreads)
                sums += [math.exp(s - max_spread) / total for s in spreads]
            order = sorted(range(lag), key=lambda i: sums[i])
            for place, i in enumerate(order):
                self.assertAlmostEqual(feature[first + i], place / lag, places=6)
        self.assertTrue((feature[:sinks] == 1).all())
        self.assertTrue((feature[sinks + (partitions - 1) * lag :] == 1).all())

    def test_redundancy(self):
        def share(t, end):
            means = [math.fsum(dot(units[i], units[j]) for j in range(end) if j != i) / end for i in range(end)]
            max_mean = max(means)
            return math.exp(means[t] - max_mean) / math.fsum(math.exp(m - max_mean) for m in means)

        short = self.shortened(120, 100)
        self.assertEqual(self.run_main("features", short, "--feature", "redundancy"), (0, ""))
        trace = Trace(short)
        feature = trace.feature("redundancy", LAYER, HEAD)
        units = [unit(key) for key in part(trace, LAYER, "k")[HEAD]]
        for t, end in ((0, 100), (57, 100), (99, 100), (100, 101), (119, 120)):
            self.assertAlmostEqual(feature[t] / share(t, end), 1, places=5)

    def test_several_features_at_once(self):
        short = self.shortened(60, 40)
        words = ("--feature", "redundancy", "--feature", "lagkv", "--feature", "lagkv", "--lag", "16")
        self.assertEqual(self.run_main("features", short, *words), (0, ""))
        names = Trace(short)._held.features
        self.assertEqual(names, ["redundancy", "lagkv"])

    def test_key_cosine_rope(self):
        trace, feature = self.add("key_cosine_rope")
        turned = [[float(x) for x in key] for key in part(trace, LAYER, "k")[HEAD]]
        frequencies = [float(f) for f in trace.inv_freq]
        half = len(frequencies)
        for t, key in enumerate(turned):
            for f, frequency in enumerate(frequencies):
                cos, sin = math.cos(t * frequency), math.sin(t * frequency)
                key[f], key[f + half] = key[f] * cos - key[f + half] * sin, key[f + half] * cos + key[f] * sin
        units = [unit(key) for key in turned]
        for t, end in ((0, PROMPT), (PROMPT - 1, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 9, PROMPT + 10)):
            sums = [math.fsum(key[d] for key in units[:end]) for d in range(trace.head_size)]
            self.assertAlmostEqual(float(feature[t]), dot(units[t], unit(sums)), places=5)
        plain, turned_too = (
            kvlab(
                "replay",
                "--trace",
                self.path,
                "--policy",
                f"keydiff{name}",
                "--budget",
                48,
                "--out",
                f"{self.path}-r{i}",
            )
            for i, name in enumerate(("", ":name=key_cosine_rope"))
        )
        self.assertEqual((plain.returncode, turned_too.returncode), (0, 0), plain.stderr + turned_too.stderr)
        self.assertNotEqual(
            open(f"{self.path}-r0/results.csv").read().replace("key_cosine", ""),
            open(f"{self.path}-r1/results.csv").read().replace("key_cosine_rope", ""),
        )

    def shortened(self, tokens, prompt):
        """A trace of the first `tokens` tokens of the sample trace."""
        trace, short = Trace(self.path), f"{self.path}-short"
        parts = {
            name: numpy.stack([part(trace, layer, name)[:, :tokens] for layer in range(trace.layers)]) for name in "qkv"
        }
        Trace.from_arrays(**parts, config={"inv_freq": trace.inv_freq}, prompt_tokens=prompt, out=short)
        return short

    def test_expected_attention(self):
        future, sinks = 50, 4
        trace, feature = self.add("expected_attention", "--future", future)
        frequencies = trace.inv_freq.astype(float)
        scale, half = trace.model["softmax_scale"], len(frequencies)
        q, k, v = (part(trace, LAYER, name).astype(float) for name in "qkv")

        def as_complex(x):  # with dimension i as the real part and dimension i + half as the imaginary part
            return x[..., :half] + 1j * x[..., half : 2 * half]

        def as_real(z):
            return numpy.concatenate([z.real, z.imag], axis=-1)

        # The mean of the rotations over future positions, as a complex number for each pair of dimensions.
        ahead = range(PROMPT, PROMPT + future)
        turn = numpy.array([sum(numpy.exp(1j * p * f) for p in ahead) / future for f in frequencies])
        positions = numpy.arange(trace.tokens)
        keys = as_real(as_complex(k[HEAD]) * numpy.exp(1j * numpy.outer(positions, frequencies)))
        heads = group(trace)
        wanted = numpy.zeros(trace.tokens)
        for g in range(heads):
            # This mean rotation is linear, so the queries can be rotated before their moments are computed.
            turned = as_real(as_complex(q[HEAD * heads + g, sinks:PROMPT]) * turn)
            mean = turned.mean(axis=0)
            spread = [float((((turned - mean) @ key) ** 2).mean()) for key in keys]
            logits = numpy.array([scale * dot(key, mean) + scale**2 / 2 * s for key, s in zip(keys, spread)])
            max_logit = logits[sinks:PROMPT].max()
            wanted += numpy.exp(logits - max_logit) / numpy.exp(logits[sinks:PROMPT] - max_logit).sum() / heads
        wanted *= numpy.sqrt((v[HEAD] ** 2).sum(axis=-1))
        self.assertTrue(numpy.allclose(feature, wanted, rtol=1e-5))

    def test_value_out_norm1(self):
        trace, feature = self.add("value_out_norm1", "--model", ROOT / "engine/models/tiny")
        weights = mapped_tensors(str(ROOT / "engine/models/tiny/model.safetensors"))
        (bits,) = weights[f"model.layers.{LAYER}.self_attn.o_proj.weight"]
        weight = (bits.astype("u4") << 16).view("f4")
        v = part(trace, LAYER, "v")[HEAD]
        for t in (0, 1, 500, 1011):
            total = 0
            for g in range(group(trace)):
                begin = (HEAD * group(trace) + g) * trace.head_size
                total += math.fsum(abs(dot(row[begin : begin + trace.head_size], v[t])) for row in weight)
            self.assertAlmostEqual(feature[t] / total, 1, places=5)

    def test_a_trace_with_features_is_replayed(self):
        for name in ("lagkv", "expected_attention", "redundancy"):
            self.add(name)
        self.add("value_out_norm1", "--model", ROOT / "engine/models/tiny")
        self.assertEqual(self.run_main("features", self.path, "--feature", "lagkv", "--lag", 64, "--replace"), (0, ""))
        done = kvlab("trace", "verify", self.path)
        self.assertEqual(done.returncode, 0, done.stderr)
        policies = "lagkv,expected_attention,r_kv,criticalkv,feature:name=redundancy:keep=-1,h2o"
        done = kvlab("replay", "--trace", self.path, "--policy", policies, "--budget", 64, "--out", self.at / "run")
        self.assertEqual(done.returncode, 0, done.stderr)
        other = ["--policy", "feature:name=other", "--budget", 64, "--out", self.at / "no"]
        done = kvlab("replay", "--trace", self.path, *other)
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stderr.count("\n"), 1)
        features = "expected_attention, redundancy, value_out_norm1, lagkv"
        self.assertIn(f"has only the features {features}", done.stderr.replace("\n", " "))
        self.assertFalse((self.at / "no").exists())

    def test_each_layer_rotates_by_its_table(self):
        trace = Trace(self.path)
        parts = {name: numpy.stack([part(trace, layer, name)[:, :60] for layer in (1, 2)]) for name in "qkv"}
        tables = numpy.stack([trace.inv_freq, trace.inv_freq / 8])

        def features(**config):
            path = f"{self.path}-{len(config)}"
            Trace.from_arrays(**parts, config=config, prompt_tokens=40, out=path)
            names = ("lagkv", "expected_attention", "key_cosine_rope")
            words = [word for name in names for word in ("--feature", name)]
            self.assertEqual(self.run_main("features", path, *words, "--lag", "8"), (0, ""))
            return [Trace(path).feature(name, max(Trace(path).layer_numbers), HEAD) for name in names]

        rows = [{"span": 9}, {"rope": 1, "scale": 0.3}]
        mixed = features(inv_freq=tables, rope_factor=[1, 1.5], rows=rows, layer_numbers=[3, 7])
        alike = features(inv_freq=tables[1], rope_factor=1.5, softmax_scale=0.3)
        for a, b in zip(mixed, alike):
            self.assertTrue((a == b).all() and a.std() > 0)

    def test_refusals(self):
        self.check_refused("--model", self.path, "--feature", "value_out_norm1")
        self.check_refused("invalid choice", self.path, "--feature", "key_norm")
        self.check_refused("not a trace", self.at, "--feature", "lagkv")
        self.check_refused("--lag", self.path, "--feature", "lagkv", "--lag", "1")
        self.add("redundancy")
        self.check_refused("--replace", self.path, "--feature", "redundancy")
