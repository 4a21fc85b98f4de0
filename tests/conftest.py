"""For every test."""

from __future__ import annotations

import signal

# Jobs that a shell starts in the background are told to ignore Ctrl-C, and would pass that on to what tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
