"""What fastrl uses of other packages that is private there: nothing but what is named here."""

import ast
import inspect
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import pytest
import transformers
from packaging.version import Version

import fastrl
from fastrl.alignment import Trainer as AlignmentTrainer
from fastrl.run.transformers_base import OpenTrainer
from tests.private_parts import (
    ROOT,
    TRAINER,
    Use,
    changes,
    definition,
    describe,
    described,
    known,
    members,
    replacements,
    sources,
    text_of,
    uses,
)

TRAINERS: tuple[Any, ...] = (
    fastrl.SFTTrainer, fastrl.RewardTrainer, fastrl.DPOTrainer, fastrl.KTOTrainer,
    fastrl.GRPOTrainer, fastrl.RLOOTrainer, AlignmentTrainer,
)  # fmt: skip
MOST_OVERRIDDEN, MOST_NAMES = 8, 33


class Reason(NamedTuple):
    """Why private names of others are used.

    Attributes:
        names, files: with blanks between them.
        of: the file that they come from, which begins with the name of its package; "" where it may
            be missing, or is no Python.
    """

    names: str
    files: str
    of: str
    why: str


BASE = "fastrl/run/transformers_base.py"
_TRAINER, _CONFIG = "transformers/trainer.py", "transformers/configuration_utils.py"
_MODEL, _ARGUMENTS = "transformers/modeling_utils.py", "transformers/training_args.py"
_MODELS = "transformers/models"
_ACCELERATOR, _STATE = "accelerate/accelerator.py", "accelerate/state.py"
_MODULE, _GROUPS = "torch/nn/modules/module.py", "torch/distributed/distributed_c10d.py"
USED = (
    Reason("_init_training_state _run_epoch _prepare_inputs _save_checkpoint _load_from_checkpoint "
     "_load_best_model _load_optimizer_and_scheduler _get_train_sampler",
     *(BASE, _TRAINER, "overridden: the reasons stand there")),
    Reason("_clip_grad_norm _get_grad_norm _get_learning_rate _track_num_input_tokens "
     "_load_rng_state _maybe_log_save_evaluate _defer_fsdp_gradient_reduction",
     *(BASE, _TRAINER, "parts of a step, in the loop over steps, which is ours")),
    Reason("_set_sync_gradients", BASE, _STATE, "batches are fetched before they are learned"),
    Reason("_get_dataloader", BASE, _TRAINER, "a loader with an order and a size of ours"),
    Reason("_save_optimizer_and_scheduler _save_rng_state",
     *(BASE, _TRAINER, "a checkpoint has what transformers, and DeepSpeed, write there")),
    Reason("_push_from_checkpoint", BASE, _TRAINER, "when a checkpoint has its name"),
    Reason("_tr_loss _total_loss_scalar _globalstep_last_logged _initial_global_step",
     *(BASE, _TRAINER, "what later logs are means of: saved and restored")),
    Reason("_loss_shifts_labels", BASE, _TRAINER, "else it depends on the model's class"),
    Reason("_models", BASE, _ACCELERATOR, "FSDP2 without an optimizer, in an evaluation"),
    Reason("_is_accelerate_prepared", f"{BASE} fastrl/compat/rollout_func.py",
     *(_ACCELERATOR, "after an evaluation training would not wrap the model")),
    Reason("_attn_implementation_internal", "fastrl/models/attention.py",
     *(_CONFIG, "the public setter checks each time, and changes other models' parts")),
    Reason("_gradient_checkpointing_func", "fastrl/models/attention.py",
     *(_MODEL, "layers that run again have the attention that they had")),
    Reason("_supports_attention_backend", "fastrl/models/layer_kinds.py",
     *(_MODEL, "whether a model takes an attention that is registered")),
    Reason("_no_split_modules", "fastrl/models/sharding.py fastrl/trainers/sharded.py",
     *(_MODEL, "accelerate asks models for it, and refuses names of layers that they have not")),
    Reason("_VALID_DICT_FIELDS", "fastrl/trainers/supervised.py fastrl/trainers/sft.py "
     "fastrl/trainers/groups/online_config.py",
     *(_ARGUMENTS, "settings of ours that are JSON, too")),
    Reason("_shared_state", "fastrl/trainers/plan/rehearsal.py", _STATE,
     "a rehearsal's own accelerators"),
    Reason("_is_vlm", "fastrl/compat/rollout_func.py", "", "of TRL's trainer, to refuse images"),
    # Of torch and others that are not behind the trainers.
    Reason("_DropoutNd", "fastrl/models/utils.py", "torch/nn/modules/dropout.py", "all kinds"),
    Reason("_fingerprint", "fastrl/data/cache_key.py", "", "the key to which ours is added"),
    Reason("_commit_hash", "fastrl/models/adapter_base.py", "", "of a base from the Hub"),
    Reason("_getframe", "fastrl/compat/programs/importer.py", "",
     "the program that asks for a name"),
    Reason("_python_dispatch", "fastrl/models/load.py fastrl/models/adapter_base.py",
     *(_MODULE, "weights of several tensors")),
    Reason("_forward_hooks",
     "fastrl/models/latents.py fastrl/models/lm_head.py fastrl/models/tied_embedding.py "
     "fastrl/models/products.py fastrl/rollout/fused_layers.py",
     *(_MODULE, "whether somebody waits for a layer that would not be called")),
    Reason("_forward_pre_hooks",
     "fastrl/models/latents.py fastrl/models/products.py fastrl/rollout/fused_layers.py",
     *(_MODULE, "the same")),
    Reason("_compiled_call_impl", "fastrl/rollout/fused_draw.py fastrl/rollout/fused_layers.py",
     *(_MODULE, "the same")),
    Reason("_get_fsdp_state _fsdp_param_group", "fastrl/models/sharding.py",
     *("torch/distributed/fsdp/_fully_shard/_fully_shard.py", "whether a unit reshards")),
    Reason("_foreach_copy_", "fastrl/rollout/model_runner.py", "", "many copies in one call"),
    Reason("_C _cuda_endAllocateToPool _cuda_releasePool", "fastrl/rollout/cuda_graphs.py",
     *("torch/cuda/memory.py", "a capture that was broken off leaves its pool open")),
    Reason(
        "_C _cdata _use_count _storage_Use_Count _current_autograd_node _python_dispatch _pytree",
        "fastrl/trainers/plan/phantoms.py",
        *("", "calls are intercepted, and gradients that the engine alone holds known"),
    ),
    Reason("_C _cdata _storage_Use_Count", "fastrl/rollout/fused_layers.py",
     *("", "weights are moved only where nobody else keeps their memory")),
    Reason("_rand", "fastrl/run/random_state.py", "", "NumPy's generator behind numpy.random"),
    Reason("_instances", "fastrl/run/progress.py", "tqdm/std.py", "open bars of any library"),
    Reason("_get_default_store", "fastrl/run/processes.py", _GROUPS, "notes without an answer"),
    Reason("_set_pg_timeout", "fastrl/run/launcher.py", _GROUPS, "of a group that is there"),
    Reason("_orig_mod _post_accumulate_grad_hooks", "fastrl/run/gradient_buckets.py",
     *("", "a model within torch.compile; optimizers that step in the backward pass")),
    Reason("_exit", "fastrl/rewards/sandbox_child.py", "",
     "a fork ends without what its parent does"),
    Reason("_Thing__number", "fastrl/rewards/code_sides.py", "", "its own, hidden from the tests"),
    Reason("_width _max_help_position", "fastrl/tools/commands/flags.py", "",
     "argparse's formatter"),
    Reason(
        "_negative_number_matcher _option_string_actions",
        *(
            "fastrl/tools/commands/flags.py",
            "",
            "argparse's parser: numbers with exponents, its flags",
        ),
    ),
)  # fmt: skip
ALLOWED = {
    (file, name): reason
    for reason in USED
    for file in reason.files.split()
    for name in reason.names.split()
}
# Public methods of transformers' Trainer that ours override.
PUBLIC = {
    "call_model_init", "compute_loss", "create_model_card", "create_optimizer", "create_scheduler",
    "evaluate", "evaluation_loop", "get_batch_samples", "get_eval_dataloader",
    "get_optimizer_cls_and_kwargs", "get_test_dataloader", "get_train_dataloader", "log",
    "prediction_step", "save_model", "store_flos", "train", "training_step",
}  # fmt: skip
BEHIND_TRAINERS = ("transformers/", "accelerate/", "peft/", "datasets/")
# Attributes of others that are replaced for a while, and put back.
REPLACED = {
    "fastrl/models/products.py": "forward of linear layers on a CPU",
    "fastrl/models/activation_checkpointing.py": "forward of decoder layers",
    "fastrl/rollout/fused_layers.py": "forward of decoder layers, their norm and rotary positions",
    "fastrl/models/attention.py": "names of attention, checkpoint functions, modelling functions",
    "fastrl/models/latents.py": "expand_kv of layers with latents",
    "fastrl/models/probes.py": "windows in configurations and layers",
    "fastrl/trainers/ppo/critic.py": "transformer_cls_names_to_wrap of accelerate's FSDP plugin",
    "fastrl/trainers/plan/memory.py": "of a log of ours",
    "fastrl/trainers/replay_walk.py": "settings, callbacks and parts of a trainer walked again",
    "fastrl/compat/programs/importer.py": "names and calls of other packages, in run-trl alone",
}
# What ours do in the place of a function of theirs, or rely on the order of, without calling it.
FOLLOWED = {
    f"{TRAINER}._inner_training_loop": "BaseTrainer: what is set before on_train_begin",
    f"{TRAINER}._run_epoch": "BaseTrainer: the order of batches, generators and callbacks",
    f"{TRAINER}._finalize_training": "BaseTrainer.log: the mean of all losses",
    f"{TRAINER}._load_rng_state": "BaseTrainer: restores the generators behind it once more",
    f"{TRAINER}._save": "save_model of BaseTrainer and alignment's Trainer",
    f"{TRAINER}.create_optimizer": "make_optimizer: moments of embeddings for bitsandbytes",
    "transformers/trainer_callback.py:TrainerState.save_to_json": "save_state",
    f"{_MODELS}/llama4/modeling_llama4.py:Llama4TextAttention.forward": "its temperature",
    f"{_MODELS}/deepseek_v3/modeling_deepseek_v3.py:DeepseekV3Attention.expand_kv": "Latents",
}


KNOWN = known()
IS_OLDER = Version(version("transformers")) < Version(KNOWN["transformers"])
as_recorded = pytest.mark.skipif(IS_OLDER, reason="names are those of a newer transformers")


def overridden() -> dict[str, set[str]]:
    """Private methods of transformers' Trainer that classes of ours have, too; with these."""
    found: dict[str, set[str]] = {}
    for trainer in TRAINERS:
        for kind in trainer.__mro__[: trainer.__mro__.index(transformers.Trainer)]:
            for name in vars(kind):
                theirs = getattr(transformers.Trainer, name, None)
                if name.startswith("_") and not name.startswith("__") and callable(theirs):
                    found.setdefault(name, set()).add(kind.__name__)
    return found


def functions() -> list[str]:
    """Those that are recorded: overridden, called, and followed."""
    own = (name for file, name in ALLOWED if file == BASE)
    methods = (name for name in own if callable(getattr(transformers.Trainer, name, None)))
    return [*(f"{TRAINER}.{name}" for name in methods), *FOLLOWED]


def files_of_trainers() -> set[str]:
    kinds = {kind for trainer in TRAINERS for kind in trainer.__mro__}
    ours = (kind for kind in kinds if kind.__module__.startswith("fastrl"))
    return {str(ROOT / inspect.getfile(kind)).removeprefix(f"{ROOT}/") for kind in ours}


def test_private_methods_are_overridden_in_one_class_and_are_few() -> None:
    found = overridden()
    elsewhere = {k: v for k, v in found.items() if v != {OpenTrainer.__name__}}
    assert not elsewhere
    assert len(found) <= MOST_OVERRIDDEN, sorted(found)
    assert {(BASE, name) for name in found} <= set(ALLOWED)


@cache
def found() -> list[Use]:
    return list(uses(sources(), files_of_trainers()))


def asked_for() -> set[tuple[str, str]]:
    """Files and names of what is asked for by getattr, since some versions do not have it."""
    return {(x.file, x.name) for x in found() if x.text.startswith(("getattr", "hasattr"))}


def test_public_ones_are_overridden_on_purpose() -> None:
    """A method or attribute that transformers adds may have a name that ours have already."""
    theirs, found = members(TRAINER), set[str]()
    for trainer in TRAINERS:
        for kind in trainer.__mro__[: trainer.__mro__.index(transformers.Trainer)]:
            found |= theirs & set(vars(kind))
    assert found == PUBLIC, f"transformers' Trainer has {sorted(found - PUBLIC)}, too: rename ours"


@as_recorded
def test_no_other_private_name_is_used() -> None:
    new = [str(use) for use in found() if (use.file, use.name) not in ALLOWED]
    assert not new, "\n".join([*new, "Use what is public, or name it in USED, and why."])
    used = {(use.file, use.name) for use in found()} | {(BASE, name) for name in overridden()}
    assert not set(ALLOWED) - used


def test_the_names_are_few() -> None:
    """Of what is behind the trainers; those of torch are other ones."""
    names = {name for (_, name), reason in ALLOWED.items() if reason.of.startswith(BEHIND_TRAINERS)}
    assert len(names) <= MOST_NAMES, sorted(names)


def test_nothing_else_of_others_is_replaced() -> None:
    assert replacements(sources()).keys() == REPLACED.keys()


@as_recorded
def test_the_names_are_there() -> None:
    """But for those that some versions do not have."""
    asked = asked_for()
    lost = [
        f"{reason.of} has no {name} any more, which {file} uses: {reason.why}"
        for (file, name), reason in ALLOWED.items()
        if reason.of and (file, name) not in asked and name not in text_of(reason.of)
    ]
    assert not lost, "\n".join(lost)


def test_transformers_does_what_it_did() -> None:
    newer = {f"{TRAINER}.{name}" for _, name in asked_for()} if IS_OLDER else set()
    known = {k: x for k, x in KNOWN["functions"].items() if k not in newer}
    said = changes(known, described(functions()), newer=not IS_OLDER)
    said += [f"{name} is not recorded" for name in functions() if name not in KNOWN["functions"]]
    assert not said, "\n".join(
        [
            f"transformers {version('transformers')}, looked at: {KNOWN['transformers']}",
            *said,
            "Look at what ours rely on there, then: python -m tests.private_parts",
        ]
    )


# That the tests see what they are for.


@pytest.mark.parametrize(("source", "name"), [
    ("model._hf_hook.detach()", "_hf_hook"),
    ("self.accelerator._optimizers", "_optimizers"),
    ("config._attn_implementation = 'eager'", "_attn_implementation"),
    ("getattr(model, '_tied_weights_keys', None)", "_tied_weights_keys"),
    ("vars(model).pop('_is_accelerate_prepared')", "_is_accelerate_prepared"),
    ("from transformers.modeling_utils import _load_state_dict", "_load_state_dict"),
    ("from peft.tuners import _buffer_dict", "_buffer_dict"),
    ("class T:\n def f(self): self._wrap_model(self.model)", "_wrap_model"),
    ("class T:\n def f(self): super()._run_epoch()", "_run_epoch"),
])  # fmt: skip
def test_another_one_is_noticed(source: str, name: str) -> None:
    (use,) = uses({"fastrl/trainers/new.py": ast.parse(source)}, {"fastrl/trainers/new.py"})
    assert use.name == name
    assert str(use).startswith("fastrl/trainers/new.py:")


@pytest.mark.parametrize("source", [
    "class A:\n def __init__(self): self._own = 1\n def f(self, other): return other._own",
    "pair._replace(one=1)", "torch.ops.aten._unsafe_view(x)", "from fastrl.run.state import _plain",
    "model.__class__",
])  # fmt: skip
def test_ours_are_none(source: str) -> None:
    assert not list(uses({"fastrl/new.py": ast.parse(source)}))


@pytest.mark.parametrize(("source", "text"), [
    ("import transformers\ntransformers.Trainer.log = None", "transformers.Trainer.log"),
    ("from peft import PeftModel\nsetattr(PeftModel, name, None)", "PeftModel"),
    ("vars(model)['forward'] = f", "vars(model)['forward']"),
    ("from accelerate import state\ndel state.PartialState.x", "state.PartialState.x"),
])  # fmt: skip
def test_a_replacement_is_noticed(source: str, text: str) -> None:
    assert replacements({"fastrl/new.py": ast.parse(source)}) == {"fastrl/new.py": [text]}


@pytest.mark.parametrize(("old", "new", "said"), [
    ("def _save_rng_state(", "def _save_random_state(", "is gone"),
    ("def _save_rng_state(self, output_dir: str)",
     "def _save_rng_state(self, output_dir: str, step: int)",
     "(self, output_dir: str) is transformers/trainer.py:Trainer._save_rng_state(self, "
     "output_dir: str, step: int)"),
    ('rng_states = {\n            "python": random.getstate()',
     'rng_states = {\n            "python": self.draws()',
     "does something else: it uses self.draws, uses random no more, "
     "uses random.getstate no more"),
    ("if self.args.world_size <= 1:\n            torch.save(rng_states",
     "if self.args.world_size < 2:\n            torch.save(rng_states",
     "does something else: it uses the same in another way"),
])  # fmt: skip
def test_a_change_of_theirs_is_told(old: str, new: str, said: str) -> None:
    name = f"{TRAINER}._save_rng_state"
    text = text_of("transformers/trainer.py")
    assert old in text
    method = definition(text.replace(old, new), "Trainer", "_save_rng_state")
    now = {} if method is None else {name: describe(method)}
    assert changes(described([name]), now) == [f"{name}{' ' * (said[0] != '(')}{said}"]


def test_a_comment_of_theirs_is_no_change() -> None:
    name = f"{TRAINER}._save_rng_state"
    text = text_of("transformers/trainer.py").replace("# Save RNG state", "# Other words")
    method = definition(text, "Trainer", "_save_rng_state")
    assert not changes(described([name]), {name: describe(method)})
