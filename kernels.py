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
