"""Operands of instructions as functions on all threads at once, and the registry of what instructions do.

A register is an array of unsigned integers over the threads of the whole launch (of bools, if it is a predicate), which nothing
changes in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np

from tests.cuda_machine.memory import Array, Memory, Shared
from tests.cuda_machine.ptx import Instruction, Kernel, PtxError


class Threads(Protocol):
    """A launch. active: which threads execute the instruction at hand. block: of each thread, as lane."""

    registers: dict[str, Array]
    special: dict[str, Array]
    params: Array
    memory: Memory
    shared: Shared
    active: Array
    block: Array
    lane: Array

    def write(self, register: str, value: Array) -> None:
        """Into the register of the active threads."""


Action = Callable[[Threads], None]
Operand = Callable[[Threads], Array]
Handler = Callable[["Decoder", list[str], tuple[str, ...]], Action]

HANDLERS: dict[str, Handler] = {}
_KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register what is done for instructions whose first word is one of these."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


@cache
def dtype_of(kind: str) -> np.dtype[Any]:
    """Of a PTX type such as u32."""
    if kind == "pred":
        return np.dtype(bool)
    if not re.fullmatch(r"[bus](8|16|32|64)|f(16|32|64)", kind):
        raise PtxError(f"type {kind}")
    return np.dtype(f"{_KINDS[kind[0]]}{int(kind[1:]) // 8}")


class Decoder:
    """Turns the instructions of one kernel into actions."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def action(self, instruction: Instruction) -> Action:
        """Raises PtxError for a form that is not known."""
        base, *modifiers = instruction.name.split(".")
        try:
            return HANDLERS[base](self, modifiers, instruction.operands)
        except (PtxError, ValueError, KeyError, IndexError) as error:
            raise PtxError(f"not known: {instruction.text} ({error!r})") from error

    def read(self, operand: str, kind: str) -> Operand:
        """An operand as numbers of a type; of a register that is wider, the low bits."""
        dtype = dtype_of(kind)
        if operand in self.kernel.registers:
            held = dtype_of(self.kernel.registers[operand])
            if held == dtype or (held.itemsize == dtype.itemsize and "b" not in (held.kind, dtype.kind)):
                return lambda threads: threads.registers[operand].view(dtype)
            if held.itemsize < dtype.itemsize or dtype.kind == "f":
                raise PtxError(f"{operand} as {kind}")
            low = np.dtype(f"u{dtype.itemsize}")
            return lambda threads: threads.registers[operand].astype(low).view(dtype)
        if operand.startswith("%"):
            if dtype.itemsize != 4:
                raise PtxError(operand)
            return lambda threads: threads.special[operand].view(dtype)
        constant = np.array([self._constant(operand, dtype)]).astype(dtype)
        return lambda _: constant

    def _constant(self, operand: str, dtype: np.dtype[Any]) -> Any:
        for symbols in (self.kernel.params, self.kernel.shared):
            if operand in symbols:
                return symbols[operand]
        if operand.startswith(("0f", "0F")):
            return np.array([int(operand[2:], 16)], np.uint32).view(np.float32)[0]
        if operand.startswith(("0d", "0D")):
            return np.array([int(operand[2:], 16)], np.uint64).view(np.float64)[0]
        number = int(operand, 0)
        return number % (1 << 8 * dtype.itemsize) if dtype.kind == "u" else number

    def write(self, register: str, kind: str) -> Callable[[Threads, Array], None]:
        """To a register that is at least as wide as the type: a shorter number is extended."""
        dtype, held = dtype_of(kind), dtype_of(self.kernel.registers[register])
        if held.itemsize < dtype.itemsize or (held.kind == "b") != (dtype.kind == "b"):
            raise PtxError(f"{register} for {kind}")
        stored = held if held.kind == "b" else np.dtype(f"u{held.itemsize}")
        extended = np.dtype(f"i{held.itemsize}") if dtype.kind == "i" else stored

        def write_as_it_is(threads: Threads, value: Array) -> None:
            threads.write(register, (value if value.dtype == dtype else value.astype(dtype)).view(stored))

        def write_extended(threads: Threads, value: Array) -> None:
            value = value.astype(dtype, copy=False)
            if dtype.kind == "f":
                value = value.view(f"u{dtype.itemsize}")
            threads.write(register, value.astype(extended).view(stored))

        return write_as_it_is if dtype.itemsize == stored.itemsize else write_extended

    def vector(self, operand: str) -> list[str]:
        """The names in `{a, b}`, or of a single one."""
        return [name.strip() for name in operand.strip("{}").split(",")]

    def address(self, operand: str) -> Operand:
        """Of `[base]` or `[base+offset]`."""
        match = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operand)
        if match is None:
            raise PtxError(operand)
        offset = np.array([int(match[2] or 0)], np.int64).view(np.uint64)
        base = self.read(match[1], "u32" if self.kernel.registers.get(match[1]) == "b32" else "u64")
        return lambda threads: base(threads).astype(np.uint64) + offset
