"""
Shortcuts: the same idea as the value residual, at the places where it helps less, not at all, or hurts.

A layer computes queries, keys, an attention matrix, values, an attention output and a new hidden state. The value
residual hands the first layer's values to the later ones. Here the first layer's other tensors are handed up in the
same way, so that one can see why the value is the place.

    Zhou et al., Value Residual Learning, arXiv 2410.17897; NeuTRENO: Nguyen et al., 2023, as in the same paper

    paper                          here
    H_{n-1}                        x                      (B, T, D)      from 0: paper layer n is code layer n-1
    Q_1, K_1, V_1                  q1, k1, v1             of code layer 0; q and k after norm and rotation
    H_0                            h0                     (B, T, D)      the embedding
    A_n = softmax(Q_n K_n^T/...)   pattern(q, k)          (B, H, T, T)
    U_n                            u                      (B, H, T, d)
    lambda_1, lambda_2             lam1[n], lam2[n]       (L,) each: the weight of what is handed up, and of the own

    variant                        mix                                       paper's loss, 82M, 8 layers: 2.739 without
    (value_residual.py             v = .5 v1 + .5 v                          2.712)
    query, key                     q = .5 q1 + .5 q; k = .5 k1 + .5 k        2.742, 2.746
    matrix                         A = .5 A_1 + .5 A_n                       2.757
    output                         u = A_n v + v1                            3.137 for one of these two, not said which
    output_half                    u = .5 A_n v + .5 v1
    neutreno                       u = A_n v + .4 (v1 - v)                   (not in that table)
    hidden                         x = .5 H_0 + .5 x                         2.781
    hidden_zero, query_zero, ...   x = x + lam H_0, lam = 0 and trained      2.722 for hidden
    hidden_sum, hidden_sum_learned x = x + .5 H_0, fixed and trained         not in the paper
    hidden_half_learned            x = .5 H_0 + .5 x, both trained           not in the paper
    resid_start                    blocks 1..s write without adding x        (figure only: V_2's shortcut then helps)
    resid_start_value              the same, with the value residual .5 v1 + .5 v from layer `source`

Cost: at most 2L parameters, 3 FLOPs for each number mixed, no cache beyond the baseline's. `matrix` cannot use a fused
attention: it makes a T x T matrix for each head and layer, and training keeps them all.

What breaks without each part: with (lam1, lam2) = (0, 1) and no stream cut, every loop is the baseline, bit for bit
except `matrix`, whose softmax is written out; the zero-started variants begin there. `query`, `key`, `matrix`,
`output` and `neutreno` begin at the second layer, so the first entries of their weights are dead; `hidden` mixes
after every layer, the last one too.

What the rows do and do not show. (1) "0.5/0.5 hurts, from zero helps" changes three things at once: the weight of
H_0, the sum of both weights, and whether they are trained. The hidden arms above take them apart. (2) That a shortcut
from V_2 gives little because the residual carries H_1 forward is a hypothesis: it carries H_0 forward as well. (3) A
value shortcut moves what attention carries "without changing where it looks" inside one layer only; every later
layer's pattern changes with its input. (4) Dropping MUDD's learned query or key reads does cost loss, so those places
are not useless.

Where paper, release and this file differ: the release holds NeuTRENO and the value residual alone. Of the losses
above 2.739 and 2.712 were read in the paper; the others are a later version's, known here at second hand. Queries and
keys are mixed after QK-norm and rotation, here and for both. For the rotation it makes no difference, since both
parts of a mix stand at one position; for the norm it does: the mean of two normed queries is shorter, and looks less
sharply. The released NeuTRENO adds (B, T, H d) to (B, T, Hkv d) and needs Hkv = H; here the value is repeated for its
query heads. A stream that starts at H_s is read as: blocks 1..s write attention + FFN without adding what they were
given.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn

import model
from model import GPT, GPTConfig, attend


class Shortcut(GPT):
    """The baseline with lam1[n] and lam2[n], the weights of what is handed up and of the layer's own. A subclass for
    each place holds its loop; Shortcut(config) makes the one that config.variant names."""

    def __new__(cls, config=None):                                       # no config: a copy of an object of class cls
        return super().__new__(VARIANTS[config.variant][0] if config else cls)

    def __init__(self, config):
        super().__init__(config)
        add_weights(self, config)


class Query(Shortcut):
    def layers(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            if n == 0:
                q1 = q
            else:
                q = self.lam1[n] * q1 + self.lam2[n] * q                 # Q'_n
            self.record(n, x=x[None], q=q, k=k, v=v)
            x = block.finish(x, attend(q, k, v, cache, n))
        return x


class Key(Shortcut):
    def layers(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            if n == 0:
                k1 = k
            else:
                k = self.lam1[n] * k1 + self.lam2[n] * k                 # K'_n, which the cache stores
            self.record(n, x=x[None], q=q, k=k, v=v)
            x = block.finish(x, attend(q, k, v, cache, n))
        return x


class Matrix(Shortcut):
    def layers(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            self.record(n, x=x[None], q=q, k=k, v=v)
            if cache is not None:
                k, v = cache.append(n, k, v)                             # (B, Hkv, S, d), S tokens so far
            A = pattern(q, k)                                            # (B, H, T, S)
            if n == 0:
                A1 = A
            else:
                A = self.lam1[n] * A1 + self.lam2[n] * A                 # A'_n
            x = block.finish(x, A @ per_query_head(v, q))
        return x


class Output(Shortcut):
    def layers(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            self.record(n, x=x[None], q=q, k=k, v=v)
            u = attend(q, k, v, cache, n)                                # A_n V_n
            if n == 0:
                v1 = v
            else:
                u = self.lam1[n] * per_query_head(v1, q) + self.lam2[n] * u     # U_n: V_1 of this token, not moved
            x = block.finish(x, u)
        return x


class NeuTRENO(Shortcut):
    def layers(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            self.record(n, x=x[None], q=q, k=k, v=v)
            u = attend(q, k, v, cache, n)
            if n == 0:
                v1 = v
            else:
                u = self.lam2[n] * u + self.lam1[n] * per_query_head(v1 - v, q)
            x = block.finish(x, u)
        return x


class Hidden(Shortcut):
    def layers(self, x, rope, cache=None):
        h0 = x
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            self.record(n, x=x[None], q=q, k=k, v=v)
            x = block.finish(x, attend(q, k, v, cache, n))
            x = self.lam1[n] * h0 + self.lam2[n] * x                     # H'_n
        return x


class ResidStart(Shortcut):
    def layers(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            if n == self.config.source:
                v1 = v
            elif n > self.config.source:
                v = self.lam1[n] * v1 + self.lam2[n] * v                 # V'_n, or V_n itself: 0 V_1 + 1 V_n
            self.record(n, x=x[None], q=q, k=k, v=v)
            x = block.finish(self.skip[n] * x, attend(q, k, v, cache, n))       # skip 0: what came before is dropped
        return x


# -------------------------------------------------------------------------------------------------------- bookkeeping


def add_weights(self, config):
    """lam1 and lam2, (L,) each, as the variant's row says, and the factor of each block's incoming stream."""
    _, *start, trained = VARIANTS[config.variant]
    for name, value in zip(("lam1", "lam2"), start):
        value = torch.full((config.n_layer,), value)
        self.register_parameter(name, nn.Parameter(value)) if name in trained else self.register_buffer(name, value)
    self.skip = [float(n >= config.resid_start) for n in range(config.n_layer)]


def pattern(q, k):
    """Causal attention weights softmax(q k^T / sqrt(d)): q (B, H, T, d), k (B, Hkv, S, d) -> (B, H, T, S)."""
    scores = q @ per_query_head(k, q).transpose(-2, -1) / q.size(-1) ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.size(2) - q.size(2))
    return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)


def per_query_head(t, q):
    """Keys or values (B, Hkv, S, d), once for each of the H query heads: (B, H, S, d)."""
    return t.repeat_interleave(q.size(1) // t.size(1), dim=1)


VARIANTS = {             # the loop, lam1 and lam2 at the start, which of them are trained
    "query":               (Query, 0.5, 0.5, []),
    "key":                 (Key, 0.5, 0.5, []),
    "query_zero":          (Query, 0.0, 1.0, ["lam1"]),
    "key_zero":            (Key, 0.0, 1.0, ["lam1"]),
    "matrix":              (Matrix, 0.5, 0.5, []),
    "output":              (Output, 1.0, 1.0, []),
    "output_half":         (Output, 0.5, 0.5, []),
    "neutreno":            (NeuTRENO, 0.4, 1.0, []),
    "hidden":              (Hidden, 0.5, 0.5, []),
    "hidden_half_learned": (Hidden, 0.5, 0.5, ["lam1", "lam2"]),
    "hidden_sum":          (Hidden, 0.5, 1.0, []),
    "hidden_sum_learned":  (Hidden, 0.5, 1.0, ["lam1"]),
    "hidden_zero":         (Hidden, 0.0, 1.0, ["lam1"]),
    "resid_start":         (ResidStart, 0.0, 1.0, []),
    "resid_start_value":   (ResidStart, 0.5, 0.5, []),
}


@dataclass
class ShortcutConfig(GPTConfig):
    variant: str = "hidden"            # a row of VARIANTS: where the shortcut enters, and with which weights
    source: int = 0                    # resid_start_value: code layer whose values are handed up (1 is V_2)
    resid_start: int = 0               # resid_start*: that many blocks write their output without adding the stream

    def __post_init__(self):
        super().__post_init__()
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r}: choose one of {', '.join(VARIANTS)}")
        for name, heeded in (("source", self.variant == "resid_start_value"),
                             ("resid_start", self.variant.startswith("resid_start"))):
            if getattr(self, name) and not heeded:
                raise ValueError(f"{name}={getattr(self, name)} has no effect on variant={self.variant}: leave it out")
            if not 0 <= getattr(self, name) < self.n_layer:
                raise ValueError(f"{name}={getattr(self, name)}: give a number from 0 to {self.n_layer - 1}")


def flops_per_token(config, T):
    """As model.flops_per_token, plus the mix: 3 FLOPs for each number mixed, forward. `matrix` mixes a number for each
    pair that a token sees; its A is kept for the backward pass, so no score is computed again there."""
    flops, L, loop = model.flops_per_token(config, T), config.n_layer, VARIANTS[config.variant][0]
    heads, kv_heads = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    width = {Query: heads, Key: kv_heads, Matrix: config.n_head, Output: heads, NeuTRENO: heads, Hidden: config.n_embd,
             ResidStart: kv_heads}
    prefill = decode = 3 * width[loop] * (L if loop is Hidden else L - 1 - config.source)
    saved = 0
    if loop is Matrix:
        prefill, decode, saved = prefill * (T + 1) / 2, decode * (T + 1), L * heads * (T + 1)
    return flops | dict(train=flops["train"] + 3 * prefill - saved, prefill=flops["prefill"] + prefill,
                        decode=flops["decode"] + decode)


if __name__ == "__main__":
    from tools.prove import main
    main("shortcut")
