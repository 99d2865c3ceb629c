"""Quantized weights: grids, codes packed into bits, and leaf types that stand where an array stands."""

from __future__ import annotations

from jaxdecode.quant.bounds import Bounds, bounds
from jaxdecode.quant.grids import grid_of, nearest_codes, value_of
from jaxdecode.quant.int8 import codes_and_scale
from jaxdecode.quant.packing import codes_of, grids_of, grouped, grouped_codes, pack, plane_pieces, ungrouped, unpack
from jaxdecode.quant.schemes import Scheme, Uniform, parse_scheme
from jaxdecode.quant.tensor import Form, QRows, QTensor, Side, is_quantized, over_rows, plane_widths
from jaxdecode.quant.trees import dequantize, quantize, quantize_matrix, values_of

__all__ = [
    "Bounds",
    "Form",
    "QRows",
    "QTensor",
    "Scheme",
    "Side",
    "Uniform",
    "bounds",
    "codes_and_scale",
    "codes_of",
    "dequantize",
    "grid_of",
    "grids_of",
    "grouped",
    "grouped_codes",
    "is_quantized",
    "nearest_codes",
    "over_rows",
    "pack",
    "parse_scheme",
    "plane_pieces",
    "plane_widths",
    "quantize",
    "quantize_matrix",
    "unpack",
    "value_of",
    "values_of",
    "ungrouped",
]
