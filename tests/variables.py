"""Environment variables of whoever starts the tests, which are no part of them."""

import os
from pathlib import Path

# Of libraries, launchers, terminals, languages and allocators. Settings of the run itself stay:
# threads, instruction sets, compilers, caches, and the options of tests.
_USERS = (
    *("ACCELERATE_", "FSDP_", "DEEPSPEED_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "DYNAMO_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DATASETS_", "TOKENIZERS_", "TRL_", "PEFT_"),
    *("SAFETENSORS_", "WANDB_", "TRACKIO_", "CLEARML_", "COMET_", "MLFLOW_", "DISABLE_TELEMETRY"),
    *("FASTRL_KERNELS_", "FASTRL_COMMIT", "FASTRL_DEBUG", "FASTRL_TESTS_"),
    *("WORLD_SIZE", "RANK", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK", "MASTER_", "CROSS_"),
    *("TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_", "MV2_", "SLURM_", "CCL_", "FORK_LAUNCHED"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "TTY_", "JUPYTER_", "TQDM_"),
    *("TERM", "COLORTERM", "LANG", "LC_", "MPLBACKEND", "SOURCE_DATE_EPOCH", "TZ"),
    *("MALLOC_", "GLIBC_TUNABLES", "XLA_", "PYTORCH_ENABLE_MPS_FALLBACK"),
)
# With a library of products tests may be run, as with a number of threads.
_OF_THE_RUN = "FASTRL_KERNELS_PRODUCTS"
# And of Python's all but where its files are, and how its own output is buffered.
_PYTHONS = ("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
_PYTHONS += ("PYTHONNOUSERSITE", "PYTHONUNBUFFERED")


def leave_out_users() -> None:
    """Has libraries, and the processes that tests start, do what they do by default."""
    for name in list(os.environ):
        users = name.startswith(_USERS) and name != _OF_THE_RUN
        if users or (name.startswith("PYTHON") and name not in _PYTHONS):
            del os.environ[name]
    # Nor what a user has measured, which lies in his cache.
    os.environ["FASTRL_KERNELS_PRODUCTS_TABLE"] = str(Path(__file__).with_name("no_products.json"))
