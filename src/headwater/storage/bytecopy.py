"""Bytes read, written and copied in words inside of compiled functions, which would do it one by one. Loads numba.

All positions are uint64, and may be anything. Who reads or writes beyond an array is not told; but with
NUMBA_BOUNDSCHECK=1, for tests, the same is done byte by byte, and numba tells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic

from headwater.storage.compiled import inlined


def _place(context: Any, builder: Any, signature: Any, arguments: Any, array: int, kind: ir.Type) -> Any:
    """Where the word of an array of bytes is whose index stands behind the array among the arguments."""
    data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
    return builder.bitcast(builder.gep(data, [arguments[array + 1]]), kind.as_pointer())


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def load_eight(_: Any, source: Any, at: Any) -> Any:
    """Eight bytes as the machine's uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_place(context, builder, signature, arguments, 0, ir.IntType(64)), align=1)

    return types.uint64(source, at), generate


def _word_store(kind: ir.Type, number: Any) -> Any:
    """`store(out, at, word)`"""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def store(_: Any, out: Any, at: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[2], _place(context, builder, signature, arguments, 0, kind), align=1)
            return context.get_dummy_value()

        return types.void(out, at, number), generate

    return store


def _word_copy(kind: ir.Type) -> Any:
    """`copy(source, at, out, to)` of one word."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def copy(_: Any, source: Any, at: Any, out: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = builder.load(_place(context, builder, signature, arguments, 0, kind), align=1)
            builder.store(word, _place(context, builder, signature, arguments, 2, kind), align=1)
            return context.get_dummy_value()

        return types.void(source, at, out, to), generate

    return copy


def _checked_load() -> Any:
    @inlined
    def load(source: Any, at: Any) -> Any:
        word = np.uint64(0)
        for k in range(np.uint64(8)):
            word |= np.uint64(source[at + k]) << (np.uint64(8) * k)
        return word

    return load


def _checked_store(size: int) -> Any:
    count = np.uint64(size)

    @inlined
    def store(out: Any, at: Any, word: Any) -> None:
        for k in range(count):
            out[at + k] = np.uint8((np.uint64(word) >> (np.uint64(8) * k)) & np.uint64(255))

    return store


def _checked_copy(size: int) -> Any:
    count = np.uint64(size)

    @inlined
    def copy(source: Any, at: Any, out: Any, to: Any) -> None:
        for k in range(count):
            out[to + k] = source[at + k]

    return copy


store_eight = _word_store(ir.IntType(64), types.uint64)
store_four = _word_store(ir.IntType(32), types.uint32)
_copy_eight = _word_copy(ir.IntType(64))
copy_sixteen = _word_copy(ir.VectorType(ir.IntType(8), 16))
if getattr(config, "BOUNDSCHECK", None):
    load_eight = _checked_load()
    store_eight, store_four = _checked_store(8), _checked_store(4)
    _copy_eight, copy_sixteen = _checked_copy(8), _checked_copy(16)
_EIGHT = np.uint64(8)
_SIXTEEN = np.uint64(16)


@inlined
def copy_bytes(source: Any, at: Any, out: Any, to: Any, size: Any) -> None:
    """`out[to : to + size] = source[at : at + size]`, all numbers uint64, not a byte more read or written.

    Short texts byte by byte, or by a call to the C library, take three to five times as long.
    """
    if size >= _SIXTEEN:
        last = size - _SIXTEEN
        for k in range(np.uint64(0), last, _SIXTEEN):
            copy_sixteen(source, at + k, out, to + k)
        copy_sixteen(source, at + last, out, to + last)  # it may overlap the one before
    elif size >= _EIGHT:
        last = size - _EIGHT
        _copy_eight(source, at, out, to)
        _copy_eight(source, at + last, out, to + last)
    else:
        for k in range(size):
            out[to + k] = source[at + k]
