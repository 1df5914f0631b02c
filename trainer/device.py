"""Which device a model runs on, in which precision, and what that device can do."""
import functools
import os
import sys
import time

import torch

from configs import SettingError

BF16_PAYS_FROM = 256            # width; a narrower model loses more to casts than its products gain
BF16_WINS_BY = 1.2              # smaller differences are noise, and casts would use them up
PEAK_FLOPS = {                  # full name of the card: dense peak in FLOP/s in (bfloat16, float16), makers' figures
    "NVIDIA H200": (989e12, 989e12),
    "NVIDIA H200 NVL": (835e12, 835e12),
    "NVIDIA H100 80GB HBM3": (989e12, 989e12),
    "NVIDIA H100 NVL": (835e12, 835e12),
    "NVIDIA H100 PCIe": (756e12, 756e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 312e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 312e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 312e12),
    "NVIDIA A100 80GB PCIe": (312e12, 312e12),
    "NVIDIA L40S": (362e12, 362e12),
    "NVIDIA L4": (121e12, 121e12),
    "NVIDIA A10G": (70e12, 70e12),
    "NVIDIA GeForce RTX 4090": (165e12, 165e12),
    "NVIDIA GeForce RTX 3090": (71e12, 71e12),
    "Tesla V100-SXM2-16GB": (None, 125e12),         # no bfloat16 in its tensor cores
    "Tesla V100-SXM2-32GB": (None, 125e12),
    "Tesla T4": (None, 65e12),
}


def usable_device(name):
    """The torch.device of a --device setting, tried out; SettingError if it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda", "mps"):
        raise SettingError(f"--device={name} cannot be used here: choose cpu, cuda, cuda:1 and so on, or mps")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).splitlines()[0].split(". ")[0]
        raise SettingError(f"--device={name} cannot be used here ({cause}): try --device=cpu") from None
    return device


def device_and_dtype(config, model_config, before=None):
    """(torch.device, torch.dtype of the matrix products, the reason in words).

    `before` is (type of the device, name of the dtype) of the run that is resumed: a new timing must not change it.

    `config` has `device` and `dtype`, `model_config` has `n_embd` and `d_ff`. Errors are those of usable_device.
    With dtype=auto on a CPU the two precisions are timed, once for each shape in a process.
    """
    device = usable_device(config.device)
    if config.dtype != "auto":
        return device, getattr(torch, config.dtype), f"{config.dtype} as requested"
    if before and before[0] == device.type:
        return device, getattr(torch, before[1]), f"{before[1]} as before"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return device, torch.bfloat16, "bfloat16 autocast"
        return device, torch.float16, "float16 autocast with a gradient scaler (no native bfloat16)"
    if device.type != "cpu" or model_config.n_embd < BF16_PAYS_FROM:
        return device, torch.float32, "float32"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:     # timings differ between processes, and all need the same answer
        return device, torch.float32, "float32 (not timed with several processes)"
    full, half = cpu_speeds(model_config.n_embd, model_config.d_ff)
    figures = f"matrix products: float32 {full / 1e9:,.0f} GFLOP/s, bfloat16 {half / 1e9:,.0f}"
    if half >= BF16_WINS_BY * full:
        return device, torch.bfloat16, f"bfloat16 autocast ({figures})"
    return device, torch.float32, f"float32 ({figures})"


@functools.cache
def cpu_speeds(width, d_ff):
    """FLOP/s of the product (256, width) x (width, d_ff) on the CPU in (float32, bfloat16), each the best of twenty.

    A processor's flags do not tell: some multiply bfloat16 natively, but more slowly than float32. Sides are cut at
    1024, so that this takes milliseconds.
    """
    rows, width, d_ff = 256, min(width, 1024), min(d_ff, 1024)
    seconds = {torch.float32: [], torch.bfloat16: []}
    x, w = torch.ones(rows, width), torch.ones(width, d_ff)
    for _ in range(20):                              # in turns, so that other work on the machine slows both
        for dtype, times in seconds.items():
            a, b = x.to(dtype), w.to(dtype)
            start = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - start)
    return tuple(2 * rows * width * d_ff / min(times) for times in seconds.values())


def mfu(flops_per_second, device, dtype, devices=1):
    """Model FLOPs utilisation of `devices` equal devices, from 0 to 1; "n/a" where the peak in `dtype` is not known."""
    column = {torch.bfloat16: 0, torch.float16: 1}.get(dtype)
    peak = PEAK_FLOPS.get(device_name(device), (None, None))[column] if column is not None else None
    return "n/a" if peak is None else flops_per_second / (peak * devices)


def device_name(device):
    """The maker's whole name of a CUDA card, such as "Tesla T4"; "cpu" or "mps" for the others."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory(device):
    """Bytes at the peak: tensors of a CUDA device, else the whole process; None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def out_of_memory(error):
    """Whether an exception says that memory was missing: torch has several ways to say it."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("out of memory", "DefaultCPUAllocator", "STATUS_ALLOC_FAILED"))
