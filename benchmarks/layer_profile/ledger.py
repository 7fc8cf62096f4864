"""Attribute each kernel of the layer's backward to a part, and give the part's FLOPs, bytes and group.

D is the width of the model, and F the width of the FFN; other names are as in ``benchmarks.by_hand.layer``.
Only compulsory bytes count, that is, each operand and each output once. This module needs only the standard
library.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

# Rates for the bounds: FLOP/s of sustained matmuls at the power limit of 700 W, and bytes/s of copies.
TENSOR, MEMORY = 640e12, 3.0e12
ATTENTION, WEIGHTS, DATA = "attention", "weight-gradient products", "data-gradient products"
UNKNOWN, PASSES, GAPS = "products not told apart", "separate memory-bound passes", "gaps"
GROUPS = (ATTENTION, WEIGHTS, DATA, UNKNOWN, PASSES, GAPS)
# The matmuls of our kernels, by their place in the layer. torch.compile computes the same matmuls.
PLACES = {"down_backward": "dy @ Wd", "gate_up_backward": "dz @ Wgu", "qkv_backward": "dqkv @ Wqkv"}
ITEM = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "int": 4, "long int": 8, "double": 8, "bool": 1}
IS_ATTENTION = re.compile(r"attention|flash|fmha|sdpa|dot_do_o|convert_dq", re.I)
IS_PRODUCT = re.compile(r"gemm|nvjet|cutlass|splitk|wgmma|^triton_tem", re.I)


@dataclass(frozen=True)
class Share:
    """A part of a backward, as far as it is known without timing: name, group, FLOPs and compulsory bytes."""

    what: str
    group: str
    flops: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class BackwardPart:
    """One part of a backward: the consecutive kernels of one matmul or operator. Times are in microseconds,
    for each step of the profile. ``taken`` is the time from the start of the first kernel to the end of the
    last; ``gap`` is the time before the first kernel."""

    share: Share
    names: tuple[str, ...]
    grid: tuple[int, ...]
    taken: tuple[float, ...]
    gap: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.taken)

    @property
    def bound(self) -> float | None:
        """The larger of two times in microseconds: for the part's FLOPs at the rate ``TENSOR``, and for the
        part's bytes at the rate ``MEMORY``. None if neither FLOPs nor bytes are known."""
        known = [n / most for n, most in ((self.share.flops, TENSOR), (self.share.bytes, MEMORY)) if n]
        return 1e6 * max(known) if known else None


def rows(entry: Mapping[str, Any], arm: str) -> list[BackwardPart]:
    """The parts of an arm's backward in launch order."""
    kernels = entry["backward"][arm]["kernels"]
    found = _calls(kernels, entry.get("operators", {}).get(arm, []))
    ours = _ours([kernel["name"] for kernel in kernels], entry.get("ours", []))
    parts: list[tuple[Any, list[int]]] = []
    for place, told in enumerate(found):
        key = ours.get(place) or told.get("call") or ("alone", place)
        if parts and parts[-1][0] == key and not _is_attention(told):
            parts[-1][1].append(place)
        else:
            parts.append((key, [place]))
    longest = _longest_attention(kernels, found)
    own = {(p["place"], p["kind"]): p for p in entry.get("ours", [])}
    return [
        _row(kernels, places, _own_share(own[key]) if key in own else _share(entry, found, places, longest))
        for key, places in parts
    ]


def _row(kernels: Sequence[Mapping[str, Any]], places: Sequence[int], share: Share) -> BackwardPart:
    own = [kernels[place] for place in places]
    steps = range(len(own[0]["microseconds"]))
    inner = [sum(k["gap"][step] for k in own[1:]) for step in steps]
    taken = [sum(k["microseconds"][step] for k in own) + inner[step] for step in steps]
    names = tuple(k["name"] for k in own)
    return BackwardPart(share, names, tuple(own[0]["grid"]), tuple(taken), tuple(own[0]["gap"]))


def _calls(
    kernels: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The operator that launched each kernel. The operators (``told``) come from another profile of the same
    backward. So the nth launch of a kernel gets the operator of that kernel's nth launch in ``told``."""
    by_name: dict[tuple[str, int], Mapping[str, Any]] = {}
    seen: Counter[str] = Counter()
    for each in told:
        by_name[each["name"], seen[each["name"]]] = each
        seen[each["name"]] += 1
    seen.clear()
    found = []
    for kernel in kernels:
        found.append(by_name.get((kernel["name"], seen[kernel["name"]]), {"name": kernel["name"]}))
        seen[kernel["name"]] += 1
    return found


def _ours(names: Sequence[str], parts: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, str]]:
    """Map each of our launches, given by its position in the launch order, to the kernel's place in the layer
    and the kernel's kind. If a kernel has several places, its launches belong to these places in the order of
    ``parts``."""
    waiting = {p["kernel"]: [q for q in parts if q["kernel"] == p["kernel"]] for p in parts}
    found: dict[int, tuple[str, str]] = {}
    last = ""
    for place, name in enumerate(names):
        kernel = next((kernel for kernel in waiting if kernel in name), None)
        if kernel is None:
            continue
        if kernel == last and place - 1 in found:  # a second launch of the same step
            found[place] = found[place - 1]
        elif waiting[kernel]:
            part = waiting[kernel].pop(0)
            found[place] = part["place"], part["kind"]
        last = kernel
    return found


def _own_share(part: Mapping[str, Any]) -> Share:
    if part["kind"] == "gemm":
        return Share(PLACES[part["place"]], DATA, part["flops"], part["bytes"])
    return Share(f"finish of {PLACES[part['place']]}", PASSES, None, part["bytes"])


def _share(
    entry: Mapping[str, Any], found: Sequence[Mapping[str, Any]], places: Sequence[int], longest: int
) -> Share:
    told = found[places[0]]
    if _is_attention(told):
        whole = _attention(entry["sizes"]) if places[0] == longest else (None, None)
        return Share("attention", ATTENTION, *whole)
    operands = _operands(told)
    if operands:
        return _product(entry["sizes"], *operands)
    if told["name"].startswith("triton_") and not told["name"].startswith("triton_tem"):
        return Share(told["name"], PASSES, None, _argument_bytes(told))
    if IS_PRODUCT.search(told["name"]):
        return Share("a product", UNKNOWN)
    return Share(told.get("op", "unknown"), PASSES, None, None)


def _is_attention(told: Mapping[str, Any]) -> bool:
    around = (told.get("op", ""), *told.get("within", ()))
    return any(IS_ATTENTION.search(name) for name in around if name.startswith("aten::")) or (
        not told["name"].startswith("triton") and IS_ATTENTION.search(told["name"]) is not None
    )


def _longest_attention(kernels: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> int:
    """The position of the longest attention kernel, which gets all of attention's FLOPs; -1 if there is no
    attention kernel."""
    its = [place for place, told in enumerate(found) if _is_attention(told)]
    return max(its, key=lambda place: fmean(kernels[place]["microseconds"]), default=-1)


def _attention(sizes: Mapping[str, int]) -> tuple[int, int]:
    """FLOPs and bytes of the backward of causal attention. The backward computes five matmuls over half of
    the pairs of tokens. The backward reads q, k, v, the output and the output's gradient, and writes three
    gradients."""
    tokens, width = sizes["tokens"], sizes["width"]
    return 5 * tokens * sizes["length"] * width, 2 * 8 * tokens * width


def _operands(told: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """The shapes of a matmul's operands A and B; None if the kernel is not a matmul of two matrices."""
    at = {"aten::mm": 0, "aten::addmm": 1}.get(told.get("op", ""))
    dims = told.get("dims") or []
    if at is None or len(dims) < at + 2 or any(len(each) != 2 for each in dims[at : at + 2]):
        return None
    return dims[at], dims[at + 1]


def _product(sizes: Mapping[str, int], a: Sequence[int], b: Sequence[int]) -> Share:
    """A matmul of the layer's backward, identified by its operands' shapes."""
    tokens, width, ffn = sizes["tokens"], sizes["width"], sizes["ffn"]
    (m, k), n = a, b[1]
    moved, flops = 2 * (m * k + k * n + m * n), 2 * m * n * k
    weights = {
        (width, ffn): "dWd = dy' @ act",
        (width, 2 * ffn): "dWgu = dz' @ hn1",
        (width, width): "dWo = dh1' @ a",
        (width, 3 * width): "dWqkv = dqkv' @ hn",
    }
    data = {
        (width, ffn): "dy @ Wd",
        (2 * ffn, width): "dz @ Wgu",
        (width, width): "dh1 @ Wo",
        (3 * width, width): "dqkv @ Wqkv",
    }
    if k == tokens and (min(m, n), max(m, n)) in weights:
        return Share(weights[min(m, n), max(m, n)], WEIGHTS, flops, moved)
    if m == tokens and (k, n) in data:
        return Share(data[k, n], DATA, flops, moved)
    return Share(f"[{m}, {k}] @ [{k}, {n}]", UNKNOWN, flops, moved)


def _argument_bytes(told: Mapping[str, Any]) -> int | None:
    """The bytes of a generated kernel's tensors, each counted once; None if the profile lists no tensors."""
    dims, types = told.get("dims") or [], told.get("types") or []
    found = sum(ITEM[t] * math.prod(d) for d, t in zip(dims, types, strict=False) if t in ITEM and d)
    return found or None


def groups(found: Sequence[BackwardPart]) -> dict[str, float]:
    """Microseconds by group. The gaps are also a group, so the groups add up to the whole backward."""
    sums = {name: sum(row.mean for row in found if row.share.group == name) for name in GROUPS}
    return sums | {GAPS: sum(fmean(row.gap) for row in found)}


def peak(conditions: Mapping[str, Any]) -> tuple[float, float] | None:
    """The median SM clock in MHz, and the tensor cores' peak FLOP/s at this clock. Each multiprocessor
    computes 4096 FLOPs per cycle. None if the clock is not known."""
    clock, many = conditions.get("sm_mhz"), conditions.get("multiprocessors", 132)
    if not isinstance(clock, list):
        return None
    return median(clock), 4096 * many * median(clock) * 1e6
