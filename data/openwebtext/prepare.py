"""
Text into token shards: OpenWebText (Gokaslan and Cohen, 2019), or any text of one's own.

    python data/openwebtext/prepare.py --subsets 1                     download the first of 21 archives, then tokenise it
    python data/openwebtext/prepare.py --from texts/ --out data/mine   what is on this disk already
    python train.py --data=data/mine

--from takes a file or a folder, searched in the order of its names, of
    .tar                 OpenWebText's own archives: a tar of xz-compressed tars of .txt pages
    .jsonl, .jsonl.xz    one JSON object a line, its text under "text"
    .parquet             a column "text"; needs pip install pyarrow
    .txt                 one document a file

A document goes to validation if the hash of its bytes is among the lowest 0.0005 of all hashes. So the split depends on
neither the order of the documents nor the number of threads, and copies of one page stay on one side. The same input
gives the same files, byte for byte; after an interruption, run the same command again: finished downloads are kept, half
ones go on where they stopped, the tokenising begins anew.

The whole set, estimated: 13 GB to download, 40 GB of text in 8 million pages, 9 billion tokens in 18 GB of shards; an
hour on 2 cores, a quarter of an hour at best on many, for one thread unpacks; under 1 GB of memory.
"""
import argparse
import hashlib
import os
import shutil
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))               # the project's root, wherever this is started from
from data.openwebtext.sources import ARCHIVES, documents, download, find_files
from data.tokenizers import END_OF_TEXT, tokenizer
from data.tokens import TokenWriter, write_meta

VALIDATION = 0.0005                                    # share of the documents
SEED = b"crosslayer"                                   # of the hash: another one gives another split
SHARD_TOKENS = 100_000_000                             # a shard ends before the document that would make it longer
BATCH_BYTES = 500_000                                  # of text handed to one thread at a time


def draw(document):
    """A number below 2^64 that depends on the document alone and falls anywhere with equal chance."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8, salt=SEED).digest(), "big")


def validation_limit(files):
    """(limit, was it moved): a document drawn below `limit` is held out. If none is, the limit moves above the lowest draw.

    This reads no further than the first document that is held out: of a large set, some 2,000 documents.
    """
    limit, lowest, highest = int(VALIDATION * 2 ** 64), 2 ** 64, -1
    for document in documents(files):
        if document.strip():
            lowest, highest = min(lowest, draw(document)), max(highest, draw(document))
            if lowest < limit <= highest:
                return limit, False
    if lowest >= highest:
        raise ValueError(f"{files[0]} and what follows it hold fewer than two different texts, and one is to be held out: "
                         f"give more, or cut a long text into several files")
    return lowest + 1, True


def tokens_of(document, encoding):
    """(uint16 ids with end of text in front, was the document UTF-8). Bytes that are not UTF-8 become U+FFFD."""
    try:
        text, valid = document.decode("utf-8"), True
    except UnicodeDecodeError:
        text, valid = document.decode("utf-8", "replace"), False
    ids = encoding.encode_to_numpy(text, disallowed_special=())        # a literal <|endoftext|> is plain characters here
    return np.insert(ids.astype(np.uint16), 0, encoding.eot_token), valid


def batches(documents):
    """Lists of documents, each BATCH_BYTES long or as much longer as its last document makes it."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def in_parallel(work, documents, procs):
    """Yield (document, work(document)) in order. `procs` threads work; at most 2 procs + 1 batches are in memory."""
    with ThreadPoolExecutor(procs) as pool:            # threads will do: tiktoken works outside Python's lock
        waiting = deque()
        for batch in batches(documents):
            waiting.append((batch, pool.submit(lambda batch: [work(document) for document in batch], batch)))
            if len(waiting) > 2 * procs:
                batch, results = waiting.popleft()
                yield from zip(batch, results.result())
        for batch, results in waiting:
            yield from zip(batch, results.result())


class Shards:
    """One split as shards openwebtext_SPLIT_000000.bin and on, none longer than SHARD_TOKENS, no document cut in two."""
    def __init__(self, folder, split, number):
        self.folder, self.split, self.number = folder, split, number
        self.out, self.tokens, self.documents = None, 0, 0

    def write(self, ids):
        if self.out and self.out.count + len(ids) > SHARD_TOKENS:
            self.close()
        if self.out is None:
            self.out = TokenWriter(self.folder / f"openwebtext_{self.split}_{self.number:06d}.bin")
            self.number += 1
        self.out.write(ids)
        self.tokens += len(ids)
        self.documents += 1

    def close(self):
        if self.out:
            self.out.close()
            self.out = None


def prepare(files, out, tokenizer_name, procs):
    """Tokenise `files` into the folder `out`. What was there before stays until everything is done."""
    others = [p.name for p in out.glob("*.bin") if not p.name.startswith("openwebtext_")]
    if others:
        raise ValueError(f"{out} already holds {others[0]} of another data set: choose another --out")
    encoding = tokenizer(tokenizer_name)
    limit, moved = validation_limit(files)
    unfinished = out / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)      # of a run that was killed
    unfinished.mkdir(parents=True)
    empty = invalid = literal = 0
    begin = time.perf_counter()
    try:
        with closing(Shards(unfinished, "train", 1)) as train, closing(Shards(unfinished, "val", 0)) as val:
            progress = tqdm(documents(files), unit=" documents")
            for document, (ids, valid) in in_parallel(lambda d: tokens_of(d, encoding), progress, procs):
                if not document.strip():
                    empty += 1
                    continue
                (val if draw(document) < limit else train).write(ids)
                invalid += not valid
                literal += END_OF_TEXT.encode() in document
        seconds = time.perf_counter() - begin

        for old in [out / "meta.json", *out.glob("openwebtext_*.bin")]:
            old.unlink(missing_ok=True)
        for shard in unfinished.iterdir():
            os.replace(shard, out / shard.name)
        write_meta(out, tokenizer_name, end_of_text="before each document",       # last: now the data set is complete
                   documents={"train": train.documents, "val": val.documents},
                   tokens={"train": train.tokens, "val": val.tokens})
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

    print(f"{out}: {train.documents:,} documents ({train.tokens:,} tokens) to train on, {val.documents:,} ({val.tokens:,}) "
          f"held out; {(train.tokens + val.tokens) / seconds / 1e6:.2f} million tokens per second, unpacking included")
    if moved:
        print(f"no document fell into the {VALIDATION:.2%} for validation, so the one with the lowest hash was held out")
    if empty or invalid or literal:
        print(f"left out as empty: {empty:,}; not UTF-8, bad bytes replaced by U+FFFD: {invalid:,}; "
              f"containing {END_OF_TEXT}, kept as plain characters: {literal:,}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Text into token shards.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", dest="source", type=Path, help="a file or folder of text on this disk")
    source.add_argument("--subsets", type=int, choices=range(1, ARCHIVES + 1), metavar="N",
                        help=f"download the first N of the {ARCHIVES} archives of OpenWebText into OUT/archives")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the shards (default: this program's)")
    parser.add_argument("--tokenizer", default="gpt2", choices=["gpt2", "bytes"], help="default: gpt2")
    parser.add_argument("--procs", type=int, default=os.cpu_count(), help="threads that tokenise (default: one a core)")
    args = parser.parse_args(arguments)
    if args.procs < 1:
        parser.error("--procs must be at least 1")
    try:
        if args.out.exists() and not args.out.is_dir():
            raise ValueError(f"--out {args.out} is a file: name a folder")
        if args.subsets:
            files = [download(n, args.out / "archives") for n in range(args.subsets)]
        else:
            files = find_files(args.source)
        prepare(files, args.out, args.tokenizer, args.procs)
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"prepare.py: {error}")
    except KeyboardInterrupt:
        sys.exit("prepare.py: stopped; the same command starts again, keeping what is downloaded")


if __name__ == "__main__":
    main()
