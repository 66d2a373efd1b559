"""A small runner of composite actions: it does with `action.yml` what GitHub's does, as far as our steps need it.

Scripts run in bash as there, with inputs in the environment, and files for outputs and the summary of the job. Steps
that use other people's actions are noted and not run. `ppbench` is the real program, in a fork of this process, which
has imported all that it needs; pip installs nothing.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ppbench.commands import main

BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")
WORD = re.compile(r"\b(inputs|steps|runner|github)((?:\.[\w-]+)+)")
PYTHON = """\
#!/bin/bash
if [ "$1 $2" != "-m pip" ]; then exec {python} "$@"; fi
printf '%s\\n' "$3" "${{@:4}}" >> "$RUNNER_TEMP/pip.txt"
case "$PIP_ENDS" in "") ;; *) echo "ERROR: no such package" >&2; exit "$PIP_ENDS" ;; esac
"""
PPBENCH = """\
#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
asked = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
server.sendall(asked)
sys.exit(server.recv(1)[0])
"""


@dataclass
class Ran:
    """What a run of an action came to: names of the steps that ran, their words on standard output and error."""

    code: int = 0
    steps: list[str] = field(default_factory=list)
    used: dict[str, dict[str, str]] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    log: str = ""
    summary: str = ""
    pip: list[str] = field(default_factory=list)


@dataclass
class Runner:
    """A machine with one workspace. home: a folder for what is neither in the workspace nor in the action."""

    workspace: Path
    home: Path
    action: Path

    def __post_init__(self):
        self.workspace.mkdir(exist_ok=True)
        (self.home / "bin").mkdir(parents=True)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(self.home / "s"))
        self.server.listen()
        self.server.settimeout(0.02)
        texts = {"python": PYTHON.format(python=shlex.quote(sys.executable))}
        texts["ppbench"] = PPBENCH.format(python=os.path.realpath(sys.executable), socket=str(self.home / "s"))
        for name, text in texts.items():
            (self.home / "bin" / name).write_text(text)
            (self.home / "bin" / name).chmod(0o755)

    def run(self, definition, inputs, **environment):
        """Run a parsed action with these inputs. environment: more variables, as PIP_ENDS, pip's exit status."""
        declared = {name: str(about.get("default", "")) for name, about in definition["inputs"].items()}
        assert set(inputs) <= set(declared), "GitHub only warns of an input that is none"
        ran, context = Ran(), {"inputs": {**declared, **inputs}, "steps": {}, "runner": {"arch": "X64"}}
        for name in ("summary.md", "pip.txt"):
            (self.home / name).write_text("")
        for step in definition["runs"]["steps"]:
            condition = str(step.get("if", "true"))
            if (ran.code and "always()" not in condition) or not self.value_of(condition, context):
                continue
            ran.steps.append(step["name"])
            parameters = {key: self.filled(str(value), context) for key, value in step.get("with", {}).items()}
            if "uses" in step:
                ran.used[step["uses"]], outputs = parameters, {"cache-primary-key": parameters.get("key", "")}
            else:
                code, outputs = self.script(step, context, environment, ran)
                ran.code = ran.code or code
            context["steps"][step.get("id", "")] = {"outputs": outputs}
        ran.outputs = {name: self.filled(about["value"], context) for name, about in definition["outputs"].items()}
        ran.summary, ran.pip = (self.home / "summary.md").read_text(), (self.home / "pip.txt").read_text().splitlines()
        return ran

    def script(self, step, context, environment, ran):
        """Run a step's script; return its exit status and outputs."""
        assert step["shell"] == "bash"
        output = self.home / "output.txt"
        output.write_text("")
        (self.home / "script.sh").write_text(step["run"])
        extra = {"GITHUB_OUTPUT": output, "GITHUB_STEP_SUMMARY": self.home / "summary.md", "RUNNER_TEMP": self.home}
        extra |= {"GITHUB_ACTION_PATH": self.action, "GITHUB_WORKSPACE": self.workspace, "GITHUB_ACTIONS": "true"}
        extra |= {key: self.filled(str(value), context) for key, value in step.get("env", {}).items()}
        extra |= {"PATH": f"{self.home / 'bin'}:{os.environ['PATH']}", "HOME": self.home, **environment}
        with (self.home / "log.txt").open("w+") as log:
            process = subprocess.Popen(
                [*BASH, str(self.home / "script.sh")], cwd=self.workspace, env={k: str(v) for k, v in extra.items()},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            while process.poll() is None:
                self.serve()
        ran.log += (self.home / "log.txt").read_text()
        return process.returncode, dict(line.split("=", 1) for line in output.read_text().splitlines())

    def serve(self):
        """Do as `ppbench` what its stand-in asks for, if it asks now."""
        try:
            asking, _ = self.server.accept()
        except TimeoutError:
            return
        with asking:
            size, descriptors, _, _ = socket.recv_fds(asking, 8, 3)
            words, folder, environment = json.loads(asking.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
            child = os.fork()
            if not child:
                _become(words, folder, environment, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            asking.send(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256]))

    def value_of(self, expression, context):
        """Return the value of an expression: names, `hashFiles`, `always`, comparisons, && and ||."""

        def value(match):
            result = context[match[1]]
            for part in match[2].split(".")[1:]:
                result = result.get(part, {}) if isinstance(result, dict) else {}
            return repr(result if isinstance(result, str) else "")

        text = WORD.sub(value, expression.replace("&&", " and ").replace("||", " or ").replace("\n", " "))
        files = {"hashFiles": self.hash_files, "always": lambda: True, "true": True}
        return eval(text, {"__builtins__": {}}, files)

    def hash_files(self, *patterns):
        """Return "" where no file of the workspace has a pattern."""
        assert not any(".." in Path(p).parts or p.startswith(("/", "./")) for p in patterns), "the runner refuses these"
        return "d1" if any(p.is_file() for p in chain(*map(self.workspace.glob, patterns))) else ""

    def filled(self, text, context):
        """Return text with its ${{ expressions }} replaced by their values."""
        return re.sub(
            r"\$\{\{(.*?)\}\}", lambda match: str(self.value_of(match[1].strip(), context)), text, flags=re.DOTALL
        )


def _become(words, folder, environment, descriptors):
    """Be the command `ppbench`, in a child of this process, which ends here whatever happens."""
    code = 70
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = words
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
