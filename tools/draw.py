"""
The schedules of cyclic.py, drawn, and the claims in its header, counted: `python cyclic.py --show T=12 g=4`.

The schedule code itself is run, with a model that computes no numbers: a token's channel says which pass made it, and
whether more passes would change it. cyclic.py hands over its run_schedule, so this file imports no mechanism.
"""
import sys
from types import SimpleNamespace

import torch

import configs
from configs import SettingError
from trainer.console import program


class Marks:
    """A model without numbers for run_schedule. Its states, keys and values hold (pass, is it final)."""

    n_sources, has_dummy, trace = 1, False, None

    def __init__(self, config):
        self.config, self.passes, self.steps = config, {}, []

    def boundary(self, batch_size):
        return torch.zeros(2, 1, 1, 1, 0, 1)                    # no keys, no values

    def stack(self, x, positions, channels):
        made, final = (t.flatten().tolist() for t in channels)
        states = []
        for i in positions.tolist():
            self.passes[i] = self.passes.get(i, 0) + 1
            states.append((self.passes[i], all(final[:i])))     # final once everything before it is
        self.steps.append((positions.tolist(), made, final, states))
        return x, torch.tensor(states, dtype=torch.float32)[None, None]      # (1, 1, n, 2)

    def pool(self, states, positions):
        return states[..., None, :, :1], states[..., None, :, 1:]            # (1, 1, 1, n, 1) each


def steps(run_schedule, schedule, T, g, passes):
    """[(tokens, the pass that made each slot before this step, is it final, [(pass, final)] of the tokens after it)]"""
    marks = Marks(SimpleNamespace(schedule=schedule, groups=g, passes=passes, grad_passes=1))
    with torch.no_grad():
        run_schedule(marks, torch.zeros(1, T, 2))
    return marks.steps


def picture(run_schedule, schedule, T, g, passes):
    """Lines of text, one for each step: the cells as the tokens of that step see and leave them."""
    lines = [f"{schedule}" + (f", {g} groups" if schedule in ("cyclic", "contiguous") else ""),
             "  pass  " + "".join(f"{i:>4} " for i in range(T))]
    for tokens, made, final, states in steps(run_schedule, schedule, T, g, passes):
        cells = dict(enumerate(zip(made, final))) | dict(zip(tokens, states))
        row = ""
        for i in range(T):
            number, exact = cells.get(i, (None, False))
            text = "." if number is None else f"{number:.0f}"
            row += (f" [{text}]" if i in tokens else f"  {text} ") + ("*" if exact else " ")
        lines.append(f"  {states[0][0]:>4.0f}  {row}".rstrip())
    return lines


def exact_after(run_schedule, schedule, T, g, passes):
    """How many first tokens are final after each of so many passes."""
    counts, final = [], set()
    for tokens, _, _, states in steps(run_schedule, schedule, T, g, passes):
        final |= {i for i, (_, done) in zip(tokens, states) if done}
        counts += [0] * (int(states[0][0]) - len(counts))
        counts[-1] = next(i for i in range(T + 1) if i not in final)
    return counts


def show(run_schedule, T, g):
    print(f"{T} tokens in columns, one step in each row.\n"
          f"[n] is computed in this step, in pass n. It reads the cells to its left. n was made in pass n, 0 from the\n"
          f"embedding alone. * is final: more passes do not change it.\n")
    for schedule, passes in (("jacobi", min(T, 4)), ("cyclic", -(-T // min(g, T))), ("contiguous", min(T, 2)),
                             ("autoregressive", 1)):
        print("\n".join(picture(run_schedule, schedule, T, g, passes)) + "\n")


def prove(run_schedule, T, g):
    print(f"{T} tokens, g = {g}. Exact first tokens after pass 1, 2, 3, .., counted in the schedules' own runs:")
    for schedule, steps_a_pass, claim in (("jacobi", 1, "p"), ("cyclic", min(g, T), "p g"),
                                          ("contiguous", min(g, T), "p or more"), ("autoregressive", T, "all")):
        counts = exact_after(run_schedule, schedule, T, g, 1 if schedule == "autoregressive" else T)
        counts = " ".join(map(str, counts[:counts.index(T) + 1]))
        print(f"  {schedule:<15}{steps_a_pass:>3} sequential steps a pass, claimed {claim:<10} counted {counts}")


@program("cyclic.py")
def main(run_schedule):
    """`python cyclic.py`: the pictures and the counts; with --show, the pictures alone. T=12 g=4 unless given."""
    words = [word for word in sys.argv[1:] if word != "--show"]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return
    sizes = {"T": "12", "g": "4"}
    for word in words:
        name, _, value = word.partition("=")
        if name not in sizes:
            raise SettingError(f"{word} is unknown: give T=12 for the tokens, g=4 for the groups, --show for the "
                               f"pictures alone; for tables of a trained model: python -m tools.schedules RUN")
        sizes[name] = value
    T, g = (configs.convert(name, value, int) for name, value in sizes.items())
    if not (1 <= g and 1 <= T <= 100):
        raise SettingError(f"T={T} g={g}: give from 1 to 100 tokens, and at least 1 group")
    show(run_schedule, T, g)
    if "--show" not in sys.argv:
        prove(run_schedule, T, g)
