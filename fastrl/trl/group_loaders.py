"""The loaders of trainers whose batches hold the prompts of whole generations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastrl.trl.group_sampler import GroupSampler, in_groups
from fastrl.trl.prompt_data import refuse_dispatch


class GroupLoaders:
    """Loads each prompt as often as it has responses, and each batch as often as it is used.

    Of a trainer it needs what is declared here.
    """

    args: Any
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    num_generations: int
    num_generations_eval: int
    loader: Callable[..., Any]
    asked_sampler: Callable[..., Any]

    @property
    def uses(self) -> int:
        """Batches that are learned from each generation."""
        return self.args.steps_per_generation * self.args.num_iterations

    def get_train_dataloader(self) -> Any:
        args, data, uses = self.args, self.train_dataset, self.uses
        prompts = args.generation_batch_size // self.num_generations
        if not hasattr(data, "__len__"):
            if args.shuffle_dataset:
                data = data.shuffle(seed=args.seed)
            data = in_groups(data, self.num_generations, prompts, uses)

        size = args.train_batch_size * args.steps_per_generation
        return self.loader(data, size, self.asked_sampler, training=True)

    def train_sampler(self, dataset: Any = None) -> Any:
        """Of a data set's rows, each as often as it has responses, and in the batches of each of
        the steps that these serve."""
        args, data = self.args, self.train_dataset if dataset is None else dataset
        prompts, shuffles = args.generation_batch_size // self.num_generations, args.shuffle_dataset
        return GroupSampler(
            data, self.num_generations, prompts, self.uses, bool(shuffles), args.seed
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        if data is None:
            raise ValueError("evaluation needs an eval_dataset")
        args, group = self.args, self.num_generations_eval
        workers = args.dataloader_num_workers

        def in_order(rows: Any) -> GroupSampler:
            return GroupSampler(rows, group, seed=args.seed)

        try:
            if not hasattr(data, "__len__"):
                refuse_dispatch(args)
                self.accelerator.dataloader_config.dispatch_batches = False
                data = in_groups(data.shuffle(seed=args.seed), group)
                args.dataloader_num_workers = 0
            return self.loader(data, args.eval_batch_size, in_order)
        finally:
            args.dataloader_num_workers = workers
