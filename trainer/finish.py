"""The last lines of a run."""
import torch

from trainer.console import printable
from trainer.evaluate import measure, perplexity
from trainer.processes import leave
from trainer.stopping import signals
from trainer.text import say_cut_prompt, stream_text

EXACT_WINDOWS = 8                        # held-out windows on which a feedback model is also run exactly


def finish(run):
    """The last lines of a run: the exact validation loss and, where the model's schedule approximates an exact run, the
    loss of that one; then a sample."""
    with signals(run):
        losses = []
        if hasattr(run.model.config, "schedule"):    # before all processes but one leave: `measure` is a work of all
            losses.append(measure(run, 1, EXACT_WINDOWS))
            with run.model.exactly():
                losses.append(losses[0] and measure(run, 1, EXACT_WINDOWS))
        if run.rank == 0:
            print(f"\nvalidation, every held-out token once: {run.val_loss:.4f} nats per token, "
                  f"{run.bits:.4f} bits per byte, perplexity {perplexity(run.val_loss):.3f}")
            if all(losses) and losses:
                print(f"the first {EXACT_WINDOWS} windows: {losses[0][0]:.4f} nats per token by the trained schedule, "
                      f"{losses[1][0]:.4f} run exactly, token by token")
            best = f"; best.pt has {run.best:.4f}" if run.best < run.val_loss else ""
            print(f"saved {run.folder / 'last.pt'}{best}")
            if run.config.sample_tokens and not run.stop:
                sample(run)
    leave(run, 130 if run.stop else 0)


def sample(run):
    say_cut_prompt(run.model, run.tokenizer, run.config.prompt)
    print("\nsample:")
    generator = torch.Generator(run.device).manual_seed(run.model.config.seed)
    for piece in stream_text(run.model.eval(), run.tokenizer, run.config.prompt, run.config.sample_tokens,
                             temperature=0.8, generator=generator):
        print(printable(piece), end="", flush=True)
        if run.stop:
            break
    print()
