"""LIMe: the routing against its formula, where it starts, and what it costs."""
import pytest
import torch

import baselines.lime as lime
import model as baseline
from model import causal_attention, rotate
from train import build
from tests.test_contract import SMALL, assert_compiled_equals_eager, ids, make as make_arm


def make(**overrides):
    return make_arm("lime", **overrides)


def plain(model):
    gpt = build("gpt", **SMALL).eval().to(model.embed.weight.dtype)
    gpt.load_state_dict({k: v for k, v in model.state_dict().items() if k in gpt.state_dict()})
    return gpt


@pytest.mark.parametrize("routed", ["kv", "v"])
def test_identity_starts_as_the_baseline_and_release_does_not(routed):
    idx = ids(2, 20)
    model = build("lime", **SMALL, start="identity", route=routed).eval()
    assert torch.equal(model(idx), plain(model)(idx))
    model = build("lime", **SMALL, route=routed).eval()
    assert (model(idx) - plain(model)(idx)).abs().max() > 0.01


def test_a_table_starts_as_the_identity_and_uniform_noise():
    model = build("lime", **SMALL | dict(n_layer=12, n_head=8, n_kv_head=8))
    assert not hasattr(model.blocks[0], "router")
    for n, block in enumerate(model.blocks[1:], start=1):
        W, fan_in = block.router, (n + 1) * 8
        assert W.shape == (8, fan_in) and torch.equal(W[:, -8:], torch.eye(8))
        noise, bound = W[:, :-8].detach(), (3 / fan_in) ** 0.5
        assert noise.abs().max() <= bound and noise.numel() == 64 * n
        if n > 3:
            assert noise.var().item() == pytest.approx(1 / fan_in, rel=0.2) and noise.abs().max() > 0.95 * bound
            kurtosis = noise.pow(4).mean() / noise.var() ** 2
            assert kurtosis.item() == pytest.approx(1.8, rel=0.15)         # of a uniform law; a Gaussian has 3


def loop(model, idx, keys_too=True, recursive=False, norm_first=False):
    """The model written out with its rows in one concatenated table."""
    x, rope, rows_k, rows_v = model.embed(idx), model.rope(torch.arange(idx.size(1))), [], []
    for n, block in enumerate(model.blocks):
        h = block.norm1(x)
        k, v = block.heads(block.wk(h)), block.heads(block.wv(h))                      # (B, T, R, d)
        k = block.k_norm(k) if norm_first else k
        rows_k.append(k)
        rows_v.append(v)
        if n > 0:
            k = torch.einsum("hr,btrd->bthd", block.router, torch.cat(rows_k, dim=2)) if keys_too else k
            v = torch.einsum("hr,btrd->bthd", block.router, torch.cat(rows_v, dim=2))
        if recursive:
            rows_k[-1], rows_v[-1] = k, v
        k = rotate((k if norm_first else block.k_norm(k)).transpose(1, 2), rope)
        x = block.finish(x, causal_attention(block.q(h, rope), k, v.transpose(1, 2)))
    return model.head(model.norm(x))


def test_rows_are_raw_and_the_norm_comes_after():
    model, idx = make().double(), ids(2, 20)
    assert (model(idx) - loop(model, idx)).abs().max() < 1e-12
    ours, expected = (torch.autograd.grad(y.square().mean(), list(model.parameters()))
                      for y in (model(idx), loop(model, idx)))
    torch.testing.assert_close(ours, expected)                             # no row is detached
    assert (model(idx) - loop(model, idx, recursive=True)).abs().max() > 1e-3
    assert (model(idx) - loop(model, idx, norm_first=True)).abs().max() > 1e-3
    assert (model(idx) - loop(model, idx, keys_too=False)).abs().max() > 1e-3
    model = make(route="v").double()
    assert (model(idx) - loop(model, idx, keys_too=False)).abs().max() < 1e-12


def test_tables_have_a_group_of_their_own():
    *groups, tables = make(router_lr_scale=7.0).param_groups()
    assert tables["lr_scale"] == 7 and not tables["decay"] and {group["lr_scale"] for group in groups} == {1}
    assert [p.shape for p in tables["params"]] == [(2, 4), (2, 6), (2, 8)]


def test_what_the_backward_keeps_grows_linearly_with_the_layers():
    """Rows are kept once, however many layers read them."""
    def kept(L):
        model, storages = make(n_layer=L).train(), {}
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(t):
            if t.untyped_storage().data_ptr() not in own:
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage(), t.untyped_storage().nbytes()
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(ids(2, 20), ids(2, 20))
        return loss, sum(size for _, size in storages.values())
    (_, two), (_, four), (_, eight) = kept(2), kept(4), kept(8)
    assert eight - four == 2 * (four - two)


def test_flops_and_parameters_by_counting():
    config, heads = make().config, 2 ** 2 * (2 + 3 + 4)                    # R^2 (n+1), layers 1 to 3
    base = baseline.flops_per_token(config, 20)
    assert lime.flops_per_token(config, 20)["decode"] - base["decode"] == 4 * 8 * heads
    assert lime.flops_per_token(make(route="v").config, 20)["decode"] - base["decode"] == 2 * 8 * heads
    for routed in ("kv", "v"):
        model = make(route=routed)
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain(model).parameters()) + heads


@pytest.mark.parametrize("bad, sentence", [(dict(start="x"), "start=x: choose"), (dict(route="x"), "route=x: choose"),
                                           (dict(router_lr_scale=0.0), "give a positive number")])
def test_bad_settings_are_refused_with_a_sentence(bad, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**bad)


@pytest.mark.slow
def test_all_layers_share_the_compiled_pieces():
    model, idx = make().train(), ids(2, 20)
    assert_compiled_equals_eager(model, idx)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4     # project, norm_and_rotate, finish, the loss
