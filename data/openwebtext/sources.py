"""Where documents come from: files on this disk, in five shapes, and OpenWebText's archives on the network."""
import http.client
import json
import lzma
import os
import tarfile
import time
import urllib.request

from tqdm import tqdm

# One revision of the data set, for its main branch is being converted to another format.
ARCHIVE = ("https://huggingface.co/datasets/Skylion007/openwebtext/resolve/8cfd553694d06979cfec29248b200468786f0294/"
           "subsets/urlsf_subset{:02d}.tar")
ARCHIVES = 21                                          # 00 to 20, about 630 MB each
ATTEMPTS = 5                                           # connections tried for one archive


# ---- files on this disk --------------------------------------------------------------------------------------------

def read_tar(path):
    with tarfile.open(path, "r:") as outer:
        for part in outer:
            if part.name.endswith(".xz"):
                with tarfile.open(fileobj=outer.extractfile(part), mode="r:xz") as inner:
                    for page in inner:
                        if page.isfile():
                            yield inner.extractfile(page).read()


def read_jsonl(path):
    with (lzma.open if path.suffix == ".xz" else open)(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:                                   # bytes that are not UTF-8 pass through, to be counted later
                    text = json.loads(line.decode("utf-8", "surrogateescape"))["text"]
                    yield text.encode("utf-8", "surrogatepass")
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise ValueError(f'line {number} is not of the form {{"text": "..."}}') from None


def read_parquet(path):
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    file = parquet.ParquetFile(path)
    if "text" not in file.schema_arrow.names:
        raise ValueError(f"its columns are {', '.join(file.schema_arrow.names)}, none is called text")
    for rows in file.iter_batches(batch_size=1000, columns=["text"]):
        for text in rows.column(0).cast("binary").to_pylist():
            yield text or b""                          # a missing text counts as an empty one


def read_txt(path):
    yield path.read_bytes()


READERS = {".tar": read_tar, ".jsonl": read_jsonl, ".jsonl.xz": read_jsonl, ".parquet": read_parquet, ".txt": read_txt}


def find_files(source):
    """The files at `source`, a file or a folder, that READERS can read."""
    if not source.exists():
        raise ValueError(f"--from {source}: there is no such file or folder")
    files = sorted(source.rglob("*"), key=lambda path: path.as_posix()) if source.is_dir() else [source]
    files = [f for f in files if f.is_file() and f.name.endswith(tuple(READERS))]
    if not files:
        raise ValueError(f"--from {source}: nothing there ends in {', '.join(READERS)}")
    return files


def documents(files):
    """Each document of each file, in order, as bytes."""
    for path in files:
        read = next(read for ending, read in READERS.items() if path.name.endswith(ending))
        try:
            yield from read(path)
        except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
            reason = " ".join(str(error).split())      # in one line
            raise ValueError(f"{path} cannot be read ({reason}): mend it, fetch it again, or leave it out") from None


# ---- the network ---------------------------------------------------------------------------------------------------

def download(number, folder):
    """The path of archive `number` in `folder`, fetched if it is not there; ValueError, in one line, if it cannot be.

    The bytes go to a file ending in .part, which gets its proper name when it has the size that the server announced.
    """
    url, path = ARCHIVE.format(number), folder / f"urlsf_subset{number:02d}.tar"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{path.name}.part"
    for attempt in range(ATTEMPTS):
        time.sleep(attempt)                            # seconds: not at first, longer after each failure
        have = partial.stat().st_size if partial.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                if answer.status != 206:               # not "partial content": the whole file comes, whatever was asked
                    have = 0
                total = have + int(answer.headers.get("Content-Length", 0))
                bar = tqdm(desc=path.name, initial=have, total=total, unit="B", unit_scale=True)
                with open(partial, "ab" if have else "wb") as file, bar:
                    while block := answer.read(1 << 20):
                        file.write(block)
                        bar.update(len(block))
            size = partial.stat().st_size
            if size == total:
                os.replace(partial, path)
                return path
            problem = f"{size} of {total} bytes came"
        except (OSError, http.client.HTTPException) as error:
            problem = error
            if getattr(error, "code", None) == 416:    # "range not satisfiable": what we have is no beginning of this file
                partial.unlink()
    raise ValueError(f"cannot download {url} ({problem}): run the same command again to go on, "
                     f"or fetch the file by other means and give it to --from")
