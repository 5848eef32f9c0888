"""Runs under another environment's Python: scores a multiple-choice task and texts with lm-eval's `local-completions`,
prints what it made of the server's answers as JSON.

Usage: ask_lm_eval.py BASE_URL TOKENIZER DOCS.jsonl. Nothing is judged here: the test compares.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

TASK = "relay_choices"


def main(base_url: str, tokenizer: str, docs: str) -> dict[str, Any]:
    model = LocalCompletionsAPI(
        base_url=f"{base_url}/v1/completions",
        model="demo",
        tokenizer=tokenizer,
        tokenizer_backend="huggingface",
        batch_size=5,
        max_length=512,
    )
    task: dict[str, Any] = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": docs}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    found = lm_eval.simple_evaluate(model=model, tasks=[task], log_samples=True, bootstrap_iters=0)
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    lines = Path(docs).read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    rolling = [
        Instance("loglikelihood_rolling", {}, (question,), i)
        for i, question in enumerate(questions)
    ]
    return {
        "version": lm_eval.__version__,
        "acc": found["results"][TASK]["acc,none"],
        "choices": [[list(answer[0]) for answer in sample["resps"]] for sample in samples],
        "rolling": model.loglikelihood_rolling(rolling),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
