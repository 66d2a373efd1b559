"""`ppbench compare` on edits of one defense's code: what weakens it is found, though no median over victims moves."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from weakened.ppbench_weakened import NO_WEAKER, WEAKER

from ppbench.base import registry
from ppbench.records.schema import Flag
from ppbench.records.store import Store
from ppbench.report.compare.alone import UnitPair, changed_alone, worst_client
from ppbench.report.compare.outcome import compare
from ppbench.run import evaluation
from ppbench.run.evaluation import evaluate

QUICK = dict(defense="guard", stages=("init",), rounds=1, train=300, candidates=20, attack_batch=(1,))
SMALL = {
    **QUICK,
    **{"attacks": ("adaptive_server", "estimated_noise"), "victims": 10, "tuning": 0},
    "settings": {"adaptive_server.budget": 20, "adaptive_server.restarts": 0},
}
HIDDEN_ON_BOTH_SIDES = "halved", "wide_clip"
"""Noise is so large that half of it, or a signal ten times as large, hides as much: nobody loses anything."""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Return a maker of results of a variant; controls are computed once for each seed and set of options."""
    home, known = Path(__file__).parent / "weakened", {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(home))
        patch.syspath_prepend(str(home))
        patch.setattr(evaluation, "write_board", lambda store, claims: [])
        registry.plugins.cache_clear()

        def make(variant, seed=0, options=SMALL):
            patch.setenv("PPBENCH_VARIANT", variant)
            out, key = tmp_path_factory.mktemp("run") / "out", (seed, len(options))
            if key in known:
                shutil.copytree(known[key], out)
                shutil.rmtree(out / "cache")
                store = Store(out)
                for record in store.load_all():
                    if record.config.defense.id == "guard":
                        (out / "records" / f"{record.cell_id}.json").unlink()
            known.setdefault(key, out)
            return evaluate(**options, seed=seed, out=out, workers=1).out

        yield make
    registry.plugins.cache_clear()


@pytest.fixture(scope="module")
def baseline(evaluated):
    return evaluated("as_it_is")


@pytest.mark.parametrize(
    ("variant", "metric", "words"),
    [
        pytest.param("tenth_bare", "psnr_median", "", marks=pytest.mark.nightly),
        ("one_client", "newly_fallen", "client 3"),
        pytest.param("training_bare", "probe_noticed", "only in NEW", marks=pytest.mark.nightly),
    ],
)
def test_what_no_median_shows_is_a_regression(evaluated, baseline, variant, metric, words):
    comparison = compare(baseline, evaluated(variant))
    rows = [row for row in comparison.regressions if row.metric == metric]
    assert comparison.exit_code == 1 and rows and all(words in row.note for row in rows)


@pytest.mark.nightly
def test_more_noise_for_one_client_and_coarser_numbers_are_none(evaluated, baseline):
    for variant in ("one_client_more", "half_precision"):
        assert compare(baseline, evaluated(variant)).exit_code == 0, variant


@pytest.mark.nightly
@pytest.mark.parametrize("variant", [name for name in WEAKER if name not in HIDDEN_ON_BOTH_SIDES])
def test_every_weakening_is_found_by_the_default(evaluated, variant):
    base = evaluated("as_it_is", options=QUICK)
    assert compare(base, evaluated(variant, options=QUICK)).exit_code == 1


@pytest.mark.nightly
@pytest.mark.parametrize("variant", NO_WEAKER)
def test_no_other_edit_is_accused_by_the_default(evaluated, variant):
    base = evaluated("as_it_is", options=QUICK)
    assert compare(base, evaluated(variant, options=QUICK)).exit_code == 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_a_rerun_is_never_accused(evaluated, seed):
    """The same code with other draws, which no seed decides, of other victims in each case."""
    assert compare(evaluated("other_draws", seed), evaluated("other_draws", seed)).exit_code == 0


# -- one unit, one client, one warning --------------------------------------------------------------------------------
def units(count=20, clients=10, **changes):
    """Return units that stand on both sides, of other draws than in BASELINE unless said otherwise."""
    one = UnitPair((0, 1, 0, 0), False, False, False, 8.0, 8.2, same=False)
    return [replace(one, name=(0, 1, n // clients, n % clients), **changes) for n in range(count)]


def fallen(unit, **changes):
    return replace(unit, **{"falls": True, "rebuilt": True, "new": 50.0, "same": False, **changes})


def test_with_equal_draws_one_unit_is_enough_and_luck_of_a_search_is_none():
    same = units(same=True)
    assert changed_alone([fallen(same[3]), *same[:3], *same[4:]], 3.0) == [fallen(same[3])]
    assert not changed_alone([fallen(same[3], same=True), *same[:3], *same[4:]], 3.0), "one upload, another search"
    assert not changed_alone([fallen(same[3], new=9.0), *same[:3], *same[4:]], 3.0), "hardly more came out"
    assert not changed_alone([fallen(same[3], fell=True), *same[:3], *same[4:]], 3.0), "it had fallen before"
    assert not changed_alone([fallen(u) for u in units()[:1]] + units()[1:], 3.0), "all drew anew: nothing is known"
    unknown = units(same=None)
    assert not changed_alone([fallen(unknown[0]), *unknown[1:]], 3.0), "nothing tells whether the draws are equal"


def test_with_other_draws_a_client_must_fall_oftener_than_others_change_sides():
    def p(*places, back=()):
        some = [fallen(u) if n in places else u for n, u in enumerate(units())]
        return worst_client([replace(u, fell=True) if n in back else u for n, u in enumerate(some)], 3.0)

    assert p(3, 13)[0] == 3 and p(3, 13)[1] < 0.01, "both of its units"
    assert p(3)[1] == 1.0 and p(3, 14)[1] == 1.0, "one unit of a client may be luck"
    assert p(3, 13, 5, 8, back=(7,))[1] > 0.05, "others change sides, too"
    whole = [replace(u, name=(*u.name[:3], -1)) for u in units()]
    assert worst_client([fallen(u) for u in whole[:2]] + whole[2:], 3.0) == (-1, 1.0), "cohorts have no client"


def test_a_new_warning_is_a_regression_and_an_old_one_is_not(cell, tmp_path):
    def written(name, flags):
        some = [cell("none", None, 30.0), cell("full_noise", None, 5.0), cell()]
        some[2] = some[2].model_copy(update={"flags": [*some[2].flags, *flags]})
        for record in some:
            Store(tmp_path / name).save(record)
        return tmp_path / name

    noticed = Flag(code="probe_noticed", severity="warning", detail="what the attacks are shown")
    with_flag, without = written("with", [noticed]), written("without", [])
    harmless = written("harmless", [Flag(code="own_remark", severity="warning", detail="of another kind")])
    comparison = compare(without, with_flag)
    (row,) = comparison.regressions
    assert comparison.exit_code == 1 and row.metric == "probe_noticed" and "what the attacks are shown" in row.note
    assert compare(with_flag, with_flag).exit_code == compare(with_flag, without).exit_code == 0
    assert compare(without, harmless).exit_code == 0


def test_clients_without_a_victim_are_named(cell, tmp_path):
    for record in (cell("none", None, 30.0), cell("full_noise", None, 5.0), cell()):
        Store(tmp_path / "one").save(record)
    clients_with_victims = {victim.client for victim in cell().victims}
    clients = cell().config.federation.clients
    notes = compare(tmp_path / "one", tmp_path / "one").notes
    assert any("nothing is known" in note for note in notes) == (len(clients_with_victims) < clients)
