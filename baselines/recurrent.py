"""
Recurrent Transformer: to later tokens, a layer shows keys and values of its own output, not of its input.

In the plain decoder token t of layer l reads what the tokens before it had made of themselves below layer l. Here it
reads what they became in layer l, which in turn was made of what their predecessors became: the depth that a layer can
build up grows with every token. A token cannot read its own output before it exists; it reads its own input.

    Oncescu et al., The Recurrent Transformer, arXiv 2604.21215

    paper                             here
    x_t, the input of a layer         x[:, t]             (B, T, D)
    (k0, v0), the temporary pair      k0, v0              (B, Hkv, T, d)   of x_t; read by token t alone
    y_t, the output of the layer      y                   (B, 1, D)
    (K_t, V_t), the permanent pair    K, V                (B, Hkv, S, d)   of y_t: the same norm, W^K and W^V
    o_t                               o                   (B, H, T, d)     over the past pairs and one's own (k0, v0)
    its running maximum and sum       lse                 (B, H, T, 1)     one number: the log of the sum of e^score

Cost: no parameters; W^K and W^V are applied twice, 4 D Hkv d FLOPs per token and layer; the baseline's cache, with the
permanent pairs in it. A layer can be finished for all tokens before the next layer starts, but inside it the T tokens
follow one another: T L steps in place of L, in training and prefill. Decoding has the baseline's L.

What breaks without each part: without the temporary pair the first token has nothing to read, and no token attends to
itself. If it stayed in the place of the permanent pair, this would be the baseline, bit for bit.

`loop` is the formula. `tiled`, the default, is the paper's exact tiling: once half of the tokens are finished, what
they give to the other half is one matrix product; T - 1 products add each pair s < t once. On one CPU core (2 layers,
width 128, T = 512, batch 8) it trains in 0.6 of the loop's time and 0.2 of its memory; at T = 128, in the same time.

Where paper, release and this file differ. The release has neither rotary embedding (ALiBi, or nothing) nor grouped
queries. Both are ours: the temporary and the permanent key are turned by the token's own position. Its tiling has a
backward by hand, which walks the tiles back and computes the feed-forward again, to save memory; ours is autograd's.
"""
from dataclasses import dataclass

import torch

import model
from model import GPT, GPTConfig, attend


def loop(block, x, rope, q, k0, v0, K, V):
    """One layer, token by token: x (B, T, D) behind the S pairs K, V -> y (B, T, D) and the T new permanent pairs."""
    y, (S, T) = [], (K.size(2), x.size(1))
    for t in (slice(t, t + 1) for t in range(T)):
        o = attend(q[:, :, t], torch.cat((K, k0[:, :, t]), dim=2), torch.cat((V, v0[:, :, t]), dim=2))
        y.append(block.finish(x[:, t], o))
        k, v = block.kv(y[-1], (rope[0][t], rope[1][t]))                 # (K_t, V_t): of the output, for later tokens
        K, V = torch.cat((K, k), dim=2), torch.cat((V, v), dim=2)
    return torch.cat(y, dim=1), K[:, :, S:], V[:, :, S:]


class Recurrent(GPT):
    def layers(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k0, v0 = block.qkv(x, rope)                               # (k0, v0): of the input, for the token itself
            y, k, v = self.run(block, x, rope, q, k0, v0, *past(cache, n, k0, v0))
            self.record(n, x=x[None], q=q, k=k, v=v, k0=k0, v0=v0)
            if cache is not None:
                cache.append(n, k, v)
            x = y
        return x

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__(config)
        self.run = VARIANTS[config.variant]


def past(cache, n, k, v):
    """The pairs of earlier tokens, (B, Hkv, S, d) each; S = 0 without a cache."""
    return (k[:, :, :0], v[:, :, :0]) if cache is None else cache.append(n, k[:, :, :0], v[:, :, :0])


# ---------------------------------------------------------------------------------------------------------------------
# The same in tiles


def tiled(block, x, rope, q, k0, v0, K, V):
    """What `loop` returns, from T - 1 tiles."""
    o = v0.repeat_interleave(q.size(1) // v0.size(1), dim=1)             # each token has read itself, and nothing else
    lse = (q * k0.repeat_interleave(q.size(1) // k0.size(1), dim=1)).sum(-1, keepdim=True) / q.size(-1) ** 0.5
    return halves(block, x, rope, q, *read(q, K, V, o, lse))


def halves(block, x, rope, q, o, lse):
    """T tokens that have read themselves and all that came before them; `o` is final for the first of them."""
    T = x.size(1)
    if T == 1:
        y = block.finish(x, o)
        return y, *block.kv(y, rope)
    half = 1 << (T - 1).bit_length() - 1                                 # the largest power of two below T
    (c1, c2), (s1, s2) = (table.tensor_split([half]) for table in rope)
    (q1, q2), (o1, o2), (l1, l2) = (t.tensor_split([half], dim=2) for t in (q, o, lse))
    y1, K1, V1 = halves(block, x[:, :half], (c1, s1), q1, o1, l1)
    y2, K2, V2 = halves(block, x[:, half:], (c2, s2), q2, *read(q2, K1, V1, o2, l2))
    return torch.cat((y1, y2), dim=1), torch.cat((K1, K2), dim=2), torch.cat((V1, V2), dim=2)


def read(q, K, V, o, lse):
    """One tile: all of q read all of K and V, beside what gave them o so far, with weight e^lse -> new o and lse."""
    g = q.size(1) // K.size(1)
    scores = q @ K.repeat_interleave(g, dim=1).transpose(-2, -1) / q.size(-1) ** 0.5                 # (B, H, T, S)
    total = torch.logaddexp(lse, scores.logsumexp(dim=-1, keepdim=True))
    return o * (lse - total).exp() + (scores - total).exp() @ V.repeat_interleave(g, dim=1), total


@dataclass
class RecurrentConfig(GPTConfig):
    variant: str = "tiled"             # loop: as the formula says; tiled: the same, with products of many tokens

    def __post_init__(self):
        super().__post_init__()
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r}: choose one of {', '.join(VARIANTS)}")


VARIANTS = {"tiled": tiled, "loop": loop}


def flops_per_token(config, T):
    """As model.flops_per_token, plus W^K and W^V once more, of the layer's output."""
    flops = model.flops_per_token(config, T)
    again = config.n_layer * 4 * config.n_embd * config.n_kv_head * config.head_dim
    return flops | dict(train=flops["train"] + 3 * again, prefill=flops["prefill"] + again,
                        decode=flops["decode"] + again)


if __name__ == "__main__":
    from tools.prove import main
    main("recurrent")
