"""Adapters that begin by changing the base's weights."""

import copy
import typing

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fastrl import DPOConfig, PPOConfig
from fastrl.learn.ref_model import choose_ref_model
from fastrl.models import CausalLMPolicy
from fastrl.models.adapter_base import moves_base
from fastrl.models.load import with_adapter
from fastrl.models.scoring import ScoringRequest
from fastrl.trainers.reference import reference_of
from tests import tiny_models

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

IDS = torch.arange(12)[None]
ROUNDING = 1e-5  # PEFT decomposes in float32: the residual's own rounding; such a start moves 1e-2
WITH_DATA = ("corda", "eva", "loftq")  # of activations, or of a quantised model


def lora(start):
    return LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=start)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture
def base():
    return tiny_models.language_model("llama")


def starts():
    _, named = typing.get_args(typing.get_type_hints(LoraConfig)["init_lora_weights"])
    texts = [x.replace("[number of iters]", "2") for x in typing.get_args(named)]
    return [True, False, *(x for x in texts if x not in WITH_DATA)]


def test_each_start_of_peft_that_moves_the_base_is_known(base):
    before = logits(base)
    for start in starts():
        model = get_peft_model(copy.deepcopy(base), lora(start))
        with model.disable_adapter():
            moved = (logits(model) - before).abs().max() > ROUNDING
        assert moves_base(lora(start)) == moved, start


@pytest.mark.parametrize("start", ["pissa", "olora"])
@pytest.mark.parametrize("syncs", [False, True])
def test_the_reference_of_a_new_adapter_is_the_model_it_was_put_on(base, tmp_path, start, syncs):
    before = logits(base)[0, :-1].log_softmax(-1)
    policy = CausalLMPolicy(with_adapter(base, lora(start)))
    args = DPOConfig(str(tmp_path), use_cpu=True, report_to="none", sync_ref_model=syncs)
    reference = reference_of(args, policy, fresh=True)
    request = ScoringRequest(torch.arange(IDS.shape[1] - 1), IDS[0, 1:])
    wanted = before.gather(1, IDS[0, 1:, None])[:, 0]
    found = reference.score({"input_ids": IDS}, request).logprobs
    torch.testing.assert_close(found, wanted, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(  # making the reference left the policy as it was
        logits(policy.pretrained_model)[0, :-1].log_softmax(-1), before, atol=ROUNDING, rtol=0
    )


def test_the_base_of_such_an_adapter_is_no_reference(base):
    policy = CausalLMPolicy(with_adapter(base, lora("pissa")))
    with pytest.raises(ValueError, match="set reference_adapter='start'"):
        choose_ref_model(PPOConfig(reference_adapter="off"), policy)


def test_a_start_that_loading_does_not_repeat_is_refused_and_told_of_where_it_is_made(base):
    drawn = lora("pissa_niter_2")
    with pytest.raises(ValueError, match="choose 'pissa'"):
        with_adapter(base, drawn)
    with pytest.warns(UserWarning, match="path_initial_model_for_weight_conversion"):
        with_adapter(get_peft_model(base, drawn), None)
