"""
Text into token shards: OpenWebText (Gokaslan and Cohen, 2019), or any text of one's own.

    python data/openwebtext/prepare.py --subsets 1                     download the first of 21 archives, tokenise it
    python data/openwebtext/prepare.py --from texts/ --out data/mine   what is on this disk already
    python train.py --data=data/mine

--from takes a file or a folder, searched in the order of its names, of
    .txt        one document a file; UTF-8, or UTF-16 with a byte-order mark
    .jsonl      one JSON object a line, its text under "text"; .json also as one list of such objects
    .parquet    a column "text"; needs pip install pyarrow
    .tar        of .txt files, or of xz-compressed tars of them, as OpenWebText's archives are
Each may be packed (.jsonl.gz, .bz2, .xz, .zst). What is hidden or has another ending is left out, and said.

A document is held out if the hash of its bytes is among the lowest 0.0005 of all hashes. So the split depends on
neither the order of the documents nor the number of threads, and copies of one text stay on one side. Where that draws
less than 100 kB, whole documents are held out up to 100 kB or a tenth of the text; a single document is cut 90/10.

The same input gives the same files, byte for byte. After an interruption, run the same command again: finished
downloads are kept, half ones go on where they stopped, the tokenising begins anew.

The whole set, estimated: 13 GB to download, 40 GB of text in 8 million pages, 9 billion tokens in 18 GB of shards; an
hour on 2 cores, a quarter of an hour at best on many, for one thread unpacks; under 1 GB of memory.
"""
import argparse
import hashlib
import os
import shutil
import sys
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))               # the project's root, wherever this is started from
from data.openwebtext.sources import ARCHIVES, documents, download, find_files, summary
from data.tokenizers import END_OF_TEXT, tokenizer
from data.tokens import TokenWriter, cut, write_meta
from trainer.run_folder import Lock

HELD_OUT = 0.0005                                      # share of a corpus
ENOUGH, TENTH = 100_000, 0.1                           # of a smaller text: so many bytes, or this share if it is less
SEED = b"crosslayer"                                   # of the hash: another one gives another split
SHARD_TOKENS = 100_000_000                             # a shard ends before the document that would make it longer
BATCH_BYTES = 500_000                                  # of text handed to one thread at a time


def draw(document):
    """A number below 2^64 that depends on the document alone and falls anywhere with equal chance."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8, salt=SEED).digest(), "big")


def choose(documents, share=None):
    """The split, as a function: from a document to a list of ("train" or "val", text). `share` is held out, if given.

    Of a large set this reads no more than shows that the hashes draw ENOUGH. Of a small one it reads all, and takes the
    documents of the lowest hashes: first those of about the size wanted, then, if that was too little, longer ones.
    """
    limit = int((share or HELD_OUT) * 2 ** 64)
    sizes, held, seen, text = {}, 0, 0, b""
    for document in documents:
        if document.strip():
            text, number, size = document, draw(document), len(document)
            sizes[number] = sizes.get(number, 0) + size
            seen, held = seen + size, held + size * (number < limit)
            if ENOUGH <= held <= 2 * seen * limit / 2 ** 64 <= seen / 2:       # and no more than twice the share
                return lambda document: [("val" if draw(document) < limit else "train", document)]

    if len(sizes) < 2:
        if not text or not all(part.strip() for part in cut(text, share or TENTH)):
            raise ValueError("there is too little text to hold some of it out: give more")
        return lambda document: list(zip(("train", "val"), cut(document, share or TENTH)))

    wanted, half = seen * share if share else min(seen * TENTH, max(ENOUGH, seen * HELD_OUT)), seen / 2
    chosen, held = set(), 0
    for longest in min(2 * wanted, half), half:
        if held < wanted / 2:
            for number, size in sorted(sizes.items()):
                if held < wanted and held + size <= longest and number not in chosen:
                    chosen.add(number)
                    held += size
    return lambda document: [("val" if draw(document) in chosen else "train", document)]


def tokens_of(document, encoding):
    """(uint16 ids with end of text in front, was the document UTF-8). Bytes that are not UTF-8 become U+FFFD."""
    try:
        text, valid = document.decode("utf-8"), True
    except UnicodeDecodeError:
        text, valid = document.decode("utf-8", "replace"), False
    ids = encoding.encode_to_numpy(text, disallowed_special=())       # a literal <|endoftext|> is plain characters here
    return np.insert(ids.astype(np.uint16), 0, encoding.eot_token), valid


def in_parallel(work, items, procs):
    """Yield (item, work(item)) in order, an item being (split, text). `procs` threads work on what is waiting: at most
    2 procs + 1 times BATCH_BYTES of text, or as much more as one text is longer than that."""
    def do(batch):
        return [(item, work(item)) for item in batch]

    with ThreadPoolExecutor(procs) as pool:            # threads will do: tiktoken works outside Python's lock
        waiting, waiting_bytes, batch, size = deque(), 0, [], 0
        for item in items:
            batch.append(item)
            size += len(item[1])
            if size >= BATCH_BYTES:
                waiting.append((size, pool.submit(do, batch)))
                waiting_bytes, batch, size = waiting_bytes + size, [], 0
            while waiting_bytes > 2 * procs * BATCH_BYTES:
                done, results = waiting.popleft()
                waiting_bytes -= done
                yield from results.result()
        for _, results in waiting:
            yield from results.result()
        yield from do(batch)


class Shards:
    """One split as shards openwebtext_SPLIT_000000.bin and on, at most SHARD_TOKENS long, no document cut in two."""
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


def prepare(files, out, tokenizer_name, procs, share=None):
    """Tokenise `files` into the folder `out`. What was there before stays until everything is done."""
    others = [p.name for p in out.glob("*.bin") if not p.name.startswith("openwebtext_")]
    if others:
        raise ValueError(f"{out} already holds {others[0]} of another data set: choose another --out")
    encoding, split, count = tokenizer(tokenizer_name), choose(documents(files), share), Counter()

    def pieces():
        for document in tqdm(documents(files), unit=" documents"):
            if document.strip():
                yield from split(document)
            else:
                count["empty"] += 1

    out.mkdir(parents=True, exist_ok=True)
    lock = Lock(out, "prepare.lock", "wait until it ends, or name another --out")
    unfinished = out / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)      # of a run that was killed
    unfinished.mkdir()
    begin = time.perf_counter()
    try:
        with closing(Shards(unfinished, "train", 1)) as train, closing(Shards(unfinished, "val", 0)) as val:
            for (part, text), (ids, valid) in in_parallel(lambda piece: tokens_of(piece[1], encoding), pieces(), procs):
                (val if part == "val" else train).write(ids)
                count["invalid"] += not valid
                count["literal"] += END_OF_TEXT.encode() in text
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
        lock.release()

    total = train.tokens + val.tokens
    print(f"{out}: {train.documents:,} documents ({train.tokens:,} tokens) to train on, {val.documents:,} "
          f"({val.tokens:,} tokens, {val.tokens / total:.2%}) held out; {total / seconds / 1e6:.2f} million tokens per "
          f"second, unpacking included")
    if count.total():
        print(f"left out as empty: {count['empty']:,}; not UTF-8, bad bytes replaced by U+FFFD: {count['invalid']:,}; "
              f"containing {END_OF_TEXT}, kept as plain characters: {count['literal']:,}")


def share_of(text):
    """--held_out as a number."""
    try:
        if 0 < float(text) <= 0.5:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no share of the text: give a number such as 0.1, at most 0.5")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Text into token shards.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", dest="source", type=Path, help="a file or folder of text on this disk")
    source.add_argument("--subsets", type=int, choices=range(1, ARCHIVES + 1), metavar="N",
                        help=f"download the first N of the {ARCHIVES} archives of OpenWebText into OUT/archives")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the shards (default: this program's)")
    parser.add_argument("--tokenizer", default="gpt2", choices=["gpt2", "bytes"], help="default: gpt2")
    parser.add_argument("--procs", type=int, default=os.cpu_count(), help="threads that tokenise (default: one a core)")
    parser.add_argument("--held_out", type=share_of, metavar="SHARE",
                        help=f"share of the text to hold out (default: {HELD_OUT}, and more of a small text)")
    parser.error = lambda message: sys.exit(f"prepare.py: {message}")          # one line, without the usage before it
    args = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")      # a file's name may have what the terminal cannot show
    if args.procs < 1:
        parser.error("--procs must be at least 1")
    try:
        if args.out.exists() and not args.out.is_dir():
            raise ValueError(f"--out {args.out} is a file: name a folder")
        if args.subsets:
            files, left_out = [download(n, args.out / "archives") for n in range(args.subsets)], {}
        else:
            files, left_out = find_files(args.source)
        prepare(files, args.out, args.tokenizer, args.procs, args.held_out)
        if left_out:
            print(summary(left_out))
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"prepare.py: {error}")
    except MemoryError:
        sys.exit("prepare.py: out of memory: give --procs=1, or cut the longest text into several files")
    except KeyboardInterrupt:
        sys.exit("prepare.py: stopped; the same command starts again, keeping what is downloaded")


if __name__ == "__main__":
    main()
