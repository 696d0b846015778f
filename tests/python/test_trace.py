from __future__ import annotations

import json
import pathlib
import pickle
import shutil

import numpy
import pytest
from conftest import SAMPLE, random_arrays

import kvlab
from kvlab import _kvlab


def test_a_traces_description(sample: kvlab.Trace) -> None:
    assert (sample.tokens, sample.prompt_tokens, sample.layers) == (1012, 573, 4)
    assert (sample.query_heads, sample.kv_heads, sample.head_size) == (4, 2, 64)
    assert sample.dtype == "bfloat16" and sample.name == "tiny-story"
    assert sample.segments == [(0, 573, "prompt"), (573, 439, "decode")]
    assert sample.ids.dtype == numpy.int32 and sample.ids.shape == (1012,)
    assert sample.model["rope"]["rope_theta"] == 10000.0
    assert "1012 tokens" in repr(sample)


def test_arrays_are_read_back_unchanged() -> None:
    arrays = random_arrays()
    trace = kvlab.Trace.from_arrays(**arrays, prompt_tokens=32, config={"name": "drawn", "rope_theta": 500.0})
    assert trace.model["model"] == "drawn"
    assert trace.segments == [(0, 32, "prompt"), (32, 48, "decode")]
    numpy.testing.assert_array_equal(trace.ids, arrays["ids"])
    numpy.testing.assert_allclose(trace.inv_freq, 500.0 ** (-numpy.arange(8) / 8), rtol=1e-6)
    for part in ("q", "k", "v"):
        for layer in range(2):
            numpy.testing.assert_array_equal(trace.read(part, layer, 1), arrays[part][layer, 1])


def test_shards_follow_one_another(tmp_path: pathlib.Path) -> None:
    arrays = random_arrays(tokens=2500)
    trace = kvlab.Trace.from_arrays(**arrays, prompt_tokens=1500, out=tmp_path / "trace")
    parts = trace.to_dict()["layers.1.q"]
    assert [part.shape[1] for part in parts] == [1024, 1024, 452]
    numpy.testing.assert_array_equal(numpy.concatenate(parts, axis=1), arrays["q"][1])


def test_to_dict_copies_nothing_and_changes_no_file(tmp_path: pathlib.Path) -> None:
    trace = kvlab.Trace.from_arrays(**random_arrays(), prompt_tokens=32, out=tmp_path / "trace")
    array = trace.to_dict()["layers.0.k"][0]
    base = array
    while base.base is not None and not isinstance(base, numpy.memmap):
        base = base.base
    assert isinstance(base, numpy.memmap)
    array[:] = 0  # changes only this process's copy of the memory pages
    assert numpy.any(trace.to_dict()["layers.0.k"][0])
    kvlab.Trace(tmp_path / "trace")  # the files still verify


def test_to_dict_refuses_bfloat16_for_numpy(sample: kvlab.Trace) -> None:
    with pytest.raises(ValueError, match="numpy has no bfloat16; give framework='torch'"):
        sample.to_dict()
    with pytest.raises(ValueError, match="should be numpy or torch"):
        sample.to_dict("jax")  # type: ignore[arg-type]


def test_to_dict_for_torch(sample: kvlab.Trace) -> None:
    torch = pytest.importorskip("torch")
    q = sample.to_dict("torch")["layers.2.q"][0]
    assert q.dtype == torch.bfloat16 and tuple(q.shape) == (4, 1012, 64)
    numpy.testing.assert_array_equal(q[3].float().numpy(), sample.read("q", 2, 3))


def test_arrays_of_other_layouts_and_dtypes() -> None:
    arrays = random_arrays()
    whole = kvlab.Trace.from_arrays(**arrays, prompt_tokens=32)
    odd = dict(arrays)
    for part in ("q", "k", "v"):  # no axis has the usual stride, not even the last one
        odd[part] = numpy.asfortranarray(arrays[part])
    trace = kvlab.Trace.from_arrays(**odd, prompt_tokens=32)
    numpy.testing.assert_array_equal(trace.read("v", 1, 1), whole.read("v", 1, 1))
    half = kvlab.Trace.from_arrays(**random_arrays(dtype="float16"), prompt_tokens=32)
    assert half.dtype == "float16"
    fixed = {name: array.copy() for name, array in arrays.items()}
    for array in fixed.values():
        array.flags.writeable = False
    kvlab.Trace.from_arrays(**fixed, prompt_tokens=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda a: a.astype("float64")}, "q: has dtype float64; convert it to float32, float16 or bfloat16"),
        ({"v": lambda a: a.astype("int32")}, "v: has dtype int32; convert it to float32, float16 or bfloat16"),
        ({"k": lambda a: a[0]}, "k: has 3 dimensions"),
        ({"q": lambda a: a[0, 0, 0]}, "q: has 1 dimensions"),
        ({"v": lambda a: a[:, :1]}, r"v: \[2, 1, 80, 16\] does not match k"),
        ({"k": lambda a: a.astype("float16")}, "k: .* does not match q"),
        ({"ids": lambda a: a[:-1]}, "ids: has 79 ids for 80 tokens"),
        ({"ids": lambda a: a.astype(float)}, "ids: has dtype float64; give whole numbers"),
        ({"ids": lambda a: -a - 1}, "ids: an id is negative"),
        ({"v": lambda a: a * numpy.float32("nan")}, "v: layer 0 contains nan"),
    ],
)
def test_bad_arrays_are_refused(change: dict, message: str) -> None:
    arrays = random_arrays()
    for name, function in change.items():
        arrays[name] = function(arrays[name])
    with pytest.raises(ValueError, match=message):
        kvlab.Trace.from_arrays(**arrays, prompt_tokens=32)


def test_bad_heads_and_prompts_are_refused() -> None:
    arrays = random_arrays()
    for tokens in (0, 81):
        with pytest.raises(ValueError, match=f"prompt_tokens: {tokens} should be a whole number from 1 to 80"):
            kvlab.Trace.from_arrays(**arrays, prompt_tokens=tokens)
    with pytest.raises(ValueError, match="rope_scaling llama3 is not supported; give inv_freq"):
        kvlab.Trace.from_arrays(**arrays, prompt_tokens=32, config={"rope_scaling": {"rope_type": "llama3"}})
    with pytest.raises(ValueError, match="q: has type str"):
        kvlab.Trace.from_arrays(**(arrays | {"q": "q"}), prompt_tokens=32)


def test_errors_equal_those_of_the_command(tmp_path: pathlib.Path, sample: kvlab.Trace) -> None:
    with pytest.raises(RuntimeError, match="no/such"):
        kvlab.Trace("no/such")
    copy = tmp_path / "trace"
    shutil.copytree(SAMPLE, copy)
    shard = copy / "shard-00000.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(RuntimeError, match="shard-00000"):
        kvlab.Trace(copy)
    kvlab.Trace(copy, verify=False)
    with pytest.raises(ValueError, match="layer 4, head 0: the trace .* has 4 layers of 2"):
        sample.read("k", 4, 0)
    with pytest.raises(ValueError, match="part: 'w' should be q, k or v"):
        sample.read("w", 0, 0)  # type: ignore[arg-type]


def test_a_trace_deleted_while_open_gives_an_error(tmp_path: pathlib.Path) -> None:
    trace = kvlab.Trace.from_arrays(**random_arrays(), prompt_tokens=32, out=tmp_path / "trace")
    before = trace.read("q", 0, 0)
    views = trace.to_dict()
    shutil.rmtree(tmp_path / "trace")
    numpy.testing.assert_array_equal(trace.read("q", 0, 0), before)
    numpy.testing.assert_array_equal(views["layers.0.q"][0][0], before)
    kvlab.replay(trace, "h2o", 16)


def test_pickling(sample: kvlab.Trace, small: kvlab.Trace) -> None:
    assert pickle.loads(pickle.dumps(sample)).hash == sample.hash
    with pytest.raises(TypeError, match="temporary folder"):
        pickle.dumps(small)


def test_opening_copies_nothing(tmp_path: pathlib.Path) -> None:
    """The trace has 32 MB on disk. Opening it may increase the process's anonymous memory by less than a tenth of
    that."""

    def own_memory() -> int:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("RssAnon:")]
        return int(line.split()[1]) * 1024

    block = numpy.random.default_rng(0).standard_normal((4096, 64)).astype("float32")
    heads = {part: numpy.broadcast_to(block, (4, count, 4096, 64)) for part, count in (("q", 4), ("k", 2), ("v", 2))}
    kvlab.Trace.from_arrays(**heads, prompt_tokens=4000, out=tmp_path / "trace")
    before = own_memory()
    trace = kvlab.Trace(tmp_path / "trace", verify=False)
    views = trace.to_dict()
    assert sum(array.nbytes for parts in views.values() for array in parts) > 32_000_000
    assert own_memory() - before < 3_200_000


def write_rows(folder: pathlib.Path, **changed: object) -> None:
    """Writes a trace of layers 2 and 5 of a model. One has a sliding window, the other one a soft cap and sinks, and
    each has its own RoPE table."""
    header = {
        "model": "rows",
        "config": {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_size": 16, "dtype": "float32"}
        | {"rope": {"rope_type": "default"}},
        "rounding": "none",
        "weights_xxh3": "",
        "tokenizer_xxh3": "",
        "capture": {},
        "spans": [],
    }
    rows: list[dict[str, object]] = [
        {"span": 5, "rope": 1},
        {"softcap": 3.0, "scale": 0.5, "sink": numpy.array([1.0, 0.0, -1.0, 2.0], numpy.float32)},
    ]
    tables = [[1.0, 0.1], [0.0, 0.0]]
    given = {"rows": rows, "layer_numbers": [2, 5], "inv_freq": tables, "rope_factor": [1.0, 1.0]} | changed
    writer = _kvlab.TraceWriter(str(folder), json.dumps(header), softmax_scale=0.25, **given)
    arrays = {name: array.swapaxes(1, 2) for name, array in random_arrays().items() if name != "ids"}
    writer.begin([7] * 80, True)
    for layer in range(2):
        parts = {name: numpy.ascontiguousarray(array[layer]) for name, array in arrays.items()}
        writer.layer(layer, **parts, out=attended(layer, **parts))
    writer.end()
    writer.finish()


def attended(layer: int, q: numpy.ndarray, k: numpy.ndarray, v: numpy.ndarray) -> numpy.ndarray:
    """Attention outputs [tokens, heads, size] in float64, with the row specs of write_rows()."""
    tokens = numpy.arange(len(q))
    angle = numpy.outer(tokens, [[0.0, 0.0], [1.0, 0.1]][layer])[:, None]
    cos, sin = numpy.cos(angle), numpy.sin(angle)

    def rotate(x: numpy.ndarray) -> numpy.ndarray:
        a, b = x[..., :2].astype(float), x[..., 2:4].astype(float)
        return numpy.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 4:]], axis=-1)

    scores = numpy.einsum("thd,jhd->htj", rotate(q), rotate(k).repeat(2, axis=1)) * (0.25, 0.5)[layer]
    seen = tokens[:, None] >= tokens
    if layer == 0:
        seen &= tokens[:, None] - tokens < 5
    else:
        scores = 3 * numpy.tanh(scores / 3)
    e = numpy.where(seen, numpy.exp(scores), 0)
    rest = 0 if layer == 0 else numpy.exp([1.0, 0.0, -1.0, 2.0])[:, None, None]
    p = e / (e.sum(axis=-1, keepdims=True) + rest)
    return numpy.einsum("htj,jhd->thd", p, v.repeat(2, axis=1)).astype(numpy.float32)


def test_rows_are_written_verified_and_read(tmp_path: pathlib.Path) -> None:
    write_rows(tmp_path / "rows")
    trace = kvlab.Trace(tmp_path / "rows")
    assert trace.layer_numbers == [2, 5] and trace.layers == 2
    assert trace.rows[0] == {"span": 5, "softcap": 0.0, "rope": 1, "scale": 0.25, "sink": None}
    assert trace.rows[1] == {"span": 0, "softcap": 3.0, "rope": 0, "scale": 0.5, "sink": [1.0, 0.0, -1.0, 2.0]}
    numpy.testing.assert_array_equal(trace.inv_freq, numpy.float32([[1.0, 0.1], [0.0, 0.0]]))
    numpy.testing.assert_array_equal(trace.read("k", 5, 1), random_arrays()["k"][1, 1])
    assert set(trace.to_dict()) >= {"layers.2.q", "layers.5.v"}
    with pytest.raises(ValueError, match="layer 0, head 0: the trace .* has 2 layers"):
        trace.read("k", 0, 0)


def test_layers_that_share_a_later_rope_table_are_written_with_it() -> None:
    tables, rows = [[1.0, 0.1], [0.5, 0.2]], [{"rope": 1}, {"rope": 1}]
    shared = {"inv_freq": tables, "rope_factor": [1.0, 1.5], "rows": rows}
    for config in (shared, {"inv_freq": tables[1], "rope_factor": 1.5}):
        trace = kvlab.Trace.from_arrays(**random_arrays(), prompt_tokens=32, config=config)
        numpy.testing.assert_array_equal(trace.inv_freq, numpy.float32(tables[1]))
        assert trace.model["rope_factor"] == 1.5


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"rows": [{}, {"window": 3}]}, '"window" is not a known key; known are span, softcap, rope, scale and sink'),
        ({"rows": [{}, {"rope": 2}]}, "rope 2 does not exist; there are 2 tables"),
        ({"rows": [{"rope": 1}]}, "1 rows or numbers; one for each of 2 layers"),
        ({"rope_factor": [1.0]}, "1 rope factors are given; give one for each of 2 tables"),
        ({"layer_numbers": [5, 2]}, '"layer" is 2'),
    ],
)
def test_rows_that_make_no_trace_are_refused(tmp_path: pathlib.Path, changed: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        write_rows(tmp_path / "rows", **changed)
    assert not (tmp_path / "rows").exists()
