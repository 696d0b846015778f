"""The kernel library from Python: its structs are the header's, and its operators trace without a device."""

from __future__ import annotations

import ctypes
import pathlib
import re
from typing import Any

import pytest

from kvlab import _kvlab, _library

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = (ROOT / "kernels" / "kvlab.h").read_text()
LAYOUT = ROOT / "tests" / "data" / "kvlab-layout.txt"
NUMBERS = dict(re.findall(r"#define (KVLAB_\w+) (\d+)", HEADER))
TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "size_t": ctypes.c_size_t,
    "cudaError_t": ctypes.c_int,
    "cudaStream_t": ctypes.c_void_p,
    **{name: ctypes.c_int for name in re.findall(r"typedef enum[^}]*} (\w+);", HEADER)},
    **_library.STRUCTS,
}


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def members_of(body: str) -> list[tuple[str, Any]]:
    """(name, type) of the members of a struct of the header."""
    found: list[tuple[str, Any]] = []
    for line in without_comments(body).split(";"):
        words = line.replace("const ", "").split()
        if not words:
            continue
        for name in " ".join(words[1:]).split(","):
            name, _, count = name.strip().rstrip("]").partition("[")
            pointer = "*" in line
            kind = ctypes.c_void_p if pointer else TYPES[words[0].rstrip("*")]
            found.append((name.strip("* "), kind * int(NUMBERS.get(count, count)) if count else kind))
    return found


@pytest.mark.parametrize("name", _library.STRUCTS)
def test_structs_are_the_headers(name: str) -> None:
    end = HEADER.index(f"}} {name};")
    body = HEADER[HEADER.rindex("typedef struct {", 0, end) + len("typedef struct {") : end]
    theirs, ours = members_of(body), _library.STRUCTS[name]._fields_
    assert [member for member, _ in theirs] == [field[0] for field in ours]
    for (member, kind), field in zip(theirs, ours, strict=True):
        assert kind is field[1] or (ctypes.sizeof(kind) == ctypes.sizeof(field[1]) and member == "columns"), member


def layouts() -> str:
    """The sizes and offsets of the header's structs, one a line, behind its version."""
    numbers = re.findall(r"#define KVLAB_VERSION_M[AJIN]+OR (\d+)", HEADER)
    lines = [f"version {'.'.join(numbers)}"]
    for body, name in re.findall(r"typedef struct \{(.*?)\n\} (\w+);", HEADER, re.DOTALL):
        fields = members_of(body)
        struct: Any = type(name, (ctypes.Structure,), {"_fields_": fields})
        TYPES.setdefault(name, struct)
        members = (f"{member} {getattr(struct, member).offset}" for member, _ in fields)
        lines.append(f"{name} {ctypes.sizeof(struct)}: {', '.join(members)}")
    return "\n".join(lines) + "\n"


def test_a_layout_moves_with_the_version_alone() -> None:
    """Where this fails: raise KVLAB_VERSION_MINOR, then put what is found here into the file."""
    assert layouts() == LAYOUT.read_text()


@pytest.mark.parametrize("name", _library.FUNCTIONS)
def test_functions_are_the_headers(name: str) -> None:
    found = re.search(rf"([\w ]+[\w*]) \*?{name}\(([^)]*)\);", without_comments(HEADER))
    assert found, name
    taken = [given for given in found[2].split(",") if given.strip() != "void"]
    result, arguments = _library.FUNCTIONS[name]
    assert len(taken) == len(arguments)
    for given, kind in zip(taken, arguments, strict=True):
        words = given.replace("const ", "").split()
        pointer = "*" in given or words[0] == "cudaStream_t"
        assert pointer == (kind in (ctypes.c_void_p, ctypes.c_char_p) or hasattr(kind, "contents")), given
        if not pointer:
            assert kind is TYPES[words[0]], given
    returned = found[1].split()[-1]
    assert result in (ctypes.c_void_p, ctypes.c_char_p) if "*" in found[1] else result is TYPES[returned]


def test_the_version_is_the_header_s() -> None:
    numbers = dict(re.findall(r"#define KVLAB_VERSION_(MAJOR|MINOR) (\d+)", HEADER))
    assert 100 * int(numbers["MAJOR"]) + int(numbers["MINOR"]) == _library.VERSION


def test_without_the_library_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_KERNELS", "/nowhere/libkvlab_kernels.so")
    with pytest.raises(RuntimeError, match="there is no kernel library; KVLAB_CUDA=1 pip install"):
        _library.library.__wrapped__()


def test_operators_say_what_they_write_and_trace() -> None:
    torch = pytest.importorskip("torch")
    import kvlab.ops
    from torch._subclasses.fake_tensor import FakeTensorMode

    written = {
        argument.name for argument in torch.ops.kvlab.evicting_attention.default._schema.arguments if argument.is_write
    }
    assert written == {"positions", "lengths", "next_slots", "ages", "states", "workspace", "out"}
    with FakeTensorMode():
        x, n = torch.empty(1, 5, 64, device="cuda"), torch.empty(1, dtype=torch.int32, device="cuda")
        assert torch.ops.kvlab.write(x, x, n, n, None, n, n, n, x, x, n, x) is None
    with pytest.raises(NotImplementedError, match="CPU"):
        here, zero = torch.zeros(1, 5, 64), torch.zeros(1, dtype=torch.int32)
        torch.ops.kvlab.write(here, here, zero, zero, None, zero, zero, zero, here, here, zero, here)
    assert kvlab.ops.__all__


def plan_of(policy: str, budget: str, own: Any = ()) -> Any:
    return _kvlab.SlotPlan(_kvlab.CacheRequest(policy, list(own), budget, "dense", "", 0, 0.01, 1000, 2, 3))


def test_a_plan_has_slots_for_the_budget() -> None:
    assert plan_of("h2o", "40").slots.tolist() == [[40] * 3] * 2
    assert plan_of("h2o:every=8", "40").slots.tolist() == [[47] * 3] * 2
    assert plan_of("h2o:once", "40").slots.tolist() == [[1000] * 3] * 2
    plan = plan_of("h2o:sinks=4", "10%")
    assert plan.budgets[0, 0] == 100 and plan.sinks[1, 2] == 4 and plan.recent[0, 1] == 50
    live = plan.budgets.copy()
    assert plan.surplus(live, False).tolist() == [[1] * 3] * 2
    assert plan_of("h2o", "pyramid(40)").slots.mean() == 40


@pytest.mark.parametrize(
    ("policy", "budget", "message"),
    [
        ("h2o", "ada(40)", "ada.*the kernel library does not know it; a model on the CPU does"),
        ("lagkv", "40", "lagkv"),
        ("h2o", "", "needs one"),
        ("oracle_mass", "40", "knows the future"),
    ],
)
def test_what_the_library_does_not_hold_is_refused_by_name(policy: str, budget: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(policy, budget)


def test_operators_look_at_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from kvlab import ops

    class Library:  # takes whatever comes
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 0

    monkeypatch.setattr(ops, "library", Library)
    monkeypatch.setattr(ops, "_stream", lambda *_: 0)
    n = torch.zeros(2, dtype=torch.int32)
    keys, qkv, first_slot = torch.zeros(8, 64), torch.zeros(1, 8, 64), torch.arange(2) * 4
    given = {"names": ["key_norm"], "keys": qkv[:, 4:6], "first_slot": first_slot, "slots": n, "now": n[:1]}
    given |= {"values": keys, "unit_keys": None, "to": torch.zeros(8, 1), "output": None}
    for word, wrong, message in (
        ("first_slot", first_slot.int(), "first_slot is torch.int32 .*; torch.int64 on"),
        ("keys", given["keys"].double(), "keys is torch.float64 .*; torch.float32 on"),
        ("keys", given["keys"].transpose(1, 2), "keys is .*, not contiguous"),
        ("unit_keys", torch.zeros(2, 64).half(), "unit_keys is torch.float16"),
        ("to", torch.zeros(8, 2)[:, :1], r"to is torch.float32 \[8, 1\] on cpu, not contiguous"),
        ("names", ["lagkv"], "lagkv; one of key_norm"),
        ("output", torch.zeros(16, 4, 64).half(), "output is torch.float16"),
    ):
        ops._columns(*given.values())
        with pytest.raises(ValueError, match=f"kvlab::columns: {message}"):
            ops._columns(*(given | {word: wrong}).values())
