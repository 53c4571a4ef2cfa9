"""Optimizers of all trainers: float32 masters, packages that are missing, 8-bit moments."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, RewardConfig, SFTConfig
from fastrl.alignment import AlignmentConfig
from fastrl.models import optimizers
from fastrl.models.activation_offloading import OffloadedActivations
from fastrl.models.master_weights import MASTER, MasterWeights
from fastrl.models.optimizer_state import load_optimizer_state, optimizer_state
from fastrl.models.optimizers import keep_state, make_optimizer
from fastrl.run.state import load_tree, save_tree
from fastrl.trainers.supervised import settings_of
from tests import tiny_models
from tests.alignment.conftest import make_trainer
from tests.golden import tiny
from tests.trainers.conftest import Make, texts

__all__ = ["make_trainer"]  # a fixture

CPU = torch.device("cpu")
STEPS = 32
LOW: dict[str, Any] = {"learning_rate": 1e-6, "lr_scheduler_type": "constant", "max_steps": STEPS}


def start(dtype: torch.dtype = torch.bfloat16) -> GPT2LMHeadModel:
    """A model whose weights bf16 has exactly."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 2}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ids = {"bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS}
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, **sizes, **off, **ids)).bfloat16().to(dtype)


def sft(make_sft: Make, dtype: torch.dtype, **settings: Any) -> nn.Module:
    trainer = make_sft(start(dtype), texts(64), **LOW, **settings)
    trainer.train()
    return trainer.model


def ppo(make_sft: Make, dtype: torch.dtype, **settings: Any) -> nn.Module:
    sizes: dict[str, Any] = {"batch_size": 8, "mini_batch_size": 4, "ppo_epochs": STEPS // 8}
    on_cpu = {"cpu": True}  # as the other model
    config = PPOConfig(**sizes, learning_rate=1e-6, accelerator_kwargs=on_cpu, **settings)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(start(dtype))
    trainer = PPOTrainer(config, policy, None, tiny.tokenizer())
    trainer.train(
        lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        prompts=[f"w{i} w{i + 1}" for i in range(3, 40)],
        steps=4,
        generation_kwargs={"max_new_tokens": 12},
        progress=False,
    )
    assert trainer.weights_version == STEPS
    return policy.pretrained_model


@pytest.mark.parametrize("learn", [sft, ppo])
def test_small_steps_move_as_many_weights_in_bf16_as_in_float32(
    learn: Callable[..., nn.Module], make_sft: Make
) -> None:
    """Weights that are no longer what they were, rounded to bf16, at a learning rate of 1e-6."""

    def moved(model: nn.Module) -> int:
        pairs = zip(model.parameters(), start().parameters(), strict=True)
        return sum(int((p.bfloat16() != before).sum()) for p, before in pairs)

    exact = moved(learn(make_sft, torch.float32))
    assert abs(moved(learn(make_sft, torch.bfloat16)) / exact - 1) < 0.02
    with pytest.warns(UserWarning, match="updates below half their spacing are lost"):
        lossy = learn(make_sft, torch.bfloat16, master_weights=False)
    assert moved(lossy) < 0.2 * exact


@pytest.mark.parametrize("offload", [False, True])
def test_an_optimizer_is_kept_once_however_often_a_trainer_trains(
    offload: bool,
    make_sft: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def on_a_gpu(optimizer: Any, **how: Any) -> Any:
        return keep_state(optimizer, **{**how, "device": torch.device("cuda")})

    monkeypatch.setattr("fastrl.trainers.low_memory.keep_state", on_a_gpu)
    trainer = make_sft(start(), texts(8), max_steps=2, offload_optimizer=offload)
    trainer.train()
    kept = trainer.optimizer.optimizer
    trainer.train()
    assert trainer.optimizer.optimizer is kept
    assert isinstance(kept, MasterWeights)
    assert kept.on_host is offload
    assert not isinstance(kept.inner, MasterWeights)
    assert {float(x["step"]) for x in kept.state.values()} == {4.0}
    assert capsys.readouterr().err.count("12 bytes a weight in place of 4") == (not offload)
    floats = [x for own in kept.state.values() for x in own.values() if x.dim()]
    taken = sum(x.numel() * x.element_size() for x in floats)
    assert taken == 12 * sum(p.numel() for p in trainer.model.parameters())


def test_preference_learning_has_masters_too(make_trainer: Make) -> None:
    model = tiny_models.language_model("gpt2").bfloat16()
    trainer = make_trainer("dpo", model, max_steps=2, learning_rate=1e-6)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, MasterWeights)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.bfloat16}
    masters = [optimizer.state[p][MASTER] for p in trained]
    assert all(map(torch.equal, trained, [m.bfloat16() for m in masters]))
    assert any((m != m.bfloat16()).any() for m in masters)


@pytest.mark.parametrize("loss", ["ppo", "dpo"])
def test_preference_learning_offloads_activations(
    loss: str, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def on_a_cpu(wanted: bool, *_: Any) -> Any:
        assert wanted
        return lambda model: used.append(OffloadedActivations(model, lambda x: True)) or used[-1]

    monkeypatch.setattr("fastrl.trainers.base.activation_offloading", on_a_cpu)
    trainer = make_trainer(loss, max_steps=2, activation_offloading=True)
    trainer.train()
    assert len(used) >= 2
    assert all(each.bytes for each in used)


def test_preferences_are_measured_against_a_reference_in_bf16(make_trainer: Make) -> None:
    losses = []
    for dtype in ("auto", "bfloat16"):
        settings: dict[str, Any] = {"reference": "copy", "reference_dtype": dtype}
        model = tiny_models.language_model("gpt2")
        trainer = make_trainer("dpo", model, max_steps=1, logging_steps=1, **settings)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert {p.dtype for p in trainer.learner.reference.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert 0 < abs(losses[0] - losses[1]) < 0.01
    with pytest.raises(ValueError, match=r"reference_dtype='bfloat16', but the reference is cach"):
        make_trainer("dpo", tiny_models.language_model("gpt2"), reference_dtype="bfloat16")


def test_a_step_that_is_not_finite_leaves_masters_alone(make_sft: Make) -> None:
    trainer = make_sft(start(), texts(8), max_steps=3, learning_rate=1e-3, logging_steps=1)
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: (
        compute(*args, **kwargs) * (torch.nan if trainer.state.global_step == 1 else 1.0)
    )
    with pytest.warns(UserWarning, match="is not finite"):
        trainer.train()
    optimizer = trainer.optimizer.optimizer
    for weight in trainer.model.parameters():
        kept = optimizer.state[weight]
        assert torch.equal(weight, kept[MASTER].bfloat16())
        assert kept["exp_avg"].isfinite().all()
        assert float(kept["step"]) == 2


@pytest.mark.parametrize("kind", [SFTConfig, RewardConfig, AlignmentConfig])
def test_a_missing_package_is_named_before_anything_is_done(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    util = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(optimizers, "importlib", SimpleNamespace(util=util))
    for name, package in (("adamw_bnb_8bit", "bitsandbytes"), ("adamw_torch_8bit", "torchao")):
        with pytest.raises(ImportError, match=rf"optim='{name}' needs .*pip install {package}"):
            kind(output_dir=str(tmp_path / "new"), optim=name, report_to="none")
        with pytest.raises(ImportError, match=rf"optim='{name}' needs .*pip install {package}"):
            PPOTrainer(PPOConfig(optim=name), tiny_models.policy(), None, tiny.tokenizer())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("settings", "said"), [
    ({"optim": "adamw"}, "unknown optim 'adamw': choose one of adam, adamw_torch"),
    ({"optim": "lomo"}, "unknown optim"),
    ({"optim_args": "momentum=0.9"}, "optim='adam' has no argument 'momentum'"),
    ({"optim": "sgd", "optim_args": "beta1=0.9"}, "optim='sgd' has no argument 'beta1'"),
    ({"optim": "sgd", "optim_args": "momentum"}, 'optim_args must be "name=value,…"'),
])  # fmt: skip
def test_optimizers_that_cannot_be_made_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PPOTrainer(PPOConfig(**settings), tiny_models.policy(), None, tiny.tokenizer())


def test_an_optimizer_is_named_or_given() -> None:
    policy = tiny_models.policy()
    own = torch.optim.SGD(policy.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optim='sgd', but optimizer was given \(SGD\)"):
        PPOTrainer(PPOConfig(optim="sgd"), policy, None, tiny.tokenizer(), optimizer=own)
    with pytest.raises(ValueError, match=r"optim_args='eps=1', but optimizer was given \(SGD\)"):
        PPOTrainer(PPOConfig(optim_args="eps=1"), policy, None, tiny.tokenizer(), optimizer=own)


@pytest.mark.parametrize(("name", "given", "found"), [
    ("adamw_torch", "amsgrad=true,fused=true,eps=1e-3", [True, True, 1e-3]),
    ("adafactor", "clip_threshold=2,scale_parameter=yes", [2.0, True]),
    ("sgd", "momentum=0.5,dampening=0.25", [0.5, 0.25]),
    ("rmsprop", "alpha=0.5,centered=1", [0.5, True]),
])  # fmt: skip
def test_arguments_reach_the_optimizer(name: str, given: str, found: list[Any]) -> None:
    (group,) = make_optimizer(nn.Linear(3, 2), name, 1e-3, given).param_groups
    assert [group[part.split("=")[0]] for part in given.split(",")] == found


@pytest.mark.parametrize(("name", "given", "said"), [
    ("adamw_torch", "lr=1", "has no argument 'lr': set learning_rate"),
    ("adamw_torch", "betas=1", "has no argument 'betas': name beta1 and beta2"),
    ("adamw_torch", "beta3=1", "has no argument 'beta3': leave it out"),
    ("sgd", "eps=1", "has no argument 'eps': leave it out"),
    ("adam", "beta1=abc", "beta1=abc of optim='adam' is not of type float"),
    ("adamw_torch", "amsgrad=2", "amsgrad=2 of optim='adamw_torch' is not true or false"),
    ("adafactor", "eps=1e-3", "eps of optim='adafactor' cannot be given here"),
    ("adam", "beta1=0.5,beta1=0.6", "optim_args has beta1 twice"),
    ("adamw_bnb_8bit", "optim_bits=32", "has no argument 'optim_bits': optim's name says"),
])  # fmt: skip
def test_arguments_that_nothing_would_read_are_refused(name: str, given: str, said: str) -> None:
    if "bnb" in name:
        pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match=said):
        make_optimizer(nn.Linear(3, 2), name, 1e-3, given)


@pytest.mark.parametrize("kind", [SFTConfig, RewardConfig, AlignmentConfig], ids=str)
@pytest.mark.parametrize(("name", "given", "said"), [
    ("adamw_torch", "momentum=0.9", "optim='adamw_torch' has no argument 'momentum'"),
    ("adamw_torch", "amsgrad=2", "amsgrad=2 of optim='adamw_torch' is not true or false"),
    ("adamw_torch", "eps", 'optim_args must be "name=value,…"'),
    ("sgd", "weight_decay=0.1", "'sgd' has no argument 'weight_decay': set weight_decay"),
    ("lomo", "eps=1", "optim='lomo' has no argument 'eps': leave it out"),
    ("galore_adamw", "rank=two", "rank=two of optim='galore_adamw' is not of type int"),
])  # fmt: skip
def test_trainers_refuse_arguments_before_anything_is_loaded(
    kind: type, name: str, given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For this module alone: transformers would keep in mind that it found everything.
    util = SimpleNamespace(find_spec=lambda name: object())
    monkeypatch.setattr(optimizers, "importlib", SimpleNamespace(util=util))
    settings = {"optim": name, "optim_args": given, "report_to": "none", "use_cpu": True}
    with pytest.raises(ValueError, match=said):
        kind(output_dir=str(tmp_path), **settings)
    plain = TrainingArguments(output_dir=str(tmp_path), **settings)
    with pytest.raises(ValueError, match=said):
        settings_of(plain, kind)


@pytest.mark.parametrize(("name", "given", "found"), [
    ("adamw_torch", "eps=1e-3,beta2=0.5", {"eps": 1e-3, "betas": (0.9, 0.5)}),
    ("adamw_torch", "amsgrad=true", {"amsgrad": True}),
    ("sgd", "momentum=0.5", {"momentum": 0.5}),
])  # fmt: skip
def test_arguments_reach_the_trainers_optimizer(
    make_sft: Make, name: str, given: str, found: dict[str, Any]
) -> None:
    """transformers does not read those of its AdamW."""
    trainer = make_sft(tiny_models.language_model(), texts(2), optim=name, optim_args=given)
    for group in trainer.create_optimizer().param_groups:
        assert {key: group[key] for key in found} == found


def test_optimizers_are_those_that_the_names_say() -> None:
    model = nn.Linear(3, 2)
    adam = make_optimizer(model, "adam", 1e-3, "beta2=0.9,eps=1e-6")
    assert type(adam) is torch.optim.Adam
    (group,) = adam.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.9), 1e-6, 0)
    sgd = make_optimizer(model, "sgd", 1e-3, "momentum=0.5,nesterov=true,weight_decay=0.1")
    assert type(sgd) is torch.optim.SGD
    (group,) = sgd.param_groups
    assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0.5, True, 0.1)
    adamw = make_optimizer(model, "adamw_torch", 1e-3)
    assert type(adamw) is torch.optim.AdamW
    assert adamw.param_groups[0]["weight_decay"] == 0  # torch's own default is 0.01


@pytest.fixture
def bitsandbytes() -> Iterator[None]:
    """Its settings of weights, by their places in any optimizer, are those of the process."""
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    manager.initialize()
    yield
    manager.initialize()


def test_moments_in_8_bits_go_on_from_a_file_bit_for_bit(
    tmp_path: Path, bitsandbytes: None
) -> None:
    gradients = torch.randn(6, 64, 128, generator=torch.Generator().manual_seed(1))

    def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(128, 64, bias=False).bfloat16()
        made = make_optimizer(model, "adamw_bnb_8bit", 1e-3)
        return model, keep_state(made, master_weights=True, on_host=False, device=CPU)

    def step(model: nn.Linear, optimizer: Any, number: int) -> None:
        model.weight.grad = gradients[number].bfloat16()
        optimizer.step()

    model, optimizer = make()
    for number in range(3):
        step(model, optimizer, number)
    saved = {"optimizer": optimizer_state(optimizer, model), "weight": model.weight}
    save_tree(saved, tmp_path)
    assert optimizer.state[model.weight]["state1"].dtype == torch.uint8
    other, of_other = make()
    read = load_tree(tmp_path)
    with torch.no_grad():
        other.weight.copy_(read["weight"])
    load_optimizer_state(of_other, other, read["optimizer"])
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, of_other, number)
    assert torch.equal(model.weight, other.weight)
    one, two = optimizer.state[model.weight], of_other.state[other.weight]
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(two[name])), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_have_moments_in_32_bits_and_so_have_their_masters(
    dtype: torch.dtype, bitsandbytes: None
) -> None:
    model = nn.ModuleList([nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)]).to(dtype)
    made = make_optimizer(model, "adamw_bnb_8bit", 1e-3)
    optimizer = keep_state(made, master_weights=True, on_host=False, device=CPU)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kinds = [optimizer.state[weight]["state1"].dtype for weight in model.parameters()]
    assert kinds == [torch.float32, torch.uint8]


def test_tensors_of_torchao_are_saved_by_their_parts(tmp_path: Path) -> None:
    """Its optimizers themselves are compiled at their first step, which takes long."""
    ao = pytest.importorskip("torchao.optim.subclass_8bit")
    model = nn.Linear(64, 64, bias=False)
    optimizer = make_optimizer(model, "adamw_torch_8bit", 1e-3)
    moments = ao.OptimState8bit.zeros((64, 64), True, 256, dtype=torch.float32)
    moments.codes.copy_(torch.arange(64 * 64).view(64, 64) % 256)
    optimizer.state[model.weight] = {"step": torch.tensor(3.0), "exp_avg": moments}
    save_tree({"optimizer": optimizer_state(optimizer, model)}, tmp_path)
    other = make_optimizer(model, "adamw_torch_8bit", 1e-3)
    load_optimizer_state(other, model, load_tree(tmp_path)["optimizer"])
    found = other.state[model.weight]["exp_avg"]
    assert type(found) is ao.OptimState8bit
    assert (found.signed, found.dtype, found.block_size) == (True, torch.float32, 256)
    assert torch.equal(found.codes, moments.codes)
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor)


def test_offloading_takes_what_is_derived_from_an_optimizer_of_torch() -> None:
    class Own(torch.optim.AdamW):
        pass

    class FromScratch(torch.optim.Optimizer):
        pass

    how: dict[str, Any] = {"master_weights": True, "on_host": True, "device": torch.device("cuda")}
    assert keep_state(Own(nn.Linear(2, 2).parameters(), lr=0.1), **how).on_host
    with pytest.raises(ValueError, match=r"FromScratch of \w+ has no steps in host memory"):
        keep_state(FromScratch(nn.Linear(2, 2).parameters(), {}), **how)


def test_offloading_an_optimizer_of_bitsandbytes_is_refused() -> None:
    class Foreign(torch.optim.SGD):
        pass

    Foreign.__module__ = "bitsandbytes.optim"
    optimizer = Foreign(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Foreign of bitsandbytes has no steps in host memory"):
        keep_state(optimizer, master_weights=True, on_host=True, device=CPU)
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="offload_optimizer has no effect on a CPU"):
        assert keep_state(plain, master_weights=True, on_host=True, device=CPU) is plain
    with pytest.raises(ValueError, match="FSDP2 spreads weights over processes"):
        keep_state(optimizer, master_weights=True, on_host=False, device=CPU, spread=True)


def test_an_optimizer_that_keeps_its_state_itself_is_not_offloaded(make_sft: Make) -> None:
    trainer = make_sft(start(), texts(8), max_steps=2, offload_optimizer=True)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="offload_optimizer is not for DeepSpeed"):
        trainer.create_optimizer()
    trainer.is_deepspeed_enabled, trainer.args.optim = False, "adalomo"
    with pytest.raises(ValueError, match="offload_optimizer is not for adalomo"):
        trainer.create_optimizer()
