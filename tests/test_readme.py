"""The README: every command in it parses, those that can run here are run at reduced size, and what it shows is true."""
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import configs
import train
from data.openwebtext import prepare
from tools import bench, prove, sample, schedules, table4
from tools.compare import __main__ as compare
from tools.compare import verdict
from value_residual import ValueResidual

ROOT = Path(train.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line]
SMALL = ["--n_layer=2", "--n_embd=16", "--n_head=2", "--block_size=16", "--batch_size=2", "--max_iters=2", "--sample_tokens=5"]

ONLY_PARSED = [          # they need a network, a GPU or several processes, or are this very test run
    "pip install -r requirements.txt -c constraints.txt",
    "pip install -r requirements-dev.txt -c constraints.txt",
    "python -m pytest -q",
    "python data/openwebtext/prepare.py --subsets 1",
    "python data/openwebtext/prepare.py --subsets 6",
    "python train.py configs/owt_small.toml",
    "python train.py configs/owt_124m.toml --model=value_residual",
    "torchrun --nproc_per_node=2 train.py configs/owt_124m.toml",
]


def test_the_list_of_commands_that_are_only_parsed_is_up_to_date():
    assert set(ONLY_PARSED) <= set(COMMANDS) and len(COMMANDS) > 15


@pytest.mark.parametrize("command", ONLY_PARSED)
def test_what_is_only_parsed_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if "train.py" in words:
        config, model_config, _ = train.read_settings(configs.read(words[words.index("train.py") + 1:]))
        assert config.max_iters > 100 and model_config.n_layer >= 8
    for word in words:
        if word.endswith((".txt", ".toml", ".py")):
            assert (ROOT / word).is_file()


def test_what_can_run_runs_in_the_readmes_order(tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for n in range(3):
        (tmp_path / "texts" / f"{n}.txt").write_text(f"Text number {n}. " * 200, encoding="utf-8")
    for command in COMMANDS:
        if command in ONLY_PARSED:
            continue
        words = shlex.split(command)
        assert words[0] == "python"
        program, arguments = (" ".join(words[1:3]), words[3:]) if words[1] == "-m" else (words[1], words[2:])
        if program == "train.py" and "--resume" in arguments:
            train.main([*arguments, "--max_iters=3", "--sample_tokens=0"])
        elif program == "train.py":
            own_data = [] if any(word.startswith("--data") for word in arguments) else [f"--data={tiny_data}"]
            train.main([*SMALL, *own_data, *arguments])
        elif program == "-m tools.sample":
            sample.main([*arguments, "--max_new_tokens=5"])
        elif program == "-m tools.table4":
            table4.main()
        elif program == "-m tools.compare":
            _, chosen, _, _ = compare.plan([*arguments, f"--data={tiny_data}"])
            print(f"{len(chosen)} arms" * any(arm.base for arm in chosen))
        elif program == "-m tools.bench":
            print(bench.read(arguments))
        elif program == "data/openwebtext/prepare.py":
            prepare.main(arguments)
        elif program == "cyclic.py":
            monkeypatch.setattr("sys.argv", [program, *arguments])
            schedules.main()
        else:                                                          # a mechanism file shows what its header claims
            name = {"value_residual.py": "value_residual", "-m baselines.shortcuts": "shortcut", "mudd.py": "mudd"}[program]
            monkeypatch.setattr("sys.argv", [program, *arguments])
            prove.main(name)
        assert capsys.readouterr().out


def test_the_diff_in_the_readme_is_the_files():
    shown = re.search(r"```diff\n(.*?)```", README, re.DOTALL).group(1)
    assert shown.splitlines() == prove.loop_diff(ValueResidual)[3:]


@pytest.mark.parametrize("name", [name for name in train.MODELS if name != "looped"])
def test_the_tables_of_models_show_what_the_code_computes(name):
    """Lines changed, cache and training FLOPs, at the laptop preset."""
    _, config, model_class = train.read_settings(configs.load_preset("laptop") | dict(model=name))
    _, plain, _ = train.read_settings(configs.load_preset("laptop"))
    config.vocab_size = plain.vocab_size = 257

    def flops(module, config):
        flops = sys.modules[module].flops_per_token(config, config.block_size)
        return flops["train"] + 3 * flops["head"]
    file = Path(sys.modules[model_class.__module__].__file__).relative_to(ROOT).as_posix()
    cells = [cell.strip() for cell in re.search(rf"^\| \[{file}\].*$", README, re.MULTILINE).group(0).split("|")]
    cache = 2 * sum(model_class.cache_slots(config)) * config.n_kv_head * config.head_dim
    assert cells[-3] == f"{cache:,}"
    assert float(cells[-2]) == pytest.approx(flops(model_class.__module__, config) / flops("model", plain), abs=6e-4)
    if len(cells) == 8 and cells[3].isdigit():                             # the table of the main mechanisms
        changed = [line for line in prove.loop_diff(model_class) if line[0] in "+-" and line[:3] not in ("+++", "---")]
        assert int(cells[3]) == len(changed)


def test_table_4_in_the_readme_is_what_the_tool_computes():
    for row, (name, settings, paper) in table4.ROWS.items():
        numbers = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", README, re.MULTILINE).group(1)
        assert tuple(float(number) for number in numbers.split("|")) == paper


def test_the_comparison_in_the_readme_is_the_shipped_one():
    report = json.loads((ROOT / "docs" / "compare.json").read_text(encoding="utf-8"))
    assert report["differences"] == json.loads(json.dumps(verdict.compare_runs(report)))
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in verdict.table(report).splitlines()]
    for row in (head, *rows):
        cells = [cell for cell, title in zip(row, head) if title != "bits per byte"]
        assert f"| {' | '.join(cells)} |" in README
    for row in report["differences"]:
        first_table = next(line for line in README.splitlines() if line.startswith(f"| [{row['arm']}.py]"))
        assert f"{row['mean']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f}): {row['verdict']}" in first_table


def test_the_speeds_in_the_readme_are_the_shipped_ones():
    results = json.loads((ROOT / "docs" / "bench.json").read_text(encoding="utf-8"))["results"]
    assert set(results) == set(train.MODELS) - {"gpt"} and "\n".join(bench.table(results)) in README


def test_every_linked_file_is_there():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
