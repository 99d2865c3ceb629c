"""The option ``--mesh``: many devices for one command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxdecode.cli.terminal import BadInput

__all__ = ["over_mesh"]


@contextlib.contextmanager
def over_mesh(text: str | None) -> Iterator[dict[str, Any]]:
    """The mesh that ``text`` describes is jax's own; gives what ``jaxdecode.load`` has to know. None: one device.

    Bad input: a text that describes none, or more devices than there are.
    """
    if text is None:
        yield {}
        return
    import jax

    from jaxdecode.meshes import mesh_of

    try:
        mesh = mesh_of(text)
    except ValueError as error:
        raise BadInput(f"--{error}") from None
    with jax.set_mesh(mesh):
        yield {"mesh": mesh}
