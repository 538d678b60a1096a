"""Which cases `make test` leaves to `make test-all`: the rest of a matrix, and what takes long for what it adds.

Of a function named here, `make test` plays the cases whose parameters match the pattern; the others get the marker
`matrix`. None of them, for "-": then another test shows the behaviour on a smaller scale. Kernels keep one interpreted
case a variant, since a GPU plays the whole matrix in minutes.
"""

import re

import pytest

IN_TEST = {
    "test_algorithms.py::test_compiled_layers_feed_every_draft_alike": "-",
    "test_algorithms.py::test_greedy_text_is_that_of_generate": "chain-eager|tree-graphs",
    "test_algorithms.py::test_poisoned_pools_change_nothing": "eagle3|modules-tree|standalone-chain",
    "test_algorithms.py::test_sampled_text_depends_on_neither_batch_nor_graphs": "eagle3|modules-tree|standalone-chain",
    "test_algorithms.py::test_trees_of_more_nodes_than_a_word_has_bits": "eagle3",
    "test_attach.py::test_an_engine_that_is_dropped_leaves_the_model_free": "settings0",
    "test_attach.py::test_engine_equals_generate": "llama$|gemma2|gpt_oss|deepseek",
    "test_backends.py::test_causal_tails": "torch|^0-4-.*split|^2-1-gqa-triton$",
    "test_backends.py::test_dtypes_and_pages": "^torch|triton-torch.bfloat16-16|split-torch.float16-1$",
    "test_backends.py::test_every_kernel_compiles_for_a_gpu": "-",
    "test_backends.py::test_large_trees_use_all_bits_of_their_words": "torch|150-triton, split",
    "test_backends.py::test_packed_prefill_equals_a_ragged_one": "torch|(gqa|sinks|wide)-triton$",
    "test_backends.py::test_ragged_prefill": "torch|split",
    "test_backends.py::test_trees_see_their_ancestors": "torch|split",
    "test_backends.py::test_windows_of_any_size_on_every_path": "torch|^100-triton$|^1-triton, split",
    "test_breakable.py::test_a_trace_serves_every_size_and_compiles_equal_pieces_once": "eager",
    "test_custom_generate.py::test_a_real_model_and_a_shipped_head": "-",
    "test_doctor.py::test_the_defect_is_named": "eagle3|nextn-random",
    "test_doctor.py::test_untrained_heads_are_told_from_misread_ones": "eagle3",
    "test_doors.py::test_pipelines_streamers_and_stop_strings_of_a_real_model": "-",
    "test_draft_edges.py::test_heads_that_score_in_fp32_serve_drafts_in_bf16": "eagle3|standalone-shape1",
    "test_engine.py::test_accepted_drafts_change_nothing": "llama-.*-1$|windowed-.*-16|gpt_oss-shape2",
    "test_engine.py::test_poisoned_pools_change_nothing": "llama-shape0|gpt_oss-shape1",
    "test_equality.py::test_what_rounding_does_is_no_reason": "gemma2-dtype0|gpt_oss-dtype1|qwen3_moe-dtype2",
    "test_evaluation.py::test_lm_eval_and_ray_are_imported_by_nobody_else": "-",
    "test_evaluation.py::test_scores_equal_a_forward_of_transformers": "one prefill|few slots|graphs",
    "test_evaluation.py::test_what_prompts_have_in_common_is_read_once": "one prefill|pages|beside",
    "test_faults.py::test_random_faults_lose_nothing": "attention",
    "test_generation.py::test_what_is_not_honoured_is_refused_by_name": "call|num_beams",
    "test_kept.py::test_a_second_process_compiles_nothing_but_what_fails_although_kept": "-",
    "test_kept.py::test_other_versions_have_folders_of_their_own": "-",
    "test_layouts.py::test_nextn_of_deepseek_and_glm": "one by one-glm|fused-deepseek",
    "test_layouts.py::test_speculators": "plain|all of",
    "test_logprobs.py::test_they_are_those_of_a_plain_forward": "plain-g|chain-e|tree-g|path-e",
    "test_lookup.py::test_greedy_text_is_that_of_generate": "eager|graphs",
    "test_peer.py::test_random_heads_draft_the_same": "llama-64|deepseek",
    "test_peer.py::test_the_shipped_head_drafts_the_same": "-",
    "test_placement.py::test_weights_that_a_gguf_file_held_packed_are_plain": "-",
    "test_prefill_graphs.py::test_compiled_layers_serve_one_token": "llama",
    "test_prefill_graphs.py::test_compiled_layers_that_differ_are_refused": "q_proj|aux",
    "test_prefill_graphs.py::test_compiled_layers_that_raise_leave_no_trace": "-",
    "test_prefill_graphs.py::test_every_architecture_replays_and_keeps_its_text": "gemma3-p|gpt_oss-b",
    "test_prefill_graphs.py::test_prefills_of_every_module_replay_and_equal_eager": "breakable",
    "test_prefill_graphs.py::test_replay_equals_eager_at_every_edge_and_batch_size": "plain-piecewise|chain-breakable",
    "test_prefill_graphs.py::test_texts_do_not_depend_on_the_mode": "tree",
    "test_prefix_cache.py::test_text_and_kv_are_those_of_an_engine_that_keeps_nothing": "eagle3-1|standalone|-4",
    "test_processors.py::test_greedy_text_equals_generate": "eager-tree|graphs-chain",
    "test_processors.py::test_smollm2_equals_generate_with_its_shipped_draft": "-",
    "test_ray.py::test_a_replica_that_dies_loses_no_row_and_repeats_none": "-",
    "test_recurrent.py::test_every_graph_replays": "qwen3_next-whole|piecewise",
    "test_recurrent.py::test_every_type_and_algorithm_in_graphs": "qwen3_next-eagle|mamba2-lookup|bamba-standalone",
    "test_recurrent.py::test_every_type_equals_generate": "qwen3_next|lfm2",
    "test_recurrent_kernels.py::test_a_prefill_in_chunks_equals_a_whole_one": "torch|triton-(delta by key|conv 4)",
    "test_recurrent_kernels.py::test_prefills_rounds_and_commits_equal_a_loop_over_tokens": "torch|by|ssd|s6|conv 4",
    "test_rollouts.py::test_texts_follow_the_weights": "compiled",
    "test_rotation.py::test_the_half_split_rotation_is_handed_over_and_no_other": "True-dtype0|other_halves",
    "test_round_graphs.py::test_replay_equals_eager_for_every_runner_and_batch": "^(eagle3|standalone|lookup)",
    "test_round_graphs.py::test_synthetic_acceptance_keeps_its_rates": "eager-chain|graphs-tree",
    "test_round_graphs.py::test_text_does_not_depend_on_graphs": "llama|gpt_oss-tree",
    "test_seams.py::test_graphs_and_traces_replay_the_same_text": "gptj|breakable|bart",
    "test_serve.py::test_64_streams_at_once": "-",
    "test_smollm2.py::test_demo_reports_equal_outputs": "-",
    "test_smollm2.py::test_greedy_speculation_equals_generate": "eagle3-K4",
    "test_threads.py::test_eight_threads_and_the_live_model": "settings0",
    "test_train.py::test_compiled_math_equals_eager": "-",
    "test_train.py::test_overfits_one_batch": "eagle3-changes1|nextn",
    "test_triton_edges.py::test_one_bad_number_on_the_longest_path_ends_its_request_alone": "0-nan|63-inf",
    "test_triton_engine.py::test_a_nan_row_ends_its_request_alone": "-",
    "test_triton_engine.py::test_accepted_paths_are_committed": "tree",
    "test_triton_engine.py::test_greedy_and_sampled_text_is_that_of_the_torch_backend": "-",
    "test_triton_engine.py::test_poisoned_pools_change_nothing_and_debug_mode_finds_nothing": "-",
    "test_triton_law.py::test_split_rows_equal_the_twin": "apart",
    "test_triton_round.py::test_greedy_walks_equal_the_twin": "dtype0-[123]-[1-8]-|dtype1-3-4",
    "test_triton_round.py::test_laws_equal_the_twin": "dtype0",
    "test_triton_variants.py::test_live_traffic_needs_no_variant_that_attaching_did_not": "-",
    "test_verify.py::test_the_same_test_finds_mistakes": "tree",
    "test_verify.py::test_what_is_emitted_has_the_law_of_the_target": "(chain 3|tree 3x3)-all",
    "test_whole_prefill.py::test_a_whole_prefill_leaves_what_one_in_parts_leaves": "None|modules",
    "test_whole_prefill.py::test_a_whole_prefill_on_triton": "-",
}
# Left to `make test-all` as a whole: test_tensor_parallel.py shows that ranks agree.
MODULES = ("test_recurrent_ranks.py", "test_sharded.py")


def is_matrix(item: pytest.Item) -> bool:
    """Return whether `make test` leaves `item` out."""
    function, _, parameters = item.nodeid.removeprefix("tests/").partition("[")
    if item.path.name in MODULES:
        return True
    pattern = IN_TEST.get(function)
    return pattern is not None and (pattern == "-" or re.search(pattern, parameters.removesuffix("]")) is None)
