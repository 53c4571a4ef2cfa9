"""fastrl's benchmarks: `pytest benchmarks` measures, `python -m benchmarks report` renders."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
