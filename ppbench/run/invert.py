"""`ppbench.invert`: an attack on a user's own gradient, without a federation.

The gradient is put into the view of an undefended federation's server, which holds the weights and one upload, and the
attack answers the same question as in the bench. Equal weights, gradient and seed give the guess of a cell of one
victim at initial weights, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ppbench.adversary.attack import Attack, Challenge, Guess, readable
from ppbench.base.device import check_device, computing
from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.fence import guard
from ppbench.base.registry import find, plugins
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, finite, moved
from ppbench.base.vocabulary import UNKNOWN
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth, misfit
from ppbench.federation.plan import Data, Plan
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.nets.channels import has_kinks
from ppbench.nets.classifier import OutputName
from ppbench.nets.model_object import explaining_failures, held_network, unwrapped
from ppbench.nets.net import OwnLoss
from ppbench.questions.base import question_of
from ppbench.records.schema import Scalar
from ppbench.run.experiment import built_for, make_attack
from ppbench.run.inversion_result import ALIKE, ROUNDING, Inverted, Planted, mix_with_noise, planted_of, variants
from ppbench.run.scene import attack_seed
from ppbench.run.update_view import (
    HOW,
    OF_STEPS,
    at_rate,
    first_rate,
    fitted_rate,
    is_rate_unknown,
    plan_of_update,
    view_of,
)
from ppbench.run.user_gradients import (
    Gradient,
    least_batch,
    observation_of,
    read_gradient,
    without_decay,
)
from ppbench.run.user_inputs import (
    ClassLabels,
    ClassWeights,
    LossFunction,
    check_batch,
    check_real,
    check_switches,
    int_between,
    plan_of_texts,
    range_of,
    shape_of,
    user_loss,
)
from ppbench.run.user_targets import Targets, examples_in, rows_behind, targets_of

THREAT = HONEST_SERVER
VICTIM = Slot(0, 0)
EXACT = ("token_rows", "closed_form", "peel", "spear", "spear_features")
"""Attacks of the default that are tried first: they compute layers one by one."""
SEARCH, KINKED_SEARCH, BY_FEATURES = "dlg", "ig", "feature_inversion"
"""Searches of the default: on smooth networks, on convolutions with kinks, and beside them by the head's features."""
GUIDED_SEARCH = "ig_features"
"""Takes the place of `KINKED_SEARCH` where it suits: where the features can be read."""
FINISHING: Mapping[str, Scalar] = {"budget": 450, "finish": 150}
"""Parameters of these two where the user sets none: what they nearly explain is computed to rounding."""
ADAPTER_SEARCH = "gauss_newton"
"""Comes before `SEARCH` where most weights are frozen (adapters): by first order another image explains nearly all."""
MOST_NUMBERS = 1024
"""Numbers of an input up to which the default takes `ADAPTER_SEARCH`: a minute or two, with 3,072 ten times as long."""
SEPARATING = "spear"
"""Separates a batch by what its first layer's units do, whatever the loss."""
SOLVED, SOLVED_WITH_KINKS = 1e-10, 1e-4
"""Misfit up to which an answer needs no search; with kinks a search leaves 1e-3 of good ones (docs/benchmarks.md)."""
MOST_ORDERED = 4
"""Examples of a batch up to which all orders of its labels are tried."""
BLIND_LEVELS = 5
"""Constant images that the best blind input is one of."""


@computing()
def invert(
    model: Module,
    gradient: Gradient,
    shape: Sequence[int],
    labels: ClassLabels | int | None = None,
    attack: str | Attack | None = None,
    *,
    loss: str | LossFunction = "cross_entropy",
    label_smoothing: float = 0.0,
    class_weights: ClassWeights | None = None,
    weight_decay: float | None = 0.0,
    output: OutputName | None = None,
    batch: int | None = None,
    seed: int = 0,
    device: str | None = None,
    data_range: tuple[float, float] = (0.0, 1.0),
    planted: bool = True,
    statistics: bool = True,
    training: Mapping[str, Scalar] | None = None,
    vocabulary: Sequence[str] | None = None,
    **parameters: Scalar,
) -> Inverted:
    """Return the inputs, and their labels, that an attack rebuilds from the gradient of a batch.

    Args:
        model: a network that answers by logits, with the weights at which the gradient was taken, each layer in the
            mode (`train`, `eval`) in which it was. It is left as it is.
        gradient: of the mean loss of the batch, or a multiple of it (`Inverted.scale`), as
            `torch.autograd.grad` gives it: one tensor a parameter that requires a gradient, or all parameters, or all
            of `model.state_dict()`, in their order; or by name, as `{n: p.grad for n, p in model.named_parameters()}`;
            or one vector. Arrays of NumPy and lists of floats will do, and names with what wrappers put before them.
            None stands for a parameter that the network does not use. Or an update, as (before, after): two state
            dicts, of which the first replaces the model's weights; without `training` it is one step of any rate.
            Parameters that a gradient by name or both state dicts lack are unknown (`Inverted.unseen`), as the norms
            of FedBN, which stay with their clients.
        shape: of one input, without the batch, as (3, 32, 32); of a text (L,), its number of tokens.
        labels: the batch's classes [B], if the attacker knows them; under other losses rows of numbers [B, C].
        attack: a reconstruction attack: its name in `ppbench list attacks`, or an object of `load_attack`. By default
            what computes layers one by one, and where that solves nothing, the searches that suit the network; of
            several answers the one that explains the gradient best (`misfit`); see `Inverted.attack`.
        loss: "cross_entropy"; "nll", of log-probabilities; "bce", with logits and labels from 0 to 1; "mse", the mean
            over outputs; "next_token", of decoders that answer every token [B, L, V], the mean over a batch's tokens,
            which are their own targets, padding (token 0) aside; one of torch's objects or functions of these; or a
            function of outputs [B, C] and labels, to losses [B] or their mean, differentiable twice. A function gets
            classes [B] int64 if `labels` are whole numbers, else rows [B, C] of floats ([B] both where the network
            answers by [B]).
        label_smoothing: of cross-entropy, from 0 to below 1, as in `torch.nn.CrossEntropyLoss`.
        class_weights: of cross-entropy, [C], positive, as there.
        weight_decay: factor of the weights in the gradient; None: unknown, and read off the last layer.
        output: the part of the network's answer that the loss takes: a key, index or attribute.
        batch: examples in the batch; by default as many as `labels`, else 1.
        seed: of the attack's draws: one seed, one result.
        device: where it is computed, as torch names it; by default where the gradient lies.
        data_range: least and greatest value of an input, where searches begin (in its middle) and end.
        planted: whether the attack runs once more, on a gradient of known inputs (its answer, half noise), to learn
            what mismatch a solved batch leaves (`Inverted.solved_mismatch`): a second search, of the same budget.
        statistics: whether the running means and variances of batch norms are used, if a pair (before, after) shows
            that the client moved them: mean and variance of the batch in each layer.
        training: if `gradient` is the change of weights in several local steps, the options of those steps: lr (None:
            unknown, and fitted), local_epochs, batch_size, optimizer ("sgd" by default), momentum, beta2, as `federate`
            takes them.
        vocabulary: of a network of texts, one whose `nn.Embedding` gets token numbers [B, L], the tokens by number;
            token 0 counts as padding. Without it `Inverted.texts` are numbers.
        parameters: of the attack, by default of the search, as `budget=3000`.

    Raises UsageError, one sentence: an argument cannot be used, or the attack needs more than a gradient.
    """
    check_real(model)
    check_switches(planted=planted, statistics=statistics)
    steps, named, bounds = training is not None, user_loss(loss, label_smoothing, class_weights), range_of(data_range)
    module, gradient, tracked = observation_of(gradient, unwrapped(model), steps, statistics)
    network = held_network(
        module,
        shape_of(shape),
        bounds,
        output=output_of(output),
        any_output=named.any_output,
        tracked=tracked,
        texts=True,
        every_token=named.targets == "tokens",
    )
    seen, moving = read_gradient(gradient, module, network), network.spec.net.statistics
    unseen = tuple(own for name, own in network.names.items() if name not in seen)
    if steps and unseen:
        raise UsageError(
            f"An update of several local steps must have each trained parameter; {unseen[0]!r} is missing."
        )
    seen = without_decay(seen, network.spec.start, weight_decay, examples_in(labels, batch), steps, moving)
    targets = targets_of(named, labels, batch, seen, network, steps)
    plan = plan_of_texts(plan_of_update(network.spec, targets.batch, bounds, training, targets.loss), vocabulary)
    check_batch(plan, min(targets.batch, plan.local.batch))
    unknown_rate = is_rate_unknown(training, plan, attack)
    place = next(iter(seen.values())).device if device is None else _device(device)
    start = moved(network.spec.start, place)
    sent = {name: (value if name in moving else value / targets.scale).to(place) for name, value in seen.items()}
    view, seeds = view_of(plan, start, sent), Seeds(int_between("seed", seed, 0, 2**63 - 1))
    if unknown_rate:
        view, parameters = at_rate(view, first_rate(sent, plan, targets.batch)), {"fits_rate": True, **parameters}
    separated = _separated(view, seeds, targets) if targets.word else None
    challenge = _challenge(targets := separated.targets if separated else targets)
    searches = _searches(plan, challenge.batch, bool(parameters)) if attack is None else (attack,)
    chosen = _chosen(searches[0], parameters or _own_parameters(searches[0], attack), view, challenge)
    with guard("attacks", chosen.name), explaining_failures(network):
        _check_usable(chosen, view, challenge)
        if separated and attack is None:
            chosen, guess, _ = separated
        elif attack is None:
            others = [other for other in map(make_attack, searches[1:]) if not _obstacle(other, view, challenge)]
            chosen, guess = _best_answer([chosen, *others], view, challenge, seeds, targets)
        else:
            guess = _answer(chosen, view, challenge, seeds, targets)
        fitted = _with_fitted_rate(chosen, view, guess, targets) if unknown_rate else view
        answer = _result(chosen, fitted, guess, targets)
        first = view.plan.local.opt.lr
        control = _planted(chosen, fitted, start, challenge, answer, seeds, targets, first) if planted else None
        least = 0 if steps else least_batch(seen, plan.spec.shape[0] - 1 if plan.next_token else 1)
        answer = replace(answer, least_batch=least, unseen=unseen, planted=control)
        return replace(answer, y=targets.labels_for(guess, network, named.word))


def _own_parameters(search: str | Attack, attack: str | Attack | None) -> Mapping[str, Scalar]:
    """Return the parameters of the default's first search; none where the user named an attack."""
    return FINISHING if attack is None and search in (KINKED_SEARCH, GUIDED_SEARCH) else {}


def _device(word: str | torch.device) -> torch.device:
    if not isinstance(word, str | torch.device):
        raise UsageError(f"device={shown(word)} cannot be used; give its name, as 'cpu' or 'cuda:0'.")
    check_device(str(word))
    return torch.device(word)


def _searches(plan: Plan, batch: int, single: bool) -> tuple[str, ...]:
    """Return the searches of the default; `single`: the first alone, because the user set its parameters."""
    if plan.local.upload != "gradient":
        return (OF_STEPS,)
    kinks = has_kinks(plan.net)
    if not (kinks or single) and batch == 1 and _has_adapters(plan):  # a budget is that of searches by first order
        return ADAPTER_SEARCH, SEARCH
    guided = kinks and make_attack(GUIDED_SEARCH).suits(plan)
    first = GUIDED_SEARCH if guided else KINKED_SEARCH if kinks else SEARCH
    return (first,) if single or not (kinks or batch > 1) else (first, BY_FEATURES)


def _has_adapters(plan: Plan) -> bool:
    """Return whether fewer weights are trained than frozen, of a small network that `ADAPTER_SEARCH` takes."""
    if math.prod(plan.spec.shape) > MOST_NUMBERS:
        return False
    frozen = sum(plan.net.frozen[name].numel() for name in plan.net.frozen_parameters)
    return plan.net.parameter_count < frozen and make_attack(ADAPTER_SEARCH).suits(plan)


def _best_answer(
    searches: Sequence[Attack], view: View, challenge: Challenge, seeds: Seeds, targets: Targets
) -> tuple[Attack, Guess]:
    """Return the attack and the guess that explain the gradient best; no search where layers could be computed."""
    answers, solved = list[tuple[Attack, Guess]](), SOLVED_WITH_KINKS if has_kinks(view.plan.net) else SOLVED
    exact = EXACT if view.plan.local.upload == "gradient" else ()
    for attack in (*map(make_attack, exact), *searches):
        if not _obstacle(attack, view, challenge):
            guess = _answer(attack, view, challenge, seeds, targets)
            answers.append((attack, guess))
            if attack.name in (*EXACT, ADAPTER_SEARCH) and (guess.is_exact or _misfit(view, guess, targets) <= solved):
                return attack, guess
    return min(answers, key=lambda answer: _misfit(view, answer[1], targets))


def _misfit(view: View, guess: Guess, targets: Targets) -> float:
    """Return how badly a guess explains a gradient, inf without inputs or labels."""
    y = targets.rows_for(guess, view.plan)
    if guess.x is None or y is None or view.plan.local.upload != "gradient":
        return math.inf
    (evidence,) = view.defense.evidence(view)
    y = y[None]
    return misfit(evidence, guess.x[None].to(evidence.device), y.to(evidence.device), view.plan.data_range)


def _challenge(targets: Targets) -> Challenge:
    return Challenge((VICTIM,), targets.batch, None if targets.y is None else targets.y[None])


class Separated(NamedTuple):
    """An answer whose inputs were separated without a loss, and targets with the labels that these inputs show."""

    attack: Attack
    guess: Guess
    targets: Targets


def _separated(view: View, seeds: Seeds, targets: Targets) -> Separated | None:
    """Return a batch whose labels are no classes, inputs first; None if they are not separated, or do not fit.

    UsageError: so it is, and no labels are known.
    """
    attack = make_attack(SEPARATING)
    plain = replace(targets, y=None, rows=None)
    guess = _answer(attack, view, _challenge(plain), seeds, plain) if attack.suits(view.plan) else None
    if guess is not None and guess.x is not None and finite(guess.x):
        rows = rows_behind(view.defense.evidence(view)[0], view.plan, guess.x, targets.word)
        known = replace(targets, y=rows, rows=rows)
        if _misfit(view, guess, known) <= SOLVED_WITH_KINKS:
            return Separated(attack, guess, known)
    if targets.y is not None:
        return None
    where = "the network begins with nn.Flatten, nn.Linear and nn.ReLU and the gradient separates its inputs"
    raise UsageError(f"Under loss={targets.word!r} labels of a batch can be inferred where {where}; give labels=.")


def _with_fitting_label(guess: Guess, view: View, challenge: Challenge, targets: Targets) -> Guess:
    """Return a guess whose inputs were computed without labels with those that fit best.

    Of one input all classes are tried, where no head shows its own; of a small batch all orders of the labels.
    """
    plan, y = view.plan, guess.y
    if challenge.y is not None or not guess.layers or y is None or plan.local.upload != "gradient":
        return guess
    candidates: list[tuple[int, ...]] = []
    if challenge.batch == 1 and "head.bias" not in plan.net.names:
        candidates = [(label,) for label in range(plan.spec.classes)]
    elif 1 < challenge.batch <= MOST_ORDERED and y.dim() == 1 and _misfit(view, guess, targets) > SOLVED:
        candidates = sorted({*itertools.permutations(y.tolist())})
    guesses = [guess, *(replace(guess, y=torch.tensor(labels)) for labels in candidates)]
    return min(guesses, key=lambda one: _misfit(view, one, targets)) if candidates else guess


def _answer(attack: Attack, view: View, challenge: Challenge, seeds: Seeds, targets: Targets) -> Guess:
    draws = attack_seed(seeds, attack.name, THREAT, "init", challenge.batch)
    (guess,) = attack.run(view, [challenge], torch.Generator().manual_seed(draws))
    return _with_fitting_label(guess, view, challenge, targets)


def _result(attack: Attack, view: View, guess: Guess, targets: Targets) -> Inverted:
    if guess.x is None:
        raise UsageError("The attack answered without inputs; use another.")
    local, steps = view.plan.local, view.plan.local.upload != "gradient"
    return Inverted(
        guess.x if view.plan.vocabulary is None else guess.x.round().long(),
        guess.y,
        _mismatch(attack, view, guess, targets),
        guess.evaluations,
        view.plan.data_range,
        targets.scale,
        getattr(attack, "budget", None),
        unexplained=targets.unexplained,
        training=local.opt.name if steps else None,
        attack=attack.name,
        layers=guess.layers,
        loss=view.plan.loss_name,
        blind_mismatch=_blind_mismatch(attack, view, guess, targets),
        rate=local.opt.lr if steps and local.opt.name == "sgd" else None,
        vocabulary=view.plan.vocabulary,
    )


def _mismatch(attack: Attack, view: View, guess: Guess, targets: Targets) -> float | None:
    """Return the share of the observation that a guess does not explain, None without labels.

    Of several steps the attack's own figure, which counts the order of the steps that it found.
    """
    if view.plan.local.upload != "gradient" and guess.confidence is not None:
        return guess.confidence
    y = targets.rows_for(guess, view.plan)
    if guess.x is None or y is None:
        return None
    reader = view.defense if view.plan.local.upload == "gradient" else attack  # an attack simulates local steps
    evidence = reader.evidence(view)[0]
    return at_truth(evidence, guess.x[None].to(evidence.device), y[None].to(evidence.device))


def _with_fitted_rate(attack: Attack, view: View, guess: Guess, targets: Targets) -> View:
    """Return a view whose plan states the rate at which a guess explains most."""
    plain, first = replace(guess, confidence=None), view.plan.local.opt.lr

    def mismatch(rate: float) -> float:
        left = _mismatch(attack, at_rate(view, rate), plain, targets)
        return math.inf if left is None else left

    return at_rate(view, fitted_rate(mismatch, first))


def _blind_mismatch(attack: Attack, view: View, guess: Guess, targets: Targets) -> float | None:
    """Return the least mismatch of constant images of five levels in the place of a guess, None without labels."""
    if guess.x is None:
        return None
    levels = torch.linspace(*view.plan.data_range, BLIND_LEVELS).tolist()
    blind = [
        _mismatch(attack, view, replace(guess, x=torch.full_like(guess.x, v), confidence=None), targets) for v in levels
    ]
    return min((left for left in blind if left is not None and math.isfinite(left)), default=None)


def _planted(
    attack: Attack,
    seen: View,
    start: Params,
    challenge: Challenge,
    answer: Inverted,
    seeds: Seeds,
    targets: Targets,
    first: float,
) -> Planted | None:
    """Return the attack's result, from other draws, on a client of the bench that holds the answer mixed with noise.

    The answer alone would prove nothing: what the gradient does not depend on (pixels cut off, a mean over channels, a
    null space of few trained entries) has its start values there, and the attack would find those again. None if no
    client could hold the answer. first: the rate of local steps that the attack begins with.
    """
    plan, defense = seen.plan, seen.defense
    assert isinstance(defense, Defense)  # not one of another package, which runs elsewhere
    y = targets.rows_for(Guess(answer.x.float(), answer.y), plan)
    if y is None or not finite(answer.x):
        return None
    again = Seeds(seeds.seed("planted"))
    noise = torch.Generator().manual_seed(again.seed("noise"))
    x = drawn_like(answer.x, plan, noise)
    data = Data(x, x if plan.next_token else y.float())
    client = Federation(defense, plan, {0: data}, again, next(iter(start.values())).device)
    client.start(start)
    view = client.probe({VICTIM: data}, "gradient" if plan.local.upload == "gradient" else "local").view(THREAT)
    view = at_rate(view, first)
    separated = _separated(view, again, targets) if targets.word and attack.name == SEPARATING else None
    guess = separated.guess if separated else _answer(attack, view, challenge, again, targets)
    targets = separated.targets if separated else targets
    mismatch = _mismatch(attack, view, guess, targets)
    if mismatch is None:
        return None
    for other in () if plan.vocabulary else variants(x, plan.data_range):  # a start may have this brightness by chance
        left = _mismatch(attack, view, Guess(other, answer.y), targets)
        if left is not None and left <= ALIKE * max(mismatch, _stop(attack), ROUNDING):
            guess = replace(guess, x=other)
    return planted_of(x, guess, mismatch, plan.data_range, _stop(attack))


def drawn_like(like: Tensor, plan: Plan, generator: torch.Generator) -> Tensor:
    """Return inputs mixed with noise; for texts [B, L] others, of tokens that are neither padding nor unknown."""
    if plan.vocabulary is None:
        return mix_with_noise(like, plan.data_range, generator)
    most = int(plan.data_range[1])
    return torch.randint(min(UNKNOWN + 1, most), most + 1, like.shape, generator=generator).float()


def _stop(attack: Attack) -> float:
    """Return the mismatch at which an attack's search ends; 0 where it has none, or one that is not relative."""
    stop = getattr(attack, "stop", 0.0)
    return float(stop) if isinstance(stop, float) and not getattr(attack, "absolute", False) else 0.0


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
    unread = "" if readable(attack, view, [challenge]) else f"has no use for a gradient alone; {instead}"
    return _obstacle_of_loss(attack, view.plan, challenge) or unread


def _obstacle_of_loss(attack: Attack, plan: Plan, challenge: Challenge) -> str:
    """Return why an attack cannot read a batch under a loss other than plain cross-entropy; "" if it can.

    Of one example no loss enters its equations: cotangents are unknowns, or read off the head.
    """
    if not isinstance(plan.loss, OwnLoss) or challenge.batch == 1:
        return ""
    plain = attack.separates_by == "softmax"
    if plain or (attack.separates_by == "classes" and not plan.loss.classes):
        words = "classes under plain cross-entropy" if plain else "their classes"
        return f"separates the examples of a batch by {words}; under this loss give batch=1, or take 'dlg' or 'ig'"
    return ""


def output_of(output: OutputName | None) -> OutputName | None:
    """Return a key, index or attribute (UsageError: it is none)."""
    if output is None or (isinstance(output, str | int) and not isinstance(output, bool)):
        return output
    raise UsageError(f"output={shown(output)} cannot be used; give the key, index or attribute of the logits.")
