"""Continuous batching: rows that end make room for the next, whatever their lengths, in a few compiled programs."""

from __future__ import annotations

from jaxdecode.engine.driver import Options, Stats, Turn
from jaxdecode.engine.requests import Request, Result
from jaxdecode.engine.serving import Engine

__all__ = ["Engine", "Options", "Request", "Result", "Stats", "Turn"]
