"""Tests of the kernel library from Python: its structs match those of the header, and torch can trace its operators
without a device."""

from __future__ import annotations

import ctypes
import pathlib
import re
import sys
from typing import Any

import pytest

from kvlab import _kvlab, _library

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools" / "examples"))
import kvlab_calls  # noqa: E402

STRUCTS = _library.STRUCTS | kvlab_calls.STRUCTS
FUNCTIONS = _library.FUNCTIONS | kvlab_calls.FUNCTIONS
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
    "kvlab_gather": ctypes.c_void_p,
    "void": None,
    **{name: ctypes.c_int for name in re.findall(r"typedef enum[^}]*} (\w+);", HEADER)},
    **STRUCTS,
}


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def members_of(body: str) -> list[tuple[str, Any]]:
    """The members of a struct of the header, as (name, type)."""
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


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_equal_the_headers(name: str) -> None:
    end = HEADER.index(f"}} {name};")
    body = HEADER[HEADER.rindex("typedef struct {", 0, end) + len("typedef struct {") : end]
    theirs, ours = members_of(body), STRUCTS[name]._fields_
    assert [member for member, _ in theirs] == [field[0] for field in ours]
    for (member, kind), field in zip(theirs, ours, strict=True):
        assert kind is field[1] or (ctypes.sizeof(kind) == ctypes.sizeof(field[1]) and member == "features"), member


def layouts() -> str:
    """A text with the version, and then the size and the offsets of each struct of the header, one struct per line."""
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
    """If this test fails, raise KVLAB_VERSION_MINOR, and then copy the layouts that it found into the file."""
    assert layouts() == LAYOUT.read_text()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_equal_the_headers(name: str) -> None:
    found = re.search(rf"([\w ]+[\w*]) \*?{name}\(([^)]*)\);", without_comments(HEADER))
    assert found, name
    taken = [given for given in found[2].split(",") if given.strip() != "void"]
    result, arguments = FUNCTIONS[name]
    assert len(taken) == len(arguments)
    for given, kind in zip(taken, arguments, strict=True):
        words = given.replace("const ", "").split()
        pointer = "*" in given or words[0] == "cudaStream_t"
        assert pointer == (kind in (ctypes.c_void_p, ctypes.c_char_p) or hasattr(kind, "contents")), given
        if not pointer:
            assert kind is TYPES[words[0]], given
    returned = found[1].split()[-1]
    assert result in (ctypes.c_void_p, ctypes.c_char_p) if "*" in found[1] else result is TYPES[returned]


def test_the_version_equals_the_headers() -> None:
    numbers = dict(re.findall(r"#define KVLAB_VERSION_(MAJOR|MINOR) (\d+)", HEADER))
    assert 100 * int(numbers["MAJOR"]) + int(numbers["MINOR"]) == _library.VERSION


def test_without_the_library_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_KERNELS", "/nowhere/libkvlab_kernels.so")
    with pytest.raises(RuntimeError, match="there is no kernel library; install a wheel that `make_wheel.sh --cuda` made"):
        _library.library.__wrapped__()


def test_operators_declare_what_they_write_and_can_be_traced() -> None:
    torch = pytest.importorskip("torch")
    import kvlab.ops
    from torch._subclasses.fake_tensor import FakeTensorMode

    for operator in (torch.ops.kvlab.append, torch.ops.kvlab.step):
        arguments = operator.default._schema.arguments
        assert {argument.name for argument in arguments if argument.is_write} == {"out"} and len(arguments) <= 12
    with FakeTensorMode():
        qkv, out = (torch.empty(1, heads, 64, device="cuda") for heads in (8, 4))
        assert torch.ops.kvlab.step(0, 0, qkv, out) is None
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.kvlab.step(0, 0, torch.zeros(1, 8, 64), torch.zeros(1, 4, 64))
    assert kvlab.ops.__all__


def plan_of(policy: str, budget: str, own: Any = ()) -> Any:
    return _kvlab.slot_plan(_kvlab.CacheRequest(policy, list(own), budget, "dense", "", 0, 0.01, 1000, 2, 3, 64))


def test_a_plan_has_rules_for_the_budget() -> None:
    plan = plan_of("h2o:sinks=4:every=8", "10%")
    assert plan["rules"].tolist() == [[[100, 4, 50, 0]] * 3] * 2 and plan["tiers"].shape == (2, 3, 0, 2)
    assert (plan["every"], plan["once"], plan["tokens"], plan["chunk"]) == (8, False, 1000, 0)
    assert plan_of("h2o", "pyramid(40)")["rules"][..., 0].mean() == 40
    # A token takes 256 bytes in 16 bits and 80 bytes in 4 bits.
    plan = plan_of("h2o:tiers=16@8t+4@100%", "40")
    assert plan["tiers"].tolist() == [[[[0, 8], [3, 32 * 256 // 80]]] * 3] * 2
    assert plan["rules"][0, 0, 0] == 8 + 32 * 256 // 80
    # If nothing is evicted, all tokens are in one tier.
    assert plan_of("full:tiers=4", "")["tiers"].tolist() == [[[[3, 2**31 - 1]]] * 3] * 2


@pytest.mark.parametrize(
    ("policy", "budget", "message"),
    [
        ("h2o", "ada(40)", "ada.*the kernel library does not support it; a model on the CPU does"),
        ("lagkv", "40", "lagkv"),
        ("h2o", "", "needs one"),
        ("oracle_attention", "40", "uses future attention"),
        ("full:tiers=kivi4", "", "does not quantize by channel"),
    ],
)
def test_tensors_outside_the_library_are_refused_by_name(policy: str, budget: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(policy, budget)


def test_operators_check_their_arguments() -> None:
    torch = pytest.importorskip("torch")
    from kvlab import ops

    qkv, out = torch.zeros(2, 8, 64), torch.zeros(2, 4, 64)
    for given, message in (
        ((qkv, out.half()), r"out is torch.float16 .*; it must be contiguous, torch.float32, on cpu"),
        ((qkv.transpose(1, 2), out), "qkv is .*, not contiguous"),
        ((qkv, out.to("meta")), "out is .* on meta"),
    ):
        with pytest.raises(ValueError, match=f"kvlab::step: {message}"):
            ops._step(0, 0, *given)


def test_a_cache_takes_rows_of_its_shape() -> None:
    torch = pytest.importorskip("torch")
    from kvlab import ops

    cache = ops.KvCache.__new__(ops.KvCache)  # skips the constructor, which needs a device
    cache.dtype, cache._sequences, cache._given, cache._shape = torch.float32, 2, (8, 64), (4, 64)
    for qkv in (torch.zeros(1, 8, 64), torch.zeros(2, 6, 64), torch.zeros(2, 8, 64).half()):
        with pytest.raises(ValueError, match=r"it must be torch.float32 \[2, 8, 64\]"):
            cache.step(0, qkv)
    with pytest.raises(ValueError, match="decodes has 1 entries; give one for each of the 2"):
        cache.begin_step([True])
    for call in (cache.begin_drafts, cache.accept_drafts):
        with pytest.raises(ValueError, match="has 1 entries; give one for each of the 2"):
            call([3])
