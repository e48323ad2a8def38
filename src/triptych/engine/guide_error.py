"""Why a guide cannot be used."""

from __future__ import annotations


class GuideError(Exception):
    """Expected. The message is the reason alone; whoever knows the request adds the field."""
