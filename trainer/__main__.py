"""The command `gradwire`, also `python -m gradwire`."""

from __future__ import annotations

import os
import runpy
import sys

USAGE = """\
usage: gradwire run -np 4 [-H a:2,b:2] train.py ...   start a training script on this host or on several hosts
       gradwire report [--out FILE] -np 4 train.py    run a training command, and write one page about its steps
       gradwire info                                  print versions, links, and the algorithm for each message size
       gradwire tune --out FILE                       measure the links between the ranks of a launcher
       gradwire check [--host H | --hosts A,B,C]      test this host, or the networks between hosts
       gradwire keygen FILE                           write a key, with which connections are encrypted
       gradwire precompile                            compile the kernels now instead of in the first run
       gradwire bench ...                             run a benchmark; `gradwire bench --help` lists them
       gradwire simulate --ranks 9600 ...             predict the speed of training on hardware that you describe

`gradwire COMMAND --help` describes a command."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command in the arguments, and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    name, rest = (given[0], given[1:]) if given else ("--help", [])
    if name in ("run", "report"):
        return _training(name, rest)
    if name in ("info", "tune"):
        return _among_ranks(name, rest)
    if name in ("keygen", "precompile"):
        return _module("gradwire.collectives", [name, *rest])
    if name == "check":
        return _module("gradwire.trainer.tools.check", rest)
    if name in ("bench", "simulate"):
        return _module("gradwire.bench", given[name == "bench" :])
    asked = name in ("-h", "--help")
    if not asked:
        print(f"gradwire: there is no command {name!r}", file=sys.stderr)
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _training(name: str, arguments: list[str]) -> int:
    from gradwire.collectives.errors import LinkError
    from gradwire.trainer.launcher.job import run_job
    from gradwire.trainer.launcher.options import parse_job
    from gradwire.trainer.tools.report.command import report

    try:
        if name == "report":
            return report(arguments)
        job = parse_job(arguments)
        if job.notice is not None:
            print(job.notice, file=sys.stderr, flush=True)
        return run_job(job)
    except (LinkError, ValueError) as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return 2


def _among_ranks(name: str, arguments: list[str]) -> int:
    """Run a command of collectives, which reads the variables of torchrun only, among the ranks of any launcher."""
    from gradwire.trainer.world.launch import torchrun_variables

    try:
        os.environ |= torchrun_variables(os.environ)
    except ValueError as error:
        print(f"gradwire {name}: {error}", file=sys.stderr)
        return 2
    return _module("gradwire.collectives", [name, *arguments])


def _module(name: str, arguments: list[str]) -> int:
    """Run a package as `python -m` does, and return its exit status."""
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
