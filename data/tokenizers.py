"""
The two tokenizers, both tiktoken.Encodings built from what lies in this folder, with no network.

    bytes   a token is one byte of the UTF-8 text, its id the byte's value; 256 is end of text; 257 ids
    gpt2    GPT-2's byte-pair encoding; 50256 is end of text; 50257 ids, the same as tiktoken's own "gpt2"

Byte-pair encoding starts from single bytes and glues neighbours: of all neighbouring pairs in a piece of text, the pair
that was learned first (the lowest rank) is merged, until no known pair is left. A token's id is its rank.
"""
import bz2
import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import tiktoken

END_OF_TEXT = "<|endoftext|>"
MERGES = Path(__file__).parent / "gpt2_merges.bpe.bz2"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"     # of the unpacked text

# Text is cut into pieces first, and no merge crosses a cut: endings such as 'll, then a run of letters, of digits or of
# other signs, each with the space before it, then white space. A doubled ++ never gives back what it has matched: the
# same pieces as a plain +, found faster. White space is cut after 10,000 characters, for tiktoken fails on a million.
GPT2_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s{1,10000}(?!\S)|\s"


@cache
def tokenizer(name):
    """The tiktoken.Encoding called `name`, "bytes" or "gpt2"; its `eot_token` is the id of end of text."""
    if name == "bytes":
        ranks, pieces = {bytes([b]): b for b in range(256)}, r"\p{L}+|\P{L}+"      # any cut will do: nothing merges
    elif name == "gpt2":
        ranks, pieces = gpt2_ranks(), GPT2_PIECES
    else:
        raise ValueError(f"unknown tokenizer {name!r}: choose bytes or gpt2")
    return tiktoken.Encoding(name, pat_str=pieces, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)},
                             explicit_n_vocab=len(ranks) + 1)


def gpt2_ranks():
    """GPT-2's tokens, each as bytes, with its rank: 256 single bytes, then the 50,000 merges, first learned first."""
    text = bz2.decompress(MERGES.read_bytes())
    if hashlib.sha256(text).hexdigest() != MERGES_SHA256:
        raise ValueError(f"{MERGES} is not GPT-2's list of merges: restore it with git checkout {MERGES.name}")

    # The file writes a byte as one visible character: as itself where it has a printable one in Latin-1, and as
    # character 256, 257, ... where it has none (the space becomes 'Ġ'). The printable bytes also take the first ranks.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(hidden)}

    ranks = {bytes([b]): rank for rank, b in enumerate(printable + hidden)}
    for line in text.decode("utf-8").splitlines()[1:]:                             # line 0 is a version
        merged = bytes(byte_of[character] for character in line.replace(" ", ""))  # "left right"
        ranks[merged] = len(ranks)
    return ranks


def token_bytes(encoding):
    """How many bytes of text each token id stands for, int64 (n_vocab,); 0 for end of text, which is no text.

    Bits per byte = nats summed over the targets that are text / ln 2 / their bytes.
    """
    lengths = [len(encoding.decode_single_token_bytes(i)) for i in range(encoding.n_vocab)]
    lengths[encoding.eot_token] = 0
    return np.array(lengths, dtype=np.int64)
