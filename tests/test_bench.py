"""tools/bench.py: that it measures what it says, not how fast this machine is."""
import pytest
import torch

from tools import bench
from tools.bench import BenchConfig, make_step, peak_bytes, spread, time_in_turns

TINY = dict(n_layer=2, n_embd=16, n_head=2, n_kv_head=1, d_ff=24, vocab_size=70, block_size=12)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(bench.SHAPES, "small", TINY)


def test_steps_alternate_and_each_begins_half_of_the_pairs():
    calls = []
    ours, plain = (lambda: calls.append("ours") or 2.0), (lambda: calls.append("plain") or 1.0)
    assert time_in_turns(ours, plain, 4) == [(2.0, 1.0)] * 4
    assert calls == ["plain", "ours", "ours", "plain"] * 2


def test_the_spread_is_median_and_quartiles():
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 2.0, 4.0) and spread([1.0]) == (1.0, 1.0, 1.0)


def test_the_ratio_is_the_baselines_time_by_the_models(monkeypatch):
    class Fake(torch.nn.Module):
        pass
    seconds = iter([9, 9, 1, 1, *[1.0, 2.0, 2.0, 1.0]])                   # first steps, second ones, two pairs
    monkeypatch.setattr(bench, "make_step", lambda *args: (Fake(), lambda: next(seconds)))
    monkeypatch.setattr(bench, "peak_bytes", lambda *args: 100)
    result = bench.bench(BenchConfig(steps=2), {})
    assert result["ratio"] == 0.5 and (result["seconds"], result["seconds_base"]) == (2.0, 1.0)


def test_a_step_is_forward_and_backward_of_the_asked_model():
    model, step = make_step(BenchConfig(compile=False, dtype="bfloat16"), "mudd", dict(multiway=False))
    assert step() > 0 and not model.config.multiway and model.config.n_embd == 16
    assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())


def test_the_peak_counts_weights_moments_gradients_and_what_is_kept():
    """A product of a known size: three times the weights' 1 MB, the 2 MB of the product and of its gradient, a fourth MB."""
    model = torch.nn.Linear(256, 1024, bias=False)
    x = torch.randn(512, 256)
    MB = 2 ** 20

    def step():
        model(x).sum().backward()
    peak = peak_bytes(model, step, "cpu")
    assert 3 * MB + 2 * MB + MB <= peak <= 3 * MB + 2 * 2 * MB + MB + 2 ** 16

    def hungry():
        kept = torch.zeros(4 * MB)                                         # 16 MB
        step()
        return kept
    assert peak_bytes(model, hungry, "cpu") == peak + 16 * MB


def test_more_sequences_need_more_and_the_baseline_less():
    def peak(name, batch_size):
        return peak_bytes(*make_step(BenchConfig(compile=False, batch_size=batch_size), name, dict(block_size=64)), "cpu")
    assert peak("gpt", 2) < peak("mudd", 2) < peak("mudd", 4)


def test_the_command_line(capsys):
    bench.main(["--model=mudd", "--compile=off", "--steps=2", "--multiway=no", "--n_layer=3"])
    out = capsys.readouterr().out
    assert "mudd multiway=False n_layer=3, shape small" in out and "of the baseline's" in out and "peak memory" in out
    bench.main(["--help"])
    assert "--multiway=True" in capsys.readouterr().out


@pytest.mark.parametrize("argument, sentence", [("--model=mud", "choose one of gpt"), ("--shape=big", "choose one of d512"),
                                                ("--steps=0", "at least 1"), ("--multiwy=no", "did you mean --multiway"),
                                                ("--dtype=fp8", "choose one of float32"), ("--device=tpu", "cpu")])
def test_bad_settings_are_one_line(argument, sentence, capsys):
    with pytest.raises(SystemExit) as error:
        bench.main([argument])
    assert sentence in str(error.value) and "\n" not in str(error.value)
