"""How a run ends early: signals, errors, numbers that are not finite. Each loses no whole step."""
import contextlib
import math
import signal
import threading
import time

from configs import SettingError
from trainer.console import Progress
from trainer.device import out_of_memory
from trainer.processes import leave


class Diverged(SettingError):
    """A loss, a gradient or a weight that is not finite."""


@contextlib.contextmanager
def running(run, save):
    """Progress and signals while the loop runs. After an error the last whole step is saved, and the error says how to
    go on. The lock of the folder is released at the end."""
    run.clock = time.perf_counter()
    run.progress = Progress(run.config.max_iters, run.step, run.config.log_interval, quiet=run.rank > 0)
    try:
        with run.progress, signals(run):
            yield
    except Diverged:
        raise
    except KeyboardInterrupt:                        # the second Ctrl-C
        raise KeyboardInterrupt(go_on(run)) from None
    except Exception as error:
        if run.step > run.saved:
            with contextlib.suppress(Exception):     # the first error is the one to tell
                save(run, "last.pt")
        if out_of_memory(error):
            error.add_note(smaller(run.config))
        if not isinstance(error, BrokenPipeError):
            error.add_note(go_on(run))
        raise
    finally:
        if run.lock:
            run.lock.release()


@contextlib.contextmanager
def signals(run):
    """Within it, a signal sets run.stop; another Ctrl-C, a second or more later, stops at once.

    Only the main thread may catch signals: in another thread this does nothing. An ignored signal stays ignored: nohup
    ignores SIGHUP.
    """
    def handle(number, frame):
        nonlocal first
        now = time.monotonic()
        if run.stop and number == signal.SIGINT and now - first > 1:      # a double press must not lose steps
            raise KeyboardInterrupt
        if not run.stop:
            first = now
        run.stop = True

    before, first = {}, -math.inf
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)                         # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)           # None: it was set outside Python


def stopped(run):
    run.progress.say(f"stopped after step {run.step}; go on with: python train.py --resume --out_dir={run.folder}")
    if run.lock:
        run.lock.release()
    leave(run, 130)


def go_on(run):
    if not (run.folder / "last.pt").exists():
        return "no checkpoint was saved yet"
    return f"go on with: python train.py --resume --out_dir={run.folder}"


def smaller(config):
    """The flags of the same step in less memory, in words."""
    batch, steps = config.batch_size, config.gradient_accumulation_steps
    if batch == 1:
        return "lower --block_size, --n_embd or --n_layer"
    factor = next(n for n in range(2, batch + 1) if batch % n == 0)
    return f"--batch_size={batch // factor} --gradient_accumulation_steps={steps * factor} make the same step in less"
