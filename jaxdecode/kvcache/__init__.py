"""The KV cache: an immutable pytree, and the only code that knows its layout.

A row's past has parts: up to two levels of *shared segments* (a prompt that many rows continue, stored once) and the
row's own *tail*. Row b's tail token number t is always in slot t, so padding never enters. Slots are kept in blocks of
128, 128, 256, 512, ...: attention goes block by block, merged by log-sum-exp, and skips those that no row has reached,
so its cost follows the tokens present; and since a block is never cut, it never copies (XLA:CPU copies a slice before a
product). A block that a row has not reached adds exactly nothing to it: how far other rows are cannot change a row.

Layers with a sliding window are rings: token t is in slot t modulo their size, so they need no more slots than their
window and some slack. Keys and values may be int8, with a scale per token and head.

Rows that are beams of one search keep what they wrote where they wrote it; *sources* say which beam's tail holds each
token of a row's past, so that following another beam moves no key and no value.
"""

from __future__ import annotations

from jaxdecode.kvcache.attention import extend
from jaxdecode.kvcache.int4 import Int4Block
from jaxdecode.kvcache.layout import (
    Block,
    Int8Block,
    KVCache,
    Layer,
    Plan,
    Segment,
    Window,
    advance,
    create,
    one_layer,
    plan,
    stored_as,
)
from jaxdecode.kvcache.parts import (
    branch,
    cuttable,
    fork,
    only_nodes,
    reaches_back,
    reorder,
    resize,
    share,
    shorten,
    truncate,
    uneven,
)

__all__ = [
    "Block",
    "Int4Block",
    "Int8Block",
    "KVCache",
    "Layer",
    "Plan",
    "Segment",
    "Window",
    "advance",
    "branch",
    "create",
    "stored_as",
    "cuttable",
    "extend",
    "fork",
    "one_layer",
    "only_nodes",
    "plan",
    "reaches_back",
    "reorder",
    "resize",
    "share",
    "shorten",
    "truncate",
    "uneven",
]
