"""One process in which media are decoded. Started by ``decode_host``.

    start   imports the decoders, hears what it is held to, limits itself for good, says that it is ready
    task    limits its memory and processor time, reads the bytes, decodes into memory that it was lent, answers
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
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import AvifImagePlugin, PpmImagePlugin

from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Stage
from triptych.core.media_options import PictureOptions
from triptych.media.audio import open_sound
from triptych.media.decode import Admitted, decode, explain, is_memory
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
    framed,
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


class DecodeServer:
    """Does what the engine asks for, one task at a time.

    Args:
        tasks: A socket that they come by.
        answers: A pipe that they go to.
        settings: What this process is held to for good.
    """

    def __init__(self, tasks: socket.socket, answers: int, settings: Settings) -> None:
        self._tasks = tasks
        self._answers = answers
        self._limits = settings.limits
        self._config = settings.config
        self._most = _mapped() + process_memory(settings.limits, settings.config) + _KEPT
        resource.setrlimit(resource.RLIMIT_AS, (self._most, self._most))
        resource.setrlimit(resource.RLIMIT_FSIZE, (process_output(settings.limits),) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def serve(self) -> bool:
        """Do one task; False when there are no more."""
        message, descriptors, _, _ = socket.recv_fds(self._tasks, MAX_MESSAGE, 2)
        if not message:
            return False
        asked = unpack_asked(message)
        try:
            with contextlib.ExitStack() as files:
                source, output = _opened(descriptors, files)
                answer = self._done(asked, source, output)
                # The engine does so too. It is quicker where it was written: the pages are in that processor's hands.
                fcntl.fcntl(output, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        except Exception as error:
            answer = _failure(asked.task, error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._say(asked.number, answer)
        return True

    def _say(self, number: bytes, answer: Answer) -> None:
        os.write(self._answers, framed(pack(Answered(number, answer))))

    def _done(self, asked: Asked, source: FileIO, output: FileIO) -> Answer:
        task = asked.task
        if isinstance(task, PictureTask):
            ceiling = picture_ceiling(Size(task.width, task.height), task.fit, task.length, self._config)
        else:
            ceiling = file_ceiling(task.length, self._limits, self._config)
        self._hold(ceiling)
        with source:
            data = os.pread(source.fileno(), task.length, 0)
        if isinstance(task, PictureTask):
            return _picture(task, data, output)
        if isinstance(task, SurveyTask):
            with open_clip(0, data, task.sampling, self._limits, task.fit) as clip:
                return Survey(*clip.survey)
        if isinstance(task, ClipTask):
            return self._clip(asked.number, task, data, output)
        return self._sound(asked.number, task, data, output)

    def _hold(self, ceiling: Ceiling) -> None:
        signal.setitimer(signal.ITIMER_PROF, ceiling.seconds)
        resource.setrlimit(resource.RLIMIT_AS, (min(_mapped() + ceiling.memory, self._most), self._most))

    def _clip(self, number: bytes, task: ClipTask, data: bytes, output: FileIO) -> Frames:
        with open_clip(0, data, task.sampling, self._limits, task.fit) as clip:
            self._work(number, clip_seconds(clip.survey.decoded_pixels, len(data), self._config))
            plan, size = clip.decode(lambda frame: _write(output, frame))
            _write(output, np.array(plan.indices, INDEX))
            _write(output, np.array(plan.timestamps, TIMESTAMP))
            return Frames(len(plan.indices), size.height, size.width, plan.fps, plan.total, plan.duration)

    def _sound(self, number: bytes, task: SoundTask, data: bytes, output: FileIO) -> Samples:
        with open_sound(0, data, self._limits, of_film=task.of_film) as sound:
            self._work(number, sound_seconds(sound.samples, sound.packets, len(data), self._config))
            return Samples(sound.decode(task.rate, lambda stretch: _write(output, stretch.astype(SAMPLE, copy=False))))

    def _work(self, number: bytes, seconds: float) -> None:
        """Say what is granted from here on."""
        self._say(number, Working(seconds))
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _opened(descriptors: list[int], files: contextlib.ExitStack) -> list[FileIO]:
    """The bytes, and what comes out; both are closed before it is answered: the engine seals what nobody writes to."""
    opened = [files.enter_context(open(descriptor, "r+b", buffering=0)) for descriptor in descriptors]  # noqa: SIM115
    if len(opened) < 2:  # the kernel found no number for one
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return opened


def _write(file: FileIO, numbers: npt.NDArray[Any]) -> None:
    left = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data
    while left:
        left = left[file.write(left) :]


def _picture(task: PictureTask, data: bytes, output: FileIO) -> Pixels:
    admitted = Admitted(task.kind, Size(task.width, task.height))
    image, source = decode(0, data, admitted, PictureOptions(task.background), task.fit)
    image.save(output, PpmImagePlugin.PpmImageFile.format)  # packed without a copy between
    return Pixels(image.width, image.height, source.width, source.height)


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
    """Serve the engine; the command line names the socket that tasks come by and the pipe that answers go to."""
    tasks, answers = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine drains first; its end is ours
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each would take memory of its own
    os.nice(NICENESS)
    with contextlib.suppress(ConnectionError):  # the other end is gone
        message = tasks.recv(MAX_MESSAGE)
        if not message:
            return
        server = DecodeServer(tasks, answers, unpack_settings(message))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(answers, framed(pack(Ready())))
        while server.serve():
            pass


if __name__ == "__main__":
    main()
