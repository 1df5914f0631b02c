"""data/openwebtext/prepare.py: every shape of input, the split, bad text, interruptions, the download."""
import gzip
import hashlib
import http.server
import io
import json
import lzma
import random
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

from data import open_tokens, read_meta, tokenizer
from data.openwebtext import prepare, sources

ROOT = Path(__file__).resolve().parents[1]
THOUSAND = ROOT.parent / "shared" / "data" / "openwebtext1000"
SCRIPT = ROOT / "data" / "openwebtext" / "prepare.py"
WORDS = "the king and his fool went out into a storm of rain; who would be wise, must learn to be wet.".split()


def packed(documents):
    """A tar with one member, a tar of `documents`, as OpenWebText's archives are."""
    pages, outer = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=pages, mode="w:xz") as tar:
        for n, text in enumerate(documents):
            add(tar, f"{n:07d}-a.txt", text.encode("utf-8"))
    with tarfile.open(fileobj=outer, mode="w") as tar:
        add(tar, "openwebtext/1_data.xz", pages.getvalue())
    return outer.getvalue()


def add(tar, name, content=b"", **facts):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for fact, value in facts.items():
        setattr(member, fact, value)
    tar.addfile(member, io.BytesIO(content))


def run(source, out, *more):
    prepare.main(["--from", str(source), "--out", str(out), *more])


def texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 60))) for _ in range(count)]


def write_jsonl(path, documents):
    path.write_bytes(jsonl(documents))


def jsonl(documents):
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode("utf-8")


def contents(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def split(folder, name):
    """The documents of one split, as a list of texts."""
    meta = read_meta(folder)
    encoding, tokens = tokenizer(meta["tokenizer"]), open_tokens(folder, name, meta["vocab_size"])
    ids = tokens.read(0, len(tokens)).tolist()
    assert ids[0] == encoding.eot_token                # end of text stands before each document
    return encoding.decode(ids).split("<|endoftext|>")[1:]


# ---- the same tokens from every shape

@pytest.mark.skipif(not THOUSAND.exists(), reason="needs ../shared/data/openwebtext1000")
def test_openwebtext_in_three_shapes(tmp_path):
    seen = []
    for name in "urlsf_subset00.tar", "train-00000-of-00001.parquet", "openwebtext-1000.jsonl.xz":
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow")
        run(THOUSAND / name, tmp_path / name)
        meta = read_meta(tmp_path / name)
        assert sum(meta["tokens"].values()) == 1_054_999 and sum(meta["documents"].values()) == 1000
        seen.append(contents(tmp_path / name))
    assert seen[0] == seen[1] == seen[2]


def test_small_files_of_every_shape(tmp_path, capsys):
    documents = texts(100)
    parts = [documents[n:n + 10] for n in range(0, 100, 10)]
    zst = pytest.importorskip("pyarrow").CompressedOutputStream(tmp_path / "9.jsonl.zst", "zstd")
    zst.write(jsonl(parts[9]))
    zst.close()
    files = {"0.tar": packed(parts[0]), "1.JSONL": b"\xef\xbb\xbf" + jsonl(parts[1]),
             "2.jsonl.xz": lzma.compress(jsonl(parts[2])), "3.jsonl.gz": gzip.compress(jsonl(parts[3])),
             "4.jsonl": jsonl(parts[4]).decode().encode("utf-16"), "5.json": jsonl(parts[5]),
             "6.json": json.dumps([{"text": text} for text in parts[6]], indent=2).encode(),
             "8/7.Txt.gz": gzip.compress("\ufeffWind, café!\r\n".encode("utf-16-le")),
             "9.jsonl.zst": (tmp_path / "9.jsonl.zst").read_bytes()}
    files |= {f"7/{n}.TXT": b"\xef\xbb\xbf" + text.encode() for n, text in enumerate(parts[7])}
    files |= {f"8/{n}.txt": text.encode("utf-32") for n, text in enumerate(parts[8])}
    left_out = {"a.csv": "unknown ending", "7/._1.TXT": "hidden", "__MACOSX": "hidden", ".ipynb_checkpoints": "hidden"}
    for name, content in (files | {"a.csv": b"x", "7/._1.TXT": b"x", "__MACOSX/1.txt": b"x",
                                   ".ipynb_checkpoints/1.txt": b"x"}).items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(content)
    run(tmp_path / "source", tmp_path / "out", "--tokenizer", "bytes")
    documents.insert(87, "Wind, café!\r\n")            # 8/7.Txt.gz comes before 8/7.txt
    held_out, said = split(tmp_path / "out", "val"), capsys.readouterr().out
    assert split(tmp_path / "out", "train") == [text for text in documents if text not in held_out]
    assert set(held_out) < set(documents) and "not UTF-8" not in said
    assert all(f"{tmp_path / 'source' / name} ({why})" in said for name, why in left_out.items())


# ---- the split

def test_the_split_depends_on_neither_order_nor_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1000)
    documents = texts(500)
    documents += documents[:20]                        # copies, which must not be parted
    write_jsonl(tmp_path / "a.jsonl", documents)
    write_jsonl(tmp_path / "b.jsonl", documents[::-1])
    for enough in 10, 10 ** 6:                         # the hash alone decides, and all documents are read before
        monkeypatch.setattr(prepare, "ENOUGH", enough)
        out = tmp_path / str(enough)
        run(tmp_path / "a.jsonl", out / "one", "--held_out=0.1", "--procs", "1")
        run(tmp_path / "a.jsonl", out / "three", "--held_out=0.1", "--procs", "3")
        run(tmp_path / "b.jsonl", out / "backwards", "--held_out=0.1")
        assert contents(out / "one") == contents(out / "three")
        held_out = split(out / "one", "val")
        assert 25 < len(held_out) < 80 and split(out / "backwards", "val") == held_out[::-1]
        assert split(out / "one", "train") == [text for text in documents if text not in held_out]


SMALL = {                                              # the documents' bytes; the least and the most that is held out
    "300 poems": ([500] * 300, 15_000, 15_500),
    "10,033 short documents": ([100] * 10_033, 100_000, 100_500),
    "a book and a note": ([1_000_000, 2000], 2000, 2000),
    "two books and a note": ([1_000_000, 300_000, 2000], 300_000, 302_000),
    "two files": ([600, 400], 400, 400),
    "two of one length": ([500, 500], 500, 500),
    "ten": ([1000] * 10, 1000, 1000),
    "one file": ([10_000], 1000, 1000),
}


@pytest.mark.parametrize("sizes, least, most", SMALL.values(), ids=SMALL)
def test_a_small_text_is_held_out_by_about_a_tenth_and_never_more_than_half(sizes, least, most):
    for seed in range(3):
        rng = random.Random(seed)
        documents = [bytes(rng.choices(b"abcdef", k=size)) for size in sizes]
        halves, choice = {"train": b"", "val": b""}, prepare.choose(documents)
        for document in documents:
            for part, text in choice(document):
                halves[part] += text
        assert least <= len(halves["val"]) <= most and len(halves["train"]) >= len(halves["val"])
        assert len(halves["train"] + halves["val"]) == sum(sizes)


def test_the_share_to_hold_out_can_be_given(tmp_path):
    (tmp_path / "a.txt").write_text("é" * 500 + "a" * 1000, encoding="utf-8")
    run(tmp_path / "a.txt", tmp_path / "out", "--tokenizer=bytes", "--held_out=0.25")
    assert split(tmp_path / "out", "val") == ["a" * 500]
    run(tmp_path / "a.txt", tmp_path / "out", "--tokenizer=bytes")
    assert split(tmp_path / "out", "train") == ["é" * 500 + "a" * 800]
    for bad in "0", "0.6", "nan", "a":
        with pytest.raises(SystemExit, match="is no share of the text: give a number such as 0.1"):
            run(tmp_path / "a.txt", tmp_path / "other", f"--held_out={bad}")


def test_shards_begin_with_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 200)
    write_jsonl(tmp_path / "a.jsonl", texts(60))
    run(tmp_path / "a.jsonl", tmp_path / "out")
    tokens = open_tokens(tmp_path / "out", "train", 50257)
    assert len(tokens.shards) > 5 and tokens.shards[0].path.name == "openwebtext_train_000001.bin"
    assert all(shard.count <= 200 and tokens.rows(n, [0], 1) == 50256 for n, shard in enumerate(tokens.shards))

    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100_000_000)           # prepared again, no old shard is left
    run(tmp_path / "a.jsonl", tmp_path / "out")
    assert len(open_tokens(tmp_path / "out", "train", 50257).shards) == 1
    assert len(split(tmp_path / "out", "train")) + len(split(tmp_path / "out", "val")) == 60


# ---- bad text and bad input

def test_bad_text_is_handled_and_counted(tmp_path, capsys):
    source = tmp_path / "texts"
    source.mkdir()
    for n, content in enumerate([b"", b" \r\n\t", b"caf\xe9 ole", b"x <|endoftext|> y", b"good"]):
        (source / f"{n}.txt").write_bytes(content)
    (source / "f.jsonl").write_bytes(b'{"text": "half \\ud83d of a pair"}\n\n{"text": "raw \xff byte"}\n{"text": ""}\n')
    run(source, tmp_path / "out")
    said = capsys.readouterr().out
    assert "left out as empty: 3; not UTF-8, bad bytes replaced by U+FFFD: 3; containing <|endoftext|>" in said
    assert "kept as plain characters: 1" in said
    meta = read_meta(tmp_path / "out")
    assert sum(meta["documents"].values()) == 5
    ids = []
    for part, count in meta["tokens"].items():
        ids += open_tokens(tmp_path / "out", part, 50257).read(0, count).tolist()
    assert ids.count(50256) == 5                       # the literal one did not become a real one
    assert "caf� ole" in tokenizer("gpt2").decode(ids)


def tar_with(content=b"", **facts):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        add(tar, content=content, **facts)
    return archive.getvalue()


ZEROS = lzma.compress(bytes(10_000_000))
HUGE = tarfile.TarInfo("1.txt")
HUGE.size = 10 ** 13
LONG_NAME = tarfile.TarInfo("x")
LONG_NAME.type, LONG_NAME.size = tarfile.GNUTYPE_LONGNAME, 10 ** 13
HUGE, LONG_NAME = (lzma.compress(member.tobuf(tarfile.GNU_FORMAT)) for member in (HUGE, LONG_NAME))
BAD = {
    "missing": (None, "there is no such file or folder"),
    "a.csv": (b"x", "a.csv .unknown ending., and nothing there ends in .txt"),
    "a.tar": (b"no tar at all", "a.tar cannot be read"),
    "empty.tar": (b"", "empty.tar cannot be read"),
    "link.tar": (tar_with(name="1.xz", type=tarfile.SYMTYPE, linkname="1.xz"), "'1.xz' is a link or a device"),
    "fifo.tar": (tar_with(name="1.xz", type=tarfile.FIFOTYPE), "'1.xz' is a link or a device"),
    "folder.tar": (tar_with(name="1.xz", type=tarfile.DIRTYPE), "too little text"),
    "claims.tar": (tar_with(HUGE, name="1.xz"), "'1.txt' claims 10,000,000,000,000 bytes"),
    "header.tar": (tar_with(LONG_NAME, name="1.xz"), "a header in it claims 10,000,000,000,"),
    "bomb.tar": (tar_with(ZEROS, name="1.xz"), "too little text"),
    "boundary.tar": (packed(["a", "b"])[:1024], "end mark is missing, so it was cut off"),
    "inside.tar": (packed(["a", "b"])[:600], "inside.tar cannot be read .(Compressed file ended|unexpected end)"),
    "a.jsonl": (b'{"text": "x"}\n{"txt": "y"}\n', "line 2 is not of the form"),
    "b.jsonl": (b'[{"text": "x"}, 1]\n', "entry 2 is not of the form"),
    "deep.json": (b"[" * 200_000, "deep.json cannot be read"),
    "deep.jsonl": (b'{"text": ' + b"[" * 200_000, "deep.jsonl cannot be read"),
    "a.jsonl.xz": (lzma.compress(b'{"text": "' + bytes(range(32, 34)) * 9999)[:60], "a.jsonl.xz cannot be read"),
    "a.txt.xz": (lzma.compress(b"x" * 10_000_000), "it unpacks to more than"),
    "b.jsonl.gz": (gzip.compress(b'{"text": "' + b"x" * 10_000_000), "line 1 has more than"),
    "c.txt": ("no mark".encode("utf-16-le"), "c.txt cannot be read .it holds NUL bytes"),
    "d.txt": ("cut".encode("utf-16")[:-1], "d.txt cannot be read .*truncated"),
    "e.txt": (b" \n", "there is too little text"),
    "f.txt": (b"f", "there is too little text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "LARGEST", 2 ** 20)
    content, sentence = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=sentence) as stop:
        run(tmp_path / name, tmp_path / "out")
    assert "\n" not in stop.value.code and not (tmp_path / "out").exists()


def test_an_error_half_way_leaves_the_earlier_data_set(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "good.jsonl", texts(30))
    run(tmp_path / "good.jsonl", tmp_path / "out")
    before = contents(tmp_path / "out")
    write_jsonl(tmp_path / "bad.jsonl", texts(3000))
    with open(tmp_path / "bad.jsonl", "a", encoding="utf-8") as file:
        file.write("not json\n")
    monkeypatch.setattr(prepare, "ENOUGH", 1)          # the first pages suffice
    with pytest.raises(SystemExit, match="line 3001"):
        run(tmp_path / "bad.jsonl", tmp_path / "out", "--held_out=0.1")
    assert contents(tmp_path / "out") == before


def test_parquet(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    parquet.write_table(pyarrow.table({"text": [*texts(9), None, ""]}), tmp_path / "a.parquet")
    run(tmp_path / "a.parquet", tmp_path / "out")
    assert sum(read_meta(tmp_path / "out")["documents"].values()) == 9
    parquet.write_table(pyarrow.table({"content": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(SystemExit, match="its columns are content, none is called text"):
        run(tmp_path / "b.parquet", tmp_path / "other")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(SystemExit, match="pip install pyarrow"):
        run(tmp_path / "a.parquet", tmp_path / "other")


def test_shards_of_another_data_set_are_not_mixed_in(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(5))
    (tmp_path / "train.bin").write_bytes(b"\0\0")
    with pytest.raises(SystemExit, match="already holds train.bin of another data set"):
        run(tmp_path / "a.jsonl", tmp_path)
    with pytest.raises(SystemExit, match="a.jsonl is a file: name a folder"):
        run(tmp_path / "a.jsonl", tmp_path / "a.jsonl")


# ---- as a program

def test_killed_and_run_again_gives_the_same_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(40_000))
    command = [sys.executable, str(SCRIPT), "--from", "a.jsonl", "--out", "out", "--procs", "2"]       # from elsewhere
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    growing = tmp_path / "out" / "unfinished" / "openwebtext_train_000001.bin.tmp"
    while not (growing.exists() and growing.stat().st_size > 100_000):
        assert child.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    child.kill()
    child.wait()
    assert growing.exists() and not (tmp_path / "out" / "meta.json").exists()
    with pytest.raises(ValueError, match="no meta.json"):
        read_meta(tmp_path / "out")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and "held out" in done.stdout
    run(tmp_path / "a.jsonl", tmp_path / "undisturbed")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_a_users_mistake_is_one_line_and_a_bad_status(tmp_path):
    command = [sys.executable, str(SCRIPT), "--from", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "prepare.py: --from nowhere: there is no such file or folder\n"
    assert done.stdout == ""


# ---- the download

class Server(http.server.BaseHTTPRequestHandler):
    """Serves `body` in a given way: see the fixture; notes every range asked for."""
    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append(wanted)
        if self.path != "/urlsf_subset03.tar":
            return self.send_error(404)
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
        if first >= len(server.body) and first:
            return self.send_error(416)
        body = server.body[first:]
        if first and server.at:                        # as many bytes as asked for, but from another place
            body = (server.body + bytes(1024))[server.at:][:len(body)]
        headers = {"ETag": server.etag, "Content-Length": len(body)}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(server.body) - 1}/{len(server.body)}"
        self.send_response(206 if first else 200)
        for name, value in (headers | server.headers).items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        if server.cuts > 0:
            server.cuts -= 1
            body = body[:len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    vars(server).update(body=BODY, etag="one", headers={}, cuts=0, ranges=True, at=None, asked=[])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(sources, "ARCHIVE", f"http://127.0.0.1:{server.server_port}/urlsf_subset{{:02d}}.tar")
    monkeypatch.setattr(sources.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


BODY = tar_with(random.Random(1).randbytes(300_000), name="1.bin")
HALF = len(BODY) // 2


def test_a_cut_download_goes_on_where_it_stopped(server, tmp_path):
    server.cuts = 2
    path = sources.download(3, tmp_path)
    assert path.read_bytes() == BODY and [p.name for p in tmp_path.iterdir()] == ["urlsf_subset03.tar"]
    assert server.asked == [None, f"bytes={HALF}-", f"bytes={HALF + HALF // 2}-"]
    sources.download(3, tmp_path)
    assert len(server.asked) == 3                      # not fetched again


ODD_SERVERS = {
    "without ranges": dict(ranges=False, cuts=1),
    "a part that does not say which": dict(headers={"Content-Range": None}, cuts=1),
    "another part than asked for": dict(headers={"Content-Range": f"bytes {HALF + 512}-{len(BODY) - 1}/{len(BODY)}"},
                                        at=HALF + 512, cuts=1),
    "no length": dict(headers={"Content-Length": None}),
    "no length, and cut": dict(headers={"Content-Length": None}, cuts=2),
    "a length that is no number": dict(headers={"Content-Length": "abc"}, cuts=1),
}


@pytest.mark.parametrize("facts", ODD_SERVERS.values(), ids=ODD_SERVERS)
@pytest.mark.parametrize("stale", [0, 1000, 400_000])
def test_an_odd_server_or_a_stale_part_never_gives_a_wrong_archive(server, tmp_path, facts, stale):
    vars(server).update(facts)
    (tmp_path / "urlsf_subset03.tar.part").write_bytes(bytes(stale))            # of another version
    try:
        assert sources.download(3, tmp_path).read_bytes() == BODY
        assert [p.name for p in tmp_path.iterdir()] == ["urlsf_subset03.tar"]
    except ValueError as error:                        # the server that lies about its first answer too
        assert "sent another part" in str(error) or "bytes came" in str(error)
        assert not (tmp_path / "urlsf_subset03.tar").exists()


def test_a_version_that_changes_half_way_is_fetched_anew(server, tmp_path, monkeypatch):
    other = tar_with(bytes(300_000), name="1.bin")
    monkeypatch.setattr(sources.time, "sleep", lambda n: vars(server).update(etag=n, body=BODY if n else other))
    server.cuts = 1
    assert sources.download(3, tmp_path).read_bytes() == BODY


@pytest.mark.parametrize("body", [b"", b"<html>Please log in</html>", BODY[:512 + 300_032], BODY[:HALF]])
def test_what_is_no_whole_archive_is_one_line_and_is_not_kept(server, tmp_path, body):
    server.body = body
    with pytest.raises(ValueError, match="what came is no whole tar archive.*run the same command again") as error:
        sources.download(3, tmp_path)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_download_that_keeps_failing_is_one_line_and_keeps_its_bytes(server, tmp_path):
    server.cuts = 99
    with pytest.raises(ValueError, match=f"of {len(BODY)} bytes came.*run the same command again") as error:
        sources.download(3, tmp_path)
    part, = tmp_path.iterdir()
    assert "\n" not in str(error.value) and part.suffix == ".part" and part.stat().st_size > 280_000
    with pytest.raises(ValueError, match="HTTP Error 404"):
        sources.download(4, tmp_path)


def test_subsets_downloads_and_tokenises(server, tmp_path, monkeypatch):
    server.body, server.cuts = packed(texts(50)), 1
    monkeypatch.setattr(sources, "ARCHIVE", sources.ARCHIVE.replace("{:02d}", "03"))
    prepare.main(["--subsets", "1", "--out", str(tmp_path)])
    assert sum(read_meta(tmp_path)["documents"].values()) == 50
    assert (tmp_path / "archives" / "urlsf_subset00.tar").exists()
