"""The text of a kernel in PTX, parsed: instructions, labels, registers and parameters."""

import re
from dataclasses import dataclass, field
from functools import cached_property


class PtxFault(Exception):
    """An error of the program, or an access that is undefined on a GPU. The message names the instruction."""


REGISTER = re.compile(r"%[a-zA-Z_]\w*")
WRITE_NONE = ("griddepcontrol", "st", "red", "bra", "brx", "ret", "bar", "cp", "fence", "stmatrix", "wgmma")


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction."""

    opcode: str  # with its suffixes: "ld.global.v4.b32"
    operands: tuple[str, ...]  # "%r1", "5", "[%rd1+16]", "{%r1, %r2}"
    guard: str | None  # the predicate register
    negated: bool  # the guard is negated
    text: str

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    @cached_property
    def registers(self) -> frozenset[str]:
        """All registers that the instruction names."""
        return frozenset(REGISTER.findall(self.text))

    @cached_property
    def written(self) -> frozenset[str]:
        """The registers that the instruction writes. Stores and branches write none."""
        if self.parts[0] in WRITE_NONE or not self.operands:
            return frozenset()
        if self.parts[0] in ("tcgen05", "mbarrier") and self.parts[1] not in ("ld", "try_wait"):
            return frozenset()
        return frozenset(REGISTER.findall(self.operands[0]))


@dataclass
class Program:
    """A kernel."""

    name: str
    threads: int  # of a block
    parameters: list[str]  # names, in order
    max_registers: int = 0  # of a thread, at the start; 0: the program does not say
    registers: dict[str, str] = field(default_factory=dict)  # name: type, such as "b32"
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # the index of the instruction at a label
    tables: dict[str, list[str]] = field(default_factory=dict)  # the labels of each table of branches


def parse(text: str) -> Program:
    """Parse the PTX of a module with one kernel, as Triton writes it."""
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)\s*(.*?)\{", text, re.DOTALL)
    assert entry, "the text has no kernel"
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    assert threads, "the text does not say how many threads a block has"
    parameters = re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", entry[2].strip())
    registers = re.search(r"\.maxnreg\s+(\d+)", entry[3])
    program = Program(entry[1], int(threads[1]), parameters, int(registers[1]) if registers else 0)
    body = text[entry.end() :]
    table = re.compile(r"(\$\w+):\s*\.branchtargets\s*([^;]*);")
    program.tables = {name: split_operands(labels) for name, labels in table.findall(body)}
    depth, scope = 1, 0  # scope: number of the inner block that declares registers of its own
    local: dict[str, str] = {}
    # A brace at the start of a statement opens or closes a block; any other brace belongs to a vector operand.
    blocks = re.sub(r"(?<=[;\n])([ \t]*[{}])(?=\s|$)", r"\n\1\n", table.sub("", body))
    for line in blocks.split("\n"):
        line = line.strip()
        if line == "{":
            depth, scope, local = depth + 1, scope + 1, {}
        elif line == "}":
            depth -= 1
            if not depth:
                break
            local = {}
        elif match := re.fullmatch(r"(\$?\w+):", line):
            program.labels[_label(match[1], scope)] = len(program.instructions)
        else:
            for statement in filter(None, (part.strip() for part in line.split(";"))):
                _add_statement(program, statement, local, scope)
    return program


def _label(name: str, scope: int) -> str:
    """Return the name of a label in the whole kernel. Inline assembly repeats its labels, which have no $."""
    return name if name.startswith("$") else f"{name}@{scope}"


def _add_statement(program: Program, statement: str, local: dict[str, str], scope: int) -> None:
    if match := re.fullmatch(r"\.reg\s*\.(\w+)\s+(.*)", statement):
        for name in (part.strip() for part in match[2].split(",")):
            several = re.fullmatch(r"(%?\w+)<(\d+)>", name)
            names = [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]
            for one in names:
                known = one if one.startswith("%") else local.setdefault(one, f"%in{scope}_{one}")
                program.registers[known] = match[1]
        return
    if statement.startswith("."):
        return  # a directive, such as .loc
    if local:
        statement = re.sub(r"(?<![%\w.])[a-zA-Z_]\w*(?![\w.])", lambda m: local.get(m[0], m[0]), statement)
    match = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
    assert match, f"no instruction: {statement}"
    operands = tuple(split_operands(match[4]))
    if match[3].startswith("bra"):
        operands = tuple(_label(one, scope) for one in operands)
    program.instructions.append(Instruction(match[3], operands, match[2], match[1] == "!", statement))


def split_operands(text: str) -> list[str]:
    """Split at the commas outside of brackets and braces."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)] if text.strip() else []


def in_braces(operand: str) -> list[str]:
    """Return the members of a vector operand; the operand itself if it has no braces."""
    return split_operands(operand.strip()[1:-1]) if operand.startswith("{") else [operand]
