"""A side of `test_grpo.py`: a trainer that makes GRPO steps."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.memory import footprint
from benchmarks.models import EOS, model_of, word_tokenizer, words
from benchmarks.sides.ppo import descent, sampling
from benchmarks.sides.training import SETTINGS, temporary_folder, timed_train
from benchmarks.timing import now


class GRPOSide:
    """GRPO steps on prompts of one length: completions of one length are drawn, scored by the share
    of their ids that are even, and learned from once, with k3 to a copy as a term of the loss.
    ``padding_free`` is a setting of fastrl's, as ``settings`` are."""

    settings: Mapping[str, Any] = {}

    def __init__(
        self,
        library: Any,
        shape: dict[str, Any],
        optimizer: str = "adam",
        padding_free: bool = True,
    ) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.half = shape["dtype"] == "bf16"
        self.shape, self.tokenizer = shape, word_tokenizer(shape["vocabulary"])
        self.tokenizer.padding_side = "left"
        self.model = model_of(shape, shape["prompt"] + shape["completion"])
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.rng = np.random.RandomState(0)
        count = 8 * shape["batch"] // shape["group"]
        high = min(1000, shape["vocabulary"])
        self.prompts = self.rng.randint(EOS + 1, high, (count, shape["prompt"])).tolist()
        self.optimizer = descent(self.model) if optimizer == "sgd" else None
        self.padding_free = padding_free
        self.ours = library.__name__ == "fastrl"
        self.trainer = self.make_ours(library) if self.ours else self.make_trls(library)

    def make_ours(self, library: Any) -> Any:
        shape = self.shape
        return library.PPOTrainer(
            library.PPOConfig(
                batch_size=shape["batch"],
                mini_batch_size=shape["batch"],
                ppo_epochs=1,
                advantage="grpo",
                group_size=shape["group"],
                kl_in="loss",
                init_kl_coef=shape["beta"],
                adap_kl_ctrl=False,
                loss_aggregate="seq-mean-token-mean",
                learning_rate=1e-5,
                max_grad_norm=1.0,
                padding_free=self.padding_free,
                **self.settings,
                accelerator_kwargs={"mixed_precision": "bf16" if self.half else "no"},
            ),
            self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
        )

    def make_trls(self, library: Any) -> Any:
        from datasets import Dataset

        shape = self.shape
        # TRL copies only what it can load again by a name.
        folder = temporary_folder()
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.model.config._name_or_path = folder
        return library.GRPOTrainer(
            model=self.model,
            reward_funcs=lambda completion_ids, **_: list(map(even_share, completion_ids)),
            args=library.GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=shape["batch"],
                num_generations=shape["group"],
                max_completion_length=shape["completion"],
                temperature=1.0,
                beta=shape["beta"],
                num_iterations=1,
                loss_type="grpo",
                shuffle_dataset=False,
                max_steps=1,
                learning_rate=1e-5,
                generation_kwargs={"min_new_tokens": shape["completion"]},
                **SETTINGS | {"bf16": self.half},
            ),
            train_dataset=Dataset.from_dict({"prompt": list(map(words, self.prompts))}),
            processing_class=self.tokenizer,
            optimizers=(self.optimizer, None),
        )

    def check(self) -> dict[str, Any]:
        """{"moved": how far, in norm, two steps of gradient descent on given completions move each
        parameter}."""
        shape = self.shape
        for _ in range(2):
            size = (shape["batch"], shape["completion"])
            given = self.rng.randint(EOS + 1, shape["vocabulary"], size).tolist()
            if self.ours:
                self.learn(self.queries(), list(map(torch.tensor, given)))
            else:
                generate = self.trainer._generate_single_turn
                self.trainer._generate_single_turn = lambda *_, given=given, **__: (given, None)
                self.trainer.train()
                self.trainer._generate_single_turn = generate
        return {"moved": self.moved()}

    def moved(self) -> dict[str, float]:
        """How far each parameter has moved, in norm."""
        return {
            name: float((p.detach().cpu() - self.before[name]).norm())
            for name, p in self.model.named_parameters()
        }

    def queries(self) -> list[torch.Tensor]:
        """The first prompts, each as often as there are completions of it."""
        group = self.shape["group"]
        chosen = self.prompts[: self.shape["batch"] // group]
        return [torch.tensor(ids) for ids in chosen for _ in range(group)]

    def learn(self, queries: list[torch.Tensor], responses: list[torch.Tensor]) -> dict[str, Any]:
        """Scores responses and steps on them with fastrl's trainer; the step's statistics."""
        scores = [torch.tensor(even_share(ids.tolist())) for ids in responses]
        return self.trainer.step(queries, responses, scores)

    def step(self) -> None:
        """Draws completions and learns from them with fastrl's trainer."""
        queries = self.queries()
        responses = self.trainer.generate(
            queries,
            batch_size=len(queries),
            return_prompt=False,
            **sampling(self.shape["completion"]),
        )
        self.learn(queries, responses)

    def turn(self) -> dict[str, Any]:
        """{"seconds": of a step}."""
        if not self.ours:
            return {"seconds": {"step": timed_train(self.trainer, "step")}}
        device = next(self.model.parameters()).device
        started = now(device)
        self.step()
        return {"seconds": {"step": now(device) - started}}

    def memory(self) -> dict[str, Any]:
        """{"peak": the most bytes that a step takes above weights, the reference's and Adam's}."""
        device = next(self.model.parameters()).device
        step = self.step if self.ours else self.trainer.train
        return {"peak": footprint(step, lambda _: (), device)}


class GRPOScriptSide(GRPOSide):
    """The same by TRL 1.x's names: fastrl's GRPOTrainer, TRL's, or TRL's with fastrl's rollouts."""

    def __init__(self, library: Any, shape: dict[str, Any], optimizer: str = "adam") -> None:
        super().__init__(library, shape, optimizer)
        self.ours = False  # a step is one of train(), on all sides
        self.generating = 0.0  # seconds so far

    def make_ours(self, library: Any) -> Any:
        trainer = super().make_trls(library)
        make = trainer._respond_by
        trainer._respond_by = lambda: self._timed(trainer, make())
        trainer.rollout_func = None  # makes it anew
        return trainer

    def make_trls(self, library: Any) -> Any:
        trainer = super().make_trls(library)
        trainer._generate = self._timed(trainer, trainer._generate)
        return trainer

    def _timed(self, trainer: Any, generate: Any) -> Any:
        """The same, with the time from prompts to texts noted."""

        def timed(*args: Any) -> Any:
            started = now(trainer.args.device)
            found = generate(*args)
            self.generating += now(trainer.args.device) - started
            return found

        return timed

    def check(self) -> dict[str, Any]:
        """As of a :class:`GRPOSide`; every trainer is given the completions by its
        ``rollout_func``."""
        shape, own = self.shape, self.trainer.rollout_func
        prompts = [ids.tolist() for ids in self.queries()]
        for _ in range(2):
            size = (shape["batch"], shape["completion"])
            given = self.rng.randint(EOS + 1, shape["vocabulary"], size).tolist()
            found = {"prompt_ids": prompts, "completion_ids": given, "logprobs": None}
            self.trainer.rollout_func = lambda *_, found=found: dict(found)
            self.trainer.train()
        self.trainer.rollout_func = own
        return {"moved": self.moved()}

    def turn(self) -> dict[str, Any]:
        """{"seconds": of a step, and of its generation}."""
        self.generating = 0.0
        seconds = {"step": timed_train(self.trainer, "step"), "generation": self.generating}
        return {"seconds": seconds}


class UpdateSide(GRPOSide):
    """fastrl's steps on given completions, the same in each: its update, and the scores before."""

    TIMERS = {"update": "time/ppo/optimize_step", "scores": "time/ppo/forward_pass"}  # noqa: RUF012

    def __init__(self, library: Any, shape: dict[str, Any], padding_free: bool = True) -> None:
        super().__init__(library, shape, padding_free=padding_free)
        size = (shape["batch"], shape["completion"])
        self.given = list(torch.from_numpy(self.rng.randint(EOS + 1, shape["vocabulary"], size)))

    def step(self) -> dict[str, Any]:
        """The step's statistics."""
        with warnings.catch_warnings():
            # The completions were drawn at random, not by the policy.
            warnings.filterwarnings("ignore", message="the KL estimate is negative")
            return self.learn(self.queries(), self.given)

    def turn(self) -> dict[str, Any]:
        """{"seconds": of the phases in `TIMERS`}."""
        stats = self.step()
        return {"seconds": {phase: stats[timer] for phase, timer in self.TIMERS.items()}}

    def memory(self) -> dict[str, Any]:
        """{"peak": the most bytes that an update takes above weights, gradients and Adam's state}.
        A step must have been made, which makes that state."""
        trainer, device = self.trainer, next(self.model.parameters()).device
        update, found = trainer.update, {}

        def watched(*given: Any) -> Any:
            done: list[Any] = []

            def gradients(_: None) -> Any:
                done.append(update(*given))
                return self.gradients().values()

            # All of it in footprint's second part: on a GPU, what that returns counts in the first.
            found["peak"] = footprint(lambda: None, gradients, device)
            return done[0]

        trainer.update = watched
        try:
            with self._keeping_gradients(update):
                self.step()
        finally:
            trainer.update = update
        return found

    def gradients_of_step(self) -> dict[str, torch.Tensor]:
        """The gradient that a step's update goes along, by the parameter's name."""
        with self._keeping_gradients(self.trainer.update):
            self.step()
            return self.gradients()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those that lie in the weights, by name."""
        named = self.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}

    @contextlib.contextmanager
    def _keeping_gradients(self, update: Any) -> Iterator[None]:
        """While open, an update's gradients stay after its optimizer step."""
        engine = update.gradient.engine
        zero, engine.zero = engine.zero, lambda: None
        try:
            yield
        finally:
            engine.zero = zero
            zero()


def even_share(ids: Sequence[int]) -> float:
    """A reward that costs nothing."""
    return sum(i % 2 == 0 for i in ids) / max(len(ids), 1)
