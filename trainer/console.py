"""How a program of this project meets its user: one line for what went wrong, readable text, progress."""
import contextlib
import errno
import functools
import os
import re
import signal
import sys
import threading
import traceback
from pathlib import Path

from tqdm import tqdm

from configs import SettingError

PROJECT = Path(__file__).resolve().parent.parent
MEMORY = ("lower --batch_size and raise --gradient_accumulation_steps by as much, or lower --block_size, --n_embd or "
          "--n_layer")
REMEDY = {errno.ENOSPC: "make room on that disk", errno.EROFS: "name a folder on another disk",
          errno.EACCES: "check its permissions", errno.EPERM: "check its permissions",
          errno.ENOENT: "check the name", errno.EISDIR: "name a file, not a folder",
          errno.ENOTDIR: "name a folder, not a file", errno.EEXIST: "name a folder, not a file",
          errno.ENAMETOOLONG: "give a shorter name"}


def starting(module):
    """starting(__name__) before `import torch`: until `main` runs, Ctrl-C ends the program without a traceback."""
    if module == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def program(name):
    """Decorator of a program's `main`. A mistake of the user, a full disk, unusable data or missing memory ends the
    program with one line on stderr, `name: ...`, and status 1. Ctrl-C gives status 130, a broken pipe 1 without a line.
    Any other exception is a fault of the code and keeps its traceback.

    Code that knows the remedy adds it with error.add_note(...), or raises KeyboardInterrupt(...): it ends the line.
    """
    def decorate(main):
        @functools.wraps(main)
        def bounded(*arguments, **keywords):
            sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")
            for stream in (sys.stdout, sys.stderr):
                if hasattr(stream, "reconfigure"):   # "?" for a character that the terminal's encoding lacks
                    stream.reconfigure(errors="replace")
            in_main_thread = threading.current_thread() is threading.main_thread()
            if in_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                result = main(*arguments, **keywords)
                sys.stdout.flush()
                return result
            except BrokenPipeError:                  # the reader of the output, `head` say, has left
                with contextlib.suppress(OSError, ValueError):       # ValueError: stdout has no file behind it
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(1)
            except KeyboardInterrupt as error:
                print(f"{name}: {'; '.join(['stopped', *map(str, error.args)])}", file=sys.stderr)
                sys.exit(130)
            except Exception as error:
                line = explain(error)
                if line is None:
                    raise
                sys.exit(f"{name}: {line}")
        return bounded
    return decorate


def explain(error):
    """The one line for an exception that is no fault of the code, else None."""
    from trainer.device import out_of_memory         # here, as `import torch` takes long
    notes = getattr(error, "__notes__", [])
    if isinstance(error, OSError):
        cause = error.strerror or str(error)
        line = f"{error.filename}: {cause}" if error.filename is not None else cause
        notes = notes or [REMEDY[n] for n in [error.errno] if n in REMEDY]
    elif out_of_memory(error):
        line, notes = "out of memory", notes or [MEMORY]
    elif isinstance(error, SettingError) or isinstance(error, ValueError) and raised_here(error):
        line = str(error)
    else:
        return None
    return " ".join("; ".join([line, *notes]).split())


def raised_here(error):
    """Whether a `raise` of this project's own files made the exception, rather than a library or a slip in the code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(last.filename).resolve()
    return file.is_relative_to(PROJECT) and "site-packages" not in file.parts and "raise " in (last.line or "")


@contextlib.contextmanager
def writing(path):
    """A failed write is an OSError that names `path`: a full disk gives no name, and torch.save a RuntimeError."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except RuntimeError as error:
        if not re.search(r"inline_container|iostream|PytorchStreamWriter|Parent directory", str(error)):
            raise
        raise OSError(errno.EIO, "cannot be written whole: is the disk full?", str(path)) from error


def printable(text):
    """Text from a model with its control characters escaped: a terminal would obey them. Newline and tab stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


class Progress:
    """Progress of a run: a bar in a terminal; elsewhere, and with TQDM_DISABLE=1, a plain line every `interval` steps.

        with Progress(total=1000, step=0, interval=10) as progress:
            progress.update(step=1, loss=5.5, tokens_per_second=1e4)
            progress.say("a line of its own")
    """

    def __init__(self, total, step=0, interval=10, quiet=False):
        """`step` of the `total` steps are done. Nothing is shown if `quiet`, as in all processes but the first."""
        self.total, self.interval, self.quiet = total, interval, quiet
        off = {"disable": True} if quiet or not sys.stderr.isatty() else {}      # if not told, tqdm reads TQDM_DISABLE
        self.bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True, **off)

    def update(self, step, loss, tokens_per_second):
        what = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
        self.bar.set_postfix_str(what, refresh=False)
        self.bar.update()
        if self.bar.disable and (step % self.interval == 0 or step == self.total):
            self.say(f"step {step} of {self.total}: {what}")

    def say(self, line):
        if not self.quiet:
            tqdm.write(line)
            sys.stdout.flush()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.bar.close()
