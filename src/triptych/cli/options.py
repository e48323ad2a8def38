"""What the command line says about engines. Each field is a flag of ``engine`` and of ``serve``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path  # noqa: TC003 - the command line reads the annotations
from typing import Annotated, Literal

from cyclopts import Parameter

from triptych.cli.flags import counted, positive, sized, words_of
from triptych.core.config import MIB, SchedulerConfig
from triptych.rpc.message_bytes import MAX_BYTES_HELD

_STEP = SchedulerConfig()


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
    kv_cache_bytes: Annotated[int, sized("Memory of the KV pool")] = 512 * MIB
    encoder_cache_bytes: Annotated[int, sized("Memory of the encoder cache")] = _STEP.encoder_cache_bytes
    max_batched_tokens: Annotated[int, counted("Tokens computed in one step.")] = _STEP.max_batched_tokens
    max_running_requests: Annotated[int, counted("Requests that hold KV at once.")] = _STEP.max_running_requests
    max_waiting_requests: Annotated[int, counted("Requests that may wait; one more is refused.")] = (
        _STEP.max_waiting_requests
    )
    max_message_bytes_held: Annotated[
        int, sized("Messages of requests that are not accepted yet; where one more may be too much it is refused")
    ] = MAX_BYTES_HELD
    max_context: Annotated[
        int | None, counted("Prompt and answer together, in tokens. Default: what the model and the KV pool allow.")
    ] = None
    max_loras: Annotated[int, counted("LoRA adapters that may be loaded at once; 0 switches them off.", least=0)] = 8
    max_lora_rank: Annotated[int, counted("Largest rank of a LoRA adapter.")] = 64
    kv_events: Annotated[
        bool, Parameter(help="Tell subscribers which prefixes are cached, for routers that send requests to them.")
    ] = True
    served_name: Annotated[
        str | None, Parameter(help="The name clients call the model by. Default: the directory's name, or demo.")
    ] = None

    def words(self) -> list[str]:
        """The same as command-line words, for a child process."""
        return words_of({one.name: getattr(self, one.name) for one in fields(self)})


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
        return words_of({one.name: getattr(self, one.name) for one in fields(self) if one.name != "handoff_secret"})


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
    encoder_quota: Annotated[int, sized("Memory for encoded pictures on their way, on either side")] = 256 * MIB
    encoder_ttl: Annotated[
        float, Parameter(validator=positive, help="Seconds for which an encoded picture waits to be used.")
    ] = 60.0

    def words(self) -> list[str]:
        """The same as command-line words, for a child process."""
        return words_of({one.name: getattr(self, one.name) for one in fields(self)})
