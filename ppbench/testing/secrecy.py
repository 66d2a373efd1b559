"""Properties of secrecy: views reach neither victims' data nor other clients' secrets, and survive the disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.adversary.replay import replayed_evidence
from ppbench.base.registry import load
from ppbench.base.tree import Tree, leaves
from ppbench.federation import secagg
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import Evidence
from ppbench.federation.shared_keys import SharedKeys
from ppbench.federation.view import Transcript, View
from ppbench.federation.wire import SERVER, Slot
from ppbench.testing.findings import NotAsked
from ppbench.testing.scene import (
    DefenseTrial,
    empty_folder,
    largest_difference,
    registered,
    same_tensors,
    scene_victims,
)

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
    sent = [letter.message for letter in (*run.wire.mail, *transcript.mail) if letter.sender == SERVER]
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
    reader = replace(load("attacks", READER)(), budget=2, restarts=0)
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
