"""
Feedback Transformer: each past token is one memory, a fixed mixture of all its layers, which every layer reads.

In the plain decoder, layer l of a token reads what the layer below it made of past tokens. Here all layers read the
same memory of each past token, and its highest layer has a share in that memory. The price is that tokens must be
computed one after another, or by a schedule of cyclic.py: the default is three passes of eight groups.

    Angela Fan et al., Addressing Some Limitations of Transformers with Feedback Memory, arXiv 2002.09402

    paper                            here
    x_t^l, x_t^0 the embedding       states              (S, B, n, D), S = L + 1
    w, its softmax                   self.w              (S,), the same for all tokens
    m_t = sum_l softmax(w)_l x_t^l   m                   (B, n, D)
    key and value projections        self.wk, self.wv    one of each, shared by all layers
    tau, the memories in view        window              token t reads m_{t-tau} .. m_{t-1}

    cost                             feedback                         baseline
    cached numbers per token         2 Hkv d                          2 L Hkv d
    parameters                       2 D Hkv d + d + L + 1            L (2 D Hkv d + d)
    sequential steps in training     T, or passes x groups            1

Paper against release: docs/errata.md.
"""
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn

if not __package__:                     # run as `python baselines/feedback.py`: what it imports lies one folder up
    sys.path[0] += "/.."
import cyclic
import kernels
from cyclic import FeedbackGPT, ScheduleConfig
from model import QueryBlock, RMSNorm, rotate


class Feedback(FeedbackGPT):
    def layers(self, x, rope, cache=None):
        return cyclic.run_schedule(self, x, cache)              # a schedule of calls to stack and pool

    def stack(self, x, positions, channels):
        """Any n tokens x (B, n, D) through all layers, each of which reads the memories of earlier tokens."""
        rope, seen, states = self.rope(positions), channels.seen_from(positions, self.window), [x]
        k, v = channels.k[0], channels.v[0]                     # one channel for all layers: (B, Hkv, N, d) each
        for n, block in enumerate(self.blocks):
            q = block.query(x, rope)
            x = block.finish(x, self.attend_past(n, q, k, v, seen))          # token 0 sees nothing: its attention is 0
            states.append(x)                                    # x_t^{l+1}
        return x, torch.stack(states)                           # (B, n, D), (L+1, B, n, D)

    def pool(self, states, positions):
        k, v = self.memory(states, self.rope(positions))
        return k[None], v[None]                                 # (1, B, Hkv, n, d): one channel

    def memory(self, states, rope):
        # m_t. With all of w on x_t^0, nothing would be fed back.
        m = torch.einsum("l, lbnd -> bnd", self.w.softmax(dim=0), states)
        k, v = self.heads(self.wk(m)), self.heads(self.wv(m))
        return rotate(self.k_norm(k).transpose(1, 2), rope), v.transpose(1, 2)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        D, kv = config.n_embd, config.n_kv_head * config.head_dim
        self.n_sources, self.window = config.n_layer + 1, config.window or math.inf
        self.w = nn.Parameter(torch.zeros(self.n_sources))        # all depths alike
        self.wk, self.wv = nn.Linear(D, kv, bias=False), nn.Linear(D, kv, bias=False)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.draw_matrices()

    LOOP = ("stack", "pool", "memory")

    def heads(self, y):
        return y.unflatten(-1, (-1, self.config.head_dim))      # (B, n, Hkv d) -> (B, n, Hkv, d)

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
    window: int | None = None          # tau: how many past tokens a token reads, at least 2 (default: all)

    def __post_init__(self):
        super().__post_init__()
        self.require("window", self.window is None or self.window >= 2,
                     "with one token in view queries and keys have nothing to choose: give at least 2, or leave it out")


def flops_per_token(config, T):
    """As model.flops_per_token, by config.schedule."""
    D, kv = config.n_embd, config.n_kv_head * config.head_dim
    body = 4 * D * config.n_head * config.head_dim + 6 * D * config.d_ff
    pool = 4 * D * kv + 2 * (config.n_layer + 1) * D            # the two projections, and the mixture
    tau = min(config.window or T, T)
    seen = (tau * (tau - 1) / 2 + (T - tau) * tau) / T          # the mean of min(t, tau) over the tokens
    return cyclic.flops(config, T, config.n_layer, body, pool, top_is_read=True, seen=seen, seen_last=tau)


if __name__ == "__main__":
    from tools.prove import main
    main({"feedback": (FeedbackConfig, Feedback)})
