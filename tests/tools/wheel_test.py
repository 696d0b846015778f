"""Tests tools/scripts/check_wheel.py on wheels that the test makes. They do not contain the package's code."""

import contextlib
import importlib.util
import io
import pathlib
import shutil
import sys
import tempfile
import unittest
import unittest.mock
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("check_wheel", ROOT / "tools" / "scripts" / "check_wheel.py")
check_wheel = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_wheel)

SHARE = "kvlab/share"
FILES = [
    "kvlab/_kvlab.abi3.so",
    "kvlab/_kvlab.pyi",
    "kvlab/py.typed",
    "kvlab/hf/__init__.py",
    *(f"{SHARE}/engine/models/tiny/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")),
    f"{SHARE}/tools/demo/prompt.txt",
    f"{SHARE}/tools/texts/a.txt",
    f"{SHARE}/traces/samples/tiny-story/manifest.json",
    f"{SHARE}/traces/samples/tiny-story/tokens.safetensors",
    f"{SHARE}/traces/samples/tiny-story/shard-00000.safetensors",
    f"{SHARE}/licenses/vega.txt",
    f"{SHARE}/javascript/vega/vega-view.min.js",
]
NUMPY = ["Requires-Dist: numpy>=1.24", "Requires-Dist: pandas; extra == 'frame'"]
NVIDIA = ["Requires-Dist: nvidia-cublas<14,>=13", "Requires-Dist: nvidia-cuda-nvrtc<14,>=13"]
COMMAND = "[console_scripts]\nkvlab = kvlab._commands:main\n"
# A shared library that needs only the C library, and one that needs more.
PLAIN = next(pathlib.Path("/lib").glob("x86_64-linux-gnu/libdl.so.2"), None)
NEEDY = next(pathlib.Path("/usr/lib/python3").parent.glob("python3*/lib-dynload/_ctypes.cpython*.so"), None)


class Wheels(unittest.TestCase):
    def faults(self, without="", requires=NUMPY, command=COMMAND, platform="linux", version="1", library=None, more=()):
        with tempfile.TemporaryDirectory() as folder:
            wheel = pathlib.Path(folder) / f"kvlab-{version}-cp312-abi3-{platform}_x86_64.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for name in [*FILES, *more]:
                    if name != without:
                        archive.writestr(name, library.read_bytes() if library and name.endswith(".so") else "")
                about = ["Metadata-Version: 2.1", "Name: kvlab", f"Version: {version}", *requires]
                archive.writestr(f"kvlab-{version}.dist-info/METADATA", "\n".join(about) + "\n\n")
                archive.writestr(f"kvlab-{version}.dist-info/entry_points.txt", command)
            return check_wheel.faults_of(wheel)

    def test_a_complete_wheel_passes(self):
        self.assertEqual(self.faults(), [])

    def test_missing_files_are_named(self):
        optional = {f"{SHARE}/javascript/vega/vega-view.min.js"}  # a wheel for this system only needs no Vega
        for name in set(FILES) - optional:
            self.assertEqual(len(self.faults(without=name)), 1, name)
        self.assertEqual(self.faults(without=optional.pop()), [])
        self.assertIn("the wheel does not install the command kvlab", self.faults(command=""))

    def test_numpy_is_the_only_dependency(self):
        self.assertEqual(self.faults(requires=[*NUMPY, "Requires-Dist: pandas"]), ["it requires numpy, pandas"])
        self.assertEqual(self.faults(requires=[]), ["it requires "])
        self.assertEqual(len(self.faults(requires=[*NUMPY, *NVIDIA])), 1)

    def test_a_cuda_wheel_contains_its_library_and_requires_nvidias(self):
        cuda = {"version": "1+cu13", "requires": [*NUMPY, *NVIDIA]}
        self.assertEqual(self.faults(**cuda, more=["kvlab/libkvlab_kernels.so"]), [])
        self.assertEqual(len(self.faults(**cuda)), 1)
        self.assertEqual(len(self.faults(version="1+cu13", more=["kvlab/libkvlab_kernels.so"])), 1)

    @unittest.skipUnless(shutil.which("readelf") and PLAIN and NEEDY, "no readelf, or not Debian's libraries")
    def test_a_library_that_other_systems_lack_is_refused(self):
        self.assertEqual(self.faults(platform="manylinux_2_34", library=PLAIN), [])
        faults = self.faults(platform="manylinux_2_34", library=NEEDY)
        self.assertEqual(len(faults), 1)
        self.assertRegex(faults[0], r"kvlab/_kvlab.abi3.so needs libffi.so.8, which the wheel does not contain")

    def test_the_exit_code_is_0_only_if_the_wheel_passed(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as errors:
            wheel = pathlib.Path(folder) / "kvlab-1-cp312-abi3-linux_x86_64.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("kvlab-1.dist-info/METADATA", "Name: kvlab\nVersion: 1\n\n")
            with unittest.mock.patch.object(sys, "argv", ["check_wheel.py", str(wheel)]):
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    self.assertEqual(check_wheel.main(), 1)
        self.assertIn("refused", output.getvalue())
        self.assertIn("the wheel does not contain kvlab/py", errors.getvalue())


if __name__ == "__main__":
    unittest.main()
