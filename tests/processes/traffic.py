"""What processes tell each other of samples in a PPO step, in bytes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from fastrl import PPOConfig, PPOTrainer
from fastrl.run.callbacks import TrainCallback
from fastrl.run.launcher import process_count
from tests import tiny_models
from tests.golden import tiny
from tests.processes.launch import keep

SAMPLES, TOKENS = 256, 32  # of a step, of all processes; of a response, at most
STEPS = 3


class Traffic:
    """Counts what collective calls bring to this process, and the seconds that it waits in them;
    sums of gradients, which DDP itself exchanges, are not among them."""

    def __init__(self) -> None:
        self.received, self.seconds = 0, 0.0
        others = dist.get_world_size() - 1
        whole = {"all_gather": others, "all_gather_into_tensor": others, "gather": others}
        for name, times in {**whole, "broadcast": 1, "all_reduce": 1}.items():
            # Each names the tensor that a process gives, by its place.
            place = 1 if name.startswith("all_gather") else 0
            counted = self._counted(name, getattr(dist, name), place, times)
            for module in (dist, distributed_c10d):
                setattr(module, name, counted)

    def _counted(self, name: str, call: Callable[..., Any], place: int, times: int) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - begin
                given: Tensor = arguments[place] if len(arguments) > place else named["tensor"]
                if name != "gather" or dist.get_rank() == 0:
                    self.received += times * given.numel() * given.element_size()

        return counted


class PerStep(TrainCallback):
    """Notes what each step has brought, and the tokens of its samples."""

    def __init__(self, traffic: Traffic):
        self.traffic, self.steps = traffic, []
        self._before = (0, 0.0, time.perf_counter())

    def on_samples(self, trainer: Any, step: int, samples: Any) -> None:
        self.tokens = sum(len(text.split()) for text in samples.completions)

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        now = (self.traffic.received, self.traffic.seconds, time.perf_counter())
        bytes_, waited, seconds = (x - y for x, y in zip(now, self._before, strict=True))
        self._before = now
        self.steps.append({"per_token": bytes_ / self.tokens, "waited": waited / seconds})


def exchange(folder: Path) -> None:
    """Trains, and keeps what each step but the first has exchanged."""
    count = process_count()
    config = PPOConfig(batch_size=SAMPLES // count, mini_batch_size=SAMPLES // count, ppo_epochs=1)
    trainer = PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer())
    noted = PerStep(Traffic())
    trainer.train(
        lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        steps=STEPS,
        prompts=[f"w{3 + i % 90} w{4 + i % 7} w5" for i in range(SAMPLES)],
        generation_kwargs={"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "top_k": 0},
        callbacks=[noted],
        output=folder / "run",
        save_every=0,
        progress=False,
    )
    keep({"steps": noted.steps[1:]}, "traffic", folder)
