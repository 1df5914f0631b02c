"""Where documents come from: files on this disk, and OpenWebText's archives on the network."""
import bz2
import codecs
import gzip
import hashlib
import http.client
import importlib
import io
import json
import lzma
import os
import re
import tarfile
import time
import urllib.request

from tqdm import tqdm

# One revision of the data set, for its main branch is being converted to another format.
ARCHIVE = ("https://huggingface.co/datasets/Skylion007/openwebtext/resolve/8cfd553694d06979cfec29248b200468786f0294/"
           "subsets/urlsf_subset{:02d}.tar")
ARCHIVES = 21                                          # 00 to 20, about 630 MB each
ATTEMPTS = 5                                           # connections tried for one archive
LARGEST = 2 ** 26                                      # bytes of one document: a packed file may claim any size


# ---- files on this disk: a reader yields the documents of an open file, as bytes ------------------------------------

def read_txt(file, largest):
    text = decoded(file).read(largest + 1)
    if len(text) > largest:
        raise ValueError(f"it unpacks to more than {largest:,} characters")
    if "\0" in text:
        raise ValueError("it holds NUL bytes, so it is no text or UTF-16 without its mark: save it as UTF-8")
    yield text.encode("utf-8", "surrogateescape")


def read_json(file, largest):
    """One object a line, or one list of objects; the text of each stands under "text"."""
    lines, number = decoded(file), 0
    while line := lines.readline(largest + 1):
        number += 1
        is_list = number == 1 and line.lstrip().startswith("[")
        if is_list:
            line += lines.read(largest + 1)
        if len(line) > largest:
            raise ValueError(f"line {number} has more than {largest:,} characters")
        if is_list:
            for n, entry in enumerate(json.loads(line), 1):
                yield text_of(entry, f"entry {n}")
        elif line.strip():
            yield text_of(line, f"line {number}")


def text_of(entry, place):
    """The text of a JSON object, or of a line that holds one. Bytes that are not UTF-8 pass, to be counted later."""
    try:
        entry = json.loads(entry) if isinstance(entry, str) else entry
        return entry["text"].encode("utf-8", "surrogatepass")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f'{place} is not of the form {{"text": "..."}}') from None


# UTF-32 comes before UTF-16, whose mark is the beginning of its own.
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF8: "utf-8-sig",
         codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def decoded(file):
    """`file` as text: UTF-8, or what its byte-order mark says."""
    start = file.peek(4)
    encoding = next((encoding for mark, encoding in MARKS.items() if start.startswith(mark)), "utf-8")
    return io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="")


def read_parquet(file, largest):
    table = optional("pyarrow.parquet").ParquetFile(file)
    if "text" not in table.schema_arrow.names:
        raise ValueError(f"its columns are {', '.join(table.schema_arrow.names)}, none is called text")
    for rows in table.iter_batches(batch_size=1000, columns=["text"]):
        for text in rows.column(0).cast("binary").to_pylist():
            yield text or b""                          # a missing text counts as an empty one


def read_tar(file, largest):
    """The .txt members of a tar, and of the .xz-compressed tars in it, which OpenWebText's archives consist of."""
    for name, content in members(file, largest):
        if name.lower().endswith(".txt"):
            yield from read_txt(io.BufferedReader(content), largest)
        elif name.lower().endswith(".xz"):
            for page, content in members(lzma.open(content), largest):
                if page.lower().endswith(".txt"):
                    yield from read_txt(io.BufferedReader(content), largest)


def members(file, largest):
    """(name, open file) of each member of the tar in `file`. ValueError for what a damaged or hostile one may hold."""
    watched = Watched(file, largest)
    with tarfile.open(fileobj=watched, mode="r:") as tar:
        while member := tar.next():
            if not (member.isreg() or member.isdir()):
                raise ValueError(f"its member {member.name!r} is a link or a device")
            if member.name.endswith(".txt") and member.size > largest:
                raise ValueError(f"its member {member.name!r} claims {member.size:,} bytes")
            if member.isreg() and not is_hidden(member.name.split("/")):
                yield member.name, tar.extractfile(member)
            tar.members.clear()                        # the list of all members would grow with the archive
    if watched.last != bytes(tarfile.BLOCKSIZE):
        raise ValueError("its end mark is missing, so it was cut off")


class Watched:
    """A file for tarfile to read: it remembers the last piece, and refuses a header that claims to be huge."""
    def __init__(self, file, largest):
        self.file, self.largest, self.last = file, largest, b""
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size):
        if size > self.largest:
            raise ValueError(f"a header in it claims {size:,} bytes")
        self.last = self.file.read(size)
        return self.last


def open_zst(path, mode):
    return optional("pyarrow").input_stream(str(path), compression="zstd")


def optional(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError("reading it needs pyarrow: pip install pyarrow") from None


READERS = {".txt": read_txt, ".jsonl": read_json, ".json": read_json, ".parquet": read_parquet, ".tar": read_tar}
PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zst}


def reader_of(path):
    """(open, read) for a file, or None: for a.jsonl.xz, (lzma.open, read_json)."""
    stem, ending = os.path.splitext(path.name.lower())
    if ending not in PACKED:
        return (open, READERS[ending]) if ending in READERS else None
    inner = os.path.splitext(stem)[1]
    return (PACKED[ending], READERS[inner]) if inner in READERS else None


def is_hidden(parts):
    """.git, ._text.txt, __MACOSX: what programs leave beside the files that a person sees."""
    return any(part.startswith((".", "__")) and part not in (".", "..") for part in parts)


def find_files(source):
    """(files to read, {path: why it is left out}) at `source`, a file or a folder."""
    if not source.exists():
        raise ValueError(f"--from {source}: there is no such file or folder")
    inside = sorted(source.rglob("*"), key=lambda path: path.as_posix()) if source.is_dir() else [source]
    files, left_out = [], {}
    for path in inside:
        if is_hidden(path.relative_to(source).parts):
            if not is_hidden(path.relative_to(source).parts[:-1]):     # of a hidden folder, only its own name is said
                left_out[path] = "hidden"
        elif not path.is_dir():
            if not path.is_file():
                left_out[path] = "no regular file"
            elif reader_of(path) is None:
                left_out[path] = "unknown ending"
            else:
                files.append(path)
    if not files:
        found = f"{summary(left_out)}, and " if left_out else ""
        raise ValueError(f"--from {source}: {found}nothing there ends in {', '.join(READERS)}, also with "
                         f"{', '.join(PACKED)} behind it")
    return files, left_out


def summary(left_out, shown=5):
    """What is left out, by name, in one line."""
    names = [f"{path} ({why})" for path, why in list(left_out.items())[:shown]]
    more = f" and {len(left_out) - shown:,} more" if len(left_out) > shown else ""
    return f"left out: {', '.join(names)}{more}"


def documents(files):
    """Each document of each file, in order, as bytes."""
    for path in files:
        open_file, read = reader_of(path)
        try:
            with io.BufferedReader(open_file(path, "rb")) as file:
                yield from read(file, max(LARGEST, path.stat().st_size))
        except ImportError as error:
            raise ImportError(f"{path}: {error}") from None
        except Exception as error:                     # a damaged file can break its reader in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{path} cannot be read ({reason}): mend it, fetch it again, or leave it out") from None


# ---- the network ---------------------------------------------------------------------------------------------------

def download(number, folder):
    """The path of archive `number` in `folder`, fetched if it is not there; ValueError, in one line, if it cannot be.

    The bytes go to a file ending in .part. It bears the mark of the version on the server, so that two versions are not
    mixed, and gets its proper name when it is a whole tar archive of the announced size.
    """
    url, path = ARCHIVE.format(number), folder / f"urlsf_subset{number:02d}.tar"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(ATTEMPTS):
        time.sleep(attempt)                            # seconds: not at first, longer after each failure
        begun = next(folder.glob(f"{path.name}*.part"), None)
        have = begun.stat().st_size if begun else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                first, total, version = announced(answer)
                partial = folder / f"{path.name}.{version}.part"
                goes_on = first > 0 and first == have and partial == begun
                if begun and not goes_on:
                    begun.unlink()
                if first and not goes_on:
                    raise ValueError("the server sent another part or version than was asked for")
                bar = tqdm(desc=path.name, initial=first, total=total, unit="B", unit_scale=True)
                with open(partial, "ab" if first else "wb") as file, bar:
                    while block := answer.read(1 << 20):
                        file.write(block)
                        bar.update(len(block))
            size = partial.stat().st_size
            if total is not None and size != total:
                raise ValueError(f"{size} of {total} bytes came")
            check_archive(partial)
            os.replace(partial, path)
            return path
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = " ".join(str(error).split()) or type(error).__name__
            if begun and getattr(error, "code", None) == 416:      # "range not satisfiable": no beginning of this file
                begun.unlink()
    raise ValueError(f"cannot download {url} ({problem}): run the same command again to go on, "
                     f"or fetch the file by other means and give it to --from")


def announced(answer):
    """What the server says of its answer: (the place of its first byte in the file, the file's size or None, a mark of
    the file's version). The place is -1 where a part does not say it."""
    headers, first, total = answer.headers, 0, answer.headers.get("Content-Length", "")
    if answer.status == 206:                           # "partial content"; else it is the whole file, asked for or not
        part = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""), re.ASCII)
        first, total = (int(part[1]), part[2]) if part else (-1, "")
    total = int(total) if total.isdecimal() else None
    version = f"{headers.get('ETag')} {headers.get('Last-Modified')} {total}"
    return first, total, hashlib.sha256(version.encode()).hexdigest()[:12]


def check_archive(partial):
    """Delete `partial` and raise ValueError if it is no whole tar, but the login page of a network, for instance."""
    try:
        with open(partial, "rb") as file:
            for _ in members(file, LARGEST):
                pass
    except Exception as error:
        partial.unlink()
        raise ValueError(f"what came is no whole tar archive: {error}") from None
