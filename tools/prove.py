"""
What a mechanism file claims in its header, computed: `python mudd.py`, or `python mudd.py --variant=...` for an option.

`python mudd.py --diff` prints the difference between the layer loop of model.py and the file's own.
"""
import difflib
import inspect
import sys

import torch

import configs
from model import GPT, GPTConfig

SIZE = dict(vocab_size=257, block_size=64, n_layer=6, n_head=4, n_kv_head=2, n_embd=64)      # small: seconds on a CPU


def loop_diff(model_class, loop="layers"):
    """The unified diff, as lines, from GPT.layers to the method `loop` of a model class."""
    def source(cls, name):
        return inspect.getsource(getattr(cls, name)).splitlines()
    return list(difflib.unified_diff(source(GPT, "layers"), source(model_class, loop), "model.py",
                                     f"{model_class.__module__.replace('.', '/')}.py", n=9, lineterm=""))


def claims(config_class, model_class, settings):
    """[(claim, value)] for the small model with the given settings."""
    from train import flops_of
    config, = configs.build(SIZE | settings, config_class)
    shared = {f.name: getattr(config, f.name) for f, _, _ in configs.fields(GPTConfig)}
    model, plain = model_class(config).eval(), GPT(GPTConfig(**shared)).eval()
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(config.vocab_size, (2, config.block_size), generator=generator)
    third = config.block_size // 3
    lengths = [n for n in (third, 1, config.block_size - third - 1) if n]
    rows = []
    with torch.no_grad():
        full = model(idx)
        apart = (full - plain(idx)).abs().max()
        if hasattr(config, "schedule"):                                    # a feedback model: exact is the exact run
            trained, config.schedule = config.schedule, "autoregressive"
            exact = model(idx)
            rows.append((f"{trained} prefill", f"{config.passes} passes: logits within {(exact - full).abs().max():.1g} "
                                               f"of the exact run's, token by token"))
            full = exact
        cache = model.new_cache(2)
        pieces = [model(piece, cache=cache) for piece in idx.split(lengths, dim=1)]
        decoded = (torch.cat(pieces, dim=1) - full).abs().max()
        if rows:
            config.schedule = trained

    def count(m):
        return sum(p.numel() for p in m.parameters())

    def cache_bytes(cls):
        return 2 * sum(cls.cache_slots(config)) * config.n_kv_head * config.head_dim
    ours, base = flops_of(model_class, config), flops_of(GPT, config)
    return [("parameters", f"{count(model):,} ({count(model) - count(plain):+,} against the baseline)"),
            ("logits at the start", f"{apart:.2g} away from the baseline's"
                                    + (" (equal bit for bit)" if apart == 0 else "")),
            ("KV cache", f"{cache_bytes(model_class):,} bytes a token in bf16 (baseline {cache_bytes(GPT):,})"),
            *((f"FLOPs, {kind}", f"{ours[kind]:,.0f} a token ({ours[kind] / base[kind]:.4f} of the baseline)")
              for kind in ("train", "prefill", "decode")),
            *rows, ("cached decoding", f"logits within {decoded:.1g} of the {'exact' if rows else 'full'} forward's, in pieces of "
                                         f"{', '.join(map(str, lengths))}")]


def main(*names):
    """The command line of a mechanism file; `names` as in train.MODELS, of which --model picks one."""
    from train import MODELS
    try:
        settings = configs.read(sys.argv[1:])
        name = settings.pop("model", names[0])
        if name not in names:
            raise configs.SettingError(f"--model={name}: this file has {' and '.join(names)}")
        config_class, model_class = MODELS[name]
        if settings.pop("help", False):
            print("--diff: this file's layer loop against the baseline's. Without it, what the header claims, computed for\n"
                  "a small model; any of these settings changes it:\n" + configs.help_text(config_class))
            return
        if configs.convert("diff", settings.pop("diff", False), bool):
            config, = configs.build(SIZE | settings, config_class)
            print("\n".join(loop_diff(type(model_class(config)))))      # a variant may have its own loop
            return
        rows = claims(config_class, model_class, settings)
    except configs.SettingError as error:
        sys.exit(f"{names[0]}: {error}")
    print(f"{name}, {' '.join(f'{key}={value}' for key, value in (SIZE | settings).items())}")
    for claim, value in rows:
        print(f"  {claim:<20} {value}")
