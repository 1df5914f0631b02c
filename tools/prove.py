"""
What a mechanism's file claims in its header, computed for a small model: `python mudd.py`, any setting behind it.

`python mudd.py --diff` prints the difference between the baseline's layer loop and the file's own.
"""
import difflib
import inspect
import sys
from pathlib import Path

import torch

import configs
from model import GPT, GPTConfig
from trainer.console import program
from trainer.flops import flops_of

SIZE = dict(vocab_size=257, block_size=64, n_layer=6, n_head=4, n_kv_head=2, n_embd=64)      # seconds on a CPU


def main(models):
    """The command line of a mechanism's file. `models` {name: (config class, model class)}; --model picks one."""
    program(next(iter(models)))(show)(models, sys.argv[1:])


def show(models, argv):
    settings = configs.read(argv)
    name = settings.pop("model", next(iter(models)))
    if name not in models:
        raise configs.SettingError(f"--model={name}: this file has {' and '.join(models)}")
    config_class, model_class = models[name]
    if settings.pop("help", False):
        print("--diff shows this file's layer loop against the baseline's. Without it, you see what the header\n"
              "claims, computed for a small model. These settings change it:\n" + configs.help_text(config_class))
        return
    diff = configs.convert("diff", settings.pop("diff", False), bool)
    config, = configs.build(SIZE | settings, config_class)
    network = model_class(config)
    if diff:
        print("\n".join(loop_diff(network)))
        return
    print(f"{name}, {' '.join(f'{key}={value}' for key, value in (SIZE | settings).items())}")
    for claim, value in claims(network.eval()):
        print(f"  {claim:<20} {value}")


def loop_diff(model):
    """The unified diff, as lines, from GPT.layers to the loop of a model, or of its class: `layers`, or the methods it
    names in LOOP where its `layers` only calls them."""
    ours = [line for name in getattr(model, "LOOP", ("layers",))
            for line in inspect.getsource(getattr(model, name)).splitlines() + [""]]
    base = inspect.getsource(GPT.layers).splitlines() + [""]
    name = Path(sys.modules[model.__module__].__file__).name
    return list(difflib.unified_diff(base, ours, "model.py", name, n=20, lineterm=""))


@torch.no_grad()
def claims(network):
    """[(claim, value)] for a model in eval mode."""
    config = network.config
    shape = {field.name: getattr(config, field.name) for field, _, _ in configs.fields(GPTConfig)}
    plain = GPT(GPTConfig(**shape)).eval()
    rows = [("parameters", f"{count(network):,} ({count(network) - count(plain):+,} against the baseline)")]

    idx = torch.randint(config.vocab_size, (2, config.block_size), generator=torch.Generator().manual_seed(0))
    full = network(idx)
    apart = (full - plain(idx)).abs().max()
    rows.append(("logits at the start", f"{apart:.2g} away from the baseline's"
                 + (" (equal bit for bit)" if apart == 0 else "")))
    rows.append(("KV cache", f"{cache_bytes(network):,} bytes a token in bf16 (baseline {cache_bytes(plain):,})"))
    ours, base = (flops_of(type(m), m.config) for m in (network, plain))
    rows += [(f"FLOPs, {kind}", f"{ours[kind]:,.0f} a token ({ours[kind] / base[kind]:.4f} of the baseline)")
             for kind in ("train", "prefill", "decode")]

    with network.exactly():                                     # a feedback model: token by token
        exact = network(idx)
        third = config.block_size // 3
        lengths = [n for n in (third, 1, config.block_size - third - 1) if n]
        cache = network.new_cache(2)
        pieces = [network(piece, cache=cache) for piece in idx.split(lengths, dim=1)]
        decoded = (torch.cat(pieces, dim=1) - exact).abs().max()
    if not torch.equal(full, exact):
        rows.append((f"{config.schedule} prefill", f"{config.passes} passes: logits within "
                                                   f"{(exact - full).abs().max():.1g} of the exact run's"))
    rows.append(("cached decoding", f"logits within {decoded:.1g} of the full forward's, in pieces of "
                                    f"{', '.join(map(str, lengths))}"))
    return rows


def count(network):
    return sum(p.numel() for p in network.parameters())


def cache_bytes(network):
    config = network.config
    return 2 * sum(network.cache_slots(config)) * config.n_kv_head * config.head_dim
