"""Advice of the error codes of checkpoints, memory, processes and options, and its tests."""

from tests.support.proofs import FILE, ONE, OUTSIDE, VALUE

RUNS: dict[str, dict[str, str]] = {
    # Checkpoints
    "LP501": {"a whole checkpoint": FILE},
    "LP502": {"another checkpoint": FILE},
    "LP503": {"a newer version": OUTSIDE},
    "LP504": {
        "weights_only=False": """
            contract/test_checkpoints.py::test_state_of_callbacks_and_pickles_only_on_request
            contract/test_checkpoints.py::test_file_of_lightning_with_a_pickle_needs_trust"""
    },
    "LP505": {
        "numbers, strings, lists, dicts or tensors": VALUE,
        "view_as_real": "unit/checkpoint/test_damage.py::test_what_cannot_be_stored_is_named",
    },
    "LP506": {
        "the model that was saved": VALUE,
        "strict_loading = False": """
            state_dicts::test_a_changed_state_dict_is_loaded_as_one_process_loads_it""",
    },
    "LP507": {
        "the optimizers that were saved": VALUE,
        "load weights alone": "resume::test_weights_alone_go_on_with_another_optimizer",
    },
    "LP508": {"space, a right, a shared folder": OUTSIDE},
    "LP509": {
        "--out NAME.safetensors --below MODULE": (
            "contract/test_checkpoint_commands.py::test_exported_weights_are_those_of_the_model"
        )
    },
    "LP510": {
        "from_pretrained in the constructor": (
            "distributed/checkpoint/test_huggingface_folders.py::"
            "test_weights_that_are_computed_are_read_by_from_pretrained"
        )
    },
    "LP511": {"one of the two": VALUE},
    "LP512": {"a checkpoint at the end of an epoch": FILE},
    "LP513": {"a folder that all hosts share": OUTSIDE},
    # Memory, precision and optimizers
    "LP601": {
        "a compiler": OUTSIDE,
        "cpu_kernel='torch'": (
            "distributed/offload/test_cures.py::test_without_a_compiler_the_kernel_of_torch_steps"
        ),
    },
    "LP602": {"a folder with space": OUTSIDE},
    "LP603": {
        "change weights where updates are complete": """
            distributed/offload/test_cures.py::weights_written_before_validation
            distributed/offload/test_cures.py::weights_written_at_the_end""",
        "delayed_update=False": (
            "distributed/offload/test_cures.py::weights_written_without_a_delay"
        ),
        "overlap='off'": ("distributed/offload/test_cures.py::gradients_in_parts_without_overlap"),
    },
    "LP604": {
        "Adam or AdamW": "unit/strategies/test_host_offload.py::test_adam_is_moved_with_any_options"
    },
    "LP605": {
        "stage 3 and two replicas": (
            "distributed/offload/test_places.py::test_parameters_on_the_host_compute_the_same"
        )
    },
    "LP606": {
        "the option that the message names": (
            "distributed/offload/test_cures.py::test_the_option_that_a_misfit_names_fits"
        )
    },
    "LP607": {"a precision of the list": VALUE},
    "LP608": {"a plan with blocks, or a list of them": VALUE},
    "LP609": {"zero_stage=0, automatic optimization": ONE},
    "LP610": {
        "looks_across = 'entry'": "early_optimizers::with_pairs_inside",
        "copies in self.state": "early_optimizers::with_copies_in_its_state",
        "call the closure": "cures_of_runs::a_closure_that_is_left_out",
        "the optimizer inside, and zero_stage=1": (
            "cures_of_runs::an_optimizer_that_divides_its_states"
        ),
        "a value of the list": VALUE,
    },
    "LP611": {
        "a new callback, or the same Trainer": (
            "distributed/test_weight_averaging.py::"
            "test_average_of_an_earlier_run_is_refused_with_cures_that_work"
        )
    },
    "LP612": {"chmod 700, or another folder": OUTSIDE},
    "LP613": {
        "each change that the message lists": (
            "distributed/faults/test_short_memory.py::"
            "test_the_first_change_fits_where_a_step_did_not"
        )
    },
    # Islands, hosts and processes
    "LP701": {"a server that listens": OUTSIDE},
    "LP702": {"the same model and options": VALUE},
    "LP703": {"start the island again": OUTSIDE},
    "LP704": {"a key of 32 bytes or more": FILE},
    "LP705": {"the variables that the message names": VALUE},
    "LP706": {"one of the two": ONE},
    "LP707": {"start all ranks": OUTSIDE},
    "LP708": {"an address that all hosts know": OUTSIDE},
    "LP709": {"another port": VALUE},
    "LP710": {
        "srun": OUTSIDE,
        "SLURM_JOB_NAME=bash": (
            "contract/test_launch.py::test_lines_of_a_prompt_run_from_a_file_as_bash"
        ),
    },
    "LP711": {
        "%%writefile train.py, !python train.py": """
            contract/test_launch.py::test_lines_of_a_prompt_run_from_a_file_as_bash
            contract/test_notebooks.py::test_notebook_runs_and_says"""
    },
    "LP712": {
        "as many processes on every host": (
            "distributed/hosts/test_slurm.py::test_heterogeneous_job_trains_or_is_refused"
        )
    },
    "LP713": {
        "call on every rank what communicates": "cures_of_steps::a_forward_for_the_first_rank",
        "broadcast a decision": "cures_of_steps::a_decision_that_is_broadcast",
    },
    # Proofs and versions
    "LP801": {
        "num_microbatches=1": "cures_of_proofs::weights_that_no_entry_gives",
        "sequence_parallel=False": "cures_of_proofs::a_pool_over_tokens",
        "another style": "cures_of_proofs::a_style_that_sums_no_gradient",
        "without hooks on weights": "cures_of_proofs::a_hook_that_sees_a_part_of_the_batch",
        "an optimizer that works entry by entry": (
            "cures_of_proofs::an_optimizer_that_divides_by_a_norm"
        ),
        "without hooks that change gradients": (
            "cures_of_proofs::a_hook_that_scales_parts_of_gradients"
        ),
        "the learning rate of one process": (
            "cures_of_proofs::a_learning_rate_by_the_size_of_a_group"
        ),
        "verify=False": (
            "cures_of_proofs::test_a_run_trains_on_in_spite_of_a_difference_if_nothing_is_proved"
        ),
    },
    "LP802": {"as many samples as the message says": VALUE},
    "LP803": {"a version that was tested": OUTSIDE},
    "LP804": {
        "verify='auto'": "first_step_proof::test_a_step_that_shows_nothing_is_not_called_equal"
    },
    "LP805": {
        "write on every rank": (
            "distributed/test_equal_copies.py::"
            "test_a_weight_is_written_on_one_rank_or_on_every_rank"
        ),
        "leave the device out": OUTSIDE,
        "verify=False": (
            "distributed/test_equal_copies.py::"
            "test_a_run_without_a_fault_or_without_proofs_goes_to_its_end"
        ),
    },
    "LP806": {"the directory of a run that has ended": FILE},
    "LP807": {
        "leave the device out": OUTSIDE,
        "write on every rank": (
            "distributed/test_equal_copies.py::"
            "test_a_weight_is_written_on_one_rank_or_on_every_rank"
        ),
    },
    "LP808": {"without the callback": ONE},
    "LP809": {"the directory of the run that died": FILE},
    "LP810": {
        "leave the host out": """
            distributed/faults/test_verdicts.py::test_a_host_that_is_to_blame_is_left_out_of_the_next_run""",
        "the line out of the file": FILE,
    },
    # Options, commands, models and data
    "LP901": {"a name of the list": VALUE},
    "LP902": {"a value of the list": VALUE},
    "LP903": {"a strategy of this package": VALUE},
    "LP904": {"a name of the list": VALUE},
    "LP905": {
        "--samples N": (
            "contract/test_search_command.py::"
            "test_forecast_names_what_no_one_says_of_data_that_are_not_here"
        ),
        "an argument that fits": VALUE,
    },
    "LP906": {"a suffix of the list": VALUE},
    "LP907": {"data, an example_input_array, a config": VALUE},
    "LP908": {"a device of the list, or a measured one": VALUE},
    "LP909": {"install it": OUTSIDE},
    "LP910": {"token files of one tokenizer": FILE},
    "LP911": {"more text, a smaller batch or length": VALUE},
    "LP912": {"a value of the list": VALUE},
    "LP913": {
        "masks in on_train_batch_end": "hooks::masks_on_weights",
        "automatic_optimization=True": "cures_of_steps::a_step_that_optimizes_by_itself",
        "gradients in on_after_backward": "cures_of_steps::gradients_in_a_backward_of_its_own",
        "gradients in on_before_optimizer_step": "cures_of_steps::gradients_while_batches_add_up",
        "accumulate_grad_batches=1": VALUE,
        "set the batch size": VALUE,
    },
    "LP914": {
        "the same Trainer": (
            "distributed/test_module_after_run.py::test_same_trainer_fits_and_saves_again"
        ),
        "a new module and ckpt_path": (
            "distributed/test_module_after_run.py::test_new_module_goes_on_from_a_checkpoint"
        ),
        "run a rehearsal in its own process": (
            "unit/verification/test_rehearse.py::test_nothing_is_left_behind"
        ),
    },
    "LP915": {"requires_grad_(False)": "cures_of_shards::a_parameter_without_entries"},
    "LP916": {
        "compile_blocks=True": (
            "distributed/test_compile.py::test_compiled_blocks_equal_one_process"
        )
    },
    "LP917": {"leave the callback out": ONE},
    "LP918": {
        "the Trainer that the message writes": (
            "unit/verification/test_rehearse.py::test_a_small_model_of_a_user_is_rehearsed"
        )
    },
    "LP919": {
        "call a lazy module once": "cures_of_shards::a_lazy_head",
        "p.grad in on_after_backward": (
            "cures_of_shards::a_hook_of_a_weight cures_of_proofs::a_hook_made_in_the_run"
        ),
        "hook the output of a module": "cures_of_shards::a_hook_of_a_weight_on_an_output",
        "sparse=False": "cures_of_shards::an_embedding_with_sparse_gradients",
        "the plain module": "cures_of_shards::a_scripted_block",
        "mark a weight by an attribute": "cures_of_shards::a_weight_marked_by_its_class",
        "packed values in buffers": "parameters::packed_weights_in_buffers",
    },
}
"""Code -> advice of its messages -> the tests that apply it, or one of `REASONS`. A name without a
path is of a file of tests/distributed/user_code, and may be a case of its table.
"""
