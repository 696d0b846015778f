"""Tests that the time for reading a file grows in proportion to its size. In each JSON file, each list, object and text
in turn is made long, and then ten times as long.

growth_test.py KVLAB SOURCE [--only WORD] [--report FILE]

A list gets many copies of its first element: in one test equal copies, in another one different ones. An object gets
many unknown keys, and a text gets many characters. Tests every sixteenth place, or all of them with --only or if
KVLAB_EVERY is set in the environment. There are two kinds of faults. The longer file takes more than MIN seconds of
processor time and more than SHARE times as long as the shorter one. Or a refusal is not one line with exit code 2.
"""

import argparse
import copy
import json
import os
import pathlib
import shutil
import struct
import sys
import tempfile

import cases
from bases import PROMPT, Bases
from generated_test import run

SHORT, LONG = 150_000, 1_500_000  # bytes that are added to a file
MIN, SHARE = 1.0, 25  # seconds, and a ratio of times; time in proportion to size gives a ratio of 10


def places(node, path=()):
    """Yields the path of every list, object and text."""
    if isinstance(node, (dict, list, str)):
        yield path
    if isinstance(node, (dict, list)):
        keys = list(node) if isinstance(node, dict) else range(min(len(node), 2))
        if isinstance(node, dict) and (len(keys) > 30 or any(isinstance(v, dict) and "dtype" in v for v in node.values())):
            keys = keys[:4]  # the entries of such a table are similar
        for key in keys:
            yield from places(node[key], (*path, key))


def is_list(node, path):
    for step in path:
        node = node[step]
    return isinstance(node, list)


def numbered(node, number):
    """`node` with the number appended to its first text or in place of its first integer, so that all copies differ."""
    if isinstance(node, str):
        return f"{node}{number}"
    if isinstance(node, int) and not isinstance(node, bool):
        return number
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        if isinstance(node[key], (str, list, dict)):
            node[key] = numbered(node[key], number)
            break
    return node


def grown(node, path, size, distinct):
    """The JSON text of a copy of `node` in which the value at `path` is about `size` bytes longer."""
    whole = {"": copy.deepcopy(node)}
    holder, key = whole, ""
    for step in path:
        holder, key = holder[key], step
    value = holder[key]
    if isinstance(value, str):
        holder[key] = value + "x," * (size // 2)
    elif isinstance(value, dict):
        one = next(iter(value.values()), 1)
        value |= {f"key{i}": one for i in range(size // (len(json.dumps(one)) + 10))}
    else:
        one = value[0] if value else 1
        count = size // (len(json.dumps(one)) + 2)
        value += [numbered(copy.deepcopy(one), 7_000_000 + i) if distinct else one for i in range(count)]
    return json.dumps(whole[""])


def header(data):
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


class Files:
    """The files to test. Reads their contents, and writes them with a changed text for the commands that read them."""

    def __init__(self, bases):
        self.bases, root = bases, bases.folder
        generate = ["generate", "--model", "model", "--prompt", PROMPT, "--max-new-tokens", "2"]
        replay = ["replay", "--trace", "trace", "--policy", "h2o", "--budget", "16", "--out", "out"]
        policy = ["generate", "--model", str(bases.windows), "--prompt", PROMPT, "--policy-file", "here/policy.json"]
        budgets = ["replay", "--trace", str(bases.trace3), "--policy", "h2o", "--budget", "@here/budgets.json", "--out", "out"]
        plan = ["replay", "--trace", str(bases.trace3), "--policy", "full", "--tiers", "@here/kvlab.json", "--out", "out"]
        self.all = [
            ("config.json", bases.windows, "model", generate),
            ("tokenizer.json", bases.windows, "model", generate),
            ("model.safetensors", bases.windows, "model", generate),
            ("manifest.json", bases.trace3, "trace", ["trace", "verify", "trace"]),
            ("tokens.safetensors", bases.trace3, "trace", ["trace", "verify", "trace"]),
            ("shard-00000.safetensors", bases.trace3, "trace", replay),
            ("policy.json", root, "here", policy),
            ("budgets.json", root, "here", budgets),
            ("kvlab.json", root, "here", plan),
            ("transformers.json", root, "here", ["export", "here/transformers.json", "--for", "transformers"]),
            ("run.json", root / "run", "run", ["report", "run", "--out", "out.html"]),
            ("kept.json", root / "run", "run", ["report", "run", "--out", "out.html"]),
            ("eval.json", root / "eval", "eval", ["report", "eval", "--out", "out.html"]),
        ]

    def content(self, name, source):
        data = (source / name).read_bytes()
        if not name.endswith(".safetensors"):
            value = json.loads(data)
            return value
        value, _ = header(data)
        if name.startswith("shard"):
            value["__metadata__"] = {k: json.loads(v) if v[:1] in "[{" else v for k, v in value["__metadata__"].items()}
        return value

    def write(self, name, source, folder, text):
        if folder == "here":
            pathlib.Path(folder).mkdir()
        else:
            cases.link(source, folder, (name,))
        if name.endswith(".safetensors"):
            value = json.loads(text)
            if name.startswith("shard"):
                value["__metadata__"] = {k: v if isinstance(v, str) else json.dumps(v) for k, v in value["__metadata__"].items()}
            _, rest = header((source / name).read_bytes())
            encoded = json.dumps(value).encode()
            pathlib.Path(folder, name).write_bytes(struct.pack("<Q", len(encoded)) + encoded + rest)
        else:
            pathlib.Path(folder, name).write_text(text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kvlab")
    parser.add_argument("source")
    parser.add_argument("--only", default="")
    parser.add_argument("--report")
    requested = parser.parse_args()
    report = requested.report and open(requested.report, "a", buffering=1)
    stride = 1 if requested.only or os.environ.get("KVLAB_EVERY") else 16
    kvlab, faults, count, worst = os.path.abspath(requested.kvlab), [], 0, (0.0, "")
    env = dict(os.environ, OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory(prefix="kvlab-growth-") as whole:
        root = pathlib.Path(whole)
        (root / "bases").mkdir()
        bases = Bases(kvlab, os.path.abspath(requested.source), root / "bases")
        files = Files(bases)

        def timed(name, source, folder, words, text):
            here = root / "case" / "here"
            here.mkdir(parents=True)
            os.chdir(here)
            files.write(name, source, folder, text)
            code, _, err, work, _, killed = run([kvlab, *words], env)
            os.chdir(root)
            shutil.rmtree(root / "case")
            line = err.decode("utf-8", "replace").strip()
            known = (0, 1, 2) if words[0] == "trace" else (0, 2)  # `trace verify` exits with 1 for a wrong trace
            if killed or code not in known or (code == 2 and ("\n" in line or len(line) > 1100)):
                faults.append(f"{what}: exit code {code}, {line[-300:]}")
            return work, line

        for name, source, folder, words in files.all:
            value = files.content(name, source)
            for path in [*places(value)][::stride]:
                what = name + "".join(f"[{key!r}]" for key in path)
                if requested.only not in what:
                    continue
                for distinct in (False, True) if is_list(value, path) else (False,):
                    short, _ = timed(name, source, folder, words, grown(value, path, SHORT, distinct))
                    long, line = timed(name, source, folder, words, grown(value, path, LONG, distinct))
                    count += 1
                    worst = max(worst, (long, what))
                    if long > MIN and long > SHARE * short:
                        faults.append(f"{what}: {short:.2f} s, and {long:.2f} s at ten times the length; {line[:200]}")
                    if report:
                        report.write(f"{what} {distinct} {short:.3f} {long:.3f} {line[:150]}\n")
    for fault in faults:
        print(fault)
    print(f"{count} places, at most {worst[0]:.2f} s of work, of {worst[1]}")
    sys.exit(f"{len(faults)} faults" if faults else 0)


if __name__ == "__main__":
    main()
