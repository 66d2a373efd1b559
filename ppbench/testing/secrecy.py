"""What must stay out of reach: victims' data, other clients' secrets; and a view on disk is the view."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.adversary.replay import replayed
from ppbench.base.registry import load
from ppbench.base.tree import Tree, leaves
from ppbench.federation import secagg
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import Evidence
from ppbench.federation.shared_keys import SharedKeys
from ppbench.federation.view import Transcript, View
from ppbench.federation.wire import SERVER, Slot
from ppbench.testing.findings import NotAsked
from ppbench.testing.scene import Trial, apart, folder, installed, same, victims_of

READER = "idlg"
"""The attack that reads a view from disk; any would do that looks at evidence."""
STEPPED = 1e-3
"""Share of the largest entry by which two readings of one upload may differ: float32 weights that small steps move."""


def secrets_of(state: Tree, known_to: int | None) -> Iterator[Tensor]:
    """Yield what a client's state hides from others, and from party `known_to`: not the public parts of its keys."""
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
    """Return whether a tensor could be told from another: rows of one and the same value are found anywhere."""
    return secret.numel() > 0 and bool((secret != secret.flatten()[0]).any())


def client_secrets(run: Federation, transcript: Transcript, curious: int | None) -> list[Tensor]:
    """Return what clients' present states hold and the server never sent, in training as far as mail was kept."""
    told = [letter.message for letter in (*run.wire.mail, *transcript.mail) if letter.sender == SERVER]
    found = []
    for client, state in enumerate(run.parties.clients):
        if client == curious:
            continue
        for secret in secrets_of(state, curious):
            if telling(secret) and not leaks((run.parties.server.params, told), [secret]):
                found.append(secret)
    return found


def no_view_reaches_a_secret(trial: Trial, threat: str, after: int = 0) -> Iterator[str]:
    """Ask whether victims' images or others' secrets can be walked to from a view, `after` so many rounds."""
    run = trial.federate()
    run.wire.keep = True
    run.run(after)
    victims = victims_of(run, threat)
    transcript = run.probe(victims.data)
    view = transcript.view(threat, own=victims.own)
    if not leaves([letter.message for letter in view.mail]):
        raise NotAsked(f"the view of {threat} holds no message that could be looked into")
    curious = view.party
    held = (view, view.defense.evidence(view), victims.challenges())
    found = leaks(held, [data.x for slot, data in victims.data.items() if slot.client != curious])
    if found:
        yield f"from the view of {threat} a victim's images are reached ({found[0]}); send no tensor that holds them"
    found = leaks(held, client_secrets(run, transcript, curious))
    if found:
        yield (
            f"from the view of {threat} what a client keeps in its state is reached ({found[0]}); what is secret stays "
            "in the state, and messages carry only what the protocol publishes"
        )


def a_view_survives_the_disk(trial: Trial) -> Iterator[str]:
    """Ask whether a view that was written and read again says the same, and is attacked with the same guess."""
    run = trial.federate()
    victims = victims_of(run)
    view = run.probe(victims.data).view("server/1")
    with installed("defenses", type(trial.defense)), folder() as home:
        view.save(home / "view")
        again = View.load(home / "view")
    if (again.threat, again.party, again.plan, again.defense) != (view.threat, view.party, view.plan, view.defense):
        yield f"the view from disk is of {again.defense!r}, not of {view.defense!r}; parameters must be plain values"
    if not same([e.message for e in view.mail], [e.message for e in again.mail]):
        yield "messages changed on their way to disk and back; make them of tensors, in classes registered with @node"
    first, second = view.defense.evidence(view), again.defense.evidence(again)
    if [e.unit for e in first] != [e.unit for e in second] or not same(
        [e.observed for e in first], [e.observed for e in second]
    ):
        yield "the evidence of the view from disk is another; make it of the view and of nothing else"
        return
    if len({id(e.simulate) for e in first}) != len({id(e.simulate) for e in second}):
        yield "evidence shares `simulate` in memory only; key it by the broadcast's identity, which survives the disk"
    # Two evaluations: kernels may round the last bit differently, and a search makes that large.
    reader = replace(load("attacks", READER)(), budget=2, restarts=0)
    mine, theirs = (reader.run(v, victims.challenges(), torch.Generator().manual_seed(0)) for v in (view, again))
    if not all(torch.allclose(a.x, b.x, atol=1e-4, equal_nan=True) for a, b in zip(mine, theirs, strict=True)):
        yield "an attack guesses another image on the view from disk; nothing but the view may decide"


def evidence_is_what_the_server_steps_on(trial: Trial) -> Iterator[str]:
    """Ask whether the defense's evidence, by default what `decoded` returns, is what its server's code steps on."""
    run = trial.federate()
    view = run.probe(victims_of(run).data).view("server/1")
    readings = defaultdict[tuple[Slot, ...], list[Evidence]](list)
    for evidence in replayed(view):
        if len(evidence.unit) == 1 and evidence.measure == "squares":
            readings[evidence.unit].append(evidence)
    if not readings:
        raise NotAsked("its server reads no single client's messages as one update")
    if run.defense.sums:
        yield "it says that only sums can be read, but its server reads each client's upload alone; let `sums` be False"
        return
    told = {e.unit: e for e in view.defense.evidence(view)}
    if told.keys() != readings.keys():
        yield f"its server reads {len(readings)} clients' uploads, its evidence {len(told)}; let `decoded` return all"
        return
    if any(e.weight is not None and not any(bool((w > 0).any()) for w in e.weight.values()) for e in told.values()):
        yield "its evidence weighs every entry with 0, so that no attack looks at what was sent; give what is known"
    far = max(min(apart(told[unit].observed, e.observed) for e in some) for unit, some in readings.items())
    most = max(float(leaf.abs().max()) for some in readings.values() for leaf in leaves(some[0].observed))
    if far > STEPPED * most:
        yield (
            f"its evidence differs by up to {far:.2g} from the step that its server takes on the same upload, whose "
            f"largest entry is {most:.2g}; let `aggregate` step on what `decoded` returns"
        )
