"""The folder of a run: choose or make it, lock it against a second process, write its log, find the newest."""
import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import data
from configs import SettingError
from trainer.checkpoint import saved_at
from trainer.console import writing

FILES = ("log.jsonl", "best.pt", "last.pt")


class Lock:
    """A lock of a folder by this process. The operating system releases it when the process dies, however it dies."""

    def __init__(self, folder, name="lock", remedy="wait until it ends, or name another --out_dir"):
        self.path = Path(folder) / name
        while True:
            self.file = open(self.path, "a+", encoding="utf-8")
            if not self.taken():
                owner = self.read_owner()
                self.file.close()
                raise SettingError(f"{folder} is in use by {owner}: {remedy}")
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno())):
                    break
            self.file.close()                        # its last owner has just removed it: lock the new file
        try:
            with writing(self.path):
                self.file.truncate(0)
                self.file.write(f"process {os.getpid()} on {socket.gethostname()}")
                self.file.flush()
        except OSError:
            self.release()
            raise
        atexit.register(self.release)                # if the run ends before its loop begins

    def taken(self):
        """Whether the lock of the open file is ours now."""
        try:
            if sys.platform == "win32":
                import msvcrt
                self.file.seek(FAR)                  # nobody can read a locked byte: lock one beyond the end
                msvcrt.locking(self.file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):   # somebody else's; Windows says permission
            return False
        except OSError:
            return True                              # this file system, of a network say, has no locks

    def read_owner(self):
        try:
            return self.path.read_text(encoding="utf-8", errors="replace") or "another process"
        except OSError:
            return "another process"

    def release(self):
        if self.file.closed:                         # the folder may be another's by now
            return
        with contextlib.suppress(OSError):           # Windows removes no open file, so there it is closed first
            if sys.platform != "win32":
                self.path.unlink()
            self.file.close()
            if sys.platform == "win32":
                self.path.unlink()


FAR = 1 << 30


def new_folder(model, out_dir=None, overwrite=False):
    """(folder, Lock) of a run that begins: out_dir, or the next free runs/<model>-<n>. An overwritten run goes."""
    if out_dir is None:
        for n in range(1, sys.maxsize):
            folder = Path("runs", f"{model}-{n}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder, Lock(folder)
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder)
    if not overwrite and any(path.name != "lock" for path in folder.iterdir()):
        lock.release()
        raise SettingError(f"{folder} exists: add --resume to go on with it, --overwrite to begin again there, "
                           f"or name another --out_dir")
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    return folder, lock


def resumed_folder(folder, model, step, validated):
    """(folder, Lock) of a run to go on with. Its log is cut at the checkpoint's step, and at its last validation."""
    folder = Path(folder)
    lock = Lock(folder)
    try:
        lines = log_until(folder / "log.jsonl", step, validated)
        heads = (record["train_config"] for record in map(json.loads, lines) if "train_config" in record)
        logged = next(heads, {"model": model})["model"]
        if logged != model:
            raise SettingError(f"{folder / 'last.pt'} is of a {model} model, and log.jsonl of a {logged} model: "
                               f"put the right file back, or remove the wrong one")
        with writing(folder / "log.jsonl"):
            data.write_text(folder / "log.jsonl", "".join(lines))
    except BaseException:
        lock.release()
        raise
    return folder, lock


def log_until(path, step, validated=None):
    """The lines of a log.jsonl up to `step`, those of validations up to step `validated`. Damaged lines are left out.

    A missing log is empty: the checkpoint holds all that a resumed run needs.
    """
    if not Path(path).exists():
        return []
    lines = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line)
            last = validated if validated is not None and "val_loss" in record else step
            if line.endswith("\n") and record["step"] <= last:
                lines.append(line)
    return lines


def write_log(folder, **record):
    path = folder / "log.jsonl"
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def newest_run(model="*"):
    """The folder of the run, of one model or of any, whose last.pt was saved last."""
    found = list(Path("runs").glob(f"{model}-*/last.pt"))
    if not found:
        raise SettingError(f"there is no run {model}-* in {Path('runs').resolve()}: train a model, or name its folder")
    return max(found, key=saved_at).parent


def git_commit():
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True,
                              check=True, timeout=5).stdout.strip()
