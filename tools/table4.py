"""
Table 4 of the WhiteMatter paper, recomputed: GFLOPs per token at D = 512, T = 2048. `python -m tools.table4` prints its
18 entries beside ours, and the terms that they are made of.

The paper's accounting (Zhang and Ren, arXiv 2608.18486; the terms were worked out from the 18 numbers and the authors'
code): 2 FLOPs for a multiply-add; only pairs that a token may see, 4 Hq d forward and 10 Hq d backward for each (the
scores are computed again); a matrix product's backward costs twice its forward. The embedding, the head, norms, softmax
and rotation are left out. What our own code does is `flops_per_token` of each model file; it needs less in places.
"""
from types import SimpleNamespace

from trainer.console import program

SHAPE = dict(n_layer=16, n_head=6, n_kv_head=3, head_dim=96, n_embd=512, d_ff=1536)
T = 2048
ROWS = {   # row: model, its settings, the paper's decode, prefill, training
    "Vanilla 16L":       ("vanilla", {}, (0.179, 0.142, 0.444)),
    "FusedKV":           ("fusedkv", {}, (0.203, 0.071, 0.429)),
    "LCKV w=4":          ("lckv", dict(w=4), (0.173, 0.935, 1.421)),
    "LCKV w=7":          ("lckv", dict(w=7), (0.175, 0.738, 1.174)),
    "WhiteMatter k=8":   ("whitematter", dict(k=8), (0.177, 0.432, 1.028)),
    "WhiteMatter k=16":  ("whitematter", dict(k=16), (0.184, 0.467, 1.111)),
}


def paper_terms(name, config, T):
    """{"train" | "prefill" | "decode": {term: FLOPs per token}} in the paper's accounting.

    `name` is vanilla, fusedkv, lckv (config.w warm-up layers) or whitematter (config.k channels); `config` has the
    dimensions of a GPTConfig. Prefill and training are over T tokens, decoding is behind T others.
    """
    L, D, kv = config.n_layer, config.n_embd, config.n_kv_head * config.head_dim
    body = 4 * D * config.n_head * config.head_dim + 6 * D * config.d_ff           # W^Q, W^O and SwiGLU of one layer
    kvp = 4 * D * kv                                                               # W^K and W^V of one layer
    pair, pair_back = 4 * config.n_head * config.head_dim, 10 * config.n_head * config.head_dim
    seen, past = (T + 1) / 2, (T - 1) / 2                # mean visible tokens: with oneself (or a dummy), and without

    if name == "vanilla":
        return dict(
            decode={"layers": L * (body + kvp), "attention": L * pair * (T + 1)},
            prefill={"layers": L * (body + kvp), "attention": L * pair * seen},
            train={"layers": 3 * L * (body + kvp), "attention": L * (pair + pair_back) * seen})

    if name == "fusedkv":                                # the lower half stores keys and values, the upper fuses them
        n, fuse = L // 2, 6 * (L // 2) * kv
        return dict(
            decode={"layers": L * body + n * kvp, "attention": L * pair * (T + 1),
                    "fusing the whole cache again": fuse * (T + 1)},
            prefill={"lower layers": n * (body + kvp), "their attention": n * pair * seen, "fusing": fuse,
                     "upper layers, last token only": n * (body + pair * T) / T},
            train={"layers": 3 * (L * body + n * kvp), "attention": L * (pair + pair_back) * seen, "fusing": 3 * fuse})

    if name == "lckv":                                   # w ordinary layers once, M condensed ones in 7 + 2 passes
        w, M = config.w, L - config.w
        layers, attention = M * body, M * pair * past    # of one pass
        project, norms_and_mix, router = kvp, 4 * M * D, 4 * M * M * D
        pool = project + norms_and_mix + router          # the router's result is ignored, and counted
        back = 2 * M * body + M * pair_back * past + 2 * (M - 1) * body + (M - 1) * pair_back * past
        return dict(
            decode={"warm-up": w * (body + kvp + pair * (T + 1)), "block": layers + M * pair * T, "pool": pool - router,
                    "ignored router": router},
            prefill={"warm-up": w * (body + kvp + pair * seen), "9 passes": 9 * (layers + attention),
                     "9 pools": 9 * (pool - router), "ignored router": 9 * router},
            train={"warm-up": w * (3 * (body + kvp) + (pair + pair_back) * seen), "9 passes": 9 * (layers + attention),
                   "9 pools": 9 * (pool - router), "2 backward passes, one without the top layer": back,
                   "2 pools backward": 4 * (pool - router), "ignored router": 13 * router})

    if name == "whitematter":                            # 1 + 2 passes, 8 groups, dummy slot, router stride 2
        k, sources = config.k, -(-L // 2)
        route, mix, project = 4 * sources * D * k * L, 4 * L * k * D, k * kvp
        pool, layers, attention = route + mix + project, L * body, L * pair * seen
        back = 2 * (2 * L * body + L * pair_back * seen) - (2 * body + pair_back * seen)
        return dict(
            decode={"layers": layers, "attention": L * pair * (T + 1), "pool": pool},
            prefill={"3 passes": 3 * (layers + attention), "3 pools": 3 * pool,
                     "first pool of the embeddings": pool, "pool again at the gradient boundary": pool},
            train={"3 passes": 3 * (layers + attention), "3 pools": 3 * pool,
                   "first pool of the embeddings": pool, "pool again at the gradient boundary": pool,
                   "2 backward passes, one without the top layer": back,
                   "3 pools backward, the last without its last group": 6 * pool - 2 * pool / 8,
                   "routing and mixing computed again in the backward pass": 3 * (route + mix)})

    raise ValueError(f"{name!r} is not in Table 4: choose vanilla, fusedkv, lckv or whitematter")


def paper_flops(name, config, T):
    """{"train", "prefill", "decode"}: FLOPs per token in the paper's accounting, the sums of `paper_terms`."""
    return {phase: sum(terms.values()) for phase, terms in paper_terms(name, config, T).items()}


@program("table4")
def main():
    print(f"GFLOPs per token, T={T}, " + ", ".join(f"{name}={value}" for name, value in SHAPE.items()))
    print(f"\n{'':<18}{'decode':>8}{'paper':>8}{'prefill':>9}{'paper':>8}{'train':>8}{'paper':>8}")
    for row, (name, settings, paper) in ROWS.items():
        flops = paper_flops(name, SimpleNamespace(**SHAPE, **settings), T)
        decode, prefill, train = (flops[phase] / 1e9 for phase in ("decode", "prefill", "train"))
        print(f"{row:<18}{decode:8.3f}{paper[0]:8.3f}{prefill:9.3f}{paper[1]:8.3f}{train:8.3f}{paper[2]:8.3f}")
    for row, (name, settings, _) in ROWS.items():
        print(f"\n{row}")
        for phase, terms in paper_terms(name, SimpleNamespace(**SHAPE, **settings), T).items():
            for term, flops in terms.items():
                print(f"  {phase:<8} {flops / 1e9:7.4f}  {term}")


if __name__ == "__main__":
    main()
