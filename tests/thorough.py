"""What `make test` runs of the tests; `make thorough` runs all that it leaves out.

Of a test with many settings `make test` has `_FEW`, drawn by their names so that they show as many
values of its parameters as they can: another test of the same table draws others. A test of each
loss, op, family of models, surface or door shows every value of each parameter (`_EACH_VALUE`),
oracles and planted faults have all settings (`_WHOLE`), and what takes seconds has those that are
named, or as few as are told (`_KEPT`).

With PART=WORD one of `PARTS` of the tests is run, drawn by the word: continuous integration gives
`make thorough` the commit's name.
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.part import drawn

ALONE = os.environ.get("THOROUGH") == "1"
_HERE = Path(__file__).parent
PARTS = 10
_FEW, _FEW_ELSEWHERE = 4, 1  # in the kernels' room, and where tests train and generate
# Files and tests of which each setting is an oracle, a planted fault or a goal.
_WHOLE = (
    "kernels/test_every_op.py",
    "kernels/test_judge.py::test_one_rounding_too_many_is_found",
    "ppo/test_bandit.py",
    "ppo/test_golden.py",
    "surfaces/test_one_method.py",
    "test_house.py::test_what_counts_as_a_fragment",
    "test_house.py::test_what_is_planted_is_counted_and_nothing_else",
    "test_notebooks.py",
)
_EACH_VALUE = {
    "alignment/test_losses.py::test_a_loss_and_its_gradients_are_those_of_its_formula",
    "commands/test_errors.py::test_a_row_that_cannot_be_used_is_named_as_in_its_file",
    "commands/test_recipes.py::test_a_recipe_is_settings_of_its_command",
    "commands/test_recipes.py::test_what_no_recipe_is_is_refused",
    "data/test_cache_key.py::test_an_edit_of_the_users_files_is_another_key",
    "data/test_keys_of_other_rows.py::test_a_null_that_is_meant_is_kept_at_each_door",
    "data/test_keys_of_other_rows.py::test_each_door_writes_the_keys_of_a_row",
    "data/test_one_reading.py::test_every_door_reads_a_row_alike",
    "data/test_one_reading.py::test_marks_are_of_what_the_assistant_said",
    "kernels/test_judge.py::test_an_op_that_rounds_as_its_formula_passes",
    "kernels/test_kl.py::test_penalty_and_both_gradients_are_as_exact_as_pytorch",
    "kernels/test_kl.py::test_rewards_and_all_gradients_are_as_exact_as_pytorch",
    "kernels/test_policy_losses.py::test_loss_gradients_and_statistics",
    "kernels/test_ppo_loss.py::test_loss_gradients_and_statistics",
    "kernels/test_preference.py::test_losses_and_all_gradients_are_as_exact_as_pytorch",
    "kernels/test_sampling.py::test_keeps_what_transformers_keeps",
    "models/test_adapter_base.py::test_no_trainer_puts_a_second_adapter_on_a_first",
    "models/test_half_products.py::test_nothing_beside_the_operands_is_read",
    "models/test_layer_kinds.py::test_a_neighbours_tokens_change_not_one_bit",
    "models/test_layer_kinds.py::test_a_packed_row_is_its_sequences_alone",
    "models/test_layer_kinds.py::test_the_engine_samples_as_a_plain_forward_says",
    "models/test_scoring.py::test_scores_of_rows_are_those_of_the_classic_forward",
    "ppo/test_losses_of_a_step.py::test_a_step_follows_the_formulas_gradient",
    "ppo/test_policy_gradients.py::test_a_step_follows_the_formulas_gradient",
    "programs/test_migrate.py::test_what_is_written_parses_and_what_is_left_is_named",
    "reports/test_doctor.py::test_every_illness_is_found_and_no_other",
    "rollout/test_choose_engine.py::test_families_with_the_interface_run_in_the_engine",
    "rollout/test_engine.py::test_figures_of_samples_are_those_of_a_plain_forward",
    "surfaces/test_mistral_common.py::test_trainers_learn_and_save_it",
    "surfaces/test_online_capabilities.py::test_both_surfaces_learn_the_same",
    "trainers/test_steps_of_uneven_batches.py::test_the_last_batch_of_an_epoch_weighs_as_many_as_it_has",
    "trl/test_bad_rows.py::test_a_path_is_no_data_set",
    "trl/test_evaluation_batches.py::test_metrics_of_preferences_are_those_of_one_batch",
    "trl/test_evaluation_batches.py::test_metrics_of_responses_are_those_of_all",
    "trl/test_online.py::test_a_response_that_ends_at_a_stop_is_whole",
    "trl/test_policy_loss.py::test_losses_are_trls",
    "trl/test_policy_loss.py::test_losses_follow_their_formulas",
    "trl_parity/test_grpo_losses.py::test_a_loss_is_trls",
}
# No test of these files is part of `make test`,
_FILES = (
    "aot/test_cubin.py", "aot/test_gate.py", "benchmarks/test_gates.py", "benchmarks/test_smoke.py",
    "models/test_quantised.py", "processes/test_commands.py", "processes/test_corrected.py",
    "processes/test_fitted.py", "processes/test_sharded.py",
)  # fmt: skip
# and of these tests only the settings named, or so many.
_KEPT: dict[str, tuple[str, ...] | int] = {
    "alignment/test_resumed_alignment.py::test_alignment_goes_on_from_any_checkpoint": (
        "online pairs",
    ),
    "benchmarks/test_gpu.py::test_a_bare_checkout_is_enough": (),
    "benchmarks/test_predictions.py::test_the_committed_file_is_what_the_command_writes": (),
    "commands/test_align_job.py::test_rows_shorter_than_the_longest_allowed_are_planned": (),
    "commands/test_errors.py::test_what_a_command_cannot_do_is_refused": 9,
    "commands/test_errors.py::"
    "test_an_error_in_a_reward_function_shows_its_lines_and_comes_last": (),
    "commands/test_four_bits.py::test_a_run_is_resumed": (),
    "commands/test_recipes.py::test_a_plan_is_what_the_plan_of_today_is": (),
    "commands/test_replay_command.py::"
    "test_a_run_resumed_with_other_settings_is_replayed_with_those_of_each_step": (),
    "commands/test_resumed_jobs.py::test_a_checkpoint_that_is_refused_leaves_no_folder": ("sft",),
    "commands/test_resumed_jobs.py::"
    "test_a_run_that_was_cut_before_its_first_step_or_behind_its_last_is_resumed": ("7",),
    "commands/test_resumed_jobs.py::test_a_run_that_was_cut_leaves_the_files_of_a_straight_one": (
        "online",
    ),
    "commands/test_run_folder.py::test_a_new_adapter_does_not_overwrite_its_base": ("ppo",),
    "commands/test_run_folder.py::test_every_command_leaves_the_same_kind_of_folder": (
        *("sft", "ppo"),
    ),
    "data/test_one_encoder.py::test_a_row_of_chats": ("bpe with BOS",),
    "data/test_one_encoder.py::test_a_row_of_texts": ("llama",),
    "demo/test_demo.py::test_quick_demo_runs_every_stage_and_reaches_its_goal": (),
    "device/test_host_reads.py::test_a_step_reads_once_per_optimizer_step": ("copy", "GRPO"),
    "device/test_host_reads.py::test_an_iteration_reads_what_its_parts_read": ("GRPO",),
    "device/test_host_reads.py::test_calls_of_other_kinds_keep_their_captured_steps": (),
    "device/test_host_reads.py::test_mini_batches_are_not_read": ("4",),
    "device/test_host_reads.py::test_slots_are_refilled_without_waiting": (),
    "device/test_iterations.py::test_ppo_trains_with_every_reference": ("GRPO",),
    "faults/test_kills.py::test_a_killed_run_is_resumed_bit_for_bit": ("grpo-1", "sft-1"),
    "faults/test_kills.py::test_other_slots_change_no_sample_and_hardly_a_weight": (),
    "faults/test_failures.py::test_a_full_disk_leaves_the_last_good_checkpoint": (),
    "faults/test_failures.py::test_a_pickle_is_never_opened": (),
    "faults/test_failures.py::test_a_reward_that_fails_costs_nothing": (),
    "faults/test_kills.py::test_a_run_may_be_killed_more_than_once": (),
    "faults/test_replays.py::test_samples_of_a_resumed_run_are_replayed": (),
    "kernels/test_compile.py::test_a_step_that_joins_ops_is_one_graph": 1,
    "kernels/test_compile.py::test_one_graph_for_all_sizes_with_the_bits_of_eager_mode": (
        "linear_logprobs-triton",
    ),
    "kernels/test_compile.py::test_triton_kernels_are_traced_without_a_graph_break": (),
    "kernels/test_decode_attention.py::test_a_row_has_the_same_bits_alone_and_among_64": 1,
    "kernels/test_decode_attention.py::test_counters_are_zero_after_every_call": (),
    "kernels/test_decode_attention.py::test_one_launch_and_two_give_the_same": 2,
    "kernels/test_decode_attention.py::test_the_order_of_arrival_does_not_matter": 1,
    "kernels/test_draws_agree.py::test_both_backends_draw_the_same_tokens_of_a_few_rows": (
        *("plain", "min-p"),
    ),
    "kernels/test_first_order.py::test_compiled_code_has_no_second_derivatives": 2,
    "kernels/test_head_on_gpu.py::test_log_probs_and_gradients": 1,
    "kernels/test_launch.py::test_bad_arguments_are_refused_after_good_ones": (),
    "kernels/test_launch.py::test_hooks_on_launches_see_them": (),
    "kernels/test_launch.py::test_torch_compile_traces_through_launches": (),
    "kernels/test_linear_properties.py::test_linear_logprobs_of_labels_to_come": 1,
    "kernels/test_linear_sample.py::test_a_group_may_have_several_tiles": (),
    "kernels/test_linear_sample.py::"
    "test_tokens_are_those_drawn_from_the_logits_that_the_head_would_round": ("per row-bfloat16",),
    "kernels/test_operators.py::test_copies_of_the_package_live_side_by_side": (),
    "kernels/test_sampling.py::test_more_candidates_than_there_is_room_for": (),
    "kernels/test_sampling_draws.py::"
    "test_draws_of_several_parts_are_as_often_as_they_are_probable": (
        "temperature, top_k, top_p, min_p",
    ),
    "kernels/test_sampling_draws.py::test_rare_tokens_and_all_places_of_a_long_row_are_drawn": (),
    "kernels/test_sampling_draws.py::test_tokens_are_drawn_as_often_as_they_are_probable": 1,
    "kernels/test_workspace.py::test_a_step_takes_no_new_pages_from_the_system": (),
    "kernels/test_workspace.py::test_ten_live_graphs_keep_two_workspaces_of_logits": (
        "whole-triton",
    ),
    "plan/test_accuracy.py::test_planning_takes_no_memory_of_the_models_size": (),
    "plan/test_accuracy.py::test_plans_are_close_to_the_profilers_sums": (),
    "plan/test_accuracy.py::test_plans_of_every_kind_of_teacher_are_close": (),
    "plan/test_plan_command.py::test_a_critic_of_its_own_is_counted": (),
    "plan/test_plan_command.py::test_a_four_bit_base_is_counted_as_it_is_stored": (),
    "plan/test_plan_command.py::test_a_reference_in_host_memory_takes_none_of_a_gpus": (),
    "plan/test_plan_command.py::test_a_size_that_the_run_refuses_is_not_suggested": (),
    "plan/test_plan_command.py::test_batches_of_several_passes_are_planned_as_such": (),
    "plan/test_plan_command.py::test_the_command_says_that_a_run_does_not_fit": (),
    "plan/test_plan_command.py::test_what_fits_fills_slots_passes_and_keys": (),
    "plan/test_plan_command.py::test_what_fits_names_flags_of_the_methods_command_alone": (),
    "plan/test_plan_command.py::test_what_is_kept_in_host_memory_is_not_counted": (),
    "ppo/test_bandit.py::test_a_bandit_converges_to_the_tilted_reference": ("dtype0",),
    "ppo/test_critic.py::test_a_run_goes_on_in_the_phase_in_which_it_stopped": ("1",),
    "ppo/test_critic.py::test_a_run_with_a_critic_is_resumed_bit_for_bit": ("3",),
    "ppo/test_ledger_rows.py::test_a_folder_of_another_run_is_refused": (),
    "ppo/test_ledger_rows.py::test_a_resumed_run_has_the_ledger_of_the_straight_one": ("grpo",),
    "ppo/test_ledger_rows.py::test_a_run_with_a_ledger_is_the_run_without": ("engine",),
    "ppo/test_loss_denominator.py::test_by_the_step_one_times_eight_is_eight_times_one": 3,
    "ppo/test_reference_modes.py::test_the_update_is_the_same_whatever_is_kept": 3,
    "ppo/test_replay.py::test_a_damaged_checkpoint_is_passed_over": (),
    "ppo/test_replay.py::test_a_replay_of_older_draws_says_so": (),
    "ppo/test_replay.py::test_all_samples_of_a_run_are_drawn_again": ("ppo",),
    "ppo/test_replay.py::test_another_machine_is_named_before": (),
    "ppo/test_replay.py::test_generation_kwargs_that_json_cannot_hold_are_asked_for": (),
    "ppo/test_replay.py::test_impossible_replays_are_refused": (),
    "ppo/test_replay.py::test_nothing_is_pushed_and_no_reward_asked": (),
    "ppo/test_resume.py::test_a_resumed_run_is_the_run_that_was_not_interrupted": (
        *("ppo", "an adapter"),
    ),
    "ppo/test_resume.py::test_a_signal_stops_the_run_at_the_steps_end": ("15",),
    "ppo/test_resume.py::test_another_reward_by_the_same_name_is_named": (),
    "ppo/test_resume.py::test_another_runs_checkpoint_leaves_nothing_of_the_run_in_the_folder": (),
    "ppo/test_resume.py::test_evaluations_by_another_reward_are_not_compared": (),
    "ppo/test_resume.py::test_resuming_before_there_is_a_checkpoint_begins": (),
    "ppo/test_resume.py::test_the_last_evaluation_is_made_up": ("2",),
    "ppo/test_resume.py::test_the_time_of_a_run_is_that_of_all_its_processes": (),
    "ppo/test_seq2seq_ppo.py::test_rewards_rise": (),
    "processes/test_failing.py::test_a_run_of_one_process_goes_on_as_several": (),
    "processes/test_failing.py::test_a_timeout_in_transformers_arguments_holds_on_cpus": (),
    "processes/test_failing.py::test_processes_share_the_search_for_a_checkpoint_that_is_whole": (),
    "processes/test_inside_trl.py::test_a_model_that_would_be_trained_without_ddp_is_refused": (),
    "processes/test_inside_trl.py::test_an_error_in_one_process_ends_all_soon": (),
    "processes/test_inside_trl.py::test_log_probs_are_those_that_trl_computes_in_each_process": (),
    "processes/test_inside_trl.py::"
    "test_no_draw_comes_twice_though_all_processes_are_seeded_alike": (),
    "processes/test_inside_trl.py::test_responses_of_each_process_are_its_own": (),
    "processes/test_killed.py::"
    "test_a_run_of_which_one_process_is_killed_is_resumed_bit_for_bit": (),
    "processes/test_killed.py::test_accelerate_launch_ends_soon_and_starts_it_again": (),
    "processes/test_vocabulary.py::test_a_group_of_some_processes": (),
    "processes/test_vocabulary.py::test_each_process_has_what_one_would_compute": ("2",),
    "processes/test_vocabulary.py::test_runs_of_several_processes_give_the_same_bits": ("2",),
    "processes/test_vocabulary.py::test_the_rows_of_a_dtensor": ("2",),
    "ptx/test_ptx_compiled.py::test_small_kernels_compute_what_torch_does_and_faults_are_found": (),
    "rollout/test_fused_layers.py::test_a_layers_launches": (),
    "rollout/test_fused_layers.py::test_an_adapter_that_comes_later_is_run": (),
    "rollout/test_fused_layers.py::test_layers_in_whose_place_are_others_are_not_run": (),
    "rollout/test_scheduler.py::test_the_host_reads_at_most_once_in_eight_steps": (),
    "serving/test_drawn_adapters.py::test_what_is_saved_is_what_was_trained": 6,
    "mutants/test_mutants.py::test_mutants_are_killed_by_tests_that_see_them_and_by_no_others": (),
    "test_documents.py::test_the_quick_starts_commands_run_as_printed_on_its_own_lines": (),
    "test_house.py::test_no_journey_is_longer_than_its_budget": (),
    "test_more_examples.py::test_a_dpo_script": (),
    "test_more_examples.py::test_a_grpo_script": (),
    "test_more_examples.py::test_sums_of_digits": (),
    "trainers/test_low_memory.py::test_small_steps_move_as_many_weights_in_bf16_as_in_float32": (),
    "processes/test_failing.py::test_one_process_ends_all_soon_with_the_state_saved": (),
    "reports/test_html_report.py::test_a_report_beside_its_runs_is_no_run": (),
    "rollout/test_fused_layers.py::test_weights_side_by_side_are_the_models_own": (),
    "test_more_examples.py::test_an_own_environment_is_asked_more_often": (),
    "trainers/test_passes.py::test_a_batch_in_passes_learns_what_it_learns_at_once": 4,
    "trainers/test_resumed_trainers.py::test_a_run_goes_on_from_any_checkpoint": (
        *("a short last step", "an adapter of a reward model", "dpo", "kto", "grpo"),
    ),
    "trainers/test_resumed_trainers.py::"
    "test_each_of_several_evaluation_sets_has_metrics_of_its_own": 3,
    "trainers/test_reward_padding.py::test_rewards_of_padded_texts_are_those_of_each_alone": (
        *("bart", "bert", "bloom", "ctrl", "fnet", "gpt2", "gpt_neo", "llama"),
        *("openai-gpt", "roberta", "t5", "xlnet"),
    ),
    "trainers/test_sft.py::test_loss_and_gradients_are_those_of_the_formula": 3,
    "commands/test_sick_runs.py::test_report_and_doctor_of_runs": (),
    "counts/test_counts.py::test_a_goal_is_kept": (
        *("plain draw, bf16", "token_logprobs with entropy, both ways", "gae with whitening"),
        *("linear_logprobs, beside its products", "linear_logprobs, above in- and outputs"),
        *("linear_ppo_loss, beside its products", "ppo_loss, in Python"),
    ),
    "kernels/test_decode_attention.py::test_dead_tokens_are_not_read": 1,
    "kernels/test_launch.py::test_a_direct_launch_is_the_one_that_triton_would_make": (),
    "kernels/test_linear_logprobs.py::test_logits_never_exist": 1,
    "kernels/test_linear_logprobs.py::test_many_chunks": 1,
    "kernels/test_sampling_draws.py::"
    "test_a_token_of_small_probability_is_drawn_as_often_as_it_should": (),
    "plan/test_accuracy.py::test_the_passes_that_are_rehearsed_have_the_peaks_of_all": (),
    "plan/test_pass_sizes.py::test_a_trainer_learns_the_same_in_passes_that_fit": (),
    "ppo/test_recorded_products.py::test_a_run_goes_on_with_the_libraries_that_it_began_with": (),
    "ppo/test_replay.py::test_an_update_that_is_not_the_runs_is_named": (),
    "ppo/test_replay.py::test_samples_of_a_run_that_was_killed_and_resumed_are_drawn_again": (),
    "processes/test_failing.py::"
    "test_where_one_process_cannot_write_none_waits_and_no_half_checkpoint_is_left": (),
    "rewards/test_math_reward.py::test_an_answer_that_takes_too_long_is_wrong_in_every_thread": (),
    "rollout/test_fused_layers.py::test_layers_are_fused_without_a_norm_that_is_another": (),
    "rollout/test_fused_layers.py::test_layers_that_hooks_look_into_stay_as_they_are": (),
    "rollout/test_fused_layers.py::test_positions_are_those_of_now": (),
    "rollout/test_fused_layers.py::test_weights_whose_memory_others_keep_are_not_moved": (),
    "test_moved.py::test_a_program_that_knows_the_old_names_alone_runs": (),
    "test_more_examples.py::test_an_own_advantage_learns_otherwise_than_grpos": (),
    "test_packaging.py::test_nothing_needs_a_later_patch_release_of_python": (),
    "trl/test_ppo_v2.py::test_the_value_model_follows_the_schedule": (),
    "trl/test_rollout_func.py::test_rewards_rise_as_with_trls_own_generation": (),
    "trl/test_tools.py::"
    "test_an_environment_that_acts_on_its_rows_columns_changes_them_for_nobody": (),
}


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves of the collected tests those that the run is for; all where some are asked for.

    Raises:
        pytest.UsageError: there is no test, or setting of it, of a name in this file.
    """
    everything = config.args == config.getini("testpaths")
    if not (ALONE or everything):
        return
    if everything:
        _check({_parts(item.nodeid) for item in items})
    quick, part = set(quick_ones(items)), drawn(range(PARTS), "tests")
    kept = {x for x in items if ((x in quick) != ALONE) and _draw(x) % PARTS in part}
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def quick_ones(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Those of `make test`."""
    by_test = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        by_test[_parts(item.nodeid)[0]].append(item)
    for test, settings in by_test.items():
        kept = _KEPT.get(test, _FEW if test.startswith("kernels/") else _FEW_ELSEWHERE)
        if test.startswith(_FILES):
            continue
        if not isinstance(kept, int):
            yield from (item for item in settings if _parts(item.nodeid)[1] in kept)
        elif len(settings) <= kept or test.startswith(_WHOLE):
            yield from settings
        else:
            yield from _spread(settings, len(settings) if test in _EACH_VALUE else kept)


def _spread(settings: list[pytest.Item], most: int) -> Iterator[pytest.Item]:
    """Each has more values of parameters that those before it lack than any that is left."""
    seen = set[tuple[str, int]]()
    left = sorted(settings, key=_draw)
    for _ in range(most):
        best = max(left, key=lambda item: len(_values(item) - seen))
        if _values(best) <= seen:
            return
        seen |= _values(best)
        yield best


def _values(item: pytest.Item) -> set[tuple[str, int]]:
    """The values of its parameters, each by what object it is: pytest's ``indices`` number the
    settings, not the values."""
    return {(name, id(x)) for name, x in item.callspec.params.items()}  # type: ignore[attr-defined]


def _draw(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def _parts(name: str) -> tuple[str, str]:
    """A test and its setting, "" where it has none."""
    test, _, setting = name.removeprefix("tests/").partition("[")
    return test, setting.removesuffix("]")


def _check(found: set[tuple[str, str]]) -> None:
    tests = {test for test, _ in found}
    named = {*_KEPT, *_EACH_VALUE, *_WHOLE, *_FILES}
    unknown = [x for x in named if not any(test.startswith(x) for test in tests)]
    for test, kept in _KEPT.items():
        settings = () if isinstance(kept, int) else kept
        unknown += [f"{test}[{x}]" for x in settings if (test, x) not in found]
    # Files that are there and have no test want a package that is not there.
    with_tests = {test.partition("::")[0] for test in tests}
    files = {str(path.relative_to(_HERE)) for path in _HERE.rglob("test_*.py")} - with_tests
    unknown = [x for x in unknown if x.partition("::")[0] not in files]
    if unknown:
        raise pytest.UsageError(f"tests/thorough.py names what is not there: {sorted(unknown)}")
