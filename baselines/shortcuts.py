"""
Shortcuts: the same idea as the value residual, at the places where it helps less, not at all, or hurts.

A layer computes queries, keys, an attention matrix, values, an attention output and a new hidden state. The value
residual hands the first layer's values to the later ones. Here the first layer's other tensors are handed up in the same
way, so that one can see why the value is the place.

    Zhou et al., Value Residual Learning, arXiv 2410.17897; NeuTRENO: Nguyen et al., 2023, as in the same paper

    paper                          here
    H_{n-1}                        x                      (B, T, D)      n counts from 0: paper layer n is code layer n-1
    Q_1, K_1, V_1                  q1, k1, v1             of code layer 0; q and k after the rotation
    A_n = softmax(Q_n K_n^T/...)   pattern(q, k)          (B, H, T, T)
    U_n                            u                      (B, H, T, d)
    lambda_1, lambda_2             lam1[n], lam2[n]       (L,) each: the weight of what is handed up, and of the own

    variant                        mix                                       the paper's loss, 82M, 8 layers (baseline 2.739)
    query, key                     q = .5 q1 + .5 q                          2.742, 2.746
    matrix                         A = .5 A_1 + .5 A_n                       2.757
    output                         u = A_n v + v1                            3.137, for one of these two: which is not said
    output_half                    u = .5 A_n v + .5 v1
    neutreno                       u = A_n v + .4 (v1 - v)                   as above, with the own value taken out
    hidden                         x = .5 H_0 + .5 x                         2.781
    hidden_zero, query_zero, ...   x = x + lam H_0, lam = 0 and trained      2.722 for hidden
    hidden_sum, hidden_sum_learned x = x + .5 H_0, fixed and trained         not in the paper
    hidden_half_learned            x = .5 H_0 + .5 x, both trained           not in the paper
    resid_start                    blocks 1..s write without adding x        (a figure only: a shortcut from V_2 then helps)
    resid_start_value              the same, with the value residual .5 v1 + .5 v from layer `source`

Cost: at most 2L parameters; `matrix` keeps two T x T matrices for each head, of the first layer and of the current one.

What the rows do and do not show. (1) "0.5/0.5 hurts, from zero helps" changes three things at once: the weight of H_0,
the sum of both weights, and whether they are trained. The hidden arms above take them apart. (2) That a shortcut from V_2
gives little because the residual carries H_1 forward is a hypothesis: it carries H_0 forward as well. (3) A value
shortcut moves what attention carries "without changing where it looks" inside one layer only; every later layer's pattern
changes with its input. (4) Dropping MUDD's learned query or key reads does cost loss, so those places are not useless.

Where paper, release and this file differ: the release holds NeuTRENO and the value residual alone. Queries and keys are
mixed after the rotation (position by position the same rotation, so for q and k alike mixing before it is the same).
The released NeuTRENO adds (B, T, H d) to (B, T, Hkv d) and needs Hkv = H; here the value is repeated for its query heads.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn

import model
from model import GPT, GPTConfig, attend


# Each place has its own loop. lam1 and lam2 are model.lam1 and model.lam2, (L,), from the variant's row of VARIANTS.


def query(model, x, rope, cache=None):
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        q1 = q if n == 0 else q1
        q = q if n == 0 else model.lam1[n] * q1 + model.lam2[n] * q
        model.record(n, x=x[None], q=q, k=k, v=v)
        x = block.finish(x, attend(q, k, v, cache, n))
    return x


def key(model, x, rope, cache=None):
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        k1 = k if n == 0 else k1
        k = k if n == 0 else model.lam1[n] * k1 + model.lam2[n] * k
        model.record(n, x=x[None], q=q, k=k, v=v)
        x = block.finish(x, attend(q, k, v, cache, n))
    return x


def matrix(model, x, rope, cache=None):
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        model.record(n, x=x[None], q=q, k=k, v=v)
        k, v = (k, v) if cache is None else cache.append(n, k, v)
        A = pattern(q, k)                                                # (B, H, T, S), S tokens so far
        A1 = A if n == 0 else A1
        A = A if n == 0 else model.lam1[n] * A1 + model.lam2[n] * A
        x = block.finish(x, A @ per_query_head(v, q))
    return x


def output(model, x, rope, cache=None):
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        model.record(n, x=x[None], q=q, k=k, v=v)
        v1 = v if n == 0 else v1
        u = attend(q, k, v, cache, n)                                    # A_n V_n
        u = u if n == 0 else model.lam1[n] * per_query_head(v1 - model.own * v, q) + model.lam2[n] * u
        x = block.finish(x, u)
    return x


def hidden(model, x, rope, cache=None):
    h0 = x
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        model.record(n, x=x[None], q=q, k=k, v=v)
        x = block.finish(x, attend(q, k, v, cache, n))
        x = model.lam1[n] * h0 + model.lam2[n] * x                       # H'_n
    return x


def resid_start(model, x, rope, cache=None):
    for n, block in enumerate(model.blocks):
        q, k, v = block.qkv(x, rope)
        if n == model.config.source:
            v1 = v
        elif n > model.config.source:
            v = model.lam1[n] * v1 + model.lam2[n] * v                   # the value residual, or nothing: 0 v1 + 1 v
        model.record(n, x=x[None], q=q, k=k, v=v)
        x = block.finish(model.skip[n] * x, attend(q, k, v, cache, n))   # skip 0: the stream begins anew
    return x


# -------------------------------------------------------------------------------------------------------- bookkeeping


def pattern(q, k):
    """Causal attention weights softmax(q k^T / sqrt(d)): q (B, H, T, d), k (B, Hkv, S, d) -> (B, H, T, S)."""
    scores = q @ per_query_head(k, q).transpose(-2, -1) / q.size(-1) ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.size(2) - q.size(2))
    return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)


def per_query_head(t, q):
    """Keys or values (B, Hkv, S, d), once for each of the H query heads: (B, H, S, d)."""
    return t.repeat_interleave(q.size(1) // t.size(1), dim=1)


VARIANTS = {             # where it enters, lam1 and lam2 at the start, which of them are trained
    "query":               (query, 0.5, 0.5, []),
    "key":                 (key, 0.5, 0.5, []),
    "query_zero":          (query, 0.0, 1.0, ["lam1"]),
    "key_zero":            (key, 0.0, 1.0, ["lam1"]),
    "matrix":              (matrix, 0.5, 0.5, []),
    "output":              (output, 1.0, 1.0, []),
    "output_half":         (output, 0.5, 0.5, []),
    "neutreno":            (output, 0.4, 1.0, []),
    "hidden":              (hidden, 0.5, 0.5, []),
    "hidden_half_learned": (hidden, 0.5, 0.5, ["lam1", "lam2"]),
    "hidden_sum":          (hidden, 0.5, 1.0, []),
    "hidden_sum_learned":  (hidden, 0.5, 1.0, ["lam1"]),
    "hidden_zero":         (hidden, 0.0, 1.0, ["lam1"]),
    "resid_start":         (resid_start, 0.0, 1.0, []),
    "resid_start_value":   (resid_start, 0.5, 0.5, []),
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
        for name in ("source", "resid_start"):
            if getattr(self, name) and not self.variant.startswith("resid_start"):
                raise ValueError(f"{name}={getattr(self, name)} has no effect on variant={self.variant}: leave it out")
            if not 0 <= getattr(self, name) < self.n_layer:
                raise ValueError(f"{name}={getattr(self, name)}: give a number from 0 to {self.n_layer - 1}")


class Shortcut(GPT):
    """The baseline with one shortcut; config.variant says which."""

    def __init__(self, config):
        super().__init__(config)
        self.place, lam1, lam2, trained = VARIANTS[config.variant]
        for name, value in (("lam1", lam1), ("lam2", lam2)):
            value = torch.full((config.n_layer,), value)
            self.register_parameter(name, nn.Parameter(value)) if name in trained else self.register_buffer(name, value)
        self.own = float(config.variant == "neutreno")                   # NeuTRENO takes the layer's own value out
        self.skip = [float(n >= config.resid_start) for n in range(config.n_layer)]

    def layers(self, x, rope, cache=None):
        return self.place(self, x, rope, cache)


def flops_per_token(config, T):
    """As model.flops_per_token, plus the mix: 3 FLOPs for each number mixed, 3 T for each of `matrix`'s T x T pairs."""
    flops, L, (place, *_) = model.flops_per_token(config, T), config.n_layer, VARIANTS[config.variant]
    width = {query: config.n_head * config.head_dim, output: config.n_head * config.head_dim, hidden: config.n_embd,
             key: config.n_kv_head * config.head_dim, resid_start: config.n_kv_head * config.head_dim}
    whole = 3 * config.n_head * (L - 1)
    prefill = whole * (T + 1) / 2 if place is matrix else 3 * width[place] * (L if place is hidden else L - 1 - config.source)
    decode = whole * (T + 1) if place is matrix else prefill
    return flops | dict(train=flops["train"] + 3 * prefill, prefill=flops["prefill"] + prefill,
                        decode=flops["decode"] + decode)


if __name__ == "__main__":
    from tools.prove import main
    main("shortcut")
