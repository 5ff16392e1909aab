"""Compiled HLO text as plain records: computations, instructions, shapes in bytes.

What lives here: reading the text, and facts that stand in one instruction (bytes,
devices of a replica group, trip count, matrix multiplications). What must not: what a
schedule of instructions means (`_hlo_schedule`), and anything that imports JAX.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)\s.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_LEAF = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_MATMUL_TARGET = re.compile(r"matmul|gemm|\$conv|\$dot", re.IGNORECASE)
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a shape.

    Attributes:
        dtype: element type as HLO spells it, such as `bf16`.
        dims: sizes.
        size_bytes: bytes of the elements themselves.
        held_bytes: bytes it occupies, with the padding that its tiles need.
        space: memory space; 0 is the device's main memory.
    """

    dtype: str
    dims: tuple[int, ...]
    size_bytes: int
    held_bytes: int
    space: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without `%`.
        op: such as `fusion` or `all-gather-start`.
        elements: arrays of the result; one list per element of a tuple.
        operands: names.
        attributes: the rest of the line.
        arguments: text between the parentheses.
        is_root: whether its value is the computation's.
    """

    name: str
    op: str
    elements: tuple[tuple[Leaf, ...], ...]
    operands: tuple[str, ...]
    attributes: str
    arguments: str
    is_root: bool

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All arrays of the result, in order."""
        return tuple(leaf for element in self.elements for leaf in element)

    @property
    def op_name(self) -> str:
        """Name of the traced operation; empty if the compiler kept none."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it runs."""
        names = _CALLED.findall(self.attributes)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if branches:
            names += _NAME.findall(branches.group(1))
        for side in ("true_computation", "false_computation"):
            names += re.findall(rf"\b{side}=%?([\w.\-]+)", self.attributes)
        return tuple(names)

    @property
    def cycles(self) -> int:
        """The compiler's own estimate; 0 if it gives none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found.group(1)) if found else 0

    @property
    def target(self) -> str:
        """What a custom call calls; empty for other instructions."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def aliases(self) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
        """Results written in place: index of the result, operand, index in it."""
        start = self.attributes.find("output_to_operand_aliasing={")
        if start < 0:
            return []
        text = _balanced(self.attributes, self.attributes.index("{", start))
        return [(_index(r), int(o), _index(i)) for r, o, i in _ALIAS.findall(text)]


@dataclasses.dataclass
class Computation:
    """A list of instructions, in schedule order if the module is scheduled."""

    name: str
    instructions: list[Instruction]

    def __post_init__(self) -> None:
        self.by_name = {i.name: i for i in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @property
    def parameters(self) -> list[Instruction]:
        """The parameters, by number."""
        found = [i for i in self.instructions if i.op == "parameter"]
        return sorted(found, key=lambda i: int(i.arguments))


class Module:
    """A compiled program.

    Args:
        text: what `compiled.as_text()` gives.

    Attributes:
        computations: by name.
        entry: where the program starts.
        is_scheduled: whether the order of the text is the order of execution.
        num_partitions: devices of the program.
        output_aliases: for each output, the parameter whose memory it takes.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        header = text[: text.find("\n")]
        self.is_scheduled = "is_scheduled=true" in header
        found = re.search(r"num_partitions=(\d+)", header)
        replicas = re.search(r"replica_count=(\d+)", header)
        self.num_partitions = int(found.group(1)) if found else 1
        if self.num_partitions == 1 and replicas:
            self.num_partitions = int(replicas.group(1))
        self.output_aliases: dict[int, int] = {}
        start = header.find("input_output_alias={")
        if start >= 0:
            aliases = _balanced(header, header.index("{", start))
            for out, param, _ in _ALIAS.findall(aliases):
                self.output_aliases[(_index(out) or (0,))[0]] = int(param)
        entry = ""
        for name, is_entry, lines in _blocks(text):
            instructions = [i for i in map(_instruction, lines) if i]
            if instructions:
                self.computations[name] = Computation(name, instructions)
                entry = name if is_entry else entry
        if not entry:
            raise ValueError(
                "this is not the text of a compiled program: it has no ENTRY. Pass "
                "what compiled.as_text() returns."
            )
        self.entry = self.computations[entry]
        self._matmul: dict[str, bool] = {}

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions of the computations that an instruction runs, and so on."""
        for name in instruction.called:
            computation = self.computations.get(name)
            for inner in computation.instructions if computation else ():
                yield inner
                yield from self.inside(inner)

    def is_matmul(self, instruction: Instruction) -> bool:
        """Whether an instruction multiplies matrices or convolves, itself or inside."""
        if instruction.op in ("dot", "convolution", "ragged-dot", "scaled-dot"):
            return True
        if instruction.op == "custom-call":
            return bool(_MATMUL_TARGET.search(instruction.target))
        if instruction.op not in ("fusion", "call", "async-start"):
            return False
        for name in instruction.called:
            if name not in self._matmul:
                self._matmul[name] = False
                computation = self.computations.get(name)
                self._matmul[name] = computation is not None and any(
                    map(self.is_matmul, computation.instructions)
                )
            if self._matmul[name]:
                return True
        return False

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a `while` runs; None if the text does not tell.

        Read off what the compiler notes of it, else off a counter from 0 by a constant.
        """
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if found:
            return int(found.group(1))
        condition, body = (
            self.computations.get(found.group(1)) if found else None
            for found in (
                re.search(rf"\b{part}=%?([\w.\-]+)", loop.attributes)
                for part in ("condition", "body")
            )
        )
        if condition is None or body is None:
            return None
        compare = condition.root
        if compare.op != "compare" or "direction=LT" not in compare.attributes:
            return None
        counter, bound = (condition.by_name[name] for name in compare.operands)
        index = re.search(r"\bindex=(\d+)", counter.attributes)
        limit = _constant(bound)
        if index is None or limit is None or body.root.op != "tuple":
            return None
        update = body.by_name[body.root.operands[int(index.group(1))]]
        terms = [_constant(body.by_name[name]) for name in update.operands]
        step = next((t for t in terms if t), None)
        return -(-limit // step) if update.op == "add" and step else None

    def group_size(self, instruction: Instruction) -> int:
        """Devices in one replica group of a collective."""
        return group_size(instruction.attributes, self.num_partitions)


def group_size(text: str, num_devices: int) -> int:
    """Devices in one replica group, from the attributes of a collective.

    Args:
        text: attributes, with `replica_groups=` in one of the ways HLO writes it: lists
            `{{0,1},{2,3}}`, an iota `[2,4]<=[8]`, or axes of a mesh.
        num_devices: what an empty list stands for.

    Returns:
        The number of devices.
    """
    if found := re.search(r"replica_groups=\{\{([\d, ]*)\}", text):
        return len(found.group(1).split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text):
        return int(found.group(1))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = {n: int(s) for n, s in re.findall(r"'([^']+)'=(\d+)", found.group(1))}
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found.group(2))
        return math.prod(int(part) if part else sizes[axis] for axis, part in used)
    return num_devices


def _constant(instruction: Instruction) -> int | None:
    if instruction.op == "constant" and instruction.arguments.isdigit():
        return int(instruction.arguments)
    return None


def itemsize_bits(dtype: str) -> int:
    """Bits of one element of an HLO element type; 0 for tokens and the like."""
    if dtype == "pred":
        return 8
    found = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
    return int(found.group(1)) if found else 0


def parse_shape(text: str) -> tuple[tuple[Leaf, ...], ...]:
    """Read a shape: one tuple of arrays per top-level element."""
    if not text.startswith("("):
        return (tuple(map(_leaf, _LEAF.findall(text))),)
    return tuple(
        tuple(map(_leaf, _LEAF.findall(part))) for part in _split(text[1:-1]) if part
    )


def _leaf(found: tuple[str, str, str]) -> Leaf:
    dtype, sizes, layout = found
    dims = tuple(int(re.sub(r"\D", "", d) or 0) for d in sizes.split(",") if d)
    bits = itemsize_bits(dtype)
    space = re.search(r"S\((\d+)\)", layout)
    held = list(dims)
    tile = re.search(r"T\(([\d,]+)\)", layout)
    order = re.match(r"[\d,]+", layout)
    if tile and order:
        minor = [int(d) for d in order.group(0).split(",")]
        for dim, unit in zip(minor, map(int, reversed(tile.group(1).split(",")))):
            held[dim] = -(-held[dim] // unit) * unit
    return Leaf(
        dtype=dtype,
        dims=dims,
        size_bytes=-(-math.prod(dims) * bits // 8),
        held_bytes=-(-math.prod(held) * bits // 8),
        space=int(space.group(1)) if space else 0,
    )


def _blocks(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """The computations of a text: name, whether it is the entry, lines."""
    name, is_entry, lines = "", False, []
    for line in text.splitlines():
        if line[:1] not in ("", " ", "}"):
            if found := _HEADER.match(line):
                name, is_entry, lines = found.group(2), bool(found.group(1)), []
        elif line.startswith("}") and name:
            yield name, is_entry, lines
            name = ""
        elif name:
            lines.append(line)


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    root, name, rest = found.groups()
    rest = _COMMENT.sub("", rest) if "/*" in rest else rest
    if rest.startswith("("):
        shape = _balanced(rest, 0)
    else:
        shape = rest[: rest.find(" ")]
    rest = rest[len(shape) :].lstrip()
    start = rest.find("(")
    if start < 0:
        return None
    arguments = _balanced(rest, start)
    return Instruction(
        name=name,
        op=rest[:start],
        elements=parse_shape(shape),
        operands=tuple(_NAME.findall(arguments)),
        attributes=rest[start + len(arguments) :],
        arguments=arguments[1:-1],
        is_root=bool(root),
    )


def _balanced(text: str, start: int) -> str:
    """The part of a text from an opening bracket to the one that closes it."""
    opening = text[start]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for found in re.compile(rf"[{opening}{closing}]").finditer(text, start):
        depth += 1 if found.group() == opening else -1
        if not depth:
            return text[start : found.end()]
    return text[start:]


def _split(text: str) -> list[str]:
    """Cut at the commas outside of all brackets."""
    parts, depth, start = [], 0, 0
    for found in re.finditer(r"[\[\](){},]", text):
        mark = found.group()
        if mark == "," and not depth:
            parts.append(text[start : found.start()].strip())
            start = found.end()
        elif mark != ",":
            depth += 1 if mark in "[({" else -1
    return [*parts, text[start:].strip()]


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in text.replace(" ", "").split(",") if i)
