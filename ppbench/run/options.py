"""Options of an evaluation by part: name, type, bounds, default and help of each, once.

`EvaluateConfig`, the sections of suites and the command line are made of these classes: a new option is one line here.
They are plain classes, without pydantic and torch, for which `ppbench --help` would wait.
"""

# No `from __future__ import annotations`: older pydantic looks such names up in the module of the model, not here.
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import get_annotations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from ppbench.federation.bounds import LARGEST_COUNT, SMALLEST_POSITIVE
from ppbench.federation.threats import HONEST_SERVER, THREATS

if TYPE_CHECKING:
    from typing import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Any:
        """Return a decorator that changes nothing: only type checkers read it."""
        return lambda cls: cls


ModelOptions = dict[str, str | int | float | bool]
Stage = Literal["init", "iterate", "final", "audit"]
FLOAT32 = 1e38
"""The largest learning rate: training that diverges is a result, a rate that float32 cannot hold is none."""
MAX_LIST = 1000
"""Values that a list may have: of a control parameter, of sizes of batches, of rounds."""


@dataclass(frozen=True)
class Option:
    """Help and bounds of an option, in its annotation; pydantic takes the bounds by `annotated_types`' protocol.

    help: as `ppbench evaluate --help` prints it; "" for what the command line does not offer. ge, gt, le, lt: bounds of
    a number; min_length, max_length: of a list.
    """

    help: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    __is_annotated_types_grouped_metadata__: ClassVar[Literal[True]] = True

    def __iter__(self) -> Iterator[Any]:
        """Yield the bounds as pydantic reads them."""
        from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

        bounds = {Ge: self.ge, Gt: self.gt, Le: self.le, Lt: self.lt, MinLen: self.min_length, MaxLen: self.max_length}
        for kind, value in bounds.items():
            if value is not None:
                yield kind(value)


@dataclass_transform(kw_only_default=True)
class OptionGroup:
    """Options that belong together; a pydantic model that inherits from groups has their options as fields."""


def option_names(group: type[OptionGroup]) -> tuple[str, ...]:
    """Return the names of a group's own options."""
    return tuple(get_annotations(group))


def offered(group: type[OptionGroup]) -> dict[str, tuple[type, str]]:
    """Return the options that a group offers on the command line: the type of their word, and their help."""
    options: dict[str, tuple[type, str]] = {}
    for name, hint in get_type_hints(group, include_extras=True).items():
        help_ = next(part.help for part in hint.__metadata__ if isinstance(part, Option))
        if help_:
            numeric = (kind for kind in (int, float, bool) if hint.__origin__ in (kind, kind | None))
            options[name] = next(numeric, str), help_
    return options


class DefenseOptions(OptionGroup):
    """Over which values of its control parameter a defense is evaluated: its own grids, or these values."""

    grid: Annotated[
        Literal["quick", "paper"] | Annotated[tuple[float, ...], Option(min_length=1, max_length=MAX_LIST)],
        Option("quick, paper, or values of the control parameter, as 0.01,0.1."),
    ] = "quick"


class TaskOptions(OptionGroup):
    """The data, the network, and who holds what.

    dataset: `configure` puts the folder of downloads in place of "{data}". train: drawn by seed; few are
    easily memorized. public: set apart first. domains: groups of clients hold one domain each.
    """

    dataset: Annotated[
        str, Option("NAME or NAME:ARGUMENT, as parquet:FOLDER (`ppbench list datasets`), or MODULE:FUNCTION of yours.")
    ] = "digits"
    model: Annotated[
        str, Option("NAME (`ppbench list models`), or MODULE:FACTORY of yours: any nn.Module that classifies.")
    ] = "dlnet"
    loss: Annotated[
        Literal["cross_entropy", "squared", "bce", "next_token"],
        Option("cross_entropy, squared, bce for masks, or next_token for texts and a decoder, as gpt."),
    ] = "cross_entropy"
    train: Annotated[
        int | None, Option("Training examples that the clients share; all by default.", ge=1, le=LARGEST_COUNT)
    ] = None
    public: Annotated[
        float,
        Option("Share of the training part that no client has and adversaries may use, as 0.5.", ge=0, lt=1),
    ] = 0.0
    partition: Annotated[str, Option("iid, imbalanced, dirichlet:ALPHA or domains.")] = "iid"
    clients: Annotated[int, Option("Number of clients.", ge=1, le=100_000)] = 10


class FederationOptions(OptionGroup):
    """How the model is trained.

    schedule: round_robin is the SPN paper's for DLNet. delta: local epochs, then start minus end. optimizer to decay:
    of who steps; the rate is multiplied by `decay` at the rounds `decay_at`.
    """

    rounds: Annotated[int, Option("Rounds of training.", ge=1, le=1_000_000)] = 40
    local_epochs: Annotated[int, Option("Epochs of a client's local training (delta).", ge=1, le=10_000)] = 1
    batch_size: Annotated[int, Option("Examples in a training batch.", ge=1, le=LARGEST_COUNT)] = 32
    sample: Annotated[int, Option("Clients drawn at random in each round; 0: all take part.", ge=0, le=100_000)] = 0
    schedule: Annotated[Literal["round_robin", "parallel"], Option("round_robin or parallel.")] = "round_robin"
    upload: Annotated[
        Literal["delta", "gradient"],
        Option("delta (FedAvg: local epochs) or gradient (FedSGD: one batch a round)."),
    ] = "delta"
    optimizer: Annotated[
        Literal["sgd", "adam"], Option("adam or sgd: the clients', or with gradients the server's.")
    ] = "adam"
    lr: Annotated[float, Option("Learning rate of that optimizer.", ge=SMALLEST_POSITIVE, le=FLOAT32)] = 5e-3
    momentum: Annotated[float, Option(ge=0, lt=1)] = 0.0
    beta2: Annotated[float, Option(gt=0, lt=1)] = 0.999
    decay_at: Annotated[tuple[Annotated[int, Option(ge=0, le=1_000_000)], ...], Option(max_length=MAX_LIST)] = (20, 32)
    decay: Annotated[float, Option(gt=0, le=1)] = 0.5


class QuestionOptions(OptionGroup):
    """What is attacked: whose view, of which model, on how many victims, by which attacks.

    attacks: of those that apply to the defense. probe: gradient: uploads one gradient of the batch; local: its part of
    a round; the adversary sees all rounds. victims: rounded up to whole batches. tuning: of the test part, before the
    victims are attacked; or 0. budget: None: each attack's own. canaries: a coin decides on the membership of each.
    iterate: what clients train on in the next round, asked about records only. threats: of reconstruction, label and
    tracing attacks.
    """

    attacks: Annotated[
        tuple[str, ...],
        Option("Names separated by commas, quick (few, where they show something), standard (in every cell), or all."),
    ] = ("standard",)
    attack_batch: Annotated[
        tuple[Annotated[int, Option(gt=0, le=100_000)], ...],
        Option("Sizes of victims' batches, as 1,8.", min_length=1, max_length=MAX_LIST),
    ] = (1, 8)
    probe: Annotated[
        Literal["gradient", "local"], Option("gradient or local: what a probed client does with the victims' batch.")
    ] = "gradient"
    probe_rounds: Annotated[int, Option("Rounds in which it holds the batch.", ge=1, le=100)] = 1
    victims: Annotated[int, Option("Victim images per cell.", ge=1, le=LARGEST_COUNT)] = 20
    batches: Annotated[
        int, Option("Least number of batches per cell, where fewer would hold the victims.", ge=0, le=100_000)
    ] = 0
    candidates: Annotated[
        int, Option("Number of members, and of non-members, under attack.", ge=4, le=LARGEST_COUNT)
    ] = 200
    tuning: Annotated[int, Option("Test images on which an attack's settings are tuned.", ge=0, le=100_000)] = 4
    budget: Annotated[
        int | None, Option("Gradient evaluations per victim, for attacks that search.", ge=1, le=LARGEST_COUNT)
    ] = None
    references: Annotated[int, Option("Reference runs of an audit: an even number, 0 for none.", ge=0, le=10_000)] = 0
    canaries: Annotated[int, Option("Canaries of each of three families in an audit.", ge=0, le=LARGEST_COUNT)] = 80
    canary_clients: Annotated[
        int,
        Option("Clients of an audit that send random directions, to estimate a client's epsilon.", ge=0, le=10_000),
    ] = 0
    stages: Annotated[
        tuple[Stage, ...],
        Option(
            "init, iterate, final, audit (membership with canaries and references); separated by commas.", min_length=1
        ),
    ] = ("init", "iterate", "final")
    threats: Annotated[tuple[str, ...], Option(f"{', '.join(THREATS)}; separated by commas.", min_length=1)] = (
        HONEST_SERVER.name,
    )


class RunOptions(OptionGroup):
    """Seed, and where and how it is computed.

    weights: null where there is no file either. tf32: factors of products are rounded to ten bits. isolate:
    `adversary.isolation`.
    """

    weights: Annotated[
        str | None,
        Option(
            "AlexNet's convolutions for LPIPS and Feat-MSE; default: PPBENCH_WEIGHTS, else torchvision's cache, else "
            "null."
        ),
    ] = None
    device: Annotated[str, Option("auto, cpu, cuda, or as torch names it.")] = "cpu"
    tf32: Annotated[
        bool,
        Option("Allow TF32 in convolutions and matrix products on a GPU: faster, with other numbers; records say so."),
    ] = False
    seed: Annotated[int, Option("Master seed: one seed, one result.", ge=0, le=2**63 - 1)] = 0
    isolate: Annotated[
        bool,
        Option(
            "Run attacks of other packages in separate processes without files, network and truth, as far as this "
            "system allows; a secret in OUT/salt takes part in every draw."
        ),
    ] = False
