"""
LCKV: all layers of a condensed block read the keys and values of the block's top layer, which alone makes any.

Most layers of a cache hold what the layers below them made of a token; the top one holds what became of it. Here only
the top layer of the block publishes, and every layer of the block reads that. The top of a token is finished last, so a
token cannot read its own: attention in the block is strictly causal, and a layer reads above itself. A few ordinary
layers below and above the block, the warm-up layers, keep their own cache and mend most of what the condensing costs.

    Wu and Tu, Layer-Condensed KV Cache, arXiv 2405.10637; compared in Zhang and Ren, WHITEMATTER, arXiv 2608.18486

    paper                                 here
    w warm-up layers, a sandwich          self.below, self.above    w // 2 of them, and the rest
    the condensed layers                  self.block                code layers w // 2 .. L - (w - w // 2) - 1
    K, V of the block's top layer         channels                  (1, B, Hkv, N, d), of its normed input
    m = 7 passes, b = 2 with gradients    passes=9, grad_passes=2   Jacobi: all tokens read the pass before

Cost: w + 1 slots of cache in place of L; (L - w - 1)(2 D Hkv d + d) parameters less. Decoding costs less than the
baseline's. Training and prefill take nine passes through the block; only the two with gradients keep activations.

What breaks without each part: without the mask on the diagonal a token would have to be finished before it starts. In
the release, with one gradient pass, W^K and W^V learn nothing from the layers below the top, since those read a pass
without gradients; cyclic.py projects once more at the boundary. Without warm-up layers the loss is worse (the paper's).

Where paper, release and this file differ. This is the model that the WhiteMatter authors compare, less the second norm
that they put between the top layer's norm and the projections, with gains of its own for K and for V. In the release
the top layer is an ordinary one, which reads itself too; the first pass reads zeros, here a projection of the block's
input; prompts of up to m + b tokens run one by one, here config.schedule decides. Its plain attention adds two masks of
finite minima, so that the first token reads every later one; its decoding masks the newest slot in place of the empty
one, so that a token misses the one before it. Here masks are boolean, and a token without a past gets 0.
"""
from dataclasses import dataclass

import cyclic
from cyclic import FeedbackGPT, ScheduleConfig
from model import Block, attend
from whitematter import QueryBlock


class LCKV(FeedbackGPT):
    def layers(self, x, rope, cache=None):
        x = self.warm_up(self.below, x, rope, cache)
        x = cyclic.run(self, x, cache)                                   # the block: a schedule of stack and pool
        return self.warm_up(self.above, x, rope, cache)

    def stack(self, x, positions, channels):
        """Any n tokens x (B, n, D) through the block, where every layer reads the one channel of earlier tokens."""
        rope, seen = self.rope(positions), channels.seen_by(positions)
        k, v = channels.k[0], channels.v[0]
        for n in self.block:
            q, h = self.blocks[n].query(x, rope), x
            self.record(n, x=x[None], q=q, k=k, v=v)
            x = self.blocks[n].finish(x, cyclic.attend(q, k, v, seen))
        return x, h[None]                                                # h: the input of the top layer

    def pool(self, states, positions):
        """The K and V of the block's top layer, from its input: the only ones that are published."""
        k, v = self.blocks[self.block[-1]].kv(states[0], self.rope(positions))
        return k[None].to(v.dtype), v[None]

    def warm_up(self, layers, x, rope, cache):
        for n, slot in layers:
            q, k, v = self.blocks[n].qkv(x, rope)
            self.record(n, x=x[None], q=q, k=k, v=v)
            x = self.blocks[n].finish(x, attend(q, k, v, cache, slot))
        return x

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        self.block = block(config)
        ordinary = [n for n in range(config.n_layer) if n not in self.block]
        slots = [(n, slot) for slot, n in enumerate(ordinary, 1)]        # slot 0 is the channel
        self.below, self.above = slots[:config.w // 2], slots[config.w // 2:]

    def make_block(self, config, n):
        return QueryBlock(config, n) if n in block(config)[:-1] else Block(config, n)

    @staticmethod
    def cache_slots(config):
        return config.w + 1, config.w + 1


def block(config):
    """The code layers of the condensed block."""
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
        if not 0 <= self.w < self.n_layer:
            raise ValueError(f"w={self.w}: give a number from 0 to n_layer-1={self.n_layer - 1}; with n_layer warm-up "
                             f"layers this is the baseline, --model=gpt")


def flops_per_token(config, T):
    """As model.flops_per_token: the warm-up layers once, the block by its schedule."""
    D, kv, pair = config.n_embd, config.n_kv_head * config.head_dim, 4 * config.n_head * config.head_dim
    body, pool, w = D * pair + 6 * D * config.d_ff, 4 * D * kv, config.w
    flops = cyclic.flops(config, T, config.n_layer - w, body, pool, top_is_read=False, seen=(T - 1) / 2, seen_last=T)
    warm, attention = w * (body + pool), w * pair * (T + 1) / 2
    return dict(train=flops["train"] + 3 * warm + 3.5 * attention, prefill=flops["prefill"] + warm + attention,
                decode=flops["decode"] + warm + 2 * attention, head=flops["head"])


if __name__ == "__main__":
    from tools.prove import main
    main("lckv")
