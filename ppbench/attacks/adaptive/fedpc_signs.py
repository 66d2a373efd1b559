"""Batches from FedPC's ternaries where the network begins with a linear layer: coarse images in closed form.

The change of the first layer [W, b] in many steps is a sum over examples of cotangents times inputs, d x^T. What the
cotangent of an example of class c is on the mean the attacker computes by himself, on random images at the public
model: it hangs on the class far more than on the image. So signs of the change are filtered by these: the coefficients
of all classes' mean cotangents that explain the signs best are each class's image, up to brightness and contrast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Guess
from ppbench.attacks.adaptive.fedpc_labels import Told
from ppbench.attacks.label.recovery import random_images
from ppbench.attacks.reconstruction.rows import FirstLayer
from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params
from ppbench.federation.plan import Plan

CONTRAST = 0.12
"""Standard deviation that a guessed image is given around mid-grey, of the data range's width: less than images have,
as the filter is far from exact (of 32 images of CIFAR-10 .06 to .12 gave the same mean error, .17 a larger one)."""
RIDGE = 1e-2
"""Strength of the ridge, in units of a class's mean squared norm."""


def filtered(told: Sequence[Told], layer: FirstLayer, labels: Tensor, plan: Plan, generator: torch.Generator) -> Guess:
    """Return images [N, *shape] of labels [N] int64 from what one client's ternaries tell of the layer's weights.

    Classes that come more than once get one image. What tells nothing gives mid-grey. An evaluation a class.
    """
    held = labels.unique()
    signs = torch.stack([one.signs[layer.weight].double().cpu() for one in told]).mean(0)
    means = class_cotangents(plan, told[-1].params, layer, held, generator)
    gram = means @ means.T
    ridge = RIDGE * gram.trace() / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
    found = torch.linalg.solve_ex(gram + ridge, means @ signs)[0].nan_to_num()
    found = found - found.mean(1, keepdim=True)
    found = found / found.std(1, keepdim=True).clamp(min=1e-12)
    low, high = plan.data_range
    images = ((low + high) / 2 + CONTRAST * (high - low) * found).clamp(low, high)
    x = images[torch.searchsorted(held, labels)].view(len(labels), *plan.spec.shape)
    return Guess(x=x.float(), y=labels, evaluations=len(held))


def class_cotangents(
    plan: Plan, params: Params, layer: FirstLayer, classes: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the mean slopes [K, m] float64 of the loss in the layer's outputs, of random images labelled each class.

    They are the gradient of its biases.
    """
    assert layer.bias is not None  # who asks has looked
    low, high = plan.data_range
    wide = {name: value.detach().double().cpu() for name, value in params.items()}
    x = random_images(plan.spec.shape, generator).double() * (high - low) + low
    ones, found = torch.ones(len(x), dtype=torch.float64), []
    for c in classes.tolist():
        y = one_hot(torch.full((len(x),), c), plan.spec.classes).double()
        with torch.no_grad():
            slopes = gradient(lambda p, y=y: plan.objective(p, x, y, ones), wide)  # type: ignore[misc]
        found.append(slopes[layer.bias])
    return torch.stack(found)
