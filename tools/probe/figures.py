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
    limits: tuple           # (lowest y, highest y), None where the numbers decide
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
    """What attention to all that is seen alike would give, once for each mask that there is."""
    kinds = {}
    for label, r in sorted(results.items(), key=lambda item: -len(item[1][name])):
        kinds.setdefault(frozenset(round(value, 4) for value in r[name]), (label, r[name]))       # however many layers
    return [(f"uniform, mask of {label}" if len(kinds) > 1 else "uniform attention", values)
            for label, values in kinds.values()]


# ---------------------------------------------------------------------------------------------------------------------
# The questions


def similarity(results):
    return [Panel("", "depth (0: embedding)", "mean cosine of two tokens' states", (0, None), 0,
                  by_run(results, "similarity"))]


def similarity_found(label, r):
    (top, at), values = largest(r["similarity"]), r["similarity"]
    return (f"{label}: from {values[0]:.2f} at the embedding to {values[-1]:.2f} at the top, the largest "
            f"{top:.2f} at depth {at}.")


def adjacent(results):
    lines = [(label if way == "x" else f"{label} {way}", values, i, j) for i, (label, r) in enumerate(results.items())
             for j, (way, values) in enumerate(r["adjacent"].items()) if values]
    return [Panel("", "layer n", "cosine to the input of layer n-1", (0, 1), 1, lines)]


def adjacent_found(label, r):
    means = {way: mean(values) for way, values in r["adjacent"].items() if values}
    if not means:
        return None
    if "x" in means:
        value, at = lowest(r["adjacent"]["x"])
        return f"{label}: {means['x']:.2f} on average, the least {value:.2f} into layer {at + 1}."
    least, other = sorted(means, key=means.get)[:2]
    most = f"stream {least} changes most" if means[other] - means[least] >= 0.01 else "no stream stands out"
    return f"{label}: " + ", ".join(f"{way} {value:.2f}" for way, value in means.items()) + f" on average; {most}."


def sink(results):
    return [Panel("attention mass, mean over heads", "layer", "mass on the first token", (0, None), 0,
                  by_run(results, "mass"), uniform_lines(results, "mass_uniform")),
            Panel("sink rate", "layer", "share of heads above 0.3", (0, 1), 0, by_run(results, "sink_rate"))]


def sink_found(label, r):
    mass, rate, token = mean(r["mass"]), mean(r["sink_rate"]), "dummy" if r["dummy"] else "first token"
    alike = max(r["mass_uniform"])
    if alike > 0.3:
        return (f"{label}: cannot be told in windows this short, where looking at all that is seen alike puts "
                f"{alike:.2f} on the {token}; mass on it {mass:.2f}.")
    if rate == 0:
        most, at = largest([max(heads) for heads in r["mass_by_head"]])
        plain = r["settings"].get("model", "gpt") == "gpt"
        return (f"{label}: {'the baseline has ' * plain}no sink here (mass on the {token} {mass:.2f}, sink rate 0; the "
                f"most of any head is {most:.2f}, in layer {at})"
                + (": that a mechanism removes sinks cannot be tested on this checkpoint." if plain else "."))
    most, at = largest(r["sink_rate"])
    return (f"{label}: {rate:.0%} of all heads are sinks, most of them in layer {at} ({most:.0%}); mass on the {token} "
            f"{mass:.2f}.")


def values(results):
    equal = [("equal norms", [1.0] * max(len(r["moved_value"]) for r in results.values()))]
    return [Panel(title, "layer", "norm: first token / mean of others", (0, None), 0, by_run(results, name), equal)
            for name, title in (("own_value", "the layer's own value"), ("moved_value", "what attention moves"))]


def values_found(label, r):
    value, at = lowest(r["moved_value"])
    sentence = f"{label}: the least of the moved value is {value:.2f} (layer {at})"
    if mean(r["own_value"]) is None:
        return sentence + "; its layers make none of their own from their input."
    value, at = lowest(r["own_value"])
    return sentence + f", of the layer's own {value:.2f} (layer {at}): " + \
        ("drained, less than half of the others'." if value < 0.5 else "not drained.")


def entropy(results):
    return [Panel("", "layer", "entropy of token importance, nats", (None, None), 0, by_run(results, "entropy"),
                  uniform_lines(results, "entropy_uniform"))]


def entropy_found(label, r):
    value, at = lowest(r["entropy"])
    return (f"{label}: {mean(r['entropy']):.2f} nats on average, the least {value:.2f} in layer {at}; attention that "
            f"looks at all it sees alike has {mean(r['entropy_uniform']):.2f}.")


def lambdas(results):
    runs = [(label, r["lambdas"], i) for i, (label, r) in enumerate(results.items()) if lambdas_found(label, r)]
    return [Panel(title, "layer", "weight", (None, None), 0, [(label, lam[name], i, 0) for label, lam, i in runs])
            for name, title in (("lam1", "of what is handed up"), ("lam2", "of the layer's own"))]


def lambdas_found(label, r):
    if not r["lambdas"] or mean(r["lambdas"]["lam1"]) is None:
        return None
    handed, own = r["lambdas"]["lam1"], r["lambdas"]["lam2"]
    if not r["lambdas_trained"]:
        return f"{label}: fixed by its variant, not learned ({mean(handed):.2f} and {mean(own):.2f} on average)."
    _, at = max((abs(value), n) for n, value in enumerate(handed) if value is not None)
    return (f"{label}: {mean(handed):.2f} of what is handed up and {mean(own):.2f} of the own on average; what is "
            f"handed up weighs most in layer {at} ({handed[at]:.2f}).")


QUESTIONS = [
    Question("similarity", "Do the states of different tokens become alike?",
             "A curve that climbs towards 1 is over-smoothing: deep layers can hardly tell tokens apart. The value "
             "residual is said to slow it down.", similarity, similarity_found),
    Question("adjacent", "How much does the input change from layer to layer?",
             "Near 1, a layer reads what the one below read. In MUDD, whose query, key, value and residual read "
             "mixtures of their own, the value stream is said to fall furthest.", adjacent, adjacent_found),
    Question("sink", "Is the first token a sink of attention?",
             "A sink is a head that spends more than 0.3 of its attention on the first token, whatever that is. "
             "QK-norm, short windows and bytes may leave none, and then no mechanism can be seen to remove it.",
             sink, sink_found),
    Question("values", "Is the first token's value drained?",
             "Far below 1, the value of the first token is nearly nothing: a sink that moves nothing. The two panels "
             "answer different questions: what the layer itself makes, and what its attention moves after a mix.",
             values, values_found),
    Question("entropy", "How widely is attention spent?",
             "Low means that a few tokens receive nearly all attention. Hold a curve against uniform attention under "
             "the same mask, not against ln T: early tokens are seen by more. Above it, attention leans to near ones.",
             entropy, entropy_found),
    Question("lambdas", "How much of what is handed up does a layer take?",
             "Paper layer n is layer n-1 here. Layers without a mix have no point; a learned weight far from its start "
             "says where what is handed up is wanted.", lambdas, lambdas_found),
]

TABLE_LOOK = """Rows read, columns are read; where there is no weight it is grey. Look for columns that stay strong far
from the diagonal: a depth that many layers go back to. The standard deviation, if there is one, says how much a weight
varies from token to token."""
GRID_LOOK = """Computed from gradients: a cell is filled where the row's layer reads the state at the column's depth
with no other layer in between, at the token's own position (top) and at earlier ones (bottom). A ring marks the depth
at which the layer stands; filled cells to its right are reads of depths above the reader. Shade: the share of this read
in what moves the layer's output; its squares add up to 1 over both rows of cells."""


def table_found(label, r):
    """The strongest read beside the newest state, of every panel."""
    sentences = []
    for title, panel in r["tables"]["panels"].items():
        cells = [(abs(value), n, m) for n, row in enumerate(panel["mean"]) for m, value in enumerate(row)
                 if value is not None and (r["tables"]["rows"] == "channel" or m != n)]
        if cells:
            value, n, m = max(cells)
            where = "head" if r["tables"]["head"] and n == len(panel["mean"]) - 1 else f"{r['tables']['rows']} {n}"
            sentences.append(f"{title}: {panel['mean'][n][m]:.2f} ({where}, {r['tables']['columns']} {m})")
    beside = "" if r["tables"]["rows"] == "channel" else " beside what a layer stands on"
    return f"{label}, the strongest read{beside}: " + "; ".join(sentences) + "." if sentences else None


def reads_found(label, r):
    """The pattern in words."""
    def depths(kind):
        cells = [(n, m) for n, row in enumerate(r["reads"][kind][:-1]) for m, value in enumerate(row) if value]
        other = sorted({m for n, m in cells if m != n})
        parts = ["the depth at which it stands"] * any(m == n for n, m in cells)
        if other:
            span = ", ".join(map(str, other)) if len(other) < 7 else f"{other[0]} to {other[-1]}"
            parts.append(f"depth{'s' * (len(other) > 1)} {span}")
        return " and ".join(parts) + ", also above its own" * any(m > n for n, m in cells)
    return f"{label}: at its own position a layer reads {depths('own')}; of past tokens {depths('past')}."


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
    names = {line[0] for panel in panels for line in (*panel.lines, *panel.references)}
    columns = len(names) if len(names) < 5 else 3
    size = 8, 3.4 + 0.22 * math.ceil(len(names) / columns)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    handles = {}
    for axis, panel in zip(axes[0], panels):
        for label, values, run, line in panel.lines:
            x = range(panel.first, panel.first + len(values))
            handles[label], = axis.plot(x, numbers(values), color=COLOURS[run], marker=MARKERS[(run + line) % 8],
                                        linestyle=STYLES[line % 4], linewidth=1.6, clip_on=False,
                                        markersize=max(4, 10 - 1.5 * (run + line)))       # equal points all show
        for n, (label, values) in enumerate(panel.references):
            handles[label], = axis.plot(range(panel.first, panel.first + len(values)), values, color=GREY,
                                        linestyle=STYLES[3 - n % 3], linewidth=1.4)
        axis.margins(y=0.08)
        axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        low, high = panel.limits
        below = low is not None and any(value is not None and value < low for line in panel.lines for value in line[1])
        axis.set_ylim(None if below else low, high)
        longest = max(len(line[1]) for line in (*panel.lines, *panel.references))
        axis.set_xticks(range(panel.first, panel.first + longest, math.ceil(longest / 8)))
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    figure.savefig(path)
    plt.close(figure)


def draw_tables(path, tables):
    """A heat map for each panel, means and, in a second row, standard deviations; of a single panel side by side."""
    import matplotlib.colors as colors
    plt = pyplot()
    panels = tables["panels"]
    kinds = ["mean", "sd"] if any(panel["sd"] for panel in panels.values()) else ["mean"]
    down, across = (len(kinds), len(panels)) if len(panels) > 1 else (1, len(kinds))
    shape = next((len(panel["mean"]), len(panel["mean"][0])) for panel in panels.values())
    width = 8 if across > 1 else 5
    height = min(3.2, ((width - 1) / across - 1) * shape[0] / shape[1])
    size = width, down * (height + 0.9) + 0.3
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for kind, row in zip(kinds, axes if len(panels) > 1 else axes.T):
        lines = [line for panel in panels.values() for line in panel[kind] or []]
        every = [value for line in lines for value in line if value is not None]
        most = max(map(abs, every)) or 1.0
        signed = kind == "mean" and min(every) < 0
        scale = colors.SymLogNorm(linthresh=most / 30, vmin=-most, vmax=most) if signed else colors.Normalize(0, most)
        for axis, (title, panel) in zip(row, panels.items()):
            if not panel[kind]:
                axis.axis("off")
                continue
            cells = [numbers(line) for line in panel[kind]]
            image = axis.imshow(cells, norm=scale, cmap="PuOr_r" if signed else "viridis_r")
            axis.set(title=title + ", s.d." * (kind == "sd"), xlabel=tables["columns"], facecolor="#d0d0d0")
            ticks(axis, shape[1], shape[0], tables["head"])
        row[0].set_ylabel(tables["rows"])
        bar = figure.colorbar(image, ax=list(row), label=tables["unit"], shrink=0.9)
        if signed:
            at = [-most, -most / 8, 0, most / 8, most]
            bar.set_ticks(at, labels=[f"{x:.2g}" if abs(x) < 10 else f"{x:.0f}" for x in at])
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
    alike, across = len({len(r["reads"]["own"]) for r in results.values()}) == 1, min(5, len(results))
    bands = math.ceil(len(results) / across)                             # at most five models side by side
    figure, axes = plt.subplots(2 * bands, across, figsize=(max(4, 1.7 * across + 1), 4 * bands), squeeze=False,
                                layout="constrained", sharey=alike)
    columns = [axes[2 * band:2 * band + 2, n] for band in range(bands) for n in range(across)]
    for column in columns[len(results):]:
        column[0].axis("off"), column[1].axis("off")
    for column, (label, r) in zip(columns, results.items()):
        for axis, kind in zip(column, ("own", "past")):
            reads = r["reads"][kind]
            cells = [[value or math.nan for value in row] for row in reads]
            image = axis.imshow(cells, cmap="viridis_r", vmin=0, vmax=1)
            for n, row in enumerate(reads):
                for m, value in enumerate(row):
                    colour, width = ("black", 0.9) if value else ("#dddddd", 0.5)
                    axis.add_patch(plt.Rectangle((m - 0.5, n - 0.5), 1, 1, facecolor="none", edgecolor=colour,
                                                 linewidth=width, zorder=2 + bool(value)))
                if any(row):
                    axis.plot(n, n, marker="o", markersize=4, markerfacecolor="none", zorder=4,
                              markeredgecolor="white" if row[n] > 0.4 else "black")
            ticks(axis, len(reads), len(reads), head=True)
            axis.spines[:].set_visible(False)
            axis.tick_params(length=0)
            axis.set_xlabel("depth read" if kind == "past" else "")
        column[0].set_title(label)
    for band in range(bands):
        axes[2 * band, 0].set_ylabel("own position\nreading layer")
        axes[2 * band + 1, 0].set_ylabel("past tokens\nreading layer")
    figure.colorbar(image, ax=axes, label="strength of the read", shrink=0.8 / bands, aspect=30)
    figure.savefig(path)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# The page


def page(out, results):
    """Draw every picture into the folder `out`; -> the page that shows them."""
    sections = []
    for question in QUESTIONS:
        found = {label: question.found(label, r) for label, r in results.items()}
        picture = f"{question.name}.png" if any(found.values()) else None
        if picture:
            draw_lines(Path(out, picture), question.panels(results))
        sections.append(section(question.title, picture, question.look, found.values()))
        silent = [label for label, sentence in found.items() if not sentence]
        if silent:
            sections.append(f"<p>No answer from {html.escape(', '.join(silent))}: no such quantity in the model.</p>")
    title = "Which weights does a model give to what it reads?"
    for n, (label, r) in enumerate(results.items()):
        if r.get("tables", {}).get("panels"):
            name = f"weights_{n}_{''.join(c if c.isalnum() else '_' for c in label)}.png"
            draw_tables(Path(out, name), r["tables"])
            what = f"Here: {r['tables']['what']}. "
            sections.append(section(f"{title} {label}", name, what + TABLE_LOOK, [table_found(label, r)]))
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
            f"{r['windows']} windows of {r['tokens']} held-out tokens of {html.escape(r['text'])}. "
            f"Attention computed from the trace is the model's own to {r['error']:.0e}.</li>")


def section(title, picture, look, found):
    image = f'<img src="{picture}" alt="{html.escape(title)}">' if picture else ""
    sentences = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in found if sentence)
    return (f"<h2>{html.escape(title)}</h2>{image}<p><b>Look for.</b> {html.escape(look)}</p>"
            + (f"<p><b>Found.</b></p><ul>{sentences}</ul>" if sentences else ""))


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Inside the models</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 850px; margin: 2em auto; padding: 0 1em; color: #222 }}
img {{ max-width: 100% }} h2 {{ margin-top: 2em }}</style></head>
<body><h1>Inside the models</h1>
<p>Made by <code>python -m tools.probe</code>; every number that is drawn stands in <a href="probe.json">probe.json</a>.
One run of each model shows what these weights do, not what the mechanism does: seeds differ. A looped model's layers
are counted as often as they run.</p>
<ul>{runs}</ul>
{sections}
</body></html>
"""
