"""Prints the quantized keys and values of transformers' QuantizedCache (5.24, optimum-quanto 0.2.7) and of the KIVI
authors' code (876b4d2). A test compares them with the values of kvlab's KIVI.

git clone https://github.com/jy-yuan/KIVI && PYTHONPATH=KIVI python tests/scripts/make_quantized_cache.py > \
  tests/data/quantized_cache.json
"""

import json
import math

import torch
from quant import new_pack
from transformers.cache_utils import QuantoQuantizedLayer

rows = [[math.sin(49 * i + 14 * d) * (0.1 + d / 8) for d in range(32)] for i in range(32)]  # [token][channel]
given = torch.tensor(rows)[None, None]
numbers = {}
for bits in (2, 4):
    layer = QuantoQuantizedLayer(bits, axis_key=-1, axis_value=0, q_group_size=32)
    layer.update(given, given)
    keys, values = (part[0, 0, :32].double() for part in layer.update(given, given))
    half = given.half()
    quantized = (new_pack.quant_and_pack_kcache(half, 32, bits), new_pack.quant_and_pack_vcache(half, 32, bits))
    authors_keys = new_pack.unpack_and_dequant_kcache(*quantized[0], 32, bits)[0, 0].double()
    authors_values = new_pack.unpack_and_dequant_vcache(*quantized[1], 32, bits)[0, 0].double()
    for name, some in (  # keys of the first eight channels, values of the first eight tokens
        ("keys", keys[:, :8]), ("values", values[:8]),
        ("authors_keys", authors_keys[:, :8]), ("authors_values", authors_values[:8]),
    ):  # fmt: skip
        numbers[f"{name}{bits}"] = [[round(x, 4) for x in row] for row in some.tolist()]
print(json.dumps(numbers))
