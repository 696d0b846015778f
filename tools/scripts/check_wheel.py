#!/usr/bin/env python3
"""Checks what is in wheels of kvlab, and prints the size of each: check_wheel.py WHEEL...

A wheel has to contain the extension, the command and all files that `kvlab demo` reads. It may only depend on numpy,
and on NVIDIA's wheels if its version ends in +cuMAJOR. A wheel for manylinux has to contain every library that other
systems may lack, and must not look for libraries in folders of the system that built it. Needs readelf. Exits with 1
if a check fails.
"""

from __future__ import annotations

import email
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

NEEDED = [
    r"kvlab/_kvlab\.(abi3|cpython-3\d+-x86_64-linux-gnu|cpython-3\d+-aarch64-linux-gnu)\.so",
    r"kvlab/_kvlab\.pyi",
    r"kvlab/py\.typed",
    r"kvlab/hf/__init__\.py",
    r"kvlab/share/engine/models/tiny/config\.json",
    r"kvlab/share/engine/models/tiny/model\.safetensors",
    r"kvlab/share/engine/models/tiny/tokenizer\.json",
    r"kvlab/share/tools/demo/prompt\.txt",
    r"kvlab/share/tools/texts/.*\.txt",
    r"kvlab/share/traces/samples/tiny-story/manifest\.json",
    r"kvlab/share/traces/samples/tiny-story/tokens\.safetensors",
    r"kvlab/share/traces/samples/tiny-story/shard-\d+\.safetensors",
    r"kvlab/share/licenses/.*",
]
MANYLINUX = [r"kvlab/share/javascript/vega/vega-view\.min\.js"]  # without it a report page has no figures
CUDA = [r"kvlab/libkvlab_kernels\.so"]
# Libraries of every Linux with glibc and C++ programs.
SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux-[a-z0-9_-]+)\.so\.\d+")
CUDA_SYSTEM = re.compile(r"libcublas(Lt)?\.so\.\d+")


def dynamic(library: pathlib.Path) -> tuple[list[str], list[str]]:
    """The libraries that a library needs, and the folders in which it searches for them."""
    text = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    folders = [folder for found in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text) for folder in found.split(":")]
    return needed, folders


def faults_of_libraries(files: list[str], folder: pathlib.Path, is_cuda: bool) -> list[str]:
    """Faults of the shared libraries of a manylinux wheel, which is unpacked in `folder`."""
    libraries = [name for name in files if re.search(r"\.so(\.|$)", name)]
    own_names = {pathlib.PurePath(name).name for name in libraries}
    faults = []
    for name in libraries:
        needed, folders = dynamic(folder / name)
        for library in needed:
            if library in own_names or SYSTEM.fullmatch(library) or (is_cuda and CUDA_SYSTEM.fullmatch(library)):
                continue
            faults.append(f"{name} needs {library}, which the wheel does not contain")
        faults += [f"{name} looks for libraries in {path}" for path in folders if not path.startswith("$ORIGIN")]
    return faults


def faults_of(wheel: pathlib.Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        files = archive.namelist()
        text = {name.split("/")[-1]: archive.read(name).decode() for name in files if ".dist-info/" in name[:60]}
        about = email.message_from_string(text["METADATA"])
        is_cuda = "+cu" in about["Version"]
        patterns = NEEDED + (MANYLINUX if "manylinux" in wheel.name else []) + (CUDA if is_cuda else [])
        missing = [want for want in patterns if not any(re.fullmatch(want, name) for name in files)]
        faults = [f"the wheel does not contain {want}" for want in missing]
        if "kvlab = kvlab._commands:main" not in text.get("entry_points.txt", ""):
            faults.append("the wheel does not install the command kvlab")
        required = sorted(
            re.split(r"[^A-Za-z0-9-]", line)[0]
            for line in about.get_all("Requires-Dist", [])
            if "extra ==" not in line
        )
        others = [name for name in required if name != "numpy" and not (is_cuda and name.startswith("nvidia-"))]
        if "numpy" not in required or others or (is_cuda and len(required) != 3):
            faults.append(f"it requires {', '.join(required)}")
        if "manylinux" in wheel.name:
            archive.extractall(folder)
            faults += faults_of_libraries(files, pathlib.Path(folder), is_cuda)
        return faults


def main() -> int:
    wheels = [pathlib.Path(name) for name in sys.argv[1:]]
    if not wheels:
        sys.exit("check_wheel.py: name at least one wheel")
    failed = False
    for wheel in wheels:
        faults = faults_of(wheel)
        failed |= bool(faults)
        for fault in faults:
            print(f"{wheel.name}: {fault}", file=sys.stderr)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {'refused' if faults else 'complete'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
