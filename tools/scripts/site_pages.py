"""Adds pages to the site that are generated while it is built: a hook of MkDocs, named in .mkdocs.yml.

reference/python-api.md and python-hf-api.md: from the docstrings (python_api.py), without a build.
reference/commands.md: what `kvlab help COMMAND` prints, by build/kvlab or the kvlab of PATH. If neither exists, the
page says how to get the texts.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import shutil
import subprocess
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMANDS_HEAD = """# Commands

This page lists every command of `kvlab` with all of its options. It shows what `kvlab help COMMAND` prints.
"""
NO_PROGRAM = """
The site was built without the program, so the texts are missing here. `kvlab help` lists the commands, and
`kvlab help COMMAND` describes one. To have them on this page, run `./dev build` and then `./dev site`.
"""


def python_pages() -> dict[str, str]:
    """The pages of python_api.py by their names."""
    spec = importlib.util.spec_from_file_location("python_api", ROOT / "tools" / "scripts" / "python_api.py")
    if spec is None or spec.loader is None:
        raise RuntimeError("tools/scripts/python_api.py: cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages: dict[str, str] = module.pages()
    return pages


def help_text(program: str, *words: str) -> str:
    return subprocess.run([program, "help", *words], check=True, capture_output=True, text=True).stdout


def commands_page(program: str | None) -> str:
    """Every command's help, in the order in which `kvlab help` lists them."""
    if program is None:
        return COMMANDS_HEAD + NO_PROGRAM
    listed = re.findall(r"^  ([a-z]+) +(.+)$", help_text(program).split("\nCommands", 1)[1], re.MULTILINE)
    parts = [COMMANDS_HEAD, "| command | what it does |\n| --- | --- |"]
    parts[1] += "".join(f"\n| [`{name}`](#{name}) | {does.replace('|', chr(92) + '|')} |" for name, does in listed)
    for name, _ in listed:
        parts.append(f"## {name}\n\n```text\n{help_text(program, name).strip()}\n```")
    return "\n\n".join(parts) + "\n"


def program_path() -> str | None:
    built = ROOT / "build" / "kvlab"
    return str(built) if built.is_file() else shutil.which("kvlab")


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls this before it reads the navigation."""
    from mkdocs.structure.files import File  # only MkDocs runs this

    for name, text in {**python_pages(), "commands.md": commands_page(program_path())}.items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files
