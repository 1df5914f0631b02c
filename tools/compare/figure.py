"""The figure of a comparison: loss against tokens and FLOPs, and every difference with its interval."""
import statistics

from tools.compare.verdict import runs_of

COLOURS = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]      # Okabe and Ito's
LINES = ["-", "--", ":", "-."]


def figure(report, path):
    """Validation loss against tokens and FLOPs, and the final differences; of a merged result the last alone.
    ImportError without matplotlib."""
    from matplotlib.figure import Figure
    height = 1.2 + 0.45 * len(report["differences"])
    if not report["runs"]:
        canvas = Figure(figsize=(8, max(3, height)), layout="constrained")
        draw_differences(canvas.subplots(), report)
    else:
        canvas = Figure(figsize=(11, 5 + max(3, height)), layout="constrained")
        panels = canvas.subplot_mosaic([["tokens", "flops"], ["differences"] * 2], height_ratios=(4, max(3, height)))
        draw_losses(panels["tokens"], report, "tokens", lambda run: run["tokens"])
        draw_losses(panels["flops"], report, "training FLOPs, head included", lambda run: run["training_flops"])
        draw_differences(panels["differences"], report)
        handles, names = panels["tokens"].get_legend_handles_labels()
        canvas.legend(handles, names, loc="outside upper center", ncols=3 if len(names) < 10 else 4, fontsize=8)
    canvas.savefig(path, dpi=150)


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
