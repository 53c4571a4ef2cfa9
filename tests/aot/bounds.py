"""What a kernel's main loop may take, and has to hold in flight; kernels by file and name.

A loop that takes more instructions per byte than a GPU issues while its memory moves that byte is
bound by them (`Target.issue_limit`): the gate's table marks it with "!". That is no fault of its
own, since scans and draws have more to do than to read; but a kernel with a bound here may not
exceed it, on any target or in any dtype. Bounds are what kernels take, and a fifth more.
"""

KIB = 1024

# Instructions per thread and byte of the main loop.
MOST_PER_BYTE: dict[str, float] = {
    "decode_attention._decode_attention_merge_kernel": 5.0,
    "full_kl._full_kl_bwd_kernel": 5.5,
    "full_kl._full_kl_fwd_kernel": 8.2,
    "gae._gae_bwd_kernel": 8.0,
    "gae._gae_fwd_kernel": 13.5,
    "kl._kl_penalty_bwd_kernel": 6.0,
    "kl._kl_penalty_fwd_kernel": 6.6,
    "kl._kl_rewards_bwd_kernel": 2.5,
    "kl._kl_rewards_fwd_kernel": 5.5,
    "linear_sample._linear_sample_draw_kernel": 13.0,
    "logprob._token_logprobs_bwd_kernel": 6.4,
    # 5.5 where rows are aligned, 6.6 where they are not; 7.8 took a logit at a time.
    "logprob._token_logprobs_fwd_kernel": 7.0,
    "moments._moments_fwd_kernel": 22.0,
    "moments._whiten_bwd_kernel": 4.1,
    "moments._whiten_sums_kernel": 3.3,
    "ppo_loss._ppo_loss_bwd_kernel": 2.5,
    "ppo_loss._ppo_loss_fwd_kernel": 12.7,
}

# Bytes that the blocks of one multiprocessor ask for before they use any of them. At 3 TB/s and a
# latency of 0.8 µs each of an H100's 132 needs 18 KiB at any time, and more to have so on average.
LEAST_IN_FLIGHT: dict[str, int] = {
    "logprob._token_logprobs_fwd_kernel": 48 * KIB,
}
