"""The command line: parses, calls, prints; no logic. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import typer

from ppbench.base.errors import Exit, ProtocolError, UsageError, because, shown, stopping
from ppbench.base.installation import fault
from ppbench.base.machine import of_machine
from ppbench.base.version import __version__
from ppbench.commands.ledger import ledger, publish, score, submit
from ppbench.commands.results import baseline, claims, compare, leaderboard, pack, verify, view_page
from ppbench.commands.running import audit, evaluate, sweep

# -- Checks of all words of a command line, before any of them is parsed --

LONGEST = 20_000
"""Largest number of characters of a word: lists of names and numbers, and names of files, are shorter."""


def check_words(words: Sequence[str]) -> None:
    """Raise UsageError for words that are empty, no UTF-8, or longer than `LONGEST`, with the word before.

    An empty word is mostly an unset variable: as a folder it would be the current one, as a list everything.
    """
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        stated = option if equals and option.startswith("--") else words[place - 1] if place else ""
        where = f"after {shown(stated)}" if stated else f"number {place + 1}"
        if not (value if equals and option.startswith("--") else word).strip():
            raise UsageError(f"The word {where} is empty; give a value, or leave the option out.")
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise UsageError(f"The word {where}, {shown(word)}, is no text in UTF-8; rename what it names.")
        if len(word) > LONGEST:
            raise UsageError(f"The word {where} has {len(word):,} characters; words end at {LONGEST:,}.")


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="How much private data does a federated-learning defense really leak?\n\n"
    "Trains a federation under the defense, attacks exactly what each party saw, scores the attacks against the truth, "
    "and keeps a leaderboard.",
)


class What(str, Enum):
    """Groups that `ppbench list` can list."""

    all = "all"
    defenses = "defenses"
    attacks = "attacks"
    datasets = "datasets"
    models = "models"
    adapters = "adapters"
    suites = "suites"


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"ppbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_(what: Annotated[What, typer.Argument(help="Which group.")] = What.all) -> None:
    """List the defenses, attacks, data sets and models that are installed, in-tree and third-party, and the suites."""
    from ppbench.base.registry import PLUGIN_GROUPS, STOCK_PREFIX, plugins, stock_names, summary

    for group in PLUGIN_GROUPS:
        if what.value not in (group, "all"):
            continue
        typer.echo(f"{group}:")
        for plugin in plugins(group).values():
            origin = "" if plugin.ours else f" [{plugin.distribution}]"
            typer.echo(f"  {plugin.name:<16}{origin} {summary(plugin)}")
            for own, theirs in stock_names(plugin).items() if group == "adapters" else ():
                typer.echo(f"    {f'{plugin.name}:{STOCK_PREFIX}{own}':<34} {' or '.join(theirs)}")
    if what.value in ("attacks", "all"):
        _list_startup_code()
    if what.value in ("suites", "all"):
        from ppbench.base.toml_files import suite_titles

        typer.echo("suites:")
        for name, title in suite_titles().items():
            typer.echo(f"  {name:<16} {title}")


def _list_startup_code() -> None:
    """List why --isolate refuses packages with attacks, and what other packages run in every process."""
    from ppbench.base.registry import GROUP_NOUNS, plugins
    from ppbench.base.startup_code import refusals, startup_code

    roots: dict[str, set[str]] = {}
    for group in GROUP_NOUNS:
        for plugin in plugins(group).values():
            if not plugin.ours:
                roots.setdefault(plugin.distribution, set()).add(plugin.root)
    theirs = {plugin.distribution for plugin in plugins("attacks").values() if not plugin.ours}
    refused = [(name, clause) for name in sorted(theirs) for clause in refusals(name, sorted(roots[name]))]
    if refused:
        typer.echo("refused by --isolate:")
    for name, clause in refused:
        typer.echo(f"  {name:<16} {clause}")
    if code := startup_code():
        typer.echo("run in every Python process:")
    for line in code:
        typer.echo(f"  {line}")


for command in (evaluate, sweep, audit, leaderboard, verify, pack, compare, claims, publish, score, ledger, submit):
    app.command()(command)
app.command("view")(view_page)
app.add_typer(baseline, name="baseline")


def help_of(docstring: str) -> str:
    """Return a docstring as help: the lines of a paragraph as one, which the screen breaks where it ends."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(text if "\n " in f"\n{text}" else text.replace("\n", " ") for text in paragraphs)


for _info in (*app.registered_commands, *baseline.registered_commands):
    _info.help = help_of((_info.callback and _info.callback.__doc__) or "")


def main(checked: bool = False) -> None:
    """Run the command line and end the process with a code of `ppbench.base.errors`.

    checked: whether `ppbench_fl` has already checked the installation.
    """
    warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
    _any_text()
    if not checked and (message := fault()):
        _say(f"ppbench: {message}")
        sys.exit(Exit.USAGE)
    with stopping() as came:
        try:
            code = _run()
        except (typer.Abort, KeyboardInterrupt):
            code = Exit.INTERRUPTED
        except BrokenPipeError:
            code = Exit.PIPE
        except BaseException as error:  # noqa: BLE001 - a plugin may raise SystemExit: it never decides the code
            code = _failed(error)
        code = _flushed(code)
    if code == Exit.INTERRUPTED or came:  # some versions of typer return this code for an interrupt
        code = 128 + came[0] if came else Exit.INTERRUPTED
        word = {129: "hung up", 143: "terminated"}.get(code, "interrupted")
        _say(f"ppbench: {word}; what is finished is kept, and the same command goes on from there.")
    sys.exit(code)


def _run() -> int:
    try:
        check_words(sys.argv[1:])
        code = app(standalone_mode=False)
    except SystemExit as stop:  # the parser's reaction to a closed pipe
        raise stop.__context__ if isinstance(stop.__context__, BrokenPipeError) else stop from None
    except Exception as error:
        if not hasattr(error, "show"):  # the parser's own errors
            raise
        message = error.format_message() if hasattr(error, "format_message") else ""
        if message:  # in one sentence, as all other errors
            _say(f"ppbench: {because(ValueError(message), 300)}; see --help.")
        else:
            error.show()
        code = getattr(error, "exit_code", Exit.USAGE)
    return code if isinstance(code, int) else Exit.OK


def _failed(error: BaseException) -> int:
    """Print in one sentence why a command failed, and return its exit code."""
    from ppbench.base.fence import plugin_error

    error = plugin_error(error) or error
    if isinstance(error, UsageError | ProtocolError):
        _say(f"ppbench: {error}")
        return Exit.USAGE
    other = isinstance(error, OSError) and error.errno not in (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    if of_machine(error) and not other:
        _say(
            f"ppbench: This machine has no more memory, files or processes for it ({type(error).__name__}: "
            f"{because(error)}); end other programs, or use fewer --workers. What is finished is kept."
        )
        return Exit.USAGE
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return _unprinted(error)
    if isinstance(error, OSError) and error.filename is not None:
        _say(f"ppbench: {shown(str(error.filename), 200)} cannot be used ({error.strerror}); give another path.")
        return Exit.USAGE
    trace = "".join(traceback.format_exception(error))
    text = f"ppbench {__version__}\n{shlex.join(['ppbench', *sys.argv[1:]])}\n\n{trace}"
    try:
        handle, name = tempfile.mkstemp(prefix="ppbench-error-", suffix=".txt")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        where = f"the traceback is in {name}"
    except OSError:
        _say(text)
        where = "the traceback stands above"
    description = f"{type(error).__name__}: {because(error)}"
    _say(f"ppbench: An error of ppbench's own ({description}); {where}: report it with the command.")
    return Exit.INTERNAL


def _any_text() -> None:
    """Let both streams print any text, escaped where their encoding lacks it; replace closed ones by a sink."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _flushed(code: int) -> int:
    """Flush standard output; return the exit code, another one where it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as cause:
        return _unprinted(cause)
    return code


def _unprinted(cause: OSError) -> int:
    """Return the exit code after a failed write to standard output; print nothing if its reader closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports it again at exit
    if isinstance(cause, BrokenPipeError):
        return Exit.PIPE
    _say(f"ppbench: The output cannot be written ({cause.strerror}); print it to another place.")
    return Exit.USAGE


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        typer.echo(sentence, err=True)
