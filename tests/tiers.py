"""How much of each test function `make test` and `make test-all` run: as many cases as its budget of seconds allows.

`seconds.json` has the mean seconds per case, set-up included, of functions that exceed the smaller budget, measured
with two processes on two cores. `python -m tests.tiers LOG...` writes it from the output of `pytest --durations=0`.
All cases of a function that is not in it run. Cases whose parameters match `FIRST` come first, the others in the
order of a hash.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

import pytest

SECONDS = Path(__file__).with_name("seconds.json")
TEST_S, ALL_S = 0.8, 2.0  # per function
NAMED_S = 1.9  # `make test` runs one case that takes no longer, if FIRST names its function
LONG_S = 10.0  # `make test-all` runs one case that takes no longer, or whose function FIRST names
# Cases share the slow part: `make test-all` runs all of them, `make test` none.
RANKS = ("test_recurrent_ranks.py", "test_sharded.py", "test_tensor_parallel.py")

FIRST = {
    "test_adapters.py::test_adapters_of_peft_are_followed_or_refused_by_name": "live",
    "test_adapters.py::test_adapters_in_one_batch_write_what_each_writes_alone": "tree-whole",
    "test_adapters.py::test_adapters_that_requests_choose_are_trained_while_they_serve": "parts",
    "test_ahead.py::test_every_body_can_do_without_its_launches": "lookup|eagle3|12",
    "test_algorithms.py::test_drafts_are_what_the_draft_says_from_scratch": "tree|(eagle3|standalone)-chain",
    "test_algorithms.py::test_greedy_text_is_that_of_generate": "tree-graphs|(eagle3|standalone)-chain-eager",
    "test_algorithms.py::test_no_random_number_is_used_twice": "tree|eagle3",
    "test_algorithms.py::test_poisoned_pools_change_nothing": "eagle3-tree|modules-tree",
    "test_algorithms.py::test_sampled_text_depends_on_neither_batch_nor_graphs": "eagle3-tree",
    "test_algorithms.py::test_texts_sample_the_targets_own_law": "^eagle3-.*-chain|^(standalone|block)-drawn-tree",
    "test_algorithms.py::test_trees_of_more_nodes_than_a_word_has_bits": "eagle3",
    "test_assistant.py::test_drafts_are_those_of_transformers": "^gemma4-centroids",
    "test_assistant.py::test_greedy_text_is_that_of_generate": "tree-plain-graphs",
    "test_attach.py::test_an_engine_that_is_dropped_leaves_the_model_free": "settings0",
    "test_attach.py::test_copies_of_an_attached_model_are_free": "False",
    "test_attach.py::test_engine_equals_generate": "llama$|gpt_oss",
    "test_attach.py::test_the_default_dtype_of_torch_changes_nothing": "bfloat16",
    "test_attention_bits.py::test_bits_are_those_of_plain_decoding": "^(full-7-12-64|narrow.*2-1-64|sinks-7-12-7)$",
    "test_attention_bits.py::test_splitting_changes_no_bits": "heads0",
    "test_auto.py::test_drafts_that_have_caught_up_are_what_the_draft_says_from_scratch": "eagle3-c|(modules|block)-t",
    "test_auto.py::test_greedy_text_is_that_of_generate": "eagle3-tree-graphs|modules-tree-e",
    "test_auto.py::test_recurrent_states_follow_every_shape": "tree-lfm2",
    "test_auto.py::test_samples_have_the_targets_own_law": "eagle3-tree",
    "test_auto.py::test_the_policy_hears_what_is_accepted": "True",
    "test_backends.py::test_every_kernel_compiles_for_a_gpu": ".",
    "test_backends.py::test_causal_tails": "torch|^0-4-.*split|^2-1-gqa-triton$",
    "test_backends.py::test_dtypes_and_pages": "^torch|triton-torch.bfloat16-16|split-torch.float16-1$",
    "test_backends.py::test_large_trees_use_all_bits_of_their_words": "torch|64-triton, split",
    "test_backends.py::test_packed_prefill_equals_a_ragged_one": "torch|(gqa|sinks|wide)-triton$",
    "test_backends.py::test_ragged_prefill": "torch|(gqa|softcap|v_dim)-triton, split",
    "test_backends.py::test_rows_of_a_block_see_each_other": "window-(torch|triton, split)",
    "test_backends.py::test_tokens_of_images_see_each_other": "window-(torch|triton, split)",
    "test_backends.py::test_trees_see_their_ancestors": "torch|(gqa|v_dim|latents)-triton, split",
    "test_backends.py::test_windows_of_any_size_on_every_path": "torch|^1-triton, split",
    "test_backends.py::test_windows_over_a_tree_of_two_words": "torch|split",
    "test_block.py::test_text_is_that_of_generate": "whole",
    "test_breakable.py::test_a_trace_serves_every_size_and_compiles_equal_pieces_once": "eager",
    "test_breakable.py::test_pieces_pass_no_shapes": "eager",
    "test_compare.py::test_committed_results_equal_themselves": "_135m_",
    "test_config_mutations.py::test_a_mutated_config_loads_or_is_refused": "eagle3|^speculators$|^nextn$",
    "test_doctor.py::test_doctor_and_report_say_what_verification_costs": "qwen3_moe",
    "test_doctor.py::test_the_defect_is_named": "eagle3-(swapped|aux_reversed)|nextn-random",
    "test_doctor.py::test_untrained_heads_are_told_from_misread_ones": "eagle3",
    "test_doors.py::test_greedy_calls_equal_transformers": (
        "(several EOS|min_length|bad_words_ids|no mask|max_length|repetition_penalty)-install|return_dict"
    ),
    "test_draft_edges.py::test_heads_that_score_in_fp32_serve_drafts_in_bf16": "eagle3-shape0|standalone-shape1-None",
    "test_engine.py::test_a_tree_smaller_than_its_depth": "^2",
    "test_engine.py::test_accepted_drafts_change_nothing": "llama-.*-1$|gpt_oss-shape2-16",
    "test_engine.py::test_poisoned_pools_change_nothing": "llama-shape0",
    "test_evaluation.py::test_scores_equal_a_forward_of_transformers": "one prefill|graphs",
    "test_evaluation.py::test_what_prompts_have_in_common_is_read_once": "one prefill|pages|beside",
    "test_few_rows.py::test_the_faster_way_is_taken": "64-",
    "test_generation.py::test_a_length_that_nobody_asked_for_is_cut_to_what_fits": "settings1",
    "test_generation.py::test_what_is_not_honoured_is_refused_by_name": "call|num_beams",
    "test_grammar.py::test_a_text_that_is_complete_before_min_new_tokens_is_whole": "greedy-tree",
    "test_grammar.py::test_greedy_text_equals_plain_constrained_decoding": "shape1",
    "test_grammar.py::test_preempted_requests_go_on_within_their_grammars": "0",
    "test_grammar.py::test_what_comes_before_a_law_that_leaves_no_token_is_kept": "greedy-chain",
    "test_images.py::test_padded_batches_and_inputs_by_name": "qwen3_vl",
    "test_images.py::test_texts_are_those_of_generate": "qwen2_5_vl-eagle3|gemma3-chunks",
    "test_images.py::test_the_prefix_cache_tells_images_apart": "gemma3",
    "test_kept_states.py::test_text_is_that_of_generate": "mamba2",
    "test_kernel_check.py::test_recurrent_kernels_pass": "delta by key|conv",
    "test_latents.py::test_products_equal_their_twins_and_rows_alone_equal_rows_together": "sizes0-torch.bfloat16",
    "test_latents.py::test_shared_prefixes_share_pages_of_latents": "torch",
    "test_latents.py::test_text_is_that_of_generate": "glm4_moe_lite-chain",
    "test_live_changes.py::test_a_changed_model_gives_its_own_text_or_a_named_error": "^cpu .* True-",
    "test_logprobs.py::test_they_are_those_of_a_plain_forward": "tree-g",
    "test_lookup.py::test_greedy_text_is_that_of_generate": "eager|graphs",
    "test_lookup.py::test_trees_hold_what_the_text_suggests": "block-graphs|eagle3-eager",
    "test_lora.py::test_one_product_has_the_bits_of_product_adapters_and_gate_apart": "^5$",
    "test_lora.py::test_kernels_equal_their_twin_and_bits_are_a_rows_own": "torch.float16",
    "test_narrow.py::test_a_draft_that_is_right_stays_right_where_it_may": "chain",
    "test_narrow.py::test_drafts_are_of_these_tokens_and_the_text_is_the_targets": "^eagle3|standalone-tree",
    "test_page.py::test_committed_results_render": "_135m_",
    "test_pages.py::test_a_preempted_request_goes_on_with_the_same_text": "eagle3|modules-.*topk",
    "test_packed.py::test_fp8_products_equal_their_twin": "silu",
    "test_packed.py::test_packed_products_equal_their_twin": "^1-|silu",
    "test_packed.py::test_packed_products_in_eight_splits_equal_their_twin": "^1$",
    "test_packed.py::test_products_with_experts_in_mxfp4_equal_their_twin": "^3-|^60",
    "test_peer.py::test_random_heads_draft_the_same": "llama-64",
    "test_policy.py::test_it_is_never_slower_than_plain_or_the_best_fixed_shape": "^8-1.0",
    "test_prefill_graphs.py::test_a_target_verify_batch_never_replays_a_prefill": "breakable",
    "test_prefill_graphs.py::test_attention_that_fails_in_a_replay_fails_its_request_only": "breakable",
    "test_prefill_graphs.py::test_chunks_replay_over_a_cached_prefix": "breakable",
    "test_prefill_graphs.py::test_compiled_layers_serve_one_token": "llama",
    "test_prefill_graphs.py::test_compiled_layers_that_differ_are_refused": "q_proj",
    "test_prefill_graphs.py::test_every_architecture_replays_and_keeps_its_text": "gpt_oss-b",
    "test_prefill_graphs.py::test_poison_in_padding_and_dummy_slot_reaches_nobody": "breakable",
    "test_prefill_graphs.py::test_prefills_of_every_module_replay_and_equal_eager": "breakable",
    "test_prefill_graphs.py::test_replay_equals_eager_at_every_edge_and_batch_size": "plain-piecewise|chain-breakable",
    "test_prefill_graphs.py::test_texts_do_not_depend_on_the_mode": "tree",
    "test_prefix_cache.py::test_it_replays_from_graphs": "whole|breakable",
    "test_prefix_cache.py::test_text_and_kv_are_those_of_an_engine_that_keeps_nothing": "eagle3-1|None-4",
    "test_processors.py::test_greedy_text_equals_generate": "graphs-chain",
    "test_processors.py::test_the_kernels_equal_the_twin": "^[0-3]$",
    "test_quantised.py::test_a_fault_between_tokens_is_still_found": "torchao",
    "test_quantised.py::test_layers_are_of_our_ops": "fp8",
    "test_quantised.py::test_text_of_experts_is_that_of_generate": "fp8-plain",
    "test_quantised.py::test_text_is_that_of_generate": "nf4-chain",
    "test_record.py::test_a_trace_imports_no_compiler": ".",
    "test_recurrent.py::test_a_draft_that_is_the_same_model_is_always_right": "qwen3_next|tree",
    "test_recurrent.py::test_every_graph_replays": "qwen3_next-whole",
    "test_recurrent.py::test_every_type_and_algorithm_in_graphs": "qwen3_next-eagle|mamba2-lookup",
    "test_recurrent.py::test_every_type_equals_generate": "lfm2",
    "test_recurrent.py::test_states_do_not_drift": "mamba2",
    "test_recurrent_kernels.py::test_a_prefill_in_chunks_equals_a_whole_one": "torch|triton-(delta by key|conv 4)",
    "test_recurrent_kernels.py::test_chunks_as_large_as_they_are": "lens0-delta by key",
    "test_recurrent_kernels.py::test_inputs_of_16_bits_lose_nothing_more": "delta$",
    "test_recurrent_kernels.py::test_prefills_rounds_and_commits_equal_a_loop_over_tokens": "torch|by|ssd|s6|conv 4",
    "test_recurrent_kernels.py::test_prefills_that_are_cut_at_multiples_of_64_have_equal_bits": "^delta$",
    "test_recurrent_kernels.py::test_scratch_is_bounded": "ssd",
    "test_recurrent_kernels.py::test_strong_decays_underflow_to_nothing": "torch|triton-delta$",
    "test_recurrent_kernels.py::test_trees_of_more_than_a_word": "torch|triton-conv 4",
    "test_recurrent_kernels.py::test_verified_and_folded_tokens_have_the_bits_of_plain_steps": "bfloat16",
    "test_rewriting.py::test_drafts_are_of_our_ops": "eagle3",
    "test_rewriting.py::test_every_recurrent_model_computes_the_same_of_our_ops": "qwen3_next|falcon_h1",
    "test_rewriting.py::test_layers_are_of_our_ops": "llama|gemma3",
    "test_ropes.py::test_text_within_the_limit_is_the_models_own": "dynamic|anew",
    "test_rotation.py::test_the_half_split_rotation_is_handed_over_and_no_other": "True-dtype0|other_halves",
    "test_round_graphs.py::test_replay_equals_eager_for_every_runner_and_batch": ("^eagle3-(plain|tree|chain-sampled)"),
    "test_round_graphs.py::test_synthetic_acceptance_keeps_its_rates": "eager-chain",
    "test_round_graphs.py::test_text_does_not_depend_on_graphs": "llama-tree",
    "test_seams.py::test_engine_equals_generate": "gptj|bart|roberta|diffllama|hrm_text",
    "test_seams.py::test_graphs_and_traces_replay_the_same_text": "gptj|breakable",
    "test_smollm2.py::test_greedy_speculation_equals_generate": "eagle3-K4",
    "test_sparse.py::test_text_is_that_of_generate": "deepseek_v32-tree",
    "test_taps.py::test_features_are_outputs_of_the_named_layers": "gptj|llama-False",
    "test_threads.py::test_eight_threads_and_the_live_model": "settings0",
    "test_threads.py::test_whatever_ends_a_call_of_the_live_model_frees_the_turn": "^model-Key|layers.2-System",
    "test_train.py::test_overfits_one_batch": "eagle3-changes1",
    "test_train_cli.py::test_a_head_is_fitted_exported_and_drafts": "eagle3",
    "test_train_rounds.py::test_prediction_equals_the_engine": "eagle3",
    "test_train_standalone.py::test_overfits_one_batch": "None",
    "test_triton_edges.py::test_a_path_may_have_64_nodes": "^(0|63)$",
    "test_triton_edges.py::test_one_bad_number_on_the_longest_path_ends_its_request_alone": "0-nan-tree|inf-greedy",
    "test_triton_law.py::test_split_rows_equal_the_twin": "apart",
    "test_triton_round.py::test_a_row_that_is_not_finite_ends_alone": "tree-nan|greedy-inf",
    "test_triton_round.py::test_greedy_walks_equal_the_twin": "dtype0-[123]-[1-8]-|dtype1-3-4",
    "test_triton_round.py::test_laws_equal_the_twin": "dtype0",
    "test_triton_round.py::test_top_tokens_equal_the_twin": "dtype0",
    "test_triton_round.py::test_trees_equal_the_twin": "^True",
    "test_verify.py::test_the_same_test_finds_mistakes": "tree 3x3-bonus",
    "test_verify.py::test_what_is_emitted_has_the_law_of_the_target": "tree 3x3-all",
    "test_whole_prefill.py::test_a_whole_prefill_leaves_what_one_in_parts_leaves": "None",
    "test_whole_prefill.py::test_every_architecture_keeps_its_text": "gpt_oss",
    "test_whole_prefill.py::test_first_tokens_of_any_law": "top_k|repetition",
}


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark cases that `make test` leaves out `matrix`, and those that `make test-all` leaves out `exhaustive`, too."""
    measured = json.loads(SECONDS.read_text())
    functions: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[_function(item.nodeid), "gpu" in item.keywords].append(item)
    for (name, _), cases in functions.items():
        if name.startswith(RANKS):
            for item in cases:
                item.add_marker("matrix")
            continue
        mean = measured.get(name, 0.0)
        in_test, in_all = (int(budget // mean) if mean else len(cases) for budget in (TEST_S, ALL_S))
        if name in FIRST and mean <= NAMED_S:
            in_test = max(1, in_test)
        if name in FIRST or mean <= LONG_S:
            in_all = max(1, in_all)
        for i, item in enumerate(sorted(cases, key=_order)):
            if i >= in_test:
                item.add_marker("matrix")
            if i >= in_all:
                item.add_marker("exhaustive")


def _function(nodeid: str) -> str:
    return nodeid.removeprefix("tests/").partition("[")[0]


def _order(item: pytest.Item) -> tuple[bool, int]:
    parameters = item.nodeid.partition("[")[2].removesuffix("]")
    first = FIRST.get(_function(item.nodeid))
    return first is None or re.search(first, parameters) is None, crc32(parameters.encode())


def means(lines: Iterable[str]) -> dict[str, float]:
    """Return the mean seconds per case of the functions that exceed the budget of `make test`."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for seconds, test in re.findall(r"^([0-9.]+)s (?:setup|call|teardown) +(\S+)", "".join(lines), re.MULTILINE):
        spent[_function(test)][test] += float(seconds)
    long = {name: cases for name, cases in sorted(spent.items()) if sum(cases.values()) > TEST_S}
    return {name: round(sum(cases.values()) / len(cases), 3) for name, cases in long.items()}


if __name__ == "__main__":
    logs = [Path(name).read_text() for name in sys.argv[1:]]
    SECONDS.write_text(json.dumps(means(logs), indent=0) + "\n")
