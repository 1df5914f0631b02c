"""Value residual against the paper's properties; V1..V12 are the items of a checklist that was made from them."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import model as baseline
import value_residual
from model import attend
from tools.prove import loop_diff
from train import build
from value_residual import VARIANTS, ValueResidual
from tests.test_contract import SMALL, assert_any_pieces_decode_alike, assert_compiled_equals_eager, ids, make as make_arm


def make(variant="identity", **overrides):
    return make_arm("value_residual", variant=variant, **overrides)


def plain(model):
    """The baseline with the same weights."""
    gpt = build("gpt", **SMALL).eval().to(model.embed.weight.dtype)
    gpt.load_state_dict({k: v for k, v in model.state_dict().items() if k in gpt.state_dict()})
    return gpt


def set_lambdas(model, lam1, lam2):
    model.weights = lambda: (torch.full((4,), lam1), torch.full((4,), lam2))


def test_the_difference_is_a_few_lines():
    changed = [line for line in loop_diff(ValueResidual) if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) < 12 and any("lam1[n] * v1 + lam2[n] * v" in line for line in changed)


def test_zero_and_one_is_the_baseline_bit_for_bit():
    """V1, V9, V10"""
    idx = ids(2, 20)
    fixed = make()
    set_lambdas(fixed, 0.0, 1.0)
    convex = make("convex")
    convex.lam1.data.zero_()
    for model in (fixed, convex, make("sparse", constant=0.0), build("value_residual", **SMALL, variant="zero")):
        assert torch.equal(model(idx), plain(model)(idx))
    with torch.autocast("cpu", torch.bfloat16):
        model = build("value_residual", **SMALL, variant="zero")
        assert torch.equal(model(idx), plain(model)(idx))


def test_the_default_does_not_start_as_the_baseline():
    model = build("value_residual", **SMALL)
    assert (model(ids(2, 20)) - plain(model)(ids(2, 20))).abs().max() > 0.01


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_by_hand(variant):
    """Every variant against a loop that is written out with its two numbers."""
    model, idx = make(variant, source=1), ids(2, 20)
    lam1, lam2 = {
        "identity": lambda: ([0.5] * 4, [0.5] * 4), "sparse": lambda: ([2.0] * 4, [1.0] * 4),
        "svformer": lambda: ([1.0] * 4, [0.0] * 4), "zero": lambda: (model.lam1, [1.0] * 4),
        "convex": lambda: (model.lam1, 1 - model.lam1), "learnable": lambda: (model.lam1, model.lam2),
        "learnable_plus": lambda: (model.s * model.z.exp() / model.z.exp().sum(), model.lam2)}[variant]()
    x, rope = model.embed(idx), model.rope(torch.arange(20))
    for n, block in enumerate(model.blocks):
        h = block.norm1(x)
        q, k = block.q(h, rope), block.k(h, rope)
        v = block.v(h)
        if n == 1:
            first = v
        if n > 1:
            v = lam1[n] * first + lam2[n] * v
        x = block.finish(x, attend(q, k, v))
    torch.testing.assert_close(model(idx), model.head(model.norm(x)))


def test_starts():
    """V9 and the table of variants"""
    plus = build("value_residual", **SMALL, variant="learnable_plus")
    lam1, lam2 = plus.weights()
    torch.testing.assert_close(lam1, torch.ones(4))
    assert lam2.eq(0.5).all()
    identity = build("value_residual", **SMALL)
    assert (plus(ids(2, 20)) - identity(ids(2, 20))).abs().max() > 0.01    # 1 and 0.5 are not 0.5 and 0.5
    sparse = build("value_residual", **SMALL, variant="sparse", targets=(2,), constant=5.0, self_weight=0.5)
    assert sparse.weights()[0].tolist() == [0, 0, 5, 0] and sparse.weights()[1].tolist() == [1, 1, 0.5, 1]
    counts = dict(identity=0, sparse=0, zero=4, convex=4, learnable=8, learnable_plus=9)
    for variant, trained in counts.items():
        count = sum(p.numel() for p in build("value_residual", **SMALL, variant=variant).parameters())
        assert count - sum(p.numel() for p in build("gpt", **SMALL).parameters()) == trained


def test_the_first_lambda_of_convex_is_dead_and_the_others_are_not():
    """V2"""
    model = make("convex").train()
    model(ids(2, 20), ids(2, 20, seed=2)).backward()
    assert model.lam1.grad[0] == 0 and model.lam1.grad[1:].abs().min() > 0


def test_what_is_dead_up_to_the_source_is_what_the_header_says():
    """V2, for the other trained variants: z alone is alive everywhere, since a softmax ties it together."""
    for variant in ("zero", "learnable", "learnable_plus"):
        model = make(variant, source=1).train()
        model(ids(2, 20), ids(2, 20, seed=2)).backward()
        for name in set(model.names) - {"s", "z"}:
            grad = getattr(model, name).grad
            assert grad[:2].eq(0).all() and grad[2:].abs().min() > 0
    assert model.z.grad.abs().min() > 0 and model.s.grad != 0


def test_lambdas_do_not_decay():
    for variant in ("zero", "convex", "learnable", "learnable_plus"):
        model = make(variant)
        rest = {id(p) for group in model.param_groups() if not group["decay"] for p in group["params"]}
        assert all(id(getattr(model, name)) in rest for name in model.names)


def test_the_first_values_learn_from_every_layer():
    """V3: V_1 is not detached."""
    model, idx = make().train(), ids(2, 20)

    def gradient():
        model.zero_grad()
        model(idx, idx).backward()
        return model.blocks[0].wv.weight.grad.clone()
    through_all = gradient()
    model.layers = lambda x, rope, cache: detached(model, x, rope)
    assert (through_all - gradient()).norm() > 0.05 * through_all.norm()


def detached(model, x, rope):
    lam1, lam2 = model.weights()
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        v1 = v.detach() if n == 0 else v1
        x = block.finish(x, attend(q, k, v if n == 0 else lam1[n] * v1 + lam2[n] * v))
    return x


def test_keys_of_two_layers_made_equal_give_half_and_half():
    """V4: attention over [K_n; K_n] with the values [V_n; V_1] is 0.5 A (V_n + V_1)."""
    q, k, v, v1 = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(4))
    seen = torch.ones(9, 9, dtype=torch.bool).tril().repeat(1, 2)
    both = F.scaled_dot_product_attention(q, torch.cat((k, k), 2), torch.cat((v, v1), 2), attn_mask=seen)
    torch.testing.assert_close(both, attend(q, k, 0.5 * (v + v1)), rtol=0, atol=1e-12)


def test_a_layers_own_pattern_is_untouched_and_the_next_layers_is_not():
    """V5"""
    model, other = make(), make()
    other.blocks[0].wv.weight.data += 1.0
    for m in (model, other):
        m.trace = {}
        m(ids(1, 20))
    for name in "qk":
        assert torch.equal(model.trace[name][0], other.trace[name][0])
        assert not torch.equal(model.trace[name][1], other.trace[name][1])


def test_the_cache_holds_mixed_values_and_mixing_twice_is_wrong():
    """V7"""
    model, idx = make().double(), ids(1, 20)
    cache = model.new_cache(1)
    model.trace = {}
    full = model(idx, cache=cache)
    for n in range(4):
        torch.testing.assert_close(cache.v[n, :, :, :20], model.trace["v"][n])
    model.trace = None
    x, rope = model.embed(idx), model.rope(torch.arange(20))
    for n, block in enumerate(model.blocks):                               # as if V' were read back and mixed again
        q, k, v = block.qkv(x, rope)
        v1 = v if n == 0 else v1
        for _ in range(1 if n == 0 else 2):
            v = v if n == 0 else 0.5 * v1 + 0.5 * v
        x = block.finish(x, attend(q, k, v))
    assert (model.head(model.norm(x)) - full).abs().max() > 1e-3


def test_keeping_own_values_and_mixing_when_they_are_read_is_the_same():
    """V7: a cache of V_n, mixed with the cached V_1 at every read; what our cache of V'_n saves is the mixing."""
    model, idx = make("learnable").double(), ids(1, 20)
    lam1, lam2 = model.weights()
    cache, rows = model.new_cache(1), []
    for t in range(20):
        x, rope = model.embed(idx[:, t:t + 1]), model.rope(torch.arange(t, t + 1))
        for n, block in enumerate(model.blocks):
            q, k, v = block.qkv(x, rope)
            k, v = cache.append(n, k, v)
            v1 = v if n == 0 else v1
            x = block.finish(x, attend(q, k, v if n == 0 else lam1[n] * v1 + lam2[n] * v))
        cache.length += 1
        rows.append(model.head(model.norm(x)))
    assert (torch.cat(rows, dim=1) - model(idx)).abs().max() < 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("source", [0, 2])
def test_decoding_in_any_pieces_is_the_full_forward(variant, source):
    """V7: all 16 ways to cut five tokens; two key heads for four query heads."""
    assert_any_pieces_decode_alike(make(variant, source=source).double())


def test_values_are_mixed_before_heads_are_repeated():
    """V8: V_1 and V_n have Hkv heads."""
    model = make(n_kv_head=1)
    model.trace = {}
    model(ids(1, 20))
    assert model.trace["v"][3].shape == (1, 1, 20, 8)


def test_svformer_has_no_later_value_weights_and_one_value_slot():
    """V1, V11"""
    model = make("svformer")
    assert [n for n in range(4) if f"blocks.{n}.wv.weight" in model.state_dict()] == [0]
    gone = sum(p.numel() for p in make().parameters()) - sum(p.numel() for p in model.parameters())
    assert gone == 3 * 24 * 16 and model.cache_slots(model.config) == (4, 1)
    assert make("svformer", source=1).cache_slots(make("svformer", source=1).config) == (4, 2)
    same = make()
    set_lambdas(same, 1.0, 0.0)
    same.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(ids(2, 20)), same(ids(2, 20)))


def test_it_survives_activation_checkpointing():
    """V12: V_1 is handed on, not stored, so a piece may be run again in the backward pass."""
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
                                           (dict(targets=(2,)), "no effect on variant=identity"),
                                           (dict(variant="convex", constant=5.0), "no effect on variant=convex"),
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


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["learnable", "svformer"])
def test_compiled_equals_eager(variant):
    """V12; a block of SVFormer has another `qkv` than the baseline's."""
    model, idx = make(variant).train(), ids(2, 20)
    assert_compiled_equals_eager(model, idx)
