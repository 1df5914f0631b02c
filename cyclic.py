"""
Cyclic iteration: how to run, and to train in parallel, a model whose layers read past tokens at any depth.

In a feedback model the lowest layer of a token may read what the highest layer made of the token before it. The exact
run is therefore sequential: one token after another. Iteration computes all tokens in parallel instead, several times.
In each pass a token reads what earlier tokens published last, and enough passes give exactly the sequential result.

    Wenbo Zhang and Xiang Ren, WhiteMatter, arXiv 2608.18486. Jacobi passes, the last few with gradients: Haoyi Wu and
    Kewei Tu, Layer-Condensed KV Cache for Efficient Inference of Large Language Models, arXiv 2405.10637.

    paper                here
    X, the embeddings    x                 (B, T, D)
    H, the states        states            (S, B, n, D)   of any n tokens, at S depths
    KV                   channels          k and v (channels, B, Hkv, N, d): what N tokens publish, in token order
    G_c, group c         group             a slice of 0 .. T-1: tokens that are computed together
    b gradient passes    grad_passes       the last ones of `passes`

    schedule             groups of 6 tokens, g = 3   sequential steps   tokens a step   exact after p passes
    autoregressive       {0} {1} {2} {3} {4} {5}     T                  1               all
    jacobi               {0 1 2 3 4 5}               p                  T               the first p tokens
    cyclic               {0 3} {1 4} {2 5}           p g                T / g           the first p g tokens
    contiguous           {0 1} {2 3} {4 5}           p g                T / g           the first p tokens or more

Cost: a pass takes the FLOPs of one forward. Only passes with gradients keep activations for the backward pass.
"""
import contextlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import GPT, GPTConfig


def autoregressive(model, x, positions, channels):
    """The exact run: token by token. Each token reads the finished channels of all tokens before it."""
    outputs = []
    for x_i, i in zip(x.split(1, dim=1), positions.split(1)):              # (B, 1, D), (1,)
        output, states = model.stack(x_i, i, channels)
        channels = channels.join(publish(model, states, i))
        outputs.append(output)
    return torch.cat(outputs, dim=1), channels


def one_pass(model, x, positions, groups, channels):
    """All tokens once, group after group. Each group publishes before the next one runs."""
    outputs, states = [], []
    for group in groups:
        output, states_of_group = model.stack(x[:, group], positions[group], channels)
        new = publish(model, states_of_group, positions[group])
        channels = channels.put(positions[group], new)                     # from here on, later groups read this pass
        outputs.append(output)
        states.append(states_of_group)
    return outputs, states, channels                                       # lists, one entry a group


def iterate(model, x, positions, past, groups, passes, grad_passes):
    """Some passes, the last `grad_passes` of them with gradients, which flow from pass to pass through the channels."""
    states = x.expand(model.n_sources, *x.shape)                           # before pass 1: the embedding everywhere
    channels = past.join(publish(model, states, positions))
    with without_gradients():                                              # first come close,
        for _ in range(passes - grad_passes):
            outputs, states, channels = one_pass(model, x, positions, groups, channels)
    if passes > grad_passes and torch.is_grad_enabled():
        # Then publish again, with gradients. Else one Jacobi pass would give W^K and W^V no gradient.
        channels = past.join(publish(model, in_order(states, groups), positions))
    for _ in range(grad_passes):
        outputs, _, channels = one_pass(model, x, positions, groups, channels)
    return in_order(outputs, groups), channels


def strided(T, g):
    return [slice(c, T, g) for c in range(g)]                             # G_c = {i : i mod g = c}


def contiguous(T, g):
    return [slice(c * T // g, (c + 1) * T // g) for c in range(g)]


GROUPS = {   # schedule: how T tokens are cut into g groups, g <= T
    "jacobi": lambda T, g: strided(T, 1),
    "cyclic": strided,           # the left neighbour of a token is of this pass, except in the first group
    "contiguous": contiguous,    # the control: only the first token of a group has a left neighbour of this pass
}


# --------------------------------------------------------------------------------------------------------- bookkeeping


def run_schedule(model, x, cache=None):
    """x (B, T, D) -> the output (B, T, D), by the schedule that model.config names at this moment.

    With a cache, the T tokens follow those in it. Only the new tokens are iterated, and their channels join the cache.
    """
    config, T = model.config, x.size(1)
    past = Channels(*model.boundary(x.size(0))) if cache is None else read_cache(model, cache)
    positions = past.k.size(3) + torch.arange(T)                           # on the CPU: a mask never waits for the GPU
    if config.schedule == "autoregressive" or T == 1:
        output, channels = autoregressive(model, x, positions, past)
    else:
        groups = GROUPS[config.schedule](T, min(config.groups, T))
        output, channels = iterate(model, x, positions, past, groups, config.passes, config.grad_passes)
    if cache is not None:
        write_cache(model, cache, channels, T)
    if model.trace is not None:                                            # record all tokens in order, reading what
        model.stack(x, positions, channels)                                # the schedule left behind
    return output


class Channels(NamedTuple):
    """What tokens publish for later ones. Slot s holds the token at position s; a dummy token has position 0."""
    k: torch.Tensor                                                        # (channels, B, Hkv, N, d), rotated
    v: torch.Tensor                                                        # (channels, B, Hkv, N, d)

    def join(self, new):
        """These slots, then the new ones, in the dtype of the new ones."""
        return Channels(*(torch.cat((old.to(t.dtype), t), dim=3) for old, t in zip(self, new)))

    def put(self, positions, new):
        """A copy with `new` in the slots of these positions. In place, autograd would find saved keys overwritten."""
        slots = positions.to(self.k.device, non_blocking=True)
        return Channels(*(old.index_copy(3, slots, t) for old, t in zip(self, new)))

    def seen_from(self, positions, window=math.inf):
        """(n, N) boolean: the slots that queries at these positions read, or None where all read all. A query reads
        smaller positions, and of these the newest `window`."""
        distance = positions[:, None] - torch.arange(self.k.size(3))
        seen = (0 < distance) & (distance <= window)     # 0 is the token itself: it must finish before its slot is made
        return None if seen.all() else seen.to(self.k.device, non_blocking=True)


def publish(model, states, positions):
    """What n tokens publish. Under autocast the keys leave their norm in fp32: they are stored as the values are."""
    k, v = model.pool(states, positions)
    return Channels(k.to(v.dtype), v)


def past_attention(q, k, v, seen):
    """Attention over the slots that `seen` marks for each query. q (B, H, n, d), k and v (B, Hkv, N, d), seen (n, N)
    or None for all -> (B, H, n, d). A query that sees no slot gets exactly 0 and gives no gradient."""
    if k.size(2) == 0:                                                     # the first token, alone
        return torch.zeros_like(q)
    elif seen is None:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    else:
        blind = ~seen.any(dim=1, keepdim=True)                             # (n, 1): the first token, among others
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | blind, enable_gqa=True)
        return attention.masked_fill(blind, 0)                             # a softmax over nothing would have been NaN


def in_order(pieces, groups):
    """The groups' pieces (..., n, D) -> (..., T, D) in token order."""
    together = torch.cat(pieces, dim=-2)
    order = torch.cat([torch.arange(together.size(-2))[group] for group in groups]).argsort()
    return together.index_select(-2, order.to(together.device, non_blocking=True))


@contextlib.contextmanager
def without_gradients():
    """torch.no_grad. In torch 2.9 autocast keeps the weights that it casts in here: later passes would use these casts,
    and the weights would get no gradient."""
    with torch.no_grad():
        yield
    torch.clear_autocast_cache()


@contextlib.contextmanager
def scheduled(config, **settings):
    """A context in which config has other settings: scheduled(config, schedule="jacobi", passes=9)."""
    before = vars(config).copy()
    vars(config).update(settings)
    try:
        yield
    finally:
        vars(config).update(before)


def read_cache(model, cache):
    """The channels in a cache: its first n_channels slots, the dummy's included."""
    end = int(model.has_dummy) + cache.length
    return Channels(*(t[:model.n_channels, :, :, :end] for t in (cache.k, cache.v)))


@torch.no_grad()
def write_cache(model, cache, channels, T):
    """Put the last T slots of the channels into the cache."""
    end, size, dummy = channels.k.size(3), cache.k.size(3), int(model.has_dummy)
    if end > size:
        raise ValueError(f"the cache has room for {size - dummy} tokens and was given {end - dummy}: "
                         f"ask new_cache for a larger max_tokens")
    for held, new in zip((cache.k, cache.v), channels):
        held[:model.n_channels, :, :, end - T:end] = new[:, :, :, -T:]


class FeedbackGPT(GPT):
    """A model whose `layers` calls run_schedule, and which writes two methods:

    stack(x, positions, channels) -> output (B, n, D), states (S, B, n, D): the layers, for any n tokens;
    pool(states, positions) -> k, v (n_channels, B, Hkv, n, d): what these tokens publish.
    """
    LOOP = ("stack", "pool")                                               # what --diff shows
    n_channels, n_sources, has_dummy = 1, 1, False                         # n_sources: S

    def attend_past(self, n, q, k, v, seen):
        self.record(n, q=q, k=k, v=v)
        return past_attention(q, k, v, seen)

    def rope(self, positions):
        return super().rope(positions.to(self.embed.weight.device, non_blocking=True))

    def boundary(self, batch_size):
        """The keys and values before the first token: none here, the dummy's in a model that has one."""
        config = self.config
        none = self.embed.weight.new_empty(self.n_channels, batch_size, config.n_kv_head, 0, config.head_dim)
        return none, none

    @torch.no_grad()
    def new_cache(self, batch_size, max_tokens=None):
        """As GPT.new_cache, with the dummy, if there is one, in front of the tokens."""
        cache = super().new_cache(batch_size, (max_tokens or self.config.block_size) + self.has_dummy)
        if self.has_dummy:
            write_cache(self, cache, self.boundary(batch_size), 1)
        return cache

    def exactly(self):
        return scheduled(self.config, schedule="autoregressive")


@dataclass
class ScheduleConfig(GPTConfig):
    schedule: str = "cyclic"           # autoregressive (exact, token by token), jacobi, cyclic or contiguous
    groups: int = 8                    # groups of tokens in one pass; jacobi has one
    passes: int = 3                    # passes over all tokens, in training, validation and prefill
    grad_passes: int = 2               # the last so many of them carry gradients in training

    def __post_init__(self):
        super().__post_init__()
        self.require("block_size", self.block_size >= 2, "one token alone reads no channel: give at least 2")
        self.require_one_of("schedule", ("autoregressive", *GROUPS))
        self.require("groups", self.groups >= 1, "give a whole number of at least 1")
        self.require("passes", self.passes >= 1, "give a whole number of at least 1")
        self.require("grad_passes", 1 <= self.grad_passes <= self.passes,
                     f"give a whole number from 1 to passes={self.passes}")


def flops(config, T, layers, body, pool, top_is_read, seen, seen_last):
    """`flops_per_token` of `layers` layers by config.schedule. body: a layer's matrix products. pool: one token's
    publishing. top_is_read: the pool reads the top layer's output. seen: slots that a token reads, on average;
    seen_last: those that the last token reads."""
    pair = 4 * config.n_head * config.head_dim
    exact = config.schedule == "autoregressive"
    passes, grad_passes = (1, 1) if exact else (config.passes, config.grad_passes)
    first, again = int(not exact), int(grad_passes < passes)              # pools before pass 1, and before gradients
    unread = 1 / T if exact else 1 / len(GROUPS[config.schedule](T, min(config.groups, T)))
    layers_back = grad_passes * layers - (0 if top_is_read else grad_passes - 1)
    pools_back = grad_passes + first - unread                             # nobody reads the last group of the last pass
    forward = passes * (layers * (body + pair * seen) + pool) + first * pool
    return dict(train=forward + again * pool + layers_back * (2 * body + 2.5 * pair * seen) + 2 * pools_back * pool,
                prefill=forward, decode=layers * (body + pair * seen_last) + pool,
                head=2 * config.n_embd * config.padded_vocab_size)


if __name__ == "__main__":
    from tools.draw import main
    main(run_schedule)
