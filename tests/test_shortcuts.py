"""The shortcuts at other places: each mix against its formula, where it starts, and what must not change."""
import pytest
import torch

from baselines.shortcuts import VARIANTS, pattern
from model import attend, attend_explicit
from tests.test_contract import SMALL, ids, make as make_arm
from train import build


def make(variant, **overrides):
    return make_arm("shortcut hidden_half_learned", **dict(variant=variant) | overrides)


def by_hand(model, mix):
    """The baseline's loop with one tensor replaced by mix(place, n, first, own, v1, v), written out for every place."""
    idx = ids(2, 20)
    x, rope = model.embed(idx), model.rope(torch.arange(20))
    h0, first = x, {}
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        v1 = first.setdefault("v", v)
        if n:
            q, k = mix("q", n, first["q"], q), mix("k", n, first["k"], k)
        first.setdefault("q", q), first.setdefault("k", k)
        A = torch.stack([attend_explicit(q, k, torch.eye(20).expand(2, 2, 20, 20))])[0]        # A = A I
        first.setdefault("A", A)
        A = mix("A", n, first["A"], A) if n else A
        u = A @ v.repeat_interleave(2, 1)
        if n:
            u = mix("u", n, v1.repeat_interleave(2, 1), u, v.repeat_interleave(2, 1))
        x = mix("h", n, h0, block.finish(x, u))
    return model.head(model.norm(x))


FORMULAS = {
    "query": ("q", lambda n, first, own: 0.5 * first + 0.5 * own),
    "key": ("k", lambda n, first, own: 0.5 * first + 0.5 * own),
    "matrix": ("A", lambda n, first, own: 0.5 * first + 0.5 * own),
    "output": ("u", lambda n, v1, u, v: u + v1),
    "output_half": ("u", lambda n, v1, u, v: 0.5 * u + 0.5 * v1),
    "neutreno": ("u", lambda n, v1, u, v: u + 0.4 * (v1 - v)),
    "hidden": ("h", lambda n, h0, h: 0.5 * h0 + 0.5 * h),
    "hidden_sum": ("h", lambda n, h0, h: 0.5 * h0 + h),
}


@pytest.mark.parametrize("variant", FORMULAS)
def test_each_mix_is_its_formula(variant):
    place, formula = FORMULAS[variant]
    model = make(variant)
    expected = by_hand(model, lambda at, n, first, own, *v: formula(n, first, own, *v) if at == place else own)
    torch.testing.assert_close(model(ids(2, 20)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant, parameter", [("query_zero", "lam1"), ("key_zero", "lam1"), ("hidden_zero", "lam1")])
def test_from_zero_starts_as_the_baseline_and_then_leaves_it(variant, parameter):
    """V10"""
    model, gpt, idx = build("shortcut", **SMALL, variant=variant), build("gpt", **SMALL), ids(2, 20)
    assert torch.equal(model(idx), gpt(idx))
    model.lam1.data += 0.5
    assert (model(idx) - gpt(idx)).abs().max() > 1e-3


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
    for variant, (_, _, _, trained) in VARIANTS.items():
        model = make(variant).train()
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


def test_neutreno_with_nothing_is_the_baseline():
    """V6"""
    model, gpt = make("neutreno"), build("gpt", **SMALL)
    model.lam1.zero_()
    gpt.load_state_dict({k: v for k, v in model.state_dict().items() if k in gpt.state_dict()})
    assert torch.equal(model(ids(2, 20)), gpt(ids(2, 20)))


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
                                           (dict(variant="resid_start", resid_start=4), "from 0 to 3")])
def test_bad_settings_are_refused_with_a_sentence(bad, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**bad)
