"""
Depth-Attention: before a layer attends over the sequence, its query attends over earlier layers and mixes their values.

The value that a token offers at layer l is made from that layer's input alone. Here the token first looks down its own
column: its query is compared with the keys that it had in earlier layers and in this one, and the softmax weights mix
the values of those layers. The mixed value takes the place of v in the ordinary attention that follows, in the cache,
and as a source for later layers. Keys are never mixed, no other token is read, and no parameter is added.

    Depth-Attention, arXiv 2606.05014

    symbol                                here
    q_l, k_l after RoPE                   q, k              (B, H, T, d), (B, Hkv, T, d)    layers count from 0
    v_l                                   v, before the mix (B, Hkv, T, d)
    S(l), the sources of layer l          sources(l, stride, recent)
    qbar, mean query of a KV head         q in depth_mix    (B, Hkv, T, d)
    e_{l,j} = <qbar, k_j> / sqrt(d)       e                 (n, B, Hkv, T): n candidates, the sources and l itself
    a_{l,j}, their softmax                a                 (n, B, Hkv, T)
    vt_l = sum_j a_{l,j} vt_j             v, after the mix  (B, Hkv, T, d); vt_0 = v_0; at j = l the layer's own v_l

Cost: no parameter, no cache beyond the baseline's. 4 n Hkv d + H d FLOPs per token and layer: 0.009 % and 0.006 % of a
forward pass at the 1.5B and 3B dimensions with stride L/2. The paper's "under 0.01 %" leaves only that reading: all
layers as sources would be 0.067 %, one mix for each query head 0.026 %. What it costs is memory traffic: each source's
key and value are read again. A forward holds k and vt of the tokens at hand, once; in training they are kept anyway.

What breaks without each part: with v_j for vt_j the sources are not what the cache holds. Averaging the softmax weights
of a group's heads instead of their queries is another function. With a norm after RoPE instead of before it, rotations
no longer cancel in <q, k_j> and the weights depend on the position. A mixed value is final once written: mixed again
after reading the cache, with the query of a later token, decoding no longer equals the full forward. The model does not
start as the baseline (each of n candidates weighs about 1/n at first); stride=0 is the baseline, bit for bit.

What a laptop can show: with 6 layers and stride L/2 the sources are layers 0 and 3, nearly a value residual with a gate
for each token and head. The smallest published model has 360M parameters: a null result here contradicts nothing.

Where paper, release and this file differ. Only the abstract was at hand, so the formulas follow a first author's code
(hyq718/Depth-Attention). It norms queries before RoPE and keys after it; here both before. From a cache it mixes past
values anew with the newest query, and masks so that only position 0 is seen; here the cache holds vt and is exact.

Looped: a prelude, a stretch of layers run R times with the same weights, a coda. The abstract says that gains extend to
looped models; no code or text of that was available, so it is this project's choice: a layer's sources are the same
layer in earlier rounds, whose keys live in one space. Where a round changes nothing, neither does the mix. It has as
many cache slots as steps; the gradient runs through all rounds; the number of rounds may be changed in a trained model.
"""
from dataclasses import dataclass, replace

import torch

import kernels
import model
from model import GPT, GPTConfig, attend


def sources(l, stride, recent):
    """S(l): of the layers below l those on the stride (0: none), and the last `recent` ones."""
    return [j for j in range(l) if stride and j % stride == 0 or j >= l - recent]


def depth_mix(q, candidates):
    """q (B, H, T, d), candidates [(k_j, vt_j)] (B, Hkv, T, d) each -> vt (B, Hkv, T, d), weights (n, B, Hkv, T)."""
    q = q.unflatten(1, (candidates[0][0].size(1), -1)).mean(dim=2)       # qbar: one depth query for each KV head
    e = torch.stack([(q * k).sum(dim=-1) for k, _ in candidates]) / q.size(-1) ** 0.5
    a = e.softmax(dim=0)                                                 # over layers, in fp32 as q and k are
    return sum(a_j[..., None] * v for a_j, (_, v) in zip(a, candidates)).type_as(candidates[-1][1]), a


class DepthAttention(GPT):
    def layers(self, x, rope, cache=None):
        depth = []                                                       # (k_j, vt_j) of these tokens, j < l
        for l, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            below = [depth[j] for j in sources(l, self.config.stride, self.config.recent)]
            v, a = self.mix(q, below + [(k, v)])                         # vt_l
            depth.append((k, v))
            self.record(l, x=x[None], q=q, k=k, v=v, weights=a.permute(1, 3, 2, 0)[:, :, None])
            x = block.finish(x, attend(q, k, v, cache, l))
        return x

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def mix(self, q, candidates):
        return depth_mix(q, candidates)

    def compile_pieces(self):
        super().compile_pieces()
        kernels.compile_methods([self], "mix")

    @staticmethod
    def cache_slots(config):
        """(key slots, value slots): one for each step; vt in the place of v."""
        return len(config.steps), len(config.steps)


@dataclass
class DepthAttentionConfig(GPTConfig):
    stride: int | None = None          # every stride-th layer from 0 on is a source (default: n_layer // 2; 0: none)
    recent: int = 0                    # so many layers right below are sources too

    def __post_init__(self):
        super().__post_init__()
        if self.stride is None:
            self.stride = max(1, self.n_layer // 2)
        for name in ("stride", "recent"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: give a whole number of at least 0")

    @property
    def steps(self):
        """[(layer, its number among the possible sources)], in the order of the run."""
        return [(l, l) for l in range(self.n_layer)]


class LoopedDepthAttention(DepthAttention):
    def layers(self, x, rope, cache=None):
        depth = {}
        for i, (l, r) in enumerate(self.config.steps):                   # step i: layer l, in its round r
            q, k, v = self.blocks[l].qkv(x, rope)
            before = [depth[l, s] for s in sources(r, self.config.stride, self.config.recent)]
            v, a = self.mix(q, before + [(k, v)])
            depth[l, r] = k, v
            self.record(i, x=x[None], q=q, k=k, v=v, weights=a.permute(1, 3, 2, 0)[:, :, None])
            x = self.blocks[l].finish(x, attend(q, k, v, cache, i))
        return x


@dataclass
class LoopedConfig(DepthAttentionConfig):
    stride: int = 1                    # every stride-th earlier round is a source (0: none, the plain looped model)
    recent: int = 0                    # so many rounds right before are sources too
    prelude: int | None = None         # layers run once, before the loop (default: 1, or 0 with fewer than 3 layers)
    coda: int | None = None            # layers run once, after it (default: likewise); those between are the loop
    rounds: int = 2                    # how often the loop runs; no weight depends on it

    def __post_init__(self):
        super().__post_init__()
        for name in ("prelude", "coda"):
            if getattr(self, name) is None:
                setattr(self, name, int(self.n_layer > 2))
        for name, least in (("prelude", 0), ("coda", 0), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: give a whole number of at least {least}")
        if self.prelude + self.coda >= self.n_layer:
            raise ValueError(f"prelude={self.prelude} and coda={self.coda} leave no layer of n_layer={self.n_layer} to "
                             f"the loop: give more layers, or a shorter prelude and coda")

    @property
    def steps(self):
        loop = range(self.prelude, self.n_layer - self.coda)
        return ([(l, 0) for l in range(loop.start)] + [(l, r) for r in range(self.rounds) for l in loop]
                + [(l, 0) for l in range(loop.stop, self.n_layer)])


def flops_per_token(config, T):
    """As model.flops_per_token, a looped layer once for each round, plus the mix wherever there is a source: scores and
    mixed values, 2 Hkv d for each candidate, and the mean query."""
    flops = model.flops_per_token(replace(config, n_layer=len(config.steps)), T)
    n = [1 + len(sources(number, config.stride, config.recent)) for _, number in config.steps]
    extra = sum(4 * m * config.n_kv_head * config.head_dim + config.n_head * config.head_dim for m in n if m > 1)
    return flops | dict(train=flops["train"] + 3 * extra, prefill=flops["prefill"] + extra,
                        decode=flops["decode"] + extra)


if __name__ == "__main__":
    from tools.prove import main
    main("depth_attention", "looped")                                    # --model=looped for the second
