"""
What the runs of a comparison show: paired differences with their interval, as a table.

    d_s = L_s(arm) - L_s(baseline)              L: exact validation loss, in nats per token; s: a seed
    mean(d) +- t sd(d) / sqrt(n)                t: 97.5 % point of Student's t with n - 1 degrees of freedom, n seeds

Both runs of a seed see the same batches in the same order, and start from the same weights wherever the two models
share one. So d varies less than either loss does. The interval is for the mean over all seeds, at this size, text and
length of training, and says nothing of others. Among twenty intervals of 95 %, one leaves out the truth.
"""
import itertools
import math
import statistics
import textwrap

LABELS = {                               # of runs that other code than today's made; the worst comes first
    "other code": "these runs were made by other code of the model than the arm has now, or by unknown code.",
    "trainer differs": "these runs were made by other code of the trainer."}
T = [12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
     2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
     2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423]


def t_quantile(df):
    """t such that a Student's t variable with df degrees of freedom is within -t .. t in 95 % of all draws. Beyond
    30 it is the value at 30, so that the interval is a little too wide."""
    return T[min(df, len(T)) - 1]


def interval(differences, of="seed"):
    """Mean, s.d. and 95 % interval of paired differences, and what they show. `of` names what was repeated."""
    n, mean = len(differences), statistics.fmean(differences)
    facts = dict(n=n, mean=mean, sd=None, low=None, high=None)
    if not math.isfinite(mean):
        return facts | dict(verdict="diverged")
    if n == 1:
        return facts | dict(verdict=f"one {of}")
    sd = statistics.stdev(differences)
    half = t_quantile(n - 1) * sd / math.sqrt(n)
    low, high = mean - half, mean + half
    shown = "lower" if high < 0 else "higher" if low > 0 else "not shown"
    return facts | dict(sd=sd, low=low, high=high, verdict=shown)


def tokens_to(loss, validation):
    """Tokens at which a curve [(tokens, loss)] first comes down to `loss`, linear between its points; None: never."""
    if validation and validation[0][1] <= loss:
        return validation[0][0]
    for (before, above), (after, below) in itertools.pairwise(validation):
        if below <= loss:
            return before + (after - before) * (above - loss) / (above - below)
    return None


def runs_of(report, label):
    return {run["seed"]: run for run in report["runs"] if run["arm"] == label}


def worst(labels):
    return next((label for label in LABELS if label in labels), "")


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
                   if runs[seed].get("given") == base[seed].get("given")
                   and runs[seed]["seconds_per_step"] and base[seed]["seconds_per_step"]]
        rows.append(dict(
            arm=arm["label"], base=arm["base"], values=values, **interval(list(values.values())),
            parameters=runs[seeds[0]]["parameters"] / base[seeds[0]]["parameters"],
            flops=runs[seeds[0]]["training_flops"] / base[seeds[0]]["training_flops"],
            seconds=statistics.fmean(seconds) if seconds else None,
            tokens=[t and t / base[seed]["tokens"] for seed, t in tokens.items()]))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# The table


FIRST = ["arm", "difference (s.d.)", "95 % interval", "verdict"]       # the columns that a narrow terminal shows
TITLES = ["arm", "nats per token (s.d.)", "bits per byte", *FIRST[1:],
          "parameters", "training FLOPs", "seconds per step", "tokens to its loss"]
ARM_WIDTH = (16, 36)                     # a longer name of an arm goes on a second line where columns need the room


def table(report):
    """The runs and differences of a report, in Markdown. Ratios are to the baseline; its own row has the amounts."""
    rows = rows_of(report)
    titles = TITLES if report["runs"] else FIRST
    return markdown([titles] + [[row[title] for title in titles] for row in rows])


def narrow_table(report, width):
    """The columns of FIRST, then as many others as fit into `width`. A long name of an arm goes on several lines."""
    rows = rows_of(report)
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) + 3
              for title in [*FIRST, *TITLES] if any(row[title] for row in rows)}
    shown = [title for title in FIRST if title in widths]
    left = width - 1 - sum(widths[title] for title in shown[1:])
    name_width = min(widths["arm"], max(min(left, ARM_WIDTH[1] + 3), ARM_WIDTH[0] + 3))
    left -= name_width
    for title in widths:
        if title not in shown and widths[title] <= left:
            shown.append(title)
            left -= widths[title]
    lines = [shown]
    for row in rows:
        first, *others = [row["arm"]] if len(row["arm"]) <= name_width - 3 else [
            part.replace(": ", ":") for part in textwrap.wrap(row["arm"].replace(":", ": "), name_width - 3)]
        lines.append([first] + [row[title] for title in shown[1:]])
        lines += [[part] + [""] * (len(shown) - 1) for part in others]
    return markdown(lines)


def rows_of(report):
    """[{title: cell}]. A merged report has a row for each difference, any other one for each arm."""
    differences = {row["arm"]: row for row in report["differences"]}
    several = len({row["base"] for row in differences.values()}) > 1 or not report["runs"]
    rows = []
    for arm in report["arms"]:
        row, runs = differences.get(arm["label"]), list(runs_of(report, arm["label"]).values())
        label = worst([run.get("code") for run in runs] + [row.get("code") if row else ""])
        name = arm["label"] + (f" to {row['base']}" if row and several else "") + (f" ({label})" if label else "")
        cells = dict.fromkeys(TITLES, "") | {"arm": name}
        if row:
            cells |= zip(FIRST[1:], (signed(row), bounds(row), row["verdict"]))
        if runs:
            cells |= amounts(runs) | (ratios(row) if row else {})
        rows.append(cells | ({} if runs or row else {"verdict": "not finished"}))
    return rows


def amounts(runs):
    losses, seconds = [run["val_loss"] for run in runs], [run["seconds_per_step"] or math.nan for run in runs]
    return {"nats per token (s.d.)": f"{statistics.fmean(losses):.4f}" + deviation(losses),
            "bits per byte": f"{statistics.fmean(run['bits_per_byte'] for run in runs):.4f}",
            "parameters": f"{runs[0]['parameters']:,}", "training FLOPs": f"{runs[0]['training_flops']:.3g}",
            "seconds per step": f"{statistics.fmean(seconds):.3g}", "tokens to its loss": f"{runs[0]['tokens']:,}"}


def ratios(row):
    return {"parameters": f"x{row['parameters']:.3f}", "training FLOPs": f"x{row['flops']:.3f}",
            "seconds per step": "" if row["seconds"] is None else f"x{row['seconds']:.2f}",
            "tokens to its loss": reached(row["tokens"])}


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
