"""The settings of ``fastrl plan``: a model, a method, and the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fastrl.settings import check_ranges, setting, setting_like
from fastrl.tools.commands.flags import UsageError, unknown_name
from fastrl.tools.commands.job import TrainingJob, check_adapter, check_weights
from fastrl.tools.recipes import recipes

if TYPE_CHECKING:
    from fastrl.trainers.plan.skeleton import Skeleton


class PlannedMethod(NamedTuple):
    """What a plan has to know of a method."""

    flags: tuple[str, str]  # a module of commands, and its class of the method's flags
    trainer: tuple[str, str]  # its module and its name
    size: str = "per_device_train_batch_size"  # the setting of samples, or pairs, in a mini-batch
    # Samples that are generated before an update, by the flags; None: no more than a mini-batch.
    generation: Callable[[Any], int] | None = None
    growth: Callable[[Any], float] = lambda flags: float("inf")  # by how much a mini-batch can grow
    whole_texts: bool = False  # whether a prompt and its response are one text
    reward_model: bool = False  # whether a classifier learns pairs
    taught: bool = False  # whether there are teachers, and no reference


_POLICY_GRADIENT = PlannedMethod(
    ("ppo", "PPOFlags"),
    ("fastrl.trainers.ppo", "PPOTrainer"),
    "mini_batch_size",
    lambda flags: flags.batch_size,
    lambda flags: flags.batch_size / flags.mini_batch_size,
)
METHODS = {
    "ppo": _POLICY_GRADIENT,
    "grpo": _POLICY_GRADIENT._replace(flags=("ppo", "GRPOFlags")),
    "sft": PlannedMethod(
        ("sft", "SFTFlags"), ("fastrl.trainers.sft", "SFTTrainer"), whole_texts=True
    ),
    "reward": PlannedMethod(
        ("reward", "RewardFlags"),
        ("fastrl.trainers.reward", "RewardTrainer"),
        whole_texts=True,
        reward_model=True,
    ),
    "distill": PlannedMethod(
        ("distill", "DistillFlags"),
        ("fastrl.trainers.groups.distillation", "DistillationTrainer"),
        generation=lambda flags: flags.per_device_train_batch_size * flags.steps_per_generation,
        growth=lambda flags: flags.gradient_accumulation_steps,
        taught=True,
    ),
}
# Of the losses of preference learning.
PREFERENCES = PlannedMethod(("align", "AlignFlags"), ("fastrl.alignment.trainer", "Trainer"))
LARGEST_GIB = 4096


def losses() -> tuple[str, ...]:
    """The names of the losses of preference learning."""
    from fastrl.alignment.losses import LOSSES

    return tuple(name for name in LOSSES if name not in METHODS)


@dataclass(kw_only=True)
class PlanJob:
    """What to plan, and for which device.

    Raises:
        ValueError: an unknown method, task, precision or device; a size out of range; what
            :func:`check_weights` refuses.
    """

    command: ClassVar[str] = "plan"
    _argument_group_name: ClassVar[str] = "the plan"
    essentials: ClassVar[dict[str, str]] = {
        "what to plan": "model method task recipe prompt_tokens response_tokens",
        "for which device": "gpu_gib device precision as_json",
        "weights": "dtype lora_r load_in_4bit",
    }

    model: str = setting(
        "The model: a directory (a run's, or of an adapter) or a Hub id. Only its configuration is "
        "read."
    )
    recipe: str | None = setting(
        "Plan a recipe, see fastrl recipes, for its device. Flags beside it win.",
        None,
        choices=recipes,
    )
    method: str = setting(
        "ppo, grpo, sft, reward, distill, or a loss of preference learning, such as dpo. Further "
        "flags are those of the method's command.",
        "ppo",
    )
    task: str | None = setting(
        "Task of preference learning, such as online-pairwise; by default the loss's first.", None
    )
    gpu_gib: float | None = setting(
        "Memory of the GPU in GiB: the plan then says whether the run fits, what more there is "
        "room for, or what to change.",
        None,
    )
    prompt_tokens: int = setting("Tokens of each prompt.", 256)
    response_tokens: int = setting(
        "Tokens of each response. Texts of sft and reward have prompt_tokens more.", 256
    )
    teacher_prompt_tokens: int | None = setting(
        "Distillation: tokens of each prompt that a teacher reads, if not the student's.",
        None,
        within="[2, inf)",
    )
    lora_r: int = setting_like(TrainingJob, "lora_r")
    load_in_4bit: bool | None = setting_like(TrainingJob, "load_in_4bit")
    bnb_4bit_quant_type: str = setting_like(TrainingJob, "bnb_4bit_quant_type")
    use_bnb_nested_quant: bool = setting_like(TrainingJob, "use_bnb_nested_quant")
    dtype: str = setting_like(TrainingJob, "dtype")
    precision: str = setting(
        "Precision of the computation: fp32, bf16 (by autocast), or auto: bf16 on a GPU.",
        "auto",
        choices=("auto", "fp32", "bf16"),
    )
    device: str = setting(
        "cpu, cuda, or auto: cuda where there is a GPU, or gpu_gib is set.",
        "auto",
        choices=("auto", "cpu", "cuda"),
    )
    as_json: bool = setting("Print the plan as JSON.", False)

    def __post_init__(self) -> None:
        from fastrl.trainers.plan.report import usable

        check_ranges(self, type(self))
        check_method(self.method)
        if self.gpu_gib is not None and not 0 < self.gpu_gib <= LARGEST_GIB:
            raise ValueError(
                f"gpu_gib must be above 0 and at most {LARGEST_GIB}, the GPU's memory in GiB, got "
                f"{self.gpu_gib:g}"
            )
        if self.gpu_gib is not None and usable(self.gpu_gib) <= 0:
            raise ValueError(f"gpu_gib={self.gpu_gib:g} is less than a GPU's driver itself takes")
        check_weights(self)
        if self.teacher_prompt_tokens is not None and not self.row.taught:
            raise ValueError(
                "teacher_prompt_tokens is for the method distill: leave it out, or set that"
            )
        if self.task is not None:
            self._check_task(self.task)

    def _check_task(self, task: str) -> None:
        """Raises ValueError for an unknown task, or one that the method's loss does not learn."""
        from fastrl.alignment.losses import make_loss
        from fastrl.alignment.tasks import find_task

        if self.row is not PREFERENCES:
            raise ValueError(f"task={task!r} is for losses of preference learning: leave it out")
        loss = make_loss(self.method)
        loss.check(find_task(task), 2 * loss.minibatches_per_batch)

    @property
    def row(self) -> PlannedMethod:
        """What is known of the method."""
        return METHODS.get(self.method, PREFERENCES)

    @property
    def samples_responses(self) -> bool:
        """Whether the policy writes the responses, in a rollout engine with slots."""
        if self.row is not PREFERENCES:
            return self.row.generation is not None
        return bool(self._task.online)

    @property
    def learns_pairs(self) -> bool:
        """Whether an example has two texts."""
        if self.row is not PREFERENCES:
            return self.row.reward_model
        return bool(self._task.generations == 2)

    @property
    def learns_a_reward_model(self) -> bool:
        """Whether a classifier is trained, which reads all texts of an example at once."""
        from fastrl.alignment.losses import LOSSES

        if self.row is not PREFERENCES:
            return self.row.reward_model
        return LOSSES[self.method].learns == "reward model"

    @property
    def _task(self) -> Any:
        """The task of preference learning: the one that is set, or the loss's first."""
        from fastrl.alignment.losses import LOSSES
        from fastrl.alignment.tasks import find_task

        return find_task(self.task or LOSSES[self.method].tasks[0])

    @property
    def kind_of_device(self) -> str:
        import torch

        if self.device != "auto":
            return self.device
        return "cuda" if self.gpu_gib is not None or torch.cuda.is_available() else "cpu"

    @property
    def mixed_precision(self) -> bool:
        """Whether bf16 autocast is on."""
        if self.precision == "auto":
            return self.kind_of_device == "cuda"
        return self.precision == "bf16"

    def skeleton(self) -> Skeleton:
        """The model without its weights."""
        from fastrl.models.quantised import four_bit_config
        from fastrl.trainers.plan.skeleton import Skeleton

        check_adapter(self)
        adapter = None if self.lora_r == 0 else new_adapter(self.lora_r)
        skeleton = Skeleton.read(self.model, self.dtype, adapter)
        if self.load_in_4bit is not None:
            skeleton.four_bits = None
        if self.load_in_4bit:
            nested = self.use_bnb_nested_quant
            skeleton.four_bits = four_bit_config(skeleton.dtype, self.bnb_4bit_quant_type, nested)
        return skeleton


def new_adapter(rank: int) -> Any:
    """The LoRA configuration of an adapter on the weights that the training commands adapt."""
    from fastrl.models.utils import need_peft

    need_peft("a plan with an adapter")
    from peft import LoraConfig

    return LoraConfig(r=rank, task_type="CAUSAL_LM")


def check_method(method: str) -> None:
    """Raises UsageError for an unknown method."""
    if method in METHODS:
        return
    methods = (*METHODS, *losses())
    if method not in methods:
        message = unknown_name("method", method, methods)
        choices = "" if "did you mean" in message else f": choose one of {', '.join(methods)}"
        raise UsageError(message + choices)
