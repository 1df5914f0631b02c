"""
What the papers ask of a trained model, each question as a function of a few tensors.

    h        the stream at one depth          (B, T, D)
    A        an attention pattern             (B, H, T, S)   S slots: the tokens, after a dummy token if there is one
    v        the values that A moves          (B, Hkv, S, d)
    first    the first slot

ResFormer: Zhou et al., arXiv 2410.17897. MUDD: Xiao et al., arXiv 2502.12170.
"""
import torch
import torch.nn.functional as F


def token_similarity(h):
    """Over-smoothing (ResFormer): the mean of cos(h_i, h_j) over tokens i != j. h (B, T, D) -> scalar; 1: all alike."""
    u, T = F.normalize(h, dim=-1), h.size(1)
    cosines = u @ u.transpose(1, 2)                                      # (B, T, T)
    return ((cosines.sum(dim=(1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(dim=1)) / (T * (T - 1))).mean()


def adjacent_cosine(x, below):
    """How little a layer changes what is read (MUDD): cos(x_t, below_t), mean over tokens. (..., B, T, D) -> (...)"""
    return F.cosine_similarity(x, below, dim=-1).mean(dim=(-2, -1))


def first_mass(A):
    """Attention mass on the first slot: the mean of A[h, t, 1] over t >= 2. A (B, H, T, S) -> (H,)"""
    return A[:, :, 1:, 0].mean(dim=(0, 2))


def sink_rate(mass):
    """Share of heads whose mass on the first slot is above .3, a convention. mass (..., H) -> (...)"""
    return (mass > 0.3).double().mean(dim=-1)


def first_norm(v):
    """Value-state drain (ResFormer): |v_1| by the mean of |v_j|, j > 1, all heads as one. v (B, Hkv, S, d) -> scalar"""
    norms = v.transpose(1, 2).flatten(2).norm(dim=-1)                    # (B, S)
    return (norms[:, 0] / norms[:, 1:].mean(dim=1)).mean()


def importance(A):
    """a_j = sum_i of A_ij, mean over heads: what slot j is given by all tokens (ResFormer). (B, H, T, S) -> (B, S)"""
    return A.mean(dim=1).sum(dim=1)


def importance_entropy(A):
    """-sum a' ln a' with a' = a / sum a: LOW means that few tokens get it all (ResFormer). (B, H, T, S) -> nats

    Not to be held against ln S: early tokens are seen by more. Uniform causal attention has 5.818 at T = 512."""
    a = importance(A)
    return torch.special.entr(a / a.sum(dim=1, keepdim=True)).sum(dim=1).mean()


def uniform(seen):
    """The pattern that looks at all it may see alike, as a reference. seen (T, S) of bool -> (1, 1, T, S)"""
    return (seen / seen.sum(dim=1, keepdim=True).clamp(min=1))[None, None]
