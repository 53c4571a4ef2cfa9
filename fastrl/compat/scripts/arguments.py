"""Arguments that training scripts have in common, and the data sets that they name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastrl.settings import setting

_IGNORED = "Ignored where a YAML file has a mixture, under datasets."


@dataclass
class ScriptArguments:
    """The data set of a training script, by TRL 1.x's names."""

    dataset_name: str | None = setting(f"Data set: a path or a name. {_IGNORED}", None)
    dataset_config: str | None = setting(f"Configuration of the data set. {_IGNORED}", None)
    dataset_train_split: str = setting(f"Split of the data set to train on. {_IGNORED}", "train")
    dataset_test_split: str = setting(f"Split of the data set to evaluate on. {_IGNORED}", "test")
    dataset_streaming: bool = setting(f"Read the data set as a stream. {_IGNORED}", False)
    ignore_bias_buffers: bool = setting(
        "Have DDP leave buffers of truth values alone: fastrl does so by itself.", False
    )


@dataclass
class SFTScriptArguments:
    """The data set of a script of TRL 0.11 for SFT."""

    dataset_name: str = setting("The data set.", "timdettmers/openassistant-guanaco")
    dataset_train_split: str = setting("Split of the data set to train on.", "train")
    dataset_test_split: str = setting("Split of the data set to evaluate on.", "test")
    config: str | None = setting("A YAML file of settings.", None)
    gradient_checkpointing_use_reentrant: bool = setting(
        "use_reentrant of gradient_checkpointing_kwargs.", False
    )


@dataclass
class RewardScriptArguments(SFTScriptArguments):
    """The data set of a script of TRL 0.11 for reward models."""

    dataset_name: str = setting("The data set.", "trl-lib/ultrafeedback_binarized")


@dataclass
class DPOScriptArguments(SFTScriptArguments):
    """The data set of a script of TRL 0.11 for DPO."""

    dataset_name: str | None = setting("The data set.", None)  # type: ignore[assignment]
    ignore_bias_buffers: bool = setting(
        "Have DDP leave buffers of truth values alone: fastrl does so by itself.", False
    )


@dataclass
class DatasetConfig:
    """A data set of a mixture: the arguments of ``datasets.load_dataset``.

    Attributes:
        columns: the columns that are kept; None: all.
        fraction: the data set's share of the mixture; set for all of the data sets or for none.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Several data sets in the place of one, in a YAML file under ``datasets``."""

    datasets: list[DatasetConfig] = setting("Data sets, each a mapping with a path.", list)
    streaming: bool = setting("Read the data sets as streams.", False)
    test_split_size: float | None = setting(
        "Share or number of rows to evaluate on; None: no rows.", None
    )

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**x) if isinstance(x, dict) else x for x in self.datasets]


def get_dataset(mixture_config: Any) -> Any:
    """The data sets of a :class:`DatasetMixtureConfig`, one behind the other, as a DatasetDict with
    ``train``; with ``test_split_size`` rows are shuffled, and split into ``train`` and ``test``.

    With fractions f the mixture has N rows, the first f·N/Σf of each data set, and N is as large as
    the data sets allow.

    Raises:
        ValueError: there is no data set; only some of them have a fraction; a fraction below 0, or
            none above 0; fractions or ``test_split_size`` of streams.
    """
    from datasets import DatasetDict, concatenate_datasets, load_dataset

    named = mixture_config.datasets
    if not named:
        raise ValueError("the mixture has no data set: name some under datasets")
    if mixture_config.streaming and mixture_config.test_split_size is not None:
        raise ValueError("streams are not split: leave test_split_size out")
    parts = []
    for source in named:
        part = load_dataset(
            source.path,
            source.name,
            data_dir=source.data_dir,
            data_files=source.data_files,
            split=source.split,
            streaming=mixture_config.streaming,
        )
        parts.append(part if source.columns is None else part.select_columns(source.columns))
    shares = [source.fraction for source in named]
    if any(share is not None for share in shares):
        parts = _in_shares(parts, shares, mixture_config.streaming)
    joined = concatenate_datasets(parts)
    if mixture_config.test_split_size is None:
        return DatasetDict({"train": joined})
    # Seeded, unlike TRL's: a run is resumed with the rows that it began with.
    return joined.train_test_split(test_size=mixture_config.test_split_size, seed=0)


def _in_shares(parts: list[Any], shares: list[float | None], streams: bool) -> list[Any]:
    numbers = [share for share in shares if share is not None]
    if len(numbers) < len(shares) or not all(share >= 0 for share in numbers) or sum(numbers) <= 0:
        raise ValueError(
            f"fraction must be set for all data sets of the mixture or for none, each 0 or more "
            f"and one above it, got {shares}"
        )
    if streams:
        raise ValueError("streams have no length, of which a fraction could be taken: leave it out")
    weights = [share / sum(numbers) for share in numbers]
    total = min(len(x) / w for x, w in zip(parts, weights, strict=True) if w > 0)
    return [x.select(range(round(w * total))) for x, w in zip(parts, weights, strict=True)]
