"""Triptych: serve vision-language models with encode, prefill and decode together or apart."""

from __future__ import annotations

__version__ = "0.1.0"
