"""One side of `python -m benchmarks ppo`: drives one library's PPOTrainer on request.

`ppo.py` starts this file once with fastrl's interpreter and once with the peer's. It is a script of
its own because the peer's environment has neither fastrl nor this package. All libraries have the
same surface, so they run the same lines here, on the device that accelerate picks.

It speaks JSON, one object a line: {"ready": versions} or {"absent": why}, and then for each command
read
- {"command": "check"}: two steps on given batches -> {"statistics": [{key: value}, ...],
  "trained": {parameter that the optimizer has: its size}, "at_rest": bytes allocated after them}
- {"command": "iterate"}: one generate and one step -> {"seconds": {phase: seconds}, "peak": bytes
  allocated in it, at most}
Bytes are None where the device keeps no count of them.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

# EOS is the tokenizer's and the model's, so that generation leaves it out: a response in which it
# was sampled would be cut there.
PAD, EOS = 0, 1
LIBRARIES = {
    "fastrl": "fastrl",
    "trl": "trl",
    "eager": "benchmarks.before.ppo_eager",
    "float64": "benchmarks.before.ppo_float64",
}
# Of plain gradient descent, which moves each weight in proportion to its gradient, rounding too:
# about as far in two steps as Adam does at its default.
SGD_RATE = 1e-2
MODELS = {"gpt2": GPT2LMHeadModel, "qwen2": Qwen2ForCausalLM}
# Where `step` says what it spent: our phases, and the timers that make them up in both libraries.
TIMERS = {
    "forward_pass": ("time/ppo/forward_pass",),
    "rewards_advantages": ("time/ppo/compute_rewards", "time/ppo/compute_advantages"),
    "optimize_step": ("time/ppo/optimize_step",),
    "calc_stats": ("time/ppo/calc_stats",),
}


class Side:
    """A trainer of one library on weights and queries that depend on nothing but the shape.

    Without a `ref_model` both libraries make the reference themselves: of a PEFT model its base,
    with `num_shared_layers` a copy above frozen layers, else a copy.
    """

    def __init__(
        self,
        library: Any,
        shape: dict[str, Any],
        reference: str = "copy",
        optimizer: str = "adam",
    ) -> None:
        self.shape = shape
        self.rng = np.random.RandomState(0)
        model = library.AutoModelForCausalLMWithValueHead.from_pretrained(
            MODELS[shape["family"]](model_config(shape)),
            summary_dropout_prob=0.0,
            peft_config=lora(shape["family"]) if reference == "adapter" else None,
        )
        fill_by_rule(model.pretrained_model, model.v_head)
        self.trainer = library.PPOTrainer(
            config=library.PPOConfig(
                batch_size=shape["batch"],
                mini_batch_size=shape["mini_batch"],
                ppo_epochs=shape["epochs"],
                seed=0,
                accelerator_kwargs=precision(shape),
                **settings(library, reference),
            ),
            model=model,
            tokenizer=padding_tokenizer(),
            optimizer=make_optimizer(model, optimizer),
            num_shared_layers=shape["layers"] // 2 if reference == "trunk" else None,
        )
        self.device = next(model.parameters()).device
        self.queries = self.random_tokens(shape["query"])

    def random_tokens(self, length: int) -> list[torch.Tensor]:
        """A batch of random token ids that are not special."""
        ids = self.rng.randint(1, self.shape["vocabulary"] - 1, (self.shape["batch"], length))
        return list(torch.from_numpy(ids).to(self.device))

    def random_scores(self) -> list[torch.Tensor]:
        """A standard normal score for each sample."""
        scores = torch.from_numpy(self.rng.standard_normal(self.shape["batch"]))
        return list(scores.float().to(self.device))

    def check(self) -> dict[str, Any]:
        """Statistics of two steps on given responses: the second sees what the first changed."""
        statistics = []
        for _ in range(2):
            responses = self.random_tokens(self.shape["response"])
            stats = self.trainer.step(self.queries, responses, self.random_scores())
            statistics.append({k: float(v) for k, v in stats.items() if is_compared(k, v)})
        del stats, responses
        return {"statistics": statistics, "trained": self.trained(), "at_rest": self.at_rest()}

    def trained(self) -> dict[str, int]:
        """The parameters that the optimizer moves, by name, and how many numbers each holds."""
        groups = self.trainer.optimizer.param_groups
        chosen = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        named = self.trainer.model.named_parameters()
        return {name: p.numel() for name, p in named if id(p) in chosen}

    def iterate(self) -> dict[str, Any]:
        """Seconds of each phase of one iteration, and its memory: sample the responses, and step
        on them."""
        scores = self.random_scores()
        length = self.shape["response"]
        self.forget_peak()
        started = self.now()
        with self.autocast(), warnings.catch_warnings():
            # All responses are of one length, for which no library's draw is the policy's own.
            warnings.filterwarnings("ignore", message="generate: min_new_tokens")
            responses = self.trainer.generate(
                self.queries,
                batch_size=self.shape["batch"],
                return_prompt=False,
                min_new_tokens=length,
                max_new_tokens=length,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                pad_token_id=PAD,
            )
        generated = self.now()
        stats = self.trainer.step(self.queries, responses, scores)
        done = self.now()
        assert {len(response) for response in responses} == {length}
        seconds = {"generate": generated - started}
        seconds |= {phase: sum(stats[t] for t in timers) for phase, timers in TIMERS.items()}
        seconds |= {"step": done - generated, "iteration": done - started}
        return {"seconds": seconds, "peak": self.peak()}

    def autocast(self) -> contextlib.AbstractContextManager:
        """For `generate`. TRL calls the model there past the forward that accelerate has wrapped,
        which would then run in fp32: what a user does who cares for speed is done for it, and for
        fastrl, which needs it not, alike."""
        if self.shape["dtype"] == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def at_rest(self) -> int | None:
        """Bytes that are allocated now: weights, the reference, Adam's state."""
        if self.device.type != "cuda":
            return None
        gc.collect()
        return torch.cuda.memory_allocated(self.device)

    def forget_peak(self) -> None:
        """What was allocated before now does not count."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        """The most bytes that were allocated since."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def now(self) -> float:
        """The time at which everything asked of the device so far is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def is_compared(key: str, value: Any) -> bool:
    """Whether both libraries must agree on this statistic: scalars of TRL's that are no timings."""
    return np.ndim(value) == 0 and key.startswith(("objective/", "ppo/", "tokens/"))


def settings(library: Any, reference: str) -> dict[str, Any]:
    """What the configuration says of the reference. TRL's cannot: it keeps a copy instead."""
    found: dict[str, Any] = {"init_kl_coef": 0.0} if reference == "none" else {}
    if library.__name__ == "fastrl" and reference in ("offload", "none"):
        found["reference"] = reference
    return found


def make_optimizer(model: torch.nn.Module, name: str) -> torch.optim.Optimizer | None:
    """Gradient descent where a side is checked; None for the library's own Adam.

    Adam divides each gradient by its size: where that is small, its rounding moves a weight as far
    as a gradient does, and two right libraries drift apart.
    """
    if name == "adam":
        return None
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=SGD_RATE)


def precision(shape: dict[str, Any]) -> dict[str, Any]:
    """What accelerate is told: bf16 means autocast over weights in fp32."""
    return {} if shape["dtype"] == "fp32" else {"mixed_precision": shape["dtype"]}


def lora(family: str) -> Any:
    """Rank 8 on the attention's input projections."""
    from peft import LoraConfig

    is_gpt2 = family == "gpt2"
    return LoraConfig(
        r=8,
        target_modules=["c_attn"] if is_gpt2 else ["q_proj", "v_proj"],
        fan_in_fan_out=is_gpt2,  # its weights lie transposed
        task_type="CAUSAL_LM",
    )


def why_absent(reference: str) -> str | None:
    """What this environment lacks for a reference."""
    if reference == "adapter":
        try:
            importlib.import_module("peft")
        except Exception as error:  # of its dependencies too, whatever they raise
            return f"peft cannot be imported ({type(error).__name__}: {error})"
    return None


def model_config(shape: dict[str, Any]) -> GPT2Config | Qwen2Config:
    """The model's sizes, without dropout: TRL leaves it on while it samples."""
    positions = max(shape["context"], shape["query"] + shape["response"])
    if shape["family"] == "gpt2":
        return GPT2Config(
            vocab_size=shape["vocabulary"],
            n_layer=shape["layers"],
            n_embd=shape["width"],
            n_head=shape["heads"],
            n_inner=shape["intermediate"],
            n_positions=positions,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=EOS,
            eos_token_id=EOS,
        )
    return Qwen2Config(
        vocab_size=shape["vocabulary"],
        num_hidden_layers=shape["layers"],
        hidden_size=shape["width"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate"],
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )


@torch.no_grad()
def fill_by_rule(*modules: torch.nn.Module) -> None:
    """Weights drawn by parameter name, GPT-2's way: the same under every version of a library.

    Those of an adapter too, whose model therefore differs from its base at once.
    """
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        rng = np.random.RandomState(zlib.crc32(name.encode()))
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
        is_gain = parameter.dim() == 1 and name.endswith("weight")
        parameter.copy_(0.02 * noise + (1.0 if is_gain else 0.0))


def padding_tokenizer() -> PreTrainedTokenizerFast:
    """All that a trainer asks of a tokenizer here: how to pad."""
    core = Tokenizer(models.WordLevel({"<pad>": PAD, "<eos>": EOS}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def versions(implementation: str, reference: str) -> dict[str, str]:
    """The versions of what decides this side's speed."""
    distribution = {"fastrl": "fastrl-lm"}.get(implementation, implementation)
    found = {"python": sys.version.split()[0]}
    names = ["torch", "transformers", "accelerate"]
    names = names if implementation in ("eager", "float64") else [distribution, *names]
    for name in [*names, "peft"] if reference == "adapter" else names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
            found[name] = "source"
    return found


def answering() -> Callable[[dict[str, Any]], None]:
    """Answers have stdout to themselves: what libraries print goes where their errors go."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda message: print(json.dumps(message), file=answers, flush=True)


def serve(
    answer: Callable[[dict[str, Any]], None], commands: dict[str, Callable[[], dict[str, Any]]]
) -> None:
    """Answers commands for as long as there are any."""
    for line in sys.stdin:
        answer(commands[json.loads(line)["command"]]())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", choices=tuple(LIBRARIES), required=True)
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--reference", default="copy")
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    args = parser.parse_args()
    answer = answering()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.shape["threads"])
    torch.manual_seed(0)
    # Both draw the same mini-batches: this is fastrl's shuffle, and TRL's is numpy's global one.
    np.random.permutation = np.random.RandomState(0).permutation
    if why := why_absent(args.reference):
        answer({"absent": why})
        return
    library = importlib.import_module(LIBRARIES[args.impl])
    side = Side(library, args.shape, args.reference, args.optimizer)
    answer({"ready": versions(args.impl, args.reference)})
    serve(answer, {"check": side.check, "iterate": side.iterate})


if __name__ == "__main__":
    main()
