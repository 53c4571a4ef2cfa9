"""Commands that measure and check fastrl: ``python -m benchmarks COMMAND``."""
