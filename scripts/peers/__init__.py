"""What scripts/bench_peers is made of. It needs nothing but Python; each participant runs in a Python of its own."""

from __future__ import annotations
