"""
The inside of a model, for tools.probe: attention patterns, states at every depth, direct reads, and what weighs them.

A forward in eval mode fills the model's trace. Beside it `look` keeps what each block was given by its attention, so
that a pattern computed from the traced q and k can be held against it, and what each block put out: the states.
"""
import contextlib
import functools
import itertools

import torch

from baselines.feedback import Feedback
from baselines.fusedkv import FusedKV
from baselines.lime import LIMe
from baselines.shortcuts import Shortcut
from cyclic import FeedbackGPT
from depth_attention import DepthAttention, LoopedDepthAttention, sources
from model import causal_mask, repeat_kv
from mudd import MUDD, mixed_ways
from value_residual import ValueResidual
from whitematter import StaticRouter, WhiteMatter

# ---------------------------------------------------------------------------------------------------------------------
# Attention, from the trace


def pattern(q, k, seen, own_k=None):
    """softmax(q k^T / sqrt(d)) over the slots that are seen; a token that sees none has a row of zeros. q (B, H, T, d),
    k (B, Hkv, S, d), seen (T, S) -> (B, H, T, S). own_k: what a token has in the place of its own slot's key."""
    scores = q @ repeat_kv(k, q).transpose(-2, -1)
    if own_k is not None:
        scores.diagonal(dim1=-2, dim2=-1).copy_((q * repeat_kv(own_k, q)).sum(dim=-1))
    A = (scores / q.size(-1) ** 0.5).masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return A.masked_fill(~seen.any(dim=1, keepdim=True), 0)


def seen_by(model, n, T):
    """(T, S): the slots that T tokens may read in layer n. Where layers feed back: those strictly before the token."""
    if isinstance(model, FeedbackGPT) and n in getattr(model, "condensed", range(model.config.n_layer)):
        dummy = int(model.has_dummy)
        distance = torch.arange(T)[:, None] + dummy - torch.arange(T + dummy)
        return (distance > 0) & (distance <= getattr(model, "window", torch.inf))
    return causal_mask(T, T, "cpu")


def attention(model, n, trace):
    """Layer n's pattern (B, H, T, S) and what its output projection is given (B, H, T, d), from the trace alone."""
    q, k, v = (trace[name][n] for name in "qkv")
    seen = seen_by(model, n, q.size(2)).to(q.device)
    A = pattern(q, k, seen, trace["k0"][n] if "k0" in trace else None)
    place = getattr(model, "place", None)                                # of a shortcut
    if place == "matrix" and n > 0:
        A = model.lam1[n] * pattern(trace["q"][0], trace["k"][0], seen) + model.lam2[n] * A
    u = A @ repeat_kv(v, q)
    if "v0" in trace:                                                    # recurrent: to itself a token is its input
        u = u + A.diagonal(dim1=-2, dim2=-1)[..., None] * repeat_kv(trace["v0"][n] - v, q)
    if place in ("output", "neutreno") and n > 0:
        handed_up = trace["v"][0] - (v if place == "neutreno" else 0)
        u = model.lam1[n] * repeat_kv(handed_up, q) + model.lam2[n] * u
    return A, u


def own_value(model, n, trace):
    """The value that layer n itself makes of its input, before any mix; None where it makes none."""
    block, x = model.blocks[order(model)[n]], trace["x"][n]
    if "v0" in trace:
        return trace["v0"][n]
    if not hasattr(block, "wv"):
        return None
    return block.v(getattr(block, "norm1_v", block.norm1)(x[2 if len(x) == 4 else 0]))


# ---------------------------------------------------------------------------------------------------------------------
# Looking, and cutting


def order(model):
    """The block of each step of a forward. A looped block has several steps; everything here goes by step."""
    return [l for l, _ in getattr(model.config, "steps", enumerate(range(model.config.n_layer)))]


@contextlib.contextmanager
def finishing(model, instead):
    """While open, a call finish(x, attention) of block l is a call instead(l, finish, x, attention)."""
    for l, block in enumerate(model.blocks):
        block.finish = functools.partial(instead, l, block.finish)
    try:
        yield
    finally:
        for block in model.blocks:
            del block.finish


def by_step(model, pieces, T, dim):
    """pieces[l]: what the calls of block l gave, some tokens each -> for each step its T tokens, of the last pass."""
    blocks, steps = order(model), []
    for n, l in enumerate(blocks):
        whole, rounds = torch.cat(pieces[l], dim=dim), blocks.count(l)
        whole = whole.narrow(dim, whole.size(dim) - rounds * T, rounds * T)
        steps.append(whole.split(T, dim)[blocks[:n].count(l)])
    return steps


@torch.no_grad()
def look(model, idx):
    """idx (B, T) -> the trace, states (one more than steps), and what each step's attention gave to its `finish`."""
    given, put_out = [[] for _ in model.blocks], [[] for _ in model.blocks]

    def keep(l, finish, x, attention):
        given[l].append(attention)
        put_out[l].append(finish(x, attention))
        return put_out[l][-1]

    model.trace = {}
    try:
        with finishing(model, keep):
            model.hidden(idx)
        if not all(given):
            raise ValueError(f"{type(model).__name__} has blocks whose `finish` is never called, which is where the "
                             f"probe looks inside: it has nothing to show of this model")
        return model.trace, [model.embed(idx), *by_step(model, put_out, idx.size(1), 1)], \
            by_step(model, given, idx.size(1), 2)
    finally:
        model.trace = None


def direct_reads(model, idx):
    """Who reads whom, from gradients. idx (B, T) -> own and past, (N + 1, N + 1) each: rows are the readers, layers
    0 .. N-1 and the head, columns the depths 0 .. N.

    "Directly" means: not by way of what another layer puts out. So whatever leaves a block is cut from the graph, and
    stands as a leaf for all that read it. The reader is y, what layer n puts out for the last token, residual included.
    With w random, g = d<w, y> / d leaf is followed to the states of that token (own) and of those before it (past).
    Listed is the root of sum |g|^2 |h|^2, of which the squares of a row add up to 1: so much of the movement of y comes
    by this read when every state is shaken independently by the same small part of its norm. Zero is exactly zero: no
    path. Feedback models run token by token here, so that a past token's upper layers are leaves too.
    """
    made, T = [[] for _ in model.blocks], idx.size(1)

    def cut(l, finish, x, attention):
        y = finish(x, attention)
        made[l].append((y, y.detach().requires_grad_()))
        return made[l][-1][1]

    h0 = model.embed(idx).detach().requires_grad_()
    with model.exactly(), finishing(model, cut):
        top = model.layers(h0, model.rope(torch.arange(T, device=idx.device)))
    readers = [*by_step(model, [[y for y, _ in calls] for calls in made], T, 1), top]
    leaves = [[leaf for _, leaf in calls] for calls in made]
    size = [h.detach().norm(dim=-1) for h in (h0, *by_step(model, leaves, T, 1))]                     # |h|: (B, T) each
    w = torch.randn(top[:, -1].shape, generator=torch.Generator().manual_seed(0)).to(top)
    own, past = (torch.zeros(len(readers), len(size), dtype=torch.float64) for _ in range(2))
    for n, y in enumerate(readers):
        g0, *g = torch.autograd.grad((w * y[:, -1]).sum(), [h0, *itertools.chain(*leaves)], retain_graph=True,
                                     materialize_grads=True)
        g = iter(g)
        g = [g0, *by_step(model, [[next(g) for _ in calls] for calls in leaves], T, 1)]
        for m in range(len(size)):
            moved = (g[m].norm(dim=-1) * size[m]).cpu().double().square().mean(dim=0)              # (T,)
            own[n, m], past[n, m] = moved[-1], moved[:-1].sum()
    total = (own + past).sum(dim=1, keepdim=True)
    return (own / total).sqrt(), (past / total).sqrt()


# ---------------------------------------------------------------------------------------------------------------------
# What a model has learned to read: tables (tokens, rows, columns), one token if static, NaN where nothing is read


def connections(model, trace, states):
    """MUDD: A_ij times the mean norm of X_j, for each way; without the norm the large late states would look small."""
    norms, L = torch.stack([x.norm(dim=-1).mean() for x in states]), model.config.n_layer
    multiway = model.config.multiway
    ways = "qkvr" if multiway else ["q, k, v, r"]
    tokens = max(A.size(1) for A in trace["weights"].values())
    tables = {way: norms.new_full((tokens, L + 1, L + 1), torch.nan) for way in ways}
    for n, A in trace["weights"].items():                                # after layer n, so read by layer n + 1
        for c, way in enumerate(mixed_ways(model.config, n) if multiway else ways[:A.size(2)]):
            tables[way][:, n + 1, model.sources[n]] = A[0, :, c, 0] * norms[model.sources[n]]
    return tables


def depth_weights(model, trace, states):
    """Depth-Attention: the softmax weights over layers, mean over KV heads."""
    steps, config = model.config.steps, model.config
    table = states[0].new_full((states[0].size(1), len(steps), len(steps)), torch.nan)
    for i, (l, number) in enumerate(steps):
        read = sources(number, config.stride, config.recent)
        if isinstance(model, LoopedDepthAttention):
            read = [steps.index((l, r)) for r in read]
        table[:, i, [*read, i]] = trace["weights"][i][0, :, 0].mean(dim=1)
    return {"values": table}


def routed(model, trace, states):
    """LIMe: how large the part of the table is that leads from layer j to layer l: |W_l[h, (j, :)]|, mean over h."""
    table = states[0].new_full((1, model.config.n_layer, model.config.n_layer), torch.nan)
    for l, W in trace["weights"].items():
        table[0, l, :l + 1] = W.view(W.size(-2), l + 1, -1).norm(dim=-1).mean(dim=0)
    return {"keys and values" if model.config.route == "kv" else "values": table}


def router(model, trace, states):
    """WhiteMatter: A^r, the router's weights of each channel over the states."""
    tables, u = {}, torch.stack(states[:model.n_sources], dim=2)           # (B, T, S, D)
    for name, r in (("keys", model.keys), ("values", model.values)):
        A = r.router(r.pre(u))[0]                                        # (T, k, S)
        tables[name] = A[:1] if type(r.router) is StaticRouter else A
    return {"both, all channels": tables["keys"]} if model.config.router == "shared" else tables


def memory(model, trace, states):
    """Feedback Transformer: softmax(w)."""
    return {"keys and values": model.w.softmax(dim=0)[None, None]}


def fused(model, trace, states):
    """FusedKV: the coefficients of the first and of the middle layer, mean over channels."""
    L, tables = model.config.n_layer, {}
    for name, first, middle in (("keys", "a", "b"), ("values", "c", "e")):
        tables[name] = states[0].new_full((1, L, L), torch.nan)
        for i, block in enumerate(model.blocks[model.config.n_storage:], model.config.n_storage):
            for coefficient, j in ((first, 0), (middle, model.config.n_storage - 1)):
                tables[name][0, i, j] = tables[name][0, i, j].nan_to_num() + getattr(block, coefficient).mean()
    return tables


TABLES = {   # class: tables, what their numbers are, their short name, rows, columns
    MUDD: (connections, "connection weights times the mean norm of the source", "weight x norm", "reading layer",
           "depth read"),
    DepthAttention: (depth_weights, "attention over depth, mean of heads", "weight", "reading layer", "value of layer"),
    LIMe: (routed, "norms of the routing weights, mean of heads", "norm", "reading layer", "heads of layer"),
    WhiteMatter: (router, "router weights", "weight", "channel", "depth mixed in"),
    Feedback: (memory, "softmax weights of the memory", "weight", "channel", "depth mixed in"),
    FusedKV: (fused, "fusing coefficients, mean over channels", "coefficient", "reading layer", "cache of layer"),
}


def tables_of(model, trace, states):
    """{title: (2, rows, columns)}: mean over tokens, and mean of the square, NaN where a table is static."""
    make = next((row[0] for cls, row in TABLES.items() if isinstance(model, cls)), lambda *_: {})
    moments = {}
    for title, table in make(model, trace, states).items():
        table = table.cpu().double()
        square = table.square().mean(dim=0) if len(table) > 1 else torch.full_like(table[0], torch.nan)
        moments[title] = torch.stack((table.mean(dim=0), square))
    return moments


def lambdas(model):
    """{"lam1": weights of what is handed up, "lam2": of the layer's own}, by layer, None where no mix takes place."""
    if isinstance(model, ValueResidual):
        pair, start = model.mix_weights(), model.config.source + 1
    elif isinstance(model, Shortcut):
        pair, start = (model.lam1, model.lam2), 0 if model.place == "hidden" else model.config.source + 1
    else:
        return {}
    return {name: [None] * start + lam.tolist()[start:] for name, lam in zip(("lam1", "lam2"), pair)}

