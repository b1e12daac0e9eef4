"""Advice of the error codes of meshes, plans, batches, steps and pipelines, and its tests."""

from tests.support.proofs import ONE, VALUE

STEPS: dict[str, dict[str, str]] = {
    # Sizes and the mesh
    "LP101": {"a whole number of 1 or more, or 'auto'": VALUE},
    "LP102": {"other devices, or sizes whose product they are": VALUE},
    "LP103": {"a size that divides": VALUE},
    "LP104": {
        "read the mesh in setup or later": (
            "cures_of_runs::the_number_of_replicas_for_a_learning_rate"
        )
    },
    "LP105": {"another number of samples or nodes": VALUE, "Hybrid3DStrategy with sizes": VALUE},
    "LP106": {
        "search, and give the sizes": (
            "contract/test_search_command.py::test_fit_runs_the_layout_that_search_wrote"
        )
    },
    "LP107": {"that pipeline size": VALUE, "leave stage_blocks out": ONE},
    "LP108": {
        "number the ranks host by host": (
            "distributed/hosts/test_placement.py::"
            "test_ranks_dealt_to_the_hosts_in_turn_are_numbered_host_by_host"
        ),
        "tensor_parallel_across_hosts=True": (
            "distributed/hosts/test_placement.py::"
            "test_tensor_parallel_group_across_hosts_is_refused_unless_asked_for"
        ),
    },
    # The plan and the model
    "LP201": {
        "parallel_plan() on the LightningModule": "mixers::attention_alone",
        "plan= of the strategy": "mixers::a_plan_that_the_strategy_gets",
    },
    "LP202": {"a field that exists, with such a value": VALUE},
    "LP203": {
        "a name that the model has": VALUE,
        "make the second name a property": "cures_of_steps::blocks_with_a_second_name",
    },
    "LP204": {
        "a size that the message lists": VALUE,
        "a style for each module": "cures_of_shards::weights_that_the_module_around_reads",
    },
    "LP205": {
        "call F.scaled_dot_product_attention in the blocks": "mixers::attention_alone",
        "let the forward take the positions": "mixers::positions_that_the_forward_takes",
        "call the module, not its forward": "mixers::positions_that_the_forward_takes",
    },
    "LP206": {"name such modules": "own_experts::experts_with_a_shared_layer_beside"},
    "LP207": {
        "torch.renorm in on_train_batch_end": """
            cures_of_shards::an_embedding_with_a_bound_on_shards
            cures_of_shards::an_embedding_with_a_bound_on_each_rank""",
        "'sequence_gather_output'": "cures_of_shards::logits_from_the_embedding",
        "view(b, t, heads, -1), and `divided`": "cures_of_shards::heads_of_which_a_rank_has_a_part",
        "'split_sequence'": "cures_of_shards::positions_of_a_part_of_the_tokens",
        "'vocab_head'": "cures_of_shards::logits_of_a_part_of_the_tokens",
        "'replicated' behind a pool": "cures_of_shards::a_head_behind_a_pool",
    },
    "LP208": {
        "call the block": "cures_of_shards::blocks_called_by_the_name_of_their_forward",
        "sequence_parallel=False and 'replicated'": (
            "cures_of_shards::weights_that_the_module_around_reads"
        ),
        "full_parameter(name) in a hook": "gradients::norms_from_the_strategy",
        "full_tensor() in a hook": "hooks::arrays_of_whole_tensors_before_the_update",
    },
    "LP209": {
        "initialize it where it is made": "cures_of_runs::a_parameter_without_values",
        "make it inside": """
            cures_of_runs::a_parameter_on_meta
            cures_of_runs::a_parameter_that_is_made_on_meta""",
    },
    "LP210": {
        "compute it from shapes": "cures_of_runs::a_number_of_a_weight_that_is_made",
        "in the first step": "cures_of_runs::a_number_of_a_weight_in_the_first_step",
        "a buffer from values of its own": "cures_of_runs::a_buffer_that_copies_a_weight",
    },
    "LP211": {
        "size 1": ONE,
        "declare a plan": "inferred_plans::plan_that_declares_the_batch_only",
    },
    "LP212": {
        "name a module that gives the tensor": "cures::outputs_that_hooks_collect",
        "the index of a tensor": (
            "contract/test_bad_huggingface.py::test_what_is_captured_has_to_be_a_tensor"
        ),
    },
    # Batches, losses and the step
    "LP301": {
        "batch_dims": """
            batches::a_batch_dim_that_is_declared
            batches::kinds_of_positions_whose_batch_dim_is_declared""",
        "whole": "batches::class_weights_declared batches::table_declared_whole",
        "num_microbatches=1": "batches::packed_sequences",
        "loss_weight='samples' or 'sum'": """
            uncommon_loaders::test_unequal_loaders_are_equal_where_it_is_declared_how_losses_add_up
            """,
    },
    "LP302": {
        "name no labels": "batches::labels_that_some_batches_lack_and_no_one_names",
        "entries as the batch has them": "batches::named_tuple_by_name",
        "give every batch the entry": "cures_in_data::weights_that_some_batches_lack",
    },
    "LP303": {
        "for any number of samples": "cures_of_steps::a_step_for_one_number_of_samples",
        "batch_dims": "batches::a_batch_dim_that_is_declared",
        "whole and loss_weight": """
            batches::graphs_that_are_declared
            batches::unequal_graphs_with_the_weight_that_is_asked_for""",
        "num_microbatches=1": "batches::graphs_whose_nodes_name_their_graph",
        "fewer micro-batches, or a larger batch": VALUE,
    },
    "LP304": {
        "cut to one length in the collate function": (
            "mixers::labels_cut_to_one_length_in_the_collate_function"
        )
    },
    "LP305": {
        "dropout of attention 0": "mixers::attention_by_the_function_of_torch",
        "is_causal=True": "mixers::attention_that_is_causal_by_an_argument",
        "lightning_par.attention": "mixers::attention_that_is_causal_by_our_function",
        "one document in a row": "cures_in_data::one_document_in_a_row",
    },
    "LP306": {
        "call F.scaled_dot_product_attention": "mixers::attention_by_the_function_of_torch",
        "context_parallel_size=1": "mixers::conv1d",
    },
    "LP307": {"method='ring', or a size that divides": VALUE},
    "LP308": {"a kernel that the message names": VALUE},
    "LP309": {
        "whole": "batches::table_declared_whole",
        "loss_weight": "batches::graphs_that_are_declared",
        "gather samples that are compared": "losses::in_batch_negatives_gathered",
        "one micro-batch": """
            losses::two_kinds_of_labels losses::in_batch_negatives
            losses::hard_samples_from_the_third_step_on losses::a_sum_from_the_third_step_on
            end_of_run::hard_samples_from_the_third_step_on""",
        "max_steps where the run is to end": "end_of_run::hard_samples_after_the_run_has_ended",
        "draw in the data set or the collate function": (
            "cures_in_data::weights_from_a_generator_of_the_step"
        ),
        "average gradients over the replicas": "cures_of_steps::a_weight_of_a_loss_by_gradients",
        "bounds of samples": "cures_of_steps::a_bound_of_the_mean_or_of_each_sample",
        "step the optimizer after every n-th batch": "cures_of_steps::a_step_that_cuts_its_batch",
    },
    "LP310": {
        "sequence_parallel=False": "random_draws::noise_like_the_activations",
        "'sequence_gather_output'": "cures_of_shards::a_term_of_the_last_activations",
    },
    "LP311": {
        "draw by torch": "cures_of_steps::numbers_of_numpy_or_of_torch",
        "a generator of each parameter": "gradients::noise_of_a_generator_of_each_parameter",
        "num_microbatches=1": "random_draws::numbers_of_numpy_for_every_sample",
        "draw in the data set": """
            cures_in_data::numbers_of_numpy_in_the_data_set
            cures_in_data::numbers_by_values_in_the_data_set
            cures_in_data::numbers_of_no_single_sample_in_the_data_set""",
    },
    "LP312": {
        "num_microbatches=1": "losses::batch_norm",
        "sync_batchnorm=True": "losses::synchronized_batch_norm",
        "GroupNorm": "cures_of_shards::batch_norm_or_group_norm",
        "eval()": "cures_of_shards::batch_norm_that_is_frozen",
        "local_statistics=True": "losses::test_statistics_of_parts_are_accepted",
    },
    "LP313": {
        "on_nonfinite='skip'": (
            "distributed/faults/test_nonfinite.py::"
            "test_one_bad_rank_is_refused_or_skipped_on_every_rank"
        )
    },
    "LP314": {
        "name the module in replicated": "cures::values_of_the_first_stage_behind_the_blocks"
    },
    "LP315": {
        "self.manual_backward(loss)": (
            "distributed/test_manual_optimization.py::two_losses_over_labels_that_count"
        ),
        "change parameter.grad after it": "cures_of_steps::gradients_of_one_rank",
    },
    "LP316": {
        "options by keyword": "cures_of_steps::options_of_a_log_by_place",
        "self.log_dict": "cures_of_steps::a_dict_of_logs",
        "set the metric in __init__": "cures_of_steps::a_metric_in_a_list",
        "mean, sum, max or min": "cures_of_steps::the_median_of_a_log",
    },
    "LP317": {
        "masked_fill": "cures_of_shards::logits_that_are_masked",
        "'colwise_gather_output'": "side_effects::colwise_gathered_behind_a_gathered_norm",
    },
    "LP318": {
        "decide it for all replicas": "uncommon_steps::a_step_without_a_loss_on_all_replicas",
        "p.grad = None by the logged loss": """
            cures_of_shards::batches_left_out_by_their_loss
            cures_of_steps::batches_left_out_by_their_loss""",
        "leave out its samples in the data set": "cures_in_data::samples_left_out_of_the_data_set",
    },
    "LP319": {
        "that many rows": (
            "distributed/models/test_mixtral.py::test_divided_experts_equal_one_process"
        )
    },
    "LP320": {
        "'colwise_gather_output'": "cures_of_shards::a_penalty_on_the_gradient_of_the_loss",
        "that axis at 1": "uncommon_steps::penalty_on_the_gradient_of_a_divided_cross_entropy",
    },
    "LP321": {
        "all_gather, reduce or the group of replicas": (
            "collectives::test_samples_of_all_replicas_are_gathered_and_counted_once"
        ),
        "the group of tokens": "mixers::tokens_that_the_step_gathers_from_all_ranks",
    },
    "LP322": {
        "shift labels in the data": "sequences::training_on_labels_shifted_in_the_data",
        "declare what weighs": "cures_in_data::class_weights_on_divided_sequences",
        "log the same names": "cures_in_data::a_number_that_only_ranks_with_some_tokens_log",
    },
    "LP323": {
        "pass a list in the place of a generator": (
            "cures_of_steps::a_list_in_the_place_of_a_generator"
        )
    },
    "LP324": {
        "use_distributed_sampler=False, or the same seed": (
            "uncommon_loaders::test_samplers_that_differ_are_refused_with_a_cure_that_works"
        )
    },
    "LP325": {
        "add up, and divide later": "counted_buffers::a_buffer_that_counts_the_samples",
        "num_microbatches=1": """
            counted_buffers::a_buffer_with_a_running_mean
            uncommon_steps::a_state_of_each_row""",
        "sync_dist=True, callback_metrics": "cures_of_steps::a_mean_that_the_next_step_adds",
        "sequence_parallel=False": "counted_buffers::whole_tokens_that_a_block_counts",
        "local_statistics=True": "losses::test_statistics_of_parts_are_accepted",
        "the largest shape from the start": "cures_in_data::a_sum_of_the_largest_shape",
        "set a rate in on_train_batch_end": "cures_in_data::a_rate_by_the_loss",
    },
    "LP326": {
        "drop_last=True": (
            "uncommon_loaders::"
            "test_batches_that_cannot_be_joined_are_refused_with_a_cure_that_works"
        )
    },
    "LP327": {
        "pad all batches to one length": """
            cures_in_data::padding_of_other_lengths cures_in_data::padding_that_comes_later
            cures_in_data::padding_that_labels_leave_out_and_the_model_reads""",
        "leave padding out of the loss": "cures_in_data::padding_in_a_mean",
        "data_parallel_size=1": ONE,
    },
    "LP328": {
        "copy it in __init__": """
            cures_of_runs::a_teacher_that_is_copied_on_the_mesh
            cures_of_runs::a_teacher_that_is_copied_under_a_pipeline""",
        "copy it in setup": "cures_of_runs::a_teacher_that_is_copied_in_setup",
        "copy its weights alone": "cures_of_runs::weights_that_are_copied_on_the_mesh",
        "save its state dict": """
            cures_of_runs::blocks_that_are_pickled cures_of_runs::shards_that_are_pickled""",
        "save the module in on_fit_end": "cures_of_runs::a_module_saved_after_the_run",
    },
    "LP329": {
        "in __init__, setup or configure_model": """
            cures_of_runs::a_parameter_that_is_replaced cures_of_runs::a_parameter_that_is_tied
            cures_of_runs::blocks_that_change_places
            cures_of_runs::a_block_that_is_deleted""",
        "write to a parameter in place": "cures_of_runs::values_of_another_parameter",
        "w.detach().clone()": "cures_of_runs::a_copy_of_a_weight_that_a_hook_keeps",
    },
    "LP334": {
        "a batch_size that gives a multiple of": """
            distributed/experts/test_transformers.py::test_balance_of_a_batch_that_is_not_full""",
        "predict with expert_parallel_size=1": """
            distributed/experts/test_transformers.py::test_balance_of_a_batch_that_is_not_full""",
    },
    # Pipelines and schedules
    "LP401": {"a schedule that exists": VALUE},
    "LP402": {"a count that fits": VALUE},
    "LP403": {"actions in an order that ends": VALUE},
    "LP404": {"times of 0 or more": VALUE},
    "LP405": {
        "freeze before the fit": "cures_of_steps::an_embedding_frozen_after_some_steps",
        "cut or pad in the collate function": "cures_in_data::batches_cut_in_the_collate_function",
        "hand on a tensor": "cures_in_data::a_number_that_changes_handed_on_as_a_tensor",
    },
    "LP406": {
        "join the inputs of both calls": "cures::two_forwards_in_a_step",
        "write `except Exception:`": "cures::a_bare_except_around_the_model",
        "use_reentrant=False": "cures::blocks_in_a_reentrant_checkpoint",
        "block(x)": "cures::blocks_whose_forward_is_called_by_name",
        "a backward hook inside of the block": "cures::backward_hooks_of_blocks",
        "output.register_hook": "cures::backward_hooks_of_blocks_on_their_outputs",
        "leave out a batch in the collate function": (
            "cures_in_data::batches_left_out_in_the_collate_function"
        ),
        "the module that holds all blocks": "cures::a_hook_that_calls_the_blocks",
    },
    "LP407": {
        "first": "cures::a_module_behind_the_blocks_used_before_them",
        "last": "cures::a_head_defined_before_the_blocks",
        "replicated": """
            cures::a_module_used_before_and_behind_the_blocks
            cures::a_weight_of_the_first_stage_in_the_head
            cures::a_module_of_the_first_stage_that_needs_values
            cures::a_module_behind_the_blocks_that_gives_integers
            cures::a_hook_that_calls_a_replicated_head""",
        "call the module that holds all blocks": "cures::a_hook_that_calls_the_head",
    },
    "LP408": {
        "weight_decay": "cures::a_penalty_on_all_weights_as_weight_decay",
        "p.grad.add_ in on_after_backward": "cures::a_penalty_on_all_weights_in_a_hook",
        "replicated": "cures::a_penalty_on_the_embedding",
        "write weights in on_train_batch_end": "cures_of_shards::weights_that_the_step_clamps",
        "full_parameter(name) on every rank": "gradients::norms_from_the_strategy",
    },
    "LP409": {
        "carried": """
            cures::losses_that_blocks_keep cures::losses_that_blocks_keep_in_the_place_of_none
            side_effects::auxiliary_loss_that_is_carried""",
        "return it with the output": "cures::losses_that_blocks_return",
        "an attribute of the LightningModule": (
            "cures_of_runs::averages_that_blocks_keep_for_validation"
        ),
        "captured": "cures::outputs_that_hooks_collect",
    },
    "LP410": {
        "grad_norm(self, norm_type)": "gradients::norm_logged_by_lightning",
        "a submodule": "cures_of_steps::norms_of_a_submodule",
    },
    "LP411": {
        "no pipeline": "uncommon_steps::penalty_on_the_gradient_of_the_input",
        "if tensor.requires_grad:": "cures::a_hook_on_the_gradient_of_the_logits",
    },
    "LP412": {
        "EMAWeightAveraging, WeightAveraging": (
            "distributed/test_weight_averaging.py::"
            "test_averages_and_their_checkpoints_equal_one_process"
        )
    },
    "LP413": {"give it parameters": VALUE},
    "LP414": {
        "assign it to an attribute": "early_optimizers::of_a_parameter_that_was_beside_the_module"
    },
    "LP415": {
        "a forward on every rank": "cures_of_steps::a_forward_for_the_first_rank",
        "arrays that every rank has made": "cures_of_steps::arrays_for_the_first_rank",
        "full_parameter(name)": "gradients::norms_from_the_strategy",
    },
    "LP416": {
        "a hyperparameter": "cures_of_shards::a_learning_rate_by_the_number_of_processes",
        "estimated_stepping_batches": "cures_of_shards::a_schedule_by_the_number_of_processes",
        "count the replicas": "losses::times_the_number_of_replicas",
    },
    "LP417": {"full_tensor()": "hooks::arrays_of_whole_tensors_before_the_update"},
    "LP418": {"log the graph in setup": "cures_of_steps::the_graph_of_the_module"},
    "LP419": {"leave the rank out": "losses::a_step_that_asks_for_its_rank"},
    "LP420": {
        "call it in a hook": "whole_module::in_every_hook",
        "the same on every rank": "whole_module::pruning_by_magnitude",
        "on='rank 0'": "whole_module::pruning_on_rank_zero",
    },
    "LP422": {"on_train_batch_end": "cures_of_steps::a_weight_that_a_step_scales"},
}
"""Code -> advice of its messages -> the tests that apply it, or one of `REASONS`. A name without a
path is of a file of tests/distributed/user_code, and may be a case of its table.
"""
