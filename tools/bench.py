"""
Time and peak memory of a model's training step against the baseline's: `python -m tools.bench --model=mudd`.

    python -m tools.bench --model=mudd --shape=d512 --dtype=bfloat16
    python -m tools.bench --model=mudd --compile=off --dynamic=no --multiway=no     any setting of the model

The two models step by turns, in pairs whose order changes, so that what else the machine does hits both alike; each pair
gives one ratio, the baseline's seconds by the model's, and the median is reported with its spread. A ratio of 0.9: the
model makes 0.9 of the baseline's steps in the same time. What is timed is forward and backward; the peak of memory holds
the optimizer's state as well.
"""
import itertools
import os
import statistics
import sys
import time
from dataclasses import dataclass

import torch

import configs

SHAPES = {
    "d512": dict(n_layer=16, n_embd=512, n_head=8, n_kv_head=4, head_dim=64, d_ff=1536, vocab_size=4096, block_size=512),
    "small": dict(n_layer=4, n_embd=128, n_head=4, n_kv_head=2, d_ff=384, vocab_size=512, block_size=128),
}


@dataclass
class BenchConfig:
    model: str = "mudd"           # which one of train.MODELS
    shape: str = "small"          # d512 or small; single settings over it, as --n_layer=8
    batch_size: int = 2           # sequences in a step
    dtype: str = "float32"        # float32, bfloat16, float16: of the matrix products
    compile: bool = True          # compile the pieces between the lines of the loop (no: eager)
    steps: int = 15               # pairs of steps that are timed
    device: str = "cpu"           # cpu, cuda, mps
    threads: int | None = None    # processor threads (default: torch's)

    def __post_init__(self):
        from train import MODELS
        for name, words in (("model", MODELS), ("shape", SHAPES), ("dtype", ("float32", "bfloat16", "float16"))):
            if getattr(self, name) not in words:
                raise ValueError(f"--{name}={getattr(self, name)}: choose one of {', '.join(words)}")
        if self.device.split(":")[0] not in ("cpu", "cuda", "mps"):
            raise ValueError(f"--device={self.device}: give cpu, cuda or mps")
        for name in ("batch_size", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)}: give a whole number of at least 1")


def make_step(config, name, settings):
    """A model, and a function () -> seconds of one forward and backward pass, which compiles when first called."""
    from train import build
    model = build(name, **SHAPES[config.shape] | settings).to(config.device).train()
    if config.compile:
        model.compile_pieces()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(model.config.vocab_size, (2, config.batch_size, model.config.block_size),
                         generator=generator).to(config.device)
    dtype = getattr(torch, config.dtype)

    def step():
        model.zero_grad(set_to_none=True)
        synchronize(config.device)
        start = time.perf_counter()
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(x, y)
        loss.backward()
        synchronize(config.device)
        return time.perf_counter() - start
    return model, step


def synchronize(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def time_in_turns(step, base, pairs):
    """[(the model's seconds, the baseline's)] of `pairs` pairs; which of the two begins changes from pair to pair."""
    times = []
    for n in range(pairs):
        if n % 2:
            ours, plain = step(), base()
        else:
            plain, ours = base(), step()
        times.append((ours, plain))
    return times


def spread(values):
    """(median, lower quartile, upper quartile)"""
    values = sorted(values)
    return statistics.median(values), values[len(values) // 4], values[-1 - len(values) // 4]


def peak_bytes(model, step, device):
    """Bytes of tensors at the peak of a training step: weights, AdamW's two moments, gradients, and what is kept between.
    On a CPU, where torch keeps no count, the profiler's record of allocations is added up."""
    step()
    model.zero_grad(set_to_none=True)
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.parameters(), *model.parameters(),
                                                      *model.buffers()))
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return held + torch.cuda.max_memory_allocated() - before
    if device != "cpu":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    return held + max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def bench(config, settings):
    """Time config.model, with the given settings of its own, against the baseline of the same shape. -> dict"""
    shared = {name: value for name, value in settings.items() if name in baseline_names()}
    (model, step), (plain, base) = make_step(config, config.model, settings), make_step(config, "gpt", shared)
    first_base, first = base(), step()
    step(), base()
    times = time_in_turns(step, base, config.steps)
    ratio, low, high = spread([b / a for a, b in times])
    return dict(ratio=ratio, low=low, high=high, seconds=statistics.median(a for a, _ in times),
                seconds_base=statistics.median(b for _, b in times), first=first, first_base=first_base,
                peak=peak_bytes(model, step, config.device), peak_base=peak_bytes(plain, base, config.device))


def baseline_names():
    from model import GPTConfig
    return {field.name for field, _, _ in configs.fields(GPTConfig)}


def main(argv):
    from train import MODELS
    try:
        settings = configs.read(argv)
        config_class = MODELS.get(settings.get("model", "mudd"), MODELS["gpt"])[0]
        if settings.pop("help", False):
            print(__doc__ + configs.help_text(BenchConfig, config_class))
            return
        names = {field.name for field, _, _ in configs.fields(BenchConfig)}
        config, = configs.build({k: v for k, v in settings.items() if k in names}, BenchConfig)
        settings = {k: v for k, v in settings.items() if k not in names}
        model_config, = configs.build(SHAPES[config.shape] | settings, config_class)
        settings = {k: getattr(model_config, k) for k in settings}               # as the types that the fields have
    except configs.SettingError as error:
        sys.exit(f"bench: {error}")
    if config.threads:
        torch.set_num_threads(config.threads)
    result = bench(config, settings)
    print(f"{config.model} {' '.join(f'{k}={v}' for k, v in settings.items())}".rstrip() + f", shape {config.shape}, "
          f"{config.batch_size} sequences, {config.dtype}, {'compiled' if config.compile else 'eager'}, {config.device}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}" + load())
    print(f"  speed          {result['ratio']:.3f} of the baseline's (middle half of {config.steps} pairs: "
          f"{result['low']:.3f} to {result['high']:.3f}); {result['seconds']:.3f} s a step against {result['seconds_base']:.3f}")
    print(f"  first step     {result['first']:.1f} s, after the baseline's, {result['first_base']:.1f} s, which shares pieces with it")
    if result["peak"] is not None:
        print(f"  peak memory    {result['peak'] / 2 ** 20:,.0f} MiB against {result['peak_base'] / 2 ** 20:,.0f} "
              f"({result['peak'] / result['peak_base'] - 1:+.1%})")


def load():
    """How busy the machine is: runnable processes, averaged over a minute, where the system says so."""
    return f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""


if __name__ == "__main__":
    main(sys.argv[1:])
