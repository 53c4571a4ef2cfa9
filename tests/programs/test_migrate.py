"""``fastrl migrate``: what becomes of a program, and a changed one that runs."""

import ast
from pathlib import Path
from typing import Any

import pytest

from fastrl.cli import main
from fastrl.compat.programs.migrate import THERE, read_program, rewritten
from fastrl.eras import DEFAULTS

PROGRAM = """\
import os
from trl import PPOConfig, PPOTrainer, SFTConfig as Config
from trl.core import LengthSampler
from transformers import AutoModelForCausalLM

args = Config(
    "out", max_seq_length=8, use_mps_device=True, packing=False, save_safetensors=False,
    learning_rate=1e-4, nonsense=1,
)
ppo = PPOTrainer(args=PPOConfig("out", num_ppo_epochs=2), reward_model=None)
model = AutoModelForCausalLM.from_pretrained("a", load_in_8bit=True)
"""


def test_each_name_and_setting_is_told() -> None:
    found = {(x.line, x.name): x for x in read_program(PROGRAM)}
    kinds = {key: x.kind for key, x in found.items()}
    assert kinds == {
        (2, "trl"): "renamed",
        (2, "PPOConfig"): "renamed",
        (2, "PPOTrainer"): "renamed",
        (2, "SFTConfig"): "as it is",
        (3, "trl.core"): "renamed",
        (3, "LengthSampler"): "as it is",
        (6, "SFTConfig(logging_steps=)"): "another default",
        (6, "SFTConfig(gradient_checkpointing=)"): "another default",
        (7, "SFTConfig(max_seq_length=)"): "renamed",
        (7, "SFTConfig(use_mps_device=)"): "changes nothing",
        (7, "SFTConfig(packing=)"): "as it is",
        (7, "SFTConfig(save_safetensors=)"): "refused",
        (8, "SFTConfig(learning_rate=)"): "as it is",
        (8, "SFTConfig(nonsense=)"): "not there",
        (10, "PPOv2Config(num_ppo_epochs=)"): "as it is",
        (10, "PPOv2Trainer(args=)"): "as it is",
        (10, "PPOv2Trainer(reward_model=)"): "as it is",
        (11, "from_pretrained(load_in_8bit=)"): "renamed",
        (1, "BitsAndBytesConfig"): "renamed",
    }
    assert found[6, "SFTConfig(logging_steps=)"].text == "500 here, 10 in TRL 1.16"


TRAINERS = """\
from trl import DPOTrainer, PPOTrainer, RLOOTrainer, SFTTrainer, GRPOTrainer
DPOTrainer(model, tokenizer=t, beta=0.1, max_prompt_length=3, reference_free=True, nonsense=1)
SFTTrainer(model=m, max_seq_length=8, infinite=True, compute_loss_func=f, learning_rate=1)
RLOOTrainer(policy=m, ref_policy=r, reward_model=s, config=c)
PPOTrainer(config, m, tokenizer=t, beta=0.1)
GRPOTrainer(model=m, tokenizer=t, processing_class=t, beta=0.1)
"""


def test_keywords_of_trainers_are_told() -> None:
    found = {(x.line, x.name.partition("(")[2][:-2]): x for x in read_program(TRAINERS)}
    kinds = {key: x.kind for key, x in found.items() if key[1]}
    assert kinds == {
        (2, "tokenizer"): "renamed",
        (2, "beta"): "kept",
        (2, "max_prompt_length"): "kept",
        (2, "reference_free"): "refused",
        (2, "nonsense"): "not there",
        (3, "model"): "as it is",
        (3, "max_seq_length"): "kept",
        (3, "infinite"): "changes nothing",
        (3, "compute_loss_func"): "refused",
        (3, "learning_rate"): "not there",
        (4, "policy"): "renamed",
        (4, "ref_policy"): "renamed",
        (4, "reward_model"): "as it is",
        (4, "config"): "renamed",
        (5, "tokenizer"): "as it is",
        (5, "beta"): "not there",
        (6, "model"): "as it is",
        (6, "tokenizer"): "not there",
        (6, "processing_class"): "as it is",
        (6, "beta"): "not there",
    }
    assert found[3, "max_seq_length"].text == "a setting of SFTConfig now"
    changed = rewritten(TRAINERS, list(found.values())).splitlines()
    assert "RLOOv1Trainer" not in changed[4]
    assert "(model=m, ref_model=r, reward_model=s, args=c)" in "".join(changed)
    assert "DPOTrainer(model, processing_class=t, beta" in "".join(changed)


def test_what_others_have_renamed_is_changed() -> None:
    program = (
        "from transformers import TrainingArguments\n"
        "from trl import is_xpu_available, is_npu_available\n"
        'args = TrainingArguments("out", evaluation_strategy="no", overwrite_output_dir=True)\n'
        'data = load_dataset("a", use_auth_token=True)\n'
        "four = wanted()\n"
        'model = AutoModel.from_pretrained("b", load_in_4bit=four, device_map="auto")\n'
        'model.push_to_hub("c", use_temp_dir=False)\n'
    )
    changed = rewritten(program, read_program(program)).splitlines()
    assert changed[:6] == [
        "from transformers import BitsAndBytesConfig",
        "from transformers import TrainingArguments",
        "from transformers.utils import (",
        "    is_torch_xpu_available as is_xpu_available,",
        "    is_torch_npu_available as is_npu_available,",
        ")",
    ]
    changed[2:6] = ["\n".join(changed[2:6])]
    assert changed[3] == 'args = TrainingArguments("out", eval_strategy="no")'
    assert changed[4] == 'data = load_dataset("a", token=True)'
    assert changed[6] == (
        'model = AutoModel.from_pretrained("b", quantization_config=BitsAndBytesConfig('
        'load_in_4bit=True) if four else None, device_map="auto")'
    )
    assert changed[7] == 'model.push_to_hub("c")'
    assert read_program("\n".join(changed)) == []


HEAD = "from trl import SFTConfig as S, PPOTrainer\n"
MODEL = "from transformers import BitsAndBytesConfig\nm = A.from_pretrained('a', "
QUANTIZED = "quantization_config=BitsAndBytesConfig"
# A program, what of it changes to, and what is named.
WRITTEN: list[tuple[str, str, set[tuple[str, str]]]] = [
    (f"{MODEL}load_in_4bit=a, load_in_8bit=b or c)",
     f"'a', {QUANTIZED}(load_in_4bit=a, load_in_8bit=b or c) if a or (b or c) else None)",
     {("from_pretrained(load_in_4bit=)", "renamed")}),
    (f"{MODEL}load_in_4bit=False, load_in_8bit=True, use_flash_attention_2=x)",
     f"'a', {QUANTIZED}(load_in_8bit=True), use_flash_attention_2=x)",
     {("from_pretrained(use_flash_attention_2=)", THERE)}),
    (f"{MODEL}load_in_4bit=True, quantization_config=q)", "'a', quantization_config=q)", set()),
    (f"{MODEL}load_in_4bit=True, **more)", "'a', load_in_4bit=True, **more)",
     {("from_pretrained(load_in_4bit=)", THERE)}),
    (f"{MODEL}load_in_4bit=f(S('x', max_seq_length=8)))", "load_in_4bit=f(S('x', max_length=8)))",
     {("from_pretrained(load_in_4bit=)", THERE)}),
    ("from peft import prepare_model_for_int8_training\n"
     "prepare_model_for_int8_training(m, layer_norm_names=[])",
     "import prepare_model_for_kbit_training as prepare_model_for_int8_training\n"
     "prepare_model_for_int8_training(m)",
     {("peft.prepare_model_for_int8_training", "renamed")}),
    ("from transformers import AdamW, EvaluationStrategy",
     "import AdamW, IntervalStrategy as EvaluationStrategy", {("transformers.AdamW", THERE)}),
    ("class M(S):\n    def __init__(self):\n        super().__init__('x', max_seq_length=8)",
     "super().__init__('x', max_length=8)", {("SFTConfig(max_seq_length=)", "renamed")}),
    ("class M(TrainingArguments):\n    def __init__(self):\n"
     "        super().__init__('x', no_cuda=True, warmup_ratio=r)",
     "super().__init__('x', use_cpu=True, warmup_ratio=r)",
     {("TrainingArguments(warmup_ratio=)", THERE)}),
    ("kind = S if x else None\nkind('x', max_seq_length=8)", "kind('x', max_length=8)", set()),
    ("partial(S, max_seq_length=8)", "partial(S, max_length=8)", set()),
    ("kw = dict(max_seq_length=8)\nS('x', **kw)", "kw = dict(max_seq_length=8)\nS('x', **kw)",
     {("SFTConfig(max_seq_length=)", "renamed")}),
    ("S(**{'reference': 1})", "S(**{'reference': 1})", {("SFTConfig(reference=)", "not there")}),
    ("S('x', use_ipex=True, use_mps_device=True)", "S('x', )", set()),
    ("S(use_ipex=True,)", "S()", set()),
    ("s = 'a\\x0cb\u2028'; S('x', max_seq_length=8)", "\u2028'; S('x', max_length=8)", set()),
    ("def compute_loss(self, a, b=(False)): ...", "def compute_loss(self, a, b=(False)): ...",
     {("compute_loss", THERE)}),
    ("class M(PPOTrainer):\n    def __init__(self, r):\n        super().__init__(reward_model=r)",
     "PPOv2Trainer as PPOTrainer", {("PPOTrainer", "renamed")}),
    ("from trl import ORPOTrainer\ndef f(x: ORPOTrainer): ...", "from trl import ORPOTrainer",
     {("ORPOTrainer", THERE)}),
    ("from trl import ORPOTrainer\nORPOTrainer()", "from trl import ORPOTrainer",
     {("ORPOTrainer", "not there")}),
]  # fmt: skip


@pytest.mark.parametrize(("program", "wanted", "named"), WRITTEN, ids=str)
def test_what_is_written_parses_and_what_is_left_is_named(
    program: str, wanted: str, named: set[tuple[str, str]]
) -> None:
    found = read_program(HEAD + program)
    changed = rewritten(HEAD + program, found)
    ast.parse(changed)
    assert wanted in changed
    assert named <= {(x.name, x.kind) for x in found}


def test_an_import_is_written_in_front_of_the_first_statement() -> None:
    program = '"""Doc."""\n@f\ndef g():\n    return A.from_pretrained("a", load_in_4bit=True)\n'
    changed = rewritten(program, read_program(program)).splitlines()
    assert changed[:3] == ['"""Doc."""', "from transformers import BitsAndBytesConfig", "@f"]


def test_what_transformers_calls_otherwise_is_changed() -> None:
    program = (
        "class Mine(Trainer):\n"
        "    def compute_loss(self, model, inputs, return_outputs=False):\n"
        "        return 0\n"
        "ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)\n"
        "text = tokenizer.apply_chat_template(chat, tokenize=False)\n"
        'options = {"return_all_scores": True}\n'
    )
    found = read_program(program)
    changed = rewritten(program, found).splitlines()
    assert changed[1].endswith("return_outputs=False, num_items_in_batch=None):")
    assert changed[3].endswith("add_generation_prompt=True, return_dict=False)")
    assert changed[4:] == program.splitlines()[4:]
    (left,) = read_program("\n".join(changed))
    assert (left.line, left.name, left.edit) == (6, "return_all_scores", None)
    assert (left.kind, left.text[:18]) == (THERE, "today: top_k=None,")


def test_settings_of_transformers_own_arguments_are_written_anew_or_named(
    tmp_path: Path, capsys: Any
) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "args = TrainingArguments('out', warmup_ratio=0.1, group_by_length=True, no_cuda=True)\n"
        "args = TrainingArguments('out', group_by_length=False, warmup_ratio=ratio)\n"
        "logps, entropies = self._get_per_token_logps_and_entropies(model, ids, mask, 3)\n"
    )
    assert main(["migrate", str(script), "--write"]) == 0
    assert script.read_text() == (
        "args = TrainingArguments('out', warmup_steps=0.1, "
        "train_sampling_strategy='group_by_length', use_cpu=True)\n"
        "args = TrainingArguments('out', warmup_ratio=ratio)\n"
        "logps, entropies, _ = self._get_per_token_logps_and_entropies(model, ids, mask, 3)\n"
    )
    said = capsys.readouterr().out
    assert "left, as only fastrl run-trl runs them: line 2 of the old program" in said


def test_trainers_of_experimental_modules_are_told() -> None:
    found = read_program(
        "from trl.experimental.gkd import GKDConfig, GKDTrainer\n"
        "from trl.experimental.sdft import SDFTConfig\n"
        "GKDConfig('out', lmbda=1.0, packing=True)\nSDFTConfig('out', distillation_topk=5)\n"
        "SDFTConfig('out', distillation_mode='full_logits')\n"
    )
    kinds = {(x.line, x.name): x.kind for x in found if "trl" not in x.name}
    assert kinds == {
        (1, "GKDConfig"): "as it is",
        (1, "GKDTrainer"): "as it is",
        (2, "SDFTConfig"): "as it is",
        (3, "GKDConfig(lmbda=)"): "as it is",
        (3, "GKDConfig(packing=)"): "refused",
        (4, "SDFTConfig(distillation_topk=)"): "changes nothing",
        (4, "SDFTConfig(distillation_mode=)"): "refused",
        (5, "SDFTConfig(distillation_mode=)"): "as it is",
    }


def test_methods_that_training_does_not_call_are_told() -> None:
    program = (
        "import trl\nclass Mine(trl.GRPOTrainer):\n    def _compute_loss(self, model, inputs):\n"
        "        pass\n    def _generate(self, prompts):\n        pass\n"
    )
    (found,) = [x for x in read_program(program) if x.name.startswith("Mine")]
    assert (found.line, found.name, found.kind) == (5, "Mine._generate", "refused")
    assert found.text.startswith("pass a rollout_func")


def test_what_is_safe_is_changed() -> None:
    changed = rewritten(PROGRAM, read_program(PROGRAM))
    assert "trl" not in changed.replace("fastrl", "")
    names = "PPOv2Config as PPOConfig, PPOv2Trainer as PPOTrainer, SFTConfig as Config"
    assert f"from fastrl import {names}\n" in changed
    assert "from fastrl import LengthSampler" in changed
    assert "max_length=8, packing=False" in changed
    assert "from transformers import BitsAndBytesConfig\nimport os\n" in changed
    assert (
        'from_pretrained("a", quantization_config=BitsAndBytesConfig(load_in_8bit=True))' in changed
    )
    assert read_program(changed) == []


def test_an_import_keeps_its_lines() -> None:
    program = "if x:\n    from trl import (\n        SFTConfig,\n        SFTTrainer as T,\n    )\n"
    changed = rewritten(program, read_program(program))
    assert changed == program.replace("trl", "fastrl")


PARSED = """\
from trl import GRPOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
class Mine(ScriptArguments):
    own: int = 1
parser = TrlParser((Mine, GRPOConfig, ModelConfig))
"""


def test_settings_of_a_file_are_told_by_the_configurations_that_the_program_reads(
    tmp_path: Path, capsys: Any
) -> None:
    script, settings = tmp_path / "p.py", tmp_path / "c.yaml"
    script.write_text(PARSED)
    settings.write_text(
        "# all of it\nbeta: 0.1\nown: 2\nuse-vllm: true\ntorch_dtype: auto\nmax_seq_length: 8\n"
        "chat_template_path: x\nenv: {A: b}\n"
    )
    assert main(["migrate", str(script), str(settings)]) == 1
    said = capsys.readouterr().out.splitlines()
    told = [x.partition("c.yaml:")[2].split(": ")[:3] for x in said if "c.yaml:" in x]
    assert told == [
        ["4", "GRPOConfig(use_vllm=)", "changes nothing"],
        ["5", "ModelConfig(torch_dtype=)", "renamed"],
        ["6", "GRPOConfig(max_seq_length=)", "not there"],
        ["7", "GRPOConfig(chat_template_path=)", "refused"],
    ]
    assert main(["migrate", str(script), str(settings), "--all"]) == 1
    assert "c.yaml:2: GRPOConfig(beta=): as it is" in capsys.readouterr().out
    script.write_text("import trl\n")
    assert main(["migrate", str(script), str(settings)]) == 2
    assert "names no configuration" in capsys.readouterr().err


def test_defaults_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    for name, defaults in DEFAULTS.items():
        fields = getattr(trl, name).__dataclass_fields__
        assert {setting: fields[setting].default for setting in defaults} == defaults


def test_the_command_writes_and_keeps_what_was(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import SFTConfig\nprint(SFTConfig.__module__)\n")
    assert main(["migrate", str(script), "--write"]) == 0
    assert "train.py:1: trl: renamed: now fastrl" in capsys.readouterr().out.replace("\n/", "/")
    assert script.read_text().startswith("from fastrl import SFTConfig\n")
    (before,) = [x for x in tmp_path.iterdir() if x != script]
    assert before.read_text().startswith("from trl")
    assert main(["migrate", str(script), "--write"]) == 0
    assert len(list(tmp_path.iterdir())) == 2
    script.write_text("from trl import SFTConfig, Nonsense\nNonsense()\n")
    assert main(["migrate", str(script)]) == 1
    script.write_bytes("# coding: latin-1\n# é\nfrom trl import SFTConfig\n".encode("latin-1"))
    assert main(["migrate", str(script)]) == 0
    script.write_text("x = 1\ndef f(:\n")
    assert main(["migrate", str(script)]) == 2
    assert "train.py does not parse: line 2" in capsys.readouterr().err
