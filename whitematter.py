"""
WhiteMatter: every layer reads what past tokens made at any depth, through k channels that each token publishes.

In a plain decoder layer l of a token reads the past at depth l alone: what the layers above have made of a past token is
out of its reach, though it lies finished in memory. Here each token, once all layers have run, publishes k keys and
values, each projected from its own learned mixture of all its layer states; layer l of every later token reads channel
l mod k. A token's channels hold its deepest states, so it cannot read its own: attention is strictly causal, and the model
is recurrent over tokens. Decoding it is exact and costs what the baseline costs; training it needs cyclic.py.

    Zhang and Ren, WHITEMATTER, arXiv 2608.18486

    paper                              here
    h_0 .. h_L, h_0 the embedding      states              (S, B, n, D)     h_l is the input of code layer l
    g^r, c^r, branch r = K or V        r.pre.weight, r.post.weight          (S, D), (k, D)
    A^r = W xi^r + b, xi^r             r.router(u)         (B, n, k, S)     xi: every second u_l, the last one included
    m^r_j, z^r_j                       m[..., j, :], z[j]  (B, n, D)        j < k
    W^K_j, W^V_j                       r.weight[j]         (Hkv d, D)

Cost, L layers, S sources: per token 2 k Hkv d cached numbers (the baseline 2 L Hkv d). Parameters: 2 k Hkv d D for the
projections, 2 ceil(S/2) D k S for the routers, instead of 2 L Hkv d D. At the paper's D=512, L=16 a decoded token takes 0.99
(k=8) or 1.03 times (k=16) the baseline's FLOPs, prefill 3.05 or 3.30 times, training 2.32 or 2.50 times, the head not
counted. Half the channels save half of the cache's room, not of what a step reads: each layer streams one channel.

What breaks without each part. With its own channel in view a token would have to be finished before it starts. With the
router's W at its start, 0, the mixture is the same for every token (`router=static` keeps it so). Without the post-mix
norm the scale of A reaches the values. Without feedback (`depth_causal`: channel l mixes h_0..h_l) the model is no
longer recurrent. It neither starts as the plain model nor contains it: no setting gives a token its own key back.

Where paper, release and this file differ. `paper`: S = L (h_L is not mixed), and a learned dummy token, the same vector at
every depth, in slot 0, so that the first token has something to read. `release`, the default here as in the authors' later
recipes: S = L + 1, no dummy, and a token without a past gets attention output 0. The paper starts the dummy at 0, where
two norms in a row have slopes of 1/sqrt(eps) and its gradient drowns all others; here it is drawn from N(0, init_std).
The router's prior, .25 on each chosen source, is the release's; the paper speaks of one source per channel, which
holds for k = L. The paper trains with Muon, here AdamW. Their pool is checkpointed in training, here it is not.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import cyclic
import kernels
from cyclic import FeedbackGPT, ScheduleConfig
from model import Block, RMSNorm, normal, rotate


class WhiteMatter(FeedbackGPT):
    def layers(self, x, rope, cache=None):
        return cyclic.run(self, x, cache)                                 # a schedule of calls to the two methods below

    def stack(self, x, positions, channels):
        """Any n tokens x (B, n, D) through all layers. Layer l reads channel l mod k of earlier tokens, never its own."""
        rope, seen, states = self.rope(positions), channels.seen_by(positions), [x]
        keys, values = channels.k.unbind(), channels.v.unbind()           # k tensors (B, Hkv, N, d) each
        for l, block in enumerate(self.blocks):
            q, k, v = block.query(x, rope), keys[l % self.k], values[l % self.k]
            self.record(l, x=x[None], q=q, k=k, v=v)
            x = block.finish(x, cyclic.attend(q, k, v, seen))
            states.append(x)                                              # h_{l+1}
        return x, torch.stack(states[:self.sources], dim=2).movedim(2, 0)             # h_0 .. h_{S-1}: (S, B, n, D)

    def pool(self, states, positions):
        """The k keys and k values that n tokens publish, each token's from its own states (S, B, n, D)."""
        K, V = self.project(self.keys, states), self.project(self.values, states)
        return rotate(self.k_norm(K), self.rope(positions)).to(V.dtype), V            # (k, B, Hkv, n, d) each

    def project(self, r, states):
        """One branch, r = keys or values. They share nothing."""
        u = r.pre(states.movedim(0, 2))                                   # u_l = g_l rms(h_l)           (B, n, S, D)
        A = r.router(u)                                                   # W xi + b: signed, no softmax (B, n, k, S)
        m = A @ u                                                         # m_j = sum_l A_jl u_l         (B, n, k, D)
        z = r.post(m).movedim(2, 0)                                       # z_j = c_j rms(m_j)           (k, B, n, D)
        y = z.flatten(1, 2) @ r.weight.transpose(1, 2)                    # W_j z_j                      (k, B n, Hkv d)
        return y.view(*z.shape[:3], -1, self.config.head_dim).transpose(2, 3)         # (k, B, Hkv, n, d)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        self.k, self.sources, self.first = config.k, config.sources, int(config.variant == "paper")
        self.keys, self.values = Branch(config, "keys"), Branch(config, "values")
        if config.router == "shared":
            self.values.pre, self.values.router = self.keys.pre, self.keys.router
        self.k_norm = RMSNorm((config.k, 1, 1, 1, config.head_dim), config.norm_eps) if config.qk_norm else nn.Identity()
        if self.first:
            self.dummy = normal(config, "dummy", config.n_embd)

    def make_block(self, config, n):
        return QueryBlock(config, n)

    def boundary(self, batch_size):
        """Before the first token: nothing, or the dummy's channels."""
        if not self.first:
            return super().boundary(batch_size)
        at, states = torch.arange(1), self.dummy.expand(self.sources, batch_size, 1, -1)
        return cyclic.Channels(*self.pool(states, at), at)

    def param_groups(self):
        """The projections and the routers' W decay as matrices do; gains, biases and the dummy do not."""
        decay, rest = super().param_groups()
        mine = {p for r in (self.keys, self.values) for p in (r.weight, *r.router.matrices())}
        return [decay | dict(params=decay["params"] + [p for p in rest["params"] if p in mine]),
                rest | dict(params=[p for p in rest["params"] if p not in mine])]

    def compile_pieces(self):
        super().compile_pieces()
        kernels.compile_methods([self], "project")

    @staticmethod
    def cache_slots(config):
        return config.k, config.k


class QueryBlock(Block):
    """A block that makes queries only."""

    def __init__(self, config, n):
        super().__init__(config, n)
        del self.wk, self.wv, self.k_norm


class Branch(nn.Module):
    """The parameters of the keys' or of the values' half of the pool."""

    def __init__(self, config, name):
        super().__init__()
        k, S, D = config.k, config.sources, config.n_embd
        self.pre, self.post = RMSNorm((S, D), config.norm_eps), RMSNorm((k, D), 1e-4)
        self.router = ROUTERS[config.router](config)
        self.weight = normal(config, f"{name}.weight", k, config.n_kv_head * config.head_dim, D)


class Static(nn.Module):
    """A = b: the same mixture for every token."""

    def __init__(self, config, rows=None):
        super().__init__()
        self.bias = nn.Parameter(PRIORS[config.prior](rows or config.k, config.sources))

    def matrices(self):
        return []

    def forward(self, u):
        return self.bias.expand(*u.shape[:2], -1, -1).to(u.dtype)


class Dynamic(Static):
    """A = W xi + b, xi = every stride-th u_l side by side, the last one included. W starts at 0."""

    def __init__(self, config, rows=None):
        super().__init__(config, rows)
        S, self.stride = config.sources, config.stride
        inputs = len(range((S - 1) % self.stride, S, self.stride)) * config.n_embd
        self.weight = nn.Parameter(torch.zeros(self.bias.numel(), inputs))

    def matrices(self):
        return [self.weight]

    def forward(self, u):
        xi = u[:, :, (u.size(2) - 1) % self.stride::self.stride].flatten(2)
        return F.linear(xi, self.weight, self.bias.flatten()).unflatten(-1, self.bias.shape)


class Shared(Dynamic):
    """One row: a single mixture, which all channels of both branches project."""

    def __init__(self, config):
        super().__init__(config, rows=1)


class DepthCausal(nn.Module):
    """Channel j mixes h_0 .. h_j, and its router reads only these: nothing flows from a layer to a lower one."""

    def __init__(self, config):
        super().__init__()
        self.stride, self.sources = config.stride, config.sources
        sizes = [(j + 1, len(range(j % self.stride, j + 1, self.stride)) * config.n_embd) for j in range(config.k)]
        self.weight = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.bias = nn.ParameterList(0.25 * F.one_hot(torch.tensor(j), j + 1).float() for j in range(config.k))

    def matrices(self):
        return list(self.weight)

    def forward(self, u):
        rows = [F.linear(u[:, :, j % self.stride:j + 1:self.stride].flatten(2), W, b)
                for j, (W, b) in enumerate(zip(self.weight, self.bias))]
        return torch.stack([F.pad(row, (0, self.sources - row.size(-1))) for row in rows], dim=2)


ROUTERS = {"dynamic": Dynamic, "static": Static, "shared": Shared, "depth_causal": DepthCausal}


def prior(source):
    """(rows, S): .25 where source l feeds row j, by the rule source(j, l, k, S)."""
    return lambda k, S: 0.25 * torch.tensor([[float(source(j, l, k, S)) for l in range(S)] for j in range(k)])


PRIORS = {
    "cyclic": prior(lambda j, l, k, S: l % k == j),
    "shifted_identity": prior(lambda j, l, k, S: l == min(j + 1, S - 1)),             # the output of layer j
    "identity": prior(lambda j, l, k, S: l == j),
    "top": prior(lambda j, l, k, S: l == S - 1),
}


@dataclass
class WhiteMatterConfig(ScheduleConfig):
    k: int | None = None               # channels, from 1 to n_layer (default: half the layers; shared, depth_causal: all)
    variant: str = "release"           # release: no dummy token, h_L is mixed too; paper: a dummy, h_L is not mixed
    router: str = "dynamic"            # dynamic; the paper's ablations static, shared, depth_causal
    prior: str | None = None           # cyclic, shifted_identity, identity, top (default: the first; if k = n_layer, the second)
    stride: int = 2                    # the router reads every stride-th state

    def __post_init__(self):
        super().__post_init__()
        for name, known in (("variant", ("release", "paper")), ("router", ROUTERS), ("prior", (None, *PRIORS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(filter(None, known))}")
        if self.k is None:
            self.k = self.n_layer if self.router in ("shared", "depth_causal") else max(1, self.n_layer // 2)
        if not 1 <= self.k <= self.n_layer:
            raise ValueError(f"k={self.k}: give a number of channels from 1 to n_layer={self.n_layer}")
        if self.router == "depth_causal" and self.k != self.n_layer:
            raise ValueError(f"router=depth_causal gives each layer its own channel: set k={self.n_layer}, or leave it out")
        if self.prior is None:
            shifted = self.k == self.n_layer > 1 and self.router != "shared"
            self.prior = "identity" if self.router == "depth_causal" else "shifted_identity" if shifted else "cyclic"
        if self.router == "depth_causal" and self.prior != "identity":
            raise ValueError(f"prior={self.prior}: router=depth_causal starts from each layer's own input: leave prior out")
        if self.stride < 1:
            raise ValueError(f"stride={self.stride}: give a whole number of at least 1")
        if self.router == "static" and self.stride != 2:
            raise ValueError(f"stride={self.stride}: router=static reads no states: leave stride out")

    @property
    def sources(self):
        """S: h_0 .. h_L, or without h_L where it has no place."""
        return self.n_layer + (self.variant == "release" and self.router != "depth_causal")


def flops_per_token(config, T):
    """As model.flops_per_token. One pass is all layers, reading (T - 1) / 2 earlier tokens and the dummy, and one pool;
    the first pass reads a pool of the embeddings, and the boundary before the gradient passes pools once more."""
    L, S, D, kv = config.n_layer, config.sources, config.n_embd, config.n_kv_head * config.head_dim
    body = 4 * D * config.n_head * config.head_dim + 6 * D * config.d_ff
    router = ROUTERS[config.router](config)
    rows = 1 if config.router == "shared" else config.k
    pool = 4 * (sum(W.numel() for W in router.matrices()) + rows * S * D + config.k * kv * D)
    dummy = int(config.variant == "paper")
    return cyclic.flops(config, T, L, body, pool, top_is_read=S > L, seen=(T - 1) / 2 + dummy, seen_last=T + dummy)


if __name__ == "__main__":
    from tools.prove import main
    main("whitematter")
