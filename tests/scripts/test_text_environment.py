"""TextEnvironment: episodes of a model and its tools, as PPOTrainer.step takes them."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

import fastrl
from fastrl import TextEnvironment, TextHistory


def tokenizer() -> Any:
    """Of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({x: i for i, x in enumerate([*alphabet, "<eos>"])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


class Scripted(torch.nn.Module):
    """Says what its lines say to each prompt in turn."""

    def __init__(self, lines: dict[str, list[str]]):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.lines, self.tokenizer, self.asked = lines, tokenizer(), 0

    def generate(self, input_ids: Any, attention_mask: Any, **given: Any) -> Any:
        assert given["max_new_tokens"] == 8
        assert set(given["stop_strings"]) == {"<call>", "<submit>"}
        self.asked += 1
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            text = self.tokenizer.decode(ids[mask.bool()])
            line = next(lines for task, lines in self.lines.items() if task in text).pop(0)
            rows.append(self.tokenizer(line)["input_ids"])
        width = max(map(len, rows))
        end = self.tokenizer.eos_token_id
        padded = torch.tensor([row + [end] * (width - len(row)) for row in rows])
        return torch.cat([input_ids, padded], 1)


def double(text: str) -> str:
    return str(2 * int(text))


def test_tools_answer_until_the_model_submits() -> None:
    lines = {
        "one": ["<request><double>4<call> and more", "= 8<submit>"],
        "two": ["no call"],
        "three": ["<request><triple>1<call>", "<request><double>x<call>", "<request>1<call>"],
        "four": ["<request><double>" + "9" * 40 + "<call>", "so<eos>"],
    }
    model, seen = Scripted(lines), {}

    def reward(texts: list[str], answers: list[int]) -> list[float]:
        seen["texts"] = texts
        return [float(x) for x in answers]

    tools = {"double": double}
    env = TextEnvironment(
        model, tokenizer(), tools, reward, "do: ", max_turns=3, max_tool_reponse=20,
        generation_kwargs={"max_new_tokens": 8},
    )  # fmt: skip
    queries, responses, masks, rewards, histories = env.run(
        ["one", "two", "three", "four"], answers=[1, 2, 3, 4]
    )
    texts = [tokenizer().decode(x) for x in responses]
    assert [tokenizer().decode(x) for x in queries] == [
        "do: one",
        "do: two",
        "do: three",
        "do: four",
    ]
    assert texts[0] == "<request><double>4<call>8<response>= 8<submit>"
    assert texts[1] == "no call<eos>"
    assert texts[2] == (
        "<request><triple>1<call>Unknown tool triple.<response><request><double>x<call>"
        "Tool error: inval...<response><request>1<call>Unknown tool call...<response>"
    )
    assert texts[3].endswith("<call>19999999999999999...<response>so<eos>")
    assert rewards == [1.0, 2.0, 3.0, 4.0]
    assert seen["texts"] == [
        "= 8<submit>",
        "no call<eos>",
        "Unknown tool call...<response>",
        "so<eos>",
    ]
    for history, ids, mask, text in zip(histories, responses, masks, texts, strict=True):
        written = tokenizer().decode(ids[mask.bool()])
        own = [
            history.text[a:b]
            for (a, b), s in zip(history.text_spans, history.system_spans, strict=True)
            if not s
        ]
        assert written == "".join(own)
        assert len(ids) == len(mask)
        assert text in history.text
    assert [history.completed for history in histories] == [True, True, False, True]
    assert model.asked == 3


def test_long_episodes_are_truncated() -> None:
    model = Scripted({"one": ["<request><double>4<call>"]})
    env = TextEnvironment(
        model, tokenizer(), [double], lambda texts: [0.0], "", max_length=10,
        generation_kwargs={"max_new_tokens": 8},
    )  # fmt: skip
    assert env.tools == {"function": double}
    (history,) = env.run(["one"])[-1]
    assert (history.completed, history.truncated) == (True, True)


def test_histories_are_shown(capsys: Any) -> None:
    history = TextHistory("ask ", torch.tensor([65, 66]))
    history.append_segment("said", torch.tensor([67]), system=False)
    history.reward = 0.5
    history.show_text(show_legend=True)
    history.show_tokens(tokenizer())
    shown = capsys.readouterr().out
    assert "ask said" in shown
    assert "Reward: 0.5" in shown
    assert "Model" in shown
    with pytest.raises(ValueError, match="this one is empty"):
        history.append_segment("", torch.tensor([1]))


@pytest.fixture
def small() -> Any:
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    return AutoModelForCausalLM.from_config(config)


def test_the_best_of_several_responses_are_kept(small: Any) -> None:
    def length(texts: list[str]) -> list[float]:
        return [float(len(text)) for text in texts]

    seen: list[list[str]] = []

    def scores(texts: list[str]) -> list[float]:
        seen.append(texts)
        return length(texts)

    sampler = fastrl.BestOfNSampler(
        small, tokenizer(), scores, lambda: 6, sample_size=5, seed=3, n_candidates=2
    )
    queries = [tokenizer()(text, return_tensors="pt").input_ids[0] for text in ("ab", "c")]
    found = sampler.generate(queries, do_sample=True, pad_token_id=256)
    for best, texts, query in zip(found, seen, ("ab", "c"), strict=True):
        assert length(best) == sorted(length(texts), reverse=True)[:2]
        assert all(text.startswith(query) for text in texts)
        assert len(texts) == 5
    (one,) = sampler.generate([97, 98], do_sample=True, pad_token_id=256)
    assert len(one) == 2
    with pytest.raises(ValueError, match="n_candidates must be 1 to sample_size"):
        fastrl.BestOfNSampler(small, tokenizer(), scores, lambda: 6, n_candidates=5)


def test_a_reference_follows_by_a_callback(small: Any) -> None:
    other = AutoModelForCausalLM.from_config(small.config)
    before = [x.clone() for x in other.parameters()]
    callback = fastrl.SyncRefModelCallback(other)
    args = type("Args", (), {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25})
    for step in (1, 2):
        callback.on_step_end(args, type("State", (), {"global_step": step}), None, model=small)
    for x, start, own in zip(other.parameters(), before, small.parameters(), strict=True):
        torch.testing.assert_close(x, 0.75 * start + 0.25 * own)


@pytest.fixture
def ignores_masks(monkeypatch: Any) -> Any:
    """A model whose padding changes what it draws."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    config.initializer_range = 0.5
    model = AutoModelForCausalLM.from_config(config).eval()
    prepare = type(model).prepare_inputs_for_generation

    def unmasked(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(self, *args, **kwargs)
        return {k: x for k, x in inputs.items() if k not in ("attention_mask", "position_ids")}

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", unmasked)
    return model


def test_tasks_go_on_as_alone_where_padding_changes_what_is_drawn(ignores_masks: Any) -> None:
    def run(tasks: list[str]) -> list[list[int]]:
        options = {"max_new_tokens": 6, "do_sample": False}
        env = TextEnvironment(
            ignores_masks, tokenizer(), {}, lambda texts: [0.0] * len(texts), "", max_turns=1,
            generation_kwargs=options,
        )  # fmt: skip
        return [response.tolist() for response in env.run(tasks)[1]]

    tasks = ["a long one", "b", "two"]
    with pytest.warns(UserWarning, match="padding changes what model.generate draws"):
        several = run(tasks)
    assert several == [run([task])[0] for task in tasks]


def test_responses_are_drawn_alone_where_a_batch_changes_them(monkeypatch: Any, small: Any) -> None:
    monkeypatch.setattr("fastrl.compat.scripts.best_of_n.together", lambda *_: 1)
    sizes, generate = [], small.generate

    def noted(ids: Any, **given: Any) -> Any:
        sizes.append((len(ids), given["max_new_tokens"]))
        return generate(ids, **given)

    monkeypatch.setattr(small, "generate", noted)
    sampler = fastrl.BestOfNSampler(small, tokenizer(), lambda texts: range(len(texts)), lambda: 3)
    (best,) = sampler.generate([97, 98], do_sample=True, pad_token_id=256)
    assert sizes == [(1, 3)] * 4
    assert len(best) == 1


def test_without_a_reward_no_turn_is_generated() -> None:
    model = Scripted({"one": ["1<submit>"]})
    with pytest.raises(ValueError, match="TextEnvironment needs a reward_fn"):
        TextEnvironment(model, model.tokenizer, generation_kwargs={"max_new_tokens": 8}).run(
            ["one"]
        )
    assert model.asked == 0
