"""
Token files: the reader, the writer, training batches, validation windows, and the shipped plays.

A data set is a folder with shards *train*.bin and *val*.bin and a meta.json that names the tokenizer. Tokens are
little-endian uint16; a shard is one of

    header      256 int32: 20240520, 1, number of tokens, zeros; then the tokens   llm.c, modded-nanogpt, and ours
    headerless  the tokens alone                                                    nanoGPT's train.bin and val.bin

Nothing can be mistaken: read as tokens, the number 20240520 begins with id 55,432, above GPT-2's largest and any byte.
"""
import json
import os
import tempfile
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from data.tokenizers import tokenizer

HEADER_BYTES = 1024
MAGIC = 20240520
FOREIGN = {20240522: "an evaluation set of llm.c (HellaSwag, MMLU), not running text",
           20240801: "llm.c's format for Llama 3, whose ids need 32 bits"}
CHECKED_AT_ONCE = 2 ** 22                              # ids, 8 MB

HERE = Path(__file__).resolve().parent
PLAYS = HERE / "plays.txt"
SHIPPED = {"plays": "bytes", "plays_gpt2": "gpt2"}     # name of the data set: its tokenizer


# ---- the reader ----------------------------------------------------------------------------------------------------

class Shard(NamedTuple):
    path: Path
    offset: int                                        # bytes before its first token
    count: int                                         # tokens
    stamp: tuple                                       # (size, time of the last change) when it was opened


class Tokens:
    """The shards of one split, made by open_tokens.

    A shard is opened for each read and closed after it. It is not memory-mapped: a mapped file that is cut off ends the
    process with a bus error.
    """
    def __init__(self, shards, vocab_size):
        self.shards = shards
        self.vocab_size = vocab_size

    def __len__(self):
        return sum(shard.count for shard in self.shards)

    def rows(self, n, starts, length):
        """`length` tokens of shard n from each of `starts`: uint16 (len(starts), length).

        ValueError if the file is gone or no longer what was opened, or if an id is not in the vocabulary.
        """
        path, offset, _, stamp = self.shards[n]
        rows = np.empty((len(starts), length), dtype="<u2")
        with readable(path) as file:
            for row, start in zip(rows, starts):
                file.seek(offset + 2 * int(start))
                file.readinto(row)
            if stamp_of(file) != stamp:
                raise ValueError(f"{path} has changed since it was opened: put it back, or {how_to_make(path.parent)}")
        if rows.max(initial=0) >= self.vocab_size:
            raise ValueError(f"{path}: token id {rows.max()} is not below the vocabulary size {self.vocab_size}: "
                             f"name the tokenizer that made the file in meta.json")
        return rows

    def read(self, start, stop):
        """Tokens start..stop of all shards laid end to end, int64 (stop - start,)."""
        pieces = []
        for n, shard in enumerate(self.shards):
            first, last = max(start, 0), min(stop, shard.count)
            if first < last:
                pieces.append(self.rows(n, [first], last - first)[0])
            start, stop = start - shard.count, stop - shard.count      # now counted from the next shard
        return np.concatenate(pieces).astype(np.int64)


def open_tokens(folder, split, vocab_size):
    """The Tokens in folder/*split*.bin, `split` being "train" or "val", in the order of their names.

    Every id is checked now, not in the middle of a run: half a second for each GB. A folder or file that cannot be used
    raises a ValueError of one line that says how to mend it.
    """
    paths = sorted(Path(folder).glob(f"*{split}*.bin"))
    if not paths:
        raise ValueError(f"no *{split}*.bin in {folder}: {how_to_make(folder)}")
    for path in paths:
        if "train" in path.name and "val" in path.name:
            raise ValueError(f"{path} is named as training and as held-out data: keep one of the two words")
    tokens = Tokens([open_shard(path) for path in paths], vocab_size)
    for n, shard in enumerate(tqdm(tokens.shards, "checking token ids", unit=" shards", delay=2, leave=False)):
        for start in range(0, shard.count, CHECKED_AT_ONCE):
            tokens.rows(n, [start], min(CHECKED_AT_ONCE, shard.count - start))
    return tokens


def open_shard(path):
    """The Shard at `path`, its header checked against its size."""
    with readable(path) as file:
        header, stamp = np.fromfile(file, dtype="<i4", count=HEADER_BYTES // 4), stamp_of(file)
    size, magic, again = stamp[0], header[0] if len(header) else None, how_to_make(path.parent)
    if magic in FOREIGN:
        raise ValueError(f"{path} has magic {magic}, {FOREIGN[magic]}: take uint16 shards of magic {MAGIC}")
    if magic == MAGIC:
        if size < HEADER_BYTES:
            raise ValueError(f"{path} ends inside its header, it was cut off: {again}")
        if header[1] != 1:
            raise ValueError(f"{path} has format version {header[1]}, and only version 1 is known here: {again}")
        offset, count = HEADER_BYTES, int(header[2])
        if size != offset + 2 * count:
            raise ValueError(f"{path} has {size} bytes where its header promises {offset + 2 * count}: {again}")
    else:
        if size % 2:
            raise ValueError(f"{path} has an odd number of bytes ({size}), so it holds no uint16 tokens: {again}")
        offset, count = 0, size // 2
    if count == 0:
        raise ValueError(f"{path} holds no tokens: {again}")
    return Shard(path, offset, count, stamp)


@contextmanager
def readable(path):
    """The file `path`, open. What the disk or the file system refuses becomes a ValueError of one line."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}): put it back, or "
                         f"{how_to_make(path.parent)}") from None


def stamp_of(file):
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def how_to_make(folder):
    """What makes the data set in `folder`: the end of an error's line."""
    folder = Path(folder)
    if folder.parent == PLAYS.parent and folder.name in {f"plays_{name}" for name in SHIPPED.values()}:
        return f"delete the folder {folder}, which is made again at its next use"
    if folder.resolve() == HERE / "openwebtext":
        return "prepare it with python data/openwebtext/prepare.py --subsets 1 (for owt_124m: --subsets 6)"
    return f"prepare it with python data/openwebtext/prepare.py --from TEXTS --out {folder}"


# ---- batches and windows -------------------------------------------------------------------------------------------

def batch(tokens, step, seed, batch_size, block_size):
    """The whole batch of optimizer step `step`: (x, y), int64, each (batch_size, block_size), y one token ahead of x.

    It depends on (seed, step) and the data alone, so a resumed run, or one on more devices, sees the same tokens. Every
    place where block_size + 1 tokens stand in one shard is equally likely.
    """
    places = np.array([max(shard.count - block_size, 0) for shard in tokens.shards])     # where a window may begin
    if places.sum() == 0:
        longest = max(shard.count for shard in tokens.shards)
        raise ValueError(f"block_size={block_size} needs {block_size + 1} tokens in a row and "
                         f"{tokens.shards[0].path.parent} has {longest}: choose block_size={longest - 1} or less, "
                         f"or give it more text")
    ends = places.cumsum()
    start = np.random.default_rng([seed, step]).integers(ends[-1], size=batch_size)      # counted over all shards
    shard = np.searchsorted(ends, start, side="right")
    start -= (ends - places)[shard]                                                      # counted in its own shard

    rows = np.empty((batch_size, block_size + 1), dtype=np.int64)
    for n in np.unique(shard):
        rows[shard == n] = tokens.rows(n, start[shard == n], block_size + 1)
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
        raise ValueError(f"{tokens.shards[0].path} holds nothing but end of text: prepare it from more text")

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
        """Give the file its header and, once it is on the disk, its name."""
        header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
        header[:3] = MAGIC, 1, self.count
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.partial, self.path)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        try:
            if error is None:
                self.close()
        except OSError as problem:
            problem.filename = problem.filename or str(self.path)
            raise
        finally:
            with suppress(OSError):                    # on a full disk even closing fails
                self.file.close()
            self.partial.unlink(missing_ok=True)


# ---- meta.json -----------------------------------------------------------------------------------------------------

def write_text(path, text):
    """All of it, or nothing but what stood there before: written under another name first, then renamed."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        os.replace(partial, path)
    except OSError as error:
        error.filename = error.filename or str(path)           # a full disk gives no name
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_meta(folder, tokenizer_name, **facts):
    """Write folder/meta.json: the tokenizer, its vocabulary size and further facts. Written last, it says that the data
    set is complete."""
    meta = {"tokenizer": tokenizer_name, "vocab_size": tokenizer(tokenizer_name).n_vocab} | facts
    write_text(Path(folder) / "meta.json", json.dumps(meta, indent=2) + "\n")


def read_meta(folder):
    """folder/meta.json as a dict with at least "tokenizer" and "vocab_size"; for a folder of nanoGPT's, GPT-2's."""
    path = Path(folder) / "meta.json"
    if path.exists():
        try:
            meta = json.loads(path.read_text(encoding="utf-8-sig"))
            encoding = tokenizer(meta["tokenizer"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f'{path} is not usable ({error!r}): it should read {{"tokenizer": "gpt2"}} or '
                             f'{{"tokenizer": "bytes"}}') from None
        return meta | {"vocab_size": encoding.n_vocab}

    names = {p.name for p in Path(folder).glob("*")}
    if "meta.pkl" in names:
        raise ValueError(f"{folder} has its own alphabet in meta.pkl, and pickles are not read here: prepare its text "
                         f"with python data/openwebtext/prepare.py --from TEXTS --tokenizer bytes --out FOLDER")
    if {"train.bin", "val.bin"} <= names:
        warnings.warn(f"{folder} has no meta.json: taking it for nanoGPT's, with GPT-2's tokens", stacklevel=2)
        return {"tokenizer": "gpt2", "vocab_size": tokenizer("gpt2").n_vocab}
    raise ValueError(f'no meta.json in {folder}: if its preparation broke off, run that again; if the shards are '
                     f'whole, write {{"tokenizer": "gpt2"}} into {path}')


# ---- data sets -----------------------------------------------------------------------------------------------------

def dataset(name):
    """The folder of a data set: "plays" and "plays_gpt2", made at their first use, or a folder, also one in data/."""
    if name in SHIPPED:
        folder = PLAYS.parent / f"plays_{SHIPPED[name]}"
        if not folder.exists():
            build_plays(folder, SHIPPED[name])
        return folder
    folders = [folder for folder in (Path(name), HERE / name, HERE.parent / name) if folder.is_dir()]
    for folder in folders:
        if any(folder.glob("*.bin")):
            return folder
    if folders:
        raise ValueError(f"{folders[0]} holds no token files: {how_to_make(folders[0])}")
    raise ValueError(f"no data set {name!r}: choose {' or '.join(SHIPPED)}, or {how_to_make(name)}")


def build_plays(folder, tokenizer_name):
    """The plays as two shards: nine tenths of the bytes to train on, the rest held out; end of text before each.

    The text is cut before it is tokenised, so that every tokenizer is tested on the same bytes. The folder is filled
    under another name and then renamed: of two processes at once, the first one's stays.
    """
    encoding = tokenizer(tokenizer_name)
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.", suffix=".tmp") as partial:
            made = Path(partial) / folder.name
            made.mkdir()
            for split, part in zip(("train", "val"), cut(PLAYS.read_bytes())):
                ids = [encoding.eot_token, *encoding.encode_ordinary(part.decode("utf-8"))]
                with TokenWriter(made / f"plays_{split}_000000.bin") as out:
                    out.write(np.array(ids, dtype=np.uint16))
            write_meta(made, tokenizer_name, end_of_text="before each split")
            os.rename(made, folder)
    except OSError:
        if not folder.exists():
            raise


def cut(text, share=0.1):
    """UTF-8 `text` in two: the last `share` of its bytes, from the beginning of a character, is the second part."""
    place = min(int(len(text) * (1 - share)), len(text) - 1)
    while place > 0 and text[place] & 0b1100_0000 == 0b1000_0000:      # inside a character: go back to its first byte
        place -= 1
    return text[:place], text[place:]
