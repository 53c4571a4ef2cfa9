"""Instructions per byte of kernels' main loops, and the times that GPUs should take, as
`benchmarks/results/predictions.json` has them: `python -m benchmarks predict` writes it anew, and
tests/benchmarks/test_predictions.py keeps all in it but the instructions up to date."""

from functools import cache, partial

from benchmarks.predict import FILE, GPUS, H100, H200, Gpu, Prediction, read
from benchmarks.results import RESULTS
from tests.counts.record import Count

DRAW = "sample_tokens", "N=256 V=151936 bf16"
LOGPROBS = "token_logprobs", "N=8192 V=151936 bf16 forward"
LINEAR_LOGPROBS = "linear_logprobs", "N=4096 H=4096 V=131072 bf16"
LINEAR_KL_LOSS = "linear_kl_loss", "N=4096 H=4096 H'=8192 β=1 V=131072 bf16"
LINEAR_PPO_LOSS = "linear_ppo_loss", "N=4096 H=4096 V=131072 bf16 entropy=metric"

# Instructions that every one of the GPUs issues while its memory moves a byte.
_PER_BYTE = min(gpu.instructions_per_second / gpu.bytes_per_second for gpu in GPUS)


@cache
def _cases() -> dict[tuple[str, str], Prediction]:
    return {(case["name"], case["label"]): case for case in read(RESULTS / FILE)}


def _per_byte(case: tuple[str, str], kernel: str) -> float:
    return _cases()[case]["counted"]["instructions per byte"][kernel]


def _time(case: tuple[str, str], gpu: Gpu, unit: float) -> float:
    return _cases()[case]["predicted"][gpu.name]["seconds"] / unit


def _instructions(what: str, case: tuple[str, str], kernel: str) -> Count:
    return Count(what, "instr./byte", _PER_BYTE, partial(_per_byte, case, kernel))


def _times(what: str, case: tuple[str, str], unit: str, *goals: float) -> tuple[Count, ...]:
    """Of each GPU, with its goal."""
    seconds = {"ms": 1e-3, "µs": 1e-6}[unit]
    return tuple(
        Count(f"{what}, estimated on an {gpu.name}", unit, goal, partial(_time, case, gpu, seconds))
        for gpu, goal in zip((H100, H200), goals, strict=True)
    )


# An H200's goals leave what an H100's do beside the bytes that it moves faster.
COUNTS = (
    _instructions("plain draw, bf16, main loop", DRAW, "_sample_statistics_kernel"),
    *_times("plain draw of 256 × 151936, bf16", DRAW, "µs", 30, 22.5),
    _instructions("token_logprobs, bf16, main loop", LOGPROBS, "_token_logprobs_fwd_kernel"),
    *_times("token_logprobs of 8192 × 151936, bf16", LOGPROBS, "ms", 0.9, 0.65),
    *_times("linear_logprobs", LINEAR_LOGPROBS, "ms", 26, 25.6),
    *_times("linear_ppo_loss", LINEAR_PPO_LOSS, "ms", 20.5, 20.1),
    # Of which five products of N·V·H are 31.4.
    *_times("linear_kl_loss", LINEAR_KL_LOSS, "ms", 34.5, 34.0),
)
