"""What papers claim about their defenses, beside what the records say: findings by rule, nothing typed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppbench.base.registry import load_all
from ppbench.federation.claim import Claim, Conditions, Scalar, allowed
from ppbench.records.schema import CellConfig, Record
from ppbench.report.claims import use
from ppbench.report.claims.attacks import calibrated, members_stay_hidden, outputs_stay_hidden, pixels_stay_hidden
from ppbench.report.claims.case import Case, Finding, Rule, Verdict
from ppbench.report.claims.use import KEY_OF, Benchmark, time_is_kept
from ppbench.report.frame import EVALUATION, Frame, Key, frame_of, network
from ppbench.report.page.evaluations import about
from ppbench.report.verdict.lines import labels_of, listed

CAPS = ("cap_reconstruction", "cap_label", "cap_tracing")
RULES: dict[str, Rule] = {
    "asr": members_stay_hidden,
    "psnr_median": pixels_stay_hidden,
    "agreement": outputs_stay_hidden,
    **dict.fromkeys(CAPS, calibrated),
    "accuracy": use.accuracy_is_kept,
    "accuracy_top5": use.top5_is_kept,
    "accuracy_rises": use.accuracy_rises,
    "dice": use.dice_is_kept,
    "mse": use.error_is_kept,
    "epsilon": use.guarantee_is_given,
    "upload_ratio": use.upload_is_as_large,
    "bytes_saving": use.bytes_are_saved,
    "memory_ratio": use.memory_is_as_small,
}
# What a setting must share with the paper's before a figure says anything about the claimed one. Attacks that succeed
# refute a claim of protection wherever they do.
TRAINING = ("data set", "model", "clients", "partition")
REQUIRED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("accuracy", "accuracy_top5", "dice"), TRAINING),
    "upload_ratio": ("clients",),
    "bytes_saving": ("model", "clients"),
    "memory_ratio": ("model",),
    "psnr_median": ("data set",),
    "mse": ("data set", "model", "clients"),
    **dict.fromkeys(CAPS, ("data set", "model")),
}
NO_RECORD = "no record of "
WORST: tuple[Verdict, ...] = ("falls", "holds", "cannot be told")


@dataclass(frozen=True)
class Checked:
    """A claim that records tell of, in our setting; `evaluations` were as close: the finding is of the worst."""

    defense: str
    claim: Claim
    setting: str
    finding: Finding
    differs: tuple[str, ...] = ()
    evaluations: int = 1


@dataclass(frozen=True)
class Unchecked:
    """A claim that cannot be checked, and why, a clause. unrun: whether the defense has no record at all."""

    defense: str
    claim: Claim
    reason: str
    unrun: bool = False


def claimed_by_all() -> dict[str, tuple[Claim, ...]]:
    """Return the claims of every installed defense, by its name."""
    found = {name: tuple(getattr(factory, "claimed", ())) for name, factory in load_all("defenses").items()}
    return {name: claims for name, claims in found.items() if claims}


def check(
    claimed: Mapping[str, Sequence[Claim]], records: Sequence[Record], benchmarks: Sequence[Benchmark]
) -> list[Checked | Unchecked]:
    """Return what becomes of each claim, in order, in the worst of the evaluations closest to the paper's setting."""
    some = {record.cell_id: record for record in records}
    groups = frame_of(records).of(some[cell] for cell in sorted(some)).by(EVALUATION)
    return [_one(name, claim, groups, benchmarks) for name in sorted(claimed) for claim in claimed[name]]


def _one(name: str, claim: Claim, groups: Mapping[Key, Frame], benchmarks: Sequence[Benchmark]) -> Checked | Unchecked:
    if not any(r.config.defense.id == name for records in groups.values() for r in records):
        return Unchecked(name, claim, f"no record of {name}", unrun=True)
    if claim.metric in KEY_OF:
        timed = time_is_kept(claim, name, benchmarks)
        return Unchecked(name, claim, timed) if isinstance(timed, str) else Checked(name, claim, timed[1], timed[0])
    rule = RULES.get(claim.metric)
    if rule is None:
        return Unchecked(name, claim, f"no rule judges {claim.metric!r}")
    cases = list(_cases(name, claim, groups))
    if not cases:
        return Unchecked(name, claim, _missing(name, claim, groups))
    closest = max(_closeness(claim, case.mine[0].config) for _, case in cases)
    near = [(key, case) for key, case in cases if _closeness(claim, case.mine[0].config) == closest]
    found = [(key, case, rule(case)) for key, case in near]
    judged = [(key, case, finding) for key, case, finding in found if isinstance(finding, Finding)]
    if not judged:
        return Unchecked(name, claim, str(found[0][2]))
    _, case, finding = min(judged, key=lambda found: (WORST.index(found[2].verdict), found[0]))
    differs = tuple(what for what in TRAINING if not _shares(claim, case.mine[0].config, what))
    return Checked(name, claim, setting_of(case), finding, differs, len(judged))


def _cases(name: str, claim: Claim, groups: Mapping[Key, Frame]) -> Iterator[tuple[tuple[str, str], Case]]:
    """Yield the evaluations that say something about the claim."""
    for key, records in sorted(((about(key), key.text()), records) for key, records in groups.items()):
        complete = [r for r in records if r.status != "failed"]
        mine = [r for r in complete if r.config.defense.id == name]
        mine = [r for r in mine if all(r.config.defense.parameters.get(k) in allowed(v) for k, v in claim.when)]
        if mine and all(_shares(claim, mine[0].config, what) for what in REQUIRED.get(claim.metric, ())):
            none = [r for r in complete if r.config.defense.id == "none"]
            yield key, Case(claim, records.of(mine), records.of(none), records.of(complete))


def _shares(claim: Claim, config: CellConfig, what: str) -> bool:
    """Return whether a cell has the claim's data set, model, number of clients or partition."""
    if what == "clients":
        return claim.clients in (None, config.federation.clients)
    if what == "data set":
        name = config.data.name.rpartition(":")[2]
        return not claim.dataset or name == claim.dataset or name.startswith(f"{claim.dataset}.")
    if what == "partition":
        dealt = config.federation.partition
        return not claim.partition or dealt == claim.partition or dealt.startswith(f"{claim.partition}:")
    options = {**config.model.options, "layers": _layers(config)}
    same = config.model.id == claim.model and all(options.get(name) == value for name, value in claim.options)
    return not claim.model or same


def _layers(config: CellConfig) -> int | None:
    """Return the number of linear layers of an "mlp", which may list its hidden widths or count its layers."""
    counted, widths = config.model.options.get("layers"), config.model.options.get("hidden")
    if isinstance(counted, int) and counted:
        return counted
    return None if widths is None else 1 + len([word for word in str(widths).split(",") if word.strip()])


def _closeness(claim: Claim, config: CellConfig) -> int:
    return sum(2**i for i, what in enumerate(reversed(TRAINING)) if _shares(claim, config, what))


def _missing(name: str, claim: Claim, groups: Mapping[Key, Frame]) -> str:
    """Return why no evaluation says anything about a claim: the first that none shares of what must be shared."""
    mine = [r for records in groups.values() for r in records if r.config.defense.id == name]
    parties = "" if claim.clients is None else f"{claim.clients} client{'s' if claim.clients != 1 else ''}"
    model = ", ".join([claim.model, *_equations(claim.options)])
    words = {"data set": claim.dataset, "model": model, "clients": parties, "partition": claim.partition}
    about: list[str] = []
    for what in REQUIRED.get(claim.metric, ()):
        mine = [r for r in mine if _shares(claim, r.config, what)]
        about.append(words[what])
        if not mine:
            return NO_RECORD + ", ".join(word for word in about if word)
    when = ", ".join(_equations(claim.when))
    setting = ", ".join(word for word in about if word)
    if not when:
        return "every cell of it failed"
    return f"{NO_RECORD}{setting} at {when}" if setting else f"no record at {when}"


def _equations(pairs: Conditions) -> list[str]:
    return [f"{name}={' or '.join(map(_word, allowed(value)))}" for name, value in pairs]


def _word(value: Scalar) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def setting_of(case: Case) -> str:
    """Return our setting in words: data, model, rounds, clients, seed, control values."""
    config = case.mine[0].config
    model, fed = network(config.model.id, config.model.options), config.federation
    controls = sorted({(c.name, c.value) for r in case.mine if (c := r.config.defense.control) is not None})
    at = f"; {listed([f'{name}={value:g}' for name, value in controls])}" if controls else ""
    other = {word.strip("()") for label in labels_of(case.mine).values() for word in label.split()[1:]}
    more = f" ({', '.join(sorted(other))})" if other else ""
    return (
        f"{config.data.name}, {config.data.train} examples, {model}, {fed.clients} clients, {fed.rounds} rounds, "
        f"seed {config.seed}{at}{more}"
    )
