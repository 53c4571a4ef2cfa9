"""python -m tests.headroom: how much of its allowance each judged comparison uses.

The kernels' tests run on one CPU, with the libraries and instructions that it has, and on one set
of random inputs. What is green by luck there is red elsewhere. This runs again what
``tests/kernels/judge.py`` judges, on other inputs each time and as other CPUs would compute it. No
comparison may use more than 0.7 of what it is allowed.

A pass is the judged tests of one seed in one setting. By default every setting has two seeds, 12 in
all; with --full each has all 12, and with --light two settings have one. As a plugin of pytest
this module records the shares.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

MOST = 0.7
ACCURATE = 0.35  # shares are no larger than they are told to be, and from here on exactly so
FOLDER, SEED = "FASTRL_HEADROOM", "FASTRL_TEST_SEED"
KERNELS = Path(__file__).parent / "kernels"
_ATEN, _ONEDNN, _MKL = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
_LIBRARY, _THREADS = "FASTRL_KERNELS_PRODUCTS", "OMP_NUM_THREADS"
# Each instruction set of each library, each library of products, and 1 to 3 threads.
SETTINGS = {
    "as it is": {},
    "AVX2": {_ATEN: "avx2", _ONEDNN: "AVX2", _MKL: "AVX2", _LIBRARY: "mm", _THREADS: "2"},
    "AVX-512 without bf16": {_ATEN: "avx2", _ONEDNN: "AVX512_CORE", _LIBRARY: "onednn"},
    "no vectors": {_ATEN: "default", _MKL: "AVX2", _LIBRARY: "mm", _THREADS: "3"},
    "oneDNN in AVX2": {_ONEDNN: "AVX2", _LIBRARY: "onednn", _THREADS: "2"},
    "bf16": {_LIBRARY: "bf16", _MKL: "AVX2", _THREADS: "3"},
}
SEEDS = range(12)
LIGHT = [("AVX2", 12), ("oneDNN in AVX2", 13)]
# Comparisons that may use more, up to 0.85, and the bound that proves them.
PROVED: dict[str, str] = {}


def pytest_configure(config: object) -> None:
    """Tells of every judged comparison, and lets generators that tests seed by hand differ."""
    if SEED in os.environ:
        torch.Generator = _shifted(int(os.environ[SEED]))
    if FOLDER not in os.environ:
        return
    from tests.kernels import judge

    out = open(Path(os.environ[FOLDER], f"{os.getpid()}.jsonl"), "w")  # noqa: SIM115

    def watch(what: str, error: float, allowed: float) -> None:
        share = error / allowed if allowed else float(error > 0)
        test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
        print(json.dumps([test, what, share]), file=out, flush=True)

    judge.watch, judge.enough = watch, ACCURATE


def _shifted(seed: int) -> type[torch.Generator]:
    class Generator(torch.Generator):
        def manual_seed(self, given: int) -> torch.Generator:
            return super().manual_seed(given + 1_000_003 * seed)

    return Generator


def judged_files() -> list[str]:
    """Test files with judged comparisons of their own, or with a helper that has them."""
    uses = re.compile(
        r"from tests\.kernels\.\w+ import [^#]*?\b(judge|assert_close_to_exact|check)\b"
    )
    files = [*KERNELS.glob("test_*.py"), *KERNELS.parent.glob("rollout/test_*.py")]
    return sorted(str(x) for x in files if uses.search(x.read_text()))


def run(setting: str, seed: int, folder: Path, workers: int) -> str:
    """Runs the judged tests; the last line that pytest prints."""
    folder.mkdir()
    env = {**os.environ, **SETTINGS[setting], SEED: str(seed), FOLDER: str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.headroom", "-q", "--tb=no"]
    command += ["-p", "no:cacheprovider", "--numprocesses", str(workers), "--dist", "worksteal"]
    done = subprocess.run([*command, *judged_files()], env=env, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


def shares(folder: Path) -> dict[tuple[str, str], float]:
    """The largest share of a pass by test and name of the result."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            test, what, share = json.loads(line)
            key = test, what
            found[key] = max(found[key], share if share == share else math.inf)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--full", action="store_true", help="every seed in every setting")
    some.add_argument("--light", action="store_true", help="one seed in each of two settings")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    passes = list(zip(itertools.cycle(SETTINGS), SEEDS))
    if options.full:
        passes = list(itertools.product(SETTINGS, SEEDS))
    if options.light:
        passes = LIGHT
    largest: dict[str, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setting, seed in passes:
            begun = time.monotonic()
            said = run(setting, seed, Path(folder, f"{setting} {seed}"), options.workers)
            found = shares(Path(folder, f"{setting} {seed}"))
            print(f"{setting}, seed {seed}: {len(found)} comparisons, {said}", flush=True)
            for (test, what), share in found.items():
                family = f"{Path(test.partition('::')[0]).stem}: {what}"
                if share >= largest.get(family, (-1.0, ""))[0]:
                    largest[family] = share, f"{setting}, seed {seed}, {test.partition('::')[2]}"
            del begun
    too_much = 0
    for family, (share, where) in sorted(largest.items()):
        over = share > (0.85 if family in PROVED else MOST)
        too_much += over
        print(f"{share:6.2f} {'!' if over else ' '} {family:50} {where}")
    sys.exit(bool(too_much))


if __name__ == "__main__":
    main()
