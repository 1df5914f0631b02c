"""
What happens inside trained models, measured on held-out text: `python -m tools.probe runs/gpt-1 runs/mudd-1`.

    python -m tools.probe                                     the newest run
    python -m tools.probe runs/a runs/b/last.pt --windows=32  several, side by side, on the same windows
    python -m tools.probe --grid                              who reads whom in the main models; needs no run

inside.py takes the tensors out of a model, measures.py asks the papers' questions of them, figures.py draws. Attention
patterns are computed from the traced q and k; if they do not give what the model's own attention gave, nothing is
shown. A run's folder `probe` then has index.html, a picture for each question, and every number in probe.json.

Feedback models run by the schedule they were trained with.
"""
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import configs
import data
from configs import SettingError
from mudd import MUDD
from tools.probe import figures
from tools.probe.inside import TABLES, attention, direct_reads, lambdas, look, own_value, seen_by, tables_of
from tools.probe.measures import (adjacent_cosine, first_mass, first_norm, importance_entropy, sink_rate,
                                  token_similarity, uniform)
from train import build, open_run, run_data
from trainer.console import program
from trainer.device import usable_device

# ---------------------------------------------------------------------------------------------------------------------
# All of it, on a few windows


@torch.no_grad()
def measure(model, idx):
    """One window idx (1, T) -> {name: tensor}, and moments of the tables. ValueError where the trace does not fit."""
    trace, states, given = look(model, idx)
    rows = dict(mass=[], entropy=[], own=[], moved=[], error=[])
    for n, attended in enumerate(given):
        A, u = attention(model, n, trace)
        error = (u - attended).abs().max() / attended.abs().max().clamp(min=1e-30)
        if not error <= 1e-4:
            raise ValueError(f"{type(model).__name__}: the attention computed from the trace of layer {n} is off the "
                             f"model's own by {error:.1e} of its largest number: the trace is not what it attends to")
        own = own_value(model, n, trace)
        rows["mass"].append(first_mass(A))
        rows["entropy"].append(importance_entropy(A))
        rows["own"].append(A.new_tensor(torch.nan) if own is None else first_norm(own))
        rows["moved"].append(first_norm(trace["v"][n]))
        rows["error"].append(error)
    reads = [trace["x"][n] for n in range(len(given))]                   # (ways, B, T, D): one, or q, k, v and r
    ways = max(map(len, reads))
    x = torch.stack([r if len(r) == ways else r[:1].expand(ways, *r.shape[1:]) for r in reads])
    numbers = {name: torch.stack(values) for name, values in rows.items()}
    return numbers | dict(similarity=torch.stack([token_similarity(h) for h in states]),
                          adjacent=adjacent_cosine(x[1:], x[:-1])), tables_of(model, trace, states)


def probe(model, windows, bar):
    """Everything that is drawn of one model, as JSON holds it."""
    numbers, tables = [], []
    for idx in windows:
        for kept, new in zip((numbers, tables), measure(model, idx)):
            kept.append(new)
        bar.update()
    mean = {name: torch.stack([n[name].cpu().double() for n in numbers]).mean(dim=0) for name in numbers[0]}
    N, T = len(mean["entropy"]), windows[0].size(1)
    references = [uniform(seen_by(model, n, T)) for n in range(N)]
    own, past = direct_reads(model, torch.cat(windows[:4])[:, :32])
    ways = "qkvr" if mean["adjacent"].size(1) == 4 else "x"
    trained = any(name in ("lam1", "lam2", "z") for name, _ in model.named_parameters())
    result = dict(
        similarity=mean["similarity"], adjacent=dict(zip(ways, mean["adjacent"].T)),
        mass_by_head=mean["mass"], mass=mean["mass"].mean(dim=1), sink_rate=sink_rate(mean["mass"]),
        mass_uniform=[first_mass(A).item() for A in references],
        own_value=mean["own"], moved_value=mean["moved"],
        entropy=mean["entropy"], entropy_uniform=[importance_entropy(A).item() for A in references],
        lambdas=lambdas(model), lambdas_trained=trained, dummy=getattr(model, "has_dummy", False),
        reads=dict(own=own, past=past), error=max(n["error"].max().item() for n in numbers))
    if tables[0]:
        _, what, unit, rows, columns = next(row for cls, row in TABLES.items() if isinstance(model, cls))
        panels = {}
        for title in tables[0]:
            first, square = torch.stack([t[title] for t in tables]).mean(dim=0)
            sd = None if square.isnan().all() else (square - first.square()).clamp(min=0).sqrt()
            if not first.isnan().all():
                panels[title] = dict(mean=first, sd=sd)
        result["tables"] = dict(what=what, unit=unit, rows=rows, columns=columns, head=isinstance(model, MUDD),
                                panels=panels)
    return as_lists(result)


def as_lists(value):
    """Tensors become lists and NaN becomes None, at any depth of dicts and lists."""
    if isinstance(value, dict):
        return {name: as_lists(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return as_lists(value.tolist())
    if isinstance(value, list):
        return [as_lists(item) for item in value]
    return None if value != value else value


# ---------------------------------------------------------------------------------------------------------------------
# Settings, runs and files

MAIN_MODELS = ["gpt", "value_residual", "mudd", "depth_attention", "whitematter"]
TINY = dict(vocab_size=64, block_size=8, n_layer=4, n_head=2, n_embd=32, d_ff=64)


@dataclass
class ProbeConfig:
    data: str | None = None       # held-out text: plays, plays_gpt2, or a folder (default: that of the runs)
    windows: int = 16             # so many windows of block_size tokens
    out: str | None = None        # folder to write to (default: probe in the first run's; with --grid runs/grid)
    device: str = "cpu"           # cpu, cuda, mps
    grid: bool = False            # only who_reads_whom.png, of fresh main models

    def __post_init__(self):
        if self.windows < 1:
            raise ValueError(f"--windows={self.windows}: give a whole number of at least 1")


def grid():
    """{name: reads} of the main models, small and fresh, every parameter moved off its start: no zero hides a path."""
    reads, generator = {}, torch.Generator().manual_seed(0)
    for name in MAIN_MODELS:
        model = build(name, **TINY).eval()
        for p in model.parameters():
            p.data += 0.05 * torch.randn(p.shape, generator=generator)
        own, past = direct_reads(model, torch.randint(64, (8, 8), generator=generator))
        reads[name] = dict(reads=dict(own=own, past=past))
    return as_lists(reads)


def load(paths, config):
    """[(label, Checkpoint)], the held-out windows [(1, T)] that all are to read, and the name of their text."""
    if len(paths) > len(figures.COLOURS):
        raise SettingError(f"{len(paths)} runs are more than there are colours: give at most {len(figures.COLOURS)}")
    opened = [open_run(path) for path in paths or [None]]
    runs, tokenizer = [run for run, _ in opened], opened[0][1]
    places = [Path(run.facts["path"]).resolve() for run in runs]
    if len(set(places)) < len(places):
        raise SettingError("the same checkpoint was named twice: name each once")
    names = [run.facts["settings"].get("model", "gpt") for run in runs]
    labels = next(labels for labels in (names, [place.parent.name for place in places], list(map(str, places)))
                  if len(set(labels)) == len(labels))
    sizes = {run.config.block_size for run in runs}
    texts = {run.facts["settings"].get("data", "plays") for run in runs}
    if len(sizes) > 1:
        raise SettingError(f"these runs have block_size {' and '.join(map(str, sorted(sizes)))}, so no window fits all "
                           f"of them: probe runs of one block_size together")
    if config.data is None and len(texts) > 1:
        raise SettingError(f"these runs were trained on {' and '.join(sorted(texts))}: give one as --data")
    T = sizes.pop()
    if T < 2:
        raise SettingError("block_size=1: a token alone has nothing to read")
    folder = next(run_data(run, config.data) for run in reversed(runs))
    for run in runs:
        run_data(run, config.data)                                       # each must know the tokens of the text
        if tokenizer.n_vocab > run.config.vocab_size:
            raise SettingError(f"{run.facts['path']} knows {run.config.vocab_size} token ids, and {folder} has "
                               f"{tokenizer.n_vocab}: give --data of the run's own tokenizer")
    tokens = data.open_tokens(folder, "val", tokenizer.n_vocab)
    cut = itertools.islice(data.windows(tokens, T, tokenizer.eot_token, 1), config.windows)
    windows = [x for x, _ in cut if x.size(1) == T]                      # the last of a text may be shorter
    if not windows:
        raise SettingError(f"{folder} has fewer than the {T} held-out tokens of a window: give another --data")
    return list(zip(labels, runs)), windows, config.data or texts.pop()


def measured(runs, windows, text, device):
    """{label: the run's facts and all that is drawn of it}"""
    results = {}
    with tqdm(total=len(runs) * len(windows), unit="window", dynamic_ncols=True, leave=False) as bar:
        for label, run in runs:
            bar.set_description(label)
            facts = dict(run.facts, windows=len(windows), tokens=windows[0].size(1), text=text)
            results[label] = facts | probe(run.model.to(device), [x.to(device) for x in windows], bar)
    return results


def summary(results):
    """A short table for the terminal."""
    lines = [f"{'':20} similarity  mass on the   sink  value norm, first/others  entropy  uniform",
             f"{'':20} at the top  first token   rate           own        moved     nats     nats"]

    def mean(values):
        value = figures.mean(values)
        return "none" if value is None else f"{value:.3f}"
    for label, r in results.items():
        lines.append(f"{label[:20]:20} {r['similarity'][-1]:10.3f} {mean(r['mass']):>12}  {mean(r['sink_rate']):>5} "
                     f"{mean(r['own_value']):>13} {mean(r['moved_value']):>12} {mean(r['entropy']):>8} "
                     f"{mean(r['entropy_uniform']):>8}")
    return "\n".join(lines)


@program("probe")
def main(argv):
    paths = []
    settings = configs.read(argv, paths)
    if settings.pop("help", False):
        print(__doc__ + configs.help_text(ProbeConfig))
        return
    config, = configs.build(settings, ProbeConfig)
    if config.grid and (paths or {"data", "windows"} & settings.keys()):
        raise SettingError("--grid draws fresh models and reads no text: leave the runs, --data and --windows out, or "
                           "leave --grid out")
    device = usable_device(config.device)
    if config.grid:
        out, name, shown = Path("runs", "grid"), "who_reads_whom.json", "who_reads_whom.png"
    else:
        runs, windows, text = load(paths, config)
        out, name, shown = Path(runs[0][1].facts["path"]).parent / "probe", "probe.json", "index.html"
    out = Path(config.out or out)
    out.mkdir(parents=True, exist_ok=True)
    results = grid() if config.grid else measured(runs, windows, text, device)
    data.write_text(out / name, json.dumps(results, indent=1) + "\n")
    if not config.grid:
        print(summary(results))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingError(f"{out / name} has the numbers; for pictures: pip install matplotlib") from None
    if config.grid:
        figures.draw_grids(out / shown, results)
    else:
        data.write_text(out / shown, figures.page(out, results))
    print(f"wrote {out / shown}")


if __name__ == "__main__":
    main(sys.argv[1:])
