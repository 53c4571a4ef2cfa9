#!/usr/bin/env bash
# torch's CPU generator reads the lower 32 bits of a seed and drops the rest in silence: two seeds
# that differ above them draw the same numbers. manual_seed takes 64 bits, and initial_seed() says
# all 64, so that nothing tells. Seeds made as run + (rank << 32), or hashes whose upper half holds
# what differs, give every process the same noise. NumPy's generator reads all bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.2.6
cat > "$folder/draw.py" <<'PROGRAM'
import numpy
import torch

print("torch", torch.__version__, "numpy", numpy.__version__)
low, high = 7, 7 + (1 << 32)


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    assert generator.initial_seed() == seed
    uniform, order = torch.rand(4, generator=generator), torch.randperm(9, generator=generator)
    return uniform.tolist() + order.tolist()


same = drawn(low) == drawn(high)
print(f"torch: seeds {low} and {high} draw the same:", same)
other = drawn(low) == drawn(low + 1)
print(f"torch: seeds {low} and {low + 1} draw the same:", other)
numpys = (
    numpy.random.default_rng(low).random(4).tolist()
    == numpy.random.default_rng(high).random(4).tolist()
)
print(f"numpy: seeds {low} and {high} draw the same:", numpys)
raise SystemExit(not (same and not other and not numpys))
PROGRAM
"$folder/venv/bin/python" "$folder/draw.py"
