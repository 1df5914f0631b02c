"""The README: every command in it parses or runs, at reduced size, and what it shows is what the code computes."""
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import configs
import train
from data.openwebtext import prepare
from tools import bench, prove, sample, table4
from tools.compare import __main__ as compare
from tools.compare import results, verdict
from tools.probe import __main__ as probe
from trainer.flops import flops_of, training_flops
from value_residual import ValueResidual

ROOT = Path(train.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line]
COMMANDS = BLOCKS + [command for command in re.findall(r"`(python [^`]+)`", README) if command not in BLOCKS]
SMALL = ["--n_layer=2", "--n_embd=16", "--n_head=2", "--block_size=16", "--batch_size=2", "--max_iters=2",
         "--sample_tokens=5"]


def test_the_first_commands_stand_in_the_first_forty_lines_with_their_output():
    top = "\n".join(README.splitlines()[:40])
    assert BLOCKS[:2] == ["pip install -r requirements.txt -c constraints.txt", "python train.py"]
    assert all(command in top for command in BLOCKS[:2]) and "nats per token" in top


def test_every_command_runs_in_the_readmes_order(tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for n in range(3):
        (tmp_path / "texts" / f"{n}.txt").write_text(f"Text number {n}. " * 200, encoding="utf-8")
    for command in sorted(COMMANDS, key=lambda command: "--data=data/mine" in command):
        _, *words = shlex.split(command)
        name, arguments = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
        if name in ("pip", "pytest", "install"):
            assert all((ROOT / word).is_file() for word in arguments if word.endswith(".txt"))
            continue
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        if name == "train.py":
            small = [] if "--resume" in arguments else [*SMALL, f"--data={tiny_data}"]
            train.main([*small, *arguments, *(["--max_iters=3"] if "--resume" in arguments else [])])
        elif name == "tools.sample":
            sample.main([*arguments, "--max_new_tokens=5"])
        elif name == "tools.table4":
            table4.main()
        elif name == "tools.compare":
            print(compare.plan([*arguments, f"--data={tiny_data}"]))
        elif name == "tools.bench":
            print(bench.read(arguments))
        elif name == "tools.probe":
            probe.main([argument for argument in arguments if not argument.startswith("runs")])
        elif name == "tools.schedules":
            print((ROOT / "tools" / "schedules.py").read_text(encoding="utf-8")[:100])
        elif name == "data/openwebtext/prepare.py":
            prepare.main(arguments)
        else:                                                              # a mechanism's file
            assert name in ("cyclic.py", "mudd.py", "value_residual.py", "baselines.shortcuts"), command
            file = ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py")
            runpy.run_path(str(file), run_name="__main__")
        assert capsys.readouterr().out, command


def test_the_diff_in_the_readme_is_the_files_and_short():
    shown = re.search(r"```diff\n(.*?)```", README, re.DOTALL).group(1).rstrip().splitlines()
    computed = [line for line in prove.loop_diff(ValueResidual)[3:] if line.strip()]
    assert [line.rstrip() for line in shown] == [line.rstrip() for line in computed]
    assert sum(line[0] in "+-" for line in shown) < 12


@pytest.mark.parametrize("name", [name for name in train.MODELS if name != "looped"])
def test_the_table_of_mechanisms_shows_what_the_code_computes(name):
    """Cache and training FLOPs, at the laptop preset."""
    def size(name):
        _, config, model_class = train.read_settings(configs.load_preset("laptop") | dict(model=name, vocab_size=257))
        return 2 * sum(model_class.cache_slots(config)) * config.n_kv_head * config.head_dim, \
            training_flops(flops_of(model_class, config))
    file = Path(sys.modules[train.MODELS[name][1].__module__].__file__).relative_to(ROOT).as_posix()
    cells = [cell.strip() for cell in re.search(rf"^\| \[{file}\].*$", README, re.MULTILINE).group(0).split("|")]
    (cache, flops), (_, plain) = size(name), size("gpt")
    assert cells[-3] == f"{cache:,}" and float(cells[-2]) == pytest.approx(flops / plain, abs=6e-4)


def test_the_comparison_in_the_readme_is_the_shipped_one():
    report = results.read(ROOT / "docs" / "compare.json")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines()]
    shown = {cells[0]: cells for cells in lines if cells and cells[0] in ("value_residual", "mudd", "depth_attention")}
    for row in verdict.compare_runs(report):
        text = f"{row['mean']:+.4f} ({row['sd']:.4f})", f"{row['low']:+.4f} to {row['high']:+.4f}", row["verdict"]
        assert tuple(shown[row["arm"]][2:5]) == text
        first_table = next(line for line in README.splitlines() if line.startswith(f"| [{row['arm']}.py]"))
        assert f"{row['mean']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f}): {row['verdict']}" in first_table


def test_table_4_and_the_speeds_on_the_pages_are_what_the_tools_give():
    claims, page = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("claims.md", "bench.md"))
    for row, (_, _, paper) in table4.ROWS.items():
        numbers = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", claims, re.MULTILINE).group(1)
        assert tuple(float(number) for number in numbers.split("|")) == paper
    speeds = json.loads((ROOT / "docs" / "bench.json").read_text(encoding="utf-8"))["results"]
    assert set(speeds) == set(train.MODELS) - {"gpt"} and "\n".join(bench.table(speeds)) in page
