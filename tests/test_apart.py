"""Strangers' attacks apart: the same guesses, none of the truth, and nothing that they answer is believed unchecked."""

import builtins
import contextlib
import os
import shutil
import socket
import sys
from dataclasses import fields, replace
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import thief
import torch

import ppbench
from ppbench.adversary import isolation as stand_ins
from ppbench.adversary.attack import Attack, Guess
from ppbench.adversary.isolation import IsolatedAttack, isolated_attack
from ppbench.base import confine, registry
from ppbench.base import registry as entries
from ppbench.base.declarations import declared
from ppbench.base.errors import PluginError, UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import save_tree
from ppbench.federation.threats import HONEST_SERVER
from ppbench.records import sources
from ppbench.records.run_files import commitment, keep_salt, salt_of
from ppbench.run.cells import CellGroup
from ppbench.run.config import configure
from ppbench.run.experiment import make_attack, resolve
from ppbench.run.scene import group_victims
from ppbench.run.suite import load_suite, salt_if_isolated
from ppbench.run.train import federation
from ppbench.verification import examine
from ppbench.verification.recheck import recheck

TINY = {
    **{"dataset": "digits", "model": "mlp", "train": 40, "clients": 2, "rounds": 1, "victims": 2, "candidates": 8},
    **{"attack_batch": (1,), "stages": ("init",), "tuning": 0, "loss": "cross_entropy", "defense": "none"},
}
OPEN = {"records", "secret_salt", "other_process", "memory", "network", "fixed_stash", "packages"}
"""Ways that only walls close: docs/threat-models.md lists them."""
WALLS = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed here")
HELPER = """
import sys
from ppbench.adversary.isolated_worker import main
for line in sys.stdin:
    try:
        main(*line.split())
        print(0, flush=True)
    except BaseException as error:
        print(1, flush=True)
"""
CACHES = (registry.plugins, entries._unreadable, confine._python, isolated_attack, stand_ins._suits, sources.code_of)


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory):
    """Install third-party attacks for this process; what they declare is kept in a cache of this module."""
    folder = thief.write(tmp_path_factory.mktemp("third-party") / "site")
    before, cached = sys.path[:], os.environ.get("PPBENCH_CACHE")
    sys.path.insert(0, str(folder))
    os.environ["PPBENCH_CACHE"] = str(folder.parent / "cache")
    for cache in CACHES:
        cache.cache_clear()
    yield folder
    sys.path[:] = before
    os.environ.pop("PPBENCH_CACHE")
    if cached is not None:
        os.environ["PPBENCH_CACHE"] = cached
    sys.modules.pop("thief_of_truth", None)
    for cache in CACHES:
        cache.cache_clear()


@contextlib.contextmanager
def process_for_many_calls():
    """Yield what has one process answer all calls, so that torch is loaded once; real ones are behind walls, below."""
    way = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with Popen([sys.executable, "-c", HELPER], stdin=PIPE, stdout=PIPE, text=True, env=way) as worker:

        def ask(target, words, read, work, seconds, device):
            print(*words, file=worker.stdin, flush=True)
            return int(worker.stdout.readline())

        yield ask


@pytest.fixture(scope="module")
def helper(site):
    with process_for_many_calls() as ask:
        yield ask


@pytest.fixture
def quick(helper):
    with thief.answered_by(helper):
        yield


@pytest.fixture(scope="module")
def world():
    """A view of an undefended federation, and the truth about it."""
    experiment = resolve(configure(**TINY, attacks=("label_recovery",)))
    fed, group = federation(experiment, experiment.points[0]), CellGroup(0, "init", HONEST_SERVER, 1, False)
    fed.start(experiment.task.params)
    victims = group_victims(experiment, group)
    return fed.probe(victims.data).view("server/1"), victims


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


def same(one, other):
    return all(
        torch.equal(a.x, b.x) and a.confidence == b.confidence and torch.equal(a.path[0][1], b.path[0][1])
        and torch.equal(a.others[0], b.others[0]) for a, b in zip(one, other, strict=True)
    )  # fmt: skip


# -- what reaches the truth, and does not any more ---------------------------------------------------------------------
def taken(guesses, victims, pid):
    """Return the ways by which a thief has got a victim's image, or what it should not reach."""
    truth = torch.cat([victims.truth(unit).x for unit in victims.units])
    result = set()
    for way, got in guesses[0].extra.items():
        images = got.dim() > 1
        if not images or any(bool((got == image).flatten(1).all(1).any()) for image in truth):
            result.add(way)
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"/tmp/stash-of-a-thief-{pid}")
    return result


@pytest.fixture(scope="module")
def stage(world, tmp_path_factory):
    """What a thief would like to have: results with the truth, a port, a process, and two runs to stash between."""
    view, victims = world
    out = tmp_path_factory.mktemp("loot") / "out"
    ppbench.evaluate(**TINY, attacks=("idlg",), settings={"idlg.budget": 2}, out=out, workers=1)
    keep_salt(out, "ab" * 32)
    with socket.create_server(("127.0.0.1", 0)) as ear:
        words = {"out": str(out), "pid": os.getpid(), "port": ear.getsockname()[1]}

        def attacked(attack):
            for _ in range(2):
                guesses = attack.run(view, victims.challenges(), seeded())
            return taken(guesses, victims, os.getpid())

        yield words, attacked


def test_beside_the_truth_a_thief_gets_it_in_fifteen_ways(stage, monkeypatch, tmp_path):
    words, attacked = stage
    (tmp_path / "data").write_text("1")
    monkeypatch.setenv("PPBENCH_DATA", str(tmp_path / "data"))
    kept = attacked(make_attack("thief", words))
    inside = {"frames", "collector", "cached_tasks", "cached_calls", "drawn_again", "environment", "home", "stash"}
    assert kept == {*OPEN, *inside}


@WALLS
def test_apart_it_gets_nothing(stage, site, monkeypatch, tmp_path):
    words, attacked = stage
    (tmp_path / "data").write_text("1")
    monkeypatch.setenv("PPBENCH_DATA", str(tmp_path / "data"))
    for path in site.glob("stash*"):
        path.unlink()
    assert confine.confinement() == confine.Confinement(True, True, True)
    assert "kept from your files, the network and other processes" in confine.confinement().words
    # Victims of seed 0 are drawn again where no secret takes part: that is what OUT/salt is for, see below.
    assert attacked(make_attack("thief", words, isolate=True)) == {"drawn_again"}


@pytest.mark.nightly
def test_without_walls_it_is_said_what_is_open(stage, site, monkeypatch):
    words, attacked = stage
    for path in site.glob("stash*"):
        path.unlink()
    monkeypatch.setattr(confine, "_bwrap", lambda: None)
    confine.confinement.cache_clear()
    try:
        result = confine.confinement()
        assert not result.files and not result.network and not result.processes
        assert "NOT kept from your files, the network and other processes (install bubblewrap" in result.words
        assert attacked(make_attack("thief", words, isolate=True)) == {*OPEN, "drawn_again"}
    finally:
        confine.confinement.cache_clear()


def test_the_document_says_as_many_ways_open_as_there_are():
    text = (Path(__file__).parents[1] / "docs" / "threat-models.md").read_text()
    table = text[text.index("| way | beside the truth") :].partition("\n\n")[0].splitlines()[2:]
    assert sum("**open**" in row for row in table) == len(OPEN)
    assert sum(row.count("| open |") for row in table) == 16  # 14 ways of a thief (the secret is not there), two more


def test_with_a_secret_nobody_draws_the_victims_again(quick, tmp_path):
    open_, secret = (
        resolve(configure(**TINY, attacks=("thief",), isolate=True, salt=salt)) for salt in ("", "cd" * 32)
    )
    kept = []
    for experiment in (open_, secret):
        fed, group = federation(experiment, experiment.points[0]), CellGroup(0, "init", HONEST_SERVER, 1, False)
        fed.start(experiment.task.params)
        victims = group_victims(experiment, group)
        guesses = experiment.attacks[0].run(fed.probe(victims.data).view("server/1"), victims.challenges(), seeded())
        kept.append("drawn_again" in taken(guesses, victims, os.getpid()))
    assert kept == [True, False]


# -- the same answers --------------------------------------------------------------------------------------------------
def test_the_stand_in_guesses_the_same_bit_for_bit_and_its_module_stays_out(quick, world):
    sys.modules.pop("thief_of_truth", None)
    if hasattr(builtins, "stolen_by_import"):
        del builtins.stolen_by_import
    view, victims = world
    there = make_attack("plain", {"scale": 0.125}, isolate=True)
    assert isinstance(there, IsolatedAttack) and there.parameters() == {"scale": 0.125, "both": False}
    answers = there.run(view, victims.challenges(), seeded())
    assert there.suits(view.plan) is True and "thief_of_truth" not in sys.modules
    assert not hasattr(builtins, "stolen_by_import")
    here = make_attack("plain", {"scale": 0.125})
    assert type(here).__module__ == "thief_of_truth" and same(answers, here.run(view, victims.challenges(), seeded()))
    other = here.run(view, victims.challenges(), seeded(8))
    assert not same(answers, other)


@WALLS
def test_behind_walls_the_guesses_are_the_same_too(world):
    view, victims = world
    there = make_attack("plain", {"scale": 0.125}, isolate=True).run(view, victims.challenges(), seeded())
    assert same(there, make_attack("plain", {"scale": 0.125}).run(view, victims.challenges(), seeded()))


def test_every_hook_is_asked_where_the_attack_is(quick, world):
    view, victims = world
    with pytest.raises(UsageError, match="scale must not be negative") as refused:
        make_attack("plain", {"scale": -1.0}, isolate=True)
    assert not isinstance(refused.value, PluginError)
    with pytest.raises(UsageError, match="'plain' refuses scale='a'"):
        make_attack("plain", {"scale": "a"}, isolate=True)
    attack = make_attack("plain", {"both": True}, isolate=True)
    assert [v.parameters()["scale"] for v in attack.variants()] == [0.5, 0.25]
    assert attack.evidence(view) == [] and not attack.knows("dp") and not attack.needs_public
    attack.check_held({0: torch.zeros(2, 1, 8, 8)})
    with pytest.raises(UsageError, match="has seen 5 images"):
        make_attack("plain", {"scale": 3}, isolate=True).check_held({0: torch.zeros(5, 1, 8, 8)})
    with pytest.raises(stand_ins.NothingRead):
        attack.run(replace(view, mail=()), victims.challenges(), seeded())
    crafty = make_attack("crafty", isolate=True)
    assert declared(type(crafty), Attack) == declared(type(make_attack("crafty")), Attack)
    options = {**TINY, "attacks": ("crafty",), "threats": ("server-active/1",), "isolate": True}
    with pytest.raises(UsageError, match=r"'crafty' needs 2 rounds .* add --probe-rounds 2"):
        resolve(configure(**options))
    experiment = resolve(configure(**options, probe_rounds=2))
    fed = federation(experiment, experiment.points[0])
    fed.start(experiment.task.params)
    from ppbench.federation.acting import Before

    before = Before(fed.plan, fed.defense, fed.parties.server, (0, 1), None, None)
    there, here = (one.crafted(before, seeded()).params for one in (crafty, make_attack("crafty")))
    assert all(torch.equal(there[name], value) for name, value in here.items())


# -- what it answers ---------------------------------------------------------------------------------------------------
def answering(act):
    """Return what stands for a process that does `act` in its folder, and how it ended."""

    def ask(target, words, read, work, seconds, device):
        return act(work) or 0

    return ask


def linked(work):
    (work / "answer.json").write_text("{}")
    (work / "secret").write_text("truth")
    (work / "answer.safetensors").symlink_to(work / "secret")


def piped(work):
    os.mkfifo(work / "answer.json")


def large(work):
    (work / "answer.json").write_text(" " * (5 << 20))


def deep(work):
    (work / "answer.json").write_text("[" * 100_000)


def written_answer(value):
    def act(work):
        (work / "answer.json").write_text("{}")
        save_tree(value, work / "answer.safetensors")

    return act


def guess_of(**values):
    """Return the fields of a guess as an attack's process writes them."""
    return [values.get(field.name, getattr(Guess(), field.name)) for field in fields(Guess)]


LIES = {
    "link": (linked, "tensors that cannot be read"),
    "pipe": (piped, "cannot be read"),
    "large": (large, "cannot be read"),
    "deep": (deep, "cannot be read"),
    "nothing": (lambda work: 3, r"without an answer \(with exit code 3\)"),
    "killed": (lambda work: -9, r"without an answer \(killed by SIGKILL\)"),
    "late": (lambda work: confine.EXPIRED, "gave no answer in"),
    "no list": (written_answer({"x": torch.zeros(1)}), "something other than a list of guesses"),
    "no guesses": (written_answer([1, 2]), "something other than a list of guesses"),
    "few fields": (written_answer([[None, None]]), "other fields than"),
    "a word for images": (written_answer([guess_of(x="x")]), "other fields than"),
    "fewer than no evaluations": (written_answer([guess_of(evaluations=-1)]), "other fields than"),
    "a path without images": (written_answer([guess_of(path=((1, None),))]), "other fields than"),
    "a word for layers": (written_answer([guess_of(layers=("head",))]), "other fields than"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_none_is_the_attacks_failure(quick, world, lie):
    view, victims = world
    attack = make_attack("plain", isolate=True)
    act, sentence = LIES[lie]
    with thief.answered_by(answering(act)), pytest.raises(PluginError, match=sentence) as failure:
        attack.run(view, victims.challenges(), seeded())
    assert "'plain' of package 'thief-of-truth'" in str(failure.value) and "\n" not in str(failure.value)


def test_a_process_that_does_not_end_is_ended(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    began = os.times().elapsed
    monkeypatch.setattr(confine, "_bwrap", lambda: None)
    slow = confine.WaitingProcess("signal:pause", [], [], tmp_path / "work", "cpu")
    assert slow.ask(0.5) == confine.EXPIRED and slow._process.poll() is not None
    unasked = confine.WaitingProcess("signal:pause", [], [], tmp_path / "work", "cpu")
    unasked.end()
    assert unasked._process.poll() == -9 and os.times().elapsed - began < 5


# -- from end to end ---------------------------------------------------------------------------------------------------
def test_an_evaluation_apart_says_so_keeps_a_secret_and_goes_on(quick, tmp_path):
    out, words = tmp_path / "out", {**TINY, "attacks": ("plain", "label_recovery"), "isolate": True, "workers": 1}
    result = ppbench.evaluate(**words, out=out)
    ours, theirs = ([r for r in result.records if (r.config.attack.id == "plain") is side] for side in (False, True))
    assert theirs and all(r.status == "complete" for r in result.records)
    assert {r.environment.apart for r in theirs} == {confine.confinement().words} and not any(
        r.environment.apart for r in ours
    )
    assert "plain, of other packages, ran in a process of its own" in result.answer.trust.sentence
    salt = salt_of(out)
    assert (out / "salt").stat().st_mode & 0o777 == 0o600
    assert {r.config.data.salt for r in result.records} == {commitment(salt)}
    others = [path for path in out.rglob("*") if path.name != "salt" and path.is_file()]
    assert others and not any(salt.encode() in path.read_bytes() for path in others)
    assert ppbench.evaluate(**words, out=out).computed == 0
    plain = ppbench.evaluate(**{**words, "isolate": False}, out=tmp_path / "beside")
    assert "in the process that knows the truth; --isolate keeps them from it" in plain.answer.trust.sentence
    assert {r.asked for r in plain.records}.isdisjoint(r.asked for r in result.records)
    assert {r.cell_id for r in plain.records}.isdisjoint(r.cell_id for r in result.records)
    assert examine(out, further=recheck).problems == ()
    assert not any("secret" in outcome for outcome in examine(out, further=recheck).unchecked)
    shutil.move(out / "salt", tmp_path / "kept")
    assert any("drawn with a secret" in outcome for outcome in examine(out, further=recheck).unchecked)


def test_a_suite_runs_third_party_attacks_apart_unless_told_otherwise(quick, tmp_path):
    suite = tmp_path / "s.toml"
    suite.write_text(
        'schema = "ppbench.run.suite/1"\nid = "s"\nversion = 1\ntitle = "t"\n[task]\ndataset = "digits"\n'
        'model = "mlp"\ntrain = 40\nclients = 2\n[questions]\nattacks = ["plain"]\nstages = ["init"]\n'
        '[[defense]]\nid = "none"\n'
    )
    (config,) = load_suite(suite).configs
    assert config.isolate and not config.salt
    assert salt_if_isolated(load_suite(suite), "ab" * 32).configs[0].salt == "ab" * 32
    assert not load_suite(suite, isolate=False).configs[0].isolate
    suite.write_text(suite.read_text().replace('["plain"]', '["label_recovery"]'))
    assert (
        not load_suite(suite).configs[0].isolate
        and salt_if_isolated(load_suite(suite), "ab" * 32).configs[0].salt == ""
    )


def test_a_secret_is_its_folders(tmp_path):
    fresh = salt_of(tmp_path)
    assert fresh != salt_of(tmp_path) and salt_of(tmp_path, fresh=False) == ""
    keep_salt(tmp_path, fresh)
    keep_salt(tmp_path, fresh)
    assert salt_of(tmp_path) == fresh and len(commitment(fresh)) == 32 and commitment("") == ""
    with pytest.raises(UsageError, match="secret of other results"):
        keep_salt(tmp_path, "0" * 64)
    (tmp_path / "salt").write_text("no secret")
    with pytest.raises(UsageError, match="64 hex digits"):
        salt_of(tmp_path)
    (tmp_path / "salt").unlink()
    (tmp_path / "salt").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="cannot be read"):
        salt_of(tmp_path)


def test_two_secrets_share_no_draw_no_seed_and_no_name():
    """One that has a secret of its own, and knows the master seed, draws nothing again."""
    one, other = Seeds(7, "ab" * 32), Seeds(7, "cd" * 32)
    assert not torch.equal(one.generator("victims", 1).get_state(), other.generator("victims", 1).get_state())
    assert one.seed("victims", 1) != other.seed("victims", 1) and one.token("unit", 1) != other.token("unit", 1)
    assert torch.equal(one.generator("victims", 1).get_state(), Seeds(7, "ab" * 32).generator("victims", 1).get_state())
