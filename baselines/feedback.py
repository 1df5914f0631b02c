"""
Feedback Transformer: each past token is one memory, a fixed mixture of all its layers, which every layer reads.

In the plain decoder layer l reads the past at depth l - 1. Here all layers of a token read the same memory of each past
token, and the highest layer's view of it has a share in that: what was concluded about a token is at hand at once, in
the lowest layer of the next one. The price is that tokens must be computed one after the other.

    Fan et al., Addressing Some Limitations of Transformers with Feedback Memory, arXiv 2002.09402

    paper                            here
    x_t^l, x_t^0 the embedding       states              (S, B, n, D), S = L + 1
    w, its softmax                   self.w              (S,), the same for all tokens
    m_t = sum_l softmax(w)_l x_t^l   m                   (B, n, D)
    key and value projections        self.wk, self.wv    one of each, shared by all layers
    tau, the memories in view        window              token t reads m_{t-tau} .. m_{t-1}

Cost: one slot of cache in place of L; (L-1)(2 D Hkv d + d) parameters less, L + 1 more; decoding below the baseline's.
Training takes T L steps one after the other, or a schedule of cyclic.py: the default is three passes of eight groups.

What breaks without each part: with its own memory in view a token would have to be finished before it starts; so token
0 has nothing to read, and skips attention. With all of w on the embedding nothing feeds back, and one pass is exact.

Where paper, release and this file differ. The paper trains token by token (here schedule=autoregressive) and has no
pre-norm decoder of this kind. The projections shared by all layers are those of its later version. The mixture is
projected as it is, without a norm, and keys get a norm and the rotation, as in the control of the WhiteMatter authors.
A widely read port splits the text into chunks with ordinary attention inside: another model. Window: default all.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn

import cyclic
import kernels
from cyclic import FeedbackGPT, ScheduleConfig
from model import Linear, RMSNorm, rotate
from whitematter import QueryBlock


class Feedback(FeedbackGPT):
    def layers(self, x, rope, cache=None):
        return cyclic.run(self, x, cache)                                # a schedule of calls to stack and pool

    def stack(self, x, positions, channels):
        """Any n tokens x (B, n, D) through all layers, each of which reads the memories of earlier tokens."""
        rope, seen, states = self.rope(positions), channels.seen_by(positions, self.window), [x]
        k, v = channels.k[0], channels.v[0]
        for n, block in enumerate(self.blocks):
            q = block.query(x, rope)
            self.record(n, x=x[None], q=q, k=k, v=v)
            x = block.finish(x, cyclic.attend(q, k, v, seen))
            states.append(x)                                             # x_t^{l+1}
        return x, torch.stack(states)                                    # (L+1, B, n, D)

    def pool(self, states, positions):
        k, v = self.memory(states, self.rope(positions))
        return k[None].to(v.dtype), v[None]                              # (1, B, Hkv, n, d): one channel

    def memory(self, states, rope):
        m = torch.einsum("l, lbnd -> bnd", self.w.softmax(dim=0), states)             # m_t
        k, v = (y.unflatten(-1, (-1, self.config.head_dim)) for y in (self.wk(m), self.wv(m)))
        return rotate(self.k_norm(k).transpose(1, 2), rope), v.transpose(1, 2)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        D, kv = config.n_embd, config.n_kv_head * config.head_dim
        self.sources, self.window = config.n_layer + 1, config.window or math.inf
        self.w = nn.Parameter(torch.zeros(self.sources))
        self.wk, self.wv = Linear(config, "wk", D, kv), Linear(config, "wv", D, kv)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def make_block(self, config, n):
        return QueryBlock(config, n)

    def compile_pieces(self):
        super().compile_pieces()
        kernels.compile_methods([self], "memory")

    @staticmethod
    def cache_slots(config):
        return 1, 1


@dataclass
class FeedbackConfig(ScheduleConfig):
    window: int | None = None          # tau: how many past tokens a token reads (default: all)

    def __post_init__(self):
        super().__post_init__()
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: give at least 1 past token, or leave it out for all")


def flops_per_token(config, T):
    """As model.flops_per_token, by config.schedule."""
    D, kv = config.n_embd, config.n_kv_head * config.head_dim
    body = 4 * D * config.n_head * config.head_dim + 6 * D * config.d_ff
    pool = 4 * D * kv + 2 * (config.n_layer + 1) * D                     # the two projections, and the mixture
    tau = min(config.window or T, T)
    seen = (tau * (tau - 1) / 2 + (T - tau) * tau) / T                   # the mean of min(t, tau) over the tokens
    return cyclic.flops(config, T, config.n_layer, body, pool, top_is_read=True, seen=seen, seen_last=tau)


if __name__ == "__main__":
    from tools.prove import main
    main("feedback")
