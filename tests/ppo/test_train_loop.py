"""``PPOTrainer.train``: what the reward function, the callbacks and the result get."""

import json
import math
import threading

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from fastrl import JsonlCallback, PPOConfig, PPOTrainer, ProgressCallback, TrainCallback
from fastrl.data.prompts import Prompts, PromptStream
from fastrl.models.layout import layout_of
from tests import patience, seq2seq_models, tiny_models
from tests.golden import tiny
from tests.trainers.conftest import weights

TEXTS = ["w3 w4", "w5 w6 w7", "w8", "w9 w10", "w11 w12", "w13 w14 w15 w16"]
SAMPLING = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, "top_p": 1.0}

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


def make_trainer(dataset=None, **settings):
    config = PPOConfig(**{"batch_size": 2, "ppo_epochs": 1, "learning_rate": 1e-3, **settings})
    return PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer(), dataset=dataset)


@pytest.fixture
def trainer():
    return make_trainer()


def run(trainer, reward_fn, **arguments):
    return trainer.train(
        reward_fn,
        **{
            "steps": 1,
            "prompts": TEXTS,
            "generation_kwargs": SAMPLING,
            "progress": False,
            **arguments,
        },
    )


def zero(completions, **_):
    return [0.0] * len(completions)


class Recorder:
    """A reward function that keeps its arguments."""

    def __init__(self, reward=lambda ids: float(len(ids))):
        self.calls = []
        self.reward = reward

    def __call__(self, **arguments):
        self.calls.append(arguments)
        return [self.reward(ids) for ids in arguments["completion_ids"]]


def test_the_reward_function_gets_prompts_completions_and_their_tokens(trainer):
    reward = Recorder()
    run(trainer, reward, steps=2)
    assert len(reward.calls) == 2
    tokenizer = trainer.tokenizer
    for call in reward.calls:
        assert set(call) == {"prompts", "completions", "completion_ids"}
        assert set(call["prompts"]) <= set(TEXTS)
        columns = (call["prompts"], call["completions"], call["completion_ids"])
        for prompt, text, ids in zip(*columns, strict=True):
            assert isinstance(ids, list)
            assert 1 <= len(ids) <= 4
            whole = tokenizer(prompt).input_ids + ids
            assert prompt + text == tokenizer.decode(whole, skip_special_tokens=True)


def test_the_reward_function_gets_the_other_columns_row_by_row(trainer):
    dataset = Dataset.from_dict(
        {"prompt": TEXTS, "answer": [t[::-1] for t in TEXTS], "level": list(range(6))}
    )
    reward = Recorder()
    run(trainer, reward, steps=3, prompts=None, dataset=dataset)
    seen = []
    for call in reward.calls:
        assert call["answer"] == [p[::-1] for p in call["prompts"]]
        assert [TEXTS[level] for level in call["level"]] == call["prompts"]
        seen += call["prompts"]
    assert sorted(seen) == sorted(TEXTS)  # one pass in batches of two


def test_rewards_reach_the_step_and_the_history(trainer):
    result = run(trainer, lambda completions, **_: [1.0, torch.tensor([4.0])], steps=2)
    assert len(result.history) == 2
    for metrics in result.history:
        assert metrics["reward/mean"] == metrics["ppo/mean_scores"] == 2.5
        assert metrics["reward/std"] == pytest.approx(math.sqrt(4.5))
        assert metrics["perf/rollout_tokens_per_second"] > 0
        parts = ("time/rollout", "time/reward", "time/ppo/total")
        assert metrics["time/step"] == pytest.approx(sum(metrics[p] for p in parts))
        assert all(isinstance(value, (int, float)) for value in metrics.values())


@pytest.mark.parametrize(("ends", "score"), [(True, 1.0), (False, -2.0)])
def test_a_missing_eos_is_penalised_in_the_score_alone(trainer, monkeypatch, ends, score):
    rollout = trainer.rollouts.run

    def ending(*arguments):
        out = rollout(*arguments)
        out.finish_reasons = ["eos" if ends else "length"] * len(out.sequences)
        return out

    monkeypatch.setattr(trainer.rollouts, "run", ending)
    result = run(trainer, lambda completions, **_: [1.0] * 2, missing_eos_penalty=3.0)
    assert result.history[0]["reward/mean"] == 1.0
    assert result.history[0]["ppo/mean_scores"] == score


def test_several_functions_are_summed_and_each_is_in_the_numbers(trainer):
    async def other(completions, **_):
        return [2.0, None]

    result = run(
        trainer,
        [lambda **_: [1.0, 3.0], other],
        reward_weights=[1.0, -0.5],
        eval_prompts=["w3", "w4"],
    )
    metrics = result.history[0]
    assert metrics["reward/mean"] == metrics["ppo/mean_scores"] == 1.5
    assert metrics["reward/<lambda>/mean"] == 2.0
    assert metrics["reward/other/mean"] == 2.0
    assert metrics["reward/other/std"] == 0.0
    numbers = result.evaluations[0].scalars()
    assert numbers["eval/reward_mean"] == 1.5
    assert numbers["eval/reward/other/mean"] == 2.0


def test_a_reward_that_is_not_finite_reaches_no_score_and_no_evaluation(trainer, monkeypatch):
    """The step gets NaN for it."""
    seen, step = [], trainer.step

    def watched(queries, responses, scores, **given):
        seen.extend(scores)
        return step(queries, responses, [score.nan_to_num() for score in scores], **given)

    monkeypatch.setattr(trainer, "step", watched)
    with pytest.warns(UserWarning, match="returned inf for completion 1"):
        result = run(trainer, lambda **_: [3.0, math.inf], eval_prompts=["w3", "w4"])
    assert [float(score) for score in seen] == pytest.approx([3.0, math.nan], nan_ok=True)
    assert result.history[0]["reward/mean"] == 3.0
    assert result.history[0]["reward/nonfinite"] == 1
    for evaluation in result.evaluations:
        numbers = evaluation.scalars()
        assert (numbers["eval/reward_mean"], numbers["eval/nonfinite_rewards"]) == (3.0, 1)
        assert "eval/nan_samples" not in numbers


def test_a_reward_that_is_nan_is_named_once_and_counted_at_each_step(trainer):
    with pytest.warns(UserWarning, match="returned nan for completion 1") as said:
        result = run(trainer, lambda **_: [3.0, math.nan], steps=2)
    assert len([one for one in said if "nan" in str(one.message)]) == 1
    assert [row["ppo/nonfinite_samples"] for row in result.history] == [1.0, 1.0]


def test_a_reward_that_hangs_changes_nothing(trainer, unchanged):
    over = threading.Event()

    def hangs(**_):
        over.wait(patience.LONG)

    with unchanged(trainer), pytest.raises(TimeoutError, match=r"hangs did not .*reward_timeout="):
        run(trainer, hangs, reward_timeout=0.1)
    over.set()


def test_prompts_may_be_token_ids(trainer):
    reward = Recorder()
    run(trainer, reward, prompts=[torch.tensor([3, 4]), torch.tensor([5, 6])])
    assert sorted(reward.calls[0]["prompts"]) == ["w3 w4", "w5 w6"]


@pytest.mark.parametrize("column", ["prompt", "query", "input_ids", "question"])
def test_the_prompts_column_is_found_or_named(trainer, column):
    values = [[3, 4], [5], [6, 7]] if column == "input_ids" else TEXTS[:3]
    dataset = Dataset.from_dict({column: values, "other": list("abc")})
    reward = Recorder()
    name = {"prompt_column": column} if column == "question" else {}
    run(trainer, reward, prompts=None, dataset=dataset, **name)
    assert set(reward.calls[0]) == {"prompts", "completions", "completion_ids", "other"}
    expected = ["w3 w4", "w5", "w6 w7"] if column == "input_ids" else TEXTS[:3]
    assert set(reward.calls[0]["prompts"]) <= set(expected)


def test_the_trainers_own_dataset_is_used_without_another():
    dataset = Dataset.from_dict({"query": TEXTS, "input_ids": [[3]] * len(TEXTS)})
    reward = Recorder()
    run(make_trainer(dataset), reward, prompts=None)
    assert set(reward.calls[0]["prompts"]) <= set(TEXTS)


def test_batches_are_whole_seeded_and_pass_over_all_prompts():
    def drawn(seed, count):
        stream = PromptStream(5, seed)
        return [stream.take(2) for _ in range(count)]

    passes = drawn(0, 40)
    assert all(len(batch) == 2 for batch in passes)
    for first, second in zip(passes[::2], passes[1::2], strict=True):
        assert len({*first, *second}) == 4
    assert {index for batch in passes for index in batch} == set(range(5))
    assert drawn(0, 40) == passes
    assert drawn(1, 40) != passes


def test_the_order_is_that_of_permutations_drawn_one_after_the_other():
    draws = np.random.RandomState(7)
    orders = [draws.permutation(5).tolist() for _ in range(3)]
    stream = PromptStream(5, 7)
    for order in orders:
        assert [stream.take(2), stream.take(2)] == [order[:2], order[2:4]]


def test_a_stream_goes_on_from_where_its_state_says():
    stream = PromptStream(5, 3)
    for _ in range(7):
        stream.take(2)
    state = json.loads(json.dumps(stream.state_dict()))
    assert (state["epoch"], state["index"]) == (3, 2)
    other = PromptStream(5, 3)
    other.load_state_dict(state)
    assert [other.take(2) for _ in range(6)] == [stream.take(2) for _ in range(6)]
    with pytest.raises(ValueError, match="has count 5, this one 6"):
        PromptStream(6, 3).load_state_dict(state)
    with pytest.raises(ValueError, match="a batch of 7 cannot be taken from 5 prompts"):
        stream.take(7)


def seen(reward):
    return [call["prompts"] for call in reward.calls]


def test_a_second_run_takes_the_prompts_that_come_next():
    whole, parts, trainer = Recorder(), Recorder(), make_trainer()
    run(make_trainer(), whole, steps=4)
    run(trainer, parts, steps=1)
    run(trainer, parts, steps=3)
    assert seen(parts) == seen(whole)


@pytest.mark.parametrize("at", [2, 4])
def test_prompts_of_a_step_that_failed_come_again(at):
    """Six prompts in batches of two: the fourth begins an epoch."""
    whole, parts, trainer = Recorder(), Recorder(), make_trainer()
    run(make_trainer(), whole, steps=5)

    def failing(**arguments):
        if len(parts.calls) == at - 1:
            raise KeyboardInterrupt
        return parts(**arguments)

    with pytest.raises(KeyboardInterrupt):
        run(trainer, failing, steps=5)
    run(trainer, parts, steps=6 - at)
    assert seen(parts) == seen(whole)


def test_the_same_prompts_in_a_data_set_go_on_too():
    whole, parts, trainer = Recorder(), Recorder(), make_trainer()
    run(make_trainer(), whole, steps=3)
    run(trainer, parts, steps=2)
    run(trainer, parts, prompts=None, dataset=Dataset.from_dict({"prompt": TEXTS}))
    assert seen(parts) == seen(whole)


def test_other_prompts_begin_an_order_of_their_own_and_the_first_go_on_after_them():
    whole, parts, others, trainer = Recorder(), Recorder(), Recorder(), make_trainer()
    run(make_trainer(), whole, steps=3)
    run(trainer, parts, steps=2)
    run(trainer, others, steps=2, prompts=["w20", "w21", "w22", "w23"])
    run(trainer, parts, steps=1)
    assert sorted(p for batch in seen(others) for p in batch) == ["w20", "w21", "w22", "w23"]
    assert seen(parts) == seen(whole)


def test_steps_are_counted_over_a_trainers_runs(trainer, tmp_path):
    events, metrics = [], JsonlCallback(tmp_path / "metrics.jsonl")
    for _ in range(2):
        result = run(
            trainer,
            zero,
            steps=2,
            eval_prompts=["w3", "w4"],
            callbacks=[Events("", events), metrics],
        )
    expected = [("begin", 2), ("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("end", 2)]
    expected += [("begin", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4), ("end", 2)]
    assert [what for _, *what in events] == [list(what) for what in expected]
    assert [e.step for e in result.evaluations] == [2, 4]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 2, 3, 4, 4]


def test_a_metrics_file_is_begun_anew_for_another_trainer(tmp_path):
    metrics = JsonlCallback(tmp_path / "metrics.jsonl")
    for _ in range(2):
        run(make_trainer(), zero, steps=1, callbacks=[metrics])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


TEMPLATE = (
    "{% set roles = {'user': 'w40', 'assistant': 'w41', 'system': 'w42'} %}<bos>"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %} {{ roles[m.role] }} {{ m.content }} w50{% endfor %}"
    "{% if add_generation_prompt %} w41{% endif %}"
)
CHATS = [
    [{"role": "user", "content": "w3 w4"}],
    [{"role": "system", "content": "w9"}, {"role": "user", "content": "w5"}],
    [{"role": "user", "content": "w6"}, {"role": "assistant", "content": "w7"},
     {"role": "user", "content": "w8"}],
]  # fmt: skip


def chat_trainer(template=TEMPLATE, **settings):
    trainer = make_trainer(**settings)
    trainer.tokenizer.chat_template = template
    # As many tokenizers do: BOS in front of every text.
    trainer.tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tiny.BOS)]
    )
    return trainer


@pytest.mark.parametrize(
    "settings", [{}, {"advantage": "grpo", "group_size": 2, "batch_size": 4}], ids=["ppo", "grpo"]
)
@pytest.mark.parametrize("kind", ["list", "dataset"])
def test_chats_go_through_the_template_and_reach_the_reward_as_messages(
    kind, settings, monkeypatch
):
    trainer, reward, queries = chat_trainer(**settings), Recorder(), []
    step = trainer.step
    monkeypatch.setattr(
        trainer,
        "step",
        lambda q, *rest, **more: queries.append([x.tolist() for x in q]) or step(q, *rest, **more),
    )
    given = {"prompts": CHATS}
    if kind == "dataset":
        given = {"prompts": None, "dataset": Dataset.from_dict({"prompt": CHATS, "n": [0, 1, 2]})}
    run(trainer, reward, steps=2, eval_prompts=CHATS[2:], **given)
    expected = {
        json.dumps(CHATS[0]): [tiny.BOS, 40, 3, 4, 50, 41],
        json.dumps(CHATS[1]): [tiny.BOS, 42, 9, 50, 40, 5, 50, 41],
        json.dumps(CHATS[2]): [tiny.BOS, 40, 6, 50, 41, 7, 50, 40, 8, 50, 41],
    }
    evaluation, *calls = reward.calls[0], *reward.calls[1:3]
    assert evaluation["prompts"] == CHATS[2:]
    assert len(queries) == 2
    for call, batch in zip(calls, queries, strict=True):
        assert batch == [expected[json.dumps(prompt)] for prompt in call["prompts"]]
        for ids, (message,) in zip(call["completion_ids"], call["completions"], strict=True):
            text = trainer.tokenizer.decode(ids, skip_special_tokens=True)
            assert message["role"] == "assistant"
            assert message["content"].split() == text.split()


def test_an_evaluation_shows_chats_as_text():
    trainer = chat_trainer()
    result = run(trainer, zero, prompts=CHATS[:2], eval_prompts=CHATS[:1])
    assert result.evaluations[0].prompts == ["<bos> w40 w3 w4 w50 w41"]
    assert isinstance(result.evaluations[0].completions[0], str)


def test_a_text_that_begins_with_bos_gets_no_other():
    prompts = Prompts.from_list(["<bos> w3", "w3"], chat_trainer().tokenizer)
    assert [ids.tolist() for ids in prompts.samples.prompt_ids] == [[tiny.BOS, 3], [tiny.BOS, 3]]


@pytest.mark.parametrize(("chat", "message"), [
    ([{"role": "user"}], r"prompts\[1\], message 0 has the content None: it must"),
    ([{"role": "Usr", "content": "w5"}], r"prompts\[1\], message 0 .*did you mean 'user'"),
    ([{"role": "user", "content": " "}], r"prompts\[1\] is empty: nothing is said"),
    (CHATS[2][:2], r"prompts\[1\] ends with an assistant's message"),
    (CHATS[1][::-1], r"prompts\[1\]: the chat template refuses .* system comes first"),
])  # fmt: skip
def test_chats_that_are_no_prompts_are_refused_by_name(chat, message):
    trainer = chat_trainer()
    with pytest.raises(ValueError, match=message):
        run(trainer, zero, prompts=[CHATS[0], chat])
    assert trainer.current_step == 0


def test_chats_need_a_template_and_the_tokenizer_is_named():
    with pytest.raises(ValueError, match=r"prompts\[0\] holds chat messages.*no chat template"):
        run(chat_trainer(None), zero, prompts=CHATS)
    with pytest.raises(ValueError, match="must be a list of chats"):
        run(chat_trainer(), zero, prompts=CHATS[0])


LONG = " ".join(f"w{3 + i}" for i in range(45))  # with 4 new tokens one more than the context


@pytest.mark.parametrize("where", ["prompts", "dataset", "eval_prompts", "eval data set"])
def test_a_prompt_over_the_context_is_found_before_the_first_step(trainer, where):
    texts, reward = [*TEXTS, LONG], Recorder()
    arguments, name = {
        "prompts": ({"prompts": texts}, r"prompts\[6\]"),
        "dataset": (
            {"prompts": None, "dataset": Dataset.from_dict({"query": texts})},
            "row 6 of column 'query'",
        ),
        "eval_prompts": ({"eval_prompts": texts}, r"eval_prompts\[6\]"),
        "eval data set": (
            {"eval_prompts": Dataset.from_dict({"prompt": texts})},
            "row 6 of eval_prompts's column 'prompt'",
        ),
    }[where]
    message = f"{name} has 45 tokens; with 4 new ones it exceeds the model's context of 48"
    with pytest.raises(ValueError, match=message):
        run(trainer, reward, **arguments)
    assert reward.calls == []


def test_prompts_over_the_context_are_dropped_and_counted_where_that_is_asked_for(trainer):
    reward = Recorder()
    with pytest.warns(UserWarning, match=r"leaves out \d of \d prompts: .*prompts\[\d\]") as caught:
        result = run(
            trainer,
            reward,
            steps=3,
            prompts=[LONG, *TEXTS[:3], LONG],
            eval_prompts=[*TEXTS[:2], LONG],
            long_prompts="drop",
        )
    assert sum("leaves out" in str(w.message) for w in caught) == 2
    assert (result.dropped_prompts, result.dropped_eval_prompts) == (2, 1)
    assert result.evaluations[0].prompts == TEXTS[:2]
    assert {p for call in reward.calls for p in call["prompts"]} <= set(TEXTS[:3])
    with pytest.raises(ValueError, match=r"no prompt is left: prompts\[0\] has 45 tokens"):
        run(trainer, reward, prompts=[LONG, LONG], long_prompts="drop")
    with pytest.raises(ValueError, match="unknown long_prompts 'cut': choose one of refuse, drop"):
        run(trainer, reward, long_prompts="cut")


def test_an_encoder_decoders_prompt_and_response_have_a_context_each():
    layout = layout_of(seq2seq_models.policy("bart"))
    words = ["w3"] * seq2seq_models.CONTEXT
    prompts = Prompts.from_list([" ".join(words)], tiny.tokenizer())
    assert prompts.fitting(layout, seq2seq_models.CONTEXT - 1, "refuse") is prompts
    with pytest.raises(ValueError, match=r"prompts\[0\] .* the decoder's context of 24"):
        prompts.fitting(layout, seq2seq_models.CONTEXT, "refuse")
    longer = Prompts.from_list(["w3", " ".join([*words, "w4"])], tiny.tokenizer())
    with pytest.raises(ValueError, match=r"prompts\[1\] .* the encoder's context of 24"):
        longer.fitting(layout, 1, "refuse")


def test_one_process_under_ddp_trains(monkeypatch):
    # As torchrun starts it where there are GPUs.
    ddp = property(lambda self: DistributedType.MULTI_CPU)
    monkeypatch.setattr(Accelerator, "distributed_type", ddp)
    trainer = make_trainer(learning_rate=1e-2)
    before = trainer.model.v_head.summary.weight.clone()
    assert run(trainer, Recorder()).history[0]["ppo/optimizer_steps"] == 1
    assert not torch.equal(trainer.model.v_head.summary.weight, before)


class Evaluations(TrainCallback):
    def __init__(self):
        self.seen = []

    def on_eval(self, trainer, step, evaluation):
        self.seen.append(evaluation)


def test_the_result_has_the_samples_of_the_first_and_last_evaluation_alone():
    recorded = Evaluations()
    rewards = {"one": Recorder(), "two": zero}
    result = run(
        make_trainer(), rewards, steps=3, eval_prompts=TEXTS[:3], eval_every=1, callbacks=[recorded]
    )
    kept = result.evaluations
    assert [e.scalars() for e in kept] == [e.scalars() for e in recorded.seen]
    assert kept[0] == recorded.seen[0]
    assert kept[-1] == recorded.seen[-1]
    for name in ("prompts", "completions", "rewards"):
        assert [len(getattr(e, name)) for e in kept] == [3, 0, 0, 3]
        assert [len(getattr(e, name)) for e in recorded.seen] == [3] * 4


def test_an_unchanged_policy_evaluates_the_same_every_time():
    trainer, recorded = make_trainer(learning_rate=0.0), Evaluations()
    run(trainer, Recorder(), steps=2, eval_prompts=TEXTS[:3], eval_every=1, callbacks=[recorded])
    first, *others = recorded.seen
    assert [e.step for e in recorded.seen] == [0, 1, 2]
    for other in others:
        assert (other.completions, other.rewards) == (first.completions, first.rewards)
    assert first.kl == pytest.approx(0.0, abs=1e-6)
    assert first.prompts == TEXTS[:3]
    assert first.mean == pytest.approx(sum(first.rewards) / 3)
    squares = sum((r - first.mean) ** 2 for r in first.rewards)
    assert first.sem == pytest.approx(math.sqrt(squares / 2 / 3))


def test_evaluating_does_not_change_training():
    histories = []
    for settings in ({}, {"eval_prompts": TEXTS[:3], "eval_every": 1}):
        result = run(make_trainer(), Recorder(), steps=2, **settings)
        histories.append([m["objective/kl"] for m in result.history])
    assert histories[0] == pytest.approx(histories[1], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("every", "expected"), [(0, [0, 3]), (2, [0, 2, 3]), (3, [0, 3])])
def test_evaluations_come_before_after_and_in_between(trainer, every, expected):
    result = run(trainer, zero, steps=3, eval_prompts=["w3"], eval_every=every)
    assert [e.step for e in result.evaluations] == expected
    assert result.evaluations[0].sem == 0.0  # of one prompt


def test_without_evaluation_prompts_there_is_no_evaluation(trainer):
    assert run(trainer, zero, eval_every=1).evaluations == []


class Events(TrainCallback):
    def __init__(self, name, events):
        self.name = name
        self.events = events

    def on_train_begin(self, trainer, total_steps):
        self.events.append((self.name, "begin", total_steps))

    def on_step(self, trainer, step, metrics):
        assert "reward/mean" in metrics
        self.events.append((self.name, "step", step))

    def on_eval(self, trainer, step, evaluation):
        assert evaluation.step == step
        self.events.append((self.name, "eval", step))

    def on_train_end(self, trainer, result):
        self.events.append((self.name, "end", len(result.history)))


def test_callbacks_are_told_in_order(trainer):
    events = []
    run(
        trainer,
        zero,
        steps=2,
        eval_prompts=["w3"],
        eval_every=1,
        callbacks=[Events("a", events), TrainCallback(), Events("b", events)],
    )
    expected = [("begin", 2), ("eval", 0), ("step", 1), ("eval", 1), ("step", 2), ("eval", 2)]
    assert events == [(name, *what) for what in [*expected, ("end", 2)] for name in "ab"]


class Stopping(TrainCallback):
    def on_step(self, trainer, step, metrics):
        return step == 2


def test_a_callback_ends_training_as_if_its_step_were_the_last(tmp_path):
    def trained(steps, callbacks=()):
        trainer, recorded = make_trainer(), Evaluations()
        result = run(
            trainer, zero, steps=steps, eval_prompts=["w3"], eval_every=1,
            output=tmp_path / f"of {steps}", callbacks=[recorded, *callbacks],
        )  # fmt: skip
        names = [path.name for path in sorted((tmp_path / f"of {steps}/checkpoints").iterdir())]
        return len(result.history), [e.step for e in recorded.seen], names, weights(trainer.model)

    stopped, whole = trained(4, [Stopping(), TrainCallback()]), trained(2)
    assert stopped[:3] == whole[:3] == (2, [0, 1, 2], whole[2])
    assert all(torch.equal(stopped[3][name], x) for name, x in whole[3].items())


def test_metrics_go_to_a_file_line_by_line(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    for _ in range(2):  # another callback starts the file anew
        result = run(
            make_trainer(),
            zero,
            steps=2,
            eval_prompts=["w3", "w4"],
            callbacks=[JsonlCallback(path)],
        )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2]
    assert set(lines[0]) == {"step", "eval/reward_mean", "eval/reward_sem", "eval/kl"}
    assert lines[1] == {"step": 1, **result.history[0]}
    assert lines[3]["eval/kl"] == result.evaluations[1].kl


def test_progress_shows_reward_kl_and_speed(trainer, capfd):
    run(trainer, lambda **_: [1.25] * 2, eval_prompts=["w3", "w4"], progress=True)
    out, err = capfd.readouterr()
    assert "PPO step 0: held-out reward +1.250 ± 0.000, KL" in out + err
    assert "reward +1.250" in err
    assert "tok/s" in err


def test_a_progress_bar_names_its_run(trainer, capfd):
    run(trainer, zero, callbacks=[ProgressCallback("sentiment")])
    assert "sentiment: 100%" in capfd.readouterr().err
