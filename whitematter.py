"""
WhiteMatter: every layer reads what past tokens made at any depth, through k channels that each token publishes.

In a plain decoder, layer l of a token reads the past at depth l alone. Here each token, once all its layers have run,
publishes k keys and k values, each projected from its own learned mixture of the layers' inputs. Layer l of every later
token reads channel l mod k: attention is strictly causal, and the model is recurrent over tokens (see cyclic.py).

    Wenbo Zhang and Xiang Ren, WhiteMatter: All-to-All Cross-Layer Connections via KV Source Mixing, arXiv 2608.18486

    paper                              here
    h_0 .. h_L, h_0 the embedding      states              (S, B, n, D)     h_l is the input of code layer l
    g^r, c^r, branch r = K or V        r.pre.weight, r.post.weight          (S, D), (k, D)
    A^r = W xi^r + b, xi^r             r.router(u)         (B, n, k, S)     xi: every second u_l, the last included
    m^r_j, z^r_j                       m[..., j, :], z[j]  (B, n, D)        j < k
    W^K_j, W^V_j                       r.weight[j]         (Hkv d, D)

    cost, S sources                    whitematter                                         baseline
    cached numbers per token           2 k Hkv d                                           2 L Hkv d
    parameters                         2 k Hkv d D, and 2 ceil(S/2) D k S for the routers  2 L Hkv d D
    FLOPs, D=512, L=16, T=2048         decode 0.99, prefill 3.00, training 2.30 (k=8)      1
                                       decode 1.03, prefill 3.20, training 2.47 (k=16)     1

The FLOPs leave out the head. WhiteMatter neither starts as the plain model nor contains it: a token never reads its own
key. Paper against release: docs/errata.md.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import cyclic
import kernels
import model
from cyclic import FeedbackGPT, ScheduleConfig
from model import QueryBlock, RMSNorm, normal, rotate


class WhiteMatter(FeedbackGPT):
    def layers(self, x, rope, cache=None):
        return cyclic.run_schedule(self, x, cache)              # a schedule of calls to stack and pool

    def stack(self, x, positions, channels):
        """Any n tokens x (B, n, D) through all layers. Layer l reads channel l mod k of earlier tokens."""
        rope, seen = self.rope(positions), channels.seen_from(positions)
        keys, values = channels.k.unbind(), channels.v.unbind()              # k tensors (B, Hkv, N, d) each
        states = [x]                                            # h_0
        for l, block in enumerate(self.blocks):
            q = block.query(x, rope)                            # q alone: the token's k and v come after the stack
            j = l % self.n_channels                             # layer l reads channel l mod k
            x = block.finish(x, self.attend_past(l, q, keys[j], values[j], seen))
            states.append(x)                                    # h_{l+1}
        states = torch.stack(states[:self.n_sources], dim=2)    # h_0 .. h_{S-1}; laid out as `project` reads them
        return x, states.movedim(2, 0)                          # (B, n, D), (S, B, n, D)

    def pool(self, states, positions):
        """The k keys and k values that n tokens publish, each token's from its own states (S, B, n, D)."""
        K, V = self.project(self.keys, states), self.project(self.values, states)
        return rotate(self.k_norm(K), self.rope(positions)), V  # (k, B, Hkv, n, d) each

    def project(self, r, states):
        """One branch, r = keys or values. They share nothing (unless router=shared)."""
        u = r.pre(states.movedim(0, 2))                         # u_l = g_l rms(h_l)           (B, n, S, D)
        A = r.router(u)                                         # W xi + b: signed, no softmax (B, n, k, S)
        m = A @ u                                               # m_j = sum_l A_jl u_l         (B, n, k, D)
        z = r.post(m).movedim(2, 0)                             # z_j = c_j rms(m_j)           (k, B, n, D)
        y = z.flatten(1, 2) @ r.weight.transpose(1, 2)          # W_j z_j                      (k, B n, Hkv d)
        return y.view(*z.shape[:3], -1, self.config.head_dim).transpose(2, 3)         # (k, B, Hkv, n, d)

    def __init__(self, config):
        super().__init__(config)
        self.n_channels, self.n_sources, self.has_dummy = config.k, config.sources, config.variant == "paper"
        self.keys, self.values = Branch(config, "keys"), Branch(config, "values")
        if config.router == "shared":
            self.values.pre, self.values.router = self.keys.pre, self.keys.router
        gains = (config.k, 1, 1, 1, config.head_dim)
        self.k_norm = RMSNorm(gains, config.norm_eps) if config.qk_norm else nn.Identity()
        if self.has_dummy:
            # The paper starts it at 0, where each norm has a gradient of about 1/sqrt(eps), which drowns all others.
            self.dummy = normal(config, "dummy", config.n_embd)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    LOOP = ("stack", "pool", "project")                         # what --diff shows

    def make_block(self, config, n):
        return QueryBlock(config, n)

    def boundary(self, batch_size):
        """The channels before the first token: none, or the dummy's. Its state is the same vector at every depth."""
        if not self.has_dummy:
            return super().boundary(batch_size)
        states = self.dummy.expand(self.n_sources, batch_size, 1, -1)
        return cyclic.publish(self, states, torch.arange(1))

    def param_groups(self):
        """The projections and the routers' W decay as matrices do. Gains, biases and the dummy do not."""
        decay, rest = super().param_groups()
        ours = {p for name, p in self.named_parameters()
                if name in ("keys.weight", "values.weight") or ".router.weight" in name}
        return [decay | dict(params=decay["params"] + [p for p in rest["params"] if p in ours]),
                rest | dict(params=[p for p in rest["params"] if p not in ours])]

    def compile_pieces(self):
        super().compile_pieces()
        kernels.compile_methods([self], "project")

    @staticmethod
    def cache_slots(config):
        return config.k, config.k


class Branch(nn.Module):
    """The parameters of one half of the pool: name is keys or values."""

    def __init__(self, config, name):
        super().__init__()
        k, S, D = config.k, config.sources, config.n_embd
        self.pre = RMSNorm((S, D), config.norm_eps)
        self.router = make_router(config, name)
        self.post = RMSNorm((k, D), 1e-4)                       # without it, the size of A would reach the values
        self.weight = normal(config, f"{name}.weight", k, config.n_kv_head * config.head_dim, D)


class StaticRouter(nn.Module):
    """A = b: the same mixture for every token."""

    def __init__(self, config, rows, trained=True):
        super().__init__()
        self.bias = nn.Parameter(prior(config, rows), requires_grad=trained)            # (rows, S)

    def forward(self, u):
        return self.bias.expand(*u.shape[:2], -1, -1).to(u.dtype)            # (B, n, rows, S)


class DynamicRouter(StaticRouter):
    """A = W xi + b. At the start W is 0, so the mixture is the same for every token."""

    def __init__(self, config, rows, trained=True):
        super().__init__(config, rows, trained)
        S, self.read = config.sources, router_inputs(config.sources, config.stride)
        inputs = math.ceil(S / config.stride) * config.n_embd
        self.weight = nn.Parameter(torch.zeros(rows * S, inputs), requires_grad=trained)

    def forward(self, u):
        xi = u[:, :, self.read].flatten(2)                      # (B, n, ceil(S/2) D)
        return F.linear(xi, self.weight, self.bias.flatten()).unflatten(-1, self.bias.shape)


class DepthCausalRouter(nn.Module):
    """Ablation without feedback: channel j mixes h_0 .. h_j, and its router reads only these. Every layer then reads
    what earlier tokens had at its own depth or below, so L Jacobi passes are exact for any T."""

    def __init__(self, config, first_is_trained=True):
        super().__init__()
        self.stride = config.stride
        self.weight, self.bias = nn.ParameterList(), nn.ParameterList()      # a row of weights for each channel
        for j in range(config.k):
            inputs, trained = math.ceil((j + 1) / config.stride) * config.n_embd, j > 0 or first_is_trained
            self.weight.append(nn.Parameter(torch.zeros(j + 1, inputs), requires_grad=trained))
            start = prior(config, config.k)[j, :j + 1]          # the input of the layer that reads channel j
            self.bias.append(nn.Parameter(start, requires_grad=trained))

    def forward(self, u):
        rows = []
        for j, (weight, bias) in enumerate(zip(self.weight, self.bias)):
            xi = u[:, :, router_inputs(j + 1, self.stride)].flatten(2)
            row = F.linear(xi, weight, bias)                    # (B, n, j + 1)
            rows.append(F.pad(row, (0, len(self.weight) - j - 1)))
        return torch.stack(rows, dim=2)                         # (B, n, k, S)


def prior(config, rows):
    """The router's bias at the start, (rows, S): 0.25 where source l feeds row j."""
    S, bias = config.sources, torch.zeros(rows, config.sources)
    for j in range(rows):
        for l in range(S):
            if config.prior == "cyclic":
                feeds = l % rows == j
            elif config.prior == "shifted_identity":            # the output of code layer j
                feeds = l == min(j + 1, S - 1)
            elif config.prior == "identity":                    # its input
                feeds = l == j
            else:                                               # top
                feeds = l == S - 1
            bias[j, l] = 0.25 * feeds
    return bias


def make_router(config, name):
    # With one source a row of the keys' router is one number, and QK-norm removes its size. Its gradient is rounding
    # noise, which AdamW turns into drift: that row is not trained.
    size_is_lost = name == "keys" and config.qk_norm
    if config.router == "depth_causal":
        return DepthCausalRouter(config, first_is_trained=not size_is_lost)
    if config.router == "shared":                               # one mixture: all channels of both branches project it
        return DynamicRouter(config, rows=1)
    kind = StaticRouter if config.router == "static" else DynamicRouter
    return kind(config, config.k, trained=config.sources > 1 or not size_is_lost)


def router_inputs(sources, stride):
    """The sources that a router reads: every stride-th, the last one included."""
    return slice((sources - 1) % stride, sources, stride)       # ceil(sources / stride) of them


PRIORS = ("cyclic", "shifted_identity", "identity", "top")


@dataclass
class WhiteMatterConfig(ScheduleConfig):
    k: int | None = None               # channels, 1 to n_layer (default: n_layer // 2; shared, depth_causal: n_layer)
    variant: str = "paper"             # paper: a dummy token, h_L is not mixed; release: no dummy, h_L is mixed
    router: str = "dynamic"            # dynamic; the paper's ablations static, shared, depth_causal
    prior: str | None = None           # cyclic (default), shifted_identity (default for k=n_layer), identity, top
    stride: int = 2                    # the router reads every stride-th state

    def __post_init__(self):
        super().__post_init__()
        L, depth_causal = self.n_layer, self.router == "depth_causal"
        self.require_one_of("variant", ("paper", "release"))
        self.require_one_of("router", ("dynamic", "static", "shared", "depth_causal"))
        if self.k is None:
            self.k = L if self.router in ("shared", "depth_causal") else max(1, L // 2)
        self.require("k", 1 <= self.k <= L, f"give a number of channels from 1 to n_layer={L}")
        self.require("k", self.k == L or not depth_causal,
                     f"router=depth_causal has a channel for each layer: set k={L}, or leave it out")
        if self.prior is None:
            shifted = self.k == L > 1 and self.router != "shared"
            self.prior = "identity" if depth_causal else "shifted_identity" if shifted else "cyclic"
        self.require_one_of("prior", PRIORS)
        self.require("prior", self.prior == "identity" or not depth_causal,
                     "router=depth_causal starts from each layer's own input: leave prior out")
        self.require("stride", self.stride >= 1, "give a whole number of at least 1")
        self.require("stride", self.stride == 2 or self.router != "static",
                     "router=static reads no states: leave stride out")

    @property
    def sources(self):
        """S: h_0 .. h_L, or without h_L where it has no place."""
        return self.n_layer + (self.variant == "release" and self.router != "depth_causal")


def flops_per_token(config, T):
    """As model.flops_per_token, by config.schedule: all layers, and a pool for each token and for the dummy."""
    L, S, D, kv = config.n_layer, config.sources, config.n_embd, config.n_kv_head * config.head_dim
    body = 4 * D * config.n_head * config.head_dim + 6 * D * config.d_ff
    rows, dummy = 1 if config.router == "shared" else config.k, int(config.variant == "paper")
    W = sum(t.numel() for name, t in make_router(config, "values").named_parameters() if name.startswith("weight"))
    pool = 4 * (W + rows * S * D + config.k * kv * D)           # two branches: router, mix, projections
    flops = cyclic.flops(config, T, L, body, pool, top_is_read=S > L, seen=(T - 1) / 2 + dummy, seen_last=T + dummy)
    flops_with_dummy = model.add_forward_flops(flops, dummy * pool / T)
    return flops_with_dummy | dict(decode=flops["decode"])      # decoding finds the dummy in the cache


if __name__ == "__main__":
    from tools.prove import main
    main({"whitematter": (WhiteMatterConfig, WhiteMatter)})
