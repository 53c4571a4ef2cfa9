"""Records vLLM's answers, in an environment that has vLLM and need have nothing else:
`python answers.py QUESTIONS ANSWERS`, both JSON."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import vllm


def answers(asked: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """For each cut and prompt: tokens, their log-probs, and the ids that could be drawn."""
    llm = vllm.LLM(
        asked["model"], dtype="float32", max_num_seqs=32, enable_prefix_caching=False, seed=0,
        skip_tokenizer_init=True, logprobs_mode="processed_logprobs", max_logprobs=asked["most"],
    )  # fmt: skip
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    found = []
    for cut in asked["cuts"]:
        params = vllm.SamplingParams(
            temperature=1.0, max_tokens=asked["length"], stop_token_ids=[asked["end"]],
            logprobs=asked["most"], detokenize=False, **cut,
        )  # fmt: skip
        made = [x.outputs[0] for x in llm.generate(prompts, params, use_tqdm=False)]
        found.append([answer(x.token_ids, x.logprobs) for x in made])
    return found


def answer(tokens: Any, logprobs: Any) -> dict[str, Any]:
    """A response; of the log-probs that came with a token, those that are finite are of its set."""
    return {
        "tokens": list(tokens),
        "logprobs": [of[token].logprob for token, of in zip(tokens, logprobs, strict=True)],
        "sets": [[i for i, x in of.items() if x.logprob > -math.inf] for of in logprobs],
    }


if __name__ == "__main__":
    questions, target = map(Path, sys.argv[1:])
    given = json.loads(questions.read_text(encoding="utf-8"))
    written = {"version": vllm.__version__, "answers": answers(given)}
    target.write_text(json.dumps(written), encoding="utf-8")
