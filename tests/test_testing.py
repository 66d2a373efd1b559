"""The batteries of `ppbench.testing`: defenses and attacks with one planted fault each, which must be named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from ppbench import Defense
from ppbench.base.errors import UsageError
from ppbench.base.registry import plugins
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.defenses.dp import DP
from ppbench.defenses.spn import SPN
from ppbench.federation.contract import Context, Job, Server, Step
from ppbench.federation.messages import Hello, Update
from ppbench.federation.plan import Batch, Data, Plan
from ppbench.testing import check_defense
from ppbench.testing.defenses import DEFENSE_PROPERTIES
from ppbench.testing.findings import Finding, NotAsked, Untold, ask, ask_all
from ppbench.testing.scene import Trial
from ppbench.testing.tradeoff import direction


# -- defenses with one fault each ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Nameless(Defense):
    """Has no name."""


@dataclass(frozen=True)
class Listed(Defense):
    """A parameter that no record can hold."""

    scales: tuple[float, ...] = (1.0, 2.0)
    name: ClassVar[str] = "listed"


@dataclass(frozen=True)
class Gridless(Defense):
    """A control parameter that is no field."""

    name: ClassVar[str] = "gridless"
    control: ClassVar[str] = "strength"


@dataclass(frozen=True)
class Picky(Defense):
    """Refuses a value of its own grid."""

    sigma: float = 0.1
    name: ClassVar[str] = "picky"
    control: ClassVar[str] = "sigma"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (0.1, -1.0)}

    def check(self, plan: Plan) -> None:
        self.require(self.sigma > 0, "sigma", "> 0")


@dataclass(frozen=True)
class GlobalNoise(Defense):
    """Draws from torch's global generator."""

    name: ClassVar[str] = "global_noise"

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        return {n: 1e-3 * torch.randn(steps, *p.shape) for n, p in params.items()}

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        clean = super().local_gradient(plan, params, batch, own, ())
        return {name: value + noise[name] for name, value in clean.items()}


@dataclass(frozen=True)
class SeedFixed(Defense):
    """Takes the same batches whatever the seed."""

    name: ClassVar[str] = "seed_fixed"

    def batches(self, ctx: Context, data: Data) -> Batch:
        return Batch(data.x[None, :16], data.y[None, :16], torch.ones(1, 16))


@dataclass(frozen=True)
class Forgetful(Defense):
    """Counts its rounds in the class, not in a state."""

    name: ClassVar[str] = "forgetful"
    seen: ClassVar[list[int]] = []

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        self.seen.append(ctx.round)
        return super().broadcast(ctx, server)

    def decode(self, upload: Tree, like: Params) -> Params:
        return {name: value / len(self.seen) for name, value in upload.params.items()}


@dataclass(frozen=True)
class InPlace(Defense):
    """Changes a client's state in place."""

    name: ClassVar[str] = "in_place"

    def init_client(self, ctx: Context, params: Params) -> Tree:
        return torch.zeros(1)

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        me += 1
        return Update({name: value / me for name, value in result.items()})


@dataclass(frozen=True)
class Branching(Defense):
    """Computes something else under vmap."""

    name: ClassVar[str] = "branching"

    def compute(self, plan: Plan, job: Job) -> Tree:
        mapped = torch._C._functorch.is_batchedtensor(job.batches.x)
        return tree_map(lambda leaf: 1.5 * leaf if mapped else leaf, super().compute(plan, job))


@node
class Scaled:
    """An update and a number that is no tensor."""

    params: Params
    scale: Any


@dataclass(frozen=True)
class FreeNumber(Defense):
    """Sends a Python number beside its update, for no byte."""

    name: ClassVar[str] = "free_number"

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        return Scaled(result, 1.0)


@dataclass(frozen=True)
class AroundTheWire(Defense):
    """Leaves its updates in the class and sends nothing."""

    name: ClassVar[str] = "around_the_wire"
    desk: ClassVar[list[Params]] = []

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        self.desk.append(result)
        return ()

    def decode(self, upload: Tree, like: Params) -> Params:
        return self.desk.pop(0)


@dataclass(frozen=True)
class Silent(Defense):
    """Has no client answer."""

    name: ClassVar[str] = "silent"

    def round(self, ctx: Context, server: Server, cohort: Any) -> Any:
        yield Step(server, dict.fromkeys(cohort, Hello()))
        noise = {n: v + 0.01 * torch.randn(v.shape, generator=ctx.generator) for n, v in server.params.items()}
        return Server(noise, server.opt, server.counts, server.own)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        return super().reply(ctx, me, message, result, data) if ctx.round == 0 else (me, None)


@dataclass(frozen=True)
class UnlikeMessages(Defense):
    """The first client sends another class of message than the others."""

    name: ClassVar[str] = "unlike_messages"

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        return Scaled(result, torch.ones(1)) if ctx.party == 0 else Update(result)


@dataclass(frozen=True)
class Widens(Defense):
    """Comes back with weights of another dtype."""

    name: ClassVar[str] = "widens"

    def stepped(self, ctx: Context, server: Server, update: Params) -> Server:
        after = super().stepped(ctx, server, update)
        return Server({n: v.double().float() for n, v in after.params.items()} | {"extra": torch.zeros(1)},
                      after.opt, after.counts, after.own)  # fmt: skip


@node
class With:
    """An update with something beside it."""

    params: Params
    beside: Tree


@dataclass(frozen=True)
class TellsItsHead(SPN):
    """SPN that uploads its secret head."""

    name: ClassVar[str] = "tells_its_head"

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        return With(result, me.head)


@dataclass(frozen=True)
class TellsItsResidual(Defense):
    """Keeps what it did not send, and sends that in the next round beside its update: seen after training only."""

    name: ClassVar[str] = "tells_its_residual"

    def init_client(self, ctx: Context, params: Params) -> Tree:
        return {name: torch.zeros_like(value) for name, value in params.items()}

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        if isinstance(message, Hello):
            return super().reply(ctx, me, message, result, data)
        return {n: 0.5 * v for n, v in result.items()}, With(result, me)


@dataclass(frozen=True)
class TellsItsData(Defense):
    """Sends its examples along."""

    name: ClassVar[str] = "tells_its_data"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        if isinstance(message, Hello):
            return super().reply(ctx, me, message, result, data)
        return me, With(result, data.x)


@dataclass(frozen=True)
class Parcel:
    """A message that was not registered with @node."""

    params: Params


@dataclass(frozen=True)
class Unregistered(Defense):
    """Sends what cannot be written to disk."""

    name: ClassVar[str] = "unregistered"

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        return Parcel({name: value.clone() for name, value in result.items()})


@dataclass(frozen=True)
class NeverOff(DP):
    """Noise that does not vanish at sigma 0."""

    name: ClassVar[str] = "never_off"

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        clean = super().local_gradient(plan, params, batch, own, noise)
        return {name: value + 1e-3 * noise[name] for name, value in clean.items()}


@dataclass(frozen=True)
class UpAndDown(DP):
    """Most noise in the middle of its grid."""

    name: ClassVar[str] = "up_and_down"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (0.0, 1.0, 2.0)}

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        clean = Defense.local_gradient(self, plan, params, batch, own, ())
        scale = self.sigma * (2 - self.sigma)
        return {name: value + scale * noise[name] for name, value in clean.items()}


@dataclass(frozen=True)
class Raises(Defense):
    """Fails in the middle of a round."""

    name: ClassVar[str] = "raises"

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        raise RuntimeError("no upload today")


FAULTS: list[tuple[Defense, str, str]] = [
    (Nameless(), "declares_itself", "has no name"),
    (Listed(), "declares_itself", "scales is a tuple"),
    (Gridless(), "declares_itself", "'strength' is none of its fields"),
    (Picky(), "declares_itself", "refuses a value of its own grid"),
    (GlobalNoise(), "one_seed_one_result", "two runs of one seed differ"),
    (GlobalNoise(), "one_seed_one_result", "global generator has moved"),
    (SeedFixed(), "one_seed_one_result", "two seeds give the same weights"),
    (Forgetful(), "resumes", "a checkpoint and two more"),
    (InPlace(), "probes_move_nothing", "a probe changed the training"),
    (Branching(), "loop_equals_vmap", "loop and vmap differ"),
    (FreeNumber(), "bytes_are_counted", "sends the value 1.0, of which no byte is counted"),
    (AroundTheWire(), "bytes_are_counted", "no byte in a round and the model has moved"),
    (Silent(), "bytes_are_counted", "clients sent no byte in a round"),
    (Forgetful(), "all_goes_over_the_wire", "the same letters gave the server another state"),
    (UnlikeMessages(), "messages_keep_their_form", "send unlike messages"),
    (Widens(), "messages_keep_their_form", "changed their names, shapes or dtypes"),
    (TellsItsHead(), "secrets_from_the_server", "what a client keeps in its state is reached"),
    (TellsItsHead(), "secrets_from_a_listener", "what a client keeps in its state is reached"),
    (TellsItsResidual(), "secrets_after_training", "what a client keeps in its state is reached"),
    (TellsItsData(), "secrets_from_the_server", "a victim's images are reached"),
    (Unregistered(), "a_view_survives_the_disk", "cannot be saved: make it a @node"),
    (NeverOff(), "off_level_equals_none", "of their length away from where `none` ends"),
    (UpAndDown(), "control_moves_accuracy_one_way", "falls and rises along sigma"),
    (Raises(), "resumes", "RuntimeError was raised at"),
]


@pytest.mark.parametrize(("defense", "name", "words"), FAULTS, ids=[f"{type(d).__name__}-{p}" for d, p, _ in FAULTS])
def test_a_planted_fault_is_named(defense: Defense, name: str, words: str) -> None:
    off = {"sigma": 0.0} if name == "off_level_equals_none" else None
    with pytest.raises(AssertionError, match=r"^Defense '?\w+'? breaks 1 of 1 properties:\n- ") as caught:
        check_defense(defense, only=(name,), off=off)
    assert f"- {name}: " in str(caught.value) and words in str(caught.value)


def test_every_property_has_a_fault_that_it_finds() -> None:
    found = {name for _, name, _ in FAULTS}
    same_code = {"resumes_round_robin", "secrets_from_a_client"}  # under another schedule, threat model
    assert found == set(DEFENSE_PROPERTIES) - same_code


def test_all_failures_are_told_together() -> None:
    with pytest.raises(AssertionError) as caught:
        check_defense(TellsItsData, only=("one_seed_one_result", "secrets_from_the_server", "secrets_from_a_listener"))
    assert str(caught.value).count("\n- ") == 2 and "breaks 2 of 3" in str(caught.value)


def test_a_sound_defense_that_nobody_installed_passes() -> None:
    @dataclass(frozen=True)
    class Rounded(Defense):
        """Uploads half-precision numbers."""

        name: ClassVar[str] = "rounded"

        def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
            return Update({name: value.half().float() for name, value in result.items()})

    findings = {finding.property: finding for finding in check_defense(Rounded)}
    assert list(findings) == list(DEFENSE_PROPERTIES)
    assert findings["control_moves_accuracy_one_way"].outcome == "not asked"
    assert all(f.outcome in ("holds", "not asked") for f in findings.values())
    assert "rounded" not in plugins("defenses")


def test_a_fault_that_is_meant_can_be_left_out_with_its_reason() -> None:
    found = check_defense(Nameless, only=("declares_itself",), skip={"declares_itself": "it is a test"})
    assert found == (Finding("declares_itself", "not asked", "it is a test"),)


def test_input_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(UsageError, match="no property named 'resume'; did you mean 'resumes'"):
        check_defense(DP, only=("resume",))
    with pytest.raises(UsageError, match="is no defense"):
        check_defense(int)  # type: ignore[arg-type]
    misspelt = Trial(DP(), (("sgima", 0),))
    assert ask("off", DEFENSE_PROPERTIES["off_level_equals_none"], misspelt).outcome == "fails"


def test_findings_keep_apart_what_fails_and_what_cannot_be_told() -> None:
    def asking(error: Exception | None) -> Any:
        def question(_: int) -> Any:
            if error is not None:
                raise error
            yield from ("one.", "two.")

        return question

    found = ask_all(0, {"a": asking(None), "b": asking(Untold("too few")), "c": asking(NotAsked("no"))}, (), {})
    assert [f.outcome for f in found] == ["fails", "untold", "not asked"]
    assert found[0].sentence == "one. Also: two." and str(found[1]) == "b: untold (too few)"


def test_a_difference_counts_only_where_seeds_agree() -> None:
    low, high = [0.1 + 0.01 * i for i in range(8)], [0.8 - 0.01 * i for i in range(8)]
    assert direction(low, high, 3) == 1 and direction(high, low, 3) == -1
    noisy = [0.8, 0.1, 0.7, 0.2, 0.9, 0.1, 0.6, 0.3]
    assert direction(low, noisy, 3) == 0
    assert direction([0.5] * 8, [0.5] * 8, 3) == 0


def test_importing_the_batteries_costs_nothing() -> None:
    code = "import sys, ppbench.testing; assert 'torch' not in sys.modules; assert ppbench.testing.__getattr__"
    subprocess.run([sys.executable, "-c", code], check=True)
