"""
What each model costs on this machine, beside the baseline of the same shape: `python -m tools.bench`.

    python -m tools.bench                                                 preset laptop: every model, on two CPU cores
    python -m tools.bench --preset=d512 --models=mudd,mudd:dynamic=no:multiway=no --dtype=bfloat16
    python -m tools.bench --preset=gpu                                    a 124M shape in bf16, on one GPU
    python -m tools.bench --models=lime --compile=off --n_layer=8         any setting of the models' shape

The two models are timed alternately, in pairs whose order changes, so that other load on the machine hits both alike.
Each pair gives one ratio; 0.9 means 90 % of the baseline's throughput. A cell shows the median of the pairs and, in
brackets, their middle half. The columns:

    step, eager / compiled    a training step: forward, backward and, unless --optimizer=no, AdamW's step
    compiling                 seconds of the first compiled step; of a model after the baseline, whose pieces it shares
    peak                      bytes of tensors at the peak of a compiled step (eager where nothing is compiled):
                              weights, gradients, AdamW's two moments and what is kept for the backward pass
    prefill, decode           reading a full block_size into the cache; one token behind block_size - 1 others (eager)
    cache gains               how much faster the last tokens of a block are generated with the cache than without
    KV                        numbers that the cache keeps of one token
    training FLOPs            of a step with its head, per token: flops_per_token of the model's file
"""
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm

import configs
import data
import kernels
import train
from configs import SettingError
from tools.compare import arms
from trainer.console import program
from trainer.device import out_of_memory, usable_device
from trainer.flops import flops_of, training_flops

SHAPES = {
    "laptop": dict(n_layer=4, n_embd=128, n_head=4, vocab_size=257, block_size=128),
    "d512": dict(n_layer=16, n_embd=512, n_head=8, n_kv_head=4, head_dim=64, d_ff=1536, vocab_size=4096,
                 block_size=512),
    "124m": dict(n_layer=12, n_embd=768, n_head=12, vocab_size=50257, block_size=1024),
}
MAIN = "value_residual,mudd:dynamic=no:multiway=no,mudd,depth_attention,depth_attention:stride=1,whitematter"
PRESETS = {
    "laptop": dict(shape="laptop", batch_size=8, steps=11),
    "d512": dict(shape="d512", batch_size=2, steps=13, models=MAIN),
    "gpu": dict(shape="124m", batch_size=8, steps=9, models=MAIN, device="cuda", dtype="bfloat16"),
}
GENERATED = 8                          # tokens, for what the cache gains


@dataclass
class BenchConfig:
    preset: str = "laptop"             # laptop, d512 or gpu: values for the settings below, flags go over them
    models: str = ""                   # names of train.MODELS, with settings as mudd:dynamic=no (default: all)
    shape: str = "laptop"              # laptop, d512 or 124m
    batch_size: int = 8                # sequences in a step
    dtype: str = "float32"             # float32, bfloat16, float16: of the matrix products
    compile: str = "both"              # off, on, both: eager steps, compiled ones, or these and those
    optimizer: bool = True             # count AdamW's step as part of a training step
    inference: bool = True             # prefill, decode and generation too
    steps: int = 11                    # pairs that are timed
    device: str = "cpu"                # cpu, cuda, mps
    threads: int | None = None         # processor threads (default: torch's)
    out: str | None = None             # file for the results, as JSON

    def __post_init__(self):
        for name, words in (("preset", PRESETS), ("shape", SHAPES), ("compile", ("off", "on", "both")),
                            ("dtype", ("float32", "bfloat16", "float16"))):
            if getattr(self, name) not in words:
                raise ValueError(f"--{name}={getattr(self, name)}: choose one of {', '.join(words)}")
        for name in ("batch_size", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)}: give a whole number of at least 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads={self.threads}: give a whole number of at least 1")


# ---------------------------------------------------------------------------------------------------------- measuring


def time_in_turns(ours, base, pairs):
    """[(our seconds, the baseline's)] of `pairs` pairs; which of the two begins changes from pair to pair."""
    times = []
    for n in range(pairs):
        if n % 2:
            seconds, plain = ours(), base()
        else:
            plain, seconds = base(), ours()
        times.append((seconds, plain))
    return times


def spread(values):
    """(median, lower quartile, upper quartile)"""
    values = sorted(values)
    return statistics.median(values), values[len(values) // 4], values[-1 - len(values) // 4]


def compare(ours, base, pairs):
    """Two functions () -> seconds, each called once before. -> dict: ratio of speeds with its quartiles, medians."""
    ours(), base()
    times = time_in_turns(ours, base, pairs)
    ratio, low, high = spread([b / a for a, b in times])
    return dict(ratio=ratio, low=low, high=high, seconds=statistics.median(a for a, _ in times),
                seconds_base=statistics.median(b for _, b in times))


def timed(work, device):
    """() -> seconds that work() takes on the device."""
    synchronize = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)

    def call():
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        return time.perf_counter() - start
    return call


def peak_bytes(model, step, device):
    """Bytes of tensors at the peak of a training step: weights, AdamW's two moments, gradients, and what is kept
    between. On a CPU, where torch keeps no count, the profiler's record of allocations is added up; None where neither
    can be."""
    step()
    model.zero_grad(set_to_none=True)
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.parameters(), *model.parameters(),
                                                      *model.buffers()))
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return held + torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return held + max(itertools.accumulate(event.nbytes() for event in events))


# ----------------------------------------------------------------------------------------------------- what is measured


class Subject:
    """A model of the shape asked for, and what is timed of it: each a function () -> seconds."""

    def __init__(self, config, name, settings):
        self.config, self.device = config, torch.device(config.device)
        self.model = train.build(name, **SHAPES[config.shape] | settings).to(self.device)
        self.optimizer = train.make_optimizer(self.model, train.TrainConfig(), self.device)
        vocabulary, T = self.model.config.vocab_size, self.model.config.block_size
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randint(vocabulary, (2, config.batch_size, T), generator=generator).to(self.device)

    def autocast(self):
        dtype = getattr(torch, self.config.dtype)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def step(self, optimizer=True):
        def work():
            self.model.train().zero_grad(set_to_none=True)
            with self.autocast():
                loss = self.model(self.x, self.y)
            loss.backward()
            if optimizer:
                self.optimizer.step()
        return timed(work, self.device)

    def prefill(self):
        cache = self.model.new_cache(self.config.batch_size)
        return self.reading(cache, 0, self.x)

    def decode(self):
        cache = self.model.new_cache(self.config.batch_size)
        self.reading(cache, 0, self.x[:, :-1])()
        return self.reading(cache, self.x.size(1) - 1, self.x[:, -1:])

    def reading(self, cache, length, idx):
        @torch.no_grad()
        def work():
            cache.length = length
            with self.autocast():
                self.model.eval().head(self.model.hidden(idx, cache, last=True))
        return timed(work, self.device)

    def generation(self, use_cache):
        """The last GENERATED tokens of a block; with a cache, the reading of the prompt is not counted."""
        prompt, n = self.x[:, :-GENERATED], GENERATED
        if not use_cache:
            return timed(lambda: self.model.eval().generate(prompt, n, temperature=0, use_cache=False), self.device)
        cache = self.model.eval().new_cache(self.config.batch_size)
        self.reading(cache, 0, prompt)()

        @torch.no_grad()
        def work():
            cache.length, token = prompt.size(1), prompt[:, -1:]
            for _ in range(n):
                token = self.model.head(self.model.hidden(token, cache, last=True))[:, -1].argmax(dim=-1, keepdim=True)
        return timed(work, self.device)

    def facts(self):
        """What needs no clock: parameters, numbers in the cache and training FLOPs per token."""
        config, model_class = self.model.config, type(self.model)
        return dict(parameters=sum(p.numel() for p in self.model.parameters()),
                    flops=training_flops(flops_of(model_class, config)),
                    kv=sum(model_class.cache_slots(config)) * config.n_kv_head * config.head_dim)


def bench(config, name, settings):
    """The model `name` with settings of its own beside the baseline. -> dict of what the columns show, and more."""
    shared = {k: v for k, v in settings.items() if k in arms.names_of(train.GPTConfig)}
    ours, base = Subject(config, name, settings), Subject(config, "gpt", shared)
    found = ours.facts() | {f"{k}_base": v for k, v in base.facts().items()}
    if config.inference:
        for what in ("prefill", "decode"):
            found[what] = compare(getattr(ours, what)(), getattr(base, what)(), config.steps)
        for key, subject in (("cache_gain", ours), ("cache_gain_base", base)):
            found[key] = compare(subject.generation(use_cache=True), subject.generation(use_cache=False), 3)["ratio"]
    steps = [subject.step(config.optimizer) for subject in (ours, base)]
    if config.compile != "on":
        found["eager"] = compare(*steps, config.steps)
    if config.compile != "off":
        try:
            for subject in (ours, base):
                subject.model.compile_pieces()
            found |= dict(first_base=steps[1](), first=steps[0](), compiled=compare(*steps, config.steps))
        except Exception as error:                   # whatever it is: a compiler may be missing, or not know the device
            if out_of_memory(error):
                raise
            for subject in (ours, base):
                kernels.restore(subject.model)
            tqdm.write(f"{name}: torch.compile does not work here ({type(error).__name__}); it is measured eager")
            found |= {} if "eager" in found else dict(eager=compare(*steps, config.steps))
    for key, subject in (("peak", ours), ("peak_base", base)):
        found[key] = peak_bytes(subject.model, subject.step(optimizer=False), ours.device)
    return found


# ----------------------------------------------------------------------------------------------------------- the table


def table(results):
    """Lines of Markdown: the baseline in its own units, then each model against it."""
    base = next(iter(results.values()))
    columns = {"": ("gpt", list(results))}

    def column(title, own, cell):
        columns[title] = own, [cell(r) for r in results.values()]

    def speed(key, title, digits):
        def cell(r):
            return "{ratio:.3f} ({low:.3f} to {high:.3f})".format(**r[key]) if key in r else "n/a"
        if key in base:
            column(title, f"{base[key]['seconds_base'] * 1000:.{digits}f} ms", cell)
    column("parameters", f"{base['parameters_base']:,}", lambda r: f"{r['parameters'] / r['parameters_base'] - 1:+.2%}")
    speed("eager", "step, eager", 0)
    speed("compiled", "step, compiled", 0)
    if "first" in base:
        column("compiling", f"{base['first_base']:.0f} s", lambda r: f"{r['first']:.0f} s" if "first" in r else "n/a")
    if base["peak"] is not None:
        column("peak", f"{base['peak_base'] / 2 ** 20:,.0f} MiB", lambda r: f"{r['peak'] / r['peak_base'] - 1:+.1%}")
    speed("prefill", "prefill", 1)
    speed("decode", "decode", 1)
    if "cache_gain" in base:
        column("cache gains", f"{base['cache_gain_base']:.1f} times", lambda r: f"{r['cache_gain']:.1f} times")
    column("KV, numbers a token", f"{base['kv_base']:,}", lambda r: f"{r['kv']:,}")
    column("training FLOPs a token", f"{base['flops_base'] / 1e6:,.1f} M",
           lambda r: f"{r['flops'] / r['flops_base']:.3f}")
    rows = [list(columns), ["---"] * len(columns), [own for own, _ in columns.values()]]
    rows += zip(*(cells for _, cells in columns.values()))
    return ["| " + " | ".join(row) + " |" for row in rows]


def parse_arm(text, shape):
    """"mudd:dynamic=no" -> ("mudd", {"dynamic": False}), with `shape`'s settings under it. SettingError for what cannot
    be built."""
    name, own = arms.parse(text)
    if name not in train.MODELS:
        raise SettingError(f"--models={text}: choose from {', '.join(train.MODELS)}")
    settings = shape | own
    built, = configs.build(settings, train.MODELS[name][0])
    return name, {k: getattr(built, k) for k in settings}                # as the types that the fields have


def read(argv):
    """Command line -> (BenchConfig, {label: (name of the model, its settings)})"""
    settings = configs.read(argv)
    names = arms.names_of(BenchConfig)
    own = {k: v for k, v in settings.items() if k in names}
    config, = configs.build(PRESETS.get(own.get("preset", "laptop"), {}) | own, BenchConfig)
    shape = {k: v for k, v in settings.items() if k not in names}
    configs.build(shape, train.GPTConfig)                               # a shape is the baseline's too
    config.device = str(usable_device(config.device))
    labels = arms.labels(config.models) if config.models else [name for name in train.MODELS if name != "gpt"]
    models = {label: parse_arm(label, SHAPES[config.shape] | shape) for label in labels}
    shortest = min(settings["block_size"] for _, settings in models.values())
    if config.inference and shortest <= GENERATED:
        raise SettingError(f"block_size={shortest}: the last {GENERATED} tokens of a block are generated, so give "
                           f"more, or --inference=no")
    return config, models


@program("bench")
def main(argv):
    if {"--help", "-h"} & set(argv):
        print(__doc__ + configs.help_text(BenchConfig, train.GPTConfig))
        return
    config, models = read(argv)
    if config.out:
        open(config.out, "a", encoding="utf-8").close()                 # before minutes of measuring, not after them
    if config.threads:
        torch.set_num_threads(config.threads)
    results = {}
    try:
        for label, (name, settings) in tqdm(models.items(), unit="model", leave=False):
            results[label] = bench(config, name, settings)
    except KeyboardInterrupt:
        if not results:
            raise
        print("stopped: these were measured")
    where = dict(device=config.device, threads=torch.get_num_threads(), torch=torch.__version__,
                 python=sys.version.split()[0], load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None)
    print(f"shape {config.shape}, {config.batch_size} sequences, {config.dtype}, {config.steps} pairs; "
          + ", ".join(f"{k} {v}" for k, v in where.items() if v is not None) + "\n")
    print("\n".join(table(results)))
    if config.out:
        content = dict(settings=asdict(config), machine=where, results=results)
        data.write_text(config.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
