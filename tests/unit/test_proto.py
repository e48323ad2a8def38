"""The generated descriptors against the contract as data, field by field."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.internal import api_implementation

from tests.openengine_data import PACKAGE, SCALAR_NAMES, extension, released, stock_class
from triptych.wire.gen import (
    encoder_pb2,
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2,
    server_pb2,
    version_pb2,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

PROTO = Path(__file__).parents[2] / "proto" / "openengine" / "v1"
BLOCK = re.DOTALL | re.MULTILINE

MODULES = (
    encoder_pb2,
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2,
    server_pb2,
    version_pb2,
)
FILES: dict[str, FileDescriptor] = {module.DESCRIPTOR.name: module.DESCRIPTOR for module in MODULES}
MESSAGES: dict[str, Descriptor] = {
    name: message for file in FILES.values() for name, message in file.message_types_by_name.items()
}
ENUMS = {name: enum for file in FILES.values() for name, enum in file.enum_types_by_name.items()}


def merged_messages() -> dict[str, dict[str, Any]]:
    messages = {name: dict(f) for part in released()["files"].values() for name, f in part["messages"].items()}
    for name, fields in extension()["extends"].items():
        messages[name] |= fields
    return messages | extension()["messages"]


def merged_enums() -> dict[str, dict[str, int]]:
    enums = {name: dict(values) for part in released()["files"].values() for name, values in part["enums"].items()}
    for name, values in extension()["extends_enums"].items():
        enums[name] |= values
    return enums | extension()["enums"]


def described(field: FieldDescriptor) -> dict[str, Any]:
    """A field in the words of the data."""
    if field.message_type is not None:
        kind = field.message_type.full_name
    elif field.enum_type is not None:
        kind = field.enum_type.full_name
    else:
        kind = SCALAR_NAMES[field.type]
    words: dict[str, Any] = {"number": field.number, "type": kind}
    if field.is_repeated:
        words["repeated"] = True
    oneof = field.containing_oneof
    if oneof is not None and oneof.name == f"_{field.name}":
        words["optional"] = True
    elif oneof is not None:
        words["oneof"] = oneof.name
    # In proto3 presence follows from these words; in another syntax it would not.
    explicit = oneof is not None or (field.message_type is not None and not field.is_repeated)
    assert field.has_presence == explicit, field.full_name
    return words


def test_the_runtime_is_the_one_that_was_asked_for() -> None:
    assert api_implementation.Type() == os.environ.get("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "upb")


def test_descriptors_carry_the_names_of_the_contract() -> None:
    assert all(file.package == PACKAGE for file in FILES.values())
    assert all(name.startswith("openengine/v1/") for name in FILES)


@pytest.mark.parametrize("name", sorted(merged_messages()))
def test_message(name: str) -> None:
    assert {field.name: described(field) for field in MESSAGES[name].fields} == merged_messages()[name]


@pytest.mark.parametrize("name", sorted(merged_enums()))
def test_enum(name: str) -> None:
    assert {value.name: value.number for value in ENUMS[name].values} == merged_enums()[name]


def test_nothing_else_is_defined() -> None:
    assert MESSAGES.keys() == merged_messages().keys()
    assert ENUMS.keys() == merged_enums().keys()
    assert not any(message.nested_types or message.enum_types for message in MESSAGES.values())


@pytest.mark.parametrize("path", sorted(released()["files"]))
def test_released_parts_live_in_the_released_files(path: str) -> None:
    assert released()["files"][path]["messages"].keys() <= set(FILES[path].message_types_by_name)
    assert released()["files"][path]["enums"].keys() <= set(FILES[path].enum_types_by_name)


def test_services() -> None:
    expected = {
        service: rpcs | extension()["services"].get(service, {})
        for service, rpcs in released()["files"]["openengine/v1/openengine.proto"]["services"].items()
    }
    services = FILES["openengine/v1/openengine.proto"].services_by_name
    actual = {
        name: {
            method.name: {
                "request": method.input_type.full_name,
                "response": method.output_type.full_name,
                "server_streaming": method.server_streaming,
            }
            for method in service.methods
        }
        for name, service in services.items()
    }
    assert actual == expected
    assert not any(method.client_streaming for service in services.values() for method in service.methods)


def test_our_additions_to_released_messages_start_at_1000() -> None:
    of_the_next_release = {"media_options", "handoff_profile", "bootstrap", "supports_client_bootstrap"}
    of_the_next_release |= {"tokenizer", "multimodal_capabilities"}
    for name, fields in extension()["extends"].items():
        for field, spec in fields.items():
            assert (spec["number"] >= 1000) != (field in of_the_next_release), (name, field)


def test_additions_take_nothing_from_the_release() -> None:
    parts = released()["files"].values()
    messages = {name: fields for part in parts for name, fields in part["messages"].items()}
    enums = {name: values for part in parts for name, values in part["enums"].items()}
    services = released()["files"]["openengine/v1/openengine.proto"]["services"]
    assert not messages.keys() & extension()["messages"].keys()
    assert not enums.keys() & extension()["enums"].keys()
    for name, fields in extension()["extends"].items():
        assert not fields.keys() & messages[name].keys()
        numbers = {spec["number"] for spec in messages[name].values()}
        assert not numbers & {spec["number"] for spec in fields.values()}
    for name, values in extension()["extends_enums"].items():
        assert not values.items() & enums[name].items()
        assert not set(values.values()) & set(enums[name].values())
    for name, rpcs in extension()["services"].items():
        assert not rpcs.keys() & services[name].keys()


MARK = "// ---- "


@pytest.mark.parametrize("name", sorted({**extension()["extends"], **extension()["extends_enums"]}))
def test_additions_stand_in_marked_blocks_at_the_end(name: str) -> None:
    added = {**extension()["extends"], **extension()["extends_enums"]}[name]
    others = {**merged_messages(), **merged_enums()}[name].keys() - added.keys()
    text = "\n".join(path.read_text() for path in PROTO.glob("*.proto"))
    (body,) = re.findall(rf"^(?:message|enum) {name} {{$(.*?)^}}$", text, BLOCK)
    for oneof in re.findall(r"^  oneof \w+ {$.*?^  }$", body, BLOCK) or [""]:
        for part in (body.replace(oneof, ""), oneof):  # a oneof has a block of its own
            before, _, after = part.partition(MARK)
            assert not {field for field in added if re.search(rf"\b{field} = \d", before)}
            assert not {field for field in others if re.search(rf"\b{field} = \d", after)}
    assert MARK in body


def test_a_released_client_ignores_the_additions() -> None:
    ready = generation_pb2.GenerateResponse(request_id="a", encoder_ready=encoder_pb2.EncoderReady())
    read = stock_class("GenerateResponse").FromString(ready.SerializeToString())
    assert read.request_id == "a"
    assert read.WhichOneof("event") is None
    info = server_pb2.ServerInfo(engine_role=server_pb2.ENGINE_ROLE_ENCODER, instance_id="i")
    assert stock_class("ServerInfo").FromString(info.SerializeToString()).instance_id == "i"


def test_a_released_client_is_read_as_it_wrote() -> None:
    sent = stock_class("GenerateRequest")(request_id="a", model="m")
    sent.token_ids.ids.extend([1, 2, 3])
    sent.sampling.temperature = 0.8999999761581421
    sent.extra.update({"detokenize": False})
    read = generation_pb2.GenerateRequest.FromString(sent.SerializeToString())
    assert list(read.token_ids.ids) == [1, 2, 3]
    assert read.sampling.temperature == 0.8999999761581421
    assert read.extra["detokenize"] is False
    assert not read.HasField("encoder")
