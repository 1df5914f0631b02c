"""
The page of tools.probe: for each question a picture, what to look for, and what was found, all from probe.json alone.

A picture is read in print, by colour-blind readers, and at 800 pixels: Okabe and Ito's colours, a marker for each run,
line styles for the streams of one run, uniform maps for tables. matplotlib is imported where something is drawn.
"""
import html
import math
from pathlib import Path
from typing import Callable, NamedTuple

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
MARKERS, STYLES = "osD^vP*X", ["-", "--", "-.", ":"]
GREY = "#666666"


class Question(NamedTuple):
    name: str               # of the picture
    title: str
    look: str               # what to look for
    panels: Callable        # results -> [Panel]
    found: Callable         # (label, result) -> a sentence, or None where this model has no answer


class Panel(NamedTuple):
    title: str
    xlabel: str
    ylabel: str
    first: int              # x of the first value
    lines: list             # [(label, values, index of the run, index of the line in its run)]
    references: list = []   # [(label, values)]


def mean(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def lowest(values):
    """(value, where) of the least number among them."""
    return min((value, n) for n, value in enumerate(values) if value is not None)


def largest(values):
    return max((value, n) for n, value in enumerate(values) if value is not None)


def by_run(results, name):
    """A line for each run that has any such number."""
    return [(label, r[name], i, 0) for i, (label, r) in enumerate(results.items()) if mean(r[name]) is not None]


def uniform_lines(results, name):
    """The references that differ, named where there are several."""
    kinds = {}
    for label, r in results.items():
        kinds.setdefault(tuple(round(value, 4) for value in r[name]), []).append(label)
    return [("uniform attention" + (f" ({', '.join(labels)})" if len(kinds) > 1 else ""), list(values))
            for values, labels in kinds.items()]


# ---------------------------------------------------------------------------------------------------------------------
# The questions


def similarity(results):
    return [Panel("", "depth (0: embedding)", "mean cosine of two tokens' states", 0, by_run(results, "similarity"))]


def similarity_found(label, r):
    (top, at), values = largest(r["similarity"]), r["similarity"]
    return (f"{label}: from {values[0]:.2f} at the embedding to {values[-1]:.2f} at the top, the largest "
            f"{top:.2f} at depth {at}.")


def adjacent(results):
    lines = [(label if way == "x" else f"{label} {way}", values, i, j) for i, (label, r) in enumerate(results.items())
             for j, (way, values) in enumerate(r["adjacent"].items()) if values]
    return [Panel("", "layer n", "cosine of the inputs of layers n-1 and n", 1, lines)]


def adjacent_found(label, r):
    means = {way: mean(values) for way, values in r["adjacent"].items() if values}
    if not means:
        return None
    if "x" in means:
        value, at = lowest(r["adjacent"]["x"])
        return f"{label}: {means['x']:.2f} on average, the least {value:.2f} into layer {at + 1}."
    least = min(means, key=means.get)
    return f"{label}: " + ", ".join(f"{way} {value:.2f}" for way, value in means.items()) + \
        f" on average; stream {least} changes most."


def sink(results):
    return [Panel("attention mass", "layer", "mass on the first token, mean over heads", 0, by_run(results, "mass"),
                  uniform_lines(results, "mass_uniform")),
            Panel("sink rate", "layer", "share of heads with a mass above 0.3", 0, by_run(results, "sink_rate"))]


def sink_found(label, r):
    mass, rate = mean(r["mass"]), mean(r["sink_rate"])
    if rate == 0:
        most, at = largest([max(heads) for heads in r["mass_by_head"]])
        plain = r["settings"].get("model", "gpt") == "gpt"
        return (("the baseline " if plain else "") + f"{label} has no sink here (mass on the first token {mass:.2f}, "
                f"sink rate 0; the most of any head is {most:.2f}, in layer {at})"
                + (": that a mechanism removes sinks cannot be tested on this checkpoint." if plain else "."))
    most, at = largest(r["sink_rate"])
    return f"{label}: {rate:.0%} of all heads are sinks, most of them in layer {at} ({most:.0%}); mean mass {mass:.2f}."


def values(results):
    return [Panel("the layer's own value", "layer", "norm, first token by the mean of the others", 0,
                  by_run(results, "own_value"), [("equal norms", [1.0] * longest(results))]),
            Panel("what attention moves", "layer", "", 0, by_run(results, "moved_value"),
                  [("equal norms", [1.0] * longest(results))])]


def longest(results):
    return max(len(r["moved_value"]) for r in results.values())


def values_found(label, r):
    value, at = lowest(r["moved_value"])
    sentence = f"{label}: of the moved value at least {value:.2f} (layer {at})"
    if mean(r["own_value"]) is None:
        return sentence + "; its layers make none of their own from their input."
    value, at = lowest(r["own_value"])
    return sentence + f", of the layer's own at least {value:.2f} (layer {at}): " + \
        ("drained, less than half of the others'." if value < 0.5 else "not drained.")


def entropy(results):
    return [Panel("", "layer", "entropy of token importance, nats", 0, by_run(results, "entropy"),
                  uniform_lines(results, "entropy_uniform"))]


def entropy_found(label, r):
    value, at = lowest(r["entropy"])
    return (f"{label}: {mean(r['entropy']):.2f} nats on average, the least {value:.2f} in layer {at}; attention that "
            f"looks at all it sees alike has {mean(r['entropy_uniform']):.2f}.")


def lambdas(results):
    return [Panel(title, "layer", "weight" if name == "lam1" else "", 0,
                  [(label, r["lambdas"][name], i, 0) for i, (label, r) in enumerate(results.items()) if r["lambdas"]])
            for name, title in (("lam1", "of what is handed up"), ("lam2", "of the layer's own"))]


def lambdas_found(label, r):
    if not r["lambdas"] or mean(r["lambdas"]["lam1"]) is None:
        return None
    handed, own = r["lambdas"]["lam1"], r["lambdas"]["lam2"]
    if not r["lambdas_trained"]:
        return f"{label}: fixed by its variant, not learned ({mean(handed):.2f} and {mean(own):.2f} on average)."
    value, at = max(((abs(value), n) for n, value in enumerate(handed) if value is not None))
    return (f"{label}: {mean(handed):.2f} of what is handed up and {mean(own):.2f} of the own on average; what is handed "
            f"up weighs most in layer {at} ({handed[at]:.2f}).")


QUESTIONS = [
    Question("similarity", "Do the states of different tokens become alike?",
             "A curve that climbs towards 1 is over-smoothing: deep layers can hardly tell tokens apart. The value "
             "residual is said to slow it down.", similarity, similarity_found),
    Question("adjacent", "How much does the input change from layer to layer?",
             "Near 1, a layer reads what the one below read. In MUDD, whose query, key, value and residual read mixtures "
             "of their own, the value stream is said to fall furthest.", adjacent, adjacent_found),
    Question("sink", "Is the first token a sink of attention?",
             "A sink is a head that spends more than 0.3 of its attention on the first token, whatever that is. QK-norm, "
             "short windows and bytes may leave none, and then no mechanism can be seen to remove it.", sink, sink_found),
    Question("values", "Is the first token's value drained?",
             "Far below 1, the value of the first token is nearly nothing: a sink that moves nothing. The two panels "
             "answer different questions: what the layer itself makes, and what its attention moves after a mix.",
             values, values_found),
    Question("entropy", "How widely is attention spent?",
             "Low means that a few tokens receive nearly all attention. Hold a curve against uniform attention under the "
             "same mask, not against ln T: early tokens are seen by more.", entropy, entropy_found),
    Question("lambdas", "Which weights did the value residual learn?",
             "Paper layer n is layer n-1 here. Layers without a mix have no point; a learned weight far from its start "
             "says where the first layer's values are wanted.", lambdas, lambdas_found),
]

TABLE_LOOK = ("Rows read, columns are read; blank cells are no read. Look for columns that stay dark far from the "
              "diagonal: a depth that many layers go back to. The lower row, if there is one, is how much a weight varies "
              "from token to token.")
GRID_LOOK = ("Computed from gradients: cells are filled where the row's layer reads the state at the column's depth with no "
             "other layer in between, at the token's own position (top) and at earlier ones (bottom). A ring marks the depth "
             "at which the layer stands; filled cells to its right are reads of depths above the reader. Shade: the share "
             "of this read in what moves the layer's output.")


def table_found(label, r):
    """The strongest read beside the newest state, of every panel."""
    sentences = []
    for title, panel in r["tables"]["panels"].items():
        cells = [(abs(value), n, m) for n, row in enumerate(panel["mean"]) for m, value in enumerate(row)
                 if value is not None and (r["tables"]["rows"] == "channel" or m != n)]
        if cells:
            value, n, m = max(cells)
            where = "the head" if r["tables"]["head"] and n == len(panel["mean"]) - 1 else f"{r['tables']['rows']} {n}"
            sentences.append(f"{title}: {panel['mean'][n][m]:.2f} ({where} on {m})")
    beside = "" if r["tables"]["rows"] == "channel" else " beside what a layer stands on"
    return f"{label}, the strongest read{beside}: " + "; ".join(sentences) + "." if sentences else None


def reads_found(label, r):
    """The pattern in words."""
    N = len(r["reads"]["own"]) - 1

    def depths(kind):
        found = {n: [m for m in range(N + 1) if r["reads"][kind][n][m]] for n in range(N)}
        if all(row == [n] for n, row in found.items()):
            return "only the depth that it stands at"
        also = "also " if any(n in row for n, row in found.items() if n) else ""
        above = any(m > n for n, row in found.items() for m in row)
        return f"{also}depths {'above' if above else 'below'} its own"
    return f"{label}: at its own position a layer reads {depths('own')}, of past tokens {depths('past')}."


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


def pyplot():
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"font.size": 11, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
                         "legend.frameon": False, "legend.fontsize": 10, "figure.dpi": 150, "savefig.dpi": 150})
    return plt


def numbers(values):
    return [math.nan if value is None else value for value in values]


def draw_lines(path, panels):
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(8, 3.8), squeeze=False, layout="constrained")
    handles = {}
    for axis, panel in zip(axes[0], panels):
        for label, values, run, line in panel.lines:
            x = range(panel.first, panel.first + len(values))
            handles[label], = axis.plot(x, numbers(values), color=COLOURS[run % 8], marker=MARKERS[(run + line) % 8],
                                        linestyle=STYLES[line % 4], linewidth=1.6, markersize=6, clip_on=False)
        for n, (label, values) in enumerate(panel.references):
            handles[label], = axis.plot(range(panel.first, panel.first + len(values)), values, color=GREY,
                                        linestyle=STYLES[3 - n % 3], linewidth=1.4)
        axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.margins(y=0.08)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))
    figure.savefig(path)
    plt.close(figure)


def draw_tables(path, tables):
    """A heat map for each panel, means above and standard deviations over tokens below."""
    import matplotlib.colors as colors
    plt = pyplot()
    panels = tables["panels"]
    kinds = ["mean", "sd"] if any(panel["sd"] for panel in panels.values()) else ["mean"]
    n_rows = max(len(panel["mean"]) for panel in panels.values())
    height = 1.1 + len(kinds) * max(1.6, min(3.2, 0.28 * n_rows + 0.9))
    size = max(4.5, min(8, 3.4 * len(panels))), height
    figure, axes = plt.subplots(len(kinds), len(panels), figsize=size, squeeze=False, layout="constrained")
    for kind, row in zip(kinds, axes):
        lines = [line for panel in panels.values() for line in panel[kind] or []]
        every = [value for line in lines for value in line if value is not None]
        most = max(map(abs, every), default=0) or 1.0
        signed = min(every, default=0) < 0
        if kind == "mean" and signed:
            scale, cmap = colors.SymLogNorm(linthresh=most / 30, vmin=-most, vmax=most), "PuOr_r"
        else:
            scale, cmap = colors.Normalize(0, most), "viridis_r"
        for axis, (title, panel) in zip(row, panels.items()):
            if not panel[kind]:
                axis.axis("off")
                continue
            image = axis.imshow([numbers(line) for line in panel[kind]], norm=scale, cmap=cmap, aspect="auto")
            axis.set(title=title + (", s.d. over tokens" if kind == "sd" else ""), xlabel=tables["columns"])
            ticks(axis, len(panel[kind][0]), len(panel[kind]), tables["head"])
        row[0].set_ylabel(tables["rows"])
        figure.colorbar(image, ax=row, label=tables["what"] if len(panels) < 3 else "weight x norm", shrink=0.9)
    figure.savefig(path)
    plt.close(figure)


def ticks(axis, columns, rows, head):
    """Few enough to be read; the last row may be the head."""
    step = max(1, math.ceil(rows / 8))
    at = [n for n in range(rows) if n % step == 0 and (not head or n < rows - 1)] + ([rows - 1] if head else [])
    axis.set_yticks(at, ["head" if head and n == rows - 1 else str(n) for n in at])
    axis.set_xticks(range(0, columns, max(1, math.ceil(columns / 8))))


def draw_grids(path, results):
    """Two panels for each model, own position above and past below: rows read, columns are read."""
    plt = pyplot()
    figure, axes = plt.subplots(2, len(results), figsize=(max(4, 1.9 * len(results) + 0.6), 4.6), squeeze=False,
                                layout="constrained")
    for column, (label, r) in zip(axes.T, results.items()):
        for axis, kind in zip(column, ("own", "past")):
            reads = r["reads"][kind]
            cells = [[value or math.nan for value in row] for row in reads]
            image = axis.imshow(cells, cmap="viridis_r", vmin=0, vmax=1)
            for n, row in enumerate(reads):
                for m, value in enumerate(row):
                    colour, width = ("black", 0.9) if value else ("#dddddd", 0.5)
                    axis.add_patch(plt.Rectangle((m - 0.5, n - 0.5), 1, 1, facecolor="none", edgecolor=colour,
                                                 linewidth=width, zorder=2 + bool(value)))
                axis.plot(n, n, marker="o", markersize=4, markerfacecolor="none", zorder=4,
                          markeredgecolor="white" if reads[n][n] and reads[n][n] > 0.4 else "black")
            ticks(axis, len(reads), len(reads), head=True)
            axis.spines[:].set_visible(False)
            axis.tick_params(length=0)
            axis.set_xlabel("depth" if kind == "past" else "")
        column[0].set_title(label)
    axes[0, 0].set_ylabel("own position\nreading layer")
    axes[1, 0].set_ylabel("past tokens\nreading layer")
    figure.colorbar(image, ax=axes, label="strength of the read", shrink=0.8)
    figure.savefig(path)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# The page


def page(out, results):
    """Draw every picture into the folder `out`; -> the page that shows them."""
    sections = []
    for question in QUESTIONS:
        found = {label: question.found(label, r) for label, r in results.items()}
        if any(found.values()):
            draw_lines(Path(out, f"{question.name}.png"), question.panels(results))
            sections.append(section(question.title, f"{question.name}.png", question.look, found.values()))
            silent = [label for label, sentence in found.items() if not sentence]
        else:
            silent = list(found)
            sections.append(section(question.title, None, question.look, []))
        if silent:
            sections.append(f"<p>No answer from {html.escape(', '.join(silent))}: no such quantity in the model.</p>")
    title = "Which weights does a model give to what it reads?"
    for n, (label, r) in enumerate(results.items()):
        if r.get("tables", {}).get("panels"):
            name = f"weights_{n}_{''.join(c if c.isalnum() else '_' for c in label)}.png"
            draw_tables(Path(out, name), r["tables"])
            sections.append(section(f"{title} {label}", name, TABLE_LOOK, [table_found(label, r)]))
    silent = [label for label, r in results.items() if not r.get("tables", {}).get("panels")]
    if silent:
        sections.append(f"<p>{title} No answer from {html.escape(', '.join(silent))}: it has no table of weights.</p>")
    draw_grids(Path(out, "reads.png"), results)
    found = [reads_found(label, r) for label, r in results.items()]
    sections.append(section("Who reads whom?", "reads.png", GRID_LOOK, found))
    return PAGE.format(runs="".join(map(run_line, results, results.values())), sections="\n".join(sections))


def run_line(label, r):
    loss = "not measured" if r["val_loss"] is None else f"{r['val_loss']:.4f} nats per token"
    return (f"<li>{html.escape(label)}: {html.escape(r['path'])}, step {r['step']}, validation loss {loss}; "
            f"{r['windows']} windows of {r['tokens']} held-out tokens. Attention computed from the trace is the model's "
            f"own to {r['error']:.0e}.</li>")


def section(title, picture, look, found):
    image = f'<img src="{picture}" alt="{html.escape(title)}">' if picture else ""
    sentences = "".join(f"<li>{html.escape(sentence[0].upper() + sentence[1:])}</li>" for sentence in found if sentence)
    return (f"<h2>{html.escape(title)}</h2>{image}<p><b>Look for.</b> {html.escape(look)}</p>"
            + (f"<p><b>Found.</b></p><ul>{sentences}</ul>" if sentences else ""))


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Inside the models</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 850px; margin: 2em auto; padding: 0 1em; color: #222 }}
img {{ width: 100%; max-width: 800px }} h2 {{ margin-top: 2em }}</style></head>
<body><h1>Inside the models</h1>
<p>Made by <code>python -m tools.probe</code>; every number that is drawn stands in <a href="probe.json">probe.json</a>.
One run of each model shows what these weights do, not what the mechanism does: seeds differ.</p>
<ul>{runs}</ul>
{sections}
</body></html>
"""
