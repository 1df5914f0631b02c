"""
Train any model of this project, on one device or several.

    python train.py                                       configs/laptop.toml: three minutes on two CPU cores, offline
    python train.py --model=value_residual                the same, with another model; --help lists every setting
    python train.py configs/owt_124m.toml --seed=2        a preset, and flags over it
    python train.py --resume --out_dir=runs/gpt-1         go on from the last checkpoint, bit for bit on a CPU
    torchrun --nproc_per_node=2 train.py ...              data-parallel: the same batches, shared out

A run writes to runs/<model>-<n>: log.jsonl, last.pt (to resume from) and best.pt (lowest validation loss).
"""
import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import configs
import data
import kernels
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
    """A freshly initialised model: build("mudd", n_layer=4). KeyError for an unknown name, ValueError for a bad value."""
    config_class, model_class = MODELS[name]
    return model_class(config_class(**overrides))


@dataclass
class TrainConfig:
    model: str = "gpt"                   # which one of train.MODELS
    data: str = "plays"                  # plays (bytes), plays_gpt2, or a folder of token files
    out_dir: str | None = None           # folder of the run (default: the next free runs/<model>-<n>)
    resume: bool = False                 # go on from last.pt in out_dir (default: in the newest run, of --model if given)
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
    eval_interval: int = 250             # steps between validations, each on every held-out token; the end counts as one
    log_interval: int = 10               # steps between records of log.jsonl
    device: str = "auto"                 # auto, cpu, cuda, cuda:1, mps
    dtype: str = "auto"                  # auto, float32, bfloat16, float16: of the matrix products; weights stay float32
    compile: str = "auto"                # auto (on for CUDA), on, off: compile the pieces between the lines of the loop
    prompt: str = ""                     # what the sample at the end goes on from (default: end of text)
    sample_tokens: int = 256             # length of that sample

    def __post_init__(self):
        if self.model not in MODELS:
            raise ValueError(f"--model={self.model}: choose one of {', '.join(MODELS)}")
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
            raise ValueError(f"--min_lr={self.min_lr} is above the peak, --learning_rate={self.learning_rate}: lower it, or "
                             f"leave it out")
        for name in ("warmup_iters", "weight_decay", "grad_clip", "sample_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)}: give 0 or a positive number")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)}: give a number from 0 up to, but not including, 1")
        for name, words in (("dtype", ("auto", "float32", "bfloat16", "float16")), ("compile", ("auto", "on", "off"))):
            if getattr(self, name) not in words:
                raise ValueError(f"--{name}={getattr(self, name)}: choose one of {', '.join(words)}")


def learning_rate(config, step):
    """Linear warm-up, then a half cosine from the peak to min_lr, then flat; positive at every step >= 0."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    end = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    progress = min(1.0, (step - config.warmup_iters) / max(1, end - config.warmup_iters))
    return config.min_lr + (config.learning_rate - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(run):
    """Optimizer steps run.step .. max_iters - 1. Everything that the loop calls and does not show stands below it."""
    config, model, optimizer, scaler = run.config, run.model, run.optimizer, run.scaler
    with run.progress_bar() as bar, run.signals():
        for step in range(run.step, config.max_iters):
            run.seed_dropout(step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step) * group["lr_scale"]

            loss = 0.0                                                       # the mean over micro-steps
            micro_batches = run.micro_batches(step)
            for i, (x, y) in enumerate(micro_batches):
                with run.gradient_sync(last=i == len(micro_batches) - 1):
                    with run.autocast():
                        part = run.parallel(x, y) / len(micro_batches)       # forward
                    scaler.scale(part).backward()                            # backward
                loss += part.detach()

            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            loss, stop = run.agree(loss)
            run.refuse_non_finite(step, loss, norm.item())
            scaler.step(optimizer)                                           # step
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

            run.step = step + 1
            run.log(bar, loss, norm.item())
            if run.step % config.eval_interval == 0 or run.step == config.max_iters:
                run.evaluate_and_save()
            elif stop:
                run.save("last.pt")
            if stop and run.step < config.max_iters:
                run.interrupted()


# ---------------------------------------------------------------------------------------------------------------------
# What the loop calls


class Run:
    """The state of a training run and the helpers of its loop. Nothing is written before all settings are found good."""

    def __init__(self, settings, resumed=None):
        """`settings` {name: value} as configs.read gives them; `resumed` the state of a checkpoint, or None."""
        self.settings = settings
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.config, model_config, model_class = read_settings(settings)
        config = self.config
        folder = checked(data.dataset, config.data)
        meta = checked(data.read_meta, folder)
        self.tokenizer = data.tokenizer(meta["tokenizer"])
        if "vocab_size" not in settings:
            model_config.vocab_size = meta["vocab_size"]
        if model_config.vocab_size < meta["vocab_size"]:
            raise SettingError(f"--vocab_size={model_config.vocab_size} is smaller than the {meta['vocab_size']} ids of "
                               f"{folder}: leave it out")
        self.train_tokens, self.val_tokens = (checked(data.open_tokens, folder, part, meta["vocab_size"])
                                              for part in ("train", "val"))
        checked(data.batch, self.train_tokens, 0, 0, 1, model_config.block_size)
        checked(check_held_out, self.val_tokens, self.tokenizer)
        if config.gradient_accumulation_steps % self.world:
            raise SettingError(f"--gradient_accumulation_steps={config.gradient_accumulation_steps} cannot be shared out "
                               f"among {self.world} processes: give a multiple of {self.world}")
        self.device, self.dtype, why = device_and_dtype(config, model_config)
        if self.world > 1:
            self.join()

        self.model = checked(model_class, model_config).to(self.device)
        self.flops = flops_of(model_class, model_config)
        self.optimizer = make_optimizer(self.model, config, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.step, self.best, self.val_loss, self.skipped, self.stop = 0, math.inf, None, 0, False
        if resumed:
            self.restore(resumed)
        self.folder = checked(self.make_folder, resumed)
        wanted = config.compile == "on" or config.compile == "auto" and self.device.type == "cuda"
        compiled = wanted and self.compile_pieces()
        self.parallel = DistributedDataParallel(self.model) if self.world > 1 else self.model
        self.report(f"{config.model}, {folder.name}", why, compiled)

    def join(self):
        """Meet the other processes that torchrun has started, each with a device of its own."""
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    # -------------------------------------------------------------------------------------------- one optimizer step

    def seed_dropout(self, step):
        """Dropout's draws, like the batch, depend on (seed, step) alone, and on the process."""
        torch.manual_seed(1_000_003 * self.model.config.seed + 1_009 * step + self.rank)

    def micro_batches(self, step):
        """This process's share of the batch of `step`, as [(x, y)] on the device. The batch depends on (seed, step)."""
        config, T = self.config, self.model.config.block_size
        rows = config.batch_size * config.gradient_accumulation_steps
        x, y = checked(data.batch, self.train_tokens, step, self.model.config.seed, rows, T)
        x, y = (t.view(config.gradient_accumulation_steps, config.batch_size, T)[self.rank::self.world] for t in (x, y))
        return list(zip(self.to_device(x), self.to_device(y)))

    def to_device(self, t):
        return t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else t.to(self.device)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def gradient_sync(self, last):
        """Processes exchange gradients in the last micro-step only."""
        return self.parallel.no_sync() if self.world > 1 and not last else contextlib.nullcontext()

    def agree(self, loss):
        """(mean loss over processes, whether any of them was asked to stop)."""
        both = torch.stack((loss.float(), torch.tensor(float(self.stop), device=self.device)))
        if self.world > 1:
            dist.all_reduce(both)
            both /= self.world
        loss, stop = both.tolist()
        return loss, stop > 0

    def refuse_non_finite(self, step, loss, norm):
        """Stop before a step that would spoil the weights. Under fp16 an overflowing gradient is the scaler's business, who
        skips the step and halves the scale: as long as there is a scale to halve."""
        if self.scaler.is_enabled() and math.isfinite(loss) and self.scaler.get_scale() > SMALLEST_SCALE:
            self.skipped += not math.isfinite(norm)
        elif not math.isfinite(loss) or not math.isfinite(norm):
            last = self.folder / "last.pt"
            good = f"the last good checkpoint is {last}" if last.exists() else "no checkpoint was saved yet"
            raise Diverged(f"step {step}: loss {loss}, gradient norm {norm}, learning rate "
                           f"{learning_rate(self.config, step):.3g}; {good}. Lower --learning_rate or raise --warmup_iters")

    # ------------------------------------------------------------------------------------------ validation, checkpoints

    def evaluate_and_save(self):
        try:
            self.val_loss, self.bits = evaluate(self.model, self.val_tokens, self.tokenizer, self.config.batch_size)
        except BaseException:                        # whatever it is, out of memory say: the steps since the last save are kept
            self.save("last.pt")
            raise
        better = self.val_loss < self.best
        self.best = min(self.best, self.val_loss)
        self.write_log(step=self.step, val_loss=self.val_loss, bits_per_byte=self.bits)
        if self.rank == 0:
            tqdm.write(f"step {self.step}: validation loss {self.val_loss:.4f} nats per token, {self.bits:.4f} bits per byte")
        for name in ("best.pt", "last.pt") if better else ("last.pt",):
            self.save(name)
        self.clock = time.perf_counter()             # validation is no part of the next step's seconds

    def save(self, name):
        """Under another name first, then renamed: whenever the process dies, a whole checkpoint is there."""
        if self.rank:
            return
        state = dict(format=FORMAT, settings=self.settings, model_config=asdict(self.model.config),
                     model=self.model.state_dict(), optimizer=self.optimizer.state_dict(), scaler=self.scaler.state_dict(),
                     step=self.step, best=self.best, val_loss=self.val_loss, skipped=self.skipped)
        partial = self.folder / f"{name}.tmp"
        with writing():
            try:
                with open(partial, "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, self.folder / name)
            finally:
                partial.unlink(missing_ok=True)      # half a checkpoint helps nobody

    def restore(self, state):
        trained = state["settings"].get("model", "gpt")
        if trained != self.config.model:
            raise SettingError(f"this is a run of --model={trained}: leave --model out, or start a new run")
        changed = [k for k, v in asdict(self.model.config).items() if v != state["model_config"].get(k)]
        if changed:
            raise SettingError(f"--{changed[0]} cannot change when a run is resumed: leave it out, or start a new run")
        if state["step"] >= self.config.max_iters:
            raise SettingError(f"the run has already made {state['step']} steps: give a larger --max_iters to go on")
        before, = configs.build({k: v for k, v in state["settings"].items() if k in vars(self.config)}, TrainConfig)
        rows = [c.batch_size * c.gradient_accumulation_steps for c in (before, self.config)]
        if rows[0] != rows[1] and self.rank == 0:
            print(f"a step has {rows[1]} sequences and had {rows[0]}: from here on the run sees other batches than it would have")
        load_weights(self.model, state, Path(self.config.out_dir) / "last.pt")
        asked = [{name: group[name] for name in ("weight_decay", "betas")} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, asked):      # as asked now, not as they were
            group |= settings
        if state["scaler"]:                          # empty where the run had no scaler until now: not float16
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.best, self.val_loss, self.skipped = (state[k] for k in ("step", "best", "val_loss", "skipped"))

    def make_folder(self, resumed):
        """The folder of the run; the log of a resumed run is cut at the step of its checkpoint."""
        if self.rank:
            return Path(self.config.out_dir or ".")
        if resumed:
            folder = Path(self.config.out_dir)
            data.write_text(folder / "log.jsonl", "".join(log_until(folder / "log.jsonl", self.step)))
            return folder
        if self.config.out_dir:
            folder = Path(self.config.out_dir)
            if folder.exists() and any(folder.iterdir()) and not self.config.overwrite:
                raise SettingError(f"{folder} exists: add --resume to go on with it, --overwrite to begin again there, "
                                   f"or name another --out_dir")
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("log.jsonl", "best.pt", "last.pt"):
                (folder / name).unlink(missing_ok=True)
            return folder
        for n in range(1, sys.maxsize):
            folder = Path("runs", f"{self.config.model}-{n}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder

    # ---------------------------------------------------------------------------------------------- what is said and kept

    def report(self, what, why, compiled):
        """Say what will run, and put it into a record of the log."""
        parameters = sum(p.numel() for p in self.model.parameters())
        if self.rank == 0:
            print(f"{what}: {parameters:,} parameters, {len(self.train_tokens):,} tokens to train on, "
                  f"{len(self.val_tokens):,} held out")
            print(f"{device_name(self.device)}: {why}, {'compiled' if compiled else 'eager'}"
                  + (f", {self.world} processes" if self.world > 1 else "") + f"; writing to {self.folder}"
                  + (f", from step {self.step}" if self.step else ""))
        self.write_log(step=self.step, settings=self.settings, train_config=asdict(self.config),
                       model_config=asdict(self.model.config), parameters=parameters, flops_per_token=self.flops,
                       device=device_name(self.device), dtype=str(self.dtype), compiled=compiled, processes=self.world,
                       torch=torch.__version__, python=sys.version.split()[0], commit=git_commit())

    def progress_bar(self):
        self.clock = time.perf_counter()
        self.tokens_per_step = (self.config.batch_size * self.config.gradient_accumulation_steps
                                * self.model.config.block_size)
        return tqdm(total=self.config.max_iters, initial=self.step, unit="step", disable=self.rank > 0, dynamic_ncols=True)

    def log(self, bar, loss, norm):
        """The bar after every step, a record of log.jsonl after every log_interval of them."""
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        rate = self.tokens_per_step / seconds
        bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
        bar.update()
        if self.step % self.config.log_interval == 0 or self.step == self.config.max_iters:
            self.write_log(step=self.step, loss=loss, learning_rate=learning_rate(self.config, self.step - 1),
                           gradient_norm=norm, tokens_per_second=rate, seconds=seconds, mfu=self.mfu(rate),
                           peak_memory=peak_memory(self.device), skipped_steps=self.skipped)

    def mfu(self, tokens_per_second):
        """Share of the device's peak that the model's FLOPs are, or "n/a" where the peak is not known."""
        peak = next((peak for name, peak in PEAK_FLOPS.items() if name in device_name(self.device)), None)
        if peak is None or self.dtype == torch.float32:
            return "n/a"
        return training_flops(self.flops) * tokens_per_second / (peak * self.world)

    def write_log(self, **record):
        if self.rank == 0:
            with writing(), open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    # --------------------------------------------------------------------------------------------------- stop and compile

    @contextlib.contextmanager
    def signals(self):
        """Ctrl-C or SIGTERM: finish the step, save, stop. A second Ctrl-C stops at once."""
        def handle(number, frame):
            if self.stop and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.stop = True
        numbers = [signal.SIGINT, signal.SIGTERM] if hasattr(signal, "SIGTERM") else [signal.SIGINT]
        before = [(number, signal.signal(number, handle)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def interrupted(self):
        if self.rank == 0:
            tqdm.write(f"stopped after step {self.step}; go on with: python train.py --resume --out_dir={self.folder}")
        raise SystemExit(130)

    def compile_pieces(self):
        """Compile, and try it on one batch: whether a compiler is missing shows only when one is called."""
        self.model.compile_pieces()
        try:
            x, y = data.batch(self.train_tokens, 0, 0, self.config.batch_size, self.model.config.block_size)
            with self.autocast():
                self.model(self.to_device(x), self.to_device(y)).backward()
            return True
        except Exception as error:                   # whatever it is: eager training tells a fault of ours from theirs
            kernels.restore(self.model)
            cause = next((line for line in str(error).splitlines() if line.strip()), "")
            print(f"torch.compile does not work here ({type(error).__name__}: {cause}); training goes on without it")
            return False
        finally:
            self.optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------------------------------------------------------------
# Precision, optimizer, validation


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


def device_and_dtype(config, model_config):
    """(device, dtype of the matrix products, a few words on why)."""
    device = usable_device(config.device)
    if config.dtype != "auto":
        return device, getattr(torch, config.dtype), f"{config.dtype} as asked"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return device, torch.bfloat16, "bfloat16 autocast"
        return device, torch.float16, "float16 autocast with a gradient scaler (no native bfloat16)"
    native = any(getattr(torch.cpu, test, bool)() for test in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    if device.type == "cpu" and native and model_config.n_embd >= BF16_PAYS_FROM:
        return device, torch.bfloat16, "bfloat16 autocast (the processor multiplies it natively)"
    return device, torch.float32, "float32"


def make_optimizer(model, config, device):
    """AdamW over model.param_groups(), which must hold every parameter once."""
    groups = model.param_groups()
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters())), "param_groups() must hold every parameter exactly once"
    groups = [dict(params=g["params"], lr_scale=g["lr_scale"], weight_decay=config.weight_decay if g["decay"] else 0.0)
              for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2),
                             fused=device.type in ("cpu", "cuda"))


def check_held_out(tokens, tokenizer):
    """ValueError if a held-out id is beyond the vocabulary or if there is no text: before training, not after it."""
    if not sum((y != tokenizer.eot_token).sum().item() for _, y in data.windows(tokens, 2 ** 20, tokenizer.eot_token, 1)):
        raise ValueError(f"{tokens.shards[0][0]} holds nothing but end of text: prepare it from more text")


@torch.no_grad()
def evaluate(model, tokens, tokenizer, batch_size, windows=None):
    """(nats per token, bits per byte) over every held-out token, or over the first so many `windows`.

    Float32 throughout, so that the number does not depend on the batch size. End of text is predicted like any token,
    but has no bytes, so its nats are left out of the bits per byte. Processes share the batches.
    """
    device, was_training = next(model.parameters()).device, model.training
    lengths = torch.as_tensor(data.token_bytes(tokenizer), device=device)
    sums = torch.zeros(4, dtype=torch.float64)                               # nats, tokens, nats of text, bytes
    batches = data.windows(tokens, model.config.block_size, tokenizer.eot_token, batch_size)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model.eval()
    for x, y in itertools.islice(batches, rank, windows and -(-windows // batch_size), world):
        h, y = model.hidden(x.to(device)), y.to(device)
        for row, targets in zip(h, y):                                       # one row of logits at a time
            nats, size = F.cross_entropy(model.head(row).float(), targets, reduction="none"), lengths[targets]
            sums += torch.stack((nats.sum(), nats.new_tensor(len(nats)), nats[size > 0].sum(), size.sum())).cpu()
    model.train(was_training)
    if world > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
    nats, count, text_nats, size = sums.tolist()
    return nats / count, text_nats / size / math.log(2)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


class Checkpoint(NamedTuple):
    model: GPT             # in eval mode, on the CPU
    config: GPTConfig
    facts: dict            # settings, step, val_loss, best, path


def load_state(path):
    """The dict of a checkpoint file, its tensors on the CPU. SettingError, one line, for anything else."""
    if not Path(path).is_file():
        raise SettingError(f"there is no checkpoint {path}: train a model first, or name another file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                       # torch.load raises whatever the first odd byte leads it to
        raise SettingError(f"{path} is no checkpoint of this project, or was cut off "
                           f"({type(error).__name__}): take best.pt or last.pt of a run") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or not KEPT <= state.keys():
        raise SettingError(f"{path} is no checkpoint of this project: take best.pt or last.pt of a run")
    return state


def load_checkpoint(path):
    """A trained model from a checkpoint file, or from the best.pt of a run folder. See Checkpoint; raises SettingError."""
    path = Path(path)
    if path.is_dir():
        path = path / ("best.pt" if (path / "best.pt").exists() else "last.pt")
    state = load_state(path)
    try:
        config_class, model_class = MODELS[state["settings"].get("model", "gpt")]
        model = model_class(config_class(**state["model_config"]))
    except (KeyError, TypeError, ValueError) as error:
        raise misfit(path, error) from None
    load_weights(model, state, path)
    facts = {name: state[name] for name in ("settings", "step", "val_loss", "best")} | {"path": str(path)}
    return Checkpoint(model.eval(), model.config, facts)


def load_weights(model, state, path):
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise misfit(path, error) from None


def misfit(path, error):
    cause = " ".join(str(error).split())[:160]       # load_state_dict lists every name, a line each
    return SettingError(f"{path} does not fit the code of its model as it is now ({type(error).__name__}: {cause}): "
                        f"check out the code it was trained with, or train anew")


def log_until(path, step):
    """The lines of a log.jsonl up to `step`. What is no record (a line cut off by a kill, say) is left out, and a log that
    is missing is empty: the checkpoint holds all that a resumed run needs."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                lines.append(line)
    return lines


def newest_run(model="*"):
    """The folder of the run, of one model or of any, whose last.pt is the newest."""
    runs = sorted(Path("runs").glob(f"{model}-*/last.pt"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise SettingError(f"there is no run {model}-* in {Path('runs').resolve()}: train a model, or name its folder")
    return runs[-1].parent


# ---------------------------------------------------------------------------------------------------------------------
# Facts and small helpers

FORMAT = "crosslayer 1"
KEPT = {"settings", "model_config", "model", "optimizer", "scaler", "step", "best", "val_loss", "skipped"}
SMALLEST_SCALE = 2.0 ** -20                          # of fp16 losses; where gradients still overflow, they always will
EXACT_WINDOWS = 8                                    # held-out windows on which a feedback model is also run exactly
BF16_PAYS_FROM = 256                                 # narrower models lose more to casts than the products gain
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12,
              "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12}       # dense, 16 bits, makers' figures


class Diverged(SettingError):
    """A loss or a gradient that is not finite."""


def checked(function, *arguments):
    """function(*arguments), its ValueError turned into the one line that the user sees."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise SettingError(str(error)) from None
    except OSError as error:
        raise SettingError(f"{error.filename} cannot be used ({error.strerror}): name another folder, or see to its "
                           f"permissions") from None


@contextlib.contextmanager
def writing():
    """What cannot be written in here, because the disk is full say, is one line that the user sees."""
    try:
        yield
    except OSError as error:
        raise SettingError(f"{error.filename or 'the folder of the run'} cannot be used ({error.strerror or error}): see to its "
                           f"space and permissions, then go on with --resume; the last checkpoint, if there is one, is "
                           f"whole") from None


def out_of_memory(error):
    """Whether it is memory that was missing: torch says so in several ways."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def flops_of(model_class, config):
    """flops_per_token of the model's file, for sequences of block_size."""
    return sys.modules[model_class.__module__].flops_per_token(config, config.block_size)


def training_flops(flops):
    """FLOPs of a training step per token, the head's forward and backward with it."""
    return flops["train"] + 3 * flops["head"]


def read_settings(settings):
    """{name: value} -> (TrainConfig, the model's config, the model's class)."""
    name = configs.convert("model", settings.get("model", "gpt"), str)
    if name not in MODELS:
        raise SettingError(f"--model={name}: choose one of {', '.join(MODELS)}")
    config_class, model_class = MODELS[name]
    return *configs.build(settings, TrainConfig, config_class), model_class


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory(device):
    """Bytes: of the device where it counts them, else of this process; None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def git_commit():
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True,
                              check=True, timeout=5).stdout.strip()


def finish(run):
    """The last lines of a run: the exact validation loss and, where the model's schedule approximates an exact run, the
    loss of that one; then a sample."""
    config, losses = run.model.config, []
    if hasattr(config, "schedule"):                  # before all processes but one leave: `evaluate` is a work of all
        trained = config.schedule
        for config.schedule in (trained, "autoregressive"):
            losses.append(evaluate(run.model, run.val_tokens, run.tokenizer, 1, windows=EXACT_WINDOWS)[0])
        config.schedule = trained
    if run.rank:
        return
    print(f"\nvalidation, every held-out token once: {run.val_loss:.4f} nats per token, {run.bits:.4f} bits per byte, "
          f"perplexity {math.exp(run.val_loss):.3f}")
    if losses:
        print(f"the first {EXACT_WINDOWS} windows: {losses[0]:.4f} nats per token by the trained schedule, {losses[1]:.4f} "
              f"run exactly, token by token")
    print(f"saved {run.folder / 'last.pt'}" + (f"; best.pt has {run.best:.4f}" if run.best < run.val_loss else ""))
    if run.config.sample_tokens:
        from tools.sample import print_anything, stream_text
        print_anything()
        print("\nsample:")
        for piece in stream_text(run.model.eval(), run.tokenizer, run.config.prompt, run.config.sample_tokens,
                                 temperature=0.8, generator=torch.Generator(run.device).manual_seed(config.seed)):
            print(piece, end="", flush=True)
        print()


def main(argv):
    try:
        settings = configs.read(argv)
        resume = configs.convert("resume", settings.pop("resume", False), bool)
        if settings.pop("help", False):
            config_class, _ = MODELS.get(str(settings.get("model")), MODELS["gpt"])
            print(__doc__ + configs.help_text(TrainConfig, config_class))
            return
        resumed = None
        if resume:
            out_dir = configs.convert("out_dir", settings.get("out_dir"), str | None)
            folder = Path(out_dir or newest_run(settings.get("model", "*")))
            resumed = load_state(folder / "last.pt")
            settings = resumed["settings"] | settings | {"out_dir": str(folder)}
        elif all(argument.startswith("--") for argument in argv):
            settings = configs.load_preset("laptop") | settings
        run = Run(settings, resumed)
        train(run)
        finish(run)
        if run.world > 1:                            # leave together: gloo may abort a process that leaves the other behind
            dist.barrier()
            run.parallel = None
    except SettingError as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("train.py: stopped at once; the last checkpoint, if there is one, is whole")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        sys.exit("train.py: out of memory: lower --batch_size, raising --gradient_accumulation_steps by as much, or lower "
                 "--block_size, --n_embd or --n_layer")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
