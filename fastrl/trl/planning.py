"""The memory of trainers by TRL's names, from a rehearsal of two optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from fastrl.plan.passes import PassSize
from fastrl.plan.rehearsal import CHOICES_LEFT_OUT, OPTIMIZER_STEPS, rehearsal
from fastrl.plan.report import Plan
from fastrl.plan.skeleton import Skeleton, blank_tokenizer, tokens
from fastrl.rollout import SamplingParams
from fastrl.rollout.rehearsed_engine import RehearsedEngine
from fastrl.rollout.self_check import UnsupportedModel
from fastrl.trainers.planning import rehearse_training, rehearsed, shortened_steps


class PlansMemory:
    """A trainer that can say what it will need of memory."""

    model: Any
    args: Any
    memory_plan: ClassVar[Callable[..., Plan]]  # such as plan_online
    texts_of_an_example = 1

    def plan(
        self,
        prompt_tokens: int,
        response_tokens: int,
        passes: PassSize | None = None,
        device: str | None = None,
    ) -> Plan:
        """What training on such prompts and responses needs of memory, phase by phase: from a
        rehearsal without memory, in which nothing of this trainer is run or changed.

        Args:
            prompt_tokens, response_tokens: of the longest, at least 2.
            passes: plans with these; by default as the settings say.
            device: "cpu" or "cuda", for which the memory is counted; by default the trainer's.

        Returns:
            a :class:`fastrl.plan.report.Plan`, whose ``peak`` is in bytes.
        """
        skeleton, lengths = Skeleton.of(self.model), (prompt_tokens, response_tokens)
        args = self.args if passes is None else passes.of(self.args)
        return self.memory_plan(
            type(self), skeleton, args, *lengths, device or self.args.device.type
        )

    def tokens_of(self, prompt_tokens: int, response_tokens: int) -> tuple[int, int]:
        """Tokens of a batch of such texts, and of what a pass does not split: an example."""
        example = self.texts_of_an_example * (prompt_tokens + response_tokens)
        whole = self.args.per_device_train_batch_size * example
        return whole, whole if self.reads_whole_batches() else example

    def reads_whole_batches(self) -> bool:
        """Whether a loss reads all of a batch, so that passes cannot split it."""
        return False


def plan_preference(
    trainer_class: Any,
    skeleton: Skeleton,
    args: Any,
    prompt_tokens: int,
    response_tokens: int,
    device: str = "cpu",
) -> Plan:
    """The memory of a DPOTrainer or KTOTrainer on data of full length.

    Raises:
        ValueError: settings that the trainer refuses; lengths beyond the model's context.
    """
    from datasets import Dataset

    skeleton.check_tokens(prompt_tokens=prompt_tokens, response_tokens=response_tokens)
    size, length = args.per_device_train_batch_size, prompt_tokens + response_tokens
    count = OPTIMIZER_STEPS * size * shortened_steps(args)
    # Each prompt is another, because those that are the same are run once.
    prompt = [list(range(2 + i % 7, 2 + i % 7 + prompt_tokens)) for i in range(count)]
    vocabulary = skeleton.config.get_text_config().vocab_size
    rows: dict[str, Any] = {"prompt_ids": [[t % vocabulary for t in ids] for ids in prompt]}
    for k, side in enumerate(("chosen", "rejected", "completion", "KL_completion")):
        rows[f"{side}_ids"] = [[2 + k] * response_tokens] * count
    rows["label"] = [bool(i % 2) for i in range(count)]
    with rehearsal(device) as found:
        own = {"max_length": length, "precompute_ref_log_probs": False}
        trainer = trainer_class(
            skeleton.build(),
            args=rehearsed(args, trainer_class.config_class, found, **own),
            train_dataset=Dataset.from_dict(rows),
            processing_class=blank_tokenizer(),
        )
        if getattr(args, "precompute_ref_log_probs", False):
            found.notes.append("the reference stays, as without precompute_ref_log_probs")
        rehearse_training(trainer, found, skeleton)
        sizes = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
        title = f"{skeleton.name}: {trainer_class.short_name}"
        return Plan.of(title, device, found, {**sizes, "batch_size": size})


def plan_online(
    trainer_class: Any,
    skeleton: Skeleton,
    args: Any,
    prompt_tokens: int,
    response_tokens: int,
    device: str = "cpu",
) -> Plan:
    """The memory of a GRPOTrainer or RLOOTrainer, rollouts included, rewards left out.

    Raises:
        ValueError: settings that the trainer refuses; lengths beyond the model's context.
    """
    from datasets import Dataset

    skeleton.check_tokens(prompt_tokens=prompt_tokens, response_tokens=response_tokens)
    steps, group = shortened_steps(args), args.num_generations
    same = args.steps_per_generation == args.gradient_accumulation_steps
    per_generation = steps if same else args.steps_per_generation
    vocabulary = skeleton.config.get_text_config().vocab_size

    with rehearsal(device) as found:
        own = {
            "steps_per_generation": per_generation,
            "generation_batch_size": None,
            "max_completion_length": response_tokens,
            "replay_routing": False,
        }
        if args.replay_routing:
            found.notes.append(CHOICES_LEFT_OUT)
        count = args.per_device_train_batch_size * per_generation // group
        rows = Dataset.from_dict({"prompt": [f"w{i}" for i in range(max(count, 1))]})
        trainer = trainer_class(
            skeleton.build(),
            lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            args=rehearsed(args, trainer_class.config, found, **own),
            train_dataset=rows,
            processing_class=blank_tokenizer(),
        )
        engine: RehearsedEngine | None = None
        try:
            options = {"autocast": trainer.accelerator.autocast, "max_slots": args.rollout_slots}
            engine = RehearsedEngine(trainer.model, trainer.processing_class, **options)
        except UnsupportedModel as error:
            found.notes.append(f"the KV cache, left out: {error.cause}")

        def respond(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
            ids = [tokens(prompt_tokens, vocabulary, start=i // group) for i in range(len(prompts))]
            if engine is not None:
                engine.rehearse(
                    ids[::group], SamplingParams(max_new_tokens=response_tokens, n=group)
                )
                found.keeps(*engine.memory())
                if args.rollout_sleep:
                    engine.sleep()
            said = [[2 + i % 3] * response_tokens for i in range(len(prompts))]
            return {"prompt_ids": ids, "completion_ids": said, "logprobs": None}

        trainer._collect.respond = trainer.responding_by(respond)
        found.notes.append("the reward functions' memory: left out")
        rehearse_training(trainer, found, skeleton)
        sizes = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
        title = f"{skeleton.name}: {trainer_class.__name__.removesuffix('Trainer')}"
        size = args.per_device_train_batch_size
        return Plan.of(title, device, found, {**sizes, "batch_size": size})
