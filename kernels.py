"""
Fused paths: the same formulas as in the model and mechanism files, with less memory traffic.

Nothing here is needed to understand or to run a model. `train.py --compile=on` calls `model.compile_pieces()`, which
compiles the pieces between the lines of the layer loop and swaps in the functions of this file; eager mode uses the
plain formulas. Each path stands here with what it saves; the tests hold it against the plain formula, value and gradient.
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

            def method(self, *args, plain=plain):
                return (compiled(plain) if self.training else plain)(self, *args)
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
# Plain: C S products and as many sums, each reading and writing a whole (B, T, D) tensor, and again in the backward pass,
# where every layer makes a new gradient for each of the states below it. All that is needed: read the S states once, write
# C mixtures; backward, read the states and the C gradients once and add to the S gradients where they lie.
#
# So the states of one token lie together, in one buffer (N, L+1, D), N = B T: a mix is then one batched matrix product
# (C x S) (S x D), and so is each of its two gradients. Each layer writes its state into the buffer in place, and the
# backward pass adds into the buffer's gradient in place as it comes down. That is safe because the buffer has one
# consumer at a time: it is a value that mix n hands on to mix n+1, made new in every forward, and never leaves History.


class WriteAndMix(torch.autograd.Function):
    """(buffer, x, A, i, step) -> the buffer with x in slot i, and the mixtures A (N or 1, C, S) of its slots .., i-step, i."""

    @staticmethod
    def forward(ctx, buffer, x, A, i, step):
        buffer[:, i] = x
        ctx.mark_dirty(buffer)
        ctx.set_materialize_grads(False)
        ctx.states, ctx.i, ctx.step = buffer.detach(), i, step        # later layers write other slots: these stay as read
        ctx.save_for_backward(A)
        return buffer, A.expand(len(x), -1, -1) @ buffer[:, i % step:i + 1:step]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_buffer, d_mixtures):
        (A,), i, step = ctx.saved_tensors, ctx.i, ctx.step
        if d_buffer is None:                                             # the topmost mix
            d_buffer = torch.zeros_like(ctx.states)
        d_A = None
        if d_mixtures is not None and A.size(1):
            states, d_states = ctx.states[:, i % step:i + 1:step], d_buffer[:, i % step:i + 1:step]
            d_A = d_mixtures @ states.transpose(1, 2)
            d_A = d_A.sum(0, keepdim=True) if len(A) == 1 else d_A
            d_states.baddbmm_(A.expand(len(states), -1, -1).transpose(1, 2), d_mixtures)
        return d_buffer, d_buffer[:, i].clone(), d_A, None, None


class History:
    """The states X_0 .. X_i of a forward pass, as the list `[x]` of the plain path: append(x), then mix."""

    def __init__(self, x, size):
        self.shape, self.i = x.shape, 0
        self.buffer = x.new_empty(x.size(0) * x.size(1), size, x.size(2))
        self.buffer, _ = WriteAndMix.apply(self.buffer, x.flatten(0, 1), x.new_zeros(1, 0, 1), 0, 1)

    def append(self, x):
        self.i, self.newest = self.i + 1, x.flatten(0, 1)

    def mix(self, A, sources):
        """The mixtures A (B or 1, T or 1, C, S) over the states `sources`, the last of which is the newest."""
        step = sources[-1] - sources[-2] if len(sources) > 1 else self.i + 1
        self.buffer, mixtures = WriteAndMix.apply(self.buffer, self.newest, A.flatten(0, 1), self.i, step)
        return [mixture.view(self.shape) for mixture in mixtures.unbind(1)]
