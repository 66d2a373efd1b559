"""The conformance battery of defenses: the properties that every defense must have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import mean, stdev

import torch
from scipy import stats
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.adversary.replay import replayed_evidence
from ppbench.adversary.two_worlds import world_report
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, leaves
from ppbench.federation import secagg
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation, run_many
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Layout, Local, Opt, Plan
from ppbench.federation.secagg import SharedKeys
from ppbench.federation.view import Transcript, View
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import initial, net_spec
from ppbench.records.scores import Scalar
from ppbench.testing import mechanics
from ppbench.testing.small_federation import (
    CLASSES,
    SHAPE,
    SHARD,
    DefenseTrial,
    Inconclusive,
    NotAsked,
    Property,
    PropertyResult,
    all_digits,
    ask_all,
    base_plan,
    digit_shards,
    empty_folder,
    largest_difference,
    plan_for,
    raise_failures,
    registered,
    same_tensors,
    scene_victims,
    with_parameters,
)

# -- Properties of learning: a defense has no effect at its "off" level, and a monotone one along its control --

LEARN_ROUNDS = 12
SEEDS = range(8)
TRAIN = 400
"""Training examples of all clients, drawn for each seed from the first `POOL` digits; the others are test examples."""
POOL = 1300
FALSE_ALARM = 0.01
"""Probability of a false direction, over all pairs of values together."""
OFF_TOLERANCE = 1e-4
"""Largest distance from the weights of `none` at the off level, relative to the change of these in training."""


def off_level_equals_none(trial: DefenseTrial) -> Iterator[str]:
    """Check that the defense at its off level trains as `none` does, to float tolerance.

    With equal shards, full batches and plain SGD, so that nothing amplifies rounding.
    """
    if trial.off is None:
        raise NotAsked("no parameters at which it does nothing are named; give off={...} if there is such a level")
    level = with_parameters(trial.defense, dict(trial.off))
    setting = ", ".join(f"{name}={value!r}" for name, value in trial.off)
    for upload in ("gradient", "delta"):
        local = Local("gradient", 1, SHARD, Opt("sgd", 0.1)) if upload == "gradient" else Local("delta", 2, SHARD)
        local = replace(local, opt=Opt("sgd", 0.1))
        plan = replace(plan_for(trial.defense, base_plan()), local=local, server_opt=Opt("sgd", 1.0))
        start = initial(plan.spec, 1)
        try:
            ends = [_weights(defense, plan, start) for defense in (level, load_plugin("defenses", "none")())]
        except UsageError as refusal:
            raise NotAsked(f"it refuses the plan of the comparison ({refusal})") from refusal
        layout = Layout.of(start)
        defended, undefended = (layout.pack(end) for end in ends)
        distance = float((defended - undefended).norm() / (undefended - layout.pack(start)).norm())
        if not distance <= OFF_TOLERANCE:
            yield (
                f"at its off level ({setting}) two rounds of {upload} uploads end {distance:.2g} of their length away "
                f"from where `none` ends; at most {OFF_TOLERANCE:g} is right there"
            )


def _weights(defense: Defense, plan: Plan, start: Params) -> Params:
    run = Federation(defense, plan, digit_shards([SHARD] * plan.clients), Seeds(0))
    run.start(start)
    run.run(2)
    return run.parties.server.params


def control_moves_accuracy_one_way(trial: DefenseTrial) -> Iterator[str]:
    """Check that accuracy is monotone over the control grid; `Inconclusive` if no pair of values differs.

    The smallest, the middle and the largest value of the quick grid, eight seeds each, paired by seed: a difference
    counts if a paired t-test finds it at level 0.01 over all pairs (Bonferroni).
    """
    defense = trial.defense
    if defense.control is None:
        raise NotAsked("it has no control parameter")
    grid = sorted(set(defense.grids.get("quick", ())))
    if len(grid) < 2:
        raise NotAsked("its quick grid has fewer than 2 values")
    values = [grid[i] for i in sorted({0, len(grid) // 2, len(grid) - 1})]
    try:
        by_value = [accuracies(with_parameters(defense, {defense.control: value})) for value in values]
    except UsageError as refusal:
        raise NotAsked(f"it refuses the federation of the comparison ({refusal})") from refusal
    ways = {
        d
        for a, b in combinations(range(len(values)), 2)
        if (d := accuracy_trend(by_value[a], by_value[b], len(values)))
    }
    means = ", ".join(f"{mean(f):.1%} at {v:g}" for v, f in zip(values, by_value, strict=True))
    if len(ways) == 2:
        yield (
            f"accuracy falls and rises along {defense.control} ({means}; means of {len(SEEDS)} seeds); a control "
            "parameter trades accuracy for privacy one way"
        )
    if not ways:
        raise Inconclusive(
            f"accuracy along {defense.control} is {means}: after {LEARN_ROUNDS} rounds of a small federation no two of "
            f"{len(SEEDS)} seeds' means differ by more than chance may make them"
        )


def accuracies(defense: Defense) -> list[float]:
    """Return the accuracy on the 497 last digits after 12 rounds, for each seed; chance where training diverged."""
    plan, data = _learning(defense), all_digits()
    runs = []
    for seed in SEEDS:
        order = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed))[:TRAIN].chunk(plan.clients)
        equal = min(len(part) for part in order)
        shards = {c: Data(data.x[part[:equal]], data.y[part[:equal]]) for c, part in enumerate(order)}
        run = Federation(defense, plan, shards, Seeds(seed))
        run.start(initial(plan.spec, seed))
        runs.append(run)
    finished = run_many(runs, LEARN_ROUNDS)
    test = Data(data.x[POOL:], data.y[POOL:])
    return [run.accuracy(test) if ok else 1 / plan.spec.classes for run, ok in zip(runs, finished, strict=True)]


def _learning(defense: Defense) -> Plan:
    """Return a plan that learns digits within a few rounds, in the federation of the defense's setting."""
    setting, plan = defense.setting.get("quick", {}), plan_for(defense, base_plan())
    opt = Opt(setting.get("optimizer", "adam"), setting.get("lr", 5e-3), setting.get("momentum", 0.0))
    if "model" not in setting:
        plan = replace(plan, spec=net_spec("mlp", SHAPE, CLASSES))
    if plan.local.upload == "gradient":
        return replace(plan, local=replace(plan.local, batch=TRAIN // plan.clients), server_opt=opt)
    return replace(plan, local=replace(plan.local, opt=opt))


def accuracy_trend(first: Sequence[float], second: Sequence[float], values: int) -> int:
    """Return 1 if accuracy, paired by seed, rises significantly from `first` to `second`, -1 if it falls, else 0.

    values: number of values whose pairs are all tested.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    pairs = values * (values - 1) / 2
    error = max(stdev(differences), 1 / (1797 - POOL)) / len(differences) ** 0.5  # never surer than one test example
    probability = 2 * stats.t.sf(abs(mean(differences)) / error, len(differences) - 1)
    if probability * pairs >= FALSE_ALARM:
        return 0
    return 1 if mean(differences) > 0 else -1


# -- Properties of secrecy: views reach neither victims' data nor other clients' secrets, and survive the disk --

READER = "idlg"
"""The attack that runs on a view from disk; any that uses evidence would do."""
STEP_TOLERANCE = 1e-3
"""Largest difference of two readings of one upload, as a share of the largest entry, due to rounding in float32."""


def secrets_of(state: Tree, known_to: int | None) -> Iterator[Tensor]:
    """Yield the tensors of a client's state that party `known_to` must not know, without public parts of keys."""
    if isinstance(state, secagg.Keys):
        yield state.private[None]
        others = [c for c in range(len(state.shared)) if c != known_to and bool(state.shared[c].any())]
        yield state.shared[others]
    elif isinstance(state, secagg.NeighborKeys):
        yield state.private[None]
        yield state.shared[state.clients != (SERVER if known_to is None else known_to)]
    elif isinstance(state, SharedKeys):
        yield state.private[None]
        if known_to != SERVER:
            yield state.shared[None]
    elif isinstance(state, Tensor):
        yield state
    else:
        parts = state.values() if isinstance(state, dict) else state if isinstance(state, tuple | list) else None
        fields = getattr(state, "__dataclass_fields__", ())
        for part in [getattr(state, name) for name in fields] if parts is None else parts:
            yield from secrets_of(part, known_to)


def telling(secret: Tensor) -> bool:
    """Return whether a tensor is recognizable: a constant one is found anywhere."""
    return secret.numel() > 0 and bool((secret != secret.flatten()[0]).any())


def client_secrets(run: Federation, transcript: Transcript, curious: int | None) -> list[Tensor]:
    """Return the secrets in clients' current states that the server never sent in the recorded mail."""
    every = (*run.wire.mail, *transcript.mail, *transcript.set_up)
    sent = [letter.message for letter in every if letter.sender == SERVER]
    secrets = []
    for client, state in enumerate(run.parties.clients):
        if client == curious:
            continue
        for secret in secrets_of(state, curious):
            if telling(secret) and not leaks((run.parties.server.params, sent), [secret]):
                secrets.append(secret)
    return secrets


def no_view_reaches_a_secret(trial: DefenseTrial, threat: str, after: int = 0) -> Iterator[str]:
    """Check that no object path leads from a view, `after` so many rounds, to victims' images or others' secrets."""
    run = trial.federate()
    run.wire.keep = True
    run.run(after)
    victims = scene_victims(run, threat)
    transcript = run.probe(victims.data)
    view = transcript.view(threat, own=victims.own)
    if not leaves([letter.message for letter in view.mail]):
        raise NotAsked(f"the view of {threat} holds no message with tensors")
    curious = view.party
    knowledge = (view, view.defense.evidence(view), victims.challenges())
    leaked = leaks(knowledge, [data.x for slot, data in victims.data.items() if slot.client != curious])
    if leaked:
        yield f"from the view of {threat} a victim's images are reached ({leaked[0]}); send no tensor that holds them"
    leaked = leaks(knowledge, client_secrets(run, transcript, curious))
    if leaked:
        yield (
            f"from the view of {threat} what a client keeps in its state is reached ({leaked[0]}); what is secret "
            "stays in the state, and messages carry only what the protocol publishes"
        )


@dataclass(frozen=True)
class OtherGenerators(Seeds):
    """Seeds by which clients have other generators, and the same secret draws."""

    def generator(self, role: str, *index: int | str) -> torch.Generator:
        """Return another generator for a client; its number is the last of `index`."""
        other = role == "party" and index[-1] != SERVER
        return super().generator("other", role, *index) if other else super().generator(role, *index)


def torch_draws_no_secret(trial: DefenseTrial) -> Iterator[str]:
    """Check that what clients keep, and send of one example, does not change with their torch generators."""
    worlds = []
    for seeds in (Seeds(0), OtherGenerators(0)):
        run = trial.federate(start=False)
        run.seeds = seeds
        run.start(initial(run.plan.spec, 1))
        mail = run.probe(scene_victims(run, batch=1).data).mail
        worlds.append((run.parties.clients, [letter.message for letter in mail if letter.sender != SERVER]))
    if not same_tensors(*worlds):
        yield (
            "what clients keep or send changes with ctx.generator, a Mersenne twister: from enough of its numbers in "
            "an upload all others follow (the attack `noise_replay`); draw secrets from ctx.secret, as "
            "ctx.secret.normal(shape)"
        )


def a_view_survives_the_disk(trial: DefenseTrial) -> Iterator[str]:
    """Check that a view read back from disk is equal, and gives the same guess."""
    run = trial.federate()
    victims = scene_victims(run)
    view = run.probe(victims.data).view("server/1")
    with registered("defenses", type(trial.defense)), empty_folder() as home:
        view.save(home / "view")
        again = View.load(home / "view")
    if (again.threat, again.party, again.plan, again.defense) != (view.threat, view.party, view.plan, view.defense):
        yield f"the view from disk is of {again.defense!r}, not of {view.defense!r}; parameters must be plain values"
    if not same_tensors([e.message for e in view.mail], [e.message for e in again.mail]):
        yield "messages changed on their way to disk and back; make them of tensors, in classes registered with @node"
    first, second = view.defense.evidence(view), again.defense.evidence(again)
    if [e.unit for e in first] != [e.unit for e in second] or not same_tensors(
        [e.observed for e in first], [e.observed for e in second]
    ):
        yield "the evidence of the view from disk is another; make it of the view and of nothing else"
        return
    if len({id(e.simulate) for e in first}) != len({id(e.simulate) for e in second}):
        yield "evidence shares `simulate` in memory only; key it by the broadcast's identity, which survives the disk"
    # Two evaluations: kernels may round the last bit differently, and a search makes that large.
    reader = replace(load_plugin("attacks", READER)(), budget=2, restarts=0)
    guesses, guesses_again = (
        reader.run(v, victims.challenges(), torch.Generator().manual_seed(0)) for v in (view, again)
    )
    if not all(
        torch.allclose(a.x, b.x, atol=1e-4, equal_nan=True) for a, b in zip(guesses, guesses_again, strict=True)
    ):
        yield "an attack guesses another image on the view from disk; nothing but the view may decide"


def evidence_is_what_the_server_steps_on(trial: DefenseTrial) -> Iterator[str]:
    """Check that the defense's evidence, by default from `decoded`, is the update that its server steps on."""
    run = trial.federate()
    view = run.probe(scene_victims(run).data).view("server/1")
    readings = defaultdict[tuple[Slot, ...], list[Evidence]](list)
    for evidence in replayed_evidence(view):
        if len(evidence.unit) == 1 and evidence.measure == "squares":
            readings[evidence.unit].append(evidence)
    if not readings:
        raise NotAsked("its server reads no single client's messages as one update")
    if run.defense.sums:
        yield "it says that only sums can be read, but its server reads each client's upload alone; let `sums` be False"
        return
    own = {e.unit: e for e in view.defense.evidence(view)}
    if own.keys() != readings.keys():
        yield f"its server reads {len(readings)} clients' uploads, its evidence {len(own)}; let `decoded` return all"
        return
    if any(e.weight is not None and not any(bool((w > 0).any()) for w in e.weight.values()) for e in own.values()):
        yield "its evidence weighs every entry with 0, so that no attack looks at what was sent; give what is known"
    difference = max(
        min(largest_difference(own[unit].observed, e.observed) for e in candidates)
        for unit, candidates in readings.items()
    )
    largest = max(
        float(leaf.abs().max()) for candidates in readings.values() for leaf in leaves(candidates[0].observed)
    )
    if difference > STEP_TOLERANCE * largest:
        yield (
            f"its evidence differs by up to {difference:.2g} from the step that its server takes on the same upload, "
            f"whose largest entry is {largest:.2g}; let `aggregate` step on what `decoded` returns"
        )


def nothing_else_reaches_the_server(trial: DefenseTrial) -> Iterator[str]:
    """Check by the two-world test that the server receives no more than sums, or what noise hides, where it says so."""
    run = trial.federate()
    report = world_report(run, run.parties.server.params, 2)
    if report.refusal:
        yield f"{report.refusal}; the server's code must do the same with the same messages and draws"
    for channel in report.channels:
        yield f"{channel.sentence}; send what the protocol declares, and mask by secrets that no message holds"


DEFENSE_PROPERTIES: Mapping[str, Property[DefenseTrial]] = {
    "declares_itself": mechanics.declares_itself,
    "one_seed_one_result": mechanics.one_seed_one_result,
    "resumes": partial(mechanics.resumes, schedule="parallel"),
    "resumes_round_robin": partial(mechanics.resumes, schedule="round_robin"),
    "probes_move_nothing": mechanics.probes_move_nothing,
    "probes_are_steps_of_training": mechanics.probes_are_steps_of_training,
    "loop_equals_vmap": mechanics.loop_equals_vmap,
    "bytes_are_counted": mechanics.bytes_are_counted,
    "messages_keep_their_form": mechanics.messages_keep_their_form,
    "all_goes_over_the_wire": mechanics.all_goes_over_the_wire,
    "secrets_from_the_server": partial(no_view_reaches_a_secret, threat="server/1"),
    "secrets_from_a_client": partial(no_view_reaches_a_secret, threat="client/1"),
    "secrets_from_a_listener": partial(no_view_reaches_a_secret, threat="eavesdropper/1"),
    "secrets_after_training": partial(no_view_reaches_a_secret, threat="server/1", after=2),
    "torch_draws_no_secret": torch_draws_no_secret,
    "a_view_survives_the_disk": a_view_survives_the_disk,
    "evidence_is_what_the_server_steps_on": evidence_is_what_the_server_steps_on,
    "nothing_else_reaches_the_server": nothing_else_reaches_the_server,
    "off_level_equals_none": off_level_equals_none,
    "control_moves_accuracy_one_way": control_moves_accuracy_one_way,
}
"""The properties by name. `tests/test_defense_contract.py` checks every defense of ppbench."""


def check_defense(
    defense: type[Defense] | Defense,
    *,
    off: Mapping[str, Scalar] | None = None,
    only: Collection[str] = (),
    skip: Mapping[str, str] | None = None,
) -> tuple[PropertyResult, ...]:
    """Check all of `DEFENSE_PROPERTIES` of a defense, installed or not, in seconds; return one finding per property.

    defense: the class, for its default parameters, or an instance; off: parameters at which it does nothing, as
    {"sigma": 0.0}, and must train as `none` does; only: names of the properties to check; skip: properties that it
    breaks on purpose, with the reason.
    AssertionError: a line for each property that fails, with what happened and what is right. UsageError: no defense,
    or an unknown property.
    """
    instance = defense() if isinstance(defense, type) and issubclass(defense, Defense) else defense
    if not isinstance(instance, Defense):
        raise UsageError(f"{defense!r} is no defense; give a subclass of ppbench.Defense, or an instance of one.")
    trial = DefenseTrial(instance, None if off is None else tuple(off.items()))
    findings = ask_all(trial, DEFENSE_PROPERTIES, only, skip or {})
    raise_failures(f"Defense {getattr(instance, 'name', type(instance).__name__)!r}", findings)
    return findings
