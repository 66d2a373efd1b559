"""`ppbench.invert`: an attack on a user's own gradient, without a federation.

The gradient is put into the view of an undefended federation's server, which holds the weights and one upload, and the
attack answers the same question as in the bench. Equal weights, gradient and seed give the guess of a cell of one
victim at initial weights, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess, readable
from ppbench.base.device import check_device, computing
from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.fence import guard
from ppbench.base.registry import find, plugins
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, finite, moved
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth, misfit
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Model, Slot, Update, Wire
from ppbench.nets.channels import has_kinks
from ppbench.nets.model_object import explaining_failures, held_network, unwrapped
from ppbench.nets.net import NetSpec
from ppbench.questions.base import question_of
from ppbench.records.schema import Scalar
from ppbench.run.config import configure
from ppbench.run.experiment import built_for, make_attack, make_defense
from ppbench.run.inversion_result import ALIKE, ROUNDING, Inverted, Planted, mix_with_noise, planted_of, variants
from ppbench.run.scene import attack_seed
from ppbench.run.task import plan_on
from ppbench.run.user_gradients import Gradient, read_gradient, scale_of
from ppbench.run.user_inputs import ClassLabels, check_batch, check_real, int_between, one_hot_of, range_of, shape_of

THREAT = HONEST_SERVER
VICTIM = Slot(0, 0)
MAX_BATCH = 100_000
"""Most examples in a batch."""
EXACT = ("closed_form", "peel", "spear", "spear_features")
"""Attacks of the default that are tried first: they compute layers one by one."""
SEARCH, KINKED_SEARCH, BY_FEATURES = "dlg", "ig", "feature_inversion"
"""Searches of the default: on smooth networks, on convolutions with kinks, and beside them by the head's features."""
GUIDED_SEARCH = "ig_features"
"""Takes the place of `KINKED_SEARCH` where it suits: where the features can be read."""
SOLVED, SOLVED_WITH_KINKS = 1e-10, 1e-4
"""Misfit up to which an answer needs no search; with kinks a search leaves 1e-3 of good ones (docs/benchmarks.md)."""
STEP_OPTIONS = ("lr", "local_epochs", "batch_size", "optimizer", "momentum", "beta2")
"""Options that describe the local steps behind a change of weights."""
HOW = '{"lr": 0.1, "local_epochs": 2, "batch_size": 4}'


@computing()
def invert(
    model: Module,
    gradient: Gradient,
    shape: Sequence[int],
    labels: ClassLabels | int | None = None,
    attack: str | Attack | None = None,
    *,
    batch: int | None = None,
    seed: int = 0,
    device: str | None = None,
    data_range: tuple[float, float] = (0.0, 1.0),
    planted: bool = True,
    training: Mapping[str, Scalar] | None = None,
    **parameters: Scalar,
) -> Inverted:
    """Return the inputs, and their labels, that an attack rebuilds from the gradient of a batch.

    Args:
        model: a network that answers by logits, with the weights at which the gradient was taken, each layer in the
            mode (`train`, `eval`) in which it was. It is left as it is.
        gradient: of the mean cross-entropy of the batch, or a multiple of it (`Inverted.scale`), as
            `torch.autograd.grad` gives it: one tensor a parameter that requires a gradient, or all parameters, or all
            of `model.state_dict()`, in their order; or by name, as `{n: p.grad for n, p in model.named_parameters()}`;
            or one vector. Arrays of NumPy and lists of floats will do, and names with what wrappers put before them.
            None stands for a parameter that the network does not use.
        shape: of one input, without the batch, as (3, 32, 32).
        labels: the batch's classes [B], if the attacker knows them.
        attack: a reconstruction attack: its name in `ppbench list attacks`, or an object of `load_attack`. By default
            what computes layers one by one, and where that solves nothing, the searches that suit the network; of
            several answers the one that explains the gradient best (`misfit`); see `Inverted.attack`.
        batch: examples in the batch; by default as many as `labels`, else 1.
        seed: of the attack's draws: one seed, one result.
        device: where it is computed, as torch names it; by default where the gradient lies.
        data_range: least and greatest value of an input, where searches begin (in its middle) and end.
        planted: whether the attack runs once more, on a gradient of known inputs (its answer, half noise), to learn
            what mismatch a solved batch leaves (`Inverted.solved_mismatch`): a second search, of the same budget.
        training: if `gradient` is start minus end of several local steps, the options of those steps: lr,
            local_epochs, batch_size, optimizer ("sgd" by default), momentum, beta2, as `federate` takes them.
        parameters: of the attack, by default of the search, as `budget=3000`.

    Raises UsageError, one sentence: an argument cannot be used, or the attack needs more than a gradient.
    """
    check_real(model)
    module = unwrapped(model)
    network = held_network(module, shape_of(shape), range_of(data_range))
    challenge = _challenge(labels, batch, network.spec)
    plan = _plan(network.spec, challenge.batch, range_of(data_range), training)
    check_batch(plan, min(challenge.batch, plan.local.batch))
    if not isinstance(planted, bool):
        raise UsageError(f"planted={shown(planted)} cannot be used; it must be True or False.")
    seen = read_gradient(gradient, module, network)
    known = None if challenge.y is None else challenge.y[0]
    fitted = scale_of(seen, network.spec.start, challenge.batch, known) if training is None else 1.0
    scale = 1.0 if fitted is None else fitted
    place = next(iter(seen.values())).device if device is None else _device(device)
    start, sent = moved(network.spec.start, place), {name: (value / scale).to(place) for name, value in seen.items()}
    view, seeds = view_of(plan, start, sent), Seeds(int_between("seed", seed, 0, 2**63 - 1))
    searches = _searches(plan, challenge.batch, bool(parameters)) if attack is None else (attack,)
    chosen = _chosen(searches[0], parameters, view, challenge)
    with guard("attacks", chosen.name), explaining_failures(network):
        _check_usable(chosen, view, challenge)
        if attack is None:
            chosen, guess = _best_answer([chosen, *map(make_attack, searches[1:])], view, challenge, seeds)
        else:
            guess = _answer(chosen, view, challenge, seeds)
        answer = _result(chosen, view, guess, scale)
        control = _planted(chosen, plan, start, challenge, answer, seeds) if planted else None
        steps = None if plan.local.upload == "gradient" else plan.local.opt.name
        return replace(answer, planted=control, unexplained=fitted is None, training=steps)


def _device(word: str | torch.device) -> torch.device:
    if not isinstance(word, str | torch.device):
        raise UsageError(f"device={shown(word)} cannot be used; give its name, as 'cpu' or 'cuda:0'.")
    check_device(str(word))
    return torch.device(word)


def view_of(plan: Plan, params: Params, gradient: Params) -> View:
    """Return the server's view of one undefended upload, a gradient at `params`."""
    wire = Wire(keep=True)
    wire.post(0, 1, 0, SERVER, [0], Model(params))
    wire.post(0, 1, 0, 0, [SERVER], Update(gradient))
    return View(THREAT, SERVER, plan, make_defense("none"), tuple(wire.mail), ())


def _searches(plan: Plan, batch: int, single: bool) -> tuple[str, ...]:
    """Return the searches of the default; `single`: the first alone, because the user set its parameters."""
    if plan.local.upload != "gradient":
        return (SEARCH,)
    kinks = has_kinks(plan.net)
    guided = kinks and make_attack(GUIDED_SEARCH).suits(plan)
    first = GUIDED_SEARCH if guided else KINKED_SEARCH if kinks else SEARCH
    return (first,) if single or not (kinks or batch > 1) else (first, BY_FEATURES)


def _best_answer(searches: Sequence[Attack], view: View, challenge: Challenge, seeds: Seeds) -> tuple[Attack, Guess]:
    """Return the attack and the guess that explain the gradient best; no search where layers could be computed."""
    answers, solved = list[tuple[Attack, Guess]](), SOLVED_WITH_KINKS if has_kinks(view.plan.net) else SOLVED
    for attack in (*map(make_attack, EXACT), *searches):
        if not _obstacle(attack, view, challenge):
            guess = _answer(attack, view, challenge, seeds)
            answers.append((attack, guess))
            if attack.name in EXACT and (guess.is_exact or _misfit(view, guess) <= solved):
                return attack, guess
    return min(answers, key=lambda answer: _misfit(view, answer[1]))


def _misfit(view: View, guess: Guess) -> float:
    """Return how badly a guess explains a gradient, inf without inputs or labels."""
    if guess.x is None or guess.y is None or view.plan.local.upload != "gradient":
        return math.inf
    (evidence,) = view.defense.evidence(view)
    y = one_hot(guess.y, view.plan.spec.classes)[None]
    return misfit(evidence, guess.x[None].to(evidence.device), y.to(evidence.device), view.plan.data_range)


def _answer(attack: Attack, view: View, challenge: Challenge, seeds: Seeds) -> Guess:
    draws = attack_seed(seeds, attack.name, THREAT, "init", challenge.batch)
    (guess,) = attack.run(view, [challenge], torch.Generator().manual_seed(draws))
    return guess


def _result(attack: Attack, view: View, guess: Guess, scale: float) -> Inverted:
    if guess.x is None:
        raise UsageError("The attack answered without inputs; use another.")
    mismatch, budget = _mismatch(attack, view, guess), getattr(attack, "budget", None)
    known = view.plan.data_range, scale, budget
    return Inverted(guess.x, guess.y, mismatch, guess.evaluations, *known, attack=attack.name, layers=guess.layers)


def _mismatch(attack: Attack, view: View, guess: Guess) -> float | None:
    """Return the share of the observation that a guess does not explain, None without labels."""
    if guess.x is None or guess.y is None:
        return None
    reader = view.defense if view.plan.local.upload == "gradient" else attack  # an attack simulates local steps
    evidence = reader.evidence(view)[0]
    y = one_hot(guess.y, view.plan.spec.classes)[None].to(evidence.device)
    return at_truth(evidence, guess.x[None].to(evidence.device), y)


def _planted(
    attack: Attack, plan: Plan, start: Params, challenge: Challenge, answer: Inverted, seeds: Seeds
) -> Planted | None:
    """Return the attack's result, from other draws, on a client of the bench that holds the answer mixed with noise.

    The answer alone would prove nothing: what the gradient does not depend on (pixels cut off, a mean over channels, a
    null space of few trained entries) has its start values there, and the attack would find those again. None if no
    client could hold the answer.
    """
    if answer.y is None or not finite(answer.x):
        return None
    again = Seeds(seeds.seed("planted"))
    noise = torch.Generator().manual_seed(again.seed("noise"))
    x, y = mix_with_noise(answer.x, plan.data_range, noise), one_hot(answer.y, plan.spec.classes).float()
    data = Data(x, y)
    client = Federation(make_defense("none"), plan, {0: data}, again, next(iter(start.values())).device)
    client.start(start)
    view = client.probe({VICTIM: data}, "gradient" if plan.local.upload == "gradient" else "local").view(THREAT)
    guess = _answer(attack, view, challenge, again)
    mismatch = _mismatch(attack, view, guess)
    if mismatch is None:
        return None
    for other in variants(x, plan.data_range):  # a start may have the planted brightness or contrast by chance
        left = _mismatch(attack, view, Guess(other, answer.y))
        if left is not None and left <= ALIKE * max(mismatch, _stop(attack), ROUNDING):
            guess = replace(guess, x=other)
    return planted_of(x, guess, mismatch, plan.data_range, _stop(attack))


def _stop(attack: Attack) -> float:
    """Return the mismatch at which an attack's search ends; 0 where it has none, or one that is not relative."""
    stop = getattr(attack, "stop", 0.0)
    return float(stop) if isinstance(stop, float) and not getattr(attack, "absolute", False) else 0.0


def _plan(spec: NetSpec, batch: int, data_range: tuple[float, float], training: Mapping[str, Scalar] | None) -> Plan:
    """Return the public plan of one client that sends a gradient, or its change of weights in the steps `training`."""
    if training is None:
        return Plan(spec, 1, Local("gradient", batch=batch), data_range=data_range)
    if not isinstance(training, Mapping):
        raise UsageError(f"training={shown(training)} cannot be used; it must say how steps were made, as {HOW}.")
    for name in training:
        if name not in STEP_OPTIONS:
            raise unknown("option of local steps", str(name), STEP_OPTIONS)
    if "lr" not in training:
        raise UsageError(f"training={shown(training)} lacks the learning rate; give it, as {HOW}.")
    options: dict[str, Any] = {"optimizer": "sgd", "batch_size": batch, **training}
    config = configure(defense="none", clients=1, upload="delta", decay_at=(), schedule="parallel", **options)
    return plan_on(config, spec, data_range)


def _chosen(attack: str | Attack, parameters: Mapping[str, Scalar], view: View, challenge: Challenge) -> Attack:
    """Return the attack, with its parameters; UsageError: unknown, or no attack."""
    if isinstance(attack, str):
        if find("attacks", attack) is None:
            raise unknown("attack", attack, _applicable(view, challenge), "on such a gradient run")
        return make_attack(attack, parameters)
    if not isinstance(attack, Attack):
        raise UsageError(f"The attack is {shown(attack, 60)}; give a name, as 'dlg', or what load_attack gives.")
    if parameters:
        raise UsageError(
            f"Parameter {next(iter(parameters))!r} does not apply to an attack object; give it to load_attack."
        )
    return attack


def _check_usable(attack: Attack, view: View, challenge: Challenge) -> None:
    """Raise UsageError for parameters that cannot be used, or an attack that needs more than this gradient."""
    attack.check()
    if obstacle := _obstacle(attack, view, challenge):
        raise UsageError(f"Attack {attack.name!r} {obstacle}.")


def _applicable(view: View, challenge: Challenge) -> Iterator[str]:
    """Yield the names of our attacks that can run on a view."""
    for name, plugin in plugins("attacks").items():
        if plugin.ours and not _obstacle(make_attack(name), view, challenge):
            yield name


def _obstacle(attack: Attack, view: View, challenge: Challenge) -> str:
    """Return what an attack needs beyond a gradient and weights, with advice, in clauses; "" if it can run."""
    gradient, instead = view.plan.local.upload == "gradient", "take one that rebuilds inputs, as 'dlg', 'idlg' or 'ig'"
    if not question_of(attack.kind).inputs:
        return f"answers another question ({attack.kind.replace('_', ' ')}); {instead}"
    if not THREAT.among(attack.threats):
        return f"is of a server that sends weights of its own ({attack.threats[0]}); {instead}"
    if not built_for(attack, view.defense.name):
        return f"is built for what {', '.join(sorted(attack.targets or ()))} sends; {instead}"
    if attack.needs_public:
        return f"learns from public examples, which only an evaluation has; {instead}"
    if not attack.suits(view.plan):
        return f"has no use for a network such as {view.plan.spec.model!r}; {instead}"
    if gradient and "gradient" not in attack.probes:
        return f"simulates several local steps; give training={HOW} and start minus end of the weights, or take 'dlg'"
    if not gradient and "local" not in attack.probes:
        return "reads one gradient, not several steps; leave out training=, or take 'fedavg_inversion'"
    if attack.replays:
        where = (
            "only a federation has its state: there, give it what `ppbench.probe` returns; here its search is 'idlg'"
        )
        return f"runs the server's own code again, and {where}"
    if attack.probe_rounds > 1:
        return f"needs gradients of {attack.probe_rounds} rounds of one batch; {instead}"
    return "" if readable(attack, view, [challenge]) else f"has no use for a gradient alone; {instead}"


def _challenge(labels: ClassLabels | int | None, batch: int | None, spec: NetSpec) -> Challenge:
    """Return the question about a batch; UsageError: labels are no classes of the network, or not one per example."""
    if labels is None:
        return Challenge((VICTIM,), int_between("batch", 1 if batch is None else batch, 1, MAX_BATCH))
    y = one_hot_of(labels, spec.classes)
    if batch is not None and int_between("batch", batch, 1, MAX_BATCH) != len(y):
        raise UsageError(f"batch={shown(batch)} cannot be used; there are {len(y)} labels.")
    return Challenge((VICTIM,), int_between("batch", len(y), 1, MAX_BATCH), y[None])
