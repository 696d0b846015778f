#!/usr/bin/env python3
"""Calls kvlab's kernels from PyTorch by ctypes: a decode loop over a cache of `--budget` slots that evicts by H2O.

Each step's output is compared with torch's attention over the live tokens, and the policy's accumulated mass with the
sum of torch's probabilities. Exits with 1 if they differ.

    python3 tools/examples/torch_evict.py --library PREFIX/lib/libkvlab_kernels.so
"""
import argparse
import ctypes
import math
import sys

import torch

BF16 = 0
p, u32, i32, f32 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_float


class Pages(ctypes.Structure):  # kvlab_pages: none
    _fields_ = [("blocks", p), ("page", i32), ("max_blocks", i32), ("by_pair", i32), ("block_stride", ctypes.c_int64),
                ("slot_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class Cache(ctypes.Structure):  # kvlab_cache_view
    _fields_ = [("type", i32), ("sequences", i32), ("query_heads", i32), ("kv_heads", i32), ("head_size", i32),
                ("softmax_scale", f32), ("max_slots", i32), ("first_slot", p), ("keys", p), ("values", p),
                ("positions", p), ("lengths", p), ("next_slots", p), ("ages", p), ("pages", Pages)]


class PolicyState(ctypes.Structure):  # kvlab_policy_state
    _fields_ = [("states", p), ("rules", p), ("params", p), ("threshold16", p), ("seeds", p), ("sequence_ids", p),
                ("layer", u32), ("first_head", u32), ("seen", p), ("features", p), ("evict_at", p)]


class Step(ctypes.Structure):  # kvlab_evicting_attention_args
    _fields_ = [("struct_size", ctypes.c_size_t), ("cache", Cache), ("policy", PolicyState), ("numbering", i32),
                ("now", p), ("q", p), ("inv_freq", p), ("rotated", i32), ("rope_factor", f32), ("out", p), ("lse", p),
                ("workspace", p), ("settled", i32)]


def load(path):
    library = ctypes.CDLL(path)
    library.kvlab_find_policy.restype = p
    library.kvlab_find_policy.argtypes = [ctypes.c_char_p]
    library.kvlab_policy_slot_bytes.restype = ctypes.c_size_t
    library.kvlab_policy_slot_bytes.argtypes = [p]
    library.kvlab_evicting_attention_workspace.restype = ctypes.c_size_t
    library.kvlab_evicting_attention_workspace.argtypes = [p, ctypes.POINTER(Cache)]
    library.kvlab_evicting_attention.argtypes = [p, ctypes.POINTER(Step), p]
    return library


class H2OCache:
    """One layer: keys and values [sequence, kv_head, budget, dim] in bfloat16."""

    def __init__(self, library, sequences, query_heads, kv_heads, dim, budget):
        def zeros(*shape, dtype):
            return torch.zeros(*shape, dtype=dtype, device="cuda")

        self.library, self.policy = library, library.kvlab_find_policy(b"h2o")
        pairs = sequences * kv_heads
        self.keys = zeros(sequences, kv_heads, budget, dim, dtype=torch.bfloat16)
        self.values = torch.zeros_like(self.keys)
        self.positions = zeros(pairs, budget, dtype=torch.int32)
        self.lengths = zeros(pairs, dtype=torch.int32)
        self.next_slots = zeros(pairs, dtype=torch.int32)
        self.first_slot = torch.arange(pairs, device="cuda") * budget
        self.states = zeros(pairs * budget * library.kvlab_policy_slot_bytes(self.policy), dtype=torch.uint8)
        self.rules = torch.tensor([[budget, 0, budget // 2, 0]] * pairs, dtype=torch.int32, device="cuda")
        self.seeds = zeros(sequences, dtype=torch.int64)
        self.ids = torch.arange(sequences, dtype=torch.int32, device="cuda")
        self.now = zeros(sequences, dtype=torch.int32)
        self.out = zeros(sequences, query_heads, dim, dtype=torch.bfloat16)
        self.cache = Cache(BF16, sequences, query_heads, kv_heads, dim, 1 / math.sqrt(dim), budget,
                           *(t.data_ptr() for t in (self.first_slot, self.keys, self.values, self.positions,
                                                    self.lengths, self.next_slots)))
        size = library.kvlab_evicting_attention_workspace(self.policy, self.cache)
        self.workspace = zeros(size, dtype=torch.uint8)

    def step(self, t, q, key, value):
        """q [sequence, query_head, dim]; key and value [sequence, kv_head, dim]. Does not wait for the device."""
        sequences, kv_heads, _, dim = self.keys.shape
        slot = self.next_slots.long().view(sequences, kv_heads, 1)
        at = slot.unsqueeze(-1).expand(-1, -1, 1, dim)
        self.keys.scatter_(2, at, key.unsqueeze(2))
        self.values.scatter_(2, at, value.unsqueeze(2))
        self.positions.scatter_(1, slot.view(-1, 1), t)
        self.now.fill_(t)
        state = PolicyState(states=self.states.data_ptr(), rules=self.rules.data_ptr(), seeds=self.seeds.data_ptr(),
                            sequence_ids=self.ids.data_ptr())
        args = Step(struct_size=ctypes.sizeof(Step), cache=self.cache, policy=state, now=self.now.data_ptr(),
                    q=q.data_ptr(), out=self.out.data_ptr(), workspace=self.workspace.data_ptr())
        error = self.library.kvlab_evicting_attention(self.policy, args, torch.cuda.current_stream().cuda_stream)
        if error:
            raise RuntimeError(f"kvlab_evicting_attention: CUDA error {error}")
        return self.out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libkvlab_kernels.so")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", type=int, default=64)
    options = parser.parse_args()
    sequences, query_heads, kv_heads, dim, budget = 2, 8, 2, 128, options.budget
    torch.manual_seed(1)
    cache = H2OCache(load(options.library), sequences, query_heads, kv_heads, dim, budget)
    masses = torch.zeros(sequences * kv_heads, options.steps, dtype=torch.float64, device="cuda")  # by position
    worst = worst_mass = 0.0
    for t in range(options.steps):
        def draw(heads):
            return torch.randn(sequences, heads, dim, device="cuda").bfloat16()

        q = draw(query_heads)
        out = cache.step(t, q, draw(kv_heads), draw(kv_heads))
        live = int(cache.lengths[0])
        keys, values = cache.keys[:, :, :live], cache.values[:, :, :live]
        torch_out = torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True)
        worst = max(worst, (out - torch_out.squeeze(2)).abs().max().item())

        grouped = q.double().view(sequences, kv_heads, query_heads // kv_heads, dim)
        probabilities = torch.softmax(grouped @ keys.double().transpose(2, 3) / math.sqrt(dim), -1)
        at = cache.positions[:, :live].long()
        masses.scatter_add_(1, at, probabilities.sum(2).view(-1, live))
        noted = cache.states.view(torch.int64).view(-1, budget)[:, :live].double() / 2**32
        worst_mass = max(worst_mass, (noted - masses.gather(1, at)).abs().max().item())
    print(f"{torch.cuda.get_device_name()}: {options.steps} tokens through a cache of {live} slots")
    print(f"largest difference from torch's attention: {worst:.1e}; of a token's accumulated mass: {worst_mass:.1e}")
    print("the first KV head keeps", sorted(cache.positions[0, :live].tolist()))
    return 0 if worst < 2e-2 and worst_mass < 1e-3 and live == budget else 1


if __name__ == "__main__":
    sys.exit(main())
