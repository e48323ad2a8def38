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
    Topology,
)
from triptych.cli.media import MediaFlags
from triptych.cli.options import EncoderOptions, EngineOptions, HandoffOptions
from triptych.core.errors import TriptychError, one_line

# gRPC's own log lines ("Got goaway", ...) are not for people; its errors reach us as exceptions.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

Options = Annotated[EngineOptions, Parameter(name="*")]
NO_OPTIONS = EngineOptions()
Media = Annotated[MediaFlags, Parameter(name="*", group="Media")]
NO_MEDIA = MediaFlags()
Handoff = Annotated[HandoffOptions, Parameter(name="*")]
NO_HANDOFF = HandoffOptions()
Encoder = Annotated[EncoderOptions, Parameter(name="*")]
NO_ENCODER = EncoderOptions()
ParityGroup = Literal[
    "greedy",
    "alike",
    "sampled",
    "outputs",
    "logprobs",
    "stops",
    "guided",
    "chunks",
    "prefix-p",
    "prefix-d",
    "prefix-both",
]

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
    role: Annotated[
        Literal["aggregated", "prefill", "decode", "encoder"], Parameter(help="What part of the work it does.")
    ] = "aggregated",
    requires_handoff: Annotated[
        bool,
        Parameter(
            negative="",
            help="Take pictures only as an encoder engine has encoded them, and load no tower. For prefill and "
            "aggregated engines with --encoder-transport.",
        ),
    ] = False,
    grpc: GrpcAddress = "127.0.0.1:50051",
    metrics: MetricsAddress = None,
    options: Options = NO_OPTIONS,
    media: Media = NO_MEDIA,
    handoff: Handoff = NO_HANDOFF,
    encoder: Encoder = NO_ENCODER,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    allow_plaintext: AllowPlaintext = False,
    announce: Annotated[bool, Parameter(negative="", show=False)] = False,
) -> int:
    """Run one engine: one model, one role, one OpenEngine gRPC server."""
    from triptych.cli.engine import Assignment, Listeners, run
    from triptych.roles.contract import RoleName
    from triptych.rpc.tls import TlsFiles

    tls = TlsFiles.of(tls_certificate, tls_key, tls_client_ca)
    assignment = Assignment.of(RoleName(role), options, handoff, encoder, requires_handoff=requires_handoff)
    listeners = Listeners(grpc, metrics, allow_plaintext, tls, options.max_message_bytes_held)
    return run(model, assignment, options, media, listeners, announce=announce)


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
    topology: Topology = "aggregated",
    http: HttpAddress = "127.0.0.1:8000",
    options: Options = NO_OPTIONS,
    media: Media = NO_MEDIA,
    handoff: Handoff = NO_HANDOFF,
    encoder: Encoder = NO_ENCODER,
    allow_plaintext: AllowPlaintext = False,
) -> int:
    """Start the engines of a topology and the gateway on this machine; Ctrl-C ends them all."""
    from triptych.cli.serve import EngineFlags, run

    return run(model, topology, EngineFlags(options, media, handoff, encoder), http, allow_plaintext=allow_plaintext)


@app.command
def ask(*words: Annotated[str, Parameter(name="PICTURE... QUESTION")], model: Model = DEMO) -> int:
    """Ask a question about one or more picture files; the question comes last.

    The demo model knows drawn shapes, their colours and places, counts up to four, and handwritten digits:
    "what colour is the circle?", "which digit is this?", "how many squares are there?",
    "what shape is in the second picture?". It always answers, also about what it cannot know.
    """
    from triptych.cli.ask import run

    return run(list(words), model)


evaluations = App(name="eval", help="Check that answers are what they should be.")
app.command(evaluations)


@evaluations.command
def parity(
    model: Model = DEMO,
    /,
    *,
    kv_transport: Annotated[
        Literal["memory", "shared-dir", "nixl"], Parameter(help="How KV and pictures move between the engines.")
    ] = "shared-dir",
    topology: Annotated[
        Literal["p+d", "e+pd", "e+p+d"], Parameter(help="The engines that are compared with one.")
    ] = "p+d",
    only: Annotated[
        list[ParityGroup] | None,
        Parameter(negative="", help="A group of cases; may be given several times. Default: all."),
    ] = None,
) -> int:
    """Compare one engine with several that share its work: tokens, text, log probabilities, usage; in this process."""
    from triptych.cli.eval import run

    return run(model, topology, kv_transport, only or ())


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
