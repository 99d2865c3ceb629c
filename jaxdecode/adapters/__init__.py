"""Models from what people have: modules of Flax and Equinox, and functions that take one token at a time."""

from __future__ import annotations

from jaxdecode.adapters.equinox_modules import from_equinox
from jaxdecode.adapters.linen_modules import from_linen
from jaxdecode.adapters.nnx_modules import from_nnx
from jaxdecode.adapters.stepwise import StateCache, recurrent

__all__ = ["StateCache", "from_equinox", "from_linen", "from_nnx", "recurrent"]
