"""Policies: registered ones, policies in C++ headers, and Python functions over numpy arrays."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy
import numpy.typing

from kvlab import _arguments, _kvlab
from kvlab._old_names import renamed
from kvlab._rows import Rows, Sight

Needs = Literal["nothing", "mass", "requests", "both"]
Ranks = numpy.typing.NDArray[Any]


@dataclass(frozen=True)
class PolicyInfo:
    """The description of a policy, as in docs/reference/policies.md."""

    name: str
    """The name on the command line."""
    summary: str
    """One line: which token is evicted first."""
    citation: str
    """Paper, section, equation."""
    evicts: bool
    """False: the policy keeps every token and takes no budget."""
    needs: str
    """What the policy observes: "nothing", "mass", "requests" or "both"."""
    features: list[str]
    """The token features that the policy reads."""
    order: str
    """Either "nested" (a larger budget keeps every token that a smaller one keeps) or "feedback" (it may keep other
    tokens)."""
    sinks: str
    """Default protection of the first positions, in tokens or as a share of the budget."""
    recent: str
    """Default protection of the youngest tokens, in tokens or as a share of the budget."""
    modifiers: list[str]
    """Default modifiers."""
    params: list[dict[str, Any]]
    """The policy's parameters."""
    positions: str
    """Default positions: "original" or "cache"."""
    slot_bytes: int
    """Bytes of policy state for each live token."""
    token_bytes: int
    """Bytes of policy state and of features for each live token."""

    @classmethod
    def _from_json(cls, text: str) -> PolicyInfo:
        known = json.loads(text)
        return cls(**{name: known[name] for name in cls.__dataclass_fields__})


class Seen(NamedTuple):
    """The attention statistics of the last append: what each live token received from the queries of that append.

    Every array has shape [live], oldest token first. An array is None if the policy's `needs` does not request it. With
    `needs="nothing"` the function gets None in place of this object.
    """

    mass: numpy.typing.NDArray[numpy.uint64]
    """[live]: attention probability in units of 2**-32, summed over the group's query heads and the queries."""
    requests: numpy.typing.NDArray[numpy.uint32]
    """[live]: number of queries that requested the token."""
    last_request: numpy.typing.NDArray[numpy.uint32]
    """[live]: position of the last query that requested the token. Valid only for tokens whose `requests` is above
    0."""
    queries: numpy.typing.NDArray[numpy.uint32]
    """[live]: number of queries that could see the token."""
    mass_by_head: Any = None
    """uint64 [query heads of the group, live]: the mass from each query head. Only for policies with `by_head=True`."""


class Token:
    """The live tokens of one cache, oldest first.

    `position` is an array [live] of positions in the sequence. Each feature of the policy is an attribute with the
    feature's name, an array [live] of float32. A policy with `rows=True` also gets `rows`, `ids`, `keys` and `values`;
    for other policies they raise LookupError.
    """

    def __init__(
        self,
        position: numpy.typing.NDArray[numpy.uint32],
        features: Mapping[str, numpy.typing.NDArray[numpy.float32]],
        look: Callable[[], Rows] | None = None,
        kv_head: int = 0,
    ) -> None:
        self.position = position
        self._features, self._look, self._kv_head = features, look, kv_head

    @property
    def rows(self) -> Rows:
        """Queries, keys and values of the whole layer."""
        if self._look is None:
            raise LookupError("token.rows is only available with @kvlab.policy(rows=True)")
        try:
            return self._look()
        except KeyError:
            raise LookupError("token.rows is not available for this layer") from None

    @property
    def ids(self) -> numpy.typing.NDArray[numpy.int32]:
        """[live]: token ids. They are known in replays only."""
        if (ids := self.rows.ids) is None:
            raise LookupError("token.ids is available in replays only")
        return ids[self.position]

    @property
    def keys(self) -> numpy.typing.NDArray[numpy.float32]:
        """[live, head_size]: keys before RoPE. Outside of replays only the keys of a prompt are known."""
        return self._shown(self.rows.k)

    @property
    def values(self) -> numpy.typing.NDArray[numpy.float32]:
        """[live, head_size]: values. Outside of replays only the values of a prompt are known."""
        return self._shown(self.rows.v)

    def _shown(self, x: numpy.typing.NDArray[numpy.float32]) -> numpy.typing.NDArray[numpy.float32]:
        if len(self) and int(self.position[-1]) >= x.shape[1]:
            raise LookupError("token.keys and token.values of decoded tokens are available in replays only")
        shown: numpy.typing.NDArray[numpy.float32] = x[self._kv_head, self.position]
        return shown

    def __getattr__(self, name: str) -> numpy.typing.NDArray[numpy.float32]:
        try:
            return self._features[name]
        except KeyError:
            there = ", ".join(["position", *self._features])
            raise AttributeError(f"token has no feature {name}; it has {there}") from None

    def __len__(self) -> int:
        return len(self.position)


class Step(NamedTuple):
    """The state of the cache that a policy ranks."""

    now: int
    """Position of the next token."""
    budget: int
    """Number of tokens that a decoded query may see, its own token included."""
    live: int
    """Number of live tokens."""
    queries: int
    """Number of tokens in the last append. 0 if the policy observes nothing."""
    seed: int
    """The configuration's random seed."""
    sequence: int
    """Number of the sequence."""
    layer: int
    """Number of the layer in the model."""
    kv_head: int
    """Number of the KV head in its layer."""


Function = Callable[[Any, Any, Token, Step], Any]


class Policy:
    """A policy that is not registered in kvlab: a Python function or a compiled header.

    `policy()` and `policy_source()` return such objects. `str(policy)` is its name, so f"{policy}:every=64" is this
    policy with a modifier.
    """

    def __init__(
        self,
        held: _kvlab.Policy,
        function: Function | None = None,
        source: str | None = None,
        look: Callable[[], _kvlab.Policy] | None = None,
    ) -> None:
        self.held = held
        self.function = function
        self.source = source
        self._look = look  # makes the extension's policy for one call; None if the policy reads no rows
        _own[self.name] = self

    @property
    def name(self) -> str:
        """The name on the command line and in results."""
        return self.held.name

    def for_one_call(self) -> _kvlab.Policy:
        """The extension's policy for one replay or evaluation. A policy with `rows=True` gets a new one each time."""
        return self.held if self._look is None else self._look()

    @property
    def info(self) -> PolicyInfo:
        """The description of the policy."""
        return PolicyInfo._from_json(self.held.json)

    def __call__(self, state: Any, seen: Any, token: Token, step: Step) -> Any:
        """Calls the Python function, so that you can try it out. Raises TypeError if the policy is a compiled
        header."""
        if self.function is None:
            raise TypeError(f"policy {self.name} comes from a C++ header, so it cannot be called as a function")
        return self.function(state, seen, token, step)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<kvlab.Policy {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.source is None:
            what = f"policy {self.name} is a Python function and cannot be pickled"
            raise TypeError(f"{what}; define it in the other process, too")
        return (policy_source, (self.source,))


_own: dict[str, Policy] = {}  # by name; a later policy replaces an earlier one of the same name


def policies() -> list[PolicyInfo]:
    """Describes every registered policy."""
    return [PolicyInfo._from_json(text) for text in _kvlab.registered_policies()]


def policy_source(path: str | os.PathLike[str]) -> Policy:
    """Compiles the policy of a C++ header like those of policies/, as `kvlab replay --policy-source` does.

    Raises ValueError or RuntimeError if the header cannot be read or compiled.
    """
    path = _arguments.path("path", path)
    return Policy(_kvlab.Policy.compile(path), source=os.path.abspath(path))


@renamed(columns="features")
def policy(
    needs: Needs | None = "nothing",
    *,
    features: Iterable[str] = (),
    state: Mapping[str, Any] | None = None,
    sinks: int | str | None = None,
    recent: int | str | None = None,
    modifiers: Iterable[str] = (),
    positions: Literal["original", "cache"] = "original",
    rows: bool = False,
    by_head: bool = False,
    weights: Sequence[float] = (),
    name: str | None = None,
    summary: str = "",
) -> Callable[[Function], Policy]:
    """Decorator that makes a policy of a function (state, seen, token, step) -> ranks.

    >>> @kvlab.policy(needs="mass", state={"mass": "uint64"}, recent="50%")
    ... def my_h2o(state, seen, token, step):
    ...     state["mass"] += seen.mass
    ...     return state["mass"]

    The function gets all live tokens of one cache, oldest first. It returns their ranks: an array [live] of floats, or
    of integers that are not negative. The token with the lowest rank is evicted first. Among tokens of equal rank, the
    oldest is evicted first.

    `needs`: what `seen` contains: attention ("mass"), requests ("requests"), "both", or "nothing". The function is
    called after each append. With `needs="nothing"` it is called when tokens have to be evicted instead, perhaps more
    than once, and cannot have a state.

    `features`: token features that the function reads, as attributes of `token`.

    `state`: names and numpy dtypes of what the policy keeps for each token, at most 4,096 bytes in all. The function
    gets a structured array [live], zeros for a new token, and changes it in place.

    `sinks`, `recent`, `modifiers`, `positions`: defaults, written as on the command line.

    `rows`: set this if the function reads `token.rows`, `token.ids`, `token.keys` or `token.values`. `by_head`: set
    this if it reads `seen.mass_by_head`. A replay of such a policy is slower, because it runs one configuration at a
    time.

    `weights`: numbers from 0 to 1 by which the attention of a prompt's queries is multiplied. The first number is for
    the last query, the second for the query before it, and so on. Queries without a number are not observed. By default
    all queries have weight 1.

    `name`, `summary`: by default the function's name and the first line of its docstring.

    Raises ValueError for a bad argument, or if the name belongs to a registered policy.
    """
    weights = _arguments.numbers("weights", weights, 0, 1)
    needed = _one_need(needs)
    features, modifiers = _arguments.texts("features", features), _arguments.texts("modifiers", modifiers)
    rows, by_head = _arguments.flag("rows", rows), _arguments.flag("by_head", by_head)
    name = None if name is None else _arguments.text("name", name)
    summary = _arguments.text("summary", summary)
    _arguments.one_of("positions", positions, "original", "cache")
    protected_tokens = [
        f"{word}={_protected(word, value)}" for word, value in (("sinks", sinks), ("recent", recent)) if value is not None
    ]
    dtype = _state(state)

    def make(function: Function) -> Policy:
        if not inspect.isfunction(function):
            raise _arguments.refuse("policy", function, "a function (state, seen, token, step)")
        own = _OwnFunction(function, name or function.__name__, tuple(features), dtype)
        if not own.name.isidentifier() or len(own.name) > _MAX_NAME:
            right = f"at most {_MAX_NAME} letters, digits and underscores, and should not begin with a digit"
            raise ValueError(f"{own.place}: policy {_arguments.shown(own.name)} should be {right}")
        if _kvlab.is_taken(own.name):
            raise ValueError(f"{own.where}: {own.name} is already a policy of kvlab; give another name: name=…")

        def held(one: _OwnFunction) -> _kvlab.Policy:
            return _kvlab.Policy.own(
                own.name,
                summary or (inspect.getdoc(function) or "a Python policy").splitlines()[0],
                own.path,
                own.text,
                needed,
                list(own.features),
                ":".join([*protected_tokens, *modifiers]),
                positions,
                own.dtype.itemsize if own.dtype is not None else 0,
                weights,
                by_head,
                one,
                one.sight,
            )

        return Policy(held(own), function, look=(lambda: held(own.looking())) if rows else None)

    return make


_MAX_NAME = 100  # characters of a policy's name
_MAX_STATE = 4096  # bytes of state for each token


def _one_need(needs: Any) -> str:
    return "nothing" if needs is None else _arguments.one_of("needs", needs, "nothing", "mass", "requests", "both")


def _protected(word: str, value: Any) -> str:
    return _arguments.text(word, value) if isinstance(value, str) else str(_arguments.whole(word, value, 0, 2**31 - 1))


def _state(state: Any) -> numpy.dtype[Any] | None:
    if not state:
        return None
    right = "a mapping of names to numpy dtypes of fixed size, without objects"
    try:
        dtype = numpy.dtype(list(state.items()))
    except (AttributeError, TypeError, ValueError):
        raise _arguments.refuse("state", state, right) from None
    if dtype.hasobject:
        raise _arguments.refuse("state", state, right)
    if not 1 <= dtype.itemsize <= _MAX_STATE:
        raise ValueError(f"state: takes {dtype.itemsize} bytes for each token; it must take 1 to {_MAX_STATE}")
    return dtype


class _OwnFunction:
    """The function that the extension calls. It converts arrays to the arguments of the user's function, and checks the
    ranks."""

    def __init__(
        self, function: Function, name: str, features: tuple[str, ...], dtype: numpy.dtype[Any] | None
    ) -> None:
        self.function, self.name, self.features = function, name, features
        self.sight: Sight | None = None
        code = function.__code__
        self.path = code.co_filename
        self.line = code.co_firstlineno
        try:
            lines, self.line = inspect.getsourcelines(function)
            self.text = "".join(lines)
            self.line += next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
        except (OSError, TypeError):
            self.text = name
        self.dtype = dtype

    def looking(self) -> _OwnFunction:
        """Returns a copy for one call. The copy records the rows that the extension shows."""
        own = copy.copy(self)
        own.sight = Sight()
        return own

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def where(self) -> str:
        return f"{self.place}: policy {self.name}"

    def __call__(
        self,
        state: Any,
        mass: Any,
        requests: Any,
        last: Any,
        queries: Any,
        by_head: Any,
        position: Any,
        features: Any,
        step: Any,
    ) -> Ranks:
        if self.dtype is not None:
            state = state.reshape(-1).view(self.dtype)
        where = Step(*step)
        look = None if self.sight is None else functools.partial(self.sight.read, where.sequence, where.layer)
        token = Token(position, {name: features[:, i] for i, name in enumerate(self.features)}, look, where.kv_head)
        seen = None if queries is None else Seen(mass, requests, last, queries, by_head)
        try:
            answer = self.function(state, seen, token, where)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"{self.where}: {self._cache(where)}")
            raise
        return self._ranks(answer, token, where)

    @staticmethod
    def _cache(step: Step) -> str:
        return f"layer {step.layer}, KV head {step.kv_head}, before token {step.now}"

    def _ranks(self, answer: Any, token: Token, step: Step) -> Ranks:
        """Checks the answer and converts it to uint64 or float64 [live], as the extension expects."""
        count = len(token)
        expected = f"it must return an array of one rank for each of {count} live tokens ({self._cache(step)})"
        if not isinstance(answer, numpy.ndarray):
            raise ValueError(f"{self.where}: returned a {type(answer).__name__}; {expected}")
        if answer.shape != (count,):
            raise ValueError(f"{self.where}: returned an array of shape {answer.shape}; {expected}")
        if answer.dtype.kind in "ub":
            return numpy.ascontiguousarray(answer, numpy.uint64)
        if answer.dtype.kind == "i":
            if count and answer.min() < 0:
                raise ValueError(f"{self.where}: returned a rank below 0; only floats may be below 0, not integers")
            return numpy.ascontiguousarray(answer, numpy.uint64)
        if answer.dtype.kind != "f" or answer.dtype.itemsize > 8:
            raise ValueError(
                f"{self.where}: returned an array of {answer.dtype}; ranks must be integers or floats of at most 64 "
                "bits"
            )
        bad = numpy.isnan(answer)
        if bad.any():
            at = int(token.position[int(numpy.argmax(bad))])
            raise ValueError(f"{self.where}: returned NaN for the token at position {at} ({self._cache(step)})")
        return numpy.ascontiguousarray(answer, numpy.float64)


def known_as(text: str) -> Policy | None:
    """Returns the Python or compiled policy that a text names, or None."""
    return _own.get(text.split(":", 1)[0])


def resolve(requested: Iterable[str | Policy]) -> tuple[list[str], list[_kvlab.Policy]]:
    """Returns the policies as texts, and the extension's objects of those that are not registered in kvlab."""
    texts: list[str] = []
    own: dict[str, Policy] = {}
    for one in _arguments.items("policies", requested, "a policy, or a list of policies"):
        if not isinstance(one, (str, Policy)):
            raise ValueError(
                f"policies: an entry has type {type(one).__name__}; give a text such as 'h2o:recent=25%' or a Policy"
            )
        found = one if isinstance(one, Policy) else known_as(_arguments.text("policies", one))
        texts.append(str(one))
        if found is None:
            continue
        if own.setdefault(found.name, found) is not found:
            raise ValueError(f"policies: two policies are called {found.name}; give one of them another name")
    return texts, [one.for_one_call() for one in own.values()]
