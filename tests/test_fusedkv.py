"""FusedKV against its formula, its early exit, and the paper's FLOPs."""
import pytest
import torch

from baselines import fusedkv
from model import causal_attention, normal, rotate
from tests.test_contract import SMALL, ids, make as make_arm
from tools.table4 import paper_flops
from train import build


def make(variant="fused", **overrides):
    return make_arm("fusedkv", variant=variant, **overrides).double()


def by_hand(model, idx, fuse, start=0):
    """The loop over layers with keys that are not rotated yet: fuse(block, K1, V1, Kn, Vn) -> K^i, V^i."""
    x, rope, stored = model.embed(idx), model.rope(torch.arange(start, start + idx.size(1))), []
    for i, block in enumerate(model.blocks):
        h = block.norm1(x)
        if i < (len(model.blocks) + 1) // 2:
            k, v = block.k_norm(block.heads(block.wk(h))).transpose(1, 2), block.v(h)
            stored.append((k, v))
        else:
            k, v = fuse(block, *stored[0], *stored[-1])
        x = block.finish(x, causal_attention(block.q(h, rope), rotate(k, rope), v))
    return model.head(model.norm(x))


def paired(block, K1, V1, Kn, Vn):
    a, b = block.a.repeat(1, 1, 2), block.b.repeat(1, 1, 2)
    return a * K1 + b * Kn, block.c * V1 + block.e * Vn


@pytest.mark.parametrize("n_layer, n_kv_head", [(4, 2), (4, 1), (4, 4), (3, 2), (2, 2), (1, 2)])
def test_fusing_rotated_keys_is_rotating_fused_keys(n_layer, n_kv_head):
    """The formula, at every depth and head count; the model fuses after the rotation, this loop before it."""
    model, idx = make(n_layer=n_layer, n_kv_head=n_kv_head), ids(2, 20)
    logits = model(idx), by_hand(model, idx, paired)
    ours, expected = (torch.autograd.grad(y.square().mean(), list(model.parameters())) for y in logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


def test_zeros_and_ones_are_lite():
    """a=0, b=1, c=1, e=0 == Lite: K^i = K^n, V^i = V^1; the default starts there."""
    lite, fused, idx = build("fusedkv", **SMALL, variant="lite"), build("fusedkv", **SMALL), ids(2, 20)
    assert torch.equal(lite(idx), fused(idx))
    lite, fused = lite.double(), make()
    expected = by_hand(lite, idx, lambda block, K1, V1, Kn, Vn: (Kn, V1))
    torch.testing.assert_close(lite(idx), expected, rtol=0, atol=1e-11)
    fused.load_state_dict(lite.state_dict())
    assert torch.equal(lite(idx), fused(idx))
    assert not {"blocks.2.a", "blocks.3.e"} & {name for name, _ in lite.named_parameters()}


def test_the_chain_is_multiplied_out_at_the_start():
    """K^i = a_i K^(i-1) + b_i K^n and V^i = c_i V^(i-1) + e_i V^1, i-1 the fused layer below, with the raw draws."""
    model, idx, below = build("fusedkv", **SMALL | dict(n_layer=6), variant="chain").eval().double(), ids(2, 20), {}

    def chained(block, K1, V1, Kn, Vn):
        i = list(model.blocks).index(block)
        a, b, c, e = (normal(model.config, f"blocks.{i}.{name}", 2, 1, width, std=1.0)
                      for name, width in (("a", 4), ("b", 4), ("c", 8), ("e", 8)))
        K, V = below.get(i - 1, (K1, None))
        below[i] = (a.repeat(1, 1, 2) * K + b.repeat(1, 1, 2) * Kn, c * V1 + e * Vn if V is None else c * V + e * V1)
        return below[i]
    torch.testing.assert_close(model(idx), by_hand(model, idx, chained), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cached", [False, True])
def test_a_prefill_runs_the_upper_half_for_the_last_token_only(cached):
    model, idx = make(), ids(2, 20)
    full, lengths = model.hidden(idx), []
    for block in model.blocks:
        finish = type(block).finish
        block.finish = lambda x, o, block=block, finish=finish: lengths.append(x.size(1)) or finish(block, x, o)
    cache = model.new_cache(2) if cached else None
    pieces = idx.split([7, 12, 1], dim=1) if cached else [idx]
    for piece in pieces:
        lengths.clear()
        last = model.hidden(piece, cache, last=True)
        assert lengths == [piece.size(1)] * 2 + [1, 1]
    torch.testing.assert_close(last, full[:, -1:], rtol=0, atol=1e-11)


def test_the_upper_half_has_no_keys_and_values_and_the_cache_half_the_slots():
    state = make().state_dict()
    for name in ("wk", "wv", "k_norm"):
        assert [n for n in range(4) if f"blocks.{n}.{name}.weight" in state] == [0, 1]
    assert make(n_layer=16).cache_slots(make(n_layer=16).config) == (8, 8)
    plain = sum(p.numel() for p in build("gpt", **SMALL).parameters())
    assert sum(p.numel() for p in make().parameters()) - plain == 2 * (3 * 2 * 8 - 2 * 24 * 2 * 8 - 8)


def test_coefficients_do_not_decay():
    model = make()
    decayed = {id(p) for group in model.param_groups() if group["decay"] for p in group["params"]}
    assert not decayed & {id(getattr(model.blocks[2], name)) for name in "abce"}


def test_flops_are_the_papers():
    config = make(n_layer=16).config
    ours, paper = fusedkv.flops_per_token(config, 20), paper_flops("fusedkv", config, 20)
    for phase in ("decode", "prefill", "train"):
        assert ours[phase] == pytest.approx(paper[phase], rel=1e-12)


def test_a_bad_variant_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="choose one of fused, chain, lite"):
        make("heavy")
