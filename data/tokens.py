"""
Token files: the reader, the writer, training batches, validation windows, and the shipped plays.

A data set is a folder with shards *train*.bin and *val*.bin and a meta.json that names the tokenizer. Tokens are
little-endian uint16; a shard is one of

    header      256 int32: 20240520, 1, number of tokens, zeros; then the tokens    llm.c, modded-nanogpt, and what we write
    headerless  the tokens alone                                                     nanoGPT's train.bin and val.bin

Nothing can be mistaken: read as tokens, the number 20240520 begins with id 55,432, above GPT-2's largest and any byte.
"""
import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch

from data.tokenizers import tokenizer

HEADER_BYTES = 1024
MAGIC = 20240520
FOREIGN = {20240522: "an evaluation set of llm.c (HellaSwag, MMLU), not running text",
           20240801: "llm.c's format for Llama 3, whose ids need 32 bits"}
CHECKED_AT_OPENING = 4096                              # ids; every id is checked again when it is used

PLAYS = Path(__file__).parent / "plays.txt"
SHIPPED = {"plays": "bytes", "plays_gpt2": "gpt2"}     # name of the data set: its tokenizer


# ---- the reader ----------------------------------------------------------------------------------------------------

class Tokens:
    """The shards of one split, made by open_tokens: a list of (path, byte offset of its first token, number of tokens).

    A page read through a memory map counts as this process's memory until the map is closed, so a map kept open would
    slowly grow to the size of the file. Hence a map lives for one read only; opening one takes about 50 microseconds.
    """
    def __init__(self, shards, vocab_size):
        self.shards = shards
        self.vocab_size = vocab_size

    def __len__(self):
        return sum(count for _, _, count in self.shards)

    def map(self, n):
        """Shard n as a read-only memory map, uint16 (number of tokens,). Drop it soon."""
        path, offset, count = self.shards[n]
        return np.memmap(path, dtype="<u2", mode="r", offset=offset, shape=count)

    def copy(self, n, ids, start, stop):
        """Tokens start..stop of shard n, int64; `ids` is the shard's map. ValueError if one is not in the vocabulary."""
        piece = ids[start:stop].astype(np.int64)
        if piece.max(initial=0) >= self.vocab_size:
            raise ValueError(f"{self.shards[n][0]}: token id {piece.max()} is not below the vocabulary size "
                             f"{self.vocab_size}: name the tokenizer that made the file in meta.json")
        return piece

    def read(self, start, stop):
        """Tokens start..stop of all shards laid end to end, int64 (stop - start,)."""
        pieces = []
        for n, (_, _, count) in enumerate(self.shards):
            if start < count and stop > 0:
                pieces.append(self.copy(n, self.map(n), max(start, 0), min(stop, count)))
            start, stop = start - count, stop - count              # now counted from the next shard
        return np.concatenate(pieces)


def open_tokens(folder, split, vocab_size):
    """The Tokens in folder/*split*.bin, `split` being "train" or "val", in the order of their names.

    Reads the headers and the first 4096 ids of each shard. A folder or file that cannot be used raises a ValueError of
    one line that says how to mend it.
    """
    paths = sorted(Path(folder).glob(f"*{split}*.bin"))
    if not paths:
        raise ValueError(f"no *{split}*.bin in {folder}: prepare it with python data/openwebtext/prepare.py "
                         f"--from TEXTS --out {folder}")
    for path in paths:
        if "train" in path.name and "val" in path.name:
            raise ValueError(f"{path} is named as training and as held-out data: keep one of the two words")
    tokens = Tokens([(path, *shard_layout(path)) for path in paths], vocab_size)
    for n, (_, _, count) in enumerate(tokens.shards):
        tokens.copy(n, tokens.map(n), 0, min(count, CHECKED_AT_OPENING))
    return tokens


def shard_layout(path):
    """(byte offset of the first token, number of tokens) of a shard, its header checked against its size."""
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
    magic = int(header[0]) if len(header) else None
    if magic in FOREIGN:
        raise ValueError(f"{path} has magic {magic}, {FOREIGN[magic]}: take uint16 shards of magic {MAGIC}")
    if magic == MAGIC:
        if size < HEADER_BYTES:
            raise ValueError(f"{path} ends inside its header: it was cut off, fetch or prepare it again")
        if header[1] != 1:
            raise ValueError(f"{path} has format version {header[1]}: only version 1 is known here, prepare it again")
        offset, count = HEADER_BYTES, int(header[2])
        if size != offset + 2 * count:
            raise ValueError(f"{path} has {size} bytes where its header promises {offset + 2 * count}: "
                             f"it was cut off or damaged, fetch or prepare it again")
    else:
        if size % 2:
            raise ValueError(f"{path} has an odd number of bytes ({size}), so it is not a file of uint16 tokens: "
                             f"fetch or prepare it again")
        offset, count = 0, size // 2
    if count == 0:
        raise ValueError(f"{path} holds no tokens: fetch or prepare it again")
    return offset, count


# ---- batches and windows -------------------------------------------------------------------------------------------

def batch(tokens, step, seed, batch_size, block_size):
    """The whole batch of optimizer step `step`: (x, y), int64, each (batch_size, block_size), y one token ahead of x.

    It depends on (seed, step) and the data alone, so a resumed run, or one on more devices, sees the same tokens. Every
    place where block_size + 1 tokens stand in one shard is equally likely.
    """
    places = np.array([max(count - block_size, 0) for _, _, count in tokens.shards])     # where a window may begin
    if places.sum() == 0:
        longest = max(count for _, _, count in tokens.shards)
        raise ValueError(f"block_size={block_size} needs {block_size + 1} tokens in a row and {tokens.shards[0][0].parent} "
                         f"has {longest}: choose block_size={longest - 1} or less, or give it more text")
    ends = places.cumsum()
    start = np.random.default_rng([seed, step]).integers(ends[-1], size=batch_size)      # counted over all shards
    shard = np.searchsorted(ends, start, side="right")
    start -= (ends - places)[shard]                                                      # counted in its own shard

    rows = np.empty((batch_size, block_size + 1), dtype=np.int64)
    for n in np.unique(shard):                                                           # each shard is mapped once
        ids = tokens.map(n)
        for row in np.flatnonzero(shard == n):
            rows[row] = tokens.copy(n, ids, start[row], start[row] + block_size + 1)
    rows = torch.from_numpy(rows)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def windows(tokens, block_size, eot, batch_size):
    """Yield (x, y), int64, (at most batch_size, block_size), so that each held-out token is a target exactly once.

    The stream is the shards laid end to end, with end of text (id `eot`) put in front unless it stands there already:
    that first token is never a target. Window k reads stream[kT : (k+1)T], T = block_size, and predicts one token
    ahead. The last, shorter window comes alone, as (1, rest). The windows are the same for every batch_size.
    """
    added = 0 if tokens.read(0, 1)[0] == eot else 1
    targets = len(tokens) + added - 1
    if targets == 0:
        raise ValueError(f"{tokens.shards[0][0]} holds nothing but end of text: prepare it from more text")

    whole, step = targets // block_size * block_size, batch_size * block_size
    chunks = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    if whole < targets:
        chunks.append((whole, targets))
    for start, stop in chunks:
        stream = tokens.read(max(start - added, 0), stop - added + 1)
        if start == 0 and added:
            stream = np.concatenate([[eot], stream])
        stream, width = torch.from_numpy(stream), min(block_size, stop - start)
        yield stream[:-1].view(-1, width), stream[1:].view(-1, width)


# ---- the writer ----------------------------------------------------------------------------------------------------

class TokenWriter:
    """`with TokenWriter(path) as out: out.write(ids)`, as often as needed: a shard in the header format.

    The file bears its name only when it is complete and on the disk; until then, and for good after an error, there is
    nothing at `path` but what stood there before.
    """
    def __init__(self, path):
        self.path, self.partial = Path(path), Path(f"{path}.tmp")
        self.count = 0
        self.file = open(self.partial, "wb")
        self.file.write(bytes(HEADER_BYTES))           # filled in at the end, when the count is known

    def write(self, ids):
        """Append an array of uint16 ids."""
        if ids.dtype != np.uint16:
            raise ValueError(f"token ids must be uint16, not {ids.dtype}: 65,535 is the largest id a shard can hold")
        self.file.write(ids.astype("<u2", copy=False).tobytes())
        self.count += len(ids)

    def close(self):
        header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
        header[:3] = MAGIC, 1, self.count
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.partial, self.path)

    def discard(self):
        self.file.close()
        self.partial.unlink(missing_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        self.close() if error is None else self.discard()


# ---- meta.json -----------------------------------------------------------------------------------------------------

def write_text(path, text):
    """All of it, or nothing but what stood there before: written under another name first, then renamed."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8", newline="\n")
    os.replace(partial, path)


def write_meta(folder, tokenizer_name, **facts):
    """Write folder/meta.json: the tokenizer, its vocabulary size and further facts for the reader. Written last, it says
    that the data set is complete."""
    meta = {"tokenizer": tokenizer_name, "vocab_size": tokenizer(tokenizer_name).n_vocab} | facts
    write_text(Path(folder) / "meta.json", json.dumps(meta, indent=2) + "\n")


def read_meta(folder):
    """folder/meta.json as a dict with at least "tokenizer" and "vocab_size"; for a folder of nanoGPT's, GPT-2's."""
    path = Path(folder) / "meta.json"
    if path.exists():
        try:
            meta = json.loads(path.read_text(encoding="utf-8-sig"))
            encoding = tokenizer(meta["tokenizer"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{path} is not usable ({error!r}): it should read {{"tokenizer": "gpt2"}} or '
                             f'{{"tokenizer": "bytes"}}') from None
        return meta | {"vocab_size": encoding.n_vocab}

    names = {p.name for p in Path(folder).glob("*")}
    if "meta.pkl" in names:
        raise ValueError(f"{folder} has its own alphabet in meta.pkl, and pickles are not read here: prepare its text with "
                         f"python data/openwebtext/prepare.py --from TEXTS --tokenizer bytes --out FOLDER")
    if {"train.bin", "val.bin"} <= names:
        warnings.warn(f"{folder} has no meta.json: taking it for nanoGPT's, with GPT-2's tokens", stacklevel=2)
        return {"tokenizer": "gpt2", "vocab_size": tokenizer("gpt2").n_vocab}
    raise ValueError(f'no meta.json in {folder}: if its preparation broke off, run that again; if the shards are whole, '
                     f'write {{"tokenizer": "gpt2"}} into {path}')


# ---- data sets -----------------------------------------------------------------------------------------------------

def dataset(name):
    """The folder of a data set: "plays" and "plays_gpt2" are made at their first use, any other name is itself a folder."""
    if name in SHIPPED:
        folder = PLAYS.parent / f"plays_{SHIPPED[name]}"
        if not folder.exists():
            build_plays(folder, SHIPPED[name])
        return folder
    if Path(name).is_dir():
        return Path(name)
    raise ValueError(f"no data set {name!r}: choose {' or '.join(SHIPPED)}, or a folder made by "
                     f"python data/openwebtext/prepare.py --from TEXTS --out {name}")


def build_plays(folder, tokenizer_name):
    """The plays as two shards: the first nine tenths of the bytes to train on, the rest held out; end of text before each.

    The text is cut before it is tokenised, so that every tokenizer is tested on the same bytes. A folder is filled under
    a name of this process's own and then renamed: of two processes at once, the first one's stays.
    """
    text = PLAYS.read_bytes()
    cut = len(text) * 9 // 10
    while text[cut] & 0b1100_0000 == 0b1000_0000:      # inside a character of several bytes: go back to its first
        cut -= 1

    encoding = tokenizer(tokenizer_name)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    partial.mkdir()
    for split, part in ("train", text[:cut]), ("val", text[cut:]):
        ids = [encoding.eot_token, *encoding.encode_ordinary(part.decode("utf-8"))]
        with TokenWriter(partial / f"plays_{split}_000000.bin") as out:
            out.write(np.array(ids, dtype=np.uint16))
    write_meta(partial, tokenizer_name, end_of_text="before each split")
    try:
        os.rename(partial, folder)
    except OSError:
        shutil.rmtree(partial)
        if not folder.exists():
            raise
