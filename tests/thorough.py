"""What `make thorough` runs and `make test` leaves out: further settings of tests that take
seconds, and a few tests of whole programs."""

from __future__ import annotations

import os

import pytest

ALONE = os.environ.get("THOROUGH") == "1"
# No test of these files is part of `make test`,
_FILES = (
    "aot/test_cubin.py",
    "benchmarks/test_scripts.py",
    "benchmarks/test_workers.py",
    "benchmarks/test_workloads.py",
    "models/test_quantised.py",
    "processes/test_commands.py",
    "processes/test_corrected.py",
    "processes/test_fitted.py",
    "processes/test_sharded.py",
)
# and of these tests only the settings named.
_KEPT: dict[str, tuple[str, ...]] = {
    "alignment/test_alignment_passes.py::test_a_batch_in_passes_learns_what_it_learns_at_once": (
        *("dpo", "kto", "orpo", "sft"),
    ),
    "alignment/test_losses.py::test_weights_of_2_and_0_duplicate_and_drop": (
        *("dpo", "orpo", "bradley-terry"),
    ),
    "alignment/test_resumed_alignment.py::test_alignment_goes_on_from_any_checkpoint": (
        *("dpo", "online pairs"),
    ),
    "aot/test_gate.py::test_every_candidate_of_an_autotuned_kernel_is_compiled": (),
    "benchmarks/test_front_door.py::test_figures_with_sleeping_threads_are_not_saved": (),
    "benchmarks/test_front_door.py::test_json_has_ratio_bytes_memory_and_goals_of_each_case": (),
    "commands/test_align_job.py::test_rows_shorter_than_the_longest_allowed_are_planned": (
        "dpo-32",
    ),
    "commands/test_errors.py::"
    "test_an_error_in_a_reward_function_shows_its_lines_and_comes_last": (),
    "commands/test_resumed_jobs.py::test_a_checkpoint_that_is_refused_leaves_no_folder": ("sft",),
    "commands/test_resumed_jobs.py::"
    "test_a_run_that_was_cut_before_its_first_step_or_behind_its_last_is_resumed": ("7",),
    "commands/test_resumed_jobs.py::test_a_run_that_was_cut_leaves_the_files_of_a_straight_one": (
        *("online", "ppo"),
    ),
    "commands/test_run_folder.py::test_a_new_adapter_does_not_overwrite_its_base": ("ppo",),
    "commands/test_run_folder.py::test_every_command_leaves_the_same_kind_of_folder": (
        *("sft", "align online", "ppo"),
    ),
    "data/test_one_encoder.py::test_a_row_of_chats": ("bpe with BOS",),
    "data/test_one_encoder.py::test_a_row_of_texts": ("llama",),
    "demo/test_demo.py::test_quick_demo_runs_every_stage_and_reaches_its_goal": (),
    "device/test_host_reads.py::test_a_step_reads_once_per_optimizer_step": (
        *("copy", "adapter", "GRPO"),
    ),
    "device/test_host_reads.py::test_an_iteration_reads_what_its_parts_read": ("copy", "GRPO"),
    "device/test_host_reads.py::test_calls_of_other_kinds_keep_their_captured_steps": (),
    "device/test_host_reads.py::test_mini_batches_are_not_read": ("4",),
    "device/test_iterations.py::test_ppo_trains_with_every_reference": (
        *("copy", "trunk", "GRPO", "bf16"),
    ),
    "faults/test_kills.py::test_a_killed_run_is_resumed_bit_for_bit": ("ppo-0", "grpo-1", "sft-1"),
    "faults/test_kills.py::test_a_run_may_be_killed_more_than_once": (),
    "faults/test_replays.py::test_samples_of_a_resumed_run_are_replayed": ("grpo",),
    "kernels/test_compile.py::test_one_graph_for_all_sizes_with_the_bits_of_eager_mode": (
        *("gae-torch", "linear_ppo_loss with everything-torch", "linear_logprobs-triton"),
    ),
    "kernels/test_compile.py::test_triton_kernels_are_traced_without_a_graph_break": (),
    "kernels/test_draws_agree.py::test_both_backends_draw_the_same_tokens_of_a_few_rows": (
        *("plain", "min-p"),
    ),
    "kernels/test_launch.py::test_torch_compile_traces_through_launches": (),
    "kernels/test_linear_sample.py::"
    "test_tokens_are_those_drawn_from_the_logits_that_the_head_would_round": (
        *("1.0-float16", "0.0-bfloat16", "per row-bfloat16"),
    ),
    "kernels/test_operators.py::test_copies_of_the_package_live_side_by_side": (),
    "kernels/test_sampling.py::test_more_candidates_than_there_is_room_for": ("3-top-k, top-p",),
    "kernels/test_sampling_draws.py::"
    "test_draws_of_several_parts_are_as_often_as_they_are_probable": (
        *("plain", "top_p", "temperature, top_k, top_p, min_p"),
    ),
    "kernels/test_workspace.py::test_ten_live_graphs_keep_two_workspaces_of_logits": (
        *("whole-triton", "chunks-torch"),
    ),
    "plan/test_accuracy.py::test_planning_takes_no_memory_of_the_models_size": (),
    "plan/test_accuracy.py::test_plans_are_close_to_the_profilers_sums": (),
    "plan/test_plan_command.py::test_batches_of_several_passes_are_planned_as_such": ("sft",),
    "plan/test_plan_command.py::test_each_method_is_planned_with_the_flags_of_its_command": (
        *("grpo", "dpo"),
    ),
    "plan/test_plan_command.py::test_each_task_of_preference_learning_is_planned": (
        *("dpo-online-pairwise", "kto-offline-pointwise"),
    ),
    "plan/test_plan_command.py::test_the_command_says_that_a_run_does_not_fit": (),
    "plan/test_plan_command.py::test_what_fits_fills_slots_passes_and_keys": (),
    "ppo/test_bandit.py::test_a_bandit_converges_to_the_tilted_reference": ("dtype0",),
    "ppo/test_critic.py::test_a_run_goes_on_in_the_phase_in_which_it_stopped": ("1",),
    "ppo/test_critic.py::test_a_run_with_a_critic_is_resumed_bit_for_bit": ("3",),
    "ppo/test_ledger_rows.py::test_a_resumed_run_has_the_ledger_of_the_straight_one": ("grpo",),
    "ppo/test_ledger_rows.py::test_a_run_with_a_ledger_is_the_run_without": ("engine",),
    "ppo/test_loss_denominator.py::test_by_the_step_one_times_eight_is_eight_times_one": (
        *("gae-seq-mean-token-mean-weights", "dr_grpo-token-mean-"),
        *("gae-seq-mean-token-sum-norm-", "dr_grpo-seq-mean-token-sum-norm-weights"),
        *("gae-token-mean-weights", "dr_grpo-seq-mean-token-sum-"),
    ),
    "ppo/test_reference_modes.py::test_a_reference_in_bf16_costs_half_and_scores_nearly_the_same": (
        *("copy-gpt2-full", "offload-llama-kl"),
    ),
    "ppo/test_reference_modes.py::test_the_update_is_the_same_whatever_is_kept": (
        *("none-gpt2", "none-gemma2", "host-gpt2", "host-llama", "some-gpt2", "some-opt"),
    ),
    "ppo/test_replay.py::test_all_samples_of_a_run_are_drawn_again": ("ppo",),
    "ppo/test_resume.py::test_a_resumed_run_is_the_run_that_was_not_interrupted": (
        *("ppo", "an adapter"),
    ),
    "ppo/test_resume.py::test_a_signal_stops_the_run_at_the_steps_end": ("15",),
    "ppo/test_resume.py::test_the_last_evaluation_is_made_up": ("2",),
    "ppo/test_seq2seq_ppo.py::test_rewards_rise": (),
    "processes/test_inside_trl.py::test_a_model_that_would_be_trained_without_ddp_is_refused": (),
    "processes/test_inside_trl.py::test_an_error_in_one_process_ends_all_soon": (),
    "processes/test_inside_trl.py::test_log_probs_are_those_that_trl_computes_in_each_process": (),
    "processes/test_inside_trl.py::"
    "test_no_draw_comes_twice_though_all_processes_are_seeded_alike": (),
    "processes/test_inside_trl.py::test_responses_of_each_process_are_its_own": (),
    "processes/test_killed.py::"
    "test_a_run_of_which_one_process_is_killed_is_resumed_bit_for_bit": (),
    "processes/test_killed.py::test_accelerate_launch_ends_soon_and_starts_it_again": (),
    "ptx/test_ptx_compiled.py::test_small_kernels_compute_what_torch_does_and_faults_are_found": (),
    "rollout/test_fused_layers.py::test_a_layers_launches": ("llama-False-13",),
    "rollout/test_scheduler.py::test_the_host_reads_at_most_once_in_eight_steps": ("True",),
    "test_documents.py::test_the_quick_starts_commands_run_as_printed_on_its_own_lines": (),
    "test_more_examples.py::test_a_dpo_script": (),
    "test_more_examples.py::test_sums_of_digits": (),
    "trainers/test_low_memory.py::test_small_steps_move_as_many_weights_in_bf16_as_in_float32": (
        "sft",
    ),
    "trainers/test_resumed_trainers.py::test_reward_modelling_goes_on_from_any_checkpoint": (
        "True",
    ),
    "trainers/test_resumed_trainers.py::test_sft_goes_on_from_any_checkpoint": (
        "a short last step",
    ),
    "trainers/test_reward.py::test_loss_and_gradients_are_those_of_the_formula": (
        *("False-None-roberta", "False-0.05-gpt2", "True-None-llama", "True-0.05-roberta"),
    ),
    "trainers/test_reward_padding.py::test_rewards_of_padded_texts_are_those_of_each_alone": (
        *("bart", "bert", "bloom", "ctrl", "fnet", "gpt2", "gpt_neo", "llama", "openai-gpt"),
        *("roberta", "t5", "xlnet"),
    ),
    "trl/test_online.py::test_a_run_goes_on_from_any_checkpoint": ("grpo",),
    "trl/test_rollout_func.py::test_rewards_rise_as_with_trls_own_generation": (),
    "trl_parity/test_trl_1_16.py::test_a_trainer_computes_the_same_patched_and_not": (
        *("dpo", "grpo"),
    ),
}

# And of these all but the settings named.
_LEFT_OUT: dict[str, tuple[str, ...]] = {
    "faults/test_failures.py::test_a_reward_that_fails_costs_nothing": (
        *("hangs-6", "miscounts-6", "raises-5", "raises-6"),
    ),
    "processes/test_failing.py::test_one_process_ends_all_soon_with_the_state_saved": (
        "2-exits-PeerFailed: process 1 of {count} failed: ExitCalled: it called sys.exit(None)",
        "2-hangs-PeerFailed: another process has ended, or did not answer within",
        "2-is stopped-stopped after step 2; saved: ",
        "2-raises in a callback-LookupError: the disk of the notes is full",
    ),
    "rollout/test_decode_step.py::test_draws_are_distributed_as_the_model_says": (
        *("{'temperature': 0.6}", "{'top_k': 7}", "{'top_p': 0.8}", "{'min_p': 0.05}"),
    ),
}


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves of the collected tests those that the run is for; all where some are asked for.

    Raises:
        pytest.UsageError: there is no test, or setting of it, of a name in this file.
    """
    if not ALONE and config.args != config.getini("testpaths"):
        return
    if config.args == config.getini("testpaths"):
        _check({_parts(item.nodeid) for item in items})
    others = [item for item in items if _is_thorough(*_parts(item.nodeid)) != ALONE]
    if others:
        config.hook.pytest_deselected(items=others)
        gone = set(others)
        items[:] = [item for item in items if item not in gone]


def _parts(name: str) -> tuple[str, str]:
    """A test and its setting, "" where it has none."""
    test, _, setting = name.removeprefix("tests/").partition("[")
    return test, setting.removesuffix("]")


def _is_thorough(test: str, setting: str) -> bool:
    kept = setting in _KEPT.get(test, (setting,)) and test.partition("::")[0] not in _FILES
    return not kept or setting in _LEFT_OUT.get(test, ())


def _check(found: set[tuple[str, str]]) -> None:
    tests = {test for test, _ in found}
    files = {test.partition("::")[0] for test in tests}
    named = [*_KEPT.items(), *_LEFT_OUT.items()]
    settings = {(test, setting) for test, some in named for setting in some}
    unknown = [*({test for test, _ in named} - tests), *(f"{t}[{x}]" for t, x in settings - found)]
    unknown += {*_FILES} - files
    if unknown:
        raise pytest.UsageError(f"tests/thorough.py names what is not there: {sorted(unknown)}")
