"""The pages of docs/: each edit breaks the test that it names, figures are computed, names exist, commands parse."""
import ast
import dataclasses
import functools
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F

import configs
import cyclic
import model as baseline
import mudd
import train
import whitematter as wm
from depth_attention import DepthAttentionConfig, sources
from model import attend
from tests import test_value_residual
from tools import prove, schedules

ROOT = Path(train.__file__).parent
SOURCES = ("*.py", "pyproject.toml", "baselines/*.py", "configs/*", "data/*.py", "data/openwebtext/*.py", "tests/*.py",
           "tools/*.py")
TINY = dict(vocab_size=70, block_size=16, n_layer=4, n_head=2, n_embd=16)
IDS = torch.randint(70, (2, 12), generator=torch.Generator().manual_seed(1))


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ break it


def edits(name):
    """{title: (file, old line, new line, red test, green test)} of a page, read from its sections."""
    entry = re.compile(r"^(?:## |\*\*)(?P<title>[^\n*]+?)(?:\*\*)?\n\n`(?P<file>\S+\.py)`[^\n]*\n\n"
                       r"```diff\n-(?P<old>[^\n]*)\n\+(?P<new>[^\n]*)\n```\n(?P<text>.*?)"
                       r"- red: `(?P<red>[^`]+)`\n- still green: `(?P<green>[^`]+)`\n", re.DOTALL | re.MULTILINE)
    return {m["title"]: (m["file"], m["old"], m["new"], m["red"], m["green"]) for m in entry.finditer(page(name))}


EDITS = edits("break_it.md") | edits("answers.md")


def copy_of_the_sources(folder):
    for pattern in SOURCES:
        for path in ROOT.glob(pattern):
            if path.is_file():
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def outcomes(folder, *arguments):
    """pytest in a process of its own -> (exit code, {test: None if it passed, else what its failure said})."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=outcome.xml", *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True,
                          text=True)
    assert (folder / "outcome.xml").exists(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(folder / "outcome.xml").iter("testcase"):
        name = case.get("classname").replace(".", "/") + ".py::" + case.get("name")
        assert case.find("error") is None and case.find("skipped") is None, done.stdout
        failure = case.find("failure")
        found[name] = None if failure is None else failure.get("message")
    return done.returncode, found


def test_there_are_ten_edits_and_two_in_the_answers_of_lines_that_stand_once_in_their_files():
    assert len(edits("break_it.md")) == page("break_it.md").count("\n## ") == 10 and len(edits("answers.md")) == 2
    for file, old, new, red, green in EDITS.values():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        assert lines.count(old) == 1 and old != new and red != green, old
    assert {file for file, *_ in EDITS.values()} >= {"model.py", "value_residual.py", "mudd.py", "depth_attention.py",
                                                     "whitematter.py", "cyclic.py"}


@pytest.mark.slow
def test_without_an_edit_all_named_tests_pass(tmp_path):
    copy_of_the_sources(tmp_path)
    named = {test for *_, red, green in EDITS.values() for test in (red, green)}
    code, found = outcomes(tmp_path, *named)
    assert code == 0 and found == dict.fromkeys(named)


@pytest.mark.slow
@pytest.mark.parametrize("title", EDITS)
def test_an_edit_fails_its_test_by_assertion_and_leaves_the_other_green(title, tmp_path):
    file, old, new, red, green = EDITS[title]
    copy_of_the_sources(tmp_path)
    lines = (tmp_path / file).read_text(encoding="utf-8").splitlines(keepends=True)
    edited = [line.replace(old, new) if line.rstrip("\r\n") == old else line for line in lines]
    (tmp_path / file).write_text("".join(edited), encoding="utf-8")
    code, found = outcomes(tmp_path, red, green)
    assert code == 1 and set(found) == {red, green} and found[green] is None, found
    assert re.match("assert|AssertionError", found[red]), found


# ------------------------------------------------------------------------------------------------------------- answers


def sections(name):
    """{title: text} of the parts under ## of a page."""
    return dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page(name), re.DOTALL | re.MULTILINE))


ANSWERS = {int(title.split(".")[0]): text for title, text in sections("answers.md").items()}


def bold(number):
    """What stands in bold in an answer: its figures, in order."""
    return re.findall(r"\*\*([^*]+)\*\*", ANSWERS[number])


def parameters(name, **settings):
    return sum(p.numel() for p in train.build(name, **settings).parameters())


def test_every_exercise_has_its_answer():
    numbers = [int(n) for n in re.findall(r"^\*\*(\d+)\. ", page("exercises.md"), re.MULTILINE)]
    assert numbers == sorted(ANSWERS) == list(range(1, 13))


def test_answer_1_the_cache():
    def slots(name, **settings):
        config_class, model_class = train.MODELS[name]
        config = config_class(n_layer=12, n_embd=768, n_head=12, n_kv_head=4, head_dim=64, **settings)
        return sum(model_class.cache_slots(config))
    arms = (("gpt", {}), ("whitematter", dict(k=4)), ("lckv", dict(w=2)), ("value_residual", dict(variant="svformer")),
            ("feedback", {}))
    sizes = [slots(name, **settings) * 4 * 64 * 2 for name, settings in arms]
    assert bold(1) == [f"{size:,}" for size in sizes] + [f"{size * 2048 / 2 ** 20:g}" for size in sizes[:2]]


def test_answer_2_what_mudd_adds():
    size = dict(n_layer=4, n_embd=128, n_head=4)
    model = train.build("mudd", **size)
    blocks = [sum(p.numel() for p in g.parameters()) for g in model.generators]
    plain = parameters("gpt", **size)
    added = sum(p.numel() for p in model.parameters()) - plain
    assert bold(2) == [f"{n:,}" for n in (*blocks, added - sum(blocks), added,
                                          parameters("mudd", **size, dynamic=False, multiway=False) - plain)]
    for n, block in enumerate(model.generators):
        row = re.search(rf"^\| {n} \|(.*?)\| \*\*", ANSWERS[2], re.MULTILINE).group(1)
        assert tuple(map(int, row.split("|"))) == mudd.sizes(model.config, n)


def test_answer_3_who_starts_where_the_baseline_starts():
    arms = re.findall(r"`(\w+(?: --\w+=\w+)?)`", page("exercises.md").partition("**3.")[2].partition("Then ask")[0])
    assert len(arms) == 9
    plain = train.build("gpt", **TINY).eval()
    same = []
    for arm in arms:
        name, *flags = arm.split()
        config, = configs.build(TINY | configs.read(flags), train.MODELS[name][0])
        if torch.equal(train.MODELS[name][1](config).eval()(IDS), plain(IDS)):
            same.append(arm)
    assert bold(3) == same


def test_answer_4_dead_numbers():
    said = []
    for variant in ("convex", "learnable", "learnable_plus"):
        model = train.build("value_residual", **TINY, variant=variant)
        model(IDS, IDS).backward()
        grads = torch.cat([getattr(model, name).grad.flatten() for name in model.names])
        said += [str(len(grads)), str((grads == 0).sum().item())]
    assert bold(4) == said


def test_answer_5_sources():
    found = []
    for stride, recent in ((DepthAttentionConfig(n_layer=6).stride, 0), (2, 2)):
        found.append(", ".join(map(str, sources(5, stride, recent))))
    for stride in (DepthAttentionConfig(n_layer=6).stride, 1):
        found.append(str(sum(1 + len(sources(l, stride, 0)) for l in range(6))))
    assert bold(5) == found


def steps(schedule, g, passes):
    """Of a schedule with 12 tokens: [(tokens, the pass that made each slot before this step, pass, all final)]"""
    marks = schedules.Marks(SimpleNamespace(schedule=schedule, groups=g, passes=passes, grad_passes=1))
    with torch.no_grad():
        cyclic.run(marks, torch.zeros(1, 12, 2))
    return [(tokens, made, states[0][0], all(final for _, final in states)) for tokens, made, _, states in marks.rows]


def test_answer_6_passes_until_exact():
    said = []
    for schedule, g in (("jacobi", 1), ("cyclic", 4), ("cyclic", 5), ("contiguous", 4)):
        run = steps(schedule, g, 12)
        exact = {p: all(final for *_, q, final in run if q == p) for p in range(1, 13)}
        passes = min(p for p in exact if exact[p])
        said += [passes, passes * g, passes * 12]
    run = steps("autoregressive", 1, 1)
    said += [len(run), sum(len(tokens) for tokens, *_ in run)]
    assert bold(6) == [str(n) for n in said]


def test_answer_7_the_freshest_cell():
    def stale(schedule, g):
        """The tokens that read a left neighbour of the first pass in the second."""
        second = [(tokens, made) for tokens, made, p, _ in steps(schedule, g, 2) if p == 2]
        return sorted(i for tokens, made in second for i in tokens if i and made[i - 1] < 2)
    tokens, made = next((tokens, made) for tokens, made, p, _ in steps("cyclic", 4, 2) if p == 2 and 10 in tokens)
    assert tokens == [2, 6, 10]
    assert bold(7) == [", ".join(f"{n:.0f}" for n in made[6:10]), ", ".join(map(str, stale("cyclic", 4))),
                       str(len(stale("contiguous", 4))), str(len(stale("jacobi", 1)))]


def test_answer_8_equal_cost():
    plain, whitematter = (train.read_settings(configs.load_preset("laptop") | dict(model=name, vocab_size=257))[1]
                          for name in ("gpt", "whitematter"))

    def cost(module, config):
        """FLOPs of training with head, and of decoding without."""
        flops = module.flops_per_token(config, config.block_size)
        return flops["train"] + 3 * flops["head"], flops["decode"]
    by_layers = {n: cost(baseline, dataclasses.replace(plain, n_layer=n)) for n in range(1, 40)}
    (train4, decode4), (ours, ours_decode) = by_layers[4], cost(wm, whitematter)
    below = max(n for n, (train_, _) in by_layers.items() if train_ <= ours)
    same = min(by_layers, key=lambda n: abs(by_layers[n][1] - ours_decode))
    assert bold(8) == [f"{ours / train4:.3f}", str(below), f"{by_layers[below][0] / train4:.3f}", str(below + 1),
                       f"{by_layers[below + 1][0] / train4:.3f}", f"{ours_decode / decode4:.3f}", str(same)]


def test_answer_9_the_interval():
    exercise = page("exercises.md").partition("**9.")[2].partition("**10.")[0]
    numbers = [float(n) for n in re.findall(r"\d\.\d{4}", exercise)]
    differences = [b - a for a, b in zip(numbers[:3], numbers[3:])]
    mean, sd = statistics.mean(differences), statistics.stdev(differences)
    half = {n: t * sd / n ** 0.5 for n, t in ((3, 4.303), (8, 2.365), (9, 2.306), (10, 2.262))}
    enough = min(n for n in half if half[n] < abs(mean))
    assert bold(9) == [f"{mean:.4f}", f"{sd:.4f}", f"{mean - half[3]:.4f}", f"{mean + half[3]:+.4f}", str(enough)]
    assert all(f"{d:+.4f}" in ANSWERS[9] for d in differences)
    assert f"{half[8]:.4f} with 8 pairs and {half[9]:.4f} with 9" in ANSWERS[9]


@pytest.mark.parametrize("lam1", [0.5, 0.2])
def test_answer_11_two_copies_of_the_keys_with_a_logarithm_added(lam1):
    assert hasattr(test_value_residual, re.search(r"`(test_keys_\w+)`", ANSWERS[11]).group(1))
    q, k, v, v1 = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(4))
    mask = torch.where(torch.ones(9, 9, dtype=torch.bool).tril(), 0.0, -math.inf).double()
    both = torch.cat((mask + math.log(1 - lam1), mask + math.log(lam1)), dim=1)
    attended = F.scaled_dot_product_attention(q, torch.cat((k, k), 2), torch.cat((v, v1), 2), attn_mask=both)
    torch.testing.assert_close(attended, attend(q, k, lam1 * v1 + (1 - lam1) * v), rtol=0, atol=1e-12)


def mechanism(text):
    """The module that stands in a page as a whole file."""
    code = re.search(r"```python\n(\"\"\".*?)```", text, re.DOTALL).group(1)
    module = types.ModuleType("attention_residuals")
    sys.modules[module.__name__] = module                                  # a dataclass looks its module up
    exec(compile(code, "attention_residuals.py", "exec"), vars(module))
    return code, module


def test_the_skeleton_is_the_baseline_bit_for_bit():
    _, skeleton = mechanism(page("exercises.md"))
    model, plain = skeleton.AttentionResiduals(skeleton.AttentionResidualsConfig(**TINY)), train.build("gpt", **TINY)
    with torch.no_grad():
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            b.copy_(a.add_(0.1 * torch.randn_like(a)))
    assert torch.equal(model(IDS), plain(IDS)) and torch.equal(model(IDS, IDS), plain(IDS, IDS))


def test_answer_12_by_hand_and_at_its_start():
    _, answer = mechanism(ANSWERS[12])
    model = answer.AttentionResiduals(answer.AttentionResidualsConfig(**TINY)).double()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    written = list(torch.randn(4, 2, 5, 16, dtype=torch.float64))
    w, norm = model.w[2], model.norms[2]
    for b, t in ((0, 0), (1, 3)):
        e = [(w * norm.weight * v[b, t]).sum() / (v[b, t].square().mean() + norm.eps).sqrt() for v in written]
        a = torch.stack(e).exp() / torch.stack(e).exp().sum()
        torch.testing.assert_close(model.mix(written)[b, t], sum(a_i * v[b, t] for a_i, v in zip(a, written)))
    added = sum(p.numel() for p in model.parameters()) - parameters("gpt", **TINY)
    assert added == 4 * 4 * 16 and "4 L D parameters" in ANSWERS[12]
    assert answer.flops_per_token(model.config, 8)["decode"] - baseline.flops_per_token(model.config, 8)["decode"] \
        == 4 * 16 * sum(range(2, 10))

    def distance(eps):
        size = dict(n_layer=4, n_embd=128, n_head=4, norm_eps=eps)
        ours = answer.AttentionResiduals(answer.AttentionResidualsConfig(**size))
        return (ours(IDS) - train.build("gpt", **size)(IDS)).abs().max()
    below, above = (float(n) for n in bold(12))
    assert distance(1e-12) < below < above < distance(1e-6)


@pytest.mark.slow
def test_answer_12_keeps_the_contract(tmp_path):
    copy_of_the_sources(tmp_path)
    code, _ = mechanism(ANSWERS[12])
    (tmp_path / "attention_residuals.py").write_text(code, encoding="utf-8")
    for file, first, added in (
            ("train.py", "MODELS = {", '    "attention_residuals": (AttentionResidualsConfig, AttentionResiduals),'),
            ("train.py", "import data\n",
             "from attention_residuals import AttentionResiduals, AttentionResidualsConfig"),
            ("tests/test_contract.py", "ARMS = {", '    "attention_residuals": ("attention_residuals", {}),')):
        lines = (tmp_path / file).read_text(encoding="utf-8").splitlines(keepends=True)
        at = next(i for i, line in enumerate(lines, 1) if line.startswith(first))
        (tmp_path / file).write_text("".join([*lines[:at], added + "\n", *lines[at:]]), encoding="utf-8")
    code, found = outcomes(tmp_path, "tests/test_contract.py", "-k", "attention_residuals or has_an_arm")
    assert code == 0 and len(found) >= 12 and set(found.values()) == {None}


# ------------------------------------------------------------------------------------------ glossary, teacher, commands


@functools.cache
def names_in(file):
    """(every name that the code of a file uses or defines, {class: the names inside it})"""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))

    def names(node):
        found = set()
        for part in ast.walk(node):
            for field in ("id", "attr", "arg", "name"):
                found.add(getattr(part, field, None))
        return found
    return names(tree), {node.name: names(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def test_every_name_in_the_glossary_is_in_the_code():
    rows = re.findall(r"^\| (?!\*\*)(?!symbol)(?!---)(.*?) \| (.*?) \| (.*) \|$", page("glossary.md"), re.MULTILINE)
    assert len(rows) > 60
    for word, meaning, where in rows:
        references = re.findall(r"`([\w/]+\.py): ([\w.]+)`", where)
        assert references and ", ".join(f"`{file}: {name}`" for file, name in references) == where, where
        for file, name in references:
            everything, classes = names_in(file)
            owner, _, member = name.rpartition(".")
            assert member in (classes[owner] if owner else everything), f"{file}: {name}"


COMMAND = re.compile(r"(?:OMP_NUM_THREADS=1 )?(python (?:-m )?[\w./]+(?: [^`]*)?)")


def commands(name):
    """Every command that starts with python: in bash blocks, and between backticks."""
    text = page(name)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line for block in blocks for line in block.splitlines()] + inline
    return [m.group(1) for line in lines if (m := COMMAND.fullmatch(line))]


@pytest.mark.parametrize("name", ["break_it.md", "exercises.md", "teacher.md"])
def test_commands_in_the_pages_are_ones_that_the_programs_take(name, capsys, monkeypatch):
    found = commands(name)
    assert len(found) >= {"break_it.md": 3, "exercises.md": 5, "teacher.md": 9}[name]
    for command in found:
        _, *words = shlex.split(command)
        monkeypatch.setattr("sys.argv", words[words[0] == "-m":])
        if words[0] == "train.py":
            settings = configs.read(words[1:])
            for flag in ("help", "resume"):
                settings.pop(flag, None)
            if settings.get("model") != "attention_residuals":             # the reader's own
                train.read_settings(configs.load_preset("laptop") | settings)
        elif words[0] == "cyclic.py":
            schedules.main()
            assert "cyclic, 4 groups" in capsys.readouterr().out
        elif words[0].endswith(".py"):
            prove.main(words[0].removesuffix(".py"))
            assert "logits at the start" in capsys.readouterr().out
        elif words[1].startswith("baselines."):
            prove.main(words[1].removeprefix("baselines."))
            assert "logits at the start" in capsys.readouterr().out
        else:
            assert words[:2] in (["-m", "pytest"], ["-m", "pip"]), command
            files = [word.partition("::")[0] for word in words if word.startswith("tests/") or word.endswith(".txt")]
            assert all((ROOT / file).is_file() for file in files)


def test_messages_in_the_teachers_page_are_the_programs():
    code = re.sub(r"\"\s+f?\"", "", (ROOT / "train.py").read_text(encoding="utf-8"))
    for said in ("exists: add --resume to go on with it", "out of memory", "torch.compile does not work here"):
        assert f"| `{said}` |" in page("teacher.md") and said in code
    with pytest.raises(SystemExit, match="--nlayer is no setting here: did you mean --n_layer?"):
        train.main(["--nlayer=3"])


def test_links_between_the_pages_lead_somewhere():
    for path in (ROOT / "docs").glob("*.md"):
        prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
