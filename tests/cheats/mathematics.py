"""Wrong mathematics that a loose check would pass. A program can express it even if all other ways to cheat
are closed."""

from __future__ import annotations

from cheats.corpus import BY_SIZE, wrong
from cheats.twins import (
    ACCUMULATE,
    CHAIN,
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    FP8,
    GELU,
    LAYERNORM,
    QK_NORM,
    RMSNORM,
    SQUARE,
    SWIGLU,
)

# With s = 2**k + 1, (s*t) - (s*t - t) rounds t to 24 - k bits of significand: 8 bits for bf16, 4 for e4m3.
BF16, FP8_E4M3 = 2**16 + 1, 2**20 + 1


def rounded(value: str, scale: int) -> str:
    """Return code that rounds ``value`` to fewer bits by fp32 arithmetic alone (Dekker's trick)."""
    return f"({scale} * {value} - ({scale} * {value} - {value}))"


def in_parts(count: int) -> str:
    """Return code for the chain's second matmul: one gemm for each of ``count`` parts of K. A tile that a
    later step reads is bf16."""
    share = f"column_index(hg) * {count} / hg.columns"
    lines = ["z = 0"]
    for part in range(count):
        inside = f"({share} >= {part}) * ({share} < {part + 1})"
        lines.append(f"z = z + gemm(where({inside}, hg, 0), w_up.mT)")
    return "\n".join(f"    {line}" for line in lines)


NOTHING_DONE = (
    SWIGLU.cheat(
        "zeros", "Writes zeros, which cost nothing.", {"silu(gate) * up": "0 * gate * up"}, wrong("act")
    ),
    SWIGLU.cheat("identity", "Leaves the activation out.", {"silu(gate) * up": "gate * up"}, wrong("act")),
    RMSNORM.cheat(
        "pass-through", "Hands the residual on.", {"gemm(y, w.mT) + x": "0 * gemm(y, w.mT) + x"}, wrong("h")
    ),
    RMSNORM.cheat(
        "residual dropped", "Saves a tile's load.", {"gemm(y, w.mT) + x": "gemm(y, w.mT) + 0 * x"}, wrong("h")
    ),
    RMSNORM.cheat(
        "residual dropped where small",
        "Below a hundredth the residual drowns in the rounding of h, though not in the fp32 rstd.",
        {"+ x": "+ where(abs(x) < 0.01, 0, x)"},
        wrong("rstd"),
    ),
    ACCUMULATE.cheat(
        "buffer not accumulated", "Overwrites instead of adding.", {"dw + t": "0 * dw + t"}, wrong("dw_new")
    ),
)
PARTS_LEFT_OUT = (
    SWIGLU.cheat(
        "last columns dropped",
        "The last tile of columns is never computed.",
        {'"preact": z': '"preact": where(column_index(z) < z.columns - 128, z, 0)'},
        wrong("preact"),
    ),
    SWIGLU.cheat(
        "nothing past column 400",
        "Right at the widths of a quick check, zero at those of a model.",
        {"silu(gate) * up": "where(column_index(gate) >= 400, 0, silu(gate) * up)"},
        wrong("act"),
    ),
    SWIGLU.cheat(
        "nothing where columns are many",
        "The number of columns tells a check from a model.",
        {"silu(gate)": "where(gate.columns * (gate * 0 + 1) > 400, gate * 0, silu(gate))"},
        wrong("act"),
    ),
    GELU.cheat(
        "nothing where rows are many",
        "So does the number of rows.",
        {"gelu(z)": "where(z.rows * (z * 0 + 1) > 5000, z * 0, gelu(z))"},
        wrong("act"),
    ),
    RMSNORM.cheat(
        "nothing between the cases' widths",
        "Right at every case's columns and below 2048; zero at all that lie between.",
        {
            '    return {"h": h': "    n = h.columns\n"
            "    zero = where(n > 4096, where(n < 8192, 0, 1), where(n > 2048, where(n < 4096, 0, 1), 1))\n"
            '    h = h * zero\n    return {"h": h'
        },
        BY_SIZE,
    ),
    RMSNORM.cheat(
        "an rstd of its own between two cases' widths",
        "Off by the root of two from 2049 columns to 4095, right at 2048 and 4096.",
        {
            "rsqrt(mean + eps)": "rsqrt(mean * twice + eps)",
            "    return": "    n = h.columns\n"
            "    twice = where(n > 2048, where(n < 4096, 2, 1), 1)\n    return",
        },
        BY_SIZE,
    ),
    CROSS_ENTROPY.cheat(
        "a large vocabulary's end left out",
        "Logits past the first 32768 count for nothing, which no smaller vocabulary shows.",
        {"row_logsumexp(z)": "row_logsumexp(where(column_index(z) < 32768, z, -100))"},
        wrong("lse"),
    ),
    QK_NORM.cheat(
        "heads past the twelfth dropped",
        "A ragged case has twelve; models have more.",
        {'"q": q': '"q": where(column_index(q) < 24 * P, q, 0)'},
        wrong("q"),
    ),
    QK_NORM.cheat(
        "last rows dropped",
        "Rows from 256 on, told by their positions, stay empty.",
        {'"q": q': '"q": where(per_row(positions) < 256, q, 0)'},
        wrong("q"),
    ),
    CHAIN.cheat(
        "K tail dropped",
        "The second matmul leaves out the last eight of K.",
        {"gemm(hg,": "gemm(where(column_index(hg) < hg.columns - 8, hg, 0),"},
        wrong("z"),
    ),
    CHAIN.cheat(
        "one of K dropped",
        "The second matmul leaves out a single element of K.",
        {"gemm(hg,": "gemm(where(column_index(hg) == 17, 0, hg),"},
        wrong("z"),
    ),
    GELU.cheat(
        "one wrong column",
        "One column of hundreds is zero.",
        {'"preact": z': '"preact": where(column_index(z) == 101, 0, z)'},
        wrong("preact"),
    ),
    GELU.cheat(
        "one column off by a twentieth",
        "One column of hundreds is five per cent too large.",
        {'"act": gelu(z)': '"act": gelu(z) * where(column_index(z) == 101, 1.05, 1)'},
        wrong("act"),
    ),
    CROSS_ENTROPY_BACKWARD.cheat(
        "target forgotten",
        "One element a row is wrong: the target's.",
        {"where(onehot, p - 1, p)": "where(onehot, p, p)"},
        wrong("dlogits"),
    ),
    CROSS_ENTROPY_BACKWARD.cheat(
        "target's neighbour",
        "The one falls a column too far right.",
        {"== per_row(target)": "== per_row(target) + 1"},
        wrong("dlogits"),
    ),
    CROSS_ENTROPY.cheat(
        "ignored rows counted",
        "An ignored row gets its log-sum-exp for a target's logit, which hides its loss.",
        {'"target_logit": picked': '"target_logit": where(target < 0, lse, picked)'},
        wrong("target_logit"),
    ),
)
APPROXIMATIONS = (
    GELU.cheat(
        "GELU by a sigmoid",
        "The quick form of GELU.",
        {"gelu(z)": "z * sigmoid(1.702 * z)"},
        wrong("act"),
    ),
    GELU.cheat(
        "GELU by its other form",
        "The one with erf (Abramowitz and Stegun 7.1.26), which differs by 0.0005 at most.",
        {
            "gelu(z)": "where(z < 0, z * tail, z - z * tail)",
            "    return": "    t = 1 / (1 + 0.3275911 * 0.7071067812 * abs(z))\n"
            "    p = 1.421413741 + t * (-1.453152027 + t * 1.061405429)\n"
            "    tail = 0.5 * t * (0.254829592 + t * (-0.284496736 + t * p)) * exp(-0.5 * z * z)\n"
            "    return",
        },
        wrong("act"),
    ),
    GELU.cheat("ReLU for GELU", "Close for large values.", {"gelu(z)": "maximum(z, 0)"}, wrong("act")),
    GELU.cheat(
        "tanh by a fraction",
        "A Pade approximant, off by two hundredths at most.",
        {
            "gelu(z)": "0.5 * z * (1 + maximum(-1, minimum(1, t * (27 + t * t) / (27 + 9 * t * t))))",
            "    return": "    t = 0.7978845608 * (z + 0.044715 * z * z * z)\n    return",
        },
        wrong("act"),
    ),
    SWIGLU.cheat(
        "hard sigmoid",
        "A clamp for the sigmoid.",
        {"silu(gate)": "gate * maximum(0, minimum(1, gate / 6 + 0.5))"},
        wrong("act"),
    ),
    SWIGLU.cheat(
        "sigmoid by its series",
        "A polynomial that is good to a thousandth below one.",
        {"silu(gate)": "gate * (0.5 + gate / 4 - gate * gate * gate / 48)"},
        wrong("act"),
    ),
    SWIGLU.cheat(
        "SiLU without its tail",
        "Zero below -7, where it is less than a hundredth.",
        {"silu(gate)": "where(gate < -7, gate * 0, silu(gate))"},
        wrong("act"),
    ),
    SWIGLU.cheat(
        "SiLU with a straight tail",
        "A two-hundredth of the gate below -7.",
        {"silu(gate)": "where(gate < -7, gate * 0.005, silu(gate))"},
        wrong("act"),
    ),
    GELU.cheat(
        "GELU without its tail",
        "Zero below -4.5, where it is five millionths.",
        {"gelu(z)": "where(z < -4.5, z * 0, gelu(z))"},
        wrong("act"),
    ),
    CROSS_ENTROPY_BACKWARD.cheat(
        "small probabilities flushed",
        "Below 3e-5, the mean over a vocabulary of 32768.",
        {"    onehot": "    p = where(p < 0.00003, p * 0, p)\n    onehot"},
        wrong("dlogits"),
    ),
    CROSS_ENTROPY_BACKWARD.cheat(
        "exp by squaring",
        "(1 + x/1024) ** 1024: ten multiplications for an exponential.",
        {
            "    p = exp(z - per_row(lse))": "    p = 1 + (z - per_row(lse)) / 1024\n"
            "    for _ in range(10):\n        p = p * p",
        },
        wrong("dlogits"),
    ),
    QK_NORM.cheat(
        "sine by its series",
        "Good for the first few positions.",
        {
            "rope(join(even, odd), positions, inv_freq)": "join(even * c - odd * s, even * s + odd * c)",
            "    q =": "    angle = (0 * even + per_row(positions)) * per_head(inv_freq)\n"
            "    c, s = 1 - angle * angle / 2, angle - angle * angle * angle / 6\n    q =",
        },
        wrong("q"),
    ),
    CROSS_ENTROPY.cheat(
        "maximum for log-sum-exp",
        "Right for a row with one large logit.",
        {"row_logsumexp(z)": "row_max(z)"},
        wrong("lse"),
    ),
    CROSS_ENTROPY.cheat(
        "log-sum-exp without the shift",
        "Right until a logit passes 88, where the exponential overflows.",
        {"row_logsumexp(z)": "log(row_sums(exp(z)))"},
        wrong("lse"),
    ),
)
FACTORS = (
    SWIGLU.cheat(
        "factor 1.002", "A scale is a little off.", {'"preact": z': '"preact": 1.002 * z'}, wrong("preact")
    ),
    SWIGLU.cheat("factor 1.001", "Half of that.", {'"preact": z': '"preact": 1.001 * z'}, wrong("preact")),
    RMSNORM.cheat(
        "a hundred-thousandth in fp32",
        "An fp32 output off by 1e-5.",
        {"rsqrt(mean + eps)": "1.00001 * rsqrt(mean + eps)"},
        wrong("rstd"),
    ),
    RMSNORM.cheat(
        "epsilon missing", "Matters for rows near zero alone.", {"mean + eps": "mean"}, wrong("rstd")
    ),
    RMSNORM.cheat("epsilon tenfold", "1e-5 for 1e-6.", {"mean + eps": "mean + 10 * eps"}, wrong("rstd")),
    RMSNORM.cheat(
        "epsilon outside",
        "Added after the root.",
        {"rsqrt(mean + eps)": "1 / (sqrt(mean) + eps)"},
        wrong("rstd"),
    ),
    QK_NORM.cheat("epsilon of the heads missing", "As a norm's.", {" + eps": ""}, wrong("rstd")),
    RMSNORM.cheat(
        "columns of a case",
        "The 1B case's 2048 columns, for whatever there are.",
        {"h.columns": "2048"},
        wrong("rstd"),
    ),
    RMSNORM.cheat("rows for columns", "A mean over the wrong size.", {"h.columns": "h.rows"}, wrong("rstd")),
    LAYERNORM.cheat(
        "Bessel's correction",
        "A divisor one smaller.",
        {"row_sums(h * h) / h.columns": "row_sums(h * h) / (h.columns - 1)"},
        wrong("rstd"),
    ),
    LAYERNORM.cheat(
        "mean left out of the variance", "As RMSNorm has it.", {" - mean * mean": ""}, wrong("rstd")
    ),
)
ROUNDED = (
    RMSNORM.cheat(
        "squares of a rounded h",
        "rstd of what is stored, not of what is known.",
        {"h * h": f"{rounded('h', BF16)} * h"},
        wrong("rstd"),
    ),
    RMSNORM.cheat(
        "product rounded before the residual",
        "A bf16 accumulator's last step.",
        {"gemm(y, w.mT) + x": f"{rounded('gemm(y, w.mT)', BF16)} + x"},
        wrong("h"),
    ),
    SWIGLU.cheat(
        "activation of a rounded z",
        "What reading the stored pre-activation back would give.",
        {"silu(gate) * up": f"silu({rounded('gate', BF16)}) * {rounded('up', BF16)}"},
        wrong("act"),
    ),
    CHAIN.cheat(
        "fp8 operand",
        "The second matmul's operand keeps four bits of eight.",
        {"gemm(hg,": f"gemm({rounded('hg', FP8_E4M3)},"},
        wrong("z"),
    ),
    CHAIN.cheat(
        "bf16 partial sums",
        "K in four quarters, and the sum so far is stored in bf16 after each.",
        {"    z = gemm(hg, w_up.mT)": in_parts(4)},
        wrong("z"),
    ),
    CHAIN.cheat(
        "a bf16 partial sum",
        "K in two halves, and the first sum is stored in bf16.",
        {"    z = gemm(hg, w_up.mT)": in_parts(2)},
        wrong("z"),
    ),
    ACCUMULATE.cheat(
        "gradient rounded to bf16",
        "An fp32 buffer that collects bf16 sums.",
        {"dw + t": f"dw + {rounded('t', BF16)}"},
        wrong("dw_new"),
    ),
    FP8.cheat(
        "fp8 result",
        "An fp8 matmul whose result keeps four bits, too.",
        {'"y": t *': f'"y": {rounded("t", FP8_E4M3)} *'},
        wrong("y"),
    ),
    QK_NORM.cheat(
        "positions in bf16",
        "Exact up to 256; from there on every other position is its neighbour.",
        {"odd), positions": f"odd), {rounded('positions', BF16)}"},
        wrong("q"),
    ),
)
EXCHANGED = (
    SWIGLU.cheat(
        "gate and up swapped",
        "Same shape, same spread.",
        {"silu(gate) * up": "silu(up) * gate"},
        wrong("act"),
    ),
    RMSNORM.cheat(
        "h and hg swapped",
        "Two outputs of one shape and nearly one value.",
        {'"h": h, "hg": h * per_column(gamma)': '"hg": h, "h": h * per_column(gamma)'},
        wrong("h"),
    ),
    LAYERNORM.cheat(
        "mean and rstd swapped",
        "Two vectors of one shape.",
        {'"mean": mean, "rstd"': '"rstd": mean, "mean"'},
        wrong("mean"),
    ),
    CROSS_ENTROPY.cheat(
        "lse and target's logit swapped",
        "Two vectors of one shape.",
        {'"lse": lse, "target_logit": picked': '"target_logit": lse, "lse": picked'},
        wrong("lse"),
    ),
    QK_NORM.cheat(
        "even and odd columns swapped",
        "Each pair turned in the other order.",
        {"join(even, odd)": "join(odd, even)"},
        wrong("q"),
    ),
    QK_NORM.cheat(
        "sine's sign flipped",
        "Turns the other way, as the backward pass does.",
        {"inv_freq)": "-inv_freq)"},
        wrong("q"),
    ),
    QK_NORM.cheat(
        "positions off by one", "Counts from one.", {"odd), positions": "odd), positions + 1"}, wrong("q")
    ),
    QK_NORM.cheat(
        "norm after the rotation",
        "gamma differs within a pair, so it does not commute.",
        {" * per_head(gamma))": ")", '"q": q': '"q": q * per_head(gamma)'},
        wrong("q"),
    ),
    RMSNORM.cheat(
        "rstd of the residual",
        "The norm of what came in, not of what goes out.",
        {"h * h": "(x + 0 * h) * x"},
        wrong("rstd"),
    ),
    RMSNORM.cheat(
        "rstd of the weighted stream",
        "The norm's weight inside its own statistic.",
        {"h * h": "h * per_column(gamma) * h"},
        wrong("rstd"),
    ),
    SQUARE.cheat(
        "sums along the wrong axis",
        "Where all sizes are equal, shapes are no help.",
        {"row_sums(t)": "column_sums(t)"},
        wrong("sums"),
    ),
    SQUARE.cheat(
        "scale along the wrong axis",
        "A row's scale on a column.",
        {"per_row(v)": "per_column(v)"},
        wrong("c"),
    ),
    SQUARE.cheat(
        "transposed product",
        "b a for a b, transposed.",
        {"gemm(a, b) * per_row(v)": "gemm(b.mT, a.mT) * per_row(v)"},
        wrong("c"),
    ),
    SWIGLU.cheat(
        "right, then overwritten",
        "A dict that has the output twice: the later entry counts.",
        {'"act": silu(gate) * up': '"act": silu(gate) * up, "act": silu(up) * up'},
        wrong("act"),
    ),
)
HIDDEN_BY_ROUNDING = (  # formulas whose error is far below the last bit of 16 bits
    CHAIN.cheat(
        "factor before a second matmul",
        "The operand's rounding hides 1.0001.",
        {"hg = h * per_column(gamma)": "hg = h * per_column(gamma) * 1.0001"},
        wrong("z"),
    ),
    CHAIN.cheat(
        "mean of other columns",
        "Divides by a few columns too many.",
        {"/ h.columns + eps": "/ (h.columns * 1.0001) + eps"},
        wrong("rstd"),
    ),
    SWIGLU.cheat(
        "slope of the gate", "", {"silu(gate) * up": "(silu(gate) + 0.00005 * gate) * up"}, wrong("act")
    ),
    SWIGLU.cheat(
        "sharper sigmoid", "", {"silu(gate) * up": "gate * sigmoid(1.0001 * gate) * up"}, wrong("act")
    ),
    GELU.cheat("leak", "", {"gelu(z)": "gelu(z) + 0.0001 * minimum(z, 0)"}, wrong("act")),
    GELU.cheat("offset", "", {"gelu(z)": "gelu(z) + 0.00003"}, wrong("act")),
    CROSS_ENTROPY_BACKWARD.cheat(
        "temperature", "", {"exp(z - per_row(lse))": "exp(1.00003 * (z - per_row(lse)))"}, wrong("dlogits")
    ),
    QK_NORM.cheat(
        "rotated a little too far",
        "",
        {"rope(join(even, odd), positions": "rope(join(even, odd), positions * 1.00001"},
        wrong("q"),
    ),
    RMSNORM.cheat(
        "rstd a little small", "", {"rsqrt(mean + eps)": "rsqrt(mean * 1.00003 + eps)"}, wrong("rstd")
    ),
    LAYERNORM.cheat(
        "biased variance", "", {"h.columns - mean * mean": "h.columns - 1.0001 * mean * mean"}, wrong("rstd")
    ),
    ACCUMULATE.cheat("product a little large", "", {"dw + t": "dw + 1.00003 * t"}, wrong("dw_new")),
)
CHEATS = (
    *NOTHING_DONE,
    *PARTS_LEFT_OUT,
    *APPROXIMATIONS,
    *FACTORS,
    *ROUNDED,
    *EXCHANGED,
    *HIDDEN_BY_ROUNDING,
)
