"""The shortcuts at other places: each mix against its formula, where it starts, and what must not change."""
import copy

import pytest
import torch

import model as baseline
from baselines import shortcuts
from baselines.shortcuts import VARIANTS, pattern
from model import attend, attend_explicit, rotate
from tests.test_contract import SMALL, assert_any_pieces_decode_alike, ids, make as make_arm
from tools.prove import main
from train import build


def make(variant, **overrides):
    return make_arm("shortcut hidden_half_learned", **dict(variant=variant) | overrides)


def by_hand(model, place, formula):
    """The baseline's loop with one tensor replaced by formula(n, first, own), written out for every place."""
    idx = ids(2, 20)
    x, rope = model.embed(idx), model.rope(torch.arange(20))
    h0, first = x, {}

    def mix(at, n, own, *more):
        handed = first.setdefault(at, own)
        return formula(n, handed, own, *more) if at == place and n > 0 else own
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        v, v1 = v.repeat_interleave(2, 1), first.setdefault("v", v.repeat_interleave(2, 1))
        q, k = mix("q", n, q), mix("k", n, k)
        A = mix("A", n, attend_explicit(q, k, torch.eye(20).expand(2, 2, 20, 20)))             # A I = A
        x = block.finish(x, mix("u", n, A @ v, v1, v))
        x = formula(n, h0, x) if place == "h" else x
    return model.head(model.norm(x))


FORMULAS = {     # variant: the place, the mix; m is the model, whose trained weights are off their start
    "query": ("q", lambda m: lambda n, first, own: 0.5 * first + 0.5 * own),
    "query_zero": ("q", lambda m: lambda n, first, own: m.lam1[n] * first + own),
    "key": ("k", lambda m: lambda n, first, own: 0.5 * first + 0.5 * own),
    "key_zero": ("k", lambda m: lambda n, first, own: m.lam1[n] * first + own),
    "matrix": ("A", lambda m: lambda n, first, own: 0.5 * first + 0.5 * own),
    "output": ("u", lambda m: lambda n, first, u, v1, v: u + v1),
    "output_half": ("u", lambda m: lambda n, first, u, v1, v: 0.5 * u + 0.5 * v1),
    "neutreno": ("u", lambda m: lambda n, first, u, v1, v: u + 0.4 * (v1 - v)),
    "hidden": ("h", lambda m: lambda n, h0, h: 0.5 * h0 + 0.5 * h),
    "hidden_half_learned": ("h", lambda m: lambda n, h0, h: m.lam1[n] * h0 + m.lam2[n] * h),
    "hidden_sum": ("h", lambda m: lambda n, h0, h: 0.5 * h0 + h),
    "hidden_sum_learned": ("h", lambda m: lambda n, h0, h: m.lam1[n] * h0 + h),
    "hidden_zero": ("h", lambda m: lambda n, h0, h: m.lam1[n] * h0 + h),
}


@pytest.mark.parametrize("variant", FORMULAS)
def test_each_mix_is_its_formula(variant):
    model, (place, formula) = make(variant), FORMULAS[variant]
    torch.testing.assert_close(model(ids(2, 20)), by_hand(model, place, formula(model)), rtol=1e-4, atol=1e-5)


def test_every_variant_has_a_formula_or_a_loop_of_its_own_below():
    assert set(VARIANTS) - set(FORMULAS) == {"resid_start", "resid_start_value"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_in_any_pieces_is_the_full_forward(variant):
    """V7: all 16 ways to cut five tokens; two key heads for four query heads."""
    assert_any_pieces_decode_alike(make(variant, **STARTED.get(variant, {})).double())


STARTED = {"resid_start": dict(resid_start=2), "resid_start_value": dict(resid_start=2, source=1)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_later_token_changes_no_earlier_logit_bit_for_bit(variant):
    model, idx = make(variant, **STARTED.get(variant, {})), ids(2, 20)
    other = idx.clone()
    other[:, 12] = (other[:, 12] + 1) % 70
    a, b = model(idx), model(other)
    assert torch.equal(a[:, :12], b[:, :12]) and not torch.equal(a[:, 12:], b[:, 12:])


def test_before_or_after_the_rotation_is_the_same_and_before_or_after_the_norm_is_not():
    """V10: the header says so of queries and keys."""
    block, rope = make("query").blocks[1], make("query").rope(torch.arange(20))
    a, b = torch.randn(1, 4, 20, 8), torch.randn(1, 4, 20, 8)
    torch.testing.assert_close(0.5 * rotate(a, rope) + 0.5 * rotate(b, rope), rotate(0.5 * a + 0.5 * b, rope))
    apart = 0.5 * block.q_norm(a) + 0.5 * block.q_norm(b) - block.q_norm(0.5 * a + 0.5 * b)
    assert apart.abs().max() > 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_diff_shows_the_variants_own_loop(variant, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["shortcuts", "--diff", f"--variant={variant}"])
    main("shortcut")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("+") and "lam1[n]" in line for line in lines)
    assert lines[1] == "+++ baselines/shortcuts.py" and len([line for line in lines[3:] if line[0] in "+-"]) < 12


def test_a_copy_is_of_the_same_kind():
    model = make("matrix")
    copied = copy.deepcopy(model)
    assert type(copied) is type(model) is VARIANTS["matrix"][0]
    assert torch.equal(copied(ids(1, 9)), model(ids(1, 9)))


def test_flops_of_each_mix_by_counting():
    T, pair = 20, 4 * 4 * 8                                                # FLOPs, n_head, head_dim
    mixes = {"query": 3 * 3 * 32, "key": 3 * 3 * 16, "output": 3 * 3 * 32, "neutreno": 3 * 3 * 32, "hidden": 3 * 4 * 24,
             "resid_start_value": 3 * 3 * 16}                              # FLOPs, layers, numbers of a token
    for variant, extra in mixes.items():
        config = make(variant).config
        ours, base = shortcuts.flops_per_token(config, T), baseline.flops_per_token(config, T)
        added = [ours[kind] - base[kind] for kind in ("train", "prefill", "decode", "head")]
        assert added == [3 * extra, extra, extra, 0]
    config, seen = make("matrix").config, sum(range(1, T + 1)) / T         # pairs that a token sees, in the mean
    ours, base = shortcuts.flops_per_token(config, T), baseline.flops_per_token(config, T)
    mix = 3 * 3 * 4 * seen                                                 # FLOPs, layers, heads
    assert ours["prefill"] - base["prefill"] == mix and ours["decode"] - base["decode"] == 3 * 3 * 4 * (T + 1)
    assert ours["train"] - base["train"] == 3 * mix + 4 * (3 - 3.5) * pair * seen       # scores are not made twice


@pytest.mark.parametrize("variant, parameter", [("query_zero", "lam1"), ("key_zero", "lam1"), ("hidden_zero", "lam1")])
def test_from_zero_starts_as_the_baseline_and_then_leaves_it(variant, parameter):
    """V10"""
    model, gpt, idx = build("shortcut", **SMALL, variant=variant), build("gpt", **SMALL), ids(2, 20)
    assert torch.equal(model(idx), gpt(idx))
    model.lam1.data += 0.5
    assert (model(idx) - gpt(idx)).abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_and_one_is_the_baseline(variant):
    """V10, V6: in every loop; bit for bit, except where the softmax is written out."""
    model, gpt, idx = make(variant), build("gpt", **SMALL), ids(2, 20)
    gpt.load_state_dict({k: v for k, v in model.state_dict().items() if k in gpt.state_dict()})
    model.lam1.data.zero_(), model.lam2.data.fill_(1.0)
    torch.testing.assert_close(model(idx), gpt(idx), **(dict(rtol=1e-4, atol=1e-5) if variant == "matrix" else
                                                        dict(rtol=0, atol=0)))


def test_the_halves_rescale_the_stream():
    """V10: after 0.5/0.5 the stream is a mean, with 1/0.5 it is a sum."""
    sizes = {}
    for variant in ("hidden", "hidden_sum"):
        model = make(variant)
        model.trace = {}
        model(ids(2, 20))
        sizes[variant] = model.trace["x"][3].norm()
    assert sizes["hidden"] < 0.8 * sizes["hidden_sum"]


def test_learned_arms_learn_and_fixed_ones_do_not():
    learned = {"query_zero": ["lam1"], "key_zero": ["lam1"], "hidden_zero": ["lam1"], "hidden_sum_learned": ["lam1"],
               "hidden_half_learned": ["lam1", "lam2"]}
    for variant in VARIANTS:
        model, trained = make(variant).train(), learned.get(variant, [])
        model(ids(2, 20), ids(2, 20, seed=2)).backward()
        names = {name for name, _ in model.named_parameters()}
        assert names & {"lam1", "lam2"} == set(trained)
        for name in trained:
            assert getattr(model, name).grad[1:].abs().min() > 0
        assert all(id(getattr(model, name)) in {id(p) for p in model.param_groups()[1]["params"]} for name in trained)


def test_at_the_first_token_neutreno_equals_the_value_residual():
    """V6: one key only, so U = V: .5 V + .5 V_1 either way. Later tokens differ."""
    neutreno, residual, idx = make("neutreno"), make_arm("value_residual"), ids(2, 20)
    neutreno.lam1.fill_(0.5)
    residual.load_state_dict(neutreno.state_dict() | dict(lam1=residual.lam1, lam2=residual.lam2))
    a, b = neutreno(idx), residual(idx)
    torch.testing.assert_close(a[:, 0], b[:, 0], rtol=1e-4, atol=1e-5)
    assert (a[:, 1:] - b[:, 1:]).abs().max() > 1e-3


def test_the_pattern_is_attentions():
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(pattern(q, k) @ v.repeat_interleave(2, 1), attend(q, k, v))
    torch.testing.assert_close(pattern(q[:, :, 6:], k), pattern(q, k)[:, :, 6:])


def test_resid_start_cuts_the_stream_and_zero_does_not():
    gpt, idx = build("gpt", **SMALL), ids(2, 20)
    assert torch.equal(build("shortcut", **SMALL, variant="resid_start")(idx), gpt(idx))
    model = make("resid_start", resid_start=2)
    x, rope = model.embed(idx), model.rope(torch.arange(20))
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        before = x if n >= 2 else torch.zeros_like(x)
        mid = before + block.wo(attend(q, k, v).transpose(1, 2).flatten(2))
        x = mid + block.feed_forward(block.norm2(mid))
    torch.testing.assert_close(model(idx), model.head(model.norm(x)))


def test_resid_start_value_is_the_value_residual_when_nothing_is_cut():
    model, residual, idx = make("resid_start_value", source=1), make_arm("value_residual", source=1), ids(2, 20)
    residual.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(idx), residual(idx))


@pytest.mark.parametrize("bad, sentence", [(dict(variant="values"), "choose one of query, key"),
                                           (dict(variant="hidden", source=1), "has no effect"),
                                           (dict(variant="resid_start", source=1), "has no effect"),
                                           (dict(variant="resid_start", resid_start=4), "from 0 to 3")])
def test_bad_settings_are_refused_with_a_sentence(bad, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**bad)
