"""The schedules, on a small WhiteMatter in fp64 whose routers are moved off 0."""
import math

import pytest
import torch

import cyclic
import model as baseline
from cyclic import Channels, iterate, past_attention, publish, scheduled
from tests.test_contract import ids
from tools import draw, schedules
from tools.schedules import by_pass
from train import build

SMALL = dict(vocab_size=70, block_size=32, n_layer=3, n_head=4, n_kv_head=2, n_embd=16, head_dim=4, d_ff=24, k=2)
VARIANTS = pytest.mark.parametrize("variant", ["release", "paper"])
SCHEDULES = [("autoregressive", 1), ("jacobi", 1), ("cyclic", 4), ("contiguous", 4)]
pytestmark = pytest.mark.usefixtures("one_thread")


def make(noise=0.3, **settings):
    model = build("whitematter", **SMALL | settings).double()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data += noise * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model.eval()


def run(model, idx, schedule, groups=1, passes=1, grad_passes=1):
    """The normed output (B, T, D) by a schedule."""
    with scheduled(model.config, schedule=schedule, groups=groups, passes=passes, grad_passes=grad_passes):
        return model.hidden(idx)


def start(model, T, batch=2):
    """x, positions, past: what run_schedule hands to a schedule."""
    past = Channels(*model.boundary(batch))
    return model.embed(ids(batch, T)), torch.arange(T) + past.k.size(3), past


def exact_prefixes(model, idx, schedule, groups, passes):
    """After each of so many passes: how many first tokens equal the exact run's."""
    with torch.no_grad():
        exact = run(model, idx, "autoregressive")
    errors = [(h - exact).abs().amax(dim=(0, 2)) for h in by_pass(model, idx, schedule, groups, passes)]
    return [(error < 1e-9).long().cumprod(0).sum().item() for error in errors]


def gradients(model, output, weights):
    """Gradients of every parameter (None as zeros) for a random linear loss on the output."""
    found = torch.autograd.grad((output * weights).sum(), list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found)]


def close(xs, ys, rtol=1e-9):
    return all((x - y).norm() <= rtol * max(x.norm(), y.norm(), 1e-6) for x, y in zip(xs, ys, strict=True))


# ------------------------------------------------------------------------------------------------ causality and masks


@VARIANTS
def test_a_token_does_not_read_its_own_slot(variant):
    """Noise in the slot of token 5 changes no output up to 5, and that of 6."""
    model = make(variant=variant)
    x, positions, past = start(model, 9)
    _, full = cyclic.autoregressive(model, x, positions, past)
    noise = torch.randn_like(full.k[:, :, :, :1])
    a, _ = model.stack(x, positions, full)
    b, _ = model.stack(x, positions, full.put(positions[5:6], Channels(noise, noise)))
    assert torch.equal(a[:, :6], b[:, :6]) and (a[:, 6] - b[:, 6]).abs().max() > 1e-3


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], [1, 4], [2], [0, 3], [4, 5], [0]])
@pytest.mark.parametrize("window", [2, math.inf])
def test_past_attention_is_the_explicit_softmax_over_smaller_positions(positions, window):
    """A query without a past gets exactly 0, and the gradients are finite; nobody reads the last slot."""
    q, k, v = (torch.randn(2, h, n, 8, requires_grad=True) for h, n in ((4, len(positions)), (2, 6), (2, 6)))
    output = past_attention(q, k, v, Channels(k[None], v[None]).seen_from(torch.tensor(positions), window))
    K, V = baseline.repeat_kv(k, q), baseline.repeat_kv(v, q)
    for row, i in enumerate(positions):
        past = slice(max(0, i - min(window, i)), i)
        scores = (q[:, :, row:row + 1] @ K[:, :, past].transpose(-2, -1)) / 8 ** 0.5
        torch.testing.assert_close(output[:, :, row:row + 1], scores.softmax(-1) @ V[:, :, past])
        assert i > 0 or output[:, :, row].eq(0).all()
    output.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v)) and v.grad[:, :, 5].eq(0).all()


def test_the_first_token_without_slots_gets_0_and_with_a_dummy_reads_it_alone():
    q, none = torch.randn(2, 4, 1, 4), torch.zeros(2, 2, 0, 4)
    assert past_attention(q, none, none, None).eq(0).all()
    x, positions, past = start(make(variant="paper"), 1)
    output = past_attention(q.double(), past.k[1], past.v[1], past.seen_from(positions))
    torch.testing.assert_close(output, baseline.repeat_kv(past.v[1], q))
    assert positions.tolist() == [1] and past.k.size(3) == 1


# ---------------------------------------------------------------------------------------------------------- schedules


@VARIANTS
@pytest.mark.parametrize("T", [9, 8])
def test_limits_of_the_schedules(variant, T):
    """One strided group is Jacobi, bit for bit; groups of one token are the exact run; more groups than tokens too"""
    model, idx = make(variant=variant), ids(2, T)
    for passes in (1, 2, 3):
        assert torch.equal(run(model, idx, "cyclic", 1, passes), run(model, idx, "jacobi", 5, passes))
    exact = run(model, idx, "autoregressive")
    for schedule in ("cyclic", "contiguous"):
        for groups in (T, T + 1, 50):
            assert (run(model, idx, schedule, groups) - exact).abs().max() < 1e-11


@pytest.mark.parametrize("variant, T, g", [("release", 11, 3), ("paper", 8, 4), ("release", 3, 4), ("paper", 2, 4)])
def test_exact_prefixes_after_every_pass(variant, T, g):
    """P tokens by Jacobi and no more, min(T, p g) by cyclic, and contiguous groups within their bounds."""
    model, idx, every = make(variant=variant), ids(2, T), range(1, T + 1)
    assert exact_prefixes(model, idx, "jacobi", 1, T) == list(every)
    assert exact_prefixes(model, idx, "cyclic", g, T) == [min(T, p * g) for p in every]
    contiguous = exact_prefixes(model, idx, "contiguous", g, T)
    assert all(found >= p for found, p in zip(contiguous, every))
    assert contiguous[T - min(g, T)] == T                                 # after T - g + 1 passes
    assert contiguous[0] < min(T, g) or T <= g                            # strided is ahead from the first pass on


def test_the_loss_of_every_pass_is_that_of_a_run_with_so_many_passes():
    """What the tables are made of, and that one token needs no schedule."""
    model, idx = make(), ids(2, 9)
    for schedule, groups in SCHEDULES[1:]:
        for p, output in enumerate(by_pass(model, idx, schedule, groups, 3), 1):
            assert torch.equal(output, run(model, idx, schedule, groups, p))
        assert torch.equal(run(model, idx[:, :1], schedule, groups, 3), run(model, idx[:, :1], "autoregressive"))


def reference(model, x, positions, past, groups, passes, grad_passes):
    """The definition, slowly: before every group all channels are built again from all states."""
    T, H = x.size(1), [x[:, i].expand(model.n_sources, *x[:, i].shape) for i in range(x.size(1))]      # (S, B, D) each
    for p in range(passes):
        if p == passes - grad_passes and p > 0:
            H = [h.detach() for h in H]
        outputs = [None] * T
        for group in groups:
            full = past.join(publish(model, torch.stack(H, dim=2), positions))
            for i in range(T)[group]:
                at, n = positions[i:i + 1], int(positions[i])
                earlier = Channels(full.k[:, :, :, :n], full.v[:, :, :, :n])
                outputs[i], states = model.stack(x[:, i:i + 1], at, earlier)
                H[i] = states[:, :, 0]                                    # `full` stands until the group is through
    return torch.cat(outputs, dim=1)


@VARIANTS
@pytest.mark.parametrize("schedule, g", [("jacobi", 1), ("cyclic", 3), ("contiguous", 3)])
@pytest.mark.parametrize("passes, grad_passes", [(1, 1), (3, 1), (3, 2), (2, 2)])
def test_outputs_and_gradients_are_those_of_the_slow_definition(variant, schedule, g, passes, grad_passes):
    """Incremental refresh, token order, detached states at the boundary; T = 8 is not divisible by 3."""
    model = make(variant=variant)
    x, positions, past = start(model, 8)
    groups = cyclic.GROUPS[schedule](8, g)
    fast, _ = iterate(model, x, positions, past, groups, passes, grad_passes)
    slow = reference(model, x, positions, past, groups, passes, grad_passes)
    assert (fast - slow).abs().max() < 1e-9
    weights = torch.randn_like(fast)
    grads = [torch.autograd.grad((output * weights).sum(), list(model.parameters()), retain_graph=True,
                                 allow_unused=True) for output in (fast, slow)]
    for (name, _), a, b in zip(model.named_parameters(), *grads):
        assert (a is None) == (b is None) and (a is None or close([a], [b], 1e-7)), name


def test_only_the_last_passes_carry_gradients_and_memory_does_not_grow_with_the_others():
    model, idx, stack = make(), ids(2, 12), type(make()).stack
    saved = []
    for no_grad, grad in ((0, 2), (1, 2), (5, 2), (2, 1)):
        modes, kept = [], []

        def counted(*args):
            modes.append(torch.is_grad_enabled())
            return stack(model, *args)

        def pack(tensor):
            kept.append(tensor.nbytes)                          # an address may be used again: count every one
            return tensor
        model.stack = counted
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run(model, idx, "cyclic", 4, no_grad + grad, grad)
        del model.stack
        assert modes == [False] * 4 * no_grad + [True] * 4 * grad and output.requires_grad
        saved.append(sum(kept))
    assert saved[1] == saved[2] > saved[3]
    with torch.no_grad():
        assert not run(model, idx, "cyclic", 4, 3, 2).requires_grad


# ---------------------------------------------------------------------------------------------------------- gradients


@VARIANTS
@pytest.mark.parametrize("schedule, g, passes", [("jacobi", 1, 9), ("cyclic", 4, 3), ("contiguous", 4, 6),
                                                 ("cyclic", 9, 1)])
def test_enough_gradient_passes_give_backpropagation_through_the_exact_run(variant, schedule, g, passes):
    model, idx = make(variant=variant), ids(2, 9)
    weights = torch.randn(2, 9, 16, dtype=torch.float64)
    exact = gradients(model, run(model, idx, "autoregressive"), weights)
    assert close(gradients(model, run(model, idx, schedule, g, passes, passes), weights), exact)
    assert close(gradients(model, run(model, idx, schedule, g, passes + 2, passes + 2), weights), exact)


# ------------------------------------------------------------------------------------------------- chunks and numerics


@VARIANTS
@pytest.mark.parametrize("first", [1, 5, 8])
def test_with_a_cache_only_the_new_tokens_are_iterated(variant, first):
    """The first passes x g of them are exact wherever they start; the prefix stays as it was."""
    model, idx = make(variant=variant), ids(2, 20)
    exact = run(model, idx, "autoregressive")
    cache = model.new_cache(2)
    with model.exactly():
        model.hidden(idx[:, :first], cache)
    before = cache.k.clone()
    with scheduled(model.config, schedule="cyclic", groups=3, passes=2):
        error = (model.hidden(idx[:, first:], cache) - exact[:, first:]).abs().amax(dim=(0, 2))
    assert error[:6].max() < 1e-9 < error[6]
    end = first + model.has_dummy
    assert torch.equal(cache.k[:, :, :, :end], before[:, :, :, :end]) and cache.length == 20


@pytest.mark.parametrize("schedule, groups", SCHEDULES)
def test_under_bf16_autocast_channels_are_cast_once(schedule, groups):
    """Keys are normed and turned in fp32, then stored in the dtype of the values; every schedule trains and decodes."""
    model = make(noise=0.03).float().train()
    with torch.autocast("cpu", torch.bfloat16):
        channels = publish(model, torch.randn(3, 2, 3, 16), torch.arange(1, 4))
        assert channels.k.dtype == channels.v.dtype == torch.bfloat16
        output = run(model, ids(2, 9), schedule, groups, 3, 2)
    output.sum().backward()
    assert output.dtype == torch.float32 and all(p.grad.isfinite().all() for p in model.parameters())
    cache = model.new_cache(2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), scheduled(model.config, schedule=schedule, passes=9):
        pieces = torch.cat([model.hidden(piece, cache) for piece in ids(2, 9).split([5, 1, 3], dim=1)], dim=1)
    assert (pieces - run(model, ids(2, 9), "autoregressive")).abs().max() < 0.05         # which is in fp32


def test_casts_made_without_gradients_do_not_reach_the_passes_with_gradients(monkeypatch):
    """In torch 2.9 they would, and the weights would get no gradient. So the casts are dropped in between."""
    model, events, stack = make().float().train(), [], type(make()).stack
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (events.append("clear"), clear()))
    model.stack = lambda *args: (events.append(torch.is_grad_enabled()), stack(model, *args))[1]
    with torch.autocast("cpu", torch.bfloat16):
        run(model, ids(2, 9), "jacobi", 1, 3, 1).sum().backward()
    assert events == [False, False, "clear", True, "clear"]               # the last by autocast's own end
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


# ---------------------------------------------------------------------------------------------- settings and programs


def test_the_schedule_is_read_at_every_forward_and_put_back():
    model, idx = make(), ids(2, 12)
    before = vars(model.config).copy()
    assert not torch.equal(run(model, idx, "jacobi"), run(model, idx, "cyclic", 4))
    with model.exactly():
        assert torch.equal(model.hidden(idx), run(model, idx, "autoregressive"))
    with pytest.raises(ValueError, match="33 tokens do not fit"):
        run(model, ids(2, 33), "jacobi")
    assert vars(model.config) == before


@pytest.mark.parametrize("settings, words", [
    (dict(schedule="cyclical"), "schedule=cyclical: choose one of autoregressive"), (dict(groups=0), "groups=0: give"),
    (dict(passes=0), "passes=0: give"), (dict(grad_passes=4), "grad_passes=4: give a whole number from 1 to passes=3"),
    (dict(grad_passes=0), "grad_passes=0"), (dict(block_size=1), "block_size=1: .* at least 2")])
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        build("whitematter", **SMALL | settings)


def test_a_cache_that_is_too_small_is_refused():
    model = make()
    with pytest.raises(ValueError, match="room for 8 tokens and was given 9: ask new_cache"):
        model(ids(2, 9), cache=model.new_cache(2, max_tokens=8))


def test_the_picture_is_drawn_by_the_schedules_themselves(capsys, monkeypatch):
    """Cyclic, T = 5 and g = 2: in step 2 the tokens 1 and 3 read fresh cells 0, 2, 4; stars grow by g in each pass."""
    rows = [line.split()[1:] for line in draw.picture(cyclic.run_schedule, "cyclic", 5, 2, 2)[2:]]
    drawn = ["".join(row) for row in rows]
    assert drawn == ["[1]*0[1]0[1]", "1*[1]*1[1]1", "[2]*1*[2]*1[2]", "2*[2]*2*[2]*2"]
    monkeypatch.setattr("sys.argv", ["cyclic.py", "T=7", "g=3"])
    draw.main(cyclic.run_schedule)
    text = capsys.readouterr().out
    assert text.count("[") > 60 and "counted 1 2 3 4 5 6 7" in text and "counted 3 6 7" in text


@pytest.mark.parametrize("word, said", [("T=0", "T=0 g=4: give"), ("runs/x", "tools.schedules"), ("g=x", "g=x")])
def test_bad_words_for_the_picture_give_one_line(word, said, monkeypatch):
    monkeypatch.setattr("sys.argv", ["cyclic.py", "--show", word])
    with pytest.raises(SystemExit, match=said):
        draw.main(cyclic.run_schedule)


def test_the_pass_by_pass_outputs_of_lckv_end_with_its_upper_layers():
    model, idx = build("lckv", **{key: value for key, value in SMALL.items() if key != "k"}, w=2), ids(2, 9)
    for p, output in enumerate(by_pass(model, idx, "jacobi", 1, 3), 1):
        torch.testing.assert_close(output, run(model, idx, "jacobi", 1, p))


def test_the_tables_name_passes_and_times_and_leave_the_model_as_it_was(capsys, monkeypatch):
    monkeypatch.setattr(schedules, "PASSES", 4)
    model = make(schedule="jacobi", passes=2, grad_passes=1, block_size=6)
    before = vars(model.config).copy()
    schedules.tables(model, ids(2, 6), ids(2, 6, seed=2))
    text = capsys.readouterr().out
    assert vars(model.config) == before and "stack" not in vars(model)
    assert text.count("jacobi ") == 2 and text.count("contiguous ") == 4 and "trained: jacobi" in text
