"""
Train any model of this project, on one device or several.

    python train.py                                       configs/laptop.toml: three minutes on two CPU cores, offline
    python train.py --model=value_residual                the same, with another model; --help lists every setting
    python train.py configs/owt_124m.toml --seed=2        a preset, and flags over it
    python train.py --resume --out_dir=runs/gpt-1         go on from the last checkpoint, bit for bit on a CPU
    torchrun --nproc_per_node=2 train.py ...              data-parallel: the same batches, shared out

A run writes to runs/<model>-<n>: log.jsonl, last.pt (to resume from) and best.pt (lowest validation loss).
"""
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainer.console import program, starting

starting(__name__)                       # until main runs, Ctrl-C ends the imports below without a traceback

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import configs
import data
from baselines.feedback import Feedback, FeedbackConfig
from baselines.fusedkv import FusedKV, FusedKVConfig
from baselines.lckv import LCKV, LCKVConfig
from baselines.lime import LIMe, LIMeConfig
from baselines.recurrent import Recurrent, RecurrentConfig
from baselines.shortcuts import Shortcut, ShortcutConfig
from configs import SettingError
from depth_attention import DepthAttention, DepthAttentionConfig, LoopedConfig, LoopedDepthAttention
from model import GPT, GPTConfig
from mudd import MUDD, MUDDConfig
from trainer import checkpoint, run_folder
from trainer.device import device_and_dtype, mfu, peak_memory
from trainer.evaluate import check_held_out, measure
from trainer.finish import finish
from trainer.flops import flops_of, training_flops
from trainer.processes import agree, gradient_sync, join
from trainer.start import compile_pieces, report, restore
from trainer.stopping import Diverged, running, stopped
from value_residual import ValueResidual, ValueResidualConfig
from whitematter import WhiteMatter, WhiteMatterConfig

MODELS = {
    "gpt": (GPTConfig, GPT),
    "value_residual": (ValueResidualConfig, ValueResidual),
    "mudd": (MUDDConfig, MUDD),
    "whitematter": (WhiteMatterConfig, WhiteMatter),
    "depth_attention": (DepthAttentionConfig, DepthAttention),
    "looped": (LoopedConfig, LoopedDepthAttention),
    "lime": (LIMeConfig, LIMe),
    "shortcut": (ShortcutConfig, Shortcut),
    "feedback": (FeedbackConfig, Feedback),
    "lckv": (LCKVConfig, LCKV),
    "fusedkv": (FusedKVConfig, FusedKV),
    "recurrent": (RecurrentConfig, Recurrent),
}


def build(name, **overrides):
    """A new model: build("mudd", n_layer=4). KeyError for an unknown name, ValueError for a bad value."""
    config_class, model_class = MODELS[name]
    return model_class(config_class(**overrides))


@dataclass
class TrainConfig:
    model: str = "gpt"                   # which one of train.MODELS
    data: str = "plays"                  # plays (bytes), plays_gpt2, or a folder of token files
    out_dir: str | None = None           # folder of the run (default: the next free runs/<model>-<n>)
    resume: bool = False                 # go on from last.pt in out_dir (default: of the newest run, or of --model's)
    overwrite: bool = False              # begin again in an out_dir that exists
    max_iters: int = 1000                # optimizer steps, exactly
    batch_size: int = 16                 # sequences in one micro-step of one process
    gradient_accumulation_steps: int = 1 # micro-steps in one optimizer step, over all processes together
    learning_rate: float = 1e-3          # its peak
    min_lr: float | None = None          # where the cosine ends (default: a tenth of the peak)
    warmup_iters: int = 100              # steps of linear warm-up
    lr_decay_iters: int | None = None    # step at which the cosine ends (default: max_iters)
    weight_decay: float = 0.1            # of the groups that decay, see GPT.param_groups
    beta1: float = 0.9                   # AdamW: decay of the mean gradient
    beta2: float = 0.95                  # AdamW: decay of its mean square
    grad_clip: float = 1.0               # largest norm of the whole gradient (0: no clipping)
    eval_interval: int = 250             # steps between validations on every held-out token; one is made at the end
    log_interval: int = 10               # steps between records of log.jsonl
    device: str = "auto"                 # auto, cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"    # of matrix products; weights stay float32
    compile: Literal["auto", "on", "off"] = "auto"       # compile the pieces of the layer loop (auto: on CUDA)
    prompt: str = ""                     # what the sample at the end goes on from (default: end of text)
    sample_tokens: int = 256             # length of that sample

    def __post_init__(self):
        for name in ("max_iters", "batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)}: give a whole number of at least 1")
        if self.lr_decay_iters is not None and self.lr_decay_iters < 0:
            raise ValueError(f"--lr_decay_iters={self.lr_decay_iters}: give 0 or a positive number, or leave it out")
        self.min_lr = self.learning_rate / 10 if self.min_lr is None else self.min_lr
        for name in ("learning_rate", "min_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)}: give a positive number")
        if self.min_lr > self.learning_rate:
            raise ValueError(f"--min_lr={self.min_lr} is above the peak, --learning_rate={self.learning_rate}: "
                             f"lower it, or leave it out")
        for name in ("warmup_iters", "weight_decay", "grad_clip", "sample_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)}: give 0 or a positive number")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)}: give a number from 0 up to, but not including, 1")


def learning_rate(config, step):
    """Linear warm-up, then a half cosine from the peak to min_lr, then flat; positive at every step >= 0."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    end = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    progress = min(1.0, (step - config.warmup_iters) / max(1, end - config.warmup_iters))
    return config.min_lr + (config.learning_rate - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


SMALLEST_SCALE = 2.0 ** -20              # of fp16 losses; where gradients still overflow, they always will


@dataclass
class Run:
    """The state of a training run, made by `prepare`."""
    settings: dict                       # as given, {name: value}
    config: TrainConfig
    model: GPT
    parallel: Any                        # the model, or its DistributedDataParallel
    optimizer: Any
    scaler: Any                          # of fp16 losses; does nothing in another precision
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    train_tokens: data.Tokens
    val_tokens: data.Tokens
    rank: int                            # of this process, 0 alone writes
    world: int                           # processes
    folder: Path | None = None
    lock: Any = None                     # of the folder
    progress: Any = None                 # on the screen
    step: int = 0                        # optimizer steps made
    validated: int = 0                   # step of the last validation
    saved: int = 0                       # step of last.pt
    best: float = math.inf               # lowest validation loss, nats per token
    val_loss: float | None = None
    bits: float | None = None            # bits per byte
    skipped: int = 0                     # steps that fp16 overflows cost
    stop: bool = False                   # a signal asked to stop
    clock: float = 0.0                   # when the last step ended

    @property
    def validation_due(self):
        at_end = self.step == self.config.max_iters
        return self.step > self.validated and (at_end or self.step % self.config.eval_interval == 0)

    @property
    def tokens_per_step(self):
        return self.config.batch_size * self.config.gradient_accumulation_steps * self.model.config.block_size


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(run):
    """Optimizer steps run.step .. max_iters - 1. What the loop calls stands below it."""
    config, model, optimizer, scaler = run.config, run.model, run.optimizer, run.scaler
    with running(run, save):
        if run.validation_due:                                               # the run was stopped before it was made
            validate(run)
        for step in range(run.step, config.max_iters):
            seed_dropout(run, step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step) * group["lr_scale"]

            loss = 0.0                                                       # the mean over micro-steps
            batches = micro_batches(run, step)
            for i, (x, y) in enumerate(batches):
                with gradient_sync(run, last=i == len(batches) - 1):
                    part = forward(run, x, y) / len(batches)                 # forward
                    scaler.scale(part).backward()                            # backward
                loss += part.detach()

            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            loss, stop = agree(run, loss)
            refuse_non_finite(run, loss, norm.item())
            scaler.step(optimizer)                                           # step
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

            run.step = step + 1
            log_step(run, loss, norm.item())
            if stop or run.validation_due:
                save(run, "last.pt")
            if stop:
                stopped(run)
            if run.validation_due:
                validate(run)


# ---------------------------------------------------------------------------------------------------------------------
# What the loop calls


def seed_dropout(run, step):
    """Dropout's draws, like the batch, depend on (seed, step) alone, and on the process."""
    torch.manual_seed(1_000_003 * run.model.config.seed + 1_009 * step + run.rank)


def micro_batches(run, step):
    """This process's share of the batch of `step`, as [(x, y)] on the device. The batch depends on (seed, step)."""
    config, T = run.config, run.model.config.block_size
    rows = config.batch_size * config.gradient_accumulation_steps
    x, y = data.batch(run.train_tokens, step, run.model.config.seed, rows, T)
    x, y = (t.view(config.gradient_accumulation_steps, config.batch_size, T)[run.rank::run.world] for t in (x, y))
    return list(zip(to_device(run, x), to_device(run, y)))


def to_device(run, t):
    return t.pin_memory().to(run.device, non_blocking=True) if run.device.type == "cuda" else t.to(run.device)


def forward(run, x, y):
    """The mean loss, its matrix products in the run's precision."""
    with torch.autocast(run.device.type, run.dtype, enabled=run.dtype != torch.float32):
        return run.parallel(x, y)


def refuse_non_finite(run, loss, norm):
    """Stop before a step that would spoil the weights. Under fp16 an overflowing gradient is the scaler's business, who
    skips the step and halves the scale, as long as there is a scale to halve."""
    if run.scaler.is_enabled() and math.isfinite(loss) and run.scaler.get_scale() > SMALLEST_SCALE:
        run.skipped += not math.isfinite(norm)
    elif not math.isfinite(loss) or not math.isfinite(norm):
        raise diverged(run, f"loss {loss}, gradient norm {norm}")


def diverged(run, what):
    last = run.folder / "last.pt"
    good = f"the last good checkpoint is {last}" if last.exists() else "no checkpoint was saved yet"
    return Diverged(f"step {run.step}: {what}, learning rate {learning_rate(run.config, run.step):.3g}; {good}. "
                    f"Lower --learning_rate or raise --warmup_iters")


def log_step(run, loss, norm):
    """The progress after every step, a record of log.jsonl after every log_interval of them."""
    now = time.perf_counter()
    seconds, run.clock = now - run.clock, now
    rate = run.tokens_per_step / seconds
    run.progress.update(run.step, loss, rate)
    if run.step % run.config.log_interval == 0 or run.step == run.config.max_iters:
        flops = training_flops(flops_of(type(run.model), run.model.config))
        write_log(run, loss=loss, learning_rate=learning_rate(run.config, run.step - 1), gradient_norm=norm,
                  tokens_per_second=rate, seconds=seconds, mfu=mfu(flops * rate, run.device, run.dtype, run.world),
                  peak_memory=peak_memory(run.device), skipped_steps=run.skipped)


def write_log(run, **record):
    if run.rank == 0:
        run_folder.write_log(run.folder, step=run.step, **record)


def validate(run):
    """The exact validation loss. last.pt was saved before it, so a stop inside loses no step; --resume makes it up."""
    result = measure(run, run.config.batch_size)
    if result is None:
        stopped(run)
    if not all(map(math.isfinite, result)):
        raise diverged(run, f"validation loss {result[0]}")
    run.val_loss, run.bits = result
    better, run.best, run.validated = run.val_loss < run.best, min(run.best, run.val_loss), run.step
    write_log(run, val_loss=run.val_loss, bits_per_byte=run.bits)
    run.progress.say(f"step {run.step}: validation loss {run.val_loss:.4f} nats per token, "
                     f"{run.bits:.4f} bits per byte")
    for name in ("best.pt", "last.pt") if better else ("last.pt",):
        save(run, name)
    run.clock = time.perf_counter()                  # validation is no part of the next step's seconds


def save(run, name):
    if run.rank:
        return
    state = dict(settings=run.settings, model_config=asdict(run.model.config), model=run.model.state_dict(),
                 optimizer=run.optimizer.state_dict(), scaler=run.scaler.state_dict(), tokenizer=run.tokenizer.name,
                 precision=(run.device.type, str(run.dtype).removeprefix("torch.")),
                 **{key: getattr(run, key) for key in ("step", "best", "val_loss", "skipped", "validated")})
    try:
        checkpoint.save(run.folder / name, state)
    except checkpoint.NotFinite as error:
        raise diverged(run, str(error)) from None
    if name == "last.pt":
        run.saved = run.step


# ---------------------------------------------------------------------------------------------------------------------
# Before the loop


def prepare(settings, resumed=None):
    """A Run from `settings` {name: value}, as configs.read gives them, and the state of a checkpoint or None.

    Nothing is written before all settings are found good.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    config, model_config, model_class = read_settings(settings)
    folder = data.dataset(config.data)
    meta = data.read_meta(folder)
    tokenizer = data.tokenizer(meta["tokenizer"])
    if "vocab_size" not in settings:
        model_config.vocab_size = meta["vocab_size"]
    if model_config.vocab_size < meta["vocab_size"]:
        raise SettingError(f"--vocab_size={model_config.vocab_size} is smaller than the {meta['vocab_size']} ids of "
                           f"{folder}: leave it out")
    train_tokens, val_tokens = (data.open_tokens(folder, part, meta["vocab_size"]) for part in ("train", "val"))
    data.batch(train_tokens, 0, 0, 1, model_config.block_size)           # refuses a text shorter than a block
    check_held_out(val_tokens, tokenizer)
    steps = config.gradient_accumulation_steps
    if steps % world:
        near = " or ".join(str(n) for n in (steps // world * world, -(-steps // world) * world) if n)
        raise SettingError(f"--gradient_accumulation_steps={steps} cannot be shared out among {world} processes: "
                           f"give {near}")
    device, dtype, why = device_and_dtype(config, model_config, resumed and resumed.get("precision"))
    if world > 1:
        device = join(device)

    model = model_class(model_config).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = Run(settings, config, model, model, make_optimizer(model, config, device), scaler, device, dtype, tokenizer,
              train_tokens, val_tokens, rank, world)
    if resumed:
        names = {name: value for name, value in resumed["settings"].items() if name in vars(config)}
        restore(run, resumed, *configs.build(names, TrainConfig), learning_rate)
    if rank:
        run.folder = Path(config.out_dir or ".")
    elif resumed:
        run.folder, run.lock = run_folder.resumed_folder(config.out_dir, config.model, run.step, run.validated)
    else:
        run.folder, run.lock = run_folder.new_folder(config.model, config.out_dir, config.overwrite)
    wanted = config.compile == "on" or config.compile == "auto" and device.type == "cuda"
    compiled = wanted and compile_pieces(run, forward, micro_batches)
    if world > 1:
        run.parallel = DistributedDataParallel(model)
    report(run, f"{config.model}, {folder.name}", why, compiled)
    return run


def make_optimizer(model, config, device):
    """AdamW over model.param_groups(), which must hold every parameter once."""
    groups = model.param_groups()
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters())), "param_groups() must hold every parameter exactly once"
    groups = [dict(params=g["params"], lr_scale=g["lr_scale"], weight_decay=config.weight_decay if g["decay"] else 0.0)
              for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2),
                             fused=device.type in ("cpu", "cuda"))


# ---------------------------------------------------------------------------------------------------------------------
# After the loop, and for the tools


class Checkpoint(NamedTuple):
    model: GPT             # in eval mode, on the CPU
    config: GPTConfig
    facts: dict            # settings, step, val_loss, best, tokenizer (its name, or None in old files), path


def load_checkpoint(path):
    """A Checkpoint from a file, or from the best.pt of a run folder. SettingError, one line, if it cannot be used."""
    path = Path(path)
    if path.is_dir():
        path = path / ("best.pt" if (path / "best.pt").exists() else "last.pt")
    state = checkpoint.load(path)
    model = checkpoint.load_model(state, path, MODELS)
    facts = {name: state.get(name) for name in ("settings", "step", "val_loss", "best", "tokenizer")}
    facts["path"] = str(path)
    return Checkpoint(model.eval(), model.config, facts)


def open_run(path=None):
    """(Checkpoint, tokenizer) of a checkpoint, of a run folder, or of the newest run. Needs no data folder."""
    opened = load_checkpoint(path or run_folder.newest_run())
    name = opened.facts["tokenizer"] or data.read_meta(run_data(opened))["tokenizer"]
    tokenizer = data.tokenizer(name)
    if tokenizer.n_vocab > opened.config.vocab_size:
        raise SettingError(f"{opened.facts['path']} knows {opened.config.vocab_size} token ids, but its data names the "
                           f"tokenizer {name} with {tokenizer.n_vocab}: mend its meta.json")
    return opened, tokenizer


def run_data(opened, name=None):
    """The data folder called `name`, or the one that the run was trained on; its tokens must be the run's."""
    folder = data.dataset(name or opened.facts["settings"].get("data", "plays"))
    meta, trained = data.read_meta(folder), opened.facts["tokenizer"]
    if trained not in (None, meta["tokenizer"]):
        raise SettingError(f"{opened.facts['path']} was trained on {trained} tokens, and {folder} names the tokenizer "
                           f"{meta['tokenizer']}: mend its meta.json, or name another --data")
    return folder


def read_settings(settings):
    """{name: value} -> (TrainConfig, the model's config, the model's class)."""
    _, (config_class, model_class) = configs.choose(settings, MODELS)
    known = {name: config for name, (config, _) in MODELS.items()}
    return *configs.build(settings, TrainConfig, config_class, models=known), model_class


@program("train.py")
def main(argv):
    settings = configs.read(argv)
    resume = configs.convert("resume", settings.pop("resume", False), bool)
    if not resume and all(argument.startswith("-") for argument in argv):
        settings = configs.load_preset(configs.HERE / "laptop.toml") | settings
    if settings.pop("help", False):
        print(__doc__ + configs.help_text(*read_settings(settings)[:2], models=MODELS))
        return
    resumed = None
    if resume:
        out_dir = configs.convert("out_dir", settings.get("out_dir"), str | None)
        folder = Path(out_dir or run_folder.newest_run(settings.get("model", "*")))
        resumed = checkpoint.load(folder / "last.pt")
        settings = resumed["settings"] | settings | {"out_dir": str(folder)}
    try:
        run = prepare(settings, resumed)
        train(run)
        finish(run)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
