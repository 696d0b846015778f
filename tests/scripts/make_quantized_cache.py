"""Numbers of transformers' QuantizedCache (5.24, optimum-quanto 0.2.7), with which a test compares KIVI's codes.

python tests/scripts/make_quantized_cache.py > tests/data/quantized_cache.json
"""

import json
import math

import torch
from transformers.cache_utils import QuantoQuantizedLayer

rows = [[math.sin(49 * i + 14 * d) * (0.1 + d / 8) for d in range(32)] for i in range(32)]  # [token][channel]
given = torch.tensor(rows)[None, None]
numbers = {}
for bits in (2, 4):
    layer = QuantoQuantizedLayer(bits, axis_key=-1, axis_value=0, q_group_size=32)
    layer.update(given, given)
    keys, values = (part[0, 0, :32].double() for part in layer.update(given, given))
    for name, some in (("keys", keys[:, :8]), ("values", values[:8])):  # of the first eight channels, or tokens
        numbers[f"{name}{bits}"] = [[round(x, 4) for x in row] for row in some.tolist()]
print(json.dumps(numbers))
