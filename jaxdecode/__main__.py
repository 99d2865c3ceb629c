"""`python -m jaxdecode`: the same as the command `jaxdecode`."""

from __future__ import annotations

from jaxdecode.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
