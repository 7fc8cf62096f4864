"""Hostile programs: JSON, signatures and schedules that no tracer writes."""

from __future__ import annotations

import json

from cheats.tamper import Json, Recorder, node, refused
from cheats.twins import SWIGLU

cheat = Recorder()


# JSON itself


@cheat(refused("json", "is not finite"))
def a_constant_that_is_not_a_number(program: Json) -> None:
    """Compares false with every limit."""
    node(program, "constant")[2] = ["float", "nan"]


@cheat(refused("json", "a number is written as"))
def a_constant_with_another_tag(program: Json) -> None:
    """A type that the reader does not know."""
    node(program, "constant")[2] = ["object", "0x1p-20"]


@cheat(refused("constant", "not finite in fp32"))
def a_constant_beyond_fp32(program: Json) -> None:
    """Finite as a double alone."""
    node(program, "constant")[2] = ["float", "0x1p+128"]


@cheat(refused("json", "a number is written as"))
def a_constant_in_decimals(program: Json) -> None:
    """Another reader may round it another way."""
    node(program, "constant")[2] = 1e-6


@cheat(refused("json", "non-finite number NaN"))
def a_literal_nan(program: Json) -> None:
    """Python's JSON has it, though JSON has not."""
    program["format"] = float("nan")


@cheat(refused("json", "a key occurs twice"))
def a_key_twice(program: Json) -> str:
    """One reader takes the first, another the last."""
    return json.dumps(program).replace('"outputs": {', '"outputs": {"h": 0, ')


@cheat(refused("json", "not valid JSON"))
def a_number_of_ten_thousand_digits(program: Json) -> str:
    """Takes quadratic time to read."""
    return json.dumps(program).replace('"format": 2', f'"format": {"9" * 10000}')


@cheat(refused("json", "arguments"))
def a_truth_value_for_a_node(program: Json) -> None:
    """True is 1 to Python."""
    node(program, "rsqrt")[1] = [True]


@cheat(refused("json", "outputs must map"))
def a_truth_value_for_an_output(program: Json) -> None:
    """True is 1 to Python."""
    program["outputs"]["h"] = True


@cheat(refused("format", "format True"))
def a_truth_value_for_the_format(program: Json) -> None:
    """True is an integer to Python."""
    program["format"] = True


@cheat(refused("json", "arguments"))
def a_float_for_a_node(program: Json) -> None:
    """2.0 equals 2, and is no index."""
    node(program, "rsqrt")[1] = [2.0]


@cheat(refused("json", "malformed"))
def a_dict_for_a_node(program: Json) -> None:
    """Unpacks to its keys."""
    program["nodes"][0] = {"add": 1, "[]": 2, "None": 3}


@cheat(refused("json", "not valid JSON"))
def deep_nesting(program: Json) -> str:
    """Overflows the reader's stack."""
    return '{"nodes": ' + "[" * 20000 + "]" * 20000 + "}"


@cheat(refused("json", "exactly format"))
def a_field_more(program: Json) -> None:
    """Brings its own verdict."""
    program["accepted"] = True


@cheat(refused("json", "exactly format"))
def a_field_missing(program: Json) -> None:
    """No schedule, where one is looked up."""
    del program["schedule"]


@cheat(refused("format", "format 1"))
def an_older_format(program: Json) -> None:
    """Rules that are no longer applied."""
    program["format"] = 1


# The signature


@cheat(refused("signature", "another version of spec"))
def a_looser_output(program: Json) -> None:
    """fp16 where the spec says bf16."""
    program["signature"]["outputs"]["h"]["dtype"] = "fp16"


@cheat(refused("signature", "another version of spec"))
def an_epsilon_of_its_own(program: Json) -> None:
    """Another value of the spec's constant."""
    program["signature"]["constants"]["eps"] = (1e-3).hex()


@cheat(refused("signature", "another version of spec"))
def a_static_size_of_its_own(program: Json) -> None:
    """Compiles for one width alone."""
    program["signature"]["static"] = ["N"]


@cheat(refused("signature", "another version of spec"))
def an_update_of_its_own(program: Json) -> None:
    """Writes h over the residual, which is an input."""
    program["signature"]["updates"] = {"h": "x"}


@cheat(refused("signature", "made for spec 'gemm_rmsnorm_swiglu'"))
def a_program_of_another_spec(program: Json) -> Json:
    """An honest program, of something else."""
    return json.loads(SWIGLU.program.to_json())


# Schedules


def schedule(program: Json, step: str = "0", **fields: object) -> None:
    program["schedule"] = {step: fields}


@cheat(refused("schedule", "no tile 32x64"))
def a_tile_that_no_mainloop_has(program: Json) -> None:
    """Smaller than a warp group's instruction."""
    schedule(program, tile_m=32, tile_n=64)


@cheat(refused("schedule", "cluster must be one of"))
def a_cluster_of_sixteen(program: Json) -> None:
    """More CTAs than a cluster may have."""
    schedule(program, cluster_m=16)


@cheat(refused("schedule", "swizzle one of"))
def a_group_of_no_tiles(program: Json) -> None:
    """A rasterisation that divides by zero."""
    schedule(program, swizzle=0)


@cheat(refused("schedule", "'pingpong' = 1"))
def a_number_for_a_truth_value(program: Json) -> None:
    """1 equals True, and prints as another text."""
    schedule(program, pingpong=1)


@cheat(refused("schedule", "'pre_launch'"))
def a_hook(program: Json) -> None:
    """A field that some tuner may call."""
    schedule(program, pre_launch="import os")


@cheat(refused("schedule", "but there are 1 steps"))
def a_step_that_is_not_there(program: Json) -> None:
    """A schedule for a step that no gemm starts."""
    schedule(program, "1", swizzle=4)


@cheat(refused("json", "step numbers"))
def a_step_spelt_otherwise(program: Json) -> None:
    """00 is 0, once it is a number."""
    schedule(program, "00", swizzle=4)


CHEATS = tuple(cheat.cheats)
