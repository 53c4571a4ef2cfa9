"""The tables of docs/capabilities.md: what each way of training can, by the names it has there, and
which layers run packed and in slots.

    python docs/.api/capabilities.py        writes it into the page (`make docs` does)

The names are looked up in the signatures and configurations; where there is none, why stands here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fastrl
from fastrl import alignment
from fastrl.models.layer_kinds import KINDS
from fastrl.settings import idle_settings, refusals

PAGE = Path(__file__).parents[1] / "capabilities.md"
_BLOCK = re.compile(
    r"^(<!-- capabilities -->\n)(?:(?!<!-- end -->).*\n)*(?=<!-- end -->)", re.MULTILINE
)
_LAYERS = re.compile(
    r"^(<!-- layers -->\n)(?:(?!<!-- end of layers -->).*\n)*(?=<!-- end of layers -->)",
    re.MULTILINE,
)
_YOURS = "*the samples are yours*"
_NO_RUN = "*has no run folder*"
_NO_SAMPLES = "*nothing is sampled*"
_NO_BASELINE = "*a group is its own baseline*"
_NO_ADVANTAGES = "*has no advantages*"
_NO_REWARDS = "*nothing is rewarded*"
_ANNOTATORS = "*the annotator judges*"
_NO_RATIO = "*preferences have no ratio to a sampler, and PPO's ratio is per token*"
_SCORES = "*responses are scored as a whole*"
_OF_PARAMS = "in an engine's `SamplingParams`"
_WHOLE = "*log-probs are over the whole vocabulary*"
_NO_DROPOUT = "*always off, so that ratios to the sampling policy stay exact*"
_OWN = "`register_policy_loss`, `group_advantage`"
_ONLY_TRAIN = "In train(): "  # how help of settings begins that step() does not read


class Surface(NamedTuple):
    """A way of training.

    Attributes:
        trainers: that have what it has, all of them.
        calls: whose arguments are its own.
        methods: that belong to it.
    """

    title: str
    trainers: dict[Any, Any]  # classes, by their configurations
    calls: Callable[[Any], list[Any]]
    methods: tuple[str, ...] = ("plan",)
    steps_alone: bool = False

    def has(self, name: str) -> bool:
        return all(
            (name in self.methods and hasattr(trainer, name))
            or any(name in inspect.signature(call).parameters for call in self.calls(trainer))
            or self._reads(config, name)
            for config, trainer in self.trainers.items()
        )

    def _reads(self, config: Any, name: str) -> bool:
        if name in refusals(config) or name in idle_settings(config):
            return False
        for field in dataclasses.fields(config):
            if field.name == name:
                said = str(field.metadata.get("help", ""))
                return not (self.steps_alone and said.startswith(_ONLY_TRAIN))
        return False


def _made_and_trained(trainer: Any) -> list[Any]:
    return [trainer.__init__, trainer.train]


PPO = {fastrl.PPOConfig: fastrl.PPOTrainer}
SURFACES = {
    "step": Surface(
        "`generate` and `step()`",
        PPO,
        lambda trainer: [trainer.__init__, trainer.step],
        ("plan", "save_checkpoint"),
        steps_alone=True,
    ),
    "train": Surface("`train()`, `fastrl ppo`, `fastrl grpo`", PPO, _made_and_trained),
    "grpo": Surface("`GRPOTrainer`", {fastrl.GRPOConfig: fastrl.GRPOTrainer}, _made_and_trained),
    "rloo": Surface("`RLOOTrainer`", {fastrl.RLOOConfig: fastrl.RLOOTrainer}, _made_and_trained),
    "teachers": Surface(
        "`DistillationTrainer`, `GKDTrainer`, `SDFTTrainer`",
        {
            fastrl.DistillationConfig: fastrl.DistillationTrainer,
            fastrl.GKDConfig: fastrl.GKDTrainer,
            fastrl.SDFTConfig: fastrl.SDFTTrainer,
        },
        _made_and_trained,
    ),
    "pairs": Surface(
        "`DPOTrainer`, `KTOTrainer`",
        {fastrl.DPOConfig: fastrl.DPOTrainer, fastrl.KTOConfig: fastrl.KTOTrainer},
        _made_and_trained,
    ),
    "align": Surface(
        "`alignment.Trainer`, `fastrl align`",
        {alignment.AlignmentConfig: alignment.Trainer},
        lambda trainer: [*_made_and_trained(trainer), alignment.BatchFactory.__init__],
    ),
    "texts": Surface(
        "`SFTTrainer`, `RewardTrainer`",
        {fastrl.SFTConfig: fastrl.SFTTrainer, fastrl.RewardConfig: fastrl.RewardTrainer},
        _made_and_trained,
    ),
}


class Capability(NamedTuple):
    """Something that a way of training can.

    Attributes:
        names: of the settings, arguments and methods that ask for it, somewhere.
        why: it is missing, by surface.
    """

    title: str
    names: tuple[str, ...]
    why: dict[str, str]


_SAMPLED_BY_NONE = {"pairs": _NO_SAMPLES, "texts": _NO_SAMPLES}
CAPABILITIES = (
    Capability("a memory plan", ("plan",), {}),
    Capability(
        "resuming from a checkpoint, bit for bit",
        ("resume", "save_checkpoint", "resume_from_checkpoint"),
        {},
    ),
    Capability("offloading", ("offload_optimizer", "activation_offloading"), {}),
    Capability("handling of non-finite steps", ("on_nonfinite",), {}),
    Capability(
        "a limit on the tokens per pass",
        ("micro_batch_tokens",),
        {},
    ),
    Capability(
        "a shared or offloaded reference",
        ("reference", "num_shared_layers"),
        {"teachers": "*has none*", "texts": "*has none*"},
    ),
    Capability(
        "a moving reference",
        ("sync_ref_every", "sync_ref_model"),
        {"teachers": "*has none*", "texts": "*has none*"},
    ),
    Capability(
        "held-out data",
        ("eval_prompts", "eval_dataset", "eval_factory"),
        {"step": _NO_RUN},
    ),
    Capability(
        "a ledger of the samples, and replay",
        ("ledger",),
        {
            "step": _NO_RUN,
            **_SAMPLED_BY_NONE,
        },
    ),
    Capability(
        "samples in trackers or tables",
        ("log_with", "log_completions"),
        _SAMPLED_BY_NONE,
    ),
    Capability(
        "`fastrl report` and `fastrl doctor`",
        ("output_dir",),
        {"step": _NO_RUN, "train": "with commands or a `JsonlCallback`"},
    ),
    Capability(
        "reward timeouts and retries",
        ("reward_timeout", "reward_retries", "reward_batch_size"),
        {
            "step": "*the rewards are yours*",
            "align": "in an annotator's `Rewards`",
            "teachers": _NO_REWARDS,
            "pairs": _NO_SAMPLES,
            "texts": _NO_SAMPLES,
        },
    ),
    Capability(
        "token rewards",
        (),
        {
            "step": "a tensor for each response",
            "train": "a list for each response",
            "grpo": "*summed: a group compares responses*",
            "rloo": "*summed: a group compares responses*",
            "align": _SCORES,
            "teachers": _NO_REWARDS,
            **_SAMPLED_BY_NONE,
        },
    ),
    Capability(
        "penalties for how responses end",
        ("missing_eos_penalty", "overlong_buffer"),
        {
            "step": "*the rewards are yours*",
            "align": _ANNOTATORS,
            "teachers": _NO_REWARDS,
            **_SAMPLED_BY_NONE,
        },
    ),
    Capability(
        "resampling of groups without spread",
        ("dynamic_sampling_rounds",),
        {
            "step": _YOURS,
            "align": "*ties are learned as ties*",
            "teachers": _NO_REWARDS,
            **_SAMPLED_BY_NONE,
        },
    ),
    Capability(
        "replay of the experts that a rollout chose",
        ("replay_routing",),
        {
            "align": "*is not recorded*",
            "teachers": "`replay_routing` (not `GKDTrainer`)",
            **_SAMPLED_BY_NONE,
        },
    ),
    Capability(
        "responses of a given form",
        ("response_format",),
        {"align": _OF_PARAMS, **_SAMPLED_BY_NONE},
    ),
    Capability(
        "log-probs over what each token was drawn from",
        ("policy_support",),
        {"align": _WHOLE, "teachers": _WHOLE, **_SAMPLED_BY_NONE},
    ),
    Capability(
        "teachers",
        ("teacher_model", "teacher_model_kind"),
        {"align": "*not yet: `GRPOTrainer`*", **_SAMPLED_BY_NONE},
    ),
    Capability(
        "tools and environments",
        ("tools", "environment_factory", "response_masks"),
        {
            "align": "*whole texts are judged*",
            "teachers": "`tools`, `environment_factory` (`DistillationTrainer`)",
            **_SAMPLED_BY_NONE,
        },
    ),
    Capability(
        "responses from another sampler",
        ("rollout_func", "rollout", "engine"),
        _SAMPLED_BY_NONE,
    ),
    Capability(
        "correction for that sampler",
        ("sampler_correction", "vllm_importance_sampling_correction"),
        {"align": _NO_RATIO, "teachers": "*the loss has no ratio*", **_SAMPLED_BY_NONE},
    ),
    Capability(
        "masking of off-policy responses",
        ("off_policy_mask_threshold",),
        {"align": _NO_RATIO, "teachers": "*the loss has no ratio*", **_SAMPLED_BY_NONE},
    ),
    Capability(
        "dropout",
        ("disable_dropout",),
        {"step": _NO_DROPOUT, "train": _NO_DROPOUT, "texts": "as the model is configured"},
    ),
    Capability(
        "a loss or an advantage of your own",
        (),
        {
            "step": _OWN,
            "train": _OWN,
            "grpo": _OWN,
            "rloo": "*has a single loss*",
            "pairs": "`loss_of_pairs` (DPO)",
            "align": "`loss_of_pairs`, a `Loss`",
            "teachers": "*the loss is the divergence*",
            "texts": "*the loss is the likelihood*",
        },
    ),
    Capability(
        "a separate critic",
        ("critic",),
        {
            "grpo": _NO_BASELINE,
            "rloo": _NO_BASELINE,
            "align": "*the loss `ppo` trains a value head*",
            "teachers": _NO_ADVANTAGES,
            "pairs": _NO_ADVANTAGES,
            "texts": _NO_ADVANTAGES,
        },
    ),
)


def cell(capability: Capability, surface: str) -> str:
    """The names by which a way of training has it, or why it has not.

    Raises:
        KeyError: neither.
        ValueError: it has it, and a reason why not stands here.
    """
    found = [name for name in capability.names if SURFACES[surface].has(name)]
    if not found:
        return capability.why[surface]
    if surface in capability.why:
        raise ValueError(f"{capability.title}: {surface} has {', '.join(found)}")
    return ", ".join(f"`{name}`" for name in found)


def table() -> str:
    rows = [["", *(surface.title for surface in SURFACES.values())], ["---"] * (1 + len(SURFACES))]
    rows += [[f"**{x.title}**", *(cell(x, name) for name in SURFACES)] for x in CAPABILITIES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def layers() -> str:
    """What runs packed and in slots, kind by kind."""
    rows = [
        "| layers | a slot keeps | in packed rows | among others in |",
        "| --- | --- | --- | --- |",
    ]
    rows += [f"| {kind.name} | {kind.keeps} | {kind.packed} | {kind.models} |" for kind in KINDS]
    return "".join(f"{row}\n" for row in rows)


def render(text: str) -> str:
    text = _BLOCK.sub(lambda found: found[1] + table(), text)
    return _LAYERS.sub(lambda found: found[1] + layers(), text)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
