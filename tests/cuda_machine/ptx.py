"""PTX text to basic blocks of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_IGNORED = (".pragma", ".maxntid", ".minnctapersm", ".loc", ".file")
_ENDS = ("bra", "ret", "exit", "bar", "barrier")  # the first word of what ends a basic block


class PtxError(Exception):
    """Text that this parser, or an instruction that the machine, does not know."""


@dataclass(frozen=True)
class Instruction:
    """`@guard name operands`: guard is a register, with a leading ! for its opposite; vectors keep their braces."""

    name: str
    operands: tuple[str, ...]
    guard: str | None
    text: str


@dataclass
class Kernel:
    """blocks: basic blocks in the order of the text. labels: of blocks, by name. params, shared: offsets in bytes, by name."""

    name: str
    registers: dict[str, str] = field(default_factory=dict)
    params: dict[str, int] = field(default_factory=dict)
    param_bytes: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def _variable(declaration: str) -> tuple[str, int, int]:
    """Name, size in bytes and alignment of `.align 8 .b8 name[80]` or `.u64 name`."""
    match = re.fullmatch(r"(?:\.align (\d+) )?\.(\w+) ([\w$]+)(?:\[(\d+)\])?", " ".join(declaration.split()))
    if match is None:
        raise PtxError(f"declaration: {declaration}")
    element = int(match[2][1:]) // 8
    return match[3], element * int(match[4] or 1), int(match[1] or element)


def _place(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _declare(kernel: Kernel, statement: str) -> None:
    if match := re.fullmatch(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>", statement):
        kernel.registers |= {f"{match[2]}{number}": match[1] for number in range(int(match[3]))}
    elif match := re.fullmatch(r"\.shared (.+)", statement):
        name, size, alignment = _variable(match[1])
        kernel.shared[name] = _place(kernel.shared_bytes, alignment)
        kernel.shared_bytes = kernel.shared[name] + size
    elif not statement.startswith(_IGNORED):
        raise PtxError(f"directive: {statement}")


def _instruction(statement: str) -> Instruction:
    match = re.fullmatch(r"(?:@(!?%\w+)\s+)?([a-z][\w.]*)(?:\s+(.*))?", statement, re.DOTALL)
    if match is None:
        raise PtxError(f"instruction: {statement}")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", match[3] or "")
    return Instruction(match[2], tuple(operands), match[1], statement)


def parse(text: str, name: str) -> Kernel:
    """The kernel of that name. Raises PtxError."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    match = re.search(rf"\.entry {re.escape(name)}\s*\((.*?)\)([^{{]*)\{{(.*?)\n\}}", text, re.DOTALL)
    if match is None:
        raise PtxError(f"no kernel {name}")
    kernel = Kernel(name)
    for declaration in filter(None, (part.strip() for part in match[1].split(","))):
        variable, size, alignment = _variable(declaration.removeprefix(".param "))
        kernel.params[variable] = _place(kernel.param_bytes, alignment)
        kernel.param_bytes = kernel.params[variable] + size

    blocks: list[list[Instruction]] = [[]]
    for shared in re.findall(r"^\.shared [^;]+", text[: match.start()], re.MULTILINE):
        _declare(kernel, " ".join(shared.split()))
    for raw in match[3].split(";"):
        statement = raw.strip()
        while label := re.match(r"([$\w]+):\s*", statement):
            if blocks[-1]:
                blocks.append([])
            kernel.labels[label[1]] = len(blocks) - 1
            statement = statement[label.end() :]
        if not statement:
            continue
        if statement.startswith("."):
            _declare(kernel, " ".join(statement.split()))
            continue
        blocks[-1].append(_instruction(statement))
        if blocks[-1][-1].name.split(".")[0] in _ENDS:
            blocks.append([])
    kernel.blocks = blocks
    return kernel
