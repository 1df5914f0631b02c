"""The value residual: each variant against its formula, where it starts, what learns, and what the cache holds."""
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import model as baseline
import value_residual
from model import causal_attention
from tools.prove import loop_diff
from train import build
from value_residual import FIXED, TRAINED, ValueResidual
from tests.test_contract import SMALL, ids, make as make_arm


def make(variant="identity", **overrides):
    return make_arm("value_residual", variant=variant, **overrides)


def plain(model):
    """The baseline with the same weights."""
    gpt = build("gpt", **SMALL).eval().to(model.embed.weight.dtype)
    gpt.load_state_dict({k: v for k, v in model.state_dict().items() if k in gpt.state_dict()})
    return gpt


def set_lambdas(model, lam1, lam2):
    model.mix_weights = lambda: (torch.full((4,), lam1), torch.full((4,), lam2))


def by_hand(model, idx, mix, source=0):
    """The baseline's loop, where the values of layer n above the source are mix(n, V_1, V_n)."""
    x, rope = model.embed(idx), model.rope(torch.arange(20))
    for n, block in enumerate(model.blocks):
        h = block.norm1(x)
        q, k, v = block.q(h, rope), block.k(h, rope), block.v(h)
        if n == source:
            first = v
        if n > source:
            v = mix(n, first, v)
        x = block.finish(x, causal_attention(q, k, v))
    return model.head(model.norm(x))


def test_the_difference_is_a_few_lines():
    changed = [line for line in loop_diff(ValueResidual) if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) < 12 and any("lam1[n] * v1 + lam2[n] * v" in line for line in changed)


@pytest.mark.parametrize("variant", FIXED + TRAINED)
def test_each_variant_is_its_formula(variant):
    """In value and in gradient: V_1 is not detached, so W_1^V learns from every layer."""
    model, idx = make(variant, source=1), ids(2, 20)
    lam1, lam2 = {
        "identity": lambda: ([0.5] * 4, [0.5] * 4), "sparse": lambda: ([2.0] * 4, [1.0] * 4),
        "svformer": lambda: ([1.0] * 4, [0.0] * 4), "zero": lambda: (model.lam1, [1.0] * 4),
        "convex": lambda: (model.lam1, 1 - model.lam1), "learnable": lambda: (model.lam1, model.lam2),
        "learnable_plus": lambda: (model.s * model.z.exp() / model.z.exp().sum(), model.lam2)}[variant]()
    expected = by_hand(model, idx, lambda n, first, v: lam1[n] * first + lam2[n] * v, source=1)
    grads = [torch.autograd.grad(y.square().mean(), list(model.parameters()), materialize_grads=True, retain_graph=True)
             for y in (model(idx), expected)]
    torch.testing.assert_close(model(idx), expected)
    torch.testing.assert_close(*grads)


def test_zero_and_one_is_the_baseline_bit_for_bit():
    idx, fixed, convex = ids(2, 20), make(), make("convex")
    set_lambdas(fixed, 0.0, 1.0)
    convex.lam1.data.zero_()
    for model in (fixed, convex, make("sparse", constant=0.0), build("value_residual", **SMALL, variant="zero")):
        assert torch.equal(model(idx), plain(model)(idx))
    with torch.autocast("cpu", torch.bfloat16):
        model = build("value_residual", **SMALL, variant="zero")
        assert torch.equal(model(idx), plain(model)(idx))



def test_starts():
    lam1, lam2 = build("value_residual", **SMALL, variant="learnable_plus").mix_weights()
    torch.testing.assert_close(lam1, torch.ones(4))
    assert lam2.eq(0.5).all()
    sparse = build("value_residual", **SMALL, variant="sparse", targets=(2,), constant=5.0, self_weight=0.5)
    lam1, lam2 = sparse.mix_weights()
    assert lam1.tolist() == [0, 0, 5, 0] and lam2.tolist() == [1, 1, 0.5, 1]
    base = sum(p.numel() for p in build("gpt", **SMALL).parameters())
    for variant, trained in dict(identity=0, sparse=0, zero=4, convex=4, learnable=8, learnable_plus=9).items():
        assert sum(p.numel() for p in build("value_residual", **SMALL, variant=variant).parameters()) - base == trained


@pytest.mark.parametrize("variant", TRAINED)
@pytest.mark.parametrize("source", [0, 1, 3])
def test_only_weights_above_the_source_learn_and_none_decays(variant, source):
    """z alone is alive everywhere, since a softmax ties it together. Above layer 3 there is nothing to learn."""
    model = make(variant, source=source).train()
    model(ids(2, 20), ids(2, 20, seed=2)).backward()
    weights = {name: p for name, p in model.named_parameters() if name in ("lam1", "lam2", "z", "s")}
    assert bool(weights) == (source < 3)
    for name, p in weights.items():
        if name.startswith("lam"):
            assert p.grad[:source + 1].eq(0).all() and p.grad[source + 1:].ne(0).all()
        else:
            assert p.grad.ne(0).all()
    assert {id(p) for p in weights.values()} <= {id(p) for p in model.param_groups()[1]["params"]}


def test_the_cache_holds_mixed_values_and_mixing_twice_is_wrong():
    model, idx = make().double(), ids(1, 20)
    cache = model.new_cache(1)
    model.trace = {}
    full = model(idx, cache=cache)
    for n in range(4):
        torch.testing.assert_close(cache.v[n, :, :, :20], model.trace["v"][n])
    twice = by_hand(model, idx, lambda n, first, v: 0.5 * first + 0.5 * (0.5 * first + 0.5 * v))
    assert (twice - full).abs().max() > 1e-3


def test_svformer_has_no_later_value_weights_and_one_value_slot():
    model, same = make("svformer"), make()
    assert [n for n in range(4) if f"blocks.{n}.wv.weight" in model.state_dict()] == [0]
    gone = sum(p.numel() for p in same.parameters()) - sum(p.numel() for p in model.parameters())
    assert gone == 3 * 24 * 16 and model.cache_slots(model.config) == (4, 1)
    assert model.cache_slots(make("svformer", source=1).config) == (4, 2)
    set_lambdas(same, 1.0, 0.0)
    same.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(ids(2, 20)), same(ids(2, 20)))


def test_it_survives_activation_checkpointing():
    """V_1 is handed on, not stored, so a piece may be run again in the backward pass."""
    model, idx = make("learnable").train(), ids(2, 20)
    model(idx, idx).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for block in model.blocks:
        block.qkv = lambda x, rope, block=block: checkpoint(type(block).qkv, block, x, rope, use_reentrant=False)
        block.finish = lambda x, u, block=block: checkpoint(type(block).finish, block, x, u, use_reentrant=False)
    model(idx, idx).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


@pytest.mark.parametrize("bad, sentence", [(dict(variant="best"), "choose one of identity"),
                                           (dict(source=4), "from 0 to 3"),
                                           (dict(targets=(2,)), "only variant=sparse reads it"),
                                           (dict(variant="convex", constant=5.0), "only variant=sparse reads it"),
                                           (dict(variant="sparse", targets=(0,)), "above source=0")])
def test_bad_settings_are_refused_with_a_sentence(bad, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**bad)


def test_flops_of_the_mix():
    config = make().config
    ours, base = value_residual.flops_per_token(config, 20), baseline.flops_per_token(config, 20)
    assert ours["decode"] - base["decode"] == 3 * 3 * 16                   # layers above the first, FLOPs, Hkv d
    config = make("svformer").config
    assert value_residual.flops_per_token(config, 20)["prefill"] - base["prefill"] == -3 * 2 * 24 * 16
