"""How files of a trace are written by Python, whole or not at all; needs xxhash."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from kvlab._files import unfinished

FORMAT = 2

# What names in a trace must not hold: C0, DEL, C1 and the marks that turn the direction of text.
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Refused(ValueError):
    """Bad input: one line that says what, where, and what would be right."""


def one_line(error: object, most: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[:most] + "..."


def name_in_trace(text: str) -> str:
    """With a space for each control character, which kvlab refuses in names."""
    return CONTROLS.sub(" ", text)


def xxh3_of(path: pathlib.Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return str(digest.hexdigest())


def xxh3_of_weights(single: pathlib.Path | None, index: pathlib.Path | None) -> str:
    """Of a checkpoint's one file; of several, the checksum of their checksums in the order of their names."""
    if single:
        return xxh3_of(single)
    if not index:
        return ""
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return xxhash.xxh3_64("".join(xxh3_of(index.parent / name) for name in names).encode()).hexdigest()


def sync(path: pathlib.Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_by_rename(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> str:
    """write(an unfinished file), sync, rename, sync the folder. Returns the file's checksum."""
    part = unfinished(path)
    try:
        write(part)
        sync(part, os.O_RDWR)
        checksum = xxh3_of(part)
        os.replace(part, path)
        sync(path.parent, os.O_RDONLY)
        return checksum
    finally:
        part.unlink(missing_ok=True)


def write_manifest(directory: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    text = json.dumps(manifest, indent=1) + "\n"
    write_by_rename(directory / "manifest.json", lambda part: part.write_text(text))
