"""Gateway process for standard clients: HTTP, gRPC (Open Inference Protocol), and metrics.

It connects to the server like any other client (docs/adr/0022-the-gateway.md), and never imports
torch.
"""
