"""
MUDD and DenseFormer: every layer reads its own mixture of all earlier layers' outputs.

In a plain decoder a layer reads X_i, the output of the layer before it. Here it reads a weighted sum of the embedding
X_0 and all outputs X_1 .. X_i. Unlike attention: signed weights, no softmax, no keys. There are four steps:

    1  static          a table of weights                                dynamic=no   multiway=no    DenseFormer
    2  dynamic         weights from the token's own newest state         dynamic=yes  multiway=no
    3  multiway        own weights for query, key, value and residual    dynamic=yes  multiway=yes   (the default)
    4  re-allocation   narrow feed-forwards below, wide ones above       reallocate_ffn=yes          MUDDFormer

    Xiao et al., MUDDFormer: Breaking Residual Bottlenecks in Transformers via Multiway Dynamic Dense Connections,
    arXiv 2502.12170. Pagliardini et al., DenseFormer, arXiv 2402.02622.

    paper                                  here
    X_0, X_i the output of block i         X[0], X[i]          (B, T, D)      paper block i is code layer i-1
    Xbar^Q, Xbar^K, Xbar^V, Xbar^R         xq, xk, xv, xr      (B, T, D)      what the next layer reads
    A_i, C ways over S sources             A                   (B, T, C, S); static: (1, 1, C, S)
    W1, W2, a_i (DenseFormer's alpha)      w1, w2, a           (K, D), (C S, K), (C, S); K = C S

Cost, summed over layers: D K + K C S + C S parameters, 2 D K + 2 K C S + 2 C S D FLOPs per token; and 2 D parameters
in each block for two more norms. The cache is the baseline's: a token mixes its own states. Releases: docs/errata.md.
"""
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
import model
from model import GPT, Block, GPTConfig, RMSNorm, normal


class StaticWeights(nn.Module):
    """Step 1: A_i = a_i, the same for every token."""

    def __init__(self, config, n):
        super().__init__()
        C, S, _ = sizes(config, n)
        newest = F.one_hot(torch.full((C,), S - 1), S).float()
        self.a = nn.Parameter(newest)                           # one-hot on X_i: the model starts as the baseline

    def forward(self, x):
        return self.a[None, None]                               # (1, 1, C, S)


class DynamicWeights(StaticWeights):
    """Step 2: A_i = GELU(RMSNorm(X_i) W1) W2 + a_i, from the token's newest state X_i = x."""

    def __init__(self, config, n):
        super().__init__(config, n)
        (C, S, K), D = sizes(config, n), config.n_embd
        self.w1, self.eps = nn.Linear(D, K, bias=False), config.norm_eps
        self.w1.init_std = D ** -0.5                            # draw_matrices reads it: W1 ~ N(0, 1/D)
        self.w2 = nn.Parameter(torch.zeros(C * S, K))           # zero: A = a at the start. W2 learns first, then W1

    def forward(self, x):
        h = F.gelu(self.project(x))                             # (B, T, K)
        return F.linear(h, self.w2).unflatten(-1, self.a.shape) + self.a     # (B, T, C, S)

    def project(self, x):
        return self.w1(F.rms_norm(x, x.shape[-1:], eps=self.eps))            # this norm has no gain


class MUDD(GPT):
    """Step 3: C = 4 ways, one mixture for each of q, k, v and the residual r."""

    def layers(self, x, rope, cache=None):
        X = self.history(x)                                     # the list [X_0]
        xq = xk = xv = xr = x
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(xq, xk, xv, rope)               # each reads its own mixture
            x = block.finish(xr, self.attend(n, q, k, v, cache))             # the skip adds xr; x would count X_i twice
            X.append(x)                                         # raw outputs: mixtures of mixtures would compound
            A = self.weights(n, x)                              # (B, T, C, S)
            mixtures = self.mix(n, A, X)                        # one (B, T, D) for each way
            xq, xk, xv, xr = self.read(n, mixtures, x)          # a way that has none reads x
        return xr                                               # the head reads the last residual way

    def mix(self, n, A, X):
        """Xbar^c = sum_j A[c, j] X_j over the sources j: one mixture (B, T, D) for each way c."""
        mixtures = []
        for c in range(A.size(2)):
            mixture = 0
            for slot, j in enumerate(self.sources[n]):          # j = 0 .. n+1, unless dilated
                mixture = mixture + A[:, :, c, slot, None] * X[j]            # (B, T, 1) * (B, T, D)
            mixtures.append(mixture)
        return mixtures

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        L, Weights = config.n_layer, DynamicWeights if config.dynamic else StaticWeights
        self.sources = [sources(config, n) for n in range(L)]
        self.generators = nn.ModuleList(Weights(config, n) if mixed_ways(config, n) else NoWeights() for n in range(L))
        self.draw_matrices()
        if not config.identity_start:                           # random: no plain transformer at the start any more
            for n, generator in enumerate(self.generators):
                for name, std in (("a", 1.0), ("w2", config.init_std)):
                    if hasattr(generator, name):
                        shape = getattr(generator, name).shape
                        setattr(generator, name, normal(config, f"generators.{n}.{name}", *shape, std=std))

    def make_block(self, config, n):
        ways = set("qkv") - set(config.drop_ways)
        alike = not ways or len(ways) == 3 and not config.multiway           # q, k and v read the same tensor
        config = replace(config, d_ff=reallocated(config, n), reallocate_ffn=False)           # step 4
        return OneNormBlock(config, n) if alike else ThreeNormBlock(config, n)

    def history(self, x):
        return [x]

    def weights(self, n, x):
        """A_i in fp32 under autocast: near one, bf16 has steps of 1/128."""
        with torch.autocast(x.device.type, enabled=False):
            A = self.generators[n](x)
        self.record(n, weights=A.unsqueeze(3))
        return A

    def read(self, n, mixtures, x):
        """What q, k, v and the residual read next: their mixture, or the newest output x where a way has none."""
        ways, multiway = mixed_ways(self.config, n), self.config.multiway
        mixture_of = {way: mixtures[c if multiway else 0] for c, way in enumerate(ways)}         # one feeds them all
        return [mixture_of.get(way, x) for way in "qkvr"]

    def compile_pieces(self):
        super().compile_pieces()
        for generator in self.generators:
            if isinstance(generator, DynamicWeights):
                kernels.replace_method(generator, "project", lambda g, x: kernels.normed_product(x, g.w1.weight, g.eps))
        kernels.replace_method(self, "history", lambda self, x: kernels.History(x, self.config.n_layer + 1))
        kernels.replace_method(self, "mix", lambda self, n, A, X: X.mix(A, self.config.dilation))


class NoWeights(nn.Module):
    """Stands where nothing is mixed (period, drop_ways, one source alone): A is empty."""

    def forward(self, x):
        return x.new_zeros(1, 1, 0, 0)


class OneNormBlock(Block):
    """A block whose q, k and v read the same."""

    def qkv(self, xq, xk, xv, rope):
        return super().qkv(xq, rope)


class ThreeNormBlock(Block):
    """A block whose q, k and v read different streams, each behind a norm of its own."""

    def __init__(self, config, n):
        super().__init__(config, n)
        self.norm1_k, self.norm1_v = RMSNorm(config.n_embd, config.norm_eps), RMSNorm(config.n_embd, config.norm_eps)

    def qkv(self, xq, xk, xv, rope):
        return self.q(self.norm1(xq), rope), self.k(self.norm1_k(xk), rope), self.v(self.norm1_v(xv))


def mixed_ways(config, n):
    """The ways, of q, k, v and r in this order, that read a mixture after block n."""
    i = n + 1                                                   # the paper's number of this block
    one_source = config.dynamic and len(sources(config, n)) == 1             # its weight would only scale it
    if i % config.period or one_source:
        return ""
    return "".join(way for way in "qkvr" if way not in config.drop_ways and (way == "r" or i < config.n_layer))


def sources(config, n):
    """Numbers of the states that the mixtures after block n read, every dilation-th, the newest one included."""
    i = n + 1
    return list(range(i % config.dilation, i + 1, config.dilation))


def sizes(config, n):
    """(C, S, K) after block n: mixtures, sources, hidden width of the generator."""
    ways = mixed_ways(config, n)
    C, S = len(ways) if config.multiway else min(1, len(ways)), len(sources(config, n))
    K = C * S
    if K and config.released_widths:                            # fourfold for the last, then the next multiple of 64
        K *= 4 if config.multiway and n + 1 == config.n_layer else 1
        K = (K // 64 + 1) * 64
    return C, S, K


def reallocated(config, n):
    """d_ff of block n, Eq. 9: from half to one and a half times d_ff, in steps of 128 (8 where d_ff is below 1024)."""
    if not config.reallocate_ffn or config.n_layer == 1:
        return config.d_ff
    unit = 128 if config.d_ff >= 1024 else 8
    return max(unit, round(config.d_ff * (0.5 + n / (config.n_layer - 1)) / unit) * unit)


@dataclass
class MUDDConfig(GPTConfig):
    dynamic: bool = True               # weights from the token's newest state (no: a table, as in DenseFormer)
    multiway: bool = True              # own weights for query, key, value and residual (no: one mixture feeds all four)
    drop_ways: str = ""                # ways that read the newest output instead of a mixture: some of the letters qkvr
    dilation: int = 1                  # read every dilation-th state only, counted back from the newest
    period: int = 1                    # mix after every period-th block only
    reallocate_ffn: bool = False       # feed-forwards from half the width at the bottom to one and a half at the top
    identity_start: bool = True        # start as the baseline (no: random a and W2)
    released_widths: bool = False      # round the generators' hidden widths up as the released code does

    def __post_init__(self):
        super().__post_init__()
        self.require("drop_ways", set(self.drop_ways) <= set("qkvr"), "give some of the letters q, k, v, r")
        for name in ("dilation", "period"):
            self.require(name, getattr(self, name) >= 1, "give a whole number of at least 1")


def flops_per_token(config, T):
    """As model.flops_per_token with each block's own d_ff, plus generators (2 D K + 2 K C S) and mixtures (2 C S D)."""
    D, extra = config.n_embd, 0
    for n in range(config.n_layer):
        C, S, K = sizes(config, n)
        extra += 6 * D * (reallocated(config, n) - config.d_ff) + 2 * C * S * D
        extra += 2 * D * K + 2 * K * C * S if config.dynamic else 0
    return model.add_forward_flops(model.flops_per_token(config, T), extra)


if __name__ == "__main__":
    from tools.prove import main
    main({"mudd": (MUDDConfig, MUDD)})
