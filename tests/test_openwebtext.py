"""data/openwebtext/prepare.py: every shape of input, the split, bad text, interruptions, the download."""
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


def run(source, out, *more):
    prepare.main(["--from", str(source), "--out", str(out), *more])


def texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 60))) for _ in range(count)]


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


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


def test_small_files_of_every_shape(tmp_path):
    documents = texts(40)
    source = tmp_path / "source"
    source.mkdir()
    pages = io.BytesIO()
    with tarfile.open(fileobj=pages, mode="w:xz") as inner:
        for n, text in enumerate(documents[:10]):
            page = tarfile.TarInfo(f"{n:07d}-a.txt")
            page.size = len(text)
            inner.addfile(page, io.BytesIO(text.encode("utf-8")))
    with tarfile.open(source / "1.tar", "w") as outer:
        part = tarfile.TarInfo("openwebtext/1_data.xz")
        part.size = len(pages.getvalue())
        outer.addfile(part, io.BytesIO(pages.getvalue()))
    write_jsonl(source / "2.jsonl", documents[10:20])
    write_jsonl(tmp_path / "plain", documents[20:30])
    (source / "3.jsonl.xz").write_bytes(lzma.compress((tmp_path / "plain").read_bytes()))
    (source / "4").mkdir()
    for n, text in enumerate(documents[30:]):
        (source / "4" / f"{n}.txt").write_bytes(text.encode("utf-8"))
    (source / "ignored.csv").write_text("x", encoding="utf-8")
    run(source, tmp_path / "out", "--tokenizer", "bytes")
    held_out = split(tmp_path / "out", "val")
    assert split(tmp_path / "out", "train") == [text for text in documents if text not in held_out]
    assert len(held_out) == 1


# ---- the split

def test_the_split_depends_on_neither_order_nor_threads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "VALIDATION", 0.1)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1000)
    documents = texts(500)
    write_jsonl(tmp_path / "a.jsonl", documents)
    write_jsonl(tmp_path / "b.jsonl", documents[::-1])
    run(tmp_path / "a.jsonl", tmp_path / "one", "--procs", "1")
    run(tmp_path / "a.jsonl", tmp_path / "three", "--procs", "3")
    run(tmp_path / "b.jsonl", tmp_path / "backwards")
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    held_out = split(tmp_path / "one", "val")
    assert 25 < len(held_out) < 80 and split(tmp_path / "backwards", "val") == held_out[::-1]
    assert split(tmp_path / "one", "train") == [text for text in documents if text not in held_out]
    assert "lowest hash" not in capsys.readouterr().out


def test_the_lowest_hash_is_held_out_where_none_would_be(tmp_path, capsys):
    documents = texts(20)
    write_jsonl(tmp_path / "a.jsonl", documents + documents[:5])        # with copies, which must not be parted
    run(tmp_path / "a.jsonl", tmp_path / "out")
    lowest = min(documents, key=lambda text: prepare.draw(text.encode("utf-8")))
    assert set(split(tmp_path / "out", "val")) == {lowest} and lowest not in split(tmp_path / "out", "train")
    assert "the one with the lowest hash was held out" in capsys.readouterr().out


def test_shards_begin_with_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 200)
    write_jsonl(tmp_path / "a.jsonl", texts(60))
    run(tmp_path / "a.jsonl", tmp_path / "out")
    tokens = open_tokens(tmp_path / "out", "train", 50257)
    assert len(tokens.shards) > 5 and tokens.shards[0][0].name == "openwebtext_train_000001.bin"
    assert all(count <= 200 and tokens.map(n)[0] == 50256 for n, (_, _, count) in enumerate(tokens.shards))

    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100_000_000)           # prepared again, no old shard is left
    run(tmp_path / "a.jsonl", tmp_path / "out")
    assert len(open_tokens(tmp_path / "out", "train", 50257).shards) == 1
    assert len(split(tmp_path / "out", "train")) == 59


# ---- bad text and bad input

def test_bad_text_is_handled_and_counted(tmp_path, capsys):
    source = tmp_path / "texts"
    source.mkdir()
    for name, content in {"a": b"", "b": b" \r\n\t", "c": b"caf\xe9 ole", "d": b"x <|endoftext|> y", "e": b"good"}.items():
        (source / f"{name}.txt").write_bytes(content)
    (source / "f.jsonl").write_bytes(b'{"text": "half \\ud83d of a pair"}\n\n{"text": "raw \xff byte"}\n{"text": ""}\n')
    run(source, tmp_path / "out")
    said = capsys.readouterr().out
    assert "left out as empty: 3; not UTF-8, bad bytes replaced by U+FFFD: 3; containing <|endoftext|>" in said
    assert "kept as plain characters: 1" in said
    meta = read_meta(tmp_path / "out")
    assert sum(meta["documents"].values()) == 5
    ids = [i for s in ("train", "val") for i in open_tokens(tmp_path / "out", s, 50257).read(0, meta["tokens"][s]).tolist()]
    assert ids.count(50256) == 5                       # the literal one did not become a real one
    assert "caf� ole" in tokenizer("gpt2").decode(ids)


BAD = {
    "missing": (None, "there is no such file or folder"),
    "a.csv": (b"x", "nothing there ends in .tar"),
    "a.tar": (b"no tar at all", "a.tar cannot be read"),
    "a.jsonl": (b'{"text": "x"}\n{"txt": "y"}\n', "line 2 is not of the form"),
    "b.jsonl": (b"[1]\n", "line 1 is not of the form"),
    "a.jsonl.xz": (lzma.compress(b'{"text": "' + bytes(range(32, 34)) * 9999)[:60], "a.jsonl.xz cannot be read"),
    "a.txt": (b"one document only", "fewer than two different texts"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, name):
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
    monkeypatch.setattr(prepare, "validation_limit", lambda files: (2 ** 60, False))      # as if the first pages sufficed
    with pytest.raises(SystemExit, match="line 3001"):
        run(tmp_path / "bad.jsonl", tmp_path / "out")
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
    monkeypatch.setitem(sys.modules, "pyarrow", None)
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
    done = subprocess.run([sys.executable, str(SCRIPT), "--from", "nowhere"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "prepare.py: --from nowhere: there is no such file or folder\n"
    assert done.stdout == ""


# ---- the download

class CuttingServer(http.server.BaseHTTPRequestHandler):
    """Serves `files`, but breaks off half way through what is asked for, `cuts` times; notes every range asked for."""
    files, cuts, asked, ranges_known = {}, 0, [], True

    def do_GET(self):
        body = self.files.get(self.path)
        if body is None:
            return self.send_error(404)
        wanted = self.headers.get("Range")
        self.asked.append(wanted)
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges_known else 0
        if first >= len(body):
            return self.send_error(416)
        self.send_response(206 if wanted and self.ranges_known else 200)
        self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        body = body[first:]
        if CuttingServer.cuts > 0:
            CuttingServer.cuts -= 1
            body = body[:len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    CuttingServer.files, CuttingServer.cuts, CuttingServer.asked, CuttingServer.ranges_known = {}, 0, [], True
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), CuttingServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(sources, "ARCHIVE", f"http://127.0.0.1:{server.server_port}/urlsf_subset{{:02d}}.tar")
    monkeypatch.setattr(sources.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield CuttingServer
    server.shutdown()
    server.server_close()


BODY = random.Random(1).randbytes(300_000)


def test_a_cut_download_goes_on_where_it_stopped(server, tmp_path):
    server.files, server.cuts = {"/urlsf_subset03.tar": BODY}, 2
    path = sources.download(3, tmp_path)
    assert path.read_bytes() == BODY and [p.name for p in tmp_path.iterdir()] == ["urlsf_subset03.tar"]
    assert server.asked == [None, "bytes=150000-", "bytes=225000-"]
    sources.download(3, tmp_path)
    assert len(server.asked) == 3                      # not fetched again


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.files, server.cuts, server.ranges_known = {"/urlsf_subset03.tar": BODY}, 1, False
    assert sources.download(3, tmp_path).read_bytes() == BODY


def test_bytes_that_cannot_be_the_beginning_are_dropped(server, tmp_path):
    server.files = {"/urlsf_subset03.tar": BODY}
    (tmp_path / "urlsf_subset03.tar.part").write_bytes(bytes(400_000))
    assert sources.download(3, tmp_path).read_bytes() == BODY


def test_a_download_that_keeps_failing_is_one_line_and_keeps_its_bytes(server, tmp_path):
    server.files, server.cuts = {"/urlsf_subset03.tar": BODY}, 99
    with pytest.raises(ValueError, match="of 300000 bytes came.*run the same command again") as error:
        sources.download(3, tmp_path)
    assert "\n" not in str(error.value) and (tmp_path / "urlsf_subset03.tar.part").stat().st_size > 280_000
    with pytest.raises(ValueError, match="HTTP Error 404"):
        sources.download(4, tmp_path)


@pytest.mark.skipif(not THOUSAND.exists(), reason="needs ../shared/data/openwebtext1000")
def test_subsets_downloads_and_tokenises(server, tmp_path):
    server.files, server.cuts = {"/urlsf_subset00.tar": (THOUSAND / "urlsf_subset00.tar").read_bytes()}, 1
    prepare.main(["--subsets", "1", "--out", str(tmp_path)])
    assert sum(read_meta(tmp_path)["tokens"].values()) == 1_054_999
    assert (tmp_path / "archives" / "urlsf_subset00.tar").exists()
