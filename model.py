"""
The plain pre-norm decoder: the baseline that every mechanism in this project is compared with.

Embedding, n_layer blocks of attention and feed-forward, a norm, a head. Between layers there is one channel only, the
residual stream x: each block reads the sum that all blocks below it have written, and adds to it. A mechanism file
subclasses GPT, adds its parameters and rewrites one method, `layers`, so that a layer can read another layer directly.

    x                 residual stream                       (B, T, D)        B sequences, T tokens, D = n_embd
    q                 queries                               (B, H, T, d)     H = n_head, d = head_dim
    k, v              keys, values                          (B, Hkv, T, d)   Hkv = n_kv_head; H/Hkv query heads share one
    rope              cosines and sines of the rotation     (T, d) each
    layer n           counted from 0; the papers' layer n is code layer n-1, and X_0 is the embedding

RMSNorm (Zhang and Sennrich, 2019), rotary embedding in the half layout (Su et al., 2021), grouped-query attention
(Ainslie et al., 2023), a norm on every query and key head (Henry et al., 2020), SwiGLU (Shazeer, 2020); no biases.
"""
import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels


@dataclass
class GPTConfig:
    vocab_size: int = 257          # token ids, end of text included
    block_size: int = 256          # longest sequence, in tokens
    n_layer: int = 6               # blocks
    n_head: int = 4                # query heads
    n_kv_head: int | None = None   # key and value heads, a divisor of n_head (default: n_head)
    n_embd: int = 128              # width of the residual stream
    head_dim: int | None = None    # width of one head, even (default: n_embd // n_head)
    d_ff: int | None = None        # hidden width of the feed-forward (default: 8/3 n_embd, to the nearest 64)
    rope_base: float = 1e4         # wavelengths of the rotation run from 2 pi to 2 pi times this
    qk_norm: bool = True           # RMSNorm on each query and key head, before the rotation
    tie_embeddings: bool = True    # the head reuses the embedding matrix
    dropout: float = 0.0           # on the embedding and on what each sublayer adds to the stream; off in eval
    norm_eps: float = 1e-6         # under the root of every RMSNorm
    init_std: float = 0.02         # standard deviation of every matrix and embedding at the start
    seed: int = 1337               # initial weights, order of batches, dropout

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a whole number of at least 1")
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}: "
                             f"choose n_kv_head from the divisors of n_head")
        if self.head_dim is None:
            if self.n_embd % self.n_head:
                raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}: "
                                 f"change one of them, or give head_dim")
            self.head_dim = self.n_embd // self.n_head
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: the rotation turns pairs, so give an even number")
        if self.d_ff is None:
            self.d_ff = max(64, round(self.n_embd * 8 / 3 / 64) * 64)
        if self.d_ff < 1:
            raise ValueError(f"d_ff={self.d_ff}: give a whole number of at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: give a number from 0 up to, but not including, 1")
        for name in ("rope_base", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: give a positive number")
        if not 0 <= self.init_std < math.inf:
            raise ValueError(f"init_std={self.init_std}: give 0 or a positive number")
        if not 0 <= self.seed < 2 ** 32:
            raise ValueError(f"seed={self.seed}: give a whole number from 0 to {2 ** 32 - 1}")

    @property
    def padded_vocab_size(self):
        """Rows of the embedding: vocab_size rounded up to a multiple of 64, which matrix products like better."""
        return -(-self.vocab_size // 64) * 64


# ---------------------------------------------------------------------------------------------------------------------
# The building blocks


def normal(config, name, *shape, std=None):
    """A parameter of `shape` drawn from N(0, std^2), std = config.init_std unless given.

    Each draw has its own generator, seeded by (config.seed, name). So a weight that two models share by name starts
    equal in both, and no later pass over the model can overwrite a zero or a one-hot that a mechanism needs.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed}:{name}".encode()))
    std = config.init_std if std is None else std
    return nn.Parameter(torch.empty(*shape).normal_(0.0, std, generator=generator))


class Linear(nn.Module):
    """y = x W^T without bias. x (..., n_in) -> y (..., n_out); W (n_out, n_in). `name` is the module's full name."""

    def __init__(self, config, name, n_in, n_out, std=None):
        super().__init__()
        self.weight = normal(config, f"{name}.weight", n_out, n_in, std=std)

    def forward(self, x):
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Row lookup. ids (...) -> (..., n_embd); one row for each of the padded_vocab_size ids."""

    def __init__(self, config, name):
        super().__init__()
        self.weight = normal(config, f"{name}.weight", config.padded_vocab_size, config.n_embd)

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """y = g * x / sqrt(mean(x^2) + eps) over the last axis, in the dtype of the gain g, which starts at one."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        x = x.to(self.weight.dtype)
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1)
        return x * (mean_square + self.eps).rsqrt() * self.weight        # 3 % of a step faster than F.rms_norm on a CPU


def rotary(positions, config, dtype=torch.float32):
    """Cosines and signed sines (T, d) of the angles position * base^(-2i/d), i = 0..d/2-1; positions (T,) integers."""
    i = torch.arange(config.head_dim // 2, device=positions.device, dtype=dtype)
    angles = positions.to(dtype)[:, None] * config.rope_base ** (-2 * i / config.head_dim)       # (T, d/2)
    return torch.cat((angles.cos(), angles.cos()), dim=-1), torch.cat((-angles.sin(), angles.sin()), dim=-1)


def rotate(x, rope):
    """Turn each pair (x[i], x[i + d/2]), the half layout, by the i-th angle of its position. x (B, H, T, d)."""
    cos, sin = rope                                                      # (T, d) each, from `rotary`
    return x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin              # roll: the other member of each pair


def attend(q, k, v, cache=None, n=None):
    """Causal attention softmax(q k^T / sqrt(d)) v: each token reads itself and all tokens before it.

    q (B, H, T, d), k and v (B, Hkv, T, d) -> (B, H, T, d). With a cache, k and v are appended to slot n and the T new
    tokens read everything that it now holds. `attend_explicit` below is the same thing, spelled out.
    """
    if cache is not None:
        k, v = cache.append(n, k, v)                                     # (B, Hkv, S, d), the newest T at the end
    T, S = q.size(2), k.size(2)
    # is_causal=True lays the triangle from the top left corner, which is right only when the queries start at key 0.
    mask = None if T in (1, S) else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T == S > 1, enable_gqa=True)


def attend_explicit(q, k, v):
    """`attend` with its matrices in view: memory T x S, and only for reading and for testing."""
    g = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)  # one key head serves g query heads
    T, S = q.size(2), k.size(2)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5                 # (B, H, T, S)
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v     # A V


def cross_entropy(h, weight, targets, vocab_size):
    """h (B, T, D), weight (padded vocabulary, D), targets (B, T), -1 ignored -> mean loss in nats. The fused form,
    which never holds all the logits at once, is kernels.cross_entropy."""
    logits = F.linear(h, weight)[..., :vocab_size]                       # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each reading a norm of the stream and adding to it.

    `q`, `k`, `v` take the normed input (B, T, D), so that a mechanism can feed each of them something else.
    """

    def __init__(self, config, n):
        super().__init__()
        D, d, name = config.n_embd, config.head_dim, f"blocks.{n}"
        self.head_dim, self.dropout = d, nn.Dropout(config.dropout)
        self.norm1 = RMSNorm(D, config.norm_eps)
        self.wq = Linear(config, f"{name}.wq", D, config.n_head * d)
        self.wk = Linear(config, f"{name}.wk", D, config.n_kv_head * d)
        self.wv = Linear(config, f"{name}.wv", D, config.n_kv_head * d)
        self.wo = Linear(config, f"{name}.wo", config.n_head * d, D)
        self.q_norm = RMSNorm(d, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.norm_eps) if config.qk_norm else nn.Identity()
        self.norm2 = RMSNorm(D, config.norm_eps)
        self.w_gate = Linear(config, f"{name}.w_gate", D, config.d_ff)
        self.w_up = Linear(config, f"{name}.w_up", D, config.d_ff)
        self.w_down = Linear(config, f"{name}.w_down", config.d_ff, D)

    def heads(self, y):
        return y.unflatten(-1, (-1, self.head_dim))                      # (B, T, H d) -> (B, T, H, d)

    def q(self, h, rope):
        return rotate(self.q_norm(self.heads(self.wq(h))).transpose(1, 2), rope)

    def k(self, h, rope):
        return rotate(self.k_norm(self.heads(self.wk(h))).transpose(1, 2), rope)

    def v(self, h):
        return self.heads(self.wv(h)).transpose(1, 2)                    # (B, Hkv, T, d)

    def qkv(self, x, rope):
        h = self.norm1(x)
        return self.q(h, rope), self.k(h, rope), self.v(h)

    def query(self, x, rope):
        return self.q(self.norm1(x), rope)

    def kv(self, x, rope):
        h = self.norm1(x)
        return self.k(h, rope), self.v(h)

    def feed_forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))        # SwiGLU

    def finish(self, x, attention):
        """Both residual additions. x (B, T, D) the stream, attention (B, H, T, d) -> the stream after this layer."""
        x = x + self.dropout(self.wo(attention.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class GPT(nn.Module):
    """A decoder of config.n_layer blocks. `forward(idx)` gives logits, `forward(idx, targets)` the mean loss in nats.

    `layers` is the lesson: what each layer reads. It takes the embedding (B, T, D) to the top of the stream (B, T, D).
    """

    def layers(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            self.record(n, x=x[None], q=q, k=k, v=v)
            x = block.finish(x, attend(q, k, v, cache, n))
        return x

    # ------------------------------------------------------------------------------------------------ bookkeeping

    loss = staticmethod(cross_entropy)

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = Embedding(config, "embed")
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.make_block(config, n) for n in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        if not config.tie_embeddings:
            self.unembed = Embedding(config, "unembed")
        self.trace = None                         # set to {} and the next eager forward fills it; see `record`

    def make_block(self, config, n):
        return Block(config, n)

    def record(self, n, **tensors):
        """trace[name][n] = tensor, detached, a tuple of them stacked: x (ways, B, T, D); q, k, v (B, heads, T, d) as attended, after RoPE;
        weights (B, T, ways, heads, sources) of a depth mix, size 1 where an axis is absent."""
        if self.trace is not None:
            for name, tensor in tensors.items():
                tensor = torch.stack(tensor) if isinstance(tensor, tuple) else tensor
                self.trace.setdefault(name, {})[n] = tensor.detach()

    def layers_last(self, x, rope, cache=None):
        """The last row of `layers`. A model whose upper layers can do without the other tokens stops early for those."""
        return self.layers(x, rope, cache)[:, -1:]

    def rope(self, positions):
        dtype = torch.promote_types(self.embed.weight.dtype, torch.float32)
        return rotary(positions, self.config, dtype)

    def hidden(self, idx, cache=None, last=False):
        """Token ids (B, T) -> the normed top of the stream (B, T, D). With a cache, the T tokens follow those in it.
        `last` asks for the last token's row alone, (B, 1, D): all that a prefill needs."""
        start = 0 if cache is None else cache.length
        if start + idx.size(1) > self.config.block_size:
            raise ValueError(f"{start + idx.size(1)} tokens do not fit block_size={self.config.block_size}: "
                             f"give fewer, or build the model with a larger block_size")
        positions = torch.arange(start, start + idx.size(1), device=idx.device)
        layers = self.layers_last if last else self.layers
        x = layers(self.dropout(self.embed(idx)), self.rope(positions), cache)
        if cache is not None:
            cache.length += idx.size(1)
        return self.norm(x)

    @property
    def head_weight(self):
        return (self.embed if self.config.tie_embeddings else self.unembed).weight

    def head(self, h):
        """Hidden states (..., D) -> logits (..., vocab_size); the padded rows are cut off here."""
        return F.linear(h, self.head_weight)[..., :self.config.vocab_size]

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. Without targets: logits (B, T, vocab_size). With targets (B, T) int64, where -1 is ignored:
        the mean cross-entropy in nats, a scalar. Raises ValueError when the tokens do not fit block_size."""
        h = self.hidden(idx, cache)
        if targets is None:
            return self.head(h)
        return self.loss(h, self.head_weight, targets, self.config.vocab_size)

    def param_groups(self):
        """[{params, decay, lr_scale}], every parameter once: the weights of Linear and Embedding decay; gains, and
        whatever a mechanism adds by hand, do not."""
        matrices = {m.weight for m in self.modules() if isinstance(m, (Linear, Embedding))}
        decay = [p for p in self.parameters() if p in matrices]
        rest = [p for p in self.parameters() if p not in matrices]
        return [dict(params=decay, decay=True, lr_scale=1.0), dict(params=rest, decay=False, lr_scale=1.0)]

    def compile_pieces(self):
        """torch.compile what stands between the lines of `layers`, never the loop, and take the fused loss. One graph
        serves all layers of equal shape. Nothing is compiled until the first call; kernels.restore undoes it."""
        kernels.compile_methods(self.blocks, "qkv", "query", "kv", "finish")
        self.loss = kernels.cross_entropy

    @staticmethod
    def cache_slots(config):
        """(key slots, value slots) of the cache: a slot holds n_kv_head * head_dim numbers for each token."""
        return config.n_layer, config.n_layer

    def new_cache(self, batch_size, max_tokens=None):
        """An empty KVCache for `max_tokens` tokens (default: block_size), in the dtype and on the device of the weights."""
        keys, values = self.cache_slots(self.config)
        return KVCache(self.config, keys, values, batch_size, max_tokens or self.config.block_size, self.embed.weight)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None, use_cache=True):
        """Yield max_new_tokens times the next ids (B, 1) after the prompt idx (B, T >= 1), each sampled from
        softmax(logits / temperature), from the top_k largest if given; temperature 0 takes the largest.

        When block_size tokens are in view, the view is cut to its last half and read anew, with and without cache.
        """
        if idx.size(1) == 0:
            raise ValueError("the prompt is empty: start it with the end-of-text token")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature}: give 0 for the most likely token, or a positive number")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k={top_k}: give a whole number of at least 1, or leave it out to keep every token")
        size = self.config.block_size
        cache = self.new_cache(idx.size(0)) if use_cache else None
        view, fresh = idx[:, -size:], idx[:, -size:]                     # what is in view; what the cache has not read
        for _ in range(max_new_tokens):
            h = self.hidden(fresh if use_cache else view, cache, last=True)
            logits = self.head(h[:, 0]).float()                          # (B, V): one row of logits is enough
            if temperature == 0:
                fresh = logits.argmax(dim=-1, keepdim=True)
            else:
                logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
                drawn = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
                fresh = ids.gather(-1, drawn)
            yield fresh
            view = torch.cat((view, fresh), dim=1)
            if view.size(1) > size:                                      # full: keep the last half and refill
                view = fresh = view[:, -max(1, size // 2):]
                if use_cache:
                    cache.length = 0

    def generate(self, idx, max_new_tokens, **how):
        """idx (B, T) -> (B, T + max_new_tokens); the options are those of `stream`."""
        return torch.cat((idx, *self.stream(idx, max_new_tokens, **how)), dim=1)


class KVCache:
    """Keys and values of past tokens, (slots, B, Hkv, max_tokens, d) each, filled up to `length` tokens.

    Layer n writes key slot n and value slot n; a mechanism with fewer slots lets later layers reuse the last one.
    """

    def __init__(self, config, key_slots, value_slots, batch_size, max_tokens, like):
        shape = (batch_size, config.n_kv_head, max_tokens, config.head_dim)
        self.k = like.new_zeros(key_slots, *shape)
        self.v = like.new_zeros(value_slots, *shape)
        self.length = 0

    def append(self, n, k, v):
        """Put k, v (B, Hkv, T, d) behind the `length` tokens of slot n; return all that the slot then holds."""
        end = self.length + k.size(2)
        if end > self.k.size(3):
            raise ValueError(f"the cache has room for {self.k.size(3)} tokens and was given {end}: "
                             f"ask new_cache for a larger max_tokens")
        keys, values = self.k[min(n, len(self.k) - 1)], self.v[min(n, len(self.v) - 1)]
        keys[:, :, self.length:end] = k
        values[:, :, self.length:end] = v
        return keys[:, :, :end].to(k.dtype), values[:, :, :end].to(v.dtype)


def flops_per_token(config, T):
    """FLOPs of one token, 2 for a multiply-add: matrix products and the attention pairs that a causal token sees.

    `train` forward and backward over T tokens, `prefill` the forward alone, `decode` one token behind T others,
    `head` the LM head of one forward, kept apart. Norms, softmax and rotation are left out. The backward of a matrix
    product costs two; that of attention 5/2 of its forward, since the scores are computed again.
    """
    D, F_, pair = config.n_embd, config.d_ff, 4 * config.n_head * config.head_dim
    matrices = 4 * D * config.head_dim * (config.n_head + config.n_kv_head) + 6 * D * F_
    L, seen = config.n_layer, (T + 1) / 2
    return dict(train=L * (3 * matrices + 3.5 * pair * seen), prefill=L * (matrices + pair * seen),
                decode=L * (matrices + pair * (T + 1)), head=2 * D * config.padded_vocab_size)
