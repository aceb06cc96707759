"""The version of this package."""

from __future__ import annotations

UNKNOWN = "0+unknown"
"""Version of a checkout that is used without an installation, through ``PYTHONPATH``."""


def own_version() -> str:
    """Return the installed version of PipeSwitch; ``UNKNOWN`` if it is not installed."""
    from importlib import metadata  # only here, because it imports all of email

    try:
        return metadata.version("pipeswitch")
    except metadata.PackageNotFoundError:
        return UNKNOWN
