"""The Recurrent Transformer against its definition, and its tiling against the plain loop."""
import pytest
import torch

import baselines.recurrent as recurrent
import model as baseline
from model import attention_weights, repeat_kv
from tests.test_contract import SMALL, ids, make as make_arm
from train import build


def make(variant="tiled", **overrides):
    return make_arm("recurrent", variant=variant, **overrides).double()


def token_by_token(model, idx):
    """The definition, with the other order of loops: each token goes through all layers before the next one starts."""
    past, out = [([], []) for _ in model.blocks], []
    for t in range(idx.size(1)):
        x, rope = model.embed(idx[:, t:t + 1]), model.rope(torch.tensor([t]))
        for block, (K, V) in zip(model.blocks, past):
            q, k0, v0 = block.qkv(x, rope)
            keys, values = torch.cat((*K, k0), dim=2), torch.cat((*V, v0), dim=2)
            x = block.finish(x, attention_weights(q, keys) @ repeat_kv(values, q))
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
            x = model.loop(block, x, rope, q, k0, v0, k0[:, :, :0], v0[:, :, :0])[0]
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


def test_the_cache_holds_permanent_pairs():
    model, idx = make(), ids(2, 12)
    cache, model.trace = model.new_cache(2), {}
    model(idx[:, :7], cache=cache)
    model(idx[:, 7:], cache=cache)
    model(idx)
    for n, block in enumerate(model.blocks[:3]):                           # what layer n + 1 reads is the output of n
        k, v = block.kv(model.trace["x"][n + 1][0], model.rope(torch.arange(12)))
        torch.testing.assert_close(cache.k[n, :, :, :12], k)
        torch.testing.assert_close(cache.v[n, :, :, :12], v)
        torch.testing.assert_close(model.trace["k"][n], k)


def test_large_scores_neither_overflow_nor_vanish():
    """What the running maximum is for: scores of +-3000, in fp32."""
    model, idx = make_arm("recurrent", qk_norm=False), ids(1, 16)
    for block in model.blocks:
        block.wq.weight.data *= 100
        block.wk.weight.data *= 100
    tiled = model(idx)
    model.config.variant = "loop"
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
