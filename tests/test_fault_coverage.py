"""Every known fault, threat and field report has tests, and each test named here exists.

F01 to F42 are faults of providers, streams, processes, sums and learning; T1 to T16 threats; B01 to
B10 reports from the field. The table says where each is checked; a renamed or deleted test, and a
case without one, fail here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tfgrpo.runtime.syntax import syntax_tree

TESTS = Path(__file__).parent

CASES: dict[str, tuple[str, str]] = {
    "F01": (
        "429 with a hint in seconds: waited for, one cut an episode, no reward",
        """store/test_faults_provider::test_f01_f12_a_misbehaving_server_loses_and_scores_nothing
        store/test_faults_provider::test_f01_a_rate_limit_waits_as_told_and_each_try_is_in_the_journal
        lm/test_retry::test_a_hint_is_waited_for_with_jitter_upwards_only
        lm/test_retry::test_many_rate_limits_of_one_episode_cut_the_width_once""",
    ),
    "F02": (
        "429 with a date, fraction, milliseconds or garbage",
        """tfgrpo/test_faults_stack::test_f02_any_spelling_of_a_hint_is_waited_for_and_garbage_means_normal_backoff
        lm/test_failures::test_hints_are_read_in_every_spelling_and_garbage_is_ignored""",
    ),
    "F03": (
        "a hint beyond the deadline is not slept",
        """store/test_faults_provider::test_f03_a_hint_beyond_the_deadline_is_not_slept
        lm/test_retry::test_a_hint_beyond_the_deadline_is_not_slept""",
    ),
    "F04": (
        "quota exhausted: fatal at once, exit 3",
        """store/test_faults_provider::test_f04_f06_a_hopeless_endpoint_stops_the_run_within_five_calls
        cli/test_provider::test_an_exhausted_quota_in_mid_run_ends_with_3_and_keeps_what_was_paid""",
    ),
    "F05": (
        "503 for two minutes: the run goes on, one log line a minute",
        """store/test_faults_provider::test_f05_two_minutes_of_503_cost_waiting_and_nothing_else
        tfgrpo/test_faults_stack::test_f05_one_log_line_a_minute_and_not_one_a_call""",
    ),
    "F06": (
        "a wrong key or model stops within five calls, exit 3",
        """store/test_faults_provider::test_f04_f06_a_hopeless_endpoint_stops_the_run_within_five_calls
        cli/test_provider::test_a_wrong_key_ends_with_3_after_a_handful_of_calls
        cli/test_provider::test_an_unknown_model_ends_with_3_after_a_handful_of_calls
        lm/test_failures::test_an_auth_failure_names_the_source_and_the_url_not_the_key""",
    ),
    "F07": (
        "context too long: typed, never retried unchanged, the critic shortens",
        """tfgrpo/test_faults_stack::test_f07_a_prompt_that_is_too_long_marks_its_rollout_and_is_never_sent_again_unchanged
        lm/test_retry::test_what_cannot_pass_is_asked_once
        experience/critic/test_critic::test_a_prompt_that_the_server_finds_too_long_is_halved_and_asked_again""",
    ),
    "F08": (
        "content filter: an outcome of its own, the task leaves both arms",
        """tfgrpo/test_faults_stack::test_f08_a_refused_task_has_no_reward_in_either_arm_of_a_comparison
        experience/test_gate_rules::test_tasks_scored_in_one_arm_only_count_in_neither
        lm/test_openai::test_a_refusal_and_a_cut_reply_are_told_apart""",
    ),
    "F09": (
        "connection, TLS and DNS failures: transient with a cap, circuit with a probe",
        """tfgrpo/test_faults_stack::test_f09_a_dead_endpoint_is_left_alone_and_probed_once_a_minute
        tfgrpo/test_faults_stack::test_f09_a_circuit_that_stays_open_ends_calls_with_the_cause
        lm/test_retry::test_the_circuit_opens_then_one_probe_goes_through
        lm/test_openai::test_a_refused_connection_and_an_unknown_host_are_connection_failures
        lm/test_openai::test_a_broken_connection_is_typed_and_the_next_call_works""",
    ),
    "F10": (
        "slow drip: the total deadline fires",
        """tfgrpo/test_faults_stack::test_f10_f11_f12_f20_a_reply_that_is_none_costs_its_rollout_and_never_scores
        lm/test_openai::test_a_slow_drip_meets_the_total_deadline""",
    ),
    "F11": (
        "slow first token: a limit of its own, named in the message",
        """tfgrpo/test_faults_stack::test_f10_f11_f12_f20_a_reply_that_is_none_costs_its_rollout_and_never_scores
        lm/test_openai::test_the_first_token_has_a_limit_of_its_own""",
    ),
    "F12": (
        "a page, nothing, or an error in a 200",
        """store/test_faults_provider::test_f01_f12_a_misbehaving_server_loses_and_scores_nothing
        tfgrpo/test_faults_stack::test_f10_f11_f12_f20_a_reply_that_is_none_costs_its_rollout_and_never_scores
        lm/test_openai::test_what_is_no_answer_is_a_bad_reply
        lm/test_openai::test_an_error_in_a_200_is_typed_by_content
        lm/test_failures::test_a_huge_body_is_kept_to_200_characters""",
    ),
    "F13": (
        "usage absent or wrong: estimated, flagged, kept apart",
        """store/test_faults_money::test_f13_estimated_tokens_stand_apart_from_billed_ones
        lm/test_usage::test_bad_usage_is_estimated_flagged_and_never_nothing""",
    ),
    "F14": (
        "five draws of eight: kept, three asked again",
        """store/test_keys::test_f14_five_draws_of_eight_are_kept_and_three_asked_again
        policies/test_chat::test_a_short_answer_is_asked_for_again_under_the_missing_indices""",
    ),
    "F15": (
        "another model answered: recorded, warned of once, refused on request",
        """tfgrpo/test_faults_stack::test_f15_another_model_is_recorded_and_warned_of_once_or_refused
        lm/test_openai::test_another_models_name_is_recorded_and_warned_of_once""",
    ),
    "F16": (
        "replies in any order belong to their requests",
        """store/test_keys::test_f16_replies_that_overtake_each_other_reach_who_asked
        lm/test_openai::test_replies_under_concurrency_belong_to_their_requests""",
    ),
    "F17": (
        "a stream split anywhere gives the same text",
        """lm/test_stream::test_any_splits_give_the_same_events
        lm/test_stream::test_every_single_split_point_gives_the_same_events
        lm/test_openai::test_a_stream_split_at_every_byte_is_the_same_reply""",
    ),
    "F18": (
        "null, unknown and unordered pieces are tolerated",
        """lm/test_wire::test_null_and_unknown_fields_are_tolerated
        lm/test_wire::test_tool_call_pieces_come_in_any_order
        policies/test_tools::test_broken_arguments_are_errors""",
    ),
    "F19": (
        "a cut reply is marked, teaches nothing and is not kept as complete",
        """store/test_keys::test_f19_a_cut_reply_is_kept_as_cut_and_a_longer_limit_asks_anew
        learning/test_loop::test_cut_replies_are_excluded_or_graded_as_asked
        tfgrpo/test_sampling::test_a_cut_reply_is_graded_on_request_and_keeps_its_flag""",
    ),
    "F20": (
        "60 MB or two million chunks: bounded, typed",
        """tfgrpo/test_faults_stack::test_f10_f11_f12_f20_a_reply_that_is_none_costs_its_rollout_and_never_scores
        lm/test_openai::test_a_reply_over_the_limit_is_refused
        lm/test_openai::test_many_tiny_chunks_are_bounded_too
        lm/test_stream::test_a_long_line_is_held_once_and_counted""",
    ),
    "F21": (
        "any text is stored and read back equal, and shown escaped",
        """store/test_faults_text::test_f21_any_text_comes_back_from_every_file_as_it_was
        store/test_faults_text::test_f21_replies_and_spend_keep_any_text
        store/test_faults_text::test_f21_any_json_value_survives_packing_small_and_large
        lm/test_openai::test_odd_text_is_sent_and_read_back
        report/test_page::test_control_and_bidirectional_characters_are_shown_as_escapes""",
    ),
    "F22": (
        "NaN and infinity are never written",
        """store/test_faults_text::test_f22_a_number_that_json_has_not_is_refused_by_name
        store/test_faults_text::test_f22_infinite_log_probs_do_not_lose_a_paid_reply
        verifiers/test_function::test_any_other_result_is_a_failure_and_never_zero
        lm/local/test_counter_rng::test_logits_that_are_not_finite_are_an_error""",
    ),
    "F23": (
        "kill at every event of a run of 300",
        """store/test_faults_process::test_f23_a_kill_at_every_event_of_a_run_changes_nothing
        store/test_faults_process::test_f23_a_kill_at_every_event_of_a_run_of_300_events
        store/test_faults_process::test_f23_kill_9_over_a_socket_pays_nothing_twice
        store/test_crash_property::test_a_run_killed_anywhere_ends_like_one_that_was_not_and_pays_nothing_twice
        cli/test_provider::test_kill_9_costs_at_most_the_calls_in_flight""",
    ),
    "F24": (
        "kill while a file is written: the old one or the new one",
        """store/test_faults_process::test_f24_a_file_that_is_being_written_is_the_old_one_or_the_new_one
        store/test_faults_process::test_f24_a_journal_that_was_being_made_is_made_again
        cli/test_report::test_a_target_that_cannot_be_written_leaves_nothing""",
    ),
    "F25": (
        "disk full in mid-step: one clear line, nothing lost, exit 6",
        """store/test_faults_process::test_f25_a_full_disk_is_one_clear_line_and_freed_space_saves_what_was_paid
        tfgrpo/test_scenarios::test_f25_a_full_disk_ends_with_6_and_the_run_goes_on_with_room""",
    ),
    "F26": (
        "read-only folder, no HOME, tight umask, odd paths",
        """store/test_faults_process::test_f26_a_read_only_folder_is_one_clear_line_before_any_call
        store/test_faults_process::test_f26_odd_paths_work
        store/test_faults_process::test_f26_a_tight_umask_and_no_home_work
        tfgrpo/test_scenarios::test_f26_spaces_other_scripts_no_home_and_a_tight_umask_are_fine""",
    ),
    "F27": (
        "a jumping wall clock",
        """tfgrpo/test_faults_stack::test_f27_a_day_that_jumps_changes_no_wait_no_limit_and_no_duration
        store/test_faults_process::test_f27_a_jumping_wall_clock_changes_no_duration
        store/test_budget::test_a_clock_that_jumps_back_gives_no_time_back""",
    ),
    "F28": (
        "two processes on one run",
        """store/test_faults_process::test_f28_a_second_opener_is_told_who_has_the_run_and_harms_nothing
        store/test_faults_process::test_f28_a_second_process_is_told_and_a_dead_owner_is_followed
        cli/test_main::test_a_second_process_on_a_run_ends_with_6""",
    ),
    "F29": (
        "Ctrl-C once and twice, TERM, a closed terminal, a notebook",
        """cli/test_provider::test_one_signal_finishes_what_is_in_flight_and_the_same_command_goes_on
        cli/test_provider::test_a_second_ctrl_c_leaves_at_once_and_the_same_command_goes_on
        cli/test_faults_terminal::test_f29_a_closed_terminal_keeps_what_was_paid_and_leaves_no_process
        learning/test_learn::test_learn_works_inside_a_running_loop""",
    ),
    "F30": (
        "a sink that is down",
        """tfgrpo/test_faults_stack::test_f30_a_dead_trace_collector_changes_nothing_of_a_run
        store/test_tracing::test_nothing_is_traced_by_default_and_a_dead_exporter_stops_no_call""",
    ),
    "F31": (
        "threads, running loops, worker processes, alarm-based scorers",
        """tfgrpo/test_scenarios::test_f31_learn_works_in_a_worker_thread
        learning/test_learn::test_learn_works_inside_a_running_loop
        store/test_faults_process::test_one_store_serves_several_threads
        lm/test_openai::test_one_lm_serves_several_event_loops
        verifiers/test_math::test_an_endless_comparison_is_a_failure_and_the_next_one_works""",
    ),
    "F32": (
        "a limit of 256 files at a concurrency of 500",
        """tfgrpo/test_faults_stack::test_f32_the_width_is_capped_below_the_file_limit_with_a_note
        tfgrpo/test_scenarios::test_f32_the_width_stays_below_the_file_limit""",
    ),
    "F33": (
        "one rollout raises: the siblings go on, the group closes",
        """tfgrpo/test_faults_stack::test_f33_one_rollout_that_raises_leaves_its_siblings_and_closes_the_group
        tfgrpo/test_sampling::test_a_failed_rollout_has_an_outcome_and_no_reward""",
    ),
    "F34": (
        "scoring fails or is cancelled: siblings are awaited, nothing is recorded afterwards",
        """tfgrpo/test_faults_stack::test_f34_scoring_siblings_have_ended_before_the_error_leaves
        policies/test_chat::test_cancelling_a_group_leaves_no_task_running
        tfgrpo/test_sampling::test_cancelling_leaves_no_task_behind""",
    ),
    "F35": (
        "cancelled while holding a slot or money: both come back",
        """store/test_faults_provider::test_f35_cancelled_anywhere_slots_and_money_come_back
        store/test_budget::test_a_cancelled_task_gives_its_reservation_back
        lm/test_retry::test_every_slot_comes_back_whatever_happens""",
    ),
    "F36": (
        "fifty equal calls are one, fifty draws are fifty",
        """store/test_keys::test_f36_fifty_equal_calls_at_once_are_one_request
        store/test_keys::test_f36_fifty_draws_at_once_are_fifty_requests_and_come_back_in_order
        store/test_keys::test_f36_when_the_one_request_fails_all_who_wait_are_told_and_it_counts_once
        store/test_keys::test_f36_when_the_one_who_asks_is_cancelled_another_takes_over""",
    ),
    "F37": (
        "cached tokens inside the prompt count are billed once",
        """store/test_faults_money::test_f37_cached_tokens_inside_the_prompt_count_are_billed_once
        lm/test_usage::test_cached_tokens_inside_the_prompt_count_are_disjoint""",
    ),
    "F38": (
        "no order of reserve, settle and cancel passes a cap",
        """store/test_faults_money::test_f38_forty_calls_at_once_never_pass_a_cap_and_use_it_up
        store/test_budget::TestLedgerMachine""",
    ),
    "F39": (
        "nothing, one, equal rewards",
        """store/test_faults_text::test_f39_an_empty_run_one_rollout_and_equal_rewards_have_defined_results
        tfgrpo/test_advantage::test_equal_rewards_give_exactly_zero
        tfgrpo/test_sampling::test_bad_tasks_are_refused_before_any_call
        report/test_summary::test_an_empty_run_has_a_summary_without_figures""",
    ),
    "F40": (
        "a scorer that raises, is late or returns something else",
        """verifiers/test_function::test_any_other_result_is_a_failure_and_never_zero
        verifiers/test_function::test_what_a_function_raises_is_a_failure
        verifiers/test_function::test_a_late_function_is_a_failure
        verifiers/test_math::test_a_reference_that_is_no_mathematics_is_found_before_spending""",
    ),
    "F41": (
        "masked tokens in a token mean",
        "rl/formulas/test_aggregations::test_a_masked_row_does_not_dilute_a_token_mean",
    ),
    "F42": (
        "a step of unusable proposals; three in a row",
        """experience/critic/test_critic::test_a_step_of_unusable_proposals_changes_nothing_and_three_in_a_row_stop
        learning/test_loop::test_three_steps_of_unusable_replies_end_the_run_with_the_cause""",
    ),
    "T1": (
        "keys in errors, logs, traces, files",
        """store/test_faults_text::test_t1_no_piece_of_a_key_reaches_any_file_of_a_run
        cli/test_provider::test_t1_no_piece_of_a_key_is_in_the_run_folder_or_the_output
        store/test_tracing::test_a_failure_is_an_error_of_its_kind_without_secrets
        report/test_page::test_a_known_secret_reaches_neither_page_nor_islands""",
    ),
    "T8": (
        "no pickle, no evaluated text",
        """tfgrpo/test_faults_stack::test_t8_no_module_reads_a_pickle_or_evaluates_text
        store/test_faults_process::test_t8_nothing_here_reads_or_evaluates_code_from_files""",
    ),
    "T12": (
        "bombs, long lines, names that would be paths",
        """store/test_faults_process::test_t12_a_bomb_a_long_line_and_a_bad_row_are_refused_with_their_line
        store/test_faults_process::test_t12_ids_never_become_file_names""",
    ),
    "T14": (
        "bad releases and start-up files",
        """tfgrpo/test_faults_stack::test_t14_no_version_with_a_known_hole_is_allowed
        tfgrpo/test_faults_stack::test_t14_doctor_names_a_start_up_file_that_nobody_knows_and_a_bad_release""",
    ),
    "T15": (
        "private data: owner-only files, no content in traces, a filter for lessons, purge",
        """store/test_faults_text::test_t15_folder_and_files_belong_to_their_owner_alone
        cli/test_provider::test_the_run_folder_is_for_its_owner_only
        store/test_tracing::test_a_call_is_a_span_with_the_agreed_names_and_no_content
        experience/test_guards::test_leaks_and_personal_data_are_refused_without_quoting_them
        cli/test_runs::test_purge_asks_deletes_runs_and_nothing_else""",
    ),
    "T16": (
        "a shared cache keeps accounts and servers apart",
        """store/test_keys::test_t16_a_shared_cache_keeps_accounts_and_servers_apart
        lm/test_spec::test_identity_changes_with_model_url_and_key""",
    ),
    "B01": (
        "cache identity",
        """store/test_keys::test_b01_each_field_makes_a_call_of_its_own
        store/test_keys::test_b01_order_of_keys_time_limits_and_a_rerun_change_nothing
        store/test_keys::test_b01_keys_are_equal_exactly_when_requests_are
        store/test_keys::test_b01_a_key_is_the_same_in_another_process""",
    ),
    "B02": (
        "stream transport",
        """lm/test_openai::test_chunk_variants_give_text_finish_and_billed_usage
        lm/test_openai::test_a_stream_split_at_every_byte_is_the_same_reply""",
    ),
    "B03": (
        "saved state: every derived figure survives a kill",
        """store/test_crash_property::test_b03_every_derived_figure_survives_a_kill_after_each_of_ten_samples
        tfgrpo/test_scenarios::test_b03_ten_samples_killed_after_each_report_what_an_unkilled_run_reports""",
    ),
    "B04": (
        "cache writes are not charged again",
        """store/test_faults_money::test_b04_written_tokens_are_not_charged_again_as_input
        lm/test_usage::test_the_same_usage_in_both_styles_is_the_same_money
        lm/test_usage::test_beside_style_is_not_billed_twice""",
    ),
    "B10": (
        "a key in the query of a URL stands nowhere after a failure",
        """lm/test_openai::test_the_key_is_found_nowhere_after_a_failure
        cli/test_provider::test_t1_no_piece_of_a_key_is_in_the_run_folder_or_the_output
        runtime/test_redaction::test_encoded_forms_are_found
        runtime/test_redaction::test_base64_is_found_at_any_alignment""",
    ),
}  # fmt: skip

WANTED = [f"F{n:02}" for n in range(1, 43)]
WANTED += ["T1", "T8", "T12", "T14", "T15", "T16", "B01", "B02", "B03", "B04", "B10"]


@cache
def defined_in(file: str) -> frozenset[str]:
    """Return the names of the tests that a file defines at its top level."""
    tree = syntax_tree((TESTS / f"{file}.py").read_text(encoding="utf-8"))
    names = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for node in tree.body:  # a state machine of hypothesis is a test by assignment
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(n for n in names if n.lower().startswith("test"))


def test_no_case_lacks_a_row() -> None:
    assert list(CASES) == WANTED


@pytest.mark.parametrize("case", CASES)
def test_every_test_of_a_case_exists(case: str) -> None:
    summary, listed = CASES[case]
    assert summary
    nodes = listed.split()
    assert nodes and len(set(nodes)) == len(nodes)
    for node in nodes:
        file, _, name = node.partition("::")
        assert (TESTS / f"{file}.py").exists(), f"{case}: tests/{file}.py is gone"
        assert name in defined_in(file), f"{case}: tests/{file}.py has no {name}"


def test_a_test_named_after_a_case_is_in_its_row() -> None:
    """A test called `test_f23_…` that nobody listed would be a case checked in secret."""
    listed = {node for _, nodes in CASES.values() for node in nodes.split()}
    for path in TESTS.rglob("test_*.py"):
        file = path.relative_to(TESTS).with_suffix("").as_posix()
        for name in defined_in(file):
            for word in name.upper().split("_")[1:]:
                if word not in CASES:
                    break  # what follows the cases is the claim
                assert f"{file}::{name}" in listed, f"{word}: list tests/{file}.py::{name}"
