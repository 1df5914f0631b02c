"""
Fused paths: the same formulas as in the model and mechanism files, with less memory traffic.

Nothing here is needed to understand a model. `train.py --compile=on` (on CUDA the default) calls
`model.compile_pieces()`, which compiles the pieces between the lines of the layer loop and swaps in the functions of
this file; eager mode uses the plain formulas. Each path stands here with what it saves; the tests hold it against the
plain formula, value and gradient.
"""
import functools
import types

import torch
import torch.nn.functional as F

# ---------------------------------------------------------------------------------------------------------------------
# Compiling pieces


@functools.cache
def compiled(function):
    """torch.compile(function), made once for each function, at its first use: importing the compiler takes seconds."""
    torch._dynamo.config.recompile_limit = 64       # many shapes of many models share a piece; the default is 8
    return torch.compile(function)


def compile_methods(modules, *names):
    """Give every module a compiled form of its methods `names`, used while the module is in training mode.

    The method of the class is compiled, with the module as an argument: equal modules share one graph, so 12 layers
    compile in the time of one. In eval mode, where lengths change with every token, the plain method runs.
    """
    for module in modules:
        for name in names:
            plain = getattr(type(module), name)
            replace_method(module, name, lambda *args, plain=plain: compiled(plain)(*args))


def replace_method(module, name, function):
    """Let function(module, ...) stand for module's method `name` in training mode."""
    plain = getattr(type(module), name)

    def method(self, *args):
        return (function if self.training else plain)(self, *args)
    setattr(module, name, types.MethodType(method, module))


def restore(model):
    """Undo model.compile_pieces(): drop what it put in front of the methods of a class, in the model and its modules."""
    for module in model.modules():
        for name in [name for name in vars(module) if callable(vars(module)[name]) and hasattr(type(module), name)]:
            delattr(module, name)


# ---------------------------------------------------------------------------------------------------------------------
# The loss
#
# Plain: logits = h W^T, (B T, V) in memory for the forward, again for the softmax, again for its gradient. At
# B T = 12,288 and V = 50,304 that is 2.5 GB each in fp32. But the gradient of the loss by the logits, softmax - onehot,
# needs nothing that is not known in the forward pass. So a few rows at a time: logits, loss, gradient, and straight on
# to the gradients of h and W; the logits are gone before the next rows come, and nothing is computed twice.


LOGITS_AT_A_TIME = 2 ** 25                              # 128 MB in fp32


def nll_and_gradient(logits, targets):
    """logits (n, V), targets (n,) -> the summed loss, and its gradient softmax - onehot (n, V); rows of -1 give 0."""
    logp = logits.float().log_softmax(dim=-1)
    onehot = torch.arange(logits.size(-1), device=logits.device) == targets[:, None]
    gradient = torch.where((targets >= 0)[:, None], logp.exp() - onehot.float(), 0)
    return -torch.where(onehot, logp, 0).sum(), gradient.to(logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, targets, vocab_size, dtype, with_gradient):
        W = weight[:vocab_size].to(dtype)                                     # (V, D)
        rows = max(1, LOGITS_AT_A_TIME // vocab_size)
        total, seen = h.new_zeros((), dtype=torch.float32), (targets >= 0).sum()
        dh = torch.empty_like(h) if with_gradient else None
        dW = torch.zeros_like(weight) if with_gradient else None
        for i in range(0, len(h), rows):
            x, y = h[i:i + rows].to(dtype), targets[i:i + rows]
            if not with_gradient:
                total += F.cross_entropy((x @ W.T).float(), y, ignore_index=-1, reduction="sum")
                continue
            nll, dlogits = compiled(nll_and_gradient)(x @ W.T, y)
            total += nll
            dh[i:i + rows] = dlogits @ W
            dW[:vocab_size] += dlogits.T @ x
        ctx.save_for_backward(dh, dW, seen)
        return total / seen

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        # What was saved is the gradient of the sum. It is divided by the count only here, in fp32: as a mean it would
        # be so small that fp16 rounds nearly all of it to zero before a gradient scaler can help.
        dh, dW, seen = ctx.saved_tensors
        return dh * (grad / seen), dW * (grad / seen), None, None, None, None


def cross_entropy(h, weight, targets, vocab_size):
    """model.cross_entropy with a peak memory of 128 MB of logits. h (B, T, D), weight (padded vocabulary, D), targets
    (B, T) with -1 ignored -> mean loss in nats, a scalar."""
    device = h.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
    return ChunkedCrossEntropy.apply(h.flatten(0, 1), weight, targets.flatten(), vocab_size, dtype,
                                     torch.is_grad_enabled())


# ---------------------------------------------------------------------------------------------------------------------
# The depth mix: C mixtures of the S states that lie below, for every token (MUDD, DenseFormer)
#
# Plain: C S products and as many sums, each reading and writing a whole (B, T, D) tensor; in the backward pass every layer
# makes a new gradient for each state below it, and autograd adds them up. What is needed: forward, read S states once and
# write C mixtures; backward, read S states and C gradients once, and add to S gradients where they lie.
#
# The states of one token lie together, in one buffer (N, L+1, D), N = B T. Every layer writes its own state into it, and the
# backward pass adds into the buffer's gradient as it comes down, both in place. That is safe because mix n hands the buffer
# on to mix n+1 as a value: autograd runs their backwards in the opposite order, and a gradient comes in on that edge alone.
# A gradient that came another way (a second reader of the buffer, a hook) is not ours to add into: it is copied first.


PADDING = 16        # numbers between two states: were they to touch, the compiler would see one long state, and add to a copy


def state_buffer(N, states, D, like):
    return like.new_empty(0).new_empty_strided((N, states, D), (states * (D + PADDING), D + PADDING, 1))


def mixtures(X, A):
    """X (N, S, D), A (N, C, S) -> C mixtures (N, D): sum_j A_cj X_j. X is read once."""
    return tuple((A[:, c, :, None] * X).sum(dim=1) for c in range(A.size(1)))


def mixture_gradients(X, dX, A, *d_mixtures):
    """dX (N, S, D) += sum_c A_cj d_c, in place; -> dA (N, C, S): <X_j, d_c>. X and dX are read once."""
    torch._check(X.size(1) == dX.size(1))
    dX += sum(A[:, c, :, None] * d[:, None] for c, d in enumerate(d_mixtures))
    return torch.stack([(X * d[:, None]).sum(dim=-1) for d in d_mixtures], dim=1)


def any_length(X, *As):
    """The number of states, S, grows from layer to layer: one compiled form serves them all."""
    for tensor, dim in ((X, 1), *((A, 2) for A in As)):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


class WriteAndMix(torch.autograd.Function):
    """(buffer, x (N, D), A (N or 1, C, S), i, step) -> the buffer, now with x in slot i, and C mixtures (N, D) of its slots
    i, i - step, .. >= 0, of which there are S."""

    @staticmethod
    def forward(ctx, buffer, x, A, i, step):
        buffer[:, i] = x
        ctx.mark_dirty(buffer)
        ctx.set_materialize_grads(False)
        ctx.states, ctx.i, ctx.step = buffer.detach(), i, step         # later layers write other slots: these stay as read
        ctx.save_for_backward(A)
        X, A = ctx.states[:, i % step:i + 1:step], A.expand(len(x), -1, -1)
        any_length(X, A)
        return buffer, *(compiled(mixtures)(X, A) if A.size(1) else ())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_buffer, *d_mixtures):
        (A,), (N, states, D), i, step = ctx.saved_tensors, ctx.states.shape, ctx.i, ctx.step
        if not getattr(d_buffer, "ours", False):
            given, d_buffer = d_buffer, state_buffer(N, states, D, ctx.states)
            d_buffer.copy_(given) if given is not None else d_buffer.zero_()
            d_buffer.ours = True
        dA = None
        if any(d is not None for d in d_mixtures):
            d_mixtures = [ctx.states.new_zeros(N, D) if d is None else d for d in d_mixtures]
            X, dX = (t[:, i % step:i + 1:step] for t in (ctx.states, d_buffer))
            weights = A.expand(N, -1, -1)
            any_length(X, weights)
            any_length(dX)
            dA = compiled(mixture_gradients)(X, dX, weights, *d_mixtures)
            dA = dA.sum(dim=0, keepdim=True) if len(A) == 1 else dA
        return d_buffer, d_buffer[:, i], dA, None, None


class History:
    """X_0 .. X_i in one buffer: what the list X is in the plain loop. Made new in every forward, it never leaves `layers`."""

    def __init__(self, x, size):
        (B, T, D), self.i = x.shape, 0
        self.buffer = state_buffer(B * T, size, D, x)
        self.buffer, = WriteAndMix.apply(self.buffer, x.flatten(0, 1), x.new_zeros(1, 0, 1), 0, 1)

    def append(self, x):
        self.i, self.x = self.i + 1, x

    def mix(self, A, step):
        """The mixtures (B, T, D) by A (B or 1, T or 1, C, S) of X_i, X_{i-step}, .."""
        self.buffer, *mixed = WriteAndMix.apply(self.buffer, self.x.flatten(0, 1), A.flatten(0, 1), self.i, step)
        return [m.view_as(self.x) for m in mixed]


# A norm without gain is one number r for each token, so it may as well be taken after a product: RMSNorm(x) W = r (x W). The
# normed (N, D) is then neither written nor kept, and the backward pass needs x alone.


class NormedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W, eps):
        r = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1) + eps).rsqrt()
        z = (x @ W.T) * r
        ctx.save_for_backward(x, W, r, z)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dz):
        x, W, r, z = ctx.saved_tensors
        of_r = -(dz * z).sum(dim=-1, keepdim=True) * r.square() / x.size(-1)        # dr/dx = -r^3 x / D, and x W = z / r
        dz = dz * r
        return (dz @ W).addcmul_(of_r, x), dz.T @ x, None


def normed_product(x, W, eps):
    """RMSNorm(x) W^T for x (B, T, D), W (K, D) -> (B, T, K)"""
    return NormedProduct.apply(x.flatten(0, 1), W, eps).unflatten(0, x.shape[:2])


# ---------------------------------------------------------------------------------------------------------------------
# The mix of Depth-Attention
#
# Plain: for every candidate a product with the query, a product with its weight and a sum, each reading and writing a
# whole (B, Hkv, T, d) tensor, and twice that in the backward. Here a candidate is read once in each direction, a few
# at a time: the mixture so far and the logsumexp of its scores are all that the next few need, and from the logsumexp
# the backward has the weights again. So compiled forms for a few lengths serve every layer, whatever its sources.


AT_A_TIME = 4


def in_parts(items):
    """What is left over by AT_A_TIME, or a whole part, first; then whole parts."""
    first = (len(items) - 1) % AT_A_TIME + 1
    return [items[:first]] + [items[i:i + AT_A_TIME] for i in range(first, len(items), AT_A_TIME)]


def mean_query(q, heads):
    """q (B, T, H, d) -> qbar / sqrt(d), (B, T, heads, d)"""
    return q.unflatten(2, (heads, -1)).mean(dim=3) / q.size(-1) ** 0.5


def mix_part(mixed, lse, q, k, v, dtype):
    """More candidates for a mixture `mixed` whose scores have the logsumexp `lse` (None at first) -> the same two of all
    together, and the scores of the new ones."""
    e = [(q * k_j).sum(dim=-1) for k_j in k]
    scores = e if lse is None else [lse] + e
    top = functools.reduce(torch.maximum, scores)
    total = top + sum((e_j - top).exp() for e_j in scores).log()
    terms = [(e_j - total).exp()[..., None] * v_j for e_j, v_j in zip(e, v)]
    if lse is not None:
        terms.append((lse - total).exp()[..., None] * mixed)
    return sum(terms).to(dtype), total, e


def mix_part_gradients(dq, q, g, lse, vt, k, v):
    """-> dq (before: None, or of earlier parts) with what these candidates add to it, [dk_j], [dvt_j]."""
    g = g.to(q.dtype)
    mean = (g * vt).sum(dim=-1)                                               # of <g, vt_j> by the weights
    a = [((q * k_j).sum(dim=-1) - lse).exp() for k_j in k]
    de = [a_j * ((g * v_j).sum(dim=-1) - mean) for a_j, v_j in zip(a, v)]
    terms = [de_j[..., None] * k_j for de_j, k_j in zip(de, k)] + ([] if dq is None else [dq])
    return (sum(terms), [de_j[..., None] * q for de_j in de],
            [(a_j[..., None] * g).to(v_j.dtype) for a_j, v_j in zip(a, v)])


class DepthMix(torch.autograd.Function):
    """(qbar / sqrt(d), k_0.., vt_0..), (B, T, Hkv, d) each -> vt, a (n, B, T, Hkv)."""

    @staticmethod
    def forward(ctx, q, *candidates):
        kept, n = [q, *candidates], len(candidates) // 2
        q, *candidates = (t.detach() for t in kept)
        vt, lse, e = None, None, []
        for k, v in zip(in_parts(candidates[:n]), in_parts(candidates[n:])):
            vt, lse, more = compiled(mix_part)(vt, lse, q, k, v, q.dtype)
            e += more
        ctx.save_for_backward(vt, lse, *kept)
        a = (torch.stack(e) - lse).exp()
        ctx.mark_non_differentiable(a)
        return vt.to(candidates[-1].dtype), a

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        vt, lse, q, *candidates = (t.detach() for t in ctx.saved_tensors)
        n, dq, dk, dv = len(candidates) // 2, None, [], []
        for k, v in zip(in_parts(candidates[:n]), in_parts(candidates[n:])):
            dq, more_k, more_v = compiled(mix_part_gradients)(dq, q, g, lse, vt, k, v)
            dk += more_k
            dv += more_v
        return dq, *dk, *dv


def depth_mix(q, candidates):
    """depth_attention.depth_mix in this way. The weights that it returns carry no gradient."""
    k, v = zip(*candidates)
    if len(candidates) == 1:
        return v[0], torch.ones_like(k[0][None, ..., 0])
    q, *tensors = (t.transpose(1, 2) for t in (q, *k, *v))                    # heads next to d, as the projections lie
    vt, a = DepthMix.apply(compiled(mean_query)(q, k[0].size(1)), *tensors)
    return vt.transpose(1, 2), a.transpose(2, 3)
