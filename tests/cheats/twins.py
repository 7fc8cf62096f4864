"""The honest kernels that cheats are made from. One change of an honest kernel makes a cheat."""

from __future__ import annotations

from cheats.corpus import Twin
from coda_agent import primitives

# All names of the vocabulary, so that no cheat fails because of a missing import.
IMPORTS = f"from primitives import {', '.join(primitives.__all__)}\n"


def twin(spec: str, parameters: str, body: str) -> Twin:
    """Return the honest kernel of ``spec``. ``body`` has no indentation here, and four spaces in the
    kernel."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return Twin(spec, f"{IMPORTS}\n\n@kernel\ndef honest({parameters}):\n{lines}")


RMSNORM = twin("gemm_residual_partial_rmsnorm", "y, w, x, gamma, eps", """
h = gemm(y, w.mT) + x
mean = row_sums(h * h) / h.columns
return {"h": h, "hg": h * per_column(gamma), "rstd": rsqrt(mean + eps)}
""")  # fmt: skip
LAYERNORM = twin("gemm_residual_partial_layernorm", "y, w, x, gamma, eps", """
h = gemm(y, w.mT) + x
mean = row_sums(h) / h.columns
variance = row_sums(h * h) / h.columns - mean * mean
return {"h": h, "hg": h * per_column(gamma), "mean": mean, "rstd": rsqrt(variance + eps)}
""")  # fmt: skip
SWIGLU = twin("gemm_rmsnorm_swiglu", "x, w, rstd", """
z = gemm(x, w.mT) * per_row(rstd)
gate, up = pairs(z)
return {"preact": z, "act": silu(gate) * up}
""")  # fmt: skip
GROUPED_SWIGLU = twin("gemm_grouped_swiglu", "x, w, offsets", """
z = gemm(x, w.mT, offsets)
gate, up = pairs(z)
return {"preact": z, "act": silu(gate) * up}
""")  # fmt: skip
GATHERED_SWIGLU = twin("gemm_gathered_swiglu", "x, w, offsets, index", """
z = gemm(x, w.mT, offsets, index)
gate, up = pairs(z)
return {"preact": z, "act": silu(gate) * up}
""")  # fmt: skip
GROUPED_DOWN = twin("gemm_grouped_down", "act, w, offsets, routed", """
return {"y": gemm(act, w.mT, offsets) * per_row(routed)}
""")  # fmt: skip
GROUPED_SWIGLU_BACKWARD = twin("gemm_grouped_swiglu_bwd", "dy, w_down, offsets, routed, z", """
d = gemm(dy, w_down, offsets)
gate, up = pairs(z)
s = sigmoid(gate)
plain = gate * s * up
weighed = d * per_row(routed)
dz = join(weighed * up * s * (1 + gate * (1 - s)), weighed * gate * s)
return {"dz": dz, "act": plain * per_row(routed), "drouted": row_sums(d * plain)}
""")  # fmt: skip
WEIGHT_GRADIENT = twin("gemm_grouped_weight_grad", "dz, x, offsets", """
return {"dw": gemm(dz.mT, x, offsets)}
""")  # fmt: skip
GELU = twin("gemm_bias_gelu", "x, w, bias", """
z = gemm(x, w.mT) + per_column(bias)
return {"preact": z, "act": gelu(z)}
""")  # fmt: skip
CROSS_ENTROPY = twin("gemm_partial_cross_entropy", "x, w, target", """
z = gemm(x, w.mT)
lse, picked = row_logsumexp(z), row_select(z, target)
return {"logits": z, "lse": lse, "target_logit": picked}
""")  # fmt: skip
CROSS_ENTROPY_BACKWARD = twin("gemm_cross_entropy_bwd", "x, w, target, lse, dloss", """
z = gemm(x, w.mT)
p = exp(z - per_row(lse))
onehot = column_index(z) == per_row(target)
return {"dlogits": where(onehot, p - 1, p) * per_row(dloss)}
""")  # fmt: skip
QK_NORM = twin("gemm_qk_norm_rope", "x, w, gamma, positions, inv_freq, eps, P", """
t = gemm(x, w.mT)
rstd = rsqrt(head_sums(t * t, 2 * P) / (2 * P) + eps)
even, odd = pairs(t * per_head(rstd) * per_head(gamma))
q = rope(join(even, odd), positions, inv_freq)
return {"q": q, "rstd": rstd}
""")  # fmt: skip
ACCUMULATE = twin("gemm_grad_accumulate", "dy, x, dw", """
t = gemm(dy.mT, x)
return {"dw_new": dw + t}
""")  # fmt: skip
CHAIN = twin("gemm_residual_rmsnorm_gemm", "y, w_o, x, gamma, w_up, eps", """
h = gemm(y, w_o.mT) + x
rstd = rsqrt(row_sums(h * h) / h.columns + eps)
hg = h * per_column(gamma)
z = gemm(hg, w_up.mT)
return {"h": h, "rstd": rstd, "z": z * per_row(rstd)}
""")  # fmt: skip
FP8 = twin("gemm_fp8_row_scale", "x, w, sx, sw", """
t = gemm(x, w.mT)
return {"y": t * per_row(sx) * per_column(sw)}
""")  # fmt: skip
FP8_SWIGLU = twin("gemm_fp8_swiglu", "x, w, sx, sw, scale", """
gate, up = pairs(gemm(x, w.mT) * per_row(sx) * per_column(sw))
h = silu(gate) * up
return {"act": h * scale, "amax": row_abs_max(h)}
""")  # fmt: skip
FP8_GELU = twin("gemm_fp8_bias_gelu", "x, w, sx, sw, bias, scale", """
z = gemm(x, w.mT) * per_row(sx) * per_column(sw) + per_column(bias)
h = gelu(z)
return {"act": h * scale, "amax": row_abs_max(h)}
""")  # fmt: skip
FP8_NORM = twin("gemm_fp8_residual_rmsnorm", "y, w, sy, sw, x, gamma, scale, eps", """
h = gemm(y, w.mT) * per_row(sy) * per_column(sw) + x
g = h * per_column(gamma)
rstd = rsqrt(row_sums(h * h) / h.columns + eps)
return {"h": h, "hg": g * scale, "rstd": rstd, "amax": row_abs_max(g)}
""")  # fmt: skip
FP8_BLOCKS = twin("gemm_fp8_gelu_blocks", "x, w, sx, sw, least", """
h = gelu(gemm(x, w.mT) * per_row(sx) * per_column(sw))
size = maximum(head_abs_max(h, 128), least)
return {"act": h * per_head(448 / size), "scale": size / 448}
""")  # fmt: skip
# In this spec rows and columns have one size, so shapes cannot tell rows from columns.
SQUARE = twin("square", "a, b, v", """
t = gemm(a, b) * per_row(v)
return {"c": t, "sums": row_sums(t)}
""")  # fmt: skip
# The reference of this spec has choices (clamps, a mask by column index), and a size as a divisor.
CLAMPED = twin("clamped", "x, w, width, limit, eps", """
z = gemm(x, w.mT)
gate, up = pairs(z)
act = silu(minimum(gate, limit)) * maximum(minimum(up, limit), -limit)
kept = column_index(act) < per_row(width)
rms = sqrt(row_sums(z * z) / z.columns + eps)
return {"act": where(kept, act, 0), "rms": rms}
""")  # fmt: skip
# Targets may be near predictions.
SQUARED_ERROR = twin("squared_error", "x, w, t", """
z = gemm(x, w.mT)
return {"s": row_sums((z - t) * (z - t)) / z.columns}
""")  # fmt: skip
ROPE = twin("gemm_rope_positions", "x, w, positions, inv_freq, P", """
t = gemm(x, w.mT)
return {"q": rope(t, positions, inv_freq)}
""")  # fmt: skip
SCALED = twin("gemm_rmsnorm", "x, w, rstd", """
t = gemm(x, w.mT)
return {"y": t * per_row(rstd)}
""")  # fmt: skip
ALPHA = twin("gemm_alpha_residual", "y, w, x, alpha", """
t = gemm(y, w.mT)
return {"h": x + alpha * t}
""")  # fmt: skip
MLP = twin("gemm_swiglu_mlp", "x, w_gate_up, w_down", """
z = gemm(x, w_gate_up.mT)
gate, up = pairs(z)
act = silu(gate) * up
return {"preact": z, "act": act, "out": gemm(act, w_down.mT)}
""")  # fmt: skip
EPS = twin("gemm_residual_partial_rmsnorm_eps", "y, w, x, gamma, eps", """
h = gemm(y, w.mT) + x
mean = row_sums(h * h) / h.columns
return {"h": h, "hg": h * per_column(gamma), "rstd": rsqrt(mean + eps)}
""")  # fmt: skip
QKV = twin("gemm_rmsnorm_qkv_bias_rope", "x, w, rstd, bias, cos_sin, H, G, P", """
heads, groups = 2 * P * H, 2 * P * G
t = gemm(x, w.mT) * per_row(rstd) + per_column(bias)
even, odd = pairs(t)
cos, sin = pairs(per_head(cos_sin))
turned = join(even * cos - odd * sin, even * sin + odd * cos)
out = where(in_columns(t, 0, heads + groups), turned, t)
q, k = column_range(out, 0, heads), column_range(out, heads, groups)
return {"q": q, "k": k, "v": column_range(out, heads + groups, groups)}
""")  # fmt: skip
QKV_NORM = twin("gemm_rmsnorm_qkv_norm_rope", "x, w, rstd, gamma_q, gamma_k, eps, cos_sin, H, G, P", """
width = 2 * P
t = gemm(x, w.mT) * per_row(rstd)
scale = rsqrt(head_sums(t * t, width) / width + eps)
gamma = where(in_columns(t, 0, width * H), per_head(gamma_q), per_head(gamma_k))
even, odd = pairs(t * per_head(scale) * gamma)
cos, sin = pairs(per_head(cos_sin))
turned = join(even * cos - odd * sin, even * sin + odd * cos)
out = where(in_columns(t, 0, width * (H + G)), turned, t)
q, k = column_range(out, 0, width * H), column_range(out, width * H, width * G)
return {"q": q, "k": k, "v": column_range(out, width * (H + G), width * G)}
""")  # fmt: skip
