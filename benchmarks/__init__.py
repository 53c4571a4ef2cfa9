"""fastrl's benchmarks: `pytest benchmarks` measures, `python -m benchmarks report` renders.

Every case takes the same way. A gate compares results with float64, with a plain forward or with
the peer's; then the sides take turns, with the least work of the case among them; the entry goes
into a result file. To read it once from end to end: `test_ops.py`, then `harness.py`.

    test_*.py            a benchmark each: its cases, its gate, its sides
    ops/                 a record for each op, by family (record.py says what it holds)
    eager.py, peers.py   the ops in eager PyTorch and in other libraries
    worker.py, sides/    trainers and ways to generate, in processes of their own
    models.py            models and tokenizers that are the same in every library
    environments.py      where peers are installed
    cases.py             cases, goals, and figures computed from an entry
    gate.py              the float64 gate of ops
    products.py          matrix products by every library, and which is the fastest
    timing.py            turns, clocks, and what the machine can do at best
    memory.py            the peak of a call, and its launches
    harness.py           a session, and a case's way from gate to figures
    results.py           result files; old_results.py reads those of older forms
    terminal.py, report.py, plots.py, curves.py   what is shown
    gpu.py, tunables.py, profilers.py  on a GPU, unattended
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
