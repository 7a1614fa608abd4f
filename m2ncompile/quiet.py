"""Keeps libraries' chatter off the terminal, and has it ready when something fails."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["captured_output"]


@contextmanager
def captured_output() -> Iterator[None]:
    """Sends file descriptors 1 and 2 to a scratch file.

    vLLM and torch log through handlers that they set up on import, from C++ and
    from subprocesses, so only the descriptors catch all of it. An exception that
    leaves the block gets the last lines as a note.
    """
    with tempfile.TemporaryFile() as scratch:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        try:
            os.dup2(scratch.fileno(), 1)
            os.dup2(scratch.fileno(), 2)
            yield
        except BaseException as error:
            _flush()
            scratch.seek(0)
            tail = scratch.read()[-4000:].decode(errors="replace").strip()
            if tail:
                error.add_note(f"output before the error:\n{tail}")
            raise
        finally:
            _flush()
            for target, fd in zip((1, 2), saved, strict=True):
                os.dup2(fd, target)
                os.close(fd)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
