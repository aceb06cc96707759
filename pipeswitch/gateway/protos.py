"""Messages of ``inference.GRPCInferenceService``, health and reflection, in a pool of their own.

Two packages that register the protobuf package ``inference`` cannot live in one process. A private
pool registers nothing: this may be imported beside ``tritonclient.grpc`` or ``kserve``. Fields are
``name=number:type``, with ``*`` when repeated and ``/o`` in the oneof ``o``; the numbers are those
of KServe's and Triton's protocols. Of Triton's ModelConfig there is what we can tell a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_INFERENCE: Final = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live=1:bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready=1:bool",
    "ModelReadyRequest": "name=1:string version=2:string",
    "ModelReadyResponse": "ready=1:bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name=1:string version=2:string extensions=3:string*",
    "ModelMetadataRequest": "name=1:string version=2:string",
    "ModelMetadataResponse": "name=1:string versions=2:string* platform=3:string "
    "inputs=4:ModelMetadataResponse.TensorMetadata* "
    "outputs=5:ModelMetadataResponse.TensorMetadata*",
    "ModelMetadataResponse.TensorMetadata": "name=1:string datatype=2:string shape=3:int64*",
    "InferParameter": "bool_param=1:bool/choice int64_param=2:int64/choice "
    "string_param=3:string/choice double_param=4:double/choice uint64_param=5:uint64/choice",
    "InferTensorContents": "bool_contents=1:bool* int_contents=2:int32* int64_contents=3:int64* "
    "uint_contents=4:uint32* uint64_contents=5:uint64* fp32_contents=6:float* "
    "fp64_contents=7:double* bytes_contents=8:bytes*",
    "ModelInferRequest": "model_name=1:string model_version=2:string id=3:string "
    "parameters=4:map.InferParameter inputs=5:ModelInferRequest.InferInputTensor* "
    "outputs=6:ModelInferRequest.InferRequestedOutputTensor* raw_input_contents=7:bytes*",
    "ModelInferRequest.InferInputTensor": "name=1:string datatype=2:string shape=3:int64* "
    "parameters=4:map.InferParameter contents=5:InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": "name=1:string parameters=2:map.InferParameter",
    "ModelInferResponse": "model_name=1:string model_version=2:string id=3:string "
    "parameters=4:map.InferParameter outputs=5:ModelInferResponse.InferOutputTensor* "
    "raw_output_contents=6:bytes*",
    "ModelInferResponse.InferOutputTensor": "name=1:string datatype=2:string shape=3:int64* "
    "parameters=4:map.InferParameter contents=5:InferTensorContents",
    "ModelStreamInferResponse": "error_message=1:string infer_response=2:ModelInferResponse",
    "ModelConfigRequest": "name=1:string version=2:string",
    "ModelConfigResponse": "config=1:ModelConfig",
    "ModelConfig": "name=1:string platform=2:string version_policy=3:ModelVersionPolicy "
    "max_batch_size=4:int32 input=5:ModelInput* output=6:ModelOutput* "
    "dynamic_batching=11:ModelDynamicBatching/scheduling_choice "
    "ensemble_scheduling=15:ModelEnsembling/scheduling_choice backend=17:string "
    "model_transaction_policy=19:ModelTransactionPolicy",
    "ModelEnsembling": "step=1:ModelEnsembling.Step*",
    "ModelEnsembling.Step": "model_name=1:string model_version=2:int64 input_map=3:map.string",
    "ModelDynamicBatching": "preferred_batch_size=1:int32* max_queue_delay_microseconds=2:uint64",
    "ModelVersionPolicy": "latest=1:ModelVersionPolicy.Latest/policy_choice",
    "ModelVersionPolicy.Latest": "num_versions=1:uint32",
    "ModelInput": "name=1:string data_type=2:DataType dims=4:int64*",
    "ModelOutput": "name=1:string data_type=2:DataType dims=3:int64*",
    "ModelTransactionPolicy": "decoupled=1:bool",
    "ModelStatisticsRequest": "name=1:string version=2:string",
    "ModelStatisticsResponse": "model_stats=1:ModelStatistics*",
    "ModelStatistics": "name=1:string version=2:string last_inference=3:uint64 "
    "inference_count=4:uint64 execution_count=5:uint64 inference_stats=6:InferStatistics "
    "batch_stats=7:InferBatchStatistics*",
    "InferBatchStatistics": "batch_size=1:uint64",
    "InferStatistics": "success=1:StatisticDuration fail=2:StatisticDuration "
    "queue=3:StatisticDuration compute_input=4:StatisticDuration "
    "compute_infer=5:StatisticDuration compute_output=6:StatisticDuration "
    "cache_hit=7:StatisticDuration cache_miss=8:StatisticDuration",
    "StatisticDuration": "count=1:uint64 ns=2:uint64",
    "ModelRepositoryParameter": "bool_param=1:bool/choice int64_param=2:int64/choice "
    "string_param=3:string/choice bytes_param=4:bytes/choice",
    "RepositoryIndexRequest": "repository_name=1:string ready=2:bool",
    "RepositoryIndexResponse": "models=1:RepositoryIndexResponse.ModelIndex*",
    "RepositoryIndexResponse.ModelIndex": "name=1:string version=2:string state=3:string "
    "reason=4:string",
    "RepositoryModelLoadRequest": "repository_name=1:string model_name=2:string "
    "parameters=3:map.ModelRepositoryParameter",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "repository_name=1:string model_name=2:string "
    "parameters=3:map.ModelRepositoryParameter",
    "RepositoryModelUnloadResponse": "",
    "TraceSettingRequest": "settings=1:map.TraceSettingRequest.SettingValue model_name=2:string",
    "TraceSettingRequest.SettingValue": "value=1:string*",
    "TraceSettingResponse": "settings=1:map.TraceSettingResponse.SettingValue",
    "TraceSettingResponse.SettingValue": "value=1:string*",
    "LogSettingsRequest": "settings=1:map.LogSettingsRequest.SettingValue",
    "LogSettingsRequest.SettingValue": "bool_param=1:bool/parameter_choice "
    "uint32_param=2:uint32/parameter_choice string_param=3:string/parameter_choice",
    "LogSettingsResponse": "settings=1:map.LogSettingsResponse.SettingValue",
    "LogSettingsResponse.SettingValue": "bool_param=1:bool/parameter_choice "
    "uint32_param=2:uint32/parameter_choice string_param=3:string/parameter_choice",
    "SystemSharedMemoryStatusRequest": "name=1:string",
    "SystemSharedMemoryStatusResponse": "regions=1:map."
    "SystemSharedMemoryStatusResponse.RegionStatus",
    "SystemSharedMemoryStatusResponse.RegionStatus": "name=1:string key=2:string offset=3:uint64 "
    "byte_size=4:uint64",
    "SystemSharedMemoryRegisterRequest": "name=1:string key=2:string offset=3:uint64 "
    "byte_size=4:uint64",
    "SystemSharedMemoryRegisterResponse": "",
    "SystemSharedMemoryUnregisterRequest": "name=1:string",
    "SystemSharedMemoryUnregisterResponse": "",
}
_DATA_TYPES: Final = {
    "TYPE_INVALID": 0, "TYPE_BOOL": 1, "TYPE_UINT8": 2, "TYPE_INT8": 6, "TYPE_INT16": 7,
    "TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP16": 10, "TYPE_FP32": 11, "TYPE_FP64": 12,
    "TYPE_STRING": 13, "TYPE_BF16": 14,
}  # fmt: skip
_HEALTH: Final = {
    "HealthCheckRequest": "service=1:string",
    "HealthCheckResponse": "status=1:ServingStatus",
}
_REFLECTION: Final = {
    "ExtensionRequest": "containing_type=1:string extension_number=2:int32",
    "ServerReflectionRequest": "host=1:string file_by_filename=3:string/message_request "
    "file_containing_symbol=4:string/message_request "
    "file_containing_extension=5:ExtensionRequest/message_request "
    "all_extension_numbers_of_type=6:string/message_request list_services=7:string/message_request",
    "FileDescriptorResponse": "file_descriptor_proto=1:bytes*",
    "ListServiceResponse": "service=1:ServiceResponse*",
    "ServiceResponse": "name=1:string",
    "ErrorResponse": "error_code=1:int32 error_message=2:string",
    "ServerReflectionResponse": "valid_host=1:string original_request=2:ServerReflectionRequest "
    "file_descriptor_response=4:FileDescriptorResponse/message_response "
    "list_services_response=6:ListServiceResponse/message_response "
    "error_response=7:ErrorResponse/message_response",
}
_STATUSES: Final = {"UNKNOWN": 0, "SERVING": 1, "NOT_SERVING": 2, "SERVICE_UNKNOWN": 3}

_Field: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _Field.TYPE_BOOL, "string": _Field.TYPE_STRING, "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32, "int64": _Field.TYPE_INT64, "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64, "float": _Field.TYPE_FLOAT, "double": _Field.TYPE_DOUBLE,
}  # fmt: skip


def _file(package: str, messages: dict[str, str], enums: dict[str, dict[str, int]]) -> Any:
    """A package as protobuf describes it."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"pipeswitch/{package}.proto", package=package, syntax="proto3"
    )
    for enum, values in enums.items():
        made = file.enum_type.add(name=enum)
        for name, number in values.items():
            made.value.add(name=name, number=number)
    known: dict[str, Any] = {}
    for full_name, fields in messages.items():
        outer, _, name = full_name.rpartition(".")
        message = known[outer].nested_type.add() if outer else file.message_type.add()
        message.name = name
        known[full_name] = message
        for field in fields.split():
            _add_field(package, full_name, message, field, enums)
    return file


def _add_field(
    package: str, full_name: str, message: Any, text: str, enums: dict[str, dict[str, int]]
) -> None:
    name, _, rest = text.partition("=")
    number, _, kind = rest.partition(":")
    kind, _, choice = kind.partition("/")
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.startswith("map."):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(package, "", entry, "key=1:string", enums)
        _add_field(package, "", entry, f"value=2:{kind.removeprefix('map.')}", enums)
        kind = f"{full_name}.{entry.name}*"
    if kind.endswith("*"):
        kind, field.label = kind[:-1], _Field.LABEL_REPEATED
    if choice:
        if not message.oneof_decl:
            message.oneof_decl.add(name=choice)
        field.oneof_index = 0
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in enums else _Field.TYPE_MESSAGE
        field.type_name = f".{package}.{kind}"


def _serve(file: Any, service: str, methods: Mapping[str, tuple[str, str, str]]) -> Any:
    """``file`` with a service: by method what it takes, what it gives, and which of the two
    (``<``, ``>``) stream."""
    made = file.service.add(name=service)
    for name, (takes, gives, streams) in methods.items():
        made.method.add(
            name=name,
            input_type=f".{file.package}.{takes}",
            output_type=f".{file.package}.{gives}",
            client_streaming="<" in streams,
            server_streaming=">" in streams,
        )
    return file


def _classes(file: Any) -> dict[str, Any]:
    POOL.AddSerializedFile(file.SerializeToString())
    return {
        message.name: message_factory.GetMessageClass(
            POOL.FindMessageTypeByName(f"{file.package}.{message.name}")
        )
        for message in file.message_type
    }


POOL: Final = descriptor_pool.DescriptorPool()
_VERBS: Final = {
    verb: (name, f"{verb}Response", "")
    for name in _INFERENCE
    if f"{(verb := name.removesuffix('Request'))}Response" in _INFERENCE
}
INFERENCE: Final = _classes(
    _serve(
        _file("inference", _INFERENCE, {"DataType": _DATA_TYPES}),
        "GRPCInferenceService",
        _VERBS | {"ModelStreamInfer": ("ModelInferRequest", "ModelStreamInferResponse", "<>")},
    )
)
"""Classes of the messages by name."""
_CHECKED: Final = "HealthCheckRequest", "HealthCheckResponse"
HEALTH: Final = _classes(
    _serve(
        _file("grpc.health.v1", _HEALTH, {"ServingStatus": _STATUSES}),
        "Health",
        {"Check": (*_CHECKED, ""), "Watch": (*_CHECKED, ">")},
    )
)
_REFLECTS: Final = {
    "ServerReflectionInfo": ("ServerReflectionRequest", "ServerReflectionResponse", "<>")
}
REFLECTION: Final = {
    package: _classes(_serve(_file(package, _REFLECTION, {}), "ServerReflection", _REFLECTS))
    for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha")
}
"""By package: clients ask one or the other."""
STATUSES: Final = _STATUSES
DATA_TYPES: Final = _DATA_TYPES
