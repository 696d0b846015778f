"""Tests kvlab with generated hostile inputs. It must neither crash nor hang. If it refuses an input, it must print one
line and leave no file.

generated_test.py KVLAB SOURCE [--runs N] [--seed S] [--first N] [--python PYTHON] [--report FILE]

Each case depends only on the seed and its number, so `--first N --runs 1` repeats case N. --python gives the path of a
Python that has numpy and kvlab; then as many further cases call the functions of the package (python_cases.py). Each
run is checked: It ends without a signal, and within the limits of time and memory in docs/reference/security.md. Its
exit code is 0 or 2, or for `verify` also 1. A refusal is one line without messages of libraries and without control
characters. A refused command writes no output. No .part file and no scratch folder is left.
"""

import argparse
import collections
import errno
import hashlib
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import cases
from bases import Bases

ADDRESS_SPACE = 6 << 30
SECONDS = 1800  # wall time until a run that only waits is killed; long, because the machine may be busy
WORK = 20  # seconds of processor time; a longer run counts as a hang
WORK_SWEPT = 0.01  # additional seconds for each configuration of a sweep
MAX_WORK = 150  # seconds of processor time until a run is killed
LIBRARIES = re.compile(
    r"json\.exception|std::|nanobind|basic_string|vector::|terminate called|boost|regex_error|bad_alloc|bad_cast|\bstoi\b|\bstod\b"
    r"|filesystem error|Assertion|numpy|Traceback|what\(\)|map::at|_M_|pcre2?_|Segmentation|core dumped|logic_error|incompatible function"
)
# Bytes allowed for each configuration of a sweep. They include the 8 KV heads of the bundled model and all threads.
SWEPT = 800_000 + 40_000 * len(os.sched_getaffinity(0))
BASE = 110_000_000  # bytes allowed for the program itself; more with larger libraries, such as CUDA's


def files_of(folder):
    """A hash of each file's contents, and the total size of the files. Follows links."""
    found, size = {}, 0
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if path.is_file():
            size += path.stat().st_size
            found[str(path.relative_to(folder))] = hashlib.sha1(path.read_bytes()).hexdigest()
    return found, size


def limited():
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_WORK, MAX_WORK))


def run(words, env):
    """Runs a command. Returns (exit code, stdout, stderr, CPU seconds, peak bytes, whether it had to be killed)."""
    with open("../stdout", "wb") as out, open("../stderr", "wb") as err:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, preexec_fn=limited)
        began, killed = time.monotonic(), False
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - began > SECONDS:
                os.kill(process.pid, signal.SIGKILL)  # process.send_signal() could take the status that wait4() waits for
                killed = True
            time.sleep(0.002 if time.monotonic() - began < 0.2 else 0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
    said = [pathlib.Path(name).read_bytes() for name in ("../stdout", "../stderr")]
    return process.returncode, *said, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, killed


def swept(words):
    """The largest number of configurations that the lists of a command can give."""
    count = 1
    for option in ("--policy", "--budget"):
        if option in words[:-1]:
            count *= words[words.index(option) + 1].count(",") + 1
    return min(count, 10_000)


class Checker:
    def __init__(self, kvlab, scratch):
        self.kvlab, self.scratch = kvlab, scratch
        self.env = dict(os.environ, TMPDIR=str(scratch), OMP_NUM_THREADS="1")
        self.codes = collections.Counter()
        self.base = max(BASE, self.peak_of("policies"))

    def faults(self, case):
        """Runs the case in the current folder. Returns its faults, each as (kind, text)."""
        found = []
        before, size = files_of(".")
        for step, writes in ((case.words, case.writes_inputs), (case.then, False)):
            if not step:
                break
            try:
                code, out, err, work, peak, killed = run([self.kvlab, *step], self.env)
            except OSError as error:
                if error.errno != errno.E2BIG:  # the system refuses words of over 128 KiB
                    raise
                break
            self.codes[code] += 1
            found += self.check_run(step, code, out, err, work, peak, killed, size)
            after, _ = files_of(".")
            changed = [name for name in before if after.get(name) != before[name]]
            if changed and (code != 0 or not writes):
                found.append(("changed input", ", ".join(changed)))
            if left := [name for name in after if ".part" in name]:
                found.append(("left", ", ".join(left)[:200]))
            if code == 2 and (made := [name for name in after if name not in before and ".part" not in name]):
                found.append(("refused, but written", ", ".join(made)[:200]))
            if code != 0:
                break
            before = after
        if left := list(self.scratch.iterdir()):
            found.append(("scratch left", str(left)[:200]))
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
        return found

    def peak_of(self, *words):
        """The peak memory, in bytes, of a command that reads no file."""
        folder = self.scratch.parent / "base" / "here"
        folder.mkdir(parents=True)
        os.chdir(folder)
        code, _, err, _, peak, _ = run([self.kvlab, *words], self.env)
        assert code == 0, err
        return peak

    def check_run(self, words, code, out, err, work, peak, killed, size):
        found = []
        if killed or work > WORK + WORK_SWEPT * swept(words):
            found.append(("hang", f"{work:.1f} s of work"))
        elif code < 0 or code > 2:
            found.append(("signal" if code < 0 or code >= 128 else "exit code", str(code)))
        elif code == 1 and words[0] not in ("verify", "trace"):
            found.append(("exit code", "1"))
        text = err.decode("utf-8", "backslashreplace")
        lines = [line for line in text.split("\n") if line]
        if code == 2 and len(lines) != 1:
            found.append(("lines", f"{len(lines)} of a refusal"))
        if code == 2 and len(err) > 1100:
            found.append(("lines", f"{len(err)} bytes of a refusal"))
        if match := LIBRARIES.search(text):
            if not any(match.group() in word for word in words):
                found.append(("library", match.group()))
        for stream in (out, err):
            try:
                shown = stream.decode()
            except UnicodeDecodeError:
                found.append(("not UTF-8", repr(stream[:100])))
                continue
            if bad := re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]", shown):
                found.append(("control character", repr(bad.group())))
        if not killed and peak > self.base + (64 << 20) + 4 * size + SWEPT * swept(words):
            found.append(("memory", f"{peak >> 20} MiB for {size} bytes"))
        return [(kind, f"{what}; {lines[0][:300] if lines else ''}") for kind, what in found]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kvlab")
    parser.add_argument("source")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--python")
    parser.add_argument("--report")
    requested = parser.parse_args()
    kvlab, began = os.path.abspath(requested.kvlab), time.monotonic()
    counts, faults = collections.Counter(), []
    with tempfile.TemporaryDirectory(prefix="kvlab-generated-") as whole:
        root = pathlib.Path(whole)
        for name in ("bases", "scratch"):
            (root / name).mkdir()
        bases = Bases(kvlab, os.path.abspath(requested.source), root / "bases")
        checker = Checker(kvlab, root / "scratch")
        for number in range(requested.first, requested.first + requested.runs):
            folder = root / "case" / "here"
            folder.mkdir(parents=True)
            os.chdir(folder)
            kind, case = cases.make(requested.seed, number, bases)
            counts[kind] += 1
            for fault, what in checker.faults(case):
                faults.append(f"{fault}: {kind} --seed {requested.seed} --first {number}: {what}: {' '.join(case.words)[:300]!a}")
                print(faults[-1], flush=True)
            os.chdir(root)
            shutil.rmtree(root / "case")
            if number % 500 == 499:
                print(f"# {sum(counts.values())} runs, exit codes {dict(checker.codes)}", flush=True)
        if requested.python:
            script = pathlib.Path(__file__).with_name("python_cases.py")
            words = [requested.seed, requested.first, requested.runs, bases.trace3, bases.windows, bases.folder / "text"]
            done = subprocess.run([requested.python, script, *map(str, words)], capture_output=True, text=True)
            counts["python"] = requested.runs
            lines = done.stdout.splitlines()
            found = [f"python: {line}" for line in lines if not line.startswith("done")]
            if done.returncode or not lines or not lines[-1].startswith("done"):
                found.append(f"python: ended with {done.returncode} after {lines[-1:]}: {done.stderr[-1500:]}")
            faults += found
            print("\n".join(found))
    summary = f"seed {requested.seed}, {sum(counts.values())} runs in {time.monotonic() - began:.0f} s: {dict(counts)}; exit codes {dict(checker.codes)}"
    if requested.report:
        with open(requested.report, "a") as file:
            file.write("\n".join([summary, *faults, ""]))
    print(summary)
    sys.exit(f"{len(faults)} faults" if faults else 0)


if __name__ == "__main__":
    main()
