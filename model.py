"""
The plain pre-norm decoder: the baseline that every mechanism in this project is compared with.

Layers talk through one sum, the residual stream x. Each block reads what all blocks below it have added, and adds its
own. A mechanism's file subclasses GPT and rewrites one method, `layers`, so that a layer reads other layers directly.

    name      what                          shape            B sequences, T tokens, D = n_embd
    x         residual stream               (B, T, D)
    q         queries                       (B, H, T, d)     H = n_head heads, each d = head_dim wide
    k, v      keys, values                  (B, Hkv, T, d)   Hkv = n_kv_head; H / Hkv query heads share one of them
    rope      cosines, sines                (T, d) each
    n, l      a layer, counted from 0                        a paper's layer n, counted from 1, is code layer n-1

The parts: RMSNorm (Zhang and Sennrich, 2019), rotary embedding (Su et al., 2021), grouped-query attention (Ainslie et
al., 2023), a norm on each query and key head (Henry et al., 2020), SwiGLU (Shazeer, 2020). No biases.
"""
import contextlib
import functools
import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels


def causal_attention(q, k, v):
    """softmax(q k^T / sqrt(d)) v, where each of the T queries sees its own token and all before it.

    q (B, H, T, d), k and v (B, Hkv, S, d) -> (B, H, T, d). The T queries belong to the last T of the S tokens.
    """
    T, S = q.size(2), k.size(2)
    if T == S:                                                  # a whole sequence: the usual triangle
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    elif T == 1:                                                # one new token: it sees everything
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    else:                                                       # a chunk behind a cache: is_causal starts top left
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(T, S, q.device), enable_gqa=True)


def causal_mask(T, S, device):
    """(T, S), True where a query sees a key: a triangle that ends in the bottom right corner."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def attention_weights(q, k):
    """The matrix A (B, H, T, S) that causal_attention never shows: causal_attention(q, k, v) = A v."""
    scores = q @ repeat_kv(k, q).transpose(-2, -1) / q.size(-1) ** 0.5       # (B, H, T, S)
    seen = causal_mask(q.size(2), k.size(2), q.device)
    return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)


def repeat_kv(t, q):
    """Keys or values (B, Hkv, S, d), each head repeated for the query heads that share it: (B, H, S, d)."""
    return t.repeat_interleave(q.size(1) // t.size(1), dim=1)


class RMSNorm(nn.Module):
    """y = g x / sqrt(mean(x^2) + eps), the mean over the last axis. The gain g starts at one."""

    def __init__(self, shape, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape)), eps

    def forward(self, x):
        x = x.to(self.weight.dtype)                             # under autocast x may be bf16: norms stay in fp32
        if self.weight.dim() == 1:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight       # a gain for each of several vectors


def rotary(positions, config, dtype=torch.float32):
    """Cosines and sines (T, d) of the angles position * base^(-2i/d), i < d/2. positions (T,) integers."""
    i = torch.arange(config.head_dim // 2, device=positions.device, dtype=dtype)
    angles = positions[:, None].to(dtype) * config.rope_base ** (-2 * i / config.head_dim)       # (T, d/2)
    angles = torch.cat((angles, angles), dim=-1)                # x[i] and x[i + d/2] turn by the same angle
    return angles.cos(), angles.sin()


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(x, rope):
    """Turn each pair (x[i], x[i + d/2]) by the angle of its token. x (..., T, d)."""
    cos, sin = rope
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


class Block(nn.Module):
    """One layer: attention, then feed-forward. Each reads a norm of the stream and adds to it.

    q, k and v take the normed input h (B, T, D), so that a mechanism can feed each of them something else.
    """

    def __init__(self, config, n):
        super().__init__()
        D, d, H, Hkv = config.n_embd, config.head_dim, config.n_head, config.n_kv_head
        self.head_dim, self.dropout = d, nn.Dropout(config.dropout)
        self.norm1 = RMSNorm(D, config.norm_eps)
        self.wq = nn.Linear(D, H * d, bias=False)
        self.wk = nn.Linear(D, Hkv * d, bias=False)
        self.wv = nn.Linear(D, Hkv * d, bias=False)
        self.wo = nn.Linear(H * d, D, bias=False)
        self.q_norm = RMSNorm(d, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.norm_eps) if config.qk_norm else nn.Identity()
        self.norm2 = RMSNorm(D, config.norm_eps)
        self.w_gate = nn.Linear(D, config.d_ff, bias=False)
        self.w_up = nn.Linear(D, config.d_ff, bias=False)
        self.w_down = nn.Linear(config.d_ff, D, bias=False)

    def heads(self, y):
        return y.unflatten(-1, (-1, self.head_dim))             # (B, T, H d) -> (B, T, H, d)

    def q(self, h, rope):
        return rotate(self.q_norm(self.heads(self.wq(h))).transpose(1, 2), rope)

    def k(self, h, rope):
        return rotate(self.k_norm(self.heads(self.wk(h))).transpose(1, 2), rope)

    def v(self, h):
        return self.heads(self.wv(h)).transpose(1, 2)           # no rotation: positions steer where to look, not what

    def qkv(self, x, rope):
        h = self.norm1(x)
        return self.q(h, rope), self.k(h, rope), self.v(h)

    def query(self, x, rope):
        return self.q(self.norm1(x), rope)

    def kv(self, x, rope):
        h = self.norm1(x)
        return self.k(h, rope), self.v(h)

    def feed_forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))            # SwiGLU

    def finish(self, x, attention):
        """Both residual additions. x (B, T, D), attention (B, H, T, d) -> the stream after this layer (B, T, D)."""
        x = x + self.dropout(self.wo(attention.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class QueryBlock(Block):
    """A block that reads keys and values made elsewhere, and so has none of its own."""

    def __init__(self, config, n):
        super().__init__(config, n)
        del self.wk, self.wv, self.k_norm


class GPT(nn.Module):
    """A decoder. `forward(idx)` gives logits, `forward(idx, targets)` the mean loss in nats.

    `layers` is the lesson: what each layer reads. It takes the embedding (B, T, D) to the top of the stream (B, T, D).
    """

    def layers(self, x, rope, cache=None):
        for n, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope)
            x = block.finish(x, self.attend(n, q, k, v, cache))
        return x

    def attend(self, n, q, k, v, cache=None):
        """Causal attention in layer n. With a cache, k and v join slot n, and the queries see all that it holds."""
        self.record(n, q=q, k=k, v=v)
        if cache is not None:
            k, v = cache.append(n, k, v)                        # (B, Hkv, S, d), the T new ones at the end
        return causal_attention(q, k, v)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.make_block(config, n) for n in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        if not config.tie_embeddings:
            self.unembed = nn.Embedding(config.padded_vocab_size, config.n_embd)      # drawn as the tied one
        self.trace = None                                       # set to {}: the next eager forward fills it
        self.draw_matrices()

    def make_block(self, config, n):
        return Block(config, n)

    @torch.no_grad()
    def draw_matrices(self):
        """Draw every Linear and Embedding from N(0, init_std^2), by its own init_std where it has one. The zeros and
        one-hots that a mechanism sets elsewhere stay.

        A mechanism that adds a Linear calls this once more, at the end of its own __init__. Each draw depends on the
        seed and the name alone, so calling it again changes nothing, and two models start with equal shared weights.
        """
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                std = getattr(module, "init_std", self.config.init_std)
                module.weight.copy_(normal(self.config, f"{name}.weight", *module.weight.shape, std=std))

    def rope(self, positions):
        dtype = torch.promote_types(self.embed.weight.dtype, torch.float32)      # half precision is too coarse here
        return rotary(positions, self.config, dtype)

    def hidden(self, idx, cache=None, last=False):
        """Token ids (B, T) -> the normed top of the stream (B, T, D). With a cache, they follow the tokens in it.
        `last` asks for the last token's row alone, (B, 1, D): all that a prefill needs."""
        start = 0 if cache is None else cache.length
        if start + idx.size(1) > self.config.block_size:
            raise ValueError(f"{start + idx.size(1)} tokens do not fit block_size={self.config.block_size}: "
                             f"give fewer, or build the model with a larger block_size")
        positions = torch.arange(start, start + idx.size(1), device=idx.device)
        layers = self.last_row if last else self.layers
        with self.listening():
            x = layers(self.dropout(self.embed(idx)), self.rope(positions), cache)
        if cache is not None:
            cache.length += idx.size(1)
        return self.norm(x)

    def last_row(self, x, rope, cache=None):
        """The last row of `layers`. Upper layers that need no other tokens may run for the last one alone."""
        return self.layers(x, rope, cache)[:, -1:]

    def head(self, h):
        """Hidden states (..., D) -> logits (..., vocab_size). The rows that pad the matrix are cut off."""
        return F.linear(h, self.head_weight)[..., :self.config.vocab_size]

    @property
    def head_weight(self):
        return (self.embed if self.config.tie_embeddings else self.unembed).weight

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. Without targets: logits (B, T, vocab_size). With targets (B, T), where -1 is ignored: the
        mean cross-entropy in nats, a scalar. Raises ValueError when the tokens do not fit block_size."""
        h = self.hidden(idx, cache)
        if targets is None:
            return self.head(h)
        return self.loss(h, self.head_weight, targets, self.config.vocab_size)

    @staticmethod
    def loss(h, weight, targets, vocab_size):
        """h (B, T, D), weight (padded vocabulary, D), targets (B, T). kernels.cross_entropy needs less memory."""
        logits = F.linear(h, weight)[..., :vocab_size]          # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def param_groups(self):
        """[{params, decay, lr_scale}], every parameter once. Linear and Embedding decay. Gains do not, nor does what a
        mechanism adds by hand: decay would pull a one-hot or a gain of one towards zero."""
        matrices = {m.weight for m in self.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
        decay = [p for p in self.parameters() if p in matrices]
        rest = [p for p in self.parameters() if p not in matrices]
        return [dict(params=decay, decay=True, lr_scale=1.0), dict(params=rest, decay=False, lr_scale=1.0)]

    def compile_pieces(self):
        """Compile the methods that `layers` calls, never the loop itself: one graph serves all equal layers.
        kernels.restore undoes it."""
        kernels.compile_methods(self.blocks, "qkv", "query", "kv", "finish")
        self.loss = kernels.cross_entropy

    def exactly(self):
        """A context in which a forward is exact. Here every forward is; a feedback model then runs token by token."""
        return contextlib.nullcontext()

    # ---------------------------------------------------------------------------------------------------- decoding

    @staticmethod
    def cache_slots(config):
        """(key slots, value slots) of the cache. A slot holds n_kv_head * head_dim numbers for each token."""
        return config.n_layer, config.n_layer

    def new_cache(self, batch_size, max_tokens=None):
        """An empty KVCache for max_tokens tokens (default: block_size), in the weights' dtype and on their device."""
        keys, values = self.cache_slots(self.config)
        return KVCache(self.config, keys, values, batch_size, max_tokens or self.config.block_size, self.embed.weight)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None, use_cache=True):
        """Yield the next ids (B, 1), max_new_tokens times, after the prompt idx (B, T >= 1). Each is drawn from
        softmax(logits / temperature), among the top_k largest if given; temperature 0 takes the largest.

        When block_size tokens are in view, the view is cut to its last half and read anew.
        """
        if idx.size(1) == 0:
            raise ValueError("the prompt is empty: start it with the end-of-text token")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature}: give 0 for the most likely token, or a positive number")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k={top_k}: give a whole number of at least 1, or leave it out to keep every token")
        size = self.config.block_size
        cache = self.new_cache(idx.size(0)) if use_cache else None
        view = unread = idx[:, -size:]
        for _ in range(max_new_tokens):
            h = self.hidden(unread if use_cache else view, cache, last=True)
            logits = self.head(h[:, 0]).float()                 # (B, V)
            if temperature < 1e-6:                              # so cold that only the largest is left
                unread = logits.argmax(dim=-1, keepdim=True)
            else:
                logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
                drawn = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
                unread = ids.gather(-1, drawn)
            yield unread
            view = torch.cat((view, unread), dim=1)
            if view.size(1) > size:
                view = unread = view[:, -max(1, size // 2):]
                if use_cache:
                    cache.length = 0

    def generate(self, idx, max_new_tokens, **how):
        """idx (B, T) -> (B, T + max_new_tokens); the options are those of `stream`."""
        return torch.cat((idx, *self.stream(idx, max_new_tokens, **how)), dim=1)

    # ----------------------------------------------------------------------------------------------------- the trace

    def record(self, n, **tensors):
        """trace[name][n] = tensor, detached: q, k, v as attended (B, heads, T, d); x, what block n reads, (ways, B, T,
        D); weights of a depth mix (B, T, ways, heads, sources), size 1 where an axis is absent."""
        if self.trace is not None:
            self.newest = n
            for name, tensor in tensors.items():
                self.trace.setdefault(name, {})[n] = tensor.detach()

    @contextlib.contextmanager
    def listening(self):
        """While there is a trace, record x: the inputs of a block's first norms and, where it differs, the residual."""
        if self.trace is None:
            yield
            return
        inputs, hooks, before = {}, [], [vars(block).get("finish") for block in self.blocks]

        def finish(plain, norms, residual, attention):
            ways = [inputs[norm] for norm in norms]
            if len(ways) > 1 or residual is not ways[0]:
                ways.append(residual)
            self.record(self.newest, x=torch.stack(ways))
            return plain(residual, attention)

        for block in self.blocks:
            norms = [norm for name, norm in block.named_children() if name.startswith("norm1")]
            for norm in norms:
                hooks.append(norm.register_forward_pre_hook(lambda norm, args: inputs.update({norm: args[0]})))
            block.finish = functools.partial(finish, block.finish, norms)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for block, method in zip(self.blocks, before):
                del block.finish
                if method:
                    block.finish = method


class KVCache:
    """Keys and values of past tokens, (slots, B, Hkv, max_tokens, d) each, filled up to `length` tokens.

    Layer n writes key slot n and value slot n. Where a mechanism has fewer slots, later layers share the last one.
    """

    def __init__(self, config, key_slots, value_slots, batch_size, max_tokens, like):
        shape = (batch_size, config.n_kv_head, max_tokens, config.head_dim)
        self.k = like.new_zeros(key_slots, *shape)
        self.v = like.new_zeros(value_slots, *shape)
        self.length = 0                                         # GPT.hidden moves it on, once all layers have written

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


def normal(config, name, *shape, std=None):
    """A parameter drawn from N(0, std^2), std = init_std unless given, by a generator seeded with (seed, name)."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed}:{name}".encode()))
    return nn.Parameter(torch.empty(shape).normal_(0.0, config.init_std if std is None else std, generator=generator))


# ---------------------------------------------------------------------------------------------------------------------
# Settings and costs


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
            self.require(name, getattr(self, name) >= 1, "give a whole number of at least 1")
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        self.require("n_kv_head", self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0,
                     f"n_head={self.n_head} is not a multiple of it: choose a divisor of n_head")
        if self.head_dim is None:
            self.require("n_embd", self.n_embd % self.n_head == 0,
                         f"it is not a multiple of n_head={self.n_head}: change one of them, or give head_dim")
            self.head_dim = self.n_embd // self.n_head
        even = self.head_dim >= 2 and self.head_dim % 2 == 0
        self.require("head_dim", even, "the rotation turns pairs: give an even number")
        if self.d_ff is None:
            self.d_ff = max(64, round(self.n_embd * 8 / 3 / 64) * 64)
        self.require("d_ff", self.d_ff >= 1, "give a whole number of at least 1")
        self.require("dropout", 0 <= self.dropout < 1, "give a number from 0 up to, but not including, 1")
        for name in ("rope_base", "norm_eps"):
            self.require(name, 0 < getattr(self, name) < math.inf, "give a positive number")
        self.require("init_std", 0 <= self.init_std < math.inf, "give 0 or a positive number")
        self.require("seed", 0 <= self.seed < 2 ** 32, f"give a whole number from 0 to {2 ** 32 - 1}")

    def require(self, name, holds, remedy):
        """ValueError, one line that says how to mend the setting `name`, unless the condition holds."""
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)}: {remedy}")

    def require_one_of(self, name, words):
        self.require(name, getattr(self, name) in words, f"choose one of {', '.join(words)}")

    @property
    def padded_vocab_size(self):
        """Rows of the embedding: vocab_size rounded up to a multiple of 64, which matrix products like better."""
        return -(-self.vocab_size // 64) * 64


def flops_per_token(config, T):
    """FLOPs of one token, 2 for a multiply-add: matrix products, and the attention pairs that a causal token sees.

    train: forward and backward over T tokens. prefill: the forward alone. decode: one token behind T others. head: the
    LM head of one forward, kept apart. Norms, softmax and rotation are left out. The backward of a matrix product costs
    two; that of attention 5/2 of its forward, since the scores are computed again.
    """
    D, pair = config.n_embd, 4 * config.n_head * config.head_dim
    matrices = 4 * D * config.head_dim * (config.n_head + config.n_kv_head) + 6 * D * config.d_ff
    L, seen = config.n_layer, (T + 1) / 2
    return dict(train=L * (3 * matrices + 3.5 * pair * seen), prefill=L * (matrices + pair * seen),
                decode=L * (matrices + pair * (T + 1)), head=2 * D * config.padded_vocab_size)


def add_forward_flops(flops, extra):
    """`flops` plus `extra` FLOPs per token of a forward pass; training has three times as many."""
    return flops | dict(train=flops["train"] + 3 * extra, prefill=flops["prefill"] + extra,
                        decode=flops["decode"] + extra)
