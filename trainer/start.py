"""What a run does before its first step: go on from a checkpoint, compile, and say what will run."""
import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import kernels
from configs import SettingError
from trainer import checkpoint
from trainer.device import device_name, out_of_memory
from trainer.flops import flops_of
from trainer.run_folder import git_commit, write_log

FEW_HELD_OUT = 10_000                    # tokens; a validation loss over fewer is mostly noise


def restore(run, state, before, learning_rate):
    """Put the state of a checkpoint into a fresh run, and say what goes on differently from `before`, its TrainConfig.

    `learning_rate(config, step)` is the trainer's.
    """
    config, path = run.config, Path(run.config.out_dir, "last.pt")
    if before.model != config.model:
        raise SettingError(f"this is a run of --model={before.model}: leave --model out, or start a new run")
    if state.get("tokenizer") not in (None, run.tokenizer.name):
        raise SettingError(f"the run was trained on {state['tokenizer']} tokens and --data={config.data} has "
                           f"{run.tokenizer.name} tokens: name other data, or start a new run")
    changed = [k for k, v in asdict(run.model.config).items() if v != state["model_config"].get(k)]
    if changed:
        raise SettingError(f"--{changed[0]} cannot change when a run is resumed: leave it out, or start a new run")
    checkpoint.load_weights(run.model, state, path)
    checkpoint.load_optimizer(run.optimizer, run.scaler, state, path)
    for key in ("step", "best", "val_loss", "skipped", "validated"):
        setattr(run, key, state[key])
    run.saved = run.step
    if run.step >= config.max_iters and not run.validation_due:
        raise SettingError(f"the run has already made {run.step} steps: give a larger --max_iters to go on")

    said = []
    if Path(before.data).resolve() != Path(config.data).resolve():
        run.best = math.inf
        said.append(f"the text was {before.data} and is {config.data} now: the best loss begins anew")
    rows = [c.batch_size * c.gradient_accumulation_steps for c in (before, config)]
    if rows[0] != rows[1]:
        said.append(f"a step has {rows[1]} sequences and had {rows[0]}: from here on the batches are other ones")
    rates = [learning_rate(c, run.step) for c in (before, config)]
    if rates[1] > rates[0] and before.learning_rate == config.learning_rate:
        end = before.max_iters if before.lr_decay_iters is None else before.lr_decay_iters
        said.append(f"the learning rate rises from {rates[0]:.3g} to {rates[1]:.3g}, for its cosine now ends later: "
                    f"--lr_decay_iters={end} keeps it flat")
    if run.rank == 0 and said:
        print("\n".join(said))


def compile_pieces(run, forward, micro_batches):
    """Compile, and try it on one batch: whether a compiler is missing shows only when one is called."""
    if run.rank == 0:
        print("compiling, which takes up to a few minutes; --compile=off does without", flush=True)
    run.model.compile_pieces()
    try:
        forward(run, *micro_batches(run, 0)[0]).backward()
        return True
    except Exception as error:                       # whatever it is: eager training tells a fault of ours from theirs
        if out_of_memory(error):
            raise
        kernels.restore(run.model)
        cause = next((line for line in str(error).splitlines() if line.strip()), "")
        print(f"torch.compile does not work here ({type(error).__name__}: {cause}); training goes on without it, and "
              f"--compile=off leaves out the attempt")
        return False
    finally:
        run.optimizer.zero_grad(set_to_none=True)


def report(run, what, why, compiled):
    """Say what will run, and put it into a record of the log."""
    parameters = sum(p.numel() for p in run.model.parameters())
    if run.rank == 0:
        print(f"{what}: {parameters:,} parameters, {len(run.train_tokens):,} tokens to train on, "
              f"{len(run.val_tokens):,} held out, {run.tokens_per_step:,} in a step")
        if len(run.val_tokens) < FEW_HELD_OUT:
            print(f"fewer than {FEW_HELD_OUT:,} held-out tokens: small differences of the validation loss are noise")
        print(f"{device_name(run.device)}: {why}, {'compiled' if compiled else 'eager'}"
              + (f", {run.world} processes" if run.world > 1 else "") + f"; writing to {run.folder}"
              + (f", from step {run.step}" if run.step else ""))
        write_log(run.folder, step=run.step, settings=run.settings, train_config=asdict(run.config),
                  model_config=asdict(run.model.config), parameters=parameters,
                  flops_per_token=flops_of(type(run.model), run.model.config),
                  device=device_name(run.device), dtype=str(run.dtype), compiled=compiled, processes=run.world,
                  torch=torch.__version__, python=sys.version.split()[0], commit=git_commit())
