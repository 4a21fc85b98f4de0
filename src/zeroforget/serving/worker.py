"""One of several processes that serve together: run as a program by the one that started the server.

The first line of its input says what to do; when its input ends, whoever started it is gone, and it ends, too.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from zeroforget.serving.app import Server
from zeroforget.serving.run import logged, run_until_told
from zeroforget.serving.settings import Settings
from zeroforget.serving.together import Together

MISTAKE = 3
"""The exit status of a process that could not begin; its output says why."""


def main() -> None:
    """Serve until told to stop."""
    told = json.loads(sys.stdin.readline())
    logged()
    torch.set_num_threads(told["threads"])
    threading.Thread(target=_end_with_the_input, args=[Path(told["folder"])], daemon=True).start()
    tls = None if told["tls"] is None else (Path(told["tls"][0]), Path(told["tls"][1]))
    together = Together(Path(told["folder"]), told["number"], told["count"])
    try:
        server = Server(told["path"], settings_of(told["settings"]), together)
        sockets = [socket.socket(fileno=number) for number in told["sockets"]]
        run_until_told(server, sockets, tls, lambda: print("ready", flush=True))
    except (ValueError, OSError) as error:
        logging.getLogger("zeroforget.serving").error("%s", error)
        print(json.dumps(str(error)), flush=True)
        sys.exit(MISTAKE)


def settings_of(given: dict[str, Any]) -> Settings:
    """Settings from plain JSON values."""
    file = given["key_file"]
    return Settings(**given | {"hosts": tuple(given["hosts"]), "key_file": None if file is None else Path(file)})


def _end_with_the_input(folder: Path) -> None:
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)  # whoever else would have done it is gone; what is mapped stays so
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
