#!/usr/bin/env python3
"""emptied_test.py KVLAB SOURCE: tests commands on folders that other commands wrote, in which one list, object or table
is empty or one key is missing. Every command that reads such a folder either works, or exits with 2, prints one line
and leaves no file. Runs every sixteenth case, or all of them if KVLAB_EVERY is set in the environment.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

KVLAB, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
MAX_OF_A_LIST = 2  # how many entries of a list are tried; the others are similar
STRIDE = 1 if os.environ.get("KVLAB_EVERY") else 16


def kvlab(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([KVLAB, *words], capture_output=True)


def make() -> dict[str, list[list[str]]]:
    """Makes the folders. Returns for each the commands that read it."""
    tiny, text = str(SOURCE / "engine/models/tiny"), "text"
    pathlib.Path(text).write_bytes((SOURCE / "tools/texts/austen-emma.txt").read_bytes()[:4000])
    loop = ["--model", tiny, "--text", text, "--max-tokens", "200", "--threads", "2", "--prompt-tokens", "60"]
    sweep = ["--policy", "h2o,lru", "--budget", "32,64"]
    for words in (
        ["replay", "--trace", str(SOURCE / "traces/samples/tiny-story"), *sweep, "--layers", "0", "--out", "run"],
        ["eval", *loop, *sweep, "--out", "eval"],
        ["task", "passkey", "--model", tiny, *sweep, "--words", "40", "--depth", "50%", "--samples", "2", "--max-new-tokens",
         "4", "--out", "task"],
        ["fidelity", *loop, "--policy", "h2o,lru,window", "--budget", "32,64", "--out", "fidelity"],
        ["tune", *loop, "--policy", "h2o,lru", "--budget", "64", "--out", "tuned"],
    ):
        done = kvlab(*words)
        assert done.returncode == 0, done.stderr
    page = ["--out", "page"]
    return {
        "run": [["report", "run", *page], ["compare", "run", "run", *page], ["deploy", "run", "--budget", "32", *page],
                ["plan", "run", "--by", "head", "--budget", "48", *page]],
        "eval": [["report", "eval", *page], ["compare", "eval", "eval", *page]],
        "task": [["report", "task", *page], ["compare", "task", "task", *page]],
        "fidelity": [["report", "fidelity", *page], ["deploy", "run", "--budget", "32", "--fidelity",
                                                     "fidelity/fidelity.json", *page]],
        "tuned": [["report", "tuned", *page], ["generate", "--model", tiny, "--prompt", "x", "--policy-file", "tuned",
                                               "--max-new-tokens", "2"]],
    }


def emptied(value: Any, put: Any) -> Iterator[None]:
    """Empties each list, object and text in `value`, and removes each key, one after another. Calls `put` with each
    replacement, yields, and then restores the value."""
    for empty in {list: [[]], dict: [{}], str: [""]}.get(type(value), []):
        if value != empty:
            put(empty)
            yield
            put(value)
    keys = list(value) if isinstance(value, dict) else range(min(len(value), MAX_OF_A_LIST)) if isinstance(value, list) else []
    for key in keys:
        if isinstance(value, dict):
            gone = {name: other for name, other in value.items() if name != key}
            put(gone)
            yield
            put(value)
        yield from emptied(value[key], lambda other, key=key: value.__setitem__(key, other))


def variants(file: pathlib.Path) -> Iterator[str]:
    """Yields the file's text with one part of it emptied, for each part."""
    text = file.read_text()
    if file.suffix == ".csv":
        head, *rows = text.splitlines()
        yield ""
        yield head + "\n"
        yield "\n".join([head, *(row for row in rows if not row.startswith(rows[0].split(",")[0] + ","))]) + "\n"
        for column in range(len(head.split(","))):
            yield "\n".join([head, *(",".join(["" if c == column else cell for c, cell in enumerate(row.split(","))])
                                     for row in rows)]) + "\n"
        return
    top = [json.loads(text)]
    for _ in emptied(top[0], lambda other: top.__setitem__(0, other)):
        yield json.dumps(top[0])


def check(words: list[str], what: str) -> None:
    before = set(os.listdir())
    done = kvlab(*words)
    lines = done.stderr.decode().splitlines()
    made = set(os.listdir()) - before
    problem = (
        f"exit code {done.returncode}" if done.returncode not in (0, 2)
        else f"{len(lines)} lines" if done.returncode == 2 and len(lines) != 1
        else f"left {made}" if done.returncode == 2 and made
        else ""
    )
    for name in made:
        pathlib.Path(name).unlink()
    if problem:
        sys.exit(f"FAILED: {problem}: kvlab {' '.join(words)}: {what}: {done.stderr.decode()}")


def main() -> None:
    commands = make()
    tried = 0
    for name, readers in commands.items():
        place = pathlib.Path(name)
        for file in sorted(place.glob("*")) if place.is_dir() else [place]:
            if not file.is_file() or file.suffix not in ("", ".csv", ".json"):
                continue
            whole = file.read_bytes()
            seen = set()
            for text in variants(file):
                if text in seen:
                    continue
                seen.add(text)
                if len(seen) % STRIDE:
                    continue
                file.write_text(text)
                if name == "run" and file.suffix == ".csv":
                    sign(place)
                for words in readers:
                    check(words, f"{file}: {text[:4000]}")
                    tried += 1
            file.write_bytes(whole)
            if name == "run":
                sign(place)
    print(f"emptied: {tried} readings ended as they should")


def sign(run: pathlib.Path) -> None:
    """Updates the checksum of results.csv in run.json."""
    hashed = subprocess.run([sys.executable, "-c", "import xxhash"], capture_output=True)
    if hashed.returncode != 0:
        return
    import xxhash

    info = json.loads((run / "run.json").read_text())
    info["results_xxh3"] = xxhash.xxh3_64_hexdigest((run / "results.csv").read_bytes())
    (run / "run.json").write_text(json.dumps(info))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
