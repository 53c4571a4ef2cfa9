"""``fastrl run-trl``: programs for TRL run as they are, and nothing else is touched."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastrl
from fastrl.cli import main
from fastrl.compat.programs.importer import TRLImporter
from fastrl.compat.programs.names import HOMES, MODULES, find, of_its_time
from fastrl.eras import other_defaults
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import reward_model


@pytest.fixture
def run(tmp_path: Path, capsys: Any) -> Any:
    """Runs a program; what it printed, and its status."""

    def run_text(text: str, *words: str) -> tuple[str, int]:
        script = tmp_path / "program.py"
        script.write_text(text)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            status = main(["run-trl", str(script), *words])
        said = capsys.readouterr()
        return said.out + said.err + "\n".join(str(x.message) for x in warned), status

    return run_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.language_model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def test_every_name_is_there_and_loads_nothing_before() -> None:
    for name in HOMES:
        assert find(name) is not None
    for name in ("vllm", "npu", "deepspeed", "no_such_package"):
        assert find(f"is_{name}_available")() in (True, False)


def test_trl_is_fastrl_in_the_program_alone(run: Any) -> None:
    installed = sys.modules.get("trl")
    said, status = run(
        "import sys, trl\n"
        "from trl import SFTConfig, TrlParser\n"
        "from trl.core import LengthSampler\n"
        "from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE\n"
        "import trl.trainer.sft_trainer as module\n"
        "print(SFTConfig.__module__, module.SFTTrainer.__name__, hasattr(trl, 'nonsense'))\n"
        "print(sys.argv[1:], __name__, trl.__version__)\n"
        "raise SystemExit(3)\n",
        "--a", "1",
    )  # fmt: skip
    assert said.splitlines()[0] == "fastrl.trainers.sft SFTTrainer False"
    assert said.splitlines()[1].startswith("['--a', '1'] __main__ 1.")
    assert status == 3
    assert sys.modules.get("trl") is installed
    assert not [x for x in sys.meta_path if isinstance(x, TRLImporter)]


def test_what_fastrl_lacks_is_named_with_the_nearest(run: Any) -> None:
    said, status = run("from trl import SFTTrainr")
    assert "ImportError: fastrl has no SFTTrainr of trl: the nearest is SFTTrainer" in said
    assert status == 1
    said, _ = run("from trl.trainer.quantum import Q")
    assert "fastrl has no quantum of trl.trainer" in said


def test_errors_of_the_program_are_its_own(run: Any, tmp_path: Path) -> None:
    said, status = run("def f():\n    raise KeyError('mine')\nf()\n")
    assert status == 1
    assert said.splitlines()[-1] == "KeyError: 'mine'"
    assert "runpy" not in said
    assert main(["run-trl", str(tmp_path / "nowhere.py")]) == 2
    assert main(["run-trl"]) == 2


def test_what_was_taken_away_is_served_and_gone_behind(run: Any, model: Path) -> None:
    before = {
        "pipeline": transformers.pipeline,
        "parse": transformers.HfArgumentParser.parse_args_into_dataclasses,
        "init": transformers.Trainer.__init__,
        "arguments": transformers.TrainingArguments.__init__,
    }
    said, status = run(
        "import dataclasses, transformers\n"
        "from transformers import AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments\n"
        "from transformers import AdamW, BloomTokenizerFast\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(model)!r}, use_auth_token=None)\n"
        "old = {'evaluation_strategy': 'no', 'warmup_ratio': 0.1, 'no_cuda': True}\n"
        "args = TrainingArguments('out', **old)\n"
        "print(args.warmup_steps, args.use_cpu)\n"
        "class Mine(Trainer):\n"
        "    def compute_loss(self, model, inputs, return_outputs=False):\n"
        "        loss = model(**inputs, labels=inputs['input_ids']).loss\n"
        "        return (loss, None) if return_outputs else loss\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(model)!r})\n"
        "rows = [{'input_ids': [3, 4, 5]}] * 2\n"
        "args = TrainingArguments('out', max_steps=1, save_strategy='no', report_to='none',\n"
        "                         no_cuda=True, disable_tqdm=True)\n"
        "Mine(model, args, train_dataset=rows, tokenizer=tokenizer).train()\n"
        "print('trained')\n"
    )
    assert status == 0, said
    assert "0.1 True" in said
    assert "trained" in said
    for gone in ("use_auth_token is gone", "Trainer(tokenizer=) is gone", "num_items_in_batch"):
        assert said.count(gone) == 1, said
    assert transformers.pipeline is before["pipeline"]
    assert transformers.HfArgumentParser.parse_args_into_dataclasses is before["parse"]
    assert transformers.Trainer.__init__ is before["init"]
    assert transformers.TrainingArguments.__init__ is before["arguments"]
    assert not hasattr(transformers, "AdamW")


def test_all_scores_of_a_classifier_are_in_the_order_of_its_labels(
    run: Any, tmp_path: Path
) -> None:
    classifier = reward_model("gpt2", num_labels=3)
    with torch.no_grad():
        classifier.score.weight.copy_(torch.tensor([[1.0], [-1.0], [0.5]]).expand(-1, 16))
    classifier.save_pretrained(tmp_path / "classifier")
    tiny.tokenizer().save_pretrained(tmp_path / "classifier")
    said, status = run(
        "from transformers import pipeline\n"
        f"words = dict(model={str(tmp_path / 'classifier')!r}, return_all_scores=True)\n"
        "pipe = pipeline('text-classification', function_to_apply='none', **words)\n"
        "own, at_call = pipe(['w3 w4']), pipeline('text-classification', model=words['model'])\n"
        "print([x['label'] for x in own[0]], [x['score'] for x in own[0]])\n"
        "print(at_call(['w3 w4'], return_all_scores=True, function_to_apply='none') == own)\n"
        "print(at_call('w3 w4', return_all_scores=False))\n"
    )
    assert status == 0, said
    labels, same, one = [line for line in said.splitlines() if line.startswith(("[", "True"))][:3]
    assert labels.startswith("['LABEL_0', 'LABEL_1', 'LABEL_2']")  # whose scores are not sorted
    assert same == "True"
    assert one.count("LABEL") == 1
    assert said.count("return_all_scores is gone") == 1


def test_trainers_that_fastrl_lacks_have_what_does_their_work(run: Any) -> None:
    said, _ = run("from trl import ORPOTrainer")
    assert "no ORPOTrainer of trl: use fastrl align --loss orpo" in said
    said, _ = run("from trl import AlignPropTrainer as T\nT()")
    assert said.rstrip().endswith("no AlignPropTrainer of trl")


def test_what_a_program_only_names_stands_there_and_cannot_be_made(run: Any) -> None:
    said, status = run(
        "import trl\n"
        "from trl import ORPOTrainer, SFTConfig, WinRateCallback\n"
        "from trl.trainer.orpo_trainer import ORPOConfig\n"
        "def annotated(x: ORPOTrainer) -> ORPOConfig | None:\n"
        "    return isinstance(x, ORPOTrainer) or None\n"
        "class Unused(ORPOTrainer):\n"
        "    def __init__(self):\n"
        "        super().__init__(ORPOConfig(), callbacks=[WinRateCallback()])\n"
        "class ByModule(trl.CPOConfig):\n"
        "    pass\n"
        "print('GOT', annotated(1), hasattr(trl, 'nonsense'))\n"
        "globals()['Unused']()\n"
    )
    assert "GOT None False" in said
    assert status == 1
    assert (
        said.count("fastrl has no ORPOTrainer of trl: use fastrl align --loss orpo; the pro") == 1
    )
    assert "ImportError: fastrl has no ORPOTrainer of trl: use fastrl align --loss orpo" in said
    for used in ("make(ORPOTrainer)", "def f():\n    return ORPOTrainer()\nf()"):
        said, _ = run(f"from trl import ORPOTrainer\nprint('REACHED')\n{used}")
        assert "REACHED" not in said
    said, _ = run("try:\n    from trl import ORPOTrainer\nexcept ImportError:\n    print('GONE')")
    assert "GONE" in said


def test_defaults_are_trls_there_and_named_elsewhere(run: Any, tmp_path: Path) -> None:
    said, _ = run(
        "from transformers import HfArgumentParser\n"
        "from trl import RewardConfig, SFTConfig, TrlParser\n"
        "own = SFTConfig('out', use_cpu=True, report_to='none')\n"
        "words = ['--output_dir', 'out', '--use_cpu', '--max_length', '9']\n"
        "(parsed,) = HfArgumentParser(RewardConfig).parse_args_into_dataclasses(words)\n"
        "print(own.learning_rate, own.gradient_checkpointing, own.logging_steps)\n"
        "print(parsed.learning_rate, parsed.max_length, parsed.disable_dropout)\n"
    )
    assert said.splitlines()[:2] == ["2e-05 True 10", "0.0001 9 True"]
    args = fastrl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none")
    assert (args.learning_rate, fastrl.RewardConfig.__dataclass_fields__["max_length"].default) == (
        5e-5, 512,
    )  # fmt: skip
    assert other_defaults(args).endswith(
        "learning_rate=5e-05 (2e-05), logging_steps=500 (10), gradient_checkpointing=False (True)"
    )
    assert "learning_rate" not in other_defaults(
        fastrl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", learning_rate=1e-3)
    )
    assert other_defaults(fastrl.DPOConfig(str(tmp_path), use_cpu=True, report_to="none")) == ""


HEAD = """\
import json, sys
from dataclasses import dataclass, field
import transformers
from transformers import HfArgumentParser, TrainingArguments
from trl import DPOConfig, GRPOConfig, RewardConfig, SFTConfig, TrlParser
off = dict(output_dir="x", use_cpu=True, report_to="none")
words = ["--output_dir", "x", "--use_cpu", "--report_to", "none"]
@dataclass
class Own:
    trust_remote_code: bool = field(default=False)
    max_length: int = field(default=7)
class WithInit(SFTConfig):
    def __init__(self, name, **more):
        super().__init__(**{**off, "max_seq_length": 64, "warmup_ratio": 0.25, **more})
@dataclass
class Added(SFTConfig):
    data: str = "x"
@dataclass
class Again(SFTConfig):
    max_seq_length: int = 33
    learning_rate: float = 3e-4
@dataclass
class Plain(transformers.TrainingArguments):
    cache_dir: str = "c"
class PlainInit(TrainingArguments):
    def __init__(self):
        super().__init__("x", use_cpu=True, report_to="none", evaluation_strategy="no", warmup_ratio=0.5)
def parsed(kinds, *more, parser=HfArgumentParser):
    return parser(kinds).parse_args_into_dataclasses([*words, *more])
"""  # noqa: E501
# What a program computes, and what it must be: defaults are TRL 1.16's and transformers' own.
COMPUTED: list[tuple[str, Any]] = [
    ("[x := parsed(TrainingArguments)[0]] and (x.learning_rate, x.logging_steps)", (5e-5, 500)),
    ("[x := TrainingArguments('x')] and (x.learning_rate, x.logging_steps)", (5e-5, 500)),
    ("[x := parsed(SFTConfig)[0]] and (x.learning_rate, x.gradient_checkpointing)", (2e-5, True)),
    ("[x := parsed(SFTConfig, '--no_gradient_checkpointing')[0]] and "
     "(x.gradient_checkpointing, x.logging_steps)", (False, 10)),
    ("[x := parsed(RewardConfig)[0]] and (x.learning_rate, x.max_length, x.disable_dropout)",
     (1e-4, 1024, True)),
    ("[x := DPOConfig(**off)] and (x.learning_rate, x.max_length)", (1e-6, 1024)),
    ("[x := WithInit('x')] and (x.max_length, x.warmup_steps, x.learning_rate)", (64, 0.25, 2e-5)),
    ("WithInit('x', max_seq_length=5).max_length", 5),
    ("[x := Added(**off)] and (x.learning_rate, x.data)", (2e-5, "x")),
    ("parsed(Added, '--max_seq_length', '9')[0].max_length", 9),
    ("[x := Again(**off)] and (x.max_seq_length, x.max_length, x.learning_rate)", (33, 33, 3e-4)),
    ("[x := parsed(Again, '--max_seq_length', '5')[0]] and (x.max_seq_length, x.max_length)",
     (5, 5)),
    ("[x := Plain('x', evaluation_strategy='no', warmup_ratio=0.5)] and "
     "(x.warmup_steps, x.warmup_ratio, x.cache_dir)", (0.5, 0.5, "c")),
    ("parsed(Plain, '--warmup_ratio', '0.5', '--no_cuda')[0].warmup_steps", 0.5),
    ("PlainInit().warmup_steps", 0.5),
    ("transformers.Seq2SeqTrainingArguments('x', warmup_ratio=0.5).warmup_steps", 0.5),
    ("HfArgumentParser(SFTConfig).parse_dict({**off, 'max_seq_length': 5})[0].max_length", 5),
    ("TrlParser(SFTConfig).parse_dict({**off, 'max_seq_length': 5})[0].max_length", 5),
    ("open('c.yaml', 'w').write('max_seq_length: 5\\nwarmup_ratio: 0.5\\noutput_dir: x\\n"
     "report_to: none\\n') and [x := HfArgumentParser(SFTConfig).parse_yaml_file('c.yaml')[0]] and "
     "(x.max_length, x.warmup_steps)", (5, 0.5)),
    ("[x := HfArgumentParser(DPOConfig).parse_dict({**off, 'max_prompt_length': 5})[0]] and "
     "[keys := {f.name for f in __import__('dataclasses').fields(x) if f.init}] and "
     "DPOConfig(**{k: v for k, v in vars(x).items() if k in keys}).max_prompt_length", 5),
    ("DPOConfig(**off).max_prompt_length", None),
    ("[kinds := {'a': SFTConfig}] and kinds['a'](**off, **{'max_seq_length': 5}).max_length", 5),
    ("[x := parsed((Own, DPOConfig), '--trust_remote_code', '--max_length', '9')] and "
     "(x[0].trust_remote_code, x[0].max_length, x[1].trust_remote_code, x[1].max_length)",
     (True, 9, False, 1024)),
    ("[x := HfArgumentParser((Own, DPOConfig)).parse_dict({**off, 'max_length': 9})] and "
     "(x[0].max_length, x[1].max_length)", (9, 1024)),
    ("[x := parsed((Own, Added), '--max_length', '9')] and (x[0].max_length, x[1].max_length)",
     (9, 1024)),
    # Batches of prompts, as in TRL 0.14, where they do not divide into groups.
    ("[x := GRPOConfig(**off, per_device_train_batch_size=1, num_generations=16, "
     "gradient_accumulation_steps=4)] and (x.per_device_train_batch_size, "
     "x.gradient_accumulation_steps, x.generation_batch_size // x.num_generations)", (16, 4, 4)),
    ("[x := GRPOConfig(**off, per_device_train_batch_size=2, num_generations=4, "
     "gradient_accumulation_steps=2)] and (x.per_device_train_batch_size, x.generation_batch_size)",
     (2, 4)),
]  # fmt: skip


def test_settings_of_programs_are_those_of_their_time(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said, status = run(HEAD + "".join(f"print('GOT', {text})\n" for text, _ in COMPUTED))
    assert status == 0, said
    found = [line.partition(" ")[2] for line in said.splitlines() if line.startswith("GOT")]
    for (text, wanted), got in zip(COMPUTED, found, strict=True):
        assert got == str(wanted), text
    assert said.count("--trust_remote_code is the program's own: DPOConfig.trust_remote_code") == 1
    assert said.count("per_device_train_batch_size=1 counts prompts here, as in TRL 0.14") == 1


def test_batches_that_hold_no_group_are_refused_outside_of_programs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(4\) must be divisible by num_generations \(16\)"):
        fastrl.GRPOConfig(
            str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=1,
            gradient_accumulation_steps=4, num_generations=16,
        )  # fmt: skip


def test_calls_of_their_time_are_served(run: Any, model: Path) -> None:
    said, status = run(
        "import warnings\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, EvaluationStrategy\n"
        "from peft import prepare_model_for_int8_training\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(model)!r}, use_flash_attention_2=False,"
        " load_in_8bit=False)\n"
        "names = dict(output_embedding_layer_name='lm_head', layer_norm_names=['norm'])\n"
        "model = prepare_model_for_int8_training(model, **names)\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(model)!r})\n"
        "same = tokenizer.encode_plus('w3 w4')['input_ids'] == tokenizer('w3 w4')['input_ids']\n"
        "print('ENCODED', same, EvaluationStrategy.NO.value)\n"
        "for x in (model, tokenizer):\n"
        "    try:\n"
        "        x.push_to_hub('no name', use_temp_dir=True, safe_serialization=True)\n"
        "    except Exception as error:\n"
        "        print('GOT', type(error).__name__)\n"
    )
    assert status == 0, said
    assert "ENCODED True no" in said
    assert said.count("GOT TypeError") == 0
    for gone in ("prepare_model_for_int8_training", "push_to_hub(use_temp_dir=)", "encode_plus"):
        assert said.count(f"{gone} is gone") == 1, said


def test_names_are_those_of_the_programs_time() -> None:
    classic = "PPOTrainer(config, model, ref, tokenizer)\nt.step(a, b, c)"
    assert of_its_time(classic) == {}
    later = of_its_time("trl.PPOTrainer(args=a, model=m, reward_model=r)")
    assert later == {"PPOConfig": "PPOv2Config", "PPOTrainer": "PPOv2Trainer"}
    assert find("PPOTrainer", later) is fastrl.PPOv2Trainer
    assert of_its_time("RLOOTrainer(policy=p)")["RLOOConfig"] == "RLOOv1Config"
    assert of_its_time("RLOOTrainer(model=p, reward_funcs=[f])") == {}
    assert of_its_time("not python (") == {}
    assert all(x.split(".")[0] == "trl" for x in MODULES)


def test_a_program_trains(run: Any, model: Path, tmp_path: Path) -> None:
    said, status = run(
        "from datasets import Dataset\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser\n"
        "from trl import get_peft_config\n"
        "parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))\n"
        "script, args, model = parser.parse_args_and_config()\n"
        "rows = Dataset.from_dict({'text': ['w3 w4 w5 w6'] * 4})\n"
        "trainer = SFTTrainer(model.model_name_or_path, args, train_dataset=rows,\n"
        "                     peft_config=get_peft_config(model))\n"
        "trainer.train()\n"
        "trainer.save_model(args.output_dir)\n",
        "--model_name_or_path", str(model), "--output_dir", str(tmp_path / "out"), "--use_cpu",
        "--max_steps", "1", "--max_seq_length", "8", "--use_peft", "--report_to", "none",
        "--lora_target_modules", "all-linear",
    )  # fmt: skip
    assert status == 0, said
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(("method", "lines"), [
    ("gkd", [
        "answer = [{'role': 'user', 'content': 'w3'}, {'role': 'assistant', 'content': 'w4 w5'}]",
        "rows = Dataset.from_dict({'messages': [answer] * 4})",
        "args = GKDConfig(**common, lmbda=0.5, beta=0.5, max_new_tokens=4, seq_kd=False)",
        "GKDTrainer(model, teacher_model=teacher, args=args, processing_class=tokenizer,",
        "           train_dataset=rows).train()",
    ]),
    ("sdft", [
        "rows = Dataset.from_dict({'prompt': ['w3'] * 4, 'privileged_context': ['w4'] * 4})",
        "args = SDFTConfig(**common, distillation_mode='full_logits', max_completion_length=4,",
        "                  num_generations=2, teacher_model_kind='ema')",
        "SDFTTrainer(model, args, rows, processing_class=tokenizer).train()",
    ]),
])  # fmt: skip
def test_a_program_distills(
    method: str, lines: list[str], run: Any, model: Path, tmp_path: Path
) -> None:
    name, other = method.upper(), transformers.AutoModelForCausalLM.from_pretrained(model)
    other.lm_head.weight.data.mul_(2)
    other.save_pretrained(tmp_path / "other")
    tiny.tokenizer().save_pretrained(tmp_path / "other")
    said, status = run("\n".join([
        "from datasets import Dataset",
        "from transformers import AutoTokenizer",
        f"from trl.experimental.{method} import {name}Config, {name}Trainer",
        f"model, teacher = {str(model)!r}, {str(tmp_path / 'other')!r}",
        "tokenizer = AutoTokenizer.from_pretrained(model)",
        "tokenizer.chat_template = '{% for m in messages %}{{ m.content }} w9 {% endfor %}'",
        f"common = dict(output_dir={str(tmp_path / 'out')!r}, use_cpu=True, max_steps=1,",
        "              report_to='none', per_device_train_batch_size=2)",
        *lines,
    ]))  # fmt: skip
    assert status == 0, said
    assert "'train_loss'" in said
