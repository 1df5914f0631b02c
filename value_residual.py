"""
Value residual: every layer's attention moves a mixture of its own values and the first layer's.

A deep layer makes its values from a stream to which all layers below have added, so the token itself is hard to read.
ResFormer mixes the first layer's values V_1 into the values of every later layer, before attention moves them. Within
a layer, where attention looks stays the same; what it finds there changes. In SVFormer all layers move V_1 itself.

    Zhou et al., Value Residual Learning, arXiv 2410.17897. The variant convex is modded-nanogpt's, of 2024-11-06.

    paper                            here
    H_{n-1}, the input of layer n    x                  (B, T, D)      paper layer n is code layer n-1
    V_n = norm(H_{n-1}) W_n^V        v                  (B, Hkv, T, d)
    V_1                              v1                 (B, Hkv, T, d)
    lambda_{n,1}, lambda_{n,2}       lam1[n], lam2[n]   (L,) each
    V'_n                             v after the mix    (B, Hkv, T, d)

Cost: at most 2L+1 parameters, and 3 Hkv d FLOPs per token and layer. The cache is the baseline's: V'_n takes the place
of V_n. SVFormer saves (L-1) D Hkv d parameters and L-1 value slots.

Only `zero` starts as the baseline. Paper against releases: docs/errata.md.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn

import model
from model import GPT, Block, GPTConfig


class ValueResidual(GPT):
    """V'_n = lam1[n] V_1 + lam2[n] V_n in every layer n after the first."""

    def layers(self, x, rope, cache=None):
        lam1, lam2 = self.mix_weights()                         # (L,) each
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            if n == self.source:
                v1 = v                                          # not detached: W_1^V learns from every layer
            elif n > self.source:
                v = lam1[n] * v1 + lam2[n] * v                  # V'_n: what attention moves, and what the cache stores
            x = block.finish(x, self.attend(n, q, k, v, cache))
        return x

    def mix_weights(self):
        """lam1, lam2 (L,). What they start from stands in __init__; how a variant ties them together stands here."""
        variant = self.config.variant
        if variant == "zero":                                   # the layer's own values keep weight 1
            return self.lam1, torch.ones_like(self.lam1)
        if variant == "convex":                                 # the two always add up to 1
            return self.lam1, 1 - self.lam1
        if variant == "learnable_plus":                         # the layers compete for shares of V_1 that add up to s
            return self.s * self.z.softmax(dim=0), self.lam2
        return self.lam1, self.lam2                             # all others: two free numbers a layer

    def __init__(self, config):
        super().__init__(config)
        L, one, self.source = config.n_layer, torch.ones(config.n_layer), config.source
        target = torch.tensor([not config.targets or n in config.targets for n in range(L)])
        start = {
            "identity": dict(lam1=one / 2, lam2=one / 2),       # fixed
            "sparse": dict(lam1=config.constant * target,       # fixed: a strong V_1 in the target layers alone
                           lam2=torch.where(target, config.self_weight, 1.0)),
            "svformer": dict(lam1=one, lam2=0 * one),           # fixed: V_1 alone; layers above the source have no W^V
            "zero": dict(lam1=0 * one),                         # trained: starts as the baseline, bit for bit
            "convex": dict(lam1=one / 2),                       # trained
            "learnable": dict(lam1=one / 2, lam2=one / 2),      # trained
            "learnable_plus": dict(z=0 * one, s=torch.tensor(float(L)), lam2=one / 2),       # trained: lam1 starts at 1
        }[config.variant]
        trained = config.variant in TRAINED and config.source < L - 1        # with no layer above, nothing would learn
        for name, value in start.items():
            if trained:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def make_block(self, config, n):
        return SharedValueBlock(config, n) if has_no_values(config, n) else Block(config, n)

    @staticmethod
    def cache_slots(config):
        values = [n for n in range(config.n_layer) if not has_no_values(config, n)]
        return config.n_layer, len(values)


class SharedValueBlock(Block):
    """A block of SVFormer above the source layer: no W^V. Its own values have weight 0, so 0 stands for them."""

    def __init__(self, config, n):
        super().__init__(config, n)
        del self.wv

    def v(self, h):
        return 0.0


def has_no_values(config, n):
    return config.variant == "svformer" and n > config.source


FIXED, TRAINED = ("identity", "sparse", "svformer"), ("zero", "convex", "learnable", "learnable_plus")


@dataclass
class ValueResidualConfig(GPTConfig):
    variant: str = "identity"          # fixed: identity sparse svformer; trained: zero convex learnable learnable_plus
    source: int = 0                    # code layer whose values are handed up: 0 is the paper's V_1
    targets: tuple[int, ...] = ()      # sparse: code layers that receive them (none: all above the source)
    constant: float = 2.0              # sparse: lam1 of the receiving layers
    self_weight: float = 1.0           # sparse: lam2 of the receiving layers

    def __post_init__(self):
        super().__post_init__()
        self.require_one_of("variant", FIXED + TRAINED)
        self.require("source", 0 <= self.source < self.n_layer, f"give a code layer from 0 to {self.n_layer - 1}")
        for name in ("targets", "constant", "self_weight"):
            unset = getattr(self, name) == getattr(ValueResidualConfig, name)
            self.require(name, unset or self.variant == "sparse", "only variant=sparse reads it: leave it out")
        self.require("targets", all(self.source < n < self.n_layer for n in self.targets),
                     f"give code layers above source={self.source} and below n_layer={self.n_layer}")


def flops_per_token(config, T):
    """As model.flops_per_token, plus the mix: three FLOPs for each value above the source. SVFormer's mix only
    copies V_1 and counts none; it has no value projection there."""
    width = config.n_kv_head * config.head_dim
    per_layer = -2 * config.n_embd * width if config.variant == "svformer" else 3 * width
    return model.add_forward_flops(model.flops_per_token(config, T), (config.n_layer - 1 - config.source) * per_layer)


if __name__ == "__main__":
    from tools.prove import main
    main({"value_residual": (ValueResidualConfig, ValueResidual)})
