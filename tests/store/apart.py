"""What another process does to a model: `python -m tests.store.apart hold|read FOLDER`.

`hold` takes the lock, says so, and lets go when a line comes; `read` gives up its rights, and reads but cannot change.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zeroforget.store import ModelError, open_model
from zeroforget.store.writing import locked


def start(what: str, folder: Path) -> subprocess.Popen[str]:
    """This file as a program."""
    words = [sys.executable, "-m", "tests.store.apart", what, str(folder)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hold(folder: Path) -> None:
    with locked(folder, "another", wait=None, say=print):
        print("held", flush=True)
        sys.stdin.readline()


def read(folder: Path) -> str | None:
    open_model(folder).verify()  # what is imported on the way may be out of this user's reach later
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
    model = open_model(folder)
    try:
        model.undo()
    except ModelError as error:
        if "may not be written by this user; predict" not in str(error):
            return f"a wrong message: {error}"
    else:
        return "it could be changed"
    return None if model.verify() else "it could not be verified"


if __name__ == "__main__":
    sys.exit((read if sys.argv[1] == "read" else hold)(Path(sys.argv[2])))
