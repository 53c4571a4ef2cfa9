"""What vLLM makes of folders: run by its own environment's Python, which has nothing of fastrl.

``python in_vllm.py JOBS FOUND`` reads a list of jobs and writes, for each, what the model says of
its ids: log-probabilities of all next tokens, or a classifier's logits; or the error's first line.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# In this process, so that errors are; without a network.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip

LENGTH = 32  # of prompts and responses
RANK = 8  # the smallest that vLLM has room for


def main(jobs: str, found: str) -> None:
    results = [said(**job) for job in json.loads(Path(jobs).read_text(encoding="utf-8"))]
    Path(found).write_text(json.dumps(results), encoding="utf-8")


def said(folder: str, adapters: list[str], classifies: bool, ids: list[int]) -> list[Any]:
    """What the model in a folder says, or each of the adapters on it; texts are errors.

    Args:
        adapters: their folders; []: the model as it is.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    of_kind = {"runner": "pooling", "convert": "classify"} if classifies else {"max_logprobs": -1}
    if adapters:
        of_kind |= {"enable_lora": True, "max_lora_rank": RANK}
    try:
        model = LLM(
            folder, dtype="float32", max_model_len=LENGTH, enforce_eager=True, seed=0, **of_kind
        )
    except Exception as error:
        return [first_line(error)] * max(1, len(adapters))
    found = []
    for number, adapter in enumerate(adapters or [None], 1):
        try:
            found.append(answer(model, classifies, ids, number, adapter))
        except Exception as error:
            found.append(first_line(error))
    del model
    cleanup_dist_env_and_memory()
    return found


def answer(model: Any, classifies: bool, ids: list[int], number: int, adapter: Any) -> Any:
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest

    prompts = [{"prompt_token_ids": ids}]
    own: Any = {"use_tqdm": False}
    if adapter is not None:
        own["lora_request"] = LoRARequest(str(number), number, adapter)
    if classifies:
        # By default a score goes through a sigmoid.
        (output,) = model.classify(
            prompts, pooling_params=PoolingParams(use_activation=False), **own
        )
        return [output.outputs.probs]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, logprobs=-1)
    (output,) = model.generate(prompts, sampling, **own)
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    return [[row[token].logprob for token in range(len(row))] for row in rows]


def first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".partition("\n")[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
