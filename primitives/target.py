"""The target architecture: the facts about the GPU that schedules, compilers and gates use."""

from __future__ import annotations

from typing import Any, NamedTuple


class Ceiling(NamedTuple):
    """A hardware limit, in ``unit``, with its source."""

    value: float
    unit: str
    source: str


class Machine(NamedTuple):
    """A GPU's limits. ``gpu``: text that its device name contains. ``tensor``: the peak rate of dense 16-bit
    matmuls with fp32 accumulation. ``tensor_fp8``: the peak rate with fp8 operands. ``memory``: the peak
    memory bandwidth. ``cache``: the size of the L2."""

    name: str
    gpu: str
    tensor: Ceiling
    tensor_fp8: Ceiling
    memory: Ceiling
    cache: Ceiling
    multiprocessors: Ceiling

    def to_dict(self) -> dict[str, Any]:
        return {k: v._asdict() if isinstance(v, Ceiling) else v for k, v in self._asdict().items()}


class Target(NamedTuple):
    """A GPU architecture. ``machine``: the GPU on which kernels are accepted. ``others``: more GPUs on which
    kernels can be measured.

    ``architecture``: the name by which compilers know the architecture. ``environment``: environment
    variables that make compilers target the architecture on any machine. ``elf``: the architecture's number
    in a cubin. ``block_bytes``: the most shared memory of a CTA. ``matrix``: a pattern that matches the names
    of tensor-core instructions. ``large_tiles``, ``small_tiles``: the tiles of QuACK's mainloop, as (tile_m,
    tile_n, pingpong). ``clusters``: the allowed numbers of CTAs of a cluster along M and N. ``swizzles``: the
    allowed sizes of a rasterisation group. ``probes``: the schedules at which every kernel is compiled, each
    given by a tile and a cluster. The first probe is the default schedule.
    """

    machine: Machine
    others: tuple[Machine, ...]
    capability: tuple[int, int]
    architecture: str
    environment: dict[str, str]
    elf: int
    block_bytes: int
    matrix: str
    large_tiles: frozenset[tuple[int, int, bool]]
    small_tiles: frozenset[tuple[int, int, bool]]
    clusters: tuple[tuple[int, int], ...]
    swizzles: tuple[int, ...]
    probes: tuple[tuple[int, int, bool, int, int], ...]

    def on(self, gpu: object) -> Machine:
        """The limits of the GPU with this device name. For an unknown GPU, those of ``machine``."""
        return next((each for each in self.others if each.gpu in str(gpu)), self.machine)


# These are the datasheet's peaks. A measured sustained rate would be no limit, because a cool chip could
# exceed the measured rate.
H100 = Machine(
    "H100 SXM",
    "H100",
    Ceiling(989.4e12, "FLOP/s", "NVIDIA H100 datasheet, SXM: 1,979 TFLOPS bf16 sparse, half of it dense"),
    Ceiling(1978.9e12, "FLOP/s", "NVIDIA H100 datasheet, SXM: 3,958 TFLOPS fp8 sparse, half of it dense"),
    Ceiling(3.35e12, "B/s", "NVIDIA H100 datasheet, SXM: 3.35 TB/s of HBM3"),
    Ceiling(50 * 2**20, "B", "NVIDIA H100 architecture whitepaper, SXM5: 50 MB of L2"),
    Ceiling(132, "SMs", "NVIDIA H100 architecture whitepaper, SXM5"),
)
H200 = H100._replace(
    name="H200 SXM",
    gpu="H200",
    memory=Ceiling(4.8e12, "B/s", "NVIDIA H200 datasheet, SXM: 4.8 TB/s of HBM3e"),
    cache=Ceiling(60 * 2**20, "B", "the size of the L2 that CUDA reports"),
)

HOPPER = Target(
    machine=H100,
    others=(H200,),
    capability=(9, 0),
    architecture="sm_90a",
    environment={"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a"},
    elf=90,
    block_bytes=227 << 10,
    matrix="[HQ]GMMA",  # HGMMA takes 16-bit operands, QGMMA takes fp8
    # tile_n is a multiple of 32, because ``pairs`` makes tiles of half the width
    large_tiles=frozenset(
        [(256, n, False) for n in (128, 160, 192, 208)]
        + [(128, n, False) for n in (128, 160, 192, 224, 256)]
        + [(128, n, True) for n in (128, 160, 192, 208)]
        + [(192, 128, True)]
    ),
    # for outputs with fewer large tiles than the GPU has SMs
    small_tiles=frozenset(
        [(128, 32, False), (128, 64, False)] + [(64, 64, True), (64, 128, True), (128, 64, True)]
    ),
    clusters=((1, 1), (1, 2), (2, 1), (2, 2)),
    swizzles=(1, 2, 4, 8, 16, 32),
    # one pingpong and one cooperative schedule
    probes=((128, 128, True, 2, 1), (256, 128, False, 2, 1)),
)

TARGET = HOPPER  # the architecture that kernels are compiled for
