"""The boundary around each program's main, what a terminal shows, and what the device is said to do."""
import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from configs import SettingError
from trainer import console, device


def ends_with(error, *notes):
    """What a program whose main raises `error` hands to sys.exit."""
    @console.program("name")
    def main():
        for note in notes:
            error.add_note(note)
        raise error
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code


@pytest.mark.parametrize("error, line", [
    (SettingError("--a=1: no"), "name: --a=1: no"),
    (ValueError("two\nlines"), "name: two lines"),
    (OSError(errno.ENOSPC, "No space left", "x.pt"), "name: x.pt: No space left; make room on that disk"),
    (OSError("certificate expired"), "name: certificate expired"),
    (MemoryError(), f"name: out of memory; {console.MEMORY}"),
    (RuntimeError("CUDA error: out of memory"), f"name: out of memory; {console.MEMORY}")])
def test_what_a_user_can_mend_is_one_line(error, line):
    assert ends_with(error) == line


def test_a_note_is_the_remedy():
    assert ends_with(torch.OutOfMemoryError("CUDA"), "try --batch_size=2") == "name: out of memory; try --batch_size=2"


@pytest.mark.parametrize("fault", [lambda: int("x"), lambda: torch.zeros(2).view(3), lambda: [].pop()])
def test_a_fault_of_the_code_keeps_its_traceback(fault):
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        console.program("name")(fault)()


def test_ctrl_c_is_status_130_and_says_how_to_go_on(capsys):
    assert ends_with(KeyboardInterrupt("go on with --resume")) == 130
    assert capsys.readouterr().err == "name: stopped; go on with --resume\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full")
@pytest.mark.parametrize("write", [lambda: torch.save(torch.zeros(300_000), "/dev/full"),
                                   lambda: torch.save([1], "/no/where.pt"),
                                   lambda: open("/dev/full", "w", 1).write("x\n")])
def test_a_write_that_fails_names_its_file(write):
    with pytest.raises(OSError) as failed, console.writing("runs/last.pt"):
        write()
    assert failed.value.filename == "runs/last.pt"


CHILD = "from trainer import console\n@console.program('name')\ndef main():\n    {}\nmain()"


def child(body, **how):
    return subprocess.Popen([sys.executable, "-c", CHILD.format(body)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            **how)


def test_a_reader_who_leaves_ends_the_program_silently():
    process = child("for _ in range(10 ** 6): print('many words')")
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 1
    process.stderr.close()


def test_a_character_that_the_encoding_lacks_stops_nothing():
    process = child("print('\\u2192 x')", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    said, complaint = process.communicate(timeout=60)
    assert said.split() == [b"?", b"x"] and complaint == b""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent otherwise there")
def test_ctrl_c_while_torch_is_imported_gives_no_traceback():
    code = ("from trainer import console; console.starting(__name__)\n"
            "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert process.returncode == -2 and process.stderr == b""


def test_printable_text_keeps_words_and_escapes_what_a_terminal_obeys():
    assert console.printable("a\tb\n\x1b[2J\x07\r\x9b é→") == "a\tb\n\\x1b[2J\\x07\\x0d\\x9b é→"


PROGRESS = """
import sys
from trainer import console
sys.stderr.isatty = lambda: {}
with console.Progress(5, interval=2) as progress:
    for step in range(1, 6):
        progress.update(step, 1.5, 2000)
"""


@pytest.mark.parametrize("terminal, disable, bar", [(False, "", False), (True, "", True), (True, "1", False)])
def test_progress_is_a_bar_in_a_terminal_and_plain_lines_elsewhere(terminal, disable, bar):
    ended = subprocess.run([sys.executable, "-c", PROGRESS.format(terminal)], timeout=60, check=True,
                           env=os.environ | {"TQDM_DISABLE": disable}, capture_output=True, text=True)
    assert ("5/5" in ended.stderr and "loss 1.500, 2,000 tokens/s" in ended.stderr) is bar
    assert ended.stdout.splitlines() == [f"step {n} of 5: loss 1.500, 2,000 tokens/s" for n in (2, 4, 5) if not bar]


@pytest.mark.parametrize("card, dtype, share", [
    ("Tesla T4", torch.float16, 0.1), ("Tesla T4", torch.bfloat16, "n/a"),
    ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 6.5 / 312),
    ("NVIDIA A100-SXM4-40GB", torch.float32, "n/a"), ("NVIDIA RTX A1000", torch.bfloat16, "n/a"),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, "n/a"), ("NVIDIA L40", torch.bfloat16, "n/a"),
    ("NVIDIA T400", torch.float16, "n/a")])
def test_mfu_is_of_that_very_card(monkeypatch, card, dtype, share):
    monkeypatch.setattr(device, "device_name", lambda d: card)
    assert device.mfu(6.5e12, None, dtype) == (share if share == "n/a" else pytest.approx(share))


@pytest.mark.parametrize("half, chosen", [(119e9, torch.float32), (121e9, torch.bfloat16)])
def test_bfloat16_must_win_by_a_fifth_on_a_cpu(monkeypatch, half, chosen):
    monkeypatch.setattr(device, "cpu_speeds", lambda width, d_ff: (100e9, half))
    choose = lambda width: device.device_and_dtype(SimpleNamespace(device="cpu", dtype="auto"),
                                                   SimpleNamespace(n_embd=width, d_ff=4 * width))
    _, dtype, why = choose(512)
    assert dtype == chosen and "float32 100 GFLOP/s" in why and f"bfloat16 {half / 1e9:.0f}" in why
    assert choose(128)[1] == torch.float32


def test_a_resumed_run_keeps_its_precision_on_the_same_kind_of_device(monkeypatch):
    monkeypatch.setattr(device, "cpu_speeds", lambda width, d_ff: (100e9, 500e9))
    settings, model = SimpleNamespace(device="cpu", dtype="auto"), SimpleNamespace(n_embd=512, d_ff=1536)
    assert device.device_and_dtype(settings, model, ("cpu", "float32"))[1] == torch.float32
    assert device.device_and_dtype(settings, model, ("cuda", "float16"))[1] == torch.bfloat16


def test_both_precisions_are_timed():
    assert all(1e6 < speed < 1e15 for speed in device.cpu_speeds(64, 64))
