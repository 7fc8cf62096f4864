"""Object files from raw modules: the compiler's own objects are accepted, and an honest object with any
forged part is refused."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import ROOT

from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.raw.objects import MOST_BYTES, MOST_SHARED, UNDEFINED, inspect, same_host

pytestmark = [
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="forges x86-64's relocations"),
    pytest.mark.slow,
]
PROGRAM = ROOT / "generated_kernels" / "gemm_row_abs_max.program.json"
COMPILE = """
import sys
from pathlib import Path
from coda_agent.primitives.compiler import jit
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
lowered = lower(Program.from_json(Path(sys.argv[1]).read_text()))
target = Path(sys.argv[2])
visit = "    @cute.jit\\n    def epi_visit"
stages = "    def _compute_stages(self, *s, **m):\\n        return 3, 1, 1\\n\\n" + visit
edits = {
    "step": lowered.text,
    "unrolled": lowered.text.replace("unroll_full=True", "unroll=1"),
    "shallow": lowered.text.replace(visit, stages, 1),
}
for name, text in edits.items():
    assert name == "step" or text != lowered.text
    (target / f"{name}.py").write_text(text)
    sys.modules.pop(lowered.module, None)
    jit.import_file(lowered.module, target / f"{name}.py")
    made = jit.compile_kernel(lowered, lowered.gemms[0], PROBES[0], {})
    made.export_to_c(object_file_path=str(target / f"{name}.o"), function_name="func")
made = jit.compile_kernel(lowered, lowered.vectors[0], None, {})
made.export_to_c(object_file_path=str(target / "finish.o"), function_name="func")
"""
HEADER, SECTION, SYMBOL, RELOCATION = "<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IBBHQQ", "<QQq"


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Compile a GEMM, two edits of its text, and a vector kernel. Return the object files by name."""
    target = tmp_path_factory.mktemp("objects")
    environment = os.environ | {
        "QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a",
        "PYTHONPATH": str(ROOT / "src"), "CODA_AGENT_CACHE": str(target),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, str(PROGRAM), str(target)]
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    return {path.stem: path.read_bytes() for path in target.glob("*.o")}


class Forge:
    """The tables of an object file, which can be changed in place."""

    def __init__(self, data: bytes):
        self.data = bytearray(data)
        self.start = struct.unpack_from("<Q", data, 40)[0]
        self.count = struct.unpack_from("<H", data, 60)[0]
        names = self.section(struct.unpack_from("<H", data, 62)[0])
        self.names = [self.text(names[4] + self.section(i)[0]) for i in range(self.count)]

    def text(self, offset: int) -> str:
        return self.data[offset : self.data.index(0, offset)].decode()

    def section(self, key: int | str) -> list[int]:
        index = self.names.index(key) if isinstance(key, str) else key
        return list(struct.unpack_from(SECTION, self.data, self.start + 64 * index))

    def set_section(self, key: int | str, **fields: int) -> Forge:
        index = self.names.index(key) if isinstance(key, str) else key
        known = ("name", "kind", "flags", "address", "offset", "size", "link", "info", "alignment", "entry")
        values = self.section(index)
        for name, value in fields.items():
            values[known.index(name)] = value
        struct.pack_into(SECTION, self.data, self.start + 64 * index, *values)
        return self

    def symbols(self) -> dict[str, int]:
        """Return the offsets of the symbol table's entries, by name."""
        table = self.section(".symtab")
        names = self.section(table[6])[4]
        offsets = range(table[4], table[4] + table[5], 24)
        return {self.text(names + struct.unpack_from("<I", self.data, at)[0]): at for at in offsets}

    def symbol(self, name: str) -> int:
        return (self.symbols()[name] - self.section(".symtab")[4]) // 24

    def set_symbol(self, name: str, **fields: int) -> Forge:
        at, known = self.symbols()[name], ("name", "info", "other", "section", "value", "size")
        values = list(struct.unpack_from(SYMBOL, self.data, at))
        for field, value in fields.items():
            values[known.index(field)] = value
        struct.pack_into(SYMBOL, self.data, at, *values)
        return self

    def rename(self, old: str, new: str) -> Forge:
        """Change a name in place, in the table of names."""
        assert len(new) <= len(old)
        at = self.data.index(b"\0" + old.encode() + b"\0") + 1
        self.data[at : at + len(old)] = new.encode().ljust(len(old), b"\0")
        return self

    def set_relocation(self, section: str, index: int, **fields: int) -> Forge:
        at, known = self.section(section)[4] + 24 * index, ("offset", "info", "addend")
        values = list(struct.unpack_from(RELOCATION, self.data, at))
        for field, value in fields.items():
            values[known.index(field)] = value
        struct.pack_into(RELOCATION, self.data, at, *values)
        return self

    def put(self, section: str, offset: int, code: bytes) -> Forge:
        at = self.section(section)[4] + offset
        self.data[at : at + len(code)] = code
        return self

    def header(self, offset: int, layout: str, value: int) -> Forge:
        struct.pack_into(layout, self.data, offset, value)
        return self

    def fatbin(self) -> int:
        """Return the offset of the fat binary."""
        return self.data.index(b"\x50\xed\x55\xba")


def test_the_compilers_own_objects_pass(objects: dict[str, bytes]) -> None:
    assert set(objects) == {"step", "unrolled", "shallow", "finish"}
    for data in objects.values():
        cubin = inspect(data)
        assert cubin[:4] == b"\x7fELF" and cubin in data
        forge = Forge(data)
        asked = {n for n, at in forge.symbols().items() if n and not forge.data[at + 6 : at + 8].strip(b"\0")}
        assert asked <= UNDEFINED


def test_the_cubin_is_one_that_the_tools_read(objects: dict[str, bytes], tmp_path: Path) -> None:
    from coda_agent.primitives.compiler.cubin import usage

    path = tmp_path / "step.cubin"
    path.write_bytes(inspect(objects["step"]))
    assert usage(path)["REG"] > 32


FORGED: dict[str, tuple[Callable[[Forge], Forge], str]] = {
    "no ELF": (lambda f: f.header(0, "<I", 0), "not a 64-bit"),
    "32 bits": (lambda f: f.header(4, "<B", 1), "not a 64-bit"),
    "shared object": (lambda f: f.header(16, "<H", 3), "not relocatable"),
    "another machine": (lambda f: f.header(18, "<H", 183), "machine 183"),
    "program headers": (lambda f: f.header(56, "<H", 1), "1 segments"),
    "many sections": (lambda f: f.header(60, "<H", 60000), "60000 sections"),
    "sections past the end": (lambda f: f.header(40, "<Q", 1 << 63), "table of sections"),
    "a far section": (lambda f: f.set_section(".lrodata", offset=1 << 62), "ends at byte"),
    "a long section": (lambda f: f.set_section(".ltext", size=1 << 63), "ends at byte"),
    "a constructor": (lambda f: f.set_section(".fini_array", kind=14), "run at loading"),
    "an early constructor": (lambda f: f.set_section(".fini_array", kind=16), "run at loading"),
    "a constructor by name": (lambda f: f.rename(".rodata.cst32", ".init_array"), "run at loading"),
    "an old constructor": (lambda f: f.rename(".rodata.cst32", ".ctors"), "run at loading"),
    "a section of its own": (lambda f: f.rename(".rodata.cst32", ".mine"), "not one that the compiler emits"),
    "two functions at the end": (lambda f: f.set_section(".fini_array", size=16), "16 bytes"),
    "another function at the end": (
        lambda f: f.set_relocation(".rela.fini_array", 0, addend=0), "at unloading",
    ),
    "an address at the end": (
        lambda f: f.set_section(".rela.fini_array", size=0), "at unloading",
    ),
    "writable code": (lambda f: f.set_section(".ltext", flags=0x10000007), "writable and executable"),
    "compressed": (lambda f: f.set_section(".lrodata", flags=0x10000802), "not one that the compiler emits"),
    "thread-local": (lambda f: f.set_section(".lbss", flags=0x10000403), "not one that the compiler emits"),
    "an address of its own": (lambda f: f.set_section(".lrodata", address=4096), "asks for address 4096"),
    "much memory": (lambda f: f.set_section(".lbss", size=1 << 40), "zeros"),
    "a wide alignment": (lambda f: f.set_section(".lbss", alignment=1 << 30), "alignment"),
    "an unknown kind": (lambda f: f.set_section(".eh_frame", kind=6), "not one that the compiler emits"),
    "system": (lambda f: f.rename("_cudaGetDevice", "system"), "asks for 'system'"),
    "a weak symbol": (lambda f: f.set_symbol("_cudaGetDevice", info=0x20), "binding 2"),
    "an indirect function": (lambda f: f.set_symbol("__tvm_ffi_func", info=0x1A), "an indirect function"),
    "malloc of its own": (lambda f: f.rename("__cute_internal_func_cuda_init", "malloc"), "defines 'malloc'"),
    "a symbol far away": (lambda f: f.set_symbol("__tvm_ffi_func", value=1 << 40), "past its section"),
    "an absolute symbol": (lambda f: f.set_symbol("__tvm_ffi_func", section=0xFFF1), "lies in section"),
    "a common symbol": (lambda f: f.set_symbol("__tvm_ffi_func", section=0xFFF2), "lies in section"),
    "a relocation out of its section": (
        lambda f: f.set_relocation(".rela.ltext", 0, offset=1 << 40), "writes past",
    ),
    "a relocation at the brink": (
        lambda f: f.set_relocation(".rela.ltext", 0, offset=f.section(".ltext")[5] - 7), "writes past",
    ),
    "a relocation of no kind": (
        lambda f: f.set_relocation(".rela.ltext", 0, info=(13 << 32) | 37), "type 37",
    ),
    "a relocation by no symbol": (
        lambda f: f.set_relocation(".rela.ltext", 0, info=(9999 << 32) | 29), "symbol 9999",
    ),
    "a pointer beside a function": (lambda f: f.set_relocation(".rela.ltext", 2, addend=4096), "bytes from"),
    "a pointer just behind its section": (
        lambda f: f.set_relocation(".rela.ltext", 1, addend=f.section(".lrodata")[5] + 9), "points",
    ),
    "a pointer far away": (lambda f: f.set_relocation(".rela.ltext", 1, addend=1 << 40), "points"),
    "relocated names": (
        lambda f: f.set_section(".rela.eh_frame", info=f.names.index(".symtab")), "relocates '.symtab'",
    ),
    "relocated nothing": (lambda f: f.set_section(".rela.eh_frame", info=999), "relocates section 999"),
    "no symbols": (lambda f: f.set_section(".symtab", kind=1), "0 symbol tables"),
    "odd symbols": (lambda f: f.set_section(".symtab", entry=23), "entries of 23"),
    "syscall": (lambda f: f.put(".ltext", 0, b"\x0f\x05"), "bytes of syscall at 0x0"),
    "syscall within an instruction": (lambda f: f.put(".ltext", 2, b"\x0f\x05"), "bytes of syscall at 0x2"),
    "sysenter": (lambda f: f.put(".ltext", 1, b"\x0f\x34"), "bytes of sysenter"),
    "int 0x80": (lambda f: f.put(".ltext", 1, b"\xcd\x80"), "bytes of int 0x80"),
    "no fat binary": (lambda f: f.header(f.fatbin(), "<I", 0), "not a fat binary"),
    "two images": (lambda f: f.header(f.fatbin() + 24, "<I", 4096), "not one cubin"),
    "PTX": (lambda f: f.header(f.fatbin() + 16, "<H", 1), "image of kind 1"),
    "compressed image": (lambda f: f.header(f.fatbin() + 16 + 0x48, "<I", 0), "compressed or foreign"),
    "sm_80": (lambda f: f.header(f.fatbin() + 16 + 0x48 + 48, "<I", 0x500550), "not for sm_90a"),
    "sm_90": (lambda f: f.header(f.fatbin() + 16 + 0x48 + 48, "<I", 0x5A055A), "not for sm_90a"),
    "no binary": (lambda f: f.rename("kernels_binary", "kernels"), "0 symbols kernels_binary"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_what_is_forged_is_refused(objects: dict[str, bytes], name: str) -> None:
    change, words = FORGED[name]
    for data in (objects["step"], objects["finish"]):
        with pytest.raises(RawError) as caught:
            inspect(bytes(change(Forge(data)).data))
        assert caught.value.code == "object" and words in caught.value.message, caught.value.message


def test_the_page_has_their_number() -> None:
    page = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
    assert f"{len(FORGED)} forged objects" in page


def test_a_constant_that_is_an_instruction_is_put_in_words(objects: dict[str, bytes]) -> None:
    """For example, the number in smem=1295 contains the bytes of the instruction syscall. The author wrote no
    such instruction, so the message must explain the refusal."""
    with pytest.raises(RawError) as caught:
        inspect(bytes(Forge(objects["finish"]).put(".ltext", 2, struct.pack("<I", 1295)).data))
    said = caught.value.message
    assert "0f 05, the bytes of syscall at 0x2" in said and "use another" in said and "smem" in said
    assert "export the compiler's object" not in said


def test_a_refusal_names_the_list(objects: dict[str, bytes]) -> None:
    forged = Forge(objects["finish"]).rename("_cudaGetDevice", "dlopen")
    with pytest.raises(RawError) as caught:
        inspect(bytes(forged.data))
    assert "'dlopen'" in caught.value.message and all(name in caught.value.message for name in UNDEFINED)


def test_whatever_the_bytes_there_is_a_cubin_or_a_refusal(objects: dict[str, bytes]) -> None:
    data = objects["finish"]
    random.seed(5)
    tables = [
        *range(64),
        *range(Forge(data).start, len(data)),
        *range(Forge(data).section(".symtab")[4], len(data)),
    ]
    for trial in range(1500):
        forged = bytearray(data)
        for _ in range(1 + trial % 3):
            forged[random.choice(tables)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        try:
            assert inspect(bytes(forged))[:4] == b"\x7fELF"
        except RawError as error:
            assert error.code == "object"
    for cut in (0, 1, 63, 64, 4000, len(data) // 2, len(data) - 1):
        with pytest.raises(RawError):
            inspect(data[:cut])
    with pytest.raises(RawError, match=json.dumps(MOST_BYTES)):
        inspect(data + bytes(MOST_BYTES))


def test_an_edit_of_device_code_leaves_the_launch_alone(objects: dict[str, bytes]) -> None:
    honest = objects["step"]
    assert len({inspect(objects[name]) for name in ("step", "unrolled", "shallow")}) == 3
    for name in ("step", "unrolled", "shallow"):  # the third text requests less shared memory
        assert same_host(objects[name], honest) and same_host(honest, objects[name]), name
    assert not same_host(objects["finish"], honest)


def test_no_number_but_that_of_shared_memory_may_differ(objects: dict[str, bytes]) -> None:
    """Only the number of shared-memory bytes may differ. The displacement of a jump or call must be
    equal, and so must any other constant, whatever its size."""
    honest, forge = objects["step"], Forge(objects["step"])
    start, size = forge.section(".ltext")[4:6]
    code = honest[start : start + size]
    jumps = [m.end() for m in re.finditer(rb"\xe8|\xe9|\x0f[\x80-\x8f]", code) if m.end() + 4 <= size]
    numbers = [
        at for at in range(size - 4) if 1024 <= struct.unpack_from("<I", code, at)[0] <= MOST_SHARED - 5
    ]
    assert len(jumps) > 80 and len(numbers) > 80
    taken = []
    for at in {*jumps, *numbers}:
        (number,) = struct.unpack_from("<I", code, at)
        forged = bytes(Forge(honest).put(".ltext", at, struct.pack("<I", number + 5 & 0xFFFFFFFF)).data)
        try:
            if same_host(forged, honest):
                taken.append((at, number))
        except RawError:
            pass
    (((at, number),)) = taken
    assert code[at - 7 : at - 4] == b"\x48\xc7\x83" and number > 100 << 10


@pytest.mark.parametrize("number", [0, 1023, MOST_SHARED + 1, 1 << 31])
def test_shared_memory_that_no_launch_has_is_told(objects: dict[str, bytes], number: int) -> None:
    honest, other = (Forge(objects[name]) for name in ("step", "shallow"))
    start, size = honest.section(".ltext")[4:6]
    place = bytes(honest.data[start : start + size]).index(b"\x48\xc7\x83\x18\x01\0\0") + 7
    same = bytes(other.put(".ltext", place, struct.pack("<I", MOST_SHARED)).data)
    assert same_host(same, objects["step"])
    assert not same_host(bytes(other.put(".ltext", place, struct.pack("<I", number)).data), objects["step"])


def test_where_it_is_not_known_where_the_number_stands_a_difference_is_told(
    objects: dict[str, bytes],
) -> None:
    """The instruction that stores the block size in z marks the place of the number of shared-memory bytes.
    A difference in this number is refused if the instruction has another register, a value other than 1, or
    an address that is not 4 lower."""
    assert same_host(objects["shallow"], objects["step"])
    for at, byte in ((1, b"\x82"), (2, b"\x10"), (6, b"\x02")):
        pair = [Forge(objects[name]) for name in ("shallow", "step")]
        start, size = pair[1].section(".ltext")[4:6]
        place = bytes(pair[1].data[start : start + size]).index(b"\x48\xc7\x83\x18\x01\0\0") - 10
        assert not same_host(*(bytes(forge.put(".ltext", place + at, byte).data) for forge in pair))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.put(".ltext", 0x10, b"\x90"),
        lambda f: f.put(".ltext", f.section(".ltext")[5] - 1, b"\x90"),
        lambda f: f.put(".rodata.cst32", 0, b"\x90"),
        lambda f: f.put(".lrodata", f.section(".lrodata")[5] - 2, b"?"),
        lambda f: f.put(".eh_frame", 20, b"\xff"),
        lambda f: f.set_relocation(".rela.ltext", 1, addend=8),
        lambda f: f.set_relocation(".rela.ltext", 2, info=(f.symbol("_cudaGetDevice") << 32) | 27),
        lambda f: f.set_symbol("__tvm_ffi_func", value=0x10, size=0),
    ],
)
def test_another_launch_is_told(objects: dict[str, bytes], change: Callable[[Forge], Forge]) -> None:
    for name in ("step", "unrolled"):
        forged = bytes(change(Forge(objects[name])).data)
        assert inspect(forged)
        assert not same_host(forged, objects["step"])
