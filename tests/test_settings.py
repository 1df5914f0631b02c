"""Presets, flags and --help: what is read, and how a wrong name or value is answered."""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

import configs
from configs import SettingError


@dataclass
class Shape:
    n_layer: int = 4                     # layers
    n_embd: int = 64                     # width
    block_size: int = 128                # tokens in a sequence
    d_ff: int | None = None              # inner width

    def __post_init__(self):
        self.d_ff = self.d_ff or 4 * self.n_embd
        if self.n_layer < 1:
            raise ValueError(f"--n_layer={self.n_layer}: give at least 1")


@dataclass
class Variant(Shape):
    variant: str = "plain"               # which one


@dataclass
class Trainer:
    learning_rate: float = 1e-3          # peak
    weight_decay: float = 0.1            # decay
    batch_size: int = 8                  # sequences
    max_iters: int = 100                 # steps
    gradient_accumulation_steps: int = 1 # micro-steps
    out_dir: str | None = None           # folder
    resume: bool = False                 # go on
    compile: Literal["auto", "on", "off"] = "auto"       # compile or not


MODELS = {"gpt": Shape, "one": Variant, "two": Variant}


def built(*argv):
    return configs.build(configs.read(argv), Trainer, Shape, models=MODELS)


@pytest.mark.parametrize("name, right", [
    ("lr", "learning_rate"), ("wd", "weight_decay"), ("bs", "batch_size"), ("steps", "max_iters"),
    ("d_model", "n_embd"), ("seq_len", "block_size"), ("context-length", "block_size"), ("n_layers", "n_layer"),
    ("accum", "gradient_accumulation_steps")])
def test_a_name_of_other_projects_is_answered_with_ours(name, right):
    with pytest.raises(SettingError, match=f"did you mean --{right}\\?"):
        built(f"--{name}=1")


@pytest.mark.parametrize("argv, sentence", [
    (["--variant=x"], "--variant is no setting here: it belongs to one, two; choose one of them with --model"),
    (["--zzz=1"], "--zzz is no setting here: --help lists them all"),
    (["--n_layer", "3"], "--n_layer 3: write --n_layer=3"),
    (["laptp"], "'laptp' is no preset: give a TOML file, one of "),
    (["--resume", "mine.toml"], "'mine.toml' is no preset: give a TOML file, one of "),
    (["--out_dir=a\0b"], "--out_dir='a\\x00b': a setting cannot hold a NUL character"),
    (["--compile=maybe"], "--compile=maybe: choose one of auto, on, off"),
    (["--n_layer=1.5"], "--n_layer=1.5: a whole number is wanted here"),
    (["--n_layer=0"], "--n_layer=0: give at least 1")])
def test_a_setting_that_cannot_be_used_is_answered_with_one_line(argv, sentence):
    with pytest.raises(SettingError) as refused:
        built(*argv)
    assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)


@pytest.mark.parametrize("value, word", [
    ("auto", "auto"), ("on", "on"), ("true", "on"), ("1", "on"), ("yes", "on"), (True, "on"), (1, "on"),
    ("off", "off"), ("False", "off"), ("no", "off"), ("0", "off"), (False, "off"), (0, "off")])
def test_a_switch_may_be_spelled_as_yes_or_no(value, word):
    assert configs.build({"compile": value}, Trainer)[0].compile == word


def test_a_bare_flag_means_yes():
    trainer, _ = built("--compile", "--resume")
    assert trainer.compile == "on" and trainer.resume


def test_flags_override_presets_whatever_their_order(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbfmax_iters = 2\nn_embd = 8\n")     # as some editors save it
    assert configs.read(["--n_embd=24", str(tmp_path / "mine.toml")]) == {"max_iters": 2, "n_embd": "24"}


def test_a_program_may_take_paths_instead_of_presets(tmp_path):
    paths = []
    assert configs.read(["--resume", str(tmp_path), "laptop", "--n_layer=3"], paths) == {"resume": True, "n_layer": "3"}
    assert paths == [str(tmp_path), "laptop"]


def test_a_model_is_chosen_by_its_name():
    assert configs.choose({}, MODELS) == ("gpt", Shape) and configs.choose({"model": "one"}, MODELS) == ("one", Variant)
    for name in ("zzz", True, ["gpt"]):
        with pytest.raises(SettingError, match="--model="):
            configs.choose({"model": name}, MODELS)


def test_help_shows_the_values_in_use_and_the_models():
    said = configs.help_text(*built("--n_layer=3", "--learning_rate=1e-2", "--out_dir=\n"), models=MODELS)
    for words in ("--n_layer=3 ", "--learning_rate=0.01 ", "--d_ff=256 ", "inner width", "=\\n ", "gpt, one, two"):
        assert words in said
    assert "--n_layer=4 " in configs.help_text(Shape)


def test_every_shipped_preset_is_read():
    for path in Path(configs.__file__).parent.glob("*.toml"):
        assert configs.load_preset(path.stem)["data"] in ("plays", "data/openwebtext")
