"""One process in which pictures are decoded. Started by ``decode_host``.

    start   imports the decoders, limits itself for good, says that it is ready
    task    reads the bytes, limits its memory and processor time, decodes, writes the pixels, answers
    end     when the other end of its socket is closed

An encoded picture is a program that a stranger wrote for a decoder that others wrote: it can make it loop, take all
memory or crash. Here it takes itself along and nothing else: the kernel ends the process by an alarm of processor time,
refuses memory beyond the limit, and gives back what either held. No thread but one, no torch, and nothing that an
engine knows; what the decoders write to stderr is nobody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import AvifImagePlugin, PpmImagePlugin

from triptych.core.media_options import PictureOptions
from triptych.media.decode import Admitted, decode, explain, is_memory
from triptych.media.decode_wire import MAX_MESSAGE, READY, Answer, Outcome, Task
from triptych.media.header import Size

if TYPE_CHECKING:
    from PIL.Image import Image

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""What keeps a descriptor's content and length as they are, whoever else has it."""

_KEPT = 256 * 1024 * 1024
"""Bytes that the allocator may keep between pictures; it was seen to keep half of that, and gives them out again."""
_STATM = Path("/proc/self/statm")


def main() -> None:
    """Serve the engine that the command line tells of: a socket, bytes of memory and of output at most."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine drains first; its end is ours
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each would take memory of its own
    most = _mapped() + int(sys.argv[2]) + _KEPT
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ConnectionError):  # the other end is gone
        channel.send(READY)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while _serve(channel, most):
            pass


def _serve(channel: socket.socket, most: int) -> bool:
    """Do one task; False when there are no more."""
    message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 1)
    if not message:
        return False
    task = Task.unpack(message)
    signal.setitimer(signal.ITIMER_PROF, task.seconds)
    resource.setrlimit(resource.RLIMIT_AS, (min(_mapped() + task.memory, most), most))
    pixels: list[int] = []
    try:
        image = _decode(task, descriptors[0])
        pixels.append(_write(image))
        answer = Answer(Outcome.DONE, Size(*image.size))
    except Exception as error:
        # Hostile bytes reach a decoder written by others: whatever it raises means that they are no good picture.
        outcome = Outcome.MEMORY if is_memory(error) else Outcome.DAMAGED
        answer = Answer(outcome, reason=explain(task.kind, error))
    signal.setitimer(signal.ITIMER_PROF, 0)
    socket.send_fds(channel, [answer.pack()], pixels)
    for descriptor in pixels:
        os.close(descriptor)
    return True


def _decode(task: Task, descriptor: int) -> Image:
    try:
        data = os.pread(descriptor, task.length, 0)
    finally:
        os.close(descriptor)
    return decode(data, Admitted(task.kind, task.size), PictureOptions(task.background))


def _write(image: Image) -> int:
    """A descriptor of the pixels that nobody can change any more; they are packed into it without a copy between."""
    descriptor = os.memfd_create("pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        image.save(file, PpmImagePlugin.PpmImageFile.format)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
    return descriptor


def _mapped() -> int:
    """Bytes of address space that this process has."""
    return int(_STATM.read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
