"""MUDD and DenseFormer: the equations by hand, the start, gradients of the first step, shapes, costs, the ladder."""
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import configs
import kernels
import model as baseline
import mudd
from model import causal_attention
from mudd import MUDDConfig, reallocated, sizes
from train import build
from tests.test_contract import SMALL, ids, make as make_arm

LADDER = {"static": dict(dynamic=False, multiway=False), "static multiway": dict(dynamic=False),
          "dynamic": dict(multiway=False), "dynamic multiway": {}}
AT_START = LADDER | {"dilated": dict(dilation=2), "periodic": dict(period=3), "dropped": dict(drop_ways="qr"),
                     "one way, dropped": dict(multiway=False, drop_ways="k"), "wide": dict(released_widths=True)}


def make(**settings):
    """A small model, every parameter moved off its start."""
    return make_arm("mudd", **settings)


def fresh(**settings):
    return build("mudd", **SMALL | settings).eval()


def plain(model):
    """The baseline with the same weights."""
    gpt = build("gpt", **SMALL | dict(n_layer=model.config.n_layer)).eval().to(model.embed.weight.dtype)
    gpt.load_state_dict({k: v for k, v in model.state_dict().items() if k in gpt.state_dict()})
    return gpt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", AT_START)
def test_it_starts_as_the_baseline_bit_for_bit(name, dtype, monkeypatch):
    """the plain loop and the fused path, in fp32 and under bf16 autocast."""
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    model, gpt, idx = fresh(**AT_START[name]), build("gpt", **SMALL).eval(), ids(2, 20)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        expected = gpt(idx)
        assert torch.equal(model(idx), expected)
        model.compile_pieces()
        assert torch.equal(model.train()(idx), expected)


def test_it_does_not_where_the_header_says_so():
    """random a and W2, and re-allocated feed-forwards."""
    expected = build("gpt", **SMALL)(ids(2, 20))
    for settings in (dict(identity_start=False), dict(identity_start=False, dynamic=False), dict(reallocate_ffn=True)):
        assert (fresh(**settings)(ids(2, 20)) - expected).abs().max() > 1e-3


def test_layers_by_hand():
    """and Eq. 3 to 8: one loop over tokens' weights, every tensor spelled out."""
    model, idx = make().double(), ids(2, 20)
    x, rope = model.embed(idx), model.rope(torch.arange(20))
    X, XQ, XK, XV, XR = [x], x, x, x, x
    for n, block in enumerate(model.blocks):
        q, k = block.q(block.norm1(XQ), rope), block.k(block.norm1_k(XK), rope)
        v = block.v(block.norm1_v(XV))
        Y = block.wo(causal_attention(q, k, v).transpose(1, 2).flatten(2)) + XR
        X.append(Y + block.feed_forward(block.norm2(Y)))
        g, C = model.generators[n], 4 if n < 3 else 1
        h = X[-1] / (X[-1].square().mean(-1, keepdim=True) + 1e-6).sqrt()
        h = h @ g.w1.weight.T
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))                    # GELU, the exact one
        A = (h @ g.w2.T).view(2, 20, C, n + 2) + g.a                       # ways outside, sources inside
        mixtures = torch.einsum("btcs,sbtd->cbtd", A, torch.stack(X))
        XQ, XK, XV, XR = mixtures if C == 4 else (None, None, None, mixtures[0])
    torch.testing.assert_close(model(idx), model.head(model.norm(XR)), rtol=0, atol=1e-10)


def test_gradients_of_the_first_step():
    """W1 waits for W2, which learns at once, and so does a. With W1 = W2 = 0 the generator would never start."""
    model, idx = fresh().train(), ids(2, 20)
    model(idx, idx).backward()
    for g in model.generators:
        assert g.w1.weight.grad.abs().max() == 0 and g.w2.grad.abs().max() > 0 and g.a.grad.abs().min() > 0
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.zero_grad()
    model(idx, idx).backward()
    assert all(g.w1.weight.grad.abs().max() > 0 for g in model.generators)
    dead = fresh().train()
    for g in dead.generators:
        g.w1.weight.data.zero_()
    dead(idx, idx).backward()
    assert all(p.grad.abs().max() == 0 for g in dead.generators for p in (g.w1.weight, g.w2))


def test_shapes_of_the_weights_and_one_hot_after_construction():
    model = fresh()
    assert [tuple(g.a.shape) for g in model.generators] == [(4, 2), (4, 3), (4, 4), (1, 5)]
    assert [tuple(g.w1.weight.shape) for g in model.generators] == [(8, 24), (12, 24), (16, 24), (5, 24)]
    for settings in LADDER.values():
        for g in fresh(**settings).generators:
            assert g.a[:, -1].eq(1).all() and g.a[:, :-1].eq(0).all()
            assert not hasattr(g, "w2") or g.w2.eq(0).all()
    assert fresh(n_embd=400).generators[2].w1.weight.std().item() == pytest.approx(400 ** -0.5, rel=0.05)


def test_the_ladder_descends():
    """dynamic with W2 = 0 is static; the same table for every way is one way."""
    idx, multi = ids(2, 20), make()
    for g in multi.generators:
        g.w2.data.zero_()
    static = make(dynamic=False)
    static.load_state_dict({k: v for k, v in multi.state_dict().items() if k in static.state_dict()})
    assert torch.equal(multi(idx), static(idx))
    for g in static.generators:
        g.a.data.copy_(g.a.data[:1].expand_as(g.a))
    for block in static.blocks:
        block.norm1_k.load_state_dict(block.norm1.state_dict())
        block.norm1_v.load_state_dict(block.norm1.state_dict())
    dense = make(dynamic=False, multiway=False)
    dense.load_state_dict({k: v[:1] if k.endswith(".a") else v for k, v in static.state_dict().items()
                           if k in dense.state_dict()})
    assert torch.equal(static(idx), dense(idx))


def test_denseformer_by_hand():
    """Y_i = sum_j alpha_ij X_j, read by everything in the next block"""
    model, idx = make(dynamic=False, multiway=False).double(), ids(2, 20)
    Y = model.embed(idx)
    X, rope = [Y], model.rope(torch.arange(20))
    for n, block in enumerate(model.blocks):
        q, k, v = baseline.Block.qkv(block, Y, rope)
        X.append(block.finish(Y, causal_attention(q, k, v)))
        Y = sum(alpha * x for alpha, x in zip(model.generators[n].a[0], X))
    torch.testing.assert_close(model(idx), model.head(model.norm(Y)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", range(4))
def test_a_dropped_way_reads_the_newest_output(way):
    letter, idx = "qkvr"[way], ids(2, 20)
    full = make(dynamic=False).double()
    dropped = make(dynamic=False, drop_ways=letter).double()
    keep = [c for c in range(4) if c != way]
    weights = {k: v for k, v in full.state_dict().items() if k in dropped.state_dict()}
    for n in range(3):
        weights[f"generators.{n}.a"] = full.generators[n].a[keep]
    dropped.load_state_dict(weights)
    read = full.read
    full.read = lambda n, mixtures, x: [x if c == way else m for c, m in enumerate(read(n, mixtures, x))]
    assert torch.equal(full(idx), dropped(idx))


@pytest.mark.parametrize("settings", [dict(drop_ways="qkvr"), dict(drop_ways="rkvq", multiway=False), dict(period=5),
                                      dict(period=5, multiway=False, dynamic=False)])
def test_with_all_ways_dropped_it_is_the_baseline_whatever_the_parameters(settings):
    model = make(**settings, **({} if "multiway" in settings or "drop_ways" in settings else dict(multiway=False)))
    assert torch.equal(model(ids(2, 20)), plain(model)(ids(2, 20)))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain(model).parameters())


def test_one_mixture_with_a_dropped_way_feeds_the_others():
    """The query alone reads the newest output: keys, values and the residual read the mixture."""
    model, idx = make(multiway=False, drop_ways="q"), ids(2, 20)
    model.trace = {}
    model(idx)
    xq, xk, xv, xr = model.trace["x"][2]
    assert torch.equal(xk, xr) and torch.equal(xv, xr) and not torch.equal(xq, xr)
    before = model.trace["k"][2]
    model.blocks[2].norm1_k.weight.data += 0.5
    model(idx)
    assert not torch.equal(model.trace["k"][2], before)


def test_feed_forward_widths():
    """Eq. 9: the released sizes exactly; small ones monotone, with the same mean."""
    for L, d_ff in ((24, 2816), (32, 6912)):
        config = MUDDConfig(n_layer=L, n_embd=1024, d_ff=d_ff, reallocate_ffn=True)
        widths = [reallocated(config, n) for n in range(L)]
        assert (widths[0], widths[-1]) == (d_ff // 2, 3 * d_ff // 2) and sum(widths) == L * d_ff
        assert all(width % 128 == 0 for width in widths)
    for L, D in ((4, 24), (4, 128), (6, 64), (7, 48), (2, 16), (1, 16)):
        config = MUDDConfig(n_layer=L, n_embd=D, n_head=1, reallocate_ffn=True)
        widths = [reallocated(config, n) for n in range(L)]
        assert widths == sorted(widths) and widths[0] >= 8 and abs(sum(widths) / L - config.d_ff) <= 4
        assert L == 1 or widths[0] < widths[-1]

    def count(**settings):
        return sum(p.numel() for p in fresh(n_layer=6, n_embd=64, d_ff=192, **settings).parameters())
    assert count(reallocate_ffn=True) == pytest.approx(count(), rel=0.005)
    assert make(reallocate_ffn=True).blocks[3].w_up.weight.size(0) == reallocated(make(reallocate_ffn=True).config, 3)


def exact(L, D, T):
    """Parameters and FLOPs that multiway dynamic mixing adds, by the paper's 12 L D^2 and 2 L D (12 D + T)."""
    config = MUDDConfig(n_layer=L, n_embd=D, n_head=1)
    parameters = sum(D * K + C * S * K + C * S for C, S, K in (sizes(config, n) for n in range(L)))
    mix = sum(2 * D * K + 2 * K * C * S + 2 * C * S * D for C, S, K in (sizes(config, n) for n in range(L)))
    return parameters / (12 * L * D ** 2), mix / (2 * L * D * (12 * D + T))


@pytest.mark.parametrize("L, D, parameters, flops", [(24, 2048, 0.22, 0.38), (42, 1536, 0.49, 0.80),
                                                     (32, 2560, 0.23, 0.40), (32, 4096, 0.14, 0.26)])
def test_the_papers_closed_forms_and_its_table_1(L, D, parameters, flops):
    """eta/6 and eta/(3 + rho/4), in per cent at T = 4096; the exact sums are within a tenth of them."""
    eta, rho = (L + 3) / D, 4096 / D
    assert round(100 * eta / 6, 2) == parameters and round(100 * eta / (3 + rho / 4), 2) == flops
    ours = exact(L, D, 4096)
    assert 100 * ours[0] == pytest.approx(parameters, rel=0.1) and 100 * ours[1] == pytest.approx(flops, rel=0.1)


@pytest.mark.parametrize("name", AT_START)
def test_parameters_and_flops_are_those_of_the_built_model(name):
    model, gpt, idx = make(**AT_START[name]), build("gpt", **SMALL), ids(1, 20)
    added = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in gpt.parameters())
    config, dynamic = model.config, model.config.dynamic
    each = [sizes(config, n) for n in range(4)]
    norms = 2 * 24 * sum(hasattr(block, "norm1_k") for block in model.blocks)
    assert added == norms + sum((24 * K + K * C * S if dynamic else 0) + C * S for C, S, K in each)

    def matrix_flops(m):
        with FlopCounterMode(display=False) as counter:
            m(idx)
        return counter.get_total_flops() / 20
    mix = sum(2 * C * S * 24 for C, S, _ in each)              # products and sums, which the counter leaves out
    ours, base = mudd.flops_per_token(config, 20), baseline.flops_per_token(gpt.config, 20)
    assert ours["prefill"] - base["prefill"] == pytest.approx(matrix_flops(model) - matrix_flops(gpt) + mix)
    assert ours["decode"] - base["decode"] == ours["prefill"] - base["prefill"]
    assert ours["train"] - base["train"] == 3 * (ours["prefill"] - base["prefill"])


def test_flops_of_reallocated_feed_forwards():
    model = fresh(reallocate_ffn=True)
    widths = sum(6 * 24 * (block.w_up.weight.size(0) - 40) for block in model.blocks)
    both = (mudd.flops_per_token(m.config, 20)["prefill"] for m in (model, fresh()))
    assert next(both) - next(both) == widths


def test_dilation_and_period():
    """the sources of DenseFormer 4x5 at 48 blocks, and the counts floor(i/k) + 1"""
    assert sum(S for _, S, _ in (sizes(MUDDConfig(n_layer=12, multiway=False), n) for n in range(12))) == 90
    model = build("mudd", **SMALL | dict(n_layer=48, n_embd=16, head_dim=4, dilation=4, period=5), dynamic=False,
                  multiway=False)
    assert [model.sources[i - 1] for i in (5, 10, 15)] == [[1, 5], [2, 6, 10], [3, 7, 11, 15]]
    mixed = [i for i in range(1, 49) if sizes(model.config, i - 1)[0]]
    assert mixed == [5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert sum(p.numel() for g in model.generators for p in g.parameters()) == 62
    for k in (1, 2, 3):
        config = MUDDConfig(n_layer=7, dilation=k, multiway=False)
        assert [sizes(config, i - 1)[1] for i in range(1, 8)] == [i // k + 1 for i in range(1, 8)]


def test_with_a_period_that_does_not_divide_the_layers_the_top_is_the_raw_output():
    model = make(period=3)
    x, u = {}, model.blocks[3].finish
    model.blocks[3].finish = lambda *args: x.setdefault("top", u(*args))
    h = model.hidden(ids(2, 20))
    assert torch.equal(h, model.norm(x["top"]))


def test_what_decays():
    """W1 like any matrix; W2, the one-hot a and the norms do not."""
    model = make()
    decays = {id(p): group["decay"] for group in model.param_groups() for p in group["params"]}
    for name, p in model.named_parameters():
        assert decays[id(p)] == (not re.search(r"\.a$|\.w2$|norm", name)), name


def test_weights_along_depth_are_float32_under_autocast():
    model, x = make(), torch.randn(2, 20, 24)
    expected = model.weights(2, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.weights(2, x).dtype == torch.float32 and torch.equal(model.weights(2, x), expected)
        model.trace = {}
        model(ids(2, 20))
    assert all(w.dtype == torch.float32 for w in model.trace["weights"].values())
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("bad, sentence", [(dict(drop_ways="qx"), "some of the letters"),
                                           (dict(dilation=0), "at least 1"), (dict(period=0), "at least 1")])
def test_bad_settings_are_refused_with_a_sentence(bad, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**bad)


def test_released_widths():
    """Hidden widths go up to the next multiple of 64, and the last generator of a multiway model is fourfold first."""
    config = MUDDConfig(n_layer=24, n_embd=1024, n_head=16, released_widths=True)
    assert [sizes(config, n)[2] for n in (0, 14, 22, 23)] == [64, 128, 128, 128]     # 8, 64, 96, 4 x 25
    assert sizes(MUDDConfig(n_layer=64, released_widths=True), 63)[2] == 320         # 4 x 65 = 260


def ladder():
    """[(the paper's perplexity, flags)] of the rows of the preset's table"""
    text = (Path(configs.__file__).parent / "mudd_405m.toml").read_text(encoding="utf-8")
    rows = re.findall(r"^#\s+.*?(\d\d\.\d\d)  (--\S.*|)$", text, re.MULTILINE)
    return [(float(ppl), flags.split()) for ppl, flags in rows]


def test_the_preset_of_the_papers_ladder():
    """Every row of its table is a command that builds, with about the paper's number of parameters."""
    assert [ppl for ppl, _ in ladder()] == [11.68, 11.93, 11.44, 11.27, 11.09, 10.83, 10.77, 10.89, 10.90, 11.05, 11.14]
    for ppl, flags in ladder():
        settings = configs.read(["mudd_405m", *flags])
        fields = {f.name for f, _, _ in configs.fields(MUDDConfig)}
        config, = configs.build({k: v for k, v in settings.items() if k in fields}, MUDDConfig)
        assert (config.n_layer, config.n_embd, config.d_ff) == (24, 1024, 2816)
        assert config.reallocate_ffn == (ppl not in (11.68, 11.44, 11.27, 11.09, 10.83))
        assert (len(set(config.drop_ways)) == 4) == (ppl in (11.68, 11.93))
