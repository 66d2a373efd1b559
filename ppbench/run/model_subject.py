"""The subject of a membership audit: a finished model, candidates, attacks on it, and reference models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, References
from ppbench.adversary.victims import CandidatePlaces, Candidates, augmentations, draw_places
from ppbench.base.errors import UsageError, because, count_of, shown
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, moved
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.threats import CURIOUS_CLIENT
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Model, Wire
from ppbench.metrics.modality import modality_in
from ppbench.nets import modes
from ppbench.nets.classifier import OutputName, named_part
from ppbench.nets.model_object import held_network, unwrapped
from ppbench.nets.net import HeldSpec
from ppbench.questions.membership import Membership, score_members
from ppbench.records.figure import Terms
from ppbench.report.page.finished_model import AttackResult, CandidateRow, Exposed
from ppbench.report.page.profiles import sprite
from ppbench.run.audit.population import POPULATION, reference_halves
from ppbench.run.audit.runs import AUGMENTATIONS
from ppbench.run.experiment import make_defense
from ppbench.run.invert import output_of
from ppbench.run.scene import attack_seed
from ppbench.run.user_inputs import check_real
from ppbench.task.member_sets import MemberSet

APART = 5
"""One in so many non-members is the population of RMIA, where reference models are trained."""
CHUNK, SHOWN_MEMBERS = 512, 12
"""Inputs in a pass; members that the report shows."""
SAME_ANSWER = 1e-3
"""Largest difference of two computations of a probability in float32."""
TrainingFunction = Callable[..., nn.Module]
"""train(x, y), or train(x, y, seed=...): from inputs float32 [N, *shape] and classes int64 [N] to a trained network."""


def in_use(model: nn.Module) -> nn.Module:
    """Return a copy of a network in eval mode, without wrappers; anything else as it is."""
    return modes.copied(unwrapped(model)).eval() if isinstance(model, nn.Module) else model


def evaluated_network(model: nn.Module, members: MemberSet, others: MemberSet, output: OutputName | None) -> HeldSpec:
    """Return a copy of a user's network in eval mode; UsageError: it cannot be used, or labels are none of its classes.

    All its weights count as trained: only a training would leave some out.
    """
    check_real(model)
    module = in_use(model)
    for parameter in module.parameters() if isinstance(module, nn.Module) else ():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    ends = float(min(members.x.min(), others.x.min())), float(max(members.x.max(), others.x.max()))
    ends = (0.0, 1.0) if 0 <= ends[0] < ends[1] <= 1 else ends if ends[0] < ends[1] else (ends[0], ends[0] + 1)
    shape = tuple(members.x.shape[1:])
    spec = held_network(module, shape, ends, when=" before the audit", output=output_of(output)).spec
    for kind, own in (("members", members), ("non-members", others)):
        low, high = int(own.y.min()), int(own.y.max())
        if low < 0 or high >= spec.classes:
            wrong = low if low < 0 else high
            right = f"the model answers by {spec.classes} classes, so labels are 0 to {spec.classes - 1}"
            raise UsageError(f"The {kind} have the label {wrong}; {right}.")
    return spec


@dataclass(frozen=True, eq=False)
class AttackedModel:
    """The model with the candidates whose membership is attacked.

    plan, params: the network and its weights, on the device. members, others: both sets; `others` begins with those
    that may be candidates, the last `population` of them are nobody's training data and no candidates.
    """

    plan: Plan
    params: Params
    members: MemberSet
    others: MemberSet
    population: int
    places: CandidatePlaces
    seeds: Seeds
    device: torch.device

    @staticmethod
    def of(
        spec: HeldSpec,
        members: MemberSet,
        others: MemberSet,
        count: int,
        references: int,
        seeds: Seeds,
        device: torch.device,
    ) -> AttackedModel:
        """Return the subject with up to `count` candidates of each set."""
        surplus = max(len(others.y) - len(members.y), len(others.y) // APART, len(others.y) - count)
        population = min(POPULATION, surplus) if references else 0
        if population:  # at random: files are often sorted by class
            others = others.at(torch.randperm(len(others.y), generator=seeds.generator("population")))
        places = draw_places(len(members.y), len(others.y) - population, count, seeds)
        plan = Plan(spec, 2, Local("gradient", batch=1))
        return AttackedModel(plan, moved(spec.start, device), members, others, population, places, seeds, device)

    def check_answers_of(self, model: nn.Module, output: OutputName | None) -> None:
        """Raise UsageError where the user's own network answers a candidate by no number, or otherwise than the copy.

        The copy ends in the last linear layer, if that gave its answer on trial inputs.
        """
        module, parts = in_use(model).to(self.device), []
        with torch.no_grad():
            for x in self.candidates.x.split(CHUNK):
                answer = module(x.to(self.device))
                parts.append((answer if output is None else named_part(answer, output)).double().cpu())
        own = torch.cat(parts)
        bad = ~(own.isfinite() & self.outputs.isfinite()).all(1)
        if bad.any():
            raise UsageError(
                f"The model answers {int(bad.sum())} of {len(bad)} examples by NaN or infinity; nothing can be said of "
                "such a model: give one whose outputs are finite."
            )
        apart = (own.log_softmax(1).exp() - self.outputs.log_softmax(1).exp()).abs().amax(1) > SAME_ANSWER
        if apart.any():
            raise UsageError(
                f"The model changes its last layer's answer on {int(apart.sum())} of {len(apart)} examples; let it "
                "answer by the logits alone."
            )

    @cached_property
    def candidates(self) -> Candidates:
        """Members and non-members in balanced halves, in random order."""
        classes = self.plan.spec.classes
        own, others = (Data(part.x, one_hot(part.y, classes).float()) for part in (self.members, self.others))
        return self.places.candidates(own, others)

    @cached_property
    def outputs(self) -> Tensor:
        """The model's logits [Q, C] float64 of the candidates, on the CPU."""
        return self.answers(self.params, self.candidates.x)

    def answers(self, params: Params, x: Tensor) -> Tensor:
        """Return logits [N, C] float64, on the CPU, of inputs x under `params`."""
        with torch.no_grad():
            parts = [self.plan.net(params, part.to(self.device)).double().cpu() for part in x.split(CHUNK)]
        return torch.cat(parts)

    def accuracy(self, member: bool) -> float:
        """Return the share of right answers among the candidates of one set."""
        right = self.outputs.argmax(1) == self.candidates.labels.argmax(1)
        return float(right[self.candidates.member == member].double().mean())

    def view(self, params: Params) -> View:
        """Return the view of a client who was sent `params`."""
        wire, client = Wire(keep=True), CURIOUS_CLIENT.client
        assert client is not None  # it is one client
        wire.post(-1, 0, 0, SERVER, [client], Model(params))
        return View(CURIOUS_CLIENT, client, self.plan, make_defense("none"), tuple(wire.mail), ())

    def attacked(
        self,
        attacks: Sequence[Attack],
        view: View,
        candidates: Candidates,
        trainer: Trainer | None,
        columns: Tensor | None = None,
    ) -> tuple[AttackResult, ...]:
        """Return the result of each attack on some candidates; columns: their places among the subject's own."""
        known = None if trainer is None else trainer.references(columns)
        challenges = [candidates.challenge(half, known) for half in (0, 1)]
        results, terms = [], Terms(self.plan.spec.classes, self.seeds.master)
        for attack in attacks:
            draws = attack_seed(self.seeds, attack.name, CURIOUS_CLIENT, "final", 1)
            guesses = attack.run(view, challenges, torch.Generator().manual_seed(draws))
            scores = tuple(score_members(candidates, guesses).victims)
            metrics = tuple(Membership().metrics(scores, terms))
            results.append(AttackResult(attack.name, attack.reference, attack.audit == "references", metrics, scores))
        return tuple(results)

    # -- for people ----------------------------------------------------------------------------------------------------
    @cached_property
    def sources(self) -> list[tuple[MemberSet, int]]:
        """The set and the place of each candidate."""
        n = len(self.places.inside)
        places = [
            *((self.members, int(i)) for i in self.places.inside),
            *((self.others, int(i)) for i in self.places.outside),
        ]
        assert len(places) == 2 * n
        return [places[index] for index in self.places.order.tolist()]

    def _class(self, number: int) -> str:
        words = self.members.classes
        return words[number] if number < len(words) else str(number)

    def rows(self) -> tuple[CandidateRow, ...]:
        """Return the candidates for the table of scores."""
        predicted = self.outputs.argmax(1).tolist()
        member, half = self.candidates.member.tolist(), self.candidates.half.tolist()
        return tuple(
            CandidateRow(
                own.names[place], member[i], half[i], self._class(int(own.y[place])), self._class(predicted[i])
            )
            for i, (own, place) in enumerate(self.sources)
        )

    def exposed(self, result: AttackResult) -> tuple[Exposed, ...]:
        """Return the members that an attack scores highest beside the non-members of their half."""
        others = {half: np.sort([s.score for s in result.scores if not s.member and s.half == half]) for half in (0, 1)}
        ranked = []
        for score in result.scores:
            if score.member:
                own = others[score.half]
                ranked.append((1 - float(np.searchsorted(own, score.score)) / len(own), -score.score, score.index))
        rows, shown_members = self.rows(), []
        drawn = modality_in(self.plan).drawn and self.plan.spec.shape[0] in (1, 3)
        for rate, _, index in sorted(ranked)[:SHOWN_MEMBERS]:
            own_set, place = self.sources[index]
            x = own_set.x[place]
            png = sprite([_as_picture(x)[None]], 96) if drawn else None
            values = "" if drawn else own_set.words[place] if own_set.words else _numbers(x)
            row = rows[index]
            shown_members.append(Exposed(row.name, row.label, row.predicted, rate, png, values))
        return tuple(shown_members)


def _as_picture(x: Tensor) -> Any:
    """Return an image [C, H, W] as float32 from 0 to 1, stretched where its values lie elsewhere."""
    low, high = float(x.min()), float(x.max())
    inside = low >= 0 and high <= 1
    return (x if inside or low == high else (x - low) / (high - low)).numpy().astype(np.float32)


def _numbers(x: Tensor, most: int = 12) -> str:
    flat = x.flatten()
    return ", ".join(f"{value:.3g}" for value in flat[:most].tolist()) + (", ..." if len(flat) > most else "")


# -- reference models, trained by the user's function ------------------------------------------------------------------
class Trainer:
    """Trains networks by a user's function: the reference models, and a control that never saw the members.

    Each candidate is in half of the reference models. Members that are no candidates are in all of them, so that each
    is trained on as many examples as the model was.
    """

    def __init__(
        self,
        train: TrainingFunction,
        subject: AttackedModel,
        references: int,
        output: OutputName | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._train, self._subject, self._references, self._say = train, subject, references, say
        self._output = output

    def trained(self, x: Tensor, y: Tensor, number: int) -> tuple[HeldSpec, Params]:
        """Return the network that the user's function trains on x and y, in eval mode; number: of its draws.

        UsageError: it raises, or its network does not fit.
        """
        subject, seed = self._subject, self._subject.seeds.seed("reference model", number) % 2**31
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            takes_seed = "seed" in inspect.signature(self._train).parameters
            try:
                module = self._train(x.clone(), y.clone(), **({"seed": seed} if takes_seed else {}))
            except Exception as cause:
                raise UsageError(
                    f"The training function failed on {count_of(len(y), 'example')} ({type(cause).__name__}: "
                    f"{because(cause)}); it must take inputs and classes, and return a trained network."
                ) from cause
        if not isinstance(module, nn.Module):
            raise UsageError(f"The training function gave {shown(module, 60)}; it must return a trained nn.Module.")
        spec = evaluated_network(module, subject.members, subject.others, self._output)
        if spec.classes != subject.plan.spec.classes:
            raise UsageError(
                f"The training function gave a network of {spec.classes} classes, and the model has "
                f"{subject.plan.spec.classes}; it must train networks like the model."
            )
        return spec, moved(spec.start, subject.device)

    @cached_property
    def _runs(self) -> References:
        """The outputs of all reference models on all candidates and on the population."""
        subject = self._subject
        candidates, first = subject.candidates, len(subject.others.y) - subject.population
        keep = reference_halves(len(candidates.x), self._references, subject.seeds)
        base = torch.ones(len(subject.members.y), dtype=torch.bool)
        base[subject.places.inside] = False
        labels = candidates.labels.argmax(1)
        copies = augmentations(candidates.x, AUGMENTATIONS if modality_in(subject.plan).smooth else 1)
        z = subject.others.x[first:]
        outputs, population = [], []
        for number, kept in enumerate(keep):
            self._say(f"reference model {number + 1} of {len(keep)}")
            x = torch.cat([subject.members.x[base], candidates.x[kept]])
            spec, params = self.trained(x, torch.cat([subject.members.y[base], labels[kept]]), number)
            reference = replace(subject, plan=replace(subject.plan, spec=spec))
            outputs.append(reference.answers(params, copies.flatten(0, 1)).unflatten(0, copies.shape[:2]))
            population.append(reference.answers(params, z))
        y = one_hot(subject.others.y[first:], subject.plan.spec.classes).float()
        return References(keep, torch.stack(outputs), y, z, torch.stack(population))

    def references(self, columns: Tensor | None = None) -> References:
        """Return the reference models' outputs on the candidates, or on those at some places; trained once."""
        known = self._runs
        if columns is None:
            return known
        return replace(known, keep=known.keep[:, columns], outputs=known.outputs[:, :, columns])
