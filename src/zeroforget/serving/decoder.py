"""A process that decodes pictures for the server. It may be killed at any moment: it knows nothing and holds nothing.

It is run as a script, with the path of the decoder's own file, and imports nothing else of ours: so it starts quickly.
A request is a head and the picture's file; an answer is a status, a length, and the bytes of the image or the reason.
"""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

from PIL import Image, UnidentifiedImageError

REQUEST = struct.Struct(">4I2Q")
"""Channels, height, width, seconds at most, pixels at most, bytes that follow."""
ANSWER = struct.Struct(">BI")
DONE, TOO_LARGE, UNREADABLE = range(3)
ROOM = 2**30
"""Bytes of memory beside 24 for each pixel that may be decoded."""


def answered(decoder: Any, content: bytes, shape: tuple[int, int, int], most: int) -> tuple[int, bytes]:
    """The image, or what is wrong with the file."""
    try:
        return DONE, decoder.covering(io.BytesIO(content), shape, most).tobytes()
    except decoder.TooLarge as error:
        return TOO_LARGE, str(error).encode()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return TOO_LARGE, f"has too many pixels; at most {most:,} are decoded".encode()
    except UnidentifiedImageError:
        return UNREADABLE, b"is no picture of a format that is read here"
    except MemoryError:
        return UNREADABLE, b"cannot be decoded: it takes too much memory"
    except Exception as error:  # decoders raise all kinds; whatever it is, the picture cannot be had
        return UNREADABLE, f"cannot be decoded: {str(error) or type(error).__name__}".encode(errors="replace")


def serve(decoder: Any, requests: BinaryIO, answers: BinaryIO) -> None:
    """Until nobody asks any more."""
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        channels, height, width, seconds, most, size = REQUEST.unpack(head)
        content = requests.read(size)
        if hasattr(signal, "alarm"):
            signal.alarm(seconds)  # whoever asked may be gone, and nobody else would end it
        status, found = answered(decoder, content, (channels, height, width), most)
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        answers.write(ANSWER.pack(status, len(found)) + found)
        answers.flush()


def _bound_memory(pixels: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    most = ROOM + 24 * pixels
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """The script: the decoder's file and the pixels of one picture at most are its arguments."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    spec = importlib.util.spec_from_file_location("decode", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    decoder = importlib.util.module_from_spec(spec)
    sys.modules["decode"] = decoder
    spec.loader.exec_module(decoder)
    decoder.formats()
    _bound_memory(int(sys.argv[2]))
    answers.write(b"!")  # ready
    answers.flush()
    serve(decoder, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
