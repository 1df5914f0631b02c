"""Small promises of the step loop, each with its number."""
from types import SimpleNamespace

import pytest
import torch

import data
import train
from train import TrainConfig, learning_rate
from trainer.evaluate import evaluate

SMALL = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4", "--sample_tokens=0",
         "--device=cpu"]


def test_the_rate_rises_in_equal_steps_reaches_its_peak_after_the_warm_up_and_falls_to_its_end():
    config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=14)
    assert [learning_rate(config, step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert learning_rate(config, 9) == pytest.approx(0.55) and learning_rate(config, 14) == pytest.approx(0.1)


def test_best_keeps_the_lowest_validation_and_last_the_newest(tiny_data, tmp_path, monkeypatch):
    given = iter([(2.0, 1.0), (3.0, 1.5)])
    monkeypatch.setattr(train, "measure", lambda run, batch_size, windows=None: next(given))
    monkeypatch.setattr(train, "finish", lambda run: None)
    train.main([*SMALL, f"--data={tiny_data}", f"--out_dir={tmp_path / 'r'}", "--max_iters=4", "--eval_interval=2"])
    best, last = (torch.load(tmp_path / "r" / name, weights_only=True) for name in ("best.pt", "last.pt"))
    assert (best["step"], best["val_loss"]) == (2, 2.0)
    assert (last["step"], last["val_loss"], last["best"]) == (4, 3.0, 2.0)


def test_dropout_draws_anew_in_each_step_and_alike_in_a_resumed_one():
    run = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(seed=1337)), rank=0)

    def draw(step):
        train.seed_dropout(run, step)
        return torch.rand(4)
    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))
    other = SimpleNamespace(model=run.model, rank=1)
    train.seed_dropout(other, 3)
    assert not torch.equal(torch.rand(4), draw(3))


def test_validation_drops_nothing_out_and_puts_training_mode_back(tiny_data):
    model = train.build("gpt", n_layer=1, n_embd=16, n_head=2, block_size=16, dropout=0.5)
    tokenizer = data.tokenizer("bytes")
    tokens = data.open_tokens(tiny_data, "val", 257)
    assert evaluate(model.train(), tokens, tokenizer, 4) == evaluate(model.eval(), tokens, tokenizer, 4)
    evaluate(model.train(), tokens, tokenizer, 4)
    assert model.training


@pytest.mark.parametrize("clip, moved", [(1e-3, 1e-3), (0.0, None)])
def test_the_whole_gradient_is_clipped_to_its_norm(tiny_data, tmp_path, monkeypatch, clip, moved):
    """With plain gradient descent a step is as long as the gradient."""
    def descent(model, config, device):
        before.extend(p.detach().clone() for p in model.parameters())
        return torch.optim.SGD([dict(params=list(model.parameters()), lr_scale=1.0)], lr=1.0)
    before = []
    monkeypatch.setattr(train, "make_optimizer", descent)
    monkeypatch.setattr(train, "measure", lambda run, batch_size, windows=None: (1.0, 1.0))
    monkeypatch.setattr(train, "finish", lambda run: None)
    train.main([*SMALL, f"--data={tiny_data}", f"--out_dir={tmp_path / 'r'}", "--max_iters=1", "--warmup_iters=0",
                "--learning_rate=1", f"--grad_clip={clip}"])
    after = train.load_checkpoint(tmp_path / "r").model.parameters()
    length = torch.sqrt(sum((a - b).square().sum() for a, b in zip(after, before))).item()
    assert length == pytest.approx(moved, rel=0.02) if moved else length > 0.1


def test_the_processes_shares_are_the_batch_of_one(tiny_data):
    def share(rank, world):
        return train.micro_batches(SimpleNamespace(
            config=SimpleNamespace(batch_size=2, gradient_accumulation_steps=4), rank=rank, world=world,
            device=torch.device("cpu"), train_tokens=data.open_tokens(tiny_data, "train", 257),
            model=SimpleNamespace(config=SimpleNamespace(seed=1337, block_size=16))), step=3)
    one, two = share(0, 1), (share(0, 2), share(1, 2))
    assert all(torch.equal(x, two[i % 2][i // 2][0]) and torch.equal(y, two[i % 2][i // 2][1])
               for i, (x, y) in enumerate(one))


def test_a_run_with_a_frozen_parameter_goes_on(tiny_data, tmp_path):
    folder = tmp_path / "r"
    frozen = ["--model=whitematter", "--n_layer=2", "--router=depth_causal"]
    train.main([*SMALL, *frozen, f"--data={tiny_data}", f"--out_dir={folder}", "--max_iters=2"])
    train.main(["--resume", f"--out_dir={folder}", "--max_iters=3"])
    assert torch.load(folder / "last.pt", weights_only=True)["step"] == 3
