"""Names of TRL, verl and OpenRLHF for settings of the commands.

:func:`aliases_of` is the one table: flags and YAML files take these names, and the documents list
them. A name that means something else than the nearest setting is refused with what to set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from fastrl.eras import value_of

_NONE: Mapping[str, Any] = MappingProxyType({})


class Alias(NamedTuple):
    """Another name of a setting.

    Attributes:
        setting: the setting's own name; "a.b" is the key b of the JSON setting a; "": no setting.
        remedy: what to set in place of a name that is refused.
        where: values of settings, by their own names, beside which the other name is refused.
        values: maps the other name's values to the setting's, if they differ; None: sets nothing.
    """

    setting: str
    remedy: str = ""
    where: Mapping[str, Any] = _NONE
    values: Mapping[Any, str | None] = _NONE

    @property
    def base(self) -> str:
        """The setting's name without the key of a JSON setting."""
        return self.setting.partition(".")[0]

    @property
    def key(self) -> str:
        return self.setting.partition(".")[2]


def _same(**names: str) -> dict[str, Alias]:
    """A table of aliases by their names; ``names`` lists these by the setting that they mean."""
    return {alias: Alias(now) for now, words in names.items() for alias in words.split()}


def _refused(remedy: str, names: str) -> dict[str, Alias]:
    return dict.fromkeys(names.split(), Alias("", remedy))


_JOBS = {
    **_same(
        model="model_name_or_path pretrain",
        dataset="dataset_name",
        dataset_split="dataset_train_split",
        output="output_dir",
        learning_rate="lr",
        dtype="torch_dtype",
        lora_r="lora_rank",
    ),
    "use_peft": Alias(
        "lora_r",
        "--lora-r is the adapter's rank, 0 here: set it, such as 16",
        where={"lora_r": 0},
        values={True: None, False: "0"},
    ),
    **_refused("name the held-out data by --eval-dataset", "dataset_test_split"),
}
_SIZES = (
    "--per-device-train-batch-size examples are in a pass of a device, and "
    "--gradient-accumulation-steps passes in a step"
)
_FITS = {
    **_JOBS,
    **_same(
        num_train_epochs="epochs num_epochs max_epochs",
        max_length="max_len",
        per_device_train_batch_size="micro_train_batch_size",
    ),
    **_refused(_SIZES, "batch_size train_batch_size"),
}
_ROLLOUTS = {
    **_JOBS,
    **_same(
        dataset="prompt_data",
        reward="reward_funcs reward_model_name_or_path reward_model_path reward_pretrain",
        steps="total_training_steps",
        eval_every="eval_steps",
        exp_name="run_name",
        learning_rate="actor_learning_rate",
        group_size="num_generations n_samples_per_prompt rloo_k",
        ppo_epochs="num_iterations num_ppo_epochs max_epochs",
        max_new_tokens="max_completion_length max_response_length response_length generate_max_len",
        cliprange="epsilon clip_ratio clip_range eps_clip",
        cliprange_high="clip_ratio_high",
        ratio_level="importance_sampling_level",
        loss_aggregate="loss_agg_mode",
        entropy_coef="entropy_coeff entropy_loss_coef",
        lam="gae_lambda lambd",
        advantage="adv_estimator advantage_estimator",
        teacher_model="teacher teacher_model_name_or_path",
    ),
    "epsilon_high": Alias(
        "cliprange_high",
        "of cispo --cliprange-high is TRL's epsilon_high less 1: set that",
        where={"policy_loss": "cispo"},
    ),
    "beta": Alias(
        "init_kl_coef",
        "it is a coefficient that stays: set --adap-kl-ctrl false, too, or --init-kl-coef, from "
        "which an adaptive coefficient starts",
        where={"adap_kl_ctrl": True},
    ),
    "kl_coef": Alias(
        "init_kl_coef",
        "it is of a KL in the reward, and stays: set --kl-in reward and --adap-kl-ctrl false, too",
        where={"adap_kl_ctrl": True, "kl_in": "loss"},
    ),
    "kl_loss_coef": Alias(
        "init_kl_coef",
        "it is of a KL in the loss, and stays: set --kl-in loss and --adap-kl-ctrl false, too",
        where={"adap_kl_ctrl": True, "kl_in": "reward"},
    ),
    "bf16": Alias("accelerator_kwargs.mixed_precision", values={True: "bf16", False: "no"}),
    "fp16": Alias("accelerator_kwargs.mixed_precision", values={True: "fp16", False: "no"}),
    **_refused(
        "sizes count completions, --group-size of them to a prompt: --batch-size in a step of a "
        "process (TRL's per_device_train_batch_size × steps_per_generation), --mini-batch-size in "
        "a forward and backward pass (TRL's per_device_train_batch_size); "
        "--gradient-accumulation-steps such passes are in an optimizer step",
        "per_device_train_batch_size generation_batch_size train_batch_size "
        "micro_train_batch_size rollout_batch_size ppo_mini_batch_size num_mini_batches "
        "ppo_micro_batch_size_per_gpu steps_per_generation",
    ),
    **_refused(
        "a run has --steps steps, each on --batch-size completions; a pass over P prompts is "
        "P × --group-size / --batch-size of them",
        "num_train_epochs epochs num_epochs total_epochs num_episodes total_episodes max_steps",
    ),
    **_refused(
        "it keeps a prompt's end: --max-prompt-tokens keeps its beginning, and --long-prompts drop "
        "leaves out prompts that exceed the model's context",
        "max_prompt_length prompt_max_len",
    ),
    **_refused(
        "--policy-loss and --loss-aggregate say it: TRL's grpo is clip and seq-mean-token-mean, "
        "its dapo clip and token-mean; --advantage dr_grpo with seq-mean-token-sum-norm is Dr. "
        "GRPO",
        "loss_type",
    ),
    **_refused(
        "--advantage grpo divides by the deviation of a group, dr_grpo does not", "scale_rewards"
    ),
    **_refused("every step is logged: leave it out", "logging_steps"),
    **_refused("the ledger keeps every sample: fastrl samples prints them", "log_completions"),
    **_refused("the rollout engine generates in this process: leave it out", "use_vllm"),
    **_refused("the learning rate is constant: leave it out", "lr_scheduler_type warmup_steps"),
    **_refused("set --optim-args weight_decay=0.01", "weight_decay"),
}
_ALIASES: dict[str, dict[str, Alias]] = {
    "sft": _FITS,
    "reward": _FITS,
    "align": {
        **_FITS,
        **_same(annotator="reward_model_name_or_path reward_model_path reward_funcs"),
        "beta": Alias("loss_args.beta"),
        "label_smoothing": Alias("loss_args.label_smoothing"),
        "max_completion_length": Alias(
            "max_new_tokens",
            "this task's responses are the data's: set --max-length, or cut them in the data set",
            where={"learning_task.online": False},
        ),
        **_refused(
            "--loss names it, TRL's sigmoid as dpo; --loss ipo is TRL's with --loss-args "
            "'{\"length_means\": true}'",
            "loss_type",
        ),
    },
    "distill": {
        **_JOBS,
        **_same(
            num_train_epochs="epochs num_epochs max_epochs",
            per_device_train_batch_size="micro_train_batch_size",
            num_generations="group_size n_samples_per_prompt",
            max_completion_length="max_new_tokens max_response_length response_length "
            "generate_max_len",
            teacher_model_name_or_path="teacher_model teacher_pretrain",
        ),
        **_refused(_SIZES, "batch_size train_batch_size"),
        **_refused(
            "responses are the student's own: leave it out, or use fastrl.GKDTrainer",
            "lmbda seq_kd",
        ),
    },
    "ppo": _ROLLOUTS,
    "grpo": _ROLLOUTS,
}
_PLANS = _same(
    prompt_tokens="max_prompt_length",
    response_tokens="max_new_tokens max_completion_length max_response_length response_length",
)


def aliases_of(command: str, method: str | None = None) -> dict[str, Alias]:
    """The aliases that a command takes beside its settings' own names.

    Args:
        method: the command that a plan is made for; None: ppo.
    """
    if command == "plan":
        return {**_ALIASES[method or "ppo"], **_PLANS}
    return _ALIASES.get(command, {})


class Words:
    """The words of a command line, or of a file's settings, with settings' own names for aliases.

    Args:
        settings: the command's settings, by each of their own names.
    """

    def __init__(self, aliases: Mapping[str, Alias], settings: Mapping[str, str]):
        self.settings = settings
        self.aliases = {
            name: alias
            for name, alias in aliases.items()
            if name not in settings and alias.base in ("", *settings)
        }
        self._objects = {alias.base for alias in self.aliases.values() if alias.key}
        self._json: dict[str, str] = {}
        self._keys: dict[str, dict[str, Any]] = {}
        self._refused: list[tuple[str, Alias]] = []

    def read(self, words: Sequence[str], place: str = "--") -> list[str]:
        """Returns the words of the command line, or of one file, with settings' own names for
        aliases; aliases of keys of JSON settings are left out, for :meth:`objects`.

        Args:
            place: what stands before a name in errors.

        Raises:
            ValueError: an alias that is refused; two names of a setting with two values.
        """
        seen: dict[str, tuple[str, Any]] = {}
        keys: dict[str, dict[str, Any]] = {}
        rewritten = []
        for name, texts, flag in _flags(words):
            alias = self.aliases.get(name)
            setting = self.settings.get(name, "") if alias is None else alias.setting
            shown = f"{place}{name.replace('_', '-') if place == '--' else name}"
            value = [value_of(text) for text in texts] or [True]
            if alias is not None:
                if not setting:
                    raise ValueError(f"{shown}: {alias.remedy}")
                # A list from JSON has no hash.
                mapped = next((x for key, x in alias.values.items() if key == value[0]), "")
                if alias.where and not mapped:
                    self._refused.append((shown, alias))
                if mapped is None:
                    continue
                if mapped:
                    value, texts, flag = [mapped], [mapped], [f"{flag[0]}={mapped}"]
                flag = [flag[0].replace(flag[0].partition("=")[0], f"--{setting}", 1), *flag[1:]]
            before = seen.setdefault(setting, (shown, value)) if setting else (shown, value)
            if before[0] != shown and before[1] != value:
                raise ValueError(
                    f"{before[0]} and {shown} are one setting, and have two values: leave one out"
                )
            if alias is not None and alias.key:
                keys.setdefault(alias.base, {})[alias.key] = (shown, value[0])
                continue
            if setting in self._objects:
                self._json[setting] = " ".join(texts)
                self._keys.pop(setting, None)
            rewritten += flag
        for setting, parts in keys.items():
            in_json = _object(setting, self._json.get(setting)) if setting in seen else {}
            for key, (shown, value) in parts.items():
                if in_json.get(key, value) != value:
                    raise ValueError(
                        f"{shown} and the {key} of {setting} are one setting, and have two "
                        "values: leave one out"
                    )
                self._keys.setdefault(setting, {})[key] = value
        return rewritten

    def objects(self) -> Iterator[str]:
        """Flags of the JSON settings some of whose keys were given by name, to stand last."""
        for setting, keys in self._keys.items():
            whole = {**_object(setting, self._json.get(setting)), **keys}
            yield f"--{setting}={json.dumps(whole)}"

    def check(self, parsed: Sequence[Any]) -> None:
        """Raises ValueError for an alias that is refused beside a setting's value in ``parsed``."""
        for shown, alias in self._refused:
            for name, value in alias.where.items():
                owner = next(x for x in parsed if hasattr(x, name.partition(".")[0]))
                if attrgetter(name)(owner) == value:
                    raise ValueError(f"{shown}: {alias.remedy}")


def _object(setting: str, text: str | None) -> dict[str, Any]:
    from fastrl.config import parse_json  # which imports torch

    return parse_json(setting, text)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each flag of a command line: its name, the texts of its value, and its words."""
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    yield from (("", [], [word]) for word in words[: starts[0] if starts else None])
    for start, end in zip(starts, [*starts, len(words)][1:], strict=True):
        flag, equals, value = words[start].partition("=")
        texts = [*([value] if equals else []), *words[start + 1 : end]]
        yield flag[2:].replace("-", "_"), texts, list(words[start:end])
