"""The 18 entries of Table 4 to three decimals, and the parameter counts of its models."""
from types import SimpleNamespace

import pytest
import torch

from model import GPT, GPTConfig, flops_per_token
from tools.table4 import ROWS, SHAPE, T, main, paper_flops, paper_terms


@pytest.mark.parametrize("row", ROWS)
def test_every_entry_is_the_papers(row):
    name, settings, paper = ROWS[row]
    flops = paper_flops(name, SimpleNamespace(**SHAPE, **settings), T)
    assert tuple(round(flops[phase] / 1e9, 3) for phase in ("decode", "prefill", "train")) == paper


def test_another_context_length_would_not_fit():
    """T = 2048 is what the numbers say: 1024 and 4096 give others."""
    for other, decode in ((1024, 0.142), (4096, 0.255)):
        assert round(paper_flops("vanilla", SimpleNamespace(**SHAPE), other)["decode"] / 1e9, 3) == decode


def test_the_terms_beyond_a_lean_run_are_what_makes_the_numbers_fit():
    lckv = paper_terms("lckv", SimpleNamespace(**SHAPE, w=4), T)["prefill"]
    assert round((sum(lckv.values()) - lckv["ignored router"]) / 1e9, 4) == 0.9326
    wm = paper_terms("whitematter", SimpleNamespace(**SHAPE, k=8), T)["train"]
    again = wm["routing and mixing computed again in the backward pass"]
    assert round((sum(wm.values()) - again) / 1e9, 4) == 1.0211


def test_the_vanilla_row_is_what_our_baseline_does():
    ours = flops_per_token(GPTConfig(vocab_size=64, block_size=T, **SHAPE), T)
    paper = paper_flops("vanilla", SimpleNamespace(**SHAPE), T)
    assert {phase: ours[phase] for phase in paper} == paper


@pytest.mark.parametrize("layers, parameters", [(16, 51_924_480), (24, 77_886_464)])
def test_parameters_without_the_embedding(layers, parameters):
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, block_size=T, **SHAPE | dict(n_layer=layers)))
    assert sum(p.numel() for p in model.parameters()) - model.embed.weight.numel() == parameters


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="choose vanilla, fusedkv, lckv or whitematter"):
        paper_flops("yoco", SimpleNamespace(**SHAPE), T)


def test_it_prints_the_table(capsys):
    main()
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("WhiteMatter k=8"))
    assert row.split()[2:] == ["0.177", "0.177", "0.432", "0.432", "1.028", "1.028"]
