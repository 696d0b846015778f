"""Tests that each command that can run longer than a second ends within a second of its first SIGINT or SIGTERM, and
leaves no incomplete file.

command_signals_test.py KVLAB SOURCE [--only COMMAND]

The limit of a second is for a process that gets enough processor time. On a busy machine, a process that gets little
processor time has five seconds.

The exit code is 128 plus the signal's number, and the last line says that the command was stopped. No output may exist
under its final name, except documented ones: RUN.part of a replay or a task, and a trace that `trace seal` saves. If a
step takes longer than a second, the process ends in the middle of the step. Only in this case may a .part file and a
scratch folder remain. The next command removes them.
"""

import argparse
import json
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

QUICK = 1.25  # seconds until the end: 1 as in docs/reference/security.md, plus 0.25 until this test notices
BUSY, LITTLE = 5.75, 0.5  # seconds until the end of a process that gets at most LITTLE seconds of processor time
DELAY, SOON = 0.4, 0.1  # seconds from the installation of the signal handler to the signal
LONG_STEP = "in the middle of a long step"
# Commands that take less than a second for any input, because they read no long file and no model.
SHORT = {"export", "manual"}
# Commands that need a GPU, or that run other commands.
ELSEWHERE = {"bench", "demo"}


def limited():
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


def listens(pid, name):
    """Whether the process has installed a handler for the signal. The test waits for this, because it takes time on a
    busy machine."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", pathlib.Path(f"/proc/{pid}/status").read_text(), re.M)
    return caught is not None and int(caught.group(1), 16) >> (getattr(signal, name) - 1) & 1 == 1


def work_of(pid):
    """The processor time that a process has used, in seconds."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Inputs:
    """Long inputs, which are made once."""

    def __init__(self, kvlab, source, folder):
        self.kvlab, self.folder = kvlab, folder
        self.tiny, self.story = source / "engine/models/tiny", source / "traces/samples/tiny-story"
        # Another text than in policies/, so that no other test has put its compiled code into the cache.
        self.header = folder / "stopped.hpp"
        self.header.write_text((source / "policies/recency/lru.hpp").read_text().replace('"lru"', '"stopped"'))
        text = (source / "tools/texts/austen-emma.txt").read_bytes()
        self.text, self.long_text = folder / "text", folder / "long-text"
        self.text.write_bytes(text * 3)
        with open(self.long_text, "wb") as file:
            for _ in range(100_000_000 // len(text)):
                file.write(text)
        self.run, self.trace = folder / "run", folder / "trace"
        self.made("replay", "--trace", self.story, "--policy", "h2o,lru", "--budget", "16,32,64", "--out", self.run)
        self.made("capture", "--model", self.tiny, "--prompt-file", self.text, "--teacher-forced", "--prompt-tokens", "4000", "--max-tokens",
                  "4400", "--beyond-context", "--out", self.trace)  # fmt: skip
        self.long_run = folder / "long-run"
        shutil.copytree(self.run, self.long_run)
        lines = (self.run / "results.csv").read_text().splitlines(True)
        with open(self.long_run / "results.csv", "w") as file:
            file.writelines(lines[:1])
            for _ in range(200_000_000 // sum(map(len, lines))):
                file.writelines(lines[1:])
        self.long_json = folder / "long-json"
        shutil.copytree(self.run, self.long_json)
        with open(self.long_json / "run.json", "w") as file:  # parsing is one step, which checks for no signal
            file.write('{"x":[' + "0.1234567890123456," * 13_000_000 + "1]}")

        self.link = folder / "link.json"
        self.link.write_text(json.dumps({
            "bench": "link", "format": 1, "device": "a GPU", "read_bytes_per_second": 4.5e12, "copy_bytes_per_second": 55e9,
            "launch_microseconds": 3, "fetches": [{"row_bytes": 512, "rows": 64, "microseconds": 8}],
        }))  # fmt: skip

    def made(self, *words):
        done = subprocess.run([self.kvlab, *map(str, words)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{words}: {done.stderr}")


def commands(at):
    """Returns calls that run for seconds, as (command, arguments, files that the call may leave)."""
    model, text = ("--model", at.tiny), ("--text", at.text)
    many = ("--policy", "h2o,lru,tova,sink", "--budget", "16,32,64,128")
    long = ("--beyond-context",)
    return [
        ("capture", (*model, "--prompt-file", at.text, "--teacher-forced", "--prompt-tokens", "12000", *long, "--out", "out"), ["out"]),
        ("trace", ("verify", at.trace, "--threads", "1"), []),
        ("replay", ("--trace", at.trace, *many, "--threads", "1", "--out", "out"), ["out.part"]),
        ("report", (at.long_run, "--out", "out"), []),
        ("report", (at.long_json, "--out", "out"), []),
        ("compare", (at.long_run, at.long_run, "--out", "out"), []),
        ("deploy", (at.long_run, "--budget", "16", "--out", "out"), []),
        ("deploy", (at.run, "--budget", "16", "--confirm", "2", *model, *text, "--out", "out"), []),
        ("plan", (at.long_run, "--by", "head", "--budget", "16", "--policy", "h2o", "--out", "out"), []),
        ("predict", (at.long_run, "--link", at.link, *model), []),
        ("plan", ("--trace", at.trace, "--budget", "4bits", "--threads", "1", "--out", "out"), []),
        ("generate", (*model, "--prompt", "It was", "--policy", "sink", "--budget", "64", "--max-new-tokens", "1000000", *long), []),
        ("generate", (*model, "--prompt-file", at.long_text, "--max-new-tokens", "2"), []),
        ("eval", (*model, *text, *many, "--out", "out"), []),
        ("fidelity", (*model, *text, *many, "--out", "out"), []),
        ("tune", (*model, *text, "--policy", "h2o,lru", "--budget", "64", "--out", "out"), []),
        ("task", ("passkey", *model, "--policy", "h2o,lru", "--budget", "64", "--samples", "50", "--out", "out"), ["out.part"]),
        ("verify", (*model, "--prompt-file", at.text, "--policy", "h2o,lru", "--budget", "64", "--max-new-tokens", "900", *long), []),
        ("policies", ("--policy-source", at.header), []),
    ]


OVER = "it was over before the signal"
SHORTEST = 0.002  # seconds
CHECKSUM = "was changed after run.json was written"  # the error of a command that has read the long run to its end


class Checker:
    def __init__(self, kvlab, at):
        self.kvlab, self.at, self.longest, self.long_steps = kvlab, at, 0.0, 0

    def faults(self, command, words, may_be_left, name):
        """Runs a command in the current folder, sends it the signal, and returns its faults. If the command ends before
        the signal, it runs again with an earlier signal."""
        delay = SOON if command == "trace" or self.at.long_json in words else DELAY
        while (found := self.try_signal(command, words, may_be_left, name, delay)) == [OVER] and delay > SHORTEST:
            delay /= 3
            shutil.rmtree("scratch")
            for left in os.listdir():
                shutil.rmtree(left) if os.path.isdir(left) else os.remove(left)
        return found

    def try_signal(self, command, words, may_be_left, name, delay):
        """Returns the faults of a command that gets the signal `delay` seconds after it has installed its handler."""
        os.mkdir("scratch")
        there = set(os.listdir())
        env = dict(os.environ, TMPDIR=os.path.abspath("scratch"), XDG_CACHE_HOME=os.path.abspath("scratch/cache"))
        with open("../said", "wb") as said:  # env restores SIGINT, which a shell's background jobs ignore
            process = subprocess.Popen(["env", "--default-signal=INT,TERM", self.kvlab, command, *map(str, words)],
                                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, env=env, preexec_fn=limited)  # fmt: skip
        while process.poll() is None and not listens(process.pid, name):
            time.sleep(0.01)
        time.sleep(delay)
        if process.poll() is not None:
            return [OVER]
        before, began = work_of(process.pid), time.monotonic()
        # Not process.send_signal(): it takes the status of a process that has just ended, and wait4() finds none.
        os.kill(process.pid, getattr(signal, name))
        _, status, used = os.wait4(process.pid, 0)
        took, work = time.monotonic() - began, used.ru_utime + used.ru_stime - before
        process.returncode = os.waitstatus_to_exitcode(status)
        said = pathlib.Path("../said").read_text(errors="backslashreplace")
        # The command ended before it got the signal, because it was complete, or because it refused a file that it had
        # read to the end.
        if CHECKSUM in said or (process.returncode == 0 and not said):
            return [OVER]
        self.longest = max(self.longest, took)
        self.long_steps += LONG_STEP in said
        found = [] if self.at.long_json not in words or LONG_STEP in said else ["no long step was ended"]
        if took > QUICK and not (work < LITTLE and took < BUSY):
            found.append(f"took {took:.2f} s, and {work:.2f} s of work")
        if process.returncode != 128 + getattr(signal, name):
            found.append(f"exit code {process.returncode}")
        last = said.rstrip("\n").split("\n")[-1]
        if f"stopped by {name}" not in last:
            found.append(f"said {last!r}")
        if left := sorted(path for path in set(os.listdir()) - there - set(may_be_left) if not (LONG_STEP in last and path.endswith(".part"))):
            found.append(f"left {left}")
        scratch = [path for path in os.listdir("scratch") if path != "cache"]
        if scratch and LONG_STEP not in last:
            found.append(f"left in TMPDIR: {scratch}")
        print(f"{command} {name}: {took:.2f} s, {work:.2f} s of work, {last[-110:]!r}", flush=True)
        return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kvlab")
    parser.add_argument("source")
    parser.add_argument("--only", default="")
    requested = parser.parse_args()
    kvlab, faults, quick = os.path.abspath(requested.kvlab), [], 0
    listed = subprocess.run([kvlab, "help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"^  ([a-z]+) {2,}", listed.split("Commands")[1], re.M))
    with tempfile.TemporaryDirectory(prefix="kvlab-signals-") as whole:
        root = pathlib.Path(whole)
        at = Inputs(kvlab, pathlib.Path(requested.source).resolve(), root)
        calls, checker = commands(at), Checker(kvlab, at)
        if missing := known - {call[0] for call in calls} - SHORT - ELSEWHERE:
            faults.append(f"no call here of: {', '.join(sorted(missing))}")
        for command, words, may_be_left in calls:
            if requested.only not in command:
                continue
            for name in ("SIGINT", "SIGTERM"):
                (root / "here").mkdir()
                os.chdir(root / "here")
                found = checker.faults(command, words, may_be_left, name)
                # On a busy machine, a short command can end before it gets the signal.
                if found == [OVER] and (at.long_run in words or command in ("trace", "policies")):
                    quick += 1
                    found = []
                faults += [f"{command} {name}: {fault}: {' '.join(map(str, words))}" for fault in found]
                os.chdir(root)
                shutil.rmtree(root / "here")
    print("\n".join(faults))
    print(f"{len(calls)} commands, two signals each; the longest end took {checker.longest:.2f} s; {checker.long_steps} long steps; "
          f"{quick} were over before the signal came")
    sys.exit(f"{len(faults)} faults" if faults else 0)


if __name__ == "__main__":
    main()
