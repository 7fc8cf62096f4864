"""Inspect an edited module's object file, which may be hostile, before anything loads it.

The loader resolves symbols, relocates, and runs registered functions. So an object may contain only those
kinds of sections, symbols and relocations that the compiler's own objects contain. The ELF parser in this
module checks this rule, and trusts no offset. But no parser can tell whether the host code does what the
launcher asks. So the GPU workers of the gates are disposable processes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.target import TARGET

MOST_BYTES = 16 << 20
MOST_SECTIONS, MOST_ENTRIES = 64, 1 << 16  # the compiler's objects have 15 sections and about 600 relocations
MOST_ZEROS = 1 << 16  # limit on the bytes of a zero-filled section; the compiler's objects have 16

# The external functions that the compiler's launch code may call. They belong to TVM's FFI, and to CuTe's
# library, which calls the CUDA runtime.
UNDEFINED = frozenset(
    {
        "CuteDSLRT_TVMFFISetRaisedCudaError", "TVMFFIEnvGetStream", "TVMFFIErrorSetRaisedFromCStr",
        "TVMFFIErrorSetRaisedFromCStrParts", "_GLOBAL_OFFSET_TABLE_", "_cuKernelGetAttribute",
        "_cudaDeviceGetAttribute", "_cudaFuncSetAttribute", "_cudaGetDevice",
        "_cudaKernelSetAttributeForDevice", "_cudaLaunchKernelEx", "_cudaLibraryGetKernel",
        "_cudaLibraryLoadData", "_cudaSetDevice", "cuda_dialect_init_library_once",
        "cuda_dialect_unload_library_once",
    }
)  # fmt: skip
_EXPORTS = re.compile(
    r"__tvm_ffi_func|__cute_internal_func_(cuda_(num_binaries|init|load|load_to_device)|"
    r"(_mlir_ciface_)?cutlass___call___\w+)",
    re.ASCII,
)
# the only function that may run when an object is unloaded
_END = "__cute_internal_func___dtor_cuda_dialect_unload_library_once"
_BINARY = "kernels_binary"
_SECTIONS = re.compile(
    r"|\.(rela)?\.?(l?text|l?data|l?data\.rel\.ro|l?rodata|l?bss|rodata\.cst\d+|fini_array|eh_frame)"
    r"|\.note\.GNU-stack|\.symtab|\.strtab|\.shstrtab",
    re.ASCII,
)


class ElfMachine(NamedTuple):
    """A CPU architecture. ``number``: the architecture's number in an ELF header. ``relocations``: maps each
    allowed relocation type to the number of bytes that it writes. ``traps``: byte patterns of instructions
    that enter the operating system's kernel. Instructions start at multiples of ``alignment``."""

    number: int
    relocations: Mapping[int, int]
    alignment: int
    traps: tuple[tuple[str, re.Pattern[bytes]], ...]


_AARCH64_CODE = (*range(263, 274), *range(274, 287), 299, 311, 312)  # relocations of an instruction's fields
MACHINES = {
    "x86_64": ElfMachine(
        62,
        # 64, PC32, PLT32, GOTPCREL, 32, 32S, PC64, GOTOFF64, GOTPC32, GOT64, GOTPC64
        {1: 8, 2: 4, 4: 4, 9: 4, 10: 4, 11: 4, 24: 8, 25: 8, 26: 4, 27: 8, 29: 8},
        1,
        (
            ("syscall", re.compile(rb"\x0f\x05")),
            ("sysenter", re.compile(rb"\x0f\x34")),
            ("int 0x80", re.compile(rb"\xcd\x80")),
        ),
    ),
    "aarch64": ElfMachine(
        183,
        # ABS64, ABS32, PREL64, PREL32, and the relocations of instructions' fields
        {257: 8, 258: 4, 260: 8, 261: 4, **dict.fromkeys(_AARCH64_CODE, 4)},
        4,
        (("svc", re.compile(rb"[\x01\x21\x41\x61\x81\xa1\xc1\xe1].[\x00-\x1f]\xd4", re.DOTALL)),),
    ),
}

_NULL, _PROGBITS, _SYMTAB, _STRTAB, _RELA, _NOTE, _NOBITS, _FINI_ARRAY = 0, 1, 2, 3, 4, 7, 8, 15
_UNWIND = 0x70000001  # the unwind section of x86-64
_TYPES = {_NULL, _PROGBITS, _SYMTAB, _STRTAB, _RELA, _NOTE, _NOBITS, _FINI_ARRAY, _UNWIND}
_STARTS = {14: ".init_array", 16: ".preinit_array"}
_WRITES, _ALLOCATES, _EXECUTES = 1, 2, 4
_KNOWN_FLAGS = 0x10000077  # write, allocate, execute, merge, strings, link, and x86-64's large sections
_ABSOLUTE, _UNDEFINED = 0xFFF1, 0
_LOCAL, _GLOBAL = 0, 1
_OBJECT, _FUNCTION, _SECTION_SYMBOL = 1, 2, 3
_KINDS = {0, _OBJECT, _FUNCTION, _SECTION_SYMBOL, 4}
_IFUNC = 10


class _Section(NamedTuple):
    name: str
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


class _Symbol(NamedTuple):
    name: str
    binding: int
    kind: int
    section: int
    value: int
    size: int


def inspect(data: bytes) -> bytes:
    """Check a relocatable object for this machine, and return the sm_90a cubin in it. The object may contain
    only what the compiler's own objects contain.

    Raises RawError with the code ``object`` and the location of the fault.
    """
    try:
        return _Object(data).cubin()
    except (struct.error, UnicodeDecodeError) as error:
        raise RawError("object", f"the object file is cut short or garbled: {error}") from None


MOST_SHARED = TARGET.block_bytes  # bytes of shared memory that a launch may request on Hopper


def same_host(data: bytes, honest: bytes) -> bool:
    """Whether an object's launch code equals that of ``honest``. The unedited code of the same kernel was
    compiled to ``honest``, on the same schedule and under the same names of module and class.

    Two differences are allowed: the cubins, and the number of shared-memory bytes that the launch requests
    (at a known location in the code). If the result is true, the launcher runs no new host code. Raises
    RawError as ``inspect`` does.
    """
    (code, rest), (known, others) = _Object(data).host(), _Object(honest).host()
    return rest == others and _but_for_shared_memory(code, known) == known


# The place where x86-64's launch code fills in cudaLaunchConfig_t. One instruction stores 1 (the block's size
# in z). A second instruction stores the number of shared-memory bytes, at an address 4 higher, through the
# same register. At most one instruction lies between these two.
_LAUNCH = re.compile(
    rb"\xc7([\x80-\x83\x85-\x87])(.{4})\x01\0\0\0.{0,8}?\x48\xc7\1(.{4})(?P<shared>.{4})", re.DOTALL
)


def _but_for_shared_memory(code: bytes, known: bytes) -> bytes:
    """Return ``code`` with its number of shared-memory bytes replaced by the number in ``known``. Return
    ``code`` unchanged if ``known`` has no such number or several of them, or if ``code`` has no plausible
    number at the same place."""
    found = [
        m
        for m in _LAUNCH.finditer(known)
        if int.from_bytes(m[3], "little") == int.from_bytes(m[2], "little") + 4 and _is_shared(m["shared"])
    ]
    if len(found) != 1 or not _is_shared(code[slice(*found[0].span("shared"))]):
        return code
    start, end = found[0].span("shared")
    return code[:start] + known[start:end] + code[end:]


def _is_shared(number: bytes) -> bool:
    return 1024 <= int.from_bytes(number, "little") <= MOST_SHARED


def _refuse(message: str, remedy: str = "export the compiler's object as it is") -> NoReturn:
    raise RawError("object", f"{message}: {remedy}")


_OTHER_CONSTANT = (
    "launch code may not contain these bytes, even within a constant; if the constant is smem, grid, block, "
    "cluster or a number behind one of them, use another, such as the next multiple of 16"
)


class _Object:
    def __init__(self, data: bytes):
        if len(data) > MOST_BYTES:
            _refuse(f"the object has {len(data)} bytes of at most {MOST_BYTES}")
        self._data = data
        machine = os.uname().machine
        self._machine = MACHINES["aarch64" if machine == "arm64" else machine]
        self._sections = self._read_sections()
        self._symbols = self._read_symbols()
        for section in self._sections:
            self._check_section(section)
        self._check_code()
        for symbol in self._symbols[1:]:
            self._check_symbol(symbol)
        self._check_relocations()

    def _read_sections(self) -> list[_Section]:
        data = self._data
        if data[:7] != b"\x7fELF\x02\x01\x01":
            _refuse("the object is not a 64-bit little-endian ELF file")
        kind, machine, _, _, programs, start, _, _, _, segments, width, count, names = struct.unpack_from(
            "<HHIQQQIHHHHHH", data, 16
        )
        if kind != 1 or programs or segments:
            _refuse(f"the ELF file is of type {kind} with {segments} segments, not relocatable")
        if machine != self._machine.number:
            _refuse(f"the object is for machine {machine}, and this is {self._machine.number}")
        if width != 64 or not 0 < count <= MOST_SECTIONS or names >= count:
            _refuse(f"the object has {count} sections of {width} bytes, of at most {MOST_SECTIONS} of 64")
        if start + 64 * count > len(data):
            _refuse(f"the table of sections ends at byte {start + 64 * count} of a file of {len(data)}")
        raw = [struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * i) for i in range(count)]
        sections = [_Section("", *fields[1:]) for fields in raw]
        for index, section in enumerate(sections):
            end = section.offset + (section.size if section.kind != _NOBITS else 0)
            if end > len(data):
                _refuse(f"section {index} ends at byte {end} of a file of {len(data)}")
        table = self._bytes(sections[names])
        return [s._replace(name=_text(table, f[0])) for s, f in zip(sections, raw, strict=True)]

    def _bytes(self, section: _Section) -> bytes:
        return b"" if section.kind == _NOBITS else self._data[section.offset : section.offset + section.size]

    def _entries(self, section: _Section, layout: str) -> Iterator[tuple[int, ...]]:
        width = struct.calcsize(layout)
        if section.entry != width or section.size % width or section.size // width > MOST_ENTRIES:
            _refuse(f"section {section.name!r} has {section.size} bytes in entries of {section.entry}")
        yield from struct.iter_unpack(layout, self._bytes(section))

    def _read_symbols(self) -> list[_Symbol]:
        tables = [s for s in self._sections if s.kind == _SYMTAB]
        if len(tables) != 1 or tables[0].link >= len(self._sections):
            _refuse(f"the object has {len(tables)} symbol tables; it must have 1")
        names = self._bytes(self._sections[tables[0].link])
        return [
            _Symbol(_text(names, name), info >> 4, info & 15, section, value, size)
            for name, info, _, section, value, size in self._entries(tables[0], "<IBBHQQ")
        ]

    def _check_section(self, section: _Section) -> None:
        name, kind, flags = section.name, section.kind, section.flags
        if kind in _STARTS or re.match(r"\.(rela)?\.?(preinit|init|ctors|fini$|dtors)", name):
            _refuse(f"section {name!r} ({_STARTS.get(kind, 'by its name')}) would run at loading")
        if kind not in _TYPES or flags & ~_KNOWN_FLAGS or not _SECTIONS.fullmatch(name):
            _refuse(f"section {name!r} (type {kind:#x}, flags {flags:#x}) is not one that the compiler emits")
        if flags & _WRITES and flags & _EXECUTES:
            _refuse(f"section {name!r} is both writable and executable")
        if section.address or section.alignment > 4096 or section.alignment & (section.alignment - 1):
            _refuse(f"section {name!r} asks for address {section.address}, alignment {section.alignment}")
        if kind == _NOBITS and section.size > MOST_ZEROS:
            _refuse(f"section {name!r} asks for {section.size} bytes of zeros, of at most {MOST_ZEROS}")
        if (kind == _FINI_ARRAY) != (name == ".fini_array") or kind == _FINI_ARRAY and section.size != 8:
            _refuse(f"section {name!r} of {section.size} bytes: at unloading one function runs, {_END}")

    def _check_code(self) -> None:
        for section in self._sections:
            if section.flags & _EXECUTES:
                code = self._bytes(section)
                for name, pattern in self._machine.traps:
                    # Search all bytes, because a jump may lead into the middle of a decoded instruction.
                    for found in pattern.finditer(code):
                        if found.start() % self._machine.alignment == 0:
                            said = f"{found[0].hex(' ')}, the bytes of {name} at {found.start():#x}"
                            _refuse(f"{section.name} has {said}", _OTHER_CONSTANT)

    def _check_symbol(self, symbol: _Symbol) -> None:
        name = symbol.name
        if symbol.kind not in _KINDS or symbol.binding not in (_LOCAL, _GLOBAL):
            kind = "an indirect function" if symbol.kind == _IFUNC else f"of type {symbol.kind}"
            _refuse(f"symbol {name!r} is {kind}, binding {symbol.binding}")
        if symbol.section == _UNDEFINED:
            if name not in UNDEFINED:
                _refuse(f"the object asks for {name!r}, and it may ask for {', '.join(sorted(UNDEFINED))}")
        elif symbol.section >= len(self._sections):
            if symbol.section != _ABSOLUTE or symbol.kind != 4 or symbol.binding != _LOCAL:
                _refuse(f"symbol {name!r} lies in section {symbol.section:#x} of {len(self._sections)}")
        elif symbol.value + symbol.size > self._sections[symbol.section].size:
            _refuse(f"symbol {name!r} reaches past its section")
        elif symbol.binding == _GLOBAL and not _EXPORTS.fullmatch(name):
            _refuse(f"the object defines {name!r} for others to use")

    def _check_relocations(self) -> None:
        for section in self._sections:
            if section.kind != _RELA:
                continue
            if section.info >= len(self._sections):
                _refuse(f"{section.name} relocates section {section.info} of {len(self._sections)}")
            target = self._sections[section.info]
            if target.kind not in (_PROGBITS, _FINI_ARRAY, _UNWIND):
                _refuse(f"{section.name} relocates {target.name!r}")
            for offset, info, addend in self._entries(section, "<QQq"):
                self._check_relocation(section, target, offset, info, addend)
        self._check_end()

    def _check_end(self) -> None:
        """Check that .fini_array has at most one entry, which a relocation fills with ``_END``'s address."""
        known = [(s.section, s.value) for s in self._symbols if s.name == _END and s.kind == _FUNCTION]
        found = []
        for section in self._sections:
            if section.kind == _RELA and self._sections[section.info].kind == _FINI_ARRAY:
                for _, info, addend in self._entries(section, "<QQq"):
                    symbol = self._symbols[info >> 32]
                    found.append((symbol.section, symbol.value + addend))
        ends = sum(s.kind == _FINI_ARRAY for s in self._sections)
        if ends and not (len(known) == ends == 1 and found == known):
            _refuse(f"at unloading {ends} functions run, at {found} (section, address); only {_END} may")

    def _check_relocation(
        self, section: _Section, target: _Section, offset: int, info: int, addend: int
    ) -> None:
        place = f"{section.name} at {offset:#x}"
        kind, number = info & 0xFFFFFFFF, info >> 32
        width = self._machine.relocations.get(kind)
        if width is None:
            _refuse(f"{place}: relocation type {kind} is not one that the compiler emits")
        if offset + width > target.size:
            _refuse(f"{place}: it writes past the {target.size} bytes of {target.name!r}")
        if number >= len(self._symbols):
            _refuse(f"{place}: symbol {number} of {len(self._symbols)}")
        symbol = self._symbols[number]
        if 0 < symbol.section < len(self._sections):
            size = self._sections[symbol.section].size
            # an address may be relative to the next instruction
            if not -8 <= symbol.value + addend <= size + 8:
                _refuse(f"{place}: it points {symbol.value + addend} bytes into a section of {size}")
        elif not -8 <= addend <= 16:  # for a relative address of the global offset table
            _refuse(f"{place}: it points {addend} bytes from {symbol.name!r}")

    def cubin(self) -> bytes:
        binary = self._binary()
        place = self._bytes(self._sections[binary.section])
        return _only_cubin(place[binary.value : binary.value + binary.size])

    def _binary(self) -> _Symbol:
        found = [s for s in self._symbols if s.name == _BINARY]
        if len(found) != 1 or not 0 < found[0].section < len(self._sections):
            _refuse(f"the object has {len(found)} symbols {_BINARY}; it must have 1")
        return found[0]

    def host(self) -> tuple[bytes, tuple[object, ...]]:
        """Return the object's host code, and everything else that is loaded or run except the cubin. The
        result does not depend on the cubin's size."""
        binary, code = self._binary(), b""
        rest: list[object] = []
        end = binary.value + binary.size
        for index, section in enumerate(self._sections):
            if section.flags & _EXECUTES:
                code += self._bytes(section)
            elif index != binary.section and section.flags & _ALLOCATES:
                rest.append((section.name, section.kind, section.flags, section.size, self._bytes(section)))
        relocations: list[tuple[str, int, int, int]] = []
        for section in self._sections:
            if section.kind == _RELA:
                name = self._sections[section.info].name
                relocations += [(name, at, info, added) for at, info, added in self._entries(section, "<QQq")]
        targets = [self._target(info >> 32, addend) for _, _, info, addend in relocations]
        texts = sorted({place for where, place in targets if where == binary.section and place >= end})
        data = self._bytes(self._sections[binary.section])
        cuts = [data[a:b].strip(b"\0") for a, b in zip([end, *texts], [*texts, len(data)], strict=True)]
        for (name, offset, info, _), (where, place) in zip(relocations, targets, strict=True):
            if where == binary.section:
                place = texts.index(place) - len(texts) if place >= end else place - binary.value
            rest.append((name, offset, info & 0xFFFFFFFF, where, place))
        exports = [(s.name, s.kind, s.section, s.value) for s in self._symbols if s.binding == _GLOBAL]
        return code, (*rest, *cuts, *exports, data[: binary.value])

    def _target(self, number: int, addend: int) -> tuple[int | str, int]:
        """The target of a relocation: a section and an offset in it, or an external name and the addend."""
        symbol = self._symbols[number]
        return (symbol.section or symbol.name), symbol.value + addend


_FATBIN, _ELF_ENTRY, _CUDA, _ACCELERATED = 0xBA55ED50, 2, 190, 0x800


def _only_cubin(data: bytes) -> bytes:
    """Return the cubin from a fat binary, which must contain no other image. A fat binary is a header of 16
    bytes, followed by entries. Each entry has its own header."""
    magic, version, header, size = struct.unpack_from("<IHHQ", data)
    kind, _, start, length = struct.unpack_from("<HHIQ", data, 16)
    if (magic, version, header) != (_FATBIN, 1, 16) or 16 + size != len(data):
        _refuse(f"{_BINARY} is not a fat binary of {len(data)} bytes")
    if kind != _ELF_ENTRY or start + length != size:
        _refuse(f"{_BINARY} has an image of kind {kind} and {start + length} bytes of {size}, not one cubin")
    cubin = data[16 + start :]
    head = struct.unpack_from("<4sBB", cubin)
    machine, flags = struct.unpack_from("<H", cubin, 18)[0], struct.unpack_from("<I", cubin, 48)[0]
    if head != (b"\x7fELF", 2, 1) or machine != _CUDA:
        _refuse(f"{_BINARY} is for machine {machine}: a compressed or foreign image")
    if flags & 0xFF != TARGET.elf or not flags & _ACCELERATED:
        _refuse(f"{_BINARY} has flags {flags:#x}: its code is not for {TARGET.architecture}")
    return cubin


def _text(table: bytes, offset: int) -> str:
    """The name at an offset in a string table."""
    end = table.find(b"\0", offset)
    if offset > len(table) or end < 0 and offset < len(table):
        _refuse(f"a name begins at byte {offset} of a table of {len(table)}")
    return table[offset:end].decode("ascii") if end >= 0 else ""
