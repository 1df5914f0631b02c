"""The shortcuts at other places: each mix against its formula, where it starts, and what must not change."""
import copy

import pytest
import torch

import model as baseline
from baselines import shortcuts
from baselines.shortcuts import VARIANTS
from model import attention_weights, causal_attention, repeat_kv
from tests.test_contract import SMALL, assert_any_pieces_decode_alike, ids, make as make_arm
from tools.prove import loop_diff
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
        v, v1 = repeat_kv(v, q), first.setdefault("v", repeat_kv(v, q))
        q, k = mix("q", n, q), mix("k", n, k)
        A = mix("A", n, attention_weights(q, k))
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
    """In value and in gradient: what is handed up is not detached."""
    model, (place, formula) = make(variant).double(), FORMULAS[variant]
    logits = model(ids(2, 20)), by_hand(model, place, formula(model))
    ours, expected = (torch.autograd.grad(y.square().mean(), list(model.parameters())) for y in logits)
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-6)              # .4 of neutreno is rounded to fp32
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_every_variant_has_a_formula_or_a_loop_of_its_own_below():
    assert set(VARIANTS) - set(FORMULAS) == {"resid_start", "resid_start_value"}


def test_resid_start_cuts_the_stream_and_zero_does_not():
    gpt, idx = build("gpt", **SMALL), ids(2, 20)
    assert torch.equal(build("shortcut", **SMALL, variant="resid_start")(idx), gpt(idx))
    model = make("resid_start", resid_start=2)
    x, rope = model.embed(idx), model.rope(torch.arange(20))
    for n, block in enumerate(model.blocks):
        before = x if n >= 2 else torch.zeros_like(x)
        mid = before + block.wo(causal_attention(*block.qkv(x, rope)).transpose(1, 2).flatten(2))
        x = mid + block.feed_forward(block.norm2(mid))
    torch.testing.assert_close(model(idx), model.head(model.norm(x)))


def test_resid_start_value_is_the_value_residual_when_nothing_is_cut():
    model, residual, idx = make("resid_start_value", source=1), make_arm("value_residual", source=1), ids(2, 20)
    residual.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(idx), residual(idx))


@pytest.mark.parametrize("variant", ["output_half", "hidden_zero", "resid_start"])             # no arm of the contract
def test_decoding_in_any_pieces_is_the_full_forward(variant):
    assert_any_pieces_decode_alike(make(variant).double())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_diff_shows_the_variants_own_loop(variant):
    lines = loop_diff(make(variant))
    changed = [line for line in lines[3:] if line[0] in "+-"]
    assert any("lam1[n]" in line for line in changed) and len(changed) < 15


@pytest.mark.parametrize("variant", ["matrix", "hidden_zero"])
def test_a_copy_computes_the_same(variant, tmp_path):
    model = make(variant)
    torch.save(model, tmp_path / "model.pt")
    for copied in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(copied(ids(1, 9)), model(ids(1, 9)))


def test_flops_of_each_mix_by_counting():
    T, pair = 20, 4 * 4 * 8                                                # FLOPs, n_head, head_dim
    mixes = {"query": 3 * 3 * 32, "key": 3 * 3 * 16, "output": 3 * 3 * 32, "neutreno": 3 * 3 * 32, "hidden": 3 * 4 * 24,
             "resid_start_value": 3 * 3 * 16}                              # FLOPs, layers, numbers of a token
    base = baseline.flops_per_token(make("hidden").config, T)
    for variant, extra in mixes.items():
        ours = shortcuts.flops_per_token(make(variant).config, T)
        added = [ours[kind] - base[kind] for kind in ("train", "prefill", "decode", "head")]
        assert added == [3 * extra, extra, extra, 0]
    ours, seen = shortcuts.flops_per_token(make("matrix").config, T), sum(range(1, T + 1)) / T     # pairs, in the mean
    mix = 3 * 3 * 4 * seen                                                 # FLOPs, layers, heads
    assert ours["prefill"] - base["prefill"] == mix and ours["decode"] - base["decode"] == 3 * 3 * 4 * (T + 1)
    assert ours["train"] - base["train"] == 3 * mix + 4 * (3 - 3.5) * pair * seen       # scores are not made twice


@pytest.mark.parametrize("variant", ["query_zero", "key_zero", "hidden_zero"])
def test_from_zero_starts_as_the_baseline_and_then_leaves_it(variant):
    model, gpt, idx = build("shortcut", **SMALL, variant=variant), build("gpt", **SMALL), ids(2, 20)
    assert torch.equal(model(idx), gpt(idx))
    model.lam1.data += 0.5
    assert (model(idx) - gpt(idx)).abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_and_one_is_the_baseline(variant):
    """Bit for bit, except where the softmax is written out."""
    model, gpt, idx = make(variant), build("gpt", **SMALL), ids(2, 20)
    gpt.load_state_dict({k: v for k, v in model.state_dict().items() if k in gpt.state_dict()})
    model.lam1.data.zero_(), model.lam2.data.fill_(1.0)
    torch.testing.assert_close(model(idx), gpt(idx), **(dict(rtol=1e-4, atol=1e-5) if variant == "matrix" else
                                                        dict(rtol=0, atol=0)))


@pytest.mark.parametrize("n_layer", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_trained_gets_a_gradient_and_does_not_decay(variant, n_layer):
    learned = {"query_zero": ["lam1"], "key_zero": ["lam1"], "hidden_zero": ["lam1"], "hidden_sum_learned": ["lam1"],
               "hidden_half_learned": ["lam1", "lam2"]}.get(variant, [])
    if n_layer == 1 and not variant.startswith("hidden"):                  # there is no layer above the first
        learned = []
    model = make(variant, n_layer=n_layer).train()
    model(ids(2, 20), ids(2, 20, seed=2)).backward()
    parameters = dict(model.named_parameters())
    assert parameters.keys() & {"lam1", "lam2"} == set(learned)
    assert all(p.grad is not None for p in parameters.values())
    assert all(parameters[name].grad[1:].ne(0).all() for name in learned)
    assert {id(parameters[name]) for name in learned} <= {id(p) for p in model.param_groups()[1]["params"]}


def test_at_the_first_token_neutreno_equals_the_value_residual():
    """There is one key only, so U = V: .5 V + .5 V_1 either way. Later tokens differ."""
    neutreno, residual, idx = make("neutreno"), make_arm("value_residual"), ids(2, 20)
    neutreno.lam1.fill_(0.5)
    residual.load_state_dict(neutreno.state_dict() | dict(lam1=residual.lam1, lam2=residual.lam2))
    a, b = neutreno(idx), residual(idx)
    torch.testing.assert_close(a[:, 0], b[:, 0], rtol=1e-4, atol=1e-5)
    assert (a[:, 1:] - b[:, 1:]).abs().max() > 1e-3


@pytest.mark.parametrize("bad, sentence", [(dict(variant="values"), "choose one of query, key"),
                                           (dict(variant="hidden", source=1), "only variant=resid_start_value"),
                                           (dict(variant="resid_start", source=1), "only variant=resid_start_value"),
                                           (dict(variant="resid_start", resid_start=4), "from 0 to 3")])
def test_bad_settings_are_refused_with_a_sentence(bad, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**bad)
