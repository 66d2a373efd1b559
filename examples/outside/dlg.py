"""Attack a published transcript of DLNet with plain torch and numpy: DLG (Zhu, Liu and Han 2019), nothing of ppbench.

Run: python dlg.py TRANSCRIPT NAME    writes NAME.json and NAME.safetensors, which `ppbench score` takes.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from labels import read
from torch.func import functional_call
from torch.nn.functional import cross_entropy


def network(channels, features, classes):
    """Return the network that `layers` in transcript.json describes, its parameters by the same names."""
    convs = [(channels, 2), (12, 2), (12, 1), (12, 1)]
    parts = [part for c, s in convs for part in (torch.nn.Conv2d(c, 12, 5, s, 2), torch.nn.Sigmoid())]
    body = torch.nn.Sequential(*parts, torch.nn.Flatten())
    return torch.nn.Sequential(body, torch.nn.Linear(features, classes))


def invert(model, weights, seen, shape):
    """Return the image whose gradient is nearest to what was seen, and its label, read off the head's bias."""
    label, x = seen["head.bias"].argmin()[None], torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    step = torch.optim.LBFGS([x.requires_grad_()], max_iter=300, line_search_fn="strong_wolfe", tolerance_change=1e-12)

    def closure():
        step.zero_grad()
        gradient = torch.autograd.grad(cross_entropy(functional_call(model, weights, (x,)), label), [*weights.values()], create_graph=True)
        loss = sum(((a - b) ** 2).sum() for a, b in zip(gradient, seen.values())) * 1000
        loss.backward()
        return loss

    step.step(closure)
    return x.detach()[0], int(label)


def main(transcript, name):
    """Answer the question "reconstruction"."""
    about, found = json.loads(Path(transcript, "transcript.json").read_text()), read(Path(transcript, "gradients.safetensors"))
    shape, classes = about["model"]["shape"], about["model"]["classes"]
    whole = {n: torch.tensor(np.array(v)) for n, v in found.items()}
    model = network(shape[0], whole["weights.0.head.weight"].shape[1], classes)
    theirs = lambda n: n.replace("0.", "features.", 1) if n.startswith("0.") else n.replace("1.", "head.", 1)
    weights = {n: whole[f"weights.0.{theirs(n)}"].requires_grad_() for n, _ in model.named_parameters()}
    x, y = np.zeros((len(about["questions"]), 1, *shape), "<f4"), np.zeros((len(about["questions"]), 1), "<i8")
    for number, one in enumerate(about["observed"]):
        seen = {theirs(n): whole[f"gradient.{number}.{theirs(n)}"] for n in weights}
        image, y[one["question"], 0] = invert(model, weights, seen, shape)
        x[one["question"], 0] = image.numpy()
    ends = [0, x.nbytes, x.nbytes + y.nbytes]
    header = {"x": {"dtype": "F32", "shape": x.shape, "data_offsets": ends[:2]}, "y": {"dtype": "I64", "shape": y.shape, "data_offsets": ends[1:]}}
    text = json.dumps(header).encode()
    Path(f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + x.tobytes() + y.tobytes())
    told = {"schema": "ppbench.guesses/1", "transcript": about["id"], "kind": "reconstruction", "name": "plain-dlg"}
    more = {"version": "1", "reference": "arXiv:1906.08935", "licence": "Apache-2.0", "knows": False, "auxiliary": ""}
    Path(f"{name}.json").write_text(json.dumps({**told, **more, "cost": {"seconds": 60.0}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
