"""
Text from a trained model: `python -m tools.sample`, or `python -m tools.sample runs/gpt-1/best.pt --prompt="ROMEO:"`.

Takes the newest run unless a run folder or a checkpoint is named, and says which. Runs on any machine, whatever device
and precision the checkpoint was trained with.
"""
import codecs
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import configs
import data


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
            raise ValueError(f"--temperature={self.temperature}: give 0 for the most likely token, or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"--top_k={self.top_k}: give a whole number of at least 1, or leave it out")
        if not 0 <= self.seed < 2 ** 63:
            raise ValueError(f"--seed={self.seed}: give a whole number from 0 up to, but not including, 2^63")


def stream_text(model, tokenizer, prompt, max_new_tokens, **how):
    """Yield the text that `model` writes after `prompt`, piece by piece; an empty prompt is end of text. The options
    are those of GPT.stream. A piece holds whole characters, whatever their bytes were split into."""
    ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in model.stream(idx, max_new_tokens, **how):
        known = token.item() < tokenizer.n_vocab                         # not so if --vocab_size was larger than the data's
        yield decoder.decode(tokenizer.decode_single_token_bytes(token.item()) if known else b"\xff")
    yield decoder.decode(b"", final=True)


def print_anything():
    """Let print write "?" for what the terminal's encoding lacks, where it would stop the program."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def main(argv):
    from train import checked, load_checkpoint, newest_run, usable_device
    try:
        paths = [argument for argument in argv if not argument.startswith("-")]
        settings = configs.read([argument for argument in argv if argument.startswith("-")])
        if settings.pop("help", False):
            print(__doc__ + configs.help_text(SampleConfig))
            return
        config, = configs.build(settings, SampleConfig)
        device = usable_device(config.device)
        if len(paths) > 1:
            raise configs.SettingError(f"one run at a time, not {' and '.join(paths)}")
        checkpoint = load_checkpoint(Path(paths[0]) if paths else newest_run())
        facts = checkpoint.facts
        folder = checked(data.dataset, facts["settings"].get("data", "plays"))
        tokenizer = data.tokenizer(checked(data.read_meta, folder)["tokenizer"])
        if tokenizer.n_vocab > checkpoint.config.vocab_size:
            raise configs.SettingError(f"{facts['path']} knows {checkpoint.config.vocab_size} token ids, but {folder} now "
                                       f"names the tokenizer {tokenizer.name} with {tokenizer.n_vocab}: mend its meta.json")
    except configs.SettingError as error:
        sys.exit(f"sample: {error}")
    loss = "not measured" if facts["val_loss"] is None else f"{facts['val_loss']:.4f} nats per token"
    print(f"{facts['path']}, step {facts['step']}, validation loss {loss}")
    print_anything()
    model = checkpoint.model.to(device)
    generator = torch.Generator(device).manual_seed(config.seed)
    for n in range(config.num_samples):
        print(f"\n---- sample {n + 1} of {config.num_samples}\n{config.prompt}", end="")
        for piece in stream_text(model, tokenizer, config.prompt, config.max_new_tokens, temperature=config.temperature,
                                 top_k=config.top_k, generator=generator):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
