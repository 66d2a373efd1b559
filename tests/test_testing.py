"""The batteries of `ppbench.testing`: defenses and attacks with one planted fault each, which must be named."""

from dataclasses import dataclass, make_dataclass
from typing import Any

import pytest
import torch

from ppbench import Defense
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, node, tree_map
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.defenses.spn import SPN
from ppbench.federation.contract import Server, Step
from ppbench.federation.plan import Batch
from ppbench.federation.wire import Hello, Update
from ppbench.testing import check_defense
from ppbench.testing.defenses import DEFENSE_PROPERTIES, accuracy_trend
from ppbench.testing.small_federation import DefenseTrial, Inconclusive, NotAsked, PropertyResult, ask, ask_all


def spoilt(name, base=Defense, **members):
    """Return a defense with other members than its base has."""
    return dataclass(frozen=True)(type(name, (base,), {"name": name.lower(), **members}))()


@node
class With:
    """An update with something beside it."""

    params: Params
    beside: Any


Parcel = make_dataclass("Parcel", ["params"])  # a message that was not registered with @node


@dataclass(frozen=True)
class Nameless(Defense):
    """Has no name."""


def replying(answer):
    """Return a `reply` that answers set-up as every defense does, and then otherwise."""

    def reply(self, ctx, me, message, result, data):
        hello = isinstance(message, Hello)
        return Defense.reply(self, ctx, me, message, result, data) if hello else answer(me, result, data)

    return reply


def noisy(scale, base=Defense):
    """Return a `local_gradient` with some of the noise that was drawn."""

    def local_gradient(self, plan, params, batch, own, noise):
        clean = base.local_gradient(self, plan, params, batch, own, noise if base is DP else ())
        return {name: value + scale(self) * noise[name] for name, value in clean.items()}

    return local_gradient


def divided(self, ctx, me, result):
    me += 1
    return Update({name: value / me for name, value in result.items()})


def torch_noise(self, ctx, me, result):
    return Update({n: value + 0.01 * torch.randn(value.shape, generator=ctx.generator) for n, value in result.items()})


def greeting(self, ctx, server, cohort):
    yield Step(server, dict.fromkeys(cohort, Hello()))
    noise = {n: v + 0.01 * torch.randn(v.shape, generator=ctx.generator) for n, v in server.params.items()}
    return Server(noise, server.opt, server.counts, server.own)


def silence(self, ctx, me, message, result, data):
    return Defense.reply(self, ctx, me, message, result, data) if ctx.round == 0 else (me, None)


def count_rounds(self, ctx, server):
    self.seen.append(ctx.round)
    return Defense.broadcast(self, ctx, server)


def compute_otherwise(self, plan, job):
    mapped = torch._C._functorch.is_batchedtensor(job.batches.x)
    return tree_map(lambda leaf: 1.5 * leaf if mapped else leaf, Defense.compute(self, plan, job))


def widen(self, ctx, server, update):
    after = Defense.stepped(self, ctx, server, update)
    return Server(after.params | {"extra": torch.zeros(1)}, after.opt, after.counts, after.own)


Listed = spoilt("Listed", scales=(1.0, 2.0), __annotations__={"scales": tuple[float, ...]})  # no record can hold it
Picky = spoilt(  # refuses a value of its own grid
    "Picky", DP, grids={"quick": (0.1, -1.0)}, check=lambda self, plan: self.require(self.sigma > 0, "sigma", "> 0")
)
InPlace = spoilt("InPlace", init_client=lambda self, ctx, params: torch.zeros(1), upload=divided)
Silent = spoilt("Silent", round=greeting, reply=silence)
TellsItsHead = spoilt("TellsItsHead", SPN, upload=lambda self, ctx, me, result: With(result, me.head))
TellsItsData = spoilt("TellsItsData", reply=replying(lambda me, result, data: (me, With(result, data.x))))
TellsItsResidual = spoilt(  # keeps what it did not send and sends that a round later: seen after training only
    "TellsItsResidual",
    init_client=lambda self, ctx, params: {name: torch.zeros_like(value) for name, value in params.items()},
    reply=replying(lambda me, result, data: ({n: 0.5 * v for n, v in result.items()}, With(result, me))),
)
GlobalNoise = spoilt(
    "GlobalNoise", local_gradient=noisy(lambda self: 1.0),
    draw=lambda self, ctx, params, steps: {n: 1e-3 * torch.randn(steps, *p.shape) for n, p in params.items()},
)  # fmt: skip
Forgetful = spoilt(  # counts its rounds in the class, not in a state
    "Forgetful",
    seen=[],
    broadcast=count_rounds,
    decode=lambda self, upload, like: {name: value / len(self.seen) for name, value in upload.params.items()},
)
AroundTheWire = spoilt(
    "AroundTheWire", desk=[], upload=lambda self, ctx, me, result: self.desk.append(result) or (),
    decode=lambda self, upload, like: self.desk.pop(0),
)  # fmt: skip
SeedFixed = spoilt(
    "SeedFixed", batches=lambda self, ctx, data: Batch(data.x[None, :16], data.y[None, :16], torch.ones(1, 16))
)


Wary = spoilt(  # believes to know training by its session's name
    "Wary",
    upload=lambda self, ctx, me, result: Update(tree_map(lambda v: v if int(ctx.session, 16) % 2 else v / 2, result)),
)


def rolled(self, ctx, server, client, upload):
    """What others are told of an upload: not what `aggregate` below steps on."""
    return tree_map(lambda value: value.roll(1), upload.params)


def plainly(self, ctx, server, uploads):
    return NoDefense().aggregate(ctx, server, uploads)


Unlike = spoilt("Unlike", upload=lambda self, ctx, me, result: With(result, ()) if ctx.party == 0 else Update(result))
Unregistered = spoilt(
    "Unregistered", upload=lambda self, ctx, me, result: Parcel({n: v.clone() for n, v in result.items()})
)
FreeNumber = spoilt("FreeNumber", upload=lambda self, ctx, me, result: With(result, 1.0))
NeverOff = spoilt("NeverOff", DP, local_gradient=noisy(lambda self: 1e-3, DP))
UpAndDown = spoilt(  # most noise in the middle of its grid
    "UpAndDown", DP, grids={"quick": (0.0, 1.0, 2.0)}, local_gradient=noisy(lambda self: self.sigma * (2 - self.sigma))
)


FAULTS = [
    (Nameless(), "declares_itself", "has no name"),
    (Listed, "declares_itself", "scales is a tuple"),
    (spoilt("Gridless", control="strength"), "declares_itself", "'strength' is none of its fields"),
    (Picky, "declares_itself", "refuses a value of its own grid"),
    (spoilt("Solvable", upload=torch_noise), "torch_draws_no_secret", "draw secrets from ctx.secret"),
    (GlobalNoise, "one_seed_one_result", "two runs of one seed differ"),
    (GlobalNoise, "one_seed_one_result", "global generator has moved"),
    (SeedFixed, "one_seed_one_result", "two seeds give the same weights"),
    (Forgetful, "resumes", "a checkpoint and two more"),
    (InPlace, "probes_move_nothing", "a probe changed the training"),
    (Wary, "probes_are_steps_of_training", "other bits than training does"),
    (spoilt("Branching", compute=compute_otherwise), "loop_equals_vmap", "loop and vmap differ"),
    (FreeNumber, "bytes_are_counted", "sends the value 1.0, of which no byte is counted"),
    (AroundTheWire, "bytes_are_counted", "no byte in a round and the model has moved"),
    (Silent, "bytes_are_counted", "clients sent no byte in a round"),
    (Forgetful, "all_goes_over_the_wire", "the same letters gave the server another state"),
    (Unlike, "messages_keep_their_form", "send unlike messages"),
    (spoilt("Widens", stepped=widen), "messages_keep_their_form", "changed their names, shapes or dtypes"),
    (TellsItsHead, "secrets_from_the_server", "what a client keeps in its state is reached"),
    (TellsItsHead, "secrets_from_a_listener", "what a client keeps in its state is reached"),
    (TellsItsResidual, "secrets_after_training", "what a client keeps in its state is reached"),
    (TellsItsData, "secrets_from_the_server", "a victim's images are reached"),
    (TellsItsData, "nothing_else_reaches_the_server", "With.beside of client 0 in round 1 differs with the examples"),
    (Unregistered, "a_view_survives_the_disk", "cannot be saved: make it a @node"),
    (
        spoilt("Rolled", decoded=rolled, aggregate=plainly),
        "evidence_is_what_the_server_steps_on",
        "from the step that its server takes",
    ),
    (NeverOff, "off_level_equals_none", "of their length away from where `none` ends"),
    (UpAndDown, "control_moves_accuracy_one_way", "falls and rises along sigma"),
    (spoilt("Raises", upload=lambda *_: 1 / 0), "resumes", "ZeroDivisionError was raised at"),
]


LATE = "control_moves_accuracy_one_way"
"""Left to the night, as in the battery of our own: it trains."""


@pytest.mark.parametrize(
    ("defense", "name", "words"),
    [
        pytest.param(d, p, w, id=f"{type(d).__name__}-{p}", marks=[pytest.mark.nightly] if p == LATE else [])
        for d, p, w in FAULTS
    ],
)
def test_a_planted_fault_is_named(defense, name, words):
    off = {"sigma": 0.0} if name == "off_level_equals_none" else None
    with pytest.raises(AssertionError, match=r"^Defense '?\w+'? breaks 1 of 1 properties:\n- ") as caught:
        check_defense(defense, only=(name,), off=off)
    assert f"- {name}: " in str(caught.value) and words in str(caught.value)


def test_every_property_has_a_fault_that_it_finds():
    results = {name for _, name, _ in FAULTS}
    same_code = {"resumes_round_robin", "secrets_from_a_client"}  # under another schedule, threat model
    assert results == set(DEFENSE_PROPERTIES) - same_code


def test_all_failures_are_told_together_and_one_that_is_meant_can_be_left_out_with_its_reason():
    with pytest.raises(AssertionError) as caught:
        check_defense(TellsItsData, only=("one_seed_one_result", "secrets_from_the_server", "secrets_from_a_listener"))
    assert str(caught.value).count("\n- ") == 2 and "breaks 2 of 3" in str(caught.value)
    result = check_defense(Nameless, only=("declares_itself",), skip={"declares_itself": "it is a test"})
    assert result == (PropertyResult("declares_itself", "not asked", "it is a test"),)


def test_input_that_cannot_be_used_is_refused():
    with pytest.raises(UsageError, match="no property named 'resume'; did you mean 'resumes'"):
        check_defense(DP, only=("resume",))
    with pytest.raises(UsageError, match="is no defense"):
        check_defense(int)
    misspelt = DefenseTrial(DP(), (("sgima", 0),))
    assert ask("off", DEFENSE_PROPERTIES["off_level_equals_none"], misspelt).outcome == "fails"


def test_findings_keep_apart_what_fails_and_what_cannot_be_told():
    def asking(error):
        def question(_):
            if error is not None:
                raise error
            yield from ("one.", "two.")

        return question

    result = ask_all(0, {"a": asking(None), "b": asking(Inconclusive("too few")), "c": asking(NotAsked("no"))}, (), {})
    assert [f.outcome for f in result] == ["fails", "inconclusive", "not asked"]
    assert result[0].sentence == "one. Also: two." and str(result[1]) == "b: inconclusive (too few)"


def test_a_difference_counts_only_where_seeds_agree():
    low, high = [0.1 + 0.01 * i for i in range(8)], [0.8 - 0.01 * i for i in range(8)]
    assert accuracy_trend(low, high, 3) == 1 and accuracy_trend(high, low, 3) == -1
    noisy = [0.8, 0.1, 0.7, 0.2, 0.9, 0.1, 0.6, 0.3]
    assert accuracy_trend(low, noisy, 3) == 0
    assert accuracy_trend([0.5] * 8, [0.5] * 8, 3) == 0
