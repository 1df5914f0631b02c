"""tools/bench.py: that it measures what it says, not how fast this machine is."""
import json
import sys
from types import SimpleNamespace

import pytest
import torch

import train
from tools import bench
from tools.bench import (BenchConfig, Subject, compare, parse_arm, peak_bytes, spread, table, time_in_turns)

TINY = dict(n_layer=2, n_embd=16, n_head=2, n_kv_head=1, d_ff=24, vocab_size=70, block_size=12)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for shape in bench.SHAPES:
        monkeypatch.setitem(bench.SHAPES, shape, TINY | (dict(block_size=1024) if shape == "124m" else {}))


def test_steps_alternate_and_each_begins_half_of_the_pairs():
    calls = []
    ours, plain = (lambda: calls.append("ours") or 2.0), (lambda: calls.append("plain") or 1.0)
    assert time_in_turns(ours, plain, 4) == [(2.0, 1.0)] * 4
    assert calls == ["plain", "ours", "ours", "plain"] * 2


def test_the_spread_is_median_and_quartiles():
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 2.0, 4.0) and spread([1.0]) == (1.0, 1.0, 1.0)


def test_the_ratio_is_the_baselines_time_by_the_models_and_the_first_call_of_each_does_not_count():
    ours, base = iter([9.0, 2.0, 4.0]), iter([9.0, 1.0, 3.0])
    found = compare(lambda: next(ours), lambda: next(base), 2)
    assert (found["ratio"], found["low"], found["high"]) == (0.625, 0.5, 0.75)
    assert (found["seconds"], found["seconds_base"]) == (3.0, 2.0)


def test_a_step_is_forward_backward_and_the_optimizers_step_if_asked():
    subject = Subject(BenchConfig(dtype="bfloat16", batch_size=2), "mudd", dict(multiway=False))
    model, before = subject.model, subject.model.embed.weight.clone()
    assert subject.step(optimizer=False)() > 0 and torch.equal(model.embed.weight, before)
    assert not model.config.multiway and model.config.n_embd == 16
    assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())
    assert subject.step()() > 0 and not torch.equal(model.embed.weight, before)


def test_prefill_reads_a_whole_block_and_decode_one_token_behind_the_rest(monkeypatch):
    """However often they are called: the cache is wound back each time."""
    subject, calls = Subject(BenchConfig(batch_size=2), "gpt", {}), []
    hidden = subject.model.hidden

    def listening(idx, cache=None, last=False):
        calls.append((cache.length, idx.size(1), last))
        return hidden(idx, cache, last)
    monkeypatch.setattr(subject.model, "hidden", listening)
    prefill, decode = subject.prefill(), subject.decode()
    assert calls == [(0, 11, True)]
    for work in (prefill, prefill, decode, decode):
        work()
    assert calls[1:] == [(0, 12, True)] * 2 + [(11, 1, True)] * 2


@pytest.mark.parametrize("use_cache, lengths", [(True, [1] * 8), (False, list(range(4, 12)))])
def test_generation_makes_the_last_tokens_of_a_block(use_cache, lengths, monkeypatch):
    subject, calls = Subject(BenchConfig(batch_size=2), "gpt", {}), []
    work, hidden = subject.generation(use_cache), subject.model.hidden
    monkeypatch.setattr(subject.model, "hidden",
                        lambda idx, cache=None, last=False: calls.append(idx.size(1)) or hidden(idx, cache, last))
    work()
    assert calls == lengths


def test_the_peak_counts_weights_moments_gradients_and_what_is_kept():
    """A product of a known size: three times the weights' 1 MB, the 2 MB of the product and of its gradient, a fourth
    MB."""
    model = torch.nn.Linear(256, 1024, bias=False)
    x = torch.randn(512, 256)
    MB = 2 ** 20

    def step():
        model(x).sum().backward()
    peak = peak_bytes(model, step, CPU)
    assert 3 * MB + 2 * MB + MB <= peak <= 3 * MB + 2 * 2 * MB + MB + 2 ** 16

    def hungry():
        kept = torch.zeros(4 * MB)                                         # 16 MB
        step()
        return kept
    assert peak_bytes(model, hungry, CPU) == peak + 16 * MB


def test_more_sequences_need_more_and_the_baseline_less():
    def peak(name, batch_size):
        subject = Subject(BenchConfig(batch_size=batch_size), name, dict(block_size=64))
        return peak_bytes(subject.model, subject.step(optimizer=False), CPU)
    assert peak("gpt", 2) < peak("mudd", 2) < peak("mudd", 4)


QUICK = ["--models=value_residual,mudd", "--steps=1", "--batch_size=1", "--inference=no"]


def test_where_nothing_compiles_the_steps_are_eager(monkeypatch, capsys):
    def fails(self):
        self.loss = lambda *args: (_ for _ in ()).throw(RuntimeError("no compiler"))
    monkeypatch.setattr(train.GPT, "compile_pieces", fails)
    monkeypatch.setattr(bench.kernels, "restore", lambda model: model.__dict__.pop("loss", None))
    bench.main([*QUICK, "--models=gpt", "--compile=on"])
    out = capsys.readouterr().out
    assert "torch.compile does not work here" in out and "step, eager" in out and "step, compiled" not in out


def test_ctrl_c_leaves_what_was_measured(monkeypatch, capsys, tmp_path):
    plain = bench.bench

    def interrupted(config, name, settings):
        return plain(config, name, settings) if name != "mudd" else (_ for _ in ()).throw(KeyboardInterrupt)
    monkeypatch.setattr(bench, "bench", interrupted)
    bench.main([*QUICK, "--compile=off", f"--out={tmp_path / 'bench.json'}"])
    assert "| value_residual |" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "bench.json").read_text())["results"]) == ["value_residual"]
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--models=mudd"])
    assert stopped.value.code == 130


def test_too_little_memory_is_one_line():
    with pytest.raises(SystemExit, match="out of memory; lower --batch_size"):
        bench.main([*QUICK, "--compile=off", "--batch_size=1e13"])


def test_facts_are_the_models():
    facts = Subject(BenchConfig(batch_size=1), "whitematter", dict(k=1)).facts()
    model = train.build("whitematter", **TINY, k=1)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters()) and facts["kv"] == 2 * 1 * 8
    flops = sys.modules["whitematter"].flops_per_token(model.config, 12)
    assert facts["flops"] == flops["train"] + 3 * flops["head"]


@pytest.mark.parametrize("name", [name for name in train.MODELS if name != "gpt"])
def test_every_model_is_measured(name, tmp_path, capsys):
    """Eager here; compiled steps are tested where each model's pieces are."""
    out = tmp_path / "bench.json"
    bench.main([f"--models={name}", "--compile=off", "--steps=1", "--batch_size=1", f"--out={out}"])
    head, _, plain, row = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    assert len(head) == len(plain) == len(row) and plain[0] == "| gpt" and row[0] == f"| {name}"
    found = json.loads(out.read_text())["results"][name]
    assert set(found) >= {"eager", "prefill", "decode", "cache_gain", "peak", "kv", "flops"}
    assert found["eager"]["seconds"] > 0


@pytest.mark.slow
def test_compiled_steps_are_timed_beside_eager_ones(capsys):
    bench.main(["--models=mudd:dynamic=no:multiway=no", "--steps=1", "--batch_size=1", "--n_layer=3", "--inference=no"])
    out = capsys.readouterr().out
    assert "step, eager | step, compiled | compiling | peak" in out and "| mudd:dynamic=no:multiway=no |" in out
    assert "prefill" not in out


def test_the_table_shows_the_baseline_in_units_and_the_models_against_it():
    speed = dict(ratio=0.5, low=0.25, high=0.75, seconds=0.4, seconds_base=0.2)
    result = dict(parameters=150, parameters_base=100, flops=3e6, flops_base=2e6, kv=8, kv_base=16, eager=speed,
                  peak=3 * 2 ** 20, peak_base=2 ** 21)
    head = "|  | parameters | step, eager | peak | KV, numbers a token | training FLOPs a token |"
    row = "0.500 (0.250 to 0.750) | +50.0% | 8 | 1.500 |"
    assert table({"x": result}) == [head, "| --- | --- | --- | --- | --- | --- |",
                                    "| gpt | 100 | 200 ms | 2 MiB | 16 | 2.0 M |", "| x | +50.00% | " + row]
    without = {name: value for name, value in result.items() if name != "eager"}         # its compiler failed, say
    assert table({"x": result, "y": without})[-1] == "| y | +50.00% | n/a | +50.0% | 8 | 1.500 |"


def test_settings_of_an_arm_are_its_own_and_a_shape_is_everybodys():
    assert bench.arms.labels("gpt,value_residual:targets=1,2:variant=sparse,mudd") == [
        "gpt", "value_residual:targets=1,2:variant=sparse", "mudd"]
    own = dict(n_layer=3, dynamic=False, period=2)
    assert parse_arm("mudd:dynamic=no:period=2", dict(n_layer="3")) == ("mudd", own)
    config, arms = bench.read(["--preset=d512", "--models=gpt,mudd:n_layer=3", "--n_embd=32", "--steps=2"])
    assert (config.shape, config.batch_size, config.steps) == ("d512", 2, 2)
    assert arms["gpt"][1] == TINY | dict(n_embd=32) and arms["mudd:n_layer=3"][1]["n_layer"] == 3


def test_the_presets_name_arms_that_can_be_built(monkeypatch):
    monkeypatch.setattr(bench, "usable_device", lambda name: SimpleNamespace(type=name))
    for preset in bench.PRESETS:
        config, arms = bench.read([f"--preset={preset}"])
        assert len(arms) >= 6 and all(train.build(name, **settings) for name, settings in arms.values())


@pytest.mark.parametrize("argument, sentence", [
    ("--models=mud", "choose from gpt"), ("--models=mudd:multiwy=no", "did you mean --multiway"),
    ("--models=mudd:period=1:period=2", "there twice"), ("--block_size=8", "the last 8 tokens of a block"),
    ("--models=mudd:block_size=4", "the last 8 tokens of a block"), ("--out=.", "name a file, not a folder"),
    ("--device=cuda:9", "try --device=cpu"), ("--shape=big", "choose one of laptop"),
    ("--models=mudd:period=0", "at least 1"), ("--steps=0", "at least 1"), ("--n_layr=2", "did you mean --n_layer"),
    ("--dtype=fp8", "choose one of float32"), ("--device=tpu", "choose cpu"), ("--preset=desk", "choose one of laptop"),
    ("--threads=0", "at least 1"), ("--out=nowhere/bench.json", "nowhere/bench.json"),
    ("--n_head=3", "not a multiple")])
def test_bad_settings_are_one_line(argument, sentence, capsys):
    with pytest.raises(SystemExit) as error:
        bench.main([argument])
    assert sentence in str(error.value) and "\n" not in str(error.value)
