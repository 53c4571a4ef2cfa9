"""PPO of encoder–decoders: every response token counts, padding changes nothing, rewards rise."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl import AutoModelForSeq2SeqLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from tests import seq2seq_models, tiny_models
from tests.golden import tiny
from tests.ppo.conftest import assert_learned_alike, make_batch, parameters

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

FAMILIES = pytest.mark.parametrize("family", seq2seq_models.FAMILIES)
# fp32 against float64 from logits of magnitude 5.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def make_trainer(
    family: str = "t5_tied",
    padding_side: str = "right",
    policy: Any = None,
    ref_model: Any = None,
    collator: Any = None,
    optimizer: Any = None,
    **settings: Any,
) -> PPOTrainer:
    settings = {"batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-3, **settings}
    return PPOTrainer(
        PPOConfig(**settings),
        policy or seq2seq_models.policy(family),
        ref_model,
        tiny.tokenizer(padding_side),
        optimizer=optimizer,
        training_data_collator=collator,
    )


def from_the_left(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collator that pads where the trainer would not."""
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [e[name] for e in examples], batch_first=True, padding_side="left"
        )
        for name in ("input_ids", "attention_mask")
    }


def by_hand(family: str, model: Any, batch: dict[str, list[Tensor]]) -> list[dict[str, Tensor]]:
    pairs = zip(batch["queries"], batch["responses"], strict=True)
    return [seq2seq_models.by_hand(model, q, r, seq2seq_models.START[family]) for q, r in pairs]


@FAMILIES
@pytest.mark.parametrize("padding", ["right", "left", "collator"])
def test_log_probs_and_values_are_those_of_plain_forwards(family: str, padding: str) -> None:
    collator = from_the_left if padding == "collator" else None
    side = "right" if padding == "collator" else padding
    trainer = make_trainer(family, side, collator=collator)
    batch = make_batch()
    queries, responses = batch["queries"], batch["responses"]
    inputs = trainer.prepare_model_inputs(queries, responses)
    logprobs, logits, values, masks = trainer.batched_forward_pass(
        trainer.model, queries, responses, inputs, return_logits=True
    )
    assert set(inputs) == {
        "input_ids",
        "attention_mask",
        "decoder_input_ids",
        "decoder_attention_mask",
    }
    assert logits is not None
    for i, expected in enumerate(by_hand(family, trainer.model, batch)):
        n = len(responses[i])
        assert masks[i].tolist() == [True] * n + [False] * (masks.shape[1] - n)
        torch.testing.assert_close(logprobs[i, :n].double(), expected["logprobs"], **TOLERANCE)
        torch.testing.assert_close(values[i, :n].double(), expected["values"], **TOLERANCE)
        entropies = torch.special.entr(logits[i, :n].double().softmax(-1)).sum(-1)
        torch.testing.assert_close(entropies, expected["entropies"], **TOLERANCE)
        assert not logprobs[i, n:].any()
        assert not values[i, n:].any()


@FAMILIES
def test_the_first_token_counts_in_the_kl(family: str) -> None:
    reference = seq2seq_models.policy(family, perturbation=0.03)
    trainer = make_trainer(family, ref_model=reference)
    batch = make_batch()
    policy = by_hand(family, trainer.model, batch)
    other = by_hand(family, reference, batch)
    kls = [p["logprobs"] - r["logprobs"] for p, r in zip(policy, other, strict=True)]
    stats = trainer.step(**batch)
    got = torch.from_numpy(stats["objective/kl_dist"]).double()
    expected = torch.stack([kl.sum() for kl in kls]).cpu()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert min(abs(float(kl[0])) for kl in kls) > 1e-3, "or leaving it out would not show"
    assert stats["tokens/queries_len_mean"] == sum(map(len, batch["queries"])) / 4
    assert stats["tokens/responses_len_mean"] == sum(map(len, batch["responses"])) / 4


@FAMILIES
def test_an_update_is_the_gradient_of_the_loss_computed_by_hand(family: str) -> None:
    """One epoch of one mini-batch by plain gradient descent: ratios are 1, so that the policy's
    gradient is that of -mean(A·log π), over every token of every response."""
    beta, vf, rate = 0.3, 0.1, 1e-2
    policy = seq2seq_models.policy(family)
    reference = seq2seq_models.policy(family, perturbation=0.03)
    trained = make_trainer(
        family,
        policy=policy,
        ref_model=reference,
        optimizer=torch.optim.SGD(policy.parameters(), lr=rate),
        mini_batch_size=4,
        ppo_epochs=1,
        init_kl_coef=beta,
        vf_coef=vf,
        gamma=1.0,
        lam=0.95,
    )
    batch = make_batch()
    model = seq2seq_models.policy(family)

    reference = seq2seq_models.policy(family, perturbation=0.03)  # the trainer moved the other
    old, other = by_hand(family, model, batch), by_hand(family, reference, batch)
    advantages, returns = [], []
    for p, r, score in zip(old, other, batch["scores"], strict=True):
        rewards = -beta * (p["logprobs"] - r["logprobs"])
        rewards[-1] += score
        values = torch.cat([p["values"], torch.zeros(1)])
        running, found = 0.0, []
        for t in reversed(range(len(rewards))):
            running = rewards[t] + values[t + 1] - values[t] + 0.95 * running
            found.insert(0, running)
        advantages.append(torch.stack(found))
        returns.append(advantages[-1] + p["values"])
    every = torch.cat(advantages)
    whitened = (every - every.mean()) / (every.var(unbiased=True) + 1e-8).sqrt()

    logprobs, values = [], []
    start = torch.tensor([seq2seq_models.START[family]])
    for query, response in zip(batch["queries"], batch["responses"], strict=True):
        read = torch.cat([start, response])[None, :-1]
        logits, _, value = model(query[None], decoder_input_ids=read)
        logprobs.append(logits[0].log_softmax(-1).gather(1, response[:, None])[:, 0])
        values.append(value[0])
    policy_loss = -(whitened * torch.cat(logprobs)).mean()
    value_loss = 0.5 * (torch.cat(values) - torch.cat(returns)).square().mean()
    (policy_loss + vf * value_loss).backward()

    stats = trained.step(**batch)
    assert stats["ppo/loss/value"] == pytest.approx(value_loss.item(), rel=1e-4)
    moved = parameters(trained)
    for name, parameter in tiny.named_parameters(model).items():
        step = (parameter.detach() - moved[name]) / rate
        assert parameter.grad is not None, name
        torch.testing.assert_close(step, parameter.grad, atol=2e-3, rtol=2e-3, msg=name)


@FAMILIES
def test_masked_response_tokens_do_not_count(family: str) -> None:
    batch = make_batch()
    masks = [torch.ones_like(r) for r in batch["responses"]]
    for mask in masks:
        mask[0] = 0
    inner = make_trainer(family, ref_model=seq2seq_models.policy(family, 0.03))
    kls = inner.step(**batch, response_masks=masks)["objective/kl_dist"]
    whole = make_trainer(family, ref_model=seq2seq_models.policy(family, 0.03))
    assert abs(whole.step(**batch)["objective/kl_dist"] - kls).min() > 1e-3


@FAMILIES
def test_generate_gives_the_models_own_responses_without_the_start_token(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that there is no engine for them is no defect
        trainer = make_trainer(family)
        queries = tiny_models.prompts(3, 7, 5)
        responses = trainer.generate(queries, max_new_tokens=6)
    model = trainer.model.pretrained_model
    for query, response in zip(queries, responses, strict=True):
        raw = model.generate(query[None].to(model.device), max_new_tokens=6)[0]
        assert raw[0] == seq2seq_models.START[family]
        own = raw[1:].tolist()
        if tiny.EOS in own:
            own = own[: own.index(tiny.EOS) + 1]
        assert response.tolist() == own
    alone = trainer.generate(queries[1], max_new_tokens=6, return_prompt=False)
    assert alone.tolist() == [responses[1].tolist()]


def test_finish_reasons_tell_an_end_from_a_limit() -> None:
    trainer = make_trainer("bart", policy=(policy := seq2seq_models.policy("bart")))
    queries = tiny_models.prompts(3, 5)
    assert trainer.rollouts.sample(queries, {"max_new_tokens": 3}).finish_reasons == ["length"] * 2
    policy.pretrained_model.final_logits_bias[0, tiny.EOS] = 100.0
    rollout = trainer.rollouts.sample(queries, {"max_new_tokens": 3})
    assert rollout.finish_reasons == ["eos"] * 2
    assert [s.tolist() for s in rollout.sequences] == [[tiny.EOS]] * 2


def test_contexts_are_those_of_the_two_stacks() -> None:
    trainer = make_trainer("bart")
    context = seq2seq_models.CONTEXT
    (longest,) = tiny_models.prompts(context)
    (response,) = trainer.generate(
        [longest], max_new_tokens=context - 1, min_new_tokens=context - 1
    )
    assert len(response) == context - 1
    with pytest.raises(ValueError, match=r"prompts\[0\] has 25 tokens.* encoder's context of 24:"):
        trainer.generate(tiny_models.prompts(context + 1), max_new_tokens=1)
    with pytest.raises(ValueError, match="decoder's context of 24, its start token included"):
        trainer.generate([longest], max_new_tokens=context)
    batch = make_batch()
    batch["queries"][2] = longest
    batch["responses"][2] = response
    trainer.step(**batch)
    batch["responses"][2] = torch.cat([response, response[:1]])
    with pytest.raises(ValueError, match=r"queries\[2\] and responses\[2\] have 24 \+ 24 tokens"):
        trainer.step(**batch)
    (endless,) = make_trainer("t5_untied").generate(
        tiny_models.prompts(60), max_new_tokens=40, min_new_tokens=40
    )
    assert len(endless) == 40


@FAMILIES
@pytest.mark.parametrize("masked", [False, True])
def test_responses_with_the_start_token_are_taken_without_it(family: str, masked: bool) -> None:
    batch = make_batch()
    masks = [torch.tensor([0] + [1] * (len(r) - 1)) for r in batch["responses"]] if masked else None
    clean = make_trainer(family)
    expected = clean.step(**batch, response_masks=masks)

    start = torch.tensor([seq2seq_models.START[family]])
    raw = {**batch, "responses": [torch.cat([start, r]) for r in batch["responses"]]}
    if masks is not None:
        masks = [torch.cat([torch.ones(1).long(), m]) for m in masks]
    trainer = make_trainer(family)
    with pytest.warns(UserWarning, match="begin with the decoder's start token") as said:
        got = trainer.step(**raw, response_masks=masks)
    assert [w.filename for w in said] == [__file__]
    for name in ("objective/kl", "ppo/loss/value", "tokens/responses_len_mean"):
        assert got[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = trainer.prepare_model_inputs(raw["queries"], raw["responses"])
        trainer.step(**raw, response_masks=masks)
    plain = clean.prepare_model_inputs(batch["queries"], batch["responses"])
    assert all(torch.equal(inputs[name], plain[name]) for name in plain)


def test_a_response_that_is_an_end_alone_is_kept() -> None:
    """BART's start token ends a response as well."""
    batch = make_batch()
    batch["responses"] = [torch.tensor([tiny.EOS])] * 4
    stats = make_trainer("bart").step(**batch)
    assert stats["tokens/responses_len_mean"] == 1


def test_a_response_may_repeat_its_query() -> None:
    batch = make_batch()
    batch["responses"] = [torch.cat([q, q]) for q in batch["queries"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer().step(**batch)


def test_reference_copy_and_none() -> None:
    batch = make_batch()
    assert make_trainer().reference.mode == "copy"
    assert make_trainer().step(**batch)["objective/kl"] == pytest.approx(0, abs=1e-5)
    trainer = make_trainer(init_kl_coef=0.0)
    assert trainer.reference.mode == "none"
    assert math.isnan(trainer.step(**batch)["objective/kl"])
    ours, theirs = make_trainer().generate(
        batch["queries"], generate_ref_response=True, max_new_tokens=3
    )
    assert [x.tolist() for x in ours] == [x.tolist() for x in theirs]


@pytest.mark.parametrize("adapter", ["off", "start"])
def test_reference_adapter(adapter: str) -> None:
    torch.manual_seed(0)
    policy = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(
        seq2seq_models.language_model(), peft_config=seq2seq_models.lora()
    )
    trainer = make_trainer(policy=policy, reference_adapter=adapter)
    assert trainer.reference.mode == "adapter"
    batch = make_batch()
    mine = by_hand("t5_tied", policy.eval(), batch)
    with trainer.reference.as_policy():
        base = by_hand("t5_tied", policy.eval(), batch)
    expected = sum(
        float((p["logprobs"] - b["logprobs"]).sum()) for p, b in zip(mine, base, strict=True)
    )
    assert (abs(expected) > 1e-2) == (adapter == "off")
    before = parameters(trainer)
    got = trainer.step(**batch)["objective/kl"]
    assert got == pytest.approx(expected / 4, abs=1e-4)
    moved = {name for name, x in parameters(trainer).items() if not torch.equal(x, before[name])}
    assert moved
    assert all("lora" in name or name.startswith("v_head") for name in moved)


@pytest.mark.parametrize(("settings", "named"), [
    ({"reference": "trunk", "num_shared_layers": 1}, "reference='trunk', num_shared_layers=1"),
    ({"num_shared_layers": 1}, "num_shared_layers=1"),
    ({"reference": "offload"}, "reference='offload'"),
])  # fmt: skip
def test_references_that_run_layer_by_layer_are_refused(settings: dict, named: str) -> None:
    with pytest.raises(ValueError, match=rf"{named}.*: an encoder–decoder.* reference='copy'"):
        make_trainer(**settings)


def test_create_reference_model_refuses_shared_layers() -> None:
    policy = seq2seq_models.policy()
    with pytest.raises(ValueError, match="num_shared_layers=1: an encoder–decoder shares no"):
        create_reference_model(policy, num_shared_layers=1)
    copied = create_reference_model(policy)
    assert isinstance(copied, AutoModelForSeq2SeqLMWithValueHead)
    assert not any(p.requires_grad for p in copied.parameters())


@FAMILIES
def test_checkpointed_layers_of_both_stacks_change_no_gradient(family: str) -> None:
    batch = make_batch()
    kept, again = make_trainer(family), make_trainer(family, gradient_checkpointing=True)
    calls: dict[int, list[int]] = {}
    for trainer in (kept, again):
        model = trainer.model.pretrained_model
        inside = [
            getattr(s, "layers", None) or s.block
            for s in (model.get_encoder(), model.get_decoder())
        ]
        for place, layers in enumerate(inside):
            part = layers[0].fc1 if family == "bart" else layers[0].layer[0]
            counts = calls.setdefault(place, [])
            counts.append(0)

            def count(_m: Any, _args: Any, counts: list[int] = counts) -> None:
                counts[-1] += 1

            part.register_forward_pre_hook(count)
        trainer.step(**batch)
    for plain, checkpointed in calls.values():
        assert checkpointed > plain, "a layer's parts run again in the backward pass"
    assert_learned_alike(parameters(again), parameters(kept))


@pytest.mark.parametrize("family", ["t5_untied", "bart"])
def test_rewards_rise(family: str) -> None:
    """One of two queries asks for words of the lower half, the other for those of the upper."""
    torch.manual_seed(0)
    policy = AutoModelForSeq2SeqLMWithValueHead(
        seq2seq_models.language_model(family), summary_dropout_prob=0.0
    )
    trainer = make_trainer(
        family, policy=policy, batch_size=64, mini_batch_size=32, ppo_epochs=2, learning_rate=5e-3,
        init_kl_coef=0.01,
    )  # fmt: skip
    middle = tiny.VOCABULARY // 2

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lower = ["w5" in prompt for prompt in prompts]
        return [
            sum((t < middle) == low for t in ids) / len(ids)
            for low, ids in zip(lower, completion_ids, strict=True)
        ]

    result = trainer.train(
        reward,
        steps=25,
        prompts=["w5", "w90 w91"] * 64,
        eval_prompts=["w5", "w90 w91"] * 64,
        generation_kwargs={"max_new_tokens": 4, "do_sample": True, "top_k": 0},
        progress=False,
    )
    before, after = result.evaluations
    assert after.mean - before.mean > 4 * math.hypot(before.sem, after.sem)
    assert after.mean > 0.7, (before.mean, after.mean)
    assert any(after.completions)
    assert not any(text.startswith(" ") for text in after.completions), "a space of the prompt's"


def test_the_trainer_says_what_it_trains(tmp_path: Any) -> None:
    trainer = make_trainer()
    assert trainer.is_encoder_decoder
    assert trainer.config.is_encoder_decoder
    trainer.step(**make_batch())
    trainer.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "AutoModelForSeq2SeqLMWithValueHead.from_pretrained" in card
    assert "AutoModelForSeq2SeqLM.from_pretrained" in card
    again = fastrl.AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tmp_path)
    expected = parameters(trainer)
    for name, parameter in tiny.named_parameters(again).items():
        torch.testing.assert_close(parameter, expected[name], atol=0, rtol=0)


def test_models_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match="model must be an AutoModelForSeq2SeqLMWithValueHead, got"):
        make_trainer(policy=seq2seq_models.language_model())
    with pytest.raises(TypeError, match="ref_model must be an AutoModelForSeq2SeqLMWithValueHead"):
        make_trainer(ref_model=tiny_models.policy())
    with pytest.raises(TypeError, match="ref_model must be an AutoModelForCausalLMWithValueHead"):
        make_trainer(policy=tiny_models.policy(), ref_model=seq2seq_models.policy())


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"decoder_input_ids": torch.tensor([[2, 5]])}, "decoder_input_ids is not supported here"),
    ({"decoder_start_token_id": 7}, "decoder_start_token_id is 7, the model's own is 2"),
])  # fmt: skip
def test_responses_that_begin_elsewhere_are_refused(kwargs: dict, message: str) -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match=message):
        trainer.generate(tiny_models.prompts(3), max_new_tokens=2, **kwargs)
    trainer.generate(tiny_models.prompts(3), max_new_tokens=2, decoder_start_token_id=2)
