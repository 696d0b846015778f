"""Common code of the tests of `python -m kvlab.hf`. The environment variable KVLAB_COMMAND is the path of the kvlab
command with which they compare."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import pytest

from kvlab import Trace
from kvlab.hf.__main__ import main

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "engine" / "models" / "tiny"
KVLAB = os.environ.get("KVLAB_COMMAND", "")
TOKENS = 1100  # more than one shard
FORCED = ["--teacher-forced", "--prompt-tokens", "512", "--max-tokens", str(TOKENS)]


def kvlab(*arguments):
    if not KVLAB:
        pytest.skip("KVLAB_COMMAND is not set to the path of kvlab")
    return subprocess.run([KVLAB, *map(str, arguments)], capture_output=True, text=True)


def manifest_of(trace):
    return json.loads((trace / "manifest.json").read_text())


class CommandTest(unittest.TestCase):
    """Provides a folder for traces."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.at = pathlib.Path(folder.name)

    def run_main(self, *arguments):
        """Runs `python -m kvlab.hf` in this process. Returns the exit code and the error output."""
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = main([*map(str, arguments)])
            except SystemExit as end:
                code = end.code
        return code, errors.getvalue()

    def check_verifies(self, trace):
        done = kvlab("trace", "verify", trace)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def check_one_line(self, words, code, errors):
        self.assertEqual(code, 2, errors)
        self.assertEqual(errors.count("\n"), 1, errors)
        self.assertIn(words, errors)


class ModelTest(CommandTest):
    """Provides a text of more than a thousand tokens, and the bundled model in float32."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.text = cls.at / "text.txt"
        cls.text.write_text((ROOT / "tools" / "demo" / "prompt.txt").read_text() * 3)
        cls.tiny32 = cls.at / "tiny32"
        copy_of_tiny(cls.tiny32, "float32")

    @classmethod
    def captured_by_kvlab(cls, out, *arguments):
        done = kvlab("capture", "--device", "cpu", *arguments, "--out", cls.at / out)
        assert done.returncode == 0, done.stderr
        return cls.at / out


def ids_of(trace):
    return Trace(trace, verify=False).ids.tolist()


def copy_of_tiny(to, dtype):
    """Saves the bundled model in another dtype. In float32, kvlab stores exactly what it computes."""
    import safetensors.torch
    import torch

    to.mkdir()
    config = json.loads((TINY / "config.json").read_text()) | {"torch_dtype": dtype}
    (to / "config.json").write_text(json.dumps(config))
    weights = safetensors.torch.load_file(TINY / "model.safetensors")
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    safetensors.torch.save_file(weights, to / "model.safetensors", {"format": "pt"})
    shutil.copy(TINY / "tokenizer.json", to)
