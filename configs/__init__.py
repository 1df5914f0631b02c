"""Settings: dataclass defaults, then TOML presets, then flags. The comment behind a field is its line in `--help`."""
import dataclasses
import difflib
import functools
import inspect
import re
import tomllib
import types
import typing
from pathlib import Path

HERE = Path(__file__).parent
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
ELSEWHERE = {"lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "accum": "gradient_accumulation_steps",
             "steps": "max_iters", "seq_len": "block_size", "context_length": "block_size", "d_model": "n_embd"}


class SettingError(ValueError):
    """A setting that cannot be used; its text is one line that says how to mend it."""


def read(argv, paths=None):
    """Command line -> {name: value}, values as TOML types or strings. Flags override presets, later ones earlier ones.

    A preset is a path, or the name of a file in configs/ with or without `.toml`. A bare `--flag` means yes, `-h` is
    `--help`. Where a list `paths` is given, arguments that are no flags are appended to it, and are no presets.
    """
    settings, flags, before = {}, {}, ""
    for argument in argv:
        if argument == "-h":
            flags["help"] = True
        elif argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            flags[name.replace("-", "_")] = value if equals else True
        elif re.fullmatch("--[^=]+", before) and not (preset_path(argument) or re.search(r"\.toml$|[/\\]", argument)):
            raise SettingError(f"{before} {argument}: write {before}={argument}")
        elif paths is None:
            settings |= load_preset(argument)
        else:
            paths.append(argument)
        before = argument
    return settings | flags


def preset_path(name):
    return next((path for path in (Path(name), HERE / name, HERE / f"{name}.toml") if path.is_file()), None)


def load_preset(name):
    """The settings of a preset, {name: value as TOML gives it}. SettingError where there is none."""
    path = preset_path(name)
    if path is None:
        known = ", ".join(sorted(path.name for path in HERE.glob("*.toml")))
        raise SettingError(f"{str(name)!r} is no preset: give a TOML file, one of {known}, or a setting, --name=value")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:           # tomllib has several ways to say that it is none
        raise SettingError(f"{path} is not a preset: {error}") from None


def choose(settings, models):
    """(name, value of `models`) for the setting `model`, gpt if it is not given; SettingError if it is none of them."""
    name = convert("model", settings.get("model", "gpt"), str)
    if name not in models:
        raise SettingError(f"--model={name}: choose one of {', '.join(models)}")
    return name, models[name]


def build(settings, *classes, models={}):
    """{name: value} -> one instance of each dataclass. SettingError for a name that none of them has, a value of the
    wrong type, and what a class itself refuses (ValueError). `models` {name: config class} serves to explain a name."""
    known = {field.name: hint for cls in classes for field, hint, _ in fields(cls)}
    for name in settings:
        if name not in known:
            owners = [model for model, cls in models.items() if name in [field.name for field, *_ in fields(cls)]]
            near = [ELSEWHERE[name]] if ELSEWHERE.get(name) in known else difflib.get_close_matches(name, known, n=1)
            hint = (f"it belongs to {', '.join(owners)}; choose one of them with --model" if owners else
                    f"did you mean --{near[0]}?" if near else "--help lists them all")
            raise SettingError(f"--{name} is no setting here: {hint}")
    values = {name: convert(name, value, known[name]) for name, value in settings.items()}
    try:
        return [cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}) for cls in classes]
    except ValueError as error:
        raise SettingError(str(error)) from None


def convert(name, value, hint):
    """A string from the command line, or a TOML value, as the type of its field; SettingError if it does not fit."""
    if isinstance(hint, types.UnionType):                                # X | None
        if value is None or str(value).lower() == "none":
            return None
        hint = typing.get_args(hint)[0]
    if "\0" in str(value):
        raise SettingError(f"--{name}={value!r}: a setting cannot hold a NUL character")
    if typing.get_origin(hint) is typing.Literal:
        words, switch = typing.get_args(hint), {True: "on", False: "off"}.get(WORDS.get(str(value).lower()))
        if value in words or switch in words:
            return value if value in words else switch
        raise SettingError(f"--{name}={value}: choose one of {', '.join(words)}")
    try:
        if hint is bool:
            return WORDS[str(value).lower()]
        if isinstance(value, bool) or hint is str and not isinstance(value, str):
            raise ValueError
        if typing.get_origin(hint) is tuple:
            items = value if isinstance(value, (list, tuple)) else [item for item in str(value).split(",") if item]
            return tuple(convert(name, item, typing.get_args(hint)[0]) for item in items)
        if hint is int:
            number = float(value) if re.search("[.eE]", str(value)) else int(value)      # 1e3 is a whole number too
            if number != int(number):
                raise ValueError
            return int(number)
        return hint(value)
    except (KeyError, ValueError, TypeError, OverflowError):
        wanted = {bool: "yes or no", int: "a whole number", float: "a number", str: "a word, in TOML between quotes,"}
        raise SettingError(f"--{name}={value}: {wanted.get(hint, 'numbers like 5,6,7')} is wanted here") from None


@functools.cache
def fields(cls):
    """[(field, type, comment)] of a dataclass, base classes first; the comment is the one behind the field."""
    hints, comments = typing.get_type_hints(cls), {}
    for base in reversed(cls.__mro__[:-1]):
        comments |= re.findall(r"^    (\w+): .*?#\s*(.+)$", inspect.getsource(base), re.MULTILINE)
    return [(field, hints[field.name], comments.get(field.name, "")) for field in dataclasses.fields(cls)]


def help_text(*configs, models=()):
    """One line for each setting: name, value, comment. A config is a dataclass (its defaults) or an instance of one."""
    lines = []
    for config in configs:
        cls = config if isinstance(config, type) else type(config)
        lines.append(f"\n{cls.__name__}")
        for field, _, comment in fields(cls):
            value = getattr(config, field.name)
            value = f"{value:.6g}" if isinstance(value, float) else str(value).replace("\n", "\\n")
            lines.append(f"  --{field.name + '=' + value:<32} {comment}")
    if models:
        lines.append(f"\nModels: {', '.join(models)}\nThe settings of another model: --model=NAME --help")
    return "\n".join(lines)
