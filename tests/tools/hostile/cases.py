"""The kinds of cases. Each writes files to the current folder and returns the command that reads them."""

import dataclasses
import json
import random
import shutil
import struct
from pathlib import Path

import mutations as m
from bases import PROMPT


@dataclasses.dataclass
class Case:
    words: list[str]
    then: list[str] = dataclasses.field(default_factory=list)  # the next command, which runs if the first exits with 0
    writes_inputs: bool = False  # whether the command may change its inputs if it succeeds, as `trace seal` does


FORMS = ["16", "fp8", "8", "4", "k4v2", "2", "kivi4", "kivi2", "3", "fp8_e4m3", "nvfp4", "q8_0", "q4_1", "int4_g64", "int2_g64", "16/int4_g64", "8/x", "/",
         "5", "", "16:", "x"]  # fmt: skip
ENGINES = ["vllm", "llama.cpp", "tensorrt-llm", "transformers", "x"]
POLICIES = ["h2o", "lru", "window", "sink", "tova", "full", "random", "streaming_h2o", "h2o*lru", "snapkv", "x", "oracle", "ada(16)"]
UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "%bytes", "%", "t", " KiB", "kib", ""]


def link(source, name, but=()):
    """Makes a folder `name` with links to the files of `source` except those in `but`."""
    folder = Path(name)
    folder.mkdir()
    for file in source.iterdir():
        if file.name not in but:
            (folder / file.name).symlink_to(file)
    return folder


def some_replay(rng, bases, trace, policy, budget, more=()):
    return ["replay", "--trace", str(trace), "--policy", policy, "--budget", budget, "--out", "out", *more]


def any_loop(rng, bases, policy, budget, more=()):
    """Returns a random command that takes a policy and a budget."""
    common = ["--policy", policy, "--budget", budget, *more]
    kind = rng.randrange(6)
    if kind == 0:
        return ["generate", "--model", str(bases.windows), "--prompt", PROMPT, "--max-new-tokens", "3", *common]
    if kind == 1:
        text = str(bases.folder / "text")
        return ["eval", "--model", str(bases.windows), "--text", text, "--max-tokens", "50", "--prompt-tokens", "30", *common, "--out", "out"]
    if kind == 2:
        return ["verify", "--model", str(bases.windows), "--prompt", PROMPT, "--max-new-tokens", "3", *common]
    return some_replay(rng, bases, m.pick(rng, bases.trace2, bases.trace3), policy, budget, more)


def plan(rng):
    form = ["16", "fp8", "8", "4", "k4v2", "2"]
    if rng.random() < 0.25:  # a valid plan
        tiers = sorted(rng.sample(range(6), rng.randrange(1, 5)))
        parts = [f"{form[t]}:{rng.choice(('1t', '4t', '8t', '25%'))}" for t in tiers[:-1]]
        left = 100 - 25 * sum(p.endswith("%") for p in parts)
        return ",".join([*parts, f"{form[tiers[-1]]}:{left}%"])
    count = rng.choice((1, 2, 3, 8, 16, 17, 255, 256, 257, 400, 5000))
    text = ",".join(f"{rng.choice(FORMS if rng.random() < 0.1 else form[:1])}:{m.number(rng) if rng.random() < 0.1 else 1}{rng.choice('t%') if rng.random() < 0.2 else 't'}"
                    for _ in range(count))  # fmt: skip
    text += rng.choice((",4:100%", ",4:100%", "", ",,", "+2@100%"))
    if rng.random() < 0.15:  # formats by layer
        runs = [f"{rng.choice(FORMS)}x{m.number(rng) if rng.random() < 0.2 else rng.choice((1, 2, 4))}" for _ in range(rng.choice((1, 2, 300)))]
        text = "-".join(runs)
    return m.text(rng, text) if rng.random() < 0.5 else text


def tiers(rng, bases):
    text = plan(rng)
    if rng.random() < 0.3:
        return Case(any_loop(rng, bases, f"h2o:tiers={text.replace(',', '+').replace(':', '@')}"[:120_000], "16"))
    more = ["--tiers", text[:120_000]]
    if rng.random() < 0.2:
        more += ["--centre", m.pick(rng, "prompt", "none", m.text(rng, "prompt"))]
    if rng.random() < 0.1:
        more *= rng.choice((2, 40))
    return Case(any_loop(rng, bases, rng.choice(POLICIES[:8]), m.pick(rng, "16", "16", "50%", "4KiB", m.number(rng)), more))


def byte_budgets(rng, bases):
    def budget():
        one = m.number(rng) + rng.choice(UNITS)
        return f"{rng.choice(('pyramid', 'ada', 'ratio', 'x'))}({one})" if rng.random() < 0.25 else one

    text = ",".join(budget() for _ in range(rng.choice((1, 1, 2, 5, 300))))
    more = ["--tiers", rng.choice(("4", "8", "16:4t,4:100%"))] if rng.random() < 0.3 else []
    return Case(any_loop(rng, bases, rng.choice(POLICIES), text, more))


def policies(rng, bases):
    settings = ["sinks=4", "recent=25%", "every=8", "smooth=5", "pool=max", "scope=layer", "once", "prompt", "tiers=4", "centre=prompt", "group=max"]
    text = ":".join([rng.choice(POLICIES), *rng.sample(settings, rng.randrange(4))])
    for _ in range(rng.choice((0, 0, 1, 6))):
        text += "*" + rng.choice(POLICIES)
    text = ",".join([m.text(rng, text)] * rng.choice((1, 1, 2, 3000)))
    return Case(any_loop(rng, bases, text[:120_000], m.pick(rng, "16", "8,16", "100%", ",".join(map(str, range(2, 3000))))))


def trace3(rng, bases):
    source = m.pick(rng, bases.trace3, bases.trace3, bases.trace2)
    name = rng.choice(("manifest.json", "manifest.json", "manifest.json", "tokens.safetensors", "shard-00000.safetensors"))
    folder = link(source, "trace", (name,))
    data = (source / name).read_bytes()
    changed = m.json_text(rng, json.loads(data)) if name.endswith(".json") else m.tensors(rng, data)
    (folder / name).write_bytes(changed)
    if rng.random() < 0.5:
        return Case(["trace", rng.choice(("info", "verify")), "trace"])
    return Case(some_replay(rng, bases, "trace", "h2o", "16"))


def seal(rng, bases):
    """Changes files of a trace without a manifest. `trace seal` computes checksums of the changed files, so that
    commands read them."""
    source = m.pick(rng, bases.trace3, bases.trace2)
    folder = Path("trace")
    shutil.copytree(source, folder)
    (folder / "manifest.json").unlink()
    for name in rng.sample(("tokens.safetensors", "shard-00000.safetensors"), rng.choice((1, 1, 2))):
        data = (folder / name).read_bytes()
        if name.startswith("shard") and rng.random() < 0.6:  # changes the shard's metadata about its trace
            size = struct.unpack("<Q", data[:8])[0]
            header = json.loads(data[8 : 8 + size])
            said = header["__metadata__"]
            key = rng.choice(list(said))
            if said[key][:1] in "[{":
                said[key] = m.json_text(rng, json.loads(said[key])).decode("utf-8", "replace")
            else:
                said[key] = str(m.value(rng))[:200]
            text = json.dumps(header).encode("utf-8", "replace")
            (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        else:
            (folder / name).write_bytes(m.tensors(rng, data))
    then = m.pick(rng, ["trace", "verify", "trace"], some_replay(rng, bases, "trace", "h2o", "16"))
    return Case(["trace", "seal", "trace"], then, True)


def policy_file(rng, bases):
    base = json.loads((bases.folder / "policy.json").read_text())
    base["tiers"] = plan(rng)[:100_000] if rng.random() < 0.3 else base.get("tiers", "16")
    if rng.random() < 0.2:
        base["centre"] = m.pick(rng, "prompt", "none", m.text(rng, "prompt"))
    changed = m.json_text(rng, base) if rng.random() < 0.85 else json.dumps(base).encode()
    Path("policy.json").write_bytes(changed)
    model = ["--model", str(bases.windows), "--policy-file", "policy.json"]
    if rng.random() < 0.7:
        return Case(["generate", *model, "--prompt", PROMPT, "--max-new-tokens", "3"])
    return Case(["verify", *model, "--prompt", PROMPT, "--max-new-tokens", "3"])


def budget_file(rng, bases):
    Path("b.json").write_bytes(m.json_text(rng, json.loads((bases.folder / "budgets.json").read_text())))
    return Case(any_loop(rng, bases, rng.choice(("h2o", "lru", "h2o:scope=layer")), "@b.json"))


def model_config(rng, bases):
    folder = link(bases.windows, "model", ("config.json",))
    config = json.loads((bases.windows / "config.json").read_text())
    if rng.random() < 0.4:
        foreign = ["quantization_config", "rope_scaling", "rope_parameters", "auto_map", "text_config", "attn_logit_softcapping",
                   "eos_token_id", "bos_token_id", "layer_types", "num_local_experts", "mlp_only_layers", "architectures"]  # fmt: skip
        config[rng.choice(foreign)] = m.value(rng)
    else:
        m.change_json(rng, config)
    (folder / "config.json").write_bytes(m.written(config).encode("utf-8", "replace"))
    return Case(["generate", "--model", "model", "--prompt", "hi there", "--max-new-tokens", "2"])


def weights(rng, bases):
    folder = link(bases.windows, "model", ("model.safetensors",))
    data = (bases.windows / "model.safetensors").read_bytes()
    if rng.random() < 0.25:
        names = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
        (folder / "part.safetensors").write_bytes(data)
        (folder / "model.safetensors.index.json").write_bytes(m.json_text(rng, index))
    else:
        (folder / "model.safetensors").write_bytes(m.tensors(rng, data))
    return Case(["generate", "--model", "model", "--prompt", "hi there", "--max-new-tokens", "2"])


def tokenizer(rng, bases):
    vocab = {chr(c): i for i, c in enumerate(range(33, 127))} | {"Ġ": 94, "th": 95, "the": 96, "<s>": 97}
    base = {
        "added_tokens": [{"id": 97, "content": "<s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": rng.choice((r"\p{N}", r"(a+)+$", r"(?=x)", "((((", r"\s+|\S+", "(?:" * 300))}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": rng.random() < 0.5}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["t h", "th e"], "byte_fallback": False, "ignore_merges": False},
    }  # fmt: skip
    folder = link(bases.windows, "model", ("tokenizer.json",))
    (folder / "tokenizer.json").write_bytes(m.json_text(rng, base))
    return Case(["generate", "--model", "model", "--prompt", "the " + "a" * 40, "--max-new-tokens", "2"])


def run_files(rng, bases):
    names = [f.name for f in (bases.folder / "run").iterdir()]
    name = rng.choice([n for n in names if not n.endswith(".html")])
    folder = link(bases.folder / "run", "run", (name,))
    data = (bases.folder / "run" / name).read_bytes()
    (folder / name).write_bytes(m.json_text(rng, json.loads(data)) if name.endswith(".json") else m.raw(rng, data))
    return Case(m.pick(rng, ["report", "run", "--out", "out.html"], ["deploy", "run", "--budget", "16", "--out", "out.json"],
                       ["compare", "run", str(bases.folder / "run")], ["plan", "run", "--by", "head", "--budget", "16", "--out", "out.json"]))  # fmt: skip


def plan_file(rng, bases):
    data = (bases.folder / m.pick(rng, "kvlab.json", "transformers.json")).read_bytes()
    Path("plan.json").write_bytes(m.json_text(rng, json.loads(data)) if rng.random() < 0.8 else m.raw(rng, data))
    if rng.random() < 0.5:
        return Case(["export", "plan.json", "--for", rng.choice(ENGINES)])
    return Case(any_loop(rng, bases, "full", "100%", ["--tiers", m.pick(rng, "@plan.json", "@plan.json", "@plan.json", "@", "@none")]))


def centre_file(rng, bases):
    Path("c.safetensors").write_bytes(m.tensors(rng, (bases.folder / "centre.safetensors").read_bytes()))
    centre = m.pick(rng, "@c.safetensors", "@c.safetensors", "@c.safetensors", "@.", "@none", m.text(rng, "@c.safetensors"))
    policy, budget = m.pick(rng, ("full", "100%"), ("h2o", "16"))
    more = ["--policy", policy, "--budget", budget, "--tiers", m.pick(rng, "4", "4", "16:4t,4:100%"), "--centre", centre]
    if rng.random() < 0.6:
        model, trace = m.pick(rng, (bases.tiny, bases.trace2), (bases.tiny, bases.trace2), (bases.windows, bases.trace3))
        if rng.random() < 0.5:
            return Case(["replay", "--trace", str(trace), *more, "--out", "out"])
        return Case(["generate", "--model", str(model), "--prompt", PROMPT, "--max-new-tokens", "3", *more])
    policy = json.loads((bases.folder / "policy.json").read_text()) | {"tiers": "4", "centre": centre}
    Path("policy.json").write_text(json.dumps(policy))
    return Case(["generate", "--model", str(bases.tiny), "--prompt", PROMPT, "--max-new-tokens", "3", "--policy-file", "policy.json"])


def plan_request(rng, bases):
    """A plan from a correct or a changed trace. Some are confirmed by an evaluation, and exported."""

    def one(good, likely=0.8):
        return good if rng.random() < likely else m.pick(rng, m.number(rng), m.text(rng, good))

    model, captured = m.pick(rng, (bases.windows, bases.trace3), (bases.tiny, bases.trace2))
    trace = captured
    if rng.random() < 0.2:
        trace = link(captured, "trace", ("manifest.json",))
        (trace / "manifest.json").write_bytes(m.json_text(rng, json.loads((captured / "manifest.json").read_bytes())))
    formats = m.pick(rng, "kvlab", "cuda", *ENGINES, ",".join(rng.choices(FORMS, k=rng.choice((1, 3, 300)))))
    words = ["plan", "--trace", str(trace), "--budget", one(m.pick(rng, "5bits", "25%bytes", "16bits")), "--formats", one(formats), "--out", "plan.json"]
    if rng.random() < 0.3:
        words += ["--centre", one("prompt"), "--queries", one("all")]
    if rng.random() < 0.2:
        words += ["--centre-out", one("c.safetensors")]
    if rng.random() < 0.6:
        if rng.random() < 0.7:
            Path("text").write_text(PROMPT * 3)
        else:
            Path("text").write_bytes(m.raw(rng, PROMPT.encode()))
        words += ["--confirm", "--model", str(model), "--text", "text", "--max-tokens", one("64")]
    return Case(words, ["export", "plan.json", "--for", rng.choice(ENGINES)])


def link_file(rng, bases):
    data = (bases.folder / "link.json").read_bytes()
    Path("link.json").write_bytes(m.json_text(rng, json.loads(data)) if rng.random() < 0.8 else m.raw(rng, data))
    return Case(["predict", "--link", "link.json", "--model", str(bases.windows), "--context", "600", "--selected", "64", "--fetch-rate", "5%",
                 "--device-memory", "1GiB", *m.pick(rng, [], ["--json"])])  # fmt: skip


def scores(rng, bases):
    name = rng.choice([file.name for file in (bases.folder / "eval").iterdir()])
    folder = link(bases.folder / "eval", "eval", (name,))
    data = (bases.folder / "eval" / name).read_bytes()
    (folder / name).write_bytes(m.json_text(rng, json.loads(data)) if name.endswith(".json") else m.raw(rng, data))
    return Case(m.pick(rng, ["report", "eval", "--out", "out.html"], ["compare", "eval", str(bases.folder / "eval")]))


def texts(rng, bases):
    Path("text").write_bytes(m.raw(rng, (PROMPT * 3).encode()) + rng.choice((b"", b"\0" * 50, b"\xff" * 50, b" " * 5000, b"\xef\xbb\xbf")))
    return Case(["eval", "--model", str(bases.windows), "--text", "text", "--max-tokens", "60", "--prompt-tokens", "20", "--policy", "h2o",
                 "--budget", "16", "--out", "out"])  # fmt: skip


COMMANDS = {
    "replay": "trace policy budget tiers centre prefill positions queries request-threshold threads seed output-error layers out",
    "generate": "model prompt policy budget tiers centre prefill positions max-new-tokens seed temperature top-k top-p threads device turn",
    "eval": "model text policy budget tiers centre max-tokens prompt-tokens seed threads out by",
    "capture": "model prompt max-new-tokens prompt-tokens out threads seed gradients passages",
    "task": "model policy budget samples words seed out threads",
    "tune": "model text budget policy max-tokens prompt-tokens out seed metric share",
    "trace": "threads json",
    "report": "out budget figures model json",
    "policies": "json policy",
    "verify": "model prompt policy budget max-new-tokens tiers",
    "allocate": "budget out metric",
    "export": "plan for json",
    "plan": "run by policy trace budget formats centre centre-out queries metric confirm model text max-tokens out threads json",
    "deploy": "budget out model metric",
    "compare": "metric out json",
    "bench": "threads json",
    "predict": "link model batch context selected page fetch-rate buffer layer-us device-memory host-memory json",
    "x": "y",
}


def command_lines(rng, bases):
    command = rng.choice(list(COMMANDS))
    good = {"model": str(bases.windows), "trace": str(bases.trace3), "text": str(bases.folder / "text"), "prompt": "hi there", "policy": "h2o",
            "budget": "16", "max-new-tokens": "2", "prompt-tokens": "20", "max-tokens": "40", "out": "out", "samples": "1", "words": "20",
            "link": str(bases.folder / "link.json"), "context": "600", "selected": "64", "fetch-rate": "5%", "device-memory": "1GiB",
            "host-memory": "1GiB"}  # fmt: skip
    words = [m.text(rng, command) if rng.random() < 0.05 else command]
    if command == "task":
        words.append(m.pick(rng, "passkey", "needle", "recall", "x"))
    if command == "trace":
        words += [m.pick(rng, "info", "verify", "x"), str(m.pick(rng, bases.trace3, bases.windows, "none"))]
    if command in ("report", "allocate", "deploy", "compare"):
        words.append(str(m.pick(rng, bases.folder / "run", bases.trace3, "none")))
    options = COMMANDS[command].split()
    for option in rng.sample(options, rng.randrange(len(options) + 1)):
        value = good.get(option, "1") if rng.random() < 0.7 else m.pick(rng, m.number(rng), m.text(rng, good.get(option, "16")))
        if option in ("max-new-tokens", "max-tokens", "samples", "words") and value.strip().isdigit():
            value = str(min(int(value), 40))  # larger values would only take longer
        words += [f"--{m.text(rng, option) if rng.random() < 0.03 else option}", value]
    return Case([word.replace("\0", "")[:100_000] for word in words])


KINDS = {tiers: 16, byte_budgets: 11, policies: 8, trace3: 14, seal: 8, policy_file: 12, budget_file: 7, model_config: 10, weights: 3,
         tokenizer: 5, run_files: 5, plan_file: 5, centre_file: 5, plan_request: 7, link_file: 3, scores: 3, texts: 2, command_lines: 9}  # fmt: skip


def make(seed, number, bases):
    """Makes case `number` of a seed in the current folder. It is the same every time."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    return kind.__name__, kind(rng, bases)
