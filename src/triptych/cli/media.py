"""What the command line says about media: what they may cost, who is asked for them, how they are read.

    MediaFlags ── limits()   what a request may cost       MediaLimits
               ── decode()   where it is decoded           DecodeConfig
               ── fetch()    who may be asked for it       FetchSettings
               ── layer()    how it is read                OptionLayer, over the model's own and under a request's

A default is read from these classes; here it has a flag and a line of help.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Parameter

from triptych.cli.flags import counted, positive, sized, words_of
from triptych.core.config import DecodeConfig, FetchSettings, MediaLimits
from triptych.core.errors import InvalidRequest, StartupError
from triptych.core.media_options import OptionLayer
from triptych.core.option_names import parse_options, write_options
from triptych.media.fetch import Fetcher
from triptych.media.network import SystemNetwork

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_VARIABLE = "TRIPTYCH_MEDIA_PREPARATION_LIMIT"
NO_FETCH = "--no-fetch"
_LIMITS = MediaLimits()
_DECODE = DecodeConfig()
_FETCH = FetchSettings()
Settings = TypeVar("Settings", MediaLimits, DecodeConfig, FetchSettings)


def _options(_: object, tokens: object) -> OptionLayer:
    """JSON, as a request would have it."""
    try:
        return parse_options(tokens[0].value, "media_options")  # type: ignore[index]
    except InvalidRequest as error:
        raise ValueError(str(error)) from None


def _check(name: str) -> Callable[[object, object], None]:
    """Refuse what the settings would refuse of one field, or a fetcher of them."""

    def check(_: object, value: object) -> None:
        try:
            Fetcher(FetchSettings(**{name: value}), _LIMITS, SystemNetwork(1))  # type: ignore[arg-type]
        except StartupError as error:
            said = str(error).removeprefix(f"--{name.replace('_', '-')}").removeprefix(name)
            raise ValueError(said.removeprefix(f" {value}").lstrip(": ")) from None

    return check


def _listed(value: tuple[int, ...]) -> str:
    return ", ".join(map(str, value))


@dataclass(frozen=True, slots=True)
class MediaFlags:
    """An engine's flags about media with their defaults. Each field is a flag of ``engine`` and of ``serve``."""

    max_items: Annotated[int, counted("Media items in one request.")] = _LIMITS.max_items
    max_item_bytes: Annotated[int, sized("Encoded size of one item")] = _LIMITS.max_item_bytes
    max_request_bytes: Annotated[int, sized("Encoded size of all items of one request")] = _LIMITS.max_request_bytes
    max_item_pixels: Annotated[int, counted("Width times height of one picture.")] = _LIMITS.max_item_pixels
    max_request_pixels: Annotated[int, counted("Pixels of all pictures and videos of one request.")] = (
        _LIMITS.max_request_pixels
    )
    max_clip_seconds: Annotated[int, counted("Seconds that one video may play.")] = _LIMITS.max_clip_seconds
    max_clip_frames: Annotated[int, counted("Frames of one video that are looked at.")] = _LIMITS.max_clip_frames
    max_clip_pixels: Annotated[int, counted("Pixels of these frames together, in the size that the model wants.")] = (
        _LIMITS.max_clip_pixels
    )
    max_frame_pixels: Annotated[int, counted("Width times height of a video's frames as they are stored.")] = (
        _LIMITS.max_frame_pixels
    )
    max_source_frames: Annotated[int, counted("Frames in one video file, looked at or not.")] = (
        _LIMITS.max_source_frames
    )
    max_decoded_pixels: Annotated[
        int, counted("Pixels of all frames that are decoded on the way to the last one that is looked at.")
    ] = _LIMITS.max_decoded_pixels
    max_sound_seconds: Annotated[int, counted("Seconds that one sound may play.")] = _LIMITS.max_sound_seconds
    media_preparation_limit: Annotated[
        int,
        counted(
            "Requests whose media are prepared at once; one with large items counts as several.",
            variable=LIMIT_VARIABLE,
        ),
    ] = _LIMITS.media_preparation_limit
    max_waiting_preparations: Annotated[int, counted("Requests that may wait for that; one more is refused.")] = (
        _LIMITS.max_waiting_preparations
    )
    max_waiting_bytes: Annotated[int, sized("Media that came with requests that wait; a request beyond is refused")] = (
        _LIMITS.max_waiting_bytes
    )
    max_waiting_seconds: Annotated[
        float, Parameter(validator=positive, help="Seconds that a request may wait for shares; then it is refused.")
    ] = _LIMITS.max_waiting_seconds
    prepared_cache_bytes: Annotated[int, sized("Memory for items that were prepared, in case they come again")] = (
        _LIMITS.prepared_cache_bytes
    )
    max_prepared_bytes: Annotated[
        int,
        sized(
            "Memory for prepared pictures and videos of all requests that are not yet answered; while they take more, "
            "further requests wait for it"
        ),
    ] = _LIMITS.max_prepared_bytes
    decode_workers: Annotated[int, counted("Processes that decode media, one item each at a time.")] = (
        _DECODE.decode_workers
    )
    max_waiting_items: Annotated[int, counted("Items that may wait for one of them; one more is refused.")] = (
        _DECODE.max_waiting_items
    )
    decode_memory_bytes: Annotated[int, sized("Memory for decoding any item, beside what its own size adds")] = (
        _DECODE.decode_memory_bytes
    )
    decode_seconds: Annotated[
        float,
        Parameter(
            validator=positive, help="Seconds of processor time for decoding any item, beside what its own size adds."
        ),
    ] = _DECODE.decode_seconds
    fetch_hosts: Annotated[
        tuple[str, ...] | None,
        Parameter(
            validator=_check("fetch_hosts"),
            negative=NO_FETCH,
            help="A host that media may be fetched from: a.example is itself, *.a.example all names below it. May be "
            "given several times. Default: every host with a public address. --no-fetch: none.",
        ),
    ] = _FETCH.fetch_hosts
    fetch_ports: Annotated[
        tuple[int, ...],
        Parameter(
            validator=_check("fetch_ports"),
            negative="",
            show_default=_listed,
            help="A port that may be dialled. May be given several times.",
        ),
    ] = _FETCH.fetch_ports
    fetch_private_networks: Annotated[
        bool,
        Parameter(
            negative="",
            help="Fetch from private and loopback addresses too; metadata services and link-local addresses never.",
        ),
    ] = _FETCH.fetch_private_networks
    fetch_seconds: Annotated[
        float,
        Parameter(validator=positive, help="Seconds for fetching one item, its redirects, retries and waits included."),
    ] = _FETCH.fetch_seconds
    fetch_connect_seconds: Annotated[
        float, Parameter(validator=positive, help="Seconds for one address to take the call.")
    ] = _FETCH.fetch_connect_seconds
    fetch_retries: Annotated[int, counted("Times that fetching one item is tried again.", least=0)] = (
        _FETCH.fetch_retries
    )
    fetch_per_host: Annotated[int, counted("Connections to one host at once.")] = _FETCH.fetch_per_host
    fetch_at_once: Annotated[int, counted("Connections to all hosts at once.")] = _FETCH.fetch_at_once
    fetch_proxy: Annotated[
        str,
        Parameter(
            validator=_check("fetch_proxy"),
            show_default=False,
            help="http://HOST:PORT of a proxy through which all is fetched; which addresses it reaches is its rule "
            "to keep. Default: none, whatever the environment says.",
        ),
    ] = _FETCH.fetch_proxy
    fetch_ca_file: Annotated[
        str,
        Parameter(
            validator=_check("fetch_ca_file"),
            show_default=False,
            help="PEM file with the authorities that are trusted when fetching. Default: the system's.",
        ),
    ] = _FETCH.fetch_ca_file
    media_options: Annotated[
        OptionLayer,
        Parameter(
            converter=_options,
            n_tokens=1,
            accepts_keys=False,
            metavar="JSON",
            show_default=False,
            help='How media are read where a request does not say, as JSON: {"video": {"fps": 1}}. '
            "Default: as the model prefers.",
        ),
    ] = field(default_factory=OptionLayer)

    def limits(self) -> MediaLimits:
        """What one request's media may cost."""
        return self._part(MediaLimits)

    def decode(self) -> DecodeConfig:
        """Where media are decoded, and what that may take."""
        return self._part(DecodeConfig)

    def fetch(self) -> FetchSettings:
        """From whom media are fetched; an empty tuple of hosts is nobody."""
        return self._part(FetchSettings)

    def layer(self) -> OptionLayer:
        """How media are read where a request does not say."""
        return self.media_options

    def words(self) -> list[str]:
        """The same as command-line words, for a child process."""
        said = {one.name: getattr(self, one.name) for one in fields(self)}
        said["media_options"] = json.dumps(write_options(self.media_options))
        words = words_of({name: value for name, value in said.items() if value != "" and value is not False})
        return words if self.fetch_hosts != () else [*words, NO_FETCH]

    def _part(self, settings: type[Settings]) -> Settings:
        return settings(**{one.name: getattr(self, one.name) for one in fields(settings)})
