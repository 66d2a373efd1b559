"""Attack a published transcript of DLNet with plain torch and numpy: DLG (Zhu, Liu and Han 2019), nothing of ppbench.

Run: python dlg.py TRANSCRIPT NAME    writes NAME.json and NAME.safetensors, which `ppbench score` takes.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from labels import read, write
from torch.nn.functional import cross_entropy


class DLNet(torch.nn.Module):
    """The network that `layers` in transcript.json describes, its parameters by the same names."""

    def __init__(self, channels, features, classes):
        super().__init__()
        convs = [(channels, 2), (12, 2), (12, 1), (12, 1)]
        parts = [part for c, s in convs for part in (torch.nn.Conv2d(c, 12, 5, s, 2), torch.nn.Sigmoid())]
        self.features, self.head = torch.nn.Sequential(*parts, torch.nn.Flatten()), torch.nn.Linear(features, classes)

    def forward(self, x):
        """Return logits."""
        return self.head(self.features(x))


def invert(model, seen, shape):
    """Return the image whose gradient is nearest to what was seen, and its label, read off the head's bias."""
    label, x = seen["head.bias"].argmin()[None], torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    step = torch.optim.LBFGS([x.requires_grad_()], max_iter=300, line_search_fn="strong_wolfe", tolerance_change=1e-12)
    names, weights = zip(*model.named_parameters(), strict=True)

    def closure():
        step.zero_grad()
        gradients = torch.autograd.grad(cross_entropy(model(x), label), weights, create_graph=True)
        loss = sum(((one - seen[name]) ** 2).sum() for name, one in zip(names, gradients, strict=True)) * 1000
        loss.backward(inputs=[x])
        return loss

    step.step(closure)
    return x.detach()[0], int(label)


def main(transcript, name):
    """Answer the question "reconstruction"."""
    about = json.loads(Path(transcript, "transcript.json").read_text())
    results = {n: torch.tensor(v) for n, v in read(Path(transcript, "gradients.safetensors")).items()}
    shape, count = about["model"]["shape"], len(about["questions"])
    model = DLNet(shape[0], results["weights.0.head.weight"].shape[1], about["model"]["classes"])
    names = [n for n, _ in model.named_parameters()]
    model.load_state_dict({n: results[f"weights.0.{n}"] for n in names})
    x, y = np.zeros((count, 1, *shape), "<f4"), np.zeros((count, 1), "<i8")
    for number, one in enumerate(about["observed"]):
        seen = {n: results[f"gradient.{number}.{n}"] for n in names}
        x[one["question"], 0], y[one["question"], 0] = invert(model, seen, shape)
    write(f"{name}.safetensors", x=x, y=y)
    fields = {"schema": "ppbench.guesses/1", "transcript": about["id"], "kind": "reconstruction", "name": "plain-dlg"}
    more = {"version": "1", "reference": "arXiv:1906.08935", "licence": "Apache-2.0", "knows": False}
    Path(f"{name}.json").write_text(json.dumps(fields | more))


if __name__ == "__main__":
    main(*sys.argv[1:])
