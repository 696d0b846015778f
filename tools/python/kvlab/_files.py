"""Files that have their name only once they are whole."""

from __future__ import annotations

import pathlib
import secrets


def unfinished(path: pathlib.Path) -> pathlib.Path:
    """A new, empty file beside `path`, to be renamed to it: of a name that nobody can foresee, links not followed."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    part.touch(exist_ok=False)
    return part
