"""
Depth-Attention: before a layer attends over the sequence, its query attends over earlier layers and mixes their values.

The value that a token offers in layer n is made from that layer's input alone. Here the token first looks down its own
column: its query meets the keys that it had in earlier layers and in this one, and softmax weights mix the values of
those layers. The mixed value takes the place of v: in attention, in the cache, and as a source for later layers.

    Zeng et al., Depth-Attention: Cross-Layer Value Mixing for Language Models, arXiv 2606.05014

    symbol                                   here, n a code layer
    q_n, k_n after RoPE                      q, k                     (B, H, T, d), (B, Hkv, T, d)
    v_n                                      v before the mix         (B, Hkv, T, d)
    S(n), the source layers of layer n       sources(n, stride, recent)
    qbar_n, mean query of a KV head          qbar                     (B, Hkv, T, d)
    a_{n,j}, softmax of <qbar_n, k_j>        a                        (m, B, Hkv, T), m candidates: S(n), and n itself
    vt_n = sum_j a_{n,j} vt_j                v after the mix          (B, Hkv, T, d); at j = n the layer's own v_n

Cost: no parameter, and the baseline's cache. 4 m Hkv d + H d FLOPs per token and layer, under 0.01 % of a forward at
the paper's sizes with stride L/2; it is memory traffic that costs. Paper against release: docs/errata.md.
"""
from dataclasses import dataclass, replace

import torch

import kernels
import model
from model import GPT, GPTConfig


def sources(n, stride, recent):
    """S(n): of the layers below n, every stride-th from 0 on (stride 0: none), and the last `recent` ones."""
    return [j for j in range(n) if (stride and j % stride == 0) or j >= n - recent]


def depth_mix(q, candidates):
    """q (B, H, T, d), candidates [(k_j, vt_j)], (B, Hkv, T, d) each -> vt (B, Hkv, T, d), a (m, B, Hkv, T)."""
    qbar = q.unflatten(1, (candidates[0][0].size(1), -1)).mean(dim=2)        # one depth query for each KV head
    e = [(qbar * k_j).sum(dim=-1) / q.size(-1) ** 0.5 for k_j, _ in candidates]      # one token: its rotations cancel
    a = torch.stack(e).softmax(dim=0)                           # over layers
    mixed = 0
    for a_j, (_, vt_j) in zip(a, candidates):
        mixed = mixed + a_j[..., None] * vt_j                   # vt_j, not v_j: as the cache holds it
    return mixed, a


class DepthAttention(GPT):
    """vt_n = sum_j a_{n,j} vt_j over the sources of layer n and n itself, in the place of v_n."""

    def layers(self, x, rope, cache=None):
        depth = []                                              # (k_j, vt_j) of these tokens, for every layer so far
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            candidates = [depth[j] for j in self.sources(n)] + [(k, v)]
            v = self.mix(n, q, candidates)                      # vt_n: never made again, it depends on this token alone
            depth.append((k, v))
            x = block.finish(x, self.attend(n, q, k, v, cache))
        return x

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def sources(self, n):
        return sources(n, self.config.stride, self.config.recent)

    def mix(self, n, q, candidates):
        v, a = self.depth_mix(q, candidates)
        self.record(n, weights=a.permute(1, 3, 2, 0)[:, :, None])            # (B, T, 1, Hkv, m)
        return v.type_as(candidates[-1][1])

    def depth_mix(self, q, candidates):                         # a method, so that compile_pieces can replace it
        return depth_mix(q, candidates)

    def compile_pieces(self):
        super().compile_pieces()
        kernels.compile_methods([self], "depth_mix")

    @staticmethod
    def cache_slots(config):
        """(key slots, value slots): one for each layer; looped, for each layer and round."""
        return len(config.steps), len(config.steps)


@dataclass
class DepthAttentionConfig(GPTConfig):
    stride: int | None = None          # every stride-th layer from 0 on is a source (default: n_layer // 2; 0: none)
    recent: int = 0                    # the last `recent` layers below are sources too

    def __post_init__(self):
        super().__post_init__()
        if self.stride is None:
            self.stride = max(1, self.n_layer // 2)
        for name in ("stride", "recent"):
            self.require(name, getattr(self, name) >= 0, "give a whole number of at least 0")

    @property
    def steps(self):
        """[(layer, the n of its S(n))] in the order of the run: here both are n; looped, (layer, round)."""
        return [(n, n) for n in range(self.n_layer)]


# ---------------------------------------------------------------------------------------------------------------------
# Looped: a prelude, a stretch of layers that run several times with the same weights, a coda
#
# A layer's sources are the same layer in earlier rounds, whose keys live in one space. At a fixed point of the loop all
# rounds have equal keys and values, and mixing changes nothing. The paper reports gains for looped models, but not how
# they choose their sources: this choice is ours.


class LoopedDepthAttention(DepthAttention):
    def layers(self, x, rope, cache=None):
        depth = {}
        for i, (n, r) in enumerate(self.config.steps):          # step i: layer n in its round r
            block = self.blocks[n]
            q, k, v = block.qkv(x, rope)
            candidates = [depth[n, s] for s in self.sources(r)] + [(k, v)]
            v = self.mix(i, q, candidates)
            depth[n, r] = k, v
            x = block.finish(x, self.attend(i, q, k, v, cache))
        return x


@dataclass
class LoopedConfig(DepthAttentionConfig):
    stride: int = 1                    # every stride-th earlier round is a source (0: none, the plain looped model)
    recent: int = 0                    # the last `recent` rounds before are sources too
    prelude: int | None = None         # layers run once, before the loop (default: 1, or 0 with fewer than 3 layers)
    coda: int | None = None            # layers run once, after it (default: likewise); those between are the loop
    rounds: int = 2                    # how often the loop runs; no weight depends on it

    def __post_init__(self):
        super().__post_init__()
        for name in ("prelude", "coda"):
            if getattr(self, name) is None:
                setattr(self, name, int(self.n_layer > 2))
        for name, least in (("prelude", 0), ("coda", 0), ("rounds", 1)):
            self.require(name, getattr(self, name) >= least, f"give a whole number of at least {least}")
        self.require("prelude", self.prelude + self.coda < self.n_layer,
                     f"with coda={self.coda} it leaves no layer of n_layer={self.n_layer} to the loop: shorten one")

    @property
    def steps(self):
        """[(layer, round)], in the order of the run."""
        loop = range(self.prelude, self.n_layer - self.coda)
        return ([(n, 0) for n in range(loop.start)] + [(n, r) for r in range(self.rounds) for n in loop]
                + [(n, 0) for n in range(loop.stop, self.n_layer)])


def flops_per_token(config, T):
    """As model.flops_per_token, a looped layer once for each round, plus the mix wherever there is a source: scores and
    mixed values, 2 Hkv d for each candidate, and the mean query."""
    flops = model.flops_per_token(replace(config, n_layer=len(config.steps)), T)
    candidates = [1 + len(sources(number, config.stride, config.recent)) for _, number in config.steps]
    mix = sum(4 * m * config.n_kv_head * config.head_dim + config.n_head * config.head_dim for m in candidates if m > 1)
    return model.add_forward_flops(flops, mix)


if __name__ == "__main__":
    from tools.prove import main
    main({"depth_attention": (DepthAttentionConfig, DepthAttention), "looped": (LoopedConfig, LoopedDepthAttention)})
