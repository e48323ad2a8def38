"""The engine's end of one decode process: started at the first item, started again when it is gone.

    bytes -> a task, and memory for what comes out -> the process -> an answer, checked -> Picture, Clip or Sound
                                                        |
                                                        +-> late or out of memory: a MediaError, and another process
                                                        +-> gone or lying: once more, if it was asked before
                                                        +-> hurried: MediaUnavailable, and no other process any more

What an answer says is believed nowhere: decode_channel.py looks whether it is one to what was asked, decode_answers.py
at what was decoded. Of a process that breaks off or lies nobody can tell which of its items made it so, unless it had
only one: that one is to blame, and any other is decoded once more, by a process that has seen nothing else. For what
the engine lacks no item is to blame.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from triptych.core.errors import Draining, Internal, MediaError, MediaUnavailable
from triptych.core.media import Stage
from triptych.media.bell import Bell
from triptych.media.decode_answers import (
    clip_of,
    clip_room,
    picture_of,
    picture_room,
    sound_of,
    sound_room,
    survey_of,
)
from triptych.media.decode_ceiling import (
    Ceiling,
    file_ceiling,
    most_clip_seconds,
    most_sound_seconds,
    picture_ceiling,
    process_output,
)
from triptych.media.decode_child import Child
from triptych.media.decode_output import Output
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
    from triptych.media.decode_wire import Answer, Task

START_SECONDS = 60.0
STOP_SECONDS = 5.0
MOMENT = 0.2
"""Seconds between the end of a channel and that of its process, where it was not closed on purpose."""
PATIENCE = 10.0
"""Seconds that an item may take for each of its seconds of processor time: others work here too."""
STILL = 30.0
"""Seconds without any processor time, after which a process is waited for no more: it sleeps, or somebody stopped it.
However busy a machine is, it gives everybody a moment."""

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
    taken: Callable[[Done, Output], Decoded]
    """What was decoded. Raises ValueError where it is something else, OSError where it cannot be mapped."""
    room: int = 0
    """Bytes that may come out."""


class _Astray(NamedTuple):
    """A process broke off or lied, and was ended."""

    kind: type[MediaError]
    """What is said of the item; likewise the reason."""
    reason: str
    again: bool
    """Whether another item may have made it so."""
    stage: Stage = Stage.DECODE


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
        self._child: Child | None = None
        self._hurry = Bell()
        self.starts = 0
        """How often a process was started."""
        self.deaths = 0
        """How often one had to be given up, or ended by itself."""

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        child = self._child
        return child.pid if child is not None else 0

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
        room = picture_room(size, fit)
        return self._decode(data, _Job(index, what, task, ceiling, ceiling.seconds, Pixels, taken, room))

    def survey(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> ClipSurvey:
        """What decoding a video will cost."""
        ceiling = file_ceiling(len(data), self._limits, self._config)
        task = SurveyTask(len(data), sampling, fit)

        def taken(answer: Survey, _: Output) -> ClipSurvey:
            return survey_of(answer, sampling, self._limits)

        return self._decode(data, _Job(index, "video", task, ceiling, ceiling.seconds, Survey, taken))

    def clip(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> Clip:
        """The chosen frames of a video, where the process wrote them."""
        ceiling = file_ceiling(len(data), self._limits, self._config)
        seconds = most_clip_seconds(len(data), self._limits, self._config)
        taken = partial(clip_of, sampling=sampling, fit=fit, limits=self._limits)
        task = ClipTask(len(data), sampling, fit)
        room = clip_room(sampling, self._limits)
        return self._decode(data, _Job(index, "video", task, ceiling, seconds, Frames, taken, room))

    def sound(
        self, index: int, data: bytes, rate: int, window_seconds: float | None = None, *, of_film: bool = False
    ) -> Sound:
        """The samples of a sound, where the process wrote them."""
        ceiling = file_ceiling(len(data), self._limits, self._config)
        seconds = most_sound_seconds(len(data), self._limits, self._config)
        window = window_length(window_seconds, rate)
        taken = partial(sound_of, rate=rate, window=window, limits=self._limits)
        task = SoundTask(len(data), rate, of_film)
        room = sound_room(rate, self._limits)
        return self._decode(data, _Job(index, "sound", task, ceiling, seconds, Samples, taken, room))

    def hurry(self) -> None:
        """End what runs and start nothing any more, for good; ``close`` comes after it.

        At once, from any thread: no lock is taken. Who waits for a process hears it, and ends the process.
        """
        self._hurry.ring()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end(STOP_SECONDS)

    def _decode(self, data: bytes, job: _Job[Done, Decoded]) -> Decoded:
        with self._lock:
            try:
                outcome = self._attempt(data, job)
                if isinstance(outcome, _Astray) and outcome.again:
                    outcome = self._attempt(data, job)  # by another process, which is asked nothing else before
            except Draining as error:
                raise MediaUnavailable(job.index, str(error), Stage.DECODE) from None
            except (OSError, Internal) as error:
                reason = f"no process can be had to decode it: {_reason(error)}; retry later"
                raise MediaUnavailable(job.index, reason, Stage.DECODE) from error
        if isinstance(outcome, _Astray):
            raise outcome.kind(job.index, outcome.reason, outcome.stage)
        return outcome

    def _attempt(self, data: bytes, job: _Job[Done, Decoded]) -> Decoded | _Astray:
        """What one process makes of the item.

        Raises:
            MediaError: the item is no good, or it cannot be decoded just now.
            Draining: it was told to hurry.
            Internal: none can be started.
            OSError: likewise, or the item cannot be handed over.
        """
        child = self._running()
        before = child.channel.asked
        with Output(min(job.room, process_output(self._limits))) as output:
            source = os.memfd_create("encoded", os.MFD_CLOEXEC)
            try:
                with open(source, "wb", closefd=False) as file:
                    file.write(data)
                child.channel.ask(job.task, source, output.descriptor)
            except ConnectionError as error:
                self._fault()
                reason = f"no process can be had to decode it: {error}; retry later"
                return _Astray(MediaUnavailable, reason, again=True)
            finally:
                os.close(source)
            return self._answer(child, output, job, again=before)

    def _answer(self, child: Child, output: Output, job: _Job[Done, Decoded], *, again: bool) -> Decoded | _Astray:
        """What was decoded, or why there is nothing."""
        seconds, begin = job.ceiling.seconds, time.monotonic()
        try:
            for _ in range(2):
                answer = _reply(child, seconds * PATIENCE)
                if not isinstance(answer, Working):
                    return self._taken(answer, output, job, again=again)
                seconds = min(max(answer.seconds, self._config.decode_seconds), job.most_seconds)
            raise ValueError("it says twice that it works")
        except _StoodStill:
            self._fault()
            return _Astray(MediaUnavailable, f"its decoder did nothing for {STILL:.1f} s; retry later", again)
        except TimeoutError:
            self._fault()
            reason = f"not decoded within {seconds * PATIENCE:.1f} s: this machine is busy; retry later"
            raise MediaUnavailable(job.index, reason, Stage.DECODE) from None
        except OSError:
            status = self._fault(MOMENT)
            if self._hurry.rung:
                raise _hurried() from None
            if status == -signal.SIGPROF:
                reason = f"decoding this {job.what} took more than {seconds:.1f} s of processor time (--decode-seconds)"
                early = time.monotonic() - begin < seconds  # then it says so, and has not
                return _Astray(MediaError, reason, again and early, Stage.LIMIT)
            return _death(job.what, status, again=again)
        except ValueError as error:
            self._fault()  # whatever answers there is not what was started
            return _insane(str(error), again=again)

    def _taken(self, answer: Answer, output: Output, job: _Job[Done, Decoded], *, again: bool) -> Decoded | _Astray:
        """What was decoded, or why there is nothing.

        Raises:
            ValueError: the answer is none to this task.
        """
        if isinstance(answer, OutOfFiles):
            self._fault()  # it needs a dozen: this one may have lost some
            reason = "its decoder has too many open files (ulimit -n) to decode it; retry later"
            raise MediaUnavailable(job.index, reason, Stage.DECODE)
        if isinstance(answer, job.answer):
            try:
                return job.taken(answer, output)
            except OSError as error:
                reason = f"what was decoded cannot be mapped: {_reason(error)}; retry later"
                raise MediaUnavailable(job.index, reason, Stage.DECODE) from error
        if isinstance(answer, OutOfMemory):
            self._fault()  # what ran out of memory in its middle is not asked again
            what = f"decoding this {job.what} takes more than {job.ceiling.memory >> 20} MiB (--decode-memory-bytes)"
            return _Astray(MediaError, what, again, Stage.LIMIT)
        if isinstance(answer, Failed):
            reason = "".join(letter for letter in answer.reason if letter.isprintable())
            raise MediaError(job.index, reason, answer.stage)
        raise ValueError(f"{type(answer).__name__} for a {job.what}")

    def _running(self) -> Child:
        if self._child is not None and self._child.has_ended():
            self._fault()
        if self._hurry.rung:
            raise _hurried()
        return self._child if self._child is not None else self._start()

    def _start(self) -> Child:
        self._child = child = Child(self._hurry)
        self.starts += 1
        try:
            child.channel.greet(Settings(self._limits, self._config), START_SECONDS)
        except (OSError, ValueError) as error:
            self._end()
            if self._hurry.rung:
                raise _hurried() from None
            what = "the process that decodes media does not start; its own message is in the log"
            raise Internal(what) from error
        except BaseException:
            self._end()
            raise
        return child

    def _fault(self, seconds: float = 0.0) -> int | None:
        if not self._hurry.rung:
            self.deaths += 1
        return self._end(seconds)

    def _end(self, seconds: float = 0.0) -> int | None:
        """End the process; its exit status, or None where it did not end by itself within so many seconds."""
        child, self._child = self._child, None
        return child.end(seconds) if child is not None else None


class _StoodStill(TimeoutError):
    """A process used no processor time, or does not end what it began to say."""


def _reply(child: Child, seconds: float) -> Answer:
    """The next one of a process, which is looked at while it works.

    Raises:
        ValueError: it is none, or one to something else.
        OSError: the process is gone, or has not said it all within ``seconds`` (TimeoutError).
    """
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > STILL:
        used = child.used()
        if child.channel.speaks(STILL):
            try:
                return child.channel.reply(STILL)  # an honest one sends all of it at once
            except TimeoutError:
                raise _StoodStill from None
        if child.used() == used:
            raise _StoodStill
    return child.channel.reply(left)


def _hurried() -> Draining:
    return Draining("the engine is shutting down; retry elsewhere")


def _reason(error: OSError | Internal) -> str:
    """On one line, with the knob where there is one."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files (ulimit -n)"
    return str(error)


def _insane(what: str, *, again: bool) -> _Astray:
    return _Astray(MediaError, f"its decoder gives no sane answer: {what}", again)


def _death(what: str, status: int | None, *, again: bool) -> _Astray:
    """Why there is no answer."""
    if status is None:
        return _insane("it closed its channel and went on", again=again)
    if status == -signal.SIGKILL:
        reason = "the process that decoded it was killed, perhaps for want of memory; retry later"
        return _Astray(MediaUnavailable, reason, again=False)  # nobody is blamed, and memory may still be short
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return _Astray(MediaError, f"damaged {what}: its decoder crashed ({how})", again)
