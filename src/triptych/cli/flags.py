"""The types of flags that several commands share, with their help lines and their checks."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from triptych.core.config import GIB, MIB
from triptych.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEMO = "demo"
ROLES_BY_LETTER = {"e": "encoder", "p": "prefill", "d": "decode", "pd": "aggregated"}
GENERATORS = ({"aggregated"}, {"prefill", "decode"})
"""What it takes to answer a request, beside encoders: the one or the other."""
MAX_ENGINES = 64
"""On one machine."""
MOST = 2**53
"""Of any number: what is computed from several of them still fits a machine's integers."""
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def size(_: object, tokens: object) -> int:
    """``512MiB`` or a plain number of bytes."""
    text = tokens[0].value  # type: ignore[index]
    match = re.fullmatch(r"([0-9]{1,16})\s*(?:([kmg])i?)?b?", text.strip(), re.IGNORECASE)
    value = int(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0
    if value > MOST:
        raise ValueError(f"{text!r} is more than 2^53 bytes")
    if not value:
        raise ValueError(f"{text!r} is not a size: write bytes or a number with KiB, MiB or GiB, such as 512MiB")
    return value


def count(_: object, tokens: object, *, least: int = 1) -> int:
    """A whole number, and nothing that could be rounded to one."""
    text = tokens[0].value  # type: ignore[index]
    if not re.fullmatch(r"[0-9]{1,16}", text.strip()) or not least <= int(text) <= MOST:
        raise ValueError(f"must be a whole number from {least} to 2^53, not {text!r}")
    return int(text)


def counted(text: str, *, least: int = 1, variable: str | None = None) -> Parameter:
    """A flag that takes a whole number; ``variable`` of the environment says it where the flag does not."""
    return Parameter(converter=partial(count, least=least), n_tokens=1, env_var=variable, help=text)


def sized(text: str) -> Parameter:
    """A flag that takes a number of bytes."""
    return Parameter(converter=size, n_tokens=1, show_default=_in_units, help=f"{text}: bytes, or with KiB, MiB, GiB.")


def _in_units(value: int) -> str:
    return f"{value // GIB}GiB" if value % GIB == 0 else f"{value // MIB}MiB"


def words_of(values: Mapping[str, object]) -> list[str]:
    """Fields and their values as the command-line words that say the same. None is not said."""
    words: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            for one in value:
                words += [f"--{flag}", str(one)]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def positive(_: object, value: object) -> None:
    """Refuse zero and less, and what is no number."""
    if isinstance(value, float) and not 0 < value < float("inf"):
        raise ValueError(f"must be above 0, not {value:g}")


def _address(_: object, value: object) -> None:
    for address in [value] if isinstance(value, str) else list(value or ()):  # type: ignore[call-overload]
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{address!r} is not HOST:PORT, such as 127.0.0.1:8000 (port 0 takes a free one)")


def _topology(_: object, value: object) -> None:
    split_topology(str(value))


def split_topology(topology: str) -> tuple[str, ...]:
    """``2e+p+d`` as the roles of the engines: encoder, encoder, prefill, decode.

    Raises:
        ValueError: it is none.
    """
    if topology == "aggregated":
        return (topology,)
    words = [re.fullmatch(r"([1-9][0-9]?)?(e|pd|p|d)", word) for word in topology.split("+")]
    roles = [ROLES_BY_LETTER[word[2]] for word in words if word for _ in range(int(word[1] or 1))]
    if None in words or set(roles) - {"encoder"} not in GENERATORS or len(roles) > MAX_ENGINES:
        raise ValueError(
            f"{topology!r} is no topology: write aggregated, or how many engines encode (e), compute prompts (p), "
            f"decode (d), or do the latter two together (pd), such as p+d, e+pd, e+p+d or 2e+1p+2d; at most "
            f"{MAX_ENGINES} in all"
        )
    return tuple(roles)


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT`` in its two parts."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def model_directory(model: str) -> Path:
    """The directory that ``MODEL`` names.

    Raises:
        StartupError: it is not there, or is no model directory.
    """
    if model == DEMO:
        return Path(__file__).resolve().parent.parent / "demo_model"
    path = Path(model).expanduser()
    if not path.exists():
        raise StartupError(f"{model}: no such directory; MODEL is a Hugging Face model directory or 'demo'")
    if not (path / "config.json").is_file():
        raise StartupError(f"{model}: not a model directory (it has no config.json)")
    return path.resolve()


def served_name(model: str, chosen: str | None) -> str:
    """What clients call the model: the chosen name, ``demo``, or the directory's."""
    return chosen or (DEMO if model == DEMO else model_directory(model).name)


Model = Annotated[str, Parameter(help="A Hugging Face model directory with safetensors weights, or 'demo'.")]
GrpcAddress = Annotated[str, Parameter(validator=_address, help="HOST:PORT of the OpenEngine gRPC server.")]
HttpAddress = Annotated[str, Parameter(validator=_address, help="HOST:PORT of the OpenAI HTTP server.")]
MetricsAddress = Annotated[
    str | None, Parameter(validator=_address, help="HOST:PORT of the Prometheus metrics; off when absent.")
]
EngineAddresses = Annotated[
    list[str],
    Parameter(
        name="--engine",
        validator=_address,
        negative="",
        help="HOST:PORT of an engine's gRPC server; may be given several times.",
    ),
]
TlsCertificate = Annotated[
    Path | None,
    Parameter(name="--tls-certificate", help="PEM file with the certificate of the gRPC server, which then encrypts."),
]
TlsKey = Annotated[Path | None, Parameter(name="--tls-key", help="PEM file with the private key of that certificate.")]
TlsClientCa = Annotated[
    Path | None,
    Parameter(
        name="--tls-client-ca",
        help="PEM file with the authorities whose clients may connect; others are then refused (mutual TLS).",
    ),
]
EngineTls = Annotated[
    bool, Parameter(name="--engine-tls", negative="", help="Reach the engines encrypted, by authorities known to gRPC.")
]
EngineCa = Annotated[
    Path | None,
    Parameter(name="--engine-ca", help="PEM file with the authority of the engines' certificates; implies TLS."),
]
EngineCertificate = Annotated[
    Path | None,
    Parameter(name="--engine-certificate", help="PEM file with our own certificate, for engines that ask for one."),
]
EngineKey = Annotated[
    Path | None, Parameter(name="--engine-key", help="PEM file with the private key of that certificate.")
]
Topology = Annotated[
    str,
    Parameter(
        validator=_topology,
        help="Which engines to start: aggregated, or encoders (e), prefill (p) and decode (d) engines apart, pd being "
        "both of these in one, such as p+d, e+pd, e+p+d or 2e+1p+2d.",
    ),
]
AllowPlaintext = Annotated[
    bool, Parameter(negative="", help="Permit unencrypted listeners on an address that is not loopback.")
]
