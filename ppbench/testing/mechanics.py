"""Properties of a protocol's mechanics: declarations, one seed one result, checkpoints, backends, the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from ppbench.base.errors import UsageError
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Tree, encode, leaves, nbytes
from ppbench.federation.contract import Server
from ppbench.federation.drive import Drive, client_map
from ppbench.federation.engine import Federation, ProbeKind
from ppbench.federation.plan import Local
from ppbench.federation.wire import SERVER, Slot, Wire
from ppbench.nets.net import initial
from ppbench.testing.small_federation import (
    SHARD,
    DefenseTrial,
    NotAsked,
    empty_folder,
    largest_difference,
    same_tensors,
    scene_victims,
    unnamed,
    with_parameters,
)

TRAIN_ROUNDS = 2
PROBE_SESSIONS = 8
"""Number of probe sessions that are compared with training."""


def declares_itself(trial: DefenseTrial) -> Iterator[str]:
    """Check that name, parameters, control parameter and grids are valid for evaluations and records."""
    defense = trial.defense
    yield from unnamed(defense, {field.name: getattr(defense, field.name) for field in dataclasses.fields(defense)})
    if defense.control is None:
        return
    if not hasattr(defense, defense.control):
        yield f"its control parameter {defense.control!r} is none of its fields"
        return
    if len(set(defense.grids.get("quick", ()))) < 2:
        yield "its 'quick' grid has fewer than 2 values of the control parameter, so that no trade-off is seen"
    for value in {value for grid in defense.grids.values() for value in grid}:
        try:
            with_parameters(defense, {defense.control: value}).check(trial.plan)
        except UsageError as error:
            yield f"it refuses a value of its own grid ({error}); a grid holds values that can be used"


def one_seed_one_result(trial: DefenseTrial) -> Iterator[str]:
    """Check that all draws come from the context: equal seeds agree bit for bit, others do not."""
    before = torch.get_rng_state()
    runs = [trial.federate(seed) for seed in (0, 0, 1)]
    for run in runs:
        if not run.run(TRAIN_ROUNDS):
            yield f"training diverged within {TRAIN_ROUNDS} rounds; it must stay finite on ordinary data"
            return
    first, again, _ = (run.parties for run in runs)
    if not same_tensors((first.server, first.clients), (again.server, again.clients)):
        difference = largest_difference((first.server, first.clients), (again.server, again.clients))
        yield f"two runs of one seed differ (by up to {difference:.2g}); draw from ctx.secret and ctx.generator alone"
    learnt = [trial.defense.own_models(run.parties.clients) or run.parties.server.params for run in runs]
    if same_tensors(learnt[0], learnt[2]):
        yield "two seeds give the same weights; draw from ctx.secret, which depends on the seed"
    if not torch.equal(before, torch.get_rng_state()):
        yield "torch's global generator has moved; draw from ctx.secret, for others rely on the global one"


def resumes(trial: DefenseTrial, schedule: str) -> Iterator[str]:
    """Check that a run from a checkpoint continues bit for bit, with the same count of bytes."""
    try:
        whole = trial.federate(schedule=schedule)
    except UsageError as refusal:
        raise NotAsked(str(refusal)) from refusal
    whole.run(3)
    half = trial.federate(schedule=schedule)
    half.run(1)
    rest = trial.federate(start=False, schedule=schedule)
    with empty_folder() as home:
        half.save(home)
        rest.restore(home)
    rest.run(3)
    if not same_tensors((whole.parties.server, whole.parties.clients), (rest.parties.server, rest.parties.clients)):
        yield (
            f"under schedule {schedule}, three rounds differ from one, a checkpoint and two more; keep all that lasts "
            "in the server's or client's state, as tensors"
        )
    if (whole.wire.up, whole.wire.down, whole.setup_up) != (rest.wire.up, rest.wire.down, rest.setup_up):
        yield f"under schedule {schedule}, the bytes counted after a checkpoint differ from those of one run"


def probes_move_nothing(trial: DefenseTrial) -> Iterator[str]:
    """Check that a probe, and an observed round, do not change training."""
    probed, plain = trial.federate(), trial.federate()
    for run in (probed, plain):
        run.run(1)
    probed.probe(scene_victims(probed).data)
    probed.observe()
    for run in (probed, plain):
        run.run(2)
    parties = [(run.parties.server, run.parties.clients) for run in (probed, plain)]
    if not same_tensors(*parties):
        difference = largest_difference(*parties)
        amount = f"by up to {difference:.2g}"
        yield f"a probe changed the training after it ({amount}); never change a state in place, return one"
    if probed.wire.up != plain.wire.up:
        yield "a probe changed the count of training's bytes"


@dataclasses.dataclass(frozen=True)
class OneDraw(Seeds):
    """Seeds by which a party draws the same in every session; sessions keep their own names."""

    def generator(self, role: str, *index: int | str) -> torch.Generator:
        """Return the generator of a party's purpose, round and step; index: purpose, session, and these."""
        return super().generator(role, *index[:1], *index[2:])

    def secret(self, role: str, *index: int | str) -> SecretDraws:
        """Return the secret draws of a party's purpose, round and step; index: purpose, session, and these."""
        return super().secret(role, *index[:1], *index[2:])


def probes_are_steps_of_training(trial: DefenseTrial) -> Iterator[str]:
    """Check that equal states, batches and draws give equal bits in training and in a probe.

    Masks differ between sessions: if uploads differ, the server's next broadcast must be equal, to float tolerance.
    """
    local, compared = replace(trial.plan.local, batch=SHARD), False
    kinds: tuple[tuple[Literal["delta", "gradient"], ProbeKind], ...] = ("delta", "local"), ("gradient", "gradient")
    for upload, kind in kinds:
        try:
            run = trial.federate(start=False, local=replace(local, upload=upload), schedule="parallel")
            run.seeds = OneDraw(0)
            run.start(initial(run.plan.spec, 1))
        except UsageError:
            continue
        sent, ended = _round_of_training(run)
        mail = run.probe(
            {Slot(p, c): shard for p in range(PROBE_SESSIONS) for c, shard in run.shards.items()}, kind
        ).mail
        compared = True
        probes = [[letter for letter in mail if letter.probe == probe] for probe in range(PROBE_SESSIONS)]
        uploads = [[letter.message for letter in some if letter.receiver == SERVER] for some in probes]
        if any(
            not same_tensors(sent, u) and _excess(ended, p[-1].message) > 1
            for u, p in zip(uploads, probes, strict=True)
        ):
            yield (
                f"with {upload} uploads a probe gives other bits than training does from the same state, batch and "
                "draws; nothing may depend on the session, on how many examples there are, or on the plan's upload"
            )
    if not compared:
        raise NotAsked("it refuses both kinds of uploads in this federation")


def _round_of_training(run: Federation) -> tuple[list[Tree], Tree]:
    """Return the clients' messages in a round of training, and the server's broadcast after it; `run` is unchanged."""
    parties, wire = run.parties.fork(), Wire(keep=True)
    drive = run.drive(run.plan, run.session, -1, run.round + 1, wire, parties, run.shards)
    drive.run(drive.begin(range(run.plan.clients)))
    _, message = run.defense.broadcast(drive.context(SERVER, drive.step), parties.server)
    return [letter.message for letter in wire.mail if letter.receiver == SERVER], message


def loop_equals_vmap(trial: DefenseTrial) -> Iterator[str]:
    """Check that `compute` gives the same, to float tolerance, client by client and mapped over clients."""
    if not trial.defense.mappable:
        raise NotAsked("its clients always run in a loop (mappable is False)")
    for local in (trial.plan.local, Local("gradient", batch=48)):
        run = trial.federate(local=local)
        _, message = run.defense.broadcast(run.context("real", 1, 0, SERVER), run.parties.server)
        prepared = {
            c: run.defense.prepare(run.context("real", 1, 0, c), run.parties.clients[c], message, shard)
            for c, shard in run.shards.items()
        }
        jobs = {c: job for c, job in prepared.items() if job is not None}
        if not jobs:
            raise NotAsked("clients compute nothing on the first broadcast")
        one, many = (client_map(backend, run.defense, run.plan, jobs) for backend in ("loop", "vmap"))
        worst = max((_excess(one[client], many[client]) for client in jobs), default=0.0)
        if worst > 1:
            yield (
                f"with {local.upload} uploads loop and vmap differ by {worst:.3g} tolerances; keep `compute` pure: "
                "tensors in and out, no draws (they belong into `draw`), no branch on values"
            )


def _excess(one: Tree, many: Tree) -> float:
    """Return the largest difference in units of the tolerance: 1e-10 of float64, else 2e-3 relative and 2e-5."""
    worst = 0.0
    for a, b in zip(leaves(one), leaves(many), strict=True):
        # Adam divides by the root of a tiny second moment: rounding grows with the steps.
        relative, absolute = (1e-10, 1e-12) if a.dtype == torch.float64 else (2e-3, 2e-5)
        if a.numel():
            difference = (a.double() - b.double()).abs() / (absolute + relative * b.double().abs())
            worst = max(worst, float(difference.nan_to_num(float("inf")).max()))
    return worst


def uncounted(message: Tree) -> list[str]:
    """Return the values in `message` that are no tensors, whose bytes are not counted, in words."""
    try:
        structure: Any = encode(message, {}, {})
    except TypeError as error:
        return [str(error)]
    uncounted_values, queue = [], [structure]
    while queue:
        part = queue.pop()
        if isinstance(part, Mapping):
            if part.get("value") is not None:
                uncounted_values.append(f"the value {part['value']!r}")
            queue += list(part.values())
        elif isinstance(part, list):
            queue += part
    return uncounted_values


def bytes_are_counted(trial: DefenseTrial) -> Iterator[str]:
    """Check that messages consist of tensors, whose bytes count, and that clients send any."""
    run = trial.federate()
    mail = run.probe(scene_victims(run, count=4).data).mail
    for sender in {letter.sender for letter in mail}:
        party = "the server" if sender == SERVER else f"client {sender}"
        uncounted_parts = [text for letter in mail if letter.sender == sender for text in uncounted(letter.message)]
        if uncounted_parts:
            part = uncounted_parts[0]
            yield f"{party} sends {part}, of which no byte is counted; make every leaf of a message a tensor"
    if any(letter.nbytes != nbytes(letter.message) for letter in mail):
        yield "a letter's size is not that of its tensors"
    before = run.wire.up
    run.run(1)
    if run.wire.up == before:
        moved = not same_tensors(run.parties.server.params, initial(run.plan.spec, 1))
        if not moved and run.defense.own_models(run.parties.clients):
            raise NotAsked("its clients keep models of their own, and send nothing")
        moved_words = " and the model has moved all the same" if moved else ""
        yield f"clients sent no byte in a round{moved_words}; send updates over the wire, by `reply`"


def messages_keep_their_form(trial: DefenseTrial) -> Iterator[str]:
    """Check that clients of one role send trees of one form and dtypes, and that the server's weights keep theirs."""
    run = trial.federate()
    start = run.parties.server.params
    forms: dict[tuple[int, str], set[str]] = {}
    transcript = run.probe(scene_victims(run, count=8).data)
    roles = transcript.roles()
    for letter in transcript.mail:
        if letter.sender != SERVER:
            role = next((name for slot, name in roles.items() if slot.client == letter.sender), "")
            form = str([(str(leaf.dtype), leaf.dim()) for leaf in leaves(letter.message)])
            forms.setdefault((letter.step, role), set()).add(f"{type(letter.message).__name__} {form}")
    for (step, role), observed_forms in forms.items():
        if len(observed_forms) > 1:
            part = f" as {role}" if role else ""
            unlike = " and ".join(sorted(observed_forms))
            yield f"in step {step} clients{part} send unlike messages ({unlike}); name them `roles`"
    run.run(TRAIN_ROUNDS)
    end = run.parties.server.params
    if {n: (v.shape, v.dtype) for n, v in start.items()} != {n: (v.shape, v.dtype) for n, v in end.items()}:
        yield "the server's weights changed their names, shapes or dtypes in training; return them as they came"


def all_goes_over_the_wire(trial: DefenseTrial) -> Iterator[str]:
    """Check that the server's new state follows from its old one and the letters, by replaying the letters."""
    run, other = trial.federate(0), trial.federate(1)
    parties = run.parties.fork()
    drive = run.drive(run.plan, run.session, -1, 1, Wire(keep=True), parties, run.shards)
    drive.run(run.defense.round(drive.context(SERVER, 0), parties.server, range(run.plan.clients)))
    other.run(1)  # whatever a protocol keeps outside of states now is another run's
    if not same_tensors(parties.server, _replayed(run, drive)):
        yield (
            "the same letters gave the server another state when they were played to it again; keep nothing in the "
            "class, the instance or the module: states and messages are the only memory"
        )


def _replayed(run: Federation, drive: Drive) -> Server:
    """Return the server's state after a replay of the letters of `drive`, without any client."""
    coroutine = run.defense.round(drive.context(SERVER, 0), run.parties.server, range(run.plan.clients))
    answers: dict[int, Tree] | None = None
    step = 0
    while True:
        try:
            coroutine.send(answers)  # type: ignore[arg-type]  # None starts a coroutine
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        answers = {m.sender: m.message for m in drive.wire.mail if m.step == step and m.sender != SERVER}
        step += 1
