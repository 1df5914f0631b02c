"""
Fused paths: the formulas of the model and mechanism files, computed with less memory traffic.

You can understand every model without this file. `train.py --compile=on` (the default on CUDA) calls
`model.compile_pieces()`. That compiles the methods that the layer loop calls, and replaces a few of them by functions
of this file. Eager mode uses the plain formulas. Each section first says what it saves and how. The tests compare each
function with the plain formula, in value and in gradient.
"""
import functools
import types

import torch
import torch.nn.functional as F

# ---------------------------------------------------------------------------------------------------------------------
# Compiling pieces


@functools.cache
def compiled(function):
    """torch.compile(function), made once per function at its first use: importing the compiler takes seconds."""
    torch._dynamo.config.recompile_limit = 64       # layers of different shapes share one function; the default is 8
    return torch.compile(function)


def compile_methods(modules, *names):
    """Give every module a compiled form of its methods `names`, for training mode.

    The class's method is compiled and takes the module as an argument. So equal modules share one graph, and 12 layers
    compile in the time of one. Eval mode runs the plain method, because lengths change with every generated token.
    """
    for module in modules:
        for name in names:
            plain = getattr(type(module), name)
            replace_method(module, name, lambda *args, plain=plain: compiled(plain)(*args))


def replace_method(module, name, function):
    """Call function(module, ...) instead of the module's method `name` in training mode."""
    plain = getattr(type(module), name)

    def method(self, *args):
        return (function if self.training else plain)(self, *args)
    setattr(module, name, types.MethodType(method, module))


def restore(model):
    """Undo model.compile_pieces(): in every module, delete the attributes that hide a method of its class."""
    for module in model.modules():
        for name in [name for name in vars(module) if callable(vars(module)[name]) and hasattr(type(module), name)]:
            delattr(module, name)


# ---------------------------------------------------------------------------------------------------------------------
# The loss
#
# The plain formula holds all logits at once, (B T, V), and the softmax and the gradient of the same size. With
# B T = 12,288 and V = 50,304 each of them is 2.5 GB in fp32. Two steps avoid this:
# 1. The forward pass takes the tokens in parts. It computes the logits of one part and their loss.
# 2. It runs the backward pass of that part at once, so that these logits are freed before the next part is computed.
# Only the gradients of h and of the head's weight are kept. The later backward pass scales them; it computes no logits.
#
# F.linear_cross_entropy (torch 2.13) works in the same way. With bf16 inputs it returns the loss in bf16, though, which
# is too coarse: near 11 nats, bf16 has steps of 0.06. In bf16 it is also slower on a CPU.


LOGITS_AT_A_TIME = 2 ** 25                              # one part of the logits: 134 MB in fp32, 67 MB in bf16


def summed_loss(h, weight, targets):
    """h (n, D), weight (V, D), targets (n,), -1 ignored -> the summed loss in nats."""
    return F.cross_entropy(F.linear(h, weight), targets, ignore_index=-1, reduction="sum")


class LossInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, targets, vocab_size, with_gradient):
        dh, dW = torch.zeros_like(h), torch.zeros_like(weight)
        W = weight[:vocab_size].detach().requires_grad_(with_gradient)
        W.grad = dW[:vocab_size]                        # every part adds to these rows; the padded rows stay zero
        # The number of parts is a power of two: it divides most batches, and equal parts share one compiled graph.
        parts = 1 << ((len(h) * vocab_size - 1) // LOGITS_AT_A_TIME).bit_length()
        total = 0
        for x, dx, y in zip(h.chunk(parts), dh.chunk(parts), targets.chunk(parts)):
            x = x.detach().requires_grad_(with_gradient)
            x.grad = dx
            with torch.set_grad_enabled(with_gradient):
                loss = compiled(summed_loss)(x, W, y)
            if with_gradient:
                loss.backward()                         # adds to dx and to dW
            total += loss.detach()
        seen = (targets >= 0).sum()
        ctx.save_for_backward(dh, dW, seen)
        return total / seen

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        # The saved gradients belong to the sum over tokens. The division by their number waits until here, in fp32:
        # fp16 would round most gradients of the mean to zero, before a gradient scaler can enlarge them.
        dh, dW, seen = ctx.saved_tensors
        return dh * (grad / seen), dW * (grad / seen), None, None, None


def cross_entropy(h, weight, targets, vocab_size):
    """GPT.loss without the full logits. h (B, T, D), weight (padded vocabulary, D), targets (B, T), -1
    ignored -> mean loss in nats."""
    return LossInParts.apply(h.flatten(0, 1), weight, targets.flatten(), vocab_size, torch.is_grad_enabled())


# ---------------------------------------------------------------------------------------------------------------------
# The depth mix: C mixtures of the S states that lie below, for every token (MUDD, DenseFormer)
#
# The plain formula needs C S products and as many sums, and each of them reads and writes a whole (B, T, D) tensor. Its
# backward pass makes a new gradient for every state in every layer, and autograd adds these up. Here,
# 1. the forward pass reads the S states once and writes the C mixtures,
# 2. the backward pass reads the S states and the C gradients once, and adds to the S state gradients in place.
#
# All states live in one buffer (N, L+1, D), N = B T, in which the states of a token are adjacent. Each layer writes its
# state into the buffer, in place. The backward pass adds into the gradient of the buffer, also in place.
#
# Why this is safe: each mix returns the buffer, and the next mix takes it as its input. So autograd runs their backward
# passes in the opposite order, and each one receives the gradient only from the mix after it. If the gradient comes
# from elsewhere (another reader of the buffer, a hook), it is copied before anything is added to it.


PADDING = 16        # unused numbers between two states: without them the compiler merges the axes, and adds to a copy


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
    """Tell the compiler that the number of states, S, changes from layer to layer, so that one graph serves all."""
    for tensor, dim in ((X, 1), *((A, 2) for A in As)):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


class WriteAndMix(torch.autograd.Function):
    """(buffer, x (N, D), A (N or 1, C, S), i, step) -> the buffer with x in slot i, and C mixtures (N, D) of its S
    slots i, i - step, i - 2 step, ... >= 0."""

    @staticmethod
    def forward(ctx, buffer, x, A, i, step):
        buffer[:, i] = x
        ctx.mark_dirty(buffer)
        ctx.set_materialize_grads(False)
        ctx.states, ctx.i, ctx.step = buffer.detach(), i, step         # later layers write to other slots only
        ctx.save_for_backward(A)
        X, A = ctx.states[:, i % step:i + 1:step], A.expand(len(x), -1, -1)
        any_length(X, A)
        return buffer, *(compiled(mixtures)(X, A) if A.size(1) else ())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_buffer, *d_mixtures):
        (A,), (N, states, D), i, step = ctx.saved_tensors, ctx.states.shape, ctx.i, ctx.step
        if not getattr(d_buffer, "ours", False):                       # not made below: copy it, or start from zero
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
    """X_0 .. X_i in one buffer, in place of the list X of the plain loop. Every forward pass makes a new one."""

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


# RMSNorm without a gain multiplies each token by one number r, so it can follow the product: RMSNorm(x) W = r (x W).
# The normed x, (N, D), is then neither written nor kept, and the backward pass needs only x.


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
        of_r = -(dz * z).sum(dim=-1, keepdim=True) * r.square() / x.size(-1)      # dr/dx = -r^3 x / D and x W = z / r
        dz = dz * r
        return (dz @ W).addcmul_(of_r, x), dz.T @ x, None


def normed_product(x, W, eps):
    """RMSNorm(x) W^T for x (B, T, D), W (K, D) -> (B, T, K)"""
    return NormedProduct.apply(x.flatten(0, 1), W, eps).unflatten(0, x.shape[:2])
