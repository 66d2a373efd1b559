"""The whole line on a tiny federation: one seed one result, resumption after a kill, controls, failures."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ppbench.attacks.reconstruction.ig import IG
from ppbench.base.errors import UsageError
from ppbench.claims.check import claimed
from ppbench.federation.plan import Data
from ppbench.report.controls import check_controls
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.experiment import resolve
from ppbench.run.schedule import plan_cells
from ppbench.run.train import mean_square
from ppbench.verification import verify

TINY = {
    **{"defense": "spn", "grid": (0.1,), "clients": 3, "rounds": 2, "train": 90, "victims": 3, "candidates": 12},
    **{"attack_batch": (1, 2), "attacks": ("dlg", "label_recovery", "tracing", "mia_loss")},
    "settings": {"dlg.budget": 20},
}
SMALL = {**TINY, "attacks": ("label_recovery",), "attack_batch": (1,), "settings": {}}


def results(out: Path) -> dict[str, bytes]:
    """Return every file of a folder but timing and cached trainings, and the page without its cells of times."""
    files = [p for p in out.rglob("*") if p.is_file() and not {"cache", "times"} & {*p.parts}]
    by_name = {str(p.relative_to(out)): p.read_bytes() for p in files if ".timing" not in p.name}
    cells = re.compile(rb'<td class="n( first)? time".*?</td>', re.DOTALL)
    by_name["leaderboard.html"], dropped = cells.subn(b"", by_name["leaderboard.html"])
    assert dropped == 2 * len(list((out / "times").iterdir())) > 0
    return by_name


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return evaluate(**TINY, out=tmp_path_factory.mktemp("first") / "out", workers=1)


def test_the_cells_are_those_asked_for(first):
    cells = {(r.config.defense.id, r.config.attack.id, r.config.stage, r.config.batch_size) for r in first.records}
    for defense in ("none", "full_noise", "spn"):
        for stage in ("init", "final"):
            for batch in (1, 2):
                for attack in ("dlg", "label_recovery", "tracing"):
                    assert (defense, attack, stage, batch) in cells
        assert (defense, "mia_loss", "final", 1) in cells
        assert (defense, "mia_loss", "init", 1) not in cells
    assert all(r.status == "complete" for r in first.records)
    assert len(first.records) == len({r.cell_id for r in first.records}) == 3 * (12 + 1)
    assert {c.control: c.ok for c in check_controls(first.records)}["full_noise"] is True


def test_every_metric_has_n_and_an_interval_or_a_reason(first):
    assert all(record.metrics for record in first.records)
    for metric in (metric for record in first.records for metric in record.metrics):
        assert metric.n > 0 and (metric.value is not None or metric.reason)
        if metric.value is not None and metric.low is not None:
            assert metric.low <= metric.value <= metric.high


def test_each_record_verifies_and_tampering_is_found(first):
    assert verify(first.out, claimed) == []
    target = next(p for p in sorted((first.out / "records").glob("*.json")) if ".timing" not in p.name)
    before = target.read_text()
    target.write_text(before.replace('"seed": 0', '"seed": 1', 1))
    try:
        assert verify(first.out, claimed)
    finally:
        target.write_text(before)
    assert verify(first.out, claimed) == []


def test_another_seed_gives_other_cells(first):
    other = plan_cells([resolve(configure(**{**SMALL, "seed": 1}))])
    assert not {r.cell_id for r in first.records} & {cell.id for one in other for cell in one.cells}


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that computes")
def test_a_killed_run_goes_on_with_two_workers_and_gives_the_same_files(first, forked, tmp_path):
    """Killed with SIGKILL at several moments; at last all files equal those that one undisturbed process wrote."""
    out = tmp_path / "killed"

    def finished():
        return len(list((out / "records").glob("*[0-9a-f].json")))

    for goal in (1, 14):  # records on disk when the blow falls
        process = forked.Process(target=evaluate, kwargs={**TINY, "out": out, "workers": 1})
        process.start()
        while process.is_alive() and finished() < goal:
            time.sleep(0.01)
        process.kill()
        process.join()
    assert 14 <= finished() < len(first.records), "killed too late to prove anything"
    evaluate(**TINY, out=out, workers=2)
    one, two = results(first.out), results(out)
    assert sorted(one) == sorted(two)
    assert [name for name in one if one[name] != two[name]] == []


def test_weak_attacks_make_the_evaluation_unreliable(tmp_path):
    weak = {**SMALL, "settings": {"dlg.budget": 1}, "attacks": ("dlg",), "stages": ("init",)}
    evaluation = evaluate(**weak, out=tmp_path / "weak", workers=1)
    assert not evaluation.reliable
    check = {c.control: c for c in evaluation.checks}["none"]
    assert check.ok is False and "does NOT break" in check.sentence
    assert evaluation.answer.trust.state == "failed" and evaluation.answer.headline.words.startswith(
        "Nothing is concluded"
    )
    page = (tmp_path / "weak" / "leaderboard.html").read_text()
    assert "A control failed" in page and evaluation.answer.headline.words in page


def test_an_attack_that_breaks_pure_noise_raises_the_alarm(first):
    labels = [r for r in first.records if r.config.attack.id == "label_recovery"]

    known = []
    for record in (r for r in labels if r.config.defense.id == "full_noise"):
        victims = [v.model_copy(update={"label": True, "probe": p}) for p in range(9) for v in record.victims]
        known.append(record.model_copy(update={"victims": victims}))
    check = {c.control: c for c in check_controls(known)}["full_noise"]
    assert check.ok is False and "label_recovery" in check.sentence


def test_a_crashing_attack_becomes_failed_cells_and_is_tried_again(tmp_path, monkeypatch):
    def run(self, view, challenges, generator):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(IG, "run", run)
    small = {**SMALL, "attacks": ("ig", "label_recovery"), "stages": ("init",)}
    evaluation = evaluate(**small, out=tmp_path / "out", workers=1)
    failed = [r for r in evaluation.records if r.status == "failed"]
    assert len(failed) == 3 and all("ZeroDivisionError: planted" in (r.reason or "") for r in failed)
    assert any(r.status == "complete" for r in evaluation.records)
    assert "planted" in (tmp_path / "out" / "leaderboard.html").read_text()
    assert evaluate(**small, out=tmp_path / "out", workers=1).computed == 3


def test_a_diverging_training_is_a_result(tmp_path):
    evaluation = evaluate(**SMALL | {"optimizer": "sgd", "lr": 1e38, "model": "mlp"}, out=tmp_path / "out", workers=1)
    mine = [r for r in evaluation.records if r.config.defense.id == "spn"]
    assert {(r.config.stage, r.status) for r in mine} == {("final", "diverged"), ("init", "complete")}
    final = [r for r in mine if r.config.stage == "final"]
    assert all(r.utility.accuracy is None and "not finite" in (r.reason or "") for r in final)
    assert any("diverged" in sentence for sentence in evaluation.verdict) or not evaluation.verdict[0].startswith(
        "spn at"
    )


def test_a_probe_out_of_range_is_a_result(tmp_path):
    """Training need not leave the range of masked uploads for a probe to do so: random weights come first."""
    options = SMALL | {"defense": "pbpfl_ext", "stages": ("init",), "grid": (1e30,)}
    evaluation = evaluate(**options, out=tmp_path / "out", workers=1)
    status = {r.config.defense.id: (r.status, r.reason) for r in evaluation.records}
    assert status["none"] == ("complete", None)
    assert status["pbpfl_ext"][0] == "diverged" and "fixed point" in status["pbpfl_ext"][1]
    assert verify(tmp_path / "out") == []


def test_errors_that_are_not_finite_are_a_diverged_training(tmp_path):
    """Weights within float32 can give outputs whose squares are in no range."""
    loud = {"optimizer": "sgd", "lr": 1e20, "rounds": 1, "model": "densenet", "stages": ("init", "final")}
    loud["model_options"] = {"bias": False, "growth": 2, "layers": 3}
    evaluation = evaluate(**SMALL | loud | {"defense": "mpdp", "grid": (3.0,)}, out=tmp_path / "out", workers=1)
    mine = [r for r in evaluation.records if r.config.defense.id == "mpdp"]
    assert {r.status for r in mine if r.config.stage == "final"} == {"diverged"}
    assert all(r.utility.accuracy is None and r.utility.mse is None for r in mine)
    assert {r.utility.reason for r in mine} == {"the model's errors were not finite after round 1"}


def test_a_single_test_example_has_an_error_and_no_interval():
    def square(n):
        answers = SimpleNamespace(answers=lambda x: [torch.tensor([[1.0, 3.0]]).double().expand(len(x), 2)])
        return mean_square(answers, SimpleNamespace(test=Data(torch.zeros(n, 4), torch.zeros(n, 2))))

    assert square(1) == (5.0, None, None)
    assert square(3) == (5.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"defense": "spm"}, "no defense named 'spm'; did you mean 'spn'"),
        ({"attacks": ("dgl",)}, "no attack named 'dgl'; did you mean"),
        ({"dataset": "digit"}, "did you mean 'digits'"),
        ({"model": "dlnett"}, "did you mean 'dlnet'"),
        ({"settings": {"alpha": 1}}, "alpha2"),
        ({"settings": {"dlg.budgets": 1}}, "budget"),
        ({"settings": {"dgl.budget": 1}}, "dlg"),
        ({"grid": (-1.0,)}, "alpha2=-1.0 cannot be used; it must be"),
        ({"grid": (float("nan"),)}, "grid=nan cannot be used: it must be a finite number"),
        ({"settings": {"alpha2": float("inf")}}, "alpha2=inf cannot be used: it must be a finite number"),
        ({"defense": "pbpfl", "grid": (0.0,)}, "kappa=0.0 cannot be used; it must be from 1e-06 to 1e+30"),
        ({"defense": "mpdp", "grid": (3.0,), "settings": {"graph": "n_out", "n": 3}}, "n=3 cannot be used; it must be"),
        ({"defense": "mpdp", "grid": (3.0,), "partition": "dirichlet:0.1"}, "equal weights 1/K"),
        ({"clients": 0}, "clients=0 cannot be used"),
        ({"clients": 1}, "use at least 2 clients"),
        ({"defense": "pbpfl", "attacks": ("dlg",), "threats": ("client/1",)}, "another --threat than client/1"),
        ({"attack_batch": (0,)}, "attack_batch=0 cannot be used: input should be greater than 0"),
        ({"attack_batch": (4000,)}, "use fewer --victims"),
        ({"threats": ("sever/1",)}, "server/1"),
        ({"attacks": ("tracing",)}, "needs reconstructions"),
        ({"attacks": ("adaptive_dp",)}, "built for dp, dp_sgd"),
        ({"defense": "none", "grid": (1.0,)}, "no control parameter"),
        ({"partition": "dirichlet:0"}, "dirichlet"),
        ({"model_options": {"activation": "relu"}}, "activation"),
        ({"dataset": "parquet:/does/not/exist"}, "/does/not/exist"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(change, sentence, tmp_path):
    with pytest.raises(UsageError) as caught:
        evaluate(**{**TINY, **change}, out=tmp_path / "out")
    text = str(caught.value)
    assert sentence in text and "\n" not in text, text
    assert not (tmp_path / "out").exists()


def test_someone_elses_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        evaluate(**TINY, out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_client_and_eavesdropper_see_what_they_see(tmp_path):
    threats = ("client/1", "eavesdropper/1", "server/1")
    options = {**SMALL, "defense": "none", "grid": "quick", "stages": ("init",), "threats": threats}
    evaluation = evaluate(**options, out=tmp_path / "out", workers=1)
    records = {(r.config.defense.id, r.config.threat_model.id): r for r in evaluation.records}
    server, listener, client = (records["none", threat] for threat in ("server/1", "eavesdropper/1", "client/1"))
    assert [(v.client, v.index) for v in server.victims] == [(v.client, v.index) for v in listener.victims]
    assert len(client.victims) == 4, "two other clients in two probes"
    assert {v.client for v in client.victims} == {1, 2}
