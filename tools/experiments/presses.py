#!/usr/bin/env python3
"""Compares presses of kvpress, run by transformers, with kvlab's policies on the same questions (docs/results/presses.md).

Needs PyTorch and kvpress, in a separate Python environment, because kvpress needs an older transformers.
"""

import json
import pathlib
import re
import sys

import kvpress
import tokenizers
import torch
import transformers
from experiment import Experiment, Refused, main, name_of_model, table
from leaderboard import clopper_pearson
from leaderboard_page import number

QUESTION = """
This page asks whether presses of kvpress, run by transformers, answer as many questions as kvlab's policies do. The
question is a part of the prompt (`--query-aware`). Both evict once, at the end of the prompt, keep all tokens of the
answer, and use positions in the text. The budget of kvlab's policies is `ratio(R)`, where R is kvpress's compression
ratio.

- **kvpress**: the press's own `compress`, in the model of transformers in float32, for the token ids that `kvlab
  task` wrote to `questions.jsonl`.
- **kvlab**: `kvlab task` with the policy that [ranks tokens in the same
  way](../reference/policies.md#compared-with-other-implementations).

Answers are decoded greedily and judged by the same rule. Numbers in parentheses are 95% intervals (Clopper and
Pearson). "Same answer" is the share of questions for which both decode the same text.

Two pairs differ on purpose. `KeyDiffPress` compares keys after RoPE, and `keydiff` before it. `LagKVPress` gives many
tokens equal scores and does not say which of them it evicts; `lagkv` evicts the oldest.
"""
# The press, and kvlab's policy with the same order of tokens. No two policies have the same name.
PAIRS = [
    (kvpress.SnapKVPress, "snapkv:window=64:recent=64"),
    (kvpress.TOVAPress, "tova:once:scope=layer:recent=2"),
    (kvpress.ObservedAttentionPress, "h2o_mean:recent=0:once"),
    (kvpress.ExpectedAttentionPress, "expected_attention:once"),
    (kvpress.StreamingLLMPress, "sink:once"),
    (kvpress.KeyDiffPress, "keydiff:once"),  # the press compares keys after RoPE, the policy before
    (kvpress.KnormPress, "knorm:once"),
    (kvpress.LagKVPress, "lagkv:once"),
]
RATIOS = [0.5, 0.75]
DEPTHS = ["10%", "50%", "90%"]


def tasks(experiment):
    """{name: words of the command}, with about --answers questions each, or the one that --task names."""
    count = experiment.arguments.answers
    words = experiment.quick(["40"], ["250", "500"])
    points = len(words) * len(DEPTHS)
    ruler = experiment.quick("niah_single_1", "niah_single_2")  # the first one fits into few tokens
    found = {
        "passkey": ["passkey", "--words", ",".join(words), "--depth", ",".join(DEPTHS), "--samples", -(-count // points)],
        ruler: ["ruler", "--tasks", ruler, "--length", experiment.quick(384, 1024), "--samples", count],
    }
    return {name: words for name, words in found.items() if experiment.arguments.task in (None, words[0])}


class Compressed:
    """Runs the presses in one forward pass over a prompt. A press compresses keys and values after the layer's attention
    over them, so all presses can compress those of one pass."""

    def __init__(self, model, presses):
        self.model, self.presses = model, presses
        self.parts = {}  # {(ratio, layer): keys and values of all presses, [press, kv_head, slot, dim]}
        # What a press's own context manager prepares.
        for press in presses:
            press.post_init_from_model(model)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb

    def hook(self, module, _, words, output):
        layer = module.layer_idx
        keys, values = words["past_key_values"].layers[layer].keys, words["past_key_values"].layers[layer].values
        for ratio in RATIOS:
            found = []
            for press in self.presses:
                press.compression_ratio = ratio
                found.append(press.compress(module, words["hidden_states"], keys, values, output[1], words))
            self.parts[ratio, layer] = tuple(torch.cat(side) for side in zip(*found))

    def read(self, prompt):
        """Reads a prompt. Returns the token that the model decodes after it, for which nothing is evicted yet."""
        hooks = [layer.self_attn.register_forward_hook(self.hook, with_kwargs=True) for layer in self.model.model.layers]
        try:
            cache = transformers.DynamicCache()
            return self.model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax()
        finally:
            for hook in hooks:
                hook.remove()

    def cache(self, ratio):
        """A cache in which each press has a row."""
        cache = transformers.DynamicCache()
        for layer in range(len(self.model.model.layers)):
            cache.update(*self.parts[ratio, layer], layer)
        return cache


def judged(question, said, ended):
    """Whether an answer is right, or None while more text could change that. `kvlab task` judges by the same rule."""
    expected = question["expected"]
    if question["matching"] == "strings":
        return True if all(text.lower() in said.lower() for text in expected) else False if ended else None
    numbers = re.findall(r"\d+" if ended else r"\d+(?=\D)", said)[: len(expected)]
    return sorted(numbers) == sorted(expected) if ended or len(numbers) == len(expected) else None


def answers(model, tokenizer, question, first, cache):
    """Decodes the answer to a question from each row of a cache. `first`: the first token of the answer. Returns for each
    row whether it is right, and its text."""
    ends = torch.tensor(model.config.eos_token_id).flatten().tolist()
    ids = first.expand(len(PAIRS), 1)
    said, right = [[] for _ in PAIRS], [None for _ in PAIRS]
    position = len(question["context"] + question["question"])  # in the text, although the cache has fewer tokens
    while True:
        for row, token in enumerate(ids[:, 0].tolist()):
            if right[row] is None:
                ended = token in ends
                said[row] += [token] * (not ended)
                ended |= len(said[row]) == question["max_new_tokens"]
                right[row] = judged(question, tokenizer.decode(said[row]), ended)
        if None not in right:
            return list(zip(right, map(tokenizer.decode, said)))
        positions = torch.full_like(ids, position)
        ids = model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits[:, -1:].argmax(-1)
        position += 1


@torch.no_grad()
def by_presses(directory, questions):
    """Returns {(press, ratio): for each answer, whether it is right, and its text}"""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = tokenizers.Tokenizer.from_file(str(pathlib.Path(directory) / "tokenizer.json"))
    compressed = Compressed(model, [make() for make, _ in PAIRS])
    found = {(make.__name__, ratio): [] for make, _ in PAIRS for ratio in RATIOS}
    for count, question in enumerate(questions, 1):
        first = compressed.read(question["context"] + question["question"])
        for ratio in RATIOS:
            for (make, _), answer in zip(PAIRS, answers(model, tokenizer, question, first, compressed.cache(ratio))):
                found[make.__name__, ratio].append(answer)
        print(f"{count} of {len(questions)} questions", file=sys.stderr)
    return found


def by_policies(experiment, out):
    """Returns {(name of a policy, ratio): for each answer, whether it is right, and its text}"""
    found = {}
    for row in experiment.rows(out / "answers.csv"):
        if row["policy"] == "full":
            continue
        ratio = float(row["budget"].removeprefix("ratio(").removesuffix(")"))
        found.setdefault((row["policy"], ratio), []).append((row["right"] == "1", row["said"]))
    return found


def share(answers):
    """The share of right answers, and its interval."""
    right = sum(is_right for is_right, _ in answers)
    return right / len(answers), clopper_pearson(right, len(answers))


def cell(answers):
    value, (low, high) = share(answers)
    return f"{number(value)} ({number(low)} to {number(high)})"


def compare(experiment, directory, words):
    """A table with a row for each press."""
    experiment.model = directory
    policies = ",".join(policy for _, policy in PAIRS)
    budgets = ",".join(f"ratio({ratio})" for ratio in RATIOS)
    out = experiment.kvlab(
        ["task", *map(str, words)], "--model", directory, "--policy", policies, "--budget", budgets, "--positions", "original", "--query-aware",
    )  # fmt: skip
    questions = [json.loads(line) for line in (out / "questions.jsonl").read_text().splitlines()]
    ours, theirs = by_policies(experiment, out), by_presses(directory, questions)
    lines, inside, both = [], 0, 0
    for make, policy in PAIRS:
        line = [f"`{make.__name__}`", f"`{policy}`"]
        for ratio in RATIOS:
            own, other = ours.get((policy.partition(":")[0], ratio)), theirs[make.__name__, ratio]
            if not own:
                line += [cell(other), "-", "-"]
                continue
            # Decoding stops when an answer is decided, in one of them perhaps a few tokens later.
            same = sum(one.startswith(text) or text.startswith(one) for (_, one), (_, text) in zip(own, other))
            line += [cell(other), cell(own), f"{same / len(own):.0%}"]
            low, high = share(own)[1]
            both += 1
            inside += low <= share(other)[0] <= high
        lines.append(line)
    header = ["press", "policy", *(f"{what} at ratio {ratio}" for ratio in RATIOS for what in ("kvpress", "kvlab", "same answer"))]
    text = f"{len(questions)} questions. {inside} of {both} shares of kvpress are within the 95% interval of kvlab."
    if both < len(lines) * len(RATIOS):
        text += ' "-": protected tokens exceed the budget of some questions.'
    return f"{text}\n\n{table(header, lines)}"


def arguments(parser):
    parser.add_argument("--task", choices=["passkey", "ruler"], help="default: both")
    parser.add_argument("--answers", type=int, default=100, help="minimum number of questions of each task (default: 100)")


def presses():
    experiment = Experiment(__doc__.splitlines()[0], models=True, arguments=arguments)
    if experiment.arguments.answers < 1:
        raise Refused("--answers: give at least 1")
    for directory in experiment.models:
        for name, words in tasks(experiment).items():
            experiment.section(f"## `{name}` on {name_of_model(directory)}\n\n" + compare(experiment, directory, words))
    experiment.write("Presses of kvpress", QUESTION, reads_texts=False)


main(presses)
