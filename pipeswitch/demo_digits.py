"""The old name of ``pipeswitch.demo.digits``: jobs in a journal may name it."""

from .demo.digits import main

__all__ = ["main"]
