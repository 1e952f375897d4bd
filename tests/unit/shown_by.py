"""The test for each row of docs/coming_from_*.md; `test_coming_from.py` checks this table against the pages.

Each entry was chosen by reading: the test fails when the key has no effect, or another effect than the row says.
"""

# Each key in a row, and the tests that set it and check its effect.
KEYS: dict[str, str | tuple[str, ...]] = {
    "algorithm.beta": "e2e/test_reference_options.py::test_another_checkpoint_as_reference_gives_a_kl_from_the_first_step_on",
    "algorithm.delta": "unit/algorithms/test_reference_losses.py::test_trl",
    "algorithm.dynamic_sample": (
        "unit/trainer/rollout/test_groups.py::test_groups_without_a_difference_are_replaced_by_fresh_prompts_until_the_step_is_full",
        "e2e/test_sampling.py::test_dynamic_sampling_fills_every_step_with_groups_that_teach",
    ),
    "algorithm.entropy_coef": "unit/algorithms/test_reference_losses.py::test_trl",
    "algorithm.entropy_coef_delta": "unit/algorithms/test_entropy.py::test_the_adaptive_weight_goes_where_trls_goes",
    "algorithm.entropy_coef_max": "unit/algorithms/test_options.py::test_an_option_of_the_adaptive_bonus_changes_its_weight",
    "algorithm.entropy_coef_min": "unit/algorithms/test_options.py::test_an_option_of_the_adaptive_bonus_changes_its_weight",
    "algorithm.entropy_target": "unit/algorithms/test_entropy.py::test_the_adaptive_weight_goes_where_trls_goes",
    "algorithm.epsilon": "unit/algorithms/test_reference_losses.py::test_trl",
    "algorithm.epsilon_high": "unit/algorithms/test_reference_losses.py::test_trl",
    "algorithm.importance_correction": (
        "unit/algorithms/test_options.py::test_an_option_of_the_loss_changes_it",
        "unit/algorithms/test_reference_losses.py::test_ms_swift",
    ),
    "algorithm.importance_correction_max": (
        "unit/algorithms/test_options.py::test_an_option_of_the_loss_changes_it",
        "unit/algorithms/test_reference_losses.py::test_ms_swift",
    ),
    "algorithm.importance_correction_min": "unit/algorithms/test_options.py::test_an_option_of_the_loss_changes_it",
    "algorithm.importance_sampling_level": "unit/algorithms/test_reference_losses.py::test_trl",
    "algorithm.kl_estimator": "unit/algorithms/test_losses.py::test_the_kl_term_is_that_of_the_estimator_in_the_config",
    "algorithm.loss_type": "unit/algorithms/test_reference_losses.py::test_trl",
    "algorithm.mask_truncated_completions": "distributed/test_dump_losses.py::test_a_step_with_this_option_agrees_with_float64",
    "algorithm.max_resample_times": "unit/trainer/rollout/test_groups.py::test_after_the_last_round_the_step_is_filled_as_asked",
    "algorithm.moe_router_bias_update_rate": (
        "distributed/test_router_bias.py::test_biases_move_by_the_loads_of_replayed_routes"
    ),
    "algorithm.multi_objective_aggregation": (
        "unit/environments/test_dialogue_samples.py::test_rewards_of_turns_and_environments_are_columns_of_weight_one",
        "unit/algorithms/test_reference_advantages.py::test_trl",
    ),
    "algorithm.num_iterations": "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
    "algorithm.off_policy_mask_threshold": "unit/algorithms/test_reference_losses.py::test_trl",
    "algorithm.ref_model_mixup_alpha": (
        "unit/trainer/test_moving_reference.py::test_the_reference_moves_by_its_share_at_every_so_many_steps_and_only_when_asked"
    ),
    "algorithm.ref_model_sync_steps": (
        "unit/trainer/test_moving_reference.py::test_the_reference_moves_by_its_share_at_every_so_many_steps_and_only_when_asked",
        "e2e/test_reference_options.py::test_the_kl_falls_when_the_reference_follows",
    ),
    "algorithm.router_aux_loss_coef": (
        "distributed/test_router_balance.py::test_the_loss_and_its_gradient_are_those_of_transformers"
    ),
    "algorithm.sapo_temperature_neg": (
        "unit/algorithms/test_options.py::test_an_option_of_the_loss_changes_it",
        "unit/algorithms/test_reference_losses.py::test_trl",
    ),
    "algorithm.sapo_temperature_pos": (
        "unit/algorithms/test_options.py::test_an_option_of_the_loss_changes_it",
        "unit/algorithms/test_reference_losses.py::test_trl",
    ),
    "algorithm.scale_rewards": "unit/algorithms/test_kl_in_reward.py::test_advantages_are_ms_swifts",
    "algorithm.steps_per_generation": (
        "e2e/test_reference_options.py::test_the_second_optimizer_step_of_one_iteration_has_moved_from_the_policy_that_generated"
    ),
    "algorithm.sync_ref_model": (
        "unit/trainer/test_moving_reference.py::test_the_reference_moves_by_its_share_at_every_so_many_steps_and_only_when_asked",
        "e2e/test_reference_options.py::test_the_kl_falls_when_the_reference_follows",
    ),
    "algorithm.top_entropy_quantile": (
        "distributed/test_loss_layouts.py::test_a_loss_that_depends_on_the_whole_step_is_the_same_over_data_parallel_ranks",
        "unit/algorithms/test_entropy.py::test_the_tokens_kept_are_those_trl_keeps",
    ),
    "algorithm.use_adaptive_entropy": "unit/algorithms/test_entropy.py::test_the_adaptive_weight_goes_where_trls_goes",
    "algorithm.use_bias_correction_kl": "unit/algorithms/test_reference_losses.py::test_trl",
    "algorithm.vespo_k_neg": (
        "unit/algorithms/test_options.py::test_an_option_of_the_loss_changes_it",
        "unit/algorithms/test_reference_losses.py::test_trl",
    ),
    "algorithm.vespo_k_pos": (
        "unit/algorithms/test_options.py::test_an_option_of_the_loss_changes_it",
        "unit/algorithms/test_reference_losses.py::test_trl",
    ),
    "algorithm.vespo_lambda_neg": (
        "unit/algorithms/test_options.py::test_an_option_of_the_loss_changes_it",
        "unit/algorithms/test_reference_losses.py::test_trl",
    ),
    "algorithm.vespo_lambda_pos": (
        "unit/algorithms/test_options.py::test_an_option_of_the_loss_changes_it",
        "unit/algorithms/test_reference_losses.py::test_trl",
    ),
    "data.chat_template": "unit/data/test_prompts.py::test_system_prompt_and_template_go_into_the_tokens_only",
    "data.chat_template_kwargs": "unit/data/test_chat_templates.py::test_a_template_gets_its_variables_and_says_what_it_opens",
    "data.eval": "e2e/test_evaluation.py::test_sets_are_evaluated_with_their_own_sampling_before_between_and_after",
    "data.overlong_prompts": "unit/data/test_prompts.py::test_overlong_prompts_are_counted_and_dropped_or_cut_on_the_left",
    "data.shuffle": "unit/data/test_prompts.py::test_without_shuffle_and_in_all_prompts_come_as_in_the_data_set",
    "data.system_prompt": "unit/data/test_prompts.py::test_system_prompt_and_template_go_into_the_tokens_only",
    "data.train": "unit/data/test_prompts.py::test_every_kind_of_source_gives_the_same_prompts",
    "evaluation.num_generations": (
        "unit/trainer/evaluation/test_sets.py::test_what_a_set_leaves_empty_comes_from_the_sections_above_it",
        "e2e/test_evaluation.py::test_sets_are_evaluated_with_their_own_sampling_before_between_and_after",
    ),
    "algorithm.critic": "distributed/test_critic.py::test_a_step_of_the_critic_is_that_of_one_process_and_resumes",
    "evaluation.steps": "e2e/test_evaluation.py::test_sets_are_evaluated_with_their_own_sampling_before_between_and_after",
    "lora.alpha": "distributed/test_lora_peft.py::test_gradients_merged_weights_and_files_are_those_of_peft",
    "lora.dropout": "distributed/test_lora_peft.py::test_dropout_drops_the_same_on_all_ranks_and_only_in_training",
    "lora.layers_to_transform": "distributed/test_lora_peft.py::test_so_are_those_of_some_modules_in_some_layers",
    "lora.target_parameters": "distributed/test_lora_experts.py::test_gradients_merged_weights_and_files_are_those_of_peft",
    "lora.rank": "distributed/test_lora_peft.py::test_gradients_merged_weights_and_files_are_those_of_peft",
    "lora.sync": "unit/engine/servers/test_server_options.py::test_servers_sleep_at_level_2_and_keep_weights_that_syncs_leave_out",
    "lora.target_modules": "distributed/test_lora_layouts.py::test_a_step_of_adapters_equals_that_of_one_process",
    "model.path": "e2e/test_bad_input.py::test_damaged_weights_are_named_before_a_run_replaces_another",
    "model.precision": "e2e/test_options.py::test_a_run_in_16_bits_keeps_float32_masters_and_stays_near_its_engine",
    "model.fusions": "unit/policy/test_transformer_config.py::test_fusions_that_change_log_probs_are_off_until_they_are_asked_for",
    "model.recompute": "distributed/test_recompute.py::test_layers_are_computed_again_in_the_backward_pass",
    "model.recompute_modules": "distributed/test_recompute.py::test_the_chosen_modules_and_no_others_are_computed_again",
    "model.tokenizer": "e2e/test_bad_input.py::test_a_mistake_in_the_config_is_named",
    "multi_turn.environment": "unit/environments/test_dialogues.py::test_what_reset_says_is_at_the_end_of_the_prompt",
    "multi_turn.max_tool_calling_iterations": (
        "unit/environments/test_dialogues.py::test_limits_end_a_response_with_its_last_call_unanswered"
    ),
    "multi_turn.scheduler": "unit/environments/test_dialogues.py::test_a_scheduler_asks_until_it_is_satisfied_and_its_rewards_add_up",
    "multi_turn.tools": "unit/environments/test_dialogues.py::test_a_tool_is_called_and_the_policy_goes_on_from_its_own_tokens",
    "parallel.tp": "e2e/test_two_workers.py::test_two_workers_synced_from_any_shards_are_a_fresh_engine_and_read_their_own_halves",
    "rewards.functions": "unit/rewards/test_workers.py::test_order_is_kept_and_the_weighted_sum_skips_functions_that_cannot_score",
    "rewards.functions.N.args": (
        "unit/rewards/test_reference_rewards.py::test_the_arguments_of_ms_swifts_length_rewards_are_args_in_the_config"
    ),
    "rewards.plugins": "unit/rewards/test_scoring.py::test_plugins_register_names_and_get_texts_as_in_ms_swift",
    "rollout.enforce_eager": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
    "rollout.extra_args": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
    "rollout.gpu_memory_utilization": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
    "rollout.logit_bias": (
        "distributed/test_logit_processors.py::test_every_layout_takes_the_same_step",
        "e2e/test_request_sampling.py::test_changed_logits_are_the_same_in_trainer_engine_and_audit",
    ),
    "rollout.allowed_token_ids": "unit/policy/test_constrained_logprobs.py::test_trainer_and_audit_are_over_the_tokens_that_brute_force_allows",
    "rollout.max_completion_length": (
        "unit/engine/servers/test_server_options.py::test_a_step_samples_as_its_keys_say",
        "unit/engine/servers/test_server_options.py::test_a_server_holds_the_longest_prompt_with_the_longest_response",
    ),
    "rollout.max_num_seqs": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
    "rollout.max_prompt_length": (
        "e2e/test_bad_input.py::test_a_mistake_in_the_config_is_named",
        "unit/engine/servers/test_server_options.py::test_a_server_holds_the_longest_prompt_with_the_longest_response",
    ),
    "rollout.max_staleness": "e2e/test_async_runs.py::test_a_policy_that_stands_still_gets_the_very_responses_of_a_synchronous_run",
    "rollout.include_stop_str_in_output": "unit/engine/servers/test_server_options.py::test_a_step_samples_as_its_keys_say",
    "rollout.min_p": (
        "unit/engine/servers/test_server_options.py::test_a_step_samples_as_its_keys_say",
        "e2e/test_truncated_rollouts.py::test_trainer_and_engine_agree_on_the_truncated_distribution",
    ),
    "rollout.num_generations": (
        "unit/trainer/rollout/test_groups.py::test_a_step_asks_for_its_prompts_with_its_number_of_responses_each_by_the_seed_of_the_run"
    ),
    "rollout.placement": (
        "unit/config/test_placement.py::test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them",
        "unit/config/test_placement.py::test_contradictions_are_refused_with_a_fix",
    ),
    "rollout.port": "unit/engine/servers/test_server_options.py::test_as_many_servers_start_at_the_ports_that_follow",
    "rollout.prompts_per_step": (
        "unit/trainer/rollout/test_groups.py::test_a_step_asks_for_its_prompts_with_its_number_of_responses_each_by_the_seed_of_the_run"
    ),
    "rollout.reconnect_timeout": "unit/engine/test_access.py::test_what_the_config_says_about_servers_reaches_them",
    "rollout.request_timeout": (
        "unit/engine/servers/test_server_options.py::test_a_request_that_takes_longer_than_its_timeout_goes_to_another_server"
    ),
    "rollout.nodes_per_server": "e2e/test_server_nodes.py::test_two_nodes_are_one_server_that_gets_verified_weights",
    "rollout.routing_replay": (
        "distributed/test_routing_replay.py::test_every_expert_that_a_router_takes_was_given",
        "e2e/test_replayed_mismatch.py::test_in_bfloat16_replay_removes_at_least_half_of_the_mismatch",
    ),
    "rollout.servers": "unit/engine/servers/test_server_options.py::test_as_many_servers_start_at_the_ports_that_follow",
    "rollout.startup_timeout": (
        "unit/engine/servers/test_launcher.py::test_a_server_that_does_not_answer_in_time_ends_the_start_with_the_key"
    ),
    "rollout.stop": "unit/engine/servers/test_server_options.py::test_a_step_samples_as_its_keys_say",
    "rollout.structured_outputs": (
        "unit/data/test_grammar.py::test_a_regex_allows_what_continues_a_word_of_its_language",
        "e2e/test_request_sampling.py::test_changed_logits_are_the_same_in_trainer_engine_and_audit",
    ),
    "rollout.temperature": (
        "unit/engine/servers/test_server_options.py::test_a_step_samples_as_its_keys_say",
        "e2e/test_options.py::test_temperature_belongs_to_both_sides",
    ),
    "rollout.top_k": (
        "unit/engine/servers/test_server_options.py::test_a_step_samples_as_its_keys_say",
        "e2e/test_truncated_rollouts.py::test_trainer_and_engine_agree_on_the_truncated_distribution",
    ),
    "rollout.top_p": (
        "unit/engine/servers/test_server_options.py::test_a_step_samples_as_its_keys_say",
        "e2e/test_truncated_rollouts.py::test_trainer_and_engine_agree_on_the_truncated_distribution",
    ),
    "rollout.repetition_penalty": (
        "distributed/test_logit_processors.py::test_values_and_gradients_are_those_of_dense_counts",
        "e2e/test_request_sampling.py::test_changed_logits_are_the_same_in_trainer_engine_and_audit",
    ),
    "rollout.tp": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
    "rollout.pp": "e2e/test_server_layouts.py::test_stages_get_their_layers",
    "rollout.dp": "e2e/test_server_layouts.py::test_copies_get_the_attention_and_their_experts",
    "rollout.urls": "e2e/test_bad_input.py::test_a_mistake_in_the_config_is_named",
    "run.callbacks": "unit/trainer/test_callbacks.py::test_every_rank_obeys_what_rank_0_was_asked_and_ends_when_a_callback_raises",
    "run.log_completions_steps": "unit/records/test_metrics.py::test_samples_are_shown_every_k_steps",
    "run.max_steps": "e2e/test_run.py::test_every_step_and_evaluation_is_a_line_of_finite_metrics",
    "run.num_train_epochs": (
        "unit/config/test_steps.py::test_epochs_become_steps_rounded_up_without_errors_of_floats",
        "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
    ),
    "run.output_dir": "e2e/test_run.py::test_the_config_that_ran_is_kept_and_loads_back",
    "run.save_steps": "e2e/test_full_disk.py::test_a_run_whose_last_checkpoint_fails_has_failed",
    "run.save_total_limit": "e2e/test_signals.py::test_a_signal_saves_after_the_last_finished_step",
    "run.seed": "unit/trainer/rollout/test_groups.py::test_a_step_asks_for_its_prompts_with_its_number_of_responses_each_by_the_seed_of_the_run",
    "run.trackers": (
        "e2e/test_run.py::test_tensorboard_events_hold_every_step",
        "unit/records/sinks/test_wandb.py::test_metrics_have_the_runs_step_and_tables_hold_every_response",
        "unit/records/sinks/test_mlflow_sink.py::test_a_run_and_its_continuation_are_one_run_in_a_database_beside_the_runs",
        "unit/records/sinks/test_trackio.py::test_a_run_and_its_continuation_are_one_run_in_a_local_database",
        "e2e/test_tracing.py::test_a_run_is_scraped_with_its_servers_and_sends_a_trace_per_step",
        "unit/records/sinks/test_find_trackers.py::test_the_sink_of_the_page_writes_what_the_page_says",
    ),
    "train.adam_beta1": "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
    "train.adam_beta2": "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
    "train.adam_epsilon": "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
    "train.freeze_moe_router": "distributed/test_frozen_router.py::test_routers_have_no_state_and_keep_their_bits",
    "train.learning_rate": "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
    "train.lr_scheduler_type": "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
    "train.max_grad_norm": "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
    "train.max_tokens_per_micro_batch": (
        "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank"
    ),
    "train.offload": "unit/config/test_placement.py::test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them",
    "train.optimizer": "distributed/test_muon.py::test_the_matrices_of_blocks_follow_the_formula_and_the_rest_adam",
    "train.optimizer_offload": (
        "distributed/test_compact_moments.py::test_moments_that_wait_in_the_hosts_memory_take_the_same_steps"
    ),
    "train.optimizer_state_dtype": "distributed/test_compact_moments.py::test_a_run_that_stops_and_goes_on_has_the_same_weights",
    "train.warmup_ratio": (
        "unit/config/test_steps.py::test_a_warmup_ratio_is_a_share_of_the_optimizer_steps_rounded_up_as_in_transformers",
        "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
    ),
    "train.warmup_steps": "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
    "train.weight_decay": "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
}

# Each row of "Arguments" with more than the name of a key, by its first argument.
SAYS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "coming_from_trl.md": {
        "callbacks": "unit/trainer/test_callbacks.py::test_a_callback_of_transformers_runs_as_it_is",
        "per_device_train_batch_size": (
            "unit/trainer/rollout/test_groups.py::test_a_step_asks_for_its_prompts_with_its_number_of_responses_each_by_the_seed_of_the_run",
            "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
        ),
        "steps_per_generation": (
            "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
            "unit/data/test_sample_slices.py::test_one_part_is_everything",
        ),
        "num_train_epochs": (
            "unit/config/test_steps.py::test_max_steps_takes_precedence_and_is_100_without_either",
            "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
        ),
        "warmup_steps": "unit/config/test_steps.py::test_a_warmup_ratio_is_a_share_of_the_optimizer_steps_rounded_up_as_in_transformers",
        "bf16": "e2e/test_options.py::test_a_run_in_16_bits_keeps_float32_masters_and_stays_near_its_engine",
        "disable_dropout": "unit/families/test_hf_config.py::test_what_the_model_code_cannot_do_is_refused",
        "cast_lm_head_to_fp32": "unit/policy/test_vocab_logprobs.py::test_bfloat16_heads_give_float32_logprobs_close_to_the_float32_ones",
        "max_prompt_length": "unit/data/test_prompts.py::test_overlong_prompts_are_counted_and_dropped_or_cut_on_the_left",
        "ds3_gather_for_generation": "e2e/test_weight_sync.py::test_ranks_publish_their_own_shards_and_each_block_once",
        "pad_to_multiple_of": (
            "unit/data/test_packing.py::test_every_token_lands_in_exactly_one_micro_batch_within_the_budget",
            "unit/data/test_packing.py::test_micro_batches_are_padded_to_the_alignment_with_a_sequence_that_counts_for_nothing",
            "unit/policy/test_fp8.py::test_what_a_rank_multiplies_at_once_is_a_multiple_of_what_shares_a_scale",
        ),
        "num_completions_to_print": "unit/records/test_metrics.py::test_the_sample_shows_the_best_and_the_worst_of_a_group_that_differs",
        "generation_kwargs": "unit/engine/servers/test_server_options.py::test_a_step_samples_as_its_keys_say",
        "use_vllm": "e2e/test_run.py::test_no_process_and_no_shared_memory_outlives_the_run",
        "vllm_mode": (
            "unit/config/test_placement.py::test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them",
            "unit/config/test_placement.py::test_contradictions_are_refused_with_a_fix",
        ),
        "vllm_server_timeout": (
            "unit/engine/servers/test_launcher.py::test_a_server_that_does_not_answer_in_time_ends_the_start_with_the_key",
            "unit/engine/test_server_faults.py::test_when_all_are_gone_the_run_waits_as_long_as_it_was_told_and_names_them",
            "unit/engine/servers/test_server_options.py::test_a_request_that_takes_longer_than_its_timeout_goes_to_another_server",
            "e2e/test_bad_input.py::test_a_mistake_in_the_config_is_named",
        ),
        "vllm_group_port": "distributed/test_point_to_point.py::test_every_worker_gets_what_its_loaders_copy_and_no_byte_more",
        "vllm_tensor_parallel_size": (
            "e2e/test_two_workers.py::test_two_workers_synced_from_any_shards_are_a_fresh_engine_and_read_their_own_halves"
        ),
        "vllm_model_impl": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
        "vllm_enable_sleep_mode": (
            "unit/config/test_placement.py::test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them"
        ),
        "use_bias_correction_kl": "unit/test_coming_from.py::test_bias_correction_is_off_here_and_on_in_the_preset_of_trl",
        "reward_funcs": "unit/rewards/test_workers.py::test_order_is_kept_and_the_weighted_sum_skips_functions_that_cannot_score",
        "vllm_importance_sampling_correction": (
            "unit/algorithms/test_reference_advantages.py::test_correction_weights_equal_trls",
            "unit/algorithms/test_options.py::test_every_correction_is_another",
        ),
        "log_completions": (
            "e2e/test_run.py::test_every_rollout_is_a_line_of_completions",
            "unit/records/test_metrics.py::test_samples_are_shown_every_k_steps",
        ),
        "report_to": "unit/records/sinks/test_find_trackers.py::test_the_sink_of_the_page_writes_what_the_page_says",
        "log_extra": "unit/rewards/test_call_log.py::test_columns_and_numbers_travel_with_the_rewards_and_are_means_over_the_responses",
        "remove_unused_columns": "unit/rewards/test_workers.py::test_a_function_gets_the_arguments_it_names_with_its_columns_and_args",
        "logging_steps": "e2e/test_run.py::test_every_step_and_evaluation_is_a_line_of_finite_metrics",
        "peft_config": (
            "distributed/test_lora_peft.py::test_gradients_merged_weights_and_files_are_those_of_peft",
            "distributed/test_lora_peft.py::test_peft_reads_what_we_write_and_computes_the_same",
        ),
        "reward_processing_classes": "unit/rewards/test_asked.py::test_a_reward_model_gives_the_logit_of_prompt_and_completion",
    },
    "coming_from_ms_swift.md": {
        "torch_dtype": "e2e/test_options.py::test_a_run_in_16_bits_keeps_float32_masters_and_stays_near_its_engine",
        "dataset": "unit/data/test_prompts.py::test_size_keeps_the_first_rows_of_the_split",
        "external_plugins": (
            "unit/rewards/test_scoring.py::test_classes_are_made_once_with_args_and_then_called",
            "unit/environments/test_dialogues.py::test_a_scheduler_that_is_a_class_remembers",
        ),
        "train_type": (
            "distributed/test_lora_peft.py::test_gradients_merged_weights_and_files_are_those_of_peft",
            "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
        ),
        "max_length": "unit/data/test_prompts.py::test_overlong_prompts_are_counted_and_dropped_or_cut_on_the_left",
        "ds3_gather_for_generation": "e2e/test_weight_sync.py::test_ranks_publish_their_own_shards_and_each_block_once",
        "reward_funcs": "unit/rewards/test_workers.py::test_order_is_kept_and_the_weighted_sum_skips_functions_that_cannot_score",
        "reward_model": "unit/rewards/test_asked.py::test_a_reward_model_gives_the_logit_of_prompt_and_completion",
        "reward_model_plugin": "unit/rewards/test_scoring.py::test_a_function_may_have_a_worker_of_its_own_and_a_deadline_of_its_own",
        "cosine_min_len_value_wrong": (
            "unit/rewards/test_reference_rewards.py::test_the_arguments_of_ms_swifts_length_rewards_are_args_in_the_config"
        ),
        "repetition_n_grams": (
            "unit/rewards/test_reference_rewards.py::test_the_arguments_of_ms_swifts_length_rewards_are_args_in_the_config"
        ),
        "soft_max_length": "unit/rewards/test_reference_rewards.py::test_the_arguments_of_ms_swifts_length_rewards_are_args_in_the_config",
        "log_completions": "e2e/test_run.py::test_every_rollout_is_a_line_of_completions",
        "use_vllm": "e2e/test_run.py::test_no_process_and_no_shared_memory_outlives_the_run",
        "vllm_server_timeout": (
            "unit/engine/servers/test_launcher.py::test_a_server_that_does_not_answer_in_time_ends_the_start_with_the_key",
            "unit/engine/test_server_faults.py::test_when_all_are_gone_the_run_waits_as_long_as_it_was_told_and_names_them",
            "unit/engine/servers/test_server_options.py::test_a_request_that_takes_longer_than_its_timeout_goes_to_another_server",
            "e2e/test_bad_input.py::test_a_mistake_in_the_config_is_named",
        ),
        "vllm_enable_prefix_caching": (
            "unit/engine/servers/test_server_options.py::test_nothing_turns_the_prefix_cache_of_vllm_off",
            "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
            "unit/engine/test_async_client.py::test_a_sync_empties_the_prefix_cache_before_a_server_serves_again",
            "e2e/test_weight_sync.py::test_after_a_sync_that_keeps_responses_no_cached_prefix_is_of_older_weights",
        ),
        "async_generate": "unit/trainer/rollout/test_async_rollouts.py::test_every_group_is_trained_on_once_in_order_and_none_is_too_old",
        "sleep_level": "unit/engine/servers/test_server_options.py::test_servers_sleep_at_level_2_and_keep_weights_that_syncs_leave_out",
        "offload_model": (
            "unit/config/test_placement.py::test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them",
            "distributed/test_offload.py::test_steps_are_the_same_and_nothing_stays_on_the_device",
        ),
        "multi_turn_func": "unit/environments/test_dialogues.py::test_the_tips_of_ms_swift_are_given_once_and_word_for_word",
        "mini_batch_size": (
            "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
            "unit/algorithms/test_exact_denominators.py::test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism",
        ),
        "overlong_filter": (
            "unit/algorithms/test_reference_losses.py::test_ms_swift_divides_token_losses_by_all_tokens_and_ours_by_those_that_its_overlong_filter_keeps"
        ),
        "report_to": "unit/records/sinks/test_find_trackers.py::test_the_sink_of_the_page_writes_what_the_page_says",
        "logging_steps": "e2e/test_run.py::test_every_step_and_evaluation_is_a_line_of_finite_metrics",
    },
}

# Each row of "What differs on purpose", by its first cell.
DIFFERS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "coming_from_trl.md": {
        "token normaliser of dapo, cispo, vespo": "unit/algorithms/test_reference_losses.py::test_trl",
        "bnpo": "unit/algorithms/test_reference_losses.py::test_trl",
        "`reward_std`": (
            "unit/algorithms/test_advantages.py::test_reward_std_is_the_mean_of_the_groups_stds",
            "unit/algorithms/test_reference_advantages.py::test_trl",
        ),
        "truncated": "e2e/test_vllm_server.py::test_a_response_ends_with_its_stop_token_or_at_the_limit",
        "train-inference mismatch": "e2e/test_options.py::test_a_mismatch_above_the_threshold_is_said_and_counted",
    },
    "coming_from_ms_swift.md": {
        "loss of a mini-batch": "unit/algorithms/test_reference_losses.py::test_the_loss_of_ms_swift_in_april_2025",
        "`overlong_filter` with `dapo`, `cispo`, `fipo`, and `bnpo` under Megatron": (
            "unit/algorithms/test_reference_losses.py::test_ms_swift_divides_token_losses_by_all_tokens_and_ours_by_those_that_its_overlong_filter_keeps"
        ),
        "`off_policy_sequence_mask_delta` "
        "(`algorithm.off_policy_mask_threshold`)": "unit/algorithms/test_reference_losses.py::test_trl",
        "several optimizer steps on one batch of rollouts": (
            "e2e/test_reference_options.py::test_the_audit_agrees_with_slices_a_kl_in_the_reward_and_a_reference_that_moves"
        ),
        "`top_entropy_quantile`": (
            "distributed/test_loss_layouts.py::test_a_loss_that_depends_on_the_whole_step_is_the_same_over_data_parallel_ranks"
        ),
        "`clip_ratio/*` with `importance_sampling_level: "
        "sequence`": "unit/algorithms/test_reference_losses.py::test_ms_swift",
        "k3": "unit/algorithms/test_reference_misc.py::test_far_from_the_reference_k3_is_trls_and_low_var_is_ms_swifts_k3",
        "a row that no function could score": "unit/algorithms/test_reference_advantages.py::test_ms_swift",
        "cosine beyond the longest length": (
            "unit/rewards/test_reference_rewards.py::test_cosine_as_ms_swift_with_its_values_and_without_the_clamp"
        ),
        "soft_overlong": "unit/rewards/test_reference_rewards.py::test_soft_overlong_as_ms_swift_without_the_floor",
        "train-inference mismatch": "unit/algorithms/test_reference_losses.py::test_ms_swift",
    },
}
