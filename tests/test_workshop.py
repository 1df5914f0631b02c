"""docs/workshop.md: its commands parse, its edits fit the files and do what it says, its figures are the shipped runs'."""
import json
import re
import shlex
import statistics
import subprocess
import sys

import pytest
import torch

import configs
import cyclic
import train
from tests.test_docs import ROOT, copy_of_the_sources, page
from tools import compare, schedules, verdict

TEXT = page("workshop.md")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
RESULT = json.loads((ROOT / "docs" / "workshop.json").read_text(encoding="utf-8"))


def edits(file):
    """[(old line, new line)] of the lab in which a file is edited, in the page's order."""
    start = {"value_residual.py": "## Lab 1", "mudd.py": "## Lab 2", "cyclic.py": "## Lab 3"}[file]
    lab = TEXT[TEXT.index(start):].split("\n## ")[0]
    return re.findall(r"```diff\n-([^\n]*)\n\+([^\n]*)\n```", lab)


def edited(folder, file, *pairs):
    copy_of_the_sources(folder)
    source = (folder / file).read_text(encoding="utf-8")
    for old, new in pairs:
        assert source.count(f"\n{old}\n") == 1, old
        source = source.replace(f"\n{old}\n", f"\n{new}\n")
    (folder / file).write_text(source, encoding="utf-8")
    return folder


def proved(folder, file):
    done = subprocess.run([sys.executable, file], cwd=folder, capture_output=True, text=True)
    return float(re.search(r"logits at the start +(\S+)", done.stdout + done.stderr).group(1))


def test_every_command_is_one_that_can_be_given(monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in COMMANDS:
        words = shlex.split(command)
        if words[0] == "pip":
            assert command in ("pip install -r requirements.txt -c constraints.txt", "pip install matplotlib")
        elif words[1] == "train.py":
            config, _, _ = train.read_settings(configs.load_preset("laptop") | configs.read(words[2:]))
            assert config.max_iters <= 1800
        elif words[2:3] == ["tools.compare"] and "--merge" not in words:
            config, chosen, _, _ = compare.plan(words[3:])
            assert compare.given_runs(config.given, chosen)["gpt", 1]["val_loss"] > 1   # the shipped baseline is this one
        elif words[1] in ("value_residual.py", "mudd.py", "depth_attention.py", "cyclic.py"):
            assert words[2:] in ([], ["--diff"], ["--show", "T=12", "g=4"])
        else:
            assert "tools.compare --merge" in command or "tools.probe runs/lab2" in command, command


@pytest.mark.parametrize("file", ["value_residual.py", "mudd.py", "cyclic.py"])
def test_each_line_that_is_edited_stands_once_in_its_file(file):
    source, pairs = (ROOT / file).read_text(encoding="utf-8"), edits(file)
    assert len(pairs) == {"value_residual.py": 3, "mudd.py": 1, "cyclic.py": 1}[file]
    assert all(source.count(f"\n{old}\n") == 1 for old, _ in pairs)


@pytest.mark.slow
def test_without_the_mix_the_value_residual_is_the_baseline_and_at_the_query_it_is_not(tmp_path):
    first, second, third = edits("value_residual.py")
    assert proved(edited(tmp_path, "value_residual.py", first), "value_residual.py") == 0
    assert proved(edited(tmp_path, "value_residual.py", second, third), "value_residual.py") > 0
    run = "import train, torch; " \
          "a, b = (train.build(n, n_layer=3, n_embd=16, **k) for n, k in (('value_residual', {}), " \
          "('shortcut', dict(variant='query')))); x = torch.arange(8)[None]; assert torch.equal(a(x), b(x))"
    subprocess.run([sys.executable, "-c", run], cwd=tmp_path, check=True)          # so the shipped arm is this edit


@pytest.mark.slow
def test_mudd_from_a_random_table_starts_far_from_the_baseline_and_is_identity_start_no(tmp_path):
    edited(tmp_path, "mudd.py", *edits("mudd.py"))
    assert proved(ROOT, "mudd.py") == 0 and proved(tmp_path, "mudd.py") > 0.1
    run = "import train, torch; x = torch.arange(8)[None]; " \
          "torch.save(train.build('mudd', n_layer=3, n_embd=16, {})(x), '{}')"
    for folder, how, name in ((tmp_path, "", "edited.pt"), (ROOT, "identity_start=False", "asked.pt")):
        subprocess.run([sys.executable, "-c", run.format(how, tmp_path / name)], cwd=folder, check=True)
    assert torch.equal(torch.load(tmp_path / "edited.pt"), torch.load(tmp_path / "asked.pt"))


def stars(schedule, passes):
    """How many of the cells of 12 tokens in 4 groups are final after so many passes."""
    return schedules.picture(schedule, 12, 4, passes)[-1].count("*")


def test_the_answers_of_lab_3(monkeypatch):
    """T passes by Jacobi, ceil(T / g) by strided groups, T - g + 1 by contiguous ones; backwards T - T / g + 1."""
    for schedule, passes in (("jacobi", 12), ("cyclic", 3), ("contiguous", 9)):
        assert stars(schedule, passes) == 12 > stars(schedule, passes - 1)
    (old, new), = edits("cyclic.py")
    assert "reversed" in new
    monkeypatch.setitem(cyclic.GROUPS, "cyclic", lambda T, g: [slice(c, T, g) for c in reversed(range(g))])
    assert stars("cyclic", 10) == 12 > stars("cyclic", 9)


def test_the_figures_of_labs_1_and_2_are_the_shipped_ones():
    """A row of a table: arm, mean difference, lowest and highest seed, 95 % interval."""
    rows = {row["arm"]: row for row in RESULT["differences"]}
    shown = re.findall(r"^\| ([^|]+?) +\| ([^|]+?) +\| ([^|]+?) +\| ([^|]+?) +\| `([^`]+)` \|$", TEXT, re.MULTILINE)
    assert len(shown) == 4
    for _, mean, ends, interval, arm in shown:
        row, values = rows[arm], rows[arm]["values"].values()
        assert mean == f"{row['mean']:+.3f}" and ends == f"{min(values):+.3f} to {max(values):+.3f}"
        assert interval == f"{row['low']:+.3f} to {row['high']:+.3f}"
    base = [run["val_loss"] for run in verdict.runs_of(RESULT, "gpt").values()]
    assert f"{statistics.fmean(base):.3f}" in TEXT
