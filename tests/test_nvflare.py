"""NVFlare's filters as defenses: plain arithmetic, noise and views. What adapters share: test_adapters.py."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted import Setting, data

from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import initial
from ppbench.testing.small_federation import largest_difference

pytest.importorskip("nvflare")

SETTING = Setting((16, 24, 32))  # 2, 3 and 4 whole batches, so that steps count as examples do
PLAN, LR, CLIENTS = SETTING.plan, SETTING.lr, len(SETTING.sizes)
federation, trained, victims, seen = SETTING.federation, SETTING.trained, SETTING.victims, SETTING.seen


def sent(run: Federation) -> dict[int, Any]:
    """Train one round, and return what each client sent in it."""
    run.wire.keep = True
    assert run.run(1)
    return {m.sender: m.message for m in run.wire.mail if m.receiver == SERVER and m.round == 1}


def changes() -> dict[int, dict[str, Any]]:
    """Return what clients change by training from the start alone, float64 a step, and in how many steps."""
    plain = sent(federation("nvflare:stock/fedavg"))
    results = {}
    for client, message in plain.items():
        assert int(message.steps) == 2 + client
        results[client] = {n: v.double().numpy() / int(message.steps) for n, v in message.change.items()}
    return results


def flat(tree: Mapping[str, Any]) -> Any:
    return np.concatenate([np.asarray(tree[name]).ravel() for name in tree])


# -- what it does is what it says ------------------------------------------------------------------------------------


def test_clients_count_by_their_steps() -> None:
    """17 and 24 examples are 3 batches of 8 each: they count the same, as NVFlare has it."""
    run = federation("nvflare:stock/fedavg")
    run.shards = {0: data(17, 0), 1: data(24, 1), 2: data(8, 2)}
    start, messages = run.parties.server.params, sent(run)
    assert run.parties.server.counts.tolist() == [3, 3, 1]
    mean = {n: sum(s * messages[c].change[n] for c, s in enumerate((3, 3, 1))) / 7 for n in start}
    assert largest_difference({n: start[n] + mean[n] for n in start}, run.parties.server.params) < 1e-6


@pytest.mark.parametrize(("percentile", "gamma"), [(10.0, 0.01), (75.0, 0.002)])
def test_percentile_privacy_is_plain_arithmetic(percentile: float, gamma: float) -> None:
    """Of the changes a step: what lies within the percentile of all sizes is 0, the rest is cut off at gamma."""
    messages = sent(federation("nvflare:stock/percentile_privacy", percentile=percentile, gamma=gamma))
    for client, change in changes().items():
        cutoff = np.percentile(np.abs(flat(change)), percentile)
        for name, value in change.items():
            expected = np.where(np.abs(value) < cutoff, 0, np.clip(value, -gamma, gamma)) * (2 + client)
            np.testing.assert_allclose(messages[client].change[name].numpy(), expected, rtol=2e-4, atol=1e-8)
        share = np.mean(flat(messages[client].change) != 0)
        assert share <= 1 - percentile / 100 + 1e-3


def test_excluded_variables_are_absent_and_keep_their_value() -> None:
    run = federation("nvflare:stock/exclude_vars", exclude_vars="head.bias")
    start, messages = run.parties.server.params, sent(run)
    assert {*messages[0].change} == {*start} - {"head.bias"}
    assert torch.equal(run.parties.server.params["head.bias"], start["head.bias"])
    whole = trained("nvflare:stock/fedavg", rounds=1)
    assert largest_difference(whole | {"head.bias": start["head.bias"]}, run.parties.server.params) == 0


def test_encrypted_layers_are_averaged_and_of_a_client_not_seen() -> None:
    """Training is federated averaging's; an upload holds the other variables, and numbers of no size."""
    plain, run = federation("nvflare:stock/fedavg"), federation("nvflare:stock/he_partial", encrypt_layers="features")
    whole, sent_values = sent(plain), sent(run)
    assert largest_difference(run.parties.server.params, plain.parties.server.params) < 1e-6
    for client, message in sent_values.items():
        assert {*message.change} == {"head.weight", "head.bias"}
        assert largest_difference(message.change, {n: whole[client].change[n] for n in message.change}) == 0
        assert 0.45 < float((message.words.abs() > 2**62).float().mean()) < 0.55
    alone = Federation(run.defense, PLAN, run.shards, Seeds(0))
    alone.start(initial(PLAN.spec, 0))
    one = alone.probe({Slot(0, 1): data(1, 50)}).view("server/1")
    assert [e.unit for e in run.defense.evidence(one)] == [(Slot(0, 1),)]
    opened = run.defense.evidence(alone.probe(victims()).view("collusion/1"))[0]
    true = victims()[Slot(0, 0)]
    assert opened.weight is None and {*opened.observed} == {*whole[0].change}
    assert at_truth(opened, true.x[None], true.y[None]) < 1e-6


def test_the_real_encryption_shows_as_much() -> None:
    """HEModelEncryptor, where TenSEAL is installed: what it lets out is the number of steps and the other variables."""
    tenseal = pytest.importorskip("tenseal")
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.app_opt.he.model_encryptor import HEModelEncryptor

    from ppbench.adapters.nvflare.mechanism import SERVER as THERE
    from ppbench.adapters.nvflare.mechanism import task_context

    key = tenseal.context(tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 40])
    key.global_scale = 2**40
    made = HEModelEncryptor(encrypt_layers="features")
    made.tenseal_context = key
    change = {n: v.numpy().copy() for n, v in initial(PLAN.spec, 0).items()}
    dxo = DXO(DataKind.WEIGHT_DIFF, data=dict(change), meta={MetaKey.NUM_STEPS_CURRENT_ROUND: 3})
    left = from_shareable(made.process(dxo.to_shareable(), task_context("site-1", THERE, 1)))
    run = federation("nvflare:stock/he_partial", encrypt_layers="features")
    seen_here = {*sent(run)[0].change}
    assert {n for n, v in left.data.items() if isinstance(v, np.ndarray)} == seen_here == {"head.weight", "head.bias"}
    for name, value in change.items():
        hidden = name not in seen_here
        there = np.array(left.data[name].decrypt()) if hidden else left.data[name]
        np.testing.assert_allclose(there, 3 * value.ravel(), atol=1e-5 if hidden else 1e-6)
    assert left.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND) == 3


def test_sparse_vectors_have_the_law_that_attackers_are_told() -> None:
    """A share of the entries is sent; from 2.8 on clipped and under Laplace noise, before under noise and clipped."""
    own = {"fraction": 0.5, "noise_var": 20.0, "gamma": 1e-3, "replace": False}
    run = federation("nvflare:stock/svt_privacy", **own)
    messages, whole = sent(run), changes()
    change = np.concatenate([flat({n: m.change[n] for n in whole[c]}) / (2 + c) for c, m in messages.items()])
    assert np.count_nonzero(change) == pytest.approx(len(change) / 2, abs=CLIENTS)
    clean = np.concatenate([flat(whole[c]) for c in messages])[change != 0]
    law = run.defense.noise(PLAN)
    assert law is not None and law.law == "laplace" and law.std == pytest.approx(math.sqrt(2) * 1e-4 / LR)
    if run.defense.guarantee(PLAN, 8, 1) is None:  # before 2.8: the noise is on what was not clipped
        assert np.abs(change).max() == pytest.approx(1e-3)
        far = np.abs(clean) > 1e-3  # ten times the noise's scale
        assert far.sum() > 100 and (np.sign(change[change != 0]) == np.sign(clean))[far].all()
        return
    noise = change[change != 0] - np.clip(clean, -1e-3, 1e-3)
    assert np.abs(noise).mean() == pytest.approx(1e-4, rel=0.1)  # 2 gamma / noise_var
    assert noise.std() / LR == pytest.approx(law.std, rel=0.1) and abs(noise.mean()) < 1e-5
    meta = json.loads(bytes(messages[0].meta.tolist()))["svt_privacy_budget"]
    epsilon, delta = run.defense.guarantee(PLAN, 8, 3)
    assert delta == 0 and 3 * meta["epsilon_total"] < epsilon < 3 * (meta["epsilon_total"] + 0.2)


def test_filters_stand_in_order_and_see_a_task() -> None:
    message = sent(federation("nvflare:nvflare_apps:chain"))[0]
    assert "head.bias" not in message.change
    assert float((message.change["features.1.weight"] == 0).float().mean()) > 0.4
    assert json.loads(bytes(message.meta.tolist()))["filter_history"] == ["PercentilePrivacy", "ExcludeVars"]
    assert (
        largest_difference(trained("nvflare:nvflare_apps:sees", rounds=1), trained("nvflare:stock/fedavg", rounds=1))
        == 0
    )


# -- probes and seeds ------------------------------------------------------------------------------------------------


def test_noise_is_another_for_each_client_and_round() -> None:
    run = federation("nvflare:nvflare_apps:mine", scale=10.0)
    run.wire.keep = True
    assert run.run(2)
    sums = [float(m.message.change["head.bias"].sum()) for m in run.wire.mail if m.receiver == SERVER and m.round > 0]
    assert len({*sums}) == 2 * CLIENTS


def test_what_filters_keep_lasts_and_a_probe_has_a_copy() -> None:
    run = federation("nvflare:nvflare_apps:feedback")
    assert run.run(3)
    for _ in range(2):
        mail = [m.message for m in seen(run).mail if m.receiver == SERVER]
        assert [json.loads(bytes(message.meta.tolist()))["calls"] for message in mail] == [4, 4, 4]


# -- what is seen ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("fedavg", {}),
        ("exclude_vars", {"exclude_vars": "head"}),
        ("exclude_vars", {"exclude_vars": "head.bias"}),
        ("exclude_vars", {"exclude_vars": "features"}),
        ("he_partial", {"encrypt_layers": "features"}),
        ("he_partial", {"encrypt_layers": "bias"}),
        ("percentile_privacy", {"percentile": 90.0, "gamma": 1.0}),
        ("percentile_privacy", {"percentile": 10.0, "gamma": 0.01}),
        ("percentile_privacy", {"percentile": 0.0, "gamma": 1e-4}),
    ],
)
def test_what_is_left_of_a_gradient_is_explained_by_the_truth(name: str, own: dict[str, Any], tmp_path: Path) -> None:
    """Of what was sent nothing is left to explain; what was not sent has no weight; a kept view says the same."""
    run = federation(f"nvflare:stock/{name}", **own)
    view = seen(run)
    view.save(tmp_path)
    truth = victims()
    for one in (view, View.load(tmp_path)):
        evidence = one.defense.evidence(one)
        assert [e.unit[0].client for e in evidence] == [0, 1, 2]
        for e in evidence:
            true = truth[e.unit[0]]
            assert at_truth(e, true.x[None], true.y[None]) < 1e-6
            assert at_truth(e, true.x[None].flip(-1), true.y[None]) > 1e-2


def test_signs_or_noise_of_a_sparse_vector_are_simulated_as_such() -> None:
    for own in ({"noise_var": 1e4}, {"noise_var": 4.0, "gamma": 1e-2}):
        run = federation("nvflare:stock/svt_privacy", **{"fraction": 1.0, "replace": False, "gamma": 1e-3, **own})
        view, truth = seen(run), victims()
        for e in run.defense.evidence(view):
            true = truth[e.unit[0]]
            right, wrong = (at_truth(e, x[None], true.y[None]) for x in (true.x, true.x.flip(-1)))
            assert right < (0.05 if own["noise_var"] > 4 else 1.0) and wrong > 1.1 * right, (e.measure, right, wrong)

    run = federation("nvflare:stock/svt_privacy")
    evidence = run.defense.evidence(seen(run))
    assert {e.measure for e in evidence} == ({"squares"} if run.defense.guarantee(PLAN, 8, 1) else {"hinge"})


def test_algebra_reads_an_image_off_what_is_left() -> None:
    """Rows that are not cut off give the image by a division, and pixels of which nothing was sent are small."""
    from ppbench.adversary.attack import Challenge

    run = federation("nvflare:stock/percentile_privacy")
    view, truth = seen(run), victims()
    challenges = [Challenge((slot,), 1) for slot in truth]
    guesses = load_plugin("attacks", "analytic")().run(view, challenges, torch.Generator().manual_seed(0))
    for guess, kept in zip(guesses, truth.values(), strict=True):
        assert float((guess.x - kept.x).square().mean()) < 1e-3
        assert guess.y.tolist() == kept.y.argmax(1).tolist()
    labels = load_plugin("attacks", "label_recovery")().run(view, challenges, torch.Generator().manual_seed(0))
    assert [g.y.tolist() for g in labels] == [kept.y.argmax(1).tolist() for kept in truth.values()]


def test_searches_do_not_take_a_cut_gradient_for_a_whole_one() -> None:
    """Where most entries are cut off, what is minimized is 0 at the truth; the fast chain would not say so."""
    from ppbench.attacks.reconstruction.search.problem import objective

    run = federation("nvflare:stock/percentile_privacy", percentile=0.0, gamma=1e-4)
    evidence, truth = run.defense.evidence(seen(run)), victims()
    assert evidence[0].params is not None and evidence[0].measure == "squares"
    x, y = (torch.stack([getattr(truth[e.unit[0]], n).double() for e in evidence]) for n in ("x", "y"))
    made = objective(evidence, PLAN, 1, torch.float64)
    at, *_ = made(x, y, x.new_zeros(len(x), 0), torch.arange(len(x)))
    scale = torch.stack([e.scale() for e in evidence])
    assert bool((at / scale < 1e-6).all())


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "own", "words"),
    [
        ("exclude_vars", {"exclude_vars": "conv"}, "matches none of the network's variables"),
        ("exclude_vars", {"exclude_vars": ""}, "it must match some of"),
        ("exclude_vars", {"exclude_vars": "."}, "matches all of the network's variables"),
        ("exclude_vars", {"exclude_vars": "("}, "raised PatternError|raised error|is no regular expression"),
        ("he_partial", {"encrypt_layers": "conv"}, "matches none of the network's variables"),
        ("percentile_privacy", {"percentile": 101.0}, "percentile=101.0 cannot be used"),
        ("percentile_privacy", {"gamma": 0.0}, "gamma=0.0 cannot be used"),
        ("svt_privacy", {"fraction": 0.0}, "fraction=0.0 cannot be used"),
    ],
)
def test_what_would_send_all_without_a_word_is_refused(name: str, own: dict[str, Any], words: str) -> None:
    """The filters pass everything then, and log it at most."""
    with pytest.raises(UsageError, match=words):
        load_plugin("defenses", f"nvflare:stock/{name}")(**own).check(PLAN)


def test_names_are_those_of_nvflare_and_all_that_ships_has_one() -> None:
    from ppbench.adapters import nvflare
    from ppbench.adapters.nvflare.defenses import NVFLARE_STOCK

    assert [one.name for one in NVFLARE_STOCK] == [f"nvflare:stock/{own}" for own in nvflare.STOCK_NAMES]
    for one, names in zip(NVFLARE_STOCK, nvflare.STOCK_NAMES.values(), strict=True):
        assert all(load_plugin("defenses", f"nvflare:stock/{name}") is one for name in names)
        assert {type(made).__name__ for made in one().filters()} <= {*names}


# -- findings --------------------------------------------------------------------------------------------------------
def finding(name: str) -> Any:
    path = Path(__file__).parents[1] / "examples" / "findings" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_what_is_found_of_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    finding("nvflare_percentile").main()
    logging.disable(logging.NOTSET)
    message = capsys.readouterr().out
    assert "label read in 50 of 50" in message and message.count("all is sent as it is: True") == 6


def test_what_is_found_of_sparse_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.8 one value tells the sign of what is sent; from then on the filter's own sum is not refuted by it."""
    made = finding("nvflare_svt")
    monkeypatch.setattr(made, "RUNS", 200)
    ten = np.full(10, 1e-2, dtype=np.float32)
    right, wrong, epsilon = made.least_epsilon(ten, -ten, lambda out: bool(out.sum() > 0))
    if load_plugin("defenses", "nvflare:stock/svt_privacy")().guarantee(PLAN, 8, 1) is None:
        assert (right, wrong) == (1.0, 0.0) and epsilon > 3.9
    else:
        assert epsilon <= 0.2
    assert made.at_least(200, 200, 0.025) == pytest.approx(0.025 ** (1 / 200), abs=1e-6)
    assert made.at_least(7, 20, 0.025) == pytest.approx(0.1539, abs=1e-4)  # as tables have it


# -- planted ---------------------------------------------------------------------------------------------------------
