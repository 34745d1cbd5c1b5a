"""What SIGTERM and SIGINT do in each part of a server's life. From its first moment to its last they never kill it."""

import logging
import os
import signal
from collections.abc import Callable
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def on_stop_signals(action: Callable[[], object]) -> None:
    """From now on they call `action`, in the main thread, whether a loop runs, has closed or is not there yet."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: action())


def ignore_stop_signals() -> None:
    """For the interpreter's own end: it gives signals with a handler back to the system, and the next one kills."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_now() -> NoReturn:
    """End the process without waiting for threads: one of them may be loading a model."""
    logging.shutdown()
    os._exit(0)
