"""
Text from a trained model: `python -m tools.sample`, or `python -m tools.sample runs/gpt-1/best.pt --prompt="ROMEO:"`.

Takes the newest run unless a run folder or a checkpoint is named, and says which. Runs on any machine, whatever device
and precision the checkpoint was trained with.
"""
import math
import sys
from dataclasses import dataclass

from trainer.console import printable, program, starting

starting(__name__)

import torch

import configs
from train import open_run
from trainer.device import usable_device
from trainer.text import say_cut_prompt, stream_text


@dataclass
class SampleConfig:
    prompt: str = ""              # text to go on from (default: end of text)
    num_samples: int = 1          # how many
    max_new_tokens: int = 500     # tokens in each
    temperature: float = 0.8      # 0 takes the most likely token; 1 samples from the model as it is
    top_k: int | None = None      # sample from that many most likely tokens only (default: from all)
    seed: int = 1337              # of the draws
    device: str = "cpu"           # cpu, cuda, mps

    def __post_init__(self):
        for name in ("num_samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)}: give a whole number of at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature={self.temperature}: give 0 for the most likely token, "
                             f"or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"--top_k={self.top_k}: give a whole number of at least 1, or leave it out")
        if not 0 <= self.seed < 2 ** 63:
            raise ValueError(f"--seed={self.seed}: give a whole number from 0 up to, but not including, 2^63")


@program("sample")
def main(argv):
    settings = configs.read(argv, paths := [])
    if settings.pop("help", False):
        print(__doc__ + configs.help_text(SampleConfig))
        return
    config, = configs.build(settings, SampleConfig)
    device = usable_device(config.device)
    if len(paths) > 1:
        raise configs.SettingError(f"one run at a time, not {' and '.join(paths)}")
    (model, _, facts), tokenizer = open_run(*paths)
    loss = "not measured" if facts["val_loss"] is None else f"{facts['val_loss']:.4f} nats per token"
    print(f"{facts['path']}, step {facts['step']}, validation loss {loss}")
    say_cut_prompt(model, tokenizer, config.prompt)
    model = model.to(device)
    generator = torch.Generator(device).manual_seed(config.seed)
    for n in range(config.num_samples):
        print(f"\n---- sample {n + 1} of {config.num_samples}\n{config.prompt}", end="")
        for piece in stream_text(model, tokenizer, config.prompt, config.max_new_tokens, temperature=config.temperature,
                                 top_k=config.top_k, generator=generator):
            print(printable(piece), end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
