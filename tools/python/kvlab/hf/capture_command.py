"""python -m kvlab.hf capture: captures a trace from a transformers model. See docs/guides/capture-from-transformers.md.

    python -m kvlab.hf capture --model DIR --prompt TEXT --max-new-tokens 200 --out TRACE
    python -m kvlab.hf capture --model DIR --prompt-file book.txt --teacher-forced --prompt-tokens 512 --out TRACE
"""

from __future__ import annotations

import argparse
import bisect
import importlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import transformers
from tokenizers import Tokenizer

from kvlab import _kvlab
from kvlab.hf.capturing import Feature, Fed, plan_of, write_capture
from kvlab.hf.command_line import Parser, announce_size, refuse_missing_cuda, whole_number
from kvlab.hf.models import (
    DTYPES,
    default_device,
    file_of,
    load_config,
    load_model,
    refuse_no_decoder,
    text_config,
)
from kvlab.hf.refused import Refused, one_line

PROGRAM = "kvlab.hf capture"


def progress(tokens: int) -> None:
    if sys.stderr.isatty():
        print(f"\rcapture: {tokens} tokens ", end="", file=sys.stderr, flush=True)


def prompt_text(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None:
        return str(arguments.prompt)
    try:
        return pathlib.Path(arguments.prompt_file).read_bytes().decode("utf-8")
    except OSError as error:
        raise Refused(f"--prompt-file {arguments.prompt_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is not UTF-8; give a text file in UTF-8"
        raise Refused(f"--prompt-file {arguments.prompt_file}: {wrong}") from None


def tokenizer_of(model: str) -> Any:
    """Loads the tokenizer from the checkpoint's tokenizer.json. None if there is no such file."""
    file = file_of(model, "tokenizer.json")
    if not file:
        return None
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    return tokenizer


def encode(model: str, config: Any, text: str) -> list[int]:
    """Encodes a text as `kvlab capture` does. A special token that the text already begins with is not added again."""
    try:
        if tokenizer := tokenizer_of(model):
            encoding = tokenizer.encode(text)
            ids, added = encoding.ids, encoding.special_tokens_mask
        else:
            auto = transformers.AutoTokenizer.from_pretrained(model)(text, return_special_tokens_mask=True)
            ids, added = auto["input_ids"], auto["special_tokens_mask"]
    except Exception as error:
        raise Refused(f"--model {model}: its tokenizer cannot be loaded: {one_line(error)}") from None
    first = (added + [0]).index(0)
    before, own = ids[:first], ids[first:]
    twice = [a == b for a, b in zip(before, own)] + [False]
    ids = [int(id) for id in before + own[twice.index(False) :]]
    if not ids:
        raise Refused("--prompt: the text has no tokens; give some text")
    if max(ids) >= config.vocab_size:
        known = f"the model's vocabulary has {config.vocab_size} ids"
        raise Refused(f"--model {model}: the tokenizer gives id {max(ids)}, but {known}")
    return ids


def refuse_passage(text: str, why: str) -> NoReturn:
    raise Refused(f"--passage: {json.dumps(text if len(text) <= 60 else text[:60] + '...')} {why}")


def passage_of(tokenizer: Any, ids: list[int], text: str) -> dict[str, Any]:
    """Returns the shortest range of tokens that covers `text`, which must occur exactly once in the decoded text. A
    special token at the start is ignored."""
    first = 1 if tokenizer.decode(ids[:1]) == "" else 0

    def decoded(count: int) -> str:
        return str(tokenizer.decode(ids[first : first + count], skip_special_tokens=False))

    if not text:
        raise Refused("--passage: is empty; give a value, or leave the option out")
    whole = decoded(len(ids) - first)
    begin = whole.find(text)
    if begin < 0:
        refuse_passage(text, "is not in the prompt; give a text that appears in it once")
    if whole.find(text, begin + 1) >= 0:
        refuse_passage(text, "appears in the prompt more than once; give a text that appears in it once")

    def fewest(length: int) -> int:
        """The smallest number of tokens that decode to the first `length` characters. If tokens end in the middle of a
        character's bytes, the tokenizer decodes a replacement character, so more tokens are needed."""
        counts = range(len(ids) - first + 1)
        return bisect.bisect_left(counts, True, key=lambda count: decoded(count)[:length] == whole[:length])

    start, stop = fewest(begin), fewest(begin + len(text))
    if len(decoded(start)) > begin:  # the token before `start` contains the beginning of the text
        start -= 1
    return {"name": _kvlab.without_controls(text), "start": first + start, "tokens": stop - start}


def passages_of(model: str, ids: list[int], texts: Sequence[str]) -> list[dict[str, Any]]:
    if not texts:
        return []
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise Refused(f"--passage: needs tokenizer.json, which --model {model} does not have")
    names = [_kvlab.without_controls(text) for text in texts]
    for name in names:
        if names.count(name) > 1:
            refuse_passage(name, "is given twice; once is enough")
    return [passage_of(tokenizer, ids, text) for text in texts]


def features_of(texts: Sequence[str]) -> dict[str, Feature]:
    """Returns {name: function} for texts of the form NAME=module:function. Modules may be in the working directory."""
    features: dict[str, Feature] = {}
    for text in texts:
        parts = re.fullmatch(r"([A-Za-z0-9_.-]{1,64})=([A-Za-z0-9_.]+):(\w+)", text)
        if not parts:
            right = "should read NAME=module:function; NAME may have letters, digits, '_', '-' and '.'"
            raise Refused(f"--feature {text}: {right}")
        name, module, function = parts.groups()
        if name in _kvlab.built_in_features()[:4] or name in features:
            raise Refused(f"--feature {name}: is {'given twice' if name in features else 'computed by kvlab'}")
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            features[name] = getattr(importlib.import_module(module), function)
        except Exception as error:
            raise Refused(f"--feature {text}: {one_line(error)}") from None
    return features


def add_options(parser: Parser) -> None:
    add = parser.add_argument

    def number(name: str, letter: str, min_value: int, text: str, default: int | None = None) -> None:
        add(name, metavar=letter, type=whole_number(min_value), default=default, help=text)

    def repeated(name: str, metavar: str, text: str) -> None:
        add(name, metavar=metavar, action="append", default=[], help=f"{text}; may be given several times")

    add("--model", metavar="DIR", required=True, help="checkpoint directory, or its name on the hub")
    add("--out", metavar="TRACE", required=True, help="directory of the trace; it must not exist yet")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="the prompt")
    text.add_argument("--prompt-file", metavar="FILE", help="a file that holds the prompt")
    number("--max-new-tokens", "N", 0, "maximum number of tokens to generate, greedily (default: 100)")
    add("--teacher-forced", action="store_true", help="decode the given text instead of generated tokens")
    number("--prompt-tokens", "P", 1, "--teacher-forced: number of tokens of the text that form the prompt")
    number("--max-tokens", "T", 1, "--teacher-forced: use the first T tokens of the text (default: all)")
    longer = "allow a prompt longer than the context that the model was trained on"
    add("--beyond-context", action="store_true", help=longer)
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="dtype to compute in; auto: the checkpoint's")
    add("--device", choices=["cuda", "cpu"], help="device to run on (default: cuda if there is a device)")
    attention = "attn_implementation with which transformers loads the model; its results check the capture"
    add("--attention", choices=["sdpa", "eager", "flash_attention_2"], help=attention)
    chunk = "number of tokens of a given text to feed at once (default: 1024)"
    number("--chunk", "N", 1, chunk, default=_kvlab.shard_tokens)
    repeated("--passage", "TEXT", "a text that appears in the prompt once; the trace stores its tokens as a passage")
    feature = "a number for each token, layer and KV head (docs/reference/configurations.md): function(q, k, v, layer)"
    repeated("--feature", "NAME=module:function", feature)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description="Captures a kvlab trace from a transformers model.")
    add_options(parser)
    arguments = parser.parse_args(argv)

    if arguments.teacher_forced:
        if arguments.prompt_tokens is None:
            parser.error("--prompt-tokens: missing; --teacher-forced needs --prompt-tokens P")
        if arguments.max_new_tokens is not None:
            parser.error("--max-new-tokens: with --teacher-forced nothing is generated; leave out one of the two "
                "options")
    for name in ("prompt_tokens", "max_tokens"):
        if not arguments.teacher_forced and getattr(arguments, name) is not None:
            parser.error(f"--{name.replace('_', '-')}: requires --teacher-forced")
    refuse_missing_cuda(parser, arguments)
    if os.path.lexists(arguments.out):
        parser.error(f"--out {arguments.out}: exists already; give a new directory")
    return arguments


def refuse_beyond_context(arguments: argparse.Namespace, config: Any, ids: list[int]) -> None:
    prompt, trained = arguments.prompt_tokens or len(ids), getattr(config, "max_position_embeddings", None)
    if isinstance(trained, int) and prompt > trained and not arguments.beyond_context:
        raise Refused(
            f"--prompt: has {prompt} tokens, but --model {arguments.model} was trained on at most {trained}; give a"
            " shorter prompt, or --beyond-context to take this one"
        )


def run(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.model)
    refuse_no_decoder(arguments.model, config)
    config = text_config(config)
    ids = encode(arguments.model, config, prompt_text(arguments))[: arguments.max_tokens]
    if arguments.teacher_forced and arguments.prompt_tokens > len(ids):
        raise Refused(f"--prompt-tokens: {arguments.prompt_tokens} is more than the text's {len(ids)} tokens")
    refuse_beyond_context(arguments, config, ids)
    passages = passages_of(arguments.model, ids, arguments.passage)
    features = features_of(arguments.feature)
    device = arguments.device or default_device()
    model = load_model(arguments.model, arguments.dtype, arguments.attention, device)
    max_new_tokens = 100 if arguments.max_new_tokens is None else arguments.max_new_tokens
    fed = Fed(ids, arguments.prompt_tokens, max_new_tokens, arguments.chunk)
    name = pathlib.Path(arguments.model).resolve().name
    plan = plan_of(model, fed)
    shape, tokens = plan.shape, len(ids) + (0 if arguments.teacher_forced else max_new_tokens)
    rows = tokens * shape.layers * (shape.query_heads + 2 * shape.kv_heads) * shape.head_size
    announce_size(PROGRAM, f"trace into {arguments.out}", rows * torch.finfo(model.dtype).bits / 8)
    try:
        fed_tokens = write_capture(plan, fed, arguments.out, name, arguments.model, passages, features, progress)
    except KeyboardInterrupt as interrupted:
        raise Refused(str(interrupted) or "interrupted") from None
    progress(fed_tokens)
    if unsafe := _kvlab.Trace.open(arguments.out, False, None).key_quantization_warning:
        print(f"{PROGRAM}: {unsafe}", file=sys.stderr)
    print(f"{arguments.out}: {fed_tokens} tokens of {_kvlab.without_controls(name)}")


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    with torch.inference_mode():
        run(arguments)
    return 0
