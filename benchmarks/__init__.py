"""What fastrl is measured by: `pytest benchmarks`."""
