"""WhiteMatter against its definition, in fp64 with every parameter moved off its start."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import configs
import model as baseline
import whitematter
from cyclic import Channels, past_attention, scheduled
from model import GPTConfig, rotate
from tests.test_contract import ids
from train import build

SMALL = dict(vocab_size=70, block_size=32, n_layer=4, n_head=4, n_kv_head=2, n_embd=16, head_dim=4, d_ff=24)
PAPER = dict(vocab_size=151936, n_layer=16, n_embd=512, n_head=6, n_kv_head=3, head_dim=96, d_ff=1536)
OPTIONS = [dict(), dict(variant="paper"), dict(k=4), dict(k=1, prior="top"), dict(k=3, stride=3), dict(router="static"),
           dict(router="shared"), dict(router="depth_causal"), dict(router="depth_causal", variant="paper"),
           dict(qk_norm=False)]
options = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: " ".join(map(str, option.values())) or "plain")


pytestmark = pytest.mark.usefixtures("one_thread")


def make(start=False, **settings):
    model = build("whitematter", **SMALL | dict(variant="release") | settings).double()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data += (0 if start else 0.3) * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model.eval()


def run(model, idx, schedule="autoregressive", groups=1, passes=1):
    with scheduled(model.config, schedule=schedule, groups=groups, passes=passes, grad_passes=1):
        return model.hidden(idx)


def some_states(model, n=5):
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(model.n_sources, 2, n, 16, generator=generator, dtype=torch.float64)
    return states, torch.arange(n) + int(model.has_dummy)


def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


# ------------------------------------------------------------------------------------------------------ the definition


def test_the_pool_by_hand():
    """Seven steps, number by number, for each token, branch and channel."""
    model = make(variant="paper")
    states, positions = some_states(model)
    K, V = model.pool(states, positions)
    S, k = 4, 2
    for r, out in ((model.keys, K), (model.values, V)):
        for b, i in ((0, 0), (1, 4)):
            u = [r.pre.weight[l] * rms(states[l, b, i], 1e-6) for l in range(S)]
            xi = torch.cat((u[1], u[3]))                                   # stride 2, the last source included
            A = (r.router.weight @ xi).view(k, S) + r.router.bias
            for j in range(k):
                m = sum(A[j, l] * u[l] for l in range(S))
                y = (r.weight[j] @ (r.post.weight[j] * rms(m, 1e-4))).view(2, 4)
                if r is model.keys:
                    y = model.k_norm.weight[j, 0, 0, 0] * rms(y, 1e-6)
                    y = rotate(y[None, :, None], model.rope(positions[i:i + 1]))[0, :, 0]
                torch.testing.assert_close(out[j, b, :, i], y)


def test_the_exact_run_by_hand():
    """The whole recurrence, one token after the other, one layer after the other, with lists for channels."""
    model = make(variant="paper", k=3)
    x = model.embed(ids(1, 6))[0]
    dummy = model.dummy.expand(4, 1, 1, 16)
    published = [model.pool(dummy, torch.tensor([0]))]
    for i in range(6):
        h, rope, H = x[i][None, None], model.rope(torch.tensor([i + 1])), []
        for l, block in enumerate(model.blocks):
            H.append(h)
            q = block.q(block.norm1(h), rope)[0].view(2, 2, 4)             # (Hkv, queries of each, d)
            K, V = (torch.stack([p[r][l % 3, 0, :, 0] for p in published], dim=1) for r in (0, 1))     # (Hkv, slots, d)
            a = (q @ K.transpose(1, 2) / 2).softmax(-1) @ V
            h = block.finish(h, a.reshape(1, 4, 1, 4))
        published.append(model.pool(torch.stack(H), torch.tensor([i + 1])))
        assert (model.norm(h)[0, 0] - run(model, ids(1, 6))[0, i]).abs().max() < 1e-10


@options
def test_every_option_is_exact_by_enough_passes_and_trains_all_its_parameters(option):
    model, idx = make(**option), ids(2, 11)
    exact = run(model, idx)
    assert (run(model, idx, "cyclic", 4, 3) - exact).abs().max() < 1e-9
    assert (run(model, idx, "jacobi", 1, 11) - exact).abs().max() < 1e-9
    model.train()(idx, idx).backward()
    assert all(p.grad.abs().max() > 1e-9 for p in model.parameters() if p.requires_grad)


@options
def test_projections_and_router_matrices_decay_and_nothing_else_of_the_pool(option):
    model = make(**option)
    names = {id(p): name for name, p in model.named_parameters()}
    decay, rest = ({names[id(p)] for p in group["params"]} for group in model.param_groups())
    pool = {name for name in decay if name.split(".")[0] in ("keys", "values", "k_norm", "dummy")}
    assert all(name.split(".")[1] == "weight" or ".router.weight" in name for name in pool) and len(pool) >= 2
    assert not any("router.weight" in name or name in ("keys.weight", "values.weight") for name in rest)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_keys_router_of_one_source_is_trained_only_where_its_size_matters(qk_norm):
    """The norm on the keys removes it, and the gradient would be rounding noise, which AdamW turns into drift."""
    for settings in (dict(router="depth_causal"), dict(n_layer=1, variant="paper"),
                     dict(n_layer=1, variant="paper", router="static")):
        model = make(qk_norm=qk_norm, **settings)
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert all(name.startswith("keys.router.") for name in frozen) and bool(frozen) == qk_norm


# ------------------------------------------------------------------------------------------------------------ decoding


def test_what_an_unconverged_prefill_leaves_is_no_more_than_its_own_error():
    """Its prefix of passes x groups tokens is exact; decoding behind it reads frozen channels and is not."""
    model, idx = make(), ids(2, 14)
    exact = run(model, idx)
    with scheduled(model.config, schedule="cyclic", groups=4, passes=1, grad_passes=1):
        cache = model.new_cache(2)
        prefill, step = model.hidden(idx[:, :13], cache), model.hidden(idx[:, 13:], cache)
    assert (prefill[:, :4] - exact[:, :4]).abs().max() < 1e-9 < (prefill[:, 4:] - exact[:, 4:13]).abs().max()
    assert (step - exact[:, 13:]).abs().max() > 1e-9


@pytest.mark.parametrize("D, L, Hkv, d, k, size", [(512, 16, 3, 96, 16, 18432), (512, 16, 3, 96, 8, 9216),
                                                   (512, 16, 3, 96, 1, 1152), (1792, 28, 7, 128, 28, 100352),
                                                   (1792, 28, 7, 128, 14, 50176), (1792, 28, 7, 128, 1, 3584)])
def test_cache_bytes_per_token(D, L, Hkv, d, k, size):
    """2 k Hkv d numbers, 2 bytes each."""
    config = whitematter.WhiteMatterConfig(n_layer=L, n_embd=D, n_head=2 * Hkv, n_kv_head=Hkv, head_dim=d, k=k)
    assert 2 * sum(whitematter.WhiteMatter.cache_slots(config)) * Hkv * d == size


# ------------------------------------------------------------------------------------------- special cases, equalities


def one_hot_routers(model, source):
    """Channel j mixes source(j) alone, with weight 1; no gains, no epsilon in the mix."""
    for r in (model.keys, model.values):
        if hasattr(r.router, "weight"):
            r.router.weight.data.zero_()
        chosen = torch.tensor([source(j) for j in range(model.n_channels)])
        r.router.bias.data = F.one_hot(chosen, model.n_sources).double()
        r.pre.weight.data.fill_(1)
        r.pre.eps = r.post.eps = 0


@pytest.mark.parametrize("variant", ["release", "paper"])
def test_with_an_identity_router_it_is_a_plain_decoder_that_does_not_see_itself(variant):
    """Post-mix gains are the layer's norm. Exact after L Jacobi passes, since nothing flows back."""
    model, plain, idx = make(variant=variant, k=4), build("gpt", **SMALL).double().eval(), ids(2, 11)
    one_hot_routers(model, lambda j: j)
    for l, block in enumerate(model.blocks):
        block.norm1.eps = 0
        target = plain.blocks[l]
        target.load_state_dict(block.state_dict() | {
            "wk.weight": model.keys.weight[l], "wv.weight": model.values.weight[l],
            "k_norm.weight": model.k_norm.weight[l].flatten()})
        target.norm1.eps = 0
        for r in (model.keys, model.values):
            r.post.weight.data[l] = block.norm1.weight.data
    x = model.embed(idx)
    past = Channels(*model.boundary(2))
    positions = torch.arange(11) + int(model.has_dummy)
    h, rope = x, model.rope(positions)
    for l, block in enumerate(plain.blocks):
        q, k, v = block.qkv(h, rope)
        full = Channels(past.k[l:l + 1], past.v[l:l + 1]).join(Channels(k[None], v[None]))
        K, V = full.k[0].repeat_interleave(2, dim=1), full.v[0].repeat_interleave(2, dim=1)
        scores = (q @ K.transpose(-2, -1) / 2).masked_fill(torch.arange(K.size(2)) >= positions[:, None], -torch.inf)
        h = block.finish(h, scores.softmax(-1).nan_to_num(0) @ V)
    assert (run(model, idx) - model.norm(h)).abs().max() < 1e-12
    assert (run(model, idx, "jacobi", 1, 4) - model.norm(h)).abs().max() < 1e-12
    assert (run(model, idx, "jacobi", 1, 3) - model.norm(h)).abs().max() > 1e-6
    for l, block in enumerate(model.blocks):                    # the norm's gain BEFORE the mix is another model
        for r in (model.keys, model.values):
            r.pre.weight.data[l], r.post.weight.data[l] = block.norm1.weight.data, 1
    assert (run(model, idx) - model.norm(h)).abs().max() > 1e-3


def test_channels_of_the_embedding_alone_need_one_pass():
    model, idx = make(), ids(2, 11)
    one_hot_routers(model, lambda j: 0)
    assert torch.equal(run(model, idx, "jacobi", 1, 1), run(model, idx, "jacobi", 1, 2))
    assert (run(model, idx, "jacobi", 1, 1) - run(model, idx)).abs().max() < 1e-12


@pytest.mark.parametrize("variant", ["release", "paper"])
def test_depth_causal_is_one_pass_layer_by_layer(variant):
    """Channel l needs h_0..h_l only, so all tokens can go through layer l together. As many Jacobi passes as layers."""
    model, idx = make(variant=variant, router="depth_causal"), ids(2, 11)
    past, positions = Channels(*model.boundary(2)), torch.arange(11) + int(model.has_dummy)
    x, rope = model.embed(idx), model.rope(positions)
    states = [x]
    for l, block in enumerate(model.blocks):
        unknown = torch.full_like(x, torch.nan)                           # what channel l must not need
        H = torch.stack(states + [unknown] * (model.n_sources - len(states)))
        mixed = []
        for r in (model.keys, model.values):
            u = r.pre(H.movedim(0, 2))[:, :, :l + 1]
            xi = u[:, :, l % 2::2].flatten(2)
            A = xi @ getattr(r.router.weight, str(l)).T + getattr(r.router.bias, str(l))
            z = r.post.weight[l] * rms((A[..., None] * u).sum(2), 1e-4)
            mixed.append(block.heads(z @ r.weight[l].T).transpose(1, 2))
        k, v = rotate(model.k_norm.weight[l, 0, 0] * rms(mixed[0], 1e-6), rope), mixed[1]
        full = Channels(past.k[l:l + 1], past.v[l:l + 1]).join(Channels(k[None], v[None]))
        x = block.finish(x, past_attention(block.query(x, rope), full.k[0], full.v[0], full.seen_from(positions)))
        states.append(x)
    assert (model.norm(x) - run(model, idx)).abs().max() < 1e-10
    assert (model.norm(x) - run(model, idx, "jacobi", 1, 4)).abs().max() < 1e-10


def test_the_mix_has_a_direction_and_no_size():
    """A times 3 changes nothing, A times -1 turns the sign of values and keys."""
    model = make()
    states, positions = some_states(model)
    for r in (model.keys, model.values):
        r.post.eps = 0
    model.k_norm.eps = 0
    K, V = model.pool(states, positions)
    for c, sign in ((3.0, 1), (-0.5, -1)):
        scaled = make()
        for r in (scaled.keys, scaled.values):
            r.post.eps = 0
            r.router.weight.data *= c
            r.router.bias.data *= c
        scaled.k_norm.eps = 0
        k, v = scaled.pool(states, positions)
        torch.testing.assert_close((k, v), (sign * K, sign * V))


def test_keys_and_values_are_independent():
    """With router=shared they are not."""
    for router, same in (("dynamic", True), ("static", True), ("shared", False)):
        model = make(router=router)
        states, positions = some_states(model)
        K, V = model.pool(states, positions)
        model.keys.router.bias.data += torch.randn_like(model.keys.router.bias)
        model.keys.pre.weight.data += torch.randn_like(model.keys.pre.weight)
        k, v = model.pool(states, positions)
        assert not torch.equal(k, K) and torch.equal(v, V) == same


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_layer_l_reads_channel_l_mod_k(k):
    """A channel without values silences its readers and no other layer."""
    model = make(k=k)
    heard = {}
    for l, block in enumerate(model.blocks):
        def finish(x, attention, l=l, block=block):
            heard[l] = attention.abs().max().item()
            return type(block).finish(block, x, attention)
        block.finish = finish
    x, positions = model.embed(ids(2, 6)), torch.arange(6)
    K, V = model.pool(x.expand(model.n_sources, *x.shape), positions)
    for j in range(k):
        silent = V.clone()
        silent[j] = 0
        model.stack(x, positions, Channels(K, silent))
        assert {l for l in heard if heard[l] == 0} == {l for l in range(4) if l % k == j}


def test_the_mixture_at_the_start():
    """W = 0, so it is the same for every token; k < L sums sources j, j + k, ..; k = L starts on layer j's output."""
    for settings, sources in ((dict(variant="paper"), [[0, 2], [1, 3]]), (dict(), [[0, 2, 4], [1, 3]]),
                              (dict(k=4), [[1], [2], [3], [4]]), (dict(k=4, variant="paper"), [[1], [2], [3], [3]]),
                              (dict(k=1), [[0, 1, 2, 3, 4]]), (dict(k=1, prior="top"), [[4]]),
                              (dict(router="depth_causal"), [[0], [1], [2], [3]]),
                              (dict(router="shared"), [[0, 1, 2, 3, 4]])):
        model = make(start=True, **settings)
        states, _ = some_states(model)
        A = model.keys.router(model.keys.pre(states.movedim(0, 2)))
        assert all(torch.equal(A[0, 0], A[b, i]) for b in range(2) for i in range(5))
        assert [row.nonzero().flatten().tolist() for row in A[0, 0]] == sources
        assert A[A != 0].eq(0.25).all()


def test_the_ablations_differ_as_the_paper_says():
    """Static: the same for every token. Shared: one mixture, projected k times. Depth-causal: nothing from above."""
    states, positions = some_states(make())
    static, shared = make(router="static", k=4), make(router="shared")
    A = static.keys.router(states.movedim(0, 2))
    assert torch.equal(A[0, 0], A[1, 3]) and A.shape == (2, 5, 4, 5)
    assert shared.keys.router is shared.values.router and shared.keys.router(states.movedim(0, 2)).shape == (2, 5, 1, 5)
    assert shared.n_channels == 4 and len(shared.pool(states, positions)[0]) == 4
    model = make(router="depth_causal")
    states = states[:4].clone()
    K, V = model.pool(states, positions)
    states[2:] += 1
    k, v = model.pool(states, positions)
    assert torch.equal(k[:2], K[:2]) and torch.equal(v[:2], V[:2])
    assert all(not torch.equal(a[j], b[j]) for a, b in ((k, K), (v, V)) for j in (2, 3))


# ---------------------------------------------------------------------------------------------------------- accounting


def non_embedding(L, D, Hq, Hkv, d, ff, k, dummy=True):
    """The specification's formula, S = L."""
    n = math.ceil(L / 2)
    return (L * (2 * D * Hq * d + 3 * D * ff + 2 * D + d) + 2 * k * Hkv * d * D + 2 * (n * D * k * L + k * L)
            + 2 * L * D + 2 * k * D + k * d + D * dummy + D)


@pytest.mark.parametrize("k, count", [(8, 50_638_336), (16, 54_055_424)])
def test_parameters_of_the_papers_models(k, count):
    """131,846,656 with the tied embedding for k = 16; the 1.3B model by the same formula."""
    model = build("whitematter", **PAPER, variant="paper", k=k)
    total = sum(p.numel() for p in model.parameters())
    assert total - model.embed.weight.numel() == count == non_embedding(16, 512, 6, 3, 96, 1536, k)
    assert model.embed.weight.numel() == 151936 * 512 and (k != 16 or total == 131_846_656)
    assert non_embedding(28, 1792, 14, 7, 128, 5376, 14) + 151936 * 1792 == 1_326_225_936


def test_presets_are_the_papers_models():
    for name, count in (("whitematter_k8", 50_638_336), ("whitematter_k16", 54_055_424), ("whitematter_1b3", None)):
        settings = configs.load_preset(name)
        fields = {f.name for f, _, _ in configs.fields(whitematter.WhiteMatterConfig)}
        config = whitematter.WhiteMatterConfig(**{key: value for key, value in settings.items() if key in fields})
        assert config.variant == "paper" and (config.groups, config.passes, config.grad_passes) == (8, 3, 2)
        assert config.rope_base == 1e6 and config.qk_norm and config.tie_embeddings
        found = non_embedding(config.n_layer, config.n_embd, config.n_head, config.n_kv_head, config.head_dim,
                              config.d_ff, config.k)
        assert found == (count or 1_326_225_936 - 151936 * 1792)


@pytest.mark.parametrize("option", [dict(), dict(variant="paper"), dict(router="static"), dict(router="shared"),
                                    dict(router="depth_causal"), dict(variant="paper", schedule="jacobi"),
                                    dict(schedule="contiguous", passes=2), dict(schedule="autoregressive")],
                         ids=lambda option: " ".join(map(str, option.values())) or "default")
def test_flops_are_those_that_torch_counts(option):
    """Matrix products of a training step and of a prefill, exactly; attention pairs are added by the formula."""
    T, B = 16, 2
    model, idx = make(**option).train(), ids(B, T)
    config, said = model.config, whitematter.flops_per_token(model.config, T)
    passes, grad_passes = (1, 1) if config.schedule == "autoregressive" else (config.passes, config.grad_passes)
    pair, seen, L = 4 * 4 * 4, (T - 1) / 2 + model.has_dummy, 4
    back = grad_passes * L - (grad_passes - 1) * (model.n_sources == L)

    with Products() as prefill, torch.no_grad():
        model.layers(model.embed(idx), None)
    assert prefill.flops / B / T == pytest.approx(said["prefill"] - passes * L * pair * seen, rel=1e-12)
    x = model.embed(idx)
    with Products() as train:
        model.layers(x, None).sum().backward()
    attention = pair * seen * (passes * L + 2.5 * back)
    blind = L * 3 * 2 * 16 * 16 / T * (config.schedule == "autoregressive")  # a lone first token's q gets no gradient
    if config.router == "depth_causal":                         # nor does keys.router.weight.0, frozen, in 3 pools,
        blind += 2 * 16 * (3 - 1 / 8)                           # less the last of 8 groups, which nobody reads
    assert train.flops / B / T == pytest.approx(said["train"] - attention - blind, rel=1e-12)


class Products(TorchDispatchMode):
    """Counts the FLOPs of the matrix products that run under it."""

    flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out, name = function(*args, **kwargs or {}), function.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self.flops += 2 * out.numel() * args[-1].size(-2)
        return out


@pytest.mark.parametrize("k, decode, prefill, train", [(8, .99, 3.00, 2.30), (16, 1.03, 3.20, 2.47)])
def test_the_price_that_the_header_names(k, decode, prefill, train):
    config = whitematter.WhiteMatterConfig(**PAPER, k=k)
    ours, plain = whitematter.flops_per_token(config, 2048), baseline.flops_per_token(GPTConfig(**PAPER), 2048)
    said = f"decode {decode:.2f}, prefill {prefill:.2f}, training {train:.2f} (k={k})"
    assert said in whitematter.__doc__
    for kind, ratio in (("decode", decode), ("prefill", prefill), ("train", train)):
        assert ours[kind] / plain[kind] == pytest.approx(ratio, abs=0.005), kind


# ------------------------------------------------------------------------------------------- numerics, trace, compiled


def test_a_dummy_at_zero_would_drown_all_other_gradients():
    """Why it is drawn from N(0, init_std): at zero, norms in a row have slopes of 1 / sqrt(eps) each."""
    def share(scale):
        model = make(start=True, variant="paper")
        model.dummy.data *= scale
        model.train()(ids(2, 12), ids(2, 12, seed=2)).backward()
        others = torch.cat([p.grad.flatten() for p in model.parameters() if p is not model.dummy]).norm()
        return (model.dummy.grad.norm() / others).item()
    assert share(1) < 20 and share(1e-8) > 1000


@pytest.mark.parametrize("variant", ["release", "paper"])
@pytest.mark.parametrize("how", [("autoregressive",), ("cyclic", 3, 3)])
def test_a_trace_holds_what_the_schedule_left_in_token_order(variant, how):
    """One more reading of all tokens, from the channels that decoding would read; for an exact run the run itself."""
    model, idx = make(variant=variant), ids(2, 9)
    exact, positions, N = run(model, idx), torch.arange(9) + int(model.has_dummy), 9 + model.has_dummy
    model.trace = {}
    run(model, idx, *how)
    x, q, k, v = (model.trace[name][3] for name in ("x", "q", "k", "v"))
    assert torch.equal(model.trace["x"][0][0], model.embed(idx)) and x.shape == (1, 2, 9, 16)
    assert q.shape == (2, 4, 9, 4) and k.shape == v.shape == (2, 2, N, 4)
    x = model.blocks[3].finish(x[0], past_attention(q, k, v, Channels(k[None], v[None]).seen_from(positions)))
    assert (model.norm(x) - exact).abs().max() < 1e-9


@pytest.mark.parametrize("settings, words", [
    (dict(k=0), "k=0: give a number of channels from 1 to n_layer=4"), (dict(k=5), "k=5"), (dict(stride=0), "stride=0"),
    (dict(variant="papers"), "variant=papers: choose one of paper, release"), (dict(prior="x"), "prior=x: .*cyclic"),
    (dict(router="depth_causal", k=2), "leave it out"), (dict(router="depth_causal", prior="top"), "leave prior out"),
    (dict(router="static", stride=1), "leave stride out")])
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        make(**settings)
