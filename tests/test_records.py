"""Aggregation and the store: planted scores, failures, clusters; atomic, honest and canonical files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppbench.base.errors import UsageError
from ppbench.metrics.audit import epsilon_lower
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.labels import LabelScore
from ppbench.questions.membership import MemberScore
from ppbench.questions.tracing import TraceScore
from ppbench.records import files
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import Metric, Record, Victim
from ppbench.records.store import MARKER, Store, canonical
from ppbench.report.verify import record_problems


def image(probe: int, psnr: float | None = 30.0, index: int = 0, **more: object) -> ImageScore:
    known = psnr is not None
    figures: dict[str, object] = (
        dict(rmse=0.1, rmse_raw=0.2, ssim=0.9) if known else dict(rmse=None, rmse_raw=None, ssim=None)
    )
    base = dict(probe=probe, client=0, index=index, psnr=psnr, label=True, confidence=0.0, at_truth=0.0, evaluations=9)
    return ImageScore.model_validate(base | figures | more)


def metrics(victims: list[Victim], seed: int = 0) -> dict[str, Metric]:
    return {m.name: m for m in aggregate(victims, classes=10, seed=seed)}


def record(victims: list[Victim] | None = None, seed: int = 1, **more: object) -> Record:
    scores = [image(i, 10.0 + i) for i in range(5)] if victims is None else victims
    config = dict(
        schema="ppbench.run/1", suite="s", threat_model=dict(id="server/1", sees="all", knows_defense=False),
        defense=dict(id="dp", version="1", parameters={"sigma": 0.1}, control=dict(name="sigma", value=0.1)),
        attack=dict(id="dlg", version="1", kind="reconstruction", parameters={}, adaptive=False),
        federation=dict(clients=4, rounds=1, schedule="parallel", upload="delta", local_epochs=1, batch=1,
                        optimizer="sgd", lr=0.1, momentum=0.0, decay_at=[], decay=1.0, partition="iid",
                        server_optimizer="sgd", server_lr=1.0, backend="loop", device="cpu", dtype="float32"),
        data=dict(name="d", sha256="", train=1, test=1),
        model=dict(id="m", options={}, shape=[1], classes=10, parameters=1, loss="cross_entropy"),
        stage="init", batch_size=1, victims=5, seed=seed,
    )  # fmt: skip
    draft = Record.model_validate(
        dict(
            cell_id="", config=config, victims=scores, metrics=aggregate(scores, classes=10, seed=seed),
            utility=dict(accuracy=None, low=None, high=None, n=10, chance=0.1, curve=[(1, 0.5)], reason="not trained"),
            cost=dict(bytes_up=1.5, bytes_down=2.0, bytes_setup=0),
            privacy=dict(epsilon=None, delta=None, reason="none"), status="complete",
            environment=dict(ppbench="0", python="3", torch="2", device="cpu", threads=1, dtype="float32"),
        ) | more
    )  # fmt: skip
    return draft.model_copy(update={"cell_id": draft.config.cell_id()})


def test_image_cells_give_every_metric_with_n_an_interval_and_its_method() -> None:
    found = metrics([image(i, 10.0 + 2 * i) for i in range(11)])
    assert list(found) == [
        "psnr_median", "psnr_p95", "psnr_max", "rmse_mean", "rmse_raw_mean", "rmse_unit_mean", "ssim_mean",
        "share_above_20db", "label_accuracy", "at_truth_median", "ratio_median",
    ]  # fmt: skip
    assert found["psnr_median"].value == 20 and found["psnr_max"].value == 30
    assert found["psnr_p95"].value == pytest.approx(29)
    assert found["share_above_20db"].value == pytest.approx(5 / 11)
    assert found["psnr_max"].low is None and "largest" in found["psnr_max"].method
    for name, metric in found.items():
        assert metric.n == 11 and metric.method
        if name not in ("psnr_max", "ratio_median"):
            assert metric.low <= metric.value <= metric.high


def newer(probe: int, psnr: float | None, **more: object) -> ImageScore:
    """Return a score as the scorer makes it today."""
    figures = dict(mse=None if psnr is None else 10 ** (-psnr / 10), blind=9.0, oracle=psnr or 0.0)
    return image(probe, psnr, **{**figures, "lpips": 0.3, "feat_mse": 2.0, "path": [(3, 8.0)], **more})


def test_newer_scores_give_further_metrics_after_the_older_ones() -> None:
    old, new = (metrics([make(i, 10.0 + i) for i in range(20)]) for make in (image, newer))
    assert list(new) == [
        *old, "psnr_worst_decile", "test_mse_mean", "lpips_mean", "feat_mse_mean", "blind_median", "oracle_median",
        "evaluations_per_broken",
    ]  # fmt: skip
    assert all(new[name] == old[name] for name in old)
    assert new["psnr_worst_decile"].value == 28.5 and new["oracle_median"].value == 19.5
    assert new["test_mse_mean"].value == pytest.approx(np.mean([10 ** (-1 - i / 10) for i in range(20)]))
    assert new["lpips_mean"].value == 0.3 and new["feat_mse_mean"].value == 2 and new["blind_median"].value == 9
    assert new["test_mse_mean"].higher_is_safer and new["lpips_mean"].higher_is_safer
    assert not new["psnr_worst_decile"].higher_is_safer


def test_the_price_of_a_victim_counts_a_batch_once_and_those_who_were_not_broken_too() -> None:
    scores = [newer(i // 2, 25.0 if i < 3 else 15.0, index=i % 2, evaluations=100 * (i // 2 + 1)) for i in range(4)]
    assert metrics(scores)["evaluations_per_broken"].value == 100
    none = metrics([newer(0, 20.0), newer(1, None)])["evaluations_per_broken"]
    assert none.value is None and "no victim" in none.reason
    assert metrics([newer(0, 40.0, evaluations=0)])["evaluations_per_broken"].value == 0, "a closed form"


def test_a_failed_reconstruction_is_as_far_off_as_can_be_and_perceived_as_the_scorer_saw_it() -> None:
    found = metrics([newer(0, 20.0), newer(1, None, lpips=0.7, feat_mse=4.0)])
    assert found["test_mse_mean"].value == pytest.approx((0.01 + 1) / 2)
    assert found["lpips_mean"].value == pytest.approx(0.5) and found["feat_mse_mean"].value == 3


def test_perceptual_figures_are_null_with_the_reason_where_one_image_has_none() -> None:
    found = metrics([newer(i, 20.0, lpips=None if i else 0.1, feat_mse=None) for i in range(3)])
    for name in ("lpips_mean", "feat_mse_mean"):
        assert found[name].value is None and "AlexNet" in found[name].reason and "28 pixels" in found[name].reason
    mixed = metrics([newer(0, 20.0), image(1, 20.0)])
    assert mixed["test_mse_mean"].value is None and "before" in mixed["test_mse_mean"].reason


def test_a_failure_counts_as_a_failure() -> None:
    found = metrics([image(0, 40.0), image(1, None, label=None)])
    assert found["psnr_median"].value == 20 and found["rmse_mean"].value == pytest.approx(0.55)
    assert found["rmse_raw_mean"].value == pytest.approx(0.6) and found["ssim_mean"].value == pytest.approx(0.45)
    assert found["label_accuracy"].value == found["share_above_20db"].value == 0.5


def test_what_cannot_be_given_is_null_with_the_reason() -> None:
    found = metrics([image(i, label=None, ssim=None, at_truth=None) for i in range(3)])
    for name in ("ssim_mean", "label_accuracy", "at_truth_median", "ratio_median"):
        assert found[name].value is None and found[name].reason
    assert metrics([image(i, ratio=float(i)) for i in range(3)])["ratio_median"].value == 1
    assert aggregate([], classes=10, seed=0) == []


def test_intervals_know_which_images_shared_a_batch() -> None:
    apart = [image(i, float(10 + i % 8 * 5)) for i in range(64)]
    together = [image(i // 8, float(10 + i // 8 * 5), i % 8) for i in range(64)]
    one, two = metrics(apart)["psnr_median"], metrics(together)["psnr_median"]
    assert one.value == two.value and two.high - two.low > 1.5 * (one.high - one.low)


def candidate(index: int, score: float, family: str, **more: object) -> MemberScore:
    base = dict(index=index, half=index // 2 % 2, member=index % 2 == 0, score=score, decision=index % 2 == 0)
    return MemberScore.model_validate({**base, "family": family, **more})


def test_canaries_stand_beside_average_records_and_change_none_of_their_figures() -> None:
    rng = np.random.default_rng(0)
    average = [candidate(i, float(rng.normal()), "average") for i in range(400)]
    blank = [candidate(i, float(i % 2 == 0), "blank") for i in range(104)]
    noise = [candidate(i, 0.0, "noise") for i in range(104)]
    alone, found = metrics(average), metrics([*average, *blank, *noise])
    assert list(found) == [*alone, "canary_auc", "canary_tpr_at_1pct_fpr", "canary_tpr_at_0.1pct_fpr", "auc_blank",
                           "auc_noise"]  # fmt: skip
    assert all(found[name] == alone[name] for name in ("asr", "auc", "tpr_at_1pct_fpr"))
    assert (found["auc_blank"].value, found["auc_noise"].value, found["canary_auc"].value) == (1, 0.5, 0.75)
    tpr = found["canary_tpr_at_1pct_fpr"]
    assert tpr.value == 0.5 and tpr.realized_fpr == 0 and tpr.n == 208 and "both halves" in tpr.method
    few = metrics([*average, *blank])["canary_tpr_at_1pct_fpr"]
    assert few.value is None and "52 non-members in both halves" in few.reason


def test_three_families_of_seventy_support_one_percent_with_one_threshold_for_both_halves() -> None:
    some = [candidate(i, float(i % 2 == 0), name) for name in ("a", "b", "c") for i in range(70)]
    found = metrics(some)["canary_tpr_at_1pct_fpr"]
    assert found.value == 1 and "one threshold for both halves" in found.method
    assert metrics(some)["auc"] == metrics(some)["canary_auc"].model_copy(
        update={"name": "auc", "low": metrics(some)["auc"].low, "high": metrics(some)["auc"].high}
    ), "where there are only canaries, the plain figures are theirs"


def test_an_audit_that_abstains_gives_a_bound_on_epsilon_and_no_asr() -> None:
    surest = [candidate(i, 1.0 - i % 2, "blank") for i in range(100)]
    silent = [candidate(100 + i, 0.5, "average", decision=None) for i in range(100)]
    found = metrics([*surest, *silent])
    assert found["epsilon_lower"].value == rounded_to(epsilon_lower(100, 50, 50)) and found["epsilon_lower"].value > 2
    assert found["epsilon_lower"].n == 100 and not found["epsilon_lower"].higher_is_safer
    assert found["asr"].value is None and "abstains" in found["asr"].reason and found["auc"].value == 0.5
    other = {m.name: m for m in aggregate([*surest, *silent], classes=10, seed=0, delta=1e-2)}
    assert other["epsilon_lower"].value < found["epsilon_lower"].value and "delta 0.01" in other["epsilon_lower"].method
    wrong = [s.model_copy(update={"score": 1 - s.score}) for s in surest]
    assert metrics([*wrong, *silent])["epsilon_lower"].value == 0
    alone = metrics(silent)["epsilon_lower"]
    assert alone.value is None and "independent coins" in alone.reason, "average records are in by halves, not by coins"
    assert "epsilon_lower" not in metrics(surest)


def rounded_to(value: float) -> float:
    return float(f"{value:.12g}")


def test_records_of_before_load_and_give_the_same_metrics(tmp_path: Path) -> None:
    """A record as 0.1 wrote it: without the later fields, in file and name."""
    store, kept = Store(tmp_path / "out"), record()
    store.save(kept)
    path = store.folder / f"{kept.cell_id}.json"
    data = json.loads(path.read_text())
    later = ("mse", "lpips", "feat_mse", "blind", "oracle", "path")
    data["victims"] = [{k: v for k, v in victim.items() if k not in later} for victim in data["victims"]]
    del data["tuned"]
    path.write_text(json.dumps(data))
    loaded = store.load(kept.cell_id)
    assert loaded == kept and not list(record_problems(loaded))
    member = dict(kind="member", index=0, half=0, member=True, score=1.0, decision=True)
    assert MemberScore.model_validate(member).family == "average"


@given(st.randoms(), st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_values_do_not_depend_on_the_order_of_victims(random: object, seed: int) -> None:
    victims = [image(i // 2, 5.0 + 3 * i, i % 2, label=i % 3 == 0) for i in range(10)]
    shuffled = random.sample(victims, 10)
    one, two = metrics(victims, seed), metrics(shuffled, seed)
    assert all(one[n].value == two[n].value or one[n].value == pytest.approx(two[n].value) for n in one)


def test_aggregation_depends_on_the_seed_alone() -> None:
    victims = [image(i, 5.0 + 3 * i) for i in range(10)]
    assert metrics(victims, 1) == metrics(victims, 1)
    assert metrics(victims, 1)["rmse_mean"] == metrics(victims, 2)["rmse_mean"]  # all equal: nothing to resample
    assert metrics(victims, 1)["psnr_median"].value == metrics(victims, 2)["psnr_median"].value


def test_label_member_and_trace_cells() -> None:
    labels = [LabelScore(probe=i, client=0, index=0, label=i < 3) for i in range(4)]
    assert metrics(labels)["label_accuracy"].value == 0.75
    assert metrics(labels)["label_accuracy"].chance == pytest.approx(0.1)
    batch = [LabelScore(probe=0, client=0, index=i, label=True) for i in range(4)]
    assert metrics(batch)["label_accuracy"].chance > 0.25
    traces = [TraceScore(index=i, owner=i % 4, guess=0) for i in range(8)]
    assert (metrics(traces)["tracing_accuracy"].value, metrics(traces)["tracing_accuracy"].chance) == (0.25, 0.25)
    members = [
        MemberScore(index=i, half=i // 200, member=i % 2 == 0, score=float(i % 2 == 0), decision=i % 2 == 0)
        for i in range(400)
    ]
    found = metrics(members)
    assert found["auc"].value == found["asr"].value == found["tpr_at_1pct_fpr"].value == 1
    assert found["tpr_at_1pct_fpr"].realized_fpr == 0
    assert found["tpr_at_0.1pct_fpr"].value is None and "1000" in found["tpr_at_0.1pct_fpr"].reason


def test_halves_are_scored_apart_and_averaged() -> None:
    """Scores of one half shifted by a constant say nothing about membership; pooled they would."""
    members = [
        MemberScore(index=i, half=h, member=m, score=10.0 * h + 0.0, decision=True)
        for i, (h, m) in enumerate([(0, False)] * 5 + [(0, True)] * 5 + [(1, True)] * 9 + [(1, False)])
    ]
    assert metrics(members)["auc"].value == 0.5


def test_mixed_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="one kind"):
        aggregate([image(0), TraceScore(index=0, owner=0, guess=0)], classes=2, seed=0)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    guess = torch.rand(5, 1, 8, 8)
    guess[0] = torch.nan
    kept = store.save(record(), seconds=1.5, tensors={"guess": guess, "truth": torch.rand(5, 1, 8, 8)})
    again = Store(tmp_path / "out")
    assert again.load_all() == [kept] and again.ids() == [kept.cell_id] and again.finished(kept.cell_id)
    assert np.array_equal(again.images(kept).guess, guess.numpy(), equal_nan=True)
    assert {p.name for p in again.folder.iterdir()} == {
        f"{kept.cell_id}{end}" for end in (".json", ".timing.json", ".safetensors")
    }
    assert json.loads((again.out / MARKER).read_text())["schema"] == "ppbench.results/1"


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    tensors = {"guess": np.ones((5, 1, 2, 2), np.float32), "truth": np.zeros((5, 1, 2, 2), np.float32)}
    one, two = Store(tmp_path / "a"), Store(tmp_path / "b")
    kept = one.save(record(), seconds=1.0, tensors=tensors)
    two.save(record(), seconds=2.0, tensors=dict(reversed(tensors.items())))
    for end in (".json", ".safetensors"):
        name = f"{kept.cell_id}{end}"
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()
    assert canonical(Record.model_validate_json(canonical(kept))) == canonical(kept)


def test_a_failed_cell_is_kept_but_not_finished(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    kept = store.save(record([], status="failed", reason="boom"))
    assert store.has(kept.cell_id) and not store.finished(kept.cell_id) and not store.finished("0" * 32)
    assert store.images(kept) is None


def test_someone_elses_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        Store(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        Store(tmp_path / "thesis.tex")


@pytest.mark.parametrize("marker", ["", "[]", "{}", '{"schema": "other/1"}', "\xff"])
def test_a_marker_that_is_not_ours_is_refused(tmp_path: Path, marker: str) -> None:
    (tmp_path / MARKER).write_text(marker, encoding="latin-1")
    with pytest.raises(UsageError):
        Store(tmp_path)


def test_looking_at_a_folder_writes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    assert store.ids() == [] and store.load_all() == [] and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "damage", ["truncate", "empty", "extra field", "text for a number", "NaN", "wrong name", "binary"]
)
def test_a_damaged_record_is_reported_by_name(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path / "out")
    kept = store.save(record())
    path = store.folder / f"{kept.cell_id}.json"
    whole = path.read_text()
    if damage == "wrong name":
        path = path.rename(path.with_name("0" * 32 + ".json"))
    else:
        path.write_bytes(
            {
                "truncate": whole[: len(whole) // 2].encode(),
                "empty": b"",
                "extra field": whole.replace('"cell_id"', '"cell": 1, "cell_id"', 1).encode(),
                "text for a number": whole.replace('"batch_size": 1', '"batch_size": "1"').encode(),
                "NaN": whole.replace('"bytes_up": 1.5', '"bytes_up": NaN').encode(),
                "binary": b"\xff\xfe\x00",
            }[damage]
        )
    with pytest.raises(UsageError, match=path.name):
        store.load_all()


def test_a_corrupt_or_missing_artifact_is_reported_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    kept = store.save(record(), tensors={"guess": np.ones((2, 3)), "truth": np.ones((2, 3))})
    path = store.folder / f"{kept.cell_id}.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match=path.name):
        store.images(kept)
    path.unlink()
    with pytest.raises(UsageError, match=path.name):
        store.images(kept)
    with pytest.raises(ValueError, match="one shape"):
        store.save(record(), tensors={"guess": np.ones((2, 3)), "truth": np.ones((2, 4))})


def test_a_path_in_a_record_is_never_followed(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    kept = store.save(record(), tensors={"guess": np.ones((2, 3)), "truth": np.zeros((2, 3))})
    evil = kept.model_copy(update={"artifacts": [kept.artifacts[0].model_copy(update={"path": "../../etc/passwd"})]})
    assert (store.images(evil).truth == 0).all()


@pytest.mark.parametrize("failing", [".safetensors", ".timing.json", ".json"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_of_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store = Store(tmp_path / "out")
    first = store.save(record(seed=7))
    real = os.fsync

    def full(handle: int) -> None:
        name = os.readlink(f"/proc/self/fd/{handle}")
        if failing + "~" in name and (failing != ".json" or ".timing" not in name):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to tell which file is written")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UsageError, match="No space is left"):
        store.save(record(), seconds=1.0, tensors={"guess": np.ones((2, 3)), "truth": np.ones((2, 3))})
    assert [p.name for p in store.folder.iterdir()] == [f"{first.cell_id}.json"]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        Store(tmp_path / "out")
    (tmp_path / "ok").mkdir()
    store = Store(tmp_path / "ok")
    (tmp_path / "ok" / "records").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        store.prepare()


def test_leftovers_of_killed_runs_are_ignored_and_swept_only_if_ours(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    store = Store(tmp_path / "out")
    (tmp_path / "out").mkdir()
    host = files._host()
    (tmp_path / "out" / f"{MARKER}~{host}.{dead.pid}.tmp").write_text("{")
    store = Store(tmp_path / "out")  # killed while it wrote the marker: still an empty folder of ours
    kept = store.save(record())
    mine = store.folder / f"{'0' * 32}.json~{host}.{dead.pid}.tmp"
    alive = store.folder / f"{'0' * 32}.json~{host}.{os.getpid()}.tmp"
    elsewhere = store.folder / f"{'0' * 32}.json~other-host.{dead.pid}.tmp"
    foreign = store.folder / "notes.tmp"
    for path in (mine, alive, elsewhere, foreign):
        path.write_text("{")
    assert store.load_all() == [kept]
    store.prepare()
    assert not mine.exists() and alive.exists() and elsewhere.exists() and foreign.exists()
    assert not list(store.out.glob(f"{MARKER}~*"))


def test_a_run_killed_at_any_write_leaves_whole_cells_only(tmp_path: Path) -> None:
    """A child process dies without cleaning up at its n-th rename, for every n; the folder must stay usable."""
    code = (
        "import os, sys, pathlib\n"
        "from ppbench.records import files\n"
        "from ppbench.records.store import Store\n"
        "from ppbench.records.schema import Record\n"
        "store, left, real = Store(pathlib.Path(sys.argv[1])), [int(sys.argv[2])], files._sync_folder\n"
        "def sync(folder):\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os._exit(9)\n"
        "    real(folder)\n"
        "files._sync_folder = sync\n"
        "record = Record.model_validate_json(pathlib.Path(sys.argv[3]).read_bytes())\n"
        "import numpy as np\n"
        "store.save(record, seconds=1.0, tensors={'guess': np.ones((2, 3)), 'truth': np.ones((2, 3))})\n"
    )
    (tmp_path / "record.json").write_bytes(canonical(record()))
    for count in (1, 2, 3, 4):
        out = tmp_path / f"out{count}"
        ran = subprocess.run([sys.executable, "-c", code, str(out), str(count), str(tmp_path / "record.json")])
        assert ran.returncode == 9
        store = Store(out)
        assert len(store.load_all()) == (count == 4)
        assert store.save(record()).cell_id in store.ids()


def test_importing_schema_and_store_does_not_import_torch() -> None:
    code = "import sys, ppbench.records.schema, ppbench.records.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
