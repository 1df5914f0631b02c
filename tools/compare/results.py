"""
The JSON files of comparisons: read and check, write, take runs from one (--given), put several together (--merge).

Every file is checked here and nowhere else. What it says of differences is not read but computed from its runs.
"""
import itertools
import json
import math
import re
import reprlib
from pathlib import Path

import data
from configs import SettingError
from tools.compare import verdict
from trainer.console import writing

FORMAT = "crosslayer comparison 1"
PARTS = ("train", "model", "data", "code")       # of an arm's identity; `machine` may differ


# ---------------------------------------------------------------------------------------------------------------------
# What a file must hold


class Unusable(Exception):
    """Its text says what is wrong with a file."""


def positive(value):
    """A number that can be divided by, and squared without overflow."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e100


def text(value):
    return isinstance(value, str) and value.isprintable()


def text_or_none(value):
    return value is None or text(value)


def seed(value):
    return type(value) is int and 0 <= value < 2 ** 32 or text(value) and re.fullmatch("[0-9]{1,10}", value)


def curve(value):
    """[[tokens, loss], ...], tokens rising."""
    pairs = isinstance(value, list) and value and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(positive, pair)) for pair in value)
    return pairs and all(before < after for (before, _), (after, _) in itertools.pairwise(value))


def scalars(value):
    """{name: value}, a value being a word, a number, or a list of them."""
    return isinstance(value, dict) and all(
        text(item) or isinstance(item, (int, float, type(None)))
        for items in value.values() for item in (items if isinstance(items, list) else [items]))


REQUIRED = dict(arm=text, seed=seed, val_loss=positive, bits_per_byte=positive, validation=curve, parameters=positive,
                training_flops=positive, steps=positive, tokens=positive, seconds_per_step=positive,
                diverged=text_or_none, threads=positive, device=text, dtype=text,
                torch=text, compiled=lambda value: isinstance(value, bool))
OPTIONAL = dict(model=text, curve=lambda value: value == [] or curve(value), settings=scalars, python=text,
                commit=text_or_none,
                given=lambda value: isinstance(value, list) and all(map(text, value)),
                code=lambda value: text(value) and value in verdict.LABELS)
SPOILT = dict(val_loss=math.inf, bits_per_byte=math.inf, validation=[], seconds_per_step=None)  # of a run that diverged


def check_run(run):
    """A run as a file has it -> the run, its seed a number. SPOILT stands for what a run that diverged lacks."""
    if not isinstance(run, dict):
        raise Unusable("a run is no table")
    diverged = text(run.get("diverged"))
    kept = {name: run.get(name) for name in (*REQUIRED, *OPTIONAL) if name in REQUIRED or name in run}
    for name, good in (REQUIRED | OPTIONAL).items():
        if diverged and name in SPOILT and (SPOILT[name] == math.inf or not good(kept[name])):
            kept[name] = SPOILT[name]
        elif name in kept and not good(kept[name]):
            raise Unusable(f"the {name} of a run is {reprlib.repr(kept[name])}")
    return kept | dict(seed=int(kept["seed"]))


def check_arm(arm):
    if not isinstance(arm, dict) or not text(arm.get("label")) or not text_or_none(arm.get("base")):
        raise Unusable("an arm has no name, or a baseline without one")
    identity = arm.get("identity")
    if not isinstance(identity, dict) or not all(scalars(identity.get(part)) for part in PARTS):
        raise Unusable(f"the identity of {arm['label']} is not whole")
    return dict(label=arm["label"], base=arm.get("base"),
                identity={part: identity[part] for part in (*PARTS, "machine") if scalars(identity.get(part))})


def check(report):
    if report.get("format") != FORMAT:
        raise Unusable("it is no result of tools.compare")
    if report.get("files"):
        raise Unusable("it is merged: name the files that were merged")
    if not isinstance(report.get("arms"), list) or not isinstance(report.get("runs"), list):
        raise Unusable("it has no list of arms, or none of runs")
    arms, runs = [check_arm(arm) for arm in report["arms"]], [check_run(run) for run in report["runs"]]
    labels = [arm["label"] for arm in arms]
    if not arms or not runs or len(set(labels)) < len(labels):
        raise Unusable("it has no runs or no arms, or an arm twice")
    for arm in arms:
        if arm["base"] is not None and arm["base"] not in labels:
            raise Unusable(f"{arm['base']}, the baseline of {arm['label']}, is none of its arms")
    pairs = [(run["arm"], run["seed"]) for run in runs]
    if twice := [pair for pair in pairs if pairs.count(pair) > 1]:
        raise Unusable(f"{twice[0][0]} has the seed {twice[0][1]} twice")
    command = report.get("command")
    return make(command if text(command) else "", arms, runs)


# ---------------------------------------------------------------------------------------------------------------------
# Reading and writing


def make(command, arms, runs):
    report = dict(format=FORMAT, command=command, arms=arms, runs=runs)
    return report | dict(differences=verdict.compare_runs(report))


def load(path):
    """The JSON of a file, unchecked; {} if it is none, or no table."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({error.strerror}): name .json files of tools.compare") from None
    except (ValueError, RecursionError):
        return {}


def read(path):
    """The result in a file, checked, its differences computed from its runs. SettingError if it cannot be used."""
    try:
        return check(load(path))
    except Unusable as error:
        raise SettingError(f"{path} cannot be used, as {error}. Name another .json file that tools.compare wrote, or "
                           f"make it again with its command") from None


def write(path, content):
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        data.write_text(path, json.dumps(words(content), allow_nan=False) + "\n")


def words(content):
    """JSON has no infinity: "infinity", "-infinity" or "nan" instead of numbers that are not finite."""
    if isinstance(content, dict):
        return {name: words(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [words(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return "nan" if math.isnan(content) else "infinity" if content > 0 else "-infinity"
    return content


# ---------------------------------------------------------------------------------------------------------------------
# Results of other machines, and of other code


def given_runs(path, chosen):
    """{(label, seed): run} of the result in a file, for the arms whose settings and text are as here. A run that was
    made by other code says so."""
    report, runs = read(path), {}
    for arm, theirs in itertools.product(chosen, report["arms"]):
        if difference_of(arm.identity, theirs["identity"]) is None:
            changed = code_label(arm.identity["code"], theirs["identity"]["code"])
            for number, run in verdict.runs_of(report, theirs["label"]).items():
                label = verdict.worst([changed, run.get("code")])
                runs[arm.label, number] = run | dict(arm=arm.label, given=[*run.get("given", []), str(path)]) | (
                    dict(code=label) if label else {})
    if not runs:
        raise SettingError(f"--given={path}: no arm of it has the settings and text of one here: leave it out")
    return runs


def merge(paths):
    """The result over machines, from a file of each. A machine's difference is the mean over its seeds; the interval
    is over machines. SettingError, one line, if the files cannot be put together."""
    reports = {path: read(path) for path in paths}
    first, *others = paths
    for one, two in itertools.combinations(paths, 2):
        if seeds := seeds_of(reports[one]) & seeds_of(reports[two]):
            raise SettingError(f"{one} and {two} both have seed {min(seeds)}, so one repeats the other: give each "
                               f"machine seeds of its own with --first_seed")
    rows = {path: {row["arm"]: row for row in report["differences"]} for path, report in reports.items()}
    shared = [(label, row["base"]) for label, row in rows[first].items()
              if all(label in rows[path] and rows[path][label]["base"] == row["base"] for path in others)]
    if not shared:
        raise SettingError(f"{' and '.join(map(str, paths))} have no arm in common that is compared with the same "
                           f"baseline: use the same --models on all machines")
    merged = []
    for arm, base in shared:
        changed = [run.get("code") for path in paths for label in (arm, base)
                   for run in verdict.runs_of(reports[path], label).values()]
        for path, label in itertools.product(others, (base, arm)):
            ours, theirs = (identity_of(reports[file], label) for file in (first, path))
            if change := difference_of(ours, theirs):
                name, value, other = change[0], *map(reprlib.repr, change[1:])
                raise SettingError(f"{path}: {name} of {label} is {other}, and {value} in {first}: all machines need "
                                   f"the same settings and text")
            changed.append(code_label(ours["code"], theirs["code"]))
        means = {str(path): rows[path][arm]["mean"] for path in paths}
        merged.append(dict(arm=arm, base=base, values=means, **verdict.interval(list(means.values()), of="machine"),
                           code=verdict.worst(changed)))
    return dict(format=FORMAT, files=list(map(str, paths)), arms=[dict(label=arm, base=base) for arm, base in shared],
                runs=[], differences=merged)


def seeds_of(report):
    return {run["seed"] for run in report["runs"]}


def identity_of(report, label):
    return next(arm["identity"] for arm in report["arms"] if arm["label"] == label)


def difference_of(ours, theirs):
    """(name, our value, their value) of the first setting or fact of the text that differs; None if all agree."""
    for part in ("train", "model", "data"):
        for name in sorted(ours[part].keys() | theirs[part].keys()):
            if ours[part].get(name) != theirs[part].get(name):
                return name, ours[part].get(name), theirs[part].get(name)
    return None


def code_label(ours, theirs):
    """What to call runs of `theirs`, an identity's hashes of code, beside our own. Older files have one checksum of
    another kind, so that their model's code is unknown. kernels.py counts if both were compiled."""
    if ours == theirs:
        return ""
    if "model" not in ours or ours["model"] != theirs.get("model") or \
            "kernels" in ours and "kernels" in theirs and ours["kernels"] != theirs["kernels"]:
        return "other code"
    return "trainer differs" if ours.get("trainer") != theirs.get("trainer") else ""
