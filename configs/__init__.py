"""How settings are read: presets as TOML, then flags `--name=value`, over the defaults of a few dataclasses.

The dataclasses are the one place where a setting is named: its comment there is its line in `--help`.
"""
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


class SettingError(ValueError):
    """A setting that cannot be used; its text is one line that says how to mend it."""


def read(argv):
    """Command line -> {name: value}, values as TOML types or strings: `preset.toml`s first, flags over them, in order.

    A preset is a path, or the name of a file in configs/ with or without `.toml`. A bare `--flag` means yes, `-h` is `--help`.
    """
    settings, flags = {}, {}
    for argument in argv:
        if argument == "-h":
            flags["help"] = True
        elif argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            flags[name.replace("-", "_")] = value if equals else True
        else:
            settings |= load_preset(argument)
    return settings | flags


def load_preset(name):
    for path in (Path(name), HERE / name, HERE / f"{name}.toml"):
        if path.is_file():
            try:
                return tomllib.loads(path.read_text(encoding="utf-8-sig"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise SettingError(f"{path} is not a preset: {error}") from None
    known = ", ".join(sorted(path.name for path in HERE.glob("*.toml")))
    raise SettingError(f"{name!r} is no preset: give a TOML file, one of {known}, or a setting as --name=value")


def build(settings, *classes):
    """{name: value} -> one instance of each dataclass. A name that none of them has is refused with the nearest one;
    a value of the wrong type, and what a class itself refuses (ValueError), likewise."""
    known = {field.name: hint for cls in classes for field, hint, _ in fields(cls)}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean --{near[0]}?" if near else "--help lists them all"
            raise SettingError(f"--{name} is no setting here: {hint}")
    values = {name: convert(name, value, known[name]) for name, value in settings.items()}
    try:
        return [cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}) for cls in classes]
    except ValueError as error:
        raise SettingError(str(error)) from None


def convert(name, value, hint):
    """A string from the command line, or a TOML value, as the type that the field asks for."""
    if isinstance(hint, types.UnionType):                                # X | None
        if value is None or str(value).lower() == "none":
            return None
        hint = typing.get_args(hint)[0]
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
        wanted = wanted.get(hint, "numbers like 5,6,7")
        raise SettingError(f"--{name}={value}: {wanted} is wanted here") from None


@functools.cache
def fields(cls):
    """[(field, type, comment)] of a dataclass, base classes first; the comment is the one behind the field."""
    hints, comments = typing.get_type_hints(cls), {}
    for base in reversed(cls.__mro__[:-1]):
        comments |= re.findall(r"^    (\w+): .*?#\s*(.+)$", inspect.getsource(base), re.MULTILINE)
    return [(field, hints[field.name], comments.get(field.name, "")) for field in dataclasses.fields(cls)]


def help_text(*classes):
    """One line for each setting: name, default, comment."""
    lines = []
    for cls in classes:
        lines.append(f"\n{cls.__name__}")
        for field, _, comment in fields(cls):
            lines.append(f"  --{field.name + '=' + str(field.default):<32} {comment}")
    return "\n".join(lines)
