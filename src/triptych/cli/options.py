"""What the command line says about engines. Each field is a flag of ``engine`` and of ``serve``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path  # noqa: TC003 - the command line reads the annotations
from typing import Annotated, Literal

from cyclopts import Parameter

from triptych.cli.flags import at_least_one, not_negative, positive, size
from triptych.core.config import MIB, MediaLimits, SchedulerConfig

_STEP = SchedulerConfig()
_MEDIA = MediaLimits()


def _count(text: str) -> Parameter:
    return Parameter(validator=at_least_one, help=text)


def _bytes(text: str) -> Parameter:
    return Parameter(converter=size, n_tokens=1, show_default=_in_mib, help=f"{text}: bytes, or with KiB, MiB, GiB.")


def _in_mib(value: int) -> str:
    return f"{value // MIB}MiB"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """An engine's flags with their defaults."""

    device: Annotated[str, Parameter(help="Where tensors live: cpu, cuda, or cuda:N.")] = "cpu"
    dtype: Annotated[
        str,
        Parameter(
            help="Number format of weights and KV: auto, float32, float16 or bfloat16. "
            "auto takes the checkpoint's own, and float32 for float16 on a CPU."
        ),
    ] = "auto"
    kv_cache_bytes: Annotated[int, _bytes("Memory of the KV pool")] = 512 * MIB
    encoder_cache_bytes: Annotated[int, _bytes("Memory of the encoder cache")] = _STEP.encoder_cache_bytes
    max_batched_tokens: Annotated[int, _count("Tokens computed in one step.")] = _STEP.max_batched_tokens
    max_running_requests: Annotated[int, _count("Requests that hold KV at once.")] = _STEP.max_running_requests
    max_waiting_requests: Annotated[int, _count("Requests that may wait; one more is refused.")] = (
        _STEP.max_waiting_requests
    )
    max_context: Annotated[
        int | None, _count("Prompt and answer together, in tokens. Default: what the model and the KV pool allow.")
    ] = None
    max_item_bytes: Annotated[int, _bytes("Encoded size of one picture")] = _MEDIA.max_item_bytes
    max_item_pixels: Annotated[int, _count("Width times height of one picture.")] = _MEDIA.max_item_pixels
    max_items: Annotated[int, _count("Pictures in one request.")] = _MEDIA.max_items
    max_request_pixels: Annotated[int, _count("Pixels of all pictures of one request.")] = _MEDIA.max_request_pixels
    media_preparation_limit: Annotated[
        int,
        Parameter(
            validator=at_least_one,
            env_var="TRIPTYCH_MEDIA_PREPARATION_LIMIT",
            help="Requests whose pictures are decoded at once.",
        ),
    ] = _MEDIA.media_preparation_limit
    max_loras: Annotated[
        int, Parameter(validator=not_negative, help="LoRA adapters that may be loaded at once; 0 switches them off.")
    ] = 8
    max_lora_rank: Annotated[int, _count("Largest rank of a LoRA adapter.")] = 64
    kv_events: Annotated[
        bool, Parameter(help="Tell subscribers which prefixes are cached, for routers that send requests to them.")
    ] = True
    served_name: Annotated[
        str | None, Parameter(help="The name clients call the model by. Default: the directory's name, or demo.")
    ] = None

    def words(self) -> list[str]:
        """The same as command-line words, for a child process."""
        return _words({one.name: getattr(self, one.name) for one in fields(self)})

    def limits(self) -> MediaLimits:
        """The part that concerns media."""
        return MediaLimits(
            max_item_bytes=self.max_item_bytes,
            max_item_pixels=self.max_item_pixels,
            max_items=self.max_items,
            max_request_pixels=self.max_request_pixels,
            media_preparation_limit=self.media_preparation_limit,
        )


SECRET_VARIABLE = "TRIPTYCH_HANDOFF_SECRET"


@dataclass(frozen=True, slots=True)
class HandoffOptions:
    """How engines hand prompts to each other. Each field is a flag of ``engine`` and of ``serve``."""

    kv_transport: Annotated[
        Literal["shared-dir", "nixl"] | None,
        Parameter(help="How KV moves between engines. Default: shared-dir for prefill and decode, none otherwise."),
    ] = None
    kv_directory: Annotated[
        Path | None,
        Parameter(
            help="Private directory of shared-dir, the same for all engines of a host. Default: one of the user's in "
            "/dev/shm, else in the directory for temporary files."
        ),
    ] = None
    session_ttl: Annotated[
        float, Parameter(validator=positive, help="Seconds for which a computed prompt waits for a decode engine.")
    ] = 60.0
    handoff_secret: Annotated[
        str | None,
        Parameter(
            env_var=SECRET_VARIABLE,
            show_default=False,
            help="Signs what engines hand to each other; the same for all of them. Better set the variable: "
            "other users of the machine can read flags.",
        ),
    ] = field(default=None, repr=False)

    def words(self) -> list[str]:
        """The same as command-line words, for a child process; the secret has its variable."""
        return _words({one.name: getattr(self, one.name) for one in fields(self) if one.name != "handoff_secret"})


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """How encoder engines hand pictures to others. Each field is a flag of ``engine`` and of ``serve``."""

    encoder_transport: Annotated[
        Literal["shared-dir", "nixl"] | None,
        Parameter(
            help="How encoded pictures move between engines. Default: shared-dir for encoders, else none. With one, "
            "engines that compute prompts take what encoders have encoded."
        ),
    ] = None
    encoder_directory: Annotated[
        Path | None,
        Parameter(
            help="Private directory of shared-dir for them, the same for all engines of a host. Default: one of the "
            "user's in /dev/shm, else in the directory for temporary files."
        ),
    ] = None
    encoder_quota: Annotated[int, _bytes("Memory for encoded pictures on their way, on either side")] = 256 * MIB
    encoder_ttl: Annotated[
        float, Parameter(validator=positive, help="Seconds for which an encoded picture waits to be used.")
    ] = 60.0

    def words(self) -> list[str]:
        """The same as command-line words, for a child process."""
        return _words({one.name: getattr(self, one.name) for one in fields(self)})


def _words(values: dict[str, object]) -> list[str]:
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words
