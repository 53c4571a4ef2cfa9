"""Which tests of tests/kernels run on compiled kernels, and which of them stand for the others."""

from typing import Any

PACKAGE = "fastrl_kernels._triton"
KERNEL_TESTS = "tests/kernels"

# Files whose tests launch no kernel of Triton's, or are about something else than its numbers.
_LEFT_OUT = {
    **dict.fromkeys(
        ("test_argument_types.py", "test_hub.py", "test_import.py", "test_native.py"), "no launch"
    ),
    **dict.fromkeys(("test_draw_counts.py", "test_head_counts.py"), "count launches"),
    **dict.fromkeys(("test_gemm.py", "test_head_pieces.py"), "products on CPUs"),
    **dict.fromkeys(("test_beyond_32_bits.py", "test_head_on_gpu.py"), "sizes of a GPU"),
    **dict.fromkeys(("test_compile.py", "test_first_order.py"), "torch.compile's own kernels"),
    "test_dtensor.py": "processes of its own, which launch",
    "test_launch.py": "the Python of a launch, which is not Triton's own here",
    "test_operators.py": "what torch.library knows of operators",
    "test_policy_loss_table.py": "a document",
    "test_workspace.py": "memory of torch's",
}

# Every kernel, with the dtypes that differ most (fp32 and bf16), both ways; where a kernel has
# phases, carries or merges that only some sizes have, the test that is about them. By file: names,
# or one setting of a test that has more.
_STANDING_FOR_ALL = {
    "test_advance_slots.py": (
        "test_slots_are_those_of_a_loop_over_rows[triton-torch.bfloat16-[5, 9]]",
    ),
    "test_decode_attention.py": ("test_rows_match_the_formula[triton-plain-bfloat16]",
     "test_heads_that_share_keys[triton-4-bfloat16]",
     "test_one_launch_and_two_give_the_same[{}-bfloat16]", "test_splits_are_merged_in_their_order"),
    "test_decode_layers.py": ("test_rms_norm_is_that_of_models[triton-llama-7-bfloat16-float32]",
     "test_swiglu_is_that_of_models[triton-bfloat16]",
     "test_keys_are_rotated_and_stored_as_models_do[triton-plain-8-bfloat16-float32]"),
    "test_full_kl.py": ("test_ragged_rows_match_the_formula[triton-float32]",
     "test_ragged_rows_match_the_formula[triton-bfloat16]"),
    "test_gae.py": ("test_the_carry_crosses_tiles[triton-whitened-cut]",
     "test_results_and_all_gradients_are_as_exact_as_the_loop[triton-bfloat16-whitened]"),
    "test_kl.py": ("test_penalty_and_both_gradients_are_as_exact_as_pytorch[triton-bfloat16-k3]",
     "test_rewards_and_all_gradients_are_as_exact_as_pytorch[triton-bfloat16-k3]",
     "test_rewards_of_any_shape"),
    "test_linear_kl.py": ("test_values_and_gradients[triton-forward-float32]",
     "test_values_and_gradients[triton-reverse-bfloat16]",
     "test_values_and_gradients[triton-mixed-bfloat16]"),
    "test_linear_logprobs.py": ("test_values_and_gradients[triton-plain-bfloat16]",
     "test_many_chunks[triton-float32]"),
    "test_linear_ppo_loss.py": ("test_loss_and_gradients[triton-many chunks-bfloat16]",),
    "test_linear_sample.py": ("test_log_probs_and_entropies_are_as_exact_as_pytorchs",),
    "test_lm_head.py": ("test_extras_match_the_formula[triton-5-507-5000]",
     "test_every_element_is_scaled_once[bfloat16-4095]"),
    "test_logprob.py": ("test_ragged_rows_match_the_formula[triton-True-float32]",
     "test_ragged_rows_match_the_formula[triton-True-bfloat16]"),
    "test_moments.py": (
        "test_values_and_gradients_are_as_exact_as_pytorch[triton-bfloat16-whitening]",
        "test_more_slices_than_programs[triton]",
        "test_ranks_merge_their_moments_into_those_of_the_whole_batch[triton]",
    ),
    "test_ppo_loss.py": ("test_loss_gradients_and_statistics[triton-bfloat16-token-mean]",
     "test_programs_that_walk_several_tiles[seq-mean-token-mean]"),
    "test_rng.py": ("test_keys_are_those_of_the_definition[triton-18446744073709551615]",),
    "test_sampling.py": ("test_keeps_what_transformers_keeps_of_a_long_row[triton-bfloat16-top-k]",
     "test_keeps_what_transformers_keeps_of_a_long_row[triton-float32-all]",
     "test_figures_match_the_formula[triton-hot-float32]"),
    "test_token_sets.py": ("test_log_probs_and_entropies_over_sets[triton-mixed]",),
}  # fmt: skip
SELECTION = tuple(
    f"{KERNEL_TESTS}/{file}::{test}" for file, tests in _STANDING_FOR_ALL.items() for test in tests
)


def left_out(item: Any) -> bool:
    """Whether a collected test is not one for compiled kernels."""
    if item.path.name in _LEFT_OUT and item.path.parent.name == "kernels":
        return True
    if any("interpreter" in mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")):
        return True
    settings = getattr(item, "callspec", None)
    return settings is not None and settings.params.get("backend") == "torch"
