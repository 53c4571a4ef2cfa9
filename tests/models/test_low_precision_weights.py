"""Trainers that keep no float32 masters warn, once, of trainable weights too coarse for the updates
that they are given."""

import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from fastrl.models import CausalLMPolicy
from tests import tiny_models
from tests.alignment.conftest import make_trainer
from tests.golden import tiny
from tests.trainers.conftest import make_reward, reward_model

__all__ = ["make_reward", "make_trainer"]  # fixtures

SAID = "trainable weights are bfloat16"
PPO_REMEDY = (
    r"master_weights=True; or load .* float32 and set "
    r'accelerator_kwargs={"mixed_precision": "bf16"} .*LoRA adapter'
)

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)


def low(model: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    return model.to(dtype)


def ppo(model: Any, **settings: Any) -> PPOTrainer:
    config = PPOConfig(batch_size=4, init_kl_coef=0.0, **settings)
    return PPOTrainer(config, model, tokenizer=tiny.tokenizer())


def about_weights(caught: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [w for w in caught if "trainable weights" in str(w.message)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ppo_says_that_updates_are_lost_and_what_to_do(dtype):
    base = low(tiny_models.language_model("gpt2"), dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ppo(AutoModelForCausalLMWithValueHead.from_pretrained(base), master_weights=False)
    (said,) = about_weights(caught)
    assert str(dtype).removeprefix("torch.") in str(said.message)
    assert said.filename == __file__
    plain = low(CausalLMPolicy(tiny_models.language_model("gpt2")))
    with pytest.warns(UserWarning, match=PPO_REMEDY):
        ppo(plain, advantage="rloo", group_size=2, master_weights=False)


UNSCALED = "weights in float16 are trained without loss scaling: gradients below 3e-8 become 0"


def test_float16_weights_are_warned_of_once_with_or_without_masters(
    make_reward: Any, make_trainer: Any, tmp_path: Any
) -> None:
    """Of all trainers, and only where such weights are trained."""
    rows = Dataset.from_list([{"text": "w1 w2"}])
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": None}
    tokenizer, half = tiny.tokenizer(), torch.float16

    def sft(model: Any) -> Any:
        return SFTTrainer(
            model, SFTConfig(**settings), train_dataset=rows, processing_class=tokenizer
        )

    kinds = (
        lambda: ppo(AutoModelForCausalLMWithValueHead(low(tiny_models.language_model(), half))),
        lambda: sft(low(tiny_models.language_model(), half)),
        lambda: make_reward(low(reward_model("gpt2"), half)),
        lambda: make_trainer("dpo", low(tiny_models.language_model(), half)),
    )
    for make in kinds:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        assert sum(UNSCALED in str(w.message) for w in caught) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sft(low(tiny_models.language_model()))
    assert not any(UNSCALED in str(w.message) for w in caught)


def test_a_warning_is_about_what_is_trained():
    """Adapters are float32 over a bf16 model, and float32 weights under autocast stay so. With
    masters no update is lost."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ppo(AutoModelForCausalLMWithValueHead.from_pretrained(tiny_models.language_model("gpt2")))
        base = low(tiny_models.language_model("gpt2"))
        ppo(AutoModelForCausalLMWithValueHead.from_pretrained(base))
        base = low(tiny_models.language_model("gpt2"))
        adapted = AutoModelForCausalLMWithValueHead.from_pretrained(
            base, peft_config=tiny_models.lora()
        )
        ppo(adapted, master_weights=False)
    assert not about_weights(caught)
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}


def test_sft_says_so_too(tmp_path):
    texts = Dataset.from_dict({"text": ["w3 w4 w5"] * 4})
    args = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, master_weights=False)
    model = low(tiny_models.language_model("gpt2"))
    with pytest.warns(
        UserWarning, match=SAID + r".*set bf16=True \(commands: --dtype float32"
    ) as w:
        SFTTrainer(model, args, train_dataset=texts, processing_class=tiny.tokenizer())
    assert len(about_weights(list(w))) == 1


@pytest.mark.parametrize("kind", ["reward", "dpo", "reward-modelling"])
def test_trainers_on_pairs_say_so_too(kind, make_reward, make_trainer):
    model = low(reward_model("gpt2") if "reward" in kind else tiny_models.language_model("gpt2"))
    makers = {
        "reward": lambda: make_reward(model, master_weights=False),
        "dpo": lambda: make_trainer("dpo", model, master_weights=False),
        "reward-modelling": lambda: make_trainer("bradley-terry", model, master_weights=False),
    }
    with pytest.warns(UserWarning, match=SAID) as caught:
        makers[kind]()
    assert len(about_weights(list(caught))) == 1
