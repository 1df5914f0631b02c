"""
What the runs of a comparison show: paired differences with their interval, as a table and a figure. See tools.compare.

    d_s = L_s(arm) - L_s(baseline)              L: exact validation loss, in nats per token; s: a seed
    mean(d) +- t sd(d) / sqrt(n)                t: 97.5 % point of Student's t with n - 1 degrees of freedom, n seeds

Both runs of a seed see the same batches in the same order, and start from the same weights wherever the two models
share one. So d varies less than either loss does. The interval is for the mean over all seeds, at this size, text and
length of training, and says nothing of others. Among twenty intervals of 95 %, one leaves out the truth.
"""
import itertools
import json
import math
import statistics

from configs import SettingError

FORMAT = "crosslayer comparison 1"
RUN = {"arm", "seed", "val_loss", "bits_per_byte", "parameters", "training_flops", "seconds_per_step", "steps",
       "tokens", "validation", "diverged", "device", "dtype", "compiled", "threads", "torch"}   # what is read of a run


def t_quantile(df, inside=0.95):
    """t such that a Student's t variable with df degrees of freedom is within -t .. t with probability `inside`."""
    def probability(t):                                                  # A(t | df), a finite sum for whole df
        angle = math.atan(t / math.sqrt(df))
        odd, total = df % 2, 0.0                                         # even df: 1 + 1/2 cos^2 + 1 3/(2 4) cos^4 ...
        term = math.cos(angle) if odd else 1.0                           # odd df: cos + 2/3 cos^3 + 2 4/(3 5) cos^5 ...
        for i in range(odd, df - 1, 2):
            total += term
            term *= (i + 1) / (i + 2) * math.cos(angle) ** 2
        return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    low, high = 0.0, 1e3
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < inside else (low, middle)
    return high


def interval(differences, of="seed"):
    """Mean, s.d. and 95 % interval of paired differences, and what they show. `of` names what was repeated."""
    n, mean = len(differences), statistics.fmean(differences)
    facts = dict(n=n, mean=mean, sd=None, low=None, high=None)
    if not math.isfinite(mean):
        return facts | dict(verdict="diverged")
    if n == 1:
        return facts | dict(verdict=f"one {of} shows nothing by itself")
    sd = statistics.stdev(differences)
    half = t_quantile(n - 1) * sd / math.sqrt(n)
    low, high = mean - half, mean + half
    shown = "lower" if high < 0 else "higher" if low > 0 else "not shown"
    return facts | dict(sd=sd, low=low, high=high, verdict=shown)


def tokens_to(loss, validation):
    """Tokens at which a curve [(tokens, loss)] first comes down to `loss`, linear between its points; None: never."""
    if validation[0][1] <= loss:
        return validation[0][0]
    for (before, above), (after, below) in itertools.pairwise(validation):
        if below <= loss:
            return before + (after - before) * (above - loss) / (above - below)
    return None


def runs_of(report, label):
    return {run["seed"]: run for run in report["runs"] if run["arm"] == label}


def compare_runs(report):
    """One dict for each arm that has a baseline: `interval` of the seeds that both have, and ratios to the baseline.
    A baseline that diverged has no loss to come down to; seconds of two machines have no ratio."""
    rows = []
    for arm in report["arms"]:
        runs, base = runs_of(report, arm["label"]), runs_of(report, arm["base"])
        seeds = [seed for seed in runs if seed in base]
        if not seeds:
            continue
        values = {seed: runs[seed]["val_loss"] - base[seed]["val_loss"] for seed in seeds}
        tokens = {seed: tokens_to(base[seed]["val_loss"], runs[seed]["validation"]) for seed in seeds
                  if math.isfinite(base[seed]["val_loss"])}
        seconds = [runs[seed]["seconds_per_step"] / base[seed]["seconds_per_step"] for seed in seeds
                   if runs[seed].get("given") == base[seed].get("given")]
        rows.append(dict(
            arm=arm["label"], base=arm["base"], values=values, **interval(list(values.values())),
            parameters=runs[seeds[0]]["parameters"] / base[seeds[0]]["parameters"],
            flops=runs[seeds[0]]["training_flops"] / base[seeds[0]]["training_flops"],
            seconds=statistics.fmean(seconds) if seconds else None,
            tokens=[t and t / base[seed]["tokens"] for seed, t in tokens.items()]))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The table


def table(report):
    """The runs and differences of a report, in Markdown. Ratios are to the baseline; its own row has the amounts."""
    rows = [["arm", "nats per token (s.d.)", "bits per byte", "difference (s.d.)", "95 % interval", "verdict",
             "parameters", "training FLOPs", "seconds per step", "tokens to its loss"]]
    differences = {row["arm"]: row for row in report["differences"]}
    several = len({row["base"] for row in differences.values()}) > 1
    for arm in report["arms"]:
        runs = list(runs_of(report, arm["label"]).values())
        if not runs:
            rows.append([arm["label"], "not finished", *[""] * 8])
            continue
        losses = [run["val_loss"] for run in runs]
        rows.append([arm["label"], f"{statistics.fmean(losses):.4f}" + deviation(losses),
                     f"{statistics.fmean(run['bits_per_byte'] for run in runs):.4f}"])
        if row := differences.get(arm["label"]):
            rows[-1] += [signed(row) + (f" to {row['base']}" if several else ""), bounds(row), row["verdict"]]
            rows[-1] += [f"x{row['parameters']:.3f}", f"x{row['flops']:.3f}"]
            rows[-1] += ["" if row["seconds"] is None else f"x{row['seconds']:.2f}", reached(row["tokens"])]
        else:
            seconds = statistics.fmean(run["seconds_per_step"] for run in runs)
            rows[-1] += ["", "", "", f"{runs[0]['parameters']:,}", f"{runs[0]['training_flops']:.3g}", f"{seconds:.3g}",
                         f"{runs[0]['tokens']:,}"]
    return markdown(rows)


def table_of_machines(report):
    rows = [["arm", "machines", "difference (s.d.)", "95 % interval", "verdict"]]
    rows += [[f"{row['arm']} to {row['base']}", str(row["n"]), signed(row), bounds(row), row["verdict"]]
             for row in report["differences"]]
    return markdown(rows)


def deviation(losses):
    return f" ({statistics.stdev(losses):.4f})" if len(losses) > 1 and math.isfinite(sum(losses)) else ""


def signed(row):
    return f"{row['mean']:+.4f}" + ("" if row["sd"] is None else f" ({row['sd']:.4f})")


def bounds(row):
    return "" if row["low"] is None else f"{row['low']:+.4f} to {row['high']:+.4f}"


def reached(tokens):
    """Of the baseline's tokens, the share after which an arm has its final loss: mean of the seeds that get there."""
    there = [t for t in tokens if t is not None]
    if not there:
        return "never" if tokens else ""
    some = f" ({len(there)} of {len(tokens)} seeds)" if len(there) < len(tokens) else ""
    return f"x{statistics.fmean(there):.2f}{some}"


def markdown(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


# ---------------------------------------------------------------------------------------------------------------------
# Many machines


def read_report(path):
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        return report if isinstance(report, dict) else {}
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({error.strerror}): name .json files of tools.compare") from None
    except ValueError:
        return {}


def whole(report):
    """Whether what a file holds is a result of one machine, as this version writes it."""
    try:
        labels = {arm["label"] for arm in report["arms"]}
        return (report["format"] == FORMAT and len(report["runs"]) > 0
                and all(RUN <= run.keys() for run in report["runs"])
                and all({"train", "model", "data", "code"} <= arm["identity"].keys() for arm in report["arms"])
                and all({row["arm"], row["base"]} <= labels and math.isfinite(row["n"]) and "mean" in row
                        for row in report["differences"]))
    except (KeyError, TypeError, AttributeError):
        return False


def merge(reports):
    """{path: report}, one of each machine -> the report over machines. A machine's difference is the mean over its
    seeds; the interval is over machines. SettingError, one line, where they cannot be put together."""
    first, *others = reports
    for path, report in reports.items():
        if not whole(report):
            raise SettingError(f"{path} is no result of tools.compare on one machine: name .json files that it wrote")
    for one, two in itertools.combinations(reports, 2):
        if seeds := seeds_of(reports[one]) & seeds_of(reports[two]):
            raise SettingError(f"{one} and {two} both have seed {min(seeds)}, so one repeats the other: give each "
                               f"machine seeds of its own with --first_seed")
    bases = [{row["arm"]: row["base"] for row in report["differences"]} for report in reports.values()]
    shared = [label for label, base in bases[0].items() if all(other.get(label) == base for other in bases)]
    if not shared:
        raise SettingError("these files have no arm in common that is compared with the same baseline: use the same "
                           "--models on all machines")
    for path, label in itertools.product(others, {label: None for arm in shared for label in (bases[0][arm], arm)}):
        if change := difference_of(identity_of(reports[first], label), identity_of(reports[path], label)):
            name, ours, theirs = change
            raise SettingError(f"{path}: {name} of {label} is {theirs}, and {ours} in {first}: all machines need the "
                               f"same settings, text and code")
    rows = []
    for label in shared:
        means = {path: next(row["mean"] for row in report["differences"] if row["arm"] == label)
                 for path, report in reports.items()}
        rows.append(dict(arm=label, base=bases[0][label], values=means, **interval(list(means.values()), of="machine")))
    arms = [dict(label=label, base=bases[0][label]) for label in shared]
    return dict(format=FORMAT, files=list(reports), arms=arms, runs=[], differences=rows)


def seeds_of(report):
    return {run["seed"] for run in report["runs"]}


def identity_of(report, label):
    return next(arm["identity"] for arm in report["arms"] if arm["label"] == label)


def difference_of(ours, theirs):
    """(name, our value, their value) of the first fact that differs, the machine's own left out; None if all agree."""
    for part in ("train", "model", "data", "code"):
        for name in sorted(ours[part].keys() | theirs[part].keys()):
            if ours[part].get(name) != theirs[part].get(name):
                return name, ours[part].get(name), theirs[part].get(name)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The figure

COLOURS = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]      # Okabe and Ito's
LINES = ["-", "--", ":", "-."]


def figure(report, path):
    """Validation loss against tokens, FLOPs and seconds, the difference against tokens, and the final differences; of a
    merged report the last alone. ImportError without matplotlib."""
    from matplotlib.figure import Figure
    height = 1.2 + 0.45 * len(report["differences"])
    if not report["runs"]:
        canvas = Figure(figsize=(8, max(3, height)), layout="constrained")
        draw_differences(canvas.subplots(), report)
    else:
        canvas = Figure(figsize=(13, 5 + max(3.5, height)), layout="constrained")
        panels = canvas.subplot_mosaic([["tokens", "flops", "seconds"], ["gap", "differences", "differences"]],
                                       height_ratios=(4, max(3.5, height)))
        draw_losses(panels["tokens"], report, "tokens", lambda run: run["tokens"])
        draw_losses(panels["flops"], report, "training FLOPs, head included", lambda run: run["training_flops"])
        draw_losses(panels["seconds"], of_one_source(report), "seconds of training steps",
                    lambda run: run["seconds_per_step"] * run["steps"])
        draw_gaps(panels["gap"], report)
        draw_differences(panels["differences"], report)
        handles, names = panels["tokens"].get_legend_handles_labels()
        canvas.legend(handles, names, loc="outside upper center", ncols=3 if len(names) < 10 else 4, fontsize=8)
    canvas.savefig(path, dpi=150)


def of_one_source(report):
    """Without the runs that come from elsewhere than the first, trained here or given: seconds of two machines do not
    belong on one axis."""
    source = report["runs"][0].get("given")
    return report | dict(runs=[run for run in report["runs"] if run.get("given") == source])


def draw_losses(ax, report, label, whole):
    """`whole`: a run -> what its whole training took of the x axis."""
    late = []
    for i, arm in enumerate(report["arms"]):
        runs = [run for run in runs_of(report, arm["label"]).values() if not run["diverged"]]
        if runs:
            total = statistics.fmean(map(whole, runs)) / runs[0]["tokens"]
            late += draw_band(ax, i, arm["label"], [[loss for _, loss in run["validation"]] for run in runs],
                              [tokens * total for tokens, _ in runs[0]["validation"]])
    zoom(ax, late)
    ax.set(xlabel=label, ylabel="validation loss, nats per token", title="mean and s.d. over seeds")


def draw_gaps(ax, report):
    late = []
    for i, arm in enumerate(report["arms"]):
        runs, base = runs_of(report, arm["label"]), runs_of(report, arm["base"])
        pairs = [(runs[seed]["validation"], base[seed]["validation"]) for seed in runs if seed in base]
        gaps = [[ours - plain for (at, ours), (same, plain) in zip(*pair) if at == same] for pair in pairs]
        if gaps and len({len(gap) for gap in gaps}) == 1 and all(map(math.isfinite, itertools.chain(*gaps))):
            late += draw_band(ax, i, arm["label"], gaps, [at for at, _ in pairs[0][0]][:len(gaps[0])])
    ax.axhline(0, color="grey", linewidth=1)
    zoom(ax, late)
    ax.set(xlabel="tokens", ylabel="less the baseline's, nats per token", title="paired difference: mean and s.d.")


def draw_band(ax, i, label, curves, x):
    """Mean and standard deviation of the seeds' curves over x. -> the band's limits, without its first quarter."""
    mean = [statistics.fmean(point) for point in zip(*curves)]
    sd = [statistics.stdev(point) if len(curves) > 1 else 0.0 for point in zip(*curves)]
    low, high = ([m + sign * s for m, s in zip(mean, sd)] for sign in (-1, 1))
    ax.plot(x, mean, LINES[i % 4], color=COLOURS[i % 7], marker="o", markersize=3, label=label)
    ax.fill_between(x, low, high, color=COLOURS[i % 7], alpha=0.15, linewidth=0)
    return low[len(low) // 4:] + high[len(high) // 4:]


def zoom(ax, late):
    """The first quarter of the training, steep as it is, may leave the picture."""
    if late:
        margin = 0.05 * (max(late) - min(late)) + 1e-3
        ax.set_ylim(min(late) - margin, max(late) + margin)


def draw_differences(ax, report):
    rows, labels = report["differences"], [arm["label"] for arm in report["arms"]]
    bases = {row["base"] for row in rows}
    several = len(bases) > 1
    for y, row in enumerate(rows):
        colour = COLOURS[labels.index(row["arm"]) % 7]
        ax.plot(list(row["values"].values()), [y] * row["n"], "|", color=colour, markersize=14, markeredgewidth=1.5)
        if row["low"] is not None:
            ax.plot([row["low"], row["high"]], [y, y], "-", color=colour, linewidth=2)
        ax.plot(row["mean"], y, "D", color=colour, markersize=6)
        name = row["arm"] + (f" to {row['base']}" if several else "")
        ax.text(0.01, y - 0.25, name, fontsize=8, va="bottom", transform=ax.get_yaxis_transform())
    ax.axvline(0, color="grey", linewidth=1)
    ax.set_yticks([])
    ax.set_ylim(max(len(rows), 1) - 0.5, -0.8)
    ax.set(xlabel="final validation loss less the baseline's, nats per token",
           title=f"difference to {'its baseline' if several else ''.join(bases)}: mean, 95 % interval, "
                 f"and {'seeds' if report['runs'] else 'machines'} as strokes")
