"""LCKV against its definition. Code with the defects of the official release, a first token that reads every later one
and a decoding that misses the token before, fails these tests."""
import pytest
import torch
import torch.nn.functional as F

from baselines import lckv
from cyclic import scheduled
from model import causal_attention
from tests.test_contract import SMALL, ids, make as make_arm
from tools.table4 import paper_flops
from train import build


def make(**overrides):
    return make_arm("lckv", **dict(n_layer=5) | overrides).double()


def run(model, idx, schedule="autoregressive", passes=1, grad_passes=1):
    with scheduled(model.config, schedule=schedule, passes=passes, grad_passes=grad_passes):
        return model(idx)


def by_hand(model, idx):
    """The definition, token by token, with lists for caches; warm-up layers read a token's own slot, the block not."""
    config, out = model.config, []
    bottom, top = config.w // 2, config.n_layer - (config.w - config.w // 2)
    channel, own = ([], []), [([], []) for _ in model.blocks]
    for i in range(idx.size(1)):
        x, rope = model.embed(idx[:, i:i + 1]), model.rope(torch.tensor([i]))
        for n, block in enumerate(model.blocks):
            h = block.norm1(x)
            if not bottom <= n < top:
                for slots, new in zip(own[n], (block.k(h, rope), block.v(h))):
                    slots.append(new)
            elif n == top - 1:
                published = block.k(h, rope), block.v(h)
            keys, values = channel if bottom <= n < top else own[n]
            q = block.q(h, rope)
            o = causal_attention(q, torch.cat(keys, 2), torch.cat(values, 2)) if keys else 0 * q
            x = block.finish(x, o)
        for slots, new in zip(channel, published):
            slots.append(new)
        out.append(x)
    return model.head(model.norm(torch.cat(out, dim=1)))


@pytest.mark.parametrize("n_layer, w, n_kv_head", [(5, 2, 2), (5, 2, 1), (5, 3, 4), (4, 0, 2), (4, 3, 2), (2, 1, 2),
                                                   (1, 0, 2)])
def test_it_is_its_definition_and_so_is_decoding(n_layer, w, n_kv_head):
    model, idx = make(n_layer=n_layer, w=w, n_kv_head=n_kv_head), ids(2, 12)
    expected, cache = by_hand(model, idx), model.new_cache(2)
    torch.testing.assert_close(run(model, idx), expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(run(model, idx, "jacobi", passes=12), expected, rtol=0, atol=1e-11)
    decoded = torch.cat([model(token, cache=cache) for token in idx.split(1, dim=1)], dim=1)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=1e-11)


def test_the_first_token_reads_nothing_in_the_block():
    """Its logits are those of the token alone, its attention output is 0, and its gradients are finite."""
    model, idx = make(w=0), ids(2, 12)
    x = model.embed(idx[:, :1])
    for block in model.blocks:
        x = block.finish(x, torch.zeros(2, 4, 1, 8, dtype=torch.float64))
    torch.testing.assert_close(run(model, idx, "jacobi", 3)[:, :1], model.head(model.norm(x)), rtol=0, atol=1e-12)
    run(model.train(), idx, "jacobi", 3, 2).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_decoded_token_reads_the_token_just_before_it():
    """The newest slot of the channel changes the next token's logits, and so does every other one."""
    model, idx = make(), ids(1, 9)
    for slot in range(8):
        logits = []
        for noise in (0.0, 1.0):
            cache = model.new_cache(1)
            model(idx[:, :8], cache=cache)
            cache.k[0, :, :, slot] += noise
            cache.v[0, :, :, slot] += noise
            logits.append(model(idx[:, 8:], cache=cache))
        assert (logits[0] - logits[1]).abs().max() > 1e-4, slot


@pytest.mark.parametrize("passes", [1, 2, 3, 12])
def test_without_warm_up_it_is_white_matter_with_one_fixed_channel(passes):
    """k=1, static, last source: equals the LCKV block (w=0), also where the passes have not converged. The second norm
    of WhiteMatter's pool holds the gain, the first one's is 1."""
    model, idx, tiny = make(n_layer=4, w=0, norm_eps=1e-15), ids(2, 12), 1e-15
    wm = build("whitematter", **SMALL, variant="release", k=1, router="static", norm_eps=tiny).eval().double()
    wm.load_state_dict({name: p for name, p in model.state_dict().items() if name in wm.state_dict()}, strict=False)
    top = model.blocks[-1]
    for r, matrix in ((wm.keys, top.wk), (wm.values, top.wv)):
        r.router.bias.data = F.one_hot(torch.tensor([3]), 5).double()     # h_{L-1}, the input of the top layer
        r.pre.weight.data.fill_(1.0)
        r.post.weight.data, r.post.eps, r.weight.data = top.norm1.weight.data[None], tiny, matrix.weight.data[None]
    wm.k_norm.weight.data = top.k_norm.weight.data.view_as(wm.k_norm.weight)
    torch.testing.assert_close(run(model, idx, "jacobi", passes), run(wm, idx, "jacobi", passes), rtol=0, atol=1e-10)


@pytest.mark.parametrize("n_layer, w, block", [(22, 2, (1, 20)), (16, 4, (2, 13)), (16, 7, (3, 11)), (3, 0, (0, 2))])
def test_the_sandwich(n_layer, w, block):
    """LCKV cache sources w+1; the target is the block's top layer, and no other layer of the block has W^K or W^V."""
    model = make(n_layer=n_layer, w=w)
    assert (model.condensed[0], model.condensed[-1]) == block and model.cache_slots(model.config) == (w + 1, w + 1)
    bare = [n for n in range(n_layer) if f"blocks.{n}.wk.weight" not in model.state_dict()]
    assert bare == list(range(block[0], block[1]))
    plain = sum(p.numel() for p in build("gpt", **SMALL | dict(n_layer=n_layer)).parameters())
    assert plain - sum(p.numel() for p in model.parameters()) == (n_layer - w - 1) * (2 * 24 * 16 + 8)


def test_the_papers_passes_are_the_default():
    config = build("lckv", **SMALL).config
    assert (config.schedule, config.passes, config.grad_passes, config.w) == ("jacobi", 9, 2, 2)


def gradients(model, idx, **how):
    model.zero_grad()
    F.cross_entropy(run(model.train(), idx, **how).flatten(0, 1), idx.flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_enough_gradient_passes_give_the_exact_gradients():
    model, idx = make(), ids(2, 8)
    exact = gradients(model, idx)
    for name, grad in gradients(model, idx, schedule="jacobi", passes=8, grad_passes=8).items():
        torch.testing.assert_close(grad, exact[name], rtol=1e-8, atol=1e-12)


def test_one_gradient_pass_reaches_the_published_projections():
    grads = gradients(make(), ids(2, 8), schedule="jacobi", passes=4, grad_passes=1)
    assert min(grads[f"blocks.3.{name}.weight"].abs().max() for name in ("wk", "wv")) > 1e-6


@pytest.mark.parametrize("w", [4, 7])
def test_flops_are_the_papers_less_what_we_do_not_do(w):
    """The paper counts an ignored router (4 M^2 D) and a mix (4 M D) in every pool; we pool the embeddings too."""
    config = make(n_layer=16, w=w).config
    config.schedule, config.passes, config.grad_passes = "jacobi", 9, 2
    ours, paper = lckv.flops_per_token(config, 20), paper_flops("lckv", config, 20)
    M, kvp = 16 - w, 4 * 24 * 16
    unused = 4 * M * 24 + 4 * M * M * 24
    assert paper["decode"] - ours["decode"] == unused
    assert paper["prefill"] - ours["prefill"] == 9 * unused - kvp
    # Two pools more forward, embeddings and boundary; as many backward: the boundary's and the first gradient pass's.
    assert paper["train"] - ours["train"] == pytest.approx(13 * unused - 2 * kvp)


@pytest.mark.parametrize("bad", [dict(w=5), dict(w=-1), dict(passes=0), dict(schedule="best")])
def test_bad_settings_are_refused_with_a_sentence(bad):
    with pytest.raises(ValueError, match=": give|choose one of"):
        make(**bad)


