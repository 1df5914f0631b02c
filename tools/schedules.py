"""
Two tables for a trained feedback model: how many passes each schedule needs, and the loss after each number of passes.

    python -m tools.schedules runs/whitematter-1     for a run folder or a checkpoint
    python -m tools.schedules                        for a small model, first trained exactly (configs/cyclic_lab.toml)
"""
import functools
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import configs
import cyclic
import data
import train
from configs import SettingError
from trainer.console import program

WINDOWS = 64                           # held-out windows of block_size tokens that the losses are taken over
PASSES, JACOBI_PASSES = 32, 96         # passes tried


@torch.no_grad()
def by_pass(model, idx, schedule, groups, passes, read=lambda h: h):
    """[read(the normed output (B, T, D)) after 1, 2, .. `passes` passes], all from one run. Each pass is read as soon
    as it is complete, so that no more than one is kept."""
    T, stack, given, found = idx.size(1), model.stack, [], []
    slices = cyclic.GROUPS[schedule](T, min(groups, T))

    def listening(x, positions, channels):
        output, states = stack(x, positions, channels)
        given.append(output)
        if len(given) == len(slices):
            top = cyclic.in_order(given, slices)
            if hasattr(model, "above"):                         # LCKV's layers above its block
                top = model.warm_up(model.above, top, model.rope(torch.arange(T, device=idx.device)), None)
            found.append(read(model.norm(top)))
            given.clear()
        return output, states
    model.stack = listening
    try:
        with cyclic.scheduled(model.config, schedule=schedule, groups=groups, passes=passes, grad_passes=1):
            model.hidden(idx)
    finally:
        del model.stack
    return found


@torch.no_grad()
def seconds(model, idx, repeats=3):
    """The shortest of a few timings of the layers alone, without the head."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        model.hidden(idx)
        if idx.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


@torch.no_grad()
def nats(model, h, y):
    """Mean loss, with the logits of one window at a time."""
    return sum(F.cross_entropy(model.head(h_i).float(), y_i).item() for h_i, y_i in zip(h, y)) / len(y)


def tables(model, x, y):
    T, config = x.size(1), model.config
    with model.exactly(), torch.no_grad():
        exact, base = nats(model, model.hidden(x), y), seconds(model, x)
    if not math.isfinite(exact):
        raise SettingError(f"the exact loss is {exact}: name a model that trained without diverging")
    print(f"{x.size(0)} held-out windows of {T} tokens; run exactly, token by token: {exact:.4f} nats, perplexity "
          f"{math.exp(min(exact, 700)):.3f}, {base:.2f} s\n")
    print("1. Passes until the perplexity is within 1 % of the exact run's, and their time\n")
    print(f"  {'schedule':<12}{'groups':>7}{'passes':>8}{'jacobi/this':>13}{'seconds':>10}{'jacobi/this':>13}")
    losses, jacobi = {}, (math.nan, math.nan)                   # no ratio where Jacobi does not get there
    read = functools.partial(nats, model, y=y)
    sizes = [g for g in (2, 4, 8, 16, 32, 64) if g < T] or [1]
    for schedule, groups in [("jacobi", 1), *(("cyclic", g) for g in sizes), *(("contiguous", g) for g in sizes)]:
        tried = min(T, JACOBI_PASSES if schedule == "jacobi" else PASSES)
        found = losses[schedule, groups] = by_pass(model, x, schedule, groups, tried, read)
        passes = next((p for p, loss in enumerate(found, 1) if loss <= exact + math.log(1.01)), None)
        if passes is None:
            print(f"  {schedule:<12}{groups:>7}{'over ' + str(len(found)):>8}")
            continue
        with cyclic.scheduled(config, schedule=schedule, groups=groups, passes=passes, grad_passes=1):
            took = seconds(model, x)
        jacobi = (passes, took) if schedule == "jacobi" else jacobi
        print(f"  {schedule:<12}{groups:>7}{passes:>8}{jacobi[0] / passes:>13.2f}"
              f"{took:>10.3f}{jacobi[1] / took:>13.2f}")
    print("\n2. Loss in nats after so many passes: does more iteration than in training help or hurt?\n")
    shown = [p for p in (1, 2, 3, 4, 8, 16, 32) if p <= min(T, PASSES)]
    print(f"  trained: {config.schedule}, groups={config.groups} passes={config.passes} "
          f"grad_passes={config.grad_passes}\n")
    print(f"  {'schedule':<12}{'groups':>7}" + "".join(f"{p:>9}" for p in shown) + f"{'exact':>9}")
    for schedule, groups in dict.fromkeys([("jacobi", 1), ("cyclic", min(config.groups, sizes[-1])), *losses]):
        if (schedule, groups) not in losses:
            losses[schedule, groups] = by_pass(model, x, schedule, groups, min(T, PASSES), read)
        row = losses[schedule, groups]
        print(f"  {schedule:<12}{groups:>7}" + "".join(f"{row[p - 1]:>9.4f}" for p in shown) + f"{exact:>9.4f}")


def windows(run, tokenizer):
    """WINDOWS full held-out windows x, y (n, block_size) of the text that the run was trained on."""
    tokens = data.open_tokens(train.run_data(run), "val", run.config.vocab_size)
    return next(data.windows(tokens, run.config.block_size, tokenizer.eot_token, WINDOWS))


@program("schedules")
def main(argv):
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    folder = Path(argv[0]) if argv else Path("runs/cyclic_lab")
    if not argv and not (folder / "last.pt").exists():
        print("no trained model yet: training one exactly, about four minutes on two free cores\n")
        train.main([str(configs.HERE / "cyclic_lab.toml")])
    run, tokenizer = train.open_run(folder)
    if not hasattr(run.config, "schedule"):
        raise SettingError(f"{folder} holds a model without feedback: name a run of whitematter, feedback or lckv")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = windows(run, tokenizer)
    tables(run.model.to(device), x.to(device), y.to(device))


if __name__ == "__main__":
    main(sys.argv[1:])
