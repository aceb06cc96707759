"""Messages of ``inference.GRPCInferenceService``, health and reflection, in a private pool.

One process cannot import two modules that register the protobuf package ``inference``. A private
pool registers nothing, so a process can import this and ``tritonclient.grpc`` or ``kserve``. The
messages are read from ``proto/``, because modules that ``protoc`` generates would register them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FOLDER: Final = Path(__file__).with_name("proto")
_Field: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
}
_FIELD: Final = re.compile(r"(repeated )?(?:map<string, (.+)>|([\w.]+)) (\w+) = (\d+);")
_RPC: Final = re.compile(r"rpc (\w+) \((stream )?(\w+)\) returns \((stream )?(\w+)\);")


class _ProtoReader:
    """Parser of the ``proto/`` files, which have one statement per line."""

    def __init__(self, text: str, package: str) -> None:
        self.file = descriptor_pb2.FileDescriptorProto(
            name=f"pipeswitch/{package}.proto", package=package, syntax="proto3"
        )
        self._enums = re.findall(r"enum (\w+)", text)
        self._within: list[Any] = [self.file]  # enclosing definitions, the innermost last
        self._choice: dict[str, int] = {}  # index of the current oneof
        for line in text.splitlines():
            self._read(line.strip())

    def _read(self, line: str) -> None:
        within = self._within[-1]
        match line.split():
            case ["enum", name, "{"]:
                self._within.append(within.enum_type.add(name=name))
            case ["service", name, "{"]:
                self._within.append(within.service.add(name=name))
            case ["message", name, opened]:
                is_outer = within is self.file
                message = (within.message_type if is_outer else within.nested_type).add(name=name)
                if opened == "{":
                    self._within.append(message)
            case ["oneof", name, "{"]:
                self._choice = {"oneof_index": len(within.oneof_decl)}
                within.oneof_decl.add(name=name)
            case ["}"] if self._choice:
                self._choice = {}
            case ["}"]:
                self._within.pop()
            case [name, "=", number] if name != "syntax":
                within.value.add(name=name, number=int(number.rstrip(";")))
            case _ if match := _RPC.fullmatch(line):
                method, takes_many, takes, gives_many, gives = match.groups()
                within.method.add(
                    name=method,
                    input_type=f".{self.file.package}.{takes}",
                    output_type=f".{self.file.package}.{gives}",
                    client_streaming=bool(takes_many),
                    server_streaming=bool(gives_many),
                )
            case _ if match := _FIELD.fullmatch(line):
                self._add_field(within, *match.groups())
            case _:
                pass  # a comment, or an option of the file

    def _add_field(
        self,
        message: Any,
        repeated: str | None,
        value: str | None,
        kind: str,
        name: str,
        number: str,
    ) -> None:
        """Add a field; ``value`` is the type of a map's values, whose keys are strings."""
        field = message.field.add(name=name, number=int(number), **self._choice)
        if value:
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            self._add_field(entry, None, None, "string", "key", "1")
            self._add_field(entry, None, None, value, "value", "2")
            outer = [one.name for one in self._within[1:]]
            kind = ".".join([*outer, entry.name])
        field.label = _Field.LABEL_REPEATED if repeated or value else _Field.LABEL_OPTIONAL
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type = (
                _Field.TYPE_ENUM if kind.split(".")[-1] in self._enums else _Field.TYPE_MESSAGE
            )
            field.type_name = f".{self.file.package}.{kind}"


def _classes(name: str, package: str) -> dict[str, Any]:
    file = _ProtoReader((FOLDER / f"{name}.proto").read_text("utf-8"), package).file
    POOL.AddSerializedFile(file.SerializeToString())
    return {
        message.name: message_factory.GetMessageClass(
            POOL.FindMessageTypeByName(f"{package}.{message.name}")
        )
        for message in file.message_type
    }


POOL: Final = descriptor_pool.DescriptorPool()
INFERENCE: Final = _classes("inference", "inference")
HEALTH: Final = _classes("health", "grpc.health.v1")
REFLECTION: Final = {
    package: _classes("reflection", package)
    for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha")
}
"""Message classes by package; a client uses one or the other."""

REFLECTION_NAME: Final = "ServerReflection"
SERVICES: Final = (
    "inference.GRPCInferenceService",
    "grpc.health.v1.Health",
    *(f"{package}.{REFLECTION_NAME}" for package in REFLECTION),
)


def described(request: Any) -> Any:
    """Return the answer to a ServerReflectionRequest of a generic client (grpcurl, Postman)."""
    messages = REFLECTION[request.DESCRIPTOR.file.package]
    answer = messages["ServerReflectionResponse"](valid_host=request.host, original_request=request)
    code, text = grpc.StatusCode.NOT_FOUND, "there is no such name"
    try:
        match request.WhichOneof("message_request"):
            case "list_services":
                answer.list_services_response.service.extend(
                    messages["ServiceResponse"](name=name) for name in SERVICES
                )
                return answer
            case "file_by_filename":
                file = POOL.FindFileByName(request.file_by_filename)
            case "file_containing_symbol":
                file = POOL.FindFileContainingSymbol(request.file_containing_symbol)
            case _:
                code, text = grpc.StatusCode.UNIMPLEMENTED, "there are no extensions here"
                raise KeyError
    except KeyError:
        answer.error_response.error_code = code.value[0]
        answer.error_response.error_message = text
    else:
        answer.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
    return answer
