"""What a kernel's main loop may take, and has to hold in flight; kernels by file and name.

A loop that takes more instructions per byte than a GPU issues while its memory moves that byte is
bound by them (`Target.issue_limit`): the gate's table marks it with "!". That is no fault of its
own, since scans and draws have more to do than to read. Two things are:

- a kernel above its bound here, on any target or in any dtype: bounds are the most that kernels
  take with any version of Triton that is supported, and a fifth more. Of kernels that reduce a tile
  to numbers that is on gfx942 with Triton before 3.9, where each reduction across warps takes about
  twenty instructions more, predicated ones;
- a kernel whose need says that the memory is its roof, on a target where instructions are, or with
  fewer bytes in flight than keep the memory busy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

KIB = 1024

# Of AMD's scalar registers that are spilled: 73 are the most, decode_attention's, and a fifth more.
# Two vector registers have lanes for 128; the moves are in the instructions per byte.
MOST_SCALAR_SPILLS = 88

# Kernels whose main loop is the one of the most instructions: the loop that merges what splits left
# may move more bytes in a round than that over tokens.
BY_INSTRUCTIONS = frozenset({"decode_attention._decode_attention_fwd_kernel"})

# Instructions per thread and byte of the main loop.
MOST_PER_BYTE: dict[str, float] = {
    # Fourteen numbers of a row, each from another place.
    "advance_slots._advance_slots_kernel": 2.2,
    # fp32 with a group of heads, whose products tensor cores do not take; 3.2 in 16 bits.
    "decode_attention._decode_attention_fwd_kernel": 20.0,
    "decode_attention._decode_attention_merge_kernel": 5.0,
    # A soft cap on each side, and the logarithm of a mixture, are nearly all of both: 4.5 of a KL
    # without caps in 16 bits, 10.8 and 13.2 of a mixture.
    "divergence._divergence_bwd_kernel": 31.7, "divergence._divergence_fwd_kernel": 41.8,
    "full_kl._full_kl_bwd_kernel": 5.5, "full_kl._full_kl_fwd_kernel": 8.4,
    "gae._gae_bwd_kernel": 8.0, "gae._gae_fwd_kernel": 16.7, "kl._kl_penalty_bwd_kernel": 6.0,
    "kl._kl_penalty_fwd_kernel": 6.6, "kl._kl_rewards_bwd_kernel": 2.5,
    "kl._kl_rewards_fwd_kernel": 7.1,
    "linear_sample._linear_sample_draw_kernel": 17.1,
    # 2.6 of heads whose rows begin at multiples of 16 bytes.
    "linear_sample._linear_sample_tiles_kernel": 29.0,
    # A softcap's tanh is two thirds of both: 3.5 and 5.4 without one, 7.9 with the entropy.
    "lm_head._lm_head_bwd_kernel": 15.0,
    "lm_head._lm_head_fwd_kernel": 29.0, "lm_head._lm_head_scale_kernel": 2.4,
    "logprob._token_logprobs_bwd_kernel": 6.4,
    # 5.5 where rows are aligned, 6.6 where they are not; 7.8 took a logit at a time.
    "logprob._token_logprobs_fwd_kernel": 7.0,
    "moments._moments_fwd_kernel": 29.4, "moments._moments_merge_kernel": 6.4,
    "moments._whiten_bwd_kernel": 4.1, "moments._whiten_fwd_kernel": 6.4,
    "moments._whiten_sums_kernel": 3.3, "ppo_loss._ppo_loss_bwd_kernel": 2.5,
    "ppo_loss._ppo_loss_fwd_kernel": 16.1, "rms_norm._rms_norm_kernel": 5.9,
    # Three hashes for the eight bytes of a sample id; one for sixteen in decode steps, 2.7.
    "rng._sample_keys_kernel": 14.4,
    # A head of 64 of which 16 are turned: a few bytes for each warp, and the latency is the roof.
    "rotary._rotate_and_store_kernel": 16.0,
    # Of what reaches a row's bound, a few logits of many; and of the group that won, 8 KiB of a
    # row's 300. Both wait for memory and for sums across threads, not for instructions.
    "sampling._sample_candidates_kernel": 19.3,
    "sampling._sample_draw_kernel": 42.0, "sampling._sample_statistics_kernel": 12.5,
    # Words of sets beside logits: 3.9 on gfx942, 3.2 on the others; 0.2 of what a short set drops.
    "swiglu._swiglu_kernel": 8.5, "token_sets._restrict_kernel": 4.2,
}  # fmt: skip


@dataclass(frozen=True)
class Need:
    """What a kernel needs for its roof to be the memory's.

    Args:
        kernel: by file and name.
        roof: what is counted, and where it comes from.
        targets: there its loops may take at most what is issued while the memory moves their bytes.
        in_flight: bytes that the blocks of one multiprocessor have to ask for before they use any
            of them. At 3 TB/s and a latency of 0.8 µs each of an H100's 132 needs 18 KiB at any
            time, and more to have so on average. A target may need a share of it
            (`Target.in_flight_share`).
        without: words of calls' labels; a specialisation that serves no other calls is exempt.
    """

    kernel: str
    roof: str
    targets: tuple[str, ...] = ()
    in_flight: int = 0
    without: tuple[str, ...] = ()

    def of(self, cases: Sequence[str]) -> bool:
        """Whether a specialisation that serves these calls has it."""
        return any(not set(self.without) & set(case.strip("]").split()) for case in cases)


_ALL = ("sm_80", "sm_90", "sm_100", "gfx942")
NEEDS = (
    Need("logprob._token_logprobs_fwd_kernel",
     "8192×151936 bf16 are 2.5 GB, 0.83 ms of an H100: the goal of 0.9 ms leaves 8%",
     targets=("sm_80", "sm_90"), in_flight=48 * KIB),
    Need("logprob._token_logprobs_bwd_kernel",
     "the logits once more and their gradient: 1.7 of the 2.6 ms both ways", targets=_ALL,
     in_flight=20 * KIB),
    Need("sampling._sample_statistics_kernel",
     "256×151936 bf16 are 78 MB, 26 µs of an H100: a plain draw's 30 µs leave 4 for its second "
     "launch. It replaced 16 instructions per byte, of which 44 µs were made",
     targets=("sm_80", "sm_90"), in_flight=48 * KIB),
    Need("linear_sample._linear_sample_tiles_kernel",
     "the head, read once: 0.27 GB of Qwen2.5-0.5B are 91 µs of an H100, beside which the race "
     "of 32 rows hides. Not of odd widths, whose rows are read by an element or four", targets=_ALL,
     in_flight=48 * KIB, without=("H=100", "H=101")),
    Need("lm_head._lm_head_fwd_kernel",
     "a pass of three over 1 GiB of logits at 4096×131072, 1.1 of the 20 ms of a loss: 5.4 "
     "instructions per byte. A softcap's tanh, and extras with what they hold in registers, are "
     "not judged: they are bound by instructions", targets=("sm_80",), in_flight=18 * KIB,
     without=("softcap", "extras", "all")),
    Need("lm_head._lm_head_bwd_kernel", "reads and writes that GiB: two of the three passes",
     targets=("sm_80", "sm_90", "gfx942"), in_flight=18 * KIB, without=("softcap", "all")),
    Need("lm_head._lm_head_scale_kernel", "the gradient, read and written once", _ALL, 48 * KIB),
    Need("divergence._divergence_fwd_kernel",
     "both models' logits once more: 2 of the 7 passes over 1 GiB each at 4096×131072, beside four "
     "products. Soft caps and a mixture's logarithm are bound by instructions",
     targets=("sm_80",), in_flight=48 * KIB, without=("mixed", "all")),
    Need("divergence._divergence_bwd_kernel", "both once more, and the student's gradient: three",
     targets=("sm_80",), in_flight=48 * KIB, without=("mixed", "all")),
    Need("full_kl._full_kl_bwd_kernel", "8192×128256 of two policies read and one gradient written",
     targets=_ALL, in_flight=48 * KIB),
    Need("rms_norm._rms_norm_kernel",
     "rows of a decode step, read, added to the stream and written: 2.2 instructions per byte",
     targets=_ALL, in_flight=48 * KIB),
    Need("swiglu._swiglu_kernel",
     "two rows read and one written: an exponential and a division for six bytes", targets=_ALL,
     in_flight=48 * KIB),
    Need("decode_attention._decode_attention_fwd_kernel",
     "keys and values of every live token, once: 64 slots of 2048 tokens and 8 heads of 128 are "
     "0.27 GB, 90 µs of an H100. Products of fp32 are not a tensor core's",
     targets=("sm_80", "sm_90", "sm_100"), in_flight=32 * KIB, without=("decode_attention[fp32",)),
    Need("decode_attention._decode_attention_merge_kernel",
     "what the splits left, in fp32: up to a ninth of the keys' and values' bytes", targets=_ALL,
     in_flight=32 * KIB),
)  # fmt: skip
