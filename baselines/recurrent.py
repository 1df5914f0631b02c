"""
Recurrent Transformer: a layer shows later tokens the keys and values of its output, not of its input.

In the plain decoder, layer l at token t reads what earlier tokens were below layer l. Here it reads what they became
in layer l, which was itself made of what their predecessors became: effective depth grows with every token. A token
cannot read its own output before it exists, so it reads its own input.

    Oncescu et al., The Recurrent Transformer: Greater Effective Depth and Efficient Decoding, arXiv 2604.21215.

    paper                            here
    x_t, the input of a layer        x[:, t]      (B, D)
    (k0, v0), the temporary pair     k0, v0       (B, Hkv, T, d)   of x_t: token t alone reads it
    y_t, the output of the layer     y[t]         (B, 1, D)
    (K_t, V_t), the permanent pair   K, V         (B, Hkv, S, d)   of y_t, by the same norm, W^K and W^V
    o_t                              o            (B, H, T, d)     over the pairs of s < t and (k0, v0) of t

    cost           against the baseline
    parameters     equal
    FLOPs          4 D Hkv d more per token and layer: W^K and W^V are applied twice
    cache          equal: it holds the permanent pairs
    sequential     T L steps in training and prefill, not L: layers one after the other, and tokens inside a layer
"""
import contextlib
import sys
from dataclasses import dataclass

import torch

if not __package__:                     # run as `python baselines/recurrent.py`: what it imports lies one folder up
    sys.path[0] += "/.."
import model
from model import GPT, GPTConfig, causal_attention, repeat_kv


class Recurrent(GPT):
    """o_t = Attn(q_t; (K_s, V_s) for s < t, and (k0_t, v0_t))."""

    def layers(self, x, rope, cache=None):
        # Layer n needs nothing from above it, so it finishes all tokens before layer n + 1 starts.
        for n, block in enumerate(self.blocks):
            q, k0, v0 = block.qkv(x, rope)                      # the temporary pair: of the layer's input
            x = self.all_tokens(n, block, x, rope, q, k0, v0, cache)         # `loop`, or `tiled`, its fast form
        return x

    @staticmethod
    def loop(block, x, rope, q, k0, v0, K, V):
        """One layer, token by token. x (B, T, D), behind S tokens with the permanent pairs K, V (B, Hkv, S, d).
        Returns the outputs (B, T, D) and all permanent pairs (B, Hkv, S + T, d)."""
        y = []
        for t in range(x.size(1)):
            x_t, q_t, rope_t = x[:, t:t + 1], q[:, :, t:t + 1], [table[t:t + 1] for table in rope]
            # Without the temporary pair no token would read itself, and the first would read nothing.
            keys = torch.cat((K, k0[:, :, t:t + 1]), dim=2)
            values = torch.cat((V, v0[:, :, t:t + 1]), dim=2)
            y.append(block.finish(x_t, causal_attention(q_t, keys, values)))
            K_t, V_t = block.kv(y[t], rope_t)                   # of the output. Of x_t it would be the baseline
            K, V = torch.cat((K, K_t), dim=2), torch.cat((V, V_t), dim=2)
        return torch.cat(y, dim=1), K, V

    # ------------------------------------------------------------------------------------------------ bookkeeping

    LOOP = ("layers", "loop")                                   # what --diff shows

    def all_tokens(self, n, block, x, rope, q, k0, v0, cache):
        """Layer n: x (B, T, D) -> its outputs (B, T, D). The permanent pairs go to the cache."""
        K, V = k0[:, :, :0], v0[:, :, :0]                       # no token yet, S = 0
        if cache is not None:
            K, V = cache.append(n, K, V)                        # nothing new: the S tokens that are there
        one_layer = self.loop if self.config.variant == "loop" else tiled
        y, k, v = one_layer(block, x, rope, q, k0, v0, K, V)
        k, v = k[:, :, K.size(2):], v[:, :, K.size(2):]         # of the T new tokens
        self.record(n, x=x[None], q=q, k=k, v=v, k0=k0, v0=v0)
        if cache is not None:
            cache.append(n, k, v)
        return y

    def listening(self):
        return contextlib.nullcontext()                         # `finish` sees some tokens only; all_tokens records x


# ---------------------------------------------------------------------------------------------------------------------
# The same in tiles. Once half of the tokens are finished, what they give to the other half is one matrix product, a
# tile. Each pair s < t stands in one of T - 1 tiles. Until a token has read all, o is its attention so far and lse the
# log of its sum of e^score. On one CPU core (2 layers, width 128, T = 512, batch 8) training takes 0.6 of the loop's
# time and 0.2 of its memory; at T = 128 it takes the same time.


def tiled(block, x, rope, q, k0, v0, K, V):
    """What `loop` returns."""
    o = repeat_kv(v0, q)                                        # each token has read itself alone: its weight is 1
    lse = (q * repeat_kv(k0, q)).sum(dim=-1, keepdim=True) / q.size(-1) ** 0.5            # (B, H, T, 1)
    y, k, v = halves(block, x, rope, q, *read(q, K, V, o, lse))
    return y, torch.cat((K, k), dim=2), torch.cat((V, v), dim=2)


def halves(block, x, rope, q, o, lse):
    """T tokens that have read themselves and all tokens before these T -> their outputs and permanent pairs."""
    T = x.size(1)
    if T == 1:
        y = block.finish(x, o)
        return y, *block.kv(y, rope)
    half = 1 << (T - 1).bit_length() - 1                        # the largest power of two below T
    (c1, c2), (s1, s2) = (table.tensor_split([half]) for table in rope)
    (q1, q2), (o1, o2), (l1, l2) = (t.tensor_split([half], dim=2) for t in (q, o, lse))
    y1, K1, V1 = halves(block, x[:, :half], (c1, s1), q1, o1, l1)
    o2, l2 = read(q2, K1, V1, o2, l2)                           # the tile: the second half reads the first
    y2, K2, V2 = halves(block, x[:, half:], (c2, s2), q2, o2, l2)
    return torch.cat((y1, y2), dim=1), torch.cat((K1, K2), dim=2), torch.cat((V1, V2), dim=2)


def read(q, K, V, o, lse):
    """All of q read all of K and V, in addition to what gave them o. Returns the new o and lse."""
    scores = q @ repeat_kv(K, q).transpose(-2, -1) / q.size(-1) ** 0.5                    # (B, H, T, S)
    total = torch.logaddexp(lse, scores.logsumexp(dim=-1, keepdim=True))     # in logs: e^score may overflow
    return o * (lse - total).exp() + (scores - total).exp() @ repeat_kv(V, q), total


@dataclass
class RecurrentConfig(GPTConfig):
    variant: str = "tiled"             # loop: as the formula says; tiled: the same, with products of many tokens

    def __post_init__(self):
        super().__post_init__()
        self.require_one_of("variant", ("tiled", "loop"))


def flops_per_token(config, T):
    """As model.flops_per_token, plus W^K and W^V once more, of the layer's output."""
    again = config.n_layer * 4 * config.n_embd * config.n_kv_head * config.head_dim
    return model.add_forward_flops(model.flops_per_token(config, T), again)


if __name__ == "__main__":
    from tools.prove import main
    main({"recurrent": (RecurrentConfig, Recurrent)})
