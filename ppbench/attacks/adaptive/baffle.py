"""The attack aware of BAFFLE's directions: images whose gradient has the observed sketch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import scipy
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.labels import LabelRecovery, Reader, greedy_multiset, read_labels, single_label, typical_means
from ppbench.attacks.reconstruction.dlg import DLG, IDLG
from ppbench.attacks.reconstruction.search.priors import ImagePrior, Penalty
from ppbench.attacks.reconstruction.search.starts import Label
from ppbench.base.autodiff import gradients
from ppbench.base.tree import Params
from ppbench.defenses.baffle import Baffle, answers_by_slot, chunks, step_seeds
from ppbench.federation.bounds import InMemoryCount, NonNegative
from ppbench.federation.evidence import Evidence, Mappable, Shared, Simulate, simulation
from ppbench.federation.plan import Layout, Plan
from ppbench.federation.secagg import cohorts
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Slot
from ppbench.metrics.modality import modality_in

# -- What BAFFLE's loss differences reveal: a linear sketch s = Z g of a victim's gradient, Z known to everybody --
# A loss difference along a public direction z_k is, up to O(sigma^2), sigma times a multiple of z_k . g. K of them
# are as good as the gradient if K exceeds the number of pixels. Every round with the same batch gives K more. Masks
# leave the sketch of the cohort's mean gradient, and of one client's where the others collude.

STACK = 256  # directions handled at a time
KEPT_NUMBERS = 200_000_000  # entries of all Z together that are kept; the others are drawn again at each use
SPAN_TOLERANCE = 1e-3  # relative distance from the span of the directions up to which an update is a sum of estimates


class DirectionMap:
    """The map Z [K, n] float32 of a seed, differentiable once; kept up to `room` entries (None: `KEPT_NUMBERS`)."""

    def __init__(self, seed: int, entries: int, count: int, room: int | None = None) -> None:
        self.seed, self.entries, self.count = seed, entries, count
        self.kept = list(self._drawn()) if entries * count <= (KEPT_NUMBERS if room is None else room) else None

    def _drawn(self) -> Iterator[Tensor]:
        return chunks(self.seed, self.entries, self.count, STACK)

    def stacks(self, like: Tensor) -> Iterator[Tensor]:
        """Yield the rows of Z, at most STACK at a time, with the dtype and device of `like`."""
        if self.kept is not None:
            self.kept = [stack.to(like.device) for stack in self.kept]
        for stack in self._drawn() if self.kept is None else self.kept:
            yield stack.to(like)

    def __call__(self, g: Tensor) -> Tensor:
        """Return Z g [K] of a gradient g [n], or Z G [K, m] of columns [n, m]; where Z is kept, under vmap too."""
        if self.kept is not None:
            # for a vector by `linear`, which under vmap is one product; `@` is one for each victim
            return torch.cat([linear(g, stack) if g.dim() == 1 else stack @ g for stack in self.stacks(g)])
        product: Tensor = _Product.apply(g, self)  # type: ignore[no-untyped-call]
        return product

    def transposed(self, s: Tensor) -> Tensor:
        """Return Z^T s [n] of s [K], or of columns."""
        total, done = s.new_zeros(self.entries, *s.shape[1:]), 0
        for stack in self.stacks(s):
            total += stack.T @ s[done : done + len(stack)]
            done += len(stack)
        return total


class _Product(torch.autograd.Function):
    """Z g, whose derivative needs Z alone: rows drawn on the fly are not kept for it."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, z: DirectionMap) -> Tensor:
        """Return Z g."""
        ctx.z = z
        return torch.cat([stack @ g for stack in z.stacks(g)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        """Return Z^T slope."""
        return ctx.z.transposed(slope), None


@dataclass(frozen=True)
class Equations:
    """What one round reveals, all on one device: the weights, the directions z, and s [K] float64, about Z g."""

    params: Params
    z: DirectionMap
    s: Tensor


@dataclass(frozen=True)
class Sketch:
    """All rounds' equations, oldest first, about a unit's mean gradient; shares: its slots' weights, () if equal."""

    unit: tuple[Slot, ...]
    rounds: tuple[Equations, ...]
    shares: tuple[float, ...] = ()


class DrawnDirections:
    """The directions in use, each drawn once."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int, int], DirectionMap] = {}
        self.room = KEPT_NUMBERS

    def at(self, seed: int, entries: int, count: int) -> DirectionMap:
        """Return the directions of `seed`."""
        key = (seed, entries, count)
        if key not in self.known:
            self.known[key] = DirectionMap(*key, self.room)
            self.room -= entries * count if self.known[key].kept is not None else 0
        return self.known[key]


def sketches(view: View) -> list[Sketch]:
    """Return a sketch of every client's gradient, or of every cohort's under masks; for updates see `_steps`."""
    defense = view.defense
    if not isinstance(defense, Baffle):
        return []
    by_slot, drawn = answers_by_slot(view), DrawnDirections()
    if defense.level == "epoch":
        return _steps(view, defense, by_slot, drawn)
    summed = defense.sums and not view.threat.colludes
    first = [sent[0] for sent in by_slot.values()]  # no sum but that of all clients is without masks
    units = cohorts(first, view.plan.clients) if summed else [[exchange] for exchange in first]
    return [_sketch(view, defense, [by_slot[e.slot] for e in unit], drawn) for unit in units]


def _sketch(view: View, defense: Baffle, sent: Sequence[Sequence[Exchange]], drawn: DrawnDirections) -> Sketch:
    unit, rounds = tuple(exchanges[0].slot for exchanges in sent), []
    for exchanges in zip(*sent, strict=False):  # by round
        params = exchanges[0].request.params
        seed, s = defense.sketch(*exchanges, view=view)
        device = next(iter(params.values())).device  # sums in a ring are on the CPU
        entries = sum(value.numel() for value in params.values())
        rounds.append(Equations(params, drawn.at(seed, entries, len(s)), s.to(device)))
    return Sketch(unit, tuple(rounds), _shares(view, sent[0][0], unit))


def _shares(view: View, exchange: Exchange, unit: tuple[Slot, ...]) -> tuple[float, ...]:
    """Return N_c / N where the server's state has it and they differ; () for a listener, which takes them for equal."""
    server = view.state_at(exchange)
    if server is None or len(unit) == 1:
        return ()
    counts = server.counts[[slot.client for slot in unit]].double()
    return () if bool((counts == counts[0]).all()) else tuple((counts / counts.sum()).tolist())


def _steps(view: View, defense: Baffle, by_slot: dict[Slot, list[Exchange]], drawn: DrawnDirections) -> list[Sketch]:
    """Return sketches of first updates that lie in the span of their steps' directions, one round per step."""
    known, local = [], view.plan.local
    steps = local.epochs if local.upload == "delta" else 1
    if steps > 1 and local.opt.momentum:  # in the span too, but steps would be weighted unequally
        return []
    for e in view.defense.evidence(view):
        if e.unit[0] not in by_slot:  # a colluder's own
            continue
        exchange = by_slot[e.unit[0]][0]
        params, layout = exchange.request.params, Layout.of(exchange.request.params)
        total = steps * layout.pack(e.observed).double()
        if steps * defense.count >= len(total) or (steps > 1 and len(e.unit) > 1) or not bool(total.isfinite().all()):
            continue
        seeds = step_seeds(int(exchange.request.seed), steps).tolist()
        maps = [drawn.at(seed, len(total), defense.count) for seed in seeds]
        slopes = coordinates(maps, total)
        estimates = [z.transposed(s) / z.count for z, s in zip(maps, slopes, strict=True)]
        if float((sum(estimates, -total)).norm()) > SPAN_TOLERANCE * float(total.norm()):
            continue
        rounds, rate, flat = [], local.opt.rate(exchange.round), layout.pack(params)
        for z, s, estimate in zip(maps, slopes, estimates, strict=True):
            rounds.append(Equations(layout.unpack(flat), z, s))
            flat = flat - rate * estimate.to(flat.dtype)
        known.append(Sketch(e.unit, tuple(rounds), _shares(view, exchange, e.unit)))
    return known


def coordinates(maps: Sequence[DirectionMap], total: Tensor) -> tuple[Tensor, ...]:
    """Return for each of T maps the s [K] float64 whose estimates Z^T s / K sum nearest to `total` [n]; T K < n."""
    total = total.double()
    rows = torch.cat([stack for z in maps for stack in z.stacks(total)])
    solution: Tensor = torch.linalg.solve(rows @ rows.T, rows @ total)
    return (maps[0].count * solution).chunk(len(maps))


def sketch_evidence(view: View, all_sketches: Sequence[Sketch]) -> list[Evidence]:
    """Return the sketches as evidence "s0", "s1", ... of the rounds; `params` None: no gradient at public weights."""
    shared, known = Shared(view.plan), dict[tuple[object, ...], Simulate]()
    evidence = []
    for sketch in all_sketches:
        gradients = [shared.at(r.params, sketch.shares) for r in sketch.rounds]
        maps = [r.z for r in sketch.rounds]
        key = tuple((id(g), id(z)) for g, z in zip(gradients, maps, strict=True))
        followed = all(isinstance(g, Mappable) for g in gradients) and all(z.kept is not None for z in maps)
        kind = MappedSketch if followed else Sketched
        simulate = known.setdefault(key, kind(sketch.rounds[0].params, tuple(gradients), tuple(maps)))
        observed = {f"s{i}": r.s for i, r in enumerate(sketch.rounds)}
        evidence.append(Evidence(sketch.unit, observed, simulate, channel="sketch"))
    return evidence


@dataclass(frozen=True, eq=False)
class Sketched:
    """The sketches that a client's computation has along the directions of T rounds.

    params: the weights of the first round. gradients: of each round, at its weights. maps: of each round.
    """

    params: Params
    gradients: tuple[Simulate, ...]
    maps: tuple[DirectionMap, ...]

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the sketches s0, s1, ... [K] of a batch x [U, B, *shape], y [U, B, C], in the dtype of x."""
        parts = [gradient(x, y) for gradient in self.gradients]
        return {f"s{i}": z(Layout.of(p).pack(p)) for i, (z, p) in enumerate(zip(self.maps, parts, strict=True))}


@dataclass(frozen=True, eq=False)
class MappedSketch(Sketched, Mappable):
    """A sketch that vmap can follow, so that Z is read once for all victims that were sent the same directions."""

    def family(self) -> Hashable:
        """Return itself: victims share the very object, see `sketch_evidence`."""
        return MappedSketch, id(self)


# -- Labels from BAFFLE's loss differences: ten of them give most labels of an untrained model, a hundred all --
# A gradient of the cross-entropy is sum_j (p_j - y_j) J_j, with J_j the derivative of logit j by the weights, whose
# mean over noise images is near enough: a sketch of K numbers is K linear equations in the C numbers p - y. For one
# example of class c they lie in a cone: p_j >= 0 along J_j - J_c for all other j. The class whose cone is nearest is
# the label. This needs fewer equations than classes, and no estimate of p, which noise images predict badly once a
# model is trained.

NOISE_IMAGES = 64
PRIOR_VARIANCE = 0.1  # prior variance of an entry of p - y
MEAN_ERRORS = (0.05, 0.2, 0.5, 1.0)
NNLS_STEPS = 10_000
HEAD_BIAS = "head.bias"


@dataclass(frozen=True)
class LinearSketch:
    """A sketch as equations A a = s in a = mean (p - y) [C]. a: [M, C], s: [M], of all rounds, float64, on the CPU."""

    a: Tensor
    s: Tensor

    @property
    def gram(self) -> Tensor:
        """A^T A [C, C] plus the ridge of a prior: the sketch's size is that of its noise at most."""
        noise = self.s.square().mean().clamp(min=1e-300)
        return self.a.T @ self.a + torch.eye(self.a.shape[1], dtype=torch.float64) * noise / PRIOR_VARIANCE

    def estimate(self) -> Tensor:
        """Return the posterior mean [C] of the unknowns."""
        mean: Tensor = torch.linalg.solve(self.gram, self.a.T @ self.s)
        return mean

    def alignment(self, unknowns: Tensor) -> Tensor:
        """Return [M] the cosine, up to one factor, of the sketch with that of each of the `unknowns` [M, C]."""
        size = ((unknowns @ self.gram) * unknowns).sum(1).clamp(min=1e-300).sqrt()
        return (unknowns @ (self.a.T @ self.s)) / size

    def nearest_cone(self) -> Tensor:
        """Return the label [1] of one example: the least residual over p_j >= 0, with a penalty on uneven p."""
        classes = self.a.shape[1]
        residuals = []
        for c in range(classes):
            edges = torch.cat([self.a[:, :c], self.a[:, c + 1 :]], 1) - self.a[:, c : c + 1]
            uneven = torch.eye(classes - 1, dtype=torch.float64) - 1 / (classes - 1)
            rows = torch.cat([edges, uneven * edges.norm() / (classes - 1) ** 0.5])
            right = torch.cat([self.s, self.s.new_zeros(classes - 1)])
            residuals.append(float(scipy.optimize.nnls(rows.numpy(), right.numpy(), maxiter=NNLS_STEPS)[1]))
        return torch.tensor(residuals).argmin(keepdim=True)


def logit_slopes(plan: Plan, params: Params, generator: torch.Generator) -> Tensor:
    """Return the mean derivative [n, C] float32 of the logits by the weights, over uniform noise images."""
    low, high = plan.data_range
    noise = low + (high - low) * torch.rand(NOISE_IMAGES, *plan.spec.shape, generator=generator)
    noise = noise.to(next(iter(params.values())).device)
    rows = gradients(lambda p: plan.net(p, noise).mean(0), params, plan.spec.classes)
    layout = Layout.of(params)
    return torch.stack([layout.pack(row).detach() for row in rows], 1)


def linearized(plan: Plan, rounds: Sequence[Equations], generator: torch.Generator) -> LinearSketch:
    """Return the equations in mean p - y that a sketch's rounds give, A = Z J."""
    parts = [r.z(logit_slopes(plan, r.params, generator)).double() for r in rounds]
    return LinearSketch(torch.cat(parts).cpu(), torch.cat([r.s for r in rounds]).cpu())


def bias_signal(rounds: Sequence[Equations]) -> Tensor:
    """Return Stein's estimate [C] float64, on the CPU, of the gradient of the head's bias, the mean over rounds."""
    estimates = [Layout.of(r.params).unpack(r.z.transposed(r.s) / r.z.count)[HEAD_BIAS].cpu() for r in rounds]
    return torch.stack(estimates).mean(0)


def sketched_labels(
    plan: Plan, sketch: Sketch, batch: int, generator: torch.Generator, method: Literal["cone", "stein"] = "cone"
) -> Tensor | None:
    """Return labels [batch] int64, sorted, from a sketch of `batch` examples' mean gradient; None for a bad sketch.

    A sketch is bad if it is not finite or all 0. The generator draws noise images; "stein" uses the estimated gradient
    of the head's bias alone.
    """
    linear = linearized(plan, sketch.rounds, generator)
    if not bool(linear.a.isfinite().all() & linear.s.isfinite().all() & (linear.s != 0).any()):
        return None
    single = batch == 1 and plan.loss == "cross_entropy"
    if method == "cone" and single:
        return linear.nearest_cone()
    prediction = typical_means(plan, sketch.rounds[0].params, generator).prediction
    if method == "cone" and plan.loss == "cross_entropy":
        return aligned_labels(linear, prediction, batch)
    signal = linear.estimate() if method == "cone" else bias_signal(sketch.rounds)
    return single_label(signal) if single else _labels(batch * (prediction - signal), batch)


def aligned_labels(linear: LinearSketch, prediction: Tensor, batch: int) -> Tensor:
    """Return the multiset of labels [batch] int64, sorted, whose mean p - y points most along the sketch.

    Mean p - y is modelled as u (wrong - counts / batch), with `wrong` even or the typical `prediction` [C]. The search
    exchanges one label at a time, from starts for several u.
    """
    even, estimate = torch.full_like(prediction, 1 / len(prediction)), linear.estimate()
    climbed = []
    for wrong in (even, prediction):
        for u in MEAN_ERRORS:
            start = torch.bincount(_labels(batch * (wrong - estimate / u), batch), minlength=len(wrong))
            climbed.append(_climbed(linear, wrong, start, batch))
    counts = max(climbed, key=lambda pair: pair[1])[0]
    return torch.repeat_interleave(counts)


def _climbed(linear: LinearSketch, wrong: Tensor, counts: Tensor, batch: int) -> tuple[Tensor, float]:
    """Return the counts [C] that no exchange of one label improves, and their alignment."""
    classes = len(counts)
    steps = torch.eye(classes, dtype=torch.int64)
    exchanges = (steps[None] - steps[:, None]).flatten(0, 1)
    best = float(linear.alignment((wrong - counts / batch)[None]))
    while True:
        neighbors = counts + exchanges
        neighbors = neighbors[(neighbors >= 0).all(1)]
        values = linear.alignment(wrong - neighbors / batch)
        if not float(values.max()) > best + abs(best) * 1e-9:
            return counts, best
        counts, best = neighbors[values.argmax()], float(values.max())


def _labels(counts: Tensor, batch: int) -> Tensor:
    return greedy_multiset(counts, torch.zeros(len(counts), dtype=torch.bool), batch)


@dataclass(frozen=True)
class BaffleLabels(LabelRecovery):
    """Labels of examples, batches and cohorts from the joint law of directions and loss differences.

    By "cone", or by "stein": the gradient of the head's bias as the server itself would estimate it, which works before
    training. On other defenses the labels are read as by `label_recovery`.
    """

    method: Literal["cone", "stein"] = "cone"

    name: ClassVar[str] = "baffle_labels"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "collusion/1")
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"baffle"})
    reference: ClassVar[str] = "this project; sign rule of Zhao et al. 2020 on the sketches of Feng et al. 2023"

    def suits(self, plan: Plan) -> bool:
        """Return whether images have classes and, for "stein", the head a trained bias."""
        return (
            plan.spec.classes > 1 and not plan.net.pixelwise and (self.method == "cone" or HEAD_BIAS in plan.net.names)
        )

    def reader(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Reader:
        """Return the labels of units that left a sketch."""
        by_unit = {sketch.unit: sketch for sketch in sketches(view)}

        def labels_of(challenge: Challenge) -> Tensor | None:
            sketch, count = by_unit.get(challenge.unit), len(challenge.unit) * challenge.batch
            return None if sketch is None else sketched_labels(view.plan, sketch, count, generator, self.method)

        return labels_of


# -- The test by which BAFFLE's paper argues that loss differences reveal nothing, used as an attack --
# App. D compares the histogram of the differences on real inputs with that on noise inputs. The histogram holds the
# K numbers without their directions, but the leak is in which direction gave which number. So the two histograms
# look alike while `baffle_labels` reads every label off the same K numbers.

EXACT_UP_TO = 50  # samples up to which the exact law of the statistic is used


def histogram_test(real: Tensor, noise: Tensor) -> Any:
    """Return the Kolmogorov-Smirnov `statistic` and `pvalue` of differences [K] on real and [K'] on noise inputs."""
    method = "exact" if min(len(real), len(noise)) <= EXACT_UP_TO else "asymp"
    return scipy.stats.ks_2samp(real.double().cpu().numpy(), noise.double().cpu().numpy(), method=method)


def most_alike(plan: Plan, rounds: Sequence[Equations], labels: Tensor, generator: torch.Generator) -> int | None:
    """Return the row of `labels` [M, B] that gives noise inputs the most similar histogram; None if not finite."""
    total = torch.zeros(len(labels), dtype=torch.float64)
    for r in rounds:
        own = DirectionMap(int(torch.randint(2**31, (), generator=generator)), r.z.entries, r.z.count)
        simulate, layout, columns = simulation(plan, r.params), Layout.of(r.params), []
        for candidate in labels:
            x = torch.randn(len(candidate), *plan.spec.shape, generator=generator).to(r.s.device)
            part = simulate(x[None], one_hot(candidate, plan.spec.classes).to(x)[None])
            columns.append(layout.pack(part).detach())
        simulated = own(torch.stack(columns, 1))
        if not bool(simulated.isfinite().all() & r.s.isfinite().all()):
            return None
        total += torch.tensor([histogram_test(r.s, column).statistic for column in simulated.T], dtype=torch.float64)
    return int(total.argmin())


@dataclass(frozen=True)
class BaffleHistogram(Attack):
    """Guesses the labels under which noise inputs give the most similar histogram; it cannot see the leak.

    For one example every class is a candidate; for more, as many random multisets as `candidates`. On other defenses
    the labels are read as by `label_recovery`.
    """

    candidates: InMemoryCount = 20

    name: ClassVar[str] = "baffle_histogram"
    kind: ClassVar[Kind] = "label"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "collusion/1")
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"baffle"})
    reference: ClassVar[str] = "the comparison of Feng et al. 2023, App. D, taken for an attack"

    def suits(self, plan: Plan) -> bool:
        """Return whether targets are classes of whole images."""
        return super().suits(plan) and not plan.net.pixelwise

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the labels [U * B] int64 of every challenge, as a sorted multiset. Granted labels are not used."""
        by_unit = {sketch.unit: sketch for sketch in sketches(view)}
        plain = {e.unit: e for e in view.defense.evidence(view)}
        classes, guesses = view.plan.spec.classes, []
        for challenge in challenges:
            count, sketch, best = len(challenge.unit) * challenge.batch, by_unit.get(challenge.unit), None
            labels = torch.arange(classes)[:, None]
            if count > 1:
                labels = torch.randint(0, classes, (self.candidates, count), generator=generator).sort().values
            if sketch is not None and bool(sketch.rounds[0].s.any()):
                best = most_alike(view.plan, sketch.rounds, labels, generator)
            y = read_labels(plain.get(challenge.unit), view.plan, count, generator) if best is None else labels[best]
            guesses.append(Guess(y=y, evaluations=len(labels)))
        return guesses


@dataclass(frozen=True)
class BaffleSketch(DLG):
    """Gradient matching on sketches: minimize ||Z grad(x, y) - s||^2 / ||s||^2 over images, all rounds together.

    Labels come from the same sketch first. At epoch level an update that is a plain sum of estimates is split into its
    steps' sketches. Without sketches the attack is iDLG on the defense's evidence.

    Attributes:
        hopeless: of DLG; sketches are nearly exact, so a search that ends above it ended in a local minimum, of which
            trained networks have many.
        smoothness: weight of the total variation of images, which determines pixels that too few equations leave open.
        box: weight of the mean squared distance of pixels from the data range.
    """

    label: Label = "inferred"
    restarts: int = 6
    hopeless: float = 3e-4
    patience: int = 50
    progress: float = 0.02
    smoothness: NonNegative = 1e-4
    box: NonNegative = 1.0

    name: ClassVar[str] = "baffle_sketch"
    version: ClassVar[str] = "2"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "collusion/1")
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"baffle"})
    reference: ClassVar[str] = "this project; gradient matching of Zhu, Liu and Han 2019 on Feng et al. 2023"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the sketches of the view's units; the plain evidence where there are none."""
        return sketch_evidence(view, sketches(view)) or super().evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge. The confidence is the minimized function: relative mismatch and prior."""
        known = {sketch.unit: sketch for sketch in sketches(view)}
        if not known:
            return IDLG(label=self.label, budget=self.budget).run(view, challenges, generator)
        infer, labelled = self.label == "inferred" and view.plan.spec.classes > 1, []
        for challenge in challenges:
            sketch, count = known.get(challenge.unit), len(challenge.unit) * challenge.batch
            if sketch is not None and challenge.y is None and infer:
                labels = sketched_labels(view.plan, sketch, count, generator)
                if labels is not None:
                    y = one_hot(labels, view.plan.spec.classes).float()
                    challenge = replace(challenge, y=y.unflatten(0, (len(challenge.unit), -1)))
            labelled.append(challenge)
        return super().run(view, labelled, generator)

    def prior(self, evidence: Evidence, plan: Plan) -> Penalty | None:
        """Return the prior on images."""
        if not modality_in(plan).smooth or not (self.smoothness or self.box):
            return None
        low, high = plan.data_range
        return ImagePrior(self.smoothness, self.box, low=low, high=high)
