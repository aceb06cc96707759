"""The Open Inference Protocol over gRPC, as KServe and Triton speak it."""

SERVERS = {"grpc": "grpc_server:open_server"}
