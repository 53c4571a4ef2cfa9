"""flash-attn from the Hub: who gets it, and what is said where it is not to be had."""

import sys
from types import ModuleType

import kernels
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers.integrations import hub_kernels
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import import_utils

from fastrl.models import flash_attention
from fastrl.models.flash_attention import HUB, asks_for_flash_attention, need_flash_attention
from fastrl.models.load import load_language_model, load_reward_model
from fastrl.rollout import attention
from fastrl.rollout.attention import FlashDecode, choose_decode_kernel, decode
from fastrl.rollout.kv_cache import KVCache, LayerShape
from fastrl.rollout.model_runner import ModelRunner
from tests import tiny_models

CPU = torch.device("cpu")


def with_kvcache(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False,
                 window_size=(-1, -1), softcap=0.0):  # fmt: skip
    raise AssertionError("it is not to be run here")


@pytest.fixture
def asked(monkeypatch):
    """What the Hub is asked for; flash-attn is not installed, and ``kernels`` gets a stand-in."""
    build = ModuleType("flash_attn2")
    build.flash_attn_func = build.flash_attn_varlen_func = lambda q, k, v, **others: q
    build.flash_attn_with_kvcache = with_kvcache
    calls = []

    def get_kernel(name, *, version=None, revision=None, **others):
        calls.append((name, version, revision))
        return build

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(flash_attention, "package_installed", lambda: False)
    for module in (import_utils, modeling_utils, hub_kernels):  # whatever version is here
        monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    # Where it is not installed, a checkout's folder has its name.
    monkeypatch.setattr(kernels, "get_kernel", get_kernel, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", get_kernel, raising=False)
    flash_attention._hub_kernel.cache_clear()
    yield calls
    flash_attention._hub_kernel.cache_clear()


def cache_of(width=8):
    return KVCache([LayerShape(2, width, width)], 6, 16, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    "name", ["flash_attention_2", HUB, f"{HUB}@main", {"": "flash_attention_2"}]
)
def test_it_comes_from_the_hub_where_the_package_is_missing(asked, name):
    need_flash_attention(name)
    ((repository, version, revision),) = asked
    assert (repository, revision) == (HUB, None)
    assert isinstance(version, int)


@pytest.mark.parametrize("name", [None, "sdpa", "eager", "kernels-community/vllm-flash-attn3"])
def test_other_attention_asks_for_nothing(asked, name):
    need_flash_attention(name)
    assert asked == []


def test_an_installed_package_is_taken(asked, monkeypatch):
    monkeypatch.setattr(flash_attention, "package_installed", lambda: True)
    need_flash_attention("flash_attention_2")
    assert asked == []


@pytest.mark.parametrize("load", [load_language_model, load_reward_model])
def test_without_kernels_both_remedies_are_named_before_anything_is_read(
    asked, load, monkeypatch, tmp_path
):
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: False)
    with pytest.raises(ImportError) as raised:
        load(tmp_path / "nowhere", attn_implementation="flash_attention_2")
    for words in ("attn_implementation='flash_attention_2'", "pip install flash-attn",
                  "pip install 'kernels>=", "attn_implementation='sdpa'"):  # fmt: skip
        assert words in str(raised.value)


def test_a_build_that_is_not_to_be_had_says_why(asked, monkeypatch):
    def fails(name, **others):
        raise FileNotFoundError("no build for torch-cpu")

    monkeypatch.setattr(kernels, "get_kernel", fails)
    with pytest.raises(
        ImportError, match=r"FileNotFoundError: no build for torch-cpu.*pip install"
    ):
        need_flash_attention("flash_attention_2")


def test_a_loaded_model_attends_by_the_hubs_build(asked, tmp_path):
    tiny_models.language_model("llama").save_pretrained(tmp_path)
    model = load_language_model(
        tmp_path, attn_implementation="flash_attention_2", dtype=torch.bfloat16
    )
    assert model.config._attn_implementation == HUB
    assert asks_for_flash_attention(model)
    assert {name for name, *_ in asked} == {HUB}
    assert not asks_for_flash_attention(load_language_model(tmp_path))


def test_rollouts_of_such_a_model_decode_by_it(asked, monkeypatch):
    monkeypatch.setattr(attention, "_runs_flash", lambda device: True)
    monkeypatch.setattr(attention, "BACKEND_VARIABLE", "FASTRL_TESTS_UNSET")
    model = tiny_models.language_model("llama")
    assert choose_decode_kernel(cache_of(), ModelRunner(model).attends_by_flash) is decode
    assert asked == []
    for register, found in ((AttentionInterface, sdpa_attention_forward),
                            (AttentionMaskInterface, sdpa_mask)):  # fmt: skip
        register.register(HUB, found)
    model.config._attn_implementation_internal = HUB
    kernel = choose_decode_kernel(cache_of(), ModelRunner(model).attends_by_flash)
    assert isinstance(kernel, FlashDecode)
    assert kernel.kernel is with_kvcache
    assert choose_decode_kernel(cache_of(width=9), from_hub=True) is decode, "it does not fit"
