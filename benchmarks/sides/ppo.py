"""A side of `test_ppo.py`: a PPO trainer with TRL's classic surface."""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.memory import peak_of_process, reset_peak
from benchmarks.models import PAD, fill_by_name, lora, model_of, word_tokenizer
from benchmarks.timing import DTYPES, now

# Of plain gradient descent, which moves each weight in proportion to its gradient, rounding too:
# about as far in two steps as Adam at its default.
SGD_RATE = 1e-2
# The phases of `step`, and the timers of both libraries that make them up.
TIMERS = {
    "old and reference scores": ("time/ppo/forward_pass",),
    "rewards, advantages": ("time/ppo/compute_rewards", "time/ppo/compute_advantages"),
    "update": ("time/ppo/optimize_step",),
    "statistics": ("time/ppo/calc_stats",),
}
MOST = 6  # times their median: the longest of log-normal lengths


class PPOSide:
    """A PPO trainer on given weights and queries.

    Without a `ref_model` both libraries make the reference themselves: the base of a PEFT model,
    with `num_shared_layers` a copy above frozen layers, else a copy.
    """

    def __init__(
        self, library: Any, shape: dict[str, Any], reference: str = "copy", optimizer: str = "adam"
    ) -> None:
        self.shape = shape
        self.rng = np.random.RandomState(0)
        # Both draw the same mini-batches: this is fastrl's shuffle, TRL's is numpy's global one.
        np.random.permutation = np.random.RandomState(0).permutation
        adapter = reference == "adapter"
        weights = DTYPES[shape["weights"]]
        model = library.AutoModelForCausalLMWithValueHead.from_pretrained(
            model_of(shape, sum(map(max, lengths_of(shape).values()))).to(weights),
            summary_dropout_prob=0.0,
            peft_config=lora(shape["family"], ["c_attn"], ["q_proj", "v_proj"])
            if adapter
            else None,
        )
        fill_by_name(model.pretrained_model, model.v_head)
        # What the configuration says of the reference. TRL's cannot: it keeps a copy instead.
        settings: dict[str, Any] = {"init_kl_coef": 0.0} if reference == "none" else {}
        if library.__name__ == "fastrl" and reference in ("offload", "none"):
            settings["reference"] = reference
        if library.__name__ == "fastrl" and shape["weights"] == "bf16":
            settings["master_weights"] = False  # TRL has none
        precision = {"mixed_precision": "no" if shape["dtype"] == "fp32" else shape["dtype"]}
        self.trainer = library.PPOTrainer(
            config=library.PPOConfig(
                batch_size=shape["batch"],
                mini_batch_size=shape["mini_batch"],
                ppo_epochs=shape["epochs"],
                seed=0,
                accelerator_kwargs=precision,  # bf16 is autocast over weights in fp32
                **settings,
            ),
            model=model,
            tokenizer=word_tokenizer(),
            optimizer=descent(model) if optimizer == "sgd" else None,
            num_shared_layers=shape["layers"] // 2 if reference == "trunk" else None,
        )
        self.device = next(model.parameters()).device
        self.lengths = lengths_of(shape)
        self.queries = self.random_tokens(self.lengths["query"])

    def random_tokens(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """A batch of random token ids that are not special."""
        high = self.shape["vocabulary"] - 1
        ids = [self.rng.randint(1, high, length) for length in lengths]
        return [torch.from_numpy(sample).to(self.device) for sample in ids]

    def random_scores(self) -> list[torch.Tensor]:
        """A standard normal score for each sample."""
        scores = torch.from_numpy(self.rng.standard_normal(self.shape["batch"]))
        return list(scores.float().to(self.device))

    def check(self) -> dict[str, Any]:
        """{"statistics": of two steps on given responses, of which the second sees what the first
        changed, "trained": {parameter that the optimizer has: its size}, "at rest": bytes,
        "positions": {phase: that the policy runs for each token of queries and responses}}."""
        statistics = []
        with self.counting_positions() as positions:
            for _ in range(2):
                responses = self.random_tokens(self.lengths["response"])
                stats = self.trainer.step(self.queries, responses, self.random_scores())
                statistics.append({k: float(v) for k, v in stats.items() if is_compared(k, v)})
        del stats, responses
        tokens = 2 * sum(map(sum, self.lengths.values()))
        passes = {"scores": 1, "update": self.shape["epochs"]}
        return {
            "statistics": statistics,
            "trained": self.trained(),
            "at rest": self.at_rest(),
            "positions": {phase: positions[phase] / (n * tokens) for phase, n in passes.items()},
        }

    @contextlib.contextmanager
    def counting_positions(self) -> Iterator[dict[str, int]]:
        """While open, counts the positions that the policy's first layer is given: without
        gradients, where the batch is scored, and with them, in the update."""
        stacks = (m for m in self.trainer.model.modules() if isinstance(m, torch.nn.ModuleList))
        positions = {"scores": 0, "update": 0}

        def count(_: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]  # [..., width]
            positions["update" if torch.is_grad_enabled() else "scores"] += hidden[..., 0].numel()

        hook = next(stacks)[0].register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield positions
        finally:
            hook.remove()

    def trained(self) -> dict[str, int]:
        """The parameters that the optimizer moves, by name, and how many numbers each holds."""
        groups = self.trainer.optimizer.param_groups
        chosen = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        named = self.trainer.model.named_parameters()
        return {name: p.numel() for name, p in named if id(p) in chosen}

    def turn(self) -> dict[str, Any]:
        """{"seconds": of each phase of one iteration, "peak": bytes}: sample responses, and step on
        them. Those of log-normal lengths are given: neither library's `generate` takes a length for
        each."""
        scores = self.random_scores()
        given = self.random_tokens(self.lengths["response"]) if self.shape["sigma"] else None
        reset_peak(self.device)
        started = now(self.device)
        responses = self.generate() if given is None else given
        generated = now(self.device)
        stats = self.trainer.step(self.queries, responses, scores)
        done = now(self.device)
        seconds = {"step()": done - generated}
        if given is None:
            generating = {"iteration": done - started, "generate": generated - started}
            seconds = generating | seconds
        seconds |= {phase: sum(stats[t] for t in timers) for phase, timers in TIMERS.items()}
        return {"seconds": seconds, "peak": peak_of_process(self.device)}

    def generate(self) -> list[torch.Tensor]:
        """Samples responses of one length."""
        length = self.shape["response"]
        with self.autocast(), warnings.catch_warnings():
            # All responses have one length: no library draws from the policy's own distribution.
            warnings.filterwarnings("ignore", message="generate: min_new_tokens")
            responses = self.trainer.generate(
                self.queries,
                batch_size=self.shape["batch"],
                return_prompt=False,
                **sampling(length),
            )
        assert {len(response) for response in responses} == {length}
        return responses

    def autocast(self) -> contextlib.AbstractContextManager:
        """For `generate`, where TRL calls the model without accelerate's autocast and would run it
        in fp32: a user who wants speed does this. fastrl does not need it, but gets the same."""
        if self.shape["dtype"] == "fp32" or self.shape["weights"] == "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def at_rest(self) -> int | None:
        """Bytes allocated now: weights, the reference, Adam's state; None on a CPU, which keeps no
        count."""
        if self.device.type != "cuda":
            return None
        gc.collect()
        return torch.cuda.memory_allocated(self.device)


def lengths_of(shape: dict[str, Any]) -> dict[str, list[int]]:
    """Tokens of each sample's query and response: as the shape says or, where it has a `sigma`,
    log-normal with that median; the same every time."""
    rng, batch = np.random.RandomState(0), shape["batch"]
    found = {}
    for part in ("query", "response"):
        median = shape[part]
        drawn = np.rint(rng.lognormal(math.log(median), shape["sigma"], batch))
        found[part] = np.clip(drawn, 1, MOST * median).astype(int).tolist()
    return found


def sampling(length: int) -> dict[str, Any]:
    """Sampling from the whole softmax, responses of one length."""
    lengths = {"min_new_tokens": length, "max_new_tokens": length}
    return {**lengths, "do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": PAD}


def is_compared(key: str, value: Any) -> bool:
    """Whether both libraries must agree on this statistic: TRL's scalars that are no timings."""
    return np.ndim(value) == 0 and key.startswith(("objective/", "ppo/", "tokens/"))


def descent(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Gradient descent, for gates. Adam divides each gradient by its size: where that is small,
    rounding moves a weight as far as a gradient does, and two correct libraries drift apart."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=SGD_RATE)
