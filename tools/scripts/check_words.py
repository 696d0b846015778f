#!/usr/bin/env python3
"""Refuses retired words in everything that people read and in names: check_words.py [PATH...], all files by default.

docs/reference/glossary.md has the vocabulary. A line that has to contain a retired word (an alias that is read for one
release, a task's word list) has the comment `old name`, or its file is listed in ALLOWED below.
"""

import pathlib
import re
import subprocess
import sys

# Retired words, as patterns, with what to write instead.
WORDS = {
    r"rungs?": "tier",
    r"ladders?": "tiers, tier plan",
    r"butterfl(?:y|ies)": "Hadamard rotation",
    r"(?:un)?squeez\w*": "cache positions",
    r"told[ _]apart": "significantly different",
    r"nobody": "no one reads a policy or a file as a person: name the subject",
    r"whoever": "name the subject",
    r"likewise": "also, too",
    r"of (?:its|their|his) own|one's own": "separate, or name what owns it",
    r"admit(?:s|t\w+)?|admissions?": "append",
    r"shr[iu]nk\w*": "compact",
    r"holds more": "over budget",
    r"first of the grid": "command-line order",
    r"contenders?": "eligible configuration",
    r"verdicts?": "recommendation",
    r"oracle_mass": "oracle_attention",
}
PATTERN = re.compile(r"(?<![a-zA-Z])(?:" + "|".join(f"({word})" for word in WORDS) + r")(?![a-z])", re.IGNORECASE)
"""Also finds the words as parts of names, such as `rung_of`, and `kMostRungs` after HUMPS has split it."""

STANDARD = re.compile(
    r"shrink_to_fit|--shrink|flex-shrink|\.(?:un)?squeeze\("  # names of C++, CSS and PyTorch
)
ALLOWED = (
    "tests/data/old_names/",  # what versions before 0.6 wrote
    "tests/tools/old_names_test.sh",
    "tests/python/test_old_names.py",
    "CHANGELOG.md",  # history
    "docs/reference/glossary.md",  # lists the old words
    "tools/scripts/check_words.py",
    "tools/texts/",
    "tools/demo/",
    "traces/samples/",
    "engine/models/",
    "engine/evaluation/task/haystack_text.cpp",  # prompts of tasks
    "engine/evaluation/task/sample.cpp",
)
TEXT = re.compile(r"\.(cpp|hpp|h|cuh?|c|py|pyi|sh|js|css|html|txt|cmake|in|md|toml|ya?ml|cff|ipynb|def)$|^dev$|^\.ci/run$")
HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def findings(path, text):
    for number, line in enumerate(text.splitlines(), 1):
        if "old name" in line:
            continue
        spread = STANDARD.sub("", HUMPS.sub(" ", line))
        for found in PATTERN.finditer(spread):
            word = next(word for word, group in zip(WORDS, found.groups()) if group)
            yield f"{path}:{number}: '{found.group(0)}' is retired; {WORDS[word]}: {line.strip()[:100]}"


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    listed = subprocess.run(["git", "ls-files", *sys.argv[1:]], cwd=root, check=True, capture_output=True, text=True)
    count = 0
    for path in listed.stdout.splitlines():
        if path.startswith(ALLOWED) or not TEXT.search(path):
            continue
        for finding in findings(path, (root / path).read_text(encoding="utf-8", errors="replace")):
            print(finding)
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
