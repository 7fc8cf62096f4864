"""dx with its row factors gathered in vectors before the step, and dgamma from h, scaled once."""

from primitives import column_sums, gemm, kernel, per_column, per_row


@kernel
def regrouped(dz, w, h, gamma, rstd, s, dres):
    d, r, g = gemm(dz, w), per_row(rstd), per_column(gamma)
    pull = per_row(rstd * rstd * s)
    return {"hn": h * (r * g), "dgamma": column_sums(r * (d * h)), "dx": (r * d * g - pull * h) + dres}
