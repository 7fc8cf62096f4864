"""24 operators around a matrix product, as a PyTorch user writes them, for the authoring experiment
(docs/authoring_experiment.md). None has a spec in ``specs/`` or a recorded run.

``coda-agent new benchmarks/authoring/operators.py:NAME --no-input --out NAME.yaml OPTIONS`` drafted the
specs in ``benchmarks/authoring/specs/``. The fp8 specs' baselines were then given ``torch._scaled_mm``.
"""

import math

import torch
import torch.nn.functional as F

KINDS = {
    "ordinary": (
        "reglu",
        "hard_swish",
        "softsign",
        "highway",
        "gaussian_units",
        "masked_residual",
        "huber_head",
        "margin_head",
        "paired_scores",
        "crest_factor",
        "squared_feature_mlp",
        "sigmoid_glu_grad",
    ),
    "numeric trap": (
        "log_cosh",
        "tanh_shrink",
        "focal_terms",
        "cloglog",
        "symlog",
        "soft_step",
    ),
    "grouped heads or fp8": (
        "grouped_l2",
        "grouped_temperature",
        "grouped_gate",
        "sigmoid_router",
        "fp8_relu2",
        "fp8_gate_residual",
    ),
}
OPTIONS = {
    "reglu": "--shape x=M,K --shape w=2*N,K --shape bias=2*N",
    "hard_swish": "--shape x=M,K --shape w=N,K --shape bias=N",
    "softsign": "--shape x=M,K --shape w=N,K",
    "highway": "--shape x=M,K --shape w=2*N,K --shape carried=M,N",
    "gaussian_units": "--shape x=M,K --shape w=N,K --shape centre=N",
    "masked_residual": (
        "--shape x=M,K --shape w=N,K --shape bias=N --shape mask=M,N --shape stream=M,N --shape scale="
    ),
    "huber_head": "--shape x=M,K --shape w=N,K --shape target=M,N",
    "margin_head": "--shape x=M,K --shape w=N,K --shape label=M --dtype label=int64",
    "paired_scores": "--shape x=M,K --shape w=N,K --shape y=M,N",
    "crest_factor": "--shape x=M,K --shape w=N,K",
    "squared_feature_mlp": "--shape x=M,K --shape w1=H,K --shape w2=N,H",
    "sigmoid_glu_grad": "--shape x=M,K --shape w=2*N,K --shape grad=M,N",
    "log_cosh": "--shape x=M,K --shape w=N,K --shape target=M,N",
    "tanh_shrink": "--shape x=M,K --shape w=N,K",
    "focal_terms": "--shape x=M,K --shape w=N,K",
    "cloglog": "--shape x=M,K --shape w=N,K --shape bias=N",
    "symlog": "--shape x=M,K --shape w=N,K",
    "soft_step": "--shape x=M,K --shape w=N,K --shape width=N",
    "grouped_l2": "--shape x=M,K --shape w=H*W+2*G*W,K --dim H=32 --dim G=8 --dim W=64",
    "grouped_temperature": (
        "--shape x=M,K --shape w=H*W+2*G*W,K --shape bias=H*W+2*G*W --shape temperature=W --dim H=32 "
        "--dim G=8 --dim W=64"
    ),
    "grouped_gate": "--shape x=M,K --shape w=H*W+G*W,K --dim H=32 --dim G=8 --dim W=64",
    "sigmoid_router": "--shape x=M,K --shape w=H*W,K --dim H=32 --dim W=128",
    "fp8_relu2": (
        "--init scale='{uniform: [20.0, 80.0]}' --shape x=M,K --shape w=N,K --shape sx=M --shape sw=N "
        "--shape scale= --dtype x=fp8_e4m3 --dtype w=fp8_e4m3 --dtype sx=fp32 --dtype sw=fp32 "
        "--init x='{normal: {std: 32.0}}' --init w='{normal: {std: 32.0}}' "
        "--init sx='{uniform: [0.003, 0.006]}' --init sw='{uniform: [0.003, 0.006]}'"
    ),
    "fp8_gate_residual": (
        "--dtype out=bf16 --shape x=M,K --shape w=2*N,K --shape sx=M --shape sw=2*N --shape stream=M,N "
        "--dtype x=fp8_e4m3 --dtype w=fp8_e4m3 --dtype sx=fp32 --dtype sw=fp32 "
        "--init x='{normal: {std: 32.0}}' --init w='{normal: {std: 32.0}}' "
        "--init sx='{uniform: [0.003, 0.006]}' --init sw='{uniform: [0.003, 0.006]}'"
    ),
}


# Ordinary ones


def reglu(x, w, bias):
    """An up projection with ReGLU: gate and up are adjacent columns."""
    z = F.linear(x, w) + bias
    return F.relu(z[:, 0::2]) * z[:, 1::2]


def hard_swish(x, w, bias):
    """A projection with hard swish, as in MobileNetV3."""
    return F.hardswish(F.linear(x, w) + bias)


def softsign(x, w):
    """A projection with softsign."""
    return F.softsign(F.linear(x, w))


def highway(x, w, carried):
    """A highway layer: a gate mixes a transformed value with the one carried past it."""
    z = F.linear(x, w)
    gate = torch.sigmoid(z[:, 0::2])
    return gate * torch.tanh(z[:, 1::2]) + (1 - gate) * carried


def gaussian_units(x, w, centre):
    """Gaussian units about learned centres."""
    z = F.linear(x, w) - centre
    return torch.exp(-(z * z))


def masked_residual(x, w, bias, mask, stream, scale):
    """A projection's output under a dropout mask, scaled and added to the residual stream."""
    return stream + mask * (F.linear(x, w) + bias) * scale


def huber_head(x, w, target):
    """The Huber loss of a projection, summed over its outputs."""
    return F.smooth_l1_loss(F.linear(x, w), target, reduction="none").sum(dim=-1)


def margin_head(x, w, label, margin: float = 1.0):
    """The largest logit of each row, and the hinge loss of the label's logit."""
    z = F.linear(x, w)
    top = z.amax(dim=-1)
    loss = F.relu(margin - z.gather(1, label[:, None]).squeeze(1))
    return top, loss


def paired_scores(x, w, y):
    """A bilinear score of paired rows: each x W against its own y."""
    return (F.linear(x, w) * y).sum(dim=-1)


def crest_factor(x, w, eps: float = 1e-6):
    """A projection, and the crest factor of each of its rows: peak over root mean square."""
    z = F.linear(x, w)
    crest = z.abs().amax(dim=-1) / torch.sqrt((z * z).mean(dim=-1) + eps)
    return z, crest


def squared_feature_mlp(x, w1, w2, eps: float = 1e-6):
    """An MLP whose squared hidden features are normalised to sum to one."""
    z = F.linear(x, w1)
    h = z * z
    return F.linear(h / (h.sum(dim=-1, keepdim=True) + eps), w2)


def sigmoid_glu_grad(x, w, grad):
    """A GLU's forward again, and the gradient of its pre-activations."""
    z = F.linear(x, w)
    value, gate = z[:, 0::2], torch.sigmoid(z[:, 1::2])
    d_value = grad * gate
    d_gate = grad * value * gate * (1 - gate)
    return torch.stack((d_value, d_gate), dim=-1).flatten(1)


# With numeric traps


def log_cosh(x, w, target):
    """The log-cosh loss of a projection, element by element."""
    d = F.linear(x, w) - target
    return d.abs() + F.softplus(-2 * d.abs()) - math.log(2.0)


def tanh_shrink(x, w):
    """A projection with tanhshrink."""
    return F.tanhshrink(F.linear(x, w))


def focal_terms(x, w):
    """What a focal loss sums for a positive label: (1 - p)^2 times -log p, p the sigmoid of the logit."""
    z = F.linear(x, w)
    p = torch.sigmoid(z)
    return (1 - p) ** 2 * -F.logsigmoid(z)


def cloglog(x, w, bias):
    """The complementary log-log link: 1 - exp(-exp(z))."""
    return -torch.expm1(-torch.exp(F.linear(x, w) + bias))


def symlog(x, w):
    """A projection in the symmetric logarithm of DreamerV3."""
    z = F.linear(x, w)
    return torch.sign(z) * torch.log1p(z.abs())


def soft_step(x, w, width):
    """A smooth step: the difference of two softplus, a width apart."""
    z = F.linear(x, w)
    return F.softplus(z + width) - F.softplus(z)


# With grouped heads or fp8


def grouped_l2(x, w, H: int, G: int, W: int):
    """Query, key and value heads from packed weights; queries and keys have unit length."""
    qk, v = F.linear(x, w).split([(H + G) * W, G * W], dim=1)
    qk = F.normalize(qk.unflatten(1, (H + G, W)), dim=-1, eps=1e-6).flatten(1)
    q, k = qk.split([H * W, G * W], dim=1)
    return q, k, v


def grouped_temperature(x, w, bias, temperature, H: int, G: int, W: int):
    """Query heads under one temperature for each of a head's columns, beside keys and values, with a bias."""
    z = F.linear(x, w) + bias
    q, kv = z.split([H * W, 2 * G * W], dim=1)
    q = (q.unflatten(1, (H, W)) * temperature).flatten(1)
    return q, kv


def grouped_gate(x, w, H: int, G: int, W: int):
    """Value heads that a tanh bounds, and the sigmoid gates of the query heads."""
    gates, v = F.linear(x, w).split([H * W, G * W], dim=1)
    return torch.sigmoid(gates), 5 * torch.tanh(v / 5)


def sigmoid_router(x, w, H: int, W: int):
    """Sigmoid scores of experts in groups: each group's scores over their sum, beside the sums."""
    p = torch.sigmoid(F.linear(x, w).unflatten(1, (H, W)))
    total = p.sum(dim=-1)
    return (p / total[..., None]).flatten(1), total


def fp8_relu2(x, w, sx, sw, scale):
    """An fp8 up projection with squared ReLU that leaves in fp8 by a delayed scale, with its rows' peaks."""
    z = F.linear(x.float(), w.float()) * sx[:, None] * sw
    h = F.relu(z) ** 2
    peak = h.amax(dim=-1)
    return (h * scale).to(torch.float8_e4m3fn), peak


def fp8_gate_residual(x, w, sx, sw, stream):
    """An fp8 projection that a sigmoid of its neighbour gates, added to the stream."""
    z = F.linear(x.float(), w.float()) * sx[:, None] * sw
    return stream + z[:, 0::2] * torch.sigmoid(z[:, 1::2])
