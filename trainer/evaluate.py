"""Exact evaluation: every held-out token is a target once, and the number is the same for any batch size."""
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

import data
from trainer.processes import agree


def check_held_out(tokens, tokenizer):
    """ValueError if the held-out part is nothing but end of text: before training, not after it."""
    eot = tokenizer.eot_token
    if not sum((y != eot).sum().item() for _, y in data.windows(tokens, 2 ** 20, eot, 1)):
        raise ValueError(f"{tokens.shards[0][0]} holds nothing but end of text: prepare it from more text")


@torch.no_grad()
def evaluate(model, tokens, tokenizer, batch_size, windows=None, stop=lambda: False):
    """(nats per token, bits per byte) over every held-out token, or over the first so many `windows`.

    Float32 throughout, so that the number does not depend on the batch size. End of text is predicted like any token,
    but has no bytes, so its nats are left out of the bits per byte. Processes share the batches.

    `stop()` is asked between batches; if it says yes, the result is None. All processes must get the same answer.
    """
    device, was_training = next(model.parameters()).device, model.training
    lengths = torch.as_tensor(data.token_bytes(tokenizer), device=device)
    sums = torch.zeros(4, dtype=torch.float64)                               # nats, tokens, nats of text, bytes
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model.eval()
    try:
        for n, (x, y) in enumerate(data.windows(tokens, model.config.block_size, tokenizer.eot_token, batch_size)):
            if windows and n * batch_size >= windows:
                break
            if n % world == rank:
                h, y = model.hidden(x.to(device)), y.to(device)
                for row, targets in zip(h, y):                               # one row of logits at a time
                    nats, size = F.cross_entropy(model.head(row).float(), targets, reduction="none"), lengths[targets]
                    count = nats.new_tensor(len(nats))
                    sums += torch.stack((nats.sum(), count, nats[size > 0].sum(), size.sum())).cpu()
            if n % world == world - 1 and stop():
                return None
    finally:
        model.train(was_training)
    if world > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
    nats, count, text_nats, size = sums.tolist()
    return nats / count, text_nats / size / math.log(2)


def measure(run, batch_size, windows=None):
    """What `evaluate` gives on the held-out text; None if any process was asked to stop."""
    return evaluate(run.model, run.val_tokens, run.tokenizer, batch_size, windows,
                   lambda: agree(run, torch.zeros((), device=run.device))[1])


def perplexity(nats):
    """e to the nats per token; infinite where that is beyond the largest float."""
    return math.exp(nats) if nats < 709 else math.inf
