"""The Open Inference Protocol over gRPC, as KServe and Triton speak it."""
