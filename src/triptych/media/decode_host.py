"""The engine's end of one decode process: started at the first item, started again when it is gone.

    bytes -> a descriptor and a task -> the process -> an answer, checked -> Picture, Clip or Sound where it lies
                                          |
                                          +-> gone, late, lying or out of memory: a MediaError, and another process
                                          +-> hurried: MediaUnavailable, and no other process any more

What an answer says is believed nowhere: decode_channel.py looks whether it is one to what was asked, decode_answers.py
at what was decoded. An item is to blame for what its own task did to the process; for what was amiss before, and for
what the engine lacks, it is not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from triptych.core.errors import Draining, Internal, MediaError, MediaUnavailable
from triptych.core.media import Stage
from triptych.media.decode_answers import clip_of, picture_of, sound_of, survey_of
from triptych.media.decode_ceiling import (
    Ceiling,
    file_ceiling,
    most_clip_seconds,
    most_sound_seconds,
    picture_ceiling,
)
from triptych.media.decode_channel import Channel, Unasked
from triptych.media.decode_wire import (
    ClipTask,
    Failed,
    Frames,
    OutOfFiles,
    OutOfMemory,
    PictureTask,
    Pixels,
    Samples,
    Settings,
    SoundTask,
    Survey,
    SurveyTask,
    Working,
)
from triptych.media.windows import window_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.clip import Clip, ClipSurvey, FrameFit, FrameSampling
    from triptych.core.config import DecodeConfig, MediaLimits
    from triptych.core.media import Picture
    from triptych.core.media_options import PictureOptions
    from triptych.core.picture_fit import PictureFit
    from triptych.core.sound import Sound
    from triptych.media.decode import Admitted
    from triptych.media.decode_channel import Reply
    from triptych.media.decode_wire import Task

START_SECONDS = 60.0
STOP_SECONDS = 5.0
PATIENCE = 10.0
"""Seconds that an item may take for each of its seconds of processor time: others work here too."""
_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")
"""Of the engine's environment: what it takes to start Python."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Decoded = TypeVar("Decoded")
Done = TypeVar("Done", Pixels, Survey, Frames, Samples)


@dataclass(frozen=True, slots=True)
class _Job(Generic[Done, Decoded]):
    """One item that the process is asked for, and what the engine makes of its answer."""

    index: int
    what: str
    """It, in words."""
    task: Task
    ceiling: Ceiling
    """To begin with."""
    most_seconds: float
    """What the process may grant it later."""
    answer: type[Done]
    taken: Callable[[Done, int], Decoded]
    """What was decoded, from the answer and its descriptor. Raises ValueError where it is something else."""
    descriptors: int = 1
    """That come with the answer; where there is none, ``taken`` gets -1."""


class DecodeProcess:
    """One process. Thread-safe; every method may block.

    What decodes raises MediaError where the item is damaged, cut off, or over a limit or a ceiling, MediaUnavailable
    where the process cannot be had, does not start, was killed from outside, or gave way to ``hurry``, and where the
    engine or the process has too many open files.

    Args:
        limits: of the items that it will be given.
        config: what decoding them may take.
    """

    def __init__(self, limits: MediaLimits, config: DecodeConfig) -> None:
        self._limits = limits
        self._config = config
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._hurried = False
        self.starts = 0
        """How often a process was started."""
        self.deaths = 0
        """How often one had to be given up, or ended by itself."""

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        process = self._process
        return process.pid if process is not None else 0

    def start(self) -> None:
        """Have a process that is ready.

        Raises:
            Internal: it does not start.
            Draining: it was told to hurry.
        """
        try:
            with self._lock:
                self._running()
        except OSError as error:
            raise Internal(f"no process can be started to decode media: {_reason(error)}") from error

    def picture(
        self, index: int, data: bytes, admitted: Admitted, options: PictureOptions, fit: PictureFit | None = None
    ) -> Picture:
        """The pixels of an admitted picture, where the process wrote them."""
        kind, size = admitted
        ceiling = picture_ceiling(size, fit, len(data), self._config)
        task = PictureTask(len(data), kind, size.width, size.height, options.background, fit)
        what = f"{kind.value} picture of {size.width} x {size.height}"
        taken = partial(picture_of, claimed=size, fit=fit)
        return self._decode(data, _Job(index, what, task, ceiling, ceiling.seconds, Pixels, taken))

    def survey(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> ClipSurvey:
        """What decoding a video will cost."""
        ceiling = file_ceiling(len(data), self._limits, self._config)
        task = SurveyTask(len(data), sampling, fit)

        def taken(answer: Survey, _: int) -> ClipSurvey:
            return survey_of(answer, sampling, self._limits)

        return self._decode(data, _Job(index, "video", task, ceiling, ceiling.seconds, Survey, taken, descriptors=0))

    def clip(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> Clip:
        """The chosen frames of a video, where the process wrote them."""
        ceiling = file_ceiling(len(data), self._limits, self._config)
        seconds = most_clip_seconds(len(data), self._limits, self._config)
        taken = partial(clip_of, sampling=sampling, fit=fit, limits=self._limits)
        task = ClipTask(len(data), sampling, fit)
        return self._decode(data, _Job(index, "video", task, ceiling, seconds, Frames, taken))

    def sound(
        self, index: int, data: bytes, rate: int, window_seconds: float | None = None, *, of_film: bool = False
    ) -> Sound:
        """The samples of a sound, where the process wrote them."""
        ceiling = file_ceiling(len(data), self._limits, self._config)
        seconds = most_sound_seconds(len(data), self._limits, self._config)
        window = window_length(window_seconds, rate)
        taken = partial(sound_of, rate=rate, window=window, limits=self._limits)
        task = SoundTask(len(data), rate, of_film)
        return self._decode(data, _Job(index, "sound", task, ceiling, seconds, Samples, taken))

    def hurry(self) -> None:
        """End what runs and start nothing any more, for good. At once, from any thread; ``close`` comes after it.

        Waits for no lock that is held while something is decoded or started. Who decodes or starts finds the channel
        cut, and kills the process by itself: only the thread that waits for a process ends it.
        """
        self._hurried = True  # first: who sets a channel looks here after that, so that one of the two is seen
        channel = self._channel
        if channel is not None:
            channel.cut()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _decode(self, data: bytes, job: _Job[Done, Decoded]) -> Decoded:
        with self._lock:
            try:
                channel = self._send(job, data)
            except Draining as error:
                raise MediaUnavailable(job.index, str(error), Stage.DECODE) from None
            except (OSError, Internal) as error:
                reason = f"no process can be had to decode it: {_reason(error)}; retry later"
                raise MediaUnavailable(job.index, reason, Stage.DECODE) from error
            return self._answer(channel, job)

    def _send(self, job: _Job[Done, Decoded], data: bytes) -> Channel:
        """Hand a task over, to a new process where the old one is found gone, or speaks unasked."""
        descriptor = os.memfd_create("encoded", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            for last in (False, True):
                channel = self._running()
                try:
                    channel.ask(job.task, descriptor)
                    return channel
                except OSError:
                    self._fault(kill=True)
                    if last:
                        raise
            raise AssertionError("the second try returns or raises")
        finally:
            os.close(descriptor)

    def _answer(self, channel: Channel, job: _Job[Done, Decoded]) -> Decoded:
        """What was decoded, or why there is nothing."""
        seconds = job.ceiling.seconds
        try:
            for _ in range(2):
                with channel.reply(seconds * PATIENCE) as reply:
                    if not isinstance(reply.answer, Working):
                        return self._taken(reply, job)
                    seconds = min(reply.answer.seconds, job.most_seconds)
            raise ValueError("it says twice that it works")
        except TimeoutError:
            self._fault(kill=True)
            reason = f"not decoded within {seconds * PATIENCE:.0f} s: this machine is busy; retry later"
            raise MediaUnavailable(job.index, reason, Stage.DECODE) from None
        except Unasked as error:
            self._fault(kill=True)  # who made it so cannot be told: this item, or one before it
            raise MediaUnavailable(job.index, f"its decoder is amiss: {error}; retry later", Stage.DECODE) from error
        except OSError:
            status = self._fault()
            if self._hurried:
                raise MediaUnavailable(job.index, str(_hurried()), Stage.DECODE) from None
            raise _death(job, status, seconds) from None
        except ValueError as error:
            self._fault(kill=True)  # whatever answers there is not what was started
            raise MediaError(job.index, f"its decoder gives no sane answer: {error}", Stage.DECODE) from error

    def _taken(self, reply: Reply, job: _Job[Done, Decoded]) -> Decoded:
        """What was decoded, or why there is nothing.

        Raises:
            ValueError: the answer is none to this task.
        """
        answer = reply.answer
        if reply.lost:
            raise _no_descriptor(job, "the engine")
        if isinstance(answer, OutOfFiles):
            self._fault(kill=True)  # it needs a dozen: this one may have lost some
            raise _no_descriptor(job, "its decoder")
        if isinstance(answer, job.answer) and len(reply.descriptors) == job.descriptors:
            try:
                return job.taken(answer, *(reply.descriptors or [-1]))
            except OSError as error:
                reason = f"what was decoded cannot be mapped: {_reason(error)}; retry later"
                raise MediaUnavailable(job.index, reason, Stage.DECODE) from error
        if isinstance(answer, OutOfMemory):
            self._fault(kill=True)  # what ran out of memory in its middle is not asked again
            what = f"decoding this {job.what} takes more than {job.ceiling.memory >> 20} MiB (--decode-memory-bytes)"
            raise MediaError(job.index, what, Stage.LIMIT)
        if isinstance(answer, Failed):
            reason = "".join(letter for letter in answer.reason if letter.isprintable())
            raise MediaError(job.index, reason, answer.stage)
        raise ValueError(f"{type(answer).__name__} with {len(reply.descriptors)} descriptors for a {job.what}")

    def _running(self) -> Channel:
        if self._process is not None and self._process.poll() is not None:
            self._fault()
        if self._hurried:
            raise _hurried()
        return self._channel if self._channel is not None else self._start()

    def _start(self) -> Channel:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = channel = Channel(ours)
        try:
            with theirs:
                if self._hurried:
                    raise _hurried()
                self._process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "triptych.media.decode_process", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in a terminal does not reach it
                    env=_environment(),
                )
            self.starts += 1
            self._greet(channel)
        except BaseException:
            self._end(kill=True)
            raise
        return channel

    def _greet(self, channel: Channel) -> None:
        try:
            channel.greet(Settings(self._limits, self._config), START_SECONDS)
        except (OSError, ValueError) as error:
            if self._hurried:
                raise _hurried() from None
            what = "the process that decodes media does not start; its own message is in the log"
            raise Internal(what) from error

    def _fault(self, *, kill: bool = False) -> int:
        if not self._hurried:
            self.deaths += 1
        return self._end(kill=kill)

    def _end(self, *, kill: bool = False) -> int:
        """End the process, which does so by itself when its channel is closed; its exit status."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is None:
            return 0
        process, self._process = self._process, None
        if not (kill or self._hurried):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(STOP_SECONDS)
        process.kill()
        return process.wait()


def _environment() -> dict[str, str]:
    """Nothing that others have no business with, such as secrets."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ} | dict.fromkeys(_THREADS, "1")


def _hurried() -> Draining:
    return Draining("the engine is shutting down; retry elsewhere")


def _reason(error: OSError | Internal) -> str:
    """On one line, with the knob where there is one."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files (ulimit -n)"
    return str(error)


def _no_descriptor(job: _Job[Done, Decoded], who: str) -> MediaUnavailable:
    reason = f"{who} has too many open files (ulimit -n) to decode it; retry later"
    return MediaUnavailable(job.index, reason, Stage.DECODE)


def _death(job: _Job[Done, Decoded], status: int, seconds: float) -> MediaError:
    """Why there is no answer."""
    if status == -signal.SIGPROF:
        reason = f"decoding this {job.what} took more than {seconds:.1f} s of processor time (--decode-seconds)"
        return MediaError(job.index, reason, Stage.LIMIT)
    if status == -signal.SIGKILL:
        reason = "the process that decoded it was killed, perhaps for want of memory; retry later"
        return MediaUnavailable(job.index, reason, Stage.DECODE)
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return MediaError(job.index, f"damaged {job.what}: its decoder crashed ({how})", Stage.DECODE)
