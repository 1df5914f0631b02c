"""The Feedback Transformer against its definition, and against WhiteMatter with one fixed channel."""
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from baselines import feedback
from cyclic import scheduled
from model import causal_attention, rotate
from tests.test_contract import SMALL, ids, make as make_arm
from train import build


def make(**overrides):
    return make_arm("feedback", **overrides).double()


def run(model, idx, schedule="autoregressive", groups=1, passes=1, grad_passes=1):
    with scheduled(model.config, schedule=schedule, groups=groups, passes=passes, grad_passes=grad_passes):
        return model(idx)


def by_hand(model, idx, window=99):
    """m_t = sum_l softmax(w)_l x_t^l; all layers of token t read m_{t-tau} .. m_{t-1}. Token 0 skips attention."""
    weights, keys, values, out = model.w.exp() / model.w.exp().sum(), [], [], []
    for t in range(idx.size(1)):
        x, rope = model.embed(idx[:, t:t + 1]), model.rope(torch.tensor([t]))
        m = weights[0] * x
        for block, weight in zip(model.blocks, weights[1:]):
            if t == 0:
                x = x + block.feed_forward(block.norm2(x))
            else:
                q = block.q(block.norm1(x), rope)
                x = block.finish(x, causal_attention(q, torch.cat(keys[-window:], 2), torch.cat(values[-window:], 2)))
            m = m + weight * x
        keys.append(rotate(model.k_norm(model.wk(m).unflatten(-1, (-1, 8))).transpose(1, 2), rope))
        values.append(model.wv(m).unflatten(-1, (-1, 8)).transpose(1, 2))
        out.append(x)
    return model.head(model.norm(torch.cat(out, dim=1)))


@pytest.mark.parametrize("n_layer, n_kv_head, window", [(4, 2, None), (4, 1, None), (4, 4, 3), (2, 2, 2), (1, 2, None)])
def test_it_is_its_definition_and_so_is_decoding(n_layer, n_kv_head, window):
    """Window tau included; token 0 skips attention."""
    model, idx = make(n_layer=n_layer, n_kv_head=n_kv_head, window=window), ids(2, 12)
    expected, cache = by_hand(model, idx, window or 99), model.new_cache(2)
    torch.testing.assert_close(run(model, idx), expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(run(model, idx, "cyclic", groups=5, passes=3), expected, rtol=0, atol=1e-11)
    decoded = torch.cat([model(token, cache=cache) for token in idx.split(1, dim=1)], dim=1)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=1e-11)


def test_a_window_of_all_is_no_window_and_a_small_one_is_another_model():
    idx = ids(2, 12)
    whole = run(make(), idx)
    assert torch.equal(whole, run(make(window=11), idx))
    two = run(make(window=2), idx)
    torch.testing.assert_close(two[:, :3], whole[:, :3], rtol=0, atol=1e-12)
    assert (two[:, 3:] - whole[:, 3:]).abs().amax((0, 2)).min() > 1e-6


def test_the_mixture_is_a_softmax():
    """Softmax weights sum to 1: equal states are their own mixture, and a constant added to w changes nothing."""
    model, idx = make(), ids(2, 12)
    state = torch.randn(1, 2, 3, 24, dtype=torch.float64)
    k, v = model.pool(state.expand(5, -1, -1, -1), torch.arange(3))
    torch.testing.assert_close(v[0], model.wv(state[0]).unflatten(-1, (-1, 8)).transpose(1, 2))
    before = run(model, idx)
    model.w.data += 2.0
    torch.testing.assert_close(run(model, idx), before, rtol=0, atol=1e-11)
    assert build("feedback", **SMALL).w.softmax(0).eq(0.2).all()


@pytest.mark.parametrize("how", [dict(), dict(schedule="jacobi", passes=2), dict(schedule="cyclic", groups=4)])
def test_it_is_white_matter_with_one_fixed_channel_and_no_norms_in_the_pool(how):
    """k=1 static softmax over S=L+1, shared projection, no pre-mix norm: equals the Feedback Transformer loop."""
    model, idx = make(), ids(2, 12)
    wm = build("whitematter", **SMALL, variant="release", k=1, router="static").eval().double()
    wm.load_state_dict({name: p for name, p in model.state_dict().items() if "k_norm" not in name}, strict=False)
    for r, matrix in ((wm.keys, model.wk), (wm.values, model.wv)):
        r.router.bias.data, r.weight.data = model.w.softmax(0).data[None], matrix.weight.data[None]
        r.pre = r.post = nn.Identity()
    wm.k_norm.weight.data = model.k_norm.weight.data.view_as(wm.k_norm.weight)
    torch.testing.assert_close(run(model, idx, **how), run(wm, idx, **how), rtol=0, atol=1e-11)


def test_with_all_weight_on_the_embedding_one_pass_is_exact():
    model, idx = make(), ids(1, 12)
    feeding_back = (run(model, idx, "jacobi") - run(model, idx)).abs().max()
    model.w.data = torch.tensor([0.0] + [-1e4] * 4).double()
    assert (run(model, idx, "jacobi") - run(model, idx)).abs().max() < 1e-12 < 1e-3 < feeding_back


def gradients(model, idx, **how):
    model.zero_grad()
    F.cross_entropy(run(model.train(), idx, **how).flatten(0, 1), idx.flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_enough_gradient_passes_give_the_exact_gradients():
    model, idx = make(window=5), ids(2, 9)
    exact = gradients(model, idx)
    for name, grad in gradients(model, idx, schedule="cyclic", groups=3, passes=3, grad_passes=3).items():
        torch.testing.assert_close(grad, exact[name], rtol=1e-8, atol=1e-12)


def test_one_slot_and_the_parameters_of_the_header():
    model, plain = make(), build("gpt", **SMALL)
    assert model.cache_slots(model.config) == (1, 1)
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert count(model) - count(plain) == 5 - 3 * (2 * 24 * 16 + 8)
    assert all(p is not model.w for group in model.param_groups() if group["decay"] for p in group["params"])


@pytest.mark.parametrize("window", [None, 2, 3, 40])
def test_flops_count_the_tokens_in_view(window):
    config = make(window=window).config
    flops = feedback.flops_per_token(config, 12)
    pairs = sum(min(t, window or 12) for t in range(12)) / 12
    body, pool = 4 * 24 * 32 + 6 * 24 * 40, 4 * 24 * 16 + 2 * 5 * 24
    assert flops["prefill"] == pytest.approx(4 * (body + 128 * pairs) + pool)
    assert flops["decode"] == 4 * (body + 128 * min(window or 12, 12)) + pool
    assert flops["train"] == pytest.approx(3 * 4 * body + 3.5 * 4 * 128 * pairs + 3 * pool - 2 * pool / 12)


@pytest.mark.parametrize("window", [0, 1])
def test_a_window_without_a_choice_is_refused(window):
    """With one token in view every softmax is 1: queries and keys would get rounding noise for a gradient."""
    with pytest.raises(ValueError, match=f"window={window}: .*at least 2"):
        make(window=window)
