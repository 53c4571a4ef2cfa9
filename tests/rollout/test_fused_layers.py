"""Decoder layers that are fused in decode steps: the same tokens and numbers, in few launches."""

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
from accelerate.utils.other import clean_state_dict_for_safetensors
from peft import LoraConfig, get_peft_model

from fastrl import RolloutEngine, SamplingParams
from fastrl.models.products import PackedProducts
from fastrl.rollout import model_runner
from fastrl.rollout.attention import DecodeAttention, choose_decode_kernel
from fastrl.rollout.kv_cache import KVCache
from fastrl.rollout.model_runner import ModelRunner
from tests import tiny_models
from tests.golden import tiny
from tests.kernels.launches import interpreted, watched

# Where there is a GPU, nothing interprets kernels.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, which the rollouts of other tests leave out on a CPU."""
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "auto")


def model_of(family: str, **changes: Any) -> Any:
    return tiny_models.language_model(family, **changes).to(DEVICE)


def engine_of(model: Any, **settings: Any) -> RolloutEngine:
    return RolloutEngine(model, tiny.tokenizer(), max_slots=2, **settings)


def generated(engine: RolloutEngine, **settings: Any) -> Any:
    return engine.generate(PROMPTS, SamplingParams(max_new_tokens=3, seed=1, **settings))


def test_rollouts_are_those_of_the_models_own_layers() -> None:
    """With a window that is shorter than the samples."""
    engine = engine_of(model_of("mistral", sliding_window=3))
    assert engine.model_runner.fused_layers.active
    found = generated(engine)
    engine.model_runner.fused_layers.active = False
    engine.sleep()  # captured steps go on as they are
    expected = generated(engine)
    for name in ("sequences", "logprobs", "entropies"):
        for x, y in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


class Decoding:
    """A model's runner outside of an engine."""

    def __init__(self, model: Any, autocast: bool = False):
        self.runner = ModelRunner(
            model, partial(torch.autocast, DEVICE.type, torch.bfloat16, enabled=autocast)
        )
        self.layers = self.runner.layer_shapes()
        self.runner.fuse_layers(self.layers)

    @property
    def fused(self) -> Any:
        return self.runner.fused_layers

    def step(self, active: bool) -> tuple[torch.Tensor, list[str]]:
        """Logits, and what was launched."""
        self.fused.active = active
        kv_cache = KVCache(self.layers, 2, 300, self.runner.dtype, self.runner.device)
        positions = torch.tensor([5, 7], device=DEVICE)
        with self.runner.opened():
            attention = DecodeAttention(choose_decode_kernel(kv_cache), kv_cache, positions, 300)
            with watched() as calls:
                logits, _ = self.runner.decode(positions, positions, attention)
        return logits, calls


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs pack weights, and keep keys in fp32."""
    monkeypatch.setattr(model_runner, "kind_of_device", lambda _device: "cuda")
    monkeypatch.setattr(PackedProducts, "in_place", lambda *_: contextlib.nullcontext())


@pytest.mark.parametrize(
    ("family", "autocast", "most"),
    [("qwen2", True, 9), ("qwen3", True, 9), ("llama", False, 9), ("qwen2", False, 9)],
)
@pytest.mark.usefixtures("like_a_gpu")
@interpreted
def test_a_layers_launches(family: str, autocast: bool, most: int) -> None:
    """Weights lie side by side, so that products of one input are one."""
    counts = []
    for layers in (2, 3):
        model = model_of(family, num_hidden_layers=layers)
        decoding = Decoding(model, autocast)
        assert decoding.fused.active
        (found, fused), (expected, own) = (decoding.step(active) for active in (True, False))
        off = (found.float() - expected.float()).abs().max()
        assert off <= (5e-2 if autocast else 1e-5) * expected.float().abs().max()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        counts.append((len(fused), len(own)))
    fused_layer, own_layer = (b - a for a, b in zip(*counts, strict=True))
    assert fused_layer <= most
    assert own_layer >= 2.5 * fused_layer


def test_weights_side_by_side_are_the_models_own() -> None:
    """To those who save, copy or train them nothing has changed."""
    model = model_of("qwen2")  # with biases
    before = {name: x.clone() for name, x in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    with torch.inference_mode():
        decoding = Decoding(model)
    assert not any(x.is_inference() for x in model.parameters())
    logits, _ = decoding.step(active=True)
    own = model.model.layers[1].self_attn
    weights = [own.q_proj.weight, own.k_proj.weight, own.v_proj.weight]
    begin = [x.data_ptr() for x in weights]
    assert begin == [begin[0] + sum(x.nbytes for x in weights[:n]) for n in range(3)]
    assert all(x is parameters[name] for name, x in model.named_parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    for x in weights:
        assert x.untyped_storage().nbytes() == x.nbytes
        assert x.untyped_storage().data_ptr() == x.data_ptr()
    # It leaves out what shares memory.
    assert clean_state_dict_for_safetensors(model.state_dict()).keys() == before.keys()

    decoding.step(active=True)
    Decoding(model).step(active=True)
    assert [x.data_ptr() for x in weights] == begin, "captured steps contain the addresses"
    with torch.no_grad():
        own.k_proj.weight.mul_(1.5)
    (found, calls), (expected, _) = (decoding.step(active) for active in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - logits).abs().max() > 1e-4
    decoding.runner.free()  # and the model may go elsewhere
    model.bfloat16().float()
    decoding.step(active=True)
    again, more = decoding.step(active=True)
    assert len(more) == len(calls)
    torch.testing.assert_close(again, found, rtol=0, atol=1e-1)


def test_weights_whose_memory_others_keep_are_not_moved() -> None:
    model = model_of("llama")
    own = model.model.layers[0].self_attn
    kept = own.k_proj.weight.detach()  # who expects to see what training makes of it
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight.data = torch.cat([mlp.up_proj.weight.data] * 2)[: len(mlp.up_proj.weight)]
    shared = mlp.up_proj.weight.data_ptr()
    _, calls = Decoding(model).step(active=True)
    assert own.k_proj.weight.data_ptr() == kept.data_ptr()
    assert mlp.up_proj.weight.data_ptr() == shared
    _, fewer = Decoding(model_of("llama")).step(active=True)
    assert len(calls) == len(fewer) + 3


@pytest.mark.usefixtures("like_a_gpu")
@interpreted
def test_what_lies_around_the_layers_is_a_launch_each() -> None:
    """The embedding and the table's row in front of a first norm, one norm in front of the head."""
    decoding = Decoding(model_of("llama"))
    decoding.step(active=True)  # makes the table
    _, calls = decoding.step(active=True)
    assert calls[:3] == ["embedding", "index_select", "_rms_norm_kernel"]
    assert calls[-3:] == ["mm", "_rms_norm_kernel", "mm"]


def test_positions_are_those_of_now() -> None:
    """A rollout makes the table of its cosines and sines anew."""
    model = model_of("llama")
    engine = engine_of(model, max_length=64)
    before = generated(engine, temperature=0)
    model.model.rotary_emb.inv_freq.mul_(0.1)
    found = generated(engine, temperature=0)
    expected = generated(engine_of(model, max_length=64), temperature=0)
    for name in ("logprobs", "entropies"):
        x, y, old = (torch.cat(getattr(z, name)) for z in (found, expected, before))
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)
        assert (x - old).abs().max() > 1e-5


@pytest.mark.parametrize("change", ["hook", "replace"])
def test_a_last_norm_that_others_look_into_or_replace_gets_the_whole_sum(change: str) -> None:
    model = model_of("llama")
    decoding = Decoding(model)
    if change == "replace":
        model.model.norm = copy.deepcopy(model.model.norm)
    seen: list[torch.Tensor] = []
    if change == "hook":
        model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    (found, calls), (expected, _) = (decoding.step(active) for active in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert "_swiglu_kernel" in calls
    if change == "hook":
        torch.testing.assert_close(*seen, rtol=0, atol=1e-5)


def test_layers_are_fused_without_a_norm_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class that looks like theirs."""
    model = model_of("llama")
    kind = type("Norm", (type(model.model.norm),), {"forward": lambda self, x: 1.01 * x})
    model.model.norm.__class__ = kind
    decoding = Decoding(model)
    (found, calls), (expected, _) = (decoding.step(active) for active in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert "_swiglu_kernel" in calls


def test_adapters_run_inside_of_fused_layers() -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    decoding = Decoding(get_peft_model(model_of("llama"), lora))
    assert decoding.fused.active
    (found, _), (expected, _) = (decoding.step(active) for active in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("like_a_gpu")
def test_keys_are_kept_as_autocast_casts_them() -> None:
    decoding = Decoding(model_of("gpt2"), autocast=True)
    assert decoding.runner.dtype == torch.bfloat16
    decoding.step(active=False)
    assert Decoding(model_of("gpt2")).runner.dtype == torch.float32


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3", "cohere"])
def test_layers_of_another_structure_stay_as_they_are(family: str) -> None:
    model = model_of(family)
    assert not Decoding(model).fused.active
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_whose_numbers_differ_stay_as_they_are_with_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    kind = type(model.model.layers[1].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 1.01 * own(self, x))
    with pytest.warns(UserWarning, match=r"fused decoder layers differ from the model's own by \d"):
        assert not Decoding(model).fused.active


def test_layers_that_cannot_run_fused_stay_as_they_are_with_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    monkeypatch.setattr(model.model.layers[1].self_attn, "head_dim", 7)
    own = type(model.model.layers[1]).forward
    monkeypatch.setattr(type(model.model.layers[1]), "forward", _with_head_dim(own, 4))
    with pytest.warns(UserWarning, match=r"fused decoder layers cannot run \(RuntimeError"):
        assert not Decoding(model).fused.active


def _with_head_dim(forward: Any, width: int) -> Any:
    """A layer's forward that does not read its attention's ``head_dim``."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, self.self_attn.head_dim = self.self_attn.head_dim, width
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.self_attn.head_dim = before

    return run


@pytest.mark.parametrize("place", ["model.layers.1", "model.layers.1.mlp"])
def test_layers_that_hooks_look_into_stay_as_they_are(place: str) -> None:
    model = model_of("llama")
    decoding = Decoding(model)
    expected, _ = decoding.step(active=False)
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(place).register_forward_hook(lambda *all_: seen.append(all_[-1]))
    logits, calls = decoding.step(active=True)
    assert torch.equal(logits, expected)
    assert len(seen) == 1
    assert not {"_swiglu_kernel", "_rms_norm_kernel"} & set(calls)
    hook.remove()
    _, calls = decoding.step(active=True)
    assert len(seen) == 1
    assert "_swiglu_kernel" in calls
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_whose_outputs_were_asked_for_once_run_fused_again() -> None:
    """transformers leaves hooks on them, which do nothing until outputs are asked for again."""
    model = model_of("llama")
    decoding = Decoding(model)
    model(torch.tensor([[3, 4]], device=DEVICE), output_hidden_states=True)
    _, calls = decoding.step(active=True)
    assert "_swiglu_kernel" in calls


def test_an_adapter_that_comes_later_is_run() -> None:
    model = model_of("llama")
    decoding = Decoding(model)
    before, _ = decoding.step(active=True)
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    get_peft_model(model, lora)  # puts the adapter into the model's own modules
    (found, calls), (expected, _) = (decoding.step(active) for active in (True, False))
    assert "_swiglu_kernel" in calls
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - before).abs().max() > 1e-2


def test_layers_in_whose_place_are_others_are_not_run() -> None:
    model = model_of("llama")
    decoding = Decoding(model)
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1
    (found, calls), (expected, _) = (decoding.step(active) for active in (True, False))
    assert "_swiglu_kernel" not in calls
    assert torch.equal(found, expected)
