"""All threads of a launch at once: who executes which basic block, and when."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from tests.cuda_machine import arithmetic, effects  # noqa: F401 (they register what they know)
from tests.cuda_machine.decoder import Action, Decoder, dtype_of
from tests.cuda_machine.memory import Array, MachineError, Memory, Shared
from tests.cuda_machine.ptx import Instruction, Kernel, PtxError

_STEPS = 1_000_000  # basic blocks that a launch may take


class Order(Enum):
    """Who goes first. A kernel that waits for others only where it says so gives the same in all.

    TOGETHER: all threads in lockstep. EVEN and ODD: every other warp as far as it gets, then the rest.
    """

    TOGETHER = "together"
    EVEN = "even"
    ODD = "odd"


class _Block:
    """A basic block: what is done, and where each thread goes next."""

    def __init__(self, decoder: Decoder, instructions: list[Instruction], number: int) -> None:
        self.steps: list[tuple[str | None, bool, Action]] = []
        self.guard: tuple[str, bool] | None = None
        self.target = number + 1
        self.barrier = False
        kernel = decoder.kernel
        for instruction in instructions:
            name, guard = instruction.name, instruction.guard
            register = guard.lstrip("!") if guard else None
            negated = bool(guard) and guard.startswith("!")  # type: ignore[union-attr]
            if name in ("bra", "bra.uni", "ret"):
                self.target = kernel.labels[instruction.operands[0]] if name != "ret" else len(kernel.blocks)
                self.guard = (register, negated) if register else None
            elif name in ("bar.sync", "barrier.sync") and instruction.operands == ("0",) and guard is None:
                self.barrier = True
            elif name.startswith(("bar", "bra", "exit")) and not name.startswith("bar.warp"):
                raise PtxError(f"not known: {instruction.text}")
            else:
                self.steps.append((register, negated, decoder.action(instruction)))
        self.next = number + 1


class Launch:
    """The state of one launch; see decoder.Threads for what instructions know of it."""

    def __init__(self, kernel: Kernel, grid: int, threads: int, params: bytes, memory: Memory) -> None:
        if len(params) != kernel.param_bytes:
            raise MachineError(f"{len(params)} bytes of parameters, not {kernel.param_bytes}")
        if threads % 32:
            raise MachineError(f"{threads} threads: not a multiple of 32")
        count = grid * threads
        self.memory, self.shared = memory, Shared(grid, kernel.shared_bytes)
        self.params = np.frombuffer(params, np.uint8)
        number = np.arange(count)
        self.block, self.lane = number // threads, number % 32
        special = {
            "%tid.x": number % threads,
            "%ctaid.x": self.block,
            "%laneid": self.lane,
            "%ntid.x": np.full(count, threads),
            "%nctaid.x": np.full(count, grid),
        }
        self.special = {name: value.astype(np.uint32) for name, value in special.items()}
        self.registers: dict[str, Array] = {}
        for name, kind in kernel.registers.items():
            dtype = dtype_of(kind)
            self.registers[name] = np.zeros(count, dtype if dtype.kind == "b" else f"u{dtype.itemsize}")
        self.active = np.ones(count, bool)
        self._all = True
        self._threads = threads
        self._kernel = kernel
        self._position = np.zeros(count, np.int64)
        self._waiting = np.zeros(count, bool)

    def write(self, register: str, value: Array) -> None:
        before = self.registers[register]
        if self._all and value.shape == before.shape:
            self.registers[register] = value
        else:
            self.registers[register] = np.where(self.active, value, before)

    def _activate(self, active: Array) -> None:
        self.active, self._all = active, bool(active.all())

    def run(self, blocks: list[_Block], first: Array) -> None:
        """first: the threads that go first. Raises MachineError."""
        end = len(blocks)
        for _ in range(_STEPS):
            ready = (self._position < end) & ~self._waiting
            if not ready.any():
                if not self._waiting.any():
                    return
                self._release()
                continue
            if (preferred := ready & first).any():
                ready = preferred
            position = int(self._position[ready].min())
            self._execute(blocks[position], ready & (self._position == position))
        raise MachineError("the kernel does not end")

    def _execute(self, block: _Block, active: Array) -> None:
        self._activate(active)
        for register, negated, action in block.steps:
            if register is None:
                action(self)
                continue
            chosen = active & (self.registers[register] != negated)
            if chosen.any():
                self._activate(chosen)
                action(self)
                self._activate(active)
        if block.guard is None:
            self._position[active] = block.target
        else:
            register, negated = block.guard
            self._position[active] = np.where(self.registers[register] != negated, block.target, block.next)[active]
        if block.barrier:
            self._waiting |= active

    def _release(self) -> None:
        """Let those blocks go on in which all threads wait, at the same barrier."""
        waiting = self._waiting.reshape(-1, self._threads)
        position = self._position.reshape(-1, self._threads)
        some, every = waiting.any(1), waiting.all(1)
        if (some & ~every).any():
            raise MachineError("threads wait at a barrier for others that have ended")
        if (position != position[:, :1])[every].any():
            raise MachineError("threads of a block wait at different barriers")
        self._waiting[:] = False


def decode(kernel: Kernel) -> list[_Block]:
    """Raises PtxError for whatever the machine does not know."""
    decoder = Decoder(kernel)
    return [_Block(decoder, instructions, number) for number, instructions in enumerate(kernel.blocks)]


def run(
    kernel: Kernel,
    blocks: list[Any],
    grid: int,
    threads: int,
    params: bytes,
    memory: Memory,
    order: Order = Order.TOGETHER,
) -> None:
    """Run a kernel. Raises MachineError."""
    launch = Launch(kernel, grid, threads, params, memory)
    warp = np.arange(grid * threads) // 32
    choose: dict[Order, Callable[[], Array]] = {
        Order.TOGETHER: lambda: np.ones(len(warp), bool),
        Order.EVEN: lambda: warp % 2 == 0,
        Order.ODD: lambda: warp % 2 == 1,
    }
    with np.errstate(all="ignore"):
        launch.run(blocks, choose[order]())
