"""The same rows through every door have the ids and marks that one reading of their text says.

That reading knows no encoder and no template: the text is written by hand, and read by the
``tokenizers`` library alone.
"""

import copy
import functools
import json
import random
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastrl.alignment import DatasLoader
from fastrl.data.collators import IGNORED
from fastrl.data.preferences import prepare_completions_of_ids, prepare_pairs_of_ids
from fastrl.data.prepare import prepare_pairs, prepare_texts
from fastrl.data.prompts import Prompts, samples_of_rows
from fastrl.data.reads_eos import KEY
from fastrl.models.fast_tokenizer import as_fast
from fastrl.rewards.functions import ClassifierReward
from fastrl.trainers.groups.reward_functions import RewardFunctions
from fastrl.trainers.groups.rollouts import GroupRollouts
from tests import mistral_folders
from tests.together import together

# A prompt's end may have other tokens in front of its completion than alone.
pytestmark = pytest.mark.filterwarnings("ignore:the end of a prompt has other tokens")

ROWS = 12  # of a tokenizer and a template
SPECIAL = ("<s>", "<e>", "<p>", "<t>", "<x>", "<k>")
MERGES = [("a", "b"), ("b", "c"), ("a", "c"), ("d", "ab"), ("{BLANK}", "a"), ("{BLANK}", "ab")]
# Which special tokens a tokenizer puts around texts, and how it splits them.
OPENS, CLOSES = {"opens", "both", "first", "always", "trims"}, {"closes", "both", "trims"}
KINDS = ("neither", "opens", "closes", "both", "first", "always", "trims")

HEAD = (
    "{% if tools %}{{ '<t>n' + (tools | tojson) + '<x>' }}{% endif %}"
    "{% if mood %}{{ '<t>m' + mood + '<x>' }}{% endif %}"
)
FRONT = "{{ '<t>' + m.role[0] }}{% if think and m.role == 'assistant' %}{{ '<k>' }}{% endif %}"
LOOP = "{% for m in messages %}TURN{% endfor %}"
ASKED = "{% if add_generation_prompt %}{{ '<t>a' }}{% if think %}{{ '<k>' }}{% endif %}{% endif %}"
SAID = "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<e>' }}{% endgeneration %}"
TURNS = {
    "plain": FRONT + "{{ m.content + '<e>\n' }}",
    "begins": FRONT + "{{ m.content + '<e>' }}",
    "strips": FRONT + "{{ m.content | trim + '<e>\n' }}",
    "switches": FRONT
    + "{{ m.content + ('<e>' if loop.last and not add_generation_prompt else '<x>') }}",
    "marks": FRONT + SAID + "{{ '\n' }}{% else %}{{ m.content + '<e>\n' }}{% endif %}",
}
TEMPLATES = {name: HEAD + LOOP.replace("TURN", turn) + ASKED for name, turn in TURNS.items()}
TEMPLATES["begins"] = "{{ bos_token }}" + TEMPLATES["begins"]
TEMPLATES["macro"] = (
    "{% macro turn(m) %}" + TURNS["marks"] + "{% endmacro %}" + HEAD
    + LOOP.replace("TURN", "{{ turn(m) }}") + ASKED
)  # fmt: skip


def written(
    template: str, messages: Sequence[Any], row: dict[str, Any], asks: bool = False
) -> list[tuple[str, bool]]:
    """The pieces of a chat's text, and which of them the assistant says."""
    options = row.get("chat_template_kwargs") or {}
    thought = "<k>" if options.get("think") else ""
    pieces = [("<s>", False)] if template == "begins" else []
    if row.get("tools"):
        pieces.append((f"<t>n{json.dumps(row['tools'])}<x>", False))
    if options.get("mood"):
        pieces.append((f"<t>m{options['mood']}<x>", False))
    for i, message in enumerate(messages):
        own = message["role"] == "assistant"
        said = message["content"].strip() if template == "strips" else message["content"]
        last = i + 1 == len(messages) and not asks
        end = "<x>" if template == "switches" and not last else "<e>"
        pieces += [(f"<t>{message['role'][0]}" + thought * own, False), (said + end, own)]
        pieces.append(("" if template in ("begins", "switches") else "\n", False))
    return [*pieces, ("<t>a" + thought, False)] if asks else pieces


def backend(kind: str, prefix: bool = True) -> Tokenizer:
    """What splits texts, without special tokens around them."""
    blank = "▁" if kind in ("first", "always") else "Ġ"
    if blank == "▁":
        alphabet = [chr(i) for i in range(33, 127)] + ["\n", "▁"]
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a.format(BLANK=blank), b) for a, b in MERGES]
    vocabulary = dict.fromkeys([*alphabet, *(a + b for a, b in merges)])
    core = Tokenizer(models.BPE({x: i for i, x in enumerate(vocabulary)}, merges))
    if kind == "first":
        scheme = "first" if prefix else "never"
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        core.decoder = decoders.Metaspace(prepend_scheme="first")
    elif kind == "always":
        front = [normalizers.Prepend("▁")] if prefix else []
        core.normalizer = normalizers.Sequence([*front, normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*SPECIAL])
    return core


@functools.cache
def tokenizer(kind: str, template: str) -> Any:
    core = backend(kind)
    ends = [(x, core.token_to_id(x)) for x in ("<s>", "<e>")]
    around = f"{'<s> ' * (kind in OPENS)}$A{' <e>' * (kind in CLOSES)}"
    post: list[Any] = [processors.TemplateProcessing(single=around, special_tokens=ends)]
    if kind == "trims":
        post.insert(0, processors.ByteLevel(trim_offsets=True))
    core.post_processor = processors.Sequence(post)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="<e>", pad_token="<p>"
    )
    made.chat_template = TEMPLATES[template]
    return made


class Reading:
    """The reading of texts by a kind of tokenizer."""

    def __init__(self, kind: str):
        self.kind = kind
        self.core, self.bare = backend(kind), backend(kind, prefix=False)
        self.bos, self.eos = (self.core.token_to_id(x) for x in ("<s>", "<e>"))

    def ids(self, text: str) -> list[int]:
        return self.core.encode(text, add_special_tokens=False).ids

    def opened(self, text: str, chat: bool) -> list[int]:
        """A text with BOS, where the tokenizer begins texts with it and it has none."""
        begins = chat or text.startswith("<s>") or self.kind not in OPENS
        return self.ids(text) if begins else [self.bos, *self.ids(text)]

    def behind(self, text: str) -> list[int]:
        """A text as it goes on behind another one: no blank is put in front."""
        found = re.search("|".join(SPECIAL), text)
        at = found.start() if found else len(text)
        front = self.bare.encode(text[:at], add_special_tokens=False).ids
        return [*front, *(self.ids(text[at:]) if text[at:] else [])]

    def marked(self, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """A chat's tokens, and which of them begin within what the assistant says."""
        text, said = "".join(x for x, _ in pieces), [own for x, own in pieces for _ in x]
        found = self.core.encode(up_to_eos(text), add_special_tokens=False)
        return found.ids, [said[begin] for begin, _ in found.offsets]

    def ended(self, ids: list[int]) -> list[int]:
        return ids if ids[-1:] == [self.eos] else [*ids, self.eos]


def up_to_eos(text: str) -> str:
    """A text without the blanks behind its last EOS."""
    end = text.rfind("<e>") + len("<e>")
    return text[:end] if "<e>" in text and not text[end:].strip() else text


def drawn_text(draw: random.Random) -> str:
    letters = [draw.choice("abcd  \n.") for _ in range(draw.randint(1, 6))]
    return "".join([*letters, draw.choice("abcd"), draw.choice(["", "", " ", "\n"])])


class Case:
    """A row, and what is to be read in it.

    Attributes:
        row: with a prompt, a completion, another one, and what goes to the chat template.
        prompt: the prompt's ids.
        texts: both completions as they stand behind the prompt.
    """

    def __init__(self, kind: str, template: str, number: int):
        draw = random.Random(f"{kind} {template} {number}")
        self.read, self.template = Reading(kind), template
        said = functools.partial(drawn_text, draw)
        what = ("texts", "written", "chat", "turns", "tools", "thinks")[number % 6]
        self.chat = what not in ("texts", "written")
        self.options: dict[str, Any] = {}
        if what in ("tools", "thinks"):
            self.options["tools"] = [{"type": "function", "function": {"name": said()}}]
        if what == "thinks":
            self.options["chat_template_kwargs"] = {"think": True, "mood": said()}
        turns = [{"role": "user", "content": said()}]
        if what == "turns":
            turns += [{"role": "assistant", "content": said()}, {"role": "user", "content": said()}]
        one, other = said(), said() + "d"
        self.messages = turns
        if what == "texts":
            self.prompt_text, texts, prompt = said(), [one, other + "<e>"], None
        else:
            replies = [[{"role": "assistant", "content": x}] for x in (one, other)]
            self.prompt_text = self.text(turns, asks=True)
            texts = [self.text([*turns, *x])[len(self.prompt_text) :] for x in replies]
            prompt = turns
        self.texts = texts
        if self.chat:
            self.row = {"prompt": prompt, "completion": replies[0], **self.options}
            self.pair = {"prompt": prompt, "chosen": replies[0], "rejected": replies[1]}
        else:
            self.row = {"prompt": self.prompt_text, "completion": texts[0]}
            self.pair = {"prompt": self.prompt_text, "chosen": texts[0], "rejected": texts[1]}
        self.pair |= self.options

    def text(self, messages: list[Any], asks: bool = False) -> str:
        return "".join(x for x, _ in written(self.template, messages, self.options, asks))

    @property
    def prompt(self) -> list[int]:
        return self.read.opened(self.prompt_text, self.chat)

    def answers(self, ends: bool) -> list[list[int]]:
        """Ids of the completions behind the prompt.

        Args:
            ends: texts with EOS; chats have that of their template.
        """
        if self.chat:
            return [self.read.behind(up_to_eos(text)) for text in self.texts]
        every = [self.read.behind(text) for text in self.texts]
        return [self.read.ended(ids) if ends else ids for ids in every]

    def jointly(self, texts: list[str]) -> tuple[list[int], list[list[int]]]:
        """The prompt's tokens in front of completions, and what follows them, where both are read
        as one text."""
        whole = [self.read.opened(self.prompt_text + text, self.chat) for text in texts]
        if not self.chat:
            whole = [self.read.ended(ids) for ids in whole]
        columns = enumerate(zip(self.prompt, *whole, strict=False))
        at = next((i for i, ids in columns if len(set(ids)) > 1), len(self.prompt))
        return self.prompt[:at], [ids[at:] for ids in whole]


class Reader(torch.nn.Module):
    """A classifier that remembers what it read."""

    def __init__(self, reads_eos: bool | None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        given = {} if reads_eos is None else {KEY: reads_eos}
        self.config = SimpleNamespace(
            num_labels=1, pad_token_id=0, label2id={"x": 0}, name_or_path="reader", **given
        )
        self.config.get_text_config = lambda: self.config
        self.read: list[list[int]] = []

    def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        rows = zip(input_ids, attention_mask, strict=True)
        self.read += [ids[mask.bool()].tolist() for ids, mask in rows]
        return SimpleNamespace(logits=torch.zeros(len(input_ids), 1))


def scored(door: str, made: Any, cases: list[Case], reads_eos: bool | None) -> list[list[int]]:
    """What a classifier reads of rows as a reward."""
    reader = Reader(reads_eos)
    prompts, said = ([case.row[name] for case in cases] for name in ("prompt", "completion"))
    columns = {name: [case.options[name] for case in cases] for name in cases[0].options}
    if door == "reward":
        ClassifierReward(reader, made, batch_size=1)(prompts, said, **columns)
    else:
        settings = SimpleNamespace(
            reward_weights=None, chat_template_kwargs=None, reward_timeout=None, reward_retries=0,
            reward_batch_size=None, on_nonfinite="raise",
        )  # fmt: skip
        functions = RewardFunctions(reader, made, {}, (), settings)
        functions(prompts, said, [[1]] * len(said), columns, finished=[True] * len(said))
    return sorted(reader.read)


def sampled_from(
    made: Any, rows: list[dict[str, Any]], longest: int | None = None
) -> list[list[int]]:
    """The ids that GRPOTrainer and RLOOTrainer go on from."""
    rollouts: Any = SimpleNamespace(
        tokenizer=made, template={}, args=SimpleNamespace(max_prompt_length=longest)
    )
    rollouts.room = SimpleNamespace(check=lambda *_: None)
    asked = samples_of_rows(rows, [row["prompt"] for row in rows])
    return [ids.tolist() for ids in GroupRollouts.encoded(rollouts, asked).prompt_ids]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_door_reads_a_row_alike(kind: str, template: str) -> None:
    made, drawn = tokenizer(kind, template), [Case(kind, template, i) for i in range(ROWS)]
    for chat, columns in ((False, 0), (True, 0), (True, 1), (True, 2)):
        cases = [case for case in drawn if (case.chat, len(case.options)) == (chat, columns)]
        for door, (found, wanted) in doors(made, cases).items():
            assert found == wanted, (door, [case.row for case in cases])


def doors(made: Any, cases: list[Case]) -> dict[str, tuple[list[Any], list[Any]]]:
    """What each door makes of rows, and what it should."""
    data, pairs = (Dataset.from_list([getattr(c, x) for c in cases]) for x in ("row", "pair"))
    prompts = [case.prompt for case in cases]
    both = {ends: [case.answers(ends) for case in cases] for ends in (True, False)}
    found: dict[str, tuple[list[Any], list[Any]]] = {}

    rows = prepare_texts(data, made)
    found["SFT"] = (
        [(row["input_ids"], row["labels"]) for row in rows],
        [([*prompt, *said], [IGNORED] * len(prompt) + said) for prompt,
         (said, _) in zip(prompts, both[True], strict=True)],
    )  # fmt: skip
    for ends, answers in both.items():
        whole = [[[*prompt, *ids] for ids in x] for prompt, x in zip(prompts, answers, strict=True)]
        rows = prepare_pairs(pairs, made, None, add_eos=ends)
        read = [[row["chosen_ids"], row["rejected_ids"]] for row in rows]
        found[f"reward model, EOS {ends}"] = (read, whole)
        for door in ("reward", "reward in GRPO"):
            read = scored(door, made, cases, ends)
            found[f"{door}, EOS {ends}"] = (read, sorted(first for first, _ in whole))
    for name, source, count in (("answers", data, 1), ("pairs", pairs, 2)):
        found[f"alignment, {name}"] = (
            [([*x.prompt_ids], [[*y.ids] for y in x.responses]) for x in DatasLoader(source, made)],
            [(prompt, x[:count]) for prompt, x in zip(prompts, both[True], strict=True)],
        )
    read = [ids.tolist() for ids in Prompts.from_dataset(data, "prompt", made).samples.prompt_ids]
    found["PPO"] = (read, prompts)
    found["GRPO, RLOO"] = (sampled_from(made, [case.row for case in cases]), prompts)

    rows = prepare_pairs_of_ids(pairs, made, None, None)
    found["DPO"] = (
        [(row["prompt_ids"], [row["chosen_ids"], row["rejected_ids"]]) for row in rows],
        [case.jointly(case.texts) for case in cases],
    )
    rows = prepare_completions_of_ids(pairs, made, None, None)
    found["KTO"] = (
        [(row["prompt_ids"], [row["completion_ids"]]) for row in rows],
        [case.jointly([case.texts[i]]) for i in (0, 1) for case in cases],
    )
    return found


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_marks_are_of_what_the_assistant_said(kind: str, template: str) -> None:
    made, read = tokenizer(kind, template), Reading(kind)
    drawn = [Case(kind, template, i) for i in range(ROWS)]
    for columns in range(3):
        cases = [case for case in drawn if len(case.options) == columns]
        chats = [[*c.messages, {"role": "assistant", "content": "ab"}] for c in cases]
        pairs = list(zip(chats, cases, strict=True))
        data = Dataset.from_list([{"messages": x, **case.options} for x, case in pairs])
        for row, (chat, case) in zip(
            prepare_texts(data, made, assistant_only=True), pairs, strict=True
        ):
            ids, marks = read.marked(written(template, chat, case.options))
            labels = [x if own else IGNORED for x, own in zip(ids, marks, strict=True)]
            assert (row["input_ids"], row["labels"]) == (ids, labels), chat


@pytest.mark.parametrize("template", ["plain", "begins"])
@pytest.mark.parametrize("kind", ["neither", "both"])
def test_prompts_that_are_cut_keep_bos(kind: str, template: str) -> None:
    made, read = tokenizer(kind, template), Reading(kind)
    chat = [{"role": "user", "content": "dcdcdc"}]
    texts = {"text": "dcdcdc", "chat": "".join(x for x, _ in written(template, chat, {}, True))}
    for what, prompt in (("text", "dcdcdc"), ("chat", chat)):
        whole = read.opened(texts[what], what == "chat")
        bos = whole[:1] == [read.bos]
        wanted = [*whole[:bos], *whole[bos - 4 :]]
        replies = {"chosen": "d", "rejected": "."}
        if what == "chat":
            replies = {k: [{"role": "assistant", "content": x}] for k, x in replies.items()}
        pair = {"prompt": prompt, **replies}
        rows = Dataset.from_list([pair])
        (example,) = DatasLoader(rows, made, max_prompt_length=4)
        cut = [
            sampled_from(made, [pair], longest=4)[0],
            prepare_pairs_of_ids(rows, made, None, None, (4, None))[0]["prompt_ids"],
            prepare_completions_of_ids(rows, made, None, None, cuts=(4, None))[0]["prompt_ids"],
            [*example.prompt_ids],
        ]
        assert cut == [wanted] * 4


def test_a_text_that_ends_with_eos_is_closed_once() -> None:
    made, read = tokenizer("both", "plain"), Reading("both")
    (row,) = prepare_texts([{"text": "dc<e>"}], made)
    assert row["input_ids"] == [read.bos, *read.ids("dc"), read.eos]


@together("thought", ["", "m"])
def test_a_turn_between_two_equal_answers_is_not_learned(thought: str) -> None:
    """Of a template that ends the last turn with another token, and may leave out a thought of all
    others."""
    made, read = copy.deepcopy(tokenizer("neither", "switches")), Reading("neither")
    turn = f"{{{{ ('{thought}' if loop.last and not add_generation_prompt else '') + m.content +"
    made.chat_template = made.chat_template.replace("{{ m.content +", turn)
    assert turn in made.chat_template
    turns = [("user", "a"), ("assistant", "d"), ("user", "d"), ("assistant", "d")]
    chat = [{"role": role, "content": said} for role, said in turns]
    (row,) = prepare_texts([{"messages": chat}], made, assistant_only=True)
    learned = [x for x in row["labels"] if x != IGNORED]
    assert learned == read.ids(f"d<x>{thought}d<e>")


@pytest.mark.parametrize("ends", [True, False], ids=["marked", "unmarked"])
def test_blanks_at_the_ends_of_a_turn_are_of_that_turn(ends: bool) -> None:
    """Though the tokenizer says that no token of theirs stands there."""
    made, read = copy.deepcopy(tokenizer("trims", "marks")), Reading("trims")
    mark = (
        SAID
        if ends
        else SAID.replace(" + '<e>' }}{% endgeneration %}", " }}{% endgeneration %}<e>")
    )
    assert (mark == SAID) == ends
    turn = FRONT + mark + "{% else %}{{ m.content + '<e>' }}{% endif %}"
    made.chat_template = HEAD + LOOP.replace("TURN", turn) + ASKED
    for said in ("d", "d ", " d", " ab "):
        turns = [("user", "b "), ("assistant", said), ("user", " b"), ("assistant", "d")]
        chat = [{"role": role, "content": text} for role, text in turns]
        (row,) = prepare_texts([{"messages": chat}], made, assistant_only=True)
        end = "<e>" if ends else ""
        expected = [*read.ids(said + end), *read.ids("d" + end)]
        assert [x for x in row["labels"] if x != IGNORED] == expected, said


CALL = [{"type": "function", "function": {"name": "w", "arguments": {}}}]


@pytest.mark.parametrize(("calls", "content"), [(CALL, None), (CALL, ""), ([], "")], ids=repr)
def test_a_turn_without_text_ends_where_the_template_ends_it(calls: Any, content: Any) -> None:
    """In the middle of a chat, under a template that ends the last turn with another token."""
    made, read = tokenizer("neither", "switches"), Reading("neither")
    turn = (
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
    )
    made.chat_template = made.chat_template.replace("{{ m.content +", turn + "{{")
    assert turn in made.chat_template
    empty: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
    chat = [{"role": "user", "content": "a"}, empty, {"role": "user", "content": "b"}, empty]
    said = "(w)" if calls else ""
    for count, expected in ((4, f"{said}<x>{said}<e>"), (2, f"{said}<e>")):
        (row,) = prepare_texts([{"messages": chat[:count]}], made, assistant_only=True)
        assert [x for x in row["labels"] if x != IGNORED] == read.ids(expected)


class TekkenCase(Case):
    """A chat with the ids that mistral-common itself writes."""

    def __init__(self, write: Any, tools: list[Any], said: tuple[str, str, str]):
        prompt, *replies = ([{"role": role, "content": text}] for role, text in zip(
            ("user", "assistant", "assistant"), said, strict=True
        ))  # fmt: skip
        self.options, self.chat = {"tools": tools} if tools else {}, True
        self.row = {"prompt": prompt, "completion": replies[0], **self.options}
        self.pair = {"prompt": prompt, "chosen": replies[0], "rejected": replies[1]}
        self.pair |= self.options
        self.begin = write(prompt, tools, "test")
        whole = [write([*prompt, *reply], tools, "finetuning") for reply in replies]
        assert all(ids[: len(self.begin)] == self.begin for ids in whole)
        self.texts: Any = [ids[len(self.begin) :] for ids in whole]

    @property
    def prompt(self) -> list[int]:
        return self.begin

    def answers(self, ends: bool) -> list[list[int]]:
        return self.texts

    def jointly(self, texts: Any) -> tuple[list[int], list[list[int]]]:
        return self.begin, texts


@pytest.mark.parametrize("version", ["v7", "v13"])
def test_every_door_reads_chats_as_mistral_common_writes_them(tmp_path: Any, version: str) -> None:
    request = pytest.importorskip("mistral_common.protocol.instruct.request")
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    folder = mistral_folders.save(tmp_path, version)

    def write(chat: list[Any], tools: list[Any], mode: str) -> list[int]:
        own = mistral.MistralTokenizer.from_file(str(folder / "tekken.json"), mode=mode)
        asked = request.ChatCompletionRequest.from_openai(messages=chat, tools=tools or None)
        return own.encode_chat_completion(asked).tokens

    made = as_fast(AutoTokenizer.from_pretrained(folder))
    tool = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    for tools in ([], [{"type": "function", "function": tool}]):
        said = [("hello the", "is", " world\n"), ("is é", "[x] ", "the")]
        cases: list[Case] = [TekkenCase(write, tools, each) for each in said]
        for door, (found, wanted) in doors(made, cases).items():
            assert found == wanted, door
