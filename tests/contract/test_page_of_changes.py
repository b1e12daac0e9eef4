"""Every line of docs/what_a_mesh_changes.md names the tests that prove its cells."""

import re
from pathlib import Path

import pytest

from tests.support.proofs import assert_proofs_exist

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "what_a_mesh_changes.md"
HEADS = ("your code", "your model", "you do")

pytestmark = pytest.mark.contract

PROOFS: dict[str, str] = {
    "`copy.deepcopy` or `torch.save` of a module in a hook of the run": """
        cures_of_runs::blocks_that_are_pickled cures_of_runs::shards_that_are_pickled
        cures_of_runs::a_teacher_that_is_copied_on_the_mesh
        cures_of_runs::a_teacher_that_is_copied_in_setup
        cures_of_runs::a_teacher_that_is_copied_under_a_pipeline""",
    "loads, clears or replaces states of an optimizer, or puts another optimizer in its place": """
        states_of_optimizers::states_loaded_where_the_optimizer_is_made
        states_of_optimizers::states_of_an_earlier_step_loaded_again
        states_of_optimizers::states_that_are_cleared
        states_of_optimizers::another_optimizer_in_a_hook""",
    "reads or writes weights and optimizer states in `on_save_checkpoint`": (
        "seen_checkpoints::test_a_hook_on_a_checkpoint_sees_that_of_one_process"
    ),
    "replaces a parameter or module by another one, in a hook such as `on_train_start`": """
        cures_of_runs::a_parameter_that_is_replaced cures_of_runs::values_of_another_parameter
        cures_of_runs::blocks_that_change_places""",
    "labels that the step masks or chooses, an `ignore_index` in the call of the loss, a count "
    "by which the step divides the loss, class weights": """
        made_labels::a_copy_that_is_masked_in_place made_labels::tokens_that_a_condition_chooses
        made_labels::a_padding_token_that_the_call_ignores made_labels::a_bounded_divisor
        made_labels::class_weights_in_a_buffer made_labels::a_mask_that_depends_on_a_value
        made_labels::labels_that_are_drawn made_labels::labels_masked_by_a_schedule""",
    "rows padded to the longest of a batch": """
        losses::padded_labels_that_nobody_declared cures_in_data::padding_of_other_lengths
        cures_in_data::padding_that_comes_later""",
    "reads `outputs` in hooks such as `on_train_batch_end`, or the loss in `on_before_backward`": (
        "results_of_replicas::test_hooks_get_the_loss_of_the_global_batch "
        "results_of_replicas::test_what_is_of_one_replica_is_named"
    ),
    # Parameters, gradients, optimizers
    "reads weights in the step: L2 terms, norms, penalties": """
        parameters::sum_of_squares parameters::norm_of_all_weights_in_one
        parameters::penalty_of_the_head parameters::penalty_of_the_embedding
        parameters::spectral_norms_of_linear_layers""",
    "`clip_grad_norm_`, `grad_norm`, clipping per layer, signs": """
        gradients::clipped_by_torch gradients::norm_logged_by_lightning
        gradients::each_block_clipped gradients::signs_of_gradients
        gradients::each_linear_layer_clipped gradients::matrices_clipped""",
    "`torch.randn_like`, `normal_` of gradients and weights in a hook or an optimizer": (
        "gradients::noise_on_gradients gradients::noise_of_a_generator_of_each_parameter "
        "gradients::noise_of_the_optimizer"
    ),
    "Muon, Adafactor, LARS, Prodigy, LBFGS, SAM, an optimizer of your own": """
        optimizers::muon_with_clipping optimizers::adafactor_with_accumulation
        optimizers::norm_of_each_parameter optimizers::prodigy_that_adapts
        optimizers::lbfgs_with_line_search optimizers::sharpness_aware_with_momentum
        optimizers::two_kinds_in_one_class optimizers::across_weights_of_another_layout""",
    "`torch.randn_like(weight)` in the step": "parameters::noise_on_the_weight_of_the_head",
    "a module, expert or block that only some batches use; detached or unused weights": """
        absent_gradients::tower_for_some_samples absent_gradients::stages_detached
        absent_gradients::first_blocks_without_gradients
        absent_gradients::frozen_blocks_for_some_samples
        absent_gradients::stages_detached_in_every_other_step""",
    "gradients inside the step: penalties on them, adversarial inputs": """
        uncommon_steps::penalty_on_the_gradient_of_the_input
        uncommon_steps::penalty_on_the_gradient_of_one_score
        uncommon_steps::penalty_on_the_gradient_of_a_divided_cross_entropy""",
    "hooks between steps (`on_train_batch_end`, hooks of epochs and of validation): norms, "
    "arrays, histograms, noise, masks and writes to slices of weights, buffers of all blocks, "
    "averages by hand, `AveragedModel`, `torch.save(net.state_dict())`, `load_state_dict`, "
    "forwards of the model": """
        hooks::numbers_of_all_weights_after_a_step hooks::shadow_made_before_the_mesh
        hooks::averaged_model_made_before_the_mesh hooks::noise_and_bounds_on_weights
        hooks::a_state_dict_that_all_ranks_save hooks::a_norm_on_rank_zero_alone
        hooks::averages_that_are_loaded_for_a_while hooks::a_forward_on_rank_zero_alone
        hooks::forwards_between_steps hooks::norms_over_the_parameters_of_the_optimizer
        hooks::members_of_groups_where_some_join_later hooks::states_of_the_optimizer
        slices::rows_of_weights
        hooks::masks_on_weights hooks::buffers_of_all_blocks_are_changed_after_a_step
        uncommon_steps::an_average_that_the_module_keeps
        distributed/test_weight_averaging.py::test_averages_and_their_checkpoints_equal_one_process
        """,
    "hooks between backward and step (`on_after_backward`, `on_before_optimizer_step`, "
    "`configure_gradient_clipping`): names, numbers, norms, arrays of all weights and "
    "gradients": """
        gradients::norm_over_all_by_hand_where_gradients_are_clipped
        gradients::what_all_weights_and_gradients_give gradients::histograms_on_rank_zero_alone
        gradients::norm_over_all_by_hand hooks::arrays_of_parts_before_the_update""",
    "an `optimizer_step` of your own that reads weights and gradients before and after the "
    "closure: numbers, norms": """
        hooks::weights_and_gradients_around_the_update
        hooks::update_left_out_by_the_norm hooks::norm_by_hand_after_the_closure""",
    "`ModelPruning`": "hooks::pruning_by_the_callback hooks::masks_on_weights",
    "an embedding with `max_norm`": "uncommon_steps::an_embedding_of_limited_norm",
    "a learning rate that `configure_optimizers` chooses by the name or number of each "
    "parameter": """
        optimizers::a_rate_for_each_parameter_by_its_number
        optimizers::a_rate_by_the_number_of_weights_of_named_parameters""",
    "a learning rate that `configure_optimizers` computes from `trainer.world_size`": """
        optimizers::learning_rate_by_the_number_of_processes""",
    "a number that `setup` computes from `trainer.num_devices`": """
        reads_in_setup::test_a_length_from_the_number_of_processes_is_told_with_its_line
        reads_in_setup::test_replicas_are_not_told""",
    "a learning rate, or another hyperparameter, that `training_step` sets": """
        uncommon_steps::a_rate_that_the_step_sets_by_its_number
        uncommon_steps::a_rate_that_the_step_sets_by_its_loss""",
    "`trainer.should_stop` or `trainer.fit_loop.max_epochs` that `training_step` sets": """
        uncommon_steps::a_stop_that_the_step_asks_for
        uncommon_steps::an_end_that_the_step_brings_forward""",
    "layers that `training_step` leaves out at random, as with LayerDrop": """
        inferred_plans::layers_left_out_at_random""",
    "parametrizations, such as spectral norm": """
        uncommon_steps::a_norm_that_iterates_when_the_weight_is_read
        counted_buffers::vectors_of_spectral_norms""",
    # Batches and losses
    "batches of any kind: dataclasses, objects, strings, lists": """
        batches::data_class batches::object_with_to batches::texts_tokenized_in_the_step
        batches::weights_of_samples_in_a_list batches::nested_lists_of_unequal_samples""",
    "entries without a batch dim: class weights, tables": """
        batches::class_weights_stand_first batches::class_weights_declared
        batches::table_with_as_many_rows_as_samples batches::table_declared_whole""",
    "packed sequences": "batches::packed_sequences",
    "a loss that is a mean over samples or labels, a sum, or weighted by a mask or by classes": """
        losses::padded_labels_that_nobody_declared losses::sum_over_samples
        losses::mean_over_a_mask losses::weights_of_a_criterion_for_classes""",
    "divides the loss by a number that the collate function counts, or weights samples by "
    "numbers that the collate function divides by their sum": """
        counts::a_count_of_the_collate_fn counts::weights_whose_sum_is_one_in_each_batch""",
    "a lower bound of the count by which the step divides the loss (`max(count, 1)`)": """
        made_labels::a_bounded_divisor counts::a_bound_where_nothing_counts_later""",
    "a sum of two means over different things": "losses::two_kinds_of_labels",
    "a loss that depends on the number of processes, such as `trainer.world_size`": """
        losses::times_the_number_of_processes losses::times_the_number_of_replicas""",
    "a step that fails, or gives another result, on a part of a batch, such as `topk` over the "
    "samples": """
        side_effects::a_count_of_samples_in_the_batch
        uncommon_steps::the_hardest_samples_of_a_batch""",
    "a loss that depends on a count of steps that the step itself keeps, also in `self.hparams` or "
    "a callback, or on the next item of an iterator": """
        side_effects::state_that_every_step_moves_on
        uncommon_steps::a_step_that_leaves_marks_around_the_module""",
    "a state that the step computes from its samples, keeps in an attribute, and reads in the "
    "next step": """
        uncommon_steps::a_state_that_the_first_stage_reads_and_the_last_one_leaves
        uncommon_steps::a_state_of_each_row""",
    "numbers and tensors that the step keeps in attributes, of the module, its class, a callback "
    "or the data module, in globals, or in dicts, lists and objects in them: the last loss, a sum "
    "of losses, an average meter, a count of steps, the last outputs": """
        attribute_values::test_callbacks_and_data_modules_get_numbers_of_the_batch
        attribute_values::test_what_is_kept_is_that_of_the_batch_on_every_rank
        attribute_values::test_what_is_kept_outside_of_the_module_is_that_of_the_batch_on_every_rank
        attribute_values::test_a_minimum_of_losses_is_named
        attribute_values::test_values_that_no_look_has_seen_are_named_once""",
    "a bound, an absolute value or a maximum of a number that is computed from all samples: "
    "`clamp(loss.mean(), min=...)`, flooding": """
        cures_of_steps::a_bound_of_the_mean_or_of_each_sample
        unit/strategies/step/test_loss_form.py::test_sides_of_numbers""",
    "a loss whose formula changes after some steps: a term that begins later, `topk` after a "
    "warm-up": """
        branches_of_losses::a_distance_to_an_average_beside_labels_that_all_count
        branches_of_losses::a_distance_to_an_average_beside_labels_that_are_left_out
        branches_of_losses::a_sum_over_samples_of_a_kind_that_one_replica_has
        losses::a_term_that_begins_later losses::hard_samples_from_the_third_step_on
        losses::a_sum_from_the_third_step_on end_of_run::hard_samples_from_the_third_step_on
        end_of_run::hard_samples_in_the_second_epoch
        end_of_run::hard_samples_after_the_run_has_ended
        end_of_run::noise_from_the_third_step_on""",
    "chooses or weights samples by outputs of the model: pseudo-labels above a confidence, hard "
    "examples by a threshold or top-k": """
        losses::confident_samples_from_the_third_step_on
        losses::hard_samples_above_a_threshold_or_the_hardest
        unit/strategies/step/test_loss_form.py::test_a_step_that_begins_to_choose_samples_is_looked_at""",
    "`training_step` returns None to skip a batch": """
        uncommon_steps::a_step_without_a_loss_on_all_replicas
        uncommon_steps::a_step_without_a_loss_on_one_replica
        cures_of_shards::batches_left_out_by_their_loss
        cures_of_steps::batches_left_out_by_their_loss
        cures_in_data::samples_left_out_of_the_data_set""",
    "in-batch negatives": """
        losses::in_batch_negatives losses::in_batch_negatives_gathered
        collectives::test_negatives_of_all_replicas_have_the_gradient_of_one_process""",
    "a step that gathers or reduces over ranks by itself": """
        collectives::test_samples_of_all_replicas_are_gathered_and_counted_once
        collectives::test_a_collective_that_counts_samples_twice_is_refused""",
    "a loss that depends on the rank (`self.global_rank`, `trainer.is_global_zero`)": """
        losses::a_loss_that_rank_zero_doubles losses::a_loss_that_lightnings_rank_zero_doubles
        losses::test_what_replicas_compute_with_their_number_is_named_where_nothing_is_proved""",
    "a buffer that a step adds to from its samples, such as tokens of each expert": """
        counted_buffers::a_buffer_that_counts_the_samples
        counted_buffers::a_buffer_with_a_running_mean
        counted_buffers::tokens_that_a_block_counts""",
    "BatchNorm": """
        losses::batch_norm losses::synchronized_batch_norm
        losses::test_statistics_of_parts_are_accepted""",
    "logs a mean over labels or over samples, or a count, of a batch": """
        metrics::test_a_step_logs_the_metric_of_the_whole_batch
        metrics::test_a_metric_that_depends_on_how_a_batch_is_cut_is_named""",
    "a sampler or batch sampler of your own, `shuffle=True`, uneven last batches, streams that "
    "divide their samples themselves": """
        samples::test_the_order_of_samples_is_that_of_one_process
        samples::test_evaluation_counts_each_sample_once
        samples::test_a_stream_that_divides_itself_loses_nothing""",
    "random noise, masks or time steps that the step draws, in training or validation": """
        random_draws::noise_like_the_activations random_draws::noise_and_steps_of_diffusion
        random_draws::masking_by_the_order_of_noise
        random_draws::numbers_of_numpy_for_every_sample
        random_draws::test_validation_draws_and_logs_what_one_process_does""",
    "dropout, `rrelu`, and DropPath (of a library, or by `torch.bernoulli`)": """
        random_draws::dropout_before_the_noise first_step_proof::test_no_false_alarm""",
    # Models
    "has no plan": """
        inferred_plans::heads_of_their_own inferred_plans::fused_heads_and_a_tied_table
        inferred_plans::one_block_many_times inferred_plans::recurrent""",
    "a block writes to another module, or appends to a list that later code reads": """
        side_effects::auxiliary_loss_that_is_carried inferred_plans::losses_that_experts_keep""",
    "pools over tokens, or computes a loss on the tokens of one rank": """
        first_step_proof::test_a_difference_ends_the_first_step
        inferred_plans::image_transformer sequences::step_that_drops_a_token""",
    "mixes tokens by other means than attention: Mamba, convolutions, recurrences": """
        mixers::test_equal_or_refused mixers::conv1d mixers::cumsum mixers::attention_alone""",
    "collects outputs in attributes of the module, for hooks of an epoch": """
        step_attributes::test_every_rank_reads_what_one_process_has_collected
        step_attributes::test_a_mean_of_what_a_replica_has_kept_is_told""",
    "a step that shifts labels, slices or pools tokens, or keeps outputs, under context "
    "parallelism": """
        sequences::training_that_shifts_labels sequences::test_evaluation_equals_one_process""",
    "a step that writes with `logger.experiment` or `self.print`, or writes files on rank 0": """
        writes::test_a_step_writes_as_often_as_in_one_process
        writes::test_a_step_on_micro_batches_writes_for_each_which_is_said
        writes::test_what_cannot_be_sent_to_rank_0_is_refused""",
    "generates text in validation, prediction or a hook of an epoch, of any number of tokens, with "
    "a cache or without": """
        sequences::test_evaluation_equals_one_process
        sequences::test_texts_of_replicas_end_at_other_lengths
        generation::test_texts_are_those_of_one_process
        generation_families::test_texts_are_those_of_one_process
        generation::test_a_step_may_sample_by_itself
        generation::test_ranks_with_several_stages_generate_without_a_cache""",
    "counts the positions of tokens by itself": """
        mixers::positions_counted_by_the_model mixers::first_rows_of_a_table_of_positions""",
    "changes its state dict: renames keys by hooks or an override, keeps extra state, saves a part "
    "of its weights": """
        state_dicts::test_a_changed_state_dict_is_loaded_as_one_process_loads_it
        state_dicts::renaming state_dicts::hooked state_dicts::counting
        state_dicts::head_only""",
    "custom layers without the right tensor style": """
        parameters::weight_of_a_block_without_a_style
        side_effects::colwise_behind_a_gathered_norm
        side_effects::weights_read_by_the_module_around""",
    "model families of transformers: decoders, encoders, encoder-decoders": """
        families::test_equal_or_refused families::pairs_of_images_and_texts
        distributed/models/test_huggingface.py::test_family_on_tensor_and_pipeline_ranks_equals_one_process
        """,
    # After the run
    "call, save or train the module again, with any Trainer": """
        distributed/test_module_after_run.py::test_module_is_whole_and_plain_after_a_fit
        distributed/test_module_after_run.py::test_another_trainer_goes_on_with_the_module
        distributed/test_module_after_run.py::test_same_trainer_fits_and_saves_again
        distributed/test_module_after_run.py::test_parts_stay_where_whole_modules_are_not_wanted""",
    "edit weights, optimizer states or parameter groups in `on_load_checkpoint`; load states of "
    "callbacks and data modules": """
        resume::test_hooks_states_and_edits_of_a_resumed_run_are_those_of_one_process
        resume::test_a_callback_that_has_added_a_group_of_parameters_resumes""",
    "resume from a checkpoint that was saved inside an epoch": """
        resumed_samples::test_an_epoch_goes_on_where_it_was_saved
        resumed_samples::test_another_global_batch_sees_every_sample_that_was_to_come""",
    "load `best_model_path` with a plain `Trainer`, or `torch.load`": """
        contract/test_plain_file.py::test_plain_torch_and_lightning_read_it
        contract/test_checkpoints.py::test_best_last_and_every_few_steps""",
}
"""First cell of a row -> the tests that prove its other cells. A name without a path is of a file
of tests/distributed/user_code, and may be a case of its table."""


def rows() -> list[str]:
    """Give the first cell of every row of the page."""
    cells = re.findall(r"^\| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    return [cell for cell in cells if cell not in HEADS]


def test_every_row_has_its_proofs_and_every_proof_its_row() -> None:
    assert len(set(rows())) == len(rows())
    assert sorted(rows()) == sorted(PROOFS)


@pytest.mark.parametrize("row", PROOFS)
def test_proofs_exist(row: str) -> None:
    assert PROOFS[row].strip()
    assert_proofs_exist(PROOFS[row])
