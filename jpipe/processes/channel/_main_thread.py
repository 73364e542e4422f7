"""The main thread's stack, read from another thread."""

import faulthandler
import os
import re
import tempfile
import threading

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def main_thread_calls() -> list[str]:
    """Return `file.py:12 (function)` for each call of the main thread, innermost first; empty if unknown, as with more than 100 threads.

    Python prints them while no other thread runs. Call it rarely, because no way to read them is quite safe. In a day of tests, which
    called it every second, `faulthandler` ended three processes by SIGSEGV on Python 3.13.0. Reading them as objects
    (`sys._current_frames`) ended one start of four processes in some hundreds on Python 3.11.
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # no space for the file
        return []
    calls, is_main = [], False
    for line in lines:
        if thread := _THREAD.match(line):
            is_main = int(thread[1], 16) == threading.main_thread().ident
        elif is_main and (call := _CALL.match(line)):
            calls.append(f"{os.path.basename(call[1])}:{call[2]} ({call[3]})")
    return calls
