"""Models as pairs of pure functions."""

from __future__ import annotations

from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

__all__ = ["TransformerConfig", "init_params", "transformer"]
