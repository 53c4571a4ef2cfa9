"""GRPOTrainer with tools and environments: turns, masks, metrics, limits, resumed runs."""

import asyncio
import copy
import json
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from fastrl import GRPOConfig, GRPOTrainer
from fastrl.collect.respond import Asked
from fastrl.collect.tools import Toolbox, ToolLoop, check_chats
from fastrl.data.chat import render
from fastrl.data.tool_calls import ToolChat, find_reader
from fastrl.rewards.calls import EventLoop
from fastrl.samples import Samples
from fastrl.user_code import ExitCalled
from tests import chat_tokenizer, tiny_models
from tests.patience import PATIENCE
from tests.resuming import assert_resumes
from tests.trl.test_online import GRADIENT_STEP, SETTINGS, advantages, logprobs

PROMPT = [{"role": "user", "content": "3*4?"}]


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: A number.
        b: Another one.
    """
    if a < 0:
        raise ValueError("too small")
    return a * b


def call(name: str = "multiply", **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


class Script:
    """What a policy says, turn by turn: the texts of all responses, then of those that go on."""

    def __init__(self, *turns: list[str]):
        self.turns, self.asked = list(turns), []

    def __call__(
        self, prompts: list[Tensor], which: list[int], turn: int, limits: list[int] | None
    ) -> Samples:
        self.asked.append((prompts, which, turn, limits))
        texts = self.turns[turn]
        assert len(texts) == len(prompts) == len(which)
        ids = [torch.tensor(TOKENIZER(text=text)["input_ids"]) for text in texts]
        if limits is not None:
            ids = [x[:n] for x, n in zip(ids, limits, strict=True)]
        known = [torch.full((len(x),), -1.0 - turn) for x in ids]
        return Samples(ids, ["eos"] * len(ids), logprobs_t1=known)


TOKENIZER = chat_tokenizer.tokenizer()


def loop(
    most_turns: int | None = None, most_tokens: int = 1000, context: int | None = None
) -> ToolLoop:
    chat = ToolChat(TOKENIZER, find_reader(TOKENIZER, {}), [TOKENIZER.eos_token_id], {})
    return ToolLoop(chat, EventLoop, most_turns, most_tokens, context, 1.0)


def totals(found: Any) -> tuple[int, ...]:
    """How many calls there were, and how many of them failed."""
    return tuple(map(sum, zip(*found.tool_calls, strict=True)))


def converse(script: Script, tools: list[Any], **limits: Any) -> Any:
    count = len(script.turns[0])
    return loop(**limits)(script, [PROMPT] * count, [Toolbox(tools)] * count)


def test_a_rows_arguments_reach_its_prompt_and_what_stands_behind_results() -> None:
    made = chat_tokenizer.tokenizer()
    end = "<|start|>assistant\n' }}"
    assert end in made.chat_template
    made.chat_template = made.chat_template.replace(end, end + "{{ mood or '' }}")
    chat = ToolChat(made, find_reader(made, {}), [made.eos_token_id], {})
    script = Script([call(a=3, b=4) + "<|end|>"] * 2, ["12<|end|>"] * 2)
    templates = [{"mood": "sad", "tools": [{"name": "elsewhere"}]}, {}]
    box = Toolbox([multiply])
    found = ToolLoop(chat, EventLoop, None, 1000, None, 1.0)(
        script, [PROMPT] * 2, [box] * 2, templates
    )
    prompts = made.batch_decode(found.prompt_ids)
    assert [text.count("sad") for text in prompts] == [1, 0]
    assert all("multiply" in text and "elsewhere" not in text for text in prompts)
    said = made.batch_decode(found.sequences)
    assert [text.count("<|start|>assistant\nsad") for text in said] == [1, 0]


def test_a_column_of_tools_beside_tools_is_named() -> None:
    rows = Dataset.from_list([{"prompt": PROMPT, "tools": []}])
    with pytest.warns(UserWarning, match="the column tools is not read beside tools"):
        check_chats(rows)


def test_results_stand_behind_the_calls_and_are_masked() -> None:
    answer = "It is 12<|end|>"
    script = Script(["Wait: " + call(a=3, b=4) + "<|end|>", "Twelve<|end|>"], [answer])
    found = converse(script, [multiply])
    assert totals(found) == (1, 0)
    asking = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}}
    said = [
        {"role": "assistant", "content": "Wait:", "tool_calls": [asking]},
        {"role": "tool", "name": "multiply", "content": "12"},
        {"role": "assistant", "content": "It is 12"},
    ]
    assert found.completions == [said, [{"role": "assistant", "content": "Twelve"}]]
    whole = TOKENIZER.decode([*found.prompt_ids[0].tolist(), *found.sequences[0].tolist()])
    tools = {"tools": Toolbox([multiply]).schemas}
    written = render([*PROMPT, *said], TOKENIZER, template=tools).rstrip("\n")
    # What the policy wrote stays as it is: the template leaves out the blank.
    assert whole.replace("Wait: ", "Wait:") == written
    mask, ids = found.masks[0], found.sequences[0]
    tail = len(TOKENIZER(text=answer)["input_ids"])
    assert TOKENIZER.decode(ids[~mask].tolist()) == (
        "\n<|start|>tool\n12<|end|>\n<|start|>assistant\n"
    )
    assert bool(mask[-tail:].all())
    assert bool((found.logprobs[0][~mask] == 0).all())
    own = found.logprobs[0][mask]
    assert bool((own[:-tail] == -1).all())
    assert bool((own[-tail:] == -2).all())
    assert bool(found.masks[1].all())
    prompts, which, turn, limits = script.asked[1]
    assert (which, turn, limits) == ([0], 1, [1000 - len(ids) + tail])
    assert prompts[0].tolist() == [*found.prompt_ids[0], *ids[:-tail]]


def test_failing_calls_are_answered_and_counted() -> None:
    def silent() -> list[dict[str, str]]:
        """Says two things."""
        return [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    script = Script(
        [
            call("divide", a=3, b=4) + "<|end|>",
            call(a=3, c=4) + "<|end|>",
            call(a=-3, b=4) + call("silent") + "<|end|>",
            '<tool_call>\n{"name": "multiply", "arguments": [3]}\n</tool_call><|end|>',
            '<tool_call>\n{"name": "multiply", "arguments": {a: 3}}\n</tool_call><|end|>',
            "<tool_call>\n{}\n</tool_call><|end|>",
        ],
        ["ok<|end|>"] * 4,
    )
    found = converse(script, [multiply, silent])
    results = [[m["content"] for m in said if m["role"] == "tool"] for said in found.completions]
    assert results[0] == ["{'error': 'Tool divide not found.'}"]
    assert "unexpected keyword argument 'c'" in results[1][0]
    assert results[2] == ["{'error': 'too small'}", "ab"]
    assert "must be an object" in results[3][0]
    assert results[4:] == [[], []]
    assert [len(said) for said in found.completions[4:]] == [1, 1]
    assert totals(found) == (7, 6)


def test_coroutines_of_all_responses_run_at_the_same_time() -> None:
    begun, all_of_them = [], asyncio.Event()

    async def wait(i: int) -> int:
        """Waits for the others.

        Args:
            i: Which.
        """
        begun.append(i)
        if len(begun) == 3:
            all_of_them.set()
        await asyncio.wait_for(all_of_them.wait(), PATIENCE)
        if i == 2:
            raise asyncio.CancelledError
        return i

    asked = [call("wait", i=0) + call(a=3, b=4) + call("wait", i=1), call("wait", i=2)]
    found = converse(Script([x + "<|end|>" for x in asked], ["a<|end|>"] * 2), [multiply, wait])
    results = [[m["content"] for m in said if m["role"] == "tool"] for said in found.completions]
    assert results[0] == ["0", "12", "1"]  # in the order of the calls
    assert "error" in results[1][0]
    assert totals(found) == (4, 1)


def test_limits_end_a_conversation() -> None:
    again = call(a=3, b=4) + "<|end|>"
    found = converse(Script([again], [again], [again]), [multiply], most_turns=2)
    assert [m["role"] for m in found.completions[0]] == ["assistant", "tool"] * 2 + ["assistant"]
    assert totals(found)[0] == 2
    whole = converse(Script([again], ["Done<|end|>"]), [multiply])
    length, answer = len(whole.sequences[0]), len("Done$")
    prompt = len(whole.prompt_ids[0])
    # A result that leaves no token for an answer is left out with its turn.
    for room, roles in ((length - answer, 1), (length - answer + 1, 3)):
        for limits in ({"most_tokens": room}, {"context": prompt + room}):
            found = converse(Script([again, again], ["Done<|end|>"] * 2), [multiply], **limits)
            assert [len(said) for said in found.completions] == [roles] * 2
            assert len(found.sequences[0]) == (room if roles == 3 else len(found.masks[0]))
            assert totals(found)[0] == 2


def test_tools_that_do_not_do_are_named() -> None:
    def bare(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(ValueError, match="tool bare is not described"):
        Toolbox([bare])
    with pytest.raises(ValueError, match="two tools have the name 'multiply'"):
        Toolbox([multiply, copy.copy(multiply)])
    with pytest.raises(TypeError, match="functions with a name"):
        Toolbox(["multiply"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="prompt 0 is '3\\*4"):
        loop()(Script([""]), ["3*4?"], [Toolbox([multiply])])

    def image() -> list[dict[str, str]]:
        """Takes a picture."""
        return [{"type": "image", "image": ""}]

    with pytest.raises(ValueError, match="the tool image returned blocks of the types image"):
        converse(Script([call("image") + "<|end|>"]), [image])


# The trainer.


def model() -> Any:
    ids = {"eos_token_id": 256, "pad_token_id": 257, "bos_token_id": None}
    return tiny_models.language_model(vocab_size=chat_tokenizer.VOCABULARY, n_positions=1024, **ids)


def small_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 7 for token in ids) / len(ids) for ids in completion_ids]


def make(folder: Path, rewards: Any = small_tokens, **settings: Any) -> GRPOTrainer:
    named = ("tools", "environment_factory", "train_dataset", "rollout_func", "processing_class")
    own = {name: settings.pop(name) for name in named if name in settings}
    if "train_dataset" not in own:
        own["train_dataset"] = Dataset.from_list([{"prompt": PROMPT}] * 8)
    own.setdefault("processing_class", chat_tokenizer.tokenizer())
    all_of_them = {**SETTINGS, "max_completion_length": 400, "logging_steps": 1, **settings}
    config = GRPOConfig(output_dir=str(folder), **all_of_them)
    return GRPOTrainer(model(), rewards, config, **own)


def says(trainer: Any, *turns: list[str]) -> None:
    """Has a trainer's model say these texts, the same in each generation."""
    said: list[int] = []

    def generate(self: Any, input_ids: Tensor, **_: Any) -> Tensor:
        texts = turns[len(said) % len(turns)]
        said.append(len(input_ids))
        assert len(texts) == len(input_ids)
        own = chat_tokenizer.tokenizer()
        padded = own(text=texts, padding=True, padding_side="right", return_tensors="pt")
        return torch.cat([input_ids, padded["input_ids"]], 1)

    trainer.model.generate = MethodType(generate, trainer.model)


CALLING = [call(a=3, b=4), call(a=3, c=4), call(a=5, b=4), "Twelve"]


def test_a_step_learns_what_the_policy_wrote(tmp_path: Path) -> None:
    trainer = make(
        tmp_path, tools=[multiply], loss_type="dapo", log_completions=True, **GRADIENT_STEP
    )
    says(trainer, [x + "<|end|>" for x in CALLING], ["12<|end|>", "eh<|end|>", "It is 20<|end|>"])
    start = copy.deepcopy(trainer.model)
    trainer.train()
    of = trainer._generations.buffer[0]
    assert sorted(int((~mask).sum()) > 0 for mask in of.learned) == [False, True, True, True]
    exact = copy.deepcopy(start).double()
    rewards = small_tokens([x.tolist() for x in of.sequences])
    a = advantages(torch.tensor(rewards).double(), "grpo")
    terms = []
    for i, mask in enumerate(of.learned):
        new = logprobs(exact, of, i)[mask]
        terms.append(-(new - new.detach()).exp() * a[i])
    (torch.cat(terms).sum() / sum(map(len, terms))).backward()
    found = dict(trainer.model.named_parameters())
    gradients = {name: p.grad for name, p in exact.named_parameters()}
    for name, weight in start.named_parameters():
        step, gradient = (weight - found[name]).double(), gradients[name]
        # The step is a difference of two fp32 weights.
        rounding = 4 * torch.finfo(torch.float32).eps * weight.detach().abs().max()
        torch.testing.assert_close(
            step, gradient, rtol=1e-3, atol=float(rounding + 1e-4 * gradient.abs().max())
        )
    logged = trainer.state.log_history[0]
    assert logged["tools/call_frequency"] == 3 / 4
    assert logged["tools/failure_frequency"] == pytest.approx(1 / 3)
    written = sum(int(mask.sum()) for mask in of.learned)
    assert logged["completions/mean_length"] == written / 4
    table = Dataset.from_parquet(str(tmp_path / "completions" / "completions_00001.parquet"))
    roles = [[m["role"] for m in json.loads(said)] for said in table["completion"]]
    assert roles == [["assistant", "tool", "assistant"]] * 3 + [["assistant"]]


def test_a_prompt_beside_tools_is_cut_to_bos_and_its_end(tmp_path: Path) -> None:
    reader = chat_tokenizer.tokenizer()
    reader.bos_token, reader.chat_template = "<|start|>", "{{ bos_token }}" + reader.chat_template
    written = render(PROMPT, reader, answered=False, template={"tools": [multiply]})
    whole = reader(written, add_special_tokens=False)["input_ids"]
    with pytest.warns(UserWarning, match="max_prompt_length=9 .today: cut prompts in the data"):
        trainer = make(tmp_path, tools=[multiply], max_prompt_length=9, processing_class=reader)
    says(trainer, [f"{i}<|end|>" for i in range(4)])
    trainer.train()
    for ids in trainer._generations.buffer[0].prompt_ids:
        assert ids.tolist() == [reader.bos_token_id, *whole[-8:]]


def echo() -> str:
    """Says a word."""
    return "w"


def always_calls(trainer: Any) -> None:
    """Any response is taken for a call of ``echo``."""
    asks = {"role": "assistant", "tool_calls": [{"name": "echo"}]}
    trainer._interaction.loop.chat.reader = lambda prompt, response, tools: copy.deepcopy(asks)


TURNS: dict[str, Any] = {
    "max_completion_length": 120, "generation_kwargs": {"max_new_tokens": 4},
    "max_tool_calling_iterations": 2, "tools": [echo],
}  # fmt: skip


@pytest.mark.parametrize("sampled", [False, True])
def test_turns_of_the_engine_draw_anew_and_have_the_models_logprobs(
    sampled: bool, tmp_path: Path
) -> None:
    cut = {"policy_support": "sampled", "top_k": 40} if sampled else {}
    trainer = make(tmp_path, **TURNS, **cut)
    always_calls(trainer)
    start, kept = copy.deepcopy(trainer.model), []
    seeds, run, respond = [], trainer._rollouts.backend, trainer._collect.respond

    def noted(policy: Any, request: Any) -> Samples:
        seeds.append((request.seed, list(request.sample_ids), request.samples))
        return run(policy, request)

    def keeping(asked: Asked) -> Samples:
        kept.append(respond(asked))
        return kept[-1]

    noted.before_update, noted.rooms = run.before_update, run.rooms  # type: ignore[attr-defined]
    trainer._rollouts.backend, trainer._collect.respond = noted, keeping
    trainer.train()
    assert [ids for _, ids, _ in seeds] == [[0], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert len({seed for seed, _, _ in seeds}) == 3
    of, found = trainer._generations.buffer[0], kept[0]
    order = [
        next(i for i, y in enumerate(found.sequences) if torch.equal(x, y)) for x in of.sequences
    ]
    assert [int(mask.sum()) for mask in of.learned] == [12] * 4
    for i, mask in enumerate(of.learned):
        exact = logprobs(start.double(), of, i).float()
        if sampled:
            sizes = of.supports[i].sizes()
            assert (sizes[mask] == 40).all()
            assert (sizes[~mask] == of.supports[i].vocabulary).all()
        # Logits of fp32 are off by rounding of a few eps times their size.
        known = found.logprobs[order[i]][mask]
        torch.testing.assert_close(known, exact[mask], rtol=0, atol=1e-4)
    own = [ids[mask] for ids, mask in zip(of.sequences, of.learned, strict=True)]
    assert len({tuple(ids.tolist()) for ids in own}) == 4
    assert trainer.state.log_history[0]["tools/call_frequency"] == 2


@pytest.mark.filterwarnings(r"ignore:suppress_tokens=\[256\] changes")
@pytest.mark.parametrize("stop", [[[i] for i in range(128)], None])
def test_an_answer_behind_tools_that_ends_at_a_stop_is_whole(stop: Any, tmp_path: Path) -> None:
    limits = {"max_completion_length": 60, "tools": [echo], "mask_truncated_completions": True}
    trainer = make(tmp_path, **limits, generation_kwargs={"stop": stop, "suppress_tokens": [256]})
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["completions/clipped_ratio"] == (stop is None)
    assert (log["grad_norm"] > 1e-4) == (stop is not None)


def test_a_run_with_tools_goes_on_from_any_checkpoint(tmp_path: Path) -> None:
    def again(folder: Path) -> Any:
        trainer = make(
            folder, **TURNS, max_steps=4, learning_rate=1e-2, save_strategy="steps", save_steps=1,
            num_iterations=2,
        )  # fmt: skip
        always_calls(trainer)
        return trainer

    assert_resumes(again, tmp_path, (0, 1))


# Environments.


class Counter:
    """Counts; its reward is the count."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, **columns: Any) -> str:
        self.count, self.columns = 0, columns
        return " Count!"

    def add(self, step: int) -> int:
        """Adds to the count.

        Args:
            step: How much.
        """
        self.count += step
        return self.count

    @property
    def hidden(self) -> int:
        raise AssertionError("a property is no tool")

    def get_reward(self) -> float:
        return float(self.count)


class Echo:
    async def reset(self, **columns: Any) -> None:
        self.columns = columns

    async def shout(self, text: str) -> str:
        """Shouts.

        Args:
            text: What.
        """
        return text.upper()


def test_an_environment_is_acted_on_by_its_response(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def others(prompts: list[Any], environments: list[Any], **_: Any) -> list[float]:
        seen.update(prompts=prompts, environments=environments)
        return [10.0 * e.count for e in environments]

    Counter.made = 0
    trainer = make(
        tmp_path, others, environment_factory=Counter, train_dataset=None, max_steps=2,
        reward_weights=[0.5],
    )  # fmt: skip
    assert [tool.__name__ for tool in trainer.tools] == ["add"]
    says(
        trainer,
        [*(call("add", step=i) + "<|end|>" for i in (1, 2)), call("add") + "<|end|>", "No<|end|>"],
        ["a<|end|>", call("add", step=5) + "<|end|>", "c<|end|>"],
        ["d<|end|>"],
    )
    trainer.train()
    assert trainer.reward_func_names == ["others", "Counter"]
    assert trainer.reward_weights.tolist() == [0.5, 1.0]
    assert [e.count for e in trainer.environments] == [1, 7, 0, 0]
    assert seen["environments"] == trainer.environments
    assert seen["prompts"] == [[{"role": "user", "content": " Count!"}]] * 4
    logged = trainer.state.log_history[1]
    assert logged["rewards/Counter/mean"] == 2.0
    assert logged["reward"] == pytest.approx((0.5 * 10 + 1) * 2.0)
    assert Counter.made == 4  # and reset for the next batch


class Board(Counter):
    """Acts on what the data set has given it."""

    def reset(self, board: list[int], **columns: Any) -> None:
        board.append(1)
        self.count = len(board)


def test_an_environment_that_acts_on_its_rows_columns_changes_them_for_nobody(
    tmp_path: Path,
) -> None:
    seen: list[Any] = []

    def judge(board: list[Any], **_: Any) -> list[float]:
        seen.extend(board)
        return [0.0] * len(board)

    chat = [{"role": "user", "content": "w3"}]
    rows = Dataset.from_list([{"prompt": chat, "board": [0]}] * 2)
    trainer = make(tmp_path, judge, environment_factory=Board, train_dataset=rows)
    trainer.train()
    assert [e.count for e in trainer.environments] == [2] * 4
    assert seen == [[0]] * 4


class Quits(Echo):
    async def reset(self, **columns: Any) -> None:
        sys.exit(0)


def test_an_environment_does_not_end_the_program(tmp_path: Path) -> None:
    trainer = make(tmp_path, environment_factory=Quits, train_dataset=None)
    with pytest.raises(ExitCalled, match=r"it called sys.exit\(0\)"):
        trainer.train()


def test_rows_name_their_environment(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"environment": "echo", "n": 1}, {"environment": "count", "n": 2}])
    trainer = make(
        tmp_path, None, environment_factory={"count": Counter, "echo": Echo}, tools=[multiply],
        train_dataset=rows, num_generations=2, shuffle_dataset=False,
    )  # fmt: skip
    assert [tool.__name__ for tool in trainer.tools] == ["multiply", "add", "shout"]
    says(
        trainer,
        [
            x + "<|end|>"
            for x in (
                call("shout", text="a"),
                call("add", step=1),
                call("add", step=2),
                call("shout", text="b"),
            )
        ],
        ["x<|end|>"] * 4,
    )
    trainer.train()
    first, _, third, fourth = trainer.environments
    assert [type(e) for e in trainer.environments] == [Echo, Echo, Counter, Counter]
    assert first.columns == {"n": 1}
    assert (third.count, fourth.count) == (2, 0)  # a tool of another environment is none
    logged = trainer.state.log_history[0]
    assert logged["tools/failure_frequency"] == 0.5
    assert logged["rewards/Counter/mean"] == 1.0
    found = [TOKENIZER.decode(x.tolist()) for x in trainer._generations.buffer[0].prompt_ids]
    assert sorted("shout" in text for text in found) == [False, False, True, True]
    assert all(("add" in text) != ("shout" in text) for text in found)


def test_bad_tools_and_environments_are_named_before_training(tmp_path: Path) -> None:
    class Still:
        def act(self) -> None:
            """Acts."""

    class Clash(Counter):
        def multiply(self, a: int) -> int:
            """Multiplies.

            Args:
                a: A number.
            """
            return a

    plain = chat_tokenizer.tokenizer()
    plain.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    none = chat_tokenizer.tokenizer()
    none.chat_template = None
    texts = Dataset.from_list([{"prompt": "3*4?"}] * 2)
    for settings, named in (
        ({"tools": [multiply], "processing_class": plain}, "does not write the name of a call"),
        ({"tools": [multiply], "processing_class": none}, "no chat template"),
        ({"tools": [multiply], "rollout_func": print}, "rollout_func takes the place"),
        ({"tools": [multiply], "train_dataset": texts}, "lists of messages"),
        ({"environment_factory": Counter, "train_dataset": texts}, "lists of messages"),
        ({"environment_factory": Still}, "without a method reset"),
        ({"environment_factory": Clash, "tools": [multiply]}, "two tools have the name 'multiply'"),
        ({"environment_factory": Counter, "train_dataset": None, "max_steps": -1}, "max_steps"),
        ({"environment_factory": {"a": Counter}, "train_dataset": None}, "requires a `train_data"),
        ({"max_tool_calling_iterations": -1}, "max_tool_calling_iterations"),
    ):
        with pytest.raises(ValueError, match=named):
            make(tmp_path, **settings)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="environment_factory holds 'Counter'"):
        make(tmp_path, environment_factory={"a": "Counter"})
    rows = Dataset.from_list([{"prompt": PROMPT, "environment": "b"}] * 2)
    trainer = make(tmp_path, environment_factory={"a": Counter}, train_dataset=rows)
    with pytest.raises(ValueError, match="'b', which is not among the environments"):
        trainer.train()
