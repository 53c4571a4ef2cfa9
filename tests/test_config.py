"""PPOConfig: the defaults of TRL 0.11, and one clear error per mistake."""

import dataclasses
import math
import sys

import numpy as np
import pytest
from transformers import HfArgumentParser

from fastrl import PPOConfig
from tests.together import together

_OURS = ("rollout_", "reference", "trunk_cache_", "teacher_")  # how names of groups of ours begin
DEFAULTS = {
    "seed": 0, "log_with": None, "task_name": None, "model_name": "gpt2", "query_dataset": "imdb",
    "reward_model": "sentiment-analysis:lvwerra/distilbert-imdb",
    "tracker_kwargs": {}, "accelerator_kwargs": {}, "project_kwargs": {},
    "push_to_hub_if_best_kwargs": {}, "compare_steps": 1, "remove_unused_columns": True,
    "dataset_num_proc": None, "steps": 20_000, "learning_rate": 1.41e-5, "batch_size": 128,
    "mini_batch_size": 128, "forward_batch_size": None, "gradient_accumulation_steps": 1,
    "ppo_epochs": 4, "max_grad_norm": None, "gradient_checkpointing": False,
    "optimize_cuda_cache": None, "optimize_device_cache": False, "adap_kl_ctrl": True,
    "init_kl_coef": 0.2, "kl_penalty": "kl", "target": 6.0, "horizon": 10_000.0,
    "early_stopping": False, "target_kl": 1.0, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2,
    "cliprange_value": 0.2, "vf_coef": 0.1, "ratio_threshold": 10.0, "use_score_scaling": False,
    "use_score_norm": False, "score_clip": None, "whiten_rewards": False,
}  # fmt: skip


def test_defaults_are_those_of_trl():
    config = PPOConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    settable = {f.name for f in dataclasses.fields(PPOConfig) if f.init}
    ours = {"old_logprobs", "num_shared_layers", "sync_ref_every", "ref_ema"}
    ours |= {"advantage", "group_size", "kl_in", "cliprange_high", "loss_aggregate"}
    ours |= {"loss_norm_length", "temperature", "loss_denominator", "on_nonfinite", "ddp_timeout"}
    ours |= {"policy_loss", "ratio_level", "delta", "entropy_coef", "top_entropy_quantile"}
    ours |= {"dynamic_sampling_rounds", "overlong_buffer", "overlong_penalty"}
    ours |= {"mask_truncated_completions", "lam_value", "lam_length_alpha"}
    ours |= {"critic", "critic_learning_rate", "critic_warmup_steps"}
    ours |= {"sapo_temperature_pos", "sapo_temperature_neg", "off_policy_mask_threshold"}
    ours |= {"sampler_correction", "sampler_correction_min", "sampler_correction_max"}
    ours |= {"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"}
    ours |= {"padding_free", "micro_batch_tokens"}
    ours |= {"max_kl", "max_ratio", "optim", "optim_args", "master_weights"}
    ours |= {"offload_optimizer", "activation_offloading"}
    ours |= {"replay_routing", "router_aux_loss_coef", "policy_support", "reference_support"}
    ours |= {"response_format"}
    ours |= {n for n in settable if n.startswith(_OURS)}
    assert settable == {*DEFAULTS, "exp_name", "tracker_project_name", *ours}


def test_every_setting_is_documented():
    for field in dataclasses.fields(PPOConfig):
        if field.init:
            assert field.metadata["help"].endswith("."), field.name


def test_the_experiment_is_named_after_the_script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/sentiment.py", "--seed", "1"])
    assert PPOConfig().exp_name == "sentiment"
    monkeypatch.setattr(sys, "argv", [""])
    assert PPOConfig().exp_name == "fastrl"


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 1), (16, 16), (128, 128), (256, 128)])
def test_an_unset_mini_batch_is_as_large_as_the_batch_up_to_128(batch_size, expected):
    config = PPOConfig(batch_size=batch_size)
    assert config.mini_batch_size == config.backward_batch_size == expected


def test_policy_gradients_are_classic_unless_chosen():
    config = PPOConfig()
    assert (config.advantage, config.group_size, config.kl_in) == ("gae", 1, "reward")
    assert (config.cliprange_high, config.loss_aggregate) == (None, "token-mean")
    assert config.needs_values
    assert config.prompts_per_step == config.batch_size
    grouped = PPOConfig(advantage="rloo", group_size=4, batch_size=32)
    assert not grouped.needs_values
    assert grouped.prompts_per_step == 8


GRPO = {"advantage": "grpo", "group_size": 4, "batch_size": 8}
RLOO = {"advantage": "rloo", "group_size": 2}
CORRECTED = {"sampler_correction": "token-truncate"}


@together(("settings", "message"), [
    ({"advantage": "ppo"}, "unknown advantage 'ppo': choose one of gae, grpo, dr_grpo, rloo, rein"),
    ({"policy_loss": "gspo"}, "unknown policy_loss 'gspo': choose one of clip, cispo, sapo"),
    ({"ratio_level": "word"}, "unknown ratio_level 'word': choose one of token, sequence"),
    ({"dynamic_sampling_rounds": 1}, "but advantage='gae' has no groups: choose another"),
    ({"overlong_buffer": 0}, "overlong_buffer must be positive or None, got 0"),
    ({"delta": 1.1}, "delta must be above 1 \\+ cliprange_high = 1.2, got 1.1"),
    ({"delta": 4.0, "policy_loss": "sapo"}, "delta is for policy_loss='clip', not 'sapo'"),
    ({"entropy_coef": math.nan}, "entropy_coef must be a number and finite, got nan"),
    ({"top_entropy_quantile": 0.0}, "top_entropy_quantile must lie in"),
    ({"sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be positive, got 0.0"),
    ({"vespo_lambda_pos": 0.0}, "vespo_lambda_pos must be positive, got 0.0"),
    ({"vespo_k_neg": -1.0}, "vespo_k_neg must be 0 or more"),
    ({"policy_loss": "vespo", "ratio_level": "sequence"},
     "ratio_level='sequence', but policy_loss='vespo' has a ratio of whole responses"),
    ({"kl_in": "score"}, "unknown kl_in 'score': choose one of reward, loss"),
    ({"loss_aggregate": "mean"}, "unknown loss_aggregate 'mean': choose one of token-mean"),
    ({"group_size": 4}, "group_size=4, but advantage='gae' compares no responses"),
    ({"advantage": "rloo"}, "'rloo' with group_size=1: a group of one has nothing to be"),
    ({**GRPO, "group_size": 0}, "group_size must be positive, got 0"),
    ({**GRPO, "group_size": 3}, r"batch_size \(8\) must be a multiple of group_size \(3\)"),
    ({**GRPO, "gamma": 0.9}, "gamma=0.9, but advantage='grpo' takes plain sums"),
    ({**GRPO, "whiten_rewards": True}, "whiten_rewards is for advantage='gae'"),
    ({"cliprange_high": -0.1}, "cliprange_high must be 0 or more or None, got"),
    ({"loss_norm_length": 0}, "loss_norm_length must be positive or None, got 0"),
    ({"kl_in": "loss", "kl_penalty": "full"}, "kl_penalty='full' with kl_in='loss'"),
    ({"batch_size": 0}, "batch_size must be positive, got 0"),
    ({"batch_size": 6, "mini_batch_size": 4}, r"batch_size \(6\) must be a multiple"),
    ({"mini_batch_size": -1}, "mini_batch_size must be positive"),
    ({"ppo_epochs": 0}, "ppo_epochs must be positive"),
    ({"learning_rate": math.inf}, "learning_rate must be 0 or more and finite"),
    ({"temperature": 0.0}, "temperature must be positive"),
    ({"gamma": 1.1}, r"gamma must lie in \[0, 1\]"),
    ({"cliprange": math.nan}, "cliprange must be 0 or more"),
    ({"kl_penalty": "js"}, "unknown kl_penalty 'js'.*kl, abs, mse, full"),
    ({"on_nonfinite": "hide"}, "on_nonfinite"),
    ({"rollout_backend": "vllm"}, "unknown rollout_backend 'vllm': choose one of"),
    ({"old_logprobs": "never"}, "unknown old_logprobs 'never': choose one of"),
    ({"max_kl": 0.0}, "max_kl must be positive or None, got 0"),
    ({"max_ratio": -1.0}, "max_ratio must be positive or None"),
    ({"max_ratio": 0.0}, "max_ratio must be positive or None, got 0"),
    ({"max_grad_norm": 0.0}, "max_grad_norm must be positive or None"),
    ({"micro_batch_tokens": 0}, "micro_batch_tokens must be positive or None"),
    ({"micro_batch_tokens": -1}, "micro_batch_tokens must be positive or None"),
    ({"loss_denominator": "batch"}, "unknown loss_denominator 'batch': choose one of auto"),
    ({"lam_value": 1.5}, r"lam_value must lie in \[0, 1\] or None, got 1.5"),
    ({"lam_value": math.nan}, "lam_value must lie in"),
    ({"lam_length_alpha": 0.0}, "lam_length_alpha must be positive or None, got 0.0"),
    ({"critic_warmup_steps": -1}, "critic_warmup_steps must be 0 or more"),
    ({**RLOO, "lam_value": 0.0}, "lam_value is of a value function"),
    ({**RLOO, "lam_length_alpha": 0.05}, "lam_length_alpha is of a value function"),
    ({**RLOO, "critic_warmup_steps": 1}, "critic_warmup_steps is of a value function"),
    ({"sampler_correction": "token"}, "unknown sampler_correction 'token': choose one of off"),
    ({**CORRECTED, "sampler_correction_max": None}, "a bound: set sampler_correction_max"),
    ({**CORRECTED, "sampler_correction_max": 0.0}, "sampler_correction_max must be positive"),
    ({**CORRECTED, "sampler_correction_min": math.nan}, "correction_min must be positive"),
    ({**CORRECTED, "sampler_correction_min": 3.0},
     r"min \(3.0\) must be below sampler_correction_max"),
    ({**CORRECTED, "old_logprobs": "rollout"}, "the sampler's log-probs for the policy's own"),
    ({"policy_loss": "vespo", "sampler_correction": "sequence-mask"},
     "choose token-truncate or token-mask"),
])  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_derived_sizes():
    config = PPOConfig(batch_size=24, mini_batch_size=4, gradient_accumulation_steps=3, steps=100)
    assert config.backward_batch_size == 12
    assert config.total_ppo_epochs == 5  # 100 samples in batches of 24


JSON_FIELDS = [
    "tracker_kwargs", "accelerator_kwargs", "project_kwargs", "push_to_hub_if_best_kwargs",
]  # fmt: skip


@pytest.mark.parametrize("name", JSON_FIELDS)
def test_json_settings_take_a_string_a_dict_or_none(name):
    text, value = '{"repo_id": {"b": [1, 2]}}', {"repo_id": {"b": [1, 2]}}
    assert getattr(PPOConfig(**{name: text}), name) == value
    assert getattr(PPOConfig(**{name: value}), name) == value
    assert getattr(PPOConfig(**{name: None}), name) == {}


@pytest.mark.parametrize("name", JSON_FIELDS)
def test_json_settings_that_hold_no_object_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is not valid JSON"):
        PPOConfig(**{name: "{wandb: 1}"})
    with pytest.raises(TypeError, match=f"{name} must be a dict or a JSON object"):
        PPOConfig(**{name: "[1]"})
    with pytest.raises(TypeError, match=f"{name} must be a dict or a JSON object"):
        PPOConfig(**{name: 3})


def test_settings_come_from_the_command_line():
    flags = [
        "--batch_size=32", "--mini_batch_size=8", "--learning_rate=1e-4", "--kl_penalty=abs",
        "--no_adap_kl_ctrl", "--whiten_rewards", "--score_clip=2.5",
        '--accelerator_kwargs={"cpu": true}', "--log_with=wandb",
    ]  # fmt: skip
    (config,) = HfArgumentParser((PPOConfig,)).parse_args_into_dataclasses(args=flags)
    expected = PPOConfig(
        batch_size=32, mini_batch_size=8, learning_rate=1e-4, kl_penalty="abs", adap_kl_ctrl=False,
        whiten_rewards=True, score_clip=2.5, accelerator_kwargs={"cpu": True}, log_with="wandb",
    )  # fmt: skip
    assert config.to_dict() == expected.to_dict()
    (unset,) = HfArgumentParser((PPOConfig,)).parse_args_into_dataclasses(args=["--batch_size=4"])
    assert unset.mini_batch_size == 4


def test_the_help_shows_every_sentence():
    text = " ".join(HfArgumentParser((PPOConfig,)).format_help().split())
    assert "--cliprange_value" in text
    assert "Clip range of the probability ratio." in text


def test_to_dict_is_flat():
    settings = PPOConfig(tracker_kwargs={"wandb": {"entity": "me"}}, batch_size=4).to_dict()
    assert settings["tracker_kwargs/wandb/entity"] == "me"
    assert settings["batch_size"] == settings["mini_batch_size"] == 4
    assert {"kl_penalty", "backward_batch_size", "world_size"} <= set(settings)
    assert not any(isinstance(value, dict) for value in settings.values())


def test_deprecated_names_warn_and_act():
    with pytest.warns(FutureWarning, match="set that instead") as caught:
        config = PPOConfig(batch_size=8, forward_batch_size=2)
    assert config.mini_batch_size == 2
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match="use optimize_device_cache") as caught:
        assert PPOConfig(optimize_cuda_cache=True).optimize_device_cache
    assert caught[0].filename == __file__


NAN = float("nan")
MISTAKES = {
    **{
        name: [0, -1]
        for name in (
            "batch_size",
            "mini_batch_size",
            "gradient_accumulation_steps",
            "ppo_epochs",
            "steps",
            "compare_steps",
        )
    },
    **{name: [0.0, -1.0, NAN] for name in ("horizon", "target_kl", "ratio_threshold")},
    **{
        name: [-0.1, NAN, float("inf")]
        for name in ("learning_rate", "init_kl_coef", "cliprange", "cliprange_value", "vf_coef")
    },
    **{name: [-0.1, 1.1, NAN] for name in ("gamma", "lam")},
    **{name: [0.0, -1.0, NAN] for name in ("max_grad_norm", "score_clip")},
    "target": [0.0, -6.0],
    "kl_penalty": ["kll", ""],
    "reference": ["clone", ""],
    "reference_adapter": ["sft"],
    **{name: [-1, NAN, float("inf")] for name in ("trunk_cache_gib", "trunk_cache_host_gib")},
    "sync_ref_every": [-1],
    "ref_ema": [0.0, -0.5, 1.1, NAN],
    "rollout_kv_cache_gib": [0.0, -1.0, NAN],
    "push_to_hub_if_best_kwargs": [{"private": True}],
}


@together(
    ("name", "value"), [(name, value) for name, values in MISTAKES.items() for value in values]
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        PPOConfig(**{name: value})


@together(("name", "value", "message"), [
    ("delta", "4", r"delta must be a number or None, got '4' \(str\)"),
    ("learning_rate", True, "learning_rate must be a number, got True"),
    ("dynamic_sampling_rounds", 1.5, r"dynamic_sampling_rounds must be a whole number, got 1.5"),
    ("overlong_buffer", 2.5, "overlong_buffer must be a whole number or None, got 2.5"),
    ("critic_warmup_steps", True, r"critic_warmup_steps must be a whole number, got True \(bool\)"),
    ("sync_ref_every", NAN, "sync_ref_every must be a whole number, got nan"),
    ("batch_size", float("inf"), "batch_size must be a whole number, got inf"),
    ("mask_truncated_completions", "yes", "must be True or False, got 'yes'"),
    ("critic", 5, "critic must be a text or None, got 5"),
    ("kl_penalty", None, "kl_penalty must be a text, got None"),
])  # fmt: skip
def test_a_value_of_another_type_is_refused_by_name(name, value, message):
    with pytest.raises(TypeError, match=message):
        PPOConfig(**{name: value})


def test_whole_floats_and_numpys_numbers_are_sizes(tmp_path):
    config = PPOConfig(steps=1e5, batch_size=np.int64(8), lam=np.float32(0.5), critic=tmp_path)
    assert (config.steps, config.batch_size, config.lam) == (100_000, 8, 0.5)
    assert isinstance(config.steps, int)


@pytest.mark.parametrize(("settings", "unread"), [
    ({"sapo_temperature_neg": 2.0}, "sapo_temperature_neg=2.0 .policy_loss='clip', not sapo"),
    ({"policy_loss": "sapo", "vespo_k_pos": 1.0}, "vespo_k_pos=1.0 .policy_loss='sapo'"),
    ({"policy_loss": "sapo", "cliprange_high": 0.3}, "cliprange_high=0.3 .*not clip or cispo"),
    ({"sampler_correction_max": 2.0}, "sampler_correction_max=2.0 .sampler_correction='off'"),
    ({"overlong_penalty": 0.5}, "overlong_penalty=0.5 .overlong_buffer is None"),
], ids=str)  # fmt: skip
def test_settings_that_nothing_reads_are_named(settings, unread):
    with pytest.warns(UserWarning, match=f"settings that nothing reads: {unread}") as caught:
        PPOConfig(**settings)
    assert caught[0].filename == __file__


def test_settings_that_are_read_are_not(recwarn):
    PPOConfig(policy_loss="sapo", sapo_temperature_neg=2.0)
    PPOConfig(policy_loss="vespo", vespo_lambda_neg=1.0)
    PPOConfig(policy_loss="cispo", cliprange_high=0.3)
    PPOConfig(sampler_correction="token-mask", sampler_correction_min=0.5, overlong_penalty=1)
    PPOConfig(overlong_buffer=8, overlong_penalty=0.5)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", 0.0), ("vf_coef", 0), ("gamma", 0), ("lam", 1), ("init_kl_coef", 0.0)],
)
def test_values_at_the_edge_are_accepted(name, value):
    assert getattr(PPOConfig(**{name: value}), name) == value


def test_a_fixed_coefficient_needs_no_target():
    assert PPOConfig(adap_kl_ctrl=False, target=0.0).target == 0.0


def test_sizes_that_do_not_divide_are_refused():
    message = r"batch_size \(10\).*mini_batch_size \(2\) × gradient_accumulation_steps \(3\)"
    with pytest.raises(ValueError, match=message):
        PPOConfig(batch_size=10, mini_batch_size=2, gradient_accumulation_steps=3)


def test_what_the_trainer_fills_in_cannot_be_set():
    with pytest.raises(TypeError, match="world_size"):
        PPOConfig(world_size=2)
