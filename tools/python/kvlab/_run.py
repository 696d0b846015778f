"""Replays and their results."""

from __future__ import annotations

import io
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy
import numpy.typing

from kvlab import _arguments, _kvlab
from kvlab._old_names import renamed
from kvlab._policy import Policy, resolve
from kvlab._progress import Progress, shown
from kvlab._trace import MAX_THREADS, Trace
from kvlab._words import LISTS, python_terms, python_words

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas
    import pyarrow

Texts = str | Iterable[str]
Model = Any  # a checkpoint's folder, a transformers model, or output projections that were read from one of these
Budgets = str | int | Iterable[str | int]


_NUMBERS: dict[str, Any] = dict.fromkeys(("threshold", "value", "stderr", "budget_bytes"), "float64") | {
    "budget_tokens": "int64", "seed": "uint64", "count": "int64",
}  # fmt: skip


class Metric(NamedTuple):
    """Describes a metric of results.csv."""

    name: str
    """The name in results.csv."""
    label: str
    """The name in figures."""
    higher_is_better: bool
    """Whether a larger value is the better one."""
    ranks: bool
    """Whether the metric can rank policies. False for bookkeeping, such as bytes."""


class LruPoint(NamedTuple):
    """How much the policy `lru` fetches with one size of the device buffer, in a replay with refetch."""

    trace: str
    """Name of the trace."""
    budget: int
    """Size of the buffer, in tokens of a KV head."""
    fetch_rate: float
    """Fetched share of the selected tokens."""
    fetch_bytes: float
    """Bytes fetched for each query, over all replayed KV heads."""


def metrics() -> dict[str, Metric]:
    """Describes every metric, by name. `passage_recall` stands for `passage_recall:NAME` of each passage."""
    return {entry[0]: Metric(*entry) for entry in _kvlab.metrics()}


class Difference(NamedTuple):
    """The paired difference of two configurations over the same texts."""

    mean: float
    """Mean of the differences over the texts."""
    standard_error: float
    """Standard error of `mean`."""
    low: float
    """Lower end of the 95% interval of `mean`."""
    high: float
    """Upper end of the 95% interval of `mean`."""
    texts: int
    """Number of texts."""

    @property
    def significantly_different(self) -> bool:
        """Whether the 95% interval excludes zero. False if there is no interval."""
        return self.low > 0 or self.high < 0


def difference(a: Iterable[Any], b: Iterable[Any]) -> Difference:
    """Compares two configurations by their paired difference `a - b`, in the same way as the recommendations of the
    commands.

    >>> kvlab.difference([[0.11, 0.12], [0.10, 0.09]], [[0.13, 0.13], [0.12, 0.10]]).significantly_different

    `a` and `b` have one entry for each text, in the same order. An entry is the value of the metric, or a list of its
    values in the blocks of the text. Every text has weight 1. The interval needs at least two texts, or one text of at
    least 8 blocks (docs/reference/recommendations.md). Raises ValueError if `a` and `b` differ in their texts or
    blocks.
    """
    right = "a list with one entry for each text: a number, or a list of numbers"
    sides = (("a", _arguments.items("a", a, right)), ("b", _arguments.items("b", b, right)))
    values = [[_metric_values(name, text) for text in side] for name, side in sides]
    return Difference(*_kvlab.difference(values))


def _metric_values(name: str, text: Any) -> list[float]:
    """The values of one text, one for each block. A single number is a text with one block."""
    try:
        values = numpy.atleast_1d(numpy.asarray(text, dtype=float))
    except (TypeError, ValueError, OverflowError):
        raise _arguments.refuse(name, text, "a number, or a list of numbers, for each text") from None
    if values.ndim != 1:
        raise _arguments.refuse(name, text, "a number, or a list of numbers, for each text")
    return [float(value) for value in values]


class Kept(NamedTuple):
    """Which tokens one KV head kept over time."""

    queries: numpy.typing.NDArray[numpy.uint32]
    """[queries]: positions of the measured queries."""
    live: numpy.typing.NDArray[numpy.bool_]
    """[queries, tokens]: whether the token was in the cache while the query attended."""


class Run:
    """The results of a replay, made by `replay()` or `load_run()`.

    A run can be pickled. `save()` writes a folder that `kvlab report` and `load_run()` read.
    """

    def __init__(
        self, held: _kvlab.Run, traces: Sequence[Trace] = (), own: Sequence[_kvlab.Policy] = (), model: Model = None
    ) -> None:
        self._held = held
        self._traces = list(traces)
        self._own = list(own)
        self._output = _output_of(model)

    def frame(self) -> pandas.DataFrame:
        """Results as a pandas DataFrame with the columns of results.csv, one value of a metric in each row.

        Columns of text are categories. `layer` and `head` are texts too: "all", "0", "1", … Needs pandas.
        """
        import pandas

        frame = pandas.read_csv(io.StringIO(self.csv()), dtype=str, keep_default_na=False)
        for name, texts in frame.items():
            if name in _NUMBERS:
                frame[name] = texts.replace("", "nan").astype(_NUMBERS[name])
            else:
                frame[name] = pandas.Categorical(texts, texts.unique())
        return frame

    def arrow(self) -> pyarrow.Table:
        """Results as an Arrow table with the columns of results.csv.

        Columns of text are dictionary-encoded. A missing `stderr` is null. Needs pyarrow.
        """
        import pyarrow
        import pyarrow.csv

        text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
        lines = self.csv().encode()
        types = dict.fromkeys(lines.split(b"\n", 1)[0].decode().split(","), text)
        types |= {name: pyarrow.from_numpy_dtype(number) for name, number in _NUMBERS.items()}
        options = pyarrow.csv.ConvertOptions(column_types=types, null_values=["", "nan"])
        return pyarrow.csv.read_csv(io.BytesIO(lines), convert_options=options)

    def parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes the Arrow table to a Parquet file. Needs pyarrow."""
        import pyarrow.parquet

        pyarrow.parquet.write_table(self.arrow(), os.fspath(path))

    def csv(self) -> str:
        """Returns the results as text, in the format of results.csv."""
        return self._held.csv()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes a new folder with the files of `kvlab replay`: results.csv, blocks.csv, run.json, kept.json.

        Raises RuntimeError if the folder cannot be made.
        """
        self._held.save(_arguments.path("directory", directory))

    @property
    def refetch(self) -> str | None:
        """The selector of a replay with refetch, as requested; None without refetch."""
        return self._held.refetch or None

    @property
    def lru_curve(self) -> list[LruPoint]:
        """How much `lru` fetches with each size of the device buffer, for each trace. Empty without refetch."""
        return [LruPoint(*point) for point in self._held.lru_curve]

    @property
    def sweep(self) -> list[dict[str, str]]:
        """The configurations, each a dict of policy, params, budget, prefill and positions."""
        names = ("policy", "params", "budget", "prefill", "positions")
        return [dict(zip(names, entry, strict=True)) for entry in self._held.sweep]

    def ranking(self, budget: str | int, metric: str = "") -> dict[str, Any]:
        """Ranks the policies at a budget.

        >>> [one["policy"] for one in run.ranking(128)["standings"]]

        The result has two keys. `standings`: a list of the eligible configurations, the best mean first, followed by
        those that are over budget. `recommendation`: what `recommendation()` returns.

        `budget`: written as in `replay()`. `metric`: by default the best predictor that the run has
        (docs/reference/metrics.md). Raises ValueError if the run has no such budget, or if configurations cannot be
        ranked by the metric.

        For one more release, old names also work. The entry `verdict` is the recommendation with the keys of older
        versions. In `standings`, `behind` is a copy of `from_lowest`.
        """
        budget, metric = _arguments.amount("budget", budget), _arguments.text("metric", metric)
        ranking: dict[str, Any] = json.loads(self._held.ranking(budget, metric))
        for one in ranking["standings"]:
            one["behind"] = one["from_lowest"]  # old name
        made = ranking["recommendation"]
        ranking["verdict"] = {  # old name
            "text": made["text"],
            "winner": made["choice"],
            "ties": [made["choice"], *made["not_significantly_different"]],
            "holds_more": [one["policy"] for one in made["over_budget"]],
            "frontier": made["frontier"],
            "warnings": made["warnings"],
        }
        return ranking

    def recommendation(self, budget: str | int, metric: str = "") -> dict[str, Any]:
        """Chooses a policy at a budget, with the evidence, as `kvlab deploy` and the pages show it.

        >>> run.recommendation(128)["choice"]

        Keys: `choice`, `reason`, `mean`, `kv_bytes_mean`, `kv_bytes_peak`, `full_bytes`, `runner_up`, `difference` (the
        runner-up minus the choice: `mean`, `low`, `high` of the 95% interval, `significant`),
        `not_significantly_different`, `order`, `over_budget`, `text`, `warnings`
        (docs/reference/recommendations.md). Arguments and errors are those of `ranking()`.
        """
        return dict(self.ranking(budget, metric)["recommendation"])

    @property
    def notices(self) -> list[str]:
        """A line for each configuration that the replay left out or does not rank, and for each warning of a
        recommendation."""
        lines = list(self._held.notices)
        for budget in self._held.budgets:
            try:
                made = self.recommendation(budget)
            except ValueError:  # at this budget the run has only oracles
                continue
            lines += [f"{one['policy']} is over the budget of {budget} and not ranked" for one in made["over_budget"]]
            lines += made["warnings"]
        return list(dict.fromkeys(lines))

    def kept(
        self,
        layer: int,
        head: int,
        policy: str | Policy,
        budget: str | int | None = None,
        *,
        prefill: str | None = None,
        positions: str | None = None,
        trace: str | None = None,
        plain: bool = False,
    ) -> Kept:
        """Replays one head again and returns the tokens that it kept at each measured query.

        >>> run.kept(layer=3, head=1, policy="h2o", budget=128).live.sum(axis=1)

        `layer`: the model's number of the layer. `head`: a KV head of the layer. `policy`, `budget`, `prefill` and
        `positions` select one configuration of the run. If `policy` is only a name and several configurations match,
        the one without modifiers is used, if the run has it. `trace`: name of the trace, if the run has several.
        `plain`: use the plain replay, a simple and slow implementation with the same result.

        Raises ValueError unless exactly one configuration matches, and if the trace on disk is not the one that was
        replayed.
        """
        layer = _arguments.whole("layer", layer, 0, 2**31 - 1)
        head = _arguments.whole("head", head, 0, 2**31 - 1)
        plain = _arguments.flag("plain", plain)
        if not isinstance(policy, Policy):
            policy = _arguments.text("policy", policy)
        wanted = self._configuration(
            str(policy),
            None if budget is None else _arguments.amount("budget", budget),
            None if prefill is None else _arguments.text("prefill", prefill),
            None if positions is None else _arguments.text("positions", positions),
        )
        sequence = self._sequence(trace)
        queries, live = self._held.kept(
            self._trace(sequence), sequence, wanted, self._own, layer, head, plain, self._output
        )
        return Kept(queries, live)

    def _configuration(self, policy: str, budget: str | None, prefill: str | None, positions: str | None) -> int:
        def fits(entry: Mapping[str, str]) -> bool:
            name, _, params = policy.partition(":")
            given = set(entry["params"].split(":"))
            return (
                entry["policy"] == name
                and (not params or set(params.split(":")) <= given)
                and (budget is None or entry["budget"] in (budget, "all"))
                and (prefill is None or entry["prefill"] == prefill)
                and (positions is None or entry["positions"] == positions)
            )

        settings = {  # index in the sweep -> settings, of the configurations that fit
            index: {entry["budget"], entry["prefill"], entry["positions"], *entry["params"].split(":")}
            for index, entry in enumerate(self.sweep)
            if fits(entry)
        }
        # If the settings of one configuration are a subset of those of every other one, that configuration has no
        # modifiers.
        plain = [index for index, own in settings.items() if all(own <= other for other in settings.values())]
        found = plain or list(settings)
        requested = _arguments.brief(policy) + ("" if budget is None else f" at budget {_arguments.brief(budget)}")
        if not found:
            there = ", ".join(sorted({f"{entry['policy']} at {entry['budget']}" for entry in self.sweep}))
            raise ValueError(f"kept: the run has no {requested}; it has {_arguments.brief(there, 1000)}")
        if len(found) > 1:
            raise ValueError(
                f"kept: {len(found)} configurations of the run match {requested}; give settings that "
                "only one of them has"
            )
        return found[0]

    def _sequence(self, trace: str | None) -> int:
        names = [name for name, _, _ in self._held.traces]
        if trace is None and len(names) == 1:
            return 0
        if trace not in names:
            raise _arguments.refuse("trace", trace, f"one of {_arguments.brief(', '.join(names), 1000)}")
        return names.index(trace)

    def _trace(self, sequence: int) -> _kvlab.Trace:
        name, path, expected = self._held.traces[sequence]
        if not self._traces:
            self._traces = [Trace(path, verify=False) for _, path, _ in self._held.traces]
        trace = self._traces[sequence]
        if trace.hash != expected:
            raise ValueError(
                f"{path}: is not the trace {name} that the run replayed (its hash is {trace.hash}, not "
                f"{expected})"
            )
        return trace._held

    def plot(self, metric: str, *, ax: matplotlib.axes.Axes | None = None) -> matplotlib.axes.Axes:
        """Plots a metric against the budget in tokens, one line for each policy, and returns the axes.

        A point is the mean over traces of the mean over layers and heads. The legend is beside the axes. The axis of
        the values is logarithmic if lower values are better and the values span more than a factor of 10. Needs
        matplotlib and pandas. Raises ValueError if the run has no such metric.
        """
        import matplotlib.pyplot

        metric, frame = _arguments.text("metric", metric), self.frame()
        rows = frame[(frame["metric"] == metric) & (frame["layer"] == "all") & (frame["head"] == "all")]
        if rows.empty:
            there = ", ".join(sorted(frame["metric"].unique()))
            raise ValueError(f"plot: the run has no {_arguments.brief(metric)}; it has {there}")
        if ax is None:
            ax = matplotlib.pyplot.subplots()[1]
        settings: dict[str, list[set[str]]] = {}
        for (policy, params), _ in rows.groupby(["policy", "params"], observed=True):
            settings.setdefault(str(policy), []).append(set(str(params).split(":")))
        lines = 0
        for (policy, params), line in rows.groupby(["policy", "params"], observed=True, sort=False):
            if policy == "full":
                continue
            means = line.groupby("budget_tokens")["value"].mean()
            common = set.intersection(*settings[str(policy)])  # settings of all variants; labels leave them out
            label = ":".join([str(policy), *(part for part in str(params).split(":") if part not in common)])
            style, marker = ("--", "") if str(policy).startswith("oracle") else ("-", "os^Dv<>P*X"[lines // 10 % 10])
            ax.plot(means.index, means.to_numpy(), style, marker=marker, markersize=4, label=label)
            lines += 1
        ax.set_xlabel("budget (tokens)")
        known = metrics().get(metric)
        ax.set_ylabel(known.label if known else metric)
        values = rows.loc[rows["policy"] != "full", "value"]
        if known and not known.higher_is_better and 0 < 10 * values.min() < values.max():
            ax.set_yscale("log")
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False)
        return ax

    def __repr__(self) -> str:
        names = ", ".join(name for name, _, _ in self._held.traces)
        return f"<kvlab.Run of {names}: {len(self.sweep)} configurations>"

    def __reduce__(self) -> tuple[Any, ...]:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "run")
            self.save(path)
            return (_from_files, ({file.name: file.read_bytes() for file in path.iterdir()},))


def _from_files(files: Mapping[str, bytes]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            pathlib.Path(folder, name).write_bytes(content)
        return load_run(folder)


def load_run(directory: str | os.PathLike[str], *, model: Model = None) -> Run:
    """Reads a folder that `kvlab replay` or `Run.save()` wrote.

    `Run.kept()` needs the run's Python policies to be defined in this process, and `model` as in `replay()`. Raises
    RuntimeError if the folder cannot be read.
    """
    held = _kvlab.Run.load(_arguments.path("directory", directory))
    return Run(held, own=resolve({entry[0] for entry in held.sweep})[1], model=model)


def _output_of(model: Model) -> _kvlab.OutputProjections | None:
    if model is None or isinstance(model, _kvlab.OutputProjections):
        return model
    if isinstance(model, (str, os.PathLike)):
        return _kvlab.OutputProjections.read(_arguments.path("model", model))
    if not hasattr(model, "config"):
        raise ValueError(f"model: has type {type(model).__name__}; give a folder or a transformers model")
    from kvlab.hf.layers import output_projections
    from kvlab.hf.models import base_of

    return output_projections(base_of(model))


@renamed(span="queries")
def replay(
    trace: Trace | str | os.PathLike[str] | Sequence[Trace | str | os.PathLike[str]],
    policies: str | Policy | Sequence[str | Policy],
    budgets: Budgets = (),
    *,
    prefill: Texts = "dense",
    positions: Texts = (),
    queries: Literal["decode", "all"] = "decode",
    seed: int = 0,
    request_threshold: float = 0.01,
    output_error: Literal["sample", "all"] = "sample",
    layers: Iterable[int] = (),
    refetch: str | None = None,
    references: bool = True,
    model: Model = None,
    plain: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    progress: Progress = True,
) -> Run:
    """Replays traces under every policy at every budget, as `kvlab replay` does, and keeps the results in memory.

    >>> run = kvlab.replay("trace", ["h2o", "sink", "lru:sinks=4:every=16"], ["10%", 128])

    `trace`: one trace or a list, as `Trace` objects or paths.

    `policies`: names with settings, as on the command line, or objects of `policy()` and `policy_source()`.

    `budgets`: tokens (128), shares of the length ("20%"), "pyramid(20%)", "ada(20%)", "@FILE" and so on
    (docs/reference/configurations.md).

    `prefill`: "dense", "chunk:N" or "stream". `positions`: "original" or "cache". Each may be a list; the sweep then
    has configurations for each entry. By default, each policy is replayed with its own default positions.

    `queries`: the queries over which metrics are taken: those of decoded tokens, or all. `output_error`: measure the
    errors of attention outputs at a sample of these queries, or at all of them. `layers`: numbers of the layers to
    replay, by default all.

    `request_threshold`: a query requests a token whose attention is at least this share of the query's largest.

    `refetch`: the selector of a replay in which an evicted token returns when a query selects it. "top:64": a query
    selects the 64 most probable tokens. "page:16:64": it selects 64 tokens in pages of 16, as Quest does. "logged": it
    selects the tokens that the trace lists. The run has the metrics `fetch_rate` and `fetch_bytes`
    (docs/guides/refetch.md).

    `references`: also replay the full cache and the oracles. `plain`: use the plain replay, a simple and slow
    implementation that keeps the same tokens.

    `model`: the model of the traces, as a checkpoint's folder or a loaded transformers model. Only policies that read
    output projections, such as `criticalkv`, need it.

    `device="cuda"` uses the GPU for the policies that it supports. It needs a package that was built with KVLAB_CUDA=1.
    `threads`: number of CPU threads, by default one for each core. `seed`: random seed of the policies that use random
    numbers.

    `progress`: True shows a bar of tqdm in notebooks and on terminals; a function gets the fraction done, from 0 to 1.

    Raises ValueError for a bad argument, and RuntimeError if a trace cannot be read. Warns about configurations that it
    leaves out.
    """
    one_trace = isinstance(trace, (Trace, str, os.PathLike))
    several: list[Any] = [trace] if one_trace else _arguments.items("trace", trace, "a trace, a path, or a list of "
        "these")
    traces = [one if isinstance(one, Trace) else Trace(one, threads=threads) for one in several]
    if not traces:
        raise ValueError("trace: give at least one")
    _arguments.one_of("device", device, "cpu", "cuda")
    _arguments.one_of("output_error", output_error, "sample", "all")
    texts, own = resolve([policies] if isinstance(policies, (str, Policy)) else policies)
    words: dict[str, Any] = {
        "policies": texts,
        "budgets": _arguments.amounts("budgets", budgets),
        "prefill": _arguments.texts("prefill", prefill),
        "positions": _arguments.texts("positions", positions),
        "seed": _arguments.whole("seed", seed, 0, 2**64 - 1),
        "threshold": _arguments.real("request_threshold", request_threshold),
        "references": _arguments.flag("references", references),
        "queries": _arguments.one_of("queries", queries, "decode", "all"),
        "every_output_error": output_error == "all",
        "plain": _arguments.flag("plain", plain),
        "device": device,
        "layers": _layers(layers),
        "refetch": None if refetch is None else _arguments.text("refetch", refetch),
        "threads": None if threads is None else _arguments.whole("threads", threads, 1, MAX_THREADS),
        "output": _output_of(model),
    }
    with shown(progress, "replay") as words["progress"], python_words(LISTS):
        held = _kvlab.replay([one._held for one in traces], own, words)
    for line in held.notices:
        warnings.warn(python_terms(line, LISTS), stacklevel=3)
    return Run(held, traces, own, words["output"])


def _layers(layers: Any) -> list[int]:
    listed = _arguments.items("layers", layers, "a list of whole numbers")
    return sorted({_arguments.whole("layers", layer, 0, 2**31 - 1) for layer in listed})
