"""Python in front of a launch, by the functions that it calls: their number is the same on every
machine, however busy, where their time is not. `python -m benchmarks.python_time` has both."""

from functools import cache, partial

from benchmarks.python_time import python_work
from tests.counts.record import Count

# Functions, of Python and C, that a call may call: those that it calls with the Triton that takes
# most, 3.9, and a tenth more for other versions of Python and torch. At 75 a call with one launch
# takes 15 to 16 µs where Triton's launch alone takes 8. Backward passes hold more: autograd's own.
MOST = {
    "token_logprobs": 83, "token_logprobs, backward": 116, "token_logprobs mask entropy": 91,
    "token_logprobs mask entropy, backward": 143, "ppo_loss": 93, "ppo_loss, backward": 87,
    "ppo_loss value": 104, "ppo_loss value, backward": 96, "gae": 96, "gae whiten": 131,
    "kl_penalty": 64, "kl_penalty, backward": 96, "kl_rewards": 101, "kl_rewards, backward": 159,
    "full_kl": 90, "full_kl, backward": 119, "masked_whiten": 97, "masked_whiten, backward": 135,
    "rms_norm": 68, "swiglu": 57, "rotate_and_store": 97, "decode_attention": 97,
    "decode_attention one split": 80,
    "advance_slots": 116,  # 115 before triton 3.9
    "sample_keys": 79, "sample_tokens": 135, "sample_tokens top_k": 169,
}  # fmt: skip


@cache
def calls_of_functions() -> dict[str, int]:
    """By what is called."""
    return {work.call: work.functions + work.builtins for work in python_work(timed=False)}


def _of(call: str) -> float:
    return calls_of_functions()[call]


COUNTS = tuple(
    Count(f"{call}, in Python", "functions", most, partial(_of, call))
    for call, most in MOST.items()
)
