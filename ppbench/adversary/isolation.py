"""Isolated third-party attacks: stand-ins that run every hook in a separate process (`inside`).

The third-party module is never imported here. What it declares and answers comes as JSON and safetensors from a folder
of its own, is read from regular files only, and is checked as untrusted input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from keyword import iskeyword
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.adversary.isolated_worker import AttackFacts, AttackSetting, Hook, HookCall, Reply
from ppbench.base import tree
from ppbench.base.confine import EXPIRED, WaitingProcess, walled
from ppbench.base.device import tf32_allowed
from ppbench.base.errors import PluginError, UsageError, because, first_of, shown
from ppbench.base.files import kind_of, make_folder, read_regular, scratch
from ppbench.base.registry import GROUP_NOUNS, Plugin, load_plugin, plugins
from ppbench.base.startup_code import refusals, startup_code
from ppbench.base.tensor_files import seal_value, unsealed
from ppbench.base.version import __version__
from ppbench.federation.acting import Before, Sent
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.threats import HONEST_SERVER, THREATS, register
from ppbench.federation.view import PublicDefense, View
from ppbench.records.scores import Scalar
from ppbench.records.sources import code_of

# -- Calls of a third-party attack: a folder of files in, a folder of files out, and a separate process between --
# Answers are read from regular files only, up to a maximal size, and checked before they are used.

LONG, SHORT = 6 * 3600.0, 300.0
"""Seconds that an attack may take for all challenges of a cell or for crafted weights, and for any other answer."""
LARGEST_ANSWER = 2 << 30
"""Most bytes of the tensors of an answer."""
ENTRY_FUNCTION = "ppbench.adversary.isolated_worker:main"


def remembered(ask: HookCall, plan: str = "", files: Sequence[Path] = ()) -> Reply:
    """Return the reply to a call that depends on the attack's code and parameters alone; cached on disk."""
    code, kinds = code_of(("attacks", ask.attack)), sorted({*plugins("defenses"), *plugins("questions")})
    key = hashlib.sha256(json.dumps([__version__, ask.model_dump(mode="json"), plan, code, kinds]).encode()).hexdigest()
    path = reply_cache() / f"{key[:32]}.json"
    if code and kind_of(path) == "file":
        with contextlib.suppress(UsageError, ValidationError):
            return Reply.model_validate(unsealed(path, files=False))
    reply, _ = isolated_answer(ask, lambda home: (home / "plan.json").write_text(plan), files)
    if code:  # "" for ppbench's own attacks, whose code changes between versions too
        with contextlib.suppress(UsageError):  # without a cache the attack is called again
            make_folder(path.parent)
            seal_value(path, reply.model_dump(mode="json"))
    return reply


def reply_cache() -> Path:
    """Return the folder of cached replies: "apart" in PPBENCH_CACHE, or in ~/.cache/ppbench."""
    return Path(os.environ.get("PPBENCH_CACHE") or Path.home() / ".cache" / "ppbench") / "apart"


def isolated_answer(ask: HookCall, write: Callable[[Path], object], files: Sequence[Path] = ()) -> tuple[Reply, Any]:
    """Return the reply of a separate process and its tree of tensors, None if it has none.

    write: writes the input into a folder; files: what else the process may read. Raises UsageError: the attack refuses
    the input; PluginError: it ended without an answer, took too long, or its answer is malformed.
    """
    title, seconds = plugins("attacks")[ask.attack].words, LONG if ask.hook in ("run", "crafted") else SHORT
    with contextlib.closing(_box(tuple(files), ask.device)) as box:
        write(box.home)
        known = ask.model_copy(update={"threats": tuple(THREATS.values())})  # no part of the key of a cached reply
        (box.home / "ask.json").write_text(known.model_dump_json())
        if ask.hook == "run":  # packages load for the next cell while this one is attacked and scored
            with contextlib.suppress(OSError, UsageError):  # then it is made, or fails, when it is needed
                _spares.append(_Box(box.files, box.device))
        ended = box.process.ask(seconds)
        if ended == EXPIRED:
            raise PluginError(f"{title} gave no answer in {seconds:,.0f} s, isolated.")
        reply = _reply(box.work / "answer.json", title, ended)
        if reply.refused:
            raise (PluginError if reply.plugin else UsageError)(reply.refused)
        tensors = box.work / "answer.safetensors"
        return reply, _tree(tensors, title) if kind_of(tensors, follow=False) is not None else None


class _Box:
    """Two folders and a process that waits between them for one call; `files`: what else it may read."""

    def __init__(self, files: tuple[Path, ...], device: str) -> None:
        self.files, self.device, self.maker, self.walls = files, device, os.getpid(), walled()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(scratch("ppbench-apart"))
            self.home, self.work = folder / "ask", folder / "work"
            self.home.mkdir()
            self.work.mkdir()
            places = [str(self.home), str(self.work)]
            self.process = WaitingProcess(ENTRY_FUNCTION, places, [self.home, *files], self.work, device)
            stack.callback(self.process.end)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the process and remove the folders."""
        if self.maker == os.getpid():  # in a fork they belong to the parent
            self._stack.close()


_spares: list[_Box] = []


def _box(files: tuple[Path, ...], device: str) -> _Box:
    """Return a waiting box with these settings, or a new one."""
    while _spares:
        box = _spares.pop()
        if (box.files, box.device, box.maker, box.walls) == (files, device, os.getpid(), walled()):
            return box
        box.close()
    return _Box(files, device)


def end_spares() -> None:
    """End the processes that wait for a next cell; called at the end of this process, also of a worker."""
    while _spares:
        _spares.pop().close()


Finalize(None, end_spares, exitpriority=10)


def _reply(path: Path, title: str, ended: int) -> Reply:
    try:
        return Reply.model_validate_json(_taken(path, 4 << 20))
    except FileNotFoundError:
        how = f"killed by {signal.Signals(-ended).name}" if ended < 0 else f"with exit code {ended}"
        raise PluginError(f"{title} ended its process without an answer ({how}), isolated.") from None
    except (OSError, ValueError, RecursionError) as cause:
        raise PluginError(f"{title} answers what cannot be read, isolated ({because(cause)}).") from cause


def _tree(path: Path, title: str) -> Any:
    try:
        return tree.unpacked(_taken(path, LARGEST_ANSWER))
    except (OSError, UsageError) as cause:
        raise PluginError(f"{title} answers tensors that cannot be read, isolated ({because(cause)}).") from cause


def _taken(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of `most` bytes or fewer; OSError for anything else."""
    size = path.lstat().st_size
    if size > limit:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes", str(path))
    return read_regular(path)


_GUESS = {
    name: TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    for name, hint in get_type_hints(Guess, include_extras=True).items()
}
"""Checks of the fields of a guess against their annotations."""


class NothingRead(UsageError):
    """An attack found nothing in the view that it can read."""


@dataclasses.dataclass(frozen=True)
class IsolatedAttack(Attack):
    """The stand-in for a third-party attack, which runs elsewhere; with the attack's declarations and fields.

    declared_facts: what the attack declares. user_parameters: what the user set. Its own evidence is not available
    here, because the discrepancy at the truth would hand it the truth; so its records have no such discrepancy.
    """

    declared_facts: ClassVar[AttackFacts]
    user_parameters: ClassVar[Mapping[str, Scalar]]

    def check(self) -> None:
        """Do nothing: parameters are checked where the attack runs."""

    def parameters(self) -> dict[str, Scalar]:
        """Return the declared parameters."""
        return dict(self.declared_facts.setting.parameters)

    def check_held(self, inputs: Mapping[int, Tensor]) -> None:
        """Check its knowledge in a process that ends afterwards (UsageError: it refuses)."""
        if self.declared_facts.holds:
            self._call("check_held", lambda home: tree.save_tree(dict(inputs), home / "held.safetensors"))

    @property
    def needs_public(self) -> bool:
        """The declared value."""
        return self.declared_facts.needs_public

    def variants(self) -> Sequence[Attack]:
        """Return stand-ins for the declared variants."""
        return [
            _standing(self.name, setting, self.declared_facts, self.user_parameters)
            for setting in self.declared_facts.variants
        ]

    def suits(self, plan: Plan) -> bool:
        """Return whether it suits `plan` (PluginError: its answers break the contract)."""
        return _suits(self, json.dumps(dataclasses.asdict(plan)))

    def knows(self, defense: str) -> bool:
        """Return whether it declares that it knows the defense."""
        return defense in self.declared_facts.knows

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return the weights that the isolated attack chooses (PluginError: they are no weights by name)."""
        view = View(HONEST_SERVER, None, before.plan, before.defense, (), (), (), before.public)

        def write(home: Path) -> None:
            view.save(home)
            tree.save_tree((before.server, before.cohort, before.target), home / "before.safetensors")
            tree.save_tree(generator.get_state(), home / "draws.safetensors")

        where = next(iter(before.server.params.values())).device
        answer = self._call("crafted", write, device=str(where), **_named(before.plan, before.defense))
        sent = answer if isinstance(answer, tuple) and len(answer) == 2 else (None, None)
        if not _is_params(sent[0]) or not (sent[1] is None or _is_params(sent[1])):
            raise PluginError(f"{plugins('attacks')[self.name].words} sends something other than weights by name.")
        return Sent(*tree.moved(sent, where))

    def evidence(self, view: View) -> list[Evidence]:
        """Return the defense's plain evidence, or none if the attack has its own."""
        return [] if self.declared_facts.own else view.defense.evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the guesses of the isolated attack. NothingRead: its question reads views, and this one is empty."""

        def write(home: Path) -> None:
            view.save(home)
            tree.save_tree([_fields(challenge) for challenge in challenges], home / "challenges.safetensors")
            tree.save_tree(generator.get_state(), home / "draws.safetensors")

        device = next((str(t.device) for letter in view.mail for t in tree.leaves(letter.message)), "cpu")
        reads = bool(load_plugin("questions", self.kind).reads)
        answer = self._call("run", write, device=device, evidence=reads, **_named(view.plan, view.defense))
        if not isinstance(answer, list) or not all(isinstance(one, list) for one in answer):
            raise PluginError(f"{plugins('attacks')[self.name].words} answers something other than a list of guesses.")
        return [self._guess(one) for one in answer]

    def _guess(self, fields: list[Any]) -> Guess:
        names = [field.name for field in dataclasses.fields(Guess)]
        try:
            values = dict(zip(names, fields, strict=True))
            values |= {"path": tuple(map(tuple, values["path"])), "others": tuple(values["others"])}
            for name, value in values.items():
                _GUESS[name].validate_python(value, strict=True)
        except (ValueError, TypeError) as cause:  # pydantic's are ValueErrors
            title = plugins("attacks")[self.name].words
            raise PluginError(f"{title} answers a guess with other fields than `Guess`.") from cause
        return Guess(**values)

    def _call(self, hook: Hook, write: Callable[[Path], object], **options: Any) -> Any:
        ask = HookCall(hook=hook, attack=self.name, parameters=dataclasses.asdict(self),
                  device=options.pop("device", "cpu"), evidence=options.pop("evidence", False),
                  threads=torch.get_num_threads(), tf32=tf32_allowed())  # fmt: skip
        reply, answer = isolated_answer(ask, write, _files({**self.user_parameters, **options}))
        if reply.unread:
            raise NothingRead
        return answer


def _fields(value: Challenge) -> list[object]:
    values = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [
        [list(slot) for slot in value.unit],
        *(dict(one) if isinstance(one, Mapping) else one for one in values[1:]),
    ]


def _is_params(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(n, str) and isinstance(tensor, Tensor) for n, tensor in value.items()
    )


def _named(plan: Plan, defense: PublicDefense) -> dict[str, Scalar]:
    """Return the network's options and the defense's parameters, which may name files that the attack needs."""
    of_defense = {f"defense.{name}": value for name, value in dataclasses.asdict(defense).items()}
    return {**{f"model.{name}": value for name, value in dict(plan.spec.options).items()}, **of_defense}


def _files(values: Mapping[str, Scalar]) -> list[Path]:
    """Return the files that `values` name; pass only what the user set, never what the attack names itself."""
    paths = [Path(value).absolute() for value in values.values() if isinstance(value, str) and value]
    return [path for path in paths if kind_of(path) == "file"]


# -- what isolates an attack must not run before it ------------------------------------------------------------------
@lru_cache
def check_package(plugin: Plugin) -> None:
    """Refuse an attack (UsageError) whose package, or what that requires, brings code that runs in this process too.

    Warns, once, of what packages that it does not require run in every process.
    """
    every = (one for group in GROUP_NOUNS for one in plugins(group).values() if one.distribution == plugin.distribution)
    clauses = refusals(plugin.distribution, sorted({one.root for one in every}))
    if clauses:
        raise UsageError(
            f"{plugin.words} cannot be kept apart: its package {first_of(clauses)}, and that would run beside the "
            "truth. Install it without (a wheel, not an editable install), or use --no-isolate."
        )
    if code := startup_code():
        _warn_of_startup_code(", ".join(code))


@lru_cache
def _warn_of_startup_code(code: str) -> None:
    warnings.warn(
        f"Installed packages run code in every Python process, also where the truth is: {code}.", stacklevel=4
    )


# -- making stand-ins --------------------------------------------------------------------------------------------------
@lru_cache
def isolated_attack(name: str, user_parameters: tuple[tuple[str, Scalar], ...] = ()) -> IsolatedAttack:
    """Return the stand-in for a third-party attack with a user's parameters, by name and value.

    Raises UsageError: the parameters cannot be used; PluginError: the attack is malformed.
    """
    reply = remembered(HookCall(hook="describe", attack=name, parameters=dict(user_parameters)))
    if reply.facts is None:
        raise PluginError(f"{plugins('attacks')[name].words} does not declare itself.")
    for threat in reply.facts.defined:
        register(threat)
    return _standing(name, reply.facts.setting, reply.facts, dict(user_parameters))


def _standing(
    name: str, setting: AttackSetting, facts: AttackFacts, user_parameters: Mapping[str, Scalar]
) -> IsolatedAttack:
    reserved = [
        key for key in setting.values if not key.isidentifier() or iskeyword(key) or hasattr(IsolatedAttack, key)
    ]
    if reserved:
        raise PluginError(
            f"{plugins('attacks')[name].words} has the parameter {shown(reserved[0])}; call it something else."
        )
    space = {
        **facts.declared,
        "name": name,
        "declared_facts": facts.model_copy(update={"setting": setting}),
        "user_parameters": user_parameters,
    }
    fields = [(key, Any, dataclasses.field(default=value)) for key, value in setting.values.items()]
    stand_in_class = dataclasses.make_dataclass(
        "Standing", fields, bases=(IsolatedAttack,), namespace=space, frozen=True
    )
    stand_in: IsolatedAttack = stand_in_class()
    return stand_in


@lru_cache(maxsize=256)
def _suits(attack: IsolatedAttack, plan: str) -> bool:
    ask = HookCall(hook="suits", attack=attack.name, parameters=dataclasses.asdict(attack))
    return remembered(ask, plan, _files(attack.user_parameters)).suits


def isolated_guesses(attack: Attack, view: View, challenges: Sequence[Challenge], seed: int) -> list[Guess]:
    """Return the guesses of any installed attack, run in a separate process on files alone."""
    parameters = tuple(dataclasses.asdict(attack).items())
    return isolated_attack(attack.name, parameters).run(view, challenges, torch.Generator().manual_seed(seed))
