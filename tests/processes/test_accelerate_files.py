"""accelerate reads the files of ``examples/accelerate``, and starts what they say."""

import pytest
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import prepare_multi_gpu_env

from tests import tiny_models
from tests.processes.launch import EXAMPLES


def started_by(file):
    """accelerate's arguments, and the environment of the processes that it starts."""
    words = ["--config_file", str(EXAMPLES / file), "-m", "fastrl", "ppo"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    return arguments, prepare_multi_gpu_env(arguments)


@pytest.mark.parametrize(("file", "shards"), [("ddp.yaml", False), ("fsdp2.yaml", True)])
def test_a_process_is_started_for_each_of_four_gpus(file, shards):
    arguments, environment = started_by(file)
    assert (arguments.nproc_per_node, arguments.use_cpu) == ("4", False)
    assert (arguments.use_fsdp, arguments.multi_gpu) == (shards, not shards)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"


def test_fsdp2_gathers_a_layer_at_a_time(monkeypatch):
    for name, value in started_by("fsdp2.yaml")[1].items():
        monkeypatch.setenv(name, value)
    for model in (tiny_models.language_model(), tiny_models.policy("gpt2")):
        plugin = FullyShardedDataParallelPlugin()
        assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
        plugin.set_auto_wrap_policy(model)  # as accelerate does before it asks for layers
        layer = fsdp2_prepare_auto_wrap_policy(plugin, model)
        transformer = getattr(model, "pretrained_model", model).transformer
        assert [each for each in model.modules() if layer(each)] == list(transformer.h)
