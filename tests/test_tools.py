"""tools.sample and the command line of the mechanism files: what a mistake is answered with."""
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from configs import SettingError
from tools import bench, prove, sample
from tools.probe import __main__ as probe
from trainer import evaluate

ROOT = Path(train.__file__).parent
SMALL = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=2", "--max_iters=1",
         "--sample_tokens=0", "--device=cpu"]


@pytest.fixture(scope="module")
def folder(tiny_data, tmp_path_factory):
    """A trained run, of a vocabulary larger than the data's."""
    folder = tmp_path_factory.mktemp("run") / "r"
    train.main([*SMALL, f"--data={tiny_data}", f"--out_dir={folder}", "--vocab_size=4000"])
    return folder


@pytest.mark.parametrize("flags, sentence", [
    (["--device=xyz"], "choose cpu, cuda"), (["--device=meta"], "choose cpu, cuda"),
    (["--device=mps:9"], "cannot be used here"),
    (["--temperature=-1"], "a positive number"), (["--temperature=nan"], "a positive number"),
    (["--temperature=inf"], "a positive number"),
    (["--seed=99999999999999999999"], "a whole number from 0"),
    (["--seed=-1"], "a whole number from 0"), (["--top_k=0"], "at least 1"),
    (["--bogus=1"], "--help lists them all"), (["another"], "one run at a time"), (["-x"], "one run at a time")])
def test_a_mistake_is_answered_with_one_line(folder, flags, sentence):
    with pytest.raises(SystemExit) as stopped:
        sample.main([str(folder), *flags])
    assert sentence in str(stopped.value.code) and "\n" not in str(stopped.value.code)


def test_an_id_that_no_text_has_is_written_as_unknown(folder, capsys):
    sample.main([str(folder), "--max_new_tokens=40"])
    assert "\ufffd" in capsys.readouterr().out


def test_a_run_is_sampled_without_its_data_and_other_tokens_are_refused(tiny_data, tmp_path, capsys):
    shutil.copytree(tiny_data, tmp_path / "d")
    train.main([*SMALL, f"--data={tmp_path / 'd'}", f"--out_dir={tmp_path / 'r'}"])
    (tmp_path / "d" / "meta.json").write_text('{"tokenizer": "gpt2"}', encoding="utf-8")
    opened, tokenizer = train.open_run(tmp_path / "r")
    assert tokenizer.name == "bytes" and train.run_data(opened, tiny_data) == tiny_data
    with pytest.raises(SettingError, match="mend its meta.json"):
        train.run_data(opened)
    shutil.rmtree(tmp_path / "d")
    sample.main([str(tmp_path / "r"), "--max_new_tokens=3", "--prompt=" + 20 * "a"])
    assert "the prompt has 20 tokens and block_size is 16: the model reads the last 16" in capsys.readouterr().out


@pytest.mark.parametrize("nats, perplexity", [(800.0, math.inf), (1.0, math.e)])
def test_the_perplexity_of_a_huge_loss_is_infinite(nats, perplexity):
    assert evaluate.perplexity(nats) == perplexity


@pytest.mark.skipif(sys.platform == "win32", reason="arguments are text there")
def test_a_prompt_and_a_terminal_without_unicode_do_not_stop_it(folder):
    import os
    done = subprocess.run([sys.executable, "-m", "tools.sample", str(folder), b"--prompt=\xff\xc3\xa9",
                           "--max_new_tokens=3"], cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"},
                          capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_settings(flag, capsys, monkeypatch):
    sample.main([flag])
    assert "--top_k" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["value_residual.py", flag])
    prove.main({"value_residual": train.MODELS["value_residual"]})
    assert "--variant" in capsys.readouterr().out
    for program, setting in ((train, "--max_iters"), (bench, "--steps"), (probe, "--windows=16")):
        program.main([flag])
        assert setting in capsys.readouterr().out


@pytest.mark.parametrize("block_size", [1, 2, 20, 64])
def test_a_file_proves_its_header_at_any_block_size(block_size, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["value_residual.py", f"--block_size={block_size}", "--n_layer=2"])
    prove.main({"value_residual": train.MODELS["value_residual"]})
    assert "in pieces of" in capsys.readouterr().out


def test_a_file_with_two_models_proves_the_one_that_is_asked_for(capsys, monkeypatch):
    """The looped model needs the cache of 10 layers run, not 6, in bf16: 2 x 10 slots of 2 heads of 16."""
    monkeypatch.setattr(sys, "argv", ["depth_attention.py", "--model=looped"])
    prove.main({name: train.MODELS[name] for name in ("depth_attention", "looped")})
    assert "looped, vocab_size" in (out := capsys.readouterr().out) and "1,280 bytes" in out
    monkeypatch.setattr(sys, "argv", ["depth_attention.py", "--model=gpt"])
    with pytest.raises(SystemExit, match="depth_attention and looped"):
        prove.main({name: train.MODELS[name] for name in ("depth_attention", "looped")})


@pytest.mark.parametrize("flag, sentence", [("--n_head=3", "n_head=3 is not a multiple of it|n_kv_head=2"),
                                            ("--diff=perhaps", "yes or no"),
                                            ("--bogus", "--help lists them all")])
def test_a_mechanism_file_answers_a_mistake_with_one_line(flag, sentence, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["value_residual.py", flag])
    with pytest.raises(SystemExit, match=sentence):
        prove.main({"value_residual": train.MODELS["value_residual"]})
