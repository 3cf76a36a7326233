"""The text of a kernel in PTX -> instructions, and runs of its programs.

All threads of a program go through the code together: a branch that only some of its threads take
is refused. Triton makes none: it selects and guards instead.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import numpy as np

from . import instructions, matrices
from .machine import Machine, UnknownInstruction, reader
from .memory import Violation

DECODERS = instructions.DECODERS | matrices.DECODERS
GUARDED = r"(?:@(!?)(%\w+)\s+)?"


class Instruction(NamedTuple):
    """One instruction, as it is written: `@%p1 ld.global.v4.b32 {%r1, ...}, [%rd1];`."""

    guard: str | None  # register of the predicate: "%p1", "!%p1"
    name: str  # "ld"
    modifiers: tuple  # ("global", "v4", "b32")
    operands: list  # of strings: ["{%r1, ...}", "[%rd1]"]
    symbols: dict  # of shared memory -> address
    widths: dict  # prefix of a register's name -> its bits; predicates have 1

    @property
    def type(self):
        return self.modifiers[-1]

    @property
    def opcode(self):
        return ".".join((self.name, *self.modifiers))

    def unknown(self):
        operands = ", ".join(self.operands)
        return UnknownInstruction(f"the emulator does not know `{self.opcode} {operands}`")

    def width(self, register):
        """Return the bits of a register."""
        return self.widths[re.match(r"%[a-z]+", register)[0]]

    def flags(self, *allowed):
        """Return the modifiers but the type; an unknown one is an error."""
        rest = self.modifiers[:-1]
        if set(rest) - set(allowed):
            raise self.unknown()
        return rest

    def read(self, index, kind=None, **options):
        """Return what reads an operand, of the instruction's type if no other one is given."""
        return reader(self.operands[index], kind or self.type, self.symbols, **options)


def split_operands(text):
    """Split at the commas that are in no brackets: "{a, b}, [c]" -> ["{a, b}", "[c]"]."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [part.strip() for part in parts if part.strip()]


def place_of(comment):
    """Name a line and its callers: "// a.py:7:3 @[ b.py:9:1 ]" -> "a.py:7, called at b.py:9"."""
    return ", called at ".join(re.findall(r"([^\s:]+:\d+):\d+", comment))


def located(error, place):
    """The same error, with the line of the kernel's source in front."""
    return type(error)(f"{place}: {error}") if place else error


class Program:
    """A kernel, decoded.

    entry: its name; parameters: names of its arguments, in order; threads: of a program
    target: "sm_90a"; code: a function of each instruction; opcodes: those of the code, as written
    places: of each instruction, its line in the source of the kernel, "attention.py:79"
    """

    def __init__(self, text):
        head, _, body = text.partition(".entry")
        self.entry = re.match(r"\s*(\w+)", body)[1]
        self.target = re.search(r"\.target\s+(\w+)", head)[1]
        if re.search(r"\.func\b", text):
            raise UnknownInstruction("a function beside the kernel")
        self.parameters = re.findall(r"\.param\s[^,)]*?(\w+)\s*[,)]", body.partition("{")[0] + ")")
        self.threads = int(re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", body)[1])
        shared = re.findall(r"\.extern\s+\.shared[^;]*?(\w+)\[\]", head)
        self.symbols = dict.fromkeys(shared, 0)
        self.code = []
        self.opcodes = []
        self.places = []
        self.labels = {}
        self._parse(body.partition("{")[2])

    def _parse(self, body):
        lines = []

        def mark(match):
            """Put a statement in place of a .loc, whose comment names the line and its callers."""
            lines.append(place_of(match[1]))
            return f"; loc {len(lines) - 1};"

        body = re.sub(r"^\s*\.loc\b[^\n]*?(//[^\n]*|)$", mark, body, flags=re.MULTILINE)
        body = re.sub(r"//[^\n]*", "", body)
        body = re.split(r"^\s*\.(?:file|section)\b", body, flags=re.MULTILINE)[0]
        widths = {}
        for kind, prefix in re.findall(r"\.reg\s+\.(\w+)\s+(%[a-z]+)<\d+>;", body):
            widths[prefix] = 1 if kind == "pred" else int(kind[1:])
        # Of memory of a thread (.local), Triton 3.8 declares some that it does not use.
        body = re.sub(r"\.(?:reg|pragma|local)\s[^;]*;", "", body)
        place = ""
        for statement in re.split(r";", body):
            statement = " ".join(statement.split())
            while found := re.match(r"(?:(\$\w+):|[{}](?!%))\s*", statement):
                if found[1]:
                    self.labels[found[1]] = len(self.code)
                statement = statement[found.end() :]
            if marked := re.fullmatch(r"loc (\d+)", statement):
                place = lines[int(marked[1])]
            elif statement:
                try:
                    self._decode(statement, widths)
                except UnknownInstruction as error:
                    raise located(error, place) from error
                self.places.append(place)

    def _decode(self, statement, widths):
        found = re.fullmatch(GUARDED + r"([a-z]\w*)((?:\.[\w:]+)*)(?:\s+(.*))?", statement)
        if not found or found[3] not in DECODERS:
            raise UnknownInstruction(f"the emulator does not know `{statement}`")
        negated, guard, name, modifiers, operands = found.groups()
        instruction = Instruction(
            negated + guard if guard else None,
            name,
            tuple(modifiers.split(".")[1:]),
            split_operands(operands or ""),
            self.symbols,
            widths,
        )
        self.opcodes.append(instruction.opcode)
        self.code.append((instruction.guard, DECODERS[name](instruction)))

    def run(self, machine):
        """Run one program to its end."""
        at = now = 0
        try:
            while at < len(self.code):
                now = at
                guard, step = self.code[at]
                at += 1
                machine.steps += 1
                on = None
                if guard:
                    on = ~machine.get(guard[1:]) if guard[0] == "!" else machine.get(guard)
                    on = None if on.all() else on
                target = step(machine, on)
                if target == instructions.EXIT:
                    break
                if target:
                    at = self.labels[target]
        except (Violation, UnknownInstruction) as error:
            raise located(error, self.places[now]) from error
        machine.finish()


def run_grid(program, values, grid, memory, shared, first=0):
    """Run all programs of a grid, one after another.

    values: the arguments: numbers, and addresses in `memory`
    grid: number of programs (x, y, z)
    memory: GlobalMemory of the arguments
    shared: bytes of shared memory of a program
    first: place of the first program along x; those before it do not run

    Returns the number of instructions that they executed together.
    """
    parameters = dict(zip(program.parameters, values, strict=True))
    steps = 0
    places = itertools.product(*(range(size) for size in reversed(grid)))
    with np.errstate(all="ignore"):
        for number, (z, y, x) in enumerate(places):
            memory.program = number
            place = (first + x, y, z)
            size = (first + grid[0], *grid[1:])
            machine = Machine(program.threads, place, size, parameters, memory, shared)
            program.run(machine)
            steps += machine.steps
    return steps
