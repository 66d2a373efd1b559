"""The features of every example of a batch, from the public head's gradient: exact, without touching the backbone.

With cross-entropy the head's gradient is dW = (1/B) A^T Phi and db = (1/B) A^T 1, where A = p - onehot(y) [B, C] and
Phi [B, D] are the features. One example: Phi = dW[y] / db[y]. More, while B < C: every feature vector lies in the
row space of dW, so Phi = M R with R its B leading right singular vectors, and the predictions p = softmax(Phi W^T + b)
close the system for the B x B matrix M.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.base.tree import Params

TINY = 1e-300
DAMPING_START, DAMPING_DOWN, DAMPING_UP, DAMPING_MAX = 1e-3, 0.3, 5.0, 1e12
STEPS = 100
"""Damped steps a start, at most."""
SPREAD = 0.3
"""Relative size of the multiplicative noise of restarts."""
STOP, ENOUGH, ACCEPT = 1e-20, 1e-13, 1e-9
"""Relative squared residuals: at which the search ends; from the plain start that makes restarts needless (a float32
gradient leaves about 1e-14); largest one of an answer that counts as a solution."""


@dataclass(frozen=True)
class Features:
    """Features [B, D] float64 of one batch, in the order of `labels` [B] int64, as the attacker found them.

    residual: relative squared mismatch of the head's gradient under them; exact: whether the system was solved, False
    where the value is the per-class start.
    """

    value: Tensor
    labels: Tensor
    residual: float
    exact: bool


@dataclass(frozen=True)
class System:
    """The closed system in the row space of dW; everything float64.

    target: [C, B + 1], dW R^T beside db: what (1/B) A^T [M, 1] must equal; logits: [B, C], R W^T: logits are
    M @ logits + bias [C]; onehot: [B, C] of the labels.
    """

    target: Tensor
    logits: Tensor
    bias: Tensor
    onehot: Tensor

    def residual(self, m: Tensor) -> Tensor:
        """Return the relative residuals [S, C * (B + 1)] of candidates m [S, B, B]."""
        a = (m @ self.logits + self.bias).softmax(-1) - self.onehot
        wide = torch.cat([m, torch.ones_like(m[..., :1])], -1)
        gap: Tensor = a.mT @ wide / len(self.onehot) - self.target
        relative: Tensor = gap / self.target.norm().clamp(min=TINY)
        return relative.flatten(1)

    def jacobian(self, m: Tensor) -> Tensor:
        """Return d residual / d m as [S, C * (B + 1), B * B] for m [S, B, B]."""
        batch, count = len(self.onehot), len(m)
        p = (m @ self.logits + self.bias).softmax(-1)
        # dp[s, i, c, j]: derivative of p[i, c] to M[i, j]
        dp = p[..., None] * (self.logits.T - (p @ self.logits.T)[:, :, None])
        wide = torch.cat([m, torch.ones_like(m[..., :1])], -1)
        parts = torch.einsum("sicj,sik->sckij", dp, wide)
        eye = torch.eye(batch, batch + 1, dtype=m.dtype, device=m.device)
        parts = parts + torch.einsum("sic,jk->sckij", p - self.onehot, eye)
        scale: Tensor = batch * self.target.norm().clamp(min=TINY)
        return parts.reshape(count, -1, batch * batch) / scale


def levenberg_marquardt(system: System, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the candidates [S, B, B] refined by `STEPS` at most, and their relative squared residuals [S].

    Candidates are independent: each has its own damping, and a step that does not lower its residual is undone. The
    search ends early when one candidate's residual is below `STOP`.
    """
    damping = torch.full((len(m),), DAMPING_START, dtype=m.dtype, device=m.device)
    r = system.residual(m)
    loss = (r * r).sum(1)
    for _ in range(STEPS):
        if bool((loss < STOP).any()) or bool((damping > DAMPING_MAX).all()):
            break
        j = system.jacobian(m)
        gram = j.mT @ j
        scale = gram.diagonal(dim1=1, dim2=2).clamp(min=1e-12)
        step, info = torch.linalg.solve_ex(gram + torch.diag_embed(damping[:, None] * scale), (j.mT @ r[..., None]))
        trial = m - step.reshape_as(m)
        r_trial = system.residual(trial)
        loss_trial = (r_trial * r_trial).sum(1)
        better = (loss_trial < loss) & (info == 0)  # False on NaN: the old candidate stays
        m = torch.where(better[:, None, None], trial, m)
        r, loss = torch.where(better[:, None], r_trial, r), torch.where(better, loss_trial, loss)
        damping = torch.where(better, damping * DAMPING_DOWN, damping * DAMPING_UP)
    return m, loss


def class_starts(weight_grad: Tensor, bias_grad: Tensor, labels: Tensor) -> Tensor:
    """Return dW[c] / db[c] for each label as [B, D] float64: exact for one example, a class mean otherwise."""
    divisor = bias_grad[labels].double()
    safe = torch.where(divisor.abs() < TINY, torch.ones_like(divisor), divisor)
    return weight_grad[labels].double() / safe[:, None]


def recover_features(
    params: Params,
    weight_grad: Tensor,
    bias_grad: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    *,
    restarts: int = 30,
) -> Features:
    """Return the features of a batch from the gradient of the public head, [C, D] and [C], finite (spec 9.2, 9.2b).

    labels: [B] int64, the recovered multiset. The generator draws the `restarts` starts besides the plain one.
    """
    start, batch = class_starts(weight_grad, bias_grad, labels), len(labels)
    params = {name: params[name].detach() for name in ("head.weight", "head.bias")}
    if 1 < batch < len(bias_grad):  # the rows of p - onehot sum to zero, so dW has rank below C: room for B < C
        value = _solved(params, weight_grad.double(), bias_grad.double(), start, labels, generator, restarts)
        residual = head_mismatch(params, weight_grad, bias_grad, value, labels)
        if residual <= ACCEPT:
            return Features(value, labels, residual, True)
    return Features(start, labels, head_mismatch(params, weight_grad, bias_grad, start, labels), batch == 1)


def _solved(
    params: Params, dw: Tensor, db: Tensor, start: Tensor, labels: Tensor, generator: torch.Generator, restarts: int
) -> Tensor:
    """Return the features [B, D] with the smallest residual, from the plain start or, if that is large, noisy ones."""
    rows = torch.linalg.svd(dw, full_matrices=False).Vh[: len(labels)]
    onehot = torch.nn.functional.one_hot(labels, len(db)).double()
    weight, bias = params["head.weight"].double(), params["head.bias"].double()
    system = System(torch.cat([dw @ rows.T, db[:, None]], 1), rows @ weight.T, bias, onehot)
    draws = torch.randn(restarts, *start.shape, generator=generator, dtype=torch.float64).to(start.device)
    best, loss = levenberg_marquardt(system, (start @ rows.T)[None])
    if not float(loss[0]) <= ENOUGH:
        more, more_loss = levenberg_marquardt(system, (start * (1 + SPREAD * draws)) @ rows.T)
        best, loss = torch.cat([best, more]), torch.cat([loss, more_loss])
    value: Tensor = best[int(loss.nan_to_num(nan=torch.inf).argmin())] @ rows
    return value


def head_mismatch(params: Params, weight_grad: Tensor, bias_grad: Tensor, phi: Tensor, labels: Tensor) -> float:
    """Return the squared distance of the head's gradient under features phi [B, D] to the observed, relative to it."""
    weight, bias = params["head.weight"].double(), params["head.bias"].double()
    a = (phi @ weight.T + bias).softmax(-1) - torch.nn.functional.one_hot(labels, len(bias)).double()
    dw, db = a.T @ phi / len(phi), a.mean(0)
    error = ((dw - weight_grad) ** 2).sum() + ((db - bias_grad) ** 2).sum()
    return float(error / ((weight_grad.double() ** 2).sum() + (bias_grad.double() ** 2).sum()).clamp(min=TINY))
