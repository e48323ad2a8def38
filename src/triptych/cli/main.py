"""``triptych``: one function a command; every heavy import waits until its command runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from triptych import __version__
from triptych.cli.flags import (
    DEMO,
    AllowPlaintext,
    EngineAddresses,
    EngineCa,
    EngineCertificate,
    EngineKey,
    EngineTls,
    GrpcAddress,
    HttpAddress,
    MetricsAddress,
    Model,
    TlsCertificate,
    TlsClientCa,
    TlsKey,
)
from triptych.cli.options import EngineOptions
from triptych.core.errors import TriptychError, one_line

# gRPC's own log lines ("Got goaway", ...) are not for people; its errors reach us as exceptions.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

Options = Annotated[EngineOptions, Parameter(name="*")]
NO_OPTIONS = EngineOptions()

app = App(
    name="triptych",
    version=__version__,
    help="Serve vision-language models with encode, prefill and decode together or apart.",
    help_format="plaintext",
)


@app.command
def engine(
    model: Model,
    /,
    *,
    role: Annotated[Literal["aggregated"], Parameter(help="What part of the work it does.")] = "aggregated",
    grpc: GrpcAddress = "127.0.0.1:50051",
    metrics: MetricsAddress = None,
    options: Options = NO_OPTIONS,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    allow_plaintext: AllowPlaintext = False,
    announce: Annotated[bool, Parameter(negative="", show=False)] = False,
) -> int:
    """Run one engine: one model, one role, one OpenEngine gRPC server."""
    from triptych.cli.engine import Listeners, run
    from triptych.rpc.tls import TlsFiles

    tls = TlsFiles.of(tls_certificate, tls_key, tls_client_ca)
    return run(model, role, options, Listeners(grpc, metrics, allow_plaintext, tls), announce=announce)


@app.command
def gateway(
    *,
    engine: EngineAddresses,
    http: HttpAddress = "127.0.0.1:8000",
    engine_tls: EngineTls = False,
    engine_ca: EngineCa = None,
    engine_certificate: EngineCertificate = None,
    engine_key: EngineKey = None,
    allow_plaintext: AllowPlaintext = False,
) -> int:
    """Serve OpenAI's HTTP API in front of running engines."""
    from triptych.cli.gateway import run
    from triptych.wire.tls import ChannelTls

    encrypted = engine_tls or engine_ca or engine_certificate or engine_key
    tls = ChannelTls(engine_ca, engine_certificate, engine_key) if encrypted else None
    return run(engine, tls, http, allow_plaintext=allow_plaintext)


@app.command
def serve(
    model: Model,
    /,
    *,
    topology: Annotated[Literal["aggregated"], Parameter(help="Which engines to start.")] = "aggregated",
    http: HttpAddress = "127.0.0.1:8000",
    options: Options = NO_OPTIONS,
    allow_plaintext: AllowPlaintext = False,
) -> int:
    """Start the engines of a topology and the gateway on this machine; Ctrl-C ends them all."""
    from triptych.cli.serve import run

    return run(model, topology, options, http, allow_plaintext=allow_plaintext)


@app.command
def ask(*words: Annotated[str, Parameter(name="PICTURE... QUESTION")], model: Model = DEMO) -> int:
    """Ask a question about one or more picture files; the question comes last.

    The demo model knows drawn shapes, their colours and places, counts up to four, and handwritten digits:
    "what colour is the circle?", "which digit is this?", "how many squares are there?",
    "what shape is in the second picture?". It always answers, also about what it cannot know.
    """
    from triptych.cli.ask import run

    return run(list(words), model)


@app.command
def doctor() -> int:
    """Check this machine: libraries, devices, memory, and the demo model's answers."""
    from triptych.cli.doctor import run

    return run()


def main(arguments: list[str] | None = None) -> None:
    """The ``triptych`` command: one clear line on stderr, and exit code 1 or 2, when something is wrong."""
    try:
        result: Any = app(arguments, print_error=False, exit_on_error=False, result_action="return_value")
    except CycloptsError as error:
        words = sys.argv[1:] if arguments is None else arguments
        command = next((f"{word} " for word in words[:1] if word in app), "")
        print(f"triptych: {one_line(error).rstrip('.')} (see triptych {command}--help)", file=sys.stderr)
        sys.exit(2)
    except TriptychError as error:
        print(f"triptych: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
