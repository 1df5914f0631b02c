"""Checkpoints: the state of a run to a file, and a file to a state that was checked once, here."""
import contextlib
import math
import os
import time
from pathlib import Path

import torch

from configs import SettingError
from trainer.console import writing
from trainer.device import out_of_memory

FORMAT = "crosslayer 1"
COUNTERS = {"step": 0, "best": math.inf, "val_loss": None, "skipped": 0}
MOMENTS = ("exp_avg", "exp_avg_sq")


class NotFinite(Exception):
    """A weight that a checkpoint must not keep."""


def save(path, state):
    """Write under another name first, then rename: whenever the process dies, a whole checkpoint is at `path`.

    OSError, with the file's name, if the disk refuses. NotFinite if a weight is: a checkpoint is a good state.
    """
    bad = first_bad(state["model"])
    if bad:
        raise NotFinite(f"the weight {bad} is not finite")
    path, partial = Path(path), Path(f"{path}.tmp")
    try:
        with writing(path):
            with open(partial, "wb") as file:
                torch.save(dict(state, format=FORMAT, time=time.time()), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def load(path):
    """The dict of a checkpoint, its tensors on the CPU, with every counter of COUNTERS. SettingError for anything else.

    Types and finiteness are checked here; shapes when the model and the optimizer take their parts.
    """
    path = Path(path)
    if not path.is_file():
        raise SettingError(f"there is no checkpoint {path}: train a model first, or name another file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                       # torch.load raises whatever the first odd byte leads it to
        if out_of_memory(error):
            raise
        raise SettingError(f"{path} is no checkpoint of this project, or was cut off "
                           f"({type(error).__name__}): take best.pt or last.pt of a run") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise SettingError(f"{path} is no checkpoint of this project: take best.pt or last.pt of a run")
    state = COUNTERS | state
    state.setdefault("validated", state["step"])     # older files were saved after their validation
    for name, good in (("settings", settings), ("model_config", named), ("model", tensors), ("step", count),
                       ("skipped", count), ("best", number), ("val_loss", lambda v: v is None or number(v)),
                       ("validated", count), ("precision", precision),
                       ("tokenizer", lambda v: v is None or isinstance(v, str))):
        if not good(state.get(name)):
            raise damaged(path, f"its {name} cannot be used")
    bad = first_bad(state["model"])
    if bad:
        raise damaged(path, f"the weight {bad} is not finite")
    return state


def load_model(state, path, models):
    """The model of a loaded state, on the CPU; `models` is {name: (config class, model class)}."""
    try:
        config_class, model_class = models[state["settings"].get("model", "gpt")]
        model = model_class(config_class(**state["model_config"]))
    except (KeyError, TypeError, ValueError) as error:
        raise misfit(path, error) from None
    load_weights(model, state, path)
    return model


def load_weights(model, state, path):
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise misfit(path, error) from None


def load_optimizer(optimizer, scaler, state, path):
    """The moments and the loss scale of a checkpoint. Rates, decay and betas stay as they are asked for now."""
    if not isinstance(state.get("optimizer"), dict):
        raise SettingError(f"{path} holds no optimizer state: it can be sampled and probed, but not resumed. "
                           f"Take the last.pt of a run")
    mine, saved = optimizer.state_dict(), state["optimizer"]
    groups, moments = saved.get("param_groups"), saved.get("state")
    try:
        alike = [group["params"] for group in groups] == [group["params"] for group in mine["param_groups"]]
    except (KeyError, TypeError):
        alike = False
    if not alike or not isinstance(moments, dict):
        raise damaged(path, "its optimizer state has other groups than the model")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for n, p in enumerate(parameters):
        entry = moments.get(n)
        if entry is None and not p.requires_grad:                  # a frozen parameter has no moments
            continue
        if entry is None and not moments and state["skipped"] == state["step"]:      # fp16: no step was ever taken
            continue
        if not tensors(entry) or not {"step", *MOMENTS} <= entry.keys() or first_bad(entry) or \
                entry["step"].numel() != 1 or not 0 <= entry["step"].item() <= state["step"] or \
                any(entry[name].shape != p.shape or entry[name].dtype != p.dtype for name in MOMENTS) or \
                entry["exp_avg_sq"].min() < 0:
            raise damaged(path, f"the optimizer state of parameter {n} is missing, of another shape, or not finite")
    optimizer.load_state_dict(dict(state=moments, param_groups=mine["param_groups"]))

    scale = state.get("scaler")
    if not isinstance(scale, dict) or not all(number(value) and 0 <= value < math.inf for value in scale.values()):
        raise damaged(path, "its scaler cannot be used")
    if scaler.is_enabled() and scale:                # empty where the run had no scaler until now: not float16
        if scale.keys() != scaler.state_dict().keys() or not scale["scale"] > 0:
            raise damaged(path, "its scaler cannot be used")
        scaler.load_state_dict(scale)


def saved_at(path):
    """The time at which a checkpoint was saved: its own, not the file's, which a copy changes. Reads no tensor."""
    try:
        return float(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["time"])
    except Exception:                                # an older or damaged file: whoever opens it says what is wrong
        return os.path.getmtime(path)


# ---- what a part must be -------------------------------------------------------------------------------------------


def named(value):
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def settings(value):
    return named(value) and all(isinstance(value.get(name, ""), str) for name in ("model", "data"))


def tensors(value):
    """Plain ones alone: whole in memory, so that no kernel goes beyond them, and of floating-point numbers."""
    return named(value) and all(
        isinstance(t, torch.Tensor) and t.layout == torch.strided and t.device.type == "cpu" and t.is_floating_point()
        and t.is_contiguous() for t in value.values())


def number(value):
    """A number above -1e300, or positive infinity: what a loss or a scale may be."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and (-1e300 < value < 1e300 or value == math.inf)


def count(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2 ** 63


def precision(value):
    dtypes = ("float32", "bfloat16", "float16")
    return value is None or isinstance(value, tuple) and len(value) == 2 and value[1] in dtypes


def first_bad(values):
    """The name of the first tensor with a value that is not finite, or None."""
    return next((name for name, tensor in values.items() if not tensor.isfinite().all()), None)


def damaged(path, what):
    return SettingError(f"{path} is damaged: {what}. Take another checkpoint of the run, or train anew")


def misfit(path, error):
    cause = " ".join(str(error).split())[:160]       # load_state_dict lists every name, a line each
    return SettingError(f"{path} does not fit the code of its model as it is now ({type(error).__name__}: {cause}): "
                        f"check out the code it was trained with, or train anew")
