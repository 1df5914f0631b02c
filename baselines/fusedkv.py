"""
FusedKV: the upper layers have no keys and values of their own. They fuse those of the first and of the middle layer.

The lower half of the layers stores keys and values as usual. Each layer above makes its own out of two stored ones,
channel by channel: layer 1, where the tokens themselves are still in view, and layer n, which has seen the context.

    Lin et al., Reconstructing KV Caches with Cross-Layer Fusion for Enhanced Transformers, arXiv 2512.03870.

    paper                 here                                            paper layer i is code layer i-1
    n                     config.n_storage                                layers that store keys and values: L/2
    K^1, V^1, K^n, V^n    k1, v1, kn, vn             (B, Hkv, S, d)       keys after the rotation
    a_i, b_i, of keys     block.a, block.b           (Hkv, 1, d/2)        one number for both members of a rotary pair
    c_i, e_i, of values   block.c, block.e           (Hkv, 1, d)

    cost          against the baseline
    parameters    2 D Hkv d + d fewer and 3 Hkv d more in each upper layer
    cache         half
    prefill       the upper layers run for the last token only
    decode        6 Hkv d FLOPs more for each upper layer and each token in the cache: all of it is fused anew

`lite` is K^i = K^n and V^i = V^1, with nothing to learn. The default, `fused`, starts there.
"""
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn

if not __package__:                     # run as `python baselines/fusedkv.py`: what it imports lies one folder up
    sys.path[0] += "/.."
import kernels
from model import GPT, Block, GPTConfig, QueryBlock, normal


def fuse(block, k1, v1, kn, vn):
    """K^i = a K^1 + b K^n and V^i = c V^1 + e V^n, channel by channel. (B, Hkv, S, d) each."""
    # One number for both members x[i], x[i + d/2] of a rotary pair. With two, the sum would be no rotated vector, and
    # scores would depend on more than the distance.
    a, b = (torch.cat((half, half), dim=-1) for half in (block.a, block.b))
    k = a * k1 + b * kn
    v = block.c * v1 + block.e * vn                             # values are not rotated: each channel is free
    return k, v


class FusedKV(GPT):
    def layers(self, x, rope, cache=None):
        x, *stored = self.lower(x, rope, cache)                 # stored: K^1, V^1, K^n, V^n
        return self.upper(x, rope, *stored)

    def lower(self, x, rope, cache):
        for n, block in enumerate(self.blocks[:self.config.n_storage]):
            q, k, v = block.qkv(x, rope)
            if cache is not None:
                k, v = cache.append(n, k, v)                    # all S tokens: the upper layers need them too
            if n == 0:
                k1, v1 = k, v
            x = block.finish(x, self.attend(n, q, k, v))        # no cache here: k and v hold the past already
        return x, k1, v1, k, v                                  # the last k and v are K^n and V^n

    def upper(self, x, rope, k1, v1, kn, vn):
        for n, block in enumerate(self.blocks[self.config.n_storage:], self.config.n_storage):
            q = block.query(x, rope)                            # only the queries are made from this layer's input
            k, v = block.fuse(k1, v1, kn, vn)                   # never from K^{i-1}: the cache would need it too
            x = block.finish(x, self.attend(n, q, k, v))
        return x

    def last_row(self, x, rope, cache=None):
        """The last token's row, (B, 1, D). No layer reads another token's upper half, so this token goes up alone."""
        x, *stored = self.lower(x, rope, cache)
        return self.upper(x[:, -1:], [table[-1:] for table in rope], *stored)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    LOOP = ("lower", "upper")                                   # what --diff shows

    def __init__(self, config):
        super().__init__(config)
        if config.variant == "chain":
            upper = self.blocks[config.n_storage:]
            for below, block in zip(upper, upper[1:]):
                block.follow(below)

    def make_block(self, config, n):
        return Block(config, n) if n < config.n_storage else FusedBlock(config, n)

    def compile_pieces(self):
        super().compile_pieces()
        kernels.compile_methods(self.blocks[self.config.n_storage:], "fuse")

    @staticmethod
    def cache_slots(config):
        return config.n_storage, config.n_storage


class FusedBlock(QueryBlock):
    """A block that fuses the stored keys and values."""

    def fuse(self, k1, v1, kn, vn):                             # a method, so that compile_pieces can replace it
        return fuse(self, k1, v1, kn, vn)

    def __init__(self, config, n):
        super().__init__(config, n)
        heads, d = config.n_kv_head, config.head_dim
        for name, width, lite in (("a", d // 2, 0.0), ("b", d // 2, 1.0), ("c", d, 1.0), ("e", d, 0.0)):     # K^n, V^1
            if config.variant == "chain":
                value = normal(config, f"blocks.{n}.{name}", heads, 1, width, std=1.0)
            else:
                value = nn.Parameter(torch.full((heads, 1, width), lite))
            if config.variant == "lite":
                self.register_buffer(name, value.data)
            else:
                self.register_parameter(name, value)

    @torch.no_grad()
    def follow(self, below):
        """chain: a, b, c, e were drawn to fuse K^{i-1} with K^n and V^{i-1} with V^1. Substitute the block below, so
        that they fuse K^1 with K^n and V^1 with V^n."""
        a, c, e = self.a.clone(), self.c.clone(), self.e.clone()             # copy_ overwrites them
        self.a.copy_(a * below.a)
        self.b.add_(a * below.b)
        self.c.copy_(c * below.c + e)
        self.e.copy_(c * below.e)


@dataclass
class FusedKVConfig(GPTConfig):
    variant: str = "fused"             # fused: trained, starts at lite; chain: trained, starts at random; lite: fixed

    def __post_init__(self):
        super().__post_init__()
        self.require_one_of("variant", ("fused", "chain", "lite"))

    @property
    def n_storage(self):
        """Half of the layers. Rounding up an odd number is this project's choice."""
        return (self.n_layer + 1) // 2


def flops_per_token(config, T):
    """As model.flops_per_token, with the fusing; a prefill runs the upper half for one token in T."""
    L, n, D, kv = config.n_layer, config.n_storage, config.n_embd, config.n_kv_head * config.head_dim
    pair, fuse = 4 * config.n_head * config.head_dim, 6 * kv    # of one pair, of one token's k and v
    body, project = D * pair + 6 * D * config.d_ff, 4 * D * kv  # W^Q, W^O and feed-forward; W^K and W^V
    return dict(train=3 * (L * body + n * project + (L - n) * fuse) + 3.5 * L * pair * (T + 1) / 2,
                prefill=n * (body + project + pair * (T + 1) / 2) + (L - n) * (fuse + body / T + pair),
                decode=L * (body + pair * (T + 1)) + n * project + (L - n) * fuse * (T + 1),
                head=2 * D * config.padded_vocab_size)


if __name__ == "__main__":
    from tools.prove import main
    main({"fusedkv": (FusedKVConfig, FusedKV)})
