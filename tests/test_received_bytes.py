"""A cost's bytes are those of what a client's own code is given: counted there, not on the wire."""

from dataclasses import dataclass

import pytest
from protocols import examples, started
from torch import Tensor

from ppbench.base.tree import Tree, leaves
from ppbench.defenses.mpdp.model_perturbation import tree_norm
from ppbench.defenses.mpdp.protocol import MPDP
from ppbench.defenses.none import NoDefense
from ppbench.defenses.pbpfl.perturbation import Surrogates
from ppbench.defenses.pbpfl.protocol import PBPFL
from ppbench.federation.contract import Context, Job
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec

CLIENTS, ROUNDS, CLASSES = 3, 2, 10
BARE = net_spec("mlp", (1, 8, 8), CLASSES, {"hidden": 6})
GOT: list[tuple[int, Tensor]] = []


def noted(ctx: Context, message: Tree) -> None:
    """Write down every tensor that a client holds, with whose it is."""
    GOT.extend((ctx.party, leaf) for leaf in leaves(message))


@dataclass(frozen=True)
class Plain(NoDefense):
    """No defense, whose clients write down what they get."""

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        noted(ctx, message)
        return super().prepare(ctx, me, message, data)


@dataclass(frozen=True)
class Perturbing(PBPFL):
    """PBPFL, whose clients write down what they get."""

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        noted(ctx, message)
        return super().prepare(ctx, me, message, data)


def downloaded(defense: NoDefense | PBPFL) -> float:
    """Return bytes a client and round as the wire has them, after holding them against what clients got."""
    GOT.clear()
    plan = Plan(BARE, CLIENTS, Local("gradient", batch=4, opt=Opt("sgd", 0.1)), loss="squared")
    run = started(defense, plan, {c: examples(BARE, 8, seed=c) for c in range(CLIENTS)})
    first = len(GOT)
    run.run(ROUNDS)
    got = sum(len(leaf.flatten().tolist()) * leaf.element_size() for _, leaf in GOT[first:])
    assert {party for party, _ in GOT[first:]} == set(range(CLIENTS))
    assert run.wire.down - run.setup_down == got
    return got / (CLIENTS * ROUNDS)


@pytest.mark.parametrize(("precision", "size"), [("float64", 8), ("float32", 4)])
def test_a_perturbed_model_counts_at_its_own_precision(precision, size):
    """Twice the undefended broadcast in float64, the default; and r_a beside it."""
    count = sum(leaf.numel() for leaf in initial(BARE, 0).values())
    assert downloaded(Plain()) == 4 * count
    assert downloaded(Perturbing(precision=precision)) == size * (count + CLASSES)


@pytest.mark.parametrize("threat", ["client/1", "eavesdropper/1"])
def test_what_an_oracle_clips_by_is_in_no_message_and_no_view(threat):
    """The simulation changes what is sent and nothing else: bytes are those of no clipping, and no view has secrets."""
    spec = net_spec("mlp", (1, 8, 8), CLASSES, {"hidden": 6, "bias": False})
    plan = Plan(spec, CLIENTS, Local("gradient", batch=8, opt=Opt("sgd", 0.1)), loss="squared")
    data = {c: examples(spec, 8, seed=c) for c in range(CLIENTS)}
    counts, seen, sizes = [], [], []
    for clip in ("none", "oracle"):
        run = started(MPDP(clip=clip, bound=0.01), plan, data)
        view = run.probe({Slot(0, c): data[c] for c in range(CLIENTS)}).view(threat)
        run.run(ROUNDS)
        counts.append((run.wire.down, run.wire.up))
        kept = [m.message for m in view.mail] + [s.state for s in view.states]
        seen.append([(type(h), [(leaf.shape, leaf.dtype) for leaf in leaves(h)]) for h in kept])
        mails = [m.message for m in view.mail if isinstance(m.message, Surrogates)]
        sizes.append([float(tree_norm(m.beta)) for m in mails])
    assert counts[0] == counts[1] and seen[0] == seen[1]
    assert all(less < 0.5 * plain for plain, less in zip(*sizes, strict=True))  # it did clip
