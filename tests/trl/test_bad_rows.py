"""What the trainers by TRL's names refuse of their rows, before anything changes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

import fastrl
from fastrl.collect.rollout_func import rolled_out
from fastrl.data.chat import check_messages
from fastrl.data.datas_loader import DatasLoader
from fastrl.data.prompts import Prompts
from fastrl.data.tables import as_dataset
from tests import tiny_models
from tests.golden import tiny
from tests.together import together
from tests.trainers.conftest import SETTINGS, reward_model
from tests.trainers.test_trl_1x_names import chats, said

SOUND = said("w5", "w6")
# Roles and contents, and what is said of them.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"content": "w5"}, "has (no role|the role None)"),
    "not a text": ({"role": 3, "content": "w5"}, "has the role 3"),
    "blank": ({"role": " ", "content": "w5"}, "has the role ' '"),
    "misspelt": ({"role": "usr", "content": "w5"}, "'usr': did you mean 'user'"),
    "capital": ({"role": "User", "content": "w5"}, "'User': did you mean 'user'"),
    "without content": ({"role": "user", "content": None}, r"\(user\) has no content"),
}
TRAINERS = ("SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO")


def rows_of(kind: str, prompt: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answer = [{"role": "assistant", "content": "w6"}]
    other = [{"role": "assistant", "content": "w7"}]
    return [
        {
            "SFT": {"messages": [*prompt, *answer]},
            "Reward": {"chosen": [*prompt, *answer], "rejected": [*prompt, *other]},
            "DPO": {"chosen": [*prompt, *answer], "rejected": [*prompt, *other]},
            "KTO": {"prompt": prompt, "completion": answer, "label": True},
            "GRPO": {"prompt": prompt},
            "RLOO": {"prompt": prompt},
        }[kind]
    ]


def make(kind: str, folder: Path, rows: Any, **settings: Any) -> Any:
    online = kind in ("GRPO", "RLOO")
    own = {"num_generations": 4, "max_completion_length": 4} if online else {}
    given = {"reward_funcs": settings.pop("reward_funcs", numbers)} if online else {}
    given |= {k: settings.pop(k) for k in ("eval_dataset",) if k in settings}
    tokenizer = settings.pop("tokenizer", None) or chats()
    model = settings.pop("model", None)
    if model is None:
        model = reward_model() if kind == "Reward" else tiny_models.language_model("llama")
    return getattr(fastrl, f"{kind}Trainer")(
        model,
        args=getattr(fastrl, f"{kind}Config")(str(folder), **{**SETTINGS, **own, **settings}),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        processing_class=tokenizer,
        **given,
    )


def numbers(completions: list[Any], **_: Any) -> list[float]:
    return [float(i) for i in range(len(completions))]


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("broken", ["missing", "misspelt", "without content"])
def test_broken_messages_are_refused_as_the_trainer_is_made(
    kind: str, broken: str, tmp_path: Path
) -> None:
    message, named = BROKEN[broken]
    rows = [*rows_of(kind, [SOUND[0]]) * 2, *rows_of(kind, [message])]
    with pytest.raises(ValueError, match=rf"(?s)row 2\b.*message 0 .*{named}"):
        make(kind, tmp_path, rows)


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_path_is_no_data_set(kind: str, tmp_path: Path) -> None:
    """Commands take paths, trainers do not; a text has elements and a length, too."""
    rows = Dataset.from_list(rows_of(kind, [SOUND[0]]) * 4)
    for given in ({"rows": "rows.jsonl"}, {"rows": rows, "eval_dataset": Path("rows.jsonl")}):
        with pytest.raises(TypeError, match=r"'rows\.jsonl' is the name of a data set, where"):
            make(kind, tmp_path, **given)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_message_is_named_with_what_is_wrong(broken: str) -> None:
    message, named = BROKEN[broken]
    with pytest.raises(ValueError, match=f"column 'x', message 1 .*{named}"):
        check_messages([SOUND[0], message], "column 'x'")


def test_roles_of_templates_are_theirs() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    blocks = [{"type": "text", "text": "w5"}]
    named = ("ipython", "model", "observation", "environment", "critic", "user_1", "tool_response")
    check_messages(
        [
            {"role": "developer", "content": blocks},
            {"role": "assistant", "tool_calls": calls},
            {"role": "assistant", "content": None, "tool_calls": calls},
            *({"role": role, "content": ""} for role in named),
        ],
        "x",
    )
    with pytest.raises(ValueError, match="must be a text"):
        check_messages([{"role": "user", "content": blocks}], "x", texts=True)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_a_streams_broken_messages_change_no_weight(kind: str, tmp_path: Path) -> None:
    rows = rows_of(kind, [BROKEN["misspelt"][0]]) * 4
    stream = Dataset.from_list(rows).to_iterable_dataset()
    model = tiny_models.language_model("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="did you mean 'user'"):
        make(kind, tmp_path, stream, model=model, dataloader_num_workers=0).train()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(("row", "named"), [
    ({"prompt": SOUND[:1], "chosen": "w5", "rejected": "w6"}, "row 0 hold texts and chat"),
    ({"prompt": None, "chosen": "w5", "rejected": "w6"}, "prompt of row 0 is None"),
    ({"chosen": SOUND, "rejected": said("w7", "w8")}, "row 0 do not begin with the same"),
    ({"prompt": SOUND[:1], "chosen": [], "rejected": SOUND[1:]}, r"chosen of row 0 is \[\]"),
])  # fmt: skip
def test_pairs_of_two_kinds_are_refused(row: dict, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        make("DPO", tmp_path, [row])


def test_an_unpaired_completion_is_named_by_its_pairs_row(tmp_path: Path) -> None:
    rows = [*rows_of("DPO", SOUND[:1]) * 2, *rows_of("DPO", SOUND[:1])]
    rows[2] = {**rows[2], "rejected": [SOUND[0], {"role": "asistant", "content": "w7"}]}
    with pytest.raises(ValueError, match=r"rejected of row 2, message 1 .*'assistant'"):
        make("KTO", tmp_path, rows)
    prompts = [{"prompt": SOUND[:1], "chosen": SOUND[1:], "rejected": SOUND[1:]}] * 2
    prompts[1] = {**prompts[1], "rejected": [{"role": "asistant", "content": "w7"}]}
    with pytest.raises(ValueError, match=r"completion of row 1, message 0 .*'assistant'"):
        make("KTO", tmp_path, prompts)
    rows = make("KTO", tmp_path, rows_of("DPO", SOUND[:1])).train_dataset
    assert not any(name.startswith("__") for name in rows.column_names)


def test_prompts_to_evaluate_with_are_checked_too(tmp_path: Path) -> None:
    sound = Dataset.from_list([{"prompt": "w5"}])
    wrong = Dataset.from_list([{"prompt": [BROKEN["misspelt"][0]]}])
    with pytest.raises(ValueError, match=r"row 0 of eval_dataset\['b'\], message 0"):
        make("GRPO", tmp_path, sound, eval_dataset={"a": sound, "b": wrong})
    with pytest.raises(ValueError, match="eval_dataset needs a column prompt, it has other"):
        make("RLOO", tmp_path, sound, eval_dataset=Dataset.from_list([{"other": "w5"}]))
    with pytest.raises(ValueError, match="row 1 of train_dataset is None"):
        make("GRPO", tmp_path, [{"prompt": "w5"}, {"prompt": None}])


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_prompts_too_long_for_the_context_are_refused_by_row(kind: str, tmp_path: Path) -> None:
    """As the trainer is made, before an adapter is in the model; of streams as they come."""
    longest = "w5 " * (tiny_models.CONTEXT - 4)  # and a response of 4 tokens
    rows = [{"prompt": longest.strip()}, {"prompt": longest + "w6"}]
    found = f"has {tiny_models.CONTEXT - 3} tokens; with 4 of its response .*context of"
    held_out = Dataset.from_list(rows[1:])
    with pytest.raises(ValueError, match=f"the prompt of row 1 of train_dataset {found}"):
        make(kind, tmp_path, rows)
    with pytest.raises(ValueError, match=r"the prompt of row 0 of eval_dataset\['b'\] has"):
        make(kind, tmp_path, rows[:1], eval_dataset={"b": held_out})
    said = [{"prompt": [{"role": "user", "content": longest}]}]
    with pytest.raises(ValueError, match="the prompt of row 0 of train_dataset has"):
        make(kind, tmp_path, said)
    make(kind, tmp_path, rows[:1])
    model = tiny_models.language_model("llama")
    before = copy.deepcopy(model.state_dict())
    stream = Dataset.from_list(rows[1:] * 4).to_iterable_dataset()
    trainer = make(kind, tmp_path, stream, model=model, dataloader_num_workers=0)
    with pytest.raises(ValueError, match=f"prompt 0, 'w5 w5 .*, {found}"):
        trainer.train()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("kind", TRAINERS)
def test_smoothed_labels_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{kind}Trainer .*leave label_smoothing_factor at 0"):
        make(kind, tmp_path, rows_of(kind, SOUND[:1]), label_smoothing_factor=0.1)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize(("reward", "named"), [
    (lambda completions, **_: [1.0], "short returned 1 rewards for 4 completions"),
    (lambda completions, **_: [1.0] * 5, "short returned 5 rewards for 4 completions"),
    (lambda completions, **_: [[1.0, 2.0]] * 4, "short"),
])  # fmt: skip
def test_rewards_of_another_length_change_no_weight(
    kind: str, reward: Callable[..., Any], named: str, tmp_path: Path
) -> None:
    reward.__name__ = reward.__qualname__ = "short"
    model = tiny_models.language_model("llama")
    before = copy.deepcopy(model.state_dict())
    trainer = make(kind, tmp_path, [{"prompt": "w5"}], model=model, reward_funcs=reward)
    with pytest.raises(ValueError, match=named):
        trainer.train()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_generation_that_no_function_judges_is_reported_by_its_functions(
    tmp_path: Path, caplog: Any
) -> None:
    def silent(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    make("GRPO", tmp_path, [{"prompt": "w5"}], reward_funcs=silent).train()
    assert "no reward function returned a number for any of its 4 responses (silent)" in caplog.text


def test_chats_need_a_template(tmp_path: Path) -> None:
    for kind in ("SFT", "DPO"):
        with pytest.raises(ValueError, match=r"has no chat template: set tokenizer\.chat_template"):
            make(kind, tmp_path, rows_of(kind, SOUND[:1]), tokenizer=tiny.tokenizer())


@pytest.mark.parametrize("label", ["False", "no", 2, None])
def test_labels_that_are_no_truth_values_are_refused(label: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "w3 w4", "completion": " w5", "label": x} for x in (label, label)]
    with pytest.raises(ValueError, match=r"column 'label' of row 0 holds .* True or False"):
        make("KTO", tmp_path, rows)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
@pytest.mark.parametrize("limit", [4, None])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_rows_whose_prompt_leaves_no_room_are_counted(
    kind: str, limit: int | None, as_tokens: bool, tmp_path: Path
) -> None:
    longest = (limit or tiny_models.CONTEXT) - 1
    rows = [
        {"prompt_ids": [5] * n, "chosen_ids": [6], "rejected_ids": [7]}
        if as_tokens and kind == "DPO"
        else {"prompt_ids": [5] * n, "completion_ids": [6], "label": n > 2}
        if as_tokens
        else {"prompt": "w5 " * n, "chosen": "w6", "rejected": "w7"}
        for n in (1, longest, longest + 1, 2)
    ]
    count = 2 if kind == "KTO" and not as_tokens else 1  # rows of a pair
    said = rf"{count} of {4 * count} rows dropped: .* longer than {longest} tokens.*max_length"
    with pytest.warns(UserWarning, match=said) as warned:
        trainer = make(kind, tmp_path, rows, max_length=limit, tokenizer=tiny.tokenizer())
    assert len([w for w in warned if "dropped" in str(w.message)]) == 1
    assert len(trainer.train_dataset) == 3 * count
    with pytest.raises(ValueError, match=rf"no row is left of .* longer than {longest} tokens"):
        make(kind, tmp_path, rows[2:3] * 2, max_length=limit, tokenizer=tiny.tokenizer())


OF_FOUR = {**SETTINGS, "num_generations": 4}
EVALUATED = {**OF_FOUR, "num_generations_eval": 3, "eval_strategy": "steps"}


@together(("kind", "settings", "error", "message"), [
    ("GRPO", {"temperature": "hot"}, TypeError, "temperature must be a number, got 'hot'"),
    ("GRPO", {"epsilon": -0.1}, ValueError, "epsilon must be 0 or more, got -0.1"),
    ("GRPO", {"delta": 0.5}, ValueError, "delta must be above 1"),
    ("GRPO", {"loss_type": "sapo", "sapo_temperature_neg": 0.0}, ValueError,
     "sapo_temperature_neg"),
    ("GRPO", {**OF_FOUR, "vllm_structured_outputs_regex": "a+", "response_format": {"regex": "b"}},
     ValueError, "vllm_structured_outputs_regex"),
    ("GRPO", {**OF_FOUR, "max_length": 3}, ValueError, "max_length"),
    ("GRPO", {**OF_FOUR, "num_generations": 1}, ValueError, "num_generations"),
    ("GRPO", {**OF_FOUR, "loss_type": "other"}, ValueError, "loss_type"),
    ("GRPO", {**OF_FOUR, "generation_batch_size": 6}, ValueError, "generation_batch_size"),
    *((kind, {**OF_FOUR, "num_generations": 3}, ValueError, r"divisible by num_generations \(3\)")
      for kind in ("GRPO", "RLOO")),
    *((kind, EVALUATED, ValueError, r"divisible by num_generations_eval \(3\)")
      for kind in ("GRPO", "RLOO")),
    ("SFT", {"packing": "no"}, TypeError, "packing must be True or False, got 'no'"),
    ("DPO", {"beta": "0.1"}, TypeError, "beta must be a number, got '0.1'"),
    ("DPO", {"beta": 0.0}, ValueError, "beta must be positive"),
    ("DPO", {"loss_type": "sigmoidal"}, ValueError, "unknown loss_type 'sigmoidal'"),
    ("DPO", {"loss_type": "simpo"}, ValueError, "loss_type 'simpo' reads no reference"),
    ("DPO", {"loss_type": "exo_pair"}, ValueError, "label_smoothing must be in"),
    ("DPO", {"loss_weights": [1.0, 2.0]}, ValueError, "loss_weights has 2 weights and loss_type 1"),
    ("DPO", {"ld_alpha": 1.5}, ValueError, "ld_alpha must lie in"),
    ("DPO", {"f_divergence_type": "tv"}, ValueError, "unknown f_divergence_type 'tv'"),
    ("DPO", {"f_divergence_type": "forward_kl", "loss_type": "bco_pair"}, ValueError,
     "bco_pair is none"),
    ("DPO", {"use_weighting": True, "loss_type": "aot"}, ValueError, "use_weighting weighs pairs"),
    ("DPO", {"sync_ref_model": True, "precompute_ref_log_probs": True}, ValueError,
     "sync_ref_model=True is of a reference model, and with precompute_ref_log_probs"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(
    kind: str, settings: dict[str, Any], error: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        getattr(fastrl, f"{kind}Config")(str(tmp_path), **{"use_cpu": True, **settings})


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids", "log_metric"])
def test_a_column_named_as_what_rewards_get_is_refused(
    kind: str, name: str, tmp_path: Path
) -> None:
    """It would replace the model's own; of streams as the first row comes."""
    rows = [{"prompt": "w5", name: "w6"}] * 4
    said = f"the column {name!r} of (train|eval)_dataset has the name of what reward functions get"
    with pytest.raises(ValueError, match=said):
        make(kind, tmp_path, rows)
    with pytest.raises(ValueError, match=said):
        make(kind, tmp_path, [{"prompt": "w5"}], eval_dataset=Dataset.from_list(rows))
    stream = IterableDataset.from_generator(lambda: iter(rows))
    trainer = make(kind, tmp_path, stream, dataloader_num_workers=0)
    with pytest.raises(ValueError, match=said):
        trainer.train()


def test_a_rollout_func_replaces_nothing_that_rewards_get() -> None:
    given = {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": None, "completions": ["x"]}
    with pytest.raises(ValueError, match="rollout_func returned 'completions', the name of what"):
        rolled_out(given, 1, tiny_models.language_model())


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_an_empty_prompt_is_refused_by_row(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": "w5"}, {"prompt": ""}]
    with pytest.raises(ValueError, match="the prompt of row 1 of train_dataset is empty"):
        make(kind, tmp_path, rows)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_fewer_prompts_than_a_generation_are_refused(kind: str, tmp_path: Path) -> None:
    """No step would be taken."""
    rows = [{"prompt": "w5"}] * 3
    said = r"3 prompts, fewer than the 4 .*generation_batch_size=16.*num_generations=4"
    with pytest.raises(ValueError, match=said):
        make(kind, tmp_path, rows, generation_batch_size=16)


TEMPLATES = {
    "is no template": ("{% if %}", "TemplateSyntaxError: Expected"),
    "refuses": ("{{ raise_exception('no system here') }}", "TemplateError: no system here"),
    "is for other messages": ("{{ messages[0].parts[0] }}", "UndefinedError"),
    "fails": ("{{ messages + 1 }}", "TypeError"),
    "writes nothing": ("", "the chat template writes nothing"),
}


@pytest.mark.parametrize("what", TEMPLATES)
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_a_chat_template_that_fails_says_so(kind: str, what: str, tmp_path: Path) -> None:
    tokenizer = chats()
    tokenizer.chat_template, named = TEMPLATES[what]
    with pytest.raises(ValueError, match=f"the chat template .*{named.split(' ')[-1]}"):
        make(kind, tmp_path, rows_of(kind, SOUND[:1]), tokenizer=tokenizer)


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "w5", "chosen": "w6", "rejected": "w7 \ud800 w8"}]
    with pytest.raises(ValueError, match=r"a text holds '\\ud800' at 3, half of a surrogate"):
        DatasLoader(rows, tiny.tokenizer())[0]
    with pytest.raises(ValueError, match="prompts\\[1\\] holds '\\\\ud800' at 0"):
        Prompts.from_list(["w5", "\ud800"], tiny.tokenizer())
    with pytest.raises(ValueError, match="column 'text' of row 1 holds '\\\\ud800'"):
        as_dataset([{"text": "w5"}, {"text": "\ud800"}])


def test_truth_values_are_no_margins(tmp_path: Path) -> None:
    rows = [{"chosen": "w5 w6", "rejected": "w7", "margin": True}]
    with pytest.raises(ValueError, match=r"margin\[0\] is True"):
        make("Reward", tmp_path, rows)
