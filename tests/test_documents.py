"""README and docs: every code block runs, every name and number in them is there.

A page's Python blocks run one after the other, as a reader would type them. Where they run, Hub
ids, runs' folders and data files are small stand-ins. What stands before a block says more of it:

    <!-- gpu -->          needs a GPU; elsewhere it is compiled
    <!-- needs: trl -->   needs this package
    <!-- file: name -->   is saved under this name
    <!-- run -->          of shell blocks: its commands are run, not only parsed; those of the
                          tutorial by docs/.api/tutorial.py, which writes what they print
"""

import dataclasses
import importlib
import importlib.util
import json
import math
import pkgutil
import re
import runpy
import shlex
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

import fastrl
import fastrl_kernels
from fastrl import PPOConfig, PPOTrainer, SamplingParams, TrainCallback, cli
from fastrl.alignment import (
    AlignmentConfig,
    BatchFactory,
    ByLength,
    DatasLoader,
    JudgeAnnotator,
    Trainer,
)
from fastrl.learn.preferences import PAIR_LOSSES
from fastrl.tools.commands import completion
from tests import tables, tiny_models
from tests.golden import tiny

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))]
GPU_BLOCKS = 3
WITH_A_PARSER = ("chat", "merge", "push", "recipes", "samples", "replay", "new", "migrate")
STEPS = 2  # of PPO, in place of a hundred
ROWS = 16  # of each data file, in place of two
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + {'name': c.function.name, "
    "'arguments': c.function.arguments} | tojson + '</tool_call>' }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_FENCE = re.compile(
    r"(?P<notes>(?:^[ ]*<!--[^\n]*-->\n)*)^(?P<indent>[ ]*)```(?P<kind>\w*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_INCLUDED = re.compile(r'^--8<-- "([^"]+):(\w+)"\n', re.MULTILINE)
_NOTE = re.compile(r"<!-- (gpu|run|file|needs)(?:: (\S+))? -->")

pytestmark = pytest.mark.filterwarnings("ignore")  # stand-ins are odd models


class Block(NamedTuple):
    kind: str
    text: str
    notes: dict[str, str]
    line: int


def blocks(page: str) -> list[Block]:
    """Of a page, those in its own text, with what these include; other text that it includes has
    tests of its own."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        indent = match["indent"]
        lines = (line.removeprefix(indent) for line in match["text"].splitlines(keepends=True))
        notes = dict(_NOTE.findall(match["notes"]))
        line = text.count("\n", 0, match.start("kind")) + 1
        text_of_block = _INCLUDED.sub(included, "".join(lines))
        found.append(Block(match["kind"], text_of_block, notes, line))
    return found


def included(asked: re.Match[str]) -> str:
    """A part of a file, as the pages' builder includes it."""
    text = (ROOT / asked[1]).read_text(encoding="utf-8")
    part = text.partition(f"[start:{asked[2]}]\n")[2].partition(f"# --8<-- [end:{asked[2]}]")[0]
    assert part, f"{asked[1]} has no part {asked[2]}"
    return part


EVERY = [(page, block) for page in PAGES for block in blocks(page)]


def with_block_of(*kinds: str) -> list[str]:
    return [page for page in PAGES if any(b.kind in kinds for p, b in EVERY if p == page)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, of a few hundred tokens, with a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<eos>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([(DOCS / "quick_start.md").read_text(encoding="utf-8")], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def stand_ins(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the documents name: models by Hub id, runs, data files."""
    folder = tmp_path_factory.mktemp("reader")
    size = len(tokenizer)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    gpt2 = GPT2Config(
        vocab_size=size, n_embd=16, n_layer=2, n_head=2, n_positions=256, num_labels=1, **ids
    )
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    qwen = Qwen3Config(
        vocab_size=size, intermediate_size=32, num_key_value_heads=2, head_dim=8, **shape, **ids
    )
    larger = Qwen3Config(
        vocab_size=size, intermediate_size=32, num_key_value_heads=2, head_dim=8,
        **{**shape, "hidden_size": 24}, **ids,
    )  # fmt: skip
    roberta = RobertaConfig(
        vocab_size=size, intermediate_size=16, max_position_embeddings=300, **shape, **ids
    )
    t5 = T5Config(
        vocab_size=size, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=1, **ids,
    )  # fmt: skip
    made = {
        "openai-community/gpt2": AutoModelForCausalLM.from_config(gpt2),
        "Qwen/Qwen3-0.6B": AutoModelForCausalLM.from_config(qwen),
        "Qwen/Qwen3-4B": AutoModelForCausalLM.from_config(larger),
        "FacebookAI/roberta-base": RobertaForMaskedLM(roberta),
        "google-t5/t5-small": T5ForConditionalGeneration(t5),
        "runs/sft/model": AutoModelForCausalLM.from_config(gpt2),
        "runs/reward/model": GPT2ForSequenceClassification(gpt2),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for _, block in EVERY:
        name = block.notes.get("file", "")
        if name.endswith(".jsonl"):
            rows = [json.loads(line) for line in block.text.splitlines()]
            (folder / name).write_text("".join(_many(rows)), encoding="utf-8")
    (folder / "kernels").symlink_to(ROOT / "kernels")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def _many(rows: list[dict[str, Any]]) -> Iterator[str]:
    """ROWS lines like these, no two alike."""
    assert all(row.keys() == rows[0].keys() for row in rows)
    for i in range(ROWS):
        row = rows[i % len(rows)]
        first = next(iter(row))
        yield json.dumps({**row, first: f"{i}. {row[first]}"}) + "\n"


@pytest.fixture
def reader(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader stands: a folder with stand-ins, in which runs take two steps."""
    for path in sorted(stand_ins.iterdir()):
        if path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "runs").mkdir()
    for path in (stand_ins / "runs").glob("*/model"):
        # A copy, which pages may overwrite.
        shutil.copytree(path, tmp_path / "runs" / path.parent.name / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    train = PPOTrainer.train

    def briefly(self: Any, *args: Any, steps: int, **kwargs: Any) -> Any:
        return train(self, *args, steps=min(steps, STEPS), progress=False, **kwargs)

    monkeypatch.setattr(PPOTrainer, "train", briefly)
    prepare = TrainingArguments.__post_init__

    def quiet(self: Any) -> None:
        self.use_cpu, self.report_to, self.disable_tqdm = True, "none", True
        self.save_strategy, self.max_steps = "no", STEPS
        prepare(self)

    monkeypatch.setattr(TrainingArguments, "__post_init__", quiet)
    with tables.kept():
        yield tmp_path
    fastrl.unpatch_trl()
    sys.modules.pop("rewards", None)


@pytest.mark.parametrize("page", with_block_of("python"))
def test_python_blocks_run(page: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = types.ModuleType("document")  # which dataclasses look themselves up in
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if block.kind != "python":
            continue
        if "file" in block.notes:
            (reader / block.notes["file"]).write_text(block.text, encoding="utf-8")
            sys.modules.pop(Path(block.notes["file"]).stem, None)
        # Lines are counted as in the page, which a traceback names.
        code = compile("\n" * block.line + block.text, ROOT / page, "exec")
        needs = block.notes.get("needs")
        if needs and importlib.util.find_spec(needs) is None:
            continue
        if "gpu" not in block.notes or torch.cuda.is_available():
            exec(code, module.__dict__)


def test_blocks_that_need_a_gpu_are_few() -> None:
    marked = [f"{page}:{block.line}" for page, block in EVERY if "gpu" in block.notes]
    assert len(marked) == GPU_BLOCKS, marked


def test_every_block_says_its_language() -> None:
    known = {"python", "bash", "json", "yaml", "text"}
    assert [f"{page}:{b.line}" for page, b in EVERY if b.kind not in known] == []


def commands(block: Block) -> Iterator[list[str]]:
    """A shell block's lines as words, comments left out, continued lines joined."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def without_launcher(words: list[str]) -> list[str]:
    """What a launcher, which takes its own flags, starts in each process."""
    match words:
        case ["torchrun", *arguments]:
            parsed = importlib.import_module("torch.distributed.run").parse_args(arguments)
        case ["accelerate", "launch", *arguments]:
            launch = importlib.import_module("accelerate.commands.launch")
            parsed = launch.launch_command_parser().parse_args(arguments)
        case _:
            return words
    started = parsed.training_script
    return [started if parsed.module else "python", *parsed.training_script_args] + (
        [] if parsed.module else [started]
    )


class Parsed(BaseException):
    """In place of a command's work."""


@pytest.mark.parametrize("page", with_block_of("bash"))
def test_shell_lines_are_what_the_tools_take(
    page: str, reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = cli.parse

    def stop(*args: Any) -> Any:
        raise Parsed(parse(*args))

    monkeypatch.setattr(cli, "parse", stop)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for block in blocks(page):
        if block.kind in ("yaml", "python", "json") and "file" in block.notes:
            target = reader / block.notes["file"]
            if not target.exists():
                target.write_text(block.text, encoding="utf-8")
        if block.kind != "bash":
            continue
        for words in map(without_launcher, commands(block)):
            match words:
                case ["python", "-m", module, *_]:
                    assert importlib.util.find_spec(module), module
                case ["pytest", where, *_]:
                    assert (ROOT / where).exists(), where
                case ["python", script, *_]:
                    assert script.endswith(".py")
                case ["fastrl", "report" | "doctor", *folders]:  # has no flags here
                    assert folders
                    assert all(folder.startswith("runs/") for folder in folders), folders
                case ["vllm", "serve", *_] | ["export" | "source", _] | ["head", *_]:
                    pass  # programs of others
                case ["fastrl", command, *arguments] if command in WITH_A_PARSER:
                    home = importlib.import_module(f"fastrl.tools.commands.{command}")
                    flags = home.make_parser().parse_args(list(arguments))
                    assert getattr(flags, "run", "runs/").startswith("runs/"), flags
                    if hasattr(home, "parse_flags"):
                        home.parse_flags(arguments)
                case ["fastrl", "run-trl", script, *_] | ["fastrl.run_trl", script, *_]:
                    assert script.endswith(".py")
                case ["fastrl", "plan", *arguments]:
                    importlib.import_module("fastrl.tools.commands.plan").parse_plan(arguments)
                case ["fastrl", "completion", shell, ">", _]:
                    assert shell in completion.SHELLS
                case ["fastrl", *arguments]:
                    with pytest.raises(Parsed):
                        assert cli.main(arguments) == 0, f"{page}:{block.line}: {words}"
                case ["make", target]:
                    assert target in targets, f"{page}:{block.line}"
                case ["pip", "install", "torch", "--index-url", index]:
                    assert index == "https://download.pytorch.org/whl/cpu"
                case ["pip", "install", "./kernels"]:
                    assert (ROOT / "kernels" / "pyproject.toml").exists()
                case ["pip", "install", "-e", what] | ["pip", "install", what]:
                    named = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", what)
                    assert named, f"{page}:{block.line}"
                    assert set((named[1] or "peft").split(",")) <= extras, f"{page}:{block.line}"
                case _:
                    pytest.fail(f"{page}:{block.line}: nothing here knows {shlex.join(words)}")


def test_the_quick_starts_commands_run(reader: Path, capsys: Any) -> None:
    """One after the other, each on what those before it have left."""
    shutil.rmtree(reader / "runs" / "sft" / "model")
    shutil.rmtree(reader / "runs" / "reward" / "model")
    brief = ["--max-length", "64", "--eval-examples", "2"]
    options = {
        "sft": brief, "reward": brief, "align": brief,
        "ppo": ["--batch-size", "4", "--max-new-tokens", "4", "--eval-prompts", "2"],
    }  # fmt: skip
    ran = []
    for block in blocks("docs/quick_start.md"):
        for command, *words in commands(block) if "run" in block.notes else ():
            assert command == "fastrl"
            assert cli.main([*words, *options[words[0]]]) == 0, capsys.readouterr().err
            output = Path(words[words.index("--output") + 1])
            assert {p.name for p in output.iterdir()} >= {
                "model", "metrics.jsonl", "summary.json", "report.png"
            }  # fmt: skip
            assert_described(
                key
                for line in (output / "metrics.jsonl").read_text().splitlines()
                for key in json.loads(line)
            )
            ran.append(words[0])
    assert ran == ["sft", "reward", "align", "ppo"]


def test_the_quick_starts_commands_run_as_printed_on_its_own_lines(
    reader: Path, capsys: Any
) -> None:
    shutil.rmtree(reader / "runs" / "sft" / "model")
    shutil.rmtree(reader / "runs" / "reward" / "model")
    for block in blocks("docs/quick_start.md"):
        if "file" in block.notes and block.notes["file"].endswith(".jsonl"):
            (reader / block.notes["file"]).unlink()
            (reader / block.notes["file"]).write_text(block.text, encoding="utf-8")
        for _, *words in commands(block) if "run" in block.notes else ():
            assert cli.main(words) == 0, capsys.readouterr().err


def described_statistics() -> set[str]:
    """The names in code in docs/statistics.md."""
    return set(re.findall(r"`([^`]+)`", (DOCS / "statistics.md").read_text(encoding="utf-8")))


def assert_described(keys: Any) -> None:
    known = described_statistics()
    missing = {key for key in keys if key not in known and key.removeprefix("eval_") not in known}
    assert not missing, f"docs/statistics.md does not say what {sorted(missing)} is"


@pytest.mark.parametrize("settings", [
    {},
    {"rollout_backend": "generate", "kl_in": "loss"},
    {"advantage": "grpo", "group_size": 2}, {"critic_warmup_steps": 2}, {"critic": "model"},
], ids=["ppo", "generate", "grpo", "warm-up", "critic"])  # fmt: skip
def test_every_statistic_of_ppo_is_described(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    evaluations = []
    if "critic" in settings:
        tiny_models.language_model().save_pretrained(tmp_path / "model")
        monkeypatch.chdir(tmp_path)

    class Keep(TrainCallback):
        def on_eval(self, trainer: Any, step: int, evaluation: Any) -> None:
            evaluations.append(evaluation.scalars())

    config = PPOConfig(batch_size=4, ppo_epochs=1, **settings)
    model = tiny_models.policy() if config.needs_values else tiny_models.language_model()
    trainer = PPOTrainer(config, model, tokenizer=tiny.tokenizer())
    prompts = ["w3 w4", "w5 w6", "w7", "w8 w9"]
    result = trainer.train(
        lambda completions, **_: [float(len(c)) for c in completions],
        prompts=prompts,
        steps=1,
        eval_prompts=prompts,
        generation_kwargs={"max_new_tokens": 4},
        callbacks=[Keep()],
        progress=False,
    )
    queries = [torch.tensor([3, 4])] * 4
    responses = [torch.tensor([5, 6, 7])] * 4
    stats = trainer.step(queries, responses, [torch.tensor(1.0)] * 4)
    assert all(math.isfinite(x) for x in evaluations[0].values())
    assert_described([*result.history[0], *stats, *evaluations[0]])


@pytest.mark.parametrize(
    ("task", "loss"), [("online-pairwise", "dpo"), ("online-pointwise", "kto")]
)
def test_every_statistic_of_online_preferences_is_described(
    task: str, loss: str, reader: Path
) -> None:
    name = "openai-community/gpt2"
    tokenizer = AutoTokenizer.from_pretrained(name)
    judge = JudgeAnnotator(lambda asked: ["A" if "Response A" in q else "3" for q in asked],
                           unparsed="skip")  # fmt: skip
    prompts = DatasLoader("prompts.jsonl", tokenizer, "prompts")
    params = SamplingParams(max_new_tokens=4)
    factories = [
        BatchFactory(task, prompts, batch_size=4, annotator=judge, params=params) for _ in "ab"
    ]
    trainer = Trainer(
        name,
        AlignmentConfig(output_dir="runs/online", logging_steps=1),
        factories[0],
        loss,
        eval_factory=factories[1],
        reweighter=ByLength(),
    )
    trainer.train()
    trainer.evaluate()
    assert_described(key for row in trainer.state.log_history for key in row)


def test_the_api_pages_have_every_public_name() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("api_*.md"))
    there = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    there |= {re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in there}  # a module named as its op
    modules = {"fastrl.alignment", "fastrl.patch", "fastrl.__version__"}
    for module in (fastrl, fastrl.alignment, fastrl_kernels):
        wanted = {f"{module.__name__}.{name}" for name in module.__all__}
        assert wanted - there - modules == set()
    for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
        assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize(
    "config", [PPOConfig, fastrl.GRPOConfig, fastrl.SFTConfig, fastrl.ModelConfig, AlignmentConfig]
)
def test_the_api_has_each_setting_with_its_default_and_none_of_its_helpers(config: Any) -> None:
    text = runpy.run_path(str(DOCS / ".api" / "settings.py"))["tables"](config)
    assert not re.search(r"setting\w*\(|refused\(|idle\(|MISSING|<[a-z]", text)
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}
    common = {field.name for field in dataclasses.fields(TrainingArguments)}
    for field in dataclasses.fields(config):
        if field.init and field.name not in common and field.metadata.get("help"):
            default = field.default if field.default_factory is dataclasses.MISSING else None
            assert default is None or f" | `{default!r}` | " in rows[field.name], field.name


def test_the_table_of_losses_of_pairs_is_the_codes() -> None:
    text = (DOCS / "preferences.md").read_text(encoding="utf-8")
    for name, row in PAIR_LOSSES.items():
        options = ", ".join(f"`{option}={value}`" for option, value in row.defaults.items())
        assert f"| `{name}` | {row.formula} | {options} | {row.source} |\n" in text


def test_what_works_where_is_what_the_signatures_and_settings_have() -> None:
    text = (DOCS / "capabilities.md").read_text(encoding="utf-8")
    render = runpy.run_path(str(DOCS / ".api" / "capabilities.py"))["render"]
    assert render(text) == text, "python docs/.api/capabilities.py writes it anew"


def test_every_page_is_in_the_navigation_and_every_picture_is_there_and_described() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inner in entry.values() if isinstance(entry, dict) else entry:
            if not isinstance(entry, str):
                yield from pages(inner)

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(pages(site["nav"])) == sorted(path.name for path in DOCS.glob("*.md"))
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "<img" not in text, page
        for said, picture in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
            assert ((ROOT / page).parent / picture).is_file(), f"{page}: {picture}"
            assert len(said.split()) > 2, f"{page}: say what {picture} shows"


def test_links_of_every_page_lead_somewhere_in_a_checkout() -> None:
    made = "notebooks/"  # pages that `make docs` makes of notebooks
    for page in (*PAGES, "benchmarks/README.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#\s]+)[)#]", text):
            if link.startswith(made):
                path = ROOT / "examples" / link.replace(".md", ".ipynb")
            else:
                path = (ROOT / page).parent / link
            assert link.startswith("http") or path.exists(), f"{page}: {link}"
