"""
Shortcuts: hand up another tensor of the first layer than its values, to see why the values are the place.

A layer makes queries, keys, an attention matrix, an attention output and a new hidden state. Each loop mixes one of
them with the first layer's, as value_residual.py does with the values; the hidden state is mixed with the embedding.
`resid_start` cuts the residual stream instead. The variant picks the loop and the weights.

    Zhou et al., Value Residual Learning, arXiv 2410.17897.
    neutreno: Nguyen, Nguyen and Baraniuk, Mitigating Over-smoothing in Transformers via Regularized Nonlocal
    Functionals, arXiv 2312.00751.

    paper                       here
    H_0, H_{n-1}                h0, x              (B, T, D)       paper layer n is code layer n-1; H_0 is the embedding
    Q_1, K_1, V_1, A_1          q1, k1, v1, A1     first layer's   q and k after norm and rotation
    A_n                         A                  (B, H, T, S)    the attention matrix
    U_n                         u                  (B, H, T, d)    the attention output
    lambda_1, lambda_2          lam1[n], lam2[n]   (L,) each       weights of the first layer's tensor and of the own

    cost        parameters   FLOPs per token and layer       cache            memory in training
                0 to 2L      3 for each number mixed         the baseline's   matrix: H T^2 numbers a layer

The *_zero variants and resid_start start as the baseline. The paper's losses stand at VARIANTS.
"""
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn

if not __package__:                     # run as `python baselines/shortcuts.py`: what it imports lies one folder up
    sys.path[0] += "/.."
import model
from model import GPT, GPTConfig, attention_weights, repeat_kv


class Shortcut(GPT):
    """X'_n = lam1[n] X_1 + lam2[n] X_n, for one tensor X of a layer; the hidden state is mixed with H_0."""

    def layers_query(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            if n == 0:
                q1 = q
            else:
                # Two normed queries average to a shorter one: the attention of Q'_n is less sharp.
                q = self.lam1[n] * q1 + self.lam2[n] * q
            x = block.finish(x, self.attend(n, q, k, v, cache))
        return x

    def layers_key(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            if n == 0:
                k1 = k
            else:
                # Both keys belong to one token, so the order of mix and rotation makes no difference.
                k = self.lam1[n] * k1 + self.lam2[n] * k        # K'_n, which the cache stores
            x = block.finish(x, self.attend(n, q, k, v, cache))
        return x

    def layers_matrix(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            A, v = self.matrix(n, q, k, v, cache)               # (B, H, T, S), (B, H, S, d); no fused attention has A
            if n == 0:
                A1 = A
            else:
                A = self.lam1[n] * A1 + self.lam2[n] * A        # A'_n: its rows add up to lam1 + lam2, 1 here
            x = block.finish(x, A @ v)
        return x

    def layers_output(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            u = self.attend(n, q, k, v, cache)
            if n == 0:
                v1 = v
            else:                                               # V_1 of the token itself: attention does not move it
                u = self.lam1[n] * repeat_kv(v1, q) + self.lam2[n] * u
            x = block.finish(x, u)
        return x

    def layers_neutreno(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            u = self.attend(n, q, k, v, cache)
            if n == 0:
                v1 = v
            else:                                               # (A_n - lam1 I) V_n + lam1 V_1: less of the own value
                u = self.lam2[n] * u + self.lam1[n] * repeat_kv(v1 - v, q)
            x = block.finish(x, u)
        return x

    def layers_hidden(self, x, rope, cache=None):
        h0 = x
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            x = block.finish(x, self.attend(n, q, k, v, cache))
            # H'_n, of the last layer too. lam2 = .5 halves, in every layer, all that the layers below have added.
            x = self.lam1[n] * h0 + self.lam2[n] * x
        return x

    def layers_resid_start(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            if n == self.source:
                v1 = v
            elif n > self.source:                               # (lam1, lam2) = (0, 1) in resid_start: no shortcut
                v = self.lam1[n] * v1 + self.lam2[n] * v
            if n < self.resid_start:
                x = torch.zeros_like(x)                         # this block does not add its input: the stream is cut
            x = block.finish(x, self.attend(n, q, k, v, cache))
        return x

    def matrix(self, n, q, k, v, cache):
        """What `attend` does short of the product A v: A (B, H, T, S), and the values of the S tokens (B, H, S, d)."""
        self.record(n, q=q, k=k, v=v)
        if cache is not None:
            k, v = cache.append(n, k, v)
        return attention_weights(q, k), repeat_kv(v, q)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        self.place, *start, trained = VARIANTS[config.variant]
        self.source, self.resid_start = config.source, config.resid_start
        self.LOOP = (f"layers_{self.place}",)                   # what --diff shows
        mixes = self.place == "hidden" or config.n_layer > 1    # with no layer above, nothing would learn
        for name, value in zip(("lam1", "lam2"), start):
            value = torch.full((config.n_layer,), value)
            if name in trained and mixes:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def layers(self, x, rope, cache=None):
        return getattr(self, f"layers_{self.place}")(x, rope, cache)


VARIANTS = {
    # Place, lam1 and lam2 at the start, and which of them are trained. The losses are the paper's: one run each, 82M
    # parameters, 8 layers; without a shortcut 2.739, with .5 V_1 + .5 V_n 2.712. Those without a loss are ours.
    "query":               ("query", 0.5, 0.5, ()),                    # 2.742
    "key":                 ("key", 0.5, 0.5, ()),                      # 2.746
    "query_zero":          ("query", 0.0, 1.0, ("lam1",)),
    "key_zero":            ("key", 0.0, 1.0, ("lam1",)),
    "matrix":              ("matrix", 0.5, 0.5, ()),                   # 2.757
    "output":              ("output", 1.0, 1.0, ()),                   # 3.137 is for this one or for output_half:
    "output_half":         ("output", 0.5, 0.5, ()),                   # our source does not say which
    "neutreno":            ("neutreno", 0.4, 1.0, ()),                 # not in that table
    "hidden":              ("hidden", 0.5, 0.5, ()),                   # 2.781
    "hidden_zero":         ("hidden", 0.0, 1.0, ("lam1",)),            # 2.722
    "hidden_half_learned": ("hidden", 0.5, 0.5, ("lam1", "lam2")),     # From `hidden` to `hidden_zero` three things
    "hidden_sum":          ("hidden", 0.5, 1.0, ()),                   # change: lam1, the sum of both, and training.
    "hidden_sum_learned":  ("hidden", 0.5, 1.0, ("lam1",)),            # These three change them one at a time.
    "resid_start":         ("resid_start", 0.0, 1.0, ()),              # only in a figure: here a shortcut from V_2
    "resid_start_value":   ("resid_start", 0.5, 0.5, ()),              # helps, which elsewhere does not
}


@dataclass
class ShortcutConfig(GPTConfig):
    variant: str = "hidden"            # a row of VARIANTS: where the shortcut enters, and with which weights
    source: int = 0                    # resid_start_value: code layer whose values are handed up (1 is V_2)
    resid_start: int = 0               # resid_start, resid_start_value: how many blocks do not add their input

    def __post_init__(self):
        super().__post_init__()
        self.require_one_of("variant", VARIANTS)
        for name, readers in (("source", ["resid_start_value"]), ("resid_start", ["resid_start", "resid_start_value"])):
            self.require(name, getattr(self, name) == 0 or self.variant in readers,
                         f"only variant={' and '.join(readers)} reads it: leave it out")
            self.require(name, 0 <= getattr(self, name) < self.n_layer, f"give a number from 0 to {self.n_layer - 1}")


def flops_per_token(config, T):
    """As model.flops_per_token, plus the mix: 3 FLOPs for each number mixed. `matrix` mixes a number for each pair that
    a token sees. It keeps A for the backward pass, which the baseline computes again."""
    heads, kv_heads = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    flops, place = model.flops_per_token(config, T), VARIANTS[config.variant][0]
    width = dict(query=heads, key=kv_heads, matrix=config.n_head, output=heads, neutreno=heads, hidden=config.n_embd,
                 resid_start=kv_heads)[place]
    mix = 3 * width * (config.n_layer if place == "hidden" else config.n_layer - 1 - config.source)
    if place != "matrix":
        return model.add_forward_flops(flops, mix)
    again = config.n_layer * heads * (T + 1)                    # 2 d for each head and pair: the scores, once
    return flops | dict(train=flops["train"] + 3 * mix * (T + 1) / 2 - again,
                        prefill=flops["prefill"] + mix * (T + 1) / 2, decode=flops["decode"] + mix * (T + 1))


if __name__ == "__main__":
    from tools.prove import main
    main({"shortcut": (ShortcutConfig, Shortcut)})
