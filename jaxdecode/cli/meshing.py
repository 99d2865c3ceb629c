"""The option ``--mesh``: many devices for one command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxdecode.cli.terminal import BadInput

__all__ = ["over_mesh"]


@contextlib.contextmanager
def over_mesh(text: str | None, *, own: bool = False) -> Iterator[dict[str, Any]]:
    """The mesh that ``text`` describes is jax's own; gives what ``jaxdecode.load`` has to know. None: one device.

    own: of the devices of this process alone; else all processes have devices in it. Bad input: a text that describes
    no mesh, or one of more devices than there are, or of no device of some process.
    """
    if text is None:
        yield {}
        return
    import jax

    from jaxdecode.meshes import mesh_of

    try:
        mesh = mesh_of(text, jax.local_devices() if own else None)
        missing = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
        if missing and not own:
            expected = f"devices of all {jax.process_count()} processes"
            raise ValueError(f"mesh: expected {expected}, got {text}, without those of process {min(missing)}")
    except ValueError as error:
        raise BadInput(f"--{error}") from None
    with jax.set_mesh(mesh):
        yield {"mesh": mesh}
