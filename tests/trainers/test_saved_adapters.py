"""Trainers that are given a saved adapter's folder, and models that cannot be trained."""

import pytest
import torch
from peft import get_peft_model

from fastrl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from tests import tiny_models
from tests.alignment import conftest as alignment
from tests.golden import tiny
from tests.trainers.conftest import SETTINGS, pairs, reward_model, texts, weights

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]
make_trainer = alignment.make_trainer


@pytest.fixture
def folders(tmp_path):
    """Of adapters with their tokenizer, by what they are of."""
    found = {}
    for kind, model, task in (
        ("policy", tiny_models.language_model(), "CAUSAL_LM"),
        ("reward", reward_model("gpt2"), "SEQ_CLS"),
    ):
        torch.manual_seed(4)
        model.save_pretrained(tmp_path / kind / "base")
        model.name_or_path = str(tmp_path / kind / "base")
        lora = tiny_models.lora(task_type=task, lora_dropout=0.25)
        found[kind] = tmp_path / kind / "adapter"
        get_peft_model(model, lora).save_pretrained(found[kind])
        tiny.tokenizer().save_pretrained(found[kind])
    return found


@pytest.fixture
def make(make_sft, make_reward, make_trainer, folders):
    makers = {
        "sft": (make_sft, "policy"),
        "reward": (make_reward, "reward"),
        "dpo": (lambda model: make_trainer("dpo", model, disable_dropout=False), "policy"),
        "reward-modelling": (
            lambda model: make_trainer("bradley-terry", model, disable_dropout=False),
            "reward",
        ),
    }

    def of(trainer, model=None):
        maker, kind = makers[trainer]
        return maker(folders[kind] if model is None else model)

    return of


TRAINERS = ("sft", "reward", "dpo", "reward-modelling")


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_saved_adapter_is_trained_on_by_its_path(kind, make):
    trainer = make(kind)
    before = weights(trainer.model)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert any("lora_B" in name for name in trained)
    trainer.train()
    after = weights(trainer.model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_frozen_model_is_an_error_that_names_the_remedy(kind, make):
    model = reward_model("gpt2") if "reward" in kind else tiny_models.language_model()
    with pytest.raises(ValueError, match=r"nothing of the model can be trained.*or pass peft_conf"):
        make(kind, model.requires_grad_(False))
    task = "SEQ_CLS" if "reward" in kind else "CAUSAL_LM"
    adapted = get_peft_model(model, tiny_models.lora(task_type=task))
    with pytest.raises(ValueError, match=r"nothing of the model .*is_trainable=True"):
        make(kind, adapted.requires_grad_(False))


@pytest.mark.parametrize(("loss", "kind"), [("dpo", "policy"), ("bradley-terry", "reward")])
def test_dropout_that_the_alignment_trainer_switches_off_is_told_of(
    loss, kind, make_trainer, folders
):
    message = r"lora_dropout=0\.25 does not act, because disable_dropout is True"
    with pytest.warns(UserWarning, match=message) as warned:
        trainer = make_trainer(loss, folders[kind])
    assert sum("lora_dropout" in str(each.message) for each in warned) == 1
    assert not any(m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["model", "model_init"])
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_what_is_only_evaluated_may_be_frozen_and_in_bfloat16(kind, given, dtype, tmp_path):
    """Nothing is trained: no error, and no warning of updates that are lost."""
    frozen = given == "model_init"
    if kind == "sft":
        Trainer, args, data = SFTTrainer, SFTConfig(str(tmp_path), **SETTINGS), texts(4)
        model = tiny_models.language_model()
    else:
        Trainer, args, data = RewardTrainer, RewardConfig(str(tmp_path), **SETTINGS), pairs(4)
        model = reward_model("gpt2")
    model = model.to(dtype).requires_grad_(not frozen)
    made = {"model_init": lambda: model} if frozen else {"model": model}
    trainer = Trainer(args=args, eval_dataset=data, processing_class=tiny.tokenizer(), **made)
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("kind", TRAINERS)
def test_an_adapters_dropout_makes_two_passes_differ_in_training(kind, make, monkeypatch):
    """Two losses of one batch, as a training step computes them."""
    trainer = make(kind)
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    batch = trainer._prepare_inputs(batch)
    losses = [trainer.compute_loss(trainer.model, batch).item() for _ in range(2)]
    assert losses[0] != losses[1]
    trainer.model.eval()
    losses = [trainer.compute_loss(trainer.model, batch).item() for _ in range(2)]
    assert losses[0] == losses[1]
