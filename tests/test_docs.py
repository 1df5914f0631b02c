"""The pages of docs/: links lead somewhere, edits do what the page says, examples run, figures are the shipped ones."""
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
WORKSHOP = (ROOT / "docs" / "workshop.md").read_text(encoding="utf-8")
RESULT = json.loads((ROOT / "docs" / "workshop.json").read_text(encoding="utf-8"))


def copy_of_the_sources(folder):
    for name in ("*.py", "pyproject.toml", "baselines/*.py", "configs/*", "data/*.py", "data/openwebtext/*.py",
                 "tests/*.py", "tools/**/*.py", "trainer/*.py"):
        for path in ROOT.glob(name):
            if path.is_file():
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    return folder


def edit(folder, file, old, new):
    source = (folder / file).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{file} has {old!r} {source.count(old)} times"
    (folder / file).write_text(source.replace(old, new), encoding="utf-8")


def python(folder, *words):
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    return done.returncode, done.stdout + done.stderr


# ----------------------------------------------------------------------------------------------------------- workshop


def lab(n):
    """[(old line, new line)] of the edits in a lab."""
    text = WORKSHOP.partition(f"## Lab {n}")[2].partition("\n## ")[0]
    return re.findall(r"```diff\n-([^\n]*)\n\+([^\n]*)\n```", text)


BREAKS = re.findall(r"^\| `(\w+\.py)` \| `([^`]+)` \| `([^`]+)` \| `(\S+)` \|$", WORKSHOP, re.MULTILINE)


def test_each_line_that_is_edited_stands_once_in_its_file():
    assert (len(lab(1)), len(lab(2)), len(BREAKS)) == (3, 1, 4)
    edits = [("value_residual.py", old) for old, _ in lab(1)] + [("mudd.py", old) for old, _ in lab(2)]
    for file, old in edits + [(file, old) for file, old, *_ in BREAKS]:
        assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1, (file, old)


@pytest.mark.slow
def test_the_edits_of_labs_1_and_2_do_what_the_page_says(tmp_path):
    def distance(file, *edits):
        folder = copy_of_the_sources(tmp_path / str(len(list(tmp_path.iterdir()))))
        for old, new in edits:
            edit(folder, file, old, new)
        _, output = python(folder, file)
        return float(re.search(r"logits at the start +(\S+)", output).group(1)), folder

    first, second, third = lab(1)
    assert distance("value_residual.py", first)[0] == 0
    apart, at_the_query = distance("value_residual.py", second, third)
    assert apart > 0
    same = ("import train, torch; a, b = (train.build(n, n_layer=3, n_embd=16, **k) for n, k in "
            "(('value_residual', {}), ('shortcut', dict(variant='query')))); x = torch.arange(8)[None]; "
            "assert torch.equal(a(x), b(x))")
    assert python(at_the_query, "-c", same) == (0, "")                     # so the shipped arm is this edit
    assert distance("mudd.py")[0] == 0 and distance("mudd.py", *lab(2))[0] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("file, old, new, red", BREAKS)
def test_an_edit_of_break_it_fails_the_test_that_is_named(file, old, new, red, tmp_path):
    folder = copy_of_the_sources(tmp_path)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", red]
    assert python(folder, *command)[0] == 0
    edit(folder, file, old, new)
    code, output = python(folder, *command)
    assert code == 1 and "1 failed" in output, output


def test_the_figures_of_labs_1_and_2_are_the_shipped_ones():
    """A row of a table: arm, mean difference, lowest and highest seed, 95 % interval."""
    rows = {row["arm"]: row for row in RESULT["differences"]}
    shown = re.findall(r"^\| ([^|]+?) +\| ([^|]+?) +\| ([^|]+?) +\| ([^|]+?) +\| `([^`]+)` \|$", WORKSHOP, re.MULTILINE)
    assert len(shown) == 4
    for _, mean, ends, interval, arm in shown:
        row, values = rows[arm], rows[arm]["values"].values()
        assert mean == f"{row['mean']:+.3f}" and ends == f"{min(values):+.3f} to {max(values):+.3f}"
        assert interval == f"{row['low']:+.3f} to {row['high']:+.3f}"
    assert f"{statistics.fmean(run['val_loss'] for run in RESULT['runs'] if run['model'] == 'gpt'):.3f}" in WORKSHOP


# --------------------------------------------------------------------------------------------------- add a mechanism


def test_the_mechanism_of_the_page_starts_as_the_baseline_and_decodes_exactly(monkeypatch, capsys):
    text = (ROOT / "docs" / "add_a_mechanism.md").read_text(encoding="utf-8")
    module = types.ModuleType("reread")
    monkeypatch.setitem(sys.modules, "reread", module)                     # a dataclass looks its module up
    code = re.search(r"```python\n(\"\"\".*?)```", text, re.DOTALL).group(1)
    exec(compile(code, "reread.py", "exec"), vars(module))
    from model import GPT, GPTConfig
    size = dict(vocab_size=70, block_size=16, n_layer=3, n_head=2, n_embd=16)
    model, plain = module.Reread(module.RereadConfig(**size)).eval(), GPT(GPTConfig(**size)).eval()
    idx = torch.arange(12)[None]
    assert torch.equal(model(idx), plain(idx))
    model.g.data += torch.randn(3)
    assert not torch.equal(model(idx), plain(idx))
    cache = model.new_cache(1)
    parts = torch.cat([model(piece, cache=cache) for piece in idx.split([5, 1, 6], dim=1)], dim=1)
    torch.testing.assert_close(parts, model(idx))
    model(idx, idx).backward()
    assert model.g.grad.abs().min() > 0
    assert module.flops_per_token(model.config, 16)["prefill"] > 0


# -------------------------------------------------------------------------------------------------------------- links


PAGES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *ROOT.glob("*/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert ((ROOT / page).parent / target).exists(), target
