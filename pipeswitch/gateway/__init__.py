"""Other people's clients: the Open Inference Protocol over HTTP and gRPC, and metrics.

A process of its own (docs/adr/0022-the-gateway.md) that is a client of the server like any other.
It never imports torch.
"""
