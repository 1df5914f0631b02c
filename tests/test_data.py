"""data/: the tokenizers, the reader and writer of token files, batches, exact windows, the shipped plays."""
import json
import lzma
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import data.tokens
from data import TokenWriter, batch, dataset, open_tokens, read_meta, token_bytes, tokenizer, windows, write_meta

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
EOT = 256


def write(path, ids):
    with TokenWriter(path) as out:
        out.write(np.array(ids, dtype=np.uint16))


def header(*numbers):
    return np.array([*numbers, *[0] * (256 - len(numbers))], dtype="<i4").tobytes()


# ---- tokenizers

def test_gpt2_known_ids():
    gpt2 = tokenizer("gpt2")
    assert gpt2.n_vocab == 50257 and gpt2.eot_token == 50256
    assert gpt2.encode("hello world") == [31373, 995]
    assert gpt2.encode("<|endoftext|>", allowed_special="all") == [50256]
    assert tokenizer("gpt2") is gpt2


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data")
def test_gpt2_equals_tiktoken(tmp_path, monkeypatch):
    import tiktoken
    shutil.copytree(SHARED / "tiktoken_cache", tmp_path / "cache")     # tiktoken deletes cached files that it dislikes
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    theirs, ours = tiktoken.get_encoding("gpt2"), tokenizer("gpt2")
    with lzma.open(SHARED / "openwebtext1000" / "openwebtext-1000.jsonl.xz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    texts += ["", " ", "\n\n  x", "I'll 12 ½ ǅ 漢字 🙂\u3000", "a <|endoftext|> b", " " * 1000, "\r\n\t\x00\x7f"]
    assert [ours.encode_ordinary(text) for text in texts] == [theirs.encode_ordinary(text) for text in texts]
    assert [ours.decode_single_token_bytes(i) for i in range(50257)] == \
           [theirs.decode_single_token_bytes(i) for i in range(50257)]


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_a_million_blanks_are_encoded(name):
    encoding, text = tokenizer(name), "a" + " \n\t " * 250_000 + "b"
    assert encoding.decode(encoding.encode_ordinary(text)) == text


def test_bytes_are_bytes():
    encoding, text = tokenizer("bytes"), "Où? <|endoftext|> 🙂\r\n"
    assert encoding.encode_ordinary(text) == list(text.encode("utf-8"))
    assert encoding.decode(encoding.encode_ordinary(text)) == text
    assert encoding.eot_token == EOT and encoding.n_vocab == 257


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_token_bytes_add_up_to_the_text(name):
    encoding, text = tokenizer(name), "To be, or not to be: ÿ 漢\n"
    lengths = token_bytes(encoding)
    assert lengths.shape == (encoding.n_vocab,) and lengths[encoding.eot_token] == 0
    assert lengths[encoding.encode_ordinary(text)].sum() == len(text.encode("utf-8"))


def test_unknown_tokenizer_and_damaged_merges(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="choose bytes or gpt2"):
        tokenizer("gpt3")
    import bz2
    import data.tokenizers
    (tmp_path / "merges.bz2").write_bytes(bz2.compress(b"#version: 0.2\na b\n"))
    monkeypatch.setattr(data.tokenizers, "MERGES", tmp_path / "merges.bz2")
    with pytest.raises(ValueError, match="restore it with git checkout"):
        data.tokenizers.gpt2_ranks()


# ---- the reader and the writer

def test_writer_makes_the_header_format(tmp_path):
    path = tmp_path / "a_train_0.bin"
    with TokenWriter(path) as out:
        out.write(np.array([1, 2], dtype=np.uint16))
        assert not path.exists()
        out.write(np.array([50256], dtype=np.uint16))
    assert path.read_bytes() == header(20240520, 1, 3) + np.array([1, 2, 50256], dtype="<u2").tobytes()


def test_writer_leaves_nothing_half_written(tmp_path):
    write(tmp_path / "train.bin", [7])
    for bad in (RuntimeError, ValueError):
        with pytest.raises(bad), TokenWriter(tmp_path / "train.bin") as out:
            out.write(np.array([1, 2], dtype=np.uint16))
            if bad is RuntimeError:
                raise bad
            out.write(np.array([70000]))               # int64
    assert [p.name for p in tmp_path.iterdir()] == ["train.bin"]
    assert open_tokens(tmp_path, "train", 257).read(0, 1).tolist() == [7]


def test_both_formats_and_many_shards_read_as_one(tmp_path):
    write(tmp_path / "x_train_000001.bin", range(0, 100))
    np.arange(100, 130, dtype="<u2").tofile(tmp_path / "x_train_000002.bin")       # headerless
    write(tmp_path / "x_train_000003.bin", range(130, 200))
    tokens = open_tokens(tmp_path, "train", 257)
    assert len(tokens) == 200
    for start, stop in (0, 200), (90, 140), (100, 130), (99, 100), (130, 131):
        assert tokens.read(start, stop).tolist() == list(range(start, stop))
    assert tokens.read(0, 1).dtype == np.int64


REFUSED = {
    "empty": (b"", "holds no tokens"),
    "no tokens after the header": (header(20240520, 1, 0), "holds no tokens"),
    "odd": (b"\1\0\2", "odd number of bytes"),
    "cut off in the header": (header(20240520, 1, 5)[:100], "ends inside its header"),
    "cut off": (header(20240520, 1, 5) + bytes(8), "1032 bytes where its header promises 1034"),
    "too long": (header(20240520, 1, 5) + bytes(12), "1036 bytes where its header promises 1034"),
    "version": (header(20240520, 7, 5) + bytes(10), "format version 7"),
    "evaluation set": (header(20240522, 1, 5) + bytes(10), "20240522, an evaluation set"),
    "llama": (header(20240801, 7, 5) + bytes(20), "20240801, llm.c's format for Llama 3"),
    "beyond the vocabulary": (header(20240520, 1, 2) + b"\0\0\1\1", "token id 257 is not below the vocabulary size"),
    "beyond it, deep inside": (bytes(10_000_000) + b"\1\1", "token id 257 .* meta.json"),
}


@pytest.mark.parametrize("content, sentence", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_file_in_one_line(tmp_path, content, sentence):
    (tmp_path / "bad_val.bin").write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as error:
        open_tokens(tmp_path, "val", 257)
    assert "bad_val.bin" in str(error.value) and "\n" not in str(error.value)


def test_a_shard_belongs_to_one_split(tmp_path):
    (tmp_path / "trainval.bin").write_bytes(bytes(20))
    for split in ("train", "val"):
        with pytest.raises(ValueError, match="trainval.bin is named as training and as held-out data"):
            open_tokens(tmp_path, split, 257)


def test_missing_files_and_folders(tmp_path):
    (tmp_path / "is_a_val.bin").mkdir()
    for folder in tmp_path, tmp_path / "nowhere":
        with pytest.raises(ValueError, match=r"no \*train\*.bin in .*prepare.py"):
            open_tokens(folder, "train", 257)
    with pytest.raises(ValueError, match="is_a_val.bin cannot be read"):
        open_tokens(tmp_path, "val", 257)


CHANGES = {
    "cut": (lambda path: os.truncate(path, 1500), "has changed since it was opened"),
    "emptied": (lambda path: path.write_bytes(b""), "has changed since it was opened"),
    "deleted": (lambda path: path.unlink(), "cannot be read"),
    "replaced": (lambda path: (write(path, range(200)), os.utime(path, (1, 1))), "has changed since it was opened"),
}


@pytest.mark.parametrize("change, sentence", CHANGES.values(), ids=CHANGES)
def test_a_shard_that_changes_during_a_run_is_one_line(tmp_path, change, sentence):
    path = tmp_path / "val_and_more.bin"
    write(path, [7] * 500)
    tokens = open_tokens(tmp_path, "val", 257)
    change(path)
    for read in lambda: batch(tokens, 0, 1, batch_size=2, block_size=64), lambda: list(windows(tokens, 64, EOT, 4)):
        with pytest.raises(ValueError, match=f"val_and_more.bin {sentence}.*put it back, or prepare it with") as error:
            read()
        assert "\n" not in str(error.value)


# ---- batches

@pytest.fixture
def three_shards(tmp_path):
    """Ids 0..49, 50..52 (too short for a window of 4) and 53..90: neighbours in a row differ by one."""
    write(tmp_path / "a_train_1.bin", range(50))
    write(tmp_path / "a_train_2.bin", range(50, 53))
    write(tmp_path / "a_train_3.bin", range(53, 91))
    return open_tokens(tmp_path, "train", 257)


def test_batches_never_cross_a_shard_and_reach_every_place(three_shards):
    x, y = batch(three_shards, 0, 1, batch_size=20000, block_size=4)
    assert x.shape == y.shape == (20000, 4) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, x + 1)
    first, count = x[:, 0].unique(return_counts=True)
    assert first.tolist() == [*range(0, 46), *range(53, 87)]           # 46 + 34 places
    assert not any((row < 50).any() and (row >= 50).any() for row in torch.cat([x, y[:, -1:]], 1)[:2000])
    assert 170 < count.min() and count.max() < 340                     # 250 expected at each, sd 16


def test_batches_depend_on_seed_and_step_alone(three_shards):
    first = batch(three_shards, 3, 1, 16, 4)[0]
    assert torch.equal(first, batch(three_shards, 3, 1, 16, 4)[0])
    assert not torch.equal(first, batch(three_shards, 4, 1, 16, 4)[0])
    assert not torch.equal(first, batch(three_shards, 3, 2, 16, 4)[0])


def test_block_longer_than_the_data(three_shards):
    assert batch(three_shards, 0, 1, 2, 49)[0].tolist() == [list(range(49))] * 2
    with pytest.raises(ValueError, match="needs 51 tokens in a row and .* has 50: choose block_size=49"):
        batch(three_shards, 0, 1, 2, 50)


# ---- windows

@pytest.mark.parametrize("begins_with_eot", [True, False])
@pytest.mark.parametrize("length, block", [(1, 8), (7, 8), (8, 8), (9, 8), (40, 8), (45, 8), (45, 1)])
@pytest.mark.parametrize("shards", [1, 3])
def test_windows_cover_every_token_once(tmp_path, begins_with_eot, length, block, shards):
    text = list(range(length))
    held_out = [EOT] * begins_with_eot + text
    for n in range(shards):
        part = held_out[n * len(held_out) // shards:(n + 1) * len(held_out) // shards]
        if part:
            write(tmp_path / f"val_{n}.bin", part)
    tokens, stream = open_tokens(tmp_path, "val", 257), [EOT] + text
    expected = [(stream[k:k + block], stream[k + 1:k + 1 + block]) for k in range(0, length, block)]
    expected[-1] = (stream[:-1][-len(expected[-1][1]):], expected[-1][1])           # the last may be shorter
    for batch_size in 1, 2, 5, 100:
        got = []
        for x, y in windows(tokens, block, EOT, batch_size):
            assert x.shape == y.shape and x.dtype == y.dtype == torch.int64 and len(x) <= batch_size
            got += list(zip(x.tolist(), y.tolist()))
        assert got == expected


# ---- meta.json and the data sets

def test_meta(tmp_path):
    with pytest.raises(ValueError, match="no meta.json"):
        read_meta(tmp_path)
    write_meta(tmp_path, "bytes", end_of_text="before each document")
    assert read_meta(tmp_path) == {"tokenizer": "bytes", "vocab_size": 257, "end_of_text": "before each document"}
    (tmp_path / "meta.json").write_text('{"tokenizer": "gpt2"}', encoding="utf-8")  # written by hand
    assert read_meta(tmp_path)["vocab_size"] == 50257
    for bad in "{", "[]", "{}", '{"tokenizer": "gpt5"}', "[" * 200_000:
        (tmp_path / "meta.json").write_text(bad, encoding="utf-8")
        with pytest.raises(ValueError, match="meta.json is not usable") as error:
            read_meta(tmp_path)
        assert "\n" not in str(error.value)


def test_a_folder_of_nanogpt(tmp_path):
    np.array([11, 50256], dtype="<u2").tofile(tmp_path / "train.bin")
    np.array([12, 13], dtype="<u2").tofile(tmp_path / "val.bin")
    with pytest.warns(UserWarning, match="taking it for nanoGPT's"):
        meta = read_meta(tmp_path)
    assert open_tokens(tmp_path, "train", meta["vocab_size"]).read(0, 2).tolist() == [11, 50256]
    (tmp_path / "meta.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match="pickles are not read"):
        read_meta(tmp_path)


@pytest.fixture
def small_plays(tmp_path, monkeypatch):
    """Plays of 28 bytes, of which byte 25 = floor(0.9 * 28) lies inside a character; their data sets go to tmp_path."""
    (tmp_path / "plays.txt").write_bytes("Enter a ghost. O speak! é.".encode("utf-8") + b"\n")
    monkeypatch.setattr(data.tokens, "PLAYS", tmp_path / "plays.txt")
    return tmp_path


@pytest.mark.parametrize("name, folder", [("plays", "plays_bytes"), ("plays_gpt2", "plays_gpt2")])
def test_plays_are_cut_before_they_are_tokenised(small_plays, name, folder):
    made = dataset(name)
    meta = read_meta(made)
    encoding = tokenizer(meta["tokenizer"])
    for split, text in ("train", "Enter a ghost. O speak! "), ("val", "é.\n"):
        tokens = open_tokens(made, split, meta["vocab_size"])
        assert tokens.read(0, len(tokens)).tolist() == [encoding.eot_token, *encoding.encode_ordinary(text)]
    assert sorted(p.name for p in small_plays.iterdir()) == ["plays.txt", folder]


def test_plays_made_twice_at_once(small_plays, monkeypatch):
    real = os.rename

    def other_process_is_first(partial, folder):
        shutil.copytree(partial, folder)
        real(partial, folder)
    monkeypatch.setattr(os, "rename", other_process_is_first)
    made = dataset("plays")
    assert read_meta(made)["tokenizer"] == "bytes" and len(open_tokens(made, "train", 257)) == 25
    assert sorted(p.name for p in small_plays.iterdir()) == ["plays.txt", "plays_bytes"]


def test_the_shipped_plays():
    made = dataset("plays")
    train, val = (open_tokens(made, split, 257) for split in ("train", "val"))
    assert (len(train), len(val)) == (1 + 1_146_805, 1 + 127_423)      # and together the 1,274,228 bytes of plays.txt
    targets = sum(y.numel() for _, y in windows(val, 128, EOT, 64))
    assert targets == 127_423


def test_a_data_set_is_found_by_its_path_or_by_its_name_in_data(tmp_path, monkeypatch):
    monkeypatch.setattr(data.tokens, "HERE", tmp_path / "data")
    for folder in "data/mine", "data/openwebtext", "elsewhere/mine":
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")                          # where a folder `mine` holds the texts
    write(tmp_path / "data" / "mine" / "train.bin", [1])
    for name in "mine", "data/mine", str(tmp_path / "data" / "mine"):
        assert dataset(name) == tmp_path / "data" / "mine"
    for name, sentence in {"plasy": "choose plays or plays_gpt2, or prepare it with .* --from TEXTS --out plasy",
                           str(tmp_path): "holds no token files: prepare it with .* --from TEXTS --out",
                           "data/openwebtext": "with python data/openwebtext/prepare.py --subsets 1"}.items():
        with pytest.raises(ValueError, match=sentence):
            dataset(name)
