"""One run in several processes, started by torchrun: they meet, exchange gradients, agree, and leave together."""
import contextlib
import os
import sys

import torch
import torch.distributed as dist


def join(device):
    """Meet the other processes that torchrun has started, each with a device of its own."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def gradient_sync(run, last):
    """Processes exchange gradients in the last micro-step only."""
    return run.parallel.no_sync() if run.world > 1 and not last else contextlib.nullcontext()


def agree(run, loss):
    """(mean loss over processes, whether any of them was asked to stop)."""
    both = torch.stack((loss.float(), torch.tensor(float(run.stop), device=run.device)))
    if run.world > 1:
        dist.all_reduce(both)
        both /= run.world
    loss, stop = both.tolist()
    return loss, stop > 0


def leave(run, status):
    """Processes leave together, and at once: gloo may abort one that takes itself apart while another still runs."""
    if run.world > 1:
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        sys.stdout.flush()
        os._exit(status)
    if status:
        raise SystemExit(status)
