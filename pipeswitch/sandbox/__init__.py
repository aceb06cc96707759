"""What a process that runs clients' programs may still ask of the kernel (ADR 20)."""
