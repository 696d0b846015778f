"""Finds out how each layer attends by running the model on a few tokens. Then checks that attention computed in this
way gives the model's own results.

layers_of() does both. It reads what transformers' attention interface passes (a Call: q and k after RoPE, v, mask and
settings), what modules get as arguments, and the decoder's tables of frequencies. It finds, for each layer:

- RoPE. The rotation that the layer gets as an argument gives the frequencies (_table_of()). To find the order of the
  key's dimensions, the same token is put at all positions, once with the model's rotation and once with the identity.
  The order is the one in which the rotation turns the second keys into the first (_rotation()).
- The output projection, the module that gets attention's output, and the module that gets the residual stream after it
  (_output_of(), _residual_of()).

A trace stores q and k before RoPE. So _compare() computes attention from q and k without rotation, at the first and at
the last positions, and compares the results with the model's."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvlab import _kvlab
from kvlab.hf.attention import Call, attending, attention, check_mask
from kvlab.hf.calls import cache_among
from kvlab.hf.models import Rope, output_projection, rotate
from kvlab.hf.refused import Refused, one_line

Given = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a module: positional, and by keyword

PROBE_TOKENS = 64  # tokens that are fed to inspect a model
# Tolerance of float32 outputs at large positions: models compute angles in float32 (error 1e-3 at position 1,000,000).
FAR_TOLERANCE = 5e-3


@dataclasses.dataclass(frozen=True)
class Layer:
    """How one layer attends, and where the parts of its block are."""

    index: int  # the model's number of the layer
    module: Any
    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int  # 0: all
    softcap: float  # 0: none
    sink: torch.Tensor | None  # [query_heads]
    rope: Rope  # [key_size / 2], zeros for dimensions that are not rotated; with the softmax scale
    # [key_size]: the order in which the model's dimensions are stored. In this order, the two dimensions of a RoPE pair
    # are key_size / 2 apart. None: the model has this order already.
    order: torch.Tensor | None
    pairs: int  # number of rotated pairs, which are stored before the others
    # Whether the module computes q and k before RoPE if it is called with cos 1 and sin 0. If not, q and k have to be
    # rotated back.
    unrotated: bool
    output: Any  # the output projection; None: it does not directly follow attention
    residual: Any  # the module whose input is the residual stream after attention; None: there is none

    def fits(self, call: Call) -> bool:
        """Whether the call attends in the same way as when the layer was inspected."""
        shape = (*call.q.shape[::2], *call.v.shape[::2])
        same_shape = shape == (self.query_heads, self.key_size, self.kv_heads, self.value_size)
        settings = (call.scale, call.window, call.softcap, call.sink is None)
        return same_shape and settings == (self.rope.softmax_scale, self.window, self.softcap, self.sink is None)

    def stored(self, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """Returns q or k [n, heads, key_size] before RoPE. `x` [heads, n, key_size]: q or k as a module computes it in
        a block of `recording_arguments`."""
        if not self.unrotated:
            return rotated_back(x, self.order, rotation, self.rope.factor)
        return reordered(x, self.order, self.pairs, self.rope.factor)


@dataclasses.dataclass(frozen=True)
class Rotation:
    """cos and sin [n, pairs] of a layer's rotation."""

    cos: torch.Tensor
    sin: torch.Tensor


def _ordered(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Returns x [heads, n, size] as [n, heads, size], with its dimensions in the order of Layer.order."""
    x = x.transpose(0, 1)
    return x if order is None else x[..., order.to(x.device)]


def reordered(x: torch.Tensor, order: torch.Tensor | None, pairs: int, factor: float) -> torch.Tensor:
    """Reorders the dimensions of x. Divides the dimensions that RoPE does not rotate by RoPE's factor, because readers
    of the trace multiply all dimensions by this factor."""
    x, size = _ordered(x, order), x.shape[-1]
    if factor == 1:
        return x
    return torch.where(torch.arange(size, device=x.device) % (size // 2) < pairs, x, x / factor)


def rotated_back(x: torch.Tensor, order: torch.Tensor | None, rotation: Rotation | None, factor: float) -> torch.Tensor:
    """Returns x [heads, n, size] before RoPE, as [n, heads, size], with its dimensions in the order of Layer.order.
    Dimensions that RoPE does not rotate (all, if `rotation` is None) are divided by `factor`, as in reordered()."""
    a, b = _ordered(x, order).float().chunk(2, dim=-1)
    cos, sin = (torch.full((len(a), 1, a.shape[-1]), value, device=a.device) for value in (factor, 0.0))
    if rotation is not None:
        cos[:, 0, : rotation.cos.shape[1]], sin[:, 0, : rotation.cos.shape[1]] = rotation.cos, rotation.sin
    return (torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1) / (cos**2 + sin**2).repeat(1, 1, 2)).to(x.dtype)


def is_rotation(value: Any) -> bool:
    """Whether a value is position_embeddings: (cos, sin), or complex numbers."""
    if isinstance(value, torch.Tensor):
        return value.is_complex()
    pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, torch.Tensor) for x in value)
    return pair and value[0].shape == value[1].shape and value[0].is_floating_point()


def _identity_rotation(value: Any) -> Any:
    if not is_rotation(value):
        return value
    if isinstance(value, torch.Tensor):
        return torch.ones_like(value)
    return torch.ones_like(value[0]), torch.zeros_like(value[1])


def rotation_among(given: Given, n: int, row: int = 0, pairs: int = 0) -> Rotation | None:
    """Returns the first rotation of n tokens among a module's arguments, with one value for each pair of dimensions. A
    model may pass one value for each dimension, which is then reduced. `row`: index of the sequence in the batch.
    `pairs`: the number of pairs, or 0 if it is unknown. It cannot be found from position 0 alone, where all values are
    equal."""
    for value in filter(is_rotation, (*given[0], *given[1].values())):
        cos, sin = (value.real, value.imag) if isinstance(value, torch.Tensor) else value
        cos, sin = (x.reshape(-1, n, x.shape[-1]) for x in (cos, sin))
        cos, sin = (x[min(row, len(x) - 1)].float() for x in (cos, sin))
        if cos.shape[-1] == pairs:
            return Rotation(cos, sin)
        half = cos.shape[-1] // 2
        # One value for each dimension: the two dimensions of a pair are half a row apart, or adjacent.
        for part, again in ((slice(half), slice(half, None)), (slice(0, None, 2), slice(1, None, 2))):
            if cos.shape[-1] % 2 == 0 and all(torch.equal(x[:, part], x[:, again]) for x in (cos, sin)):
                return Rotation(cos[:, part], sin[:, part])
        return Rotation(cos, sin)
    return None


@contextlib.contextmanager
def recording_arguments(
    layers: Sequence[Layer], given: dict[int, Given], active: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """In the `with` block, the arguments of each layer's module are recorded in `given`. If a layer's `unrotated` is
    set, the layer gets the identity as its rotation. Both happen only while `active()` returns True."""

    last: list[Any] = [None, None]  # the last rotation and its replacement; most layers get the same one

    def without_rotation(value: Any) -> Any:
        if not is_rotation(value):
            return value
        if value is not last[0]:
            last[:] = value, _identity_rotation(value)
        return last[1]

    def hook_of(layer: Layer) -> Any:
        def take(_: Any, arguments: Any, words: Any) -> Any:
            if not active():
                return None
            given[layer.index] = (arguments, words)
            if layer.unrotated:
                plain = {name: without_rotation(value) for name, value in words.items()}
                return tuple(map(without_rotation, arguments)), plain
            return None

        return take

    hooks = [layer.module.register_forward_pre_hook(hook_of(layer), with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclasses.dataclass
class Run:
    """The results of a run over some tokens: each layer's call and output, and the arguments of its module."""

    calls: list[Call] = dataclasses.field(default_factory=list)
    outs: list[torch.Tensor] = dataclasses.field(default_factory=list)  # [n, query_heads, value_size]
    given: dict[Any, Given] = dataclasses.field(default_factory=dict)  # by module with a layer_idx
    # Input of every module, by name: [n, width].
    inputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def decoder_of(model: Any) -> Any:
    """The text decoder of a model, without the head."""
    own = getattr(model, "get_decoder", lambda: None)()
    for found in (own, getattr(model, "base_model", None), getattr(model, "model", None)):
        if found is not None and found is not model and hasattr(found, "set_attn_implementation"):
            found = getattr(found, "language_model", found)
            return found if found.get_output_embeddings() is None else decoder_of(found)
    raise Refused(f"--model: {type(model).__name__} has no decoder; give a model such as LlamaForCausalLM")


def _hidden_states(decoder: Any, ids: Sequence[int], first: int) -> torch.Tensor:
    """Returns the hidden states [n, width] of ids at the positions from `first` on."""
    words: dict[str, Any] = {"input_ids": torch.tensor([list(ids)], device=decoder.device), "use_cache": False}
    if first:
        words["position_ids"] = first + torch.arange(len(ids), device=decoder.device)[None]
    hidden: torch.Tensor = decoder(**words, return_dict=True).last_hidden_state[0].float()
    return hidden


@contextlib.contextmanager
def _recording_inputs(decoder: Any, run: Run) -> Iterator[None]:
    """In the `with` block, records the arguments and inputs of the decoder's modules in run.given and run.inputs."""

    def hook_of(name: str) -> Any:
        def keep(module: Any, arguments: Any, words: Any) -> None:
            if hasattr(module, "layer_idx"):
                run.given[module] = (arguments, words)
            first = next((x for x in (*arguments, *words.values()) if isinstance(x, torch.Tensor)), None)
            if first is not None and first.ndim == 3 and len(first) == 1:
                run.inputs.setdefault(name, first[0])

        return keep

    modules = decoder.named_modules()
    hooks = [module.register_forward_pre_hook(hook_of(name), with_kwargs=True) for name, module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _inspect(decoder: Any, ids: Sequence[int], first: int, tokens: int = 0) -> Run:
    """Runs the decoder on ids at the positions from `first` on. `tokens`: see attending()."""
    run = Run()

    def attend(call: Call) -> torch.Tensor:
        check_mask(call, len(ids))
        run.calls.append(call)
        run.outs.append(attention(call))
        return run.outs[-1]

    with attending(decoder, attend, tokens), _recording_inputs(decoder, run):
        _hidden_states(decoder, ids, first)
    if not run.calls:
        what = f"attention of {type(decoder).__name__} does not go through transformers' AttentionInterface"
        raise Refused(f"--model: {what}, which kvlab needs")
    return run


# ---------------------------------------------------------------------------------------------
# Rotation


def _tables(decoder: Any) -> Iterator[tuple[torch.Tensor, float]]:
    """inv_freq and factor of each rotary embedding in the decoder."""
    for module in decoder.modules():
        for name, values in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                factor = getattr(module, name.replace("inv_freq", "attention_scaling"), 1.0)
                yield values.float().cpu().clone(), float(factor)


def _read_back(rotation: Rotation) -> tuple[torch.Tensor, float]:
    """inv_freq and factor of a rotation, computed from its change between two positions."""
    z = torch.complex(rotation.cos.double(), rotation.sin.double()).cpu()
    return (z[1:2] / z[:1]).angle()[0].float(), float(z.abs().mean())


def rotates_by_position(rotation: Rotation, rope: Rope, pairs: int, first: int) -> bool:
    """Whether the rotation's angles are position · inv_freq, for the positions from `first` on."""
    positions = first + torch.arange(len(rotation.cos), device=rotation.cos.device)
    ours = [x[:, :pairs] for x in rope.cos_sin(positions)]
    tolerance = 5e-3 + 2e-7 * (first + len(positions)) * max(1.0, float(rope.inv_freq.abs().max()))
    return all(float((x - y).abs().max()) <= tolerance for x, y in zip(ours, (rotation.cos, rotation.sin)))


def _table_of(decoder: Any, rotation: Rotation, layer: int) -> tuple[torch.Tensor, float]:
    """inv_freq and factor of a rotation at the positions from 0 on. The model's own tables come first, because reading
    them back from rounded cosines is less exact. Raises Refused if no table gives the rotation."""
    pairs = rotation.cos.shape[1]
    for inv_freq, factor in (*_tables(decoder), _read_back(rotation)):
        if len(inv_freq) == pairs and rotates_by_position(rotation, Rope(inv_freq, factor, 1.0), pairs, 0):
            return inv_freq, factor
    other = Rotation(rotation.sin, rotation.cos)
    if rotates_by_position(other, Rope(*_read_back(other), 1.0), pairs, 0):
        what = "its RoPE argument has sines before cosines; only cosines before sines are supported"
        raise Refused(f"--model: layer {layer}: {what}")
    raise Refused(f"--model: layer {layer}: its RoPE does not rotate by position · inv_freq, as kvlab needs it to")


def _orders(size: int, pairs: int) -> Iterator[torch.Tensor]:
    """Yields the possible orders of a key's dimensions. The rotated pairs are at the start or at the end, and the two
    dimensions of a pair are far apart or adjacent."""
    for start in sorted({0, size - 2 * pairs}):
        numbers = torch.arange(pairs)
        rest = torch.tensor([i for i in range(size) if not start <= i < start + 2 * pairs], dtype=torch.int64)
        for a, b in ((numbers, numbers + pairs), (2 * numbers, 2 * numbers + 1)):
            for one, other in ((a, b), (b, a)):  # rotated in either direction
                yield torch.cat((one + start, rest[: len(rest) // 2], other + start, rest[len(rest) // 2 :]))


def _keys_of_one_token(decoder: Any, call: Call, given: Given, unrotated: bool) -> torch.Tensor:
    """Returns the keys [kv_heads, n, key_size] that the layer's module computes if the same token is at all positions.
    They differ only by their rotation. `unrotated`: replace the rotation by the identity."""
    n, keys = call.q.shape[1], []

    def alike(x: Any) -> Any:
        is_hidden = isinstance(x, torch.Tensor) and x.shape[:2] == (1, n) and x.ndim == 3 and x.is_floating_point()
        if is_hidden:  # uses the first token that is not zero, because zeros (of padding) do not show a rotation
            token = int((x[0].abs().amax(dim=-1) > 0).to(torch.int8).argmax())
            x = x[:, token : token + 1].expand(-1, n, -1).contiguous()
        elif cache_among([x]) is not None:
            x = None
        return _identity_rotation(x) if unrotated else x

    def attend(call: Call) -> torch.Tensor:
        keys.append(call.k)
        return attention(call)

    with attending(decoder, attend):
        call.module(*map(alike, given[0]), **{name: alike(x) for name, x in given[1].items()})
    return keys[0]


def _rotation(decoder: Any, call: Call, given: Given) -> tuple[Rope, torch.Tensor | None, int, bool]:
    """The layer's RoPE, the order of its dimensions, the number of rotated pairs, and whether the module computes the
    keys before RoPE if its rotation is the identity (Layer.unrotated). Chooses the RoPE and the order that come nearest
    to turning the unrotated keys of a token into its rotated keys."""
    size = call.q.shape[-1]
    if size % 2:
        raise Refused(f"--model: layer {call.layer}: its keys have {size} dimensions; only an even number is supported")
    plain, rotated = (_keys_of_one_token(decoder, call, given, unrotated).float() for unrotated in (True, False))
    tolerance = 1e-4 if call.k.dtype == torch.float32 else 0.05
    if not (off := difference(plain, plain[:, :1].expand_as(plain))) <= tolerance:
        raise Refused(
            f"--model: layer {call.layer}: keys of one token differ by {off:.2g} between positions, but no argument of"
            " the layer rotates them; only a RoPE that the layer gets as an argument (position_embeddings) is supported"
        )
    rotation = rotation_among(given, plain.shape[1])
    found: list[Any] = [(Rope(torch.zeros(size // 2), 1.0, call.scale), None, 0)]  # no RoPE
    if rotation is not None and 2 * rotation.cos.shape[1] <= size:
        inv_freq, factor = _table_of(decoder, rotation, call.layer)
        rope = Rope(torch.cat((inv_freq, torch.zeros(size // 2 - len(inv_freq)))), factor, call.scale)
        found += [(rope, order, len(inv_freq)) for order in _orders(size, len(inv_freq))]

    def error_of(rope: Rope, order: torch.Tensor | None, pairs: int) -> float:
        back = rotated_back(rotated, order, rotation if pairs else None, rope.factor)
        return difference(reordered(plain, order, pairs, rope.factor), back)

    best = min(found, key=lambda one: error_of(*one))
    return *best, error_of(*best) <= tolerance


# ---------------------------------------------------------------------------------------------
# The block


def _output_of(modules: dict[str, Any], call: Call, out: torch.Tensor, run: Run) -> str:
    """Returns the name of the module inside attention whose input is the attention output. Empty if no module gets this
    output unchanged."""
    within, wanted = _name_of(modules, call.module) + ".", out.reshape(len(out), -1)
    for name, given in run.inputs.items():
        if name.startswith(within) and torch.equal(given, wanted.to(given.dtype)):
            weight = getattr(modules[name], "weight", None)  # a function if quantized; None with adapters
            if callable(weight) or getattr(weight, "ndim", 0) == 2 or hasattr(modules[name], "in_features"):
                return name
    return ""


def _residual_of(modules: dict[str, Any], call: Call, output: str, run: Run) -> Any:
    """Returns the module in the transformer block whose input is the block's input plus the projected attention output,
    or None."""
    block = _name_of(modules, call.module).rpartition(".")[0]
    if block not in run.inputs:
        return None
    before, added = run.inputs[block].float(), modules[output](run.inputs[output][None])[0].float()
    tolerance = 0.01 if run.inputs[block].dtype == torch.float32 else 0.05
    for name, given in run.inputs.items():
        if name.startswith(block + ".") and given.shape == before.shape:
            off = (given.float() - before - added).norm(dim=-1) / added.norm(dim=-1).clamp_min(1e-30)
            if float(off.median()) <= tolerance:
                return modules[name]
    return None


def _name_of(modules: dict[str, Any], wanted: Any) -> str:
    return next(name for name, module in modules.items() if module is wanted)


# ---------------------------------------------------------------------------------------------
# The layers


def layers_of(decoder: Any, ids: Sequence[int], tokens: int) -> list[Layer]:
    """Returns the layers that attend, in order. Raises Refused if a trace of `tokens` tokens cannot represent what the
    plain model computes. The first and the last positions are tried."""
    with torch.no_grad(), running(decoder):
        return _layers_of(decoder, ids, tokens)


@contextlib.contextmanager
def running(decoder: Any) -> Iterator[None]:
    """In the `with` block, turns unexpected errors of the decoder into Refused."""
    try:
        yield
    except (Refused, OSError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        what = f"{type(decoder).__name__} does not run as a decoder of text: {type(error).__name__}"
        raise Refused(f"--model: {what}: {one_line(error, 120)}") from None


def _layers_of(decoder: Any, ids: Sequence[int], tokens: int) -> list[Layer]:
    max_tokens = getattr(decoder.config, "max_position_embeddings", None)
    n = min(PROBE_TOKENS, max_tokens) if isinstance(max_tokens, int) and max_tokens > 0 else PROBE_TOKENS
    probe = (list(ids) + [number * 7 % len(decoder.get_input_embeddings().weight) for number in range(1, n)])[:n]
    run = _inspect(decoder, probe, 0, tokens)
    numbers, modules = [call.layer for call in run.calls], dict(decoder.named_modules())
    for call in run.calls:
        for name, part in (("queries", call.q), ("keys", call.k), ("values", call.v)):
            if not bool(part.isfinite().all()):
                what = f"layer {call.layer}: {name} of a few tokens are not finite"
                raise Refused(f"--model: {what}; check the weights for NaN and infinity")
    if twice := {number for number in numbers if numbers.count(number) > 1}:
        raise Refused(f"--model: layer {min(twice)} attends more than once in a call; only once is supported")
    owners = {  # the first layer with these keys; reversed, because later items replace earlier ones
        call.k.float().cpu().numpy().tobytes(): call.layer for call in reversed(run.calls)
    }
    for call in run.calls:
        if (owner := owners[call.k.float().cpu().numpy().tobytes()]) != call.layer:
            raise Refused(f"--model: layer {call.layer} uses the keys of layer {owner}, which is not supported")
    layers = []
    for call, out in sorted(zip(run.calls, run.outs), key=lambda one: one[0].layer):
        layers.append(_layer_of(decoder, modules, call, out, run))
    _compare(decoder, layers, probe, 0, run)
    if tokens > n and "position_ids" in inspect.signature(decoder.forward).parameters:
        _compare(decoder, layers, probe, tokens - n, _inspect(decoder, probe, tokens - n))
    return layers


def _layer_of(decoder: Any, modules: dict[str, Any], call: Call, out: torch.Tensor, run: Run) -> Layer:
    rope, order, pairs, unrotated = _rotation(decoder, call, run.given[call.module])
    if order is not None:
        order = None if torch.equal(order, torch.arange(len(order))) else order.to(call.q.device)
    (query_heads, _, key_size), (kv_heads, _, value_size) = call.q.shape, call.v.shape
    output = _output_of(modules, call, out, run)
    residual = _residual_of(modules, call, output, run) if output else None
    return Layer(
        index=call.layer,
        module=call.module,
        query_heads=query_heads,
        kv_heads=kv_heads,
        key_size=key_size,
        value_size=value_size,
        window=call.window,
        softcap=call.softcap,
        sink=None if call.sink is None else call.sink.float().cpu(),
        rope=rope,
        order=order,
        pairs=pairs,
        unrotated=unrotated,
        output=modules[output] if output else None,
        residual=residual,
    )


def rotation_of(layer: Layer, given: Given, n: int, first: int) -> Rotation | None:
    """The layer's rotation of n tokens at positions from `first` on, checked against its table."""
    if not layer.pairs:
        return None
    rotation = rotation_among(given, n, pairs=layer.pairs)
    if rotation is None or not rotates_by_position(rotation, layer.rope, layer.pairs, first):
        raise Refused(
            f"--model: layer {layer.index}: from position {first} on, its RoPE rotates by other frequencies than before;"
            " only a RoPE with the same frequencies at all positions is supported"
        )
    return rotation


def _compare(decoder: Any, layers: Sequence[Layer], ids: Sequence[int], first: int, own: Run) -> None:
    """Computes attention from the values that a trace stores. Compares it with the model's own attention (`own`), and
    the resulting hidden states with those of the plain model."""
    where, at = f" at positions from {first} on" if first else "", {layer.index: layer for layer in layers}
    plain = _hidden_states(decoder, ids, first)
    given: dict[int, Given] = {}
    outs: list[torch.Tensor] = []

    def attend(call: Call) -> torch.Tensor:
        layer = at[call.layer]
        rotation = rotation_of(layer, given[call.layer], len(ids), first)
        now = layer.rope.cos_sin(first + torch.arange(len(ids), device=call.q.device))
        q, k = (rotate(layer.stored(x, rotation), *now).transpose(0, 1) for x in (call.q, call.k))
        outs.append(attention(dataclasses.replace(call, q=q, k=k, scale=layer.rope.softmax_scale)))
        return outs[-1]

    with attending(decoder, attend), recording_arguments(layers, given):
        hidden = _hidden_states(decoder, ids, first)
    tolerance = 0.1 if own.calls[0].q.dtype != torch.float32 else FAR_TOLERANCE if first else 1e-3
    for call, right, out in zip(own.calls, own.outs, outs, strict=True):
        if not (off := difference(right, out)) <= tolerance:
            raise Refused(
                f"--model: layer {call.layer}: the trace's outputs differ by {off:.2g} from the plain model's{where}"
            )
    if not (off := difference(plain, hidden)) <= tolerance:
        causal = getattr(layers[0].module, "is_causal", True)
        what = "computes more than softmax(scale · q kᵀ + mask) · v" if causal else "lets queries see later tokens"
        raise Refused(
            f"--model: {type(layers[0].module).__name__} {what}: hidden states differ by {off:.2g} from the plain"
            f" model's{where}"
        )


def difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """The norm of the difference, relative to the norm of `theirs`; infinity if there is a NaN."""
    return float(((theirs - ours).norm() / theirs.norm().clamp_min(1e-30)).nan_to_num(torch.inf))


def layer_count(decoder: Any, layers: Sequence[Layer]) -> int:
    """Number of layers in the model, including layers without attention. The layers are the modules that
    have numbers as names, such as layers.3 of layers.3.self_attn."""
    path = _name_of(dict(decoder.named_modules()), layers[0].module).split(".")
    blocks = ".".join(path[: next((at for at, part in enumerate(path) if part.isdigit()), 0)])
    return len(decoder.get_submodule(blocks)) if blocks else layers[-1].index + 1


def policy_layers(layers: Sequence[Layer], tokens: int) -> list[Layer]:
    """The layers that policies act on: those without a window, or all if no window hides any of `tokens` tokens."""
    windows = {layer.window for layer in layers}
    acted = list(layers) if min(windows) >= tokens > 0 else [layer for layer in layers if layer.window == 0]
    if not acted:
        what = (
            f"every layer has a window, the smallest of {min(windows)} tokens, so policies have nothing to act on"
        )
        raise Refused(
            f"--model: {what}; use a model with a layer that sees all tokens, or give length={min(windows)} "
            "or less"
        )
    return acted


def layer_arguments(layers: Sequence[Layer]) -> tuple[list[list[float]], list[float], list[dict[str, Any]]]:
    """The RoPE tables, their factors, and the row of each layer, in the form that the extension takes."""
    tables = {layer.rope.key: layer.rope for layer in layers}
    names = list(tables)
    rows: list[dict[str, Any]] = [
        {
            "span": layer.window,
            "softcap": layer.softcap,
            "rope": names.index(layer.rope.key),
            "scale": layer.rope.softmax_scale,
            "sink": None if layer.sink is None else layer.sink.tolist(),
        }
        for layer in layers
    ]
    return [rope.inv_freq.tolist() for rope in tables.values()], [rope.factor for rope in tables.values()], rows


def output_weights(model: Any, layers: Sequence[Layer]) -> Iterator[torch.Tensor]:
    """The output projection [hidden, inputs] of each layer."""
    for layer in layers:
        if layer.output is None:
            what = "a feature reads the output projection, but attention's output does not go to it directly"
            raise Refused(f"--model: layer {layer.index}: {what}; use a policy without this feature")
        with torch.no_grad():
            yield output_projection(layer.output, model).detach()


def output_projections(model: Any, layers: Sequence[Layer] = ()) -> _kvlab.OutputProjections:
    """Returns the output projections of the layers, for the features that read them. `layers`: by default all layers
    that policies act on."""
    layers = layers or policy_layers(layers_of(decoder_of(model), [], 0), 0)
    weights = [weight.float().T.contiguous().cpu().numpy() for weight in output_weights(model, layers)]
    return _kvlab.OutputProjections(weights, layers[0].kv_heads, layers[0].key_size)


def refuse_beyond_format(layers: Sequence[Layer], limit: str = "traces support only") -> None:
    """Raises Refused unless all layers have one shape, with keys and values of equal size."""
    first = layers[0]
    for layer in layers:
        if layer.key_size != layer.value_size:
            sizes = f"keys have {layer.key_size} and values {layer.value_size} dimensions"
            raise Refused(f"--model: layer {layer.index}: {sizes}; {limit} equal sizes")
        for name in ("query_heads", "kv_heads", "key_size"):
            if (own := getattr(layer, name)) != (others := getattr(first, name)):
                what = f"{name} is {own}, but that of layer {first.index} is {others}"
                raise Refused(f"--model: layer {layer.index}: {what}; {limit} equal shapes")
