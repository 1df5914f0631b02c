"""
Cyclic iteration: how to run, and to train in parallel, a model whose layers read past tokens at any depth.

In a feedback model (WhiteMatter, Feedback Transformer, LCKV) the lowest layer of a token may read what the highest made
of the token before it. So a token must wait for the one before it to be finished, and the exact run goes token by
token. But "every token reads the finished past" is an equation in the channels, the keys and values that all tokens
publish. It is triangular in the tokens, so it has one solution, and iteration finds it from any start: compute all tokens,
publish, again. A schedule says which tokens of a pass see what others publish in the same pass.

    Zhang and Ren, WHITEMATTER, arXiv 2608.18486; Jacobi passes, the last few with gradients: Wu and Tu, arXiv 2405.10637

    paper                        here
    X, the embeddings            x                 (B, T, D)
    H, states at S depths        states            (S, B, n, D)      of some n of the tokens
    KV                           channels          k, v (k, B, Hkv, N, d) and the positions (N,) of the N slots
    G_c, group c                 group             a slice of 0..T-1: tokens that are computed together
    n + b passes                 passes - grad_passes, grad_passes

Which pass made what a token reads? T = 6 tokens, second pass, g = 3 groups, the last of which is about to run:

    jacobi      1 1 1 1 1 1    one group of all tokens            after p passes the first p tokens are exact
    cyclic      2 2 1 2 2 1    {0 3} {1 4} {2 5}, strided         the first p g; T/g passes suffice
    contiguous  2 2 2 2 1 1    {0 1} {2 3} {4 5}, the control     p at least; T - g + 1 passes suffice

Only the first token of a strided round reads a stale neighbour. `python cyclic.py --show T=12 g=4` draws every step.

Cost: a pass costs the FLOPs of one forward, by any schedule. One behind the other stand T stacks of layers in the exact
run, p by Jacobi, p g by cyclic and contiguous groups, T/g tokens each. Only passes with gradients keep activations.

What breaks without each part: with a token's own channel in view, its states would depend on themselves. Without the
re-projection at the boundary, one gradient pass would leave the projections of the channels without a gradient. Written in place,
channels would change under the attention that has saved them for its backward pass.

Where paper, release and this file differ. A chunk behind a cached prefix is iterated by any schedule against that frozen
prefix; the release has Jacobi alone. Its groups start with the chunk's first token: the partition is that of the absolute
position mod g, the order is such that the first p g new tokens are exact. For T < g, g = T. A token alone runs exactly.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import GPT, GPTConfig


def autoregressive(model, x, positions, past):
    """The ground truth: token by token, each reading the finished channels of all tokens before it."""
    outputs, new = [], []
    for x_i, i in zip(x.split(1, dim=1), positions.split(1)):             # (B, 1, D), (1,)
        output, states = model.stack(x_i, i, past.join(*new))
        new.append(Channels(*model.pool(states, i), i))
        outputs.append(output)
    return torch.cat(outputs, dim=1), new[0].join(*new[1:])


def iterate(model, x, positions, past, groups, passes, grad_passes):
    """`passes` times all tokens, group after group. The last `grad_passes` carry gradients, which flow from pass to pass
    through the channels. Before them stands the boundary: there the states are constants, and are projected again."""
    states = x.expand(model.sources, *x.shape)                            # (S, B, T, D): the embedding at every depth
    boundary = passes - grad_passes if torch.is_grad_enabled() else 0
    for p in range(passes):
        with torch.set_grad_enabled(torch.is_grad_enabled() and p >= boundary):
            if p == boundary > 0:
                torch.clear_autocast_cache()                              # older torch reuses casts that have no gradient
                states = in_order([states for _, states in done], groups)
            if p in (0, boundary):
                channels = past.join(Channels(*model.pool(states, positions), positions))
            done = []
            for group in groups:
                output, states = model.stack(x[:, group], positions[group], channels)
                channels = channels.put(positions[group], *model.pool(states, positions[group]))
                done.append((output, states))                             # from here on, later groups read this pass
    return in_order([output for output, _ in done], groups), channels.last(x.size(1))


def strided(T, g):
    return [slice(c, T, g) for c in range(g)]                             # G_c = {i : i mod g = c}


def contiguous(T, g):
    return [slice(c * T // g, (c + 1) * T // g) for c in range(g)]


# --------------------------------------------------------------------------------------------------------- bookkeeping


GROUPS = {   # schedule: how T tokens are cut into g groups, g <= T
    "jacobi": lambda T, g: strided(T, 1),
    "cyclic": strided,
    "contiguous": contiguous,
}


def run(model, x, cache=None):
    """x (B, T, D) -> the output (B, T, D), by the schedule that model.config names at this moment.

    With a cache, the T tokens follow those in it. The channels in it stay as they are; those of the T tokens join them.
    """
    config, T = model.config, x.size(1)
    past = model.boundary(x.size(0)) if cache is None else held(model, cache)
    positions = torch.arange(len(past.positions), len(past.positions) + T)
    if config.schedule == "autoregressive" or T == 1:
        output, new = autoregressive(model, x, positions, past)
    else:
        groups = GROUPS[config.schedule](T, min(config.groups, T))
        output, new = iterate(model, x, positions, past, groups, config.passes, config.grad_passes)
    if cache is not None:
        store(model, cache, new)
    if model.trace is not None:                                           # all in order, reading what the schedule left
        model.stack(x, positions, past.join(new))
    return output


class Channels(NamedTuple):
    """What tokens publish for later ones. Slot s holds position s; a dummy, if there is one, has position 0."""
    k: torch.Tensor                    # (k, B, Hkv, N, d), rotated
    v: torch.Tensor                    # (k, B, Hkv, N, d)
    positions: torch.Tensor            # (N,), on the CPU, as all positions here: so no mask waits for the device

    def join(self, *others):
        """These slots and then the others', in the dtype of the newest."""
        parts = [part for part in (self, *others) if len(part.positions)]
        if len(parts) < 2:
            return parts[0] if parts else self
        k, v, positions = zip(*parts)
        return Channels(torch.cat([part.to(k[-1].dtype) for part in k], dim=3),
                        torch.cat([part.to(v[-1].dtype) for part in v], dim=3), torch.cat(positions))

    def put(self, positions, k, v):
        """A copy, for autograd's sake, with k and v (k, B, Hkv, n, d) in the slots of `positions`."""
        slots = positions.to(k.device, non_blocking=True)
        return Channels(self.k.index_copy(3, slots, k), self.v.index_copy(3, slots, v), self.positions)

    def last(self, n):
        return Channels(self.k[:, :, :, -n:], self.v[:, :, :, -n:], self.positions[-n:])

    def seen_by(self, positions, window=math.inf):
        """Which slots queries at `positions` (n,), in rising order, may read: those at smaller positions, of these the
        newest `window`. For `attend`: [(queries, how many slots the last of them sees, mask, blind)], mask None where all
        see all, blind None where none sees nothing. Many queries are cut into four: the first need not meet late keys."""
        seen, n, to_device = [], len(positions), lambda t: t.to(self.k.device, non_blocking=True)
        for rows in contiguous(n, max(1, min(4, n // 64))):
            distance = positions[rows][:, None] - self.positions[self.positions < positions[rows][-1]]
            mask = (0 < distance) & (distance <= window)                  # (rows, reach)
            blind = ~mask.any(dim=1, keepdim=True)                        # (rows, 1): a softmax over nothing would be NaN,
            seen.append((rows, mask.size(1),                              # so they see all, and then nothing of it
                         None if mask.all() else to_device(mask | blind), to_device(blind) if blind.any() else None))
        return seen


def attend(q, k, v, seen):
    """Attention over past slots. q (B, H, n, d), k and v (B, Hkv, N, d), seen from Channels.seen_by -> (B, H, n, d).
    A query that sees no slot gets exactly 0, and gives every key and value the gradient 0."""
    pieces = [attend_rows(q[:, :, rows], k[:, :, :reach], v[:, :, :reach], *masks) for rows, reach, *masks in seen]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def attend_rows(q, k, v, mask, blind):
    if k.size(2) == 0:
        return torch.zeros_like(q)
    attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return attention if blind is None else attention.masked_fill(blind, 0)


def in_order(pieces, groups):
    """Pieces (..., n, D) of the groups -> (..., T, D) in token order."""
    T = sum(piece.size(-2) for piece in pieces)
    order = torch.cat([torch.arange(T)[group] for group in groups]).argsort()
    order = order.to(pieces[0].device, non_blocking=True)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2).index_select(-2, order)


def held(model, cache):
    """The channels in a cache: its first model.k slots, from the dummy, if the model has one, to the newest token."""
    N = model.first + cache.length
    return Channels(cache.k[:model.k, :, :, :N], cache.v[:model.k, :, :, :N], torch.arange(N))


@torch.no_grad()
def store(model, cache, new):
    start, end = new.positions[0], new.positions[-1] + 1
    if end > cache.k.size(3):
        raise ValueError(f"the cache has room for {cache.k.size(3) - model.first} tokens and was given "
                         f"{end - model.first}: ask new_cache for a larger max_tokens")
    cache.k[:model.k, :, :, start:end] = new.k
    cache.v[:model.k, :, :, start:end] = new.v


class FeedbackGPT(GPT):
    """A model with `stack(x, positions, channels)` -> (output (B, n, D), states (S, B, n, D)) and `pool(states,
    positions)` -> k and v (k, B, Hkv, n, d). It sets k, the number of channels; sources = S; and first = 1 if it has a
    dummy, which then is what its `boundary` returns. Its `layers` calls `run`."""

    k, sources, first = 1, 1, 0

    def rope(self, positions):
        return super().rope(positions.to(self.embed.weight.device, non_blocking=True))

    def boundary(self, batch_size):
        """The channels that are there before the first token: here none."""
        config = self.config
        none = self.embed.weight.new_empty(self.k, batch_size, config.n_kv_head, 0, config.head_dim)
        return Channels(none, none, torch.arange(0))

    @torch.no_grad()
    def new_cache(self, batch_size, max_tokens=None):
        """As GPT.new_cache, with the dummy, if there is one, in front of the tokens."""
        cache = super().new_cache(batch_size, (max_tokens or self.config.block_size) + self.first)
        if self.first:
            store(self, cache, self.boundary(batch_size))
        return cache


def flops(config, T, layers, body, pool, top_is_read, seen, seen_last):
    """`flops_per_token` of `layers` layers run by config.schedule. body: a layer's matrix products, pool: what publishing
    a token takes, seen: how many slots a token reads on average, seen_last: how many the last one. The first pass reads
    a pool of the embeddings; the boundary pools once more. top_is_read: the pool reads the top layer's output."""
    pair = 4 * config.n_head * config.head_dim
    exact = config.schedule == "autoregressive"
    passes, grad_passes = (1, 1) if exact else (config.passes, config.grad_passes)
    first, boundary = int(not exact), int(grad_passes < passes)
    unread = 1 / T if exact else 1 / len(GROUPS[config.schedule](T, min(config.groups, T)))
    layers_back = grad_passes * layers - (0 if top_is_read else grad_passes - 1)
    pools_back = grad_passes + first - unread                             # nobody reads the last pass's last group
    forward = passes * (layers * (body + pair * seen) + pool) + first * pool
    return dict(train=forward + boundary * pool + layers_back * (2 * body + 2.5 * pair * seen) + 2 * pools_back * pool,
                prefill=forward, decode=layers * (body + pair * seen_last) + pool,
                head=2 * config.n_embd * config.padded_vocab_size)


@dataclass
class ScheduleConfig(GPTConfig):
    schedule: str = "cyclic"           # autoregressive (exact, token by token), jacobi, cyclic or contiguous
    groups: int = 8                    # groups of tokens in one pass; jacobi has one
    passes: int = 3                    # passes over all tokens, in training, validation and prefill
    grad_passes: int = 2               # the last so many of them carry gradients in training

    def __post_init__(self):
        super().__post_init__()
        if self.schedule not in ("autoregressive", *GROUPS):
            raise ValueError(f"schedule={self.schedule!r}: choose one of autoregressive, {', '.join(GROUPS)}")
        if self.groups < 1:
            raise ValueError(f"groups={self.groups}: give a whole number of at least 1")
        if not 1 <= self.grad_passes <= self.passes:
            raise ValueError(f"passes={self.passes}, grad_passes={self.grad_passes}: give at least one pass with "
                             f"gradients, and no more than there are passes")


if __name__ == "__main__":
    from tools.schedules import main
    main()
