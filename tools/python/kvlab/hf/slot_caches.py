"""The caches of a model on CUDA: slots that the kernel library evicts from, through torch.ops.kvlab."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import numpy.typing
import torch

from kvlab import _library, ops
from kvlab.hf.layers import Layer
from kvlab.hf.models import Shape, name_of
from kvlab.hf.refused import Refused

Counts = numpy.typing.NDArray[numpy.uint32]
OP = torch.ops.kvlab  # .default: of one overload each, found once


class Slots(NamedTuple):
    """One layer of a cache, or an admission's memory: kvlab_cache and what lies beside it."""

    most: int  # slots of a KV head
    first_slot: torch.Tensor  # [KV head]
    keys: torch.Tensor  # [slot, head size]
    values: torch.Tensor
    positions: torch.Tensor  # [slot]
    lengths: torch.Tensor  # [KV head]
    next_slots: torch.Tensor
    states: torch.Tensor | None  # [slot, bytes]
    columns: torch.Tensor | None  # [slot, column]


@dataclasses.dataclass
class Admission:
    """Tokens that one layer admits together, and what does not differ from layer to layer."""

    fed: int  # tokens before them
    count: int
    ends_prompt: bool
    now: torch.Tensor  # [1]: fed, on the device
    admitted: torch.Tensor  # [1]: count
    rows: torch.Tensor  # 0, 1, 2, …
    sequences: torch.Tensor  # 0, 0, 0, …
    ropes: list[torch.Tensor] | None  # of each table [token, half, 2]; None: by age
    weights: torch.Tensor | None
    tail: int


class SlotCaches:
    """All layers' caches for one sequence: each KV head has as many slots as the plan says, and no more."""

    def __init__(
        self,
        plan: Any,
        layers: Sequence[Layer],
        dtype: torch.dtype,
        device: torch.device,
        outputs: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        """`outputs` gives each layer's W_o [hidden, inputs], if the policy has a column that reads it."""
        if name_of(dtype) not in _library.TYPES:
            raise Refused(f"evicting: {name_of(dtype)}; on CUDA one of {', '.join(_library.TYPES)} is expected")
        for layer in layers:
            if layer.softcap or layer.sink is not None:
                what = "a soft cap" if layer.softcap else "sinks"
                raise Refused(f"evicting: layer {layer.index} has {what}; on CUDA neither is held; model.to('cpu')")
        first = layers[0]
        shape = Shape(len(layers), first.query_heads, first.kv_heads, first.key_size)
        self._plan, self._shape = plan, shape
        self._dtype, self._device = dtype, device
        self._policy = _library.policy(plan.policy)
        tables = {layer.rope.key: layer.rope for layer in layers}
        self._tables = [list(tables).index(layer.rope.key) for layer in layers]  # [layer]: which of these
        self._ropes = [(rope.inv_freq.to(device), rope.factor) for rope in tables.values()]
        self._inv_freq64 = [inv_freq.double() for inv_freq, _ in self._ropes]
        self._of_model = [(layer.index, layer.rope.softmax_scale) for layer in layers]
        self._heads = (shape.query_heads, shape.kv_heads, shape.head_size)
        self._outputs: list[torch.Tensor | None] = [None] * shape.layers  # [hidden, query head, head size]
        if "value_out_norm1" in plan.columns:
            rows = (-1, shape.query_heads, shape.head_size)
            self._outputs = [one.to(dtype).reshape(rows).contiguous() for one in outputs()]
        self._allocate()
        self._clear_counts()
        self._admissions: list[Admission] = []  # of the prompt that goes through the layers
        bounded = not plan.once and bool((plan.room_at <= plan.slots).all())
        self._limit = None if bounded else int(plan.length)

    def _allocate(self) -> None:
        plan, (query_heads, kv_heads, size) = self._plan, self._heads
        slots = plan.slots.astype(numpy.int64)
        total = int(slots.sum())
        self._most = int(slots.max())
        starts = numpy.cumsum(slots).reshape(slots.shape) - slots
        self._first_slot = self._table(starts, numpy.int64)
        self._keys, self._values = (self._zeros(total, size, dtype=self._dtype) for _ in range(2))
        self._positions = self._zeros(total, dtype=torch.int32)
        self._ages = self._zeros(total, dtype=torch.int32) if plan.squeezed else None
        self._states = self._per_slot(total, self._policy.slot_bytes, torch.uint8)
        self._columns = self._per_slot(total, len(plan.columns), torch.float32)
        cosines = "key_cosine" in plan.columns
        self._unit_keys = self._zeros(*slots.shape, size, dtype=torch.float32) if cosines else None
        self._lengths, self._next_slots = (self._zeros(*slots.shape, dtype=torch.int32) for _ in range(2))

        group = numpy.full_like(plan.budgets, plan.group_max)
        self._rules = self._table(numpy.stack([plan.budgets, plan.sinks, plan.recent, group], -1), numpy.int32)
        never = numpy.full_like(plan.budgets, _library.UNLIMITED)
        self._never = self._table(never, numpy.int32)
        self._room_at = self._table(plan.room_at, numpy.int32)
        self._bytes = self._policy.params(plan.params)
        self._params = self._table(numpy.frombuffer(self._bytes, numpy.uint8), numpy.uint8) if self._bytes else None
        self._threshold16 = torch.tensor([plan.threshold16], dtype=torch.int32, device=self._device)
        self._seeds = self._table(numpy.array([plan.seed], numpy.uint64), numpy.int64)
        self._zero = self._zeros(1, dtype=torch.int32)
        self._now = self._zeros(1, dtype=torch.int32)
        size_of_work = ops.attention_workspace(plan.policy, self._dtype, 1, query_heads, kv_heads, size, self._most)
        if size_of_work == 0:
            raise Refused(
                f"evicting: head size {size}, {query_heads} query heads on {kv_heads}; on CUDA head sizes 64, 96 and 128"
                " and at most 8 query heads for a KV head are expected; model.to('cpu')"
            )
        self._workspace = self._zeros(size_of_work, dtype=torch.uint8)
        self._q = self._zeros(1, query_heads, size, dtype=self._dtype)  # of a step's layer, in turn
        self._layers = [self._slots_of(layer) for layer in range(self._shape.layers)]
        self._rules_of = list(self._rules)
        self._room_of = [None] * self._shape.layers if plan.steps_make_room else list(self._never)

    def _slots_of(self, layer: int) -> Slots:
        first_slot, lengths, next_slots = (of[layer] for of in (self._first_slot, self._lengths, self._next_slots))
        held = (self._keys, self._values, self._positions, lengths, next_slots, self._states, self._columns)
        return Slots(self._most, first_slot, *held)

    def _clear_counts(self) -> None:
        shape = (self._shape.layers, self._shape.kv_heads)
        self._live: Counts = numpy.zeros(shape, numpy.uint32)
        self._left = numpy.zeros(shape, numpy.int64)
        self._fed = [0] * self._shape.layers

    def begin_anew(self) -> None:
        """Nothing is live. The memory is what it was, so that a graph goes on serving."""
        for tensor in (self._lengths, self._next_slots, self._unit_keys):
            if tensor is not None:
                tensor.zero_()
        self._clear_counts()

    def _zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _per_slot(self, slots: int, count: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self._zeros(slots, count, dtype=dtype) if count else None

    def _table(self, values: Any, dtype: Any) -> torch.Tensor:
        """Unsigned numbers have the bits of torch's signed ones."""
        values = numpy.array(values)
        values = values.view(dtype) if values.itemsize == numpy.dtype(dtype).itemsize else values.astype(dtype)
        return torch.from_numpy(values).to(self._device)

    # --- What others ask ------------------------------------------------------------------------

    def tokens(self, layer: int) -> int:
        return self._fed[layer]

    def kept(self, layer: int, head: int) -> Counts:
        if not (0 <= layer < self._shape.layers and 0 <= head < self._shape.kv_heads):
            raise IndexError(
                f"kept: layer {layer}, head {head}; the model has {self._shape.layers} of {self._shape.kv_heads}"
            )
        first, count = int(self._first_slot[layer, head]), int(self._lengths[layer, head])
        live = self._positions[first : first + count].sort().values
        kept: Counts = live.cpu().numpy().astype(numpy.uint32)
        return kept

    @property
    def evictions(self) -> int:
        return int(self._left.sum())

    @property
    def kv_bytes(self) -> int:
        held: int = int(self._live.sum()) * 2 * self._shape.head_size * self._keys.element_size()
        return held

    @property
    def allocated_bytes(self) -> int:
        return 2 * self._keys.numel() * self._keys.element_size()

    # --- Attention ------------------------------------------------------------------------------

    def attend(self, layer: int, qkv: torch.Tensor, is_prompt: bool) -> torch.Tensor:
        """[token, query and KV heads, head size] before RoPE; returns [token, query head, head size]."""
        return self._admit_prompt(layer, qkv) if is_prompt else self._step(layer, qkv)

    def _refuse_beyond(self, count: int) -> None:
        if self._limit is not None and self._fed[0] + count > self._limit:
            raise Refused(
                f"evicting: more than {self._limit} tokens, and caches that keep so many; evicting(…, length=…) says how"
                " many there may be"
            )

    def before_token(self) -> None:
        """What the host does for a step of all layers: room that steps leave to a shrink, and the position."""
        self._refuse_beyond(1)
        fed, plan = self._fed[0], self._plan
        if not plan.steps_make_room:
            self._make_room(plan.surplus(self._live, False))
        surplus = plan.surplus(self._live, False)  # of which the step itself makes room
        self._live -= surplus
        self._left += surplus
        self._live += 1
        self._now.fill_(fed)

    def token_ropes(self) -> list[torch.Tensor] | None:
        """By table, cos and sin of the position that `now` holds on the device."""
        return None if self._plan.squeezed else self._ropes_of(self._now.double())

    def _ropes_of(self, positions: torch.Tensor) -> list[torch.Tensor]:
        return [self._rope_of(positions, table) for table in range(len(self._ropes))]

    def _rope_of(self, positions: torch.Tensor, table: int) -> torch.Tensor:
        """[n, half, 2] float32 of the float64 angle."""
        angle = positions[:, None] * self._inv_freq64[table]
        return torch.stack((angle.cos(), angle.sin()), -1).float() * self._ropes[table][1]

    def _step(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        if layer == 0:
            self.before_token()
            self._step_ropes = self.token_ropes()
        self._fed[layer] += 1
        return self.token(layer, qkv, self._step_ropes)

    def count_token(self) -> None:
        """A step went through all layers by other means than attend()."""
        self._fed = [fed + 1 for fed in self._fed]

    def token(self, layer: int, qkv: torch.Tensor, ropes: list[torch.Tensor] | None) -> torch.Tensor:
        """One token's attention: nothing but launches."""
        q, out = self._q, torch.empty_like(self._q)
        most, first_slot, keys, values, positions, lengths, next_slots, states, columns = self._layers[layer]
        zero, table, (number, scale) = self._zero, self._tables[layer], self._of_model[layer]
        rope = None if ropes is None else ropes[table]
        OP.write.default(qkv, rope, zero, zero, None, self._now, first_slot, next_slots, keys, values, positions, q)
        if columns is not None:
            self._bring(layer, qkv, first_slot, next_slots, self._now, values, columns)
        slots = (first_slot, keys, values, positions, lengths, next_slots, self._ages, states)
        rules = (self._rules_of[layer], self._params, self._threshold16, self._seeds, zero)
        turns = (self._ropes[table][0] if self._plan.squeezed else None, self._ropes[table][1])
        heads = (number, scale, most)
        room_at, work = self._room_of[layer], self._workspace
        OP.evicting_attention.default(
            self._plan.policy, q, self._now, *heads, *slots, *rules, columns, room_at, *turns, work, out
        )
        return out

    def _bring(self, layer: int, qkv: torch.Tensor, *held: torch.Tensor | None) -> None:
        """The columns of new tokens. `held`: first_slot, next_slots, now, values and the columns."""
        query_heads, kv_heads, _ = self._heads
        *slots, columns = held
        unit_keys = None if self._unit_keys is None else self._unit_keys[layer]
        plain = qkv[:, query_heads : query_heads + kv_heads]
        OP.columns.default(self._plan.columns, plain, *slots, unit_keys, columns, self._outputs[layer])

    # --- Room -----------------------------------------------------------------------------------

    def _make_room(self, leaving: Counts) -> None:
        if not leaving.any():
            return
        work = self._shrink_workspace(self._most)
        now = torch.full_like(self._now, self._fed[0])
        for layer in range(self._shape.layers):
            slots = self._layers[layer]
            self._shrink(layer, slots, slots, now, self._zero, None, self._room_at[layer], False, work)
            self._number(slots)
        self._live -= leaving
        self._left += leaving

    def _shrink_workspace(self, most: int) -> torch.Tensor:
        size = ops.shrink_workspace(1, self._shape.kv_heads, most)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _number(self, slots: Slots) -> None:
        if self._ages is not None:
            OP.number_by_age.default(
                *self._heads[:2], slots.most, slots.first_slot, slots.positions, slots.lengths, self._ages, slots.keys
            )

    def _shrink(
        self,
        layer: int,
        source: Slots,
        to: Slots,
        now: torch.Tensor,
        admitted: torch.Tensor,
        seen: torch.Tensor | None,
        room_at: torch.Tensor,
        after_prompt: bool,
        workspace: torch.Tensor,
    ) -> None:
        plan = self._plan
        OP.shrink.default(
            plan.policy,
            self._of_model[layer][0],
            self._shape.query_heads,
            *source,
            *to,
            self._rules[layer],
            self._params,
            self._threshold16,
            self._seeds,
            self._zero,
            room_at,
            now,
            admitted,
            seen,
            self._policy.weighted,
            plan.by_layer,
            plan.smooth(after_prompt),
            plan.pool_max,
            workspace,
        )

    # --- Prompts --------------------------------------------------------------------------------

    def _admit_prompt(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        if layer == 0:
            self._refuse_beyond(len(qkv))
            self._admissions = list(self._admissions_of(self._fed[0], len(qkv)))
        outs = []
        for admission in self._admissions:
            first = admission.fed - self._admissions[0].fed
            outs.append(self._admit(layer, qkv[first : first + admission.count], admission))
        if layer == self._shape.layers - 1:
            self._admissions = []
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _admissions_of(self, fed: int, count: int) -> Any:
        step = self._plan.chunk or count
        for first in range(0, count, step):
            tokens = min(step, count - first)
            numbers = torch.arange(tokens, dtype=torch.int32, device=self._device)
            weights, tail = None, 0
            if self._policy.weighted:
                by_age, tail = self._policy.weights(self._bytes, tokens)
                weights = torch.tensor(by_age, dtype=torch.float32, device=self._device)
            yield Admission(
                fed + first,
                tokens,
                first + tokens == count,
                torch.full_like(self._now, fed + first),
                torch.full_like(self._now, tokens),
                numbers,
                torch.zeros_like(numbers),
                None if self._plan.squeezed else self._ropes_of(fed + first + numbers.double()),
                weights,
                tail,
            )

    def _admit(self, layer: int, qkv: torch.Tensor, admission: Admission) -> torch.Tensor:
        """One layer: the tokens attend behind those that are live, in memory of their own; then those that stay go to
        their slots."""
        plan, (query_heads, kv_heads, size) = self._plan, self._heads
        leaving = plan.surplus(self._live, False)[layer]
        older = int((self._live[layer] - leaving).max())
        memory = self._memory(max(older + admission.count, self._most))
        stays = self._never[layer] if plan.once and not admission.ends_prompt else self._room_at[layer]
        work = self._shrink_workspace(memory.most)
        if admission.fed > 0:
            behind = self._never[layer] if plan.once else self._room_at[layer]
            self._shrink(layer, self._layers[layer], memory, admission.now, self._zero, None, behind, False, work)

        q, out = (torch.empty(len(qkv), query_heads, size, dtype=self._dtype, device=self._device) for _ in range(2))
        OP.write.default(
            qkv,
            None if admission.ropes is None else admission.ropes[self._tables[layer]],
            admission.rows,
            admission.sequences,
            admission.rows,
            None,
            memory.first_slot,
            memory.lengths,
            memory.keys,
            memory.values,
            memory.positions,
            q,
        )
        keys = memory.keys
        if plan.squeezed:
            q, keys = self._squeezed(layer, q, memory)
        seen = self._attend_prompt(layer, q, keys, memory, admission, older + admission.count, out)
        if memory.columns is not None:
            self._bring(layer, qkv, memory.first_slot, memory.lengths, None, memory.values, memory.columns)
        slots = self._layers[layer]
        self._shrink(layer, memory, slots, admission.now, admission.admitted, seen, stays, admission.ends_prompt, work)
        self._number(slots)
        self._count(layer, admission, leaving)
        return out

    def _memory(self, most: int) -> Slots:
        """For live and new tokens together; nothing is live in it yet."""
        kv_heads, size, total = self._shape.kv_heads, self._shape.head_size, self._shape.kv_heads * most
        return Slots(
            most,
            torch.arange(kv_heads, device=self._device) * most,
            torch.empty(total, size, dtype=self._dtype, device=self._device),
            torch.empty(total, size, dtype=self._dtype, device=self._device),
            self._zeros(total, dtype=torch.int32),
            self._zeros(kv_heads, dtype=torch.int32),
            self._zeros(kv_heads, dtype=torch.int32),
            self._per_slot(total, self._policy.slot_bytes, torch.uint8),
            self._per_slot(total, len(self._plan.columns), torch.float32),
        )

    def _attend_prompt(
        self,
        layer: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        memory: Slots,
        admission: Admission,
        keys_end: int,
        out: torch.Tensor,
    ) -> torch.Tensor | None:
        """Returns what each slot received; None where the policy looks at nothing."""
        scale, observes = self._of_model[layer][1], self._policy.needs > 0
        first_slot, older, query_heads = memory.first_slot, memory.lengths, self._shape.query_heads
        rows = self._zeros(len(q), query_heads, 2, dtype=torch.float32) if observes else None
        OP.prefill_attention.default(q, keys, memory.values, first_slot, older, 0, scale, out, rows)
        if rows is None:
            return None
        seen = self._zeros(len(keys), _library.OBSERVATION_BYTES, dtype=torch.uint8)
        work = self._zeros(ops.observe_workspace(self._dtype, *self._heads, len(q)), dtype=torch.uint8)
        OP.observe.default(
            self._plan.policy,
            q,
            keys,
            first_slot,
            older,
            rows,
            0,
            scale,
            keys_end,
            admission.fed,
            0,
            admission.weights,
            admission.tail,
            self._plan.group_max,
            self._threshold16,
            seen,
            work,
        )
        return seen

    def _squeezed(self, layer: int, q: torch.Tensor, memory: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys by the number of older live tokens, as kvlab_evicting_attention rotates them."""
        query_heads, kv_heads, size = self._heads
        slot = torch.arange(memory.most, device=self._device).expand(kv_heads, -1)
        older = memory.lengths[:, None]
        ages = torch.where(slot < older, memory.positions.view(kv_heads, -1), 2**40 + slot).argsort(-1).argsort(-1)
        keys = self._rotated(layer, memory.keys.view(kv_heads, -1, size), ages).view(-1, size)
        places = (older + torch.arange(len(q), device=self._device)).repeat_interleave(query_heads // kv_heads, 0)
        return self._rotated(layer, q.transpose(0, 1), places).transpose(0, 1).contiguous(), keys

    def _rotated(self, layer: int, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[head, n, size] by [head, n], in float32, rounded once."""
        rope = self._rope_of(places.reshape(-1).double(), self._tables[layer])
        cos, sin = rope.view(*places.shape, -1, 2).unbind(-1)
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def _count(self, layer: int, admission: Admission, leaving: Counts) -> None:
        self._left[layer] += leaving
        self._live[layer] += numpy.uint32(admission.count) - leaving
        if not (self._plan.once and not admission.ends_prompt):
            after = self._plan.surplus(self._live, admission.ends_prompt)[layer]
            self._live[layer] -= after
            self._left[layer] += after
        self._fed[layer] = admission.fed + admission.count
