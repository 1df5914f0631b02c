"""tools/probe: its numbers against hand-computed ones, its patterns against every model's own attention."""
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch

import train
from model import GPT, GPTConfig
from tests.test_contract import ARMS, ids, make
from tools.probe import __main__ as probe
from tools.probe import figures, inside, measures

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=24", "--batch_size=2", "--max_iters=2",
         "--sample_tokens=0", "--device=cpu"]
CAUSAL = torch.ones(512, 512, dtype=torch.bool).tril()


# ---- metrics on hand-made tensors ----------------------------------------------------------------------------------

def test_uniform_causal_attention_has_the_entropy_and_the_first_token_that_it_must():
    """a_j = sum over t >= j of 1/t. At T = 512: entropy 5.818, not ln 512; the first token has 6.8 times the mean."""
    A = measures.uniform(CAUSAL).double()
    a = measures.importance(A)[0]
    by_hand = [sum(1 / t for t in range(j, 513)) for j in range(1, 513)]
    assert a.tolist() == pytest.approx(by_hand, rel=1e-5)
    entropy = -sum(x / 512 * math.log(x / 512) for x in by_hand)
    assert measures.importance_entropy(A).item() == pytest.approx(entropy, rel=1e-6)
    assert round(measures.importance_entropy(A).item(), 3) == 5.818 and round((a[0] / a.mean()).item(), 1) == 6.8
    assert measures.first_mass(A).item() == pytest.approx((by_hand[0] - 1) / 511, rel=1e-5)


def test_a_pure_sink_gives_all_to_the_first_token():
    """Head 0 looks at the first token only, head 1 at itself only: masses 1 and 0, half of the heads are sinks."""
    sink, self_only = torch.zeros(8, 8), torch.eye(8)
    sink[:, 0] = 1
    A = torch.stack((sink, self_only))[None]
    assert measures.first_mass(A).tolist() == [1, 0] and measures.sink_rate(measures.first_mass(A)).item() == 0.5
    assert measures.importance(A)[0].tolist() == [4.5] + [0.5] * 7
    by_hand = -(4.5 / 8 * math.log(4.5 / 8) + 7 * 0.5 / 8 * math.log(0.5 / 8))
    assert measures.importance_entropy(A).item() == pytest.approx(by_hand, rel=1e-6)
    assert measures.importance_entropy(A[:, :1]).item() == 0                 # one token has it all


def test_similarity_is_1_of_equal_states_and_by_hand_of_three_tokens():
    assert measures.token_similarity(torch.randn(1, 1, 9).expand(2, 5, 9)).item() == pytest.approx(1, abs=1e-6)
    h = torch.tensor([[[1.0, 0], [0, 2], [3, 3]]])                       # cosines 0, 1/sqrt 2, 1/sqrt 2
    assert measures.token_similarity(h).item() == pytest.approx(2 ** 0.5 / 3, rel=1e-6)
    assert measures.token_similarity(torch.eye(4)[None]).item() == 0


def test_adjacent_cosine_is_a_mean_over_tokens_by_stream():
    x = torch.tensor([[[[1.0, 0], [0, 1]]], [[[1.0, 0], [1, 1]]]])       # (2 ways, B=1, T=2, D=2)
    below = torch.tensor([[[[2.0, 0], [0, 5]]], [[[0.0, 1], [1, 0]]]])
    assert measures.adjacent_cosine(x, below).tolist() == pytest.approx([1, 0.5 ** 0.5 / 2])


def test_the_first_value_is_measured_against_the_mean_of_the_others_heads_side_by_side():
    v = torch.zeros(1, 2, 3, 2)                                          # norms 5 (3 and 4 in two heads), 2, 8
    v[0, 0, 0, 0], v[0, 1, 0, 1], v[0, 0, 1, 0], v[0, 1, 2, 1] = 3, 4, 2, 8
    assert measures.first_norm(v).item() == 1
    v[0, :, 0] = 0
    assert measures.first_norm(v).item() == 0


def test_a_pattern_by_hand_and_a_token_that_sees_nothing():
    q, k = torch.tensor([[[[2.0], [1.0]]]]), torch.tensor([[[[1.0], [math.log(3)]]]])
    assert inside.pattern(q, k, CAUSAL[:2, :2])[0, 0].tolist()[0] == [1, 0]
    e = [math.e / (math.e + 3), 3 / (math.e + 3)]
    assert inside.pattern(q, k, CAUSAL[:2, :2])[0, 0, 1].tolist() == pytest.approx(e)
    strict = CAUSAL[:2, :2].tril(-1)
    assert inside.pattern(q, k, strict)[0, 0].tolist() == [[0, 0], [1, 0]]
    own = inside.pattern(q, k, CAUSAL[:2, :2], own_k=torch.zeros_like(k))[0, 0, 1]
    assert own.tolist() == pytest.approx([math.e / (math.e + 1), 1 / (math.e + 1)])


# ---- every model ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arm", ARMS)
def test_patterns_from_the_trace_give_the_models_own_attention(arm):
    model = make(arm).double()
    trace, states, given = inside.look(model, ids(2, 20))
    assert len(states) == len(given) + 1 == len(inside.order(model)) + 1 and model.trace is None
    for n, attended in enumerate(given):
        A, u = inside.attention(model, n, trace)
        assert (u - attended).abs().max() < 1e-10
        seen = inside.seen_by(model, n, 20)
        assert not A[..., ~seen].any()
        rows = A.sum(dim=-1)
        if "matrix" not in arm:                                          # whose rows sum to lam1 + lam2
            assert (rows - seen.any(dim=1).double()).abs().max() < 1e-12


@pytest.mark.parametrize("arm", ARMS)
def test_every_model_is_measured(arm):
    result = probe.probe(make(arm), [ids(1, 20), ids(1, 20, seed=3)], probe.tqdm(disable=True))
    N = len(result["entropy"])
    assert len(result["similarity"]) == N + 1 and len(result["mass"]) == len(result["moved_value"]) == N
    assert all(len(values) == N - 1 for values in result["adjacent"].values()) and result["error"] < 1e-5
    assert all(0 <= nats <= math.log(21) for nats in result["entropy"] + result["entropy_uniform"])
    json.dumps(result, allow_nan=False)
    for question in figures.QUESTIONS:
        question.found("x", result | dict(settings={}))
    figures.reads_found("x", result)


@pytest.mark.parametrize("name", ["gpt", "mudd", "whitematter release"])
def test_a_trace_that_does_not_hold_what_is_attended_is_one_clear_error(name, monkeypatch):
    model = make(name, n_kv_head=4)
    plain = inside.attention
    monkeypatch.setattr(probe, "attention", lambda model, n, trace: plain(model, n, trace | dict(q=trace["k"])))
    with pytest.raises(ValueError, match="the trace is not what it attends to"):
        probe.measure(model, ids(1, 20))


def test_a_model_that_does_without_finish_is_one_clear_error():
    class Flat(GPT):
        def layers(self, x, rope, cache=None):
            return x
    model = Flat(GPTConfig(n_layer=1, n_embd=16, n_head=2))
    with pytest.raises(ValueError, match="Flat has blocks whose `finish` is never called"):
        probe.measure(model, ids(1, 20))
    assert model.trace is None and "finish" not in vars(model.blocks[0])


def test_a_layers_own_value_is_told_from_the_mixed_one():
    model = make("value_residual").double()
    trace, _, _ = inside.look(model, ids(2, 20))
    v = [inside.own_value(model, n, trace) for n in range(4)]
    assert torch.equal(v[0], trace["v"][0]) and not torch.allclose(v[2], trace["v"][2])
    assert torch.allclose(0.5 * v[0] + 0.5 * v[2], trace["v"][2], atol=1e-12)
    model = make("mudd").double()                                        # reads its own mixture, and mixes no values
    trace, _, _ = inside.look(model, ids(2, 20))
    assert all(torch.allclose(inside.own_value(model, n, trace), trace["v"][n], atol=1e-12) for n in range(4))
    model = make("whitematter")
    assert inside.own_value(model, 1, inside.look(model, ids(2, 20))[0]) is None


# ---- who reads whom ------------------------------------------------------------------------------------------------

L = 4
UP_TO = [set(range(n + 1)) for n in range(L)]
OWN = [{n} for n in range(L)]
ANY = [set(range(L + 1))] * L
FIRST = [{0, n} for n in range(L)]
READS = {                       # arm: depths read at the own position, of past tokens, and by the head
    "gpt": (OWN, OWN, {L}),
    "value_residual": (FIRST, FIRST, {L}),
    "value_residual svformer": (FIRST, FIRST, {L}),
    "mudd": (UP_TO, UP_TO, set(range(L + 1))),
    "mudd dynamic": ([{0}, {1}, {0, 2}, {1, 3}], [{0}, {1}, {0, 2}, {1, 3}], {0, 2, 4}),
    "depth_attention": ([{0}, {0, 1}, {0, 2}, {0, 2, 3}],) * 2 + ({L},),
    "depth_attention stride 1": (UP_TO, UP_TO, {L}),
    "lime": (UP_TO, UP_TO, {L}),
    "shortcut hidden_half_learned": (FIRST, FIRST, {0, L}),
    "shortcut output": (FIRST, OWN, {L}),                                # V_1 of this token, not moved
    "whitematter": (OWN, [set(range(L))] * L, {L}),                       # h_L is not mixed
    "whitematter release": (OWN, ANY, {L}),
    "whitematter depth_causal": (OWN, UP_TO, {L}),
    "feedback": (OWN, ANY, {L}),
    "feedback cyclic": (OWN, ANY, {L}),
    "lckv": (OWN, [{0}, {2}, {2}, {3}], {L}),                            # layers 1 and 2 are condensed
    "lckv jacobi": (OWN, [{2}, {2}, {2}, {3}], {L}),
    "fusedkv": ([{0}, {1}, {0, 1, 2}, {0, 1, 3}], [{0}, {1}, {0, 1}, {0, 1}], {L}),
    "recurrent": (OWN, [{n + 1} for n in range(L)], {L}),
}


@pytest.mark.parametrize("arm", READS)
def test_the_grid_is_exactly_the_reads_that_the_model_has(arm):
    model = make(arm)
    own, past = inside.direct_reads(model, ids(2, 8))
    expected_own, expected_past, head = READS[arm]
    assert [set(row.nonzero().flatten().tolist()) for row in own] == [*expected_own, head]
    assert [set(row.nonzero().flatten().tolist()) for row in past] == [*expected_past, set()]
    torch.testing.assert_close(own.square().sum(dim=1) + past.square().sum(dim=1), torch.ones(L + 1).double())
    assert not any("finish" in vars(block) for block in model.blocks)    # the model is whole again


def test_a_looped_model_reads_its_layers_earlier_rounds():
    own, past = inside.direct_reads(make("looped", rounds=2), ids(2, 8))             # steps: layers 0, 1, 2, 1, 2, 3
    expected = [{0}, {1}, {2}, {1, 3}, {2, 4}, {5}]
    assert [set(row.nonzero().flatten().tolist()) for row in own] == [*expected, {6}]
    assert [set(row.nonzero().flatten().tolist()) for row in past] == [*expected, set()]


def test_the_strength_of_a_read_is_the_models_own_slope():
    """With one layer whose attention and feed-forward write nothing, the residual is all there is."""
    model = make("gpt", n_layer=1)
    model.blocks[0].wo.weight.data.zero_(), model.blocks[0].w_down.weight.data.zero_()
    own, past = inside.direct_reads(model, ids(2, 8))
    assert own.tolist() == [[1, 0], [0, 1]] and not past.any()


def test_the_schedule_of_a_feedback_model_is_put_back():
    model = make("whitematter")
    inside.direct_reads(model, ids(1, 6))
    assert model.config.schedule == "cyclic"


# ---- tables of weights ---------------------------------------------------------------------------------------------

def table(arm, **overrides):
    model, idx = make(arm, **overrides).double(), ids(1, 12)
    trace, states, _ = inside.look(model, idx)
    return model, trace, states, inside.tables_of(model, trace, states)


def test_connections_are_weight_times_norm_with_their_spread_over_tokens():
    model, trace, states, tables = table("mudd")
    assert list(tables) == list("qkvr")
    A, norm = trace["weights"][1][0, :, 2, 0, 0], states[0].norm(dim=-1).mean()      # after layer 1: v on the embedding
    first, square = tables["v"][:, 2, 0]
    assert first == pytest.approx((A.mean() * norm).item()) and square == pytest.approx(((A * norm) ** 2).mean().item())
    assert tables["v"][0, 2].isfinite().tolist() == [True, True, True, False, False]
    assert tables["r"][0, 4].isfinite().all() and not tables["q"][0, 4].isfinite().any()        # the head reads r alone
    _, _, _, tables = table("mudd static")
    assert list(tables) == ["q, k, v, r"] and tables["q, k, v, r"][1].isnan().all()             # no spread over tokens


def test_depth_weights_sum_to_one_over_their_sources():
    model, trace, _, tables = table("depth_attention")
    first = tables["values"][0]
    assert first.nansum(dim=1).tolist() == pytest.approx([1] * 4)
    assert [set(row.isfinite().nonzero().flatten().tolist()) for row in first] == [{0}, {0, 1}, {0, 2}, {0, 2, 3}]
    assert first[3, 2] == pytest.approx(trace["weights"][3][0, :, 0, :, 1].mean().item())
    _, _, _, tables = table("looped", rounds=2)
    assert [set(row.isfinite().nonzero().flatten().tolist()) for row in tables["values"][0]] == \
        [{0}, {1}, {2}, {1, 3}, {2, 4}, {5}]


def test_the_router_of_whitematter_is_its_own():
    """m_j = sum_l A_jl u_l, projected, must be the channels that its layers have read."""
    model, trace, states, tables = table("whitematter release")
    u = model.values.pre(torch.stack(states, dim=2))
    A = model.values.router(u)
    assert torch.allclose(tables["values"][0], A[0].mean(dim=0)) and tables["keys"].shape == (2, 2, 5)
    m = model.values.post(A @ u)                                         # (B, T, k, D)
    v = (m[:, :, 1] @ model.values.weight[1].T).unflatten(-1, (2, 8)).transpose(1, 2)
    assert torch.allclose(v, trace["v"][1], atol=1e-9)
    _, _, _, tables = table("feedback")
    assert tables["keys and values"][0, 0].tolist() == pytest.approx(make("feedback").w.softmax(0).tolist(), rel=1e-5)
    _, _, _, tables = table("fusedkv lite")
    assert tables["keys"][0, 3, :2].tolist() == [0, 1] and tables["values"][0, 3, :2].tolist() == [1, 0]


def test_lambdas_are_those_of_layers_that_mix():
    assert inside.lambdas(make("value_residual learnable"))["lam1"][:2] == [None, None]         # source = 1
    lam = inside.lambdas(make("value_residual"))
    assert lam == dict(lam1=[None, 0.5, 0.5, 0.5], lam2=[None, 0.5, 0.5, 0.5]) and inside.lambdas(make("mudd")) == {}
    model = make("shortcut hidden_half_learned")
    assert inside.lambdas(model)["lam1"] == model.lam1.tolist()


# ---- what the page says --------------------------------------------------------------------------------------------

def test_a_sink_is_found_and_none_is_said_to_leave_the_claim_untested():
    facts = dict(dummy=False, settings={}, mass_uniform=[0.1, 0.1])
    none = dict(mass=[0.02, 0.04], sink_rate=[0, 0], mass_by_head=[[0.01, 0.03], [0.02, 0.06]]) | facts
    assert figures.sink_found("gpt-1", none) == (
        "gpt-1: the baseline has no sink here (mass on the first token 0.03, sink rate 0; the most of any head is "
        "0.06, in layer 1): that a mechanism removes sinks cannot be tested on this checkpoint.")
    assert "cannot be tested" not in figures.sink_found("m", none | dict(settings=dict(model="mudd")))
    some = dict(mass=[0.02, 0.4], sink_rate=[0, 0.5], mass_by_head=[[0.01, 0.03], [0.02, 0.78]]) | facts
    assert figures.sink_found("x", some | dict(dummy=True)) == \
        "x: 25% of all heads are sinks, most of them in layer 1 (50%); mass on the dummy 0.21."
    T4 = measures.first_mass(measures.uniform(CAUSAL[:4, :4])).item()      # (1/2 + 1/3 + 1/4) / 3: all would be sinks
    assert figures.sink_found("x", some | dict(mass_uniform=[0.1, T4])) == \
        "x: cannot be told in windows this short, where looking at all that is seen alike puts 0.36 on the first " \
        "token; mass on it 0.21."


def test_the_pattern_of_reads_in_words():
    own, past = [[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0.1, 0.2, 0.3], [0.1, 0.2, 0.3], [0, 0, 0]]
    stands = "the depth at which it stands"
    assert figures.reads_found("x", dict(reads=dict(own=own, past=own))) == \
        f"x: at its own position a layer reads {stands}; of past tokens {stands}."
    assert figures.reads_found("x", dict(reads=dict(own=own, past=past))).endswith(
        f"of past tokens {stands} and depths 0, 1, 2, also above its own.")


def test_the_stream_that_changes_most_is_named_only_where_one_does():
    r = dict(adjacent=dict(q=[0.9, 0.9], k=[0.9, 0.8], v=[0.5, 0.6], r=[0.95, 0.95]))
    assert figures.adjacent_found("m", r) == "m: q 0.90, k 0.85, v 0.55, r 0.95 on average; stream v changes most."
    assert "no stream stands out" in figures.adjacent_found("m", dict(adjacent=dict.fromkeys("qkvr", [0.9])))


def test_a_drained_value_is_one_below_half_of_the_others():
    r = dict(own_value=[1, 0.4], moved_value=[1, 0.7])
    assert figures.values_found("x", r) == \
        "x: the least of the moved value is 0.70 (layer 1), of the layer's own 0.40 (layer 1): " \
        "drained, less than half of the others'."
    assert "none of their own" in figures.values_found("x", r | dict(own_value=[None, None]))


def test_one_layer_stands_at_a_whole_number_and_no_line_is_without_a_point(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(figures.pyplot(), "close", drawn.append)
    for values in ([0.5], [0.5] * 40):
        figures.draw_lines(tmp_path / "x.png", [figures.Panel("", "layer", "y", (0, 1), 1, [("gpt", values, 0, 0)])])
    ticks = [figure.axes[0].get_xticks().tolist() for figure in drawn]
    assert ticks == [[1], [1, 6, 11, 16, 21, 26, 31, 36]]
    alone = dict(lambdas=dict(lam1=[None], lam2=[None]), lambdas_trained=False)
    both = dict(a=alone, b=dict(lambdas=dict(lam1=[None, 0.5], lam2=[None, 0.5]), lambdas_trained=False))
    assert [line[0] for line in figures.lambdas(both)[0].lines] == ["b"]


# ---- end to end ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory):
    """Three trained runs of one data set."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("gpt", "mudd", "value_residual"):
        train.main([*SMALL, f"--model={name}", f"--data={tiny_data}", f"--out_dir={folder / name}"])
    train.main([*SMALL, "--block_size=16", f"--data={tiny_data}", f"--out_dir={folder / 'short'}"])
    (folder / "words").mkdir()
    (folder / "words" / "meta.json").write_text('{"tokenizer": "gpt2"}', encoding="utf-8")
    shutil.copy(tiny_data / "val.bin", folder / "words" / "val.bin")
    return folder


def test_one_command_makes_numbers_pictures_and_a_page(runs, tiny_data, tmp_path, capsys):
    probe.main([str(runs / "gpt"), str(runs / "mudd" / "last.pt"), str(runs / "value_residual"), "--windows=3",
                f"--out={tmp_path / 'o'}"])
    out = capsys.readouterr().out
    assert "value_residual" in out and "index.html" in out
    results = json.loads((tmp_path / "o" / "probe.json").read_text(encoding="utf-8"))
    assert list(results) == ["gpt", "mudd", "value_residual"] and results["gpt"]["windows"] == 3
    page = (tmp_path / "o" / "index.html").read_text(encoding="utf-8")
    pictures = {path.name for path in (tmp_path / "o").glob("*.png")}
    assert pictures == {f"{question.name}.png" for question in figures.QUESTIONS} | {"reads.png", "weights_1_mudd.png"}
    assert all(f'<img src="{name}"' in page and (tmp_path / "o" / name).stat().st_size > 5000 for name in pictures)
    assert ("the baseline has no sink here" in page) == (max(results["gpt"]["sink_rate"]) == 0)
    assert "No answer from gpt, mudd: no such quantity" in page           # they have no lambdas
    assert page.count("Look for.") == len(pictures) and results["gpt"]["text"] == str(tiny_data)
    assert f"3 windows of 24 held-out tokens of {tiny_data}. Attention" in page

    model = train.load_checkpoint(runs / "mudd" / "last.pt").model
    tokens = train.data.open_tokens(train.load_checkpoint(runs / "mudd").facts["settings"]["data"], "val", 257)
    windows = [x for x, _ in train.data.windows(tokens, 24, 256, 1)][:3]
    similarity, mass = 0, 0
    for idx in windows:
        trace, states, _ = inside.look(model, idx)
        similarity += measures.token_similarity(states[2]).item() / 3
        mass += measures.first_mass(inside.attention(model, 1, trace)[0]).mean().item() / 3
    assert results["mudd"]["similarity"][2] == pytest.approx(similarity, rel=1e-5)
    assert results["mudd"]["mass"][1] == pytest.approx(mass, rel=1e-5)
    assert results["value_residual"]["lambdas"]["lam1"] == [None, 0.5] and results["mudd"]["lambdas"] == {}
    assert results["gpt"]["reads"]["own"][1][0] == 0 < results["value_residual"]["reads"]["own"][1][0]
    assert set(results["mudd"]["adjacent"]) == set("qkvr") and set(results["gpt"]["adjacent"]) == {"x"}


def test_the_grid_needs_no_run_and_the_one_that_is_shown_is_the_codes(tmp_path):
    probe.main(["--grid", f"--out={tmp_path}"])
    made = json.loads((tmp_path / "who_reads_whom.json").read_text(encoding="utf-8"))
    assert (tmp_path / "who_reads_whom.png").stat().st_size > 5000 and list(made) == probe.MAIN_MODELS
    figure = Path(train.__file__).parent / "docs" / "figures" / "who_reads_whom.json"
    shown = json.loads(figure.read_text(encoding="utf-8"))
    for name in probe.MAIN_MODELS:
        for kind in ("own", "past"):
            cells = [[[bool(value) for value in row] for row in grid[name]["reads"][kind]] for grid in (made, shown)]
            assert cells[0] == cells[1]


def test_without_matplotlib_the_numbers_are_there(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        probe.main([str(runs / "gpt"), "--windows=1", f"--out={tmp_path}"])
    assert "pip install matplotlib" in str(stopped.value.code) and "\n" not in str(stopped.value.code)
    assert json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))["gpt"]["windows"] == 1


@pytest.mark.parametrize("arguments, sentence", [
    (["nothing_here"], "there is no checkpoint"), (["gpt", "--windows=0"], "at least 1"),
    (["gpt", "short"], "block_size 16 and 24"), (["gpt", "gpt"], "named twice"),
    (["gpt", "--window=3"], "did you mean --windows"), (["gpt", "--data=nowhere"], "no data set 'nowhere'"),
    (["gpt", "--data=words"], "was trained on bytes tokens"),
    (["gpt", "--grid"], "leave the runs, --data and --windows out"), (["--windows=2", "--grid"], "reads no text"),
    (["gpt", "--device=tpu"], "choose cpu"), (["gpt", "short/../gpt/best.pt"], "named twice"),
    (["gpt"] * 9, "9 runs are more than there are colours")])
def test_a_mistake_is_answered_with_one_line(runs, tmp_path, arguments, sentence):
    arguments = [argument if argument.startswith("-") else str(runs / argument) for argument in arguments]
    arguments = [argument.replace("=words", f"={runs / 'words'}") for argument in arguments]
    with pytest.raises(SystemExit) as stopped:
        probe.main([*arguments, f"--out={tmp_path / 'o'}"])
    assert sentence in str(stopped.value.code) and "\n" not in str(stopped.value.code)
    assert not (tmp_path / "o").exists()


def test_runs_are_named_by_what_tells_them_apart(runs, monkeypatch):
    def labels(*paths):
        return [label for label, _ in probe.load(paths, probe.ProbeConfig(windows=1))[0]]
    assert labels(runs / "gpt", runs / "mudd") == ["gpt", "mudd"]
    best, last = (str((runs / "gpt" / name).resolve()) for name in ("best.pt", "last.pt"))
    assert labels(best, last) == [best, last]
    shutil.copytree(runs / "gpt", runs / "gpt-2", dirs_exist_ok=True)
    monkeypatch.chdir(runs / "gpt")
    assert labels("best.pt", runs / "gpt-2") == ["gpt", "gpt-2"]          # its folder has a name from within, too


def test_a_place_that_cannot_be_written_is_named(runs, tmp_path):
    (tmp_path / "probe.json").mkdir()
    with pytest.raises(SystemExit, match="probe.json.*Is a directory|Permission|denied"):
        probe.main([str(runs / "gpt"), "--windows=1", f"--out={tmp_path}"])


def test_windows_longer_than_the_text_are_refused(tmp_path):
    import numpy as np
    import data
    for split, count in (("train", 60), ("val", 9)):
        with data.TokenWriter(tmp_path / f"{split}.bin") as out:
            out.write(np.arange(65, 65 + count).astype(np.uint16))
    data.write_meta(tmp_path, "bytes")
    train.main([*SMALL, f"--data={tmp_path}", f"--out_dir={tmp_path / 'r'}"])
    with pytest.raises(SystemExit, match="fewer than the 24 held-out tokens"):
        probe.main([str(tmp_path / "r")])
