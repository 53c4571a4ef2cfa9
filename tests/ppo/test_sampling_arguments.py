"""Responses are sampled as the caller asks, and log-probs are of what they are sampled from."""

import warnings

import pytest
import torch
from transformers import GenerationConfig

from fastrl import GenerateEngine
from fastrl.trainers.ppo.rollouts import SamplingArguments
from tests import tiny_models
from tests.golden import tiny
from tests.ppo.conftest import make_trainer

# As Qwen2.5-Instruct ships it.
QWEN = {
    "do_sample": True, "repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
    "eos_token_id": [tiny.EOS, 40],
}  # fmt: skip
LEAKS = {"repetition_penalty": "1.1", "temperature": "0.7", "top_k": "20", "top_p": "0.8"}
NEUTRAL = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def instruct(**settings):
    """A Qwen2 with a generation_config of its own."""
    policy = tiny_models.policy("qwen2")
    policy.pretrained_model.generation_config.update(**(settings or QWEN))
    return policy


def plain():
    policy = tiny_models.policy("qwen2")
    policy.pretrained_model.generation_config.eos_token_id = QWEN["eos_token_id"]
    return policy


def trainer_of(policy, **settings):
    return make_trainer(policy, ppo_epochs=1, mini_batch_size=4, **settings)


def rollout(trainer, **generation_kwargs):
    torch.manual_seed(3)
    return trainer.rollouts.sample(
        tiny_models.prompts(5, 3, 7, 2), {"max_new_tokens": 8, **generation_kwargs}
    )


def logits_of(model, ids):
    """[T, V] of tokens [1, T], by a plain forward on the model's device."""
    return model(ids.to(model.device)).logits[0].cpu()


def logprobs_at(trainer, prompt, response, temperature):
    """log softmax(z/T) of the response's tokens, by a plain forward."""
    response = response.cpu()
    ids = torch.cat([prompt, response])[None]
    with torch.no_grad():
        logits = logits_of(trainer.model.pretrained_model, ids)[len(prompt) - 1 : -1].double()
    every = (logits / temperature).log_softmax(-1)
    return every.gather(1, response[:, None])[:, 0]


def drawn_ones(policy, backend):
    """The tokens of one draw each, from many equal prompts."""
    trainer = make_trainer(policy, rollout_backend=backend)
    torch.manual_seed(5)
    (prompt,) = tiny_models.prompts(4)
    out = trainer.rollouts.sample([prompt] * 800, {"max_new_tokens": 1})
    return torch.stack(out.sequences).flatten().bincount(minlength=tiny.VOCABULARY)


@pytest.mark.parametrize("backend", ["engine", "generate"])
def test_the_checkpoints_settings_do_not_act_on_rollouts(backend):
    """Had top-k or top-p cut, 77 of 97 tokens would never come."""
    counts = drawn_ones(instruct(), backend)
    assert torch.equal(counts, drawn_ones(plain(), backend))
    assert (counts > 0).sum() > 60


def test_the_checkpoints_eos_ids_still_end_responses():
    policy = instruct()
    with torch.no_grad():
        policy.pretrained_model.lm_head.weight[40] = 0
        policy.pretrained_model.lm_head.weight[40].add_(
            policy.pretrained_model.lm_head.weight.sum(0)
        )
    out = rollout(trainer_of(policy), max_new_tokens=30)
    ended = [
        s for s, reason in zip(out.sequences, out.finish_reasons, strict=True) if reason == "eos"
    ]
    assert any(int(s[-1]) == 40 for s in ended)


def test_what_the_caller_gives_acts_and_is_named_once():
    trainer = trainer_of(instruct())
    with pytest.warns(UserWarning, match=r"generation_kwargs: top_k=1 changes what tokens") as told:
        out = rollout(trainer, top_k=1)
    assert len(told) == 1
    best = [
        logits_of(trainer.model.pretrained_model, prompt[None])[-1].argmax()
        for prompt in tiny_models.prompts(5, 3, 7, 2)
    ]
    assert [int(s[0]) for s in out.sequences] == [int(b) for b in best]
    rollout(trainer, top_k=1)  # a second warning would be an error


def test_training_on_greedy_responses_is_named():
    with pytest.warns(UserWarning, match=r"generation_kwargs: do_sample=False changes"):
        trainer_of(plain()).train(
            lambda completions, **_: [0.0] * len(completions),
            steps=1, prompts=["w5 w6"] * 4, progress=False,
            generation_kwargs={"max_new_tokens": 2, "do_sample": False},
        )  # fmt: skip
    rollout(trainer_of(plain()), do_sample=False)  # an evaluation, say: without a warning


@pytest.mark.parametrize("backend", ["engine", "generate"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_of_epoch_one_is_one(temperature, backend):
    trainer = trainer_of(
        instruct(), temperature=temperature, rollout_backend=backend, old_logprobs="auto"
    )
    out = rollout(trainer)
    stats = trainer.step(
        tiny_models.prompts(5, 3, 7, 2), out.sequences, list(torch.tensor([1.0, -1.0, 0.5, 2.0]))
    )
    assert stats["rollout/reused"] == float(backend == "engine")
    assert abs(stats["ppo/policy/ratio"] - 1).max() <= 1e-5
    assert stats["ppo/optimizer_steps"] == 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reuse", ["auto", "recompute"])
def test_log_probs_are_of_the_policy_at_its_temperature(temperature, reuse):
    trainer = trainer_of(instruct(), temperature=temperature, old_logprobs=reuse)
    prompts = tiny_models.prompts(5, 3, 7, 2)
    responses = rollout(trainer).sequences
    expected = [
        logprobs_at(trainer, p, r, temperature) for p, r in zip(prompts, responses, strict=True)
    ]
    stats = trainer.step(prompts, responses, list(torch.zeros(4)))
    for name in ("logprobs", "ref_logprobs"):  # the policy is its reference yet
        got = torch.from_numpy(stats[f"objective/{name}"])
        for i, each in enumerate(expected):
            begin = len(prompts[i]) - 1
            found = got[i, begin : begin + len(each)].double()
            torch.testing.assert_close(found, each, atol=2e-5, rtol=0)


def test_the_update_descends_the_loss_at_the_temperature():
    """One SGD step on -A·ρ alone, against autograd in float64."""
    import copy

    from fastrl import PPOConfig, PPOTrainer

    temperature, rate = 0.5, 0.1
    policy = plain()
    config = PPOConfig(
        batch_size=2, mini_batch_size=2, ppo_epochs=1, init_kl_coef=0.0,
        temperature=temperature, advantage="dr_grpo", group_size=2,
    )  # fmt: skip
    exact = copy.deepcopy(policy.pretrained_model).double()
    optimizer = torch.optim.SGD([p for p in policy.pretrained_model.parameters()], lr=rate)
    trainer = PPOTrainer(config, policy, tokenizer=tiny.tokenizer(), optimizer=optimizer)
    (prompt,) = tiny_models.prompts(4)
    responses, advantages = tiny_models.prompts(3, 5, seed=1), [0.5, -0.5]
    trainer.step([prompt] * 2, responses, list(torch.tensor([1.0, 0.0])))
    tokens = sum(map(len, responses))
    loss = torch.zeros((), dtype=torch.float64)
    for response, advantage in zip(responses, advantages, strict=True):
        ids = torch.cat([prompt, response])[None]
        logits = exact(ids).logits[0, len(prompt) - 1 : -1]
        chosen = (logits / temperature).log_softmax(-1).gather(1, response[:, None])
        loss = loss - advantage * chosen.sum() / tokens  # d ρ = d log π at ρ = 1
    loss.backward()
    for (name, got), p in zip(
        policy.pretrained_model.named_parameters(), exact.parameters(), strict=True
    ):
        expected = p.detach() - rate * p.grad
        torch.testing.assert_close(got.cpu().double(), expected, atol=1e-6, rtol=0, msg=name)


def test_the_kl_over_the_vocabulary_is_at_the_temperature():
    from tests.ppo.conftest import make_policy, perturbed

    policy, reference = make_policy(), perturbed(make_policy())
    trainer = make_trainer(policy, reference, temperature=0.5, kl_penalty="full")
    prompts, responses = tiny_models.prompts(5, 3), tiny_models.prompts(4, 6, seed=1)
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.cat([prompt, response])[None]
        with torch.no_grad():
            p, q = (
                (
                    logits_of(m.pretrained_model, ids)[len(prompt) - 1 : -1].double() / 0.5
                ).log_softmax(-1)
                for m in (trainer.model, trainer.ref_model)
            )
        expected.append((p.exp() * (p - q)).sum())
    assert trainer.sequence_kl(prompts, responses) == pytest.approx(
        float(sum(expected) / 2), rel=1e-5
    )


@pytest.mark.parametrize(("given", "expected"), [
    ({}, (32, None)),
    ({"max_new_tokens": 7}, (7, None)),
    ({"max_length": 30}, (None, 30)),
    ({"generation_config": GenerationConfig(max_new_tokens=5)}, (5, None)),
])  # fmt: skip
def test_lengths_are_the_callers_too(given, expected):
    policy = instruct(max_new_tokens=3, max_length=40)
    kwargs = SamplingArguments(policy, 1.0).of_the_policy(given)
    assert (kwargs["max_new_tokens"], kwargs["max_length"]) == expected


def test_a_generation_config_that_is_given_acts():
    trainer = trainer_of(instruct())
    config = GenerationConfig(max_new_tokens=4, top_k=1)
    with pytest.warns(UserWarning, match=r"generation_kwargs: top_k=1 changes"):
        out = trainer.rollouts.sample(tiny_models.prompts(5), {"generation_config": config})
    assert len(out.sequences[0]) <= 4
    assert out.logprobs is not None, "the engine wrote it"
    with pytest.raises(ValueError, match=r"temperature=0.4, the policy that is trained"):
        trainer.rollouts.sample(
            tiny_models.prompts(5), {"generation_config": GenerationConfig(temperature=0.4)}
        )


def test_another_temperature_in_train_is_an_error_before_anything_is_done():
    trainer = trainer_of(plain())
    asked = []
    with pytest.raises(ValueError, match=r"temperature=0.7.*set PPOConfig\(temperature=0.7\)"):
        trainer.train(
            lambda completions, **_: asked.append(1) or [0.0] * len(completions),
            steps=1, prompts=["w5 w6"] * 4, progress=False,
            generation_kwargs={"max_new_tokens": 3, "temperature": 0.7},
        )  # fmt: skip
    assert not asked
    assert trainer.current_step == 0


def test_the_same_temperature_in_train_is_none():
    trainer = trainer_of(plain(), temperature=0.7)
    trainer.train(
        lambda completions, **_: [float(len(c)) for c in completions], steps=1,
        prompts=["w5 w6"] * 4, progress=False,
        generation_kwargs={"max_new_tokens": 3, "temperature": 0.7},
    )  # fmt: skip
    assert trainer.current_step == 1


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be positive"):
        make_trainer(temperature=temperature)


def test_classic_generate_names_each_field_of_the_checkpoint_once():
    trainer = trainer_of(instruct())
    prompts = tiny_models.prompts(5, 3)
    with pytest.warns(UserWarning, match="changes what tokens are drawn from") as told:
        trainer.generate(prompts, max_new_tokens=3)
    (warning,) = told
    for name, value in LEAKS.items():
        assert f"{name}={value} (the model's generation_config)" in str(warning.message)
    trainer.generate(prompts, max_new_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.generate(prompts, max_new_tokens=3, repetition_penalty=1.0, **NEUTRAL)


def test_classic_generate_names_the_fields_of_a_generation_config_that_is_given():
    """And none of the checkpoint's that it takes the place of."""
    trainer = trainer_of(instruct())
    (prompt,) = tiny_models.prompts(5)
    neutral = GenerationConfig(max_new_tokens=3, repetition_penalty=1.0, **NEUTRAL)
    trainer.generate(prompt, generation_config=neutral)  # a warning would be an error
    bent = GenerationConfig(max_new_tokens=3, repetition_penalty=1.5, **NEUTRAL)
    with pytest.warns(UserWarning, match=r"generate: repetition_penalty=1.5 changes") as told:
        trainer.generate(prompt, generation_config=bent)
    assert len(told) == 1


def test_a_generation_config_with_sampling_has_the_policys_temperature():
    trainer = trainer_of(plain(), temperature=0.5)
    prompts = tiny_models.prompts(5, 3, 7, 2)
    config = GenerationConfig(max_new_tokens=4, do_sample=True, top_k=0)
    responses = trainer.generate(prompts, return_prompt=False, generation_config=config)
    assert trainer.step(prompts, responses, list(torch.zeros(4)))["rollout/reused"] == 1


def test_classic_generate_keeps_the_checkpoints_settings():
    """As model.generate does: top_k = 1 of the checkpoint is greedy."""
    trainer = trainer_of(instruct(do_sample=True, top_k=1))
    (prompt,) = tiny_models.prompts(5)
    with pytest.warns(UserWarning, match="top_k=1"):
        drawn = trainer.generate(prompt, max_new_tokens=6, return_prompt=False)
    greedy = trainer.generate(prompt, max_new_tokens=6, return_prompt=False, do_sample=False)
    assert torch.equal(drawn, greedy)


def test_a_temperature_of_classic_generate_acts_on_the_draw_alone():
    trainer = trainer_of(plain())
    prompts = tiny_models.prompts(5, 3, 7, 2)
    with pytest.warns(UserWarning, match=r"temperature=0.5.*set the trainer's temperature"):
        responses = trainer.generate(
            prompts, return_prompt=False, max_new_tokens=4, **(NEUTRAL | {"temperature": 0.5})
        )
    expected = [logprobs_at(trainer, p, r, 1.0) for p, r in zip(prompts, responses, strict=True)]
    stats = trainer.step(prompts, responses, list(torch.zeros(4)))
    got = torch.from_numpy(stats["objective/logprobs"]).double()
    assert stats["rollout/reused"] == 1
    assert got.sum() == pytest.approx(float(sum(e.sum() for e in expected)), abs=1e-4)


def test_a_loop_in_which_something_seeds_torch_is_warned_once():
    trainer, prompts = trainer_of(plain()), tiny_models.prompts(5, 3, 7, 2)

    def one_step():
        responses = trainer.generate(prompts, return_prompt=False, max_new_tokens=4, **NEUTRAL)
        torch.manual_seed(1)  # as a reward function may
        trainer.step(prompts, responses, list(torch.zeros(4)))

    one_step()
    one_step()
    with pytest.warns(UserWarning, match="the same random numbers as before the last") as said:
        one_step()
    assert said[0].filename == __file__
    one_step()


def test_the_policys_temperature_is_the_default_of_classic_generate():
    trainer = trainer_of(plain(), temperature=0.5)
    prompts = tiny_models.prompts(5, 3, 7, 2)
    responses = trainer.generate(
        prompts, return_prompt=False, max_new_tokens=4, do_sample=True, top_k=0
    )
    stats = trainer.step(prompts, responses, list(torch.zeros(4)))
    assert stats["rollout/reused"] == 1
    expected = sum(
        logprobs_at(trainer.reference, p, r, 0.5).sum()
        for p, r in zip(prompts, responses, strict=True)
    )
    got = torch.from_numpy(stats["objective/ref_logprobs"]).double().sum()
    assert got == pytest.approx(float(expected), abs=1e-4)


def stopped_model():
    """Its greedy continuation of a prompt is known, and long."""
    return tiny_models.policy("llama")


def byte_level():
    """A tokenizer of bytes, which stop strings need: 256 of them, and EOS, which also pads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    core = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


def test_a_stop_string_ends_a_response_there():
    from fastrl import PPOConfig, PPOTrainer

    tokenizer = byte_level()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": 256, "pad_token_id": 256}
    policy = tiny_models.policy("llama", **ids, bos_token_id=None)
    trainer = PPOTrainer(PPOConfig(batch_size=4), policy, tokenizer=tokenizer)
    prompts = tiny_models.prompts(5, 3, 7, 2)
    settings = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [256]}
    free = trainer.generate(prompts, return_prompt=False, **settings)
    # Printable, so that it is a text by itself.
    at, stop = next(
        (i, tokenizer.decode([t])) for i, t in enumerate(free[0].tolist()) if 32 < t < 94 and i < 11
    )
    with pytest.warns(UserWarning, match=r"the argument stop_strings.*it knows stop=\[\["):
        got = trainer.generate(
            prompts, return_prompt=False, stop_strings=[stop], batch_size=4, **settings
        )
    assert len(got[0]) == at + 1
    for mine, whole in zip(got, free, strict=True):
        tokens = whole.tolist()
        ends = [i + 1 for i in range(len(tokens)) if stop in tokenizer.decode(tokens[: i + 1])]
        assert mine.tolist() == tokens[: ends[0] if ends else None]


@pytest.mark.parametrize("family", ["llama", "t5_untied"])
def test_responses_that_something_stopped_say_so(family):
    from fastrl.rollout.sampling_params import end_tokens
    from tests import seq2seq_models

    make = seq2seq_models.policy if family.startswith("t5") else tiny_models.policy
    model = make(family)
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token  # padding looks like an end
    engine = GenerateEngine(model, tokenizer, batch_size=4)
    prompts = tiny_models.prompts(5, 3, 7, 2)
    settings = {
        "max_new_tokens": 10,
        "do_sample": False,
        "suppress_tokens": end_tokens(model, tokenizer).tolist(),
    }
    free = engine.generate_with(prompts, settings)
    assert set(free.finish_reasons) == {"length"}
    stop = free.sequences[1][2:4].tolist()
    out = engine.generate_with(prompts, {**settings, "stop": [stop]})
    assert out.finish_reasons[1] == "stop"
    assert out.sequences[1].tolist()[-2:] == stop
    for mine, whole in zip(out.sequences, free.sequences, strict=True):
        assert mine.tolist() == whole[: len(mine)].tolist()


def test_a_criterion_and_the_time_stop_responses():
    from transformers import StoppingCriteria, StoppingCriteriaList

    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            limits = torch.tensor([9, 100])
            return input_ids.shape[1] >= limits

    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    engine = GenerateEngine(tiny_models.policy("llama"), tokenizer, batch_size=4)
    settings = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [tiny.EOS]}
    prompts = tiny_models.prompts(5, 5)
    out = engine.generate_with(
        prompts, {**settings, "stopping_criteria": StoppingCriteriaList([After()])}
    )
    assert out.finish_reasons == ["stop", "length"]
    assert [len(s) for s in out.sequences] == [4, 8]
    out = engine.generate_with(prompts, {**settings, "max_time": 1e-9})
    assert out.finish_reasons == ["length", "length"]
    assert [len(s) for s in out.sequences] == [1, 1]


def test_a_generation_config_that_is_given_ends_responses():
    """Its EOS ids and its time; arguments beside it come first."""
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    engine = GenerateEngine(tiny_models.policy("llama"), tokenizer, batch_size=4)
    settings = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [tiny.EOS]}
    prompts = tiny_models.prompts(5, 5)
    free = engine.generate_with(prompts, settings)
    config = GenerationConfig(max_time=1e-9, **settings)
    out = engine.generate_with(prompts, {"generation_config": config})
    assert out.finish_reasons == ["length", "length"]
    assert [len(s) for s in out.sequences] == [1, 1]
    end = int(free.sequences[0][3])
    config = GenerationConfig(eos_token_id=end, **settings)
    out = engine.generate_with(prompts, {"generation_config": config, "max_new_tokens": 6})
    for mine, whole in zip(out.sequences, free.sequences, strict=True):
        tokens = whole.tolist()[:6]
        at = tokens.index(end) + 1 if end in tokens else 6
        assert mine.tolist() == tokens[:at]
    assert out.finish_reasons[0] == "eos"


@pytest.mark.parametrize("backend", ["engine", "generate"])
@pytest.mark.parametrize("stop", [["w5"], "w5", [5], 5, [[]]])
def test_a_stop_that_is_no_list_of_token_sequences_is_refused(backend, stop):
    trainer = make_trainer(stopped_model(), rollout_backend=backend)
    with pytest.raises(ValueError, match=r"stop must be a list of token seq|an empty sequence"):
        trainer.rollouts.sample(tiny_models.prompts(3), {"max_new_tokens": 2, "stop": stop})


def test_stops_with_several_beams_are_refused():
    engine = GenerateEngine(tiny_models.policy("llama"), tiny.tokenizer())
    with pytest.raises(ValueError, match="stop_strings with num_beams=2"):
        engine.generate_with(
            tiny_models.prompts(3), {"num_beams": 2, "stop_strings": ["w5"], "max_new_tokens": 2}
        )


@pytest.mark.parametrize("backend", ["engine", "generate"])
def test_trainers_take_token_sequences_that_stop(backend):
    trainer = make_trainer(stopped_model(), rollout_backend=backend)
    prompts = tiny_models.prompts(5, 3)
    settings = {"max_new_tokens": 12, "do_sample": False}
    free = trainer.rollouts.sample(prompts, settings)
    stop = free.sequences[0][1:3].tolist()
    out = trainer.rollouts.sample(prompts, {**settings, "stop": [stop]})
    assert out.sequences[0].tolist() == free.sequences[0][:3].tolist()
    assert out.finish_reasons[0] == "stop"
