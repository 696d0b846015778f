"""Functions that change texts, JSON and tensor files to make them hostile. All random choices come from the given
generator."""

import copy
import json
import re
import struct

NUMBERS = ["0", "-1", "1", "2", "16", "63", "64", "255", "256", "257", "65535", "65536", "65537", "2147483647", "2147483648",
           "4294967295", "4294967296", "9223372036854775807", "18446744073709551616", "1e9", "1e308", "1e999", "-1e9",
           "0.5", "1.5", "nan", "inf", "-inf", "0x10", "1_000", " 5", "5 ", "٣", "", "+5", "1e", "--1"]  # fmt: skip
MARKS = ["\u202e", "\ufeff", "\x1b[31m", "\x07", "\t", "é", "日本", "'", '"', "\\", "%", "%s", "{}", "{0}", "$(x)", "`", "@", "*",
         ":", ",", "=", "(", ")", "+", "/", "..", "../x", "~", "#"]  # fmt: skip
VALUES = [None, True, False, 0, 1, -1, 2, 7, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 0.5, 1e300,
          -1e300, 1e-300, "", "x", "0", "1", "null", "../x", "é", "\u202e", "\x00", "x" * 300, [], {}, [[]], [None], [1], ["x"],
          {"x": 1}, {"": {}}, [[1], 2], {"quant_method": 5}]  # fmt: skip


def pick(rng, *choices):
    return rng.choice(choices)


def number(rng):
    return rng.choice(NUMBERS) if rng.random() < 0.8 else str(rng.randrange(-(10 ** rng.randrange(1, 25)), 10 ** rng.randrange(1, 25)))


def text(rng, base):
    """`base` with some of its characters changed."""
    chars = list(base)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
        at = rng.randrange(len(chars) + 1)
        kind = rng.randrange(5)
        if kind == 0 and chars:
            del chars[min(at, len(chars) - 1)]
        elif kind == 1:
            chars[at:at] = rng.choice(MARKS)
        elif kind == 2:
            chars[at:at] = number(rng)
        elif kind == 3 and chars:
            end = min(len(chars), at + rng.randrange(1, 12))
            chars[at:at] = chars[at:end] * rng.choice((1, 2, 40))
        else:
            chars = chars[:at]
    return "".join(chars).replace("\0", "")


def raw(rng, data):
    """`data` with some of its bytes changed, removed or added."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
        elif kind == 3:
            data[at : at + rng.choice((1, 8, 64))] = b"\xff" * 8
        else:
            data[at:at] = data[at : at + 200]
    return bytes(data)


def value(rng):
    """A random JSON value. It is a copy, so that later changes by the caller do not change VALUES."""
    kind = rng.randrange(12)
    if kind == 0:
        return f"RAW({number(rng)})"  # written() replaces this by the number
    if kind == 1:
        nested = 1
        for _ in range(rng.choice((3, 63, 64, 65, 200))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    if kind == 2:
        one = rng.choice(VALUES)
        return [copy.deepcopy(one) for _ in range(rng.choice((2, 17, 1000)))]
    if kind == 3:
        return {f"k{i}": copy.deepcopy(rng.choice(VALUES)) for i in range(rng.choice((2, 300)))}
    return copy.deepcopy(rng.choice(VALUES))


def written(node, ascii_only=False):
    """The JSON text of `node`. Numbers that json.dumps() cannot write, such as 1e999, are inserted afterwards."""
    return re.sub(r'"RAW\(([^)"]*)\)"', r"\1", json.dumps(node, ensure_ascii=ascii_only))


def places(node, found, depth=0):
    """Appends (container, key) of every value in `node` to `found`, and returns it."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        found.append((node, key))
        if isinstance(node[key], (dict, list)) and depth < 90:
            places(node[key], found, depth + 1)
    return found


def change_json(rng, node):
    """Replaces, removes, duplicates or adds some values, in place."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        all_places = places(node, [])
        if not all_places:
            return node
        holder, key = rng.choice(all_places)
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            small = len(json.dumps(holder[key])) < 500  # many copies of larger values would fill this test's memory
            holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 3, 500)) if small else 1)]
        elif kind == 2 and isinstance(holder, dict):
            holder[rng.choice(("x", "", "__proto__", "é", str(key) + "s"))] = value(rng)
        elif kind == 3 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += rng.choice((-1, 1, 2, 1000, 2**31, 2**32))
        else:
            holder[key] = value(rng)
    return node


def json_text(rng, node):
    """The JSON text of a changed copy of `node`. Some texts also have changed bytes or a repeated key."""
    changed = change_json(rng, json.loads(json.dumps(node)))
    text = written(changed, rng.random() < 0.5)
    if rng.random() < 0.1 and text.startswith("{") and len(text) > 2:
        text = text[:-1] + "," + text[1:]
    data = text.encode("utf-8", "replace")
    return raw(rng, data) if rng.random() < 0.15 else data


def tensors(rng, data):
    """A tensor file with a changed header or changed data. The length of the header is usually correct."""
    size = struct.unpack("<Q", data[:8])[0]
    header, rest = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.75:
        header = json_text(rng, json.loads(header))
        length = len(header) if rng.random() < 0.9 else rng.choice((0, 7, 2**31, 2**63, len(header) + 1, 10**8 + 1))
        return struct.pack("<Q", length) + header + rest
    return data[:8] + header + raw(rng, rest)
