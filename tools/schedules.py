"""
What the schedules of cyclic.py do, drawn and measured.

    python cyclic.py --show T=12 g=4        every step of the three schedules, drawn from the schedule code itself
    python cyclic.py runs/whitematter-1     two tables for a trained feedback model: a run folder or a checkpoint
    python cyclic.py                        the same for a small model, which is first trained exactly (configs/cyclic_lab.toml)
"""
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import configs
import cyclic
import data
from configs import SettingError

WINDOWS = 64                           # held-out windows of block_size tokens that the losses are taken over
PASSES, JACOBI_PASSES = 32, 96         # passes tried


# ---------------------------------------------------------------------------------------------------------- the picture


class Marks:
    """A model for cyclic.run without numbers: a token's channel says which pass made it, and whether that is final."""

    k, sources, first, trace = 1, 1, 0, None

    def __init__(self, config):
        self.config, self.passes, self.rows = config, {}, []

    def boundary(self, batch_size):
        return cyclic.Channels(*torch.zeros(2, 1, 1, 1, 0, 1), torch.arange(0))

    def stack(self, x, positions, channels):
        made, final = channels.k.flatten().tolist(), channels.v.flatten().tolist()
        states = []
        for i in positions.tolist():
            self.passes[i] = self.passes.get(i, 0) + 1
            states.append((self.passes[i], all(final[:i])))              # final: everything before it was
        self.rows.append((positions.tolist(), made, final, states))
        return x, torch.tensor(states, dtype=torch.float32)[None, None]  # (1, 1, n, 2)

    def pool(self, states, positions):
        return states[..., None, :, :1], states[..., None, :, 1:]        # (1, 1, 1, n, 1) each


def picture(schedule, T, g, passes):
    """Lines of text, one for each step of a schedule: the cells as the tokens of that step see and leave them."""
    marks = Marks(SimpleNamespace(schedule=schedule, groups=g, passes=passes, grad_passes=1))
    with torch.no_grad():
        cyclic.run(marks, torch.zeros(1, T, 2))
    lines = [f"{schedule}" + (f", {g} groups" if schedule in ("cyclic", "contiguous") else ""),
             "  pass  " + "".join(f"{i:>4} " for i in range(T))]
    for tokens, made, final, states in marks.rows:
        cells = dict(enumerate(zip(made, final))) | dict(zip(tokens, states))
        row = ""
        for i in range(T):
            number, exact = cells.get(i, (None, False))
            text = "." if number is None else f"{number:.0f}"
            row += (f" [{text}]" if i in tokens else f"  {text} ") + ("*" if exact else " ")
        lines.append(f"  {states[0][0]:>4.0f}  {row}".rstrip())
    return lines


def show(T, g):
    print(f"{T} tokens in columns, one step in each row. [n] is being computed, in pass n; its tokens read the cells to "
          f"their left.\nn was made in pass n, 0 from the embedding alone; * is final: more passes do not change it.\n")
    for schedule, passes in (("jacobi", min(T, 4)), ("cyclic", -(-T // min(g, T))), ("contiguous", min(T, 2)),
                             ("autoregressive", 1)):
        print("\n".join(picture(schedule, T, g, passes)) + "\n")


# ----------------------------------------------------------------------------------------------------------- the tables


@torch.no_grad()
def by_pass(model, idx, schedule, groups, passes, read=lambda h: h):
    """[read(the normed output (B, T, D)) after 1, 2, .. `passes` passes], from one run: what `stack` gave, group by group.
    Each pass is read as soon as it is through, so that no more than one is held."""
    T, stack, given, found = idx.size(1), model.stack, [], []
    slices = cyclic.GROUPS[schedule](T, min(groups, T))

    def listening(x, positions, channels):
        output, states = stack(x, positions, channels)
        given.append(output)
        if len(given) == len(slices):
            found.append(read(model.norm(cyclic.in_order(given, slices))))
            given.clear()
        return output, states
    config, before = model.config, vars(model.config).copy()
    config.schedule, config.groups, config.passes, config.grad_passes = schedule, groups, passes, 1
    model.stack = listening
    try:
        model.hidden(idx)
    finally:
        del model.stack
        vars(config).update(before)
    return found


@torch.no_grad()
def seconds(model, idx, schedule, groups=1, passes=1, repeats=3):
    """The shortest of a few timings of the layers alone, without head."""
    config, before, times = model.config, vars(model.config).copy(), []
    config.schedule, config.groups, config.passes, config.grad_passes = schedule, groups, passes, 1
    for _ in range(repeats):
        begin = time.perf_counter()
        model.hidden(idx)
        if idx.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    vars(config).update(before)
    return min(times)


@torch.no_grad()
def exact_output(model, idx):
    config, before = model.config, model.config.schedule
    config.schedule = "autoregressive"
    output = model.hidden(idx)
    config.schedule = before
    return output


@torch.no_grad()
def nats(model, h, y):
    """Mean loss, with the logits of one window at a time."""
    return sum(F.cross_entropy(model.head(h_i).float(), y_i).item() for h_i, y_i in zip(h, y)) / len(y)


def tables(model, x, y):
    T, config = x.size(1), model.config
    exact = nats(model, exact_output(model, x), y)
    base = seconds(model, x, "autoregressive")
    print(f"{x.size(0)} held-out windows of {T} tokens; run exactly, token by token: {exact:.4f} nats, perplexity "
          f"{math.exp(exact):.3f}, {base:.2f} s\n")
    print("1. Passes until the perplexity is within 1 % of the exact run's, and what they take\n")
    print(f"  {'schedule':<12}{'groups':>7}{'passes':>8}{'jacobi/this':>13}{'seconds':>10}{'jacobi/this':>13}")
    losses, jacobi = {}, (math.nan, math.nan)                            # no ratio if Jacobi does not get there
    sizes = [g for g in (2, 4, 8, 16, 32, 64) if g < T]
    for schedule, groups in [("jacobi", 1), *(("cyclic", g) for g in sizes), *(("contiguous", g) for g in sizes)]:
        tried = min(T, JACOBI_PASSES if schedule == "jacobi" else PASSES)
        found = losses[schedule, groups] = by_pass(model, x, schedule, groups, tried, lambda h: nats(model, h, y))
        passes = next((p for p, loss in enumerate(found, 1) if loss <= exact + math.log(1.01)), None)
        if passes is None:
            print(f"  {schedule:<12}{groups:>7}{'over ' + str(len(found)):>8}")
            continue
        took = seconds(model, x, schedule, groups, passes)
        jacobi = (passes, took) if schedule == "jacobi" else jacobi
        print(f"  {schedule:<12}{groups:>7}{passes:>8}{jacobi[0] / passes:>13.2f}{took:>10.3f}{jacobi[1] / took:>13.2f}")
    print("\n2. Loss in nats after a number of passes, and exactly: does more iteration than in training help or hurt?\n")
    shown = [p for p in (1, 2, 3, 4, 8, 16, 32) if p <= min(T, PASSES)]
    print(f"  trained: {config.schedule}, groups={config.groups} passes={config.passes} grad_passes={config.grad_passes}\n")
    print(f"  {'schedule':<12}{'groups':>7}" + "".join(f"{p:>9}" for p in shown) + f"{'exact':>9}")
    for schedule, groups in dict.fromkeys([("jacobi", 1), ("cyclic", min(config.groups, sizes[-1])), *losses]):
        if (schedule, groups) not in losses:
            losses[schedule, groups] = by_pass(model, x, schedule, groups, min(T, PASSES), lambda h: nats(model, h, y))
        row = losses[schedule, groups]
        print(f"  {schedule:<12}{groups:>7}" + "".join(f"{row[p - 1]:>9.4f}" for p in shown) + f"{exact:>9.4f}")


def windows(name, config):
    """WINDOWS full held-out windows x, y (n, block_size) of a data set."""
    folder = data.dataset(name)
    tokens = data.open_tokens(folder, "val", config.vocab_size)
    eot = data.tokenizer(data.read_meta(folder)["tokenizer"]).eot_token
    return next(data.windows(tokens, config.block_size, eot, WINDOWS))


def main():
    words = sys.argv[1:]
    try:
        if "--show" in words:
            sizes = dict(word.split("=") for word in words if "=" in word)
            show(*(configs.convert(name, sizes.get(name, default), int) for name, default in (("T", 12), ("g", 4))))
            return
        import train
        folder = Path(words[0]) if words else Path("runs/cyclic_lab")
        if not words and not (folder / "last.pt").exists():
            print("no trained model yet: training one exactly, about four minutes on two free cores\n")
            train.main([str(configs.HERE / "cyclic_lab.toml")])
        model, config, facts = train.load_checkpoint(folder)
        if not hasattr(config, "schedule"):
            raise SettingError(f"{folder} holds a model without feedback: name a run of whitematter, feedback or lckv")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x, y = windows(facts["settings"].get("data", "plays"), config)
        tables(model.to(device), x.to(device), y.to(device))
    except ValueError as error:                                          # SettingError is one
        sys.exit(f"cyclic.py: {error}")
