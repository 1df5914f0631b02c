"""The Recurrent Transformer against its definition, and its tiling against the plain loop."""
import pytest
import torch

import baselines.recurrent as recurrent
import model as baseline
from model import attend, attend_explicit
from tests.test_contract import SMALL, assert_compiled_equals_eager, ids, make as make_arm
from train import build
from whitematter import WhiteMatter, WhiteMatterConfig


def make(variant="tiled", **overrides):
    return make_arm("recurrent", variant=variant, **overrides).double()


def token_by_token(model, idx):
    """The definition, with the other order of loops: each token goes through all layers before the next one starts."""
    past, out = [([], []) for _ in model.blocks], []
    for t in range(idx.size(1)):
        x, rope = model.embed(idx[:, t:t + 1]), model.rope(torch.tensor([t]))
        for block, (K, V) in zip(model.blocks, past):
            q, k0, v0 = block.qkv(x, rope)
            x = block.finish(x, attend_explicit(q, torch.cat((*K, k0), dim=2), torch.cat((*V, v0), dim=2)))
            K.append(block.k(block.norm1(x), rope))
            V.append(block.v(block.norm1(x)))
        out.append(x)
    return model.head(model.norm(torch.cat(out, dim=1)))


@pytest.mark.parametrize("variant", ["tiled", "loop"])
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_it_is_its_definition_and_layers_can_be_finished_one_after_the_other(variant, n_kv_head):
    model, idx = make(variant, n_kv_head=n_kv_head), ids(2, 13)
    torch.testing.assert_close(model(idx), token_by_token(model, idx), rtol=0, atol=1e-11)


@pytest.mark.parametrize("T", [1, 2, 3, 8, 11, 16, 24])
def test_tiled_is_the_loop_with_its_gradients(T):
    """RT tiled == RT loop, T a power of two and not"""
    idx, grads = ids(2, T), []
    for variant in ("loop", "tiled"):
        model = make(variant)
        model(idx, ids(2, T, seed=2)).backward()
        grads.append((model(idx), *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("T", [8, 11])
def test_the_tiles_are_the_papers(T, monkeypatch):
    """After token t, U keys up to t, U the largest power of two that divides t + 1, go to the next U queries."""
    tiles, read = [], recurrent.read
    monkeypatch.setattr(recurrent, "read", lambda q, K, *a: tiles.append((q.size(2), K.size(2))) or read(q, K, *a))
    make(n_layer=1)(ids(1, T))
    powers = [(t + 1) & -(t + 1) for t in range(T - 1)]
    assert tiles[1:] == [(min(U, T - 1 - t), U) for t, U in enumerate(powers)]
    assert tiles[0] == (T, 0) and sum(a * b for a, b in tiles) == T * (T - 1) // 2


def test_with_pairs_of_the_input_it_is_the_baseline():
    """The one difference is what K_t and V_t are made of."""
    model, idx = make("loop"), ids(2, 16)
    gpt = build("gpt", **SMALL).eval().double()
    gpt.load_state_dict(model.state_dict())
    assert (model(idx) - gpt(idx)).abs().max() > 1e-2

    def layers(x, rope, cache=None):
        for block in model.blocks:
            pairs = iter(zip(*(t.split(1, dim=2) for t in block.qkv(x, rope)[1:])))
            block.kv = lambda y, rope: next(pairs)
            q, k0, v0 = block.qkv(x, rope)
            x = model.run(block, x, rope, q, k0, v0, k0[:, :, :0], v0[:, :, :0])[0]
        return x
    model.layers = layers
    torch.testing.assert_close(model(idx), gpt(idx), rtol=0, atol=1e-11)


def test_a_token_reads_its_own_input_and_its_own_pair_is_for_others():
    """One layer: the pair that token 5 publishes does not enter output 5, and does enter output 6."""
    model, idx = make(n_layer=1), ids(1, 10)
    block, x, rope = model.blocks[0], model.embed(idx), model.rope(torch.arange(10))
    before = model.layers(x, rope)
    kv = block.kv
    block.kv = lambda y, r: tuple(t + 1.0 * torch.equal(r[0], rope[0][5:6]) for t in kv(y, r))
    after = model.layers(x, rope)
    assert torch.equal(before[:, :6], after[:, :6]) and (before[:, 6:] - after[:, 6:]).abs().amax(-1).min() > 1e-6
    o = block.finish(x[:, :1], block.v(block.norm1(x[:, :1])).repeat_interleave(2, 1))    # one key: its weight is 1
    torch.testing.assert_close(before[:, :1], o)


class WithSelfKey(WhiteMatter):
    """WhiteMatter, each layer of which also reads a temporary pair of the token's own input; `donors` project it."""

    def stack(self, x, positions, channels):
        rope, states = self.rope(positions), [x]
        for l, (block, donor) in enumerate(zip(self.blocks, self.donors)):
            k0, v0 = donor.kv(x, rope)
            k, v = torch.cat((channels.k[l], k0), dim=2), torch.cat((channels.v[l], v0), dim=2)
            x = block.finish(x, attend(block.query(x, rope), k, v))
            states.append(x)
        return x, torch.stack(states)


def test_it_is_white_matter_that_publishes_each_layers_output_with_a_self_key():
    """k=L, S=L+1, one-hot l+1; adding a temporary self key from the layer input gives RT. Without it, it is not."""
    model, idx, tiny = make(norm_eps=1e-15), ids(2, 12), 1e-15
    config = WhiteMatterConfig(**SMALL, k=4, router="static", norm_eps=tiny, schedule="autoregressive")
    wm = WithSelfKey(config).eval().double()
    wm.load_state_dict({name: p for name, p in model.state_dict().items() if name in wm.state_dict()}, strict=False)
    wm.donors = list(model.blocks)
    for r, name in ((wm.keys, "wk"), (wm.values, "wv")):
        r.router.bias.data = torch.eye(5, dtype=torch.float64)[1:]         # channel l is h_{l+1}, the output of layer l
        r.pre.weight.data.fill_(1.0)
        r.post.weight.data, r.post.eps = torch.stack([block.norm1.weight.data for block in model.blocks]), tiny
        r.weight.data = torch.stack([getattr(block, name).weight.data for block in model.blocks])
    wm.k_norm.weight.data = torch.stack([block.k_norm.weight.data for block in model.blocks]).view_as(wm.k_norm.weight)
    torch.testing.assert_close(model(idx), wm(idx), rtol=0, atol=1e-10)
    wm.stack = lambda *inputs: WhiteMatter.stack(wm, *inputs)
    assert (model(idx) - wm(idx)).abs().max() > 1e-2


def test_the_cache_holds_permanent_pairs():
    model, idx = make(), ids(2, 12)
    cache, model.trace = model.new_cache(2), {}
    model(idx[:, :7], cache=cache)
    model(idx[:, 7:], cache=cache)
    model(idx)
    for n, block in enumerate(model.blocks):
        y = model.trace["x"][n + 1][0] if n < 3 else None
        torch.testing.assert_close(cache.k[n, :, :, :12], model.trace["k"][n])
        if y is not None:
            torch.testing.assert_close(cache.v[n, :, :, :12], block.v(block.norm1(y)))


def test_large_scores_neither_overflow_nor_vanish():
    """What the running maximum is for: scores of +-3000, in fp32."""
    model, idx = make_arm("recurrent", qk_norm=False), ids(1, 16)
    for block in model.blocks:
        block.wq.weight.data *= 100
        block.wk.weight.data *= 100
    tiled = model(idx)
    model.run = recurrent.loop
    assert tiled.isfinite().all()
    torch.testing.assert_close(tiled, model(idx), rtol=1e-3, atol=1e-3)


def test_flops_are_the_baselines_and_two_projections():
    config = make().config
    ours, base = recurrent.flops_per_token(config, 20), baseline.flops_per_token(config, 20)
    assert ours["prefill"] - base["prefill"] == ours["decode"] - base["decode"] == 4 * 4 * 24 * 16     # 4 L D Hkv d
    assert ours["train"] - base["train"] == 3 * 4 * 4 * 24 * 16


def test_a_bad_variant_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="choose one of tiled, loop"):
        make("fast")


@pytest.mark.slow
def test_compiled_equals_eager():
    model, idx = make_arm("recurrent", n_layer=2).train(), ids(2, 6)
    assert_compiled_equals_eager(model, idx)
