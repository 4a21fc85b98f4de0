"""Runs the commands of docs/tutorial.md in a folder of their own; as a program, writes their real output into it, and
what the tutorial's model answers over HTTP into docs/serving.md.

python -m tests.cli.tutorial
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
SERVING = TUTORIAL.with_name("serving.md")
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def write_pictures() -> None:
    """Make the folder `photos` by the tutorial's own Python."""
    found = re.search(r"```python\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    assert found is not None
    exec(found[1], {})


def run(command: str) -> tuple[str, int]:
    """One line after a `$`, run in the current folder: its output and exit code."""
    from zeroforget.cli import app

    program, *words = [part for word in shlex.split(command) for part in _expanded(word)]
    if program != "zeroforget":
        raise ValueError(f"the tutorial runs zeroforget only, not {program}")
    result = CliRunner().invoke(app, words, catch_exceptions=True)
    if isinstance(result.exception, (ValueError, OSError)):
        return _read(result.output) + f"error: {result.exception}\n", 2
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return _read(result.output), result.exit_code


def _read(output: str) -> str:
    """What is printed, without a line for each epoch: in a terminal these are a bar, which goes when it is full."""
    return re.sub(r"^  (candidate \d+, )?epoch \d+/.*\n", "", output, flags=re.MULTILINE)


def _expanded(word: str) -> list[str]:
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


def sessions(text: str) -> list[list[tuple[str, str]]]:
    """The console blocks: each a list of a command and the output printed below it."""
    out = []
    for block in _BLOCK.findall(text):
        parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
        out.append([(part.partition("\n")[0], part.partition("\n")[2]) for part in parts])
    return out


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder with the pictures, as the current one."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write_pictures()
            yield Path(folder)
        finally:
            os.chdir(before)


def _printed(command: str) -> str:
    output = run(command)[0]
    return f"$ {command}\n" + "".join(f"{line.rstrip()}\n" for line in output.splitlines())


def asked(text: str, model: str) -> str:
    """A page whose lines with curl are followed by what a server of the model answers."""
    command = [sys.executable, "-m", "zeroforget", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]

            def answer(match: re.Match[str]) -> str:
                words = shlex.split(match[1].replace("http://127.0.0.1:8000/", address))
                return f"$ {match[1]}\n{subprocess.check_output([*words, '--silent'], text=True)}\n"

            return re.sub(r"^\$ (curl .*)\n.*\n", answer, text, flags=re.MULTILINE)
        finally:
            server.terminate()


def main() -> None:
    """Replace the output of every command by what it prints now."""
    text = TUTORIAL.read_text()
    with workplace():
        new = _BLOCK.sub(lambda m: "```console\n" + "".join(_printed(c) for c, _ in sessions(m[0])[0]) + "```", text)
        serving = asked(SERVING.read_text(), "phone")
    TUTORIAL.write_text(new)
    SERVING.write_text(serving)


if __name__ == "__main__":
    sys.exit(main())
