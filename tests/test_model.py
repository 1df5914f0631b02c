"""The baseline: attention, cache, sampling, loss, initial weights and the sentences that refuse a bad configuration."""
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import kernels
from model import (GPT, GPTConfig, RMSNorm, attention_weights, causal_attention, flops_per_token, normal, repeat_kv,
                   rotary, rotate)

SMALL = dict(vocab_size=70, block_size=24, n_layer=3, n_head=4, n_kv_head=2, n_embd=24, head_dim=8, d_ff=40)


def make(**overrides):
    """A small model with every parameter moved off its start, so that nothing hides behind a one."""
    model = GPT(GPTConfig(**SMALL | overrides))
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator)
    return model.eval()


def ids(*shape, vocab_size=70, seed=1):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize("Hkv", [1, 2, 4])
def test_causal_attention_moves_values_by_the_softmax(Hkv):
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, Hkv, 7, 8), torch.randn(2, Hkv, 7, 8)
    torch.testing.assert_close(causal_attention(q, k, v), attention_weights(q, k) @ repeat_kv(v, q))


def test_causal_attention_by_hand():
    """Two tokens, one head: the second token weighs both values with softmax(q k / sqrt(d))."""
    q = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]])
    k = torch.tensor([[[[1.0, 1.0], [0.0, 3.0]]]])
    v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    a = torch.tensor([2.0, 6.0]).div(math.sqrt(2)).softmax(0)
    torch.testing.assert_close(causal_attention(q, k, v), torch.stack((torch.tensor([1.0, 0.0]), a))[None, None])


def test_new_tokens_read_the_whole_past_not_the_top_left_corner():
    """PyTorch lays is_causal from the top left: with 2 queries and 5 keys it would hide keys 2..4 from them."""
    model = make()
    cache, (q, k, v) = model.new_cache(1), (torch.randn(1, h, 5, 8) for h in (4, 2, 2))
    whole = causal_attention(q, k, v)
    model.attend(0, q[:, :, :3], k[:, :, :3], v[:, :, :3], cache)
    cache.length = 3
    torch.testing.assert_close(model.attend(0, q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], cache), whole[:, :, 3:])
    trap = F.scaled_dot_product_attention(q[:, :, 3:], k, v, is_causal=True, enable_gqa=True)
    assert (trap - whole[:, :, 3:]).abs().max() > 0.1


def test_the_rotation_turns_pairs_half_a_head_apart_by_position():
    config = GPTConfig(n_head=1, n_embd=4, rope_base=100.0)
    x = rotate(torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 1, 3, 4), rotary(torch.tensor([0, 1, 5]), config))[0, 0]
    for row, t in zip(x, (0, 1, 5)):                        # frequencies 1 and 100^(-2/4) = 0.1
        torch.testing.assert_close(row, torch.tensor([math.cos(t), -math.sin(t / 10), math.sin(t), math.cos(t / 10)]))


def test_scores_depend_on_the_distance_alone():
    config, q, k = GPTConfig(n_head=1, n_embd=16), torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(i, j):
        return (rotate(q, rotary(torch.tensor([i]), config)) * rotate(k, rotary(torch.tensor([j]), config))).sum()
    torch.testing.assert_close(score(3, 1), score(13, 11))
    assert (score(3, 1) - score(3, 2)).abs() > 1e-3


@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_rms_norm_by_hand(shape):
    """Large fp16 numbers too: their squares overflow fp16, so the mean must be taken in fp32."""
    norm, x = RMSNorm(shape, 1e-6), torch.randn(3, 8)
    norm.weight.data = torch.randn(shape)
    by_hand = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), by_hand)
    assert norm(x.bfloat16()).dtype == torch.float32                       # as under autocast, where gains are fp32
    half = norm.half()(300 * x.half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), by_hand, rtol=5e-3, atol=5e-3)


def test_qk_norm_makes_scores_blind_to_the_scale_of_the_projection():
    for qk_norm, same in ((True, True), (False, False)):
        model, idx = make(qk_norm=qk_norm), ids(1, 9)
        before = model(idx)
        for block in model.blocks:
            block.wq.weight.data *= 3
        assert torch.allclose(model(idx), before, atol=1e-3) == same


# --------------------------------------------------------------------------------------------------- the whole model


def test_a_full_cache_is_refused_with_a_sentence():
    model = make()
    cache = model.new_cache(1, max_tokens=4)
    with pytest.raises(ValueError, match="room for 4 tokens and was given 5: ask new_cache"):
        model(ids(1, 5), cache=cache)
    with pytest.raises(ValueError, match="25 tokens do not fit block_size=24"):
        model(ids(1, 25))


def test_logits_stop_at_the_vocabulary_and_padded_rows_touch_nothing():
    model, idx = make(), ids(2, 20)
    assert model.embed.weight.shape == (128, 24) and model(idx).shape == (2, 20, 70)
    before, loss = model(idx), model(idx, idx)
    model.embed.weight.data[70:] = 1e4
    assert torch.equal(model(idx), before) and torch.equal(model(idx, idx), loss)
    assert model.generate(idx[:, :1], 100, temperature=5.0).max() < 70
    model(idx, idx).backward()
    assert model.embed.weight.grad[70:].eq(0).all() and model.embed.weight.grad[:70].abs().sum() > 0


def test_the_loss_is_the_mean_over_targets_that_are_not_minus_one():
    model, idx, targets = make(), ids(2, 20), ids(2, 20, seed=2)
    targets[0, :15] = -1
    logp = model(idx).log_softmax(-1)
    by_hand = [-logp[b, t, targets[b, t]] for b in range(2) for t in range(20) if targets[b, t] >= 0]
    torch.testing.assert_close(model(idx, targets), torch.stack(by_hand).mean())


def test_dropout_acts_in_training_only():
    model, idx = make(dropout=0.5), ids(1, 20)
    assert torch.equal(model(idx), model(idx)) and torch.equal(model(idx), make()(idx))
    model.train()
    assert not torch.equal(model(idx), model(idx))


def test_the_trace_holds_what_each_layer_reads():
    model, idx = make(), ids(2, 20)
    model.trace = {}
    logits = model(idx)
    trace, model.trace = model.trace, None
    assert trace["x"][0].shape == (1, 2, 20, 24) and trace["q"][2].shape == (2, 4, 20, 8)
    assert trace["k"][1].shape == trace["v"][1].shape == (2, 2, 20, 8)
    x = model.blocks[2].finish(trace["x"][2][0], causal_attention(*(trace[name][2] for name in "qkv")))
    torch.testing.assert_close(model.head(model.norm(x)), logits)
    assert not trace["x"][2].requires_grad


# --------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("block_size", [1, 2, 7, 24])
def test_greedy_text_is_the_same_with_and_without_cache_also_past_the_block(block_size):
    model, prompt = make(block_size=block_size).double(), ids(2, 5)
    a = model.generate(prompt, 40, temperature=0)
    b = model.generate(prompt, 40, temperature=0, use_cache=False)
    assert a.shape == (2, 45) and torch.equal(a, b) and torch.equal(a[:, :5], prompt)


def test_when_full_the_view_is_the_last_half_of_the_block():
    model, prompt = make().double(), ids(1, 24)
    out = model.generate(prompt, 3, temperature=0)
    assert out[0, 24] == model(prompt)[0, -1].argmax()
    assert out[0, 25] == model(out[:, 13:25])[0, -1].argmax()
    assert out[0, 26] == model(out[:, 13:26])[0, -1].argmax()


def test_sampling_follows_its_generator_and_the_distribution():
    model, prompt = make(), ids(1, 5)

    def sample(seed, **how):
        return model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed), **how)
    assert torch.equal(sample(1), sample(1)) and not torch.equal(sample(1), sample(2))
    assert torch.equal(sample(1, top_k=1), model.generate(prompt, 20, temperature=0))
    assert torch.equal(sample(1, top_k=1000), sample(1)) and torch.equal(sample(1, top_k=None), sample(1))
    assert torch.equal(sample(1, temperature=1e-39), model.generate(prompt, 20, temperature=0))
    p = (model(prompt)[0, -1] / 0.5).softmax(-1)
    batch = model.generate(prompt.expand(4000, 5), 1, temperature=0.5, generator=torch.Generator().manual_seed(3))
    seen = torch.bincount(batch[:, -1], minlength=70) / 4000
    assert (seen - p).abs().max() < 5 * (p.max() * (1 - p.max()) / 4000).sqrt()
    top = model.generate(prompt.expand(500, 5), 1, temperature=9.0, top_k=3, generator=torch.Generator().manual_seed(3))
    assert set(top[:, -1].tolist()) == set(model(prompt)[0, -1].topk(3).indices.tolist())


@pytest.mark.parametrize("how, sentence", [(dict(temperature=-1), "give 0 for the most likely"),
                                           (dict(top_k=0), "at least 1")])
def test_impossible_sampling_is_refused(how, sentence):
    with pytest.raises(ValueError, match=sentence):
        make().generate(ids(1, 5), 1, **how)
    with pytest.raises(ValueError, match="the prompt is empty: start it with the end-of-text token"):
        make().generate(ids(1, 0), 1)


# --------------------------------------------------------------------------------------------- initial weights, groups


def test_each_parameter_is_drawn_by_its_name_and_the_seed():
    a, b = GPT(GPTConfig(**SMALL)), GPT(GPTConfig(**SMALL | dict(n_layer=5, n_head=2)))
    assert torch.equal(a.blocks[2].wk.weight, b.blocks[2].wk.weight)       # another depth, the same layer
    assert not torch.equal(a.blocks[1].wk.weight, a.blocks[2].wk.weight)
    assert not torch.equal(a.embed.weight, GPT(GPTConfig(**SMALL, seed=2)).embed.weight)
    weight = normal(GPTConfig(init_std=0.3), "x", 400, 400)
    assert weight.std().item() == pytest.approx(0.3, rel=0.02) and abs(weight.mean().item()) < 0.003
    assert all(norm.weight.eq(1).all() for norm in a.modules() if isinstance(norm, RMSNorm))


def test_matrices_and_embeddings_decay_and_gains_do_not():
    model = GPT(GPTConfig(**SMALL, tie_embeddings=False))
    decay, rest = model.param_groups()
    assert decay["decay"] and not rest["decay"] and decay["lr_scale"] == rest["lr_scale"] == 1
    names = {id(p): name for name, p in model.named_parameters()}
    assert all("norm" not in names[id(p)] for p in decay["params"])
    assert all("norm" in names[id(p)] for p in rest["params"])
    assert sorted(map(id, decay["params"] + rest["params"])) == sorted(names)


@pytest.mark.parametrize("bad, sentence", [
    (dict(n_head=4, n_kv_head=3), "n_kv_head=3: n_head=4 is not a multiple of it"),
    (dict(n_head=4, n_kv_head=0), "n_kv_head=0: n_head=4 is not a multiple"),
    (dict(n_head=3, n_embd=16), "n_embd=16: it is not a multiple of n_head=3"),
    (dict(n_head=2, n_embd=6), "head_dim=3: the rotation turns pairs"),
    (dict(n_layer=0), "n_layer=0: give a whole number"),
    (dict(d_ff=0), "d_ff=0"),
    (dict(dropout=1.0), "dropout=1.0"),
])
def test_an_impossible_configuration_is_refused_with_a_sentence(bad, sentence):
    with pytest.raises(ValueError, match=sentence):
        GPTConfig(**bad)


def test_derived_fields():
    config = GPTConfig(n_embd=512, n_head=8)
    assert (config.n_kv_head, config.head_dim, config.d_ff) == (8, 64, 1344) and config.padded_vocab_size == 320
    names = {f.name for f in dataclasses.fields(config)}
    assert names >= {"rope_base", "qk_norm", "tie_embeddings", "norm_eps", "init_std"}


def test_flops_by_counting_every_product():
    config, T = GPTConfig(**SMALL), 6
    matrices = sum(2 * p.numel() for name, p in GPT(config).named_parameters() if p.dim() == 2 and "embed" not in name)
    pairs = sum(range(1, T + 1)) / T                                       # token t sees t + 1 tokens
    attention = 3 * 2 * 2 * 4 * 8                                      # layers, two products, 2 FLOPs, heads, head_dim
    flops = flops_per_token(config, T)
    assert flops["prefill"] == matrices + attention * pairs
    assert flops["train"] == 3 * matrices + 3.5 * attention * pairs
    assert flops["decode"] == matrices + attention * (T + 1) and flops["head"] == 2 * 24 * 128


# ----------------------------------------------------------------------------------------------------- the fused paths


@pytest.fixture
def few_rows(monkeypatch):
    """The loss in parts of at most three rows, not compiled."""
    def few(h, weight, targets):
        assert len(h) <= 3
        return summed_loss(h, weight, targets)
    summed_loss = kernels.summed_loss
    monkeypatch.setattr(kernels, "compiled", lambda function: few)
    monkeypatch.setattr(kernels, "LOGITS_AT_A_TIME", 3 * 70)


def loss_and_gradients(function, h, weight, targets, scale=1.0):
    h, weight = h.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = function(h, weight, targets, 70)
    (scale * loss).backward()
    return loss.detach(), h.grad / scale, weight.grad / scale


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_the_fused_loss_is_the_plain_one_with_its_gradients(few_rows, dtype, tolerance):
    h, weight, targets = torch.randn(2, 5, 8, dtype=dtype), torch.randn(128, 8, dtype=dtype), ids(2, 5)
    targets[0, 1:4] = -1
    targets[1, 4] = -1                                                     # all of the last part, which has one row
    plain, fused = (loss_and_gradients(f, h, weight, targets, 2.5) for f in (GPT.loss, kernels.cross_entropy))
    for a, b in zip(plain, fused):
        torch.testing.assert_close(b, a, rtol=10 * tolerance, atol=tolerance)
    assert (fused[2][70:] == 0).all()                                      # the padded rows


def test_the_fused_loss_under_autocast(few_rows):
    """bf16 rounds the two forms at different places: the error of the fused one may be 1.5 times the plain one's."""
    torch.manual_seed(0)
    h, weight, targets = torch.randn(2, 5, 8), torch.randn(128, 8), ids(2, 5)
    targets[0, 1:4] = -1
    with torch.autocast("cpu", torch.bfloat16):
        plain, fused = (loss_and_gradients(f, h, weight, targets) for f in (GPT.loss, kernels.cross_entropy))
    for a, b, exact in zip(plain, fused, loss_and_gradients(GPT.loss, h, weight, targets)):
        assert b.dtype == torch.float32 and (b - exact).norm() <= 1.5 * (a - exact).norm() + 1e-6


def test_scaled_fp16_keeps_the_gradient_that_a_mean_would_round_away(monkeypatch):
    """Each of 128 tokens is sure of one id, the others get a probability of 3e-6: fp16 holds that, but not a 128th."""
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    torch.manual_seed(0)
    V, N = 4096, 128
    h, weight, targets = torch.randn(N, 8), 0.02 * torch.randn(V, 8), torch.randint(V // 2, (N,))
    h[:, 0], weight[0] = 1.0, 12.7 * torch.eye(8)[0]
    summed = ((h @ weight.T).softmax(dim=-1) - F.one_hot(targets, V)).half()      # the gradient by the logits
    W = weight.clone().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = kernels.cross_entropy(h[None], W, targets[None], V)
    (2.0 ** 16 * loss).backward()                                          # what a gradient scaler does
    exact = weight.double().requires_grad_()
    F.cross_entropy(h.double() @ exact.T, targets).backward()
    ours, exact = W.grad[V // 2:] / 2 ** 16, exact.grad[V // 2:]        # rows that are no target: nothing but softmax
    assert (ours - exact).norm() < 0.03 * exact.norm()


def test_without_gradients_the_fused_loss_only_adds_up(few_rows):
    h, weight, targets = torch.randn(2, 5, 8), torch.randn(128, 8), ids(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(kernels.cross_entropy(h, weight, targets, 70), GPT.loss(h, weight, targets, 70))


def test_the_fused_loss_accumulates_over_micro_steps(few_rows):
    model, idx = make().train(), ids(4, 20)
    for half in idx.split(2):
        (model(half, half) / 2).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.loss = kernels.cross_entropy
    for half in idx.split(2):
        (model(half, half) / 2).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], rtol=1e-4, atol=1e-6)


def test_restore_gives_the_plain_methods_back():
    model = make()
    model.compile_pieces()
    assert "qkv" in vars(model.blocks[0]) and model.loss is kernels.cross_entropy
    kernels.restore(model)
    assert "qkv" not in vars(model.blocks[0]) and model.loss is GPT.loss


