"""Rows of tables: how they are encoded is public, which columns are right is told, and TabLeak finds them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observations import ask, seeded, updates, uploads
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench import evaluate
from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.search.starts import Starts
from ppbench.attacks.reconstruction.tableak import TabLeak, pooled_ends
from ppbench.base.bars import Bars
from ppbench.base.errors import UsageError
from ppbench.commands.terminal import evaluation_json
from ppbench.federation.evidence import simulation
from ppbench.federation.plan import Columns, Local, Plan
from ppbench.federation.view import View
from ppbench.nets.net import initial, net_spec
from ppbench.questions.image_metrics import ImageScore, image_metrics
from ppbench.questions.images import NUMBER_TOLERANCE, row_accuracy
from ppbench.records.run_files import origin_of
from ppbench.records.store import Store
from ppbench.task.user_data import open_dataset

COLUMNS = Columns(4, (3, 5, 2))
PLAN = Plan(
    net_spec("mlp", (COLUMNS.width,), 2, {"hidden": 32, "activation": "sigmoid"}),
    1,
    Local("gradient"),
    data_range=(-4.0, 4.0),
    columns=COLUMNS,
)
FEW = TabLeak(budget=1600, tries=4)


def rows(count: int, seed: int = 0) -> Tensor:
    """Return valid rows [count, D]."""
    g = seeded(seed)
    groups = [one_hot(torch.randint(width, (count,), generator=g), width).float() for width in COLUMNS.categories]
    return torch.cat([torch.randn(count, COLUMNS.numbers, generator=g).clamp(-3, 3), *groups], 1)


def accuracies(guess: Guess, truth: Tensor) -> list[float]:
    """Return the best accuracy that any guessed row has for each true one."""
    return [max(row_accuracy(guesses, one, COLUMNS) for guesses in guess.x) for one in truth]


def posed(batch: int, count: int = 2, noise: bool = False) -> tuple[View, Tensor]:
    """Return a server's view of `count` gradients at random weights, and the rows [count, batch, D] behind them."""
    x, y = rows(count * batch).unflatten(0, (count, batch)), torch.arange(count * batch).view(count, batch) % 2
    params = initial(PLAN.spec, 1)
    observed = updates(simulation(PLAN, params), x, one_hot(y, 2).float())
    if noise:
        g = seeded(5)
        observed = [{n: 1e-3 * torch.randn(v.shape, generator=g) for n, v in one.items()} for one in observed]
    return uploads(PLAN, params, observed), x


@pytest.fixture
def table(tmp_path):
    jobs = ["nurse", "", "clerk", "nurse"]
    lines = [f"{i % 7},{jobs[i % 4]},{'yes' if i % 3 else 'no'},{i * 0.5},{i % 2}" for i in range(60)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["age,job,ill,dose,y", *lines]))
    return path


def test_a_table_tells_its_columns_numbers_first(table, tmp_path):
    data = open_dataset(f"csv:{table}", seed=0, root=tmp_path)
    assert data.columns == Columns(2, (3, 2))  # a missing category is one of its own
    assert torch.equal(data.columns.rounded(data.train.x), data.train.x)
    assert open_dataset("digits", seed=0, root=tmp_path).columns is None
    with pytest.raises(UsageError, match="do not fit"):
        replace(data, columns=Columns(2, (3, 3)))


@pytest.mark.parametrize(("numbers", "categories"), [(-1, ()), (2, (3, 0))])
def test_columns_that_cannot_be_are_refused(numbers, categories):
    with pytest.raises(UsageError, match="cannot be"):
        Columns(numbers, categories)


def test_a_view_from_disk_has_the_columns(tmp_path):
    view, _ = posed(1)
    view.save(tmp_path)
    assert View.load(tmp_path).plan.columns == COLUMNS


@given(st.integers(0, 1000))
def test_perfect_rows_have_all_columns_right_and_each_wrong_one_counts(seed):
    x = rows(1, seed)[0]
    assert row_accuracy(x, x, COLUMNS) == 1
    far = x.clone()
    far[0] += 1.01 * NUMBER_TOLERANCE
    far[1] -= 0.99 * NUMBER_TOLERANCE
    far[4:7] = far[4:7].roll(1)
    far[7:12] *= 0.3  # still the largest of its group
    assert row_accuracy(far, x, COLUMNS) == 5 / 7
    assert row_accuracy(torch.full_like(x, torch.nan), x, COLUMNS) == 0


def test_a_category_that_training_never_had_is_not_found():
    x = rows(1)[0]
    unseen = x.clone()
    unseen[4:7] = 0
    assert row_accuracy(x, unseen, COLUMNS) == 6 / 7


def test_the_accuracy_is_a_mean_beside_chance_and_absent_without_columns():
    def score(index: int, **label: float) -> ImageScore:
        kept = ("psnr", "rmse", "rmse_raw", "ssim", "label", "confidence", "at_truth")
        return ImageScore(probe=index, client=0, index=0, evaluations=1, **dict.fromkeys(kept), **label)

    known = image_metrics(
        [score(0, accuracy=1.0, blind_accuracy=0.5), score(1, accuracy=0.5, blind_accuracy=0.25)], 2, 0
    )
    metric = known["reconstruction_accuracy"]()
    assert (metric.value, metric.chance, metric.n) == (0.75, 0.375, 2) and not metric.higher_is_safer
    assert "reconstruction_accuracy" not in image_metrics([score(0)], 2, 0)


@pytest.mark.parametrize("batch", [1, 4])
def test_planted_rows_are_found_valid(batch):
    view, truth = posed(batch)
    for guess, x in zip(FEW.run(view, ask(2, batch), seeded()), truth, strict=True):
        assert torch.equal(COLUMNS.rounded(guess.x), guess.x)
        assert accuracies(guess, x) == [1.0] * batch
        assert 0 <= guess.confidence <= 1 and 0 < guess.evaluations <= FEW.budget


def test_nothing_is_found_in_noise():
    view, truth = posed(1, count=12, noise=True)
    guesses = replace(FEW, budget=80).run(view, ask(12), seeded())
    table = torch.tensor([[row_accuracy(g.x[0], x[0], COLUMNS) for x in truth] for g in guesses])
    orders = torch.stack([torch.randperm(12, generator=seeded(i)) for i in range(999)])
    others = table[torch.arange(12), orders].mean(1)
    assert table.diagonal().mean() <= others.max()
    assert all(torch.equal(COLUMNS.rounded(g.x), g.x) for g in guesses)


@pytest.mark.nightly
def test_the_pool_disagrees_more_where_nothing_is_told():
    sure, unsure = (FEW.run(posed(4, 2, noise)[0], ask(2, 4), seeded()) for noise in (False, True))
    assert sum(g.confidence for g in sure) < 0.75 * sum(g.confidence for g in unsure)


@pytest.mark.parametrize("budget", [1, 2, 7, 50])
def test_budgets_are_kept_and_one_bad_upload_harms_no_other(budget):
    view, _ = posed(2)
    attack = replace(FEW, budget=budget)
    first, again = (attack.run(view, ask(2, 2), seeded()) for _ in range(2))
    assert all(0 < g.evaluations <= budget and torch.equal(g.x, h.x) for g, h in zip(first, again, strict=True))
    bad = {n: torch.full_like(v, torch.nan) for n, v in view.mail[3].message.params.items()}
    spoilt = replace(view.mail[3], message=replace(view.mail[3].message, params=bad))
    guesses = attack.run(replace(view, mail=(*view.mail[:3], spoilt)), ask(2, 2), seeded())
    assert torch.allclose(guesses[0].x, first[0].x, atol=1e-3) and guesses[1].x.isfinite().all()


def test_tables_without_numbers_have_only_categories_to_settle():
    columns = Columns(0, (3, 5))
    plan = replace(PLAN, spec=net_spec("mlp", (8,), 2, {"activation": "sigmoid"}), columns=columns)
    x = torch.cat([one_hot(torch.tensor([1]), 3), one_hot(torch.tensor([4]), 5)], 1).float()[None]
    params = initial(plan.spec, 1)
    view = uploads(plan, params, updates(simulation(plan, params), x, torch.eye(2)[None, :1]))
    (guess,) = FEW.run(view, ask(1), seeded())
    assert torch.equal(guess.x, x[0])


def ensemble(x: Tensor) -> Starts:
    return Starts(x, torch.eye(2)[torch.zeros(x.shape[:2], dtype=torch.int64)], False)


def test_an_ensemble_is_put_in_one_order_before_it_is_pooled():
    x = rows(6, 3)
    orders = torch.stack([torch.randperm(6, generator=seeded(i)) for i in range(5)])
    pool = pooled_ends(ensemble(x[orders]), torch.tensor([2.0, 1, 3, 4, torch.inf]), COLUMNS)
    assert pool.best == 1 and torch.equal(pool.x, x[orders[1]]) and pool.disagreement < 1e-6


def test_the_majority_and_the_median_decide():
    x = rows(1).repeat(5, 1, 1)
    off = x.clone()
    off[0, :, :4] += 9
    off[0, :, 4:7] = off[0, :, 4:7].roll(1, -1)
    pool = pooled_ends(ensemble(off), torch.zeros(5), COLUMNS)
    assert torch.equal(pool.x, x[0]) and 0 < pool.disagreement < 1


def test_images_are_not_for_it():
    assert FEW.suits(PLAN) and not FEW.suits(replace(PLAN, columns=None)) and not TabLeak.standard
    with pytest.raises(UsageError, match="settle"):
        TabLeak(settle=2.0).check()


def test_an_evaluation_of_a_table_tells_the_accuracy_of_its_columns_and_how_they_were_read(table, tmp_path):
    lines = []
    progress = Bars(quiet=True)
    progress.say = lines.append
    evaluation = evaluate(
        **dict(defense="none", dataset=f"csv:{table}", model="mlp", clients=2, rounds=1, victims=4, attack_batch=(1,)),
        **dict(stages=("init",), threats=("server/1",), attacks=("tableak",), out=tmp_path / "out", workers=1),
        settings={"tableak.budget": 400},
        progress=progress,
    )
    label = {r.config.defense.id: r.metric("reconstruction_accuracy") for r in evaluation.records}
    assert label["none"].value == 1 and 0 < label["none"].chance < 1
    assert label["full_noise"].value < 0.9
    read = "60 rows; numbers: age, dose; categories (values): job (3), ill (2); target: y (2 classes)"
    assert (f"csv:t.csv: {read}",) == tuple(lines) == evaluation.notes == origin_of(Store(evaluation.out)).data
    assert evaluation_json(evaluation)["data"] == lines
    assert f"<br>csv:t.csv: {read}" in (evaluation.out / "leaderboard.html").read_text()
    assert "reconstruction_accuracy_chance" in (evaluation.out / "leaderboard.csv").read_text().splitlines()[0]
