"""kvpress: its presses as policies of kvlab, and kvlab's policies as a press."""

from __future__ import annotations

import copy
import functools
import os
import threading
import types
import warnings
from typing import Any, Literal

import kvpress
import numpy
import numpy.typing
import torch
import transformers
from kvpress.utils import compute_n_kept, get_prerope_key_states, get_prerope_query_states

from kvlab import _arguments, _kvlab
from kvlab._policy import Policy, Step, Token, policy, resolve
from kvlab._rows import Rows
from kvlab.hf.features import output_projection
from kvlab.hf.layers import decoder_of, layer_arguments, layers_of, output_projections, policy_layers
from kvlab.hf.models import base_of, context_of
from kvlab.hf.refused import Refused

Scores = numpy.typing.NDArray[numpy.float64]

_SAFEGUARD = 0.2  # alpha_safeguard of ada()
_one_at_a_time = threading.Lock()  # torch's random state is shared by all threads


class Tie(tuple[int, int, int, int, int]):
    """A case in which tokens with equal scores do not all fit: (sequence, layer, KV head, number of tokens with the
    same score, free slots for them)."""


class PressPolicy(Policy):
    """A press as a policy. It is called once, at the end of a prompt."""

    def __init__(self, made: Policy, budget: str, ties: list[Tie]) -> None:
        super().__init__(made.held, made.function, look=made._look)
        self.budget = budget
        """The press's compression ratio as a budget: ratio(…), or ada(ratio(…))."""
        self.ties = ties
        """The cases in which tokens had equal scores but only some of them fitted. The policy kept those that
        torch.topk selects."""


def from_press(press: Any, *, model: Any = None, name: str | None = None) -> PressPolicy:
    """Makes a policy that keeps the tokens of a dense prompt that a kvpress press keeps at the same ratio.

    >>> press = kvlab.from_press(kvpress.SnapKVPress(0.5))
    >>> run = kvlab.replay(trace, [press, "h2o:once"], ["ratio(0.5)", "ratio(0.75)"])

    `press`: a ScorerPress, or an AdaKVPress or KeyRerotationPress around one. AdaKVPress needs a budget such as
    "ada(ratio(0.5))"; KeyRerotationPress gives the policy positions="cache".

    The press itself computes the scores from a layer's queries, keys and values, separately for each budget. At budget B the
    press gets the compression ratio with which it keeps B - 1 tokens of the prompt. The budget "ratio(0.5)" is
    kvpress's compression ratio 0.5.

    `model`: a checkpoint's folder or a loaded model, for presses that read the output projection. `name`: the policy's
    name, by default made from the name of the press's class.

    Raises Refused for a press that needs more than scores from queries, keys and values. A replay raises it for a text
    with several prompts that are evicted from, because a press scores one prompt.
    """
    inner, budget = press, "ratio({:g})"
    positions: Literal["original", "cache"] = "original"
    if isinstance(press, kvpress.AdaKVPress):
        if press.alpha_safeguard != _SAFEGUARD:
            raise Refused(f"AdaKVPress: alpha_safeguard is {press.alpha_safeguard}; ada() supports only {_SAFEGUARD}")
        inner, budget = press.press, "ada(ratio({:g}))"
    elif isinstance(press, kvpress.KeyRerotationPress):
        inner, positions = press.press, "cache"
    names = _names(inner)
    ties: list[Tie] = []

    def ranks(state: Any, seen: Any, token: Token, step: Step) -> Scores:
        rows = token.rows
        with _one_at_a_time:
            if rows.memo.setdefault("prompt", step.now) != step.now:
                what = f"scores one prompt, but a second one ends at token {step.now}"
                raise Refused(f"from_press: {'('.join(names)}{')' * (len(names) - 1)} {what}; use texts with one prompt")
            if step.budget not in rows.memo:
                rows.memo[step.budget] = _scores(inner, rows, step, model, ties)
        scores: Scores = rows.memo[step.budget][step.kv_head, token.position]
        return scores

    made = policy(
        modifiers=["once"],
        positions=positions,
        rows=True,
        name=name or "_".join(["press", *names]).lower(),
        summary=f"kvpress's {'('.join(names)}{')' * (len(names) - 1)}",
    )(ranks)
    return PressPolicy(made, budget.format(press.compression_ratio), ties)


def _names(press: Any) -> list[str]:
    """Names of the press and of the presses that it wraps. Raises Refused for a press that needs more than scores."""
    kind, base = type(press), kvpress.ScorerPress
    name = kind.__name__
    if not isinstance(press, base):
        right = "give a ScorerPress, alone or in an AdaKVPress or KeyRerotationPress"
        raise Refused(f"{name}: is not a ScorerPress; {right}")
    if kind.compress is not base.compress:
        raise Refused(f"{name}: does not choose tokens by its scores alone")
    if isinstance(press, kvpress.CriticalKVPress):
        return ["CriticalKV", *_names(press.press)]
    if kind.post_init_from_model is not base.post_init_from_model:
        raise Refused(f"{name}: reads its own weights or hidden states, which a trace does not have")
    return [name.removesuffix("Press")]


def _ratio(tokens: int, kept: int) -> float:
    """The ratio for which int(tokens * (1 - ratio)) == kept."""
    ratio = 1 - kept / tokens
    while int(tokens * (1 - ratio)) < kept:
        ratio = float(numpy.nextafter(ratio, 0))
    return ratio


class _Attention:
    """Replaces a layer's attention module when a press computes scores. The hidden state of a token is its position,
    and the projections look up the token's query, key or value by this position."""

    def __init__(self, rows: Rows, step: Step, model: Any) -> None:
        self._rows, self._model, self.layer_idx = rows, model, step.layer
        self._parts = {part: torch.from_numpy(getattr(rows, part)[:, : step.now]) for part in "qkv"}
        heads, self.head_dim = len(rows.q), rows.q.shape[-1]
        if 2 * len(rows.inv_freq) != self.head_dim:
            what = f"RoPE rotates {2 * len(rows.inv_freq)} of {self.head_dim} dimensions"
            raise Refused(f"from_press: {what}; use a trace of a model that rotates all of them")
        self.num_key_value_groups = heads // len(rows.k)
        self.config = types.SimpleNamespace(
            num_attention_heads=heads,
            num_key_value_heads=len(rows.k),
            num_key_value_groups=self.num_key_value_groups,
            head_dim=self.head_dim,
            hidden_size=heads * self.head_dim,
            _attn_implementation="sdpa",
        )

    def _of(self, part: str, hidden: torch.Tensor) -> torch.Tensor:
        rows = self._parts[part][:, hidden[0, :, 0].long()]
        return rows.transpose(0, 1).reshape(1, hidden.shape[1], -1)

    def q_proj(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._of("q", hidden)

    def k_proj(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._of("k", hidden)

    def v_proj(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._of("v", hidden)

    def rotary_emb(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, count = int(position_ids[0, 0]), position_ids.shape[1]
        cos, sin = (torch.from_numpy(table).repeat(1, 2)[None] for table in self._rows.turns(first, count))
        return cos, sin

    @property
    def o_proj(self) -> Any:
        if self._model is None:
            raise Refused("from_press: the press reads the output projection; give model=, the model of the trace")
        if hasattr(self._model, "model"):
            return self._model.model.layers[self.layer_idx].self_attn.o_proj
        shape = types.SimpleNamespace(query_heads=self.config.num_attention_heads, head_size=self.head_dim)
        weight = torch.from_numpy(output_projection(shape, str(self._model), self.layer_idx))  # type: ignore[arg-type]
        self.config.hidden_size = len(weight)
        return types.SimpleNamespace(weight=weight)


class _Probabilities:
    """Attention probabilities [1, query_heads, tokens, tokens], which are computed only if a press reads them."""

    def __init__(self, rows: Rows, tokens: int) -> None:
        self._rows, self._tokens = rows, tokens

    @functools.cached_property
    def _made(self) -> torch.Tensor:
        rows, n = self._rows, self._tokens
        q, k = (torch.from_numpy(rows.turned(x[:, :n])) for x in (rows.q, rows.k))
        logits = q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2) * rows.softmax_scale
        return logits.masked_fill_(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)[None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]


def _scores(press: Any, rows: Rows, step: Step, model: Any, ties: list[Tie]) -> Scores:
    """Returns the press's scores [kv_heads, tokens]. If only some of the tokens with an equal score can be kept, those
    that torch.topk selects get a slightly higher score, so that the policy evicts the same tokens as the press."""
    kept, own = step.budget - 1, copy.deepcopy(press)
    if kept == 0:
        raise Refused("from_press: a budget of 1 token keeps no token of the prompt; use a budget of 2 tokens or more")
    own.compression_ratio = _ratio(step.now, kept)
    module = _Attention(rows, step, model)
    hidden = torch.arange(step.now).float()[None, :, None]
    keys, values = torch.from_numpy(rows.turned(rows.k[:, : step.now]))[None], module._parts["v"][None]
    turns = module.rotary_emb(hidden, torch.arange(step.now)[None])
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(step.seed + step.layer)
        attentions = _Probabilities(rows, step.now)
        scores = own.score(module, hidden, keys, values, attentions, {"position_embeddings": turns})[0].float()
    for head, given in enumerate(scores):
        top = given.topk(kept)
        equal, cut = given == top.values[-1], top.values[-1]
        free_slots = int((top.values == cut).sum())
        if int(equal.sum()) == free_slots:
            continue
        if not ties:
            what = f"{int(equal.sum())} tokens in layer {step.layer}, KV head {head} have the same score"
            rule = f"only {free_slots} of them can be kept, and torch.topk decides which"
            warnings.warn(f"{type(press).__name__}: {what}; {rule}", stacklevel=2)
        ties.append(Tie((step.sequence, step.layer, head, int(equal.sum()), free_slots)))
        stay = top.indices[top.values == cut]
        given[stay] = torch.nextafter(cut, torch.tensor(float("inf")))
    result: Scores = scores.double().numpy()
    return result


class KvlabPress(kvpress.BasePress):  # type: ignore[misc]
    """A policy of kvlab as a press for kvpress's pipeline and evaluation.

    >>> pipeline(context, question=question, press=kvlab.KvlabPress("snapkv", compression_ratio=0.5))

    It keeps the same tokens of a prompt as a replay does. `budget`: as everywhere in kvlab, the number of tokens that a
    decoded query may see, its own token included. Without it, `compression_ratio` says how many tokens are evicted, as
    in any press. Keys stay at their original positions. Raises Refused with transformers 5.3 or newer, which kvpress
    does not support.
    """

    def __init__(
        self, policy: str | Policy, budget: int | str | None = None, compression_ratio: float = 0.0, *, seed: int = 0
    ) -> None:
        self.policy, self.budget, self.compression_ratio, self.seed = policy, budget, compression_ratio, seed

    def post_init_from_model(self, model: Any) -> None:
        """Called by kvpress: reads the model's layers."""
        base = base_of(model)
        length = context_of(base.config)
        layers = layers_of(decoder_of(base), [], length)
        self._acted = policy_layers(layers, length)
        self._outputs = functools.cache(lambda: output_projections(base, self._acted))

    def _kept(self, layer: int, *rows: torch.Tensor) -> list[torch.Tensor]:
        """Kept positions of each KV head, ascending. `rows`: q, k and v [heads, tokens, head_size] before RoPE."""
        first, tokens = self._acted[0], rows[0].shape[1]
        index = [one.index for one in self._acted].index(layer)
        (text,), own = resolve([self.policy])
        budget = self.budget if self.budget is not None else compute_n_kept(tokens, self.compression_ratio) + 1
        requested = _kvlab.CacheRequest(
            policy=text,
            own=own,
            budget="" if text == "full" else _arguments.amount("budget", budget),
            length=tokens,
            prefill="dense",
            positions="original",
            seed=_arguments.whole("seed", self.seed, 0, 2**64 - 1),
            threshold=0.01,
            layers=len(self._acted),
            kv_heads=first.kv_heads,
            head_size=first.key_size,
            layer_numbers=[one.index for one in self._acted],
        )
        layers = layer_arguments(self._acted)
        caches = _kvlab.Caches(requested, first.query_heads, first.key_size, *layers, self._outputs)
        q, k, v = (part.transpose(0, 1).float().contiguous().cpu().numpy() for part in rows)
        caches.attend(index, q, k, v, True, os.cpu_count() or 1)
        return [torch.from_numpy(caches.kept(index, head).astype(int)) for head in range(first.kv_heads)]

    def forward_hook(self, module: Any, input: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Called by kvpress after a layer's attention."""
        if "past_key_values" not in kwargs:
            what = f"transformers {transformers.__version__} calls attention without past_key_values, which kvpress reads"
            raise Refused(f"KvlabPress: {what}; install transformers older than 5.3")
        return super().forward_hook(module, input, kwargs, output)

    def compress(
        self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Called by kvpress at the end of a prompt. Returns the keys and values that are kept.

        If KV heads keep different numbers of tokens, it returns all keys and values and masks the evicted ones, as
        AdaKVPress does.
        """
        if self.budget is None and self.compression_ratio == 0:
            return keys, values
        q = get_prerope_query_states(module, hidden_states)
        k = get_prerope_key_states(module, hidden_states)
        kept = [self._kept(module.layer_idx, *row) for row in zip(q, k, values)]
        if len({len(head) for row in kept for head in row}) == 1:
            at = torch.stack([torch.stack(row) for row in kept]).to(keys.device)[..., None].expand(-1, -1, -1, keys.shape[-1])
            return keys.gather(2, at).contiguous(), values.gather(2, at).contiguous()
        gone = torch.ones(keys.shape[:3], dtype=torch.bool)  # heads keep different numbers of tokens
        for row, heads in enumerate(kept):
            for head, live in enumerate(heads):
                gone[row, head, live] = False
        module.masked_key_indices = gone.nonzero(as_tuple=True)
        return keys, values
