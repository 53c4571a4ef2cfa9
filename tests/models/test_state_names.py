"""Names of a policy's weights in state dicts: made, taken, saved, and left alone by what shards."""

import copy

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from fastrl import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from fastrl.models import CausalLMPolicy
from tests import seq2seq_models, tiny_models

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

HEAD = {"v_head.summary.weight", "v_head.summary.bias"}


def adapted() -> AutoModelForCausalLMWithValueHead:
    torch.manual_seed(1)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny_models.language_model(), peft_config=tiny_models.lora()
    ).eval()


POLICIES = {
    "gpt2": tiny_models.policy,
    "llama": lambda: tiny_models.policy("llama"),
    "adapted": adapted,
    "t5": lambda: seq2seq_models.policy("t5"),
    "without values": lambda: CausalLMPolicy(tiny_models.language_model()),
}


def by_module(policy: nn.Module) -> dict[str, torch.Tensor]:
    """As in ``named_parameters()``, tied weights under each of their names."""
    state = {f"pretrained_model.{k}": v for k, v in policy.pretrained_model.state_dict().items()}
    head = {} if policy.v_head is None else policy.v_head.state_dict()
    return state | {f"v_head.{k}": v for k, v in head.items()}


def as_in_trl(policy: nn.Module) -> dict[str, torch.Tensor]:
    """The language model's own names, and the value head's beside them."""
    return {k.removeprefix("pretrained_model."): v for k, v in by_module(policy).items()}


def whole(x: torch.Tensor) -> torch.Tensor:
    """Of all shards."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def zeroed(policy: nn.Module) -> nn.Module:
    """A copy whose weights are all 0."""
    policy = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    return policy


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize("kind", POLICIES)
def test_a_state_dict_names_weights_as_the_language_model_does(kind) -> None:
    policy = POLICIES[kind]()
    plain = list(policy.pretrained_model.state_dict())
    head = [] if policy.v_head is None else ["v_head.summary.weight", "v_head.summary.bias"]
    assert list(policy.state_dict()) == [*plain, *head]
    assert {name.partition(".")[0] for name, _ in policy.named_parameters()} <= {
        "pretrained_model",
        "v_head",
    }


@pytest.mark.parametrize("kind", POLICIES)
def test_both_namings_load(kind) -> None:
    policy = POLICIES[kind]()
    for state in (as_in_trl(policy), by_module(policy)):
        names = list(state)
        loaded = zeroed(policy)
        loaded.load_state_dict(state)
        assert list(state) == names, "the caller's dict stays as it is"
        assert_same_weights(loaded, policy)


@pytest.mark.parametrize("naming", ["as in TRL", "by module"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_a_gathered_state_of_either_naming_saves_every_weight(kind, naming, tmp_path) -> None:
    policy = POLICIES[kind]()
    state = as_in_trl(policy) if naming == "as in TRL" else by_module(policy)
    zeroed(policy).save_pretrained(tmp_path, state_dict=state)
    saved = load_file(tmp_path / "model.safetensors")
    # A tied weight is saved once, under whichever of its names.
    storages = {x.data_ptr() for x in policy.state_dict().values()}
    assert len(saved) + len(HEAD) == len(storages)
    assert set(load_file(tmp_path / "value_head.safetensors")) == HEAD
    assert_same_weights(type(policy).from_pretrained(tmp_path), policy)


@pytest.mark.parametrize("naming", ["as in TRL", "by module"])
def test_a_gathered_state_of_an_adapter_saves_it_and_the_value_head(naming, tmp_path) -> None:
    policy = adapted()
    state = as_in_trl(policy) if naming == "as in TRL" else by_module(policy)
    zeroed(policy).save_pretrained(tmp_path, state_dict=state)
    assert set(load_file(tmp_path / "value_head.safetensors")) == HEAD
    lora = load_file(tmp_path / "adapter_model.safetensors")
    trained = [p for name, p in policy.named_parameters() if "lora_" in name]
    assert sorted(x.sum().item() for x in lora.values()) == sorted(p.sum().item() for p in trained)


def test_what_is_missing_or_unknown_is_named_as_in_the_state_dict() -> None:
    policy = tiny_models.policy("llama")
    state = policy.state_dict()
    state["lm_head.scale"] = state.pop("lm_head.weight")
    del state["v_head.summary.bias"]
    missing, unexpected = policy.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight", "v_head.summary.bias"]
    assert unexpected == ["lm_head.scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"lm_head\.weight"'):
        policy.load_state_dict(state)


def test_a_copy_names_its_own_weights() -> None:
    policy = tiny_models.policy()
    twin = zeroed(policy)
    assert list(twin.state_dict()) == list(policy.state_dict())
    assert all(not x.any() for x in twin.state_dict().values())


def test_inside_another_module_names_are_paths() -> None:
    whole = nn.ModuleDict({"policy": tiny_models.policy("llama"), "extra": nn.Linear(2, 2)})
    names = set(whole.state_dict())
    assert {f"policy.{name}" for name in by_module(whole["policy"])} < names
    blank = nn.ModuleDict({"policy": zeroed(whole["policy"]), "extra": nn.Linear(2, 2)})
    blank.load_state_dict(whole.state_dict())
    assert_same_weights(blank, whole)


def test_accelerates_checkpoints_bring_every_weight_back(tmp_path) -> None:
    # GPT-2's head is tied: safetensors keep one of its names, and loading misses the other.
    policy = tiny_models.policy("gpt2")
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(policy)
    expected = copy.deepcopy(policy)
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    assert_same_weights(prepared, expected)


@pytest.mark.parametrize("what", ["all", "the language model"])
def test_names_of_sharded_weights_are_paths(mesh, tmp_path, what) -> None:
    from torch.distributed.fsdp import fully_shard

    policy = tiny_models.policy("llama")
    expected = copy.deepcopy(policy)
    fully_shard(policy if what == "all" else policy.pretrained_model, mesh=mesh)
    state = get_model_state_dict(policy)
    assert set(state) == set(by_module(expected))
    gathered = {name: whole(x) for name, x in state.items()}
    expected.save_pretrained(tmp_path, state_dict=gathered)
    assert_same_weights(type(expected).from_pretrained(tmp_path), expected)
    with torch.no_grad():
        state = {name: torch.zeros_like(x) for name, x in state.items()}
    set_model_state_dict(policy, state)
    assert all(not whole(p).any() for p in policy.parameters())


def test_torchs_checkpoints_take_the_two_parts() -> None:
    policy = AutoModelForSeq2SeqLMWithValueHead(seq2seq_models.language_model("t5"))
    for part in (policy.pretrained_model, policy.v_head):
        assert set(get_model_state_dict(part)) == set(part.state_dict())
