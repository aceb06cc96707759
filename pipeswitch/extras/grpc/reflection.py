"""``grpc.reflection``, which generic clients (grpcurl, Postman) query before they call a verb."""

from __future__ import annotations

from typing import Any, Final

import grpc

from .protos import POOL, REFLECTION

NAME: Final = "ServerReflection"
SERVICES: Final = (
    "inference.GRPCInferenceService",
    "grpc.health.v1.Health",
    *(f"{package}.{NAME}" for package in REFLECTION),
)


def described(request: Any) -> Any:
    """Return the answer to one ServerReflectionRequest."""
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
