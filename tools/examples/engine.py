#!/usr/bin/env python3
"""A small serving engine: continuous batching over kvlab's kernels, with keys and values in blocks of one pool.

Requests join and finish at any step. Prompts are appended in chunks, between decode steps; a decode step is one CUDA
graph. Some requests share a prefix, whose attention is computed once. If no block is free, a request is swapped out to
the host and swapped in again later. The model has the shape of Llama 3 8B and random weights.

Then each request is served alone, and its prefix is computed again. The script exits with 1 if a request then gets
other tokens than in the batch. This happens in bfloat16. The batch determines how attention is divided among
multiprocessors, which changes the last bits of the logits. With random weights, two tokens often have nearly the same
logit, so these bits decide. In float32 all tokens are equal.

    KVLAB_CUDA=1 pip install . torch && python3 tools/examples/engine.py
"""

import argparse
import ctypes
import dataclasses
import sys
import time

import torch

import kvlab_calls as kvlab  # kvlab.h by ctypes

PAGE, IDLE = 16, -1
HIDDEN, QUERY_HEADS, KV_HEADS, DIM, INNER, VOCAB = 4096, 32, 8, 128, 14336, 32000


@dataclasses.dataclass(eq=False)
class Request:
    prefix: list  # tokens that other requests may share; may be empty
    prompt: list  # the rest of its prompt
    wanted: int  # tokens to generate
    said: list = dataclasses.field(default_factory=list)
    fed: int = 0  # tokens that are or were in its cache
    row: int = -1
    swapped: dict | None = None

    def chunk(self, limit):
        """Returns the next part of the prompt to append: first the whole prefix, then at most `limit` tokens at a
        time."""
        if self.fed < len(self.prefix):
            return self.prefix
        begun = self.fed - len(self.prefix)
        return self.prompt[begun : begun + limit]

    @property
    def is_read(self):
        return self.fed >= len(self.prefix) + len(self.prompt)


class Model:
    """A model with random weights: the computations of its layers except attention."""

    def __init__(self, layers, dtype):
        torch.manual_seed(1)
        self.layers, self.dtype = layers, dtype
        qkv = (QUERY_HEADS + 2 * KV_HEADS) * DIM
        self.embedding, self.head = self.draw(VOCAB, HIDDEN), self.draw(VOCAB, HIDDEN)
        shapes = {"qkv": (qkv, HIDDEN), "o": (HIDDEN, QUERY_HEADS * DIM), "up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        self.weights = [{name: self.draw(*shape) for name, shape in shapes.items()} for _ in range(layers)]
        angle = torch.arange(8192, device="cuda")[:, None] * 500000.0 ** (-torch.arange(DIM // 2, device="cuda") / (DIM // 2))
        self.rope = torch.stack([angle.cos(), angle.sin()], -1).float().contiguous()  # [position, DIM / 2, 2]

    def draw(self, out, into):
        return torch.randn(out, into, dtype=self.dtype, device="cuda") * into**-0.5

    @staticmethod
    def norm(x):
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-5)

    def logits(self, tokens, attend):
        """Returns logits. `attend(layer, qkv)` maps [token, head, DIM] to [token, query head, DIM]."""
        x = self.embedding[tokens]
        for layer, weights in enumerate(self.weights):
            qkv = (self.norm(x) @ weights["qkv"].T).view(len(x), -1, DIM)
            x = x + attend(layer, qkv).view(len(x), -1) @ weights["o"].T
            gate, up = (self.norm(x) @ weights["up"].T).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ weights["down"].T
        return self.norm(x) @ self.head.T


class Engine:
    """Decodes up to `rows` requests together. Each request has one row of the cache, and one more row holds a shared
    prefix. The slots of a row are in blocks of the pool."""

    def __init__(self, model, policy, rows, budget, chunk, blocks):
        self.type = kvlab.TYPES[str(model.dtype).removeprefix("torch.")]
        self.model, self.rows, self.budget, self.chunk = model, rows, budget, chunk
        self.library, self.policy = kvlab.library(), kvlab.Policy(policy)
        self.max_slots = -(-(budget + chunk) // PAGE) * PAGE  # slots of a KV head: the kept tokens and a chunk
        layers, all_rows = model.layers, rows + 1

        def zeros(*shape, dtype=torch.int32):
            return torch.zeros(*shape, dtype=dtype, device="cuda")

        self.keys, self.values = (zeros(layers, blocks, PAGE, KV_HEADS, DIM, dtype=model.dtype) for _ in range(2))
        # The other arrays are indexed by slot: `max_slots` for each row and KV head.
        self.positions = zeros(layers, all_rows, KV_HEADS, self.max_slots)
        self.states = zeros(layers, all_rows, KV_HEADS, self.max_slots, max(self.policy.slot_bytes, 1), dtype=torch.uint8)
        self.seen = zeros(layers, all_rows, KV_HEADS, self.max_slots, kvlab.OBSERVATION_BYTES, dtype=torch.uint8)
        self.lengths, self.next_slots = (zeros(layers, all_rows, KV_HEADS) for _ in range(2))
        self.first_slot = (torch.arange(all_rows * KV_HEADS, device="cuda") * self.max_slots).view(all_rows, KV_HEADS)
        rule = torch.tensor([budget, 4, budget // 4, 0], dtype=torch.int32, device="cuda")  # 4 sinks, a quarter recent
        self.rules = rule.repeat(all_rows * KV_HEADS, 1)
        self.threshold16 = torch.full((all_rows,), 655, dtype=torch.int32, device="cuda")
        self.seeds, self.ids = zeros(all_rows, dtype=torch.int64), zeros(all_rows)
        self.table = torch.zeros(all_rows, self.max_slots // PAGE, dtype=torch.int32)
        self.blocks = zeros(*self.table.shape)
        self.held = [[] for _ in range(all_rows)]
        self.free, self.unused_rows = list(range(blocks)), list(range(rows))
        self.prefix = None  # the prefix whose keys, values and observations the last row holds
        self.now, self.tokens = torch.full((rows,), IDLE, dtype=torch.int32, device="cuda"), zeros(rows, dtype=torch.int64)
        self.chunk_range = zeros(2)  # position of a chunk's first token, and number of tokens
        self.numbers = torch.arange(max(rows, self.max_slots), dtype=torch.int32, device="cuda")
        self.zeros = zeros(self.max_slots)
        size = self.library.kvlab_evicting_attention_workspace(self.policy.handle, self.cache(0, 0, rows))
        self.workspace = zeros(size, dtype=torch.uint8)
        size = self.library.kvlab_compact_workspace(self.cache(0, 0, 1))
        self.compact_workspace = zeros(size, dtype=torch.uint8)
        self.swaps = self.hits = self.steps = 0
        self.graph = self.capture()

    # --- Blocks -----------------------------------------------------------------------------------

    def hold(self, row, slots):
        """Gives a row exactly the blocks for `slots` slots. Returns False if there are too few."""
        held, wanted = self.held[row], -(-slots // PAGE)
        if wanted - len(held) > len(self.free):
            return False
        while len(held) > wanted:
            self.free.append(held.pop())
        while len(held) < wanted:
            held.append(self.free.pop())
        self.table[row, :wanted] = torch.tensor(held, dtype=torch.int32)
        self.blocks.copy_(self.table)
        return True

    # --- kvlab.h ----------------------------------------------------------------------------------

    def cache(self, layer, row, sequences):
        pages = kvlab.Pages(self.blocks[row].data_ptr(), PAGE, self.table.shape[1], 0, PAGE * KV_HEADS * DIM,
                            KV_HEADS * DIM, DIM)  # fmt: skip
        arrays = (self.first_slot[row], self.keys[layer], self.values[layer], self.positions[layer], self.lengths[layer, row],
                  self.next_slots[layer, row])  # fmt: skip
        return kvlab.Cache(self.type, sequences, QUERY_HEADS, KV_HEADS, DIM, DIM**-0.5, self.max_slots, *map(at, arrays), None, pages)

    def state(self, layer, row):
        rules = self.rules[row * KV_HEADS :]
        given = (self.states[layer], rules, None, self.threshold16[row:], self.seeds[row:], self.ids[row:])
        return kvlab.PolicyState(*map(at, given), layer, 0, None, None, None)

    def call(self, name, *arguments):
        if getattr(self.library, name)(*arguments, torch.cuda.current_stream().cuda_stream):
            raise RuntimeError(f"{name}: {self.library.kvlab_last_error().decode()}")

    def write(self, cache, qkv, rope_rows, sequences, slots, now):
        """Writes keys and values to their slots. Returns the rotated queries."""
        q = torch.empty(len(qkv), QUERY_HEADS, DIM, dtype=qkv.dtype, device="cuda")
        given = (self.model.rope, rope_rows, sequences, slots, now, q)
        self.call("kvlab_write", kvlab.WriteArgs(cache, len(qkv), at(qkv), DIM, *map(at, given)))
        return q

    # --- A decode step ----------------------------------------------------------------------------

    def capture(self):
        """Captures a step that feeds `tokens` at positions `now` to all rows. Rows whose position is IDLE are skipped.
        """

        def step():
            places = self.now.clamp(min=0)
            logits = self.model.logits(self.tokens, lambda layer, qkv: self.attend(layer, qkv, places))
            self.tokens.copy_(logits.float().argmax(-1))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # that stream may still be filling the buffers
        with torch.cuda.stream(stream):
            step()  # all rows are idle; this initializes libraries before the capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        return graph

    def attend(self, layer, qkv, places):
        cache = self.cache(layer, 0, self.rows)
        q = self.write(cache, qkv, places, self.numbers, None, self.now)
        out = torch.zeros_like(q)
        given = kvlab.EvictingAttentionArgs(cache, self.state(layer, 0), 0, at(self.now), at(q), None, 0, 1.0, at(out), None,
                                            at(self.workspace), 0)  # fmt: skip
        self.call("kvlab_evicting_attention", self.policy.handle, given)
        return out

    def decode(self, running):
        for request in running:
            self.tokens[request.row] = request.said[-1]
        now = torch.full((self.rows,), IDLE, dtype=torch.int32)
        for request in running:
            now[request.row] = request.fed
        self.now.copy_(now)
        self.graph.replay()
        said = self.tokens.tolist()
        for request in running:
            request.said.append(said[request.row])
            request.fed += 1
        self.steps += 1

    # --- A chunk of a prompt ----------------------------------------------------------------------

    def append(self, request, tokens, shared):
        """Appends a chunk: attention over the kept tokens and the chunk, observation, and compaction to the budget."""
        row, fed, count = (self.rows if shared else request.row), request.fed, len(tokens)
        self.chunk_range.copy_(torch.tensor([fed, count], dtype=torch.int32))
        if not (shared and self.prefix == tokens):
            self.seen[:, row] = 0
            logits = self.model.logits(torch.tensor(tokens, device="cuda"),
                                       lambda layer, qkv: self.attend_chunk(layer, qkv, row, fed))  # fmt: skip
            request.said = [int(logits[-1].float().argmax())]
        for layer in range(self.model.layers):
            self.compact(layer, row, request.row)
        request.fed += count

    def attend_chunk(self, layer, qkv, row, fed):
        cache, count = self.cache(layer, row, 1), len(qkv)
        q = self.write(cache, qkv, self.numbers[:count] + fed, self.zeros, self.numbers, None)
        out, rows = torch.empty_like(q), torch.empty(count, QUERY_HEADS, 2, device="cuda")
        prefill = kvlab.PrefillArgs(self.type, QUERY_HEADS, KV_HEADS, DIM, DIM**-0.5, 0, count, at(q), cache.keys, cache.values,
                                    cache.first_slot, cache.lengths, at(out), None, at(rows), cache.pages)  # fmt: skip
        self.call("kvlab_prefill_attention", prefill)
        if self.policy.needs:
            observe = kvlab.ObserveArgs(prefill, self.policy.needs, min(fed, self.budget - 1) + count, fed,
                                        at(self.threshold16), at(self.seen[layer]))  # fmt: skip
            work = torch.empty(self.library.kvlab_observe_workspace(observe), dtype=torch.uint8, device="cuda")
            observe.workspace = at(work)
            self.call("kvlab_observe", observe)
        return out

    def compact(self, layer, row, to):
        """Compacts a row to the budget: in place (`to` is `row`), or into another row's blocks, so that a prefix stays
        unchanged for other requests."""
        args = kvlab.CompactArgs(self.cache(layer, row, 1), self.cache(layer, to, 1), self.state(layer, to),
                                at(self.states[layer]), at(self.chunk_range), at(self.chunk_range[1:]),
                                at(self.seen[layer]) if self.policy.needs else None, at(self.compact_workspace))  # fmt: skip
        self.call("kvlab_compact", self.policy.handle, args)

    # --- Requests ---------------------------------------------------------------------------------

    def join(self, request):
        request.row = self.unused_rows.pop()
        self.lengths[:, request.row] = 0
        self.next_slots[:, request.row] = 0

    def leave(self, request):
        self.hold(request.row, 0)
        self.unused_rows.append(request.row)
        request.row = -1

    def read(self, request, share):
        """Appends the next chunk of a request's prompt. Returns False if too few blocks are free."""
        tokens = request.chunk(self.chunk)
        shared = share and request.fed == 0 and bool(request.prefix)
        stays = min(request.fed, self.budget - 1)
        if shared:  # empties the prefix's row; compaction writes to the request's row instead
            self.lengths[:, self.rows] = 0
            self.next_slots[:, self.rows] = 0
        if shared and self.prefix != tokens:
            self.prefix = None
            if not self.hold(self.rows, len(tokens)):
                return False
        if not self.hold(request.row, self.budget if shared else max(stays + len(tokens), self.budget)):
            return False
        self.hits += shared and self.prefix == tokens
        self.append(request, tokens, shared)
        self.prefix = tokens if shared else self.prefix
        return self.hold(request.row, self.budget)

    def swap_out(self, request):
        held, row = torch.tensor(self.held[request.row], device="cuda"), request.row
        request.swapped = {name: getattr(self, name)[:, held].cpu() for name in ("keys", "values")}
        for name in ("positions", "states", "lengths", "next_slots"):
            request.swapped[name] = getattr(self, name)[:, row].cpu()
        self.leave(request)
        self.swaps += 1

    def swap_in(self, request):
        self.join(request)
        self.hold(request.row, self.budget)
        held = torch.tensor(self.held[request.row], device="cuda")
        for name, saved in request.swapped.items():
            getattr(self, name)[:, held if name in ("keys", "values") else request.row] = saved.cuda()
        request.swapped = None

    def serve(self, requests, share):
        waiting, running, out = list(requests), [], []
        reading = None
        while waiting or running or out or reading:
            if reading is None and waiting and self.unused_rows:
                reading = waiting.pop(0)
                self.join(reading)
            if reading and not self.read(reading, share):
                if not running:
                    raise RuntimeError("the pool has too few blocks for one request")
                out.append(running.pop())  # the youngest request returns its blocks
                self.swap_out(out[-1])
                continue
            if reading and reading.is_read:
                running, reading = [*running, reading], None
            if out and not waiting and not reading and self.unused_rows and len(self.free) * PAGE >= self.budget:
                self.swap_in(out[0])
                running.append(out.pop(0))
            if running:
                self.decode(running)
            for request in [one for one in running if len(one.said) >= one.wanted]:
                running.remove(request)
                self.leave(request)


def at(tensor):
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def drawn(count):
    generator = torch.Generator().manual_seed(7)

    def tokens(min_length, max_length):
        length = int(torch.randint(min_length, max_length + 1, (1,), generator=generator))
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    prefix = tokens(300, 300)
    return [Request(prefix if i % 2 == 0 else [], tokens(100, 900), 20 + i * 5 % 40) for i in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--rows", type=int, default=6, help="number of requests that decode together")
    parser.add_argument("--budget", type=int, default=256, help="budget of each KV head, in tokens")
    parser.add_argument("--policy", default="h2o", help="a policy that has no parameters and reads no token features")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    model = Model(arguments.layers, getattr(torch, arguments.dtype))

    def engine(rows):
        blocks = 20 + 32 + (rows - 1) * (-(-arguments.budget // PAGE)) - 8  # too few for all requests at once
        return Engine(model, arguments.policy, arguments.rows, arguments.budget, 256, blocks)

    together = drawn(arguments.requests)
    served, began = engine(arguments.rows), time.perf_counter()
    served.serve(together, share=True)
    seconds = time.perf_counter() - began
    said = sum(len(request.said) for request in together)
    print(f"{len(together)} requests, {said} tokens in {seconds:.2f} s, {served.steps} steps, {served.hits} prefix hits, "
          f"{served.swaps} swapped out")  # fmt: skip
    wrong, alone = 0, engine(arguments.rows)
    for number, request in enumerate(drawn(arguments.requests)):
        alone.serve([request], share=False)
        if request.said != together[number].said:
            wrong += 1
            same = sum(a == b for a, b in zip(request.said, together[number].said))
            print(f"request {number}: {same} of {request.wanted} tokens are the same when it runs alone")
    print(
        "every request gets the same tokens when it runs alone"
        if wrong == 0
        else f"{wrong} requests get other tokens when they run alone"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
