"""
LIMe, layer-integrated memory: a head's keys and values are a trained sum of the keys and values of all layers so far.

A layer of a plain transformer attends to keys and values made from one place, its own input. In LIMe each layer still
projects its input once, but what a head attends to is routed: a table of weights adds up all heads of all layers up to
this one, any old head into any new head, the same table for keys and values. The table is static, the same for every
token; Depth-Attention's weights come from a query and keys, and touch values only.

    Gerasimov et al., You Do Not Fully Utilize Transformer's Representation Capacity, arXiv 2502.09245 (second version)

    paper                                 here
    R key and value heads                 n_kv_head
    kv_{j,g} = [k ; v], before RoPE       keys[j], values[j]    (R, B, T, d) each     layers count from 0
    M_l, all rows (j, g) with j <= l      the lists keys, values: raw, so that no router reads another's result
    W_l                                   block.router          (R, (l+1) R); none in layer 0
    [kt ; vt]_{l,h} = sum W_l kv_{j,g}    k, v after `route`

Cost: R^2 (l+1) parameters and 4 d R^2 (l+1) FLOPs per token in layer l; the cache holds the routed kt, vt and is the
baseline's. In training the raw keys and values are kept once, not once for each reader.

What breaks without each part: a table of zeros outside the own block is the baseline, bit for bit (start=identity). The
routing commutes with RoPE, which turns all rows of a token alike, but not with QK-norm: route first, then norm. A list
of routed rows would be another, recursive model. The default does not start as the baseline: own plus noise of nearly
the same power. Without its own group, at ten times the learning rate and without decay, the table hardly moves.

Where paper, release and this file differ. The release (corl-team/lime, 4242812) concatenates M_l anew in every layer;
here it is a list and the sum runs over it. It has no QK-norm, draws W^K and W^V uniform within 1/sqrt(D), and its
optimiser settings name parameters that no longer exist; here W^K and W^V start as the baseline's, N(0, init_std^2), so
that the table is the only difference. route=v, values only, and start=identity are this project's own arms. The first
release (601cd30) routed hidden states instead: for each query head a softmax over the inputs of all layers, static or
from the token, before W^K and W^V. That takes H times the stream's memory in every layer; it is not built.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn

import kernels
import model
from model import GPT, Block, GPTConfig, attend, normal, rotate


def route(W, rows):
    """W (R, (l+1) R), rows: l+1 tensors (R, B, T, d) -> (R, B, T, d): head h is the sum of W[h, (j, g)] rows[j][g]."""
    return sum((W_j @ row.flatten(1)).view_as(row) for W_j, row in zip(W.split(W.size(0), dim=1), rows))


class LIMe(GPT):
    def layers(self, x, rope, cache=None):
        keys, values = [], []                                            # M_l: raw, of these tokens only
        for l, block in enumerate(self.blocks):
            q, k, v = block.project(x, rope)
            keys.append(k)
            values.append(v)
            k = self.route_keys(block.router, keys)                      # kt_l
            v = route(block.router, values)                              # vt_l
            k, v = block.attended(k, v, rope)                            # norm and rotation after routing
            self.record(l, x=x[None], q=q, k=k, v=v, weights=block.router[None, None, None])
            x = block.finish(x, attend(q, k, v, cache, l))
        return x

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        self.route_keys = {"kv": route, "v": lambda W, keys: keys[-1]}[config.route]

    def make_block(self, config, n):
        return LIMeBlock(config, n)

    def param_groups(self):
        routers = [block.router for block in self.blocks[1:]]
        groups = [group | dict(params=[p for p in group["params"] if not any(p is r for r in routers)])
                  for group in super().param_groups()]
        return groups + [dict(params=routers, decay=False, lr_scale=self.config.router_lr_scale)]

    def compile_pieces(self):
        super().compile_pieces()
        kernels.compile_methods(self.blocks, "project", "attended")


class LIMeBlock(Block):
    """A block that stops between the projections and the QK-norm of the keys."""

    def __init__(self, config, n):
        super().__init__(config, n)
        R, fan_in = config.n_kv_head, (n + 1) * config.n_kv_head
        own = torch.eye(R, fan_in).roll(n * R, dims=1)                   # identity in the last R columns
        if n == 0:
            self.register_buffer("router", own, persistent=False)
        else:
            noise = torch.special.erf(normal(config, f"blocks.{n}.router", R, fan_in, std=0.5 ** 0.5).detach())
            noise[:, n * R:] = 0                                         # erf of N(0, 1/2) is uniform in -1..1
            self.router = nn.Parameter(own + (config.start == "release") * (3 / fan_in) ** 0.5 * noise)

    def project(self, x, rope):
        """x (B, T, D) -> q (B, H, T, d) normed and rotated; k, v (R, B, T, d) raw."""
        h = self.norm1(x)
        return self.q(h, rope), *(self.heads(w(h)).permute(2, 0, 1, 3).contiguous() for w in (self.wk, self.wv))

    def attended(self, k, v, rope):
        """Routed k, v (R, B, T, d) -> what attention reads, (B, R, T, d)."""
        return rotate(self.k_norm(k).transpose(0, 1), rope), v.transpose(0, 1)


@dataclass
class LIMeConfig(GPTConfig):
    start: str = "release"             # release: own block and uniform noise; identity: own block alone, the baseline
    route: str = "kv"                  # kv: keys and values by one table, as released; v: values only
    router_lr_scale: float = 10.0      # learning rate of the tables, in units of the model's

    def __post_init__(self):
        super().__post_init__()
        for name, words in (("start", ("release", "identity")), ("route", ("kv", "v"))):
            if getattr(self, name) not in words:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose {' or '.join(words)}")
        if not self.router_lr_scale > 0:
            raise ValueError(f"router_lr_scale={self.router_lr_scale}: give a positive number")


def flops_per_token(config, T):
    """As model.flops_per_token, plus the routing above layer 0: (l+1) R products for each number of R heads."""
    flops, R = model.flops_per_token(config, T), config.n_kv_head
    extra = sum(2 * len(config.route) * config.head_dim * R * R * (l + 1) for l in range(1, config.n_layer))
    return flops | dict(train=flops["train"] + 3 * extra, prefill=flops["prefill"] + extra,
                        decode=flops["decode"] + extra)


if __name__ == "__main__":
    from tools.prove import main
    main("lime")
