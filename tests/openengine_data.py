"""The contract as data, and a client that knows only its released part."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

DATA = Path(__file__).parent / "data" / "openengine"
PACKAGE = "openengine.v1"

_SCALARS = {
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
}
SCALAR_NAMES = {number: name for name, number in _SCALARS.items()}


def released() -> dict[str, Any]:
    """Release v0.1.0."""
    data: dict[str, Any] = json.loads((DATA / "v0.1.0.json").read_text())
    return data


def extension() -> dict[str, Any]:
    """What is added to it."""
    data: dict[str, Any] = json.loads((DATA / "extension.json").read_text())
    return data


@cache
def stock_class(name: str) -> Any:
    """A message class of a client generated from v0.1.0 alone, in a descriptor pool of its own."""
    return message_factory.GetMessageClass(_stock_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _stock_pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="stock.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    files = released()["files"].values()
    enums = {name: values for part in files for name, values in part["enums"].items()}
    for name, values in enums.items():
        enum = file.enum_type.add(name=name)
        for value, number in values.items():
            enum.value.add(name=value, number=number)
    for part in files:
        for name, fields in part["messages"].items():
            _add_message(file, name, fields, enums)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _add_message(file: Any, name: str, fields: dict[str, Any], enums: dict[str, Any]) -> None:
    message = file.message_type.add(name=name)
    oneofs = list(dict.fromkeys(spec["oneof"] for spec in fields.values() if "oneof" in spec))
    optionals = [f"_{field}" for field, spec in fields.items() if spec.get("optional")]
    for oneof in (*oneofs, *optionals):  # synthetic ones come last
        message.oneof_decl.add(name=oneof)
    for field, spec in fields.items():
        added = message.field.add(name=field, number=spec["number"])
        added.label = added.LABEL_REPEATED if spec.get("repeated") else added.LABEL_OPTIONAL
        if spec["type"] in _SCALARS:
            added.type = _SCALARS[spec["type"]]
        else:
            local = spec["type"].removeprefix(f"{PACKAGE}.")
            added.type = added.TYPE_ENUM if local in enums else added.TYPE_MESSAGE
            added.type_name = f".{spec['type']}"
        if "oneof" in spec:
            added.oneof_index = oneofs.index(spec["oneof"])
        elif spec.get("optional"):
            added.proto3_optional = True
            added.oneof_index = len(oneofs) + optionals.index(f"_{field}")
