"""The SDK: ``Client`` talks to a server from any thread, ``AsyncClient`` from asyncio."""

from .client import Client, Task

__all__ = ["Client", "Task"]
