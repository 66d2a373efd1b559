"""What an adversary sees in tests of attacks on gradients, and how near a guess comes."""

from collections.abc import Sequence

import torch
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.adversary.victims import Victims, choose_victims
from ppbench.base.autodiff import gradient
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import Evidence, Simulate, simulation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Model, Slot, Update
from ppbench.nets.net import initial, net_spec
from ppbench.questions.images import score_images

Seen = tuple[View, Victims]
CHANCE = float(stats.norm.isf(5e-4))
"""Deviations from chance that a null exceeds once in a thousand."""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def secret(seed: int = 0) -> SecretDraws:
    return Seeds(seed).secret("party")


def psnr(guess: Tensor, truth: Tensor) -> float:
    """Return dB of a clipped guess; 120 for an exact one."""
    return float(-10 * torch.log10(((guess.clamp(0, 1).double() - truth.double()) ** 2).mean().clamp(min=1e-12)))


def updates(simulate: Simulate, x: Tensor, y: Tensor) -> list[Params]:
    """Return the gradient of each batch of x [V, B, *shape], y [V, B, C]."""
    return [
        {name: g.detach() for name, g in simulate(images[None], labels[None]).items()}
        for images, labels in zip(x, y, strict=True)
    ]


def batch_gradient(plan: Plan, params: Params, x: Tensor, y: Tensor) -> Params:
    """Return the gradient of the mean loss on a batch x [B, *shape], y [B, C], in the dtype of the parameters."""
    dtype = next(iter(params.values())).dtype
    ones = torch.ones(len(x), dtype=dtype)
    gradients = gradient(lambda p: plan.objective(p, x.to(dtype), y.to(dtype), ones), params)
    return {name: value.detach() for name, value in gradients.items()}


def fedsgd_mail(
    plan: Plan, x: Tensor, y: Tensor, owned: Sequence[Tensor], rounds: int, seed: int, noise: float
) -> tuple[Envelope, ...]:
    """Return rounds of FedSGD at drawn weights: clients send the gradient of the rows that they own, under noise.

    noise: of each entry, in units of the root mean square of the gradient's entries.
    """
    g, mail = seeded(seed + 1000), []
    for number in range(1, rounds + 1):
        params = initial(plan.spec, 10 * seed + number)
        for client, rows in enumerate(owned):
            update = batch_gradient(plan, params, x[rows], y[rows])
            size = noise * torch.cat([v.flatten() for v in update.values()]).square().mean().sqrt()
            update = {n: v + size * torch.randn(v.shape, generator=g) for n, v in update.items()}
            mail += letters(number, client, params, update)
    return tuple(mail)


def drawn_rounds(
    plan: Plan, count: int, rounds: int, noise: float, seed: int, all_in: bool = False
) -> tuple[View, Challenge, Tensor, Tensor]:
    """Return a server's view of FedSGD at drawn weights, a challenge about `count` records, who was in, the owners.

    Each client has 20 more records. noise: as of `fedsgd_mail`; all_in: whether all records were in.
    """
    g = seeded(seed)
    x = torch.rand(1, *plan.spec.shape, generator=g)
    x = x + 0.3 * torch.randn(count + 20 * plan.clients, *plan.spec.shape, generator=g)
    y = torch.nn.functional.one_hot(torch.randint(0, 10, (len(x),), generator=g), 10).float()
    member = torch.ones(count, dtype=torch.bool) if all_in else torch.rand(count, generator=g) < 0.5
    owner = torch.randint(0, plan.clients, (count,), generator=g)
    rest = [count + 20 * client + torch.arange(20) for client in range(plan.clients)]
    owned = [torch.cat([(member & (owner == client)).nonzero()[:, 0], more]) for client, more in enumerate(rest)]
    view = View("server/1", SERVER, plan, NoDefense(), fedsgd_mail(plan, x, y, owned, rounds, seed, noise), ())
    known = None if all_in else half_known(member)
    return view, Challenge((), 1, x=x[:count], labels=y[:count], known=known), member, owner


def letters(number: int, client: int, params: Params, update: Params, probe: int = -1) -> tuple[Envelope, Envelope]:
    """Return a broadcast and the client's answer, an update."""
    return (
        Envelope(probe, number, 0, SERVER, client, 0, Model(params)),
        Envelope(probe, number, 0, client, SERVER, 0, Update(update)),
    )


def delivered(plan: Plan, params: Params) -> View:
    """Return a client's view of a delivered model."""
    return View("client/1", 0, plan, NoDefense(), (Envelope(-1, 1, 0, SERVER, 0, 0, Model(params)),), ())


def half_known(member: Tensor) -> Tensor:
    """Return what a challenge tells of who was a member: of every second record nothing (-1)."""
    known = member.to(torch.int8)
    known[1::2] = -1
    return known


def deviations(member: Tensor, score: Tensor) -> float:
    """Return how far an AUC lies from .5, in deviations of Mann and Whitney's law: (m + n + 1) / (12 m n)."""
    inside, outside = int(member.sum()), int((~member).sum())
    return float(roc_auc_score(member, score) - 0.5) / ((inside + outside + 1) / (12 * inside * outside)) ** 0.5


def uploads(plan: Plan, params: Params, observed: Sequence[Params], public: Data | None = None) -> View:
    """Return an undefended server's view of one upload a probe, all from client 0."""
    mail = tuple(letter for probe, update in enumerate(observed) for letter in letters(1, 0, params, update, probe))
    return View("server/1", SERVER, plan, NoDefense(), mail, (), public=public)


def ask(count: int, batch: int = 1, y: Tensor | None = None) -> list[Challenge]:
    """Return a question about each of `count` probes; labels y [V, B, C] are granted."""
    return [Challenge((Slot(i, 0),), batch, None if y is None else y[i][None]) for i in range(count)]


def observation(plan: Plan, params: Params, x: Tensor, y: Tensor) -> Evidence:
    """Return the evidence on one batch x [B, *shape], y [B, C]."""
    simulate = simulation(plan, params)
    return Evidence((Slot(0, 0),), updates(simulate, x[None], y[None])[0], simulate, params)


def watched(
    run: Federation, threat: str = "server/1", batch: int = 1, count: int = 4, kind: str = "gradient", rounds: int = 1
) -> Seen:
    """Return what an adversary sees of `count` victims of a started federation, and whose they are."""
    victims = choose_victims(run.shards, threat, batch, count, Seeds(0), sums=run.defense.sums)
    return run.probe(victims.data, kind, rounds).view(threat, own=victims.own), victims


def server_sees(
    digits: Data,
    defense: Defense,
    batch: int = 1,
    count: int = 8,
    first: int = 900,
    nconv: int = 4,
    kinks: bool = False,
) -> Seen:
    """Return what a server sees of `count` digits on a fresh network under a defense, and whose they are."""
    spec = net_spec("cnn", (1, 8, 8), 10) if kinks else net_spec("dlnet", (1, 8, 8), 10, {"nconv": nconv})
    plan = Plan(spec, 1, Local("gradient", batch=batch))
    rows = slice(first, first + 60)
    run = Federation(defense, plan, {0: Data(digits.x[rows].clone(), digits.y[rows].clone())}, Seeds(0))
    run.start(initial(plan.spec, 1))
    return watched(run, batch=batch, count=count)


def scored(victims: Victims, guesses: Sequence[Guess], own: Sequence[Evidence] = ()) -> list[tuple[float, bool]]:
    """Return each image's PSNR (100 dB at most) and label hit, by the scorer."""
    result = score_images(victims, guesses, {e.unit: e for e in own}, {}, (0.0, 1.0))
    return [(s.psnr or 0.0, bool(s.label)) for s in result.victims]


def reached(seen: Seen, attack: Attack) -> tuple[list[float], list[Guess]]:
    """Return the scorer's PSNR of every victim image, and the guesses."""
    view, victims = seen
    guesses = attack.run(view, victims.challenges(), seeded())
    return [s.psnr or 0.0 for s in score_images(victims, guesses, {}, {}, view.plan.data_range).victims], guesses
