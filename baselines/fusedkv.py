"""
FusedKV: the upper layers have no keys and values of their own; they fuse those of the first and of the middle layer.

Neighbouring layers' keys and values are alike, so half of the cache says little. Layers 1..n keep theirs as usual. Each
layer above makes its keys and values, per channel, from layer 1's and layer n's: the values lean on layer 1, where the
tokens themselves are still in view, the keys on layer n, where the context is. Nothing below reads anything above.

    Lin et al., Reconstructing KV Caches with Cross-Layer Fusion, arXiv 2512.03870

    paper                             here                   paper layer i is code layer i-1
    n, the storage layers             self.n                 half of the layers, rounded up
    K^1, V^1, K^n, V^n                k1, v1, kn, vn         (B, Hkv, S, d), keys after the rotation
    a_i, b_i, of keys                 block.a, block.b       (Hkv, 1, d/2): one number for both of a rotary pair
    c_i, e_i, of values               block.c, block.e       (Hkv, 1, d)

Cost: half of the baseline's cache; in each upper layer 2 D Hkv d + d parameters less and 3 Hkv d more. An upper layer
fuses the whole cache again at every decoded token, 6 Hkv d FLOPs for each token in it: the price of storing half. A
prefill runs the upper layers for the last token only.

What breaks without each part: with two numbers for one rotary pair, a fused key is no longer a vector turned by its
position, so scores depend on more than distances. `lite` is K^i = K^n and V^i = V^1, with nothing to learn.

Where paper, release and this file differ: the authors' release was not at hand; the formula is that of the WhiteMatter
authors' baseline. They draw all coefficients from N(0, 1) for a chain in which layer i fuses what layer i-1 fused, and
multiply the chain out once, at the start: `chain`. The default, `fused`, starts at `lite` and trains from there.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn

import kernels
from model import GPT, Block, GPTConfig, attend, normal
from whitematter import QueryBlock


class FusedKV(GPT):
    def layers(self, x, rope, cache=None):
        return self.upper(*self.lower(x, rope, cache))

    def lower(self, x, rope, cache):
        for i, block in enumerate(self.blocks[:self.n]):
            q, k, v = block.qkv(x, rope)
            self.record(i, x=x[None], q=q, k=k, v=v)
            if cache is not None:
                k, v = cache.append(i, k, v)
            k1, v1 = (k, v) if i == 0 else (k1, v1)
            x = block.finish(x, attend(q, k, v))
        return x, rope, k1, v1, k, v

    def upper(self, x, rope, k1, v1, kn, vn):
        for i, block in enumerate(self.blocks[self.n:], self.n):
            q, (k, v) = block.query(x, rope), self.fuse(block, k1, v1, kn, vn)
            self.record(i, x=x[None], q=q, k=k, v=v)
            x = block.finish(x, attend(q, k, v))
        return x

    def fuse(self, block, k1, v1, kn, vn):
        a, b = (torch.cat((half, half), dim=-1) for half in (block.a, block.b))       # both members of a rotary pair
        return a * k1 + b * kn, block.c * v1 + block.e * vn              # K^i, V^i

    def layers_last(self, x, rope, cache=None):
        """The last token's row (B, 1, D): no other token needs the upper half."""
        x, (cos, sin), *stored = self.lower(x, rope, cache)
        return self.upper(x[:, -1:], (cos[-1:], sin[-1:]), *stored)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        self.n = storage(config)
        if config.variant == "chain":
            for below, block in zip(self.blocks[self.n:], self.blocks[self.n + 1:]):
                block.follow(below)

    def make_block(self, config, i):
        return Block(config, i) if i < storage(config) else FusedBlock(config, i)

    def compile_pieces(self):
        super().compile_pieces()
        kernels.compile_methods([self], "fuse")

    @staticmethod
    def cache_slots(config):
        return storage(config), storage(config)


def storage(config):
    """n: how many layers store keys and values."""
    return (config.n_layer + 1) // 2


class FusedBlock(QueryBlock):
    def __init__(self, config, i):
        super().__init__(config, i)
        heads, d = config.n_kv_head, config.head_dim
        for name, width, start in (("a", d // 2, 0.0), ("b", d // 2, 1.0), ("c", d, 1.0), ("e", d, 0.0)):
            value = normal(config, f"blocks.{i}.{name}", heads, 1, width, std=1.0)
            if config.variant != "chain":
                nn.init.constant_(value, start)
            self.register_buffer(name, value.data) if config.variant == "lite" else self.register_parameter(name, value)

    @torch.no_grad()
    def follow(self, below):
        """What fused the keys of the block below with K^n now fuses K^1 with K^n, and so for the values with V^1."""
        a, c, e = self.a.clone(), self.c.clone(), self.e.clone()
        self.a.copy_(a * below.a), self.b.add_(a * below.b)
        self.c.copy_(c * below.c + e), self.e.copy_(c * below.e)


@dataclass
class FusedKVConfig(GPTConfig):
    variant: str = "fused"             # fused: trained, starts at lite; chain: trained, starts at random; lite: fixed

    def __post_init__(self):
        super().__post_init__()
        if self.variant not in ("fused", "chain", "lite"):
            raise ValueError(f"variant={self.variant!r}: choose one of fused, chain, lite")


def flops_per_token(config, T):
    """As model.flops_per_token, with the fusing; a prefill runs the upper half for one token in T."""
    L, n, D, kv = config.n_layer, storage(config), config.n_embd, config.n_kv_head * config.head_dim
    pair, fuse = 4 * config.n_head * config.head_dim, 6 * kv             # of one pair, of one token's k and v
    body, project = D * pair + 6 * D * config.d_ff, 4 * D * kv
    return dict(train=3 * (L * body + n * project + (L - n) * fuse) + 3.5 * L * pair * (T + 1) / 2,
                prefill=n * (body + project + pair * (T + 1) / 2) + (L - n) * (fuse + body / T + pair),
                decode=L * (body + pair * (T + 1)) + n * project + (L - n) * fuse * (T + 1),
                head=2 * D * config.padded_vocab_size)


if __name__ == "__main__":
    from tools.prove import main
    main("fusedkv")
