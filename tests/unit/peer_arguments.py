"""The arguments of other trainers that docs/coming_from_*.md list, by the version each page names.

`name.*` stands for all arguments below `name` where one row covers them.
"""

# The keys of verl 0.9.1: verl/trainer/config/_generated_ppo_megatron_trainer.yaml, without `actor_rollout_ref.`.
VERL = """actor.optim.lr actor.optim.lr_warmup_steps_ratio actor.optim.total_training_steps actor.optim.weight_decay
    actor.optim.lr_warmup_steps actor.optim.betas actor.optim.clip_grad actor.optim.optimizer actor.optim.lr_warmup_init
    actor.optim.lr_decay_steps actor.optim.lr_decay_style actor.optim.min_lr actor.optim.weight_decay_incr_style
    actor.optim.lr_wsd_decay_style actor.optim.lr_wsd_decay_steps actor.optim.use_checkpoint_opt_param_scheduler
    actor.optim.use_precision_aware_optimizer actor.optim.main_grads_dtype actor.optim.exp_avg_dtype actor.optim.exp_avg_sq_dtype
    actor.optim.use_layer_wise_distributed_optimizer actor.optim.muon_momentum actor.optim.muon_nesterov actor.optim.muon_split_qkv
    actor.optim.muon_scale_mode actor.optim.muon_coefficient_type actor.optim.muon_num_ns_steps actor.optim.muon_tp_mode
    actor.optim.muon_fp32_matmul_prec actor.optim.muon_extra_scale_factor actor.optim.muon_scalar_optimizer
    actor.optim.muon_match_adamw_update_rms actor.optim.override_optimizer_config actor.megatron.param_offload
    actor.megatron.optimizer_offload actor.megatron.tensor_model_parallel_size actor.megatron.expert_model_parallel_size
    actor.megatron.expert_tensor_parallel_size actor.megatron.pipeline_model_parallel_size
    actor.megatron.virtual_pipeline_model_parallel_size actor.megatron.context_parallel_size actor.megatron.sequence_parallel
    actor.megatron.use_distributed_optimizer actor.megatron.use_dist_checkpointing actor.megatron.dist_checkpointing_path
    actor.megatron.dynamic_context_parallel actor.megatron.max_seqlen_per_dp_cp_rank actor.megatron.dist_checkpointing_prefix
    actor.megatron.dist_ckpt_optim_fully_reshardable actor.megatron.distrib_optim_fully_reshardable_mem_efficient
    actor.megatron.entropy_from_logits_with_chunking actor.megatron.entropy_from_logits_chunk_size actor.megatron.seed
    actor.megatron.override_ddp_config actor.megatron.override_transformer_config.* actor.megatron.override_mcore_model_config
    actor.megatron.use_mbridge actor.megatron.vanilla_mbridge actor.megatron.use_remove_padding
    actor.megatron.pad_bshd_to_minibatch_max actor.megatron.pad_to_length actor.megatron.pad_to_length_bucket
    actor.megatron.use_megatron_fsdp actor.megatron.forward_only actor.megatron.dtype actor.megatron.router_replay.*
    actor.megatron.qat.* actor.rollout_n actor.strategy actor.ppo_mini_batch_size actor.ppo_micro_batch_size
    actor.ppo_micro_batch_size_per_gpu actor.use_dynamic_bsz actor.ppo_max_token_len_per_gpu actor.clip_ratio actor.clip_ratio_low
    actor.clip_ratio_high actor.tau_pos actor.tau_neg actor.freeze_vision_tower actor.policy_loss.loss_mode
    actor.policy_loss.clip_cov_ratio actor.policy_loss.clip_cov_lb actor.policy_loss.clip_cov_ub actor.policy_loss.kl_cov_ratio
    actor.policy_loss.ppo_kl_coef actor.policy_loss.dro_beta actor.clip_ratio_c actor.loss_agg_mode actor.loss_scale_factor
    actor.entropy_coeff actor.calculate_entropy actor.calculate_sum_pi_squared actor.use_kl_loss actor.use_prefix_grouper
    actor.use_torch_compile actor.kl_loss_coef actor.kl_loss_type actor.ppo_epochs actor.shuffle actor.data_loader_seed
    actor.checkpoint.save_contents actor.checkpoint.load_contents actor.checkpoint.async_save actor.checkpoint.strict
    actor.checkpoint.mbridge_config actor.use_fused_kernels actor.profiler.* actor.qat.* actor.entropy_from_logits_with_chunking
    actor.entropy_from_logits_chunk_size ref.rollout_n ref.strategy ref.use_torch_compile ref.log_prob_micro_batch_size
    ref.log_prob_micro_batch_size_per_gpu ref.log_prob_use_dynamic_bsz ref.log_prob_max_token_len_per_gpu ref.profiler.*
    ref.megatron.* ref.entropy_from_logits_with_chunking ref.entropy_from_logits_chunk_size rollout.name rollout.mode rollout.nnodes
    rollout.n_gpus_per_node rollout.temperature rollout.top_k rollout.top_p rollout.full_determinism rollout.seed
    rollout.prompt_length rollout.response_length rollout.dtype rollout.gpu_memory_utilization rollout.ignore_eos
    rollout.enforce_eager rollout.cudagraph_capture_sizes rollout.free_cache_engine rollout.tensor_model_parallel_size
    rollout.data_parallel_size rollout.expert_parallel_size rollout.pipeline_model_parallel_size rollout.max_num_batched_tokens
    rollout.max_model_len rollout.max_num_seqs rollout.enable_chunked_prefill rollout.enable_prefix_caching rollout.logprobs_mode
    rollout.scheduling_policy rollout.load_format rollout.layered_summon rollout.log_prob_micro_batch_size
    rollout.log_prob_micro_batch_size_per_gpu rollout.log_prob_use_dynamic_bsz rollout.log_prob_max_token_len_per_gpu
    rollout.disable_log_stats rollout.do_sample rollout.n rollout.over_sample_rate rollout.multi_stage_wake_up
    rollout.engine_kwargs.* rollout.val_kwargs.top_k rollout.val_kwargs.top_p rollout.val_kwargs.temperature rollout.val_kwargs.n
    rollout.val_kwargs.do_sample rollout.router_config_path rollout.multi_turn.enable rollout.multi_turn.max_assistant_turns
    rollout.multi_turn.tool_config_path rollout.multi_turn.function_tool_path rollout.multi_turn.max_user_turns
    rollout.multi_turn.max_parallel_calls rollout.multi_turn.max_tool_response_length rollout.multi_turn.tool_response_truncate_side
    rollout.multi_turn.use_inference_chat_template rollout.multi_turn.tokenization_sanity_check_mode rollout.multi_turn.format
    rollout.multi_turn.num_repeat_rollouts rollout.calculate_log_probs rollout.agent.* rollout.checkpoint_engine.* rollout.trace.*
    rollout.skip_tokenizer_init rollout.enable_rollout_routing_replay rollout.moe_load_balance_metrics_interval rollout.profiler.*
    rollout.prometheus.* rollout.quantization rollout.quantization_config_file rollout.mtp rollout.qat rollout.disaggregation.*
    model.path model.hf_config_path model.tokenizer_path model.use_shm model.trust_remote_code model.custom_chat_template
    model.external_lib model.override_config model.enable_gradient_checkpointing model.enable_activation_offload
    model.use_remove_padding model.lora_rank model.lora_alpha model.target_modules model.exclude_modules model.lora_adapter_path
    model.use_liger model.use_fused_kernels model.fused_kernel_options.* model.tiled_mlp.* model.mtp.* model.lora.type
    model.lora.merge model.lora.rank model.lora.alpha model.lora.dropout model.lora.target_modules model.lora.exclude_modules
    model.lora.dropout_position model.lora.lora_A_init_method model.lora.lora_B_init_method model.lora.a2a_experimental
    model.lora.dtype model.lora.adapter_path model.lora.freeze_vision_model model.lora.freeze_vision_projection
    model.lora.freeze_language_model hybrid_engine nccl_timeout data.tokenizer data.use_shm data.train_files data.val_files
    data.train_max_samples data.val_max_samples data.prompt_key data.reward_fn_key data.max_prompt_length data.max_response_length
    data.train_batch_size data.gen_batch_size data.val_batch_size data.tool_config_path data.function_tool_path
    data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.shuffle data.seed data.dataloader_num_workers
    data.image_patch_size data.validation_shuffle data.filter_overlong_prompts data.filter_overlong_prompts_workers data.truncation
    data.image_key data.video_key data.audio_key data.trust_remote_code data.custom_cls.* data.return_multi_modal_inputs
    data.apply_chat_template_kwargs data.mm_processor_kwargs critic.* custom_reward_function.* reward_model.* sandbox_fusion.*
    reward.num_workers reward.custom_reward_function.path reward.custom_reward_function.name reward.reward_manager.*
    reward.reward_model.* reward.sandbox_fusion.* algorithm.rollout_correction.rollout_is
    algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_correction.rollout_rs
    algorithm.rollout_correction.rollout_rs_threshold algorithm.rollout_correction.bypass_mode
    algorithm.rollout_correction.loss_type algorithm.rollout_correction.rollout_is_batch_normalize algorithm.gamma algorithm.lam
    algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo algorithm.filter_groups.enable algorithm.filter_groups.metric
    algorithm.filter_groups.max_num_gen_batches algorithm.filter_groups.max_inflight_gen_batches algorithm.use_kl_in_reward
    algorithm.kl_penalty algorithm.kl_ctrl.* algorithm.use_pf_ppo algorithm.pf_ppo.* distillation.* transfer_queue.*
    trainer.balance_batch trainer.total_epochs trainer.total_training_steps trainer.project_name trainer.experiment_name
    trainer.logger trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir trainer.nnodes
    trainer.n_gpus_per_node trainer.save_freq trainer.esi_redundant_time trainer.resume_mode trainer.resume_from_path
    trainer.checkpoint_callback_class trainer.val_before_train trainer.val_only trainer.test_freq trainer.critic_warmup
    trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.default_local_dir trainer.max_actor_ckpt_to_keep
    trainer.max_critic_ckpt_to_keep trainer.ray_wait_register_center_timeout trainer.device trainer.use_v1 trainer.v1.*
    global_profiler.* skip.* ray_kwargs.*""".split()

# The keys of NeMo-RL 0.7.0: examples/configs/grpo_math_1B.yaml.
NEMO_RL = """grpo.num_prompts_per_step grpo.num_generations_per_prompt grpo.max_rollout_turns grpo.max_num_epochs grpo.max_num_steps
    grpo.normalize_rewards grpo.use_leave_one_out_baseline grpo.val_period grpo.val_at_start grpo.val_at_end grpo.overlong_filtering
    grpo.advantage_clip_low grpo.advantage_clip_high grpo.max_val_samples grpo.val_batch_size grpo.seed grpo.use_dynamic_sampling
    grpo.dynamic_sampling_max_gen_batches grpo.batch_multiplier grpo.reward_shaping.enabled
    grpo.reward_shaping.overlong_buffer_length grpo.reward_shaping.overlong_buffer_penalty grpo.reward_shaping.max_response_length
    grpo.reward_shaping.stop_properly_penalty_coef grpo.adv_estimator.name grpo.adv_estimator.normalize_rewards
    grpo.adv_estimator.use_leave_one_out_baseline grpo.adv_estimator.minus_baseline grpo.reward_scaling.*
    grpo.seq_logprob_error_threshold grpo.invalid_tool_call_advantage grpo.malformed_thinking_advantage grpo.async_grpo.enabled
    grpo.async_grpo.max_trajectory_age_steps grpo.async_grpo.in_flight_weight_updates
    grpo.async_grpo.recompute_kv_cache_after_weight_updates loss_fn.reference_policy_kl_penalty loss_fn.reference_policy_kl_type
    loss_fn.kl_input_clamp_value loss_fn.kl_output_clamp_value loss_fn.ratio_clip_min loss_fn.ratio_clip_max loss_fn.ratio_clip_c
    loss_fn.use_on_policy_kl_approximation loss_fn.use_importance_sampling_correction loss_fn.truncated_importance_sampling_type
    loss_fn.truncated_importance_sampling_ratio loss_fn.truncated_importance_sampling_ratio_min
    loss_fn.sequence_level_importance_ratios loss_fn.token_level_loss loss_fn.force_on_policy_ratio loss_fn.use_kl_in_reward
    loss_fn.use_cispo loss_fn.disable_ppo_ratio loss_fn.positive_example_nll_weight checkpointing.enabled
    checkpointing.checkpoint_dir checkpointing.metric_name checkpointing.higher_is_better checkpointing.keep_top_k
    checkpointing.save_period checkpointing.checkpoint_must_save_by checkpointing.model_save_format checkpointing.save_consolidated
    checkpointing.save_optimizer policy.model_name policy.tokenizer.name policy.tokenizer.chat_template_kwargs
    policy.hf_config_overrides policy.train_global_batch_size policy.train_micro_batch_size policy.generation_batch_size
    policy.logprob_batch_size policy.max_total_sequence_length policy.precision policy.logprob_chunk_size
    policy.offload_optimizer_for_logprob policy.dtensor_cfg.* policy.megatron_cfg.enabled
    policy.megatron_cfg.force_reconvert_from_hf policy.megatron_cfg.empty_unused_memory_level
    policy.megatron_cfg.activation_checkpointing policy.megatron_cfg.recompute_granularity policy.megatron_cfg.recompute_modules
    policy.megatron_cfg.tensor_model_parallel_size policy.megatron_cfg.expert_tensor_parallel_size
    policy.megatron_cfg.expert_model_parallel_size policy.megatron_cfg.pipeline_model_parallel_size
    policy.megatron_cfg.num_layers_in_first_pipeline_stage policy.megatron_cfg.num_layers_in_last_pipeline_stage
    policy.megatron_cfg.context_parallel_size policy.megatron_cfg.pipeline_dtype policy.megatron_cfg.sequence_parallel
    policy.megatron_cfg.freeze_moe_router policy.megatron_cfg.moe_router_dtype policy.megatron_cfg.moe_router_load_balancing_type
    policy.megatron_cfg.moe_router_bias_update_rate policy.megatron_cfg.moe_permute_fusion policy.megatron_cfg.apply_rope_fusion
    policy.megatron_cfg.bias_activation_fusion policy.megatron_cfg.defer_fp32_logits policy.megatron_cfg.moe_per_layer_logging
    policy.megatron_cfg.moe_enable_deepep policy.megatron_cfg.moe_token_dispatcher_type
    policy.megatron_cfg.moe_shared_expert_overlap policy.megatron_cfg.mtp_num_layers policy.megatron_cfg.mtp_loss_scaling_factor
    policy.megatron_cfg.mtp_use_repeated_layer policy.megatron_cfg.mtp_detach_heads policy.megatron_cfg.gradient_accumulation_fusion
    policy.megatron_cfg.use_fused_weighted_squared_relu policy.megatron_cfg.peft.enabled policy.megatron_cfg.peft.target_modules
    policy.megatron_cfg.peft.exclude_modules policy.megatron_cfg.peft.dim policy.megatron_cfg.peft.alpha
    policy.megatron_cfg.peft.dropout policy.megatron_cfg.peft.dropout_position policy.megatron_cfg.peft.lora_A_init_method
    policy.megatron_cfg.peft.lora_B_init_method policy.megatron_cfg.peft.a2a_experimental policy.megatron_cfg.peft.lora_dtype
    policy.megatron_cfg.optimizer.optimizer policy.megatron_cfg.optimizer.lr policy.megatron_cfg.optimizer.min_lr
    policy.megatron_cfg.optimizer.weight_decay policy.megatron_cfg.optimizer.bf16 policy.megatron_cfg.optimizer.fp16
    policy.megatron_cfg.optimizer.params_dtype policy.megatron_cfg.optimizer.adam_beta1 policy.megatron_cfg.optimizer.adam_beta2
    policy.megatron_cfg.optimizer.adam_eps policy.megatron_cfg.optimizer.sgd_momentum
    policy.megatron_cfg.optimizer.use_distributed_optimizer policy.megatron_cfg.optimizer.use_precision_aware_optimizer
    policy.megatron_cfg.optimizer.clip_grad policy.megatron_cfg.optimizer.optimizer_cpu_offload
    policy.megatron_cfg.optimizer.optimizer_offload_fraction policy.megatron_cfg.scheduler.start_weight_decay
    policy.megatron_cfg.scheduler.end_weight_decay policy.megatron_cfg.scheduler.weight_decay_incr_style
    policy.megatron_cfg.scheduler.lr_decay_style policy.megatron_cfg.scheduler.lr_decay_iters
    policy.megatron_cfg.scheduler.lr_warmup_iters policy.megatron_cfg.scheduler.lr_warmup_init
    policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32
    policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce
    policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather
    policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp
    policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy policy.megatron_cfg.fp8_cfg.enabled
    policy.megatron_cfg.fp8_cfg.fp8 policy.megatron_cfg.fp8_cfg.fp8_recipe policy.megatron_cfg.fp8_cfg.fp8_param
    policy.megatron_cfg.env_vars policy.draft.* policy.dynamic_batching.* policy.sequence_packing.*
    policy.make_sequence_length_divisible_by policy.max_grad_norm policy.optimizer.* policy.scheduler
    policy.generation.port_range_low policy.generation.port_range_high policy.generation.backend policy.generation.max_new_tokens
    policy.generation.temperature policy.generation.top_p policy.generation.top_k policy.generation.stop_token_ids
    policy.generation.stop_strings policy.generation.mcore_generation_config.* policy.generation.vllm_cfg.async_engine
    policy.generation.vllm_cfg.precision policy.generation.vllm_cfg.kv_cache_dtype policy.generation.vllm_cfg.tensor_parallel_size
    policy.generation.vllm_cfg.pipeline_parallel_size policy.generation.vllm_cfg.expert_parallel_size
    policy.generation.vllm_cfg.gpu_memory_utilization policy.generation.vllm_cfg.max_model_len
    policy.generation.vllm_cfg.enforce_eager policy.generation.vllm_cfg.use_tqdm policy.generation.vllm_cfg.use_deep_gemm
    policy.generation.vllm_cfg.num_last_layers_in_bf16 policy.generation.vllm_cfg.num_first_layers_in_bf16
    policy.generation.vllm_cfg.enable_vllm_metrics_logger policy.generation.vllm_cfg.vllm_metrics_logger_interval
    policy.generation.vllm_kwargs policy.generation.colocated.enabled policy.generation.colocated.resources.gpus_per_node
    policy.generation.colocated.resources.num_nodes data.max_input_seq_length data.shuffle data.num_workers
    data.use_multiple_dataloader data.train.dataset_name data.train.split_validation_size data.train.seed data.validation
    data.default.prompt_file data.default.system_prompt_file data.default.processor data.default.env_name env.math.num_workers
    env.math.math_verify_impl logger.log_dir logger.num_val_samples_to_print logger.wandb_enabled logger.tensorboard_enabled
    logger.mlflow_enabled logger.swanlab_enabled logger.monitor_gpus logger.wandb.* logger.swanlab.* logger.tensorboard
    logger.mlflow.* logger.gpu_monitoring.* cluster.gpus_per_node cluster.num_nodes cluster.master_port_range_low
    cluster.master_port_range_high cluster.segment_size data_plane.* on_policy_distillation""".split()

# The arguments of OpenRLHF 0.11.2: openrlhf/cli/train_ppo_ray.py.
OPENRLHF = """ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node train.colocate_actor_ref actor.num_nodes
    actor.num_gpus_per_node critic.* train.colocate_critic_reward train.colocate_all vllm.num_engines vllm.tensor_parallel_size
    vllm.sync_backend vllm.sync_with_ray vllm.enable_prefix_caching vllm.enforce_eager vllm.enable_sleep
    vllm.gpu_memory_utilization algo.advantage.is_correction_level algo.advantage.is_correction_mode
    algo.advantage.is_correction_gating algo.advantage.is_correction_threshold train.async_enable train.async_queue_size
    train.partial_rollout_enable eval.steps ckpt.save_steps logger.logging_steps ckpt.path ckpt.save_hf ckpt.disable_ds
    ckpt.max_num ckpt.max_mem ckpt.load_enable ckpt.best_metric_key ds.use_universal_ckpt local_rank ds.zero_stage
    actor.gradient_checkpointing_enable ds.deepcompile ds.param_dtype train.enable_ema train.ema_beta ds.zpg ds.adam_offload
    ds.attn_implementation ds.experts_implementation ds.use_liger_kernel ds.grad_accum_dtype ds.overlap_comm
    actor.gradient_checkpointing_reentrant data.disable_fast_tokenizer data.dataloader_num_workers ds.enable_sleep
    ds.tensor_parallel_size ds.packing_samples train.dynamic_batch_enable rollout.max_tokens_per_gpu train.max_tokens_per_gpu
    ds.load_in_4bit ds.lora.rank ds.lora.alpha ds.lora.target_modules ds.lora.dropout ckpt.output_dir train.num_episodes
    rollout.batch_size rollout.vllm_generate_batch_size rollout.micro_batch_size train.max_epochs data.max_len
    rollout.max_new_tokens data.max_samples actor.eps_clip actor.eps_clip_low_high actor.dual_clip algo.advantage.lambd
    algo.advantage.gamma train.micro_batch_size train.batch_size reward.normalize_enable rollout.top_p rollout.temperature
    train.seed train.full_determinism_enable rollout.n_samples_per_prompt algo.kl.target algo.kl.horizon algo.kl.init_coef
    actor.policy_loss_type actor.loss_agg_mode algo.kl.estimator algo.kl.unbiased_gradient actor.aux_loss_coef
    actor.entropy_coef reward.clip_range actor.optim actor.muon.lr actor.muon.momentum actor.muon.ns_steps actor.muon.nesterov
    actor.muon.no_nesterov actor.adam.lr actor.adam.betas actor.adam.eps actor.adam.weight_decay actor.lr_scheduler
    actor.lr_warmup_ratio actor.min_lr_ratio actor.max_norm algo.advantage.estimator algo.kl.use_loss algo.advantage.no_std_norm
    reward.overlong_buffer_len reward.overlong_penalty_factor reward.stop_properly_penalty_coef ds.ring_attn_size
    ds.ring_attn_head_stride actor.model_name_or_path reward.model_name_or_path reward.remote_url ds.value_head_prefix
    ref.offload reward.offload train.agent_func_path data.prompt_dataset data.prompt_probs data.prompt_split eval.dataset
    eval.split eval.temperature eval.n_samples_per_prompt data.input_key data.label_key data.input_template
    data.apply_chat_template logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project logger.wandb.run_name
    algo.dynamic_filtering_enable algo.dynamic_filtering_range data.image_key data.max_images_per_prompt
    actor.freeze_visual_encoder logger.tensorboard_dir use_ms""".split()

# The arguments of Unsloth 2026.10.9: FastLanguageModel.from_pretrained and get_peft_model, and its fields of
# GRPOConfig.
UNSLOTH = """model_name max_seq_length dtype load_in_4bit load_in_8bit load_in_16bit full_finetuning token device_map
    device_map_planner_kwargs rope_scaling fix_tokenizer trust_remote_code use_gradient_checkpointing resize_model_vocab revision
    use_exact_model_name offload_embedding float32_mixed_precision fast_inference gpu_memory_utilization float8_kv_cache
    random_state max_lora_rank disable_log_stats qat_scheme load_in_fp8 unsloth_tiled_mlp text_only on_model_resolved r
    target_modules lora_alpha lora_dropout bias layers_to_transform layers_pattern finetune_last_n_layers use_rslora modules_to_save
    init_lora_weights loftq_config temporary_location target_parameters ensure_weight_tying offload_layers checkpoint_skip_layers
    vllm_sampling_params unsloth_num_chunks unsloth_logit_chunk_multiplier unsloth_grpo_mini_batch""".split()

# The fields that TRL 1.16.0's GRPOConfig adds to transformers' TrainingArguments.
TRL = """model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations num_generations_eval
    max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation
    temperature top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm
    vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
    vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos
    vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
    scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
    max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl
    log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
    use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
    vllm_importance_sampling_cap""".split()

# The arguments on ms-swift's GRPO page of April 2025 (commit 526f8a409), then those of its recipe for DAPO.
SWIFT = """num_generations max_completion_length ds3_gather_for_generation reward_funcs reward_weights reward_model reward_model_plugin
    log_completions use_vllm vllm_device vllm_gpu_memory_utilization vllm_max_model_len vllm_max_num_seqs vllm_enforce_eager
    vllm_limit_mm_per_prompt vllm_enable_prefix_caching vllm_server_host vllm_server_port vllm_server_timeout num_infer_workers
    num_iterations epsilon epsilon_high async_generate sleep_level move_model_batches offload_optimizer offload_model
    gc_collect_after_offload multi_turn_func mini_batch_size dynamic_sample max_resample_times overlong_filter
    tensor_parallel_size temperature top_k top_p repetition_penalty system external_plugins beta cosine_min_len_value_wrong
    cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len_value_correct cosine_max_len repetition_n_grams
    repetition_max_penalty soft_max_length soft_cache_length train_type lora_rank lora_alpha target_modules torch_dtype max_length
    truncation_strategy warmup_ratio eval_steps save_steps save_total_limit logging_steps report_to lmdeploy_device""".split()

OF_PAGE = {
    "coming_from_trl.md": TRL,
    "coming_from_ms_swift.md": SWIFT,
    "coming_from_verl.md": VERL,
    "coming_from_nemo_rl.md": NEMO_RL,
    "coming_from_openrlhf.md": OPENRLHF,
    "coming_from_unsloth.md": UNSLOTH,
}
# The pages of TRL and ms-swift also list arguments of transformers and of other pages; the others list these arguments
# only.
WHOLE = OF_PAGE.keys() - {"coming_from_trl.md", "coming_from_ms_swift.md"}
