"""``fastrl run-trl``: programs for TRL run as they are, and nothing else is touched."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastrl
from fastrl.cli import main
from fastrl.eras import other_defaults
from fastrl.programs.names import HOMES, MODULES, find, of_its_time
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
    assert not [x for x in sys.meta_path if type(x).__module__.startswith("fastrl")]


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
    said, _ = run("from trl import AlignPropTrainer")
    assert said.rstrip().endswith("no AlignPropTrainer of trl")


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
