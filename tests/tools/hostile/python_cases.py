"""Calls the package's functions with generated arguments: python_cases.py SEED FIRST RUNS TRACE MODEL TEXT, with a Python
that has numpy and kvlab. Calls kvlab.hf too if that Python has torch and transformers.

Each call has to work, or to raise ValueError with a one-line message of the package. The script prints a line for each
call that does neither. Its last line says that all cases ran. If this process crashes, the last "at" on stderr gives
the number of the case.
"""

import pathlib
import random
import re
import sys
import tempfile
import types
import warnings

import numpy

import kvlab

try:
    import torch
    import transformers
except ImportError:
    torch = transformers = None

LIBRARIES = re.compile(
    r"std::|nanobind|incompatible function|json\.exception|numpy\.|not supported between|unsupported operand|object is not|has no attribute"
    r"|filesystem error|positional argument|invalid literal|could not convert|cannot reshape|setting an array"
)
TRACE = MODEL = TEXT = LOADED = None

NUMBERS = [0, 1, 2, 3, 15, 16, 17, 64, 255, 256, -1, -2, 1.5, 0.0, -0.0, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**5000, 1e300, float("inf"),
           float("nan"), True, False, numpy.int64(1), numpy.uint8(2), numpy.int64(-1), numpy.float32(1), numpy.bool_(True), "1", "x", b"1", None,
           [], [1], (1,), {}, {"a": 1}, object(), 1j, numpy.array(1), numpy.array([1, 2]), numpy.datetime64("2020"), range(3), "\ud800", "\0",
           lambda: 1, int, numpy.ones((2, 2))]  # fmt: skip
TEXTS = ["h2o", "lru", "full", "window", "h2o:recent=25%", "h2o*lru", "16", "25%", "4KiB", "pyramid(16)", "ada(16)", "ratio(0.5)", "dense", "chunk:8",
         "original", "cache", "decode", "all", "sample", "q", "k", "v", "", " ", "x", "\ud800", "\0", "é", "\u202e", "h2o:tiers=" + "16@1t+" * 400 + "4@100%",
         "h2o," * 50, "@/nowhere", "@/dev/null", "0", "-1", "nan", "x" * 5000, "mass", "both"]  # fmt: skip


class Hostile:
    """An object that raises an error on every access."""

    def __index__(self):
        raise ValueError("no index")

    def __float__(self):
        raise ValueError("no float")

    def __iter__(self):
        return iter([1])

    def __repr__(self):
        raise RuntimeError("no repr")


def any_of(rng, good, others):
    """Returns a value of `good` or, less often, of `others`. Most arguments are valid, so that a call often has a
    single bad argument and does not fail at an earlier one."""
    return rng.choice(good) if rng.random() < 0.6 else rng.choice(others)


def arrays(rng):
    layers, heads, kv_heads, tokens, size = (rng.choice(c) for c in ((1, 2), (2, 4), (1, 2, 3), (1, 8, 20), (2, 7, 16, 32)))
    dtype = any_of(rng, ["f4", "f2"], ["f8", "i4", "c8", "O", "U3", "?"])

    def one(count):
        array = numpy.asarray(numpy.random.default_rng(1).normal(size=(layers, count, tokens, size)), "f4")
        kind = rng.randrange(20)
        if kind == 0:
            return rng.choice(NUMBERS)
        if kind == 1:
            array = array[..., :-1]
        if kind == 2:
            array = array[0]
        if kind == 3:
            array[0, 0, 0, 0] = rng.choice((numpy.nan, numpy.inf, 1e38))
        if kind == 4:
            return numpy.broadcast_to(array[:1, :1, :1], (layers, count, 2**31, size))
        return array.astype(dtype)

    return one(heads), one(kv_heads), one(kv_heads), tokens, layers


def config(rng, layers):
    if rng.random() < 0.15:
        return rng.choice(NUMBERS)
    known = {
        "rope_theta": [1e4, 5e5], "inv_freq": [[1.0], [1.0] * 8, [[1.0], [0.5]], [0.0]], "rope_factor": [1.0, [1.0, 2.0]],
        "softmax_scale": [0.5, 1], "name": ["x"], "layer_numbers": [[0], [1, 5], list(range(layers))], "rope_scaling": [None, {"rope_type": "default"}],
        "rows": [[{}] * layers, [{"span": 3}] * layers, [{"softcap": 2.0, "rope": 0}] * layers, [{"sink": [0.0, 1.0]}] * layers],
    }  # fmt: skip
    bad = {"inv_freq": [[1.0] * 9, [1.0] * 17, [1.0] * 1000, [], [[]], [-1.0], ["x"]],
           "rows": [[{"sink": [1.0] * 99}], [{"rope": 7}] * layers, [{"span": -1}] * layers, [{"x": 1}] * layers, [5]]}  # fmt: skip
    made = {}
    for key in rng.sample(list(known), rng.randrange(4)):
        made[key] = any_of(rng, known[key], bad.get(key, NUMBERS) if rng.random() < 0.6 else NUMBERS)
    if rng.random() < 0.05:
        made[rng.choice(("zzz", 5, None, "\ud800"))] = 1
    return types.SimpleNamespace(**{str(k): v for k, v in made.items()}) if made and rng.random() < 0.2 and all(isinstance(k, str) for k in made) else made


def from_arrays(rng):
    q, k, v, tokens, layers = arrays(rng)
    ids = any_of(rng, [None, list(range(tokens)), numpy.arange(tokens)], NUMBERS)
    trace = kvlab.Trace.from_arrays(q, k, v, ids, config(rng, layers), prompt_tokens=any_of(rng, [1, tokens], NUMBERS))
    assert trace.tokens == tokens


def reads(rng):
    layer, head = any_of(rng, [0, 1], NUMBERS), any_of(rng, [0, 1], NUMBERS)
    kind = rng.randrange(6)
    if kind == 0:
        TRACE.read(any_of(rng, ["q", "k", "v"], TEXTS + NUMBERS), layer, head)
    elif kind == 1:
        TRACE.feature(any_of(rng, ["x"], TEXTS + NUMBERS), layer, head)
    elif kind == 2:
        TRACE.attention(layer, head, any_of(rng, [0, 3], NUMBERS), any_of(rng, [None, 2], NUMBERS))
    elif kind == 3:
        TRACE.accesses(layer=layer, head=head, top_k=any_of(rng, [None, 2], NUMBERS), request_threshold=any_of(rng, [0.01], NUMBERS),
                       queries=any_of(rng, ["decode", "all"], TEXTS))  # fmt: skip
    elif kind == 4:
        TRACE.to_dict(any_of(rng, ["torch"], TEXTS + NUMBERS))
    else:
        kvlab.Trace(any_of(rng, [TRACE.path], TEXTS + NUMBERS), verify=any_of(rng, [False], NUMBERS), threads=any_of(rng, [1], NUMBERS))


def replays(rng):
    policies = any_of(rng, ["h2o", ["h2o", "lru"], "full"], TEXTS + NUMBERS + [TEXTS])
    budgets = any_of(rng, [16, [16, 24], "25%", ["4KiB"], numpy.int64(16)], TEXTS + NUMBERS + [list(range(2, 20_000))])
    words = {"layers": [[1], [0]], "threads": [1], "seed": [1], "prefill": ["dense"], "positions": ["original"], "queries": ["decode"], "plain": [False],
             "request_threshold": [0.01], "output_error": ["sample"], "references": [False], "device": ["cpu"]}  # fmt: skip
    given = {key: any_of(rng, good, TEXTS + NUMBERS) for key, good in words.items() if rng.random() < 0.35}
    trace = any_of(rng, [TRACE], NUMBERS + TEXTS + [[], [TRACE, 5]])
    run = kvlab.replay(trace, policies, budgets, progress=False, **given)
    kind = rng.randrange(3)
    if kind == 0:
        run.kept(any_of(rng, [1], NUMBERS), any_of(rng, [0], NUMBERS), any_of(rng, ["h2o"], TEXTS + NUMBERS), any_of(rng, [16, None], NUMBERS + TEXTS))
    elif kind == 1:
        run.ranking(any_of(rng, [16], NUMBERS + TEXTS), any_of(rng, ["", "recall"], TEXTS + NUMBERS))


def policies(rng):
    words = {"needs": ["mass", "nothing"], "features": [[]], "state": [None, {"a": "f4"}], "sinks": [2, "5%"], "recent": [2], "modifiers": [[], ["every=4"]],
             "positions": ["original"], "rows": [False], "by_head": [False], "weights": [(), [0.5]], "name": ["mine"], "summary": ["x"]}  # fmt: skip
    bad = NUMBERS + TEXTS + [{"a": "V100000000"}, {"a": "O"}, {1: 2}, [None], ["x"] * 9, {"a": ("f4", 10**7)}]
    given = {key: any_of(rng, good, bad) for key, good in words.items() if rng.random() < 0.4}
    answer = any_of(rng, [lambda n: numpy.arange(n)], [lambda n: numpy.full(n, numpy.nan), lambda n: list(range(n)), lambda n: None, lambda n: numpy.arange(n + 1)])

    def mine(state, seen, token, step):
        return answer(len(token))

    kvlab.policy(**given)(mine)


def differences(rng):
    good = [[1.0, 2.0], [[1.0, 2.0], [3.0]], numpy.ones(3)]
    kvlab.difference(any_of(rng, good, NUMBERS + TEXTS), any_of(rng, good, NUMBERS + TEXTS))


def options_of(rng, words, share):
    """Some keywords of `words`, {name: valid values}, mostly with valid values."""
    return {key: any_of(rng, good, TEXTS + NUMBERS + [[], ["x", 1], {1: 2}]) for key, good in words.items() if rng.random() < share}


def commands(rng):
    """The functions that run a command: evaluate, fidelity, tune and task."""
    words = {"window": [60], "max_tokens": [60], "prompt_tokens": [20], "prefill": ["dense", ["dense", "stream"]], "positions": ["original"], "tiers": ["4", "16:4t,4:100%"],
             "centre": ["prompt"], "seed": [1], "threads": [1], "device": ["cpu"], "samples": [1], "words": [[20]], "depth": ["50%"], "progress": [False],
             "query_agnostic": [True], "by_tokens": [True], "ladder": ["4"], "threds": [1]}  # fmt: skip  # old name
    kind = rng.choice(("evaluate", "fidelity", "tune", "task"))
    if rng.random() < 0.9:  # only keywords that the function has
        known = {option.replace("-", "_") for option, _ in kvlab._kvlab.command_options("eval" if kind == "evaluate" else kind)}
        words = {key: good for key, good in words.items() if key in known}
    small = {"samples": 1, "words": 20} if kind == "task" else {"max_tokens": 60, "prompt_tokens": 20}
    given = small | options_of(rng, words, 0.25)
    model, policies = any_of(rng, [MODEL], TEXTS + NUMBERS), any_of(rng, ["h2o", ["h2o", "lru"], "full"], TEXTS + NUMBERS + [TEXTS])
    budgets = any_of(rng, [16, "25%", numpy.int64(16)], TEXTS + NUMBERS + [list(range(2, 20_000))])
    with tempfile.TemporaryDirectory() as folder:
        text, out = any_of(rng, [TEXT, [TEXT]], TEXTS + NUMBERS), any_of(rng, [folder + "/out"], TEXTS + NUMBERS)
        call = {
            "evaluate": lambda: kvlab.evaluate(model, text, policies, budgets, **given),
            "fidelity": lambda: kvlab.fidelity(model, text, policies, budgets, out, **given),
            "tune": lambda: kvlab.tune(model, text, budgets, out, policies, **given),
            "task": lambda: kvlab.task(any_of(rng, ["passkey", "needle", "recall"], TEXTS + NUMBERS), model, policies, budgets, **given),
        }[kind]
        try:
            call()
        except TypeError as error:  # what docs/reference/security.md says of unknown keywords
            if "unexpected keyword argument" not in str(error):
                raise


def quantized(rng):
    rows = any_of(rng, [numpy.ones((2, 64), "f4"), numpy.ones((1, 3, 128), "f8")], NUMBERS + TEXTS + [numpy.full(64, 1e38), numpy.ones((2, 33)), [[1.0] * 64]])
    kvlab.quantize(rows, any_of(rng, ["4", "8", "q8_0", "int4_g64", "int2_g64", "nvfp4"], TEXTS + NUMBERS + ["16", "8/4", "kivi4"]))


def runs(rng):
    """The methods of a run, and of one that was saved and is loaded again."""
    run = kvlab.replay(TRACE, ["h2o", "lru"], [16, 24], progress=False)
    budget, metric = any_of(rng, [16], NUMBERS + TEXTS), any_of(rng, ["", "recall"], TEXTS + NUMBERS)
    kind = rng.randrange(4)
    if kind == 0:
        run.recommendation(budget, metric)
    elif kind == 1:
        run.kept(1, 0, "h2o", 16, trace=any_of(rng, [TRACE.name], TEXTS + NUMBERS))
    elif kind == 2:
        kvlab.load_run(any_of(rng, [TRACE.path], TEXTS + NUMBERS), model=any_of(rng, [None, MODEL], TEXTS + NUMBERS))
    else:
        with tempfile.TemporaryDirectory() as folder:
            run.save(any_of(rng, [folder + "/run"], TEXTS + NUMBERS))


def features(rng):
    trace = kvlab.Trace.from_arrays(*[numpy.ones((1, 2, 8, 16), "f4")] * 3, prompt_tokens=4)
    good = numpy.ones((1, 2, 8), "f4")
    trace.add_feature(any_of(rng, ["mine"], TEXTS + NUMBERS), any_of(rng, [good], NUMBERS + [good * numpy.nan, good[:, :1], good.astype("U3"), [good]]))


def model_of_torch():
    global LOADED
    if LOADED is None:
        LOADED = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    return LOADED


def caches(rng):
    """The arguments of kvlab.hf.Cache and evicting, and calls with them."""
    if transformers is None:
        return
    words = {"tiers": ["4", "16:4t,4:100%", None], "centre": ["prompt", None], "prefill": ["dense", "chunk:8"], "positions": ["original", None], "seed": [1],
             "request_threshold": [0.01], "length": [256], "threads": [1], "record": [True, False]}  # fmt: skip
    given = options_of(rng, words, 0.3)
    make = any_of(rng, [kvlab.hf.Cache], [kvlab.hf.evicting])
    ids = torch.tensor([[5, 6, 7] * 10])
    with torch.no_grad():
        model = any_of(rng, [model_of_torch()], NUMBERS + TEXTS) if rng.random() < 0.2 else model_of_torch()
        made = make(model, any_of(rng, ["h2o", "lru", "sink", "full"], TEXTS + NUMBERS), any_of(rng, [16, "25%"], TEXTS + NUMBERS), **given)
        if make is kvlab.hf.evicting:
            with made:
                model(ids)
            return
        model(ids, past_key_values=made)
        kind = rng.randrange(3)
        try:
            if kind == 0:
                made.crop(any_of(rng, [-2, 20], NUMBERS))
            elif kind == 1:
                made.kept(any_of(rng, [0, 1], NUMBERS), any_of(rng, [0, 1], NUMBERS), any_of(rng, [0], NUMBERS))
            else:
                made.trace(any_of(rng, [None], TEXTS + NUMBERS), any_of(rng, [0], NUMBERS))
        except IndexError as error:  # what kept() says of a layer, a head or a row that does not exist
            if not any(word in str(error) for word in ("layer", "head", "row")):
                raise


def captures(rng):
    """The arguments of kvlab.hf.capture."""
    if transformers is None:
        return
    words = {"prompt_tokens": [5, None], "max_new_tokens": [2, 0], "passages": [(), [{"name": "x", "start": 0, "tokens": 3}]], "chunk": [16],
             "features": [None, {"mine": lambda q, k, v, layer: k[..., 0]}], "checkpoint": [None], "progress": [False]}  # fmt: skip
    passages = [[5], [{}], [{"name": "x"}], [{"name": "x", "start": -1, "tokens": 1}], [{"name": "\ud800", "start": 0, "tokens": 1}], {"mine": 5}, {5: len}]
    given = {key: any_of(rng, good, TEXTS + NUMBERS + passages) for key, good in words.items() if rng.random() < 0.3}
    ids = any_of(rng, [list(range(20)), torch.arange(20)], NUMBERS + TEXTS + [[10**9], [[1, 2], [3, 4]], [-1]])
    with tempfile.TemporaryDirectory() as folder:
        kvlab.hf.capture(any_of(rng, [model_of_torch()], NUMBERS), ids, out=any_of(rng, [folder + "/out", None], NUMBERS + TEXTS), **given)


CALLS = {from_arrays: 25, reads: 20, replays: 20, policies: 10, differences: 5, commands: 20, quantized: 5, runs: 5, features: 5, caches: 15, captures: 10}


def fault_of(call, rng):
    """Runs a call. Returns a description of the fault in how it ended, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(rng)
    except ValueError as error:
        said = str(error)
        if "\n" in said or len(said) > 1500:
            return f"a message of {len(said)} bytes or several lines: {said[:200]!a}"
        if match := LIBRARIES.search(said):
            return f"{match.group()!r} in {said[:300]!a}"
    except RuntimeError as error:  # allowed for missing or unreadable files, for which commands exit with 2
        if not any(word in str(error) for word in ("/", "folder", "directory", "file", "File name", "trace", "config.json", "path that does not exist")) or LIBRARIES.search(str(error)):
            return f"RuntimeError: {str(error)[:300]!a}"
    except Exception as error:
        if "<lambda>() takes" in str(error):  # kvlab called the user's function, which takes other arguments
            return None
        return f"{type(error).__name__}: {str(error)[:300]!a}"
    return None


def main():
    global TRACE, MODEL, TEXT
    seed, first, count = map(int, sys.argv[1:4])
    TRACE, MODEL, TEXT = kvlab.Trace(sys.argv[4], verify=False), *sys.argv[5:7]
    for _ in range(2):
        NUMBERS.append(Hostile())
    for number in range(first, first + count):
        rng = random.Random(f"python/{seed}/{number}")
        call = rng.choices(list(CALLS), list(CALLS.values()))[0]
        print(f"at {number}", file=sys.stderr)
        if fault := fault_of(call, rng):
            print(f"{call.__name__} {seed} {number}: {fault}", flush=True)
    left = [path.name for path in pathlib.Path(tempfile.gettempdir()).glob("kvlab-scratch-*")]
    print(f"done: {count} calls{'; left: ' + str(left) if left else ''}")


if __name__ == "__main__":
    main()
