"""The fused depth mix of kernels.py against the plain loop of mudd.py, and where it could go wrong."""
import copy
from unittest import mock

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import kernels
from mudd import MUDD
from train import build
from tests.test_contract import SMALL, ids, make as make_arm

ARMS = {"multiway": {}, "static": dict(dynamic=False, multiway=False), "static multiway": dict(dynamic=False),
        "dynamic": dict(multiway=False), "dilated": dict(dilation=2), "periodic": dict(period=3, dilation=3),
        "dropped": dict(drop_ways="r", period=2), "dropped query": dict(drop_ways="q", multiway=False)}
arms = pytest.mark.parametrize("arm", ARMS)


@pytest.fixture
def uncompiled(monkeypatch):
    """The fused path with its pieces as they stand in the file: what the compiler makes of them is another test."""
    monkeypatch.setattr(kernels, "compiled", lambda function: function)


def make(**settings):
    return make_arm("mudd", **settings).double().train()


def gradients(model, loss):
    """{name: gradient} of a loss, or of a list of losses whose gradients are accumulated."""
    model.zero_grad()
    for part in loss if isinstance(loss, list) else [loss]:
        part.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same(a, b, atol=1e-12):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=name)


def plain_and_fused(**settings):
    plain = make(**settings)
    fused = copy.deepcopy(plain)
    fused.compile_pieces()
    return plain, fused


@arms
def test_value_and_every_gradient_are_the_plain_loops(arm, uncompiled):
    plain, fused = plain_and_fused(**ARMS[arm])
    with mock.patch.object(MUDD, "mix", side_effect=AssertionError("the plain mix ran")):
        loss = fused(ids(2, 20), ids(2, 20, seed=2))
    expected = plain(ids(2, 20), ids(2, 20, seed=2))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    same(gradients(fused, loss), gradients(plain, expected))


def test_the_gradients_are_those_of_finite_differences(uncompiled):
    x = torch.randn(3, 2, 3, 5, dtype=torch.float64, requires_grad=True)             # three states (B, T, D)
    A = [torch.randn(2, 3, 2, s, dtype=torch.float64, requires_grad=True) for s in (2, 3)]

    def run(x, *A):
        X = kernels.History(x[0], 3)
        out = []
        for state, weights in zip(x[1:], A):
            X.append(state)
            out += X.mix(weights, 1)
        return torch.stack([o.sin() for o in out])
    assert torch.autograd.gradcheck(run, (x, *A))
    W = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, W: kernels.normed_product(x, W, 1e-3), (x[0], W))


def test_two_forwards_before_a_backward_and_accumulation(uncompiled):
    plain, fused = plain_and_fused()
    batches = [(ids(2, 20, seed=s), ids(2, 20, seed=s + 1)) for s in (3, 5)]
    expected = gradients(plain, [plain(x, y) for x, y in batches])
    same(gradients(fused, [fused(x, y) for x, y in batches]), expected)
    same(gradients(fused, sum(fused(x, y) for x, y in batches)), expected)
    fused.zero_grad()
    for x, y in batches:
        fused(x, y).backward()
    same({name: p.grad for name, p in fused.named_parameters()}, expected)


def test_a_retained_graph_gives_the_same_gradients_twice(uncompiled):
    _, fused = plain_and_fused()
    loss = fused(ids(2, 20), ids(2, 20))
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in fused.named_parameters()}
    loss.backward()
    same({name: p.grad for name, p in fused.named_parameters()}, {name: 2 * g for name, g in once.items()})


def test_a_second_derivative_is_refused(uncompiled):
    _, fused = plain_and_fused()
    grads = torch.autograd.grad(fused.hidden(ids(1, 9)).sum(), fused.generators[0].a, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grads[0].sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant, uncompiled):
    plain, fused = plain_and_fused()
    layers = fused.layers
    fused.layers = lambda x, rope, cache: checkpoint(layers, x, rope, use_reentrant=reentrant)
    same(gradients(fused, fused(ids(2, 20), ids(2, 20))), gradients(plain, plain(ids(2, 20), ids(2, 20))))


def states_and_weights(count=4, N=6, D=5):
    """(states, weights of each mix) in float64."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(N, D, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(count)]
    A = [torch.randn(N, 2, i + 1, dtype=torch.float64, generator=generator).requires_grad_() for i in range(count)]
    return x, A


def chain(x, A, second=None, hook=None, apply=kernels.WriteAndMix.apply):
    """The sum of all mixtures squared, the buffer handed from mix to mix; `second` reads it too after mix 2."""
    buffer, total = kernels.state_buffer(len(x[0]), len(x), x[0].size(1), x[0].detach()).zero_(), 0
    for i in range(len(x)):
        buffer, *mixed = apply(buffer, x[i], A[i], i, 1)
        total = total + sum((m ** 2).sum() for m in mixed)
        if i == 2 and second:
            total = total + second(buffer)
        if i == 2 and hook:
            buffer.register_hook(hook)
    return total


def reference(x, A, second=lambda X: 0):
    total = sum((torch.einsum("ncs,snd->ncd", A[i], torch.stack(x[:i + 1])) ** 2).sum() for i in range(len(x)))
    return total + second(torch.stack(x[:3], dim=1))


def compare(ours, theirs, x, A):
    a, b = (torch.autograd.grad(total, [*x, *A]) for total in (ours, theirs))
    for ours, theirs in zip(a, b):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_a_second_reader_of_the_buffer_gets_the_right_gradients_or_an_error(uncompiled):
    """Reading it is counted in; keeping it for a backward pass is refused, since the next mix writes into it."""
    x, A = states_and_weights()
    compare(*(f(x, A, lambda X: X[:, :3].sum()) for f in (chain, reference)), x, A)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chain(x, A, lambda X: (X[:, :3] ** 3).sum()).backward()


def test_a_reader_of_the_last_buffer_does_not_have_its_gradient_written_into(uncompiled):
    x, A = states_and_weights()
    buffer = kernels.state_buffer(6, 1, 5, x[0].detach())
    buffer, *mixed = kernels.WriteAndMix.apply(buffer, x[0], A[0], 0, 1)
    gradient = torch.ones_like(buffer)
    torch.autograd.backward([buffer, *mixed], [gradient, *map(torch.ones_like, mixed)])
    assert gradient.eq(1).all()
    torch.testing.assert_close(x[0].grad, 1 + A[0].detach().sum(dim=(1, 2))[:, None].expand_as(x[0]))


def test_a_hook_on_the_buffer(uncompiled):
    """One that looks changes nothing; what one returns is copied before it is added to."""
    x, A = states_and_weights()
    compare(chain(x, A, hook=lambda g: None), reference(x, A), x, A)
    given = []
    compare(chain(x, A, hook=lambda g: given.append(g.clone()) or given[0]), reference(x, A), x, A)
    before = given[0].clone()
    assert torch.equal(given[0], before)


def test_one_checkpointed_mix_is_refused(uncompiled):
    """Whole `layers` may be checkpointed, see above; a single mix cannot, since the next one writes into its buffer."""
    x, A = states_and_weights()

    def apply(*args):
        return checkpoint(kernels.WriteAndMix.apply, *args, use_reentrant=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chain(x, A, apply=apply).backward()


@pytest.mark.parametrize("fused", [False, True])
def test_what_the_mixes_keep_for_the_backward_pass(fused, uncompiled):
    """At most L + 1 states and 4 mixtures of B T D, beside the weights, whatever the number of layers."""
    B, T, D, L = 2, 8, 512, 12
    model = build("mudd", **SMALL | dict(n_layer=L, dynamic=False)).train()
    if fused:
        model.compile_pieces()
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t
    states = [torch.randn(B, T, D, requires_grad=True) for _ in range(L + 1)]
    weights = [torch.randn(B, T, 4 if n + 1 < L else 1, n + 2, requires_grad=True) for n in range(L)]
    X, out = model.history(states[0]), []
    with saved_tensors_hooks(pack, lambda t: t):
        for n in range(L):
            X.append(states[n + 1])
            out.append(model.mix(n, weights[n], X))
    if fused:
        kept[X.buffer.data_ptr()] = X.buffer
    weight_storages = {w.untyped_storage().data_ptr() for w in weights}
    size = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weight_storages)
    assert L * B * T * D * 4 < size <= (L + 1 + 4) * B * T * D * 4


def test_the_generators_hidden_layer_keeps_its_input_alone():
    kept = []
    x, W = torch.randn(2, 8, 512, requires_grad=True), torch.randn(6, 512, requires_grad=True)
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        kernels.normed_product(x, W, 1e-6)
    assert {t.untyped_storage().data_ptr() for t in kept if t.numel() >= x.numel()} == {x.untyped_storage().data_ptr()}


def test_no_buffer_outlives_its_graph(uncompiled):
    import gc
    import weakref
    _, fused = plain_and_fused()
    made, plain_buffer = [], kernels.state_buffer
    with mock.patch.object(kernels, "state_buffer", lambda *a: made.append(weakref.ref(t := plain_buffer(*a))) or t):
        gc.disable()
        try:
            fused(ids(2, 20), ids(2, 20)).backward()
            assert len(made) == 2 and all(ref() is None for ref in made)
        finally:
            gc.enable()


def test_eval_mode_restore_and_copies_use_the_plain_loop(uncompiled):
    plain, fused = plain_and_fused()
    with mock.patch.object(kernels, "History", side_effect=AssertionError("fused")):
        assert torch.equal(fused.eval()(ids(2, 20)), plain.eval()(ids(2, 20)))
        with pytest.raises(AssertionError, match="fused"):
            copy.deepcopy(fused).train()(ids(2, 20))
        kernels.restore(fused)
        fused.train()(ids(2, 20))


def test_under_bf16_autocast_the_fused_mix_stays_in_float32(uncompiled):
    plain, fused = (m.float() for m in plain_and_fused())
    with torch.autocast("cpu", torch.bfloat16):
        a, b = plain(ids(2, 20), ids(2, 20)), fused(ids(2, 20), ids(2, 20))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    X = kernels.History(torch.randn(2, 8, 5), 2)
    x = torch.randn(2, 8, 5)
    X.append(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, = X.mix(torch.tensor([0.0, 1.0]).view(1, 1, 1, 2), 1)
    assert torch.equal(mixed, x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2 ** -6)])
def test_the_compiled_mix_alone(dtype, tolerance):
    """Mixtures and gradients against the plain formula in float64, to a part of the largest entry: 1e-6 for float32
    states, and for bf16 ones two of their steps, since a state's gradient is rounded at every layer that adds to it."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 8, 32, generator=generator).to(dtype).requires_grad_() for _ in range(5)]
    weights = [torch.randn(2, 8, 4, n + 2, generator=generator).to(dtype).requires_grad_() for n in range(4)]
    X, mixed = kernels.History(states[0], 5), []
    for x, A in zip(states[1:], weights):
        X.append(x)
        mixed += X.mix(A, 1)
    exact = [t.detach().double().requires_grad_() for t in (*states, *weights)]
    expected = [sum(A[:, :, c, s, None] * exact[s] for s in range(n + 2))
                for n, A in enumerate(exact[5:]) for c in range(4)]
    d = [torch.randn(2, 8, 32, generator=generator).to(dtype) for _ in mixed]
    ours = torch.autograd.grad(mixed, [*states, *weights], d)
    theirs = torch.autograd.grad(expected, exact, [g.double() for g in d])
    for a, b in zip([*mixed, *ours], [*expected, *theirs]):
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.slow
def test_compiled_pieces_serve_all_layers_within_the_recompile_limit():
    """Twelve layers of every length and width: few graphs, and none that falls back to eager for want of room."""
    torch._dynamo.reset()
    kernels.compiled.cache_clear()
    with mock.patch.object(torch._dynamo.config, "fail_on_recompile_limit_hit", True):
        model = build("mudd", **SMALL | dict(n_layer=12)).train()
        model.compile_pieces()
        model(ids(2, 20), ids(2, 20)).backward()
        few = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert few <= 10, few
        model = build("mudd", **SMALL | dict(n_layer=12, reallocate_ffn=True, d_ff=96)).train()
        model.compile_pieces()
        model(ids(2, 20), ids(2, 20)).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= few + 12
