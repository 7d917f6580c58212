"""`python -m tests.torch_distributed`: torch's own tests of a backend for CPU tensors, for gloo and for gradwire in the same run.

The tests are those of torch.testing._internal.distributed.distributed_test that gloo runs. For gradwire the same ones
run, with its name wherever they ask for a gloo group. Each has WORLD_SIZE (3) forked processes. What gloo passes and
gradwire does not is listed at the end, and is an exit code of 1 unless KNOWN has a reason for it; the outputs are in
--out. torch's tests need the package expecttest.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

GLOO, OURS = "gloo", "gradwire"
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
TEST_S = 60

#: What gloo passes and gradwire does not, and why; docs/torch_backend.md repeats it for its readers.
_WORDS, _NAME = "it compares gloo's words for a timeout", "it needs the name to be gloo"
KNOWN: dict[str, str] = {
    "test_barrier_timeout_full_group": _WORDS,
    "test_barrier_timeout_global": _WORDS,
    "test_barrier_timeout_group": _WORDS,
    "test_get_backend": _NAME,
    "test_monitored_barrier_gloo": _NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": _WORDS,
    "test_monitored_barrier_gloo_subgroup": _NAME,
}


def load() -> ModuleType:
    """Return torch's module of tests, as it is for gloo; it reads the environment when it is imported."""
    os.environ.setdefault("WORLD_SIZE", "3")
    os.environ.update(BACKEND=GLOO, DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_S), INIT_METHOD="file://")
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def case_of(tests: ModuleType) -> type[unittest.TestCase]:
    """Return the class of all tests, whose processes are forked: what they import is there."""
    import torch.multiprocessing

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            folder = os.environ["TEMP_DIR"]
            tests.INIT_METHOD = f"file://{folder}/again-{time.monotonic_ns()}"  # type: ignore[attr-defined]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Case


@contextmanager
def in_place_of_gloo(backend: str) -> Iterator[None]:
    """Have torch.distributed make groups of a backend where gloo is asked for."""
    import torch.distributed as dist

    made = {name: getattr(dist, name) for name in ("init_process_group", "new_group")}

    def instead(name: str) -> Any:
        def make(*arguments: Any, **options: Any) -> Any:
            if options.get("backend") == GLOO:
                options["backend"] = backend
            return made[name](*[backend if each == GLOO else each for each in arguments], **options)

        return make

    for name in made:
        setattr(dist, name, instead(name))
    try:
        yield
    finally:
        for name, function in made.items():
            setattr(dist, name, function)


def run(case: type[unittest.TestCase], name: str, out: Path) -> str:
    """Run a test, and return how it went; what its processes say is left in a file."""
    result = unittest.TestResult()
    with out.open("w") as file:
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            case(name).run(result)
        finally:
            for descriptor, original in zip((1, 2), kept, strict=True):
                os.dup2(original, descriptor)
                os.close(original)
        troubles = [text for _, text in result.errors + result.failures]
        file.write("\n".join(troubles))
    return FAILED if troubles else SKIPPED if result.skipped else PASSED


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_distributed", description=__doc__)
    parser.add_argument("-k", default="", help="only tests with this in their names")
    parser.add_argument("--part", default="1/1", help="only the first of 4 parts of the tests: 1/4")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "torch-distributed")
    chosen = parser.parse_args(arguments)
    part, parts = map(int, chosen.part.split("/"))
    tests = load()
    import gradwire  # noqa: F401  # which registers the backend

    case = case_of(tests)
    names = [name for name in unittest.TestLoader().getTestCaseNames(case) if chosen.k in name][part - 1 :: parts]
    worse: list[str] = []
    counts: dict[tuple[str, str], int] = {}
    for backend in (GLOO, OURS):
        (chosen.out / backend).mkdir(parents=True, exist_ok=True)
    for name in names:
        results: dict[str, str] = {}
        for backend in (GLOO, OURS):
            if results.get(GLOO, PASSED) == PASSED:
                with in_place_of_gloo(backend):
                    results[backend] = run(case, name, chosen.out / backend / f"{name}.txt")
                counts[backend, results[backend]] = counts.get((backend, results[backend]), 0) + 1
        print(f"{name:70} {'  '.join(f'{backend} {result}' for backend, result in results.items())}", flush=True)
        if results[GLOO] == PASSED and results[OURS] != PASSED:
            worse.append(name)
    print(", ".join(f"{backend} {result} {count}" for (backend, result), count in sorted(counts.items())))
    for name in worse:
        print(f"gloo passes and gradwire does not: {name}: {KNOWN.get(name, 'no reason known')}")
    return 1 if set(worse) - set(KNOWN) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
