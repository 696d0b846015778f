"""Compares storage formats of keys and values with their public implementations, bit for bit."""

from __future__ import annotations

import numpy
import numpy.typing
import pytest

import kvlab

Rows = numpy.typing.NDArray[numpy.float32]


def rows_of(seed: int) -> list[Rows]:
    """Random rows with several standard deviations, and rows of zeros, subnormal numbers and large numbers."""
    draws = numpy.random.default_rng(seed)
    rows = [draws.normal(0, spread, (64, 128)).astype("f4") for spread in (1e-30, 1e-6, 1e-3, 1, 30, 400)]
    rows.append(rows[3] * numpy.exp(draws.normal(0, 2, rows[3].shape)).astype("f4"))  # with outliers
    rows.append(rows[3] + draws.normal(0, 50, (1, 128)).astype("f4"))  # with biases by channel
    edges = numpy.zeros((5, 128), "f4")
    edges[1] = 1
    edges[2, ::3] = 1e-40
    edges[3, 5], edges[3, 6] = -448, 447
    edges[4, ::2] = -0.5
    return [*rows, edges]


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_formats_of_llama_cpp_equal_those_of_gguf(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    for rows in rows_of(1):
        with numpy.errstate(all="ignore"):
            expected = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
        expected[numpy.isnan(expected)] = 0  # in the subnormal row, where the inverse of the scale is infinite
        numpy.testing.assert_array_equal(kvlab.quantize(rows, name.lower()), expected)


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("size", [64, 128, 192])
def test_rotated_formats_of_llama_cpp(name: str, size: int) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    matrix = numpy.ones((1, 1))
    while size % (2 * len(matrix)) == 0:
        matrix = numpy.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= len(matrix) ** 0.5
    # Sums of these small integers are exact. Where 1 / sqrt(n) is also exact, both implementations therefore quantize
    # the same numbers.
    rows = numpy.random.default_rng(7).integers(-60, 60, (50, size)).astype("f4")
    turned = (rows.reshape(-1, len(matrix)) @ matrix).reshape(rows.shape).astype("f4")
    rounded = gguf.quants.dequantize(gguf.quants.quantize(turned, kind), kind)
    expected = (rounded.reshape(-1, len(matrix)) @ matrix).reshape(rows.shape)
    found = kvlab.quantize(rows, name.lower() + "_rot")
    apart = numpy.abs(found - expected)
    assert apart.max() < (1e-4 if len(matrix) == 64 else 60)
    assert numpy.count_nonzero(apart.max(axis=1) > 1e-4) <= (0 if len(matrix) == 64 else 2)  # ties in rounding
    with pytest.raises(ValueError, match="multiple of 64 channels, not 96"):
        kvlab.quantize(numpy.ones((2, 96), "f4"), "q4_0_rot")


def test_fp8_e4m3_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    for rows in rows_of(2):
        rows = numpy.clip(rows, -448, 448)  # torch converts larger numbers to NaN, and engines clamp them
        expected = torch.from_numpy(rows).to(torch.float8_e4m3fn).float().numpy()
        numpy.testing.assert_array_equal(kvlab.quantize(rows, "fp8_e4m3"), expected)
    assert kvlab.quantize(numpy.full(32, 1e6, "f4"), "fp8_e4m3").max() == 448


@pytest.mark.parametrize("bits", [4, 2])
def test_formats_of_transformers_equal_those_of_quanto(bits: int) -> None:
    torch = pytest.importorskip("torch")
    quanto = pytest.importorskip("optimum.quanto")
    kind = {4: quanto.qint4, 2: quanto.qint2}[bits]
    for rows in rows_of(5):
        given = torch.from_numpy(rows)
        scale, shift = quanto.MaxOptimizer()(given, kind, 0, 64)
        expected = quanto.quantize_weight(given, kind, 0, scale, shift, 64, optimized=False).dequantize().numpy()
        equal = (scale == 0).numpy()  # quanto computes 0 / 0 there
        expected = numpy.where(equal, rows.reshape(-1, 64), expected.reshape(-1, 64)).reshape(rows.shape)
        numpy.testing.assert_array_equal(kvlab.quantize(rows, f"int{bits}_g64"), expected)
    with pytest.raises(ValueError, match="a multiple of 64, not 96"):
        kvlab.quantize(numpy.ones((2, 96), "f4"), "int4_g64")
    with pytest.raises(ValueError, match="too large for a float32 scale"):
        kvlab.quantize(numpy.array([3e38, -3e38] * 32, "f4"), "int4_g64")


def test_nvfp4_has_the_nearest_numbers_of_its_definition() -> None:
    grid = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "f4")  # e2m1; numbers at odd indices have an odd mantissa
    torch = pytest.importorskip("torch")
    for rows in rows_of(3):
        blocks = rows.reshape(-1, 16)
        wanted = numpy.minimum(numpy.abs(blocks).max(axis=1, keepdims=True) / numpy.float32(6), 448)
        scale = torch.from_numpy(wanted).to(torch.float8_e4m3fn).float().numpy()
        with numpy.errstate(divide="ignore", invalid="ignore"):
            size = numpy.minimum(numpy.abs(blocks / scale), 6)
        distance = numpy.abs(size[..., None] - grid)
        nearest = distance == distance.min(axis=-1, keepdims=True)
        even = nearest & (numpy.arange(8) % 2 == 0)
        index = numpy.where(even.any(axis=-1), even.argmax(axis=-1), nearest.argmax(axis=-1))
        expected = numpy.where(scale == 0, 0, numpy.sign(blocks) * grid[index] * scale)
        numpy.testing.assert_array_equal(kvlab.quantize(rows, "nvfp4"), expected.reshape(rows.shape))


@pytest.mark.parametrize(("name", "bits"), [("8", 8), ("4", 4), ("3", 3), ("2", 2)])
def test_integer_formats_lose_less_with_more_bits(name: str, bits: int) -> None:
    rows = rows_of(4)[3]
    error = numpy.abs(kvlab.quantize(rows, name) - rows).mean()
    assert 0.2 < error * (2**bits - 1) < 2  # the range of 32 normal numbers is about four standard deviations
    numpy.testing.assert_array_equal(kvlab.quantize(rows, "16"), rows)


def test_wrong_arguments_are_refused() -> None:
    rows = numpy.ones((2, 64), "f4")
    assert kvlab.quantize(rows.reshape(2, 1, 64), "4").shape == (2, 1, 64)
    for format in ("5", "q9_0", "8/4", "kivi4", ""):
        with pytest.raises(ValueError, match=f"format: '{format}' is not a format of one row; known: 16, fp8"):
            kvlab.quantize(rows, format)
    with pytest.raises(ValueError, match="a head size of 48 is not supported; it should be a multiple of 32"):
        kvlab.quantize(rows[:, :48], "4")
    with pytest.raises(ValueError, match="is NaN"):
        kvlab.quantize(rows * numpy.nan, "q4_0")
    with pytest.raises(ValueError, match="too large for"):
        kvlab.quantize(rows * numpy.arange(64, dtype="f4") * 1e9, "q4_0")
    for wrong in ("rows", None, [[1], [2, 3]], 3.0):
        with pytest.raises(ValueError, match="rows: "):
            kvlab.quantize(wrong, "4")
