"""
LIMe, layer-integrated memory: a layer's keys and values are a trained sum of those of all layers so far.

A layer of a plain transformer attends to keys and values of one place, its own input. Here each layer still projects
its input once, but a table of weights adds up all heads of all layers up to this one, any old head into any new head.
The table is the same for every token, and the same for keys and values.

    Gerasimov et al., You Do Not Fully Utilize Transformer's Representation Capacity, arXiv 2502.09245 (second version).

    paper                                 here
    R                                     n_kv_head
    kv_{j,g} = [k ; v], before RoPE       keys[j][g], values[j][g]   (B, T, d) each    layers count from 0 in both
    M_l, all rows (j, g) with j <= l      the lists keys, values     (R, B, T, d) for each layer
    W_l                                   block.router               (R, (n+1) R), none in layer 0; l is n here
    [kt ; vt]_{l,h}                       k[h], v[h] after `route`   (B, T, d) each

    cost in layer n > 0     R^2 (n+1) parameters, 4 d R^2 (n+1) FLOPs per token
    cache                   the baseline's: it holds the routed kt, vt, so decoding routes the new token alone
    memory in training      linear in L: raw keys and values are kept once, not once for each reader

start=identity starts as the baseline. The default does not: it adds noise of nearly the power of the layer's own.
"""
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn

if not __package__:                     # run as `python baselines/lime.py`: what it imports lies one folder up
    sys.path[0] += "/.."
import kernels
import model
from model import GPT, Block, GPTConfig, normal, rotate


def route(W, rows):
    """Head h is the sum over layers j and heads g of W[h, (j, g)] rows[j][g]. W (R, (n+1) R), rows n+1 (R, B, T, d)."""
    routed = 0
    for W_j, row in zip(W.split(W.size(0), dim=1), rows):       # W_j (R, R): from the heads of layer j to the new ones
        routed = routed + (W_j @ row.flatten(1)).view_as(row)   # no softmax: weights may be negative
    return routed                                               # (R, B, T, d)


class LIMe(GPT):
    """[kt ; vt]_{l,h} = sum_{j <= l} sum_g W_l[h, (j, g)] [k ; v]_{j,g}, in every layer after the first."""

    def layers(self, x, rope, cache=None):
        keys, values = [], []                                   # M_l: of these tokens only
        for n, block in enumerate(self.blocks):
            q, k, v = block.project(x, rope)                    # k and v (R, B, T, d), raw
            keys.append(k)                                      # raw: with routed rows the tables would compound
            values.append(v)
            if n > 0:
                k, v = self.routed(n, keys, values)
            k, v = block.norm_and_rotate(k, v, rope)            # QK-norm last: the norm of a sum is no sum of norms
            x = block.finish(x, self.attend(n, q, k, v, cache))
        return x

    def routed(self, n, keys, values):
        W = self.blocks[n].router
        self.record(n, weights=W[None, None, None])
        k = keys[-1] if self.config.route == "v" else route(W, keys)         # one table for both, as released
        return k, route(W, values)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def make_block(self, config, n):
        return LIMeBlock(config, n)

    def param_groups(self):
        """The tables have a group of their own: at the model's learning rate, or with decay, they hardly move."""
        routers = [block.router for block in self.blocks[1:]]
        groups = super().param_groups()
        for group in groups:
            group["params"] = [p for p in group["params"] if p not in set(routers)]
        return groups + [dict(params=routers, decay=False, lr_scale=self.config.router_lr_scale)]

    def compile_pieces(self):
        super().compile_pieces()
        kernels.compile_methods(self.blocks, "project", "norm_and_rotate")


class LIMeBlock(Block):
    """A block that stops between the projections and the QK-norm of the keys."""

    def __init__(self, config, n):
        super().__init__(config, n)
        R, fan_in = config.n_kv_head, (n + 1) * config.n_kv_head
        if n == 0:                                              # one layer so far: its own keys and values
            return
        own = torch.eye(R, fan_in).roll(n * R, dims=1)          # the last R columns are the identity: this layer
        noise = normal(config, f"blocks.{n}.router", R, fan_in, std=0.5 ** 0.5).detach().erf()
        noise[:, n * R:] = 0                                    # erf of N(0, 1/2) is uniform in -1..1, of variance 1/3
        scale = (3 / fan_in) ** 0.5 if config.start == "release" else 0      # then the variance is 1 / fan_in
        self.router = nn.Parameter(own + scale * noise)

    def project(self, x, rope):
        """x (B, T, D) -> q (B, H, T, d) normed and rotated; k, v (R, B, T, d) raw."""
        h = self.norm1(x)
        k, v = (self.heads(w(h)).permute(2, 0, 1, 3).contiguous() for w in (self.wk, self.wv))
        return self.q(h, rope), k, v

    def norm_and_rotate(self, k, v, rope):
        """k, v (R, B, T, d) -> what attention reads, (B, R, T, d)."""
        return rotate(self.k_norm(k).transpose(0, 1), rope), v.transpose(0, 1)


@dataclass
class LIMeConfig(GPTConfig):
    start: str = "release"             # release: own block and uniform noise; identity: own block alone, the baseline
    route: str = "kv"                  # kv: keys and values by one table, as released; v: values only
    router_lr_scale: float = 10.0      # learning rate of the tables, in units of the model's

    def __post_init__(self):
        super().__post_init__()
        self.require_one_of("start", ("release", "identity"))
        self.require_one_of("route", ("kv", "v"))
        self.require("router_lr_scale", self.router_lr_scale > 0, "give a positive number")


def flops_per_token(config, T):
    """As model.flops_per_token, plus the routing above layer 0: (n+1) R products for each of R d numbers."""
    routed, R = len(config.route), config.n_kv_head             # "kv": both; "v": one
    extra = sum(2 * routed * config.head_dim * R * R * (n + 1) for n in range(1, config.n_layer))
    return model.add_forward_flops(model.flops_per_token(config, T), extra)


if __name__ == "__main__":
    from tools.prove import main
    main({"lime": (LIMeConfig, LIMe)})
