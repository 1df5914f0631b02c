"""Ctrl-C, SIGTERM and SIGHUP: a run finishes its step, saves and stops."""
import contextlib
import signal
import threading


@contextlib.contextmanager
def signals(run):
    """Within it, a signal sets run.stop; a second Ctrl-C stops at once. Only the main thread may catch signals: in another
    thread this does nothing. A signal that is ignored, as nohup does with SIGHUP, stays ignored."""
    def handle(number, frame):
        if run.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop = True

    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)                         # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
