"""What the tests of the scripts for transformers share: `from hf_fixture import *`. Without torch it prints `skipped: …` and ends."""

import contextlib
import importlib.util
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import safetensors.torch
    import tokenizers  # noqa: F401
    import torch
    import transformers
    import xxhash  # noqa: F401
except ImportError as missing:
    print(
        f"skipped: {sys.executable} cannot import {missing.name}; KVLAB_HF_PYTHON may name a Python that can"
    )
    sys.exit(0)

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "engine" / "models" / "tiny"
KVLAB = sys.argv[1]
TOKENS = 1100  # past a shard's end
FORCED = ["--teacher-forced", "--prompt-tokens", "512", "--max-tokens", str(TOKENS)]

sys.path.insert(0, str(ROOT / "tools"))
torch.set_num_threads(1)


def script(name):
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kvlab(*arguments):
    return subprocess.run([KVLAB, *map(str, arguments)], capture_output=True, text=True)


def manifest_of(trace):
    return json.loads((trace / "manifest.json").read_text())


def ids_of(trace):
    return safetensors.torch.load_file(trace / "tokens.safetensors")["ids"].tolist()


def copy_of_tiny(to, dtype):
    """The bundled model in another dtype: in float32 kvlab stores what it computes."""
    to.mkdir()
    config = json.loads((TINY / "config.json").read_text()) | {
        "torch_dtype": str(dtype).removeprefix("torch.")
    }
    (to / "config.json").write_text(json.dumps(config))
    weights = safetensors.torch.load_file(TINY / "model.safetensors")
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    safetensors.torch.save_file(weights, to / "model.safetensors", {"format": "pt"})
    shutil.copy(TINY / "tokenizer.json", to)


class ScriptTest(unittest.TestCase):
    """A folder, a text of some thousand tokens, and the bundled model in float32."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.at = pathlib.Path(folder.name)
        cls.text = cls.at / "text.txt"
        cls.text.write_text((ROOT / "tools" / "demo" / "prompt.txt").read_text() * 3)
        cls.tiny32 = cls.at / "tiny32"
        copy_of_tiny(cls.tiny32, torch.float32)

    def run_main(self, main, *arguments):
        """Returns the exit code and what was printed as an error."""
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = main([*map(str, arguments), "--device", "cpu"])
            except SystemExit as end:
                code = end.code
        return code, errors.getvalue()

    def captured_by_kvlab(self, out, *arguments):
        done = kvlab("capture", "--device", "cpu", *arguments, "--out", self.at / out)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.at / out

    def check_verifies(self, trace):
        done = kvlab("trace", "verify", trace)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def check_one_line(self, words, code, errors):
        self.assertEqual(code, 2, errors)
        self.assertEqual(errors.count("\n"), 1, errors)
        self.assertIn(words, errors)


def main():
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    unittest.main(argv=sys.argv[:1])
