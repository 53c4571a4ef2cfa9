"""python -m tests.headroom: how much of its allowance each judged comparison uses.

The kernels' tests run on one CPU, with the libraries and instructions that it has, and on one set
of random inputs. What is green by luck there is red elsewhere. This runs again what
``tests/kernels/judge.py`` judges, on other inputs each time and as other CPUs would compute it. No
comparison may use more than 0.7 of what it is allowed.

A pass is one seed in one setting. By default each of the 6 settings has 2 of 12 seeds and a third
of the tests with each, so that a test meets 4 settings; with --full all tests meet all seeds in all
settings, --light is two passes with a third of the tests each, and PART=WORD draws one pass. As a
plugin of pytest this module records the shares.
"""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fastrl_kernels import gemm
from tests.part import drawn

MOST = 0.7
ACCURATE = 0.35  # shares are no larger than they are told to be, and from here on exactly so
MOST_PROVED = 0.85
FOLDER, PART, SEED = "FASTRL_HEADROOM", "FASTRL_HEADROOM_PART", "FASTRL_TEST_SEED"
KERNELS = Path(__file__).parent / "kernels"
_ATEN, _ONEDNN, _MKL = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
_LIBRARY, _THREADS = "FASTRL_KERNELS_PRODUCTS", "OMP_NUM_THREADS"
# Each instruction set of each library, each library of products, and 1 to 3 threads.
SETTINGS = {
    "as it is": {},
    "AVX2": {_ATEN: "avx2", _ONEDNN: "AVX2", _MKL: "AVX2", _LIBRARY: "mm", _THREADS: "2"},
    "AVX-512 without bf16": {_ATEN: "avx2", _ONEDNN: "AVX512_CORE", _LIBRARY: "onednn"},
    "no vectors": {_ATEN: "default", _MKL: "AVX2", _LIBRARY: "fp32", _THREADS: "3"},
    "oneDNN in AVX2": {_ONEDNN: "AVX2", _LIBRARY: "onednn", _THREADS: "2"},
    "bf16": {_LIBRARY: "bf16", _MKL: "AVX2", _THREADS: "3"},
}
SEEDS, PARTS = 12, 3
# Comparisons that may use more, up to 0.85, and the bound that proves them.
PROVED: dict[str, str] = {}


class Pass(NamedTuple):
    setting: str
    seed: int
    part: int | None  # of the tests; None for all

    def __str__(self) -> str:
        return f"{self.setting}, seed {self.seed}"


def passes(choice: str) -> list[Pass]:
    if choice == "full":
        return [Pass(setting, seed, None) for setting in SETTINGS for seed in range(SEEDS)]
    if choice == "light":
        return [Pass("AVX2", 100, 0), Pass("oneDNN in AVX2", 101, 1)]
    cycle = zip(range(SEEDS), itertools.cycle(SETTINGS), strict=False)
    # Another part for a setting's second seed.
    return [Pass(name, seed, (seed + seed // len(SETTINGS)) % PARTS) for seed, name in cycle]


def pytest_configure(config: pytest.Config) -> None:
    """Tells of every judged comparison, and lets generators that tests seed by hand differ."""
    if FOLDER not in os.environ:
        return
    torch.Generator = _shifted(int(os.environ[SEED]))
    from tests.kernels import judge

    out = open(Path(os.environ[FOLDER], f"{os.getpid()}.jsonl"), "w")  # noqa: SIM115
    config.add_cleanup(out.close)

    def watch(what: str, error: float, allowed: float) -> None:
        share = error / allowed if allowed else float(error > 0)
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        print(json.dumps([test, what, share]), file=out, flush=True)

    judge.watch, judge.enough = watch, ACCURATE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PART in os.environ:
        items[:] = [
            x for x in items if zlib.crc32(x.nodeid.encode()) % PARTS == int(os.environ[PART])
        ]


def _shifted(seed: int) -> type[torch.Generator]:
    class Generator(torch.Generator):
        def manual_seed(self, given: int) -> torch.Generator:
            return super().manual_seed(given + 1_000_003 * seed)

    return Generator


def judged_files() -> list[str]:
    """Test files with judged comparisons of their own, or with a helper that has them."""
    uses = re.compile(
        r"from tests\.kernels\.\w+ import [^#]*?\b(judge|assert_close_to_exact|check)\b"
        r"|ppo_tests\.check"
    )
    files = [*KERNELS.glob("test_*.py"), *KERNELS.parent.glob("rollout/test_*.py")]
    faults = KERNELS / "test_judge.py"  # planted, to be above 1
    return sorted(str(x) for x in files if x != faults and uses.search(x.read_text()))


def run(one: Pass, folder: Path, workers: int) -> tuple[dict[tuple[str, str], float], list[str]]:
    """The largest share by test and name of the result, and pytest's summary and failures."""
    settings = SETTINGS[one.setting]
    if settings.get(_LIBRARY) == "bf16" and gemm.Bf16.absent():
        settings = {**settings, _LIBRARY: "auto"}  # it would be refused
    env = {"OMP_WAIT_POLICY": "passive", **os.environ, **settings}
    env |= {SEED: str(one.seed), FOLDER: str(folder)}
    env.pop("THOROUGH", None)  # of `make thorough`, which would leave these tests out
    if one.part is not None:
        env[PART] = str(one.part)
    command = [sys.executable, "-m", "pytest", "-p", "tests.headroom", "-q", "--tb=no"]
    command += ["-p", "no:cacheprovider", "--numprocesses", str(workers), "--dist", "worksteal"]
    done = subprocess.run([*command, *judged_files()], env=env, capture_output=True, text=True)
    found: dict[tuple[str, str], float] = {}
    for path in folder.glob("*.jsonl"):
        for test, what, share in map(json.loads, path.read_text().splitlines()):
            share = math.inf if math.isnan(share) else share
            found[test, what] = max(found.get((test, what), 0.0), share)
    *lines, last = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return found, [last, *(line for line in lines if line.startswith(("FAILED", "ERROR")))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--full", dest="choice", action="store_const", const="full")
    some.add_argument("--light", dest="choice", action="store_const", const="light")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    largest: dict[str, tuple[float, str]] = {}
    total = failed = 0
    for one in drawn(passes(options.choice), "headroom"):
        with tempfile.TemporaryDirectory() as folder:
            found, said = run(one, Path(folder), options.workers)
        print(f"{one}: {len(found)} comparisons, pytest:", "\n    ".join(said), flush=True)
        total, failed = total + len(found), failed + len(said[1:]) + (not found)
        for (test, what), share in found.items():
            file, _, name = test.partition("::")
            family = f"{Path(file).stem.removeprefix('test_')}: {kind(what)}"
            largest[family] = max(largest.get(family, (0.0, "")), (share, f"{name} {what}, {one}"))
    over = 0
    for family, (share, where) in sorted(largest.items(), key=lambda x: -x[1][0]):
        limit = MOST if family not in PROVED else MOST_PROVED
        over += share > limit
        print(f"{share:8.3f} {'too much' if share > limit else '':8} {family:45} {where}")
    print(f"{total} comparisons; {over} of {len(largest)} families use more than {MOST} of theirs")
    print(f"{failed} tests failed")
    return int(over + failed > 0)


def kind(what: str) -> str:
    """A result's name: values are told apart by nothing but their number."""
    return "values" if what.startswith("output") else what


if __name__ == "__main__":
    sys.exit(main())
