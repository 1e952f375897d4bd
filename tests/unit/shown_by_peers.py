"""The test for each row of the pages on verl, NeMo-RL, OpenRLHF, slime, prime-rl, AReaL, SkyRL and Unsloth, as
`shown_by` has them for TRL and ms-swift."""

# Each key that these pages name and the pages on TRL and ms-swift do not.
KEYS: dict[str, str | tuple[str, ...]] = {
    "algorithm.advantage_by": "unit/algorithms/test_turn_advantages.py::test_turns_have_the_advantages_of_the_formula",
    "algorithm.advantage_estimator": "unit/algorithms/test_kl_in_reward.py::test_advantages_are_ms_swifts",
    "algorithm.kl_in_reward": "unit/algorithms/test_kl_in_reward.py::test_advantages_are_ms_swifts",
    "algorithm.skip_zero_advantage": "unit/data/test_packing.py::test_samples_without_advantage_are_left_out_but_still_count",
    "data.columns": "unit/data/test_prompts.py::test_columns_are_renamed_beside_the_originals",
    "data.curriculum": "unit/data/test_curriculum.py::test_prompts_outside_of_the_band_rest_for_their_epochs_and_are_tried_again",
    "data.images": "distributed/test_images.py::test_logprobs_of_packed_samples_with_images_equal_transformers",
    "model.freeze_vision_tower": "distributed/test_trained_tower.py::test_gradients_of_all_tensors_equal_transformers",
    "data.prompt_column": "unit/planner/test_files.py::test_data_that_does_not_exist_or_lacks_a_column_is_a_problem",
    "data.source": (
        "e2e/test_data_source.py::test_a_run_draws_what_its_source_chooses_and_resumes_as_if_never_interrupted"
    ),
    "evaluation.keep_best": "e2e/test_evaluation.py::test_the_best_checkpoint_stays_beside_the_newest_and_a_resumed_run_knows_it",
    "evaluation.sets": "e2e/test_evaluation.py::test_sets_are_evaluated_with_their_own_sampling_before_between_and_after",
    "evaluation.temperature": "e2e/test_evaluation.py::test_sets_are_evaluated_with_their_own_sampling_before_between_and_after",
    "evaluation.top_k": "e2e/test_evaluation.py::test_sets_are_evaluated_with_their_own_sampling_before_between_and_after",
    "evaluation.top_p": "unit/trainer/evaluation/test_sets.py::test_what_a_set_leaves_empty_comes_from_the_sections_above_it",
    "lora.adapter_path": "e2e/test_lora_run.py::test_a_run_continues_from_an_adapter_which_is_its_reference",
    "model.base_storage": "e2e/test_lora_run.py::test_vllm_samples_from_the_rounded_weights_that_the_trainer_computes_with",
    "model.fp8_param": (
        "e2e/test_fp8_weights_run.py::test_a_run_with_weights_in_fp8_resumes_bit_for_bit_and_vllm_is_nearer_to_it_than_to_bf16_weights"
    ),
    "model.fp8_recipe": "e2e/test_options.py::test_a_run_learns_in_fp8_which_vllm_does_not_compute_in",
    "model.reference_path": "e2e/test_reference_options.py::test_another_checkpoint_as_reference_gives_a_kl_from_the_first_step_on",
    "model.offload_activations": (
        "distributed/test_activation_offload.py::test_gradients_are_the_same_bits_whether_activations_leave_or_stay"
    ),
    "multi_turn.max_turns": "unit/environments/test_dialogues.py::test_limits_end_a_response_with_its_last_call_unanswered",
    "multi_turn.tool_parser": "unit/environments/test_dialogues.py::test_calls_can_be_read_by_the_engine",
    "parallel.cp": "e2e/test_layouts.py::test_two_pipeline_stages_and_two_context_parallel_ranks",
    "parallel.ep": "distributed/test_expert_parity.py::test_every_layout_takes_the_step_of_one_process",
    "parallel.etp": "distributed/test_expert_parity.py::test_every_layout_takes_the_step_of_one_process",
    "parallel.pipeline_layers": "unit/planner/test_plan.py::test_uneven_stages_are_planned_with_their_own_layers",
    "parallel.pp": "e2e/test_layouts.py::test_two_pipeline_stages_and_two_context_parallel_ranks",
    "parallel.expert_dispatcher": "unit/policy/test_overlap_checks.py::test_each_overlap_is_one_setting_of_megatron",
    "parallel.sequence_parallel": "distributed/test_expert_parity.py::test_every_layout_takes_the_step_of_one_process",
    "parallel.timeout_minutes": "distributed/test_timeout.py::test_collectives_end_after_the_timeout_of_the_config",
    "parallel.vpp": (
        "distributed/test_overlap_grad_reduce.py::test_steps_are_those_without_overlap_and_sums_begin_before_the_backward_pass_ends"
    ),
    "rewards.workers": "unit/rewards/test_workers.py::test_workers_die_with_a_killed_trainer_even_in_the_middle_of_a_reward",
    "rollout.enable_expert_parallel": "distributed/test_plan_weight_sync.py::test_experts_that_workers_share_out_are_planned_whole",
    "rollout.in_flight": "e2e/test_async_runs.py::test_responses_under_way_live_through_a_sync",
    "rollout.quantization": "e2e/test_fp8_rollouts.py::test_training_on_rollouts_in_fp8_shows_in_its_metrics",
    "rollout.weight_sync_transport": "unit/config/test_placement.py::test_a_transport_is_chosen_for_a_reason",
    "run.async_save": "e2e/test_full_disk.py::test_a_full_disk_is_reported_and_counted_and_training_goes_on",
    "run.deterministic": "unit/engine/servers/test_launcher.py::test_a_deterministic_server_on_a_gpu_computes_requests_apart_from_each_other",
    "run.name": "e2e/test_run.py::test_the_config_that_ran_is_kept_and_loads_back",
    "run.nodes": "unit/cluster/launch/test_submit.py::test_ranks_and_servers_get_their_nodes",
    "run.resume": "e2e/test_resume.py::test_without_a_checkpoint_there_is_nothing_to_resume",
    "run.time_limit": "e2e/test_signals.py::test_a_run_saves_before_its_time_is_over",
    "run.wandb.project": "unit/records/sinks/test_wandb.py::test_metrics_have_the_runs_step_and_tables_hold_every_response",
    "run.wandb.entity": "unit/records/sinks/test_wandb.py::test_metrics_have_the_runs_step_and_tables_hold_every_response",
    "run.wandb.group": "unit/records/sinks/test_wandb.py::test_metrics_have_the_runs_step_and_tables_hold_every_response",
    "train.distributed_optimizer": "e2e/test_options.py::test_what_saves_memory_changes_no_weight",
    "train.fused_logprobs": "e2e/test_bad_input.py::test_what_this_machine_cannot_compute_is_refused_before_a_server_starts",
    "train.logprob_chunk": "unit/planner/test_plan.py::test_logits_cost_a_chunk_and_exact_kl_the_hidden_states_of_the_reference",
    "train.min_learning_rate": "e2e/test_options.py::test_the_learning_rate_follows_its_schedule",
    "train.muon_momentum": "distributed/test_muon.py::test_a_run_that_stops_and_goes_on_has_the_same_weights",
    "train.overlap": "distributed/test_overlap.py::test_updates_and_log_probs_between_them_are_those_without_overlap",
    "train.overlap_grad_reduce": (
        "distributed/test_overlap_grad_reduce.py::test_steps_are_those_without_overlap_and_sums_begin_before_the_backward_pass_ends"
    ),
    "train.share_prompts": "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
}

# Each row of "Arguments" with more than the name of a key, by its first argument.
SAYS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "coming_from_verl.md": {
        "algorithm.gamma": "distributed/test_critic.py::test_advantages_and_returns_are_those_of_the_recursion",
        "data.image_key": "unit/data/test_images.py::test_an_image_may_be_bytes_a_path_or_inside_a_message",
        "model.use_remove_padding": (
            "unit/data/test_packing.py::test_every_token_lands_in_exactly_one_micro_batch_within_the_budget",
            "unit/data/test_packing.py::test_micro_batches_are_padded_to_the_alignment_with_a_sequence_that_counts_for_nothing",
        ),
        "data.train_files": "unit/data/test_prompts.py::test_size_keeps_the_first_rows_of_the_split",
        "data.reward_fn_key": "unit/rewards/test_workers.py::test_a_function_gets_the_arguments_it_names_with_its_columns_and_args",
        "reward.reward_manager.*": "unit/rewards/test_functions.py::test_soft_overlong_takes_a_fifth_of_the_maximum_as_slope",
        "data.filter_overlong_prompts": "unit/data/test_prompts.py::test_overlong_prompts_are_counted_and_dropped_or_cut_on_the_left",
        "actor.ppo_mini_batch_size": (
            "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
            "unit/data/test_sample_slices.py::test_one_part_is_everything",
        ),
        "actor.ppo_max_token_len_per_gpu": (
            "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
            "unit/algorithms/test_exact_denominators.py::test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism",
        ),
        "actor.megatron.use_mbridge": "distributed/test_checkpoint_layouts.py::test_a_run_continues_from_a_checkpoint_of_another_layout",
        "ref.megatron.*": "distributed/test_reference_sync.py::test_a_moved_reference_is_its_mixture_and_comes_back_in_another_layout",
        "actor.clip_ratio_c": "unit/algorithms/test_other_trainers.py::test_the_dual_clip_of_verl_nemo_rl_and_openrlhf_is_delta",
        "actor.loss_agg_mode": (
            "unit/algorithms/test_losses.py::test_loss_and_gradient_equal_the_reference_systems",
            "unit/algorithms/test_reference_losses.py::test_trl",
        ),
        "actor.policy_loss.loss_mode": (
            "unit/algorithms/test_reference_losses.py::test_trl",
            "unit/algorithms/test_other_trainers.py::test_gspo_of_verl_is_sequence_token_and_that_of_openrlhf_sequence",
        ),
        "actor.calculate_entropy": "e2e/test_run.py::test_every_step_and_evaluation_is_a_line_of_finite_metrics",
        "actor.kl_loss_type": (
            "unit/algorithms/test_other_trainers.py::test_k3_of_verl_nemo_rl_and_openrlhf_is_low_var",
            "unit/algorithms/test_kl.py::test_unbiased_estimators_average_to_the_kl",
        ),
        "algorithm.kl_ctrl.*": "e2e/test_reference_options.py::test_another_checkpoint_as_reference_gives_a_kl_from_the_first_step_on",
        "algorithm.filter_groups.metric": "unit/trainer/rollout/test_groups.py::test_accuracy_decides_which_groups_are_useful_where_soft_overlong_is_a_penalty",
        "algorithm.adv_estimator": (
            "unit/algorithms/test_reference_advantages.py::test_rloo_is_the_reward_minus_the_mean_of_the_others",
            "unit/algorithms/test_reference_advantages.py::test_reinforce_plus_plus_compares_with_the_whole_batch",
        ),
        "algorithm.norm_adv_by_std_in_grpo": "unit/algorithms/test_reference_advantages.py::test_trl",
        "algorithm.rollout_correction.rollout_is": (
            "unit/algorithms/test_other_trainers.py::test_bands_of_the_correction_cut_or_drop_as_the_rows_say"
        ),
        "rollout.name": "e2e/test_run.py::test_no_process_and_no_shared_memory_outlives_the_run",
        "rollout.max_num_batched_tokens": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
        "rollout.enable_prefix_caching": (
            "unit/engine/servers/test_server_options.py::test_nothing_turns_the_prefix_cache_of_vllm_off",
            "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
            "unit/engine/test_async_client.py::test_a_sync_empties_the_prefix_cache_before_a_server_serves_again",
            "e2e/test_weight_sync.py::test_after_a_sync_that_keeps_responses_no_cached_prefix_is_of_older_weights",
        ),
        "rollout.free_cache_engine": (
            "unit/config/test_placement.py::test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them"
        ),
        "rollout.load_format": "e2e/test_weight_sync.py::test_ranks_publish_their_own_shards_and_each_block_once",
        "reward.reward_model.*": "unit/rewards/test_asked.py::test_a_reward_model_gives_the_logit_of_prompt_and_completion",
        "trainer.test_freq": "e2e/test_evaluation.py::test_sets_are_evaluated_with_their_own_sampling_before_between_and_after",
        "trainer.rollout_data_dir": "e2e/test_run.py::test_every_rollout_is_a_line_of_completions",
        "trainer.balance_batch": (
            "unit/data/test_packing.py::test_no_micro_batch_and_no_rank_is_fuller_than_another_by_more_than_the_longest_sample"
        ),
        "trainer.use_v1": "unit/trainer/rollout/test_async_rollouts.py::test_every_group_is_trained_on_once_in_order_and_none_is_too_old",
    },
    "coming_from_nemo_rl.md": {
        "policy.train_global_batch_size": (
            "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
            "unit/data/test_sample_slices.py::test_one_part_is_everything",
        ),
        "policy.train_micro_batch_size": (
            "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
            "unit/algorithms/test_exact_denominators.py::test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism",
        ),
        "grpo.adv_estimator.name": (
            "unit/algorithms/test_reference_advantages.py::test_rloo_is_the_reward_minus_the_mean_of_the_others",
            "unit/algorithms/test_reference_advantages.py::test_reinforce_plus_plus_compares_with_the_whole_batch",
            "unit/algorithms/test_reference_advantages.py::test_trl",
        ),
        "grpo.use_leave_one_out_baseline": (
            "unit/algorithms/test_reference_advantages.py::test_rloo_is_the_reward_minus_the_mean_of_the_others",
            "unit/algorithms/test_other_trainers.py::test_the_default_advantage_of_nemo_rl_also_leaves_the_response_out_of_the_deviation",
        ),
        "grpo.normalize_rewards": "unit/algorithms/test_reference_advantages.py::test_trl",
        "grpo.adv_estimator.minus_baseline": (
            "unit/algorithms/test_reference_advantages.py::test_reinforce_plus_plus_compares_with_the_whole_batch"
        ),
        "grpo.max_val_samples": "unit/data/test_prompts.py::test_size_keeps_the_first_rows_of_the_split",
        "grpo.reward_shaping.enabled": (
            "unit/rewards/test_reference_rewards.py::test_the_arguments_of_ms_swifts_length_rewards_are_args_in_the_config",
            "unit/rewards/test_functions.py::test_soft_overlong_takes_a_fifth_of_the_maximum_as_slope",
        ),
        "grpo.async_grpo.enabled": "unit/trainer/rollout/test_async_rollouts.py::test_every_group_is_trained_on_once_in_order_and_none_is_too_old",
        "grpo.async_grpo.in_flight_weight_updates": "e2e/test_async_runs.py::test_responses_under_way_live_through_a_sync",
        "grpo.val_period": "e2e/test_evaluation.py::test_sets_are_evaluated_with_their_own_sampling_before_between_and_after",
        "loss_fn.reference_policy_kl_type": "unit/algorithms/test_other_trainers.py::test_k3_of_verl_nemo_rl_and_openrlhf_is_low_var",
        "loss_fn.use_on_policy_kl_approximation": (
            "unit/algorithms/test_kl.py::test_weighted_by_the_ratio_value_and_gradient_average_to_those_of_the_kl"
        ),
        "loss_fn.token_level_loss": (
            "unit/algorithms/test_losses.py::test_loss_and_gradient_equal_the_reference_systems",
            "unit/algorithms/test_reference_losses.py::test_trl",
        ),
        "loss_fn.use_importance_sampling_correction": (
            "unit/algorithms/test_other_trainers.py::test_bands_of_the_correction_cut_or_drop_as_the_rows_say"
        ),
        "loss_fn.force_on_policy_ratio": (
            "unit/algorithms/test_losses.py::test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient"
        ),
        "policy.generation.backend": "e2e/test_run.py::test_no_process_and_no_shared_memory_outlives_the_run",
        "policy.generation.stop_token_ids": "unit/data/test_chat_templates.py::test_special_tokens_among_the_stop_strings_are_end_tokens",
        "policy.generation.vllm_cfg.kv_cache_dtype": (
            "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm"
        ),
        "policy.generation.colocated.enabled": (
            "unit/config/test_placement.py::test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them",
            "unit/config/test_placement.py::test_contradictions_are_refused_with_a_fix",
        ),
    },
    "coming_from_openrlhf.md": {
        "algo.advantage.lambd": "distributed/test_critic.py::test_advantages_and_returns_are_those_of_the_recursion",
        "reward.model_name_or_path": "unit/rewards/test_asked.py::test_a_reward_model_gives_the_logit_of_prompt_and_completion",
        "reward.remote_url": (
            "unit/rewards/test_asked.py::test_any_address_may_answer_with_rewards",
            "unit/test_coming_from.py::test_the_reward_file_of_openrlhf_calls_a_reward_function_of_openrlhf",
        ),
        "reward.overlong_buffer_len": (
            "unit/rewards/test_reference_rewards.py::test_the_arguments_of_ms_swifts_length_rewards_are_args_in_the_config",
            "unit/rewards/test_functions.py::test_soft_overlong_takes_a_fifth_of_the_maximum_as_slope",
        ),
        "data.prompt_dataset": "unit/data/test_prompts.py::test_size_keeps_the_first_rows_of_the_split",
        "data.image_key": "unit/families/test_hf_config.py::test_a_multimodal_model_is_refused_with_a_way_out",
        "train.batch_size": (
            "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
            "unit/data/test_sample_slices.py::test_one_part_is_everything",
        ),
        "train.micro_batch_size": (
            "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
            "unit/algorithms/test_exact_denominators.py::test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism",
        ),
        "vllm.enable_prefix_caching": (
            "unit/engine/servers/test_server_options.py::test_nothing_turns_the_prefix_cache_of_vllm_off",
            "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
            "unit/engine/test_async_client.py::test_a_sync_empties_the_prefix_cache_before_a_server_serves_again",
            "e2e/test_weight_sync.py::test_after_a_sync_that_keeps_responses_no_cached_prefix_is_of_older_weights",
        ),
        "vllm.sync_backend": "e2e/test_weight_sync.py::test_ranks_publish_their_own_shards_and_each_block_once",
        "train.colocate_all": (
            "unit/config/test_placement.py::test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them",
            "unit/config/test_placement.py::test_contradictions_are_refused_with_a_fix",
        ),
        "vllm.enable_sleep": "unit/config/test_placement.py::test_servers_get_the_gpus_of_their_placement_and_sleep_where_they_share_them",
        "train.colocate_actor_ref": (
            "distributed/test_reference_sync.py::test_a_moved_reference_is_its_mixture_and_comes_back_in_another_layout"
        ),
        "train.async_enable": "unit/trainer/rollout/test_async_rollouts.py::test_every_group_is_trained_on_once_in_order_and_none_is_too_old",
        "algo.advantage.estimator": (
            "unit/algorithms/test_reference_advantages.py::test_rloo_is_the_reward_minus_the_mean_of_the_others",
            "unit/algorithms/test_reference_advantages.py::test_reinforce_plus_plus_compares_with_the_whole_batch",
            "unit/algorithms/test_other_trainers.py::test_rloo_of_verl_and_openrlhf_is_ours_without_a_scale",
        ),
        "actor.policy_loss_type": (
            "unit/algorithms/test_other_trainers.py::test_gspo_of_verl_is_sequence_token_and_that_of_openrlhf_sequence"
        ),
        "actor.loss_agg_mode": (
            "unit/algorithms/test_losses.py::test_loss_and_gradient_equal_the_reference_systems",
            "unit/algorithms/test_reference_losses.py::test_trl",
        ),
        "algo.kl.init_coef": "unit/algorithms/test_kl_in_reward.py::test_advantages_are_ms_swifts",
        "algo.advantage.is_correction_level": (
            "unit/algorithms/test_other_trainers.py::test_bands_of_the_correction_cut_or_drop_as_the_rows_say"
        ),
        "logger.logging_steps": "e2e/test_run.py::test_every_step_and_evaluation_is_a_line_of_finite_metrics",
    },
    "coming_from_slime.md": {
        "global-batch-size": (
            "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
            "unit/data/test_sample_slices.py::test_one_part_is_everything",
        ),
        "rm-type": (
            "unit/rewards/test_calls.py::test_a_call_has_one_whole_group_in_order_whatever_the_function_is",
            "unit/rewards/test_asked.py::test_any_address_may_answer_with_rewards",
        ),
        "advantage-estimator": (
            "unit/algorithms/test_reference_advantages.py::test_reinforce_plus_plus_compares_with_the_whole_batch",
            "unit/algorithms/test_other_trainers.py::test_gspo_of_verl_is_sequence_token_and_that_of_openrlhf_sequence",
        ),
        "disable-grpo-std-normalization": "unit/algorithms/test_reference_advantages.py::test_trl",
        "calculate-per-token-loss": (
            "unit/algorithms/test_losses.py::test_loss_and_gradient_equal_the_reference_systems",
            "unit/algorithms/test_reference_losses.py::test_trl",
        ),
        "kl-loss-type": "unit/algorithms/test_other_trainers.py::test_k3_of_verl_nemo_rl_and_openrlhf_is_low_var",
        "use-tis": "unit/algorithms/test_other_trainers.py::test_bands_of_the_correction_cut_or_drop_as_the_rows_say",
        "use-routing-replay": "distributed/test_routing_replay.py::test_a_step_with_replay_is_the_same_in_this_layout",
        "max-tokens-per-gpu": (
            "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
            "unit/algorithms/test_exact_denominators.py::test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism",
        ),
        "sglang-kv-cache-dtype": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
    },
    "coming_from_prime_rl.md": {
        "orchestrator.batch_size": "unit/rewards/test_calls.py::test_a_call_has_one_whole_group_in_order_whatever_the_function_is",
        "orchestrator.algo.type": (
            "unit/algorithms/test_reference_advantages.py::test_trl",
            "unit/algorithms/test_custom_advantage.py::test_the_example_of_the_page_gives_advantages_to_the_best_only",
        ),
        "inference.vllm.enable_prefix_caching": (
            "unit/engine/servers/test_server_options.py::test_nothing_turns_the_prefix_cache_of_vllm_off",
            "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
            "e2e/test_weight_sync.py::test_after_a_sync_that_keeps_responses_no_cached_prefix_is_of_older_weights",
        ),
    },
    "coming_from_areal.md": {
        "actor.use_sapo_loss": "unit/algorithms/test_reference_losses.py::test_trl",
        "actor.kl_ctl": "unit/algorithms/test_kl_in_reward.py::test_advantages_are_ms_swifts",
        "actor.reward_norm.*": "unit/algorithms/test_reference_advantages.py::test_trl",
        "actor.overlong_tokens": (
            "unit/rewards/test_reference_rewards.py::test_the_arguments_of_ms_swifts_length_rewards_are_args_in_the_config",
            "unit/rewards/test_functions.py::test_soft_overlong_takes_a_fifth_of_the_maximum_as_slope",
        ),
        "actor.use_decoupled_loss": (
            "unit/algorithms/test_losses.py::test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient",
            "unit/algorithms/test_other_trainers.py::test_bands_of_the_correction_cut_or_drop_as_the_rows_say",
        ),
        "actor.rejection_sampling.*": "unit/algorithms/test_other_trainers.py::test_bands_of_the_correction_cut_or_drop_as_the_rows_say",
        "actor.mb_spec.max_tokens_per_mb": (
            "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
            "unit/algorithms/test_exact_denominators.py::test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism",
        ),
        "vllm.kv_cache_dtype": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
    },
    "coming_from_skyrl.md": {
        "trainer.policy_mini_batch_size": (
            "e2e/test_reference_options.py::test_learning_rate_and_warmup_count_optimizer_steps",
            "unit/data/test_sample_slices.py::test_one_part_is_everything",
        ),
        "trainer.micro_train_batch_size_per_gpu": (
            "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
            "unit/algorithms/test_exact_denominators.py::test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism",
        ),
        "trainer.algorithm.advantage_estimator": (
            "unit/algorithms/test_reference_advantages.py::test_rloo_is_the_reward_minus_the_mean_of_the_others",
            "unit/algorithms/test_reference_advantages.py::test_reinforce_plus_plus_compares_with_the_whole_batch",
        ),
        "trainer.algorithm.grpo_norm_by_std": "unit/algorithms/test_reference_advantages.py::test_trl",
        "trainer.algorithm.policy_loss_type": (
            "unit/algorithms/test_reference_losses.py::test_trl",
            "unit/algorithms/test_other_trainers.py::test_gspo_of_verl_is_sequence_token_and_that_of_openrlhf_sequence",
        ),
        "trainer.algorithm.loss_reduction": (
            "unit/algorithms/test_losses.py::test_loss_and_gradient_equal_the_reference_systems",
            "unit/algorithms/test_reference_losses.py::test_trl",
        ),
        "trainer.algorithm.kl_estimator_type": "unit/algorithms/test_other_trainers.py::test_k3_of_verl_nemo_rl_and_openrlhf_is_low_var",
        "generator.inference_engine.engine_init_kwargs": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
    },
    "coming_from_unsloth.md": {
        "load_in_4bit": "e2e/test_lora_run.py::test_vllm_samples_from_the_rounded_weights_that_the_trainer_computes_with",
        "use_rslora": "distributed/test_lora_peft.py::test_peft_reads_what_we_write_and_computes_the_same",
        "full_finetuning": (
            "distributed/test_lora_peft.py::test_gradients_merged_weights_and_files_are_those_of_peft",
            "distributed/test_optimizer_step.py::test_the_weights_of_four_steps_are_those_of_adamw_in_float64",
        ),
        "fast_inference": "e2e/test_run.py::test_no_process_and_no_shared_memory_outlives_the_run",
        "float8_kv_cache": "unit/engine/servers/test_server_options.py::test_a_key_of_the_rollout_is_an_argument_of_vllm",
        "vllm_sampling_params": "unit/engine/servers/test_server_options.py::test_a_step_samples_as_its_keys_say",
        "unsloth_num_chunks": (
            "distributed/test_large_groups.py::test_a_group_may_exceed_a_micro_batch_and_the_share_of_a_rank",
            "unit/algorithms/test_exact_denominators.py::test_a_tokens_part_of_the_gradient_is_bitwise_independent_of_packing_and_data_parallelism",
        ),
    },
}

# Each row of "What differs on purpose", by its first cell.
DIFFERS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "coming_from_verl.md": {
        "dual clip": "unit/algorithms/test_other_trainers.py::test_the_dual_clip_of_verl_nemo_rl_and_openrlhf_is_delta",
        "k3": "unit/algorithms/test_other_trainers.py::test_k3_of_verl_nemo_rl_and_openrlhf_is_low_var",
        "rloo": "unit/algorithms/test_other_trainers.py::test_rloo_of_verl_and_openrlhf_is_ours_without_a_scale",
        "cispo": (
            "unit/algorithms/test_other_trainers.py::test_cispo_of_verl_and_nemo_rl_is_ours_where_the_ratio_is_above_their_lower_bound"
        ),
        "group std": (
            "unit/algorithms/test_other_trainers.py::test_group_advantages_of_verl_and_openrlhf_differ_by_what_is_added_to_the_deviation"
        ),
    },
    "coming_from_nemo_rl.md": {
        "default advantage": (
            "unit/algorithms/test_other_trainers.py::test_the_default_advantage_of_nemo_rl_also_leaves_the_response_out_of_the_deviation"
        ),
        "`overlong_filtering` without a token-level loss": (
            "unit/algorithms/test_truncated_completions.py::test_a_cut_response_divides_by_sequence_but_not_by_token"
        ),
        "k3": "unit/algorithms/test_other_trainers.py::test_k3_of_verl_nemo_rl_and_openrlhf_is_low_var",
        "gradient of the KL": "unit/algorithms/test_kl.py::test_weighted_by_the_ratio_value_and_gradient_average_to_those_of_the_kl",
        "cispo": (
            "unit/algorithms/test_other_trainers.py::test_cispo_of_verl_and_nemo_rl_is_ours_where_the_ratio_is_above_their_lower_bound"
        ),
        "a KL in the reward": "unit/algorithms/test_kl_in_reward.py::test_advantages_are_ms_swifts",
    },
    "coming_from_openrlhf.md": {
        "rewards": "unit/rewards/test_workers.py::test_order_is_kept_and_the_weighted_sum_skips_functions_that_cannot_score",
        "`reinforce`, `reinforce_baseline`": (
            "unit/algorithms/test_other_trainers.py::test_reinforce_of_openrlhf_weighs_responses_by_their_tokens"
        ),
        "group std": (
            "unit/algorithms/test_other_trainers.py::test_group_advantages_of_verl_and_openrlhf_differ_by_what_is_added_to_the_deviation"
        ),
        "k1, k2, k3": "unit/algorithms/test_other_trainers.py::test_k3_of_verl_nemo_rl_and_openrlhf_is_low_var",
        "train-inference mismatch with `gspo`": "unit/algorithms/test_options.py::test_every_correction_is_another",
    },
    "coming_from_slime.md": {
        "group std": (
            "unit/algorithms/test_other_trainers.py::test_group_advantages_of_verl_and_openrlhf_differ_by_what_is_added_to_the_deviation"
        ),
        "cispo": (
            "unit/algorithms/test_other_trainers.py::test_cispo_of_verl_and_nemo_rl_is_ours_where_the_ratio_is_above_their_lower_bound"
        ),
    },
    "coming_from_prime_rl.md": {
        "group std": "unit/algorithms/test_reference_advantages.py::test_trl",
        "train-inference mismatch": (
            "unit/algorithms/test_other_trainers.py::test_bands_of_the_correction_cut_or_drop_as_the_rows_say"
        ),
    },
    "coming_from_areal.md": {
        "group std": (
            "unit/algorithms/test_other_trainers.py::test_group_advantages_of_verl_and_openrlhf_differ_by_what_is_added_to_the_deviation"
        ),
        "a KL in the reward": "unit/algorithms/test_kl_in_reward.py::test_advantages_are_ms_swifts",
    },
    "coming_from_skyrl.md": {
        "group std": (
            "unit/algorithms/test_other_trainers.py::test_group_advantages_of_verl_and_openrlhf_differ_by_what_is_added_to_the_deviation"
        ),
        "k3": "unit/algorithms/test_other_trainers.py::test_k3_of_verl_nemo_rl_and_openrlhf_is_low_var",
    },
    "coming_from_unsloth.md": {
        "micro-batches": "unit/algorithms/test_reference_losses.py::test_trl",
        "defaults": "unit/config/test_presets.py::test_a_preset_of_a_trainer_holds_its_defaults",
    },
}
