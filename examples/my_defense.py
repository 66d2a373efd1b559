"""A defense of your own in twenty lines: upload signs only, scaled by the mean magnitude. Run: python my_defense.py

To have `ppbench evaluate --defense sign_sgd` find it, name it in your package's pyproject.toml:

    [project.entry-points."ppbench.defenses"]
    sign_sgd = "my_package.my_defense:SignSGD"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ppbench import Defense
from ppbench.federation.contract import Context
from ppbench.federation.optim import Layout
from ppbench.federation.tree import Params, Tree, node


@node
class Signs:
    """What travels. sign: int8 [P]; scale: float32 scalar."""

    sign: Tensor
    scale: Tensor


@dataclass(frozen=True)
class SignSGD(Defense):
    """Uploads one sign a parameter and one scale (Bernstein et al. 2018), the scale blurred by `round_to` digits."""

    round_to: int = 3

    name: ClassVar[str] = "sign_sgd"
    control: ClassVar[str] = "round_to"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (1, 2, 3), "paper": (1, 2, 3, 4, 5)}

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Encode: signs as one byte each (pack them to bits for a real network)."""
        flat = Layout.of(result).pack(result)
        return Signs(flat.sign().char(), flat.abs().mean().round(decimals=int(self.round_to) + 2))

    def decode(self, upload: Tree, like: Params) -> Params:
        """The public inverse of `upload`."""
        return Layout.of(like).unpack(upload.sign * upload.scale)


def main() -> None:
    """Attack one round of it, without installing it."""
    from ppbench.adversary.victims import choose_victims
    from ppbench.attacks.label.recovery import LabelRecovery
    from ppbench.choice import Point
    from ppbench.config import configure
    from ppbench.task.task import make_task
    from ppbench.train import federation

    config = configure(defense="none", clients=4)
    task = make_task(config)
    run = federation(task, Point(SignSGD()), config)
    run.start(task.params)
    victims = choose_victims(task.shards, "server/1", 1, 20, task.seeds)
    view = run.probe(victims.data).view("server/1")
    guesses = LabelRecovery().run(view, victims.challenges(), task.seeds.generator("attack"))
    hits = sum(int(g.y[0]) == int(victims.truth(u).y.argmax()) for g, u in zip(guesses, victims.units, strict=True))
    print(f"{hits} of {len(guesses)} labels recovered; {next(view.exchanges()).answer.sign.numel()} signs an upload")


if __name__ == "__main__":
    main()
