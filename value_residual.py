"""
Value residual: every layer's attention moves a mixture of its own values and the first layer's.

A deep layer's values are read from a stream in which the layers below have overwritten much of what the token was.
ResFormer mixes the first layer's values V_1 into the values of every later layer, before attention moves them. Where
a layer looks is untouched (inside that layer); what it finds there is not. In SVFormer all layers move V_1 itself.

    Zhou et al., Value Residual Learning, arXiv 2410.17897; convex and trained: modded-nanogpt, record of 2024-11-06

    paper                            here
    H_{n-1}, the input of layer n    x                  (B, T, D)      n counts from 0: paper layer n is code layer n-1
    V_n = norm(H_{n-1}) W_n^V        v                  (B, Hkv, T, d)
    V_1                              v1                 (B, Hkv, T, d), not detached
    lambda_{n,1}, lambda_{n,2}       lam1[n], lam2[n]   (L,) each
    V'_n                             v after the mix    what attention moves and what the cache stores
    U_n = A_n V'_n                   attend(q, k, v)

Cost: at most 2L+1 parameters and 3 Hkv d FLOPs per token and layer; no cache beyond the baseline's, since V'_n is
stored in the place of V_n; in training, V_1 is kept anyway. SVFormer saves (L-1) D Hkv d parameters, L-1 value slots.

What breaks without each part: (lam1, lam2) = (0, 1) is the baseline, bit for bit. With V_1 detached, W_1^V learns from
its own layer only. Mixed a second time, after reading V' from a cache, decoding no longer equals the full forward.
The default does not start as the baseline: 0.5/0.5 is another function than 0/1. The variant `zero` does start there.

Where paper, release and this file differ. The release holds `identity` alone; the others follow the paper's text and
two ports. `learnable_plus` is not settled by either: here lam1 = s softmax(z), z = 0 and s = L at the start, over all
L layers. In the trained variants lam1 and lam2 are dead up to the source layer: their entries there get a zero
gradient and are not learned values (the z there are not dead, because one softmax ties all z together). SVFormer's
release writes the shared value into every layer's cache and saves nothing; here it has one slot. The paper's gains
are single runs; its 16 % fewer parameters and 20 % fewer tokens are a later version's, not `identity`'s first
figures, 10.4 % and 13.6 %.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn

import model
from model import GPT, Block, GPTConfig, attend


class ValueResidual(GPT):
    def layers(self, x, rope, cache=None):
        lam1, lam2 = self.weights()
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            if n == self.config.source:
                v1 = v
            elif n > self.config.source:
                v = lam1[n] * v1 + lam2[n] * v                           # V'_n: the value residual
            self.record(n, x=x[None], q=q, k=k, v=v)
            x = block.finish(x, attend(q, k, v, cache, n))
        return x

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        trained, start, self.rule = VARIANTS[config.variant]
        for name, value in start(config).items():
            value = value.clone()
            self.register_parameter(name, nn.Parameter(value)) if trained else self.register_buffer(name, value)
        self.names = list(start(config))

    def weights(self):
        """(lam1, lam2), (L,) each, from the variant's numbers."""
        return self.rule(*(getattr(self, name) for name in self.names))

    def make_block(self, config, n):
        shared = config.variant == "svformer" and n > config.source
        return SharedValueBlock(config, n) if shared else Block(config, n)

    @staticmethod
    def cache_slots(config):
        """(key slots, value slots): from the source layer up, SVFormer writes one value slot."""
        return config.n_layer, config.source + 1 if config.variant == "svformer" else config.n_layer


class SharedValueBlock(Block):
    """A block of SVFormer above the source layer: no W^V. Its own share of the mix, 0 times V_n, is 0."""

    def __init__(self, config, n):
        super().__init__(config, n)
        del self.wv

    def v(self, h):
        return 0.0


@dataclass
class ValueResidualConfig(GPTConfig):
    variant: str = "identity"          # fixed: identity sparse svformer; trained: zero convex learnable learnable_plus
    source: int = 0                    # code layer whose values are handed up: 0 is the paper's V_1
    targets: tuple[int, ...] = ()      # sparse: code layers that receive them (none: all above the source)
    constant: float = 2.0              # sparse: lam1 of the receiving layers
    self_weight: float = 1.0           # sparse: lam2 of the receiving layers

    def __post_init__(self):
        super().__post_init__()
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r}: choose one of {', '.join(VARIANTS)}")
        if not 0 <= self.source < self.n_layer:
            raise ValueError(f"source={self.source}: give a code layer from 0 to {self.n_layer - 1}")
        for name in ("targets", "constant", "self_weight"):
            if self.variant != "sparse" and getattr(self, name) != getattr(ValueResidualConfig, name):
                raise ValueError(f"{name}={getattr(self, name)} has no effect on variant={self.variant}: "
                                 f"leave it out, or give variant=sparse")
        if not all(self.source < n < self.n_layer for n in self.targets):
            raise ValueError(f"targets={self.targets}: give code layers above source={self.source} "
                             f"and below n_layer={self.n_layer}")


def each(config, value):
    return torch.full((config.n_layer,), value)


def chosen(config, on, off):
    """(L,): `on` in the target layers, `off` in the others."""
    return torch.tensor([on if not config.targets or n in config.targets else off for n in range(config.n_layer)])


VARIANTS = {   # name: (trained?, the numbers at the start, how (lam1, lam2) come from them)
    "identity":       (False, lambda c: dict(lam1=each(c, 0.5), lam2=each(c, 0.5)), lambda lam1, lam2: (lam1, lam2)),
    "sparse":         (False, lambda c: dict(lam1=chosen(c, c.constant, 0.0), lam2=chosen(c, c.self_weight, 1.0)),
                       lambda lam1, lam2: (lam1, lam2)),
    "svformer":       (False, lambda c: dict(lam1=each(c, 1.0), lam2=each(c, 0.0)), lambda lam1, lam2: (lam1, lam2)),
    "zero":           (True, lambda c: dict(lam1=each(c, 0.0)), lambda lam1: (lam1, torch.ones_like(lam1))),
    "convex":         (True, lambda c: dict(lam1=each(c, 0.5)), lambda lam1: (lam1, 1 - lam1)),
    "learnable":      (True, lambda c: dict(lam1=each(c, 0.5), lam2=each(c, 0.5)), lambda lam1, lam2: (lam1, lam2)),
    "learnable_plus": (True, lambda c: dict(z=each(c, 0.0), s=torch.tensor(float(c.n_layer)), lam2=each(c, 0.5)),
                       lambda z, s, lam2: (s * z.softmax(dim=0), lam2)),
}


def flops_per_token(config, T):
    """As model.flops_per_token, plus the mix: three FLOPs for each value above the source layer. SVFormer has no mix, and
    no value projection there."""
    flops, width = model.flops_per_token(config, T), config.n_kv_head * config.head_dim
    per_layer = -2 * config.n_embd * width if config.variant == "svformer" else 3 * width
    extra = (config.n_layer - 1 - config.source) * per_layer
    return flops | dict(train=flops["train"] + 3 * extra, prefill=flops["prefill"] + extra,
                        decode=flops["decode"] + extra)


if __name__ == "__main__":
    from tools.prove import main
    main("value_residual")
