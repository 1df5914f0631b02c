"""
MUDD and DenseFormer: every layer reads its own mixture of all earlier layers' outputs.

In a plain decoder a layer reads X_i, the output of the layer before it, and nothing else of what lies below. Here it
reads a weighted sum of the embedding X_0 and all outputs X_1 .. X_i. Four steps lead from a table of numbers to MUDDFormer:

    1  static          a weight for each pair of layers                          dynamic=no   multiway=no    DenseFormer
    2  dynamic         the weights come from the token's own newest state        dynamic=yes  multiway=no
    3  multiway        own weights for query, key, value and residual            dynamic=yes  multiway=yes   (the default)
    4  re-allocation   narrow feed-forwards below, wide ones above               reallocate_ffn=yes          MUDDFormer

It is attention over depth only in a manner of speaking: signed, no softmax, no keys; the query side alone sets the weights.

    Xiao et al., MUDDFormer, arXiv 2502.12170, Eq. 3-9; Pagliardini et al., DenseFormer, arXiv 2402.02622

    paper                                  here
    X_0, X_i the output of block i         X[0], X[i]                (B, T, D); paper block i is code layer i-1
    Xbar^Q, Xbar^K, Xbar^V, Xbar^R         xq, xk, xv, xr            (B, T, D): what the next layer reads
    A_i (C ways over i+1 sources)          A                         (B, T, C, S); static: (1, 1, C, S)
    W1, W2, a_i (DenseFormer's alpha)      w1, w2, a                 (K, D), (C S, K), (C, S); K = C S
    dilation k, period p                   config.dilation, config.period

Cost: sum over layers of D K + K C S + C S parameters, and 2 L D for the separate norms; 2 D K + 2 K C S + 2 C S D FLOPs a
token (the paper's closed forms, for D >> L: eta/6 of the parameters and eta/(3 + rho/4) of the FLOPs, eta = (L+3)/D,
rho = T/D). No cache: all reads are at one position, so decoding holds L+1 states of the current token only. Training
keeps the X_i, which it has anyway, and their C mixtures.

What breaks without each part. With random a and W2 (identity_start=no) the start is not a transformer: the paper calls the
start critical. With X_i added to Xbar^R again there are two residuals; with mixtures instead of raw outputs in X, weights
would compound. All four ways dropped (drop_ways=qkvr) is the baseline, whatever the parameters.

It starts equal to the baseline bit for bit, with any options but reallocate_ffn=yes and identity_start=no.
Decay: w1 decays like any matrix; w2, a and the norms do not, for decay would pull the one-hot towards 0.

Where papers, releases and this file differ. The release rounds K up to a multiple of 64 (64 becomes 128) and makes the last
generator four times as wide: released_widths=yes, which the 405M presets set. It decays every parameter, a included, and
DenseFormer decays alpha. Its PyTorch file draws a at random, since it only loads checkpoints. The first block has one norm there,
three here. An optional pre- and post-normalisation (sources normed; X_i + norm(mixture) with gain 0.001 on R alone, a = 0)
is on in the public 405M configuration and said to be for other models in the paper; it is not built here. DenseFormer
with n_layer not a multiple of the period has no mixture at the top, and its X_0 is read where i = 0 mod dilation only.
"""
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
import model
from model import GPT, Block, GPTConfig, Linear, RMSNorm, attend, normal


class Static(nn.Module):
    """Step 1: A_i = a_i, a table of C ways over S sources. -> (1, 1, C, S)"""

    def forward(self, x):
        return self.a[None, None]


class Dynamic(Static):
    """Step 2: A_i = GELU(RMSNorm(X_i) W1) W2 + a_i, from the token's newest state X_i. -> (B, T, C, S)"""

    def forward(self, x):
        h = F.gelu(self.project(x))                                      # (B, T, K)
        return F.linear(h, self.w2).unflatten(-1, self.a.shape) + self.a

    def project(self, x):
        return self.w1(F.rms_norm(x, x.shape[-1:], eps=self.eps))        # a norm without gain


class MUDD(GPT):
    def layers(self, x, rope, cache=None):
        X, (xq, xk, xv, xr) = self.history(x), (x, x, x, x)              # X = [X_0]
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(xq, xk, xv, rope)                        # step 3: each reads its own mixture
            x = block.finish(xr, attend(q, k, v, cache, n))              # and xr, not x, is the residual
            X.append(x)                                                  # raw outputs, never mixtures
            A = self.weights(n, x)
            self.record(n, x=(xq, xk, xv, xr), q=q, k=k, v=v, weights=A.unsqueeze(3))
            xq, xk, xv, xr = self.ways(n, self.mix(n, A, X), x)
        return xr

    def mix(self, n, A, X):
        """[Xbar^c for c < C]: Xbar^c_i = sum_j A^c_ij X_j over the sources j of this layer. (B, T, D) each."""
        return [sum(A[:, :, c, s, None] * X[j] for s, j in enumerate(self.sources[n])) for c in range(A.size(2))]

    def ways(self, n, mixtures, x):
        """What q, k, v and the residual read: a mixture, or the newest output where the way has none."""
        return [x if c is None else mixtures[c] for c in self.reads[n]]

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        L = config.n_layer
        self.sources = [[j for j in range(i + 1) if (i - j) % config.dilation == 0] for i in range(1, L + 1)]
        self.reads = [reads_of(config, n) for n in range(L)]
        self.generators = nn.ModuleList(make_generator(config, n) for n in range(L))

    def make_block(self, config, n):
        config = replace(config, d_ff=reallocated(config, n), reallocate_ffn=False)
        mixed = set("qkv") - set(config.drop_ways)
        return (ThreeNormBlock if mixed and (config.multiway or len(mixed) < 3) else OneNormBlock)(config, n)

    def history(self, x):
        return [x]

    def weights(self, n, x):
        """A_i in fp32, whatever the matrix products are in: near one, bf16 has steps of 1/128."""
        with torch.autocast(x.device.type, enabled=False):
            return self.generators[n](x)

    def compile_pieces(self):
        super().compile_pieces()
        for g in self.generators:
            if isinstance(g, Dynamic):
                kernels.replace_method(g, "project", lambda g, x: kernels.normed_product(x, g.w1.weight, g.eps))
        kernels.replace_method(self, "history", lambda self, x: kernels.History(x, self.config.n_layer + 1))
        kernels.replace_method(self, "mix", lambda self, n, A, X: X.mix(A, self.config.dilation))


class NoMixture(nn.Module):
    """No way of this layer reads a mixture: A has none."""

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


def reads_of(config, n):
    """For q, k, v, r after block n: the index of its mixture, or None where it reads the newest output."""
    if (n + 1) % config.period:
        return [None] * 4
    kept = [way for way in "qkvr" if way not in config.drop_ways]
    if n + 1 == config.n_layer:
        kept = [way for way in kept if way == "r"]                       # the head reads the residual alone
    index = {way: i if config.multiway else 0 for i, way in enumerate(kept)}
    return [index.get(way) for way in "qkvr"]


def sizes(config, n):
    """(C, S, K) of the mix after block n: mixtures, sources, hidden width of the generator."""
    C = len(set(reads_of(config, n)) - {None})
    S = len(range((n + 1) % config.dilation, n + 2, config.dilation))
    return C, S, released_width(config, n, C * S) if config.released_widths else C * S


def make_generator(config, n):
    (C, S, K), name = sizes(config, n), f"generators.{n}"
    if C == 0:
        return NoMixture()
    generator = Dynamic() if config.dynamic else Static()
    a, w2 = F.one_hot(torch.full((C,), S - 1), S).float(), torch.zeros(C * S, K)      # the newest source alone
    if not config.identity_start:
        a, w2 = normal(config, f"{name}.a", C, S, std=1.0).data, normal(config, f"{name}.w2", C * S, K).data
    generator.a = nn.Parameter(a)
    if config.dynamic:
        generator.w1 = Linear(config, f"{name}.w1", config.n_embd, K, std=config.n_embd ** -0.5)
        generator.w2 = nn.Parameter(w2)
        generator.eps = config.norm_eps
    return generator


def reallocated(config, n):
    """d_ff of block n: from half to one and a half times d_ff, in steps of 128 (8 where d_ff is below 1024). Eq. 9"""
    if not config.reallocate_ffn or config.n_layer == 1:
        return config.d_ff
    unit = 128 if config.d_ff >= 1024 else 8
    return max(unit, round(config.d_ff * (0.5 + n / (config.n_layer - 1)) / unit) * unit)


def released_width(config, n, K):
    """K as in the release: fourfold for a multiway model's last generator, then up to the next multiple of 64."""
    K = 4 * K if config.multiway and n + 1 == config.n_layer else K
    return (K // 64 + 1) * 64


@dataclass
class MUDDConfig(GPTConfig):
    dynamic: bool = True               # weights from the token's newest state (no: a table, as in DenseFormer)
    multiway: bool = True              # own weights for query, key, value and residual (no: one mixture feeds all four)
    drop_ways: str = ""                # ways that read the newest output instead of a mixture: some of the letters qkvr
    dilation: int = 1                  # read every so manyth source, counted back from the newest
    period: int = 1                    # mix after every so manyth block only
    reallocate_ffn: bool = False       # feed-forwards from half the width at the bottom to one and a half at the top
    identity_start: bool = True        # start as the baseline (no: random a and W2)
    released_widths: bool = False      # round the generators' hidden widths up as the released code does

    def __post_init__(self):
        super().__post_init__()
        if not set(self.drop_ways) <= set("qkvr"):
            raise ValueError(f"drop_ways={self.drop_ways!r}: give some of the letters q, k, v, r")
        for name in ("dilation", "period"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a whole number of at least 1")


def flops_per_token(config, T):
    """As model.flops_per_token with each block's own d_ff, plus generators (2 D K + 2 K C S) and mixtures (2 C S D)."""
    flops, D = model.flops_per_token(config, T), config.n_embd
    extra = sum(6 * D * (reallocated(config, n) - config.d_ff) for n in range(config.n_layer))
    for n in range(config.n_layer):
        C, S, K = sizes(config, n)
        extra += 2 * C * S * D + (2 * D * K + 2 * K * C * S if config.dynamic else 0)
    return flops | dict(train=flops["train"] + 3 * extra, prefill=flops["prefill"] + extra,
                        decode=flops["decode"] + extra)


if __name__ == "__main__":
    from tools.prove import main
    main("mudd")
