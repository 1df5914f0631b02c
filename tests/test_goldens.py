"""Our models give the numbers of the papers' released codes, on the same weights, to 1e-9 in double precision.

Each file of tests/goldens names its source: repository, commit and file, what was patched there, and the formula that
fills the weights. The files hold numbers only. A parameter is filled by its name, so names of parameters and settings
are a contract: after a rename, add a line to RENAMED.
"""
import json
import math
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from model import RMSNorm

GOLDENS = sorted((Path(__file__).parent / "goldens").glob("*.json"))

RENAMED = {}    # name in the goldens, of a setting, parameter or parameter's part -> name here, as in {"groups": "g"}


def repeat_half(model):
    """Key-norm gains whose halves are equal: then a norm after RoPE, as in the release, is the norm before it."""
    for name, gain in model.named_parameters():
        if name.endswith("k_norm.weight"):
            half = len(gain) // 2
            gain[half:] = gain[:half]


def one_norm(model):
    """The release has one norm in block 0 where we have three."""
    first = model.blocks[0]
    for norm in (first.norm1_k, first.norm1_v):
        norm.weight.copy_(first.norm1.weight)


def no_rotation(model):
    head_dim = model.config.head_dim
    model.rope = lambda positions: (torch.ones(len(positions), head_dim).double(),
                                    torch.zeros(len(positions), head_dim).double())


AFTER_FILL = {   # what the files say under "after_fill" and "note"
    "depth_attention_stride1_mha": repeat_half,
    "mudd_multiway_dynamic": one_norm,
    "mudd_multiway_dynamic_released_widths": one_norm,
    "mudd_static_multiway": one_norm,
    "neutreno": lambda model: model.lam1.fill_(0.4),      # a constant that fp32 rounds
    "recurrent_tiled": no_rotation,
}


def renamed(name):
    return ".".join(RENAMED.get(part, part) for part in RENAMED.get(name, name).split("."))


def fill(model):
    """Weights from the files' formula, by the names that the goldens use."""
    theirs = {ours: name for name, ours in RENAMED.items()}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            old = ".".join(theirs.get(part, part) for part in theirs.get(name, name).split("."))
            h = (np.arange(parameter.numel(), dtype=np.uint64) * 2654435761 + zlib.crc32(old.encode())) % 2 ** 32
            h ^= h >> np.uint64(16)
            h = h * 73244475 % 2 ** 32
            h ^= h >> np.uint64(16)
            u = h.astype(np.float64) / 2 ** 31 - 1
            gain = isinstance(module, RMSNorm)
            scale = 0.25 if parameter.dim() == 1 or gain else (3 / parameter.shape[-1]) ** 0.5
            parameter.copy_(torch.from_numpy(gain + scale * u).view_as(parameter))


def check(tensor, golden):
    assert tensor.numel() == math.prod(golden["shape"])    # the release flattens WhiteMatter's biases
    expected = torch.tensor([float(value) for value in golden["values"]], dtype=torch.float64)
    torch.testing.assert_close(tensor.detach().flatten()[golden["at"]], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("path", GOLDENS, ids=[path.stem for path in GOLDENS])
def test_a_model_gives_the_numbers_of_the_released_code(path, one_thread):
    golden = json.loads(path.read_text(encoding="utf-8"))
    model = train.build(golden["model"], **{renamed(name): value for name, value in golden["config"].items()}).double()
    with torch.no_grad():
        fill(model)
        if after := AFTER_FILL.get(path.stem):
            after(model)
    assert bool(after) == bool(golden.get("after_fill") or golden.get("note"))
    tokens, targets = torch.tensor(golden["tokens"]), torch.tensor(golden["targets"])
    check(model(tokens), golden["logits"])
    loss = model(tokens, targets)
    check(loss, dict(shape=[], at=[0], values=[golden["loss"]]))
    loss.backward()
    parameters = dict(model.named_parameters())
    for name, values in golden["grads"].items():
        check(parameters[renamed(name)].grad, values)


def test_all_released_codes_are_there():
    assert len(GOLDENS) == 23
