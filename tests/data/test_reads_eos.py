"""A reward model is scored on the token ids that it was trained on, EOS or not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, RewardTrainer
from fastrl.alignment import AlignmentConfig, BatchFactory, DatasLoader, Trainer
from fastrl.alignment.annotator import RewardAnnotator
from fastrl.alignment.responses import compare_responses, score_responses
from fastrl.data.collators import ID_COLUMNS
from fastrl.data.encode import Encoder
from fastrl.data.examples import Example, Response
from fastrl.data.prepare import prepare_pairs
from fastrl.data.reads_eos import ADAPTER_FILE, KEY, recorded
from fastrl.rewards.functions import ClassifierReward, load_reward
from fastrl.rewards.weighted import Rewards
from tests import tiny_models
from tests.data.conftest import chat_tokenizer, trained
from tests.golden import tiny
from tests.trainers.conftest import SETTINGS, Make, pairs, reward_model

PAIR = {"prompt": "w5 ", "chosen": "w6 w7", "rejected": "w8"}
IDS = [5, 6, 7]
EOS = tiny.EOS


def read_by(reward: ClassifierReward, *given: Any, **more: Any) -> list[list[int]]:
    """What the model reads, one row per forward pass."""
    read: list[list[int]] = []

    def look(_module: Any, _args: Any, kwargs: Any) -> None:
        rows = zip(kwargs["input_ids"], kwargs["attention_mask"], strict=True)
        read.extend(ids[mask.bool()].tolist() for ids, mask in rows)

    reward.batch_size = 1
    handle = reward.model.register_forward_pre_hook(look, with_kwargs=True)
    reward(*given, **more)
    handle.remove()
    return read


def read_of(folder: Any, prompt: Any = "w5 ", answer: Any = "w6 w7", **more: Any) -> list[int]:
    (ids,) = read_by(load_reward(str(folder)), [prompt], [answer], **more)
    return ids


def closing_chats() -> Any:
    """A tokenizer whose chat template writes EOS behind every message."""
    tokenizer = chat_tokenizer()
    said = "{{ m.content }} "
    tokenizer.chat_template = tokenizer.chat_template.replace(said, said + "<eos> ")
    return tokenizer


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["c_attn"], fan_in_fan_out=True)


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_whether_it_reads_eos_is_saved_with_the_model(
    make_reward: Make, tmp_path: Path, append_eos: bool, adapter: bool
) -> None:
    model, base, saved = reward_model("gpt2"), tmp_path / "base", tmp_path / "saved"
    given = {}
    if adapter:
        model.save_pretrained(base)
        tiny.tokenizer().save_pretrained(base)
        model, given = str(base), {"peft_config": lora()}
    trainer = make_reward(model, [PAIR, PAIR], append_eos=append_eos, **given)
    ids = IDS + [EOS] * append_eos
    assert trainer.train_dataset[0]["chosen_ids"] == ids
    trainer.train()
    trainer.save_model(str(saved))
    trainer.processing_class.save_pretrained(saved)
    file = saved / (ADAPTER_FILE if adapter else "config.json")
    assert json.loads(file.read_text())[KEY] is append_eos
    assert read_of(saved) == ids
    assert read_by(ClassifierReward(trainer.model, tiny.tokenizer()), ["w5 "], ["w6 w7"]) == [ids]
    # It is trained on as it was.
    again = make_reward(str(saved), [PAIR, PAIR], append_eos=None)
    assert again.train_dataset[0]["chosen_ids"] == ids


def test_eos_that_a_decoder_passes_over_as_padding_is_not_said_to_be_read(
    make_reward: Make,
) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    given = {"processing_class": tokenizer, "append_eos": True}
    with pytest.raises(ValueError, match=r"append_eos=True changes nothing: .* pad_token="):
        make_reward(reward_model("gpt2", pad_token_id=None), **given)
    # An encoder's mask lets it read EOS, and another pad token a decoder.
    make_reward(reward_model("roberta"), **given)
    trainer = make_reward(reward_model("gpt2", pad_token_id=None), **given, pad_token="w3")
    assert trainer.model.config.pad_token_id == 3
    assert trainer.train_dataset[0]["chosen_ids"][-1] == EOS


def test_the_key_outlives_transformers(make_reward: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    make_reward(reward_model("gpt2"), append_eos=True).model.save_pretrained(tmp_path / "one")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "one")
    loaded.save_pretrained(tmp_path / "two")
    tiny.tokenizer().save_pretrained(tmp_path / "two")
    assert read_of(tmp_path / "two") == [*IDS, EOS]


@pytest.mark.parametrize("append_eos", [False, True])
def test_it_scores_pairs_as_it_was_trained(make_reward: Make, append_eos: bool) -> None:
    data = pairs(24)
    trainer = make_reward(
        reward_model("gpt2"), data, append_eos=append_eos, max_steps=20, learning_rate=1e-2
    )
    trainer.train()
    reward = ClassifierReward(trainer.model, tiny.tokenizer())
    chosen, rejected = (reward(data["prompt"], data[side]) for side in ("chosen", "rejected"))
    share = sum(a > b for a, b in zip(chosen, rejected, strict=True)) / len(data)
    assert share == trainer.predict(data).metrics["test_accuracy"]
    assert share > 0.9


@pytest.mark.parametrize("add_eos", [False, True])
def test_the_alignment_framework_says_so_too(tmp_path: Path, add_eos: bool) -> None:
    loader = DatasLoader([PAIR, PAIR], tiny.tokenizer(), add_eos=add_eos)
    args = AlignmentConfig(output_dir=str(tmp_path), **{**SETTINGS, "report_to": "none"})
    factory = BatchFactory("reward-modelling", loader, batch_size=4)
    trainer = Trainer(reward_model("gpt2"), args, factory, "bradley-terry")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    ids = IDS + [EOS] * add_eos
    assert [*loader[0].prompt_ids, *loader[0].responses[0].ids] == ids
    assert read_of(tmp_path / "saved") == ids


def test_pairs_that_a_limit_would_cut_are_no_reward_models(tmp_path: Path) -> None:
    long = {**PAIR, "prompt": "w5 w5 w5 w5 "}
    for limit in ({"max_length": 5}, {"max_prompt_length": 2}):
        loader = DatasLoader([PAIR, long], tiny.tokenizer(), **limit)
        with pytest.warns(UserWarning, match="1 of 2 examples are longer than max_length"):
            factory = BatchFactory("reward-modelling", loader, batch_size=1)
        assert len(factory.data) == 1
        assert factory.data[0] == loader[0]
        with pytest.warns(UserWarning, match="1 of 2 examples are longer than .* and are cut"):
            factory = BatchFactory("offline-pairwise", loader, batch_size=1)
        assert len(factory.data) == 2
    with pytest.raises(ValueError, match="no example is left: 1 of 1 examples are longer"):
        BatchFactory("reward-modelling", DatasLoader([long], tiny.tokenizer(), max_length=4))


def test_what_is_too_long_to_score_loses_the_prompts_beginning() -> None:
    reward = ClassifierReward(marked(True), tiny.tokenizer())
    prompt, answer = "w5 " * 60 + "w6 ", "w7 " * 10
    (ids,) = read_by(reward, [prompt], [answer])
    assert ids == [5] * (tiny_models.CONTEXT - 12) + [6] + [7] * 10 + [EOS]
    (ids,) = read_by(reward, [prompt], ["w7 " * 60])  # the answer is cut, too: no EOS
    half = tiny_models.CONTEXT // 2
    assert ids == [5] * (half - 1) + [6] + [7] * half


def marked(reads_eos: bool) -> Any:
    model = reward_model("gpt2")
    setattr(model.config, KEY, reads_eos)
    return model


def test_an_answer_that_a_length_has_cut_gets_no_eos() -> None:
    reward = ClassifierReward(marked(True), tiny.tokenizer())
    ids = read_by(reward, ["w5 "] * 2, ["w6 w7"] * 2, finished=[False, True])
    assert sorted(ids) == [IDS, [*IDS, EOS]]
    assert read_by(reward, [""], ["w6 w7"], finished=[False]) == [IDS[1:]]
    assert read_by(reward, [" "], ["w6 w7"], finished=[True]) == [[*IDS[1:], EOS]]
    tokenizer = closing_chats()
    reward = ClassifierReward(marked(False), tokenizer)
    chat = [{"role": "user", "content": "w5"}], [{"role": "assistant", "content": "w6"}]
    whole = [10, 5, EOS, 11, 6]
    assert read_by(reward, *([x] for x in chat)) == [[*whole, EOS]]
    assert read_by(reward, *([x] for x in chat), finished=[False]) == [whole]


def test_a_function_that_names_finished_gets_it_unless_a_column_has_the_name() -> None:
    told: list[Any] = []

    def plain(prompts: Any, finished: Any = None, **_: Any) -> list[float]:
        told.append(finished)
        return [0.0] * len(prompts)

    for columns in ({}, {"finished": ["so", "so"]}):
        Rewards(plain)(["w5 "] * 2, ["w6"] * 2, [[6], [6]], columns, finished=[False, True])
    assert told == [[False, True], ["so", "so"]]


def test_a_wrapped_reward_model_that_is_not_told_what_was_cut_warns_once() -> None:
    reward = ClassifierReward(marked(True), tiny.tokenizer())
    given: Any = (["w5 "], ["w6"], [[6]])

    def passes_on(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return reward(prompts=prompts, completions=completions, **columns)

    def names_it(prompts: Any, completions: Any, finished: Any, **columns: Any) -> list[float]:
        return reward(prompts=prompts, completions=completions, finished=finished, **columns)

    cut = Rewards(names_it)(*given, finished=[False]).total.tolist()
    assert cut == Rewards(reward)(*given, finished=[False]).total.tolist()
    with pytest.warns(UserWarning, match="name a parameter `finished`") as found:
        whole = [Rewards(passes_on)(*given, finished=[False]).total.tolist() for _ in range(2)]
    assert len(found) == 1
    assert whole == [reward(["w5 "], ["w6"])] * 2 != [cut] * 2  # texts alone are whole ones
    other = ClassifierReward(marked(True), tiny.tokenizer())
    other.wants_finished = False  # as of a classifier of others
    other(*given[:2], completion_ids=[[6]])


def test_ppo_says_which_completions_are_whole() -> None:
    told: list[Any] = []

    class Reward(ClassifierReward):
        def __call__(self, *_: Any, **given: Any) -> Any:
            told.extend(zip(given["completion_ids"], given["finished"], strict=True))
            return [0.0] * len(given["prompts"])

    policy = AutoModelForCausalLMWithValueHead(tiny_models.language_model())
    config = PPOConfig(batch_size=8, mini_batch_size=8)
    trainer = PPOTrainer(config, policy, None, tiny.tokenizer())
    given = {"max_new_tokens": 12, "eos_token_id": list(range(1, 9)), "do_sample": True}
    prompts = [f"w{i}" for i in range(10, 18)]
    trainer.train(
        Reward(marked(True), tiny.tokenizer()),
        steps=2,
        prompts=prompts,
        generation_kwargs=given,
        progress=False,
    )
    assert {whole for _, whole in told} == {True, False}
    assert all(whole == (0 < ids[-1] < 9) for ids, whole in told)


def test_online_tasks_say_which_responses_are_whole() -> None:
    reward = ClassifierReward(marked(True), tiny.tokenizer())
    whole, cut = Response("w6", (6, EOS)), Response("w7", (7,), finished=False)
    ids = read_by(reward, ["w5 "], ["w6"])  # seen to be read one by one
    assert ids == [[5, 6, EOS]]
    read: list[Any] = []
    call = reward.__call__
    annotator = RewardAnnotator(lambda **given: read.append(given) or call(**given))
    annotator.reward.wants_finished = True  # type: ignore[attr-defined]
    score_responses(annotator, [Example("w5 ", (5,), (cut,))])
    compare_responses(annotator, [Example("w5 ", (5,), (whole, cut))])
    assert [given["finished"] for given in read] == [[False], [True], [False]]


def test_annotators_get_chats_as_messages_and_read_them_as_trained() -> None:
    tokenizer = closing_chats()
    reward = ClassifierReward(marked(True), tokenizer)
    prompt = [{"role": "user", "content": "w5"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("w6", "w7")]
    example = Encoder(tokenizer)(prompt, answers)
    trained_on = [[*example.prompt_ids, *response.ids] for response in example.responses]
    written = zip(example.responses, ("w6", "w7"), strict=True)  # as decoded, without EOS
    sampled = replace(example, responses=tuple(replace(r, text=text) for r, text in written))
    given: list[Any] = []
    annotator = RewardAnnotator(lambda **told: given.append(told) or reward(**told))
    score_responses(annotator, [sampled])
    compare_responses(annotator, [sampled])
    assert [told["prompts"] for told in given] == [[prompt]] * 3
    assert [told["completions"][0] for told in given] == [answers[0], *answers]
    assert read_by(reward, [prompt, prompt], answers) == trained_on


def test_without_a_record_a_text_is_read_as_its_tokenizer_writes_it(make_reward: Make) -> None:
    tokenizer = trained("wordpiece")
    model = reward_model("gpt2", vocab_size=len(tokenizer))
    reward = ClassifierReward(model, tokenizer)
    text = "The film was won", "derful and moving"
    assert read_by(reward, *([x] for x in text)) == [tokenizer("".join(text))["input_ids"]]
    assert read_by(reward, ["The film"], [" was"], finished=[False]) == [
        tokenizer("The film was")["input_ids"]
    ]
    # Ours are apart, and closed as the tokenizer closes a text.
    row = {"prompt": text[0], "chosen": text[1], "rejected": "no"}
    model = reward_model("gpt2", vocab_size=len(tokenizer))
    trainer = make_reward(model, [row], processing_class=tokenizer)
    ids = trainer.train_dataset[0]["chosen_ids"]
    assert ids == tokenizer(text[0])["input_ids"][:-1] + tokenizer(text[1])["input_ids"][1:]
    assert read_by(ClassifierReward(model, tokenizer), *([x] for x in text)) == [ids]


def test_of_ids_that_others_made_nothing_is_known(make_reward: Make) -> None:
    model = marked(True)
    rows = prepare_pairs([PAIR, PAIR], tiny.tokenizer(), None)
    assert set(rows.column_names) == set(ID_COLUMNS)
    trainer = make_reward(model, rows)
    assert recorded(trainer.model) is None
    make_reward(model, [PAIR], eval_dataset=[PAIR]).evaluate(num_print_samples=0)
    assert recorded(model) is False
    RewardTrainer(model, trainer.args, eval_dataset=[PAIR], processing_class=tiny.tokenizer())
    assert recorded(model) is False  # nothing is trained


def test_a_chat_templates_eos_counts(make_reward: Make) -> None:
    tokenizer = closing_chats()
    chosen, rejected = ([{"role": "assistant", "content": word}] for word in ("w6", "w7"))
    row = {"prompt": "w5", "chosen": chosen, "rejected": rejected}
    trainer = make_reward(reward_model("gpt2"), [row], processing_class=tokenizer)
    assert trainer.train_dataset[0]["chosen_ids"] == [10, 5, EOS, 11, 6, EOS]
    assert recorded(trainer.model) is True
