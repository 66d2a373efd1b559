"""Batches from FedPC's ternaries where the network begins with a linear layer: coarse images in closed form.

The change of the first layer [W, b] in many steps is a sum over examples of cotangents times inputs, d x^T. The
attacker computes the mean cotangent of class c himself, on random images at the public model: it depends on the class
far more than on the image. The signs of the change are filtered by these: the coefficients of the mean cotangents that
explain the signs best are the image of each class, up to brightness and contrast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Guess
from ppbench.attacks.adaptive.fedpc_labels import StepSigns
from ppbench.attacks.label.recovery import random_images
from ppbench.attacks.reconstruction.rows import FirstLayer
from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params
from ppbench.federation.plan import Plan

GUESS_CONTRAST = 0.12
"""Standard deviation of a guessed image around mid-grey, relative to the width of the data range: less than in real
images, as the filter is far from exact (on 32 images of CIFAR-10, 0.06 to 0.12 gave equal mean errors, 0.17 a larger
one)."""
CLASS_RIDGE = 1e-2
"""Strength of the ridge, in units of a class's mean squared norm."""


def images_from_signs(
    steps: Sequence[StepSigns], layer: FirstLayer, labels: Tensor, plan: Plan, generator: torch.Generator
) -> Guess:
    """Return images [N, *shape] for labels [N] int64 from one client's known signs of the layer's weights.

    Equal labels get the same image. Signs of 0 alone give mid-grey. One evaluation per class.
    """
    classes = labels.unique()
    signs = torch.stack([step.signs[layer.weight].double().cpu() for step in steps]).mean(0)
    means = class_cotangents(plan, steps[-1].params, layer, classes, generator)
    gram = means @ means.T
    ridge = CLASS_RIDGE * gram.trace() / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
    coefficients = torch.linalg.solve_ex(gram + ridge, means @ signs)[0].nan_to_num()
    coefficients = coefficients - coefficients.mean(1, keepdim=True)
    coefficients = coefficients / coefficients.std(1, keepdim=True).clamp(min=1e-12)
    low, high = plan.data_range
    images = ((low + high) / 2 + GUESS_CONTRAST * (high - low) * coefficients).clamp(low, high)
    x = images[torch.searchsorted(classes, labels)].view(len(labels), *plan.spec.shape)
    return Guess(x=x.float(), y=labels, evaluations=len(classes))


def class_cotangents(
    plan: Plan, params: Params, layer: FirstLayer, classes: Tensor, generator: torch.Generator
) -> Tensor:
    """Return by class the mean slopes [K, m] float64 of the loss in the layer's outputs, on random images.

    They are the gradient of the layer's biases.
    """
    assert layer.bias is not None  # the caller has checked
    low, high = plan.data_range
    wide = {name: value.detach().double().cpu() for name, value in params.items()}
    x = random_images(plan.spec.shape, generator).double() * (high - low) + low
    ones, means = torch.ones(len(x), dtype=torch.float64), []
    for c in classes.tolist():
        y = one_hot(torch.full((len(x),), c), plan.spec.classes).double()
        with torch.no_grad():
            slopes = gradient(lambda p, y=y: plan.objective(p, x, y, ones), wide)  # type: ignore[misc]
        means.append(slopes[layer.bias])
    return torch.stack(means)
