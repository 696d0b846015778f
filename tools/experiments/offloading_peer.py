#!/usr/bin/env python3
"""One process of tools/experiments/offloading.py, which starts it: measures one peer, the link, or holds memory.

    python3 tools/experiments/offloading_peer.py SYSTEM --csv FILE --model CONFIG.json [--cells '[[32, 2, "gpu"]]']

A cell is [new tokens, batch, where], where `where` is "gpu", "weights" or "cache": what is in the host's memory. Appends
each measurement to the CSV as soon as it is there. `hold` takes GPU memory until --cap bytes are free, prints "holding"
and keeps the memory until its standard input ends.
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch
from offloading import append_row

STEPS = {"gpu": 8, "weights": 3, "cache": 3}  # number of steps that are timed together, by placement
GIB = 1 << 30


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Peer:
    """A system under test. Subclasses load a model for a placement and time one call of their generation."""

    def __init__(self, arguments):
        self.csv, self.system, self.prompt = arguments.csv, arguments.system, arguments.prompt
        self.repeats, self.config = arguments.repeats, json.loads(pathlib.Path(arguments.model).read_text())
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def prepare(self, where, batch):
        """Makes a model with random weights for a batch, with its parts in the memories that `where` names."""
        raise NotImplementedError

    def generate(self, batch, length, steps):
        """Returns the seconds of the prompt (which gives the first token), and the seconds of each of `steps` more
        tokens."""
        raise NotImplementedError

    def close(self):
        """Stops whatever would keep this process alive."""

    def note(self, metric, value="", note="", **cell):
        append_row(self.csv, self.system, metric, value, note, **cell)

    def measure(self, cells):
        for where in dict.fromkeys(where for _, _, where in cells):
            for batch in dict.fromkeys(batch for _, batch, other in cells if other == where):
                news = [new for new, other, place in cells if (other, place) == (batch, where)]
                self.measure_batch(where, batch, news)

    def measure_batch(self, where, batch, news):
        """Halves the batch until it fits, because the authors tuned their batches on another machine. The time of a
        step grows linearly with the number of tokens, so only steps at the middle length are measured."""
        while not self.fits(where, batch, max(news)):
            if batch == 1:
                return
            batch //= 2
        steps = STEPS[where]
        for repeat in range(self.repeats):
            first, _ = self.generate(batch, self.prompt, 0)
            for new in news:
                _, rest = self.generate(batch, self.prompt + (new - steps) // 2, steps)
                for metric, value in (("prefill_seconds", first), ("step_seconds", statistics.median(rest))):
                    self.note(metric, value, where=where, batch=batch, prompt=self.prompt, new=new, repeat=repeat)

    def fits(self, where, batch, new):
        """Prepares the model and runs it once to warm up. If all memory that a step needs is on the GPU, this run has
        the last length. Otherwise it has the middle length, because a prompt of the last length needs more memory than
        decoding."""
        try:
            self.prepare(where, batch)
            self.generate(batch, self.prompt + (new - 3 if where == "gpu" else new // 2), 2)
            return True
        except torch.cuda.OutOfMemoryError:
            pass
        note = f"out of memory at batch {batch}"
        self.note("out_of_memory", note=note, where=where, batch=batch, prompt=self.prompt, new=new)
        gc.collect()
        torch.cuda.empty_cache()
        return False


class Transformers(Peer):
    """transformers' generate() with weights on the GPU. The placement `cache` stands for transformers' own offloaded
    cache."""

    package = "transformers"
    extra = {"cache": {"cache_implementation": "offloaded"}}

    def __init__(self, arguments):
        super().__init__(arguments)
        self.model = self.placed = None

    def random_model(self):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**self.config)
        torch.manual_seed(1)
        with torch.device(self.device), torch.no_grad():
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def prepare(self, where, batch):
        if self.placed == where:
            return
        if self.model is None:
            self.model = self.random_model()
        self.place(where, batch)
        self.placed = where

    def place(self, where, batch):
        pass

    def generate(self, batch, length, steps):
        from transformers import StoppingCriteriaList

        ids = torch.randint(3, self.config["vocab_size"], (batch, length), device=self.device)
        marks = []

        def mark(ids, scores, **_):
            synchronize()
            marks.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps + 1, do_sample=False, eos_token_id=None,
                pad_token_id=0, stopping_criteria=StoppingCriteriaList([mark]), **self.extra.get(self.placed, {}),
            )  # fmt: skip
        return marks[0] - start, [b - a for a, b in zip(marks, marks[1:])]


class Accelerate(Transformers):
    """Accelerate's offloading: the decoder layers are in host memory, embeddings and head on the GPU, as in the
    benchmarks of FlexGen and H2O (hf_ds/hf_opt.py)."""

    package = "accelerate"

    def place(self, where, batch):
        from accelerate import dispatch_model

        if where == "gpu":
            return
        self.model.to("cpu")
        torch.cuda.empty_cache()
        gpu = 0 if self.device == "cuda" else "cpu"
        places = {"model.embed_tokens": gpu, "model.rotary_emb": gpu, "model.norm": "cpu", "model.layers": "cpu", "lm_head": gpu}
        self.model = dispatch_model(self.model, places, main_device=gpu)


class DeepSpeed(Transformers):
    """ZeRO-Inference: stage 3 with the parameters in pinned host memory and the settings of the benchmarks of FlexGen
    and H2O (hf_ds/hf_opt.py)."""

    package = "deepspeed"

    def place(self, where, batch):
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
        import deepspeed

        deepspeed.init_distributed("nccl" if self.device == "cuda" else "gloo")
        self.model.to("cpu")
        if self.device == "cuda":
            torch.cuda.empty_cache()
        settings = {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": self.config["hidden_size"] ** 2,
                "stage3_param_persistence_threshold": 0,
                "offload_param": {"device": "cpu", "pin_memory": self.device == "cuda"},
            },
            "train_batch_size": batch,
        }
        self.model = deepspeed.initialize(model=self.model, config=settings)[0].module.eval()


class FlexGen(Peer):
    """Runs FlexGen 0.1.8 through the classes that its own flex_opt.py uses, because its command needs a tokenizer from
    the network. FlexGen runs OPT only. The options are those of H2O's suite for OPT-6.7B: everything on the GPU, no
    overlap."""

    package = "flexgen"
    model_name = "facebook/opt-6.7b"

    def __init__(self, arguments):
        super().__init__(arguments)
        self.model = self.env = None

    def prepare(self, where, batch):
        from flexgen import flex_opt

        if self.env is None:
            gpu, cpu = flex_opt.TorchDevice("cuda:0"), flex_opt.TorchDevice("cpu")
            disk = flex_opt.TorchDisk(tempfile.mkdtemp())
            mixed = flex_opt.TorchMixedDevice([gpu, cpu, disk])
            self.env = flex_opt.ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=mixed)
        self.model = None  # frees the weights of another batch
        gc.collect()
        torch.cuda.empty_cache()
        weights, cache = (flex_opt.CompressionConfig(num_bits=4, group_size=64, group_dim=dim, symmetric=False) for dim in (0, 2))
        policy = flex_opt.Policy(
            gpu_batch_size=batch, num_gpu_batches=1, w_gpu_percent=100, w_cpu_percent=0, cache_gpu_percent=100,
            cache_cpu_percent=0, act_gpu_percent=100, act_cpu_percent=0, overlap=False, sep_layer=True, pin_weight=True,
            cpu_cache_compute=False, attn_sparsity=1.0, compress_weight=False, comp_weight_config=weights,
            compress_cache=False, comp_cache_config=cache,
        )  # fmt: skip
        self.model = flex_opt.OptLM(flex_opt.get_opt_config(self.model_name), self.env, flex_opt.DUMMY_WEIGHT, policy)

    def generate(self, batch, length, steps):
        from flexgen.timer import timers

        ids = torch.randint(3, self.model.config.vocab_size, (batch, length)).tolist()
        timers("generate").reset()
        self.model.generate(ids, max_new_tokens=steps + 1, verbose=0)
        costs = timers("generate").costs
        return costs[0], costs[1:]

    def close(self):
        if self.env is not None:
            self.env.close_copy_threads()


PEERS = {"transformers": Transformers, "accelerate": Accelerate, "deepspeed": DeepSpeed, "flexgen": FlexGen}


def rate(work, count, calls=1, repeats=5):
    """Bytes per second of `work`, which moves `count` bytes: the median of several runs of `calls` calls each."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize()
        times.append(time.perf_counter() - start)
    return calls * count / statistics.median(times[1:])


def measure_limits(arguments):
    """Rates of the link and of the GPU's memory, in bytes per second. A copy on the GPU counts twice, because it reads
    and writes."""
    size = arguments.bytes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    pageable = torch.ones(size, dtype=torch.uint8)
    found = {"pageable_to_gpu": rate(lambda: on_gpu.copy_(pageable), size)}
    pinned = pageable.pin_memory() if device == "cuda" else pageable
    found["link_to_gpu"] = rate(lambda: on_gpu.copy_(pinned, non_blocking=True), size)
    found["link_to_host"] = rate(lambda: pinned.copy_(on_gpu, non_blocking=True), size)
    found["memory_copy"] = rate(lambda: other.copy_(on_gpu), 2 * size, calls=20)
    words = on_gpu.view(torch.int32)
    found["memory_read"] = rate(lambda: torch.max(words), size, calls=20)
    for name, value in found.items():
        append_row(arguments.csv, "limits", name + "_bytes_per_second", value)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    append_row(arguments.csv, "limits", "device", note=f"{name}, PyTorch {torch.__version__}")


def hold(arguments):
    """Takes memory so that --cap bytes of the GPU stay free for the processes that are measured."""
    free, total = torch.cuda.mem_get_info()
    if free < arguments.cap:
        sys.exit(f"--cap: {free} bytes of the GPU are free, less than {arguments.cap}; give a smaller cap")
    block = torch.empty(free - arguments.cap, dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    append_row(arguments.csv, "limits", "free_bytes", free, note=f"of {total}")
    print("holding", flush=True)
    sys.stdin.read()
    del block


def measure_peer(arguments):
    from importlib.metadata import version

    peer = PEERS[arguments.system](arguments)
    peer.note("version", note=f"{peer.package} {version(peer.package)}")
    try:
        peer.measure([tuple(cell) for cell in json.loads(arguments.cells)])
    finally:
        peer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("system", choices=["limits", "hold", *PEERS])
    parser.add_argument("--csv", required=True)
    parser.add_argument("--model")
    parser.add_argument("--cells", default="[]")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cap", type=int)
    parser.add_argument("--bytes", type=int, default=GIB)
    arguments = parser.parse_args()
    {"limits": measure_limits, "hold": hold}.get(arguments.system, measure_peer)(arguments)


if __name__ == "__main__":
    main()
