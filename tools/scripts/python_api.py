#!/usr/bin/env python3
"""Writes python-api.md and python-hf-api.md from kvlab's docstrings: python3 tools/scripts/python_api.py [FOLDER]

FOLDER is build/docs by default. The script reads the sources, so the package need not be built or installed. It fails
if a public name has no docstring.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tools" / "python" / "kvlab"
WIDTH = 120
TITLES = {
    "_trace": "Traces",
    "_run": "Replays",
    "_formats": "Storage formats",
    "_policy": "Policies",
    "_rows": "What a policy can read",
    "_commands": "The end-to-end evaluation",
}
HEAD = """# Python, name by name

This page lists the names of the package `kvlab`, and `docs/guides/python.md` explains them by examples. The names of
`kvlab.hf` have [a separate page](python-hf-api.md). `tools/scripts/python_api.py` makes this page from the docstrings."""
HF_HEAD = """# kvlab.hf, name by name

This page lists the names of `kvlab.hf`, and `docs/guides/python.md` explains them by examples.
`tools/scripts/python_api.py` makes this page from the docstrings."""


def names_by_module(path: pathlib.Path) -> dict[str, list[str]]:
    """Returns a dict from each module of the package to the names that this __init__.py imports from the module."""
    return {
        node.module.removeprefix("kvlab.").removeprefix("hf."): [alias.name for alias in node.names]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and re.match(r"kvlab\.(?!_kvlab)", node.module)
    }


def doc(node: ast.AST) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")  # type: ignore[arg-type]


def written(node: ast.expr | None) -> str:
    return ast.unparse(node).replace("'", '"') if node else ""


def code(text: str) -> str:
    return f"```py\n{text}\n```"


def filled(text: str) -> str:
    """Fills each paragraph to the width of the page. A paragraph that begins with >>> is an example and stays code."""
    return "\n\n".join(
        code(part) if part.startswith(">>> ") else textwrap.fill(" ".join(part.split()), WIDTH, break_on_hyphens=False)
        for part in text.split("\n\n")
    )


def parameters(node: ast.FunctionDef, is_method: bool) -> list[str]:
    """The parameters as they are written, with the bare * before keyword-only ones."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = list(zip(plain, defaults))[1 if is_method else 0 :]
    texts = [_parameter(*pair) for pair in pairs]
    if arguments.vararg:
        texts.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        texts.append("*")
    texts += [_parameter(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    if arguments.kwarg:
        texts.append("**" + _parameter(arguments.kwarg, None))
    return texts


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    typed = argument.arg + (f": {written(argument.annotation)}" if argument.annotation else "")
    if default is None:
        return typed
    return typed + (" = " if argument.annotation else "=") + written(default)


def signature(name: str, node: ast.FunctionDef, is_method: bool = False) -> str:
    back = f" -> {written(node.returns)}" if node.returns and node.name != "__init__" else ""
    given = parameters(node, is_method)
    line = f"{name}({', '.join(given)}){back}"
    if len(line) <= WIDTH - 10:
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in given), f"){back}"])


def fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """(name and type, docstring) of each field of a NamedTuple or dataclass."""
    for part, after in zip(node.body, [*node.body[1:], None]):
        if isinstance(part, ast.AnnAssign):
            told = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield f"{ast.unparse(part.target)}: {written(part.annotation)}", str(told)


def public(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Public methods and properties, in the order of the source."""
    return [part for part in node.body if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")]


def is_property(node: ast.FunctionDef) -> bool:
    return "property" in [ast.unparse(decorator) for decorator in node.decorator_list]


def listed(entries: Iterable[tuple[str, str]]) -> str:
    """A code block of the entries, with their descriptions as comments."""
    lines = []
    for shown, told in entries:
        beside = f"{shown:<28}  # {' '.join(told.split())}"
        if not told:
            lines.append(shown)
        elif len(beside) <= WIDTH:
            lines.append(beside)
        else:
            lines += [*textwrap.wrap(" ".join(told.split()), WIDTH, initial_indent="# ", subsequent_indent="# "), shown]
    return code("\n".join(lines)) if lines else ""


def class_parts(shown: str, node: ast.ClassDef) -> Iterator[str]:
    made = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    is_called = made is not None and doc(made)  # users do not call constructors without a docstring
    if made is not None and is_called:
        yield code(signature(shown, made, True))
    yield filled(doc(node))
    if made is not None and is_called:
        yield filled(doc(made))
    short, long = [*fields(node)], []
    for part in public(node):
        if is_property(part):
            short.append((f"{part.name}: {written(part.returns)}", doc(part)))
        else:
            name = f"{node.name}.{part.name}"
            long += [f"#### {name}", code(signature(name, part, True)), filled(doc(part))]
    yield listed(short)
    yield from long


def entry(shown: str, node: ast.stmt) -> Iterator[str]:
    """The section of one name."""
    yield f"### {shown}"
    if isinstance(node, ast.ClassDef):
        yield from class_parts(shown, node)
    elif isinstance(node, ast.FunctionDef):
        yield code(signature(shown, node))
        yield filled(doc(node))


def aliases(module: ast.Module, text: str) -> str:
    """Definitions of the type aliases that the signatures use."""
    entries = []
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper() and re.search(rf"\b{name}\b", text):
                entries.append(f"{name} = {written(node.value)}")
    return code("\n".join(entries)) if entries else ""


def section(path: pathlib.Path, names: list[str], prefix: str) -> list[str]:
    module = ast.parse(path.read_text())
    found = {node.name: node for node in module.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    parts: list[str] = []
    for name in sorted(names, key=lambda name: (isinstance(found[name], ast.ClassDef), name)):
        if not doc(found[name]):
            raise SystemExit(f"{path}: {name} has no docstring, and is public")
        parts += entry(f"{prefix}.{name}", found[name])
    return [aliases(module, "\n".join(parts)), *parts]


def joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def pages() -> dict[str, str]:
    parts = [HEAD]
    api_names = names_by_module(PACKAGE / "__init__.py")
    api_names.pop("hf", None)  # kvlab.hf has a separate page
    for home, title in TITLES.items():
        parts += [f"## {title}", *section(PACKAGE / f"{home}.py", api_names.pop(home), "kvlab")]
    if api_names:
        raise SystemExit(f"{PACKAGE}/__init__.py: {', '.join(api_names)}: has no title in tools/scripts/python_api.py")
    hf = PACKAGE / "hf"
    hf_parts = [HF_HEAD, filled(doc(ast.parse((hf / "__init__.py").read_text())))]
    for home, names in names_by_module(hf / "__init__.py").items():
        hf_parts += section(hf / f"{home}.py", names, "kvlab.hf")
    return {"python-api.md": joined(parts), "python-hf-api.md": joined(hf_parts)}


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)
        print(f"{folder / name}: {text.count(chr(10) + '### ')} names")


if __name__ == "__main__":
    main()
