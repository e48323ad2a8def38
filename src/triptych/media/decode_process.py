"""One process in which media are decoded. Started by ``decode_host``.

    start   imports the decoders, hears what it is held to, limits itself for good, says that it is ready
    task    reads the bytes, limits its memory and processor time, decodes, writes what comes out, answers
    end     when the other end of its socket is closed

An encoded item is a program that a stranger wrote for a decoder that others wrote: it can make it loop, take all
memory or crash. Here it takes itself along and nothing else: the kernel ends the process by an alarm of processor time,
refuses memory beyond the limit, and gives back what either held. No thread but one, no torch, and nothing that an
engine knows; what the decoders write to stderr is nobody's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import AvifImagePlugin, PpmImagePlugin

from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Stage
from triptych.core.media_options import PictureOptions
from triptych.media.audio import open_sound
from triptych.media.decode import Admitted, decode, explain, is_memory
from triptych.media.decode_answers import SEALS
from triptych.media.decode_ceiling import (
    Ceiling,
    clip_seconds,
    file_ceiling,
    picture_ceiling,
    process_memory,
    process_output,
    sound_seconds,
)
from triptych.media.decode_wire import (
    INDEX,
    MAX_MESSAGE,
    SAMPLE,
    TIMESTAMP,
    Answered,
    ClipTask,
    Failed,
    Frames,
    OutOfFiles,
    OutOfMemory,
    PictureTask,
    Pixels,
    Ready,
    Samples,
    Settings,
    SoundTask,
    Survey,
    SurveyTask,
    Working,
    pack,
    unpack_asked,
    unpack_settings,
)
from triptych.media.header import Size
from triptych.media.video import open_clip

if TYPE_CHECKING:
    from io import FileIO

    import numpy.typing as npt

    from triptych.media.decode_wire import Answer, Asked, Task

NICENESS = 5
"""Behind the engine, whose steps wait for no picture, and not so far that pictures wait long: a third of its share."""
_KEPT = 256 * 1024 * 1024
"""Bytes that the allocator may keep between items; it was seen to keep half of that, and gives them out again."""
_STATM = Path("/proc/self/statm")


class _Result(NamedTuple):
    """What is answered, and the descriptor that goes with it, to be closed."""

    answer: Answer
    descriptors: tuple[int, ...] = ()


class DecodeServer:
    """Does what the engine at the other end of a socket asks for, one task at a time.

    Args:
        channel: To the engine.
        settings: What this process is held to for good.
    """

    def __init__(self, channel: socket.socket, settings: Settings) -> None:
        self._channel = channel
        self._limits = settings.limits
        self._config = settings.config
        self._most = _mapped() + process_memory(settings.limits, settings.config) + _KEPT
        resource.setrlimit(resource.RLIMIT_AS, (self._most, self._most))
        resource.setrlimit(resource.RLIMIT_FSIZE, (process_output(settings.limits),) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def serve(self) -> bool:
        """Do one task; False when there are no more."""
        message, descriptors, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE, 1)
        if not message:
            return False
        asked = unpack_asked(message)
        try:
            if not descriptors:  # the kernel found no number for it
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            result = self._done(asked, descriptors[0])
        except Exception as error:
            result = _Result(_failure(asked.task, error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        socket.send_fds(self._channel, [pack(Answered(asked.number, result.answer))], result.descriptors)
        for descriptor in result.descriptors:
            os.close(descriptor)
        return True

    def _done(self, asked: Asked, descriptor: int) -> _Result:
        task = asked.task
        if isinstance(task, PictureTask):
            ceiling = picture_ceiling(Size(task.width, task.height), task.fit, task.length, self._config)
        else:
            ceiling = file_ceiling(task.length, self._limits, self._config)
        self._hold(ceiling)
        try:
            data = os.pread(descriptor, task.length, 0)
        finally:
            os.close(descriptor)
        if isinstance(task, PictureTask):
            return _picture(task, data)
        if isinstance(task, SurveyTask):
            with open_clip(0, data, task.sampling, self._limits, task.fit) as clip:
                return _Result(Survey(*clip.survey))
        if isinstance(task, ClipTask):
            return self._clip(asked.number, task, data)
        return self._sound(asked.number, task, data)

    def _hold(self, ceiling: Ceiling) -> None:
        signal.setitimer(signal.ITIMER_PROF, ceiling.seconds)
        resource.setrlimit(resource.RLIMIT_AS, (min(_mapped() + ceiling.memory, self._most), self._most))

    def _clip(self, number: bytes, task: ClipTask, data: bytes) -> _Result:
        with open_clip(0, data, task.sampling, self._limits, task.fit) as clip, _Paper() as paper:
            self._work(number, clip_seconds(clip.survey.decoded_pixels, len(data), self._config))
            plan, size = clip.decode(paper.write)
            paper.write(np.array(plan.indices, INDEX))
            paper.write(np.array(plan.timestamps, TIMESTAMP))
            answer = Frames(len(plan.indices), size.height, size.width, plan.fps, plan.total, plan.duration)
            return _Result(answer, (paper.seal(),))

    def _sound(self, number: bytes, task: SoundTask, data: bytes) -> _Result:
        with open_sound(0, data, self._limits, of_film=task.of_film) as sound, _Paper() as paper:
            self._work(number, sound_seconds(sound.samples, sound.packets, len(data), self._config))
            count = sound.decode(task.rate, lambda stretch: paper.write(stretch.astype(SAMPLE, copy=False)))
            return _Result(Samples(count), (paper.seal(),))

    def _work(self, number: bytes, seconds: float) -> None:
        """Say what is granted from here on."""
        self._channel.send(pack(Answered(number, Working(seconds))))
        signal.setitimer(signal.ITIMER_PROF, seconds)


class _Paper:
    """Memory that what is decoded is written to as it comes, and that nobody can change any more when it is sealed."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("decoded", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.file: FileIO = open(self._descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
        self._sealed = False

    def write(self, numbers: npt.NDArray[Any]) -> None:
        """Add to it."""
        left = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data
        while left:
            left = left[self.file.write(left) :]

    def seal(self) -> int:
        """The descriptor, which is the caller's to close."""
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
        self._sealed = True
        return self._descriptor

    def __enter__(self) -> _Paper:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        if not self._sealed:
            os.close(self._descriptor)


def _picture(task: PictureTask, data: bytes) -> _Result:
    with _Paper() as paper:
        admitted = Admitted(task.kind, Size(task.width, task.height))
        image, source = decode(0, data, admitted, PictureOptions(task.background), task.fit)
        image.save(paper.file, PpmImagePlugin.PpmImageFile.format)  # packed without a copy between
        return _Result(Pixels(image.width, image.height, source.width, source.height), (paper.seal(),))


def _failure(task: Task, error: Exception) -> Answer:
    """What is said of it. Hostile bytes reach decoders written by others: whatever they raise, the item is no good."""
    if isinstance(error, MediaUnavailable) or is_memory(error):
        return OutOfMemory()
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return OutOfFiles()
    if isinstance(error, MediaError):
        return Failed(error.stage, error.reason)
    if isinstance(task, PictureTask):
        return Failed(Stage.DECODE, explain(task.kind, error))
    return Failed(Stage.DECODE, f"damaged or cut off: {error}")


def _mapped() -> int:
    """Bytes of address space that this process has."""
    return int(_STATM.read_text().split()[0]) * resource.getpagesize()


def main() -> None:
    """Serve the engine at the other end of the socket that the command line names."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine drains first; its end is ours
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each would take memory of its own
    os.nice(NICENESS)
    with contextlib.suppress(ConnectionError):  # the other end is gone
        message = channel.recv(MAX_MESSAGE)
        if not message:
            return
        server = DecodeServer(channel, unpack_settings(message))
        channel.send(pack(Ready()))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while server.serve():
            pass


if __name__ == "__main__":
    main()
