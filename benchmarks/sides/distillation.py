"""A side of `test_scripts.py`: DistillationTrainer, fastrl's or TRL's, by the same arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.memory import footprint
from benchmarks.models import EOS, model_of, word_tokenizer, words
from benchmarks.sides.ppo import descent
from benchmarks.sides.training import SETTINGS, temporary_folder, timed_train
from benchmarks.timing import now


class DistillationSide:
    """Steps on prompts of one length: responses of one length are drawn, read by a teacher of its
    own width, and learned from once."""

    def __init__(self, library: Any, shape: dict[str, Any], optimizer: str = "adam") -> None:
        from datasets import Dataset
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.shape, self.tokenizer = shape, word_tokenizer(shape["vocabulary"])
        self.tokenizer.padding_side = "left"
        length = shape["prompt"] + shape["completion"]
        self.model = model_of(shape, length)
        wide = {"width": shape["teacher_width"], "heads": 8, "kv_heads": 8}
        self.teacher = model_of(shape | wide, length)
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.rng = np.random.RandomState(0)
        high = min(1000, shape["vocabulary"])
        count = 8 * shape["batch"]
        self.prompts = self.rng.randint(EOS + 1, high, (count, shape["prompt"])).tolist()
        self.ours = library.__name__ == "fastrl"
        self.parts = {"generation": 0.0}
        own = descent(self.model) if optimizer == "sgd" else None
        self.trainer = library.DistillationTrainer(
            self.model,
            self.teacher,
            args=library.DistillationConfig(
                output_dir=temporary_folder(),
                per_device_train_batch_size=shape["batch"],
                max_completion_length=shape["completion"],
                beta=shape["beta"],
                shuffle_dataset=False,
                max_steps=1,
                learning_rate=1e-5,
                generation_kwargs={"min_new_tokens": shape["completion"]},
                **SETTINGS,
            ),
            train_dataset=Dataset.from_dict({"prompt": list(map(words, self.prompts))}),
            processing_class=self.tokenizer,
            optimizers=(own, None),
        )
        if self.ours:
            make = self.trainer._respond_by
            self.trainer._respond_by = lambda: self._timed(make())
            self.trainer.rollout_func = None  # makes it anew
        else:
            self.trainer._generate = self._timed(self.trainer._generate)

    def _timed(self, generate: Any) -> Any:
        def timed(*args: Any) -> Any:
            started = now(self.trainer.args.device)
            found = generate(*args)
            self.parts["generation"] += now(self.trainer.args.device) - started
            return found

        return timed

    def check(self) -> dict[str, Any]:
        """{"moved": how far, in norm, two steps of gradient descent on given responses move each
        parameter}."""
        shape = self.shape
        for _ in range(2):
            size = (shape["batch"], shape["completion"])
            given = self.rng.randint(EOS + 1, shape["vocabulary"], size).tolist()
            if self.ours:
                prompts = self.prompts[: shape["batch"]]
                found = {"prompt_ids": prompts, "completion_ids": given, "logprobs": None}
                self.trainer.rollout_func = lambda *_, found=found: dict(found)
                self.trainer.train()
                self.trainer.rollout_func = None
            else:
                own = self.trainer._generate_single_turn
                self.trainer._generate_single_turn = lambda *_, given=given, **__: given
                self.trainer.train()
                self.trainer._generate_single_turn = own
        moved = {
            name: float((p.detach().cpu() - self.before[name]).norm())
            for name, p in self.model.named_parameters()
        }
        return {"moved": moved}

    def turn(self) -> dict[str, Any]:
        """{"seconds": of a step, of its generation, and of all that follows it}."""
        self.parts["generation"] = 0.0
        step, generation = timed_train(self.trainer, "step"), self.parts["generation"]
        return {"seconds": {"step": step, "generation": generation, "update": step - generation}}

    def memory(self) -> dict[str, Any]:
        """{"peak": the most bytes that a step takes above weights and Adam's state}."""
        device = next(self.model.parameters()).device
        return {"peak": footprint(self.trainer.train, lambda _: (), torch.device(device))}
