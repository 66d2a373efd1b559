"""A third party's attack that reaches for the truth in every way that was found, as a package on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from ppbench.adversary import isolation as asking

SOURCE = '''
import builtins, gc, glob, os, socket, sys, tempfile
from dataclasses import dataclass
from typing import ClassVar
import torch
from ppbench import Attack, Guess

builtins.stolen_by_import = True
PATCHED = sys.modules.get("ppbench.questions.reconstruction")
if PATCHED is not None:
    PATCHED.patched_by_a_plugin = True


def named(word):
    return [one for one in gc.get_objects() if type(one).__name__ == word]


def images(victims):
    return torch.cat([data.x for one in victims for data in one.data.values()])


def frames(me):
    frame, found = sys._getframe(), []
    while frame is not None:
        found += [v for v in list(frame.f_locals.values()) if type(v).__name__ == "Victims"]
        frame = frame.f_back
    return images(found)


def collector(me):
    return images(named("Victims"))


def cached_tasks(me):
    held = [shard.x for task in named("Task") if hasattr(task, "shards") for shard in task.shards.values()]
    return torch.cat([x for x in held if x.shape[1:] == (1, 8, 8)])


def cached_calls(me):
    from ppbench.run.task import task_of
    held = [one for one in gc.get_referents(task_of) if type(one).__name__ == "Task"]
    for some in gc.get_referents(task_of):
        held += list(some.values()) if isinstance(some, dict) else []
    return torch.cat([shard.x for task in held if hasattr(task, "shards") for shard in task.shards.values()])


def records(me):
    from safetensors.torch import load_file
    found = [load_file(path) for path in glob.glob(os.path.join(me.out, "records", "*.safetensors"))]
    return torch.cat([some["truth"] for some in found])


def drawn_again(me):
    from ppbench.adversary.victims import choose_victims
    from ppbench.run.config import configure
    from ppbench.run.task import make_task
    known = {"defense": "none", "dataset": "digits", "model": "mlp", "loss": "cross_entropy"}
    task = make_task(configure(**known, train=40, clients=2))
    return images([choose_victims(task.shards, "server/1", 1, 2, task.seeds)])


def secret_salt(me):
    return one(len(open(os.path.join(me.out, "salt")).read()) >= 64)


def one(found):
    assert found
    return torch.ones(1)


def environment(me):
    return one(open(os.environ["PPBENCH_DATA"]).read())


def other_process(me):
    return one(open(f"/proc/{me.pid}/environ", "rb").read())


def memory(me):
    return one(open(f"/proc/{me.pid}/mem", "rb"))


def network(me):
    return one(socket.create_connection(("127.0.0.1", me.port), 2))


def home(me):
    return one(os.listdir(os.path.expanduser("~")))


def stash(me):
    path = os.path.join(tempfile.gettempdir(), "stash-of-a-thief")
    if os.path.exists(path):
        return torch.ones(1)
    open(path, "w").close()


def fixed_stash(me):
    path = f"/tmp/stash-of-a-thief-{me.pid}"
    if os.path.exists(path):
        return torch.ones(1)
    open(path, "w").close()


def packages(me):
    path = os.path.join(os.path.dirname(__file__), "stash_of_a_thief.txt")
    if os.path.exists(path):
        return torch.ones(1)
    open(path, "w").close()


WAYS = (frames, collector, cached_tasks, cached_calls, records, drawn_again, secret_salt, environment,
        other_process, memory, network, home, stash, fixed_stash, packages)


@dataclass(frozen=True)
class Thief(Attack):
    """Takes what it can reach."""

    name: ClassVar[str] = "thief"
    kind: ClassVar[str] = "reconstruction"
    threats: ClassVar = ("server/1",)
    out: str = ""
    pid: int = 0
    port: int = 0

    def run(self, view, challenges, generator):
        found = {}
        for way in WAYS:
            try:
                got = way(self)
            except BaseException:
                got = None
            if got is not None:
                found[way.__name__] = got
        shape = view.plan.spec.shape
        x = [torch.rand(len(c.unit) * c.batch, *shape, generator=generator) for c in challenges]
        return [Guess(x=one, extra=found) for one in x]


@dataclass(frozen=True)
class Plain(Attack):
    """Guesses, and has settings."""

    name: ClassVar[str] = "plain"
    kind: ClassVar[str] = "reconstruction"
    scale: float = 0.5
    both: bool = False

    def variants(self):
        return [self, Plain(scale=0.25)] if self.both else [self]

    def check(self):
        if self.scale < 0:
            from ppbench.base.errors import UsageError
            raise UsageError("Attack 'plain': scale must not be negative.")

    def check_held(self, held):
        if self.scale == 3:
            from ppbench.base.errors import UsageError
            raise UsageError(f"Attack 'plain' has seen {sum(len(x) for x in held.values())} images.")

    def suits(self, plan):
        return plan.clients < 5

    def evidence(self, view):
        return view.defense.evidence(view)

    def run(self, view, challenges, generator):
        found = []
        for evidence, asked in zip(self.evidence(view), challenges):
            shape = (len(asked.unit) * asked.batch, *view.plan.spec.shape)
            pull = sum(float(v.abs().mean()) for v in evidence.observed.values())
            found.append(Guess(x=self.scale * torch.rand(shape, generator=generator) + pull, confidence=pull,
                               path=((1, torch.zeros(shape)),), others=(torch.ones(shape),)))
        return found


@dataclass(frozen=True)
class Crafty(Attack):
    """Sends weights."""

    name: ClassVar[str] = "crafty"
    kind: ClassVar[str] = "reconstruction"
    probe_rounds: ClassVar[int] = 2
    threats: ClassVar = ("server-active/1",)

    def crafted(self, before, generator):
        from ppbench.federation.acting import Sent
        return Sent({n: p + torch.rand(p.shape, generator=generator) for n, p in before.server.params.items()})

    def run(self, view, challenges, generator):
        shape = view.plan.spec.shape
        return [Guess(x=torch.zeros(len(c.unit) * c.batch, *shape)) for c in challenges]
'''
NAMES = ("thief", "plain", "crafty")
ENTRIES = "[ppbench.attacks]\n" + "".join(f"{name} = thief_of_truth:{name.title()}\n" for name in NAMES)


@contextmanager
def answered_by(ask: Callable[..., int]) -> Iterator[None]:
    """Have `ask` answer instead of processes: it gets what these would, and the seconds, and says how it ended."""

    def made(target: str, words: list[str], read: list[Path], work: Path, device: str) -> SimpleNamespace:
        return SimpleNamespace(ask=lambda seconds: ask(target, words, read, work, seconds, device), end=lambda: None)

    asking.end_spares()
    with patch.object(asking, "WaitingProcess", made):
        yield
        asking.end_spares()


def write(site: Path) -> Path:
    """Write the package below `site`, as pip leaves it."""
    site.mkdir(parents=True, exist_ok=True)
    (site / "thief_of_truth.py").write_text(SOURCE)
    info = site / "thief_of_truth-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thief-of-truth\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    names = "thief_of_truth.py", *(f"{info.name}/{name}" for name in ("METADATA", "entry_points.txt", "RECORD"))
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    return site
