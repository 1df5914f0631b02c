"""
Train models on the same batches, from several seeds, and say which differences are real.

    python -m tools.compare                                     gpt, value_residual, mudd; 3 seeds: configs/compare.toml
    python -m tools.compare --models=gpt,mudd,mudd:dynamic=no   an arm is a model, its own settings behind colons
    python -m tools.compare --study=ladder --seeds=5            a named list of arms: tools/compare/arms.py
    python -m tools.compare --models=gpt,mudd --match=flops     the baseline widened until both cost the same
    python -m tools.compare --sweep=learning_rate               each arm at its best of several learning rates
    python -m tools.compare --quick                             two models, one seed, under 5 minutes on two CPU cores
    python -m tools.compare --quick --given=docs/baseline.json --first_seed=1      a shipped result is not trained again
    python -m tools.compare --merge a.json b.json c.json        a result of each machine: the interval over machines

Any setting of train.py holds for all arms, as in --max_iters=300; a preset may stand before the flags. The first arm is
the baseline. What the table says of each arm:

    nats per token     exact loss over every held-out token after the last step, mean and standard deviation over seeds
    difference         to the baseline, paired by seed, with its 95 % interval: formulas in tools/compare/verdict.py
    verdict            lower, higher, or not shown: the interval holds zero. One seed shows nothing by itself
    parameters, training FLOPs, seconds per step     ratios to the baseline's, whose row has the amounts. FLOPs are of
                       the whole training, head included, as flops_per_token counts; seconds are the median step's,
                       left out where one of the two runs was --given and so may be another machine's
    tokens to its loss     the share of the baseline's tokens after which the arm has the baseline's final loss, read
                       on a straight line between validations (every --eval_interval steps), or "never"

Each run lies in runs/compare/<model>-s<seed>-<hash>, the hash over all that determines its result: settings, text, and
the code of model and trainer, without comments. A finished run is found again, an interrupted one resumed; any change
makes another run. Delete a folder to repeat it. Runs of --given and --merge are taken although their code differs. The
table then says "other code" (of the model, or unknown) or "trainer differs" behind the arm.
"""
import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trainer.console import program, starting

starting(__name__)                       # until main runs, Ctrl-C ends the imports below without a traceback

import torch

import configs
import data
import train
from configs import SettingError
from tools.compare import arms, results, verdict
from tools.compare.figure import figure
from trainer import checkpoint, run_folder

RUNS = Path("runs", "compare")
QUICK = dict(max_iters=700, eval_interval=350)               # over compare.toml


@dataclass
class CompareConfig:
    models: str = "gpt,value_residual,mudd"  # the arms; the first is the baseline
    study: str = ""                          # where, source, target, ladder, streams or feedback, instead of --models
    seeds: int | None = None                 # runs of each arm, from the seeds 1337, 1, 2, ... (default: 3; --quick: 1)
    first_seed: int | None = None            # from the seeds first_seed, first_seed + 1, ... instead: another machine's
    match: str = ""                          # params or flops: train beside each arm a baseline of equal cost
    match_by: str = "width"                  # what of the baseline changes: width or depth
    sweep: str = ""                          # a setting, such as learning_rate: report each arm at its best value
    sweep_values: tuple[float, ...] = ()     # the values to try (default: half, once and twice the preset's)
    given: str = ""                          # a result of any machine, whose runs of these arms and seeds are taken
    out: str = ""                            # file of the results (default: runs/compare/<name>.json), figure beside it
    quick: bool = False                      # the first two arms only, one seed, fewer steps

    def __post_init__(self):
        for name, words in (("study", ("", *arms.STUDIES)), ("match", ("", "params", "flops")),
                            ("match_by", ("width", "depth"))):
            if getattr(self, name) not in words:
                raise ValueError(f"--{name}={getattr(self, name)}: choose one of {', '.join(filter(None, words))}")
        if self.match_by != "width" and not self.match:
            raise ValueError(f"--match_by={self.match_by} says how to match, not what: give --match too")
        if self.sweep_values and not self.sweep:
            raise ValueError("--sweep_values without --sweep: name the setting, as in --sweep=learning_rate")
        self.seeds = (1 if self.quick else 3) if self.seeds is None else self.seeds
        if self.seeds < 1:
            raise ValueError(f"--seeds={self.seeds}: give a whole number of at least 1")
        if self.first_seed is not None and not 0 <= self.first_seed <= 2 ** 32 - self.seeds:
            raise ValueError(f"--first_seed={self.first_seed}: give a whole number from 0 to {2 ** 32 - self.seeds}")
        if self.out and not self.out.endswith(".json"):
            raise ValueError(f"--out={self.out}: give the name of a .json file; the figure takes it with .png")


def plan(argv):
    """Command line -> (CompareConfig, arms, {label: its arms in the sweep}, remarks). Every arm has been built once."""
    settings = configs.read(argv)
    if all(argument.startswith("-") for argument in argv):
        quick = configs.convert("quick", settings.get("quick", False), bool)
        settings = configs.load_preset("compare") | (QUICK if quick else {}) | settings
    own = arms.names_of(CompareConfig)
    config, = configs.build({name: value for name, value in settings.items() if name in own}, CompareConfig)
    shared = {name: value for name, value in settings.items() if name not in own}
    arms.refuse_reserved(shared)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SettingError("a comparison is one process: start it without torchrun, and share out the seeds instead")

    groups = [arms.labels(config.models)]
    if config.study:
        if "models" in settings:
            raise SettingError("--study and --models: a study names its models, so give one of the two")
        n_layer = arms.make_arm("gpt", shared).config.n_layer
        if n_layer < 2:
            raise SettingError(f"--study={config.study}: one layer has no other to read: give --n_layer=2 or more")
        groups = arms.STUDIES[config.study](n_layer)
    if config.quick:
        groups = [groups[0][:2]]
    listed = list(itertools.chain(*groups))
    for label in listed:
        if listed.count(label) > 1:
            raise SettingError(f"--models: {label} is there twice: name each arm once")
    chosen, remarks = {}, []
    for first, *others in groups:
        plain = arms.make_arm(first, shared)
        if not others or not config.match:
            chosen[first] = plain
        for label in others:
            arm, base = arms.make_arm(label, shared), plain
            if config.match:
                base = arms.matched(config.match, config.match_by, plain, arm, shared)
                chosen.setdefault(base.label, base)
                ours, its = arms.cost(config.match, base), arms.cost(config.match, arm)
                remarks.append(f"beside {label} stands {base.label}: {ours:,.6g} {config.match} against {its:,.6g}, "
                               f"mismatch {ours / its - 1:+.2%}")
            arm.base = base.label if base.label != label else None
            chosen[label] = arm                              # which may be the matched baseline of another, too
    sweep = {}
    if config.sweep:
        sweep = {arm.label: arms.swept(config.sweep, config.sweep_values, arm, shared) for arm in chosen.values()}
    return config, list(chosen.values()), sweep, remarks


# ---------------------------------------------------------------------------------------------------------------------
# Running


def train_all(chosen, seeds, given):
    """(results, whether all are there). Seed by seed, so that what is there when Ctrl-C comes are whole pairs."""
    runs, todo = [], list(itertools.product(seeds, chosen))
    try:
        for n, (seed, arm) in enumerate(todo, 1):
            what = f"[{n}/{len(todo)}] {arm.label}, seed {seed}:"
            run, how = read_result(folder_of(arm, seed)), ", found"
            if not run and (arm.label, seed) in given:
                run, how = given[arm.label, seed], ", given"
            if not run:
                print(f"{what} training", flush=True)
                run, how = run_one(arm, seed), ""
            runs.append(run | dict(arm=arm.label))
            print(f"{what} {run['val_loss']:.4f} nats per token{how}", flush=True)
        return runs, True
    except (KeyboardInterrupt, SystemExit):                  # train.py leaves by SystemExit when it has saved
        return runs, False


def folder_of(arm, seed):
    digest = hashlib.sha256(json.dumps(arm.identity | dict(seed=seed), sort_keys=True).encode()).hexdigest()
    return RUNS / f"{arm.settings['model']}-s{seed}-{digest[:8]}"


def run_one(arm, seed):
    """Train one run, from its last checkpoint where it has one -> its result, which is kept."""
    folder = folder_of(arm, seed)
    folder.mkdir(parents=True, exist_ok=True)
    lock = run_folder.Lock(folder, "compare.lock", "wait until it ends, then give the same command again")
    try:
        if run := read_result(folder):                       # of a process that had the lock until now
            return run
        resumed = whole_checkpoint(folder, arm)
        settings = arm.settings | dict(seed=seed, out_dir=str(folder), overwrite=resumed is None)
        diverged, stop = None, False
        if resumed is None or resumed["validated"] < arm.steps:
            with contextlib.redirect_stdout(io.StringIO()):  # its progress bar, on stderr, is left
                run = train.prepare(settings, resumed)
                try:
                    train.train(run)
                except train.Diverged as error:
                    diverged = str(error)
                stop = run.stop
        result = read_log(folder, arm, seed, diverged)
        results.write(folder / "result.json", result)
    finally:
        lock.release()
    if stop:                                                 # Ctrl-C after the last step began: the trainer just ends
        raise KeyboardInterrupt
    return result


def read_result(folder):
    """The result of a finished run; None where there is none, or none that can be read."""
    with contextlib.suppress(SettingError, results.Unusable):
        return results.check_run(dict(arm="") | results.load(folder / "result.json"))


def whole_checkpoint(folder, arm):
    """The state to go on from; None, which is to begin again, where it or the log up to it is missing or damaged."""
    try:
        state = checkpoint.load(folder / "last.pt")
    except SettingError:
        return None
    head, _, checks = read_records(folder, state["step"])
    every, there = arm.identity["train"]["eval_interval"], {record["step"] for record in checks}
    due = {step for step in range(1, state["validated"] + 1) if step % every == 0 or step == arm.steps}
    return state if head and due <= there else None


def read_records(folder, step):
    """A log.jsonl up to `step` -> (what was trained, or None; the records of steps; those of validations)"""
    records = [json.loads(line) for line in run_folder.log_until(folder / "log.jsonl", step)]
    return (next((record for record in records if "train_config" in record), None),
            [record for record in records if "loss" in record], [record for record in records if "val_loss" in record])


def read_log(folder, arm, seed, diverged):
    """A run's log.jsonl -> its result."""
    head, steps, checks = read_records(folder, arm.steps)
    per_step = head["train_config"]["batch_size"] * head["train_config"]["gradient_accumulation_steps"]
    per_step *= arm.config.block_size
    last = dict(val_loss=math.inf, bits_per_byte=math.inf) if diverged else checks[-1]
    return dict(
        model=arm.settings["model"], seed=seed, val_loss=last["val_loss"], bits_per_byte=last["bits_per_byte"],
        parameters=arm.parameters, training_flops=arm.training_flops, steps=arm.steps, tokens=arm.steps * per_step,
        seconds_per_step=statistics.median(record["seconds"] for record in steps) if steps else None,
        curve=[[record["step"] * per_step, record["loss"]] for record in steps],
        validation=[[record["step"] * per_step, record["val_loss"]] for record in checks],
        diverged=diverged, threads=torch.get_num_threads(), settings=arm.settings,
        **{name: head[name] for name in ("device", "dtype", "compiled", "torch", "python", "commit")})


# ---------------------------------------------------------------------------------------------------------------------
# What came out


def choose(setting, chosen, sweep, runs):
    """(each arm at the value of the swept setting whose mean validation loss is the lowest, lines that say which). The
    loss that chooses is the one that is reported, so it is a little too low, for all arms alike."""
    losses, best, lines = {}, {}, []
    for run in runs:
        losses.setdefault(run["arm"], []).append(run["val_loss"])
    for label, tried in sweep.items():
        means = [statistics.fmean(losses.get(arm.label, [math.inf])) for arm in tried]
        n = means.index(min(means))
        best[label] = tried[n]
        values = [arms.parse(arm.label)[1][setting] for arm in tried]
        lines.append(f"{setting} of {label}: " + ", ".join(
            f"{value}: {mean:.4f}" + " (best)" * (i == n) for i, (value, mean) in enumerate(zip(values, means))))
        if n in (0, len(tried) - 1):
            lines.append("  the best is at an end of the grid, so a better one may lie beyond: widen --sweep_values")
    for arm in chosen:
        best[arm.label].base = arm.base and best[arm.base].label
    return list(best.values()), lines


def make_report(argv, chosen, runs):
    return results.make(command(argv), [dict(label=arm.label, base=arm.base, identity=arm.identity) for arm in chosen],
                        runs)


def command(argv):
    return shlex.join(["python", "-m", "tools.compare", *argv])


def show(report):
    rows, runs = report["differences"], report["runs"]
    print("\n" + verdict.narrow_table(report, shutil.get_terminal_size().columns) + "\n")
    if "files" in report:
        print(f"Each interval is over {len(report['files'])} machines.")
    elif any(row["n"] == 1 for row in rows):
        print("One seed shows nothing by itself: another seed moves a loss as much as another model. Try --seeds=3.")
    if any(row["verdict"] == "not shown" for row in rows):
        print("not shown: the interval holds zero, so the difference may be none.")
    for label in sorted({part.get("code") for part in [*runs, *rows]} & set(verdict.LABELS)):
        print(f"{label}: {verdict.LABELS[label]}")
    if (n := sum(row["low"] is not None for row in rows)) >= 5:
        print(f"Of {n} intervals of 95 %, expect {0.05 * n:.1f} to miss the truth by chance.")
    where = "{device}, {dtype}, compiled: {compiled}, {threads} threads, torch {torch}"
    for line in sorted({where.format(**run) for run in runs}):
        print(line)


def out_path(name, inputs):
    """The file for the results, found to be writable before hours of training, not after them."""
    path = Path(name)
    if path.resolve() in [Path(other).resolve() for other in inputs]:
        raise SettingError(f"--out={path} is read as well: name another file")
    if path.exists() and results.load(path).get("format") != results.FORMAT:
        raise SettingError(f"--out={path} is there and is no result of tools.compare: name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise SettingError(f"--out={path} cannot be written ({error.strerror}): name another file") from None


def save(report, path):
    """The results as JSON, the whole table and the figure beside it."""
    results.write(path, report)
    table, picture = (path.with_name(path.stem + ending) for ending in (".table.md", ".png"))
    data.write_text(table, verdict.table(report) + "\n")
    print(f"results: {path}\ntable:   {table}")
    try:
        figure(report, picture)
        print(f"figure:  {picture}")
    except ImportError:
        print("no figure, since matplotlib is missing: pip install matplotlib, then the same command again")


def name_of(config):
    parts = [config.study or "-".join(re.sub(r"[^\w.=-]+", "_", label) for label in config.models.split(","))]
    parts += [f"match-{config.match}-{config.match_by}"] if config.match else []
    parts += [f"sweep-{config.sweep}"] if config.sweep else []
    parts += ["quick"] if config.quick else []
    parts += [f"from-seed-{config.first_seed}"] if config.first_seed is not None else []
    return "-".join(parts)[-150:]


def merge(argv):
    """--merge a.json b.json ..."""
    files = [argument for argument in argv if not argument.startswith("--")]
    files += [argument.partition("=")[2] for argument in argv if argument.startswith("--merge=")]
    flags = [argument for argument in argv if argument.startswith("--") and argument.partition("=")[0] != "--merge"]
    config, = configs.build(configs.read(flags), CompareConfig)
    if len(set(files)) < 2:
        raise SettingError("--merge: name at least two .json files, one of each machine")
    report = results.merge(list(dict.fromkeys(files)))
    out = out_path(config.out or RUNS / "merged.json", files)
    show(report)
    save(report, out)


@program("compare")
def main(argv):
    if "--help" in argv or "-h" in argv:
        print(__doc__ + configs.help_text(CompareConfig, train.TrainConfig, train.GPTConfig))
        return
    if any(argument.partition("=")[0] == "--merge" for argument in argv):
        return merge(argv)
    config, chosen, sweep, remarks = plan(argv)
    for remark in remarks:
        print(remark)
    first = config.first_seed
    seeds = [1337, *range(1, config.seeds)] if first is None else range(first, first + config.seeds)
    every = list(itertools.chain(*sweep.values())) or chosen
    given = results.given_runs(config.given, every) if config.given else {}
    out = out_path(config.out or RUNS / f"{name_of(config)}.json", [config.given] if config.given else [])
    runs, finished = train_all(every, seeds, given)
    if config.sweep:
        chosen, lines = choose(config.sweep, chosen, sweep, runs)
        print("\n" + "\n".join(lines))
    report = make_report(argv, chosen, runs)
    show(report)
    if not finished:
        raise KeyboardInterrupt(f"what is done is kept; go on with: {command(argv)}")
    save(report, out)


if __name__ == "__main__":
    main(sys.argv[1:])
