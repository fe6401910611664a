"""Holds a managed server: starts it, and ends its whole process group when whoever asked for it is gone.

A process of its own (`python -m engines.http.keeper COMMAND...`), in a session of its own, so that ending the engine
process by force does not leave a server behind: its standard input closes with the engine process, however that ends.
It imports nothing but the standard library. Its exit status is the server's, 128 + N for one that signal N ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
GRACE_S = 10.0  # between asking a server to end and ending it


def main() -> int:
    """Keeps the server until it ends or standard input does."""
    server = subprocess.Popen(  # noqa: S603 - as asked
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_keeper
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: _end(server))
    threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    code = server.wait()
    _signal_group(server.pid, signal.SIGKILL)  # whatever the server itself left running
    return code if code >= 0 else 128 - code


def _end_with_input(server: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1 << 12):  # not through sys.stdin, whose lock a dying interpreter would wait for
        pass
    _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Asks the group to end, and ends it once its grace is over; `main` is waiting for the server meanwhile."""
    _signal_group(server.pid, signal.SIGTERM)
    timer = threading.Timer(GRACE_S, _signal_group, (server.pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _end_with_keeper() -> None:
    """In the server's process, before it is the server: have Linux end it if the keeper is killed without a word."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
