"""Compares `python -m kvlab.hf capture` with `kvlab capture`."""

import csv
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import safetensors.torch
import tokenizers
from hf_fixture import FORCED, KVLAB, ROOT, TINY, TOKENS, ModelTest, ids_of, kvlab, manifest_of

from kvlab.hf import capturing, layers, models

COMPARE = ROOT / "tests" / "scripts" / "compare_traces.py"


def add_path(folder):
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def program(*arguments, env):
    command = [sys.executable, "-m", "kvlab.hf", "capture", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def compare(*arguments):
    return subprocess.run([sys.executable, COMPARE, *map(str, arguments)], capture_output=True, text=True)


def tensors_of(trace, name):
    """A tensor of a trace, concatenated over its shards."""
    shards = [safetensors.torch.load_file(trace / shard["file"]) for shard in manifest_of(trace)["shards"]]
    return torch.cat([shard[name] for shard in shards], dim=-1 if "residual" in name else 1).float()


class CaptureTest(ModelTest):
    def capture(self, out, *arguments):
        """Runs the capture. Returns the exit code and the error output."""
        return self.run_main("capture", *arguments, "--device", "cpu", "--out", self.at / out)

    def captured(self, out, *arguments):
        code, errors = self.capture(out, *arguments)
        self.assertEqual((code, errors), (0, ""))
        return self.at / out

    def check_refused(self, words, out, *arguments):
        self.check_one_line(words, *self.capture(out, *arguments))

    def check_same_recall(self, ours, theirs, model):
        """Compares recall for every policy and oracle at two budgets."""
        done = compare(ours, theirs, "--replay", KVLAB, "--model", model, "--budget", "64,25%")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for policy in json.loads(kvlab("policies", "--json").stdout)["policies"]:
            if policy["decodes"]:
                self.assertIn(f"\n{policy['name']} ", done.stdout)

    def check_same_residual_error(self, ours, theirs, tolerance):
        """Compares residual_error for some policies at two budgets, by layer and head."""
        found = []
        for trace in (ours, theirs):
            run = self.at / f"run-{trace.name}"
            sweep = ["--policy", "window,h2o,sink", "--budget", "64,25%"]
            done = kvlab("replay", "--trace", trace, *sweep, "--out", run)
            self.assertEqual(done.returncode, 0, done.stderr)
            rows = csv.DictReader(io.StringIO((run / "results.csv").read_text()))
            found.append([row | {"trace": ""} for row in rows if row["metric"] == "residual_error"])
        self.assertGreater(len(found[0]), 6 * 4)
        for ours, theirs in zip(*found, strict=True):
            x, y = (float(row.pop("value")) for row in (ours, theirs))
            self.assertLessEqual(abs(x - y), tolerance * y, ours)
            keys = ("policy", "budget", "layer", "head", "count")
            self.assertEqual([ours[key] for key in keys], [theirs[key] for key in keys])

    def check_same_sketch(self, ours, theirs):
        """Checks that the sketches have the same seed and equal bits."""
        x, y = (safetensors.torch.load_file(trace / "output.safetensors") for trace in (ours, theirs))
        self.assertEqual(x.keys(), y.keys())
        for name in x:
            self.assertTrue(torch.equal(x[name], y[name]), name)
        a, b = (manifest_of(trace)["extras"] for trace in (ours, theirs))
        self.assertEqual(a.keys(), b.keys())
        self.assertEqual(a["sketch"]["seed"], b["sketch"]["seed"])

    def test_features_of_a_function(self):
        """Uses a function that computes the same feature as kvlab's key_norm, with sums in the same order. Checks that
        the same tokens are evicted, and that errors say what is wrong."""
        (self.at / "own_features.py").write_text(
            "def norm(q, k, v, layer):\n"
            "    assert q.shape[1:] == k.shape[1:] == v.shape[1:]\n"
            "    return sum((k[..., d] * k[..., d]) for d in range(k.shape[-1])).sqrt()\n"
            "def short(q, k, v, layer):\n"
            "    return k.float().norm(dim=-1)[:, 1:]\n"
            "def broken(q, k, v, layer):\n"
            "    return layer / 0\n"
        )
        sys.path.insert(0, str(self.at))
        self.addCleanup(sys.path.remove, str(self.at))
        few = ["--model", self.tiny32, "--prompt-file", self.text, "--teacher-forced"]
        few += ["--prompt-tokens", 100, "--max-tokens", 180]
        trace = self.captured("features", *few, "--feature", "mine=own_features:norm")
        self.assertEqual(kvlab("trace", "verify", trace).returncode, 0)
        run = self.at / "run-features"
        both = "feature:name=mine:keep=-1,feature:name=key_norm:keep=-1"
        done = kvlab("replay", "--trace", trace, "--policy", both, "--budget", 40, "--no-references", "--out", run)
        self.assertEqual(done.returncode, 0, done.stderr)
        metrics = {}
        for row in csv.DictReader(io.StringIO((run / "results.csv").read_text())):
            metrics.setdefault(row["params"], []).append((row["layer"], row["head"], row["metric"], row["value"]))
        self.assertEqual(len(metrics), 2)
        self.assertEqual(*metrics.values())
        for words, feature in (  # these errors come after the capture, whose trace is kept
            ("--feature mine: layer 0 has shape [2, 179]; it should be [2, 180]", "mine=own_features:short"),
            ("--feature mine: ZeroDivisionError", "mine=own_features:broken"),
        ):
            self.check_refused(words, "refused", *few, "--feature", feature)
            self.check_verifies(self.at / "refused")
            self.assertEqual(manifest_of(self.at / "refused")["tokens"], 180)
            shutil.rmtree(self.at / "refused")
        for words, feature in (
            ("no attribute", "mine=own_features:other"),
            ("No module", "mine=no_such_module:norm"),
            ("should read NAME=module:function", "mine"),
            ("is computed by kvlab", "key_norm=own_features:norm"),
        ):
            self.check_refused(words, "refused", *few, "--feature", feature)
            self.assertFalse((self.at / "refused").exists())

    def test_a_float32_capture_agrees_with_kvlabs(self):
        arguments = ["--model", self.tiny32, "--prompt-file", self.text, *FORCED]
        ours = self.captured("ours", *arguments)
        theirs = self.captured_by_kvlab("theirs", *arguments)
        self.check_verifies(ours)

        same = ("config", "rounding", "tokens", "prompt_tokens", "segments", "weights_xxh3", "tokenizer_xxh3")
        a, b = manifest_of(ours), manifest_of(theirs)
        self.assertEqual({key: a[key] for key in same}, {key: b[key] for key in same})
        self.assertEqual([shard["tokens"] for shard in a["shards"]], [1024, TOKENS - 1024])
        self.assertEqual(ids_of(ours), ids_of(theirs))
        for layer in range(a["config"]["layers"]):
            for part in ("q", "k", "v", "check_out", "residual_norm2"):
                x, y = (tensors_of(trace, f"layers.{layer}.{part}") for trace in (ours, theirs))
                self.assertLess(float((x - y).norm() / y.norm()), 1e-4, (layer, part))
        self.check_same_recall(ours, theirs, self.tiny32)
        self.check_same_sketch(ours, theirs)
        self.check_same_residual_error(ours, theirs, 1e-3)

    def test_a_bfloat16_capture_verifies_and_replays_as_kvlabs(self):
        arguments = ["--model", TINY, "--prompt-file", self.text, *FORCED]
        ours = self.captured("ours16", *arguments)
        self.check_verifies(ours)
        self.assertEqual(manifest_of(ours)["config"]["dtype"], "bfloat16")
        self.assertEqual(manifest_of(ours)["rounding"], "model_dtype")
        theirs = self.captured_by_kvlab("theirs16", *arguments)
        self.check_same_recall(ours, theirs, TINY)
        self.check_same_sketch(ours, theirs)
        self.check_same_residual_error(ours, theirs, 0.05)

    def test_differing_traces_are_reported(self):
        model = ["--model", self.tiny32, "--max-new-tokens", 30]
        trace = self.captured("told", *model, "--prompt", "It was a dark night, and")
        same = compare(trace, trace, "--reference", trace)
        self.assertEqual(same.returncode, 0, same.stderr)
        other = self.captured("told-other", *model, "--prompt", "It was a bright day, and")
        different = compare(trace, other)
        self.assertEqual(different.returncode, 2)
        self.assertIn("ids", different.stderr)

        damaged = self.at / "damaged"
        shutil.copytree(trace, damaged)
        shard = damaged / "shard-00000.safetensors"
        tensors = safetensors.torch.load_file(shard)
        tensors["layers.2.k"] *= 1.01
        safetensors.torch.save_file(tensors, shard)
        told = compare(damaged, trace, "--reference", trace, "--json")
        self.assertEqual(told.returncode, 1)
        parts = {(row["layer"], row["part"]): row["relative"] for row in json.loads(told.stdout)["parts"]}
        self.assertEqual([key for key, value in parts.items() if value > 0], [(2, "k")])
        self.assertAlmostEqual(parts[2, "k"], 0.01, 5)

    def test_passages_are_the_tokens_that_cover_a_text(self):
        prompt = "It was dark \u2014 and \U0001f600\u7684 in caf\u00e9s\u0301. The\npass\tkey is 52417; say it."
        texts = [
            "pass\tkey is 52417",
            "\u2014",
            "\U0001f600",
            "\u7684 in",
            "caf",
            " is ",
            "It",
            "it.",
            prompt,
            " 5",
            "s\u0301. ",
        ]
        passages = [word for text in texts for word in ("--passage", text)]
        arguments = ["--model", self.tiny32, "--prompt", prompt, "--max-new-tokens", 2, *passages]
        ours = self.captured("passages", *arguments)
        found = manifest_of(ours)["spans"]
        plain = [text.replace("\n", " ").replace("\t", " ") for text in texts]
        self.assertEqual([passage["name"] for passage in found], plain)
        self.assertEqual(found, manifest_of(self.captured_by_kvlab("passages-kvlab", *arguments))["spans"])
        self.check_verifies(ours)

        tokenizer = tokenizers.Tokenizer.from_file(str(self.tiny32 / "tokenizer.json"))
        ids = ids_of(ours)
        for passage, text in zip(found, texts):
            for fewer, covers in ((0, True), (1, False)):
                for begin, end in ((fewer, 0), (0, fewer)):
                    part = ids[passage["start"] + begin : passage["start"] + passage["tokens"] - end]
                    decoded = tokenizer.decode(part, skip_special_tokens=False)
                    self.assertEqual(text in decoded, covers, (passage, decoded))

        model = ["--model", self.tiny32, "--prompt", prompt]
        cut = ["--teacher-forced", "--prompt-tokens", 2, "--max-tokens", 5]
        for words, *more in (
            ('"dog" is not in the prompt', "--passage", "dog"),
            ("--passage: is empty", "--passage", ""),
            ('"a" appears in the prompt more than once', "--passage", "a"),
            ('"dark" is given twice', "--passage", "dark", "--passage", "dark"),
            ('"The pass" is given twice', "--passage", "The\npass", "--passage", "The pass"),
            ('"say" is not in the prompt', "--passage", "say", *cut),
        ):
            self.check_refused(words, "refused", *model, *more)
            done = kvlab("capture", "--device", "cpu", *model, *more, "--out", self.at / "refused")
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn(words, done.stderr)
            self.assertFalse((self.at / "refused").exists())

    def test_it_generates_the_text_that_kvlab_generates(self):
        arguments = ["--model", self.tiny32, "--prompt", "It was a dark night, and", "--max-new-tokens", 40]
        ours, theirs = self.captured("generated", *arguments), self.captured_by_kvlab("generated-kvlab", *arguments)
        self.check_verifies(ours)
        self.assertEqual(ids_of(ours), ids_of(theirs))
        self.assertEqual(manifest_of(ours)["segments"], manifest_of(theirs)["segments"])

    def test_the_size_of_chunks_does_not_matter(self):
        arguments = ["--model", self.tiny32, "--prompt-file", self.text, *FORCED]
        whole, chunks = self.captured("whole", *arguments), self.captured("chunks", *arguments, "--chunk", 100)
        self.check_verifies(chunks)
        x, y = (tensors_of(trace, "layers.3.check_out") for trace in (whole, chunks))
        self.assertLess(float((x - y).norm() / y.norm()), 1e-4)

    def make_older(self, model):
        """Rewrites config.json in the layout of transformers 4. transformers 4 would ignore the newer key,
        rope_parameters."""
        config = json.loads((model / "config.json").read_text())
        if "rope_parameters" in config:
            self.check_refused("rope_parameters", "refused", "--model", model, "--prompt", "w3")
            scaling = config.pop("rope_parameters")
            config["rope_theta"] = scaling.pop("rope_theta")
            config["rope_scaling"] = scaling if scaling["rope_type"] != "default" else None
            (model / "config.json").write_text(json.dumps(config))

    def test_every_family_verifies(self):
        if models.TRANSFORMERS < (4, 51):
            self.skipTest("Qwen3 came with transformers 4.51, head_dim of Qwen2 little earlier")
        vocabulary = {f"w{id}": id for id in range(67)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w2"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        rng = random.Random(1)
        text = self.at / "words.txt"
        text.write_text(" ".join(rng.choices(list(vocabulary), k=TOKENS)))
        for name in ("llama3", "llama_biases", "mistral", "qwen2", "qwen3"):
            model = self.at / name
            shutil.copytree(ROOT / "tests" / "data" / "models" / name, model)
            tokenizer.save(str(model / "tokenizer.json"))
            if models.TRANSFORMERS < (5, 0):
                self.make_older(model)
            for dtype in ("float32", "bfloat16"):
                with self.subTest(model=name, dtype=dtype):
                    arguments = ["--model", model, "--prompt-file", text, *FORCED, "--beyond-context"]
                    arguments += ["--dtype", dtype]
                    trace = self.captured(f"{name}-{dtype}", *arguments)
                    self.check_verifies(trace)
                    tokens = safetensors.torch.load_file(trace / "tokens.safetensors")
                    right = safetensors.torch.load_file(model / "expected.safetensors")
                    torch.testing.assert_close(tokens["inv_freq"], right["inv_freq"])
                    torch.testing.assert_close(tokens["rope_factor"], right["rope_factor"])

    def test_a_capture_that_fails_can_be_sealed(self):
        arguments = ["--model", TINY, "--prompt-file", self.text, *FORCED]
        out = self.at / "full"
        feed = capturing.Listener.feed_chunk
        self.addCleanup(setattr, capturing.Listener, "feed_chunk", feed)

        def feed_until(file):
            """Makes a folder with the name of a file that the capture has to write."""

            def feed_chunk(hooked, ids, kind):
                (out / file).mkdir(exist_ok=True)
                return feed(hooked, ids, kind)

            capturing.Listener.feed_chunk = feed_chunk

        feed_until("shard-00001.safetensors")
        self.check_refused("kvlab trace seal", "full", *arguments)
        self.assertFalse((out / "manifest.json").exists())
        (out / "shard-00001.safetensors").rmdir()
        self.assertEqual(kvlab("trace", "seal", out).returncode, 0)
        self.check_verifies(out)
        self.assertEqual(manifest_of(out)["tokens"], 1024)
        shutil.rmtree(out)
        feed_until("tokens.safetensors")
        self.check_refused("tokens.safetensors: exists and is not a regular file", "full", *arguments)
        self.assertFalse(out.exists())

        capturing.Listener.feed_chunk = feed
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, unlimited)
        for file, max_bytes in (("output", 50_000), ("shard-00000", 1_000_000)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, unlimited[1]))
            self.check_refused(f"{file}.safetensors: cannot write: File too large", "full", *arguments)
            self.assertFalse(out.exists())

    def test_a_rotation_that_is_not_the_models_is_refused(self):
        rotate = layers.rotate
        self.addCleanup(setattr, layers, "rotate", rotate)
        layers.rotate = lambda x, cos, sin: rotate(x, cos, -sin).flip(0)
        self.check_refused("plain model", "wrong", "--model", TINY, "--prompt-file", self.text, *FORCED)

    def test_models_that_a_trace_cannot_describe_are_refused_by_name(self):
        config = json.loads((TINY / "config.json").read_text())
        dynamic = {"rope_type": "dynamic", "factor": 2.0}
        few, many = ["--prompt", "It was"], ["--prompt-file", self.text, *FORCED, "--beyond-context"]
        for words, changes, arguments in (
            ("layer 0: from position 1036 on, its RoPE", {"rope_scaling": dynamic}, many),
            ("LlamaForSequenceClassification", {"architectures": ["LlamaForSequenceClassification"]}, few),
            ("have no tensor", {"num_hidden_layers": 5}, few),
        ):
            with self.subTest(words):
                model = self.at / "changed"
                shutil.rmtree(model, ignore_errors=True)
                shutil.copytree(TINY, model)
                (model / "config.json").write_text(json.dumps(config | changes))
                self.check_refused(words, "refused", "--model", model, *arguments)
        self.assertFalse((self.at / "refused").exists())

    def test_bad_options_are_refused(self):
        model = ["--model", TINY]
        (self.at / "there").mkdir()
        self.check_refused("exists already", "there", *model, "--prompt", "It was")
        self.check_refused("--prompt", "refused", *model)
        self.check_refused("--prompt-tokens", "refused", *model, "--prompt", "It was", "--teacher-forced")
        self.check_refused(
            "--prompt-tokens",
            "refused",
            *model,
            "--prompt",
            "It was",
            "--teacher-forced",
            "--prompt-tokens",
            99,
        )
        self.check_refused("--max-tokens", "refused", *model, "--prompt", "It was", "--max-tokens", 9)
        self.check_refused("--max-new-tokens", "refused", *model, "--prompt", "It was", "--max-new-tokens", -1)
        over = ["--prompt-file", self.text, "--teacher-forced", "--prompt-tokens", 1025]
        self.check_refused("was trained on at most 1024", "refused", *model, *over)
        self.check_refused("no-such-file", "refused", *model, "--prompt-file", "no-such-file")
        self.check_refused("no-such-model", "refused", "--model", self.at / "no-such-model", "--prompt", "It was")

    def test_an_unreachable_hub_gives_a_one_line_error(self):
        (self.at / "quick").mkdir()
        (self.at / "quick" / "sitecustomize.py").write_text("import time\ntime.sleep = lambda seconds: None\n")
        at = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(self.at), "PYTHONPATH": add_path(self.at / "quick")}
        done = program("--model", "no/such", "--prompt", "x", "--out", self.at / "refused", env=os.environ | at)
        self.check_one_line("is not a directory here, and the hub did not provide it", done.returncode, done.stderr)

    def test_a_missing_package_is_named(self):
        (self.at / "stub").mkdir()
        (self.at / "stub" / "transformers.py").write_text("raise ImportError('none', name='transformers')")
        done = program("--help", env=os.environ | {"PYTHONPATH": add_path(self.at / "stub")})
        self.check_one_line("cannot import transformers", done.returncode, done.stderr)
