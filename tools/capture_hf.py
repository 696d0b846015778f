#!/usr/bin/env python3
"""Captures a kvlab trace from a transformers model. See docs/capture-hf.md.

    python3 tools/capture_hf.py --model DIR --prompt TEXT --max-new-tokens 200 --out TRACE
    python3 tools/capture_hf.py --model DIR --prompt-file book.txt --teacher-forced --prompt-tokens 512 --out TRACE

Exits 2 with one line if anything is wrong with the input.
"""

import bisect
import dataclasses
import importlib
import json
import os
import pathlib
import re
import sys

try:
    import safetensors
    import safetensors.torch
    import torch
    import transformers
    from hf_model import (
        DTYPES,
        Parser,
        attention_modules,
        default_attention,
        default_device,
        file_of,
        load_config,
        load_model,
        name_of,
        refuse_missing_cuda,
        refuse_unsupported,
        rope_of,
        rope_parameters,
        rotary_modules,
        rotate,
        shape_of,
        weights_xxh3,
        whole_number,
    )
    from output_sketch import SEED, output_sketch
    from tokenizers import Tokenizer
    from trace_files import FORMAT, Refused, one_line, xxh3_of
    from trace_writer import SHARD_TOKENS, TraceWriter
except ImportError as missing:
    print(
        f"capture_hf.py: cannot import {missing.name}: pip install torch transformers safetensors xxhash",
        file=sys.stderr,
    )
    sys.exit(2)

PLAIN_TOKENS = 64  # that are also fed to the model as it is
COMPUTED_COLUMNS = ("key_norm", "value_norm", "value_norm1", "key_cosine")


# ---------------------------------------------------------------------------------------------
# The hooks


def turn_by_nothing(module, inputs, output):
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)


def plain_outputs(model, shape, ids):
    """What layer 0's attention puts out [n, query_heads, head_size] in the model as it is."""
    outputs = []
    attention = attention_modules(model)[0]
    hook = attention.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    model.model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    hook.remove()
    return outputs[0].view(len(ids), shape.query_heads, shape.head_size)


class HookedModel:
    """Feeds a model; what its attention computes goes to a trace writer.

    Hooks sit on the projections and norms, which have had the same names and places in every
    version of transformers; attention itself is left alone. The hooks also rotate q and k, and the
    model's own rotation then turns by nothing: it would round cos, sin and both products to the
    model's dtype and take angles in float32 (off by 0.004 at position 100,000), which no trace can
    say.
    """

    def __init__(self, model, shape, rope, writer, plain):
        """`plain`: plain_outputs of the first tokens."""
        self.model, self.shape, self.rope, self.writer, self.plain = model, shape, rope, writer, plain
        self.cache = transformers.DynamicCache()
        self.count = 0  # tokens being fed
        self.seen = set()  # (layer, part)s that came of them
        self.turns_on = {}  # device: their cos and sin
        for index, module in enumerate(attention_modules(model)):
            self.hook_layer(index, module)
        for module in rotary_modules(model):
            module.register_forward_hook(turn_by_nothing)

    def hook_layer(self, index, module):
        queries, keys = self.shape.query_heads, self.shape.kv_heads
        normed = hasattr(module, "q_norm")
        for part, source, heads in (
            ("q", module.q_norm if normed else module.q_proj, queries),
            ("k", module.k_norm if normed else module.k_proj, keys),
            ("v", module.v_proj, keys),
        ):
            source.register_forward_hook(
                lambda _, inputs, output, part=part, heads=heads: self.keep(index, part, heads, output)
            )
        module.o_proj.register_forward_pre_hook(lambda _, inputs: self.keep_output(index, inputs[0]))
        after = self.model.model.layers[index].post_attention_layernorm  # whose input is the residual stream
        after.register_forward_pre_hook(lambda _, inputs: self.keep_residual(index, inputs[0]))

    def rows(self, layer, part, heads, values):
        """To [n, heads, head_size], from [1, n, heads * head_size], or [1, n, heads, head_size]
        after a norm of heads."""
        count, size = self.count, self.shape.head_size
        right = tuple(values.shape) in ((1, count, heads * size), (1, count, heads, size))
        if not right or values.dtype != self.model.dtype:
            raise Refused(
                f"--model: layer {layer}: {part} is {name_of(values.dtype)} {list(values.shape)};"
                f" {name_of(self.model.dtype)} [1, {count}, {heads * size}] is expected"
            )
        self.seen.add((layer, part))
        return values.view(count, heads, size)

    def keep(self, layer, part, heads, values):
        """Returns what the model goes on with."""
        rows = self.rows(layer, part, heads, values)
        self.writer.open.put(layer, part, self.writer.row(), rows)
        return values if part == "v" else rotate(rows, *self.turns(rows.device)).view(values.shape)

    def turns(self, device):
        """cos and sin of the tokens being fed: once for each device, not for each layer."""
        if device not in self.turns_on:
            first = len(self.writer.ids)
            self.turns_on[device] = self.rope.cos_sin(torch.arange(first, first + self.count, device=device))
        return self.turns_on[device]

    def keep_output(self, layer, values):
        rows = self.rows(layer, "out", self.shape.query_heads, values)
        self.writer.open.put_output(layer, self.writer.row(), rows)
        if layer == 0 and not self.writer.ids:
            self.compare(rows)

    def keep_residual(self, layer, values):
        self.seen.add((layer, "residual"))
        norm2 = values.view(self.count, -1).float().square().sum(-1)
        self.writer.open.put_residual(layer, self.writer.row(), norm2)

    def compare(self, rows):
        """The first tokens' outputs of layer 0 against the plain model's: the rotation must be its."""
        count = min(len(rows), len(self.plain))
        plain, ours = self.plain[:count].float(), rows[:count].float()
        error = float((plain - ours).norm() / plain.norm())
        most = 1e-3 if self.model.dtype == torch.float32 else 0.1
        if not error <= most:
            raise Refused(
                f"--model: layer 0 differs by {error:.2g} from the plain model's; the RoPE of Llama is expected"
                " (--dtype float32 tells its rounding from another RoPE)"
            )

    def feed(self, ids, kind, chunk):
        """Returns the hidden state [1, hidden] behind the last token."""
        while ids:
            part = ids[: min(chunk, self.writer.room())]
            ids = ids[len(part) :]
            hidden = self.feed_chunk(part)
            self.writer.admit(part, kind)
            progress(len(self.writer.ids))
        return hidden

    def feed_chunk(self, ids):
        self.count = len(ids)
        self.seen.clear()
        self.turns_on.clear()
        tokens = torch.tensor([ids], device=self.model.device)
        result = self.model.model(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        if len(self.seen) != 5 * self.shape.layers:
            raise Refused("--model: some projections are not called as modules; their outputs cannot be had")
        return result.last_hidden_state[:, -1]

    def most_likely(self, hidden):
        return int(self.model.get_output_embeddings()(hidden).argmax())


# ---------------------------------------------------------------------------------------------
# The command


def progress(tokens):
    if sys.stderr.isatty():
        print(f"\rcapture: {tokens} tokens ", end="", file=sys.stderr, flush=True)


def prompt_text(arguments):
    if arguments.prompt is not None:
        return arguments.prompt
    try:
        return pathlib.Path(arguments.prompt_file).read_bytes().decode("utf-8")
    except OSError as error:
        raise Refused(f"--prompt-file {arguments.prompt_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Refused(
            f"--prompt-file {arguments.prompt_file}: byte {error.start} is not UTF-8; text is expected"
        ) from None


def tokenizer_of(model):
    """That of tokenizer.json, or None."""
    file = file_of(model, "tokenizer.json")
    if not file:
        return None
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    return tokenizer


def encode(model, config, text):
    """As `kvlab capture` does: by tokenizer.json, the model's first token in front but for Qwen."""
    try:
        if tokenizer := tokenizer_of(model):
            ids = tokenizer.encode(text).ids
        else:
            ids = transformers.AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    except Exception as error:
        raise Refused(f"--model {model}: no tokenizer: {one_line(error)}") from None
    wants_bos = isinstance(config.bos_token_id, int) and not config.model_type.startswith("qwen")
    if wants_bos and ids[:1] != [config.bos_token_id]:
        ids = [config.bos_token_id] + ids
    if not ids:
        raise Refused("--prompt: has no tokens; give some text")
    if max(ids) >= config.vocab_size:
        raise Refused(
            f"--model {model}: the tokenizer gives id {max(ids)}; the model's vocabulary is {config.vocab_size}"
        )
    return ids


def refuse_span(text, why):
    raise Refused(f"--span-of: {json.dumps(text if len(text) <= 60 else text[:60] + '...')} {why}")


def span_of(tokenizer, ids, text):
    """The fewest tokens that cover `text`, where it is once in what the tokens spell, less a special one in front."""
    first = 1 if tokenizer.decode(ids[:1]) == "" else 0

    def spelled(count):
        return tokenizer.decode(ids[first : first + count], skip_special_tokens=False)

    whole = spelled(len(ids) - first)
    begin = whole.find(text) if text else -1
    if begin < 0:
        refuse_span(text, "is not in the prompt; a text that is there once is expected")
    if whole.find(text, begin + 1) >= 0:
        refuse_span(text, "is there more than once; a text that is there once is expected")

    def fewest(length):
        """Tokens that spell so many characters. One whose bytes are not all there yet is spelled as another."""
        counts = range(len(ids) - first + 1)
        return bisect.bisect_left(counts, True, key=lambda count: spelled(count)[:length] == whole[:length])

    start, stop = fewest(begin), fewest(begin + len(text))
    if len(spelled(start)) > begin:  # the token in front reaches into the text
        start -= 1
    return {"name": span_name(text), "start": first + start, "tokens": stop - start}


def span_name(text):
    """Without control characters."""
    return "".join(" " if character < " " or character == "\x7f" else character for character in text)


def spans_of(model, ids, texts):
    if not texts:
        return []
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise Refused(f"--span-of: --model {model} has no tokenizer.json, which is needed")
    names = [span_name(text) for text in texts]
    for name in names:
        if names.count(name) > 1:
            refuse_span(name, "is given twice; once is enough")
    return [span_of(tokenizer, ids, text) for text in texts]


def columns_of(texts):
    """name -> function, from NAME=module:function each. Modules are looked for in the working directory too."""
    columns = {}
    for text in texts:
        parts = re.fullmatch(r"([A-Za-z0-9_.-]{1,64})=([A-Za-z0-9_.]+):(\w+)", text)
        if not parts:
            raise Refused(
                f"--column {text}: should read NAME=module:function, the name of letters, digits, '_', '-', '.'"
            )
        name, module, function = parts.groups()
        if name in COMPUTED_COLUMNS or name in columns:
            raise Refused(f"--column {name}: is {'given twice' if name in columns else 'computed by kvlab'}")
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            columns[name] = getattr(importlib.import_module(module), function)
        except Exception as error:
            raise Refused(f"--column {text}: {one_line(error)}") from None
    return columns


def add_columns(writer, columns):
    for name, function in columns.items():
        try:
            writer.add_column(name, function)
        except (Refused, OSError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise Refused(f"--column {name}: {type(error).__name__}: {one_line(error)}") from None


def add_options(parser):
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="checkpoint, or its name on the hub")
    add("--out", metavar="TRACE", required=True, help="the trace's directory, which is made")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="the prompt")
    text.add_argument("--prompt-file", metavar="FILE", help="a file that holds the prompt")
    add(
        "--max-new-tokens",
        metavar="N",
        type=whole_number(0),
        help="tokens to generate, at most; always the most likely (default: 100)",
    )
    add("--teacher-forced", action="store_true", help="decode the given text itself, instead of generating")
    add(
        "--prompt-tokens",
        metavar="P",
        type=whole_number(1),
        help="teacher-forced: so many of the text's tokens are the prompt",
    )
    add(
        "--max-tokens",
        metavar="T",
        type=whole_number(1),
        help="teacher-forced: use the first T tokens of the text (default: all)",
    )
    add(
        "--beyond-context",
        action="store_true",
        help="take a prompt that is longer than what the model was trained on",
    )
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="to compute in; auto: the checkpoint's")
    add("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    add(
        "--attention",
        choices=["sdpa", "eager", "flash_attention_2"],
        default=default_attention(),
        help="transformers' attn_implementation (default: sdpa, or eager where PyTorch is too old for it)",
    )
    add(
        "--chunk",
        metavar="N",
        type=whole_number(1),
        default=SHARD_TOKENS,
        help="tokens of a given text to feed at once (default: 1024)",
    )
    add(
        "--span-of",
        metavar="TEXT",
        action="append",
        default=[],
        help="a part of the prompt that is there once: the trace gets its tokens as a span; repeatable",
    )
    add(
        "--column",
        metavar="NAME=module:function",
        action="append",
        default=[],
        help="a number for each token, layer and KV head (docs/columns.md): function(q, k, v, layer); repeatable",
    )


def parse_arguments(argv):
    parser = Parser(prog="capture_hf.py", description="Captures a kvlab trace from a transformers model.")
    add_options(parser)
    arguments = parser.parse_args(argv)

    if arguments.teacher_forced:
        if arguments.prompt_tokens is None:
            parser.error("--prompt-tokens: missing; --teacher-forced needs --prompt-tokens P")
        if arguments.max_new_tokens is not None:
            parser.error("--max-new-tokens: generates, and --teacher-forced does not; leave out one of them")
    for name in ("prompt_tokens", "max_tokens"):
        if not arguments.teacher_forced and getattr(arguments, name) is not None:
            parser.error(f"--{name.replace('_', '-')}: comes with --teacher-forced only")
    refuse_missing_cuda(parser, arguments)
    if os.path.lexists(arguments.out):
        parser.error(f"--out {arguments.out}: exists already; a new folder is expected")
    return arguments


def describe(arguments, model, shape, spans):
    """What the manifest and every shard say alike."""
    dtype = name_of(model.dtype)
    tokenizer = file_of(arguments.model, "tokenizer.json")
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    return {
        "format": FORMAT,
        "model": pathlib.Path(arguments.model).resolve().name,
        "config": dataclasses.asdict(shape) | {"dtype": dtype, "rope": rope_parameters(model.config)},
        "rounding": "none" if dtype == "float32" else "model_dtype",
        "weights_xxh3": weights_xxh3(arguments.model),
        "tokenizer_xxh3": xxh3_of(tokenizer) if tokenizer else "",
        "spans": spans,
        "capture": {
            "engine": "transformers",
            "version": transformers.__version__,
            "device": device,
            "options": {
                "torch": torch.__version__,
                "attention": arguments.attention,
                "rope": "rotated in float32, rounded once",
                "teacher_forced": arguments.teacher_forced,
            },
        },
    }


def capture(hooked, arguments, ids):
    config, chunk = hooked.model.config, arguments.chunk
    if arguments.teacher_forced:
        hooked.feed(ids[: arguments.prompt_tokens], "prompt", chunk)
        if len(ids) > arguments.prompt_tokens:
            hooked.feed(ids[arguments.prompt_tokens :], "decode", chunk)
        return
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    hidden = hooked.feed(ids, "prompt", chunk)
    most = 100 if arguments.max_new_tokens is None else arguments.max_new_tokens
    for _ in range(most - 1):  # the last token is chosen and not fed
        token = hooked.most_likely(hidden)
        if token in ends:
            return
        hidden = hooked.feed([token], "decode", 1)


def refuse_beyond_context(arguments, config, ids):
    prompt, trained = arguments.prompt_tokens or len(ids), config.max_position_embeddings
    if prompt > trained and not arguments.beyond_context:
        raise Refused(
            f"--prompt: needs {prompt} positions; --model {arguments.model} was trained on {trained}, and so many"
            " tokens would fit; --beyond-context takes the prompt all the same"
        )


def run(arguments):
    config = load_config(arguments.model)
    refuse_unsupported(arguments.model, config)
    ids = encode(arguments.model, config, prompt_text(arguments))[: arguments.max_tokens]
    if arguments.teacher_forced and arguments.prompt_tokens > len(ids):
        raise Refused(f"--prompt-tokens: {arguments.prompt_tokens} is more than the text's {len(ids)} tokens")
    refuse_beyond_context(arguments, config, ids)
    spans = spans_of(arguments.model, ids, arguments.span_of)
    columns = columns_of(arguments.column)
    device = arguments.device or default_device()
    model = load_model(arguments.model, arguments.dtype, arguments.attention, device)
    shape = shape_of(model)
    rope = rope_of(model, shape)
    plain = plain_outputs(model, shape, ids[:PLAIN_TOKENS])
    sketch = output_sketch([module.o_proj.weight for module in attention_modules(model)])
    writer = TraceWriter(arguments.out, describe(arguments, model, shape, spans), rope, sketch, SEED)
    try:
        capture(HookedModel(model, shape, rope, writer, plain), arguments, ids)
        add_columns(writer, columns)
        writer.finish()
    except (
        Refused,
        OSError,
        safetensors.SafetensorError,
        torch.cuda.OutOfMemoryError,
        KeyboardInterrupt,
    ) as error:
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else one_line(error)
        raise Refused(f"{what}: --out {arguments.out} is unfinished{writer.abandon()}") from None
    except BaseException:
        writer.abandon()
        raise
    progress(len(writer.ids))
    print(f"{arguments.out}: {len(writer.ids)} tokens of {writer.description['model']}")


def main(argv=None):
    arguments = parse_arguments(argv)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with torch.inference_mode():
            run(arguments)
    except (Refused, OSError) as error:
        print(f"capture_hf.py: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
