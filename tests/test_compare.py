"""tools/compare: what it trains, what it finds again, and that its verdicts are those of the numbers."""
import json
import math
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

import configs
import train
from tools import bench
from tools.compare import __main__ as compare
from tools.compare import arms, figure, results, verdict
from trainer import checkpoint, evaluate, run_folder

ROOT = Path(train.__file__).parent
CLAIMS = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
TINY = ["--n_layer=2", "--n_embd=16", "--n_head=2", "--d_ff=24", "--block_size=16", "--batch_size=2", "--max_iters=4",
        "--warmup_iters=1", "--eval_interval=2", "--log_interval=1", "--dtype=float32"]
CODE = dict(model="m", trainer="t")


@pytest.fixture
def tiny(tiny_data, tmp_path, monkeypatch, one_thread):
    """Flags of a comparison that takes no time, in an empty folder, without a figure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "figure", lambda report, path: None)
    return [*TINY, f"--data={tiny_data}"]


@pytest.fixture
def trained(monkeypatch):
    """The folders of the runs that are trained, not found, in order."""
    folders, plain = [], train.train
    monkeypatch.setattr(train, "train", lambda run: folders.append(run.folder.name) or plain(run))
    return folders


@pytest.fixture
def again(tiny, trained):
    """A function: the baseline alone, compared with these flags -> whether it was trained anew."""
    def again(*flags):
        before = len(trained)
        compare.main(["--models=gpt", "--seeds=1", *tiny, *flags])
        return len(trained) > before
    return again


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """A function that edits a copy of the sources, which is hashed instead of them."""
    copy = tmp_path / "sources"
    for path in (path for folder in (".", "data", "trainer", "baselines") for path in (ROOT / folder).glob("*.py")):
        (copy / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy / path.relative_to(ROOT))
    monkeypatch.setattr(arms, "PROJECT", copy)

    def edit(file, old, new):
        source = (copy / file).read_text(encoding="utf-8")
        assert source.count(old) == 1, (file, old)
        (copy / file).write_text(source.replace(old, new), encoding="utf-8")
    return edit


def result(name):
    return json.loads(Path("runs/compare", name).read_text(encoding="utf-8"))


def run(arm, seed, loss, **facts):
    return dict(model=arm, arm=arm, seed=seed, val_loss=loss, bits_per_byte=loss / math.log(2), parameters=1000,
                training_flops=1e9, seconds_per_step=0.1, tokens=400, steps=4, validation=[(200, 3.0), (400, loss)],
                diverged=None, device="cpu", dtype="float32", compiled=False, threads=1, torch="2.13") | facts


def planted(gap, noise, seeds=range(5), **facts):
    """A report of two arms whose losses vary by 0.1 over seeds, and their difference by `noise` about `gap`."""
    runs, identity = [], dict(train=dict(max_iters=4), model=dict(n_layer=2), data=dict(train=9), code=CODE)
    for seed in seeds:
        level = 2 + 0.1 * math.sin(seed)
        runs += [run("gpt", seed, level), run("mudd", seed, level + gap + noise * math.cos(7 * seed), **facts)]
    return results.make("", [dict(label=label, base=base, identity=dict(identity))
                             for label, base in (("gpt", None), ("mudd", "gpt"))], runs)


# ---- Statistics ------------------------------------------------------------------------------------------------------


def test_an_interval_by_hand():
    """Mean -0.02, s.d. 0.01: half width 4.3027 x 0.01 / sqrt(3) = 0.024841."""
    row = verdict.interval([-0.01, -0.02, -0.03])
    assert (row["n"], row["verdict"]) == (3, "not shown")
    numbers = [row[name] for name in ("mean", "sd", "low", "high")]
    assert numbers == pytest.approx([-0.02, 0.01, -0.044841, 0.004841], abs=1e-6)
    for differences, shown in (([-0.02, -0.021, -0.022], "lower"), ([0.02, 0.021, 0.022], "higher"),
                               ([-5.0], "one seed"), ([-0.1, math.inf], "diverged")):
        assert verdict.interval(differences)["verdict"] == shown
    for df, t in ((1, 12.7062), (4, 2.7764), (9, 2.2622), (19, 2.0930), (30, 2.0423), (31, 2.0423)):
        assert verdict.t_quantile(df) == t


def test_tokens_to_a_loss_are_read_between_validations():
    curve = [(100, 3.0), (200, 2.0), (300, 2.2), (400, 1.0)]
    for loss, tokens in ((2.5, 150), (3.5, 100), (2.1, 190), (1.0, 400), (0.9, None)):
        assert verdict.tokens_to(loss, curve) == tokens
    assert verdict.tokens_to(0.9, []) is None


@pytest.mark.parametrize("gap, shown", [(-0.01, "lower"), (0.0, "not shown"), (0.01, "higher")])
def test_a_planted_difference_is_found_and_a_planted_null_is_not(gap, shown):
    """The difference is a tenth of what losses vary by: unpaired, five seeds could not show it."""
    row, = planted(gap, 0.002)["differences"]
    assert row["verdict"] == shown and row["low"] < gap < row["high"]


def test_the_table_has_ratios_and_tokens_to_the_baselines_loss():
    report = planted(-0.5, 0.0, seeds=(0,), parameters=1100, training_flops=2e9, seconds_per_step=0.15)
    row, = report["differences"]
    assert row["tokens"] == [pytest.approx((200 + 200 * 1.0 / 1.5) / 400)]     # 3.0 to 1.5 from 200 to 400: 2.0 at 333
    cells = [cell.strip() for cell in verdict.table(report).splitlines()[-1].split("|")[1:-1]]
    assert cells == ["mudd", "1.5000", f"{1.5 / math.log(2):.4f}", "-0.5000", "", "one seed", "x1.100", "x2.000",
                     "x1.50", "x0.83"]
    assert "never" in verdict.table(planted(0.5, 0.0))
    assert verdict.reached([0.5, None, 0.7]) == "x0.60 (2 of 3 seeds)" and verdict.reached([]) == ""
    diverged = verdict.table(planted(math.inf, 0.0, validation=[], seconds_per_step=None))
    assert "diverged" in diverged and "never" in diverged


def test_the_table_fits_the_terminal_and_its_first_columns_stay():
    report = planted(-0.01, 0.002)
    report["arms"][1]["label"] = label = "value_residual:variant=sparse:targets=1,2,3:constant=0.5"
    for run in verdict.runs_of(report, "mudd").values():
        run.update(arm=label, code="trainer differs")
    report = results.make("", report["arms"], report["runs"])
    for width in (80, 100, 130, 250):
        lines = verdict.narrow_table(report, width).splitlines()
        assert max(map(len, lines)) <= width and all(title in lines[0] for title in verdict.FIRST)
        assert ("nats per token" in lines[0]) == (width > 100)
        names = " ".join(line.split("|")[1].strip() for line in lines)
        assert f"{label} (trainer differs)" in names.replace(": ", ":")
    assert len(verdict.table(report).splitlines()) == 4


def test_what_is_paired():
    """Only seeds that both have. A baseline that diverged has no loss to come down to; seconds are of one machine."""
    report = planted(-0.1, 0.0, seconds_per_step=0.2)
    report["runs"] = [r for r in report["runs"] if (r["arm"], r["seed"]) not in {("gpt", 0), ("mudd", 4)}]
    base, row = verdict.runs_of(report, "gpt"), verdict.compare_runs(report)[0]
    assert row["values"] == pytest.approx(dict.fromkeys((1, 2, 3), -0.1)) and row["seconds"] == 2
    base[1]["val_loss"] = math.inf
    row, = verdict.compare_runs(report)
    assert row["verdict"] == "diverged" and len(row["tokens"]) == 2
    base[1].update(given=["theirs.json"], seconds_per_step=9.0)
    assert verdict.compare_runs(report)[0]["seconds"] == 2
    for run in base.values():
        run.update(given=["theirs.json"])
    report["differences"] = verdict.compare_runs(report)
    assert report["differences"][0]["seconds"] is None
    assert "| x1.000         |                  | x" in verdict.table(report)


# ---- End to end ------------------------------------------------------------------------------------------------------


def test_a_comparison_end_to_end_and_found_again(tiny, trained, capsys, monkeypatch):
    monkeypatch.setattr(compare, "figure", figure.figure)
    compare.main(["--models=gpt,value_residual:variant=convex,mudd", "--seeds=2", *tiny])
    out = capsys.readouterr().out
    assert len(trained) == 6 and [name.split("-s")[1][:4] for name in trained[:3]] == ["1337"] * 3
    name = "gpt-value_residual_variant=convex-mudd"
    report = results.read(f"runs/compare/{name}.json")
    assert json.loads(json.dumps(report)) == result(f"{name}.json")
    assert Path(f"runs/compare/{name}.png").stat().st_size > 10_000
    assert Path(f"runs/compare/{name}.table.md").read_text(encoding="utf-8") == verdict.table(report) + "\n"
    assert [(row["arm"], row["base"], row["n"]) for row in report["differences"]] == [
        ("value_residual:variant=convex", "gpt", 2), ("mudd", "gpt", 2)]
    for row in report["differences"]:
        for seed, value in row["values"].items():
            ours, base = (verdict.runs_of(report, label)[seed]["val_loss"] for label in (row["arm"], "gpt"))
            assert value == ours - base
        assert f"{row['mean']:+.4f} ({row['sd']:.4f})" in out and f"{row['low']:+.4f} to {row['high']:+.4f}" in out
    first = report["runs"][0]
    assert [tokens for tokens, _ in first["validation"]] == [64, 128] and len(first["curve"]) == 4
    assert first["validation"][-1][1] == first["val_loss"] == checkpoint.load(
        Path("runs/compare", trained[0], "last.pt"))["val_loss"]
    assert first["parameters"] == weights(2, 16, 24) and "validation loss" not in out and "expect" not in out

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)                    # without it the results are there
    compare.main(["--models=gpt,mudd", "--seeds=2", *tiny])
    out = capsys.readouterr().out
    assert len(trained) == 6 and "found" in out and "pip install matplotlib" in out.splitlines()[-1]
    assert result("gpt-mudd.json")["runs"] and not Path("runs/compare/gpt-mudd.png").exists()
    compare.main(["--models=gpt,gpt:d_ff=24", "--seeds=1", *tiny])                 # another name for the same thing
    assert len(trained) == 6 and "One seed shows nothing by itself" in capsys.readouterr().out
    compare.main(["--models=gpt,mudd", "--seeds=2", "--first_seed=1", *tiny])      # another process, its own file
    compare.main(["--models=gpt,mudd", "--seeds=3", *tiny])
    assert len(trained) == 8 and result("gpt-mudd.json")["differences"][0]["n"] == 3
    compare.main(["--models=gpt,mudd", "--seeds=1", *tiny, "--out=first.json"])
    compare.main(["--merge", "first.json", "runs/compare/gpt-mudd-from-seed-1.json"])
    row, = result("merged.json")["differences"]
    assert len(trained) == 8 and row["n"] == 2 and row["sd"] is not None and row["code"] == ""


def test_what_changes_the_result_trains_anew_and_the_rest_is_found(again, tiny_data, tmp_path):
    assert again()
    for flag in ("", "--prompt=a", "--sample_tokens=3", "--device=cpu", "--n_kv_head=2", "--first_seed=1337"):
        assert not again(*flag.split()), flag
    for flag in ("--max_iters=5", "--learning_rate=1e-4", "--d_ff=32", "--qk_norm=no", "--dtype=bfloat16",
                 "--weight_decay=0", "--first_seed=3"):
        assert again(flag), flag
    copy = shutil.copytree(tiny_data, tmp_path / "copy")
    assert not again(f"--data={copy}")                                             # the same text elsewhere
    changed = bytearray((copy / "train.bin").read_bytes())
    changed[-2] ^= 1
    (copy / "train.bin").write_bytes(changed)
    for cached in (arms.data_facts, arms.open_data):
        cached.cache_clear()
    assert again(f"--data={copy}")


def test_changed_code_is_trained_anew_and_changed_words_are_found(edit, again):
    assert again()
    for file, old, new in (
            ("model.py", "tril(S - T)", "tril(S - T)  # a comment"), ("model.py", "import math\n", "import math\n\n\n"),
            ("train.py", '"""Optimizer steps run.step .. max_iters - 1', '"""Steps'),
            ("train.py", '    "mudd": (MUDDConfig, MUDD),\n', ""), ("trainer/console.py", "import errno\n", ""),
            ("mudd.py", "import torch\n", ""), ("kernels.py", "import torch\n", "")):
        edit(file, old, new)
        assert not again(), (file, new)
    for file, old, new in (
            ("train.py", "betas=(config.beta1, config.beta2)", "betas=(config.beta2, config.beta1)"),
            ("train.py", "            if run.validation_due:\n                validate(run)\n",
             "        if run.validation_due:\n            validate(run)\n"),              # dedented out of the loop
            ("train.py", "math.cos(math.pi * progress)", "math.cos(progress)"),
            ("data/tokens.py", "integers(ends[-1], size=batch_size)", "integers(ends[0], size=batch_size)"),
            ("trainer/evaluate.py", "import math\n", "import math, os\n"), ("model.py", "tril(S - T)", "tril()")):
        edit(file, old, new)
        assert again() and not again(), (file, new)


def test_the_hashes_cover_what_a_model_imports_and_kernels_only_if_they_are_used(edit):
    def code():
        return arms.code_of("baselines.lime", compiled=False), arms.code_of("whitematter", compiled=True)
    before = code()
    edit("cyclic.py", "import math\n", "import math as m\n")                        # whitematter.py imports it
    lime, whitematter = code()
    assert lime == before[0] and {name for name in whitematter if whitematter[name] != before[1][name]} == {"model"}
    edit("kernels.py", "recompile_limit = 64", "recompile_limit = 65")
    assert code()[0] == lime and {name for name in whitematter if whitematter[name] != code()[1][name]} == {"kernels"}
    edit("model.py", "tril(S - T)", "tril()")
    assert code()[0]["model"] != lime["model"] and code()[1]["model"] != whitematter["model"]
    ours = CODE | dict(kernels="k")
    assert results.code_label(ours, CODE | dict(kernels="other")) == "other code"
    assert results.code_label(ours, ours | dict(trainer="other")) == "trainer differs"


def test_what_is_given_is_not_trained_again_and_says_whose_code_made_it(tiny, trained, tmp_path, monkeypatch, capsys):
    """A baseline of another machine: its runs are paired with ours as they stand, and ours only are trained."""
    compare.main(["--models=gpt", "--seeds=2", *tiny, "--out=base.json"])
    base = json.loads(Path("base.json").read_text(encoding="utf-8"))
    identity = base["arms"][0]["identity"]
    identity["machine"]["torch"] = "2.99"
    for run in base["runs"]:
        run["val_loss"] += 1.0
    (tmp_path / "room").mkdir()
    monkeypatch.chdir(tmp_path / "room")
    argv, same = ["--models=gpt,mudd", "--seeds=3", *tiny, "--given=../base.json", "--out=all.json"], identity["code"]
    for code, label in ((same, ""), (same | dict(model="other"), "other code"),
                        (same | dict(trainer="other"), "trainer differs"), ({"code": 1}, "other code")):
        identity["code"] = code
        Path("../base.json").write_text(json.dumps(base), encoding="utf-8")
        compare.main(argv)
        out, runs = capsys.readouterr().out, results.read("all.json")["runs"]
        assert out.count(", given") == 2 and (f"gpt ({label})" in out and f"{label}: these runs" in out) == bool(label)
        assert [run.get("code", "") for run in runs] == [label, "", label, "", "", ""]
    assert [name.rsplit("-", 1)[0] for name in trained[2:]] == ["mudd-s1337", "mudd-s1", "gpt-s2", "mudd-s2"]
    assert [bool(run.get("given")) for run in runs] == [True, False, True, False, False, False]
    values = results.read("all.json")["differences"][0]["values"]
    assert values[1337] < -0.5 and values[1] < -0.5 and abs(values[2]) < 0.5
    compare.main(["--models=gpt", "--seeds=2", *tiny, "--given=all.json", "--out=again.json"])
    assert [run["code"] for run in results.read("again.json")["runs"]] == ["other code"] * 2     # the label stays
    with pytest.raises(SystemExit, match="no arm of it"):
        compare.main([*argv, "--max_iters=3"])


# ---- Runs that stop, break or meet -----------------------------------------------------------------------------------


def test_an_interrupted_comparison_keeps_whole_pairs_and_goes_on_bit_for_bit(tiny, trained, capsys, monkeypatch):
    argv, plain = ["--models=gpt,mudd", "--seeds=2", *tiny], train.micro_batches

    def interrupted(self, step):
        self.stop = self.stop or step == 2 and len(trained) == 4                   # Ctrl-C in the last run's third step
        return plain(self, step)
    monkeypatch.setattr(train, "micro_batches", interrupted)
    with pytest.raises(SystemExit):
        compare.main(argv)
    out, err = capsys.readouterr()
    assert "| mudd" in out and "One seed shows nothing by itself" in out           # the pair of seed 1337
    assert err.splitlines()[-1].endswith("go on with: python -m tools.compare " + shlex.join(argv))
    assert checkpoint.load(Path("runs/compare", trained[3], "last.pt"))["step"] == 3
    monkeypatch.setattr(train, "micro_batches", plain)
    compare.main(argv)
    assert len(trained) == 5 and trained[4] == trained[3]
    resumed = result("gpt-mudd.json")["runs"]
    Path("whole").mkdir()
    monkeypatch.chdir("whole")
    compare.main(argv)
    for ours, whole in zip(resumed, result("gpt-mudd.json")["runs"], strict=True):
        assert [ours[name] for name in ("val_loss", "curve", "validation")] == [
            whole[name] for name in ("val_loss", "curve", "validation")]


def test_ctrl_c_in_the_last_validation_or_before_the_first_checkpoint_starts_no_other_run(tiny, trained, monkeypatch):
    argv = ["--models=gpt,mudd", "--seeds=1", *tiny]
    validate, log_step = train.validate, train.log_step

    def interrupted(self):
        self.stop = self.step == 4
        validate(self)

    def killed(self, *args):
        raise KeyboardInterrupt
    for name, stop, plain, runs in (("log_step", killed, log_step, 1), ("validate", interrupted, validate, 2)):
        monkeypatch.setattr(train, name, stop)
        with pytest.raises(SystemExit):
            compare.main(argv)
        assert len(trained) == runs
        monkeypatch.setattr(train, name, plain)
    compare.main(argv)
    assert len(trained) == 4                         # the first only makes up its validation
    assert len(result("gpt-mudd.json")["runs"][0]["curve"]) == 4


def test_a_damaged_folder_is_read_anew_or_trained_anew(tiny, trained):
    """A result that is cut off is made again from the log; a log or a checkpoint that is, from the first step."""
    argv = ["--models=gpt", "--seeds=1", *tiny]
    compare.main(argv)
    whole, folder = result("gpt.json")["runs"], Path("runs/compare", trained[0])
    log = (folder / "log.jsonl").read_text(encoding="utf-8")
    for content in (json.dumps(whole[0])[:90], "{}", "[]", json.dumps(whole[0] | dict(val_loss=None))):
        (folder / "result.json").write_text(content, encoding="utf-8")
        compare.main(argv)
        assert result("gpt.json")["runs"] == whole and len(trained) == 1
    for name, content in (("log.jsonl", ""), ("log.jsonl", log[log.index("\n") + 1:]),
                          ("log.jsonl", log[:log.index("\n") + 1]), ("last.pt", "cut")):
        before = len(trained)
        (folder / "result.json").unlink()
        (folder / name).write_text(content, encoding="utf-8")
        compare.main(argv)
        assert len(trained) == before + 1 and result("gpt.json")["runs"][0]["validation"] == whole[0]["validation"]


def test_a_run_that_another_process_makes_is_refused_in_one_line(tiny, again):
    folder = compare.folder_of(compare.plan(["--models=gpt", *tiny])[1][0], 1337)
    folder.mkdir(parents=True)
    lock = run_folder.Lock(folder, "compare.lock")
    with pytest.raises(SystemExit, match="in use by process .* give the same command again"):
        again()
    lock.release()
    assert not list(folder.iterdir()) and again()


def test_a_diverged_run_is_a_result_and_stops_nothing(tiny, trained, monkeypatch, capsys):
    """The last step may spoil the weights, too: no later one notices."""
    plain, evaluated = train.refuse_non_finite, evaluate.evaluate
    monkeypatch.setattr(train, "refuse_non_finite", lambda self, loss, norm: plain(
        self, math.nan if self.step == 1 and self.config.learning_rate == 9 else loss, norm))
    monkeypatch.setattr(evaluate, "evaluate", lambda model, *args: (
        (math.nan, math.nan) if model.config.norm_eps == 2 else evaluated(model, *args)))
    compare.main(["--models=gpt,gpt:learning_rate=9,gpt:norm_eps=2", "--seeds=2", *tiny, "--out=all.json"])
    report = results.read("all.json")
    assert [row["verdict"] for row in report["differences"]] == ["diverged"] * 2 and len(trained) == 6
    assert "diverged" in capsys.readouterr().out and "validation loss nan" in report["runs"][2]["diverged"]
    assert report["runs"][1]["val_loss"] == report["runs"][2]["val_loss"] == math.inf
    assert not re.search("NaN|Infinity", Path("all.json").read_text(encoding="utf-8"))
    assert results.check_run(json.loads(json.dumps(run("gpt", 1, 2.0, diverged="step 3"))))["val_loss"] == math.inf


def test_results_are_not_written_over_what_is_read_or_is_no_result(tiny, trained):
    compare.main(["--models=gpt,mudd", "--seeds=1", *tiny, "--out=a.json"])
    before = Path("a.json").read_bytes()
    Path("other.json").write_text('{"name": 1}', encoding="utf-8")
    files(planted(0, 0, [1]), planted(0, 0, [2]))
    for argv, sentence in (([*tiny, "--seeds=1", "--given=a.json", "--out=a.json"], "is read as well"),
                           ([*tiny, "--seeds=1", "--out=other.json"], "is no result of tools.compare"),
                           ([*tiny, "--seeds=1", "--out=other.json/a.json"], "cannot be written"),
                           (["--merge", "0.json", "1.json", "--out=0.json"], "is read as well")):
        with pytest.raises(SystemExit, match=sentence):
            compare.main(argv)
    assert len(trained) == 2 and Path("a.json").read_bytes() == before
    assert Path("other.json").read_text() == '{"name": 1}'


def test_the_figure_draws_what_diverged_or_is_one_seed_or_of_other_lengths_too(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    plain = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: plain(self, path, dpi=dpi / 5))
    reports = [planted(-0.01, 0.0, seeds=(0,)), planted(math.inf, 0.0, diverged="step 1", validation=[]),
               planted(-0.01, 0.001, validation=[(100, 2.0)]), planted(0, 0) | dict(differences=[])]
    for n, report in enumerate(reports):
        figure.figure(report, tmp_path / f"{n}.png")
        assert (tmp_path / f"{n}.png").stat().st_size > 5_000


# ---- Equal cost, and each arm at its best ----------------------------------------------------------------------------


def test_quick_is_two_arms_one_seed_of_a_shorter_run(tiny, tiny_data):
    config, chosen, _, _ = compare.plan(["--quick", f"--data={tiny_data}"])
    whole = configs.load_preset("compare")
    assert [arm.label for arm in chosen] == ["gpt", "value_residual"] and config.seeds == 1
    assert chosen[0].config.n_layer == whole["n_layer"]
    assert chosen[0].steps == compare.QUICK["max_iters"] < whole["max_iters"]
    assert len(compare.plan(["--quick", "--models=gpt,mudd,lime", *tiny])[1]) == 2


def weights(L, D, F, heads=2):
    """The baseline's: matrices, two norms a block, its q and k norms; the last norm, 320 rows of embedding."""
    return L * (4 * D * D + 3 * D * F + 2 * D + 2 * (D // heads)) + D + 320 * D


def flops(L, D, F, T):
    matrices = 8 * D * D + 6 * D * F
    return L * (3 * matrices + 3.5 * 4 * D * (T + 1) / 2) + 3 * 2 * D * 320


def test_match_by_width_is_the_nearest_baseline_and_says_by_how_much_it_misses(tiny):
    _, chosen, _, remarks = compare.plan(["--models=gpt,mudd,gpt:n_layer=4", "--match=params", *tiny])
    for base, arm, remark in zip(chosen[::2], chosen[1::2], remarks):
        c = base.config
        assert arm.base == base.label and c.n_embd % 4 == 0 and c.d_ff % 8 == 0
        assert base.parameters == weights(2, c.n_embd, c.d_ff)
        miss = base.parameters / arm.parameters - 1
        assert f"mismatch {miss:+.2%}" in remark and base.label in remark
        for d_ff in (c.d_ff - 8, c.d_ff + 8):
            assert abs(weights(2, c.n_embd, d_ff) / arm.parameters - 1) >= abs(miss)
    assert chosen[0].config.n_embd < chosen[2].config.n_embd and chosen[3].parameters == weights(4, 16, 24)
    wide = ["--n_embd=2", "--n_head=2", "--head_dim=4", "--d_ff=8"]                # heads wider than their share
    _, (base, _), _, _ = compare.plan(["--models=gpt,gpt:n_layer=3", "--match=params", *tiny, *wide])
    assert base.config.n_embd == 4 and base.config.head_dim == 4


def test_match_by_depth_and_an_arm_that_is_its_own_match(tiny):
    argv = ["--match=flops", "--match_by=depth", *tiny]
    _, (base, arm), _, (remark,) = compare.plan(["--models=gpt,whitematter", *argv])
    n = base.config.n_layer
    assert base.training_flops == 128 * flops(n, 16, 24, 16)
    assert f"mismatch {base.training_flops / arm.training_flops - 1:+.2%}" in remark
    for other in (n - 1, n + 1):
        assert abs(128 * flops(other, 16, 24, 16) - arm.training_flops) >= abs(base.training_flops - arm.training_flops)
    for models in (f"gpt,whitematter,{base.label}", f"gpt,{base.label},whitematter"):
        _, chosen, _, _ = compare.plan([f"--models={models}", *argv])
        assert {arm.label: arm.base for arm in chosen} == {base.label: None, "whitematter": base.label}


def test_a_sweep_reports_each_arm_at_its_best_rate(tiny, monkeypatch, capsys):
    best, plain = {"gpt": 2e-3, "mudd": 1e-3}, compare.read_log

    def planted(folder, arm, seed, diverged):
        rate, model = float(arm.settings["learning_rate"]), arm.settings["model"]
        loss = 1 + (model == "mudd") + abs(math.log(rate / best[model]))
        return plain(folder, arm, seed, diverged) | dict(val_loss=loss)
    monkeypatch.setattr(compare, "read_log", planted)
    compare.main(["--models=gpt,mudd", "--sweep=learning_rate", "--seeds=1", "--learning_rate=2e-3", *tiny])
    out = capsys.readouterr().out
    assert "learning_rate of gpt: 0.001: 1.6931, 0.002: 1.0000 (best), 0.004: 1.6931" in out
    assert "learning_rate of mudd: 0.001: 2.0000 (best)" in out and out.count("end of the grid") == 1
    report = result("gpt-mudd-sweep-learning_rate.json")
    row, = report["differences"]
    assert (row["arm"], row["base"]) == ("mudd:learning_rate=0.001", "gpt:learning_rate=0.002")
    assert row["mean"] == pytest.approx(1) and len(report["runs"]) == 6
    _, _, sweep, _ = compare.plan(["--models=gpt", "--sweep=learning_rate", "--sweep_values=3e-3,1e-3", *tiny])
    assert [arm.label for arm in sweep["gpt"]] == ["gpt:learning_rate=0.001", "gpt:learning_rate=0.003"]


# ---- Files, and many machines ----------------------------------------------------------------------------------------


def files(*reports):
    for n, report in enumerate(reports):
        results.write(f"{n}.json", report)
    return [f"{n}.json" for n in range(len(reports))]


def changed(change):
    report = json.loads(json.dumps(planted(0, 0, [2])))
    change(report)
    return json.dumps(report)


def of_run(**facts):
    return changed(lambda report: report["runs"][0].update(facts))


def of_arm(**facts):
    return changed(lambda report: report["arms"][1].update(facts))


@pytest.mark.parametrize("content, sentence", [
    ("{}", "no result of tools.compare"), ("[]", "no result"), ("cut", "no result"), ("[" * 100_000, "no result"),
    (None, "cannot be read"),
    *((of_run(val_loss=value), "val_loss") for value in ("x", None, True, [], 0, -1.0, math.nan, math.inf, 10 ** 400)),
    *((of_run(seed=value), "seed") for value in ([1], -1, 2.0, "one", None, "9" * 5000)),
    *((of_run(validation=value), "validation") for value in ([], [1], [[1, "x"]], [[2, 1.0], [2, 1.0]], [[0, 1.0]])),
    *((of_run(**{name: 0}), name) for name in ("tokens", "seconds_per_step", "parameters", "training_flops")),
    (of_run(code="fine"), "code"), (of_run(arm=[1]), "arm"),
    (of_run(diverged=[[[]]]), "diverged"), (of_run(compiled="no"), "compiled"),
    (changed(lambda report: report["runs"].append(1)), "a run is no table"),
    (changed(lambda report: report["runs"].append(report["runs"][0] | dict(seed="2"))), "gpt has the seed 2 twice"),
    (changed(lambda report: report["runs"].clear()), "no runs"),
    (changed(lambda report: report.pop("arms")), "no list"),
    (changed(lambda report: report["arms"].append(report["arms"][0])), "an arm twice"),
    (of_arm(label=3), "has no name"), (of_arm(base="lime"), "lime, the baseline of mudd"), (of_arm(base=3), "baseline"),
    *((of_arm(identity=value), "identity of mudd") for value in (
        [], None, {}, dict.fromkeys(results.PARTS, []), dict.fromkeys(results.PARTS, dict(a=[[1]])))),
    (changed(lambda report: report.update(files=["a"])), "it is merged"),
    (of_arm(identity=dict(train=dict(max_iters=4), model=dict(n_layer=3), data=dict(train=9), code=CODE)),
     "n_layer of mudd is 3, and 2 in 0.json"),
    (changed(lambda report: report["runs"][1].update(seed=3)), "1.json have no arm in common"),
    (changed(lambda report: [run.update(seed="1") for run in report["runs"]]), "both have seed 1"),
])
def test_a_damaged_or_unfit_file_is_refused_in_one_line_that_names_it(content, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files(planted(0, 0, [1]))
    if content is not None:
        Path("1.json").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=sentence) as error:
        compare.main(["--merge", "0.json", "1.json"])
    line = str(error.value)
    assert "\n" not in line and len(line) < 300 and "1.json" in line and not Path("runs").exists()


def test_differences_are_computed_from_the_runs_whatever_a_file_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rows in ("x", None, [], [dict(arm="mudd", base="gpt", n=1, mean="-5"), 3]):
        Path("0.json").write_text(changed(lambda report: report.update(differences=rows)), encoding="utf-8")
        assert results.read("0.json")["differences"] == planted(0, 0, [2])["differences"]


def test_merge_pairs_within_a_machine_and_takes_the_interval_over_machines(tmp_path, monkeypatch, capsys):
    """Machines' means -0.01, -0.02 and -0.03, from two seeds, one and one: mean -0.02 +- 0.024841."""
    monkeypatch.chdir(tmp_path)
    names = files(planted(-0.01, 0.0, [1, 2]), planted(-0.02, 0.0, [3]), planted(-0.03, 0.0, [4]))
    compare.main(["--merge", *names, "--out=all.json"])
    row, = json.loads(Path("all.json").read_text(encoding="utf-8"))["differences"]
    numbers = [row[name] for name in ("n", "mean", "low", "high")]
    assert numbers == pytest.approx([3, -0.02, -0.044841, 0.004841], abs=1e-6)
    assert "-0.0200 (0.0100)" in capsys.readouterr().out and Path("all.png").exists()
    compare.main([f"--merge={names[0]}", names[1]])
    assert "-0.0150" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="at least two"):
        compare.main(["--merge", names[0], names[0]])


@pytest.mark.parametrize("code, facts, label", [
    (CODE, {}, ""), (CODE | dict(kernels="k"), {}, ""), (CODE | dict(trainer="u"), {}, "trainer differs"),
    (CODE | dict(model="u"), {}, "other code"), ({"code": 1}, {}, "other code"),
    (CODE, dict(code="other code"), "other code")])
def test_machines_of_other_code_merge_and_say_so(code, facts, label, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    theirs = planted(-0.01, 0.0, [2], **facts)
    for arm in theirs["arms"]:
        arm["identity"]["code"] = code
    compare.main(["--merge", *files(planted(-0.01, 0.0, [1]), theirs)])
    assert result("merged.json")["differences"][0]["code"] == label
    assert (f"\n{label}: these runs" in capsys.readouterr().out) == bool(label)
    assert (f"mudd to gpt ({label})" in Path("runs/compare/merged.table.md").read_text()) == bool(label)


# ---- Studies, claims, wrong input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", arms.STUDIES)
@pytest.mark.parametrize("preset", ["compare", "eight layers", "two layers"])
def test_every_arm_of_every_study_builds(study, preset, tiny_data):
    flags = {"compare": [], "eight layers": ["--n_layer=8"], "two layers": ["--n_layer=2"]}[preset]
    _, chosen, _, _ = compare.plan([f"--study={study}", f"--data={tiny_data}", *flags])
    labels = [arm.label for arm in chosen]
    assert len(labels) == len(set(labels)) >= 2 and all(arm.base in labels for arm in chosen if arm.base)
    identities = [json.dumps(arm.identity, sort_keys=True) for arm in chosen]
    assert len(set(identities)) == len(identities), "two arms of a study are one and the same"


def test_a_shortcut_from_v2_in_a_cut_stream_is_compared_with_the_cut_stream(tiny_data):
    bases = {arm.label: arm.base for arm in compare.plan(["--study=source", f"--data={tiny_data}"])[1]}
    cut = "shortcut:variant=resid_start"
    assert bases[f"{cut}_value:source=1:resid_start=2"] == f"{cut}:resid_start=2"


def test_help_lists_every_setting(capsys):
    compare.main(["--help"])
    out = capsys.readouterr().out
    assert "--match_by=width" in out and "--max_iters=1000" in out and "--merge a.json" in out


@pytest.mark.parametrize("argv, sentence", [
    (["--models=gpt,mud"], "mud is no model: choose among gpt"), (["--models=gpt,"], "an empty name is no model"),
    (["--models=gpt,gpt"], "gpt is there twice"), (["--models=gpt,mudd,mudd"], "mudd is there twice"),
    (["--models=gpt,mudd:period=1:period=2"], "period in mudd:period=1:period=2 is there twice"),
    (["--models=gpt,gpt:data=plays"], "one text for all arms"),
    (["--models=gpt,gpt:vocab_size=20"], "smaller than the 257 ids"),
    (["--models=gpt,gpt:block_size=100000"], "choose block_size="),
    (["--models=gpt,mudd", "--study=where"], "give one of the two"),
    (["--study=target", "--n_layer=1"], "give --n_layer=2 or more"), (["--match_by=depth"], "give --match too"),
    (["--sweep_values=1,2"], "name the setting"), (["--sweep=dropout"], "0 alone is no sweep"),
    (["--sweep=learning_rate", "--sweep_values=1e-3,1e-3"], "0.001 alone is no sweep"),
    (["--first_seed=-1"], "a whole number from 0"), (["--models=gpt,mudd:dynamic"], "write model:setting=value"),
    (["--models=gpt,mudd:seed=1"], "instead: --seeds"), (["--merge", "--bogus=1"], "is no setting here"),
    (["--dynamic=no"], "no setting of gpt: write it behind its model, as in --models=gpt,mudd:dynamic=no"),
    (["--study=when"], "choose one of where, source"), (["--match=time"], "choose one of params, flops"),
    (["--match=params", "--match_by=tokens"], "choose one of width, depth"), (["--sweep=data"], "that is a number"),
    (["--sweep=lr"], "that is a number"), (["--seeds=0"], "at least 1"), (["--seed=3"], "instead: --seeds"),
    (["--model=mudd"], "instead: --models"), (["--resume"], "found and resumed by themselves"),
    (["--out=a.txt"], "give the name of a .json file"), (["--data=nowhere"], "no data set 'nowhere'"),
])
def test_wrong_input_is_answered_with_one_line_and_nothing_is_written(argv, sentence, tiny, tmp_path):
    own = {argument.partition("=")[0] for argument in argv}
    with pytest.raises(SystemExit) as error:
        compare.main([*(flag for flag in tiny if flag.partition("=")[0] not in own), *argv])
    assert str(error.value).startswith("compare: ") and sentence in str(error.value) and "\n" not in str(error.value)
    assert not any(tmp_path.iterdir())


ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in CLAIMS.splitlines() if re.match(r"\| \d+ ", line)]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_claim_has_a_valid_command_a_figure_and_a_verdict(row, tiny_data, monkeypatch):
    monkeypatch.chdir(ROOT)
    number, claim, paper, commands, ours, conclusion = row
    assert claim and paper
    verdicts = (r"shown.*|not shown.*|contradicted.*|open|direction only.*|reconstruction|"
                r"not testable at this scale: .{15,}")
    assert re.fullmatch(verdicts, conclusion)
    assert (ours == "not measured yet") == (conclusion == "open") or conclusion.startswith("not testable")
    for command in re.findall(r"`(python [^`]*)`", commands) or pytest.fail("no command"):
        words = shlex.split(command)[1:]
        if words[:2] == ["-m", "tools.compare"]:
            _, chosen, _, _ = compare.plan([*words[2:], f"--data={tiny_data}"])
            assert any(arm.base for arm in chosen)
        elif words[:2] == ["-m", "tools.bench"]:
            assert bench.read(words[2:])[1]
        elif words[0] == "train.py":
            train.read_settings(configs.read(words[1:]))
        else:
            assert words[:2] == ["-m", "tools.probe"] or words in (
                ["-m", "tools.table4"], ["depth_attention.py"], ["-m", "tools.schedules", "runs/reference"])


def test_the_ledger_is_numbered():
    assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1)) and len(ROWS) >= 24
