"""
LCKV: all condensed layers read the keys and values of the topmost of them, which alone makes any.

In a plain decoder every layer caches its own keys and values. Here only the top one of the condensed layers does, and
they all read it. That layer finishes a token last, so attention in the condensed layers is strictly causal, and they
read above themselves. A few ordinary layers below and above them, the warm-up layers, keep their own cache.

    Haoyi Wu and Kewei Tu, Layer-Condensed KV Cache for Efficient Inference of Large Language Models, arXiv 2405.10637

    paper                                 here
    w warm-up layers, a sandwich          self.below, self.above    w // 2 of them, and the rest
    the condensed layers                  self.condensed            code layers w // 2 .. L - (w - w // 2) - 1
    K, V of the top condensed layer       channels                  (1, B, Hkv, N, d), of its normed input
    m = 7 passes, b = 2 with gradients    passes=9, grad_passes=2   Jacobi: all tokens read the pass before

    cost                             lckv                              baseline
    cached numbers per token         2 (w + 1) Hkv d                   2 L Hkv d
    parameters of keys and values    (w + 1) (2 D Hkv d + d)           L (2 D Hkv d + d)
    passes, condensed layers         9 in training and prefill         1

This is the model that the WhiteMatter paper compares, with one norm fewer. Paper against release: docs/errata.md.
"""
import sys
from dataclasses import dataclass

if not __package__:                     # run as `python baselines/lckv.py`: what it imports lies one folder up
    sys.path[0] += "/.."
import cyclic
import model
from cyclic import FeedbackGPT, ScheduleConfig
from model import Block, QueryBlock, causal_attention


class LCKV(FeedbackGPT):
    def layers(self, x, rope, cache=None):
        x = self.warm_up(self.below, x, rope, cache)            # the paper: without warm-up layers the loss is higher
        x = cyclic.run_schedule(self, x, cache)                 # the condensed ones: a schedule of stack and pool
        return self.warm_up(self.above, x, rope, cache)

    def stack(self, x, positions, channels):
        """Any n tokens x (B, n, D) through the condensed layers: all read the one channel of earlier tokens."""
        rope, seen = self.rope(positions), channels.seen_from(positions)
        k, v = channels.k[0], channels.v[0]                     # (B, Hkv, N, d) each
        for n in self.condensed:
            top_input = x                                       # after the loop: the top layer's input
            q = self.blocks[n].query(x, rope)
            x = self.blocks[n].finish(x, self.attend_past(n, q, k, v, seen))
        return x, top_input[None]                               # (B, n, D), (1, B, n, D)

    def pool(self, states, positions):
        """The keys and values of the top condensed layer, from its input: the only ones that are published."""
        k, v = self.blocks[self.condensed[-1]].kv(states[0], self.rope(positions))
        return k[None], v[None]                                 # (1, B, Hkv, n, d): one channel

    def warm_up(self, layers, x, rope, cache):
        for n in layers:
            q, k, v = self.blocks[n].qkv(x, rope)
            x = self.blocks[n].finish(x, self.attend(n, q, k, v, cache))
        return x

    # ------------------------------------------------------------------------------------------------ bookkeeping

    LOOP = ("layers", "stack", "pool", "warm_up")

    def __init__(self, config):
        super().__init__(config)
        self.condensed = condensed(config)
        self.below, self.above = range(self.condensed.start), range(self.condensed.stop, config.n_layer)
        self.slot = {n: slot for slot, n in enumerate((*self.below, *self.above), 1)}            # slot 0 is the channel

    def attend(self, n, q, k, v, cache=None):
        self.record(n, q=q, k=k, v=v)
        if cache is not None:
            k, v = cache.append(self.slot[n], k, v)
        return causal_attention(q, k, v)

    def make_block(self, config, n):
        return QueryBlock(config, n) if n in condensed(config)[:-1] else Block(config, n)

    @staticmethod
    def cache_slots(config):
        return config.w + 1, config.w + 1


def condensed(config):
    """The code layers of the block."""
    return range(config.w // 2, config.n_layer - (config.w - config.w // 2))


@dataclass
class LCKVConfig(ScheduleConfig):
    w: int | None = None               # ordinary warm-up layers, half below and half above (default: 2, if they fit)
    schedule: str = "jacobi"           # autoregressive (exact, token by token), jacobi, cyclic or contiguous
    passes: int = 9                    # passes over all tokens, in training, validation and prefill

    def __post_init__(self):
        super().__post_init__()
        if self.w is None:
            self.w = min(2, self.n_layer - 1)
        self.require("w", 0 <= self.w < self.n_layer,
                     f"give a number from 0 to {self.n_layer - 1}; with warm-up layers alone this is --model=gpt")


def flops_per_token(config, T):
    """As model.flops_per_token: the warm-up layers once, the block by its schedule."""
    D, kv = config.n_embd, config.n_kv_head * config.head_dim
    body, pool = 4 * D * config.n_head * config.head_dim + 6 * D * config.d_ff, 4 * D * kv
    block = cyclic.flops(config, T, config.n_layer - config.w, body, pool,
                         top_is_read=False, seen=(T - 1) / 2, seen_last=T)
    plain, share = model.flops_per_token(config, T), config.w / config.n_layer
    return block | {kind: block[kind] + share * plain[kind] for kind in ("train", "prefill", "decode")}


if __name__ == "__main__":
    from tools.prove import main
    main({"lckv": (LCKVConfig, LCKV)})
