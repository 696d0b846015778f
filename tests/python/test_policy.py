from __future__ import annotations

import pathlib
import pickle
import re
from typing import Any

import numpy
import pytest
from conftest import random_arrays

import kvlab
from kvlab._trace import mapped_tensors

ROOT = pathlib.Path(__file__).resolve().parents[2]


@kvlab.policy(needs="mass", state={"mass": "u8"}, recent="50%")
def my_h2o(state: Any, seen: Any, token: Any, step: Any) -> Any:
    """Evicts the token with the least accumulated attention first."""
    state["mass"] += seen.mass
    return state["mass"]


@kvlab.policy(needs="requests", state={"last": "u4"})
def my_lru(state: Any, seen: Any, token: Any, step: Any) -> Any:
    requested = seen.requests > 0
    state["last"] = numpy.where(requested, seen.last_request, numpy.maximum(state["last"], token.position))
    return state["last"]


@kvlab.policy(needs="mass", features=["value_norm1"], state={"mass": "u8"}, recent="50%")
def my_vatp(state: Any, seen: Any, token: Any, step: Any) -> Any:
    state["mass"] += seen.mass
    return state["mass"].astype("f8") * token.value_norm1.astype("f8")


@kvlab.policy()
def my_window(state: Any, seen: Any, token: Any, step: Any) -> Any:
    assert state is None and seen is None and step.live == len(token)
    return token.position


@kvlab.policy(features=["key_norm"])
def my_knorm(state: Any, seen: Any, token: Any, step: Any) -> Any:
    return -token.key_norm


PAIRS = [
    (my_h2o, "h2o", ""),
    (my_h2o, "h2o", ":sinks=4:recent=10"),
    (my_h2o, "h2o", ":every=16"),
    (my_h2o, "h2o", ":scope=layer:sinks=2"),
    (my_h2o, "h2o", ":once"),
    (my_h2o, "h2o", ":group=max"),
    (my_h2o, "h2o", ":every=8:smooth=2"),
    (my_lru, "lru", ""),
    (my_lru, "lru", ":sinks=4:recent=50%"),
    (my_vatp, "vatp", ""),
    (my_vatp, "vatp", ":scope=layer"),
    (my_vatp, "vatp", ":scope=layer:every=8:smooth=2"),
    (my_vatp, "vatp", ":every=8:smooth=3:pool=max"),
    (my_window, "window", ":sinks=3"),
    (my_knorm, "knorm", ":recent=8"),
    (my_knorm, "knorm", ":scope=layer"),
    (my_knorm, "knorm", ":every=8:smooth=500:scope=layer"),
]


def sets(trace: kvlab.Trace, policy: Any, words: dict[str, Any], plain: bool) -> list[Any]:
    run = kvlab.replay(trace, policy, [24, "50%"], references=False, **words)
    return [
        run.kept(layer, head, str(policy).split(":")[0], budget, plain=plain).live
        for layer in range(trace.layers)
        for head in range(trace.kv_heads)
        for budget in (24, "50%")
    ]


@pytest.mark.parametrize("words", [{}, {"prefill": "chunk:7"}, {"positions": "cache"}, {"queries": "all"}], ids=str)
@pytest.mark.parametrize(("mine", "header", "more"), PAIRS, ids=lambda x: str(x))
def test_kept_sets_are_those_of_the_header(
    small: kvlab.Trace, mine: kvlab.Policy, header: str, more: str, words: dict[str, Any]
) -> None:
    expected = sets(small, header + more, words, plain=False)
    for plain in (False, True):
        for one, other in zip(sets(small, f"{mine}{more}", words, plain), expected, strict=True):
            numpy.testing.assert_array_equal(one, other)


def test_metrics_are_those_of_the_header(sample: kvlab.Trace) -> None:
    mine = kvlab.replay(sample, [my_h2o, "ada(20%)"][:1], ["20%", "ada(20%)"], references=False, threads=2)
    header = kvlab.replay(sample, "h2o", ["20%", "ada(20%)"], references=False, threads=2)
    same = [row for row in header.csv().replace(",h2o,", ",my_h2o,").splitlines() if "state_bytes" not in row]
    assert [row for row in mine.csv().splitlines() if "state_bytes" not in row] == same
    numpy.testing.assert_array_equal(
        mine.kept(2, 1, my_h2o, "ada(20%)").live, header.kept(2, 1, "h2o", "ada(20%)").live
    )


def test_a_user_header(small: kvlab.Trace, tmp_path: pathlib.Path) -> None:
    text = (ROOT / "policies" / "mass" / "h2o.hpp").read_text().replace('"h2o"', '"mine"')
    path = tmp_path / "mine.hpp"
    path.write_text(text.replace("struct H2O ", "struct Mine "))
    mine = kvlab.policy_source(path)
    assert mine.name == "mine" and mine.info.recent == "50%"
    run = kvlab.replay(small, [mine, "h2o"], 24)
    numpy.testing.assert_array_equal(run.kept(1, 1, "mine", 24).live, run.kept(1, 1, "h2o", 24).live)
    again = pickle.loads(pickle.dumps(mine))
    assert again.name == "mine"
    path.write_text("struct Nothing {};")
    with pytest.raises(ValueError, match="mine.hpp"):
        kvlab.policy_source(path)


def refused(trace: kvlab.Trace, answer: Any, **words: Any) -> str:
    @kvlab.policy(**({"needs": "mass"} | words))
    def odd(state: Any, seen: Any, token: Any, step: Any) -> Any:
        return answer(state, seen, token, step)

    with pytest.raises((ValueError, TypeError)) as caught:
        kvlab.replay(trace, odd, 16, threads=1)
    line = odd.function.__code__.co_firstlineno + 1  # the line after the decorator
    text = str(caught.value)
    assert text.startswith(f"{__file__}:{line}: policy odd: returned "), text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda state, seen, token, step: seen.mass[:-1],
            r"returned an array of shape \(31,\); it must return an array of one rank for each of 32",
        ),
        (lambda state, seen, token, step: seen.mass[:, None], r"of shape \(32, 1\)"),
        (lambda state, seen, token, step: 1.0, "returned a float; it must return an array of one rank for each of 32 live tokens"),
        (lambda state, seen, token, step: None, "returned a NoneType"),
        (lambda state, seen, token, step: seen.mass.astype("U8"), "returned an array of <U8; ranks"),
        (lambda state, seen, token, step: seen.mass.astype("f16"), "float128; ranks must be integers or floats of at most 64 bits"),
        (lambda state, seen, token, step: -token.position.astype("i8"), "a rank below 0"),
        (
            lambda state, seen, token, step: numpy.where(token.position == 5, numpy.nan, 1.0),
            r"returned NaN for the token at position 5 \(layer 0, KV head 0, before token 32\)",
        ),
    ],
)
def test_bad_results_are_refused(small: kvlab.Trace, answer: Any, message: str) -> None:
    assert re.search(message, refused(small, answer))


def test_an_exception_of_a_function_is_raised(small: kvlab.Trace) -> None:
    @kvlab.policy(needs="mass")
    def broken(state: Any, seen: Any, token: Any, step: Any) -> Any:
        return token.value_norm

    with pytest.raises(AttributeError, match="token has no feature value_norm; it has position") as caught:
        kvlab.replay(small, broken, 16, threads=2)
    notes = getattr(caught.value, "__notes__", ["policy broken"])
    assert any("policy broken" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"name": "h2o"}, "h2o is already a policy of kvlab"),
        ({"name": "oracle_residual"}, "oracle_residual is already a policy of kvlab"),
        ({"name": "my policy"}, "policy 'my policy' should be at most 100 letters, digits and underscores"),
        ({"state": {"x": "f4"}}, "a policy that observes nothing has no state"),
        ({"needs": "everything"}, "needs: 'everything' should be nothing, mass, requests or both"),
        ({"features": list("abcde")}, "a policy has at most 4"),
        ({"needs": "requests", "by_head": True}, 'by_head: requires mass; give needs="mass" or "both"'),
        ({"needs": "mass", "state": {"x": "O"}}, "numpy dtypes of fixed size"),
        ({"sinks": "many"}, "sinks"),
        ({"positions": "here"}, "here"),
    ],
)
def test_bad_policies_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvlab.policy(**({"name": "odd"} | words))(lambda state, seen, token, step: token.position)


def test_two_policies_of_one_name_are_refused(small: kvlab.Trace) -> None:
    def window(state: Any, seen: Any, token: Any, step: Any) -> Any:
        return token.position

    one, other = (kvlab.policy(name="twice")(window) for _ in range(2))
    with pytest.raises(ValueError, match="policies: two policies are called twice"):
        kvlab.replay(small, [one, other], 16)
    kvlab.replay(small, "twice:sinks=2", 16)  # runs the policy that was registered last under that name


def test_the_registry() -> None:
    names = [entry.name for entry in kvlab.policies()]
    assert len(names) >= 24 and len(set(names)) == len(names)
    h2o = kvlab.policies()[names.index("h2o")]
    assert (h2o.needs, h2o.recent, h2o.slot_bytes) == ("mass", "50%", 8)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "u4"])
def test_ranks_may_have_any_number_type(small: kvlab.Trace, dtype: str) -> None:
    def score(position: Any, head: int) -> Any:
        return ((position.astype("i8") * 7919 + 31 * head) % 997).astype(dtype)

    @kvlab.policy(name=f"scored_{dtype}")
    def scored(state: Any, seen: Any, token: Any, step: Any) -> Any:
        return score(token.position, step.kv_head)

    kept = kvlab.replay(small, f"{scored}:scope=layer", 24, prefill="stream", references=False).kept(1, 0, scored, 24)
    rows = {int(query): row for query, row in zip(kept.queries, kept.live)}
    live: list[int] = []
    for query in range(max(rows) + 1):
        if len(live) == 24:
            all_live = numpy.array(live)
            sums = sum(score(all_live, head).astype("f8") for head in range(small.kv_heads))
            live.remove(int(all_live[numpy.argmin(sums)]))
        live.append(query)
        if query in rows:
            assert sorted(numpy.flatnonzero(rows[query])) == live


def test_heads_with_different_rank_types_are_refused(small: kvlab.Trace) -> None:
    @kvlab.policy()
    def mixed(state: Any, seen: Any, token: Any, step: Any) -> Any:
        return token.position if step.kv_head == 0 else token.position / 2

    kvlab.replay(small, mixed, 24)  # each head by itself works
    with pytest.raises(ValueError, match="one KV head ranks by integers and another by floats"):
        kvlab.replay(small, f"{mixed}:scope=layer", 24)


def test_a_functions_private_state_is_harmless(small: kvlab.Trace) -> None:
    held: list[Any] = []

    @kvlab.policy(needs="mass", state={"mass": "u8"})
    def hoarder(state: Any, seen: Any, token: Any, step: Any) -> Any:
        held.append((state, seen, token))
        state["mass"] += seen.mass
        return state["mass"]

    kvlab.replay(small, hoarder, 16)
    for state, seen, token in held:
        state["mass"] += seen.mass
        assert len(state) == len(token)


@pytest.mark.parametrize(
    ("needs", "modifier"),
    [("mass", "group=max"), ("both", "group=max"), ("requests", "once"), ("nothing", "every=8"), ("mass", "scope=layer")],
)
def test_modifiers_are_defaults_that_a_name_may_change(small: kvlab.Trace, needs: Any, modifier: str) -> None:
    @kvlab.policy(needs=needs, modifiers=[modifier], name="modified")
    def modified(state: Any, seen: Any, token: Any, step: Any) -> Any:
        return token.position if seen is None or seen.mass is None else seen.mass

    @kvlab.policy(needs=needs, name="unmodified")
    def unmodified(state: Any, seen: Any, token: Any, step: Any) -> Any:
        return modified.function(state, seen, token, step)

    assert modified.info.modifiers == [modifier]
    run = kvlab.replay(small, [modified, f"{unmodified}:{modifier}"], 16, references=False)
    numpy.testing.assert_array_equal(run.kept(1, 1, "modified").live, run.kept(1, 1, f"unmodified:{modifier}").live)


@pytest.mark.parametrize(
    ("needs", "modifier", "message"),
    [
        ("requests", "group=max", "policy mine: group=max applies to accumulated attention, which mine does not"),
        ("mass", "bogus", "policy mine: 'bogus' should read parameter=value"),
        ("mass", "grop=max", "policy mine: unknown parameter 'grop'; did you mean 'group'"),
        ("mass", "once=1", "policy mine: once: '1' should be no or yes"),
    ],
)
def test_wrong_modifiers_are_refused_with_the_policys_name(needs: Any, modifier: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvlab.policy(needs=needs, modifiers=[modifier], name="mine")(lambda state, seen, token, step: token.position)


def test_the_plain_variant_keeps_its_name(small: kvlab.Trace) -> None:
    policies = ["h2o:group=max", "h2o", "h2o:every=8", "h2o:sinks=4"]
    run = kvlab.replay(small, policies, [16, 24], references=False)
    for name, params in (("h2o", "sinks=0:recent=50%"), ("h2o:group=max", "sinks=0:recent=50%:group=max")):
        alone = kvlab.replay(small, f"h2o:{params}", 16, references=False).kept(0, 1, "h2o").live
        wanted = name if name != "h2o" else "h2o:sinks=0"
        numpy.testing.assert_array_equal(run.kept(0, 1, wanted, 16).live, alone)
    with pytest.raises(ValueError, match="4 configurations of the run match h2o at budget 16; give settings"):
        run.kept(0, 1, "h2o", 16)  # ambiguous, because the run has h2o with sinks=4 and with sinks=0
    with pytest.raises(ValueError, match="configurations of the run match h2o:sinks=0; give settings"):
        run.kept(0, 1, "h2o:sinks=0")


def test_a_function_may_read_keys_and_values(small: kvlab.Trace, tmp_path: pathlib.Path) -> None:
    @kvlab.policy(rows=True)
    def looking(state: Any, seen: Any, token: Any, step: Any) -> Any:
        rows, trace = token.rows, (small, other)[step.sequence]
        assert rows.output is None and rows.q.shape == (4, trace.tokens, 16) and rows.v.shape == (2, trace.tokens, 16)
        assert numpy.array_equal(token.ids, trace.ids[token.position])
        key = trace.read("k", step.layer, step.kv_head)
        assert numpy.array_equal(token.keys, key[token.position]) and token.values.shape == (step.live, 16)
        turned = rows.turned(rows.k)
        assert numpy.allclose(numpy.linalg.norm(turned, axis=2), numpy.linalg.norm(rows.k, axis=2), rtol=1e-5)
        return -numpy.linalg.norm(token.keys, axis=1)

    other = kvlab.Trace.from_arrays(**random_arrays(seed=2), prompt_tokens=32, out=tmp_path / "other")
    run = kvlab.replay([small, other], [looking, "knorm"], 20)
    for trace in ("trace", "other"):
        live = [run.kept(1, 1, policy, 20, trace=trace).live for policy in ("looking", "knorm")]
        assert numpy.array_equal(*live)

    @kvlab.policy()
    def blind(state: Any, seen: Any, token: Any, step: Any) -> Any:
        return token.keys[:, 0]

    with pytest.raises(LookupError, match="is only available with @kvlab.policy"):
        kvlab.replay(small, blind, 20)


def test_rows_have_the_rope_of_their_layer() -> None:
    config = {"inv_freq": [[1.0, 0.1], [0.5, 0.2]], "rope_factor": [1.0, 1.5], "rows": [{"rope": 1}, {"rope": 0}]}
    trace = kvlab.Trace.from_arrays(**random_arrays(), prompt_tokens=32, config=config)
    found = {}

    @kvlab.policy(rows=True)
    def turning(state: Any, seen: Any, token: Any, step: Any) -> Any:
        found[step.layer] = (token.rows.rope_factor, list(token.rows.inv_freq))
        return token.position

    kvlab.replay(trace, turning, 20, references=False)
    assert found == {0: (1.5, [numpy.float32(0.5), numpy.float32(0.2)]), 1: (1.0, [1.0, numpy.float32(0.1)])}


def test_a_function_may_read_the_output_projection(command: Any, tmp_path: pathlib.Path) -> None:
    words = ("--prompt", "Once upon a time", "--max-new-tokens", 9, "--out", tmp_path / "trace")
    assert command("capture", "--model", ROOT / "engine/models/tiny", *words).returncode == 0
    tensors = mapped_tensors(str(ROOT / "engine/models/tiny/model.safetensors"))
    (trained,) = tensors["model.layers.2.self_attn.o_proj.weight"]
    weights = (trained.astype(numpy.uint32) << 16).view(numpy.float32)
    found = {}

    @kvlab.policy(rows=True)
    def asking(state: Any, seen: Any, token: Any, step: Any) -> Any:
        found[step.layer] = token.rows.output
        return token.position

    kvlab.replay(tmp_path / "trace", asking, 4, references=False)
    sketch = found[2]  # random directions with variance 1 / 64, so that the mean squared length is preserved
    assert sketch.shape[0] * sketch.shape[1] == weights.shape[1] and sketch.shape[2] == 64
    assert numpy.square(sketch).sum() == pytest.approx(numpy.square(weights).sum(), rel=0.1)


@kvlab.policy(needs="both", state={"mass": "u8"}, recent="50%", by_head=True)
def by_largest(state: Any, seen: Any, token: Any, step: Any) -> Any:
    """h2o:group=max, for one query at a time."""
    assert seen.mass_by_head.shape == (2, step.live) and (seen.mass_by_head.sum(0) == seen.mass).all()
    state["mass"] += seen.mass_by_head.max(0)
    return state["mass"]


@pytest.mark.parametrize("words", [{}, {"positions": "cache"}], ids=str)
def test_a_function_may_read_each_query_head(small: kvlab.Trace, words: dict[str, Any]) -> None:
    expected = sets(small, "h2o:group=max", words | {"prefill": "stream"}, plain=False)
    for one, other in zip(sets(small, by_largest, words | {"prefill": "stream"}, False), expected, strict=True):
        numpy.testing.assert_array_equal(one, other)
    kvlab.replay(small, [f"{by_largest}:scope=layer:every=4"], 24, **words)  # with a dense prompt


def test_queries_may_have_weights(small: kvlab.Trace) -> None:
    @kvlab.policy(needs="mass", state={"mass": "u8"}, recent=8, weights=[1.0] * 8, modifiers=["once"])
    def last_eight(state: Any, seen: Any, token: Any, step: Any) -> Any:
        state["mass"] += seen.mass
        return state["mass"]

    run = kvlab.replay(small, [last_eight, "snapkv:window=8:recent=8:smooth=0"], 16)
    assert numpy.array_equal(run.kept(1, 1, "last_eight", 16).live, run.kept(1, 1, "snapkv", 16).live)
    with pytest.raises(ValueError, match=r"weights\[0\]: 2.0 should be a number from 0 to 1"):
        kvlab.policy(weights=[2.0])


def test_a_feature_may_be_added(tmp_path: pathlib.Path) -> None:
    trace = kvlab.Trace.from_arrays(**random_arrays(), prompt_tokens=32, out=tmp_path / "trace")
    values = numpy.random.default_rng(0).random((2, 2, trace.tokens), dtype="float32")
    trace.add_feature("mine", values)
    assert numpy.array_equal(trace.feature("mine", 1, 0), values[1, 0])

    @kvlab.policy(features=["mine"])
    def by_mine(state: Any, seen: Any, token: Any, step: Any) -> Any:
        return token.mine

    run = kvlab.replay(trace, [by_mine, "feature:name=mine"], 20)
    assert numpy.array_equal(run.kept(1, 0, "by_mine", 20).live, run.kept(1, 0, "feature", 20).live)
    with pytest.raises(ValueError, match=r"feature more: layer 0 has shape \[1, 80\]; it should be \[2, 80\]"):
        trace.add_feature("more", values[:, :1])
