"""Which features work together: each pair works, or is refused with a reason; with the test that shows it.

`python -m tests.fault.promises.feature_pairs` prints the table of docs/guarantees.md. Add a feature to FEATURES and its
pairs to PAIRS; a pair that is in no row is printed as not tried.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.fault.promises.show import Show, run_script

ROOT = Path(__file__).parents[3]

FEATURES = {
    "pd": "P and D on two nodes",
    "resume": "resumed streams",
    "tp": "tensor parallelism",
    "dp": "DP ranks",
    "graphs": "recorded decode steps",
    "host": "host tier",
    "preempt": "preemption, suspension",
    "events": "KV events",
    "tenants": "tenants and classes",
    "grammar": "structured output",
    "tools": "tool calls, reasoning",
    "choices": "several choices",
    "logprobs": "logprobs of answers",
    "prompts": "logprobs of prompts",
    "drafts": "speculative decoding",
    "windows": "windows, chunks (page groups)",
    "states": "states of sequences",
    "codes": "FP8 KV cache",
    "quantized": "quantized weights",
    "simulate": "`--simulate`",
}
"""Short name → name in the table, in the order of its rows."""


class Verdict(Enum):
    WORKS = "works"
    REFUSED = "refused"
    NOT_DONE = "not done"
    """Accepted; one of the two has no effect on such requests, for the reason given."""


@dataclass(frozen=True, slots=True)
class FeaturePair:
    first: str
    second: str
    verdict: Verdict
    test: str
    """file:function that shows it."""
    reason: str = ""


def _works(first: str, second: str, test: str, note: str = "") -> FeaturePair:
    return FeaturePair(first, second, Verdict.WORKS, test, note)


def _refused(first: str, second: str, test: str, reason: str) -> FeaturePair:
    return FeaturePair(first, second, Verdict.REFUSED, test, reason)


def _not_done(first: str, second: str, test: str, reason: str) -> FeaturePair:
    return FeaturePair(first, second, Verdict.NOT_DONE, test, reason)


IN_ONE_PROCESS = "tests/unit/server/response/test_answer_pairs.py"
ANSWER_FEATURES = ("grammar", "tools", "choices", "logprobs", "prompts")
"""Asked for by a request; each has a test with each feature of the engine below."""
ENGINE_TESTS = {
    "host": "test_answer_behind_pages_of_the_host_is_the_plain_one",
    "preempt": "test_answer_that_is_suspended_again_and_again_is_the_plain_one",
    "events": "test_events_of_an_answer_name_what_is_cached",
    "tenants": "test_answer_of_a_tenants_class_is_the_plain_one_and_charged",
}


def _pairs_in_one_process() -> Iterator[FeaturePair]:
    """Pairs that one parametrized test shows."""
    for engine_feature, test in ENGINE_TESTS.items():
        for feature in ANSWER_FEATURES:
            # Pages of such a prompt are not taken from any cache.
            if (engine_feature, feature) != ("host", "prompts"):
                yield _works(engine_feature, feature, f"{IN_ONE_PROCESS}:{test}")
    shown_elsewhere = [("grammar", "tools"), ("choices", "prompts")]
    for first, second in itertools.combinations(ANSWER_FEATURES, 2):
        if (first, second) not in shown_elsewhere:
            test = "test_answer_of_a_pair_has_what_each_gives_alone"
            yield _works(first, second, f"{IN_ONE_PROCESS}:{test}")
    for first, second in (
        ("host", "tenants"),
        ("host", "events"),
        ("events", "tenants"),
        ("preempt", "events"),
    ):
        yield _works(first, second, f"{IN_ONE_PROCESS}:test_engine_with_two_features_has_both")


DRAFTS = "tests/parity/test_speculation_matrix.py:test_answers_are_those_without_drafts"
MATRIX = "tests/parity/test_matrix.py:test_tokens_are_those_of_the_judge"
BORDERS = "tests/parity/test_window_borders.py"
STATES = "tests/parity/test_states.py"
STATE_PAIRS = "tests/parity/test_pair_states.py"
CODES = "tests/parity/test_fp8_cache.py"


def _pairs_of_models() -> Iterator[FeaturePair]:
    """Kinds of models and their forms, and drafts."""
    for feature in ("pd", "resume", "preempt", "grammar", "choices", "logprobs"):
        yield _works(feature, "drafts", DRAFTS)
    yield _works(
        "tp", "drafts", "tests/parity/test_tensor_parallel.py:test_ranks_compute_rows_with_drafts"
    )
    yield _works(
        "host",
        "drafts",
        "tests/parity/test_draft_heads.py:test_no_draft_reads_an_entry_of_another_text",
    )
    yield _works("pd", "windows", f"{BORDERS}:test_pair_equals_transformers")
    yield _works(
        "preempt", "windows", f"{BORDERS}:test_engine_with_too_few_pages_equals_transformers"
    )
    yield _works(
        "host", "windows", f"{BORDERS}:test_engine_through_the_host_pool_equals_transformers"
    )
    yield _works(
        "graphs",
        "windows",
        "tests/parity/test_decode_graphs.py:test_pages_behind_windows_go_to_other_rows",
    )
    yield _works(
        "drafts", "windows", "tests/parity/test_speculation.py:test_models_with_windows_and_sinks"
    )
    yield _works(
        "pd",
        "states",
        f"{STATE_PAIRS}:test_prompts_around_every_border_equal_transformers_with_hits_on_either_node",
    )
    yield _works(
        "resume",
        "states",
        f"{STATE_PAIRS}:test_answer_resumed_by_another_pair_goes_on_as_it_would_have",
    )
    yield _works(
        "preempt", "states", f"{STATES}:test_suspended_and_resumed_the_tokens_are_transformers"
    )
    yield _works(
        "tp",
        "states",
        "tests/e2e/engines/test_tensor_parallel.py:test_divided_nodes_exchange_states_and_equal_transformers",
    )
    yield _works(
        "drafts", "states", f"{STATES}:test_states_of_drafts_that_were_not_drawn_are_taken_back"
    )
    yield _works(
        "graphs",
        "states",
        "tests/parity/test_device_states.py:test_tokens_are_transformers_with_graphs_and_without",
    )
    yield _works(
        "graphs",
        "drafts",
        "tests/parity/test_device_drafts.py:test_answers_are_those_without_drafts",
    )
    for feature, reason in (
        ("host", "states are not moved to the host in this version"),
        ("codes", "K and V stay in the compute type in this version"),
    ):
        yield _refused(
            feature,
            "states",
            "tests/unit/models/test_delta_net.py:test_start_with_a_flag_that_has_no_states_yet_is_refused",
            reason,
        )
    yield _works("pd", "codes", f"{CODES}:test_pair_equals_one_process")
    for feature in ("host", "preempt"):
        yield _works(feature, "codes", f"{CODES}:test_chunks_hits_and_preemption_change_no_token")
    yield _works(
        "graphs", "codes", "tests/parity/test_decode_graphs.py:test_graphs_on_off_and_the_cpu"
    )
    yield _works(
        "pd",
        "quantized",
        "tests/parity/test_quantized.py:test_pair_equals_transformers_on_dequantized_weights",
    )
    yield _works(
        "graphs",
        "quantized",
        "tests/unit/layers/kernels/test_experts.py"
        ":test_recorded_steps_have_the_tokens_of_plain_torch_and_padding_chooses_nothing",
    )
    for first, second in (
        ("resume", "windows"), ("resume", "codes"), ("resume", "quantized"), ("tp", "windows"),
        ("tp", "codes"), ("tp", "quantized"), ("preempt", "quantized"), ("windows", "codes"),
        ("windows", "quantized"), ("states", "quantized"),
    ):  # fmt: skip
        yield _works(first, second, MATRIX)


PAIRS = (
    *_pairs_in_one_process(),
    *_pairs_of_models(),
    _not_done(
        "host",
        "prompts",
        f"{IN_ONE_PROCESS}:{ENGINE_TESTS['host']}",
        "a prompt whose logprobs are asked for is computed again, wherever its pages are",
    ),
    _not_done(
        "resume",
        "choices",
        f"{IN_ONE_PROCESS}:test_only_a_single_answer_is_resumable",
        "an interrupted stream of several choices ends with an error event",
    ),
    _works(
        "pd",
        "resume",
        "tests/e2e/failover/test_failover.py:test_killed_decode_node_in_mid_stream_changes_nothing",
    ),
    _works(
        "pd",
        "tp",
        "tests/e2e/engines/test_tensor_parallel.py:test_divided_nodes_exchange_pages_and_equal_one_process",
        "P and D have the same `--tp-size`",
    ),
    _works(
        "pd",
        "dp",
        "tests/e2e/engines/test_dp.py:test_both_chosen_ranks_serve_and_the_room_names_the_prefill_rank",
    ),
    _works(
        "pd",
        "host",
        "tests/sim/memory/test_offload.py:test_decode_node_takes_evicted_pages_from_its_host"
        "_and_grants_the_rest_after_the_copies",
    ),
    _works(
        "pd",
        "preempt",
        "tests/parity/test_preempted_tokens.py:test_suspended_on_either_node_of_a_pair_the_tokens_are_transformers",
        "but for a request whose pages travel: 409",
    ),
    _works(
        "pd", "events", "tests/e2e/engines/test_dp.py:test_index_follows_each_rank_of_both_roles"
    ),
    _works(
        "pd",
        "tenants",
        "tests/e2e/traffic/test_fairness.py:test_class_of_a_request_reaches_both_nodes",
    ),
    _works(
        "pd",
        "grammar",
        "tests/e2e/engines/test_equal.py:test_constrained_answer_of_two_nodes_equals_that_of_one",
    ),
    _works("pd", "tools", "tests/e2e/api/test_agents.py:test_answer_has_reasoning_and_a_call"),
    _works("pd", "choices", "tests/e2e/api/test_openai.py:test_several_choices_of_one_prompt"),
    _works(
        "pd",
        "logprobs",
        "tests/parity/test_prefill_decode_pair.py:test_sampling_and_logprobs_are_transferred_unchanged",
    ),
    _not_done(
        "pd",
        "prompts",
        "tests/e2e/api/test_prompt_logprobs.py:test_prefill_and_decode_nodes_refuse_to_share_the_work",
        "the router sends such a request to one node; two nodes refuse to share it",
    ),
    _works("pd", "simulate", "tests/e2e/traffic/test_simulated.py:test_trace_of_twenty_requests"),
    _works(
        "resume", "grammar", "tests/e2e/api/test_reasoning.py:test_answer_is_resumed_at_every_event"
    ),
    _works("resume", "tools", "tests/e2e/api/test_agents.py:test_call_is_resumed_at_every_event"),
    _not_done(
        "resume",
        "prompts",
        "tests/e2e/api/test_prompt_logprobs.py:test_streams_with_prompt_logprobs_are_not_resumable",
        "an interrupted stream ends with an error event",
    ),
    _works(
        "tp",
        "host",
        "tests/parity/test_tensor_parallel.py:test_chunks_hits_overlap_retraction_and_host_pages_change_nothing",
    ),
    _works(
        "tp",
        "preempt",
        "tests/parity/test_tensor_parallel.py:test_chunks_hits_overlap_retraction_and_host_pages_change_nothing",
    ),
    _works(
        "tp", "prompts", "tests/parity/sampling/test_prompt_logprobs.py:test_tensor_parallel_ranks"
    ),
    _refused(
        "tp",
        "graphs",
        "tests/unit/config/test_feature_pairs.py:test_refused_pair_of_flags",
        "`--cuda-graph-max-bs`: steps are not recorded with `--tp-size` above 1",
    ),
    _refused(
        "tp",
        "dp",
        "tests/unit/config/test_feature_pairs.py:test_refused_pair_of_flags",
        "on P nodes: start more nodes; other nodes take both",
    ),
    _refused(
        "tp",
        "simulate",
        "tests/unit/config/test_feature_pairs.py:test_refused_pair_of_flags",
        "there is no device to divide",
    ),
    _works("dp", "events", "tests/e2e/engines/test_dp.py:test_index_follows_each_rank"),
    _refused(
        "graphs",
        "simulate",
        "tests/unit/config/test_feature_pairs.py:test_refused_pair_of_flags",
        "there is no device that could record steps",
    ),
    _refused(
        "host",
        "simulate",
        "tests/unit/config/test_feature_pairs.py:test_refused_pair_of_flags",
        "there are no pages of a device to copy",
    ),
    _works(
        "host",
        "preempt",
        "tests/parity/test_preempted_tokens.py:test_through_the_host_pool_and_back_the_tokens_are_transformers",
    ),
    _works(
        "graphs", "preempt", "tests/parity/test_decode_graphs.py:test_graphs_on_off_and_the_cpu"
    ),
    _works(
        "graphs",
        "grammar",
        "tests/parity/test_device_runner.py:test_answers_that_follow_grammars_are_those_of_the_cpu",
    ),
    _works(
        "tenants",
        "preempt",
        "tests/sim/queue/test_fairness.py:test_preemption_makes_room_for_the_request_whose_turn_it_is",
    ),
    _works(
        "grammar", "tools", "tests/e2e/api/test_forced_calls.py:test_answer_with_a_schema_may_call"
    ),
    _refused(
        "grammar",
        "simulate",
        "tests/unit/server/request/grammar/test_constraint.py:test_engines_without_grammars_refuse",
        "a simulated engine has no model that could follow one",
    ),
    _works(
        "choices",
        "prompts",
        "tests/e2e/api/test_prompt_logprobs.py:test_choices_of_a_prompt_share_its_logprobs",
    ),
    _works(
        "logprobs",
        "simulate",
        "tests/e2e/traffic/test_simulated.py:test_openai_surface_answers",
        "each is 0: simulated tokens are certain",
    ),
    _refused(
        "prompts",
        "simulate",
        "tests/e2e/traffic/test_simulated.py:test_logprobs_of_prompts_are_refused",
        "a simulated engine computes no logits",
    ),
)


def find_pair(first: str, second: str) -> FeaturePair | None:
    for pair in PAIRS:
        if {pair.first, pair.second} == {first, second}:
            return pair
    return None


def table() -> str:
    """The rows of docs/guarantees.md."""
    lines = ["| features | | why | shown by |", "|---|---|---|---|"]
    for first, second in itertools.combinations(FEATURES, 2):
        pair = find_pair(first, second)
        if pair is None:
            continue
        name = pair.test.rpartition("/")[2].replace(".py:", ": ")
        names = f"{FEATURES[first]} + {FEATURES[second]}"
        lines.append(f"| {names} | {pair.verdict.value} | {pair.reason} | `{name}` |")
    total = len(FEATURES) * (len(FEATURES) - 1) // 2
    lines.append("")
    lines.append(f"{len(PAIRS)} of {total} pairs are in the table; the others were not tried.")
    return "\n".join(lines)


def mistakes() -> list[str]:
    """Pairs named twice, features that do not exist, and tests that are not there."""
    found = []
    seen: set[frozenset[str]] = set()
    for pair in PAIRS:
        names = frozenset((pair.first, pair.second))
        if names in seen:
            found.append(f"{sorted(names)} stand twice")
        seen.add(names)
        found += [f"{name} is no feature" for name in names if name not in FEATURES]
        path, _, function = pair.test.partition(":")
        if function not in _functions(ROOT / path):
            found.append(f"there is no {pair.test}")
        if pair.verdict is not Verdict.WORKS and not pair.reason:
            found.append(f"{sorted(names)}: give the reason")
    return found


def _functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def short(show: Show) -> None:
    wrong = mistakes()
    show.keep(
        "every pair names a test that exists, and a reason if it is refused",
        not wrong,
        wrong or len(PAIRS),
    )
    documented = table() in (ROOT / "docs/guarantees.md").read_text()
    show.keep(
        "docs/guarantees.md has the table that this prints", documented, f"{len(PAIRS)} pairs"
    )


def long(show: Show) -> None:
    print(table())
    short(show)


if __name__ == "__main__":
    run_script(__doc__, long, short)
