"""What a compiled program holds, and when: XLA's own buffer assignment, read from its dump.

`memory_analysis()` gives one number for all temporaries. The dump gives each of them with its shape, its place in
memory and the instructions between which it lives, from which follows what makes up the peak; that all were read is
checked against `memory_analysis()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

HALF = ("f16", "bf16")
# " value: <7469 while.181{1} (phi) @0> (size=272498688,offset=9537454080): f32[152064,448]{1,0}"
_VALUE = re.compile(
    r"^ value: <\d+ ([\w.\-]+)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\w*)\[?([\d,]*)"
)
# "    while.181{1}:459-466"
_RANGE = re.compile(r"^    ([\w.\-]+\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
# "  ROOT %convert.8 = f32[8,4]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused_computation.399"
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\w*)(\S*) .*?([\w\-]+)\(([^()]*)\)(.*)$")
_SAME = ("copy", "bitcast", "transpose", "reshape", "convert")  # as its operand, in another layout or width


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A temporary of one device, live from instruction `start` to before `end`."""

    name: str
    dtype: str  # XLA's: "f32", "f16", "pred"; "" for a tuple's table
    shape: tuple[int, ...]
    bytes: int
    offset: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Count = Callable[[Buffer], float]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program and its temporaries.

    `widened`: names of float32 temporaries that hold half precision, for a processor that does not compute in it.
    """

    compiled: jax.stages.Compiled
    temporaries: tuple[Buffer, ...]
    widened: frozenset[str] = frozenset()

    def peak(self, count: Count = lambda buffer: buffer.bytes) -> float:
        """Most bytes at one time, each temporary counted as `count` says."""
        return max((sum(map(count, live)) for live in self._moments()), default=0)

    def parts(self, kind: Callable[[Buffer], str], count: Count, until: str) -> dict[str, float]:
        """Most bytes of each kind at one time, as long as there is anything of kind `until`; the times may differ."""
        most: dict[str, float] = {}
        last = max((buffer.end for buffer in self.temporaries if kind(buffer) == until), default=0)
        for live in self._moments():
            live = [buffer for buffer in live if buffer.start < last]
            now: dict[str, float] = {}
            for buffer in live:
                now[kind(buffer)] = now.get(kind(buffer), 0) + count(buffer)
            most |= {name: max(most.get(name, 0), size) for name, size in now.items()}
        return most

    def _moments(self) -> Iterator[list[Buffer]]:
        for at in sorted({buffer.start for buffer in self.temporaries}):
            yield [buffer for buffer in self.temporaries if buffer.start <= at < buffer.end]


def compile_program(lowered: jax.stages.Lowered) -> Program:
    """Compiles without running or allocating anything. RuntimeError if this version's dump is read wrongly."""
    with tempfile.TemporaryDirectory(prefix="parasearch-plan-") as folder, _without_cache():
        # Level 0: the same buffers, and 40 % less time for machine code that nobody runs.
        options = {"xla_dump_to": folder, "xla_backend_optimization_level": 0}
        compiled = lowered.compile(compiler_options=options)
        ranges, assignment = (_dumped(folder, end) for end in ("-live-range.txt", "-buffer-assignment.txt"))
    temporaries, phis = _temporaries(assignment, ranges)
    told = compiled.memory_analysis().temp_size_in_bytes
    read = max((buffer.offset + buffer.bytes for buffer in temporaries), default=0)
    if abs(read - told) > 2**20:
        raise RuntimeError(
            f"the plan reads {read:,} bytes of temporaries in XLA's dump, memory_analysis() has {told:,}: the dump of "
            "this jaxlib is another than parasearch_jax/plan/buffers.py knows"
        )
    return Program(compiled, *_narrowed(temporaries, phis, _sources(compiled.as_text())))


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """A program that comes from the persistent cache has no dump."""

    def use(cache: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", cache)
        compilation_cache.reset_cache()  # it remembers whether it is in use

    before = jax.config.jax_enable_compilation_cache
    use(False)
    try:
        yield
    finally:
        use(before)


def _dumped(folder: str, end: str) -> str:
    (path,) = Path(folder).glob(f"*{end}")
    return path.read_text()


def _temporaries(assignment: str, ranges: str) -> tuple[list[Buffer], set[str]]:
    """The temporaries, and the names of those that a loop hands on."""
    live = {name: (int(start), int(end)) for name, start, end in _RANGE.findall(ranges)}
    buffers, phis, inside = [], set(), False
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            inside = "preallocated-temp" in line
        elif inside and (found := _VALUE.match(line)):
            name, index, phi, size, offset, dtype, dims = found.groups()
            shape = tuple(int(n) for n in dims.split(",") if n)
            name += index or "{}"
            start, end = live[name]
            buffers.append(Buffer(name, dtype, shape, int(size), int(offset), start, end + 1))
            phis |= {name} if phi else set()
    return _in_place(buffers), phis


def _in_place(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Where a result takes the place of its operand, the operand has ended."""
    begins = {(buffer.offset, buffer.start) for buffer in buffers}
    shorter = lambda b: dataclasses.replace(b, end=b.end - 1) if (b.offset, b.end - 1) in begins else b  # noqa: E731
    return [shorter(buffer) for buffer in buffers]


# ------------------------------------------------------------------------------------------- half precision on a CPU
#
# A CPU multiplies in float32: it keeps wide copies of the operands of products, in the layout that suits it. A GPU or
# TPU reads the operand itself. So where such a copy lives, its source is taken to live in its place.


def _narrowed(buffers: list[Buffer], phis: set[str], sources: dict[str, str | None]) -> tuple[tuple, frozenset]:
    """Without the wide copies of what lies in memory too; and the names of the wide ones that are left: their numbers
    were rounded on the way, so that nothing else holds them."""
    by_place = {(buffer.offset, buffer.bytes, buffer.end): buffer.name for buffer in buffers}
    for buffer in sorted(buffers, key=lambda buffer: buffer.start):
        if buffer.name in phis:  # a loop hands on what lay there before
            before = by_place.get((buffer.offset, buffer.bytes, buffer.start))
            if before in sources:
                sources[buffer.name] = sources[before]
    ends: dict[str, int] = {}
    for buffer in sorted(buffers, key=lambda buffer: -buffer.start):  # a source after its copies
        if source := sources.get(buffer.name):
            ends[source] = max(ends.get(source, 0), ends.get(buffer.name, 0), buffer.end)
    left = [b for b in buffers if not sources.get(b.name)]
    left = [dataclasses.replace(b, end=max(b.end, ends.get(b.name, 0))) for b in left]
    return tuple(left), frozenset(b.name for b in left if b.name in sources)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    dtype: str
    shape: str  # with its layout: "[8,4]{1,0}"
    opcode: str
    operands: list[str]
    rest: str  # of its line


def _sources(program: str) -> dict[str, str | None]:
    """float32 instruction that is a wide copy -> what it copies, or None if that is in no memory.

    A wide copy holds half precision in float32, or float32 in another layout than its source. Both by the names that
    buffers have: "fusion.3{}", or "while.2{1}" for an element of a tuple.
    """
    found, roots = _instructions(program)
    nothing = _Instruction("", "", "", [""], "")
    get = lambda name: found.get(name, nothing)  # noqa: E731

    def lies(name: str) -> str:
        """The buffer behind a name, which may only be another view of it."""
        it = get(name)
        if it.opcode in ("bitcast", "reshape"):
            return lies(it.operands[0])
        if it.opcode == "get-tuple-element":
            return f"{it.operands[0]}{{{re.search(r'index=([0-9]+)', it.rest)[1]}}}"
        return f"{name}{{}}"

    def changes(it: _Instruction) -> bool:
        """Whether one of _SAME makes a wide copy."""
        operand = get(it.operands[0])
        moves = it.opcode == "transpose" or (it.opcode == "copy" and operand.shape != it.shape)
        return moves or operand.dtype in HALF

    def inside(name: str, arguments: list[str]) -> tuple[bool, str | None]:
        """Of a fusion's instruction: whether it is a wide copy, and of which of the fusion's arguments."""
        it = get(name)
        if it.opcode == "parameter":
            given = arguments[int(it.operands[0])]
            return get(given).dtype in HALF or wide(given)[0], lies(given)
        if it.opcode in _SAME:
            is_wide, source = inside(it.operands[0], arguments)
            return is_wide or changes(it), source
        return it.dtype in HALF, None

    def wide(name: str) -> tuple[bool, str | None]:
        it = get(name)
        called = re.search(r"calls=%([\w.\-]+)", it.rest)
        if it.opcode == "fusion" and called and called[1] in roots:
            return inside(roots[called[1]], it.operands)
        if it.opcode in _SAME:
            return changes(it) or wide(it.operands[0])[0], lies(it.operands[0])
        return False, None

    copies = {name: wide(name) for name, it in found.items() if it.dtype == "f32"}
    return {f"{name}{{}}": source for name, (is_wide, source) in copies.items() if is_wide}


def _instructions(program: str) -> tuple[dict[str, _Instruction], dict[str, str]]:
    """Instructions by name, and the last one of each computation."""
    found, roots, computation = {}, {}, ""
    for line in program.splitlines():
        if match := _INSTRUCTION.match(line):
            root, name, dtype, shape, opcode, operands, rest = match.groups()
            operands = [operand.strip().lstrip("%") for operand in operands.split(",")]
            found[name] = _Instruction(dtype, shape, opcode, operands, rest)
            if root:
                roots[computation] = name
        elif line.endswith("{"):
            computation = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
    return found, roots
