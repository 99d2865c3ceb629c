"""The names of quantization schemes, one grammar for all of them.

``int8`` and ``int8_weights``: one scale per output channel, 255 levels (``jaxdecode.quant.int8``). All others are
``int{b}[_even|_zero|_affine][_g{n}|_channel|_tensor]``, b = 1 .. 8: `Uniform`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, TypeAlias, get_args

from jaxdecode import checks

__all__ = ["RANGES", "Grid", "Int8", "Range", "Scheme", "Uniform", "parse_scheme"]

Int8 = Literal["int8", "int8_weights"]
Grid = Literal["even", "zero", "affine"]
Range = Literal["max", "percentile", "search"]
RANGES: tuple[str, ...] = get_args(Range)
_EXPECTED = (
    f"{', '.join(get_args(Int8))}, or int{{1 to 8}} with _even, _zero or _affine and _g{{size}}, _channel or _tensor"
)
_NAME = re.compile(r"int([1-8])(?:_(even|zero|affine))?(?:_(?:g([1-9]\d{0,6})|(channel|tensor)))?")


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Codes of ``bits`` bits on an evenly spaced grid per group; weights are rounded, activations are not.

    grid: ``even``: levels -a + jD, none of them 0 (S8.1); ``zero``: one integer code is exactly 0; ``affine``: scale
    and offset, both real. group: values of a row that share a grid, or "channel" (a row) or "tensor". range: how the
    end a of the grid is found: the largest magnitude, the 99.9th percentile, or the least squared error (S8.6).
    """

    bits: int
    grid: Grid = "even"
    group: int | Literal["channel", "tensor"] = 32
    range: Range = "max"

    def __post_init__(self) -> None:
        checks.require(self.bits in range(1, 9), "bits", "1 to 8", self.bits)
        checks.require(self.grid in get_args(Grid), "grid", f"one of {', '.join(get_args(Grid))}", self.grid)
        size = isinstance(self.group, int) and not isinstance(self.group, bool) and self.group >= 1
        ok = size or self.group in ("channel", "tensor")
        checks.require(ok, "group", "a positive whole number, 'channel' or 'tensor'", self.group)
        checks.require(self.range in RANGES, "range", f"one of {', '.join(RANGES)}", self.range)

    @property
    def last_code(self) -> int:
        return 2**self.bits - 1

    def __str__(self) -> str:
        size = f"g{self.group}" if isinstance(self.group, int) else self.group
        return f"int{self.bits}_{self.grid}_{size}"


Scheme: TypeAlias = str | Uniform


def parse_scheme(name: str, text: Any, *, range: Range | None = None) -> Uniform | Int8:
    """What a scheme says; a ``Uniform`` stays. ``range`` is that of the result, if the text names a ``Uniform``.

    ValueError, naming the argument ``name``: another text.

    >>> parse_scheme("scheme", "int3_affine_g64")
    Uniform(bits=3, grid='affine', group=64, range='max')
    """
    if isinstance(text, Uniform):
        return text if range is None else dataclasses.replace(text, range=range)
    if isinstance(text, str) and text in get_args(Int8):
        return text  # type: ignore[return-value]
    match = _NAME.fullmatch(text) if isinstance(text, str) else None
    checks.require(match is not None, name, _EXPECTED, text)
    assert match is not None
    bits, grid, size, whole = match.groups()
    group: Any = whole or int(size or 32)
    return Uniform(int(bits), grid or "even", group, range or "max")  # type: ignore[arg-type]
