"""The trainer: exact steps, exact resume, exact validation, and every mistake answered with one line."""
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import data
import kernels
import train
from trainer import evaluate
from configs import SettingError
from train import MODELS, TrainConfig, learning_rate, load_checkpoint

ROOT = Path(train.__file__).parent
SMALL = ["--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4", "--max_iters=6",
         "--eval_interval=4", "--log_interval=1", "--warmup_iters=2", "--learning_rate=0.01",
         "--sample_tokens=0", "--device=cpu"]


@pytest.fixture
def run(tiny_data, tmp_path, monkeypatch):
    """run("--flag=value", ...) trains a tiny model in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return lambda *flags: train.main([*SMALL, f"--data={tiny_data}", *flags])


def log(folder):
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder):
    return {record["step"]: record["loss"] for record in log(folder) if "loss" in record}


def at_step(patch, step, action):
    """action(run) is done before optimizer step `step` (counted from 0)."""
    def micro_batches(run, now, plain=train.micro_batches):
        if now == step:
            action(run)
        return plain(run, now)
    patch.setattr(train, "micro_batches", micro_batches)


def stop_after(patch, step):
    """As if Ctrl-C came during that step."""
    at_step(patch, step - 1, lambda run: setattr(run, "stop", True))


def refused(function, *arguments):
    """The one line with which a program ends."""
    with pytest.raises(SystemExit) as stopped:
        function(*arguments)
    assert stopped.value.code and "\n" not in str(stopped.value.code)
    return str(stopped.value.code)


def equal_state(a, b):
    """Weights, optimizer and counters of two checkpoints, bit for bit."""
    a, b = (torch.load(path, weights_only=True) for path in (a, b))
    assert a["model"].keys() == b["model"].keys()
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
    for p in a["optimizer"]["state"]:
        assert all(torch.equal(v, b["optimizer"]["state"][p][k]) for k, v in a["optimizer"]["state"][p].items())
    assert (a["step"], a["best"], a["val_loss"]) == (b["step"], b["best"], b["val_loss"])


def test_exactly_max_iters_steps_and_the_last_weights_are_evaluated_and_saved(run):
    run("--max_iters=6", "--eval_interval=4")
    assert list(losses("runs/gpt-1")) == [1, 2, 3, 4, 5, 6]
    state = torch.load("runs/gpt-1/last.pt", weights_only=True)
    assert state["step"] == 6 and state["optimizer"]["state"][0]["step"] == 6
    assert [r["step"] for r in log("runs/gpt-1") if "val_loss" in r] == [4, 6]
    assert state["val_loss"] == log("runs/gpt-1")[-1]["val_loss"]


@pytest.mark.parametrize("flags", [[], ["--dropout=0.2"], ["--dtype=bfloat16", "--dropout=0.1"],
                                   ["--model=value_residual", "--variant=learnable",
                                    "--gradient_accumulation_steps=2"]])
def test_resume_is_bit_equal_also_from_a_step_that_was_no_evaluation(run, monkeypatch, flags):
    run(*flags, "--out_dir=whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(SystemExit) as stopped:
            run(*flags, "--out_dir=parts")
    assert stopped.value.code == 130 and torch.load("parts/last.pt", weights_only=True)["step"] == 3
    train.main(["--resume", "--out_dir=parts"])
    equal_state("whole/last.pt", "parts/last.pt")
    assert losses("whole") == losses("parts")


@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("gpt", "value_residual")])
def test_every_model_trains_resumes_bit_equal_and_samples(run, monkeypatch, capsys, model):
    flags = [f"--model={model}", "--max_iters=4", "--eval_interval=3", "--n_layer=4", "--block_size=8",
             "--batch_size=16"]
    run(*flags, "--out_dir=whole", "--sample_tokens=4")
    assert "sample:" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(SystemExit):
            run(*flags, "--out_dir=parts")
    train.main(["--resume", "--out_dir=parts"])
    equal_state("whole/last.pt", "parts/last.pt")


def test_accumulation_logs_the_mean_loss_and_gives_the_same_step(run):
    run("--batch_size=4", "--gradient_accumulation_steps=1", "--out_dir=a")
    run("--batch_size=2", "--gradient_accumulation_steps=2", "--out_dir=b")
    for step, loss in losses("a").items():
        assert losses("b")[step] == pytest.approx(loss, abs=2e-5)


def test_validation_is_exact_and_does_not_depend_on_the_batch_size(run, tiny_data):
    run("--max_iters=3")
    model = load_checkpoint("runs/gpt-1").model
    tokens, tokenizer = data.open_tokens(tiny_data, "val", 257), data.tokenizer("bytes")
    stream = torch.cat((torch.tensor([256]), torch.from_numpy(tokens.read(1, 701))))       # end of text, then 700 bytes
    nats = 0.0
    with torch.no_grad():
        for start in range(0, 700, 16):                               # by hand: windows of 16, a short last one
            x, y = stream[start:min(start + 16, 700)], stream[start + 1:start + 17]
            nats += F.cross_entropy(model(x[None])[0], y, reduction="sum").item()
    for batch_size in (1, 3, 64):
        loss, bits = evaluate.evaluate(model, tokens, tokenizer, batch_size)
        assert loss == pytest.approx(nats / 700, abs=1e-6)
        assert bits == pytest.approx(nats / 700 / math.log(2), abs=1e-6)       # one byte a token, no end of text inside


def test_bits_per_byte_leave_end_of_text_out(tmp_path):
    import numpy as np
    for split in ("train", "val"):
        with data.TokenWriter(tmp_path / f"{split}.bin") as out:
            out.write(np.array([256, 65, 66, 256, 67, 68, 69], dtype=np.uint16))
    data.write_meta(tmp_path, "bytes")
    model = train.build("gpt", n_layer=1, n_head=1, n_embd=8, block_size=4).eval()
    for p in model.parameters():
        p.data.zero_()                                                # uniform: every token costs ln 257
    nats, bits = evaluate.evaluate(model, data.open_tokens(tmp_path, "val", 257), data.tokenizer("bytes"), 2)
    assert nats == pytest.approx(math.log(257)) and bits == pytest.approx(math.log2(257))


@pytest.mark.parametrize("warmup, decay, steps", [(0, None, 10), (10, None, 10), (20, None, 10), (0, None, 1),
                                                  (1, None, 1),
                                                  (5, 5, 10), (5, 3, 10), (2, 0, 10)])
def test_the_learning_rate_is_positive_and_finite_for_every_edge(warmup, decay, steps):
    config = TrainConfig(max_iters=steps, warmup_iters=warmup, lr_decay_iters=decay, learning_rate=1.0)
    rates = [learning_rate(config, step) for step in range(steps + 3)]
    assert all(0 < rate <= 1 for rate in rates)
    if decay is None and warmup < steps:
        assert rates[steps] == pytest.approx(config.min_lr) and max(rates) <= 1


MISTAKES = [
    (["--model=gtp"], "choose one of gpt"),
    (["--n_head=4", "--n_kv_head=3"], "n_kv_head=3: n_head=4 is not a multiple"),
    (["--block_size=7000"], "block_size=7000 needs 7001 tokens"),
    (["--data=nowhere"], "no data set 'nowhere'"),
    (["--device=tpu"], "cannot be used here"),
    (["--max_iters=0"], "at least 1"),
    (["--learning_rate=0"], "a positive number"),
    (["--lr_decay_iters=-5"], "or leave it out"),
    (["--learning_rate=1e-3", "--min_lr=2e-3"], "is above the peak"),
    (["--dropout=1"], "up to, but not including, 1"),
    (["--vocab_size=100"], "smaller than the 257 ids"),
    (["--seed=-1"], "a whole number from 0"),
    (["--device=meta"], "choose cpu, cuda"),
    ([f"--out_dir={ROOT / 'train.py'}"], "train.py: File exists"),
    ([f"--out_dir={ROOT / 'train.py' / 'x'}"], "Not a directory"),
    (["--out_dir=" + 300 * "x"], "File name too long"),
    (["--n_embd=2000000000000000"], "out of memory"),
    (["--resume", "--out_dir"], "a word, in TOML between quotes, is wanted"),
    (["--resume", "--out_dir=nowhere"], "there is no checkpoint"),
]


@pytest.mark.parametrize("flags, sentence", MISTAKES, ids=[" ".join(m[0])[-40:] for m in MISTAKES])
def test_a_mistake_is_answered_with_one_line_and_nothing_is_written(run, flags, sentence):
    before = set(Path().iterdir())
    with pytest.raises(SystemExit) as stopped:
        run(*flags)
    assert sentence in str(stopped.value.code) and "\n" not in str(stopped.value.code)
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize("preset, sentence", [
    (b"prompt = 5", "a word"), (b"max_iters = 2020-01-01", "a whole number"), (b"x = = 1", "is not a preset"),
    (b"\xef\xbb\xbfn_layer = [1]", "--n_layer=[1]: a whole number")])         # some editors mark UTF-8 by these bytes
def test_a_malformed_preset_is_answered_with_one_line(tmp_path, monkeypatch, preset, sentence):
    monkeypatch.chdir(tmp_path)
    Path("odd.toml").write_bytes(preset)
    assert sentence in refused(train.main, ["odd.toml", "--device=cpu"])
    assert [p.name for p in Path().iterdir()] == ["odd.toml"]


@pytest.mark.parametrize("held_out, sentence", [([256] * 3, "nothing but end of text"),
                                                ([65] * 5000 + [40000], "token id 40000")])
def test_held_out_data_that_cannot_be_used_is_refused_before_training(run, tmp_path, held_out, sentence):
    import numpy as np
    for split, ids in (("train", [65] * 100), ("val", held_out)):
        with data.TokenWriter(tmp_path / f"{split}.bin") as out:
            out.write(np.array(ids, dtype=np.uint16))
    data.write_meta(tmp_path, "bytes")
    with pytest.raises(SystemExit, match=sentence):
        run(f"--data={tmp_path}")
    assert not Path("runs").exists()


@pytest.mark.parametrize("steps, near", [(3, "give 2 or 4"), (1, "give 2")])
def test_accumulation_that_cannot_be_shared_out_names_the_nearest_values(run, monkeypatch, steps, near):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(run, f"--gradient_accumulation_steps={steps}").endswith(near)


def test_a_run_may_be_resumed_in_fp16(run):
    run("--out_dir=r", "--max_iters=2")
    train.main(["--resume", "--out_dir=r", "--max_iters=3", "--dtype=float16"])
    train.main(["--resume", "--out_dir=r", "--max_iters=4", "--dtype=float32"])
    assert list(losses("r")) == [1, 2, 3, 4]


def spoil_weights(run):
    run.model.embed.weight.data[:] = math.nan


def spoil_gradient(run):
    run.model.norm.weight.register_hook(lambda grad: grad * math.inf)


def spoil_after(patch):
    patch.setattr(train, "log_step", lambda run, *numbers: spoil_weights(run))


@pytest.mark.parametrize("spoil, flags, sentence, kept", [
    (lambda patch: at_step(patch, 5, spoil_weights), [], "step 5: loss nan", 4),
    (lambda patch: at_step(patch, 5, spoil_gradient), [], "gradient norm inf", 4),
    (lambda patch: at_step(patch, 3, spoil_gradient), ["--dtype=float16", "--max_iters=100", "--eval_interval=100"],
     "gradient norm", None),
    (spoil_after, ["--max_iters=1"], "is not finite", None)])
def test_a_non_finite_number_stops_the_run_and_spares_the_checkpoint(run, monkeypatch, spoil, flags, sentence, kept):
    spoil(monkeypatch)
    said = refused(run, "--out_dir=r", *flags)
    assert sentence in said and ("the last good checkpoint is r" if kept else "no checkpoint was saved yet") in said
    assert load_checkpoint("r/last.pt").facts["step"] == kept if kept else not list(Path("r").glob("*.pt"))


def test_a_validation_that_is_not_finite_stops_the_run(run, monkeypatch):
    monkeypatch.setattr(evaluate, "evaluate", lambda *arguments: (math.nan, math.nan))
    assert "step 1: validation loss" in refused(run, "--out_dir=r", "--max_iters=1")
    assert load_checkpoint("r/last.pt").facts["step"] == 1 and not Path("r/best.pt").exists()


def test_under_fp16_an_overflow_skips_the_step_and_is_counted(run, monkeypatch):
    def overflow(run):
        hook = run.model.norm.weight.register_hook(lambda grad: (hook.remove(), grad * math.inf)[1])
    at_step(monkeypatch, 1, overflow)
    run("--out_dir=r", "--dtype=float16", "--max_iters=4")
    state = torch.load("r/last.pt", weights_only=True)
    assert state["skipped"] == 1 and state["scaler"]["scale"] == 2.0 ** 15          # half of where it began
    assert state["optimizer"]["state"][0]["step"] == 3 and state["step"] == 4


def raising(error):
    def action(run):
        raise error
    return action


def lose_log(run):
    (run.folder / "log.jsonl").unlink()
    (run.folder / "log.jsonl").mkdir()


@pytest.mark.parametrize("action, sentence", [
    (raising(torch.OutOfMemoryError("CUDA")), "out of memory; --batch_size=2 --gradient_accumulation_steps=2"),
    (raising(SettingError("train.bin: token id 40000")), "train.bin: token id 40000; go on with"),
    (raising(RuntimeError("illegal memory access")), None), (lose_log, "log.jsonl: Is a directory")])
def test_an_error_in_the_loop_saves_the_last_whole_step(run, monkeypatch, action, sentence):
    with monkeypatch.context() as patch:
        at_step(patch, 3, action)
        if sentence is None:                                          # a fault of the code keeps its traceback
            with pytest.raises(RuntimeError, match="illegal"):
                run("--out_dir=parts")
        else:
            assert sentence in refused(run, "--out_dir=parts")
    if action is lose_log:
        Path("parts/log.jsonl").rmdir()
    assert torch.load("parts/last.pt", weights_only=True)["step"] in (3, 4)
    train.main(["--resume", "--out_dir=parts"])
    run("--out_dir=whole")
    equal_state("whole/last.pt", "parts/last.pt")


@pytest.mark.parametrize("max_iters, made", [(6, 4), (4, 4)])
def test_a_validation_that_was_interrupted_is_made_up_on_resume(run, monkeypatch, max_iters, made):
    run(f"--max_iters={max_iters}", "--out_dir=whole")
    with monkeypatch.context() as patch:                              # the signal comes between two of its batches
        def windows(*arguments, plain=data.windows):
            for n, batch in enumerate(plain(*arguments)):
                if n == 1 and running:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch
        running = []
        at_step(patch, 3, running.append)
        patch.setattr(data, "windows", windows)
        assert refused(run, f"--max_iters={max_iters}", "--out_dir=parts") == "130"
    assert torch.load("parts/last.pt", weights_only=True)["step"] == made and not Path("parts/best.pt").exists()
    train.main(["--resume", "--out_dir=parts"])
    for name in ("best.pt", "last.pt"):
        equal_state(f"whole/{name}", f"parts/{name}")
    checks = [[r for r in log(folder) if "val_loss" in r] for folder in ("whole", "parts")]
    assert checks[0] == checks[1]


def test_a_save_that_fails_leaves_the_old_checkpoint(run, monkeypatch):
    def save(state, file):
        file.write(b"half a checkpoint")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        said = refused(run, "--out_dir=r", "--max_iters=2")
        assert "last.pt" in said and "no checkpoint was saved yet" in said and "--resume" not in said
    run("--out_dir=r", "--max_iters=2", "--overwrite")
    before = Path("r/last.pt").read_bytes()
    monkeypatch.setattr(torch, "save", save)
    assert "go on with: python train.py --resume" in refused(train.main, ["--resume", "--out_dir=r", "--max_iters=3"])
    assert Path("r/last.pt").read_bytes() == before and sorted(p.name for p in Path("r").iterdir()) == \
        ["best.pt", "last.pt", "log.jsonl"]


def test_a_run_is_trained_in_a_thread_of_a_notebook(run):
    thread = threading.Thread(target=run, args=("--out_dir=r", "--max_iters=2"))
    thread.start()
    thread.join()
    assert load_checkpoint("r").facts["step"] == 2


def test_a_signal_that_is_ignored_stays_ignored(run, monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)            # as nohup does with SIGHUP
    try:
        at_step(monkeypatch, 1, lambda run: os.kill(os.getpid(), signal.SIGTERM))
        run("--out_dir=r", "--max_iters=2")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert load_checkpoint("r/last.pt").facts["step"] == 2


def test_a_folder_has_one_process_at_a_time(run, tmp_path):
    run("--out_dir=r", "--max_iters=1")
    before = Path("r/last.pt").read_bytes()
    code = "import sys; from trainer.run_folder import Lock; lock = Lock(sys.argv[1]); " \
           "print('locked', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r")], cwd=ROOT, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "locked\n"
        for flags in (["--overwrite"], ["--resume", "--max_iters=2"], []):
            assert f"r is in use by process {other.pid} on " in refused(run, "--out_dir=r", *flags)
    finally:
        other.kill()
        other.communicate()
    assert Path("r/last.pt").read_bytes() == before
    train.main(["--resume", "--out_dir=r", "--max_iters=2"])          # its death released the folder
    assert not Path("r/lock").exists()


@pytest.fixture(scope="module")
def trained(tiny_data, tmp_path_factory):
    """The last checkpoint of a run of one step."""
    folder = tmp_path_factory.mktemp("trained") / "r"
    train.main([*SMALL, f"--data={tiny_data}", "--max_iters=1", f"--out_dir={folder}"])
    return folder / "last.pt"


def change(state, path, value):
    """Sets the entry at `path`, or deletes it if the value is None."""
    *keys, last = (int(key) if key.isdigit() else key for key in path)
    for key in keys:
        state = state[key]
    if value is None:
        del state[last]
    else:
        state[last] = value


@pytest.mark.parametrize("name, value, sentence", [
    ("settings.model", "gone", "does not fit the code"), ("settings", [], "its settings cannot be used"),
    ("model_config.gone", 1, "does not fit the code"), ("norm", None, "does not fit the code"),
    ("norm", torch.ones(3), "does not fit the code"),
    ("norm", 5, "its model cannot be used"), ("norm", torch.ones(16).to_sparse(), "its model cannot be used"),
    ("norm", torch.ones(1).expand(16), "its model cannot be used"),        # a kernel would write past its one number
    ("norm", torch.ones(16, dtype=torch.int64), "its model cannot be used"),
    ("settings.data", 3, "its settings cannot be used"), ("best", -math.inf, "its best cannot be used"),
    ("best", 10 ** 400, "its best cannot be used"), ("step", 10 ** 30, "its step cannot be used"),
    ("norm", torch.full((16,), math.nan), "norm.weight is not finite"),
    ("step", 1.5, "its step cannot be used"), ("step", -1, "its step cannot be used"),
    ("best", "low", "its best cannot be used"),
    ("format", "other", "is no checkpoint of this project"),
    ("optimizer", None, "holds no optimizer state"), ("optimizer", {}, "has other groups than the model"),
    ("optimizer.param_groups", [], "has other groups than the model"),
    ("optimizer.state", [], "has other groups than the model"),
    ("optimizer.state.1", None, "state of parameter 1"), ("optimizer.state.1.exp_avg", None, "state of parameter 1"),
    ("optimizer.state.1.exp_avg_sq", torch.ones(1), "optimizer state of parameter 1"),
    ("optimizer.state.1.exp_avg", torch.zeros(1).expand(16), "optimizer state of parameter 1"),
    ("optimizer.state.1.step", torch.tensor(math.nan), "state of parameter 1"),
    ("scaler", 5, "its scaler cannot be used")])
def test_a_tampered_checkpoint_is_refused_with_one_line(trained, tmp_path, monkeypatch, name, value, sentence):
    monkeypatch.chdir(tmp_path)
    Path("r").mkdir()
    state = torch.load(trained, weights_only=True)
    change(state, ["model", "norm.weight"] if name == "norm" else name.split("."), value)
    torch.save(state, "r/last.pt")
    if name not in ("settings.model", "model_config.gone"):
        assert sentence in refused(train.main, ["--resume", "--out_dir=r", "--max_iters=2"])
    if name.startswith(("optimizer", "scaler")):                      # only resuming needs them
        assert load_checkpoint("r/last.pt").facts["step"] == 1
    else:
        with pytest.raises(SettingError, match=sentence):
            load_checkpoint("r/last.pt")


def test_a_bare_run_takes_the_next_free_folder_and_says_what_it_is(run, capsys):
    for flags in ([], [], ["--model=value_residual", "--seed=5"]):
        run("--max_iters=1", "--gradient_accumulation_steps=2", *flags)
    said = capsys.readouterr().out
    assert "128 in a step" in said and "fewer than 10,000 held-out tokens" in said
    assert sorted(p.name for p in Path("runs").iterdir()) == ["gpt-1", "gpt-2", "value_residual-1"]
    first, step, *_ = log("runs/value_residual-1")
    assert first["model_config"]["seed"] == 5 and first["train_config"]["max_iters"] == 1
    assert first["parameters"] == sum(p.numel() for p in load_checkpoint("runs/value_residual-1").model.parameters())
    assert first["flops_per_token"]["train"] > 0 and first["torch"] == torch.__version__
    assert step["tokens_per_second"] > 0 and step["gradient_norm"] > 0 and step["mfu"] == "n/a"


def test_resume_takes_the_run_saved_last_with_its_settings_and_those_asked_for_now(run, tiny_data, tmp_path, capsys):
    run("--max_iters=1")
    run("--max_iters=4", "--n_embd=32")
    os.utime("runs/gpt-2/last.pt", (0, 0))                            # not when it was saved
    state = torch.load("runs/gpt-2/last.pt", weights_only=True)
    torch.save(state | dict(best=0.0), "runs/gpt-2/last.pt")
    os.utime("runs/gpt-2/last.pt", (0, 0))
    shutil.copytree(tiny_data, tmp_path / "other")
    train.main(["--resume", "--max_iters=8", "--weight_decay=0.5", "--beta2=0.9", "--batch_size=5",
                f"--data={tmp_path / 'other'}"])
    state = torch.load("runs/gpt-2/last.pt", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    assert state["step"] == 8 and state["model_config"]["n_embd"] == 32
    assert [(group["weight_decay"], group["betas"][1]) for group in groups] == [(0.5, 0.9), (0.0, 0.9)]
    said = capsys.readouterr().out
    assert "a step has 5 sequences and had 4" in said and "--lr_decay_iters=4 keeps it flat" in said
    assert "the best loss begins anew" in said and torch.load("runs/gpt-2/best.pt", weights_only=True)["step"] > 4


def test_a_folder_is_used_again_only_as_it_was_asked_for(run):
    run("--out_dir=r", "--max_iters=2")
    run("--out_dir=v", "--max_iters=1", "--model=value_residual")
    before = Path("r/last.pt").read_bytes()
    for flags, sentence in ((["--out_dir=r"], "add --resume"), (["--resume", "--out_dir=r"], "already made 2 steps"),
                            (["--resume", "--out_dir=r", "--max_iters=3", "--n_layer=3"], "--n_layer cannot change"),
                            (["--resume", "--out_dir=r", "--model=mudd"], "a run of --model=gpt: leave --model out")):
        assert sentence in refused(train.main, flags)
    assert Path("r/last.pt").read_bytes() == before
    Path("v/last.pt").write_bytes(before)
    assert "is of a gpt model" in refused(train.main, ["--resume", "--out_dir=v", "--max_iters=3"])
    run("--out_dir=r", "--max_iters=1", "--overwrite")
    assert list(losses("r")) == [1]


@pytest.mark.parametrize("content, steps", [
    (None, [3]), (b"garbage\n\xff\xfe\n", [3]), (b'{"a": 1}\n[1]\n{"step": "x"}\n\n', [3]),
    (b'{"step": 2, "loss": 5.0}\n{"step": 3, "loss": 99.0}\n{"step": 4, "lo', [2, 3])])
def test_a_log_is_cut_at_the_checkpoint_and_what_is_damaged_in_it_is_left_out(run, content, steps):
    run("--out_dir=r", "--max_iters=2")
    Path("r/log.jsonl").unlink()
    if content is not None:
        Path("r/log.jsonl").write_bytes(content)
    train.main(["--resume", "--out_dir=r", "--max_iters=3"])
    assert list(losses("r")) == steps and 99.0 not in losses("r").values()


class Surprise:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint", {"model": torch.zeros(3)}, {"model": Surprise()}])
def test_what_is_no_checkpoint_gets_one_sentence_and_no_pickle_is_executed(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    if isinstance(content, bytes):
        Path("x.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, "x.pt")
    with pytest.raises(SettingError, match="checkpoint") as error:
        load_checkpoint("x.pt")
    assert "\n" not in str(error.value) and not Path("executed").exists()


def test_load_checkpoint_gives_the_best_weights_in_eval_mode(run):
    run("--out_dir=r", "--model=value_residual", "--variant=convex", "--dropout=0.5")
    model, config, facts = load_checkpoint("r")
    assert not model.training and config.variant == "convex" and facts["path"].endswith("best.pt")
    idx = torch.arange(10)[None]
    assert torch.equal(model(idx), model(idx))


def test_every_parameter_is_in_the_optimizer_once_or_training_does_not_begin():
    model = train.build("gpt", n_layer=1, n_head=1, n_embd=8)
    model.param_groups = lambda: [dict(params=[model.embed.weight], decay=True, lr_scale=1.0)]
    with pytest.raises(AssertionError, match="every parameter exactly once"):
        train.make_optimizer(model, TrainConfig(), torch.device("cpu"))


def test_weight_decay_and_rates_follow_the_groups():
    model = train.build("value_residual", variant="learnable", n_layer=2, n_head=1, n_embd=8)
    optimizer = train.make_optimizer(model, TrainConfig(weight_decay=0.3), torch.device("cpu"))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay[id(model.blocks[0].wq.weight)] == 0.3
    assert decay[id(model.lam1)] == 0 and decay[id(model.norm.weight)] == 0


def test_a_compiler_that_fails_is_named_and_training_goes_on(run, monkeypatch, capsys):
    def broken(function):
        def call(*args):
            raise RuntimeError("no compiler here\nmore lines")
        return call
    monkeypatch.setattr(kernels, "compiled", broken)
    run("--out_dir=r", "--compile=on", "--max_iters=2")
    said = capsys.readouterr().out
    assert said.count("torch.compile does not work here (RuntimeError: no compiler here)") == 1 and "eager" in said
    run("--out_dir=e", "--compile=off", "--max_iters=2")
    assert losses("r") == losses("e")


def test_help_names_every_setting_with_its_comment(capsys):
    train.main(["--help", "--model=value_residual"])
    said = capsys.readouterr().out
    for cls in (TrainConfig, MODELS["value_residual"][0]):
        for field, _, comment in train.configs.fields(cls):
            assert f"--{field.name}=" in said and comment and comment in said


@pytest.mark.parametrize("number", [getattr(signal, "SIGHUP", None), getattr(signal, "SIGKILL", None)])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals for another process")
def test_a_stopped_or_killed_run_leaves_a_checkpoint_that_resumes(tiny_data, tmp_path, number):
    small = [flag for flag in SMALL if not flag.startswith("--max_iters")]
    command = [sys.executable, str(ROOT / "train.py"), *small, f"--data={tiny_data}", "--max_iters=100000",
               "--lr_decay_iters=100", "--eval_interval=5", f"--out_dir={tmp_path / 'r'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        deadline = time.time() + 120
        while not (tmp_path / "r" / "last.pt").exists() and time.time() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    step = load_checkpoint(tmp_path / "r" / "last.pt").facts["step"]
    if number != signal.SIGKILL:
        assert process.returncode == 130 and f"stopped after step {step}; go on with: python train.py --resume" in said
    train.main(["--resume", f"--out_dir={tmp_path / 'r'}", f"--max_iters={step + 2}"])
    assert load_checkpoint(tmp_path / "r" / "last.pt").facts["step"] == step + 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "feedback"])     # all processes share the exact loss at its end
def test_two_processes_take_the_steps_of_one(run, tiny_data, tmp_path, model):
    common = [*SMALL, f"--data={tiny_data}", "--gradient_accumulation_steps=4", f"--model={model}"]
    train.main([*common, f"--out_dir={tmp_path / 'one'}"])
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                    str(ROOT / "train.py"), *common, f"--out_dir={tmp_path / 'two'}"], check=True, timeout=240,
                   cwd=tmp_path)
    one, two = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("one", "two"))
    for name in one["model"]:
        torch.testing.assert_close(two["model"][name], one["model"][name], rtol=1e-4, atol=1e-5)
    assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-5)
    for step, loss in losses(tmp_path / "one").items():
        assert losses(tmp_path / "two")[step] == pytest.approx(loss, abs=2e-5)
    assert not any("module." in name or "_orig_mod" in name for name in two["model"])
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["best.pt", "last.pt", "log.jsonl"]


@pytest.mark.slow
def test_a_compiled_run_learns_the_same_and_saves_plain_names(run):
    run("--out_dir=e", "--compile=off")
    run("--out_dir=c", "--compile=on")
    for step, loss in losses("e").items():
        assert losses("c")[step] == pytest.approx(loss, abs=1e-4)
    assert load_checkpoint("c").model.state_dict().keys() == load_checkpoint("e").model.state_dict().keys()
