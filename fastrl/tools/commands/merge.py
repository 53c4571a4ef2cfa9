"""``fastrl merge``: an adapter becomes a whole model, in a folder that any library loads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastrl.run.files import new_folder
from fastrl.run.model_card import recorded_training, write_model_card
from fastrl.run.processor_files import write_processor
from fastrl.run.terminal import plain, run_console
from fastrl.tools.commands.flags import own_parser

DTYPES = ("float32", "bfloat16", "float16")


def run_merge(arguments: Sequence[str]) -> int:
    """Merges an adapter into the base that it names, and saves both as one model, with tokenizer,
    generation settings, value head and model card; with ``--dtype`` converts a whole model, too.
    Raises FileNotFoundError without such a model, and ValueError for an output that is not empty,
    for a whole model without ``--dtype``, and as :func:`save_merged` does."""
    flags = make_parser().parse_args(list(arguments))
    out = Path(flags.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{flags.out} is there and not empty: name a new folder")
    from fastrl.models.model_files import CONFIG_NAME, find_file, is_adapter, model_folder

    source = model_folder(flags.folder)
    if not is_adapter(source) and flags.dtype is None:
        if find_file(source, CONFIG_NAME, {}) is None:
            raise FileNotFoundError(
                f"there is no folder {flags.folder}, and no model of that id was found on the Hub"
            )
        raise ValueError(
            f"{flags.folder} holds no adapter but a whole model: there is nothing to merge; use it "
            "as it is, or pass --dtype to convert its weights"
        )
    save_merged(source, out, flags.dtype)
    run_console().print(plain(f"saved: {out}"), soft_wrap=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("merge", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="Folder or run of an adapter or a model.")
    parser.add_argument("out", metavar="OUT", help="A new folder, for the whole model.")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="Dtype of the saved weights [float32, in which adapters are trained; servers often "
        "take bfloat16]. A whole model is converted to it.",
    )
    return parser


def merge(model: Any) -> Any:
    """Merges a PEFT model, in place, into a whole model that any library loads, and returns that.

    Raises:
        ValueError: adapters that cannot be merged, or whose merged model has other logits.
    """
    import torch

    config = next(iter(model.peft_config.values()))
    kind, remedy = getattr(config.peft_type, "value", config.peft_type), "serve it on its base"
    if not hasattr(model, "merge_and_unload"):
        raise ValueError(f"{kind} is no change of weights that can be merged: {remedy}")
    if getattr(config, "layer_replication", None):
        raise ValueError(
            "the adapter is on layers that share their weights (layer_replication), with which no "
            f"whole model is saved: {remedy}"
        )
    vocabulary = model.config.get_text_config().vocab_size
    inputs = {"input_ids": torch.arange(min(8, vocabulary), device=model.device)[None]}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        before = model.eval()(**inputs).logits
        merged = model.merge_and_unload(safe_merge=True)
        off = (merged.eval()(**inputs).logits - before).abs().max()
    left = [name for name, x in merged.named_modules() if type(x).__module__.startswith("peft.")]
    if left or not off <= 1e-3 * before.abs().max().clamp(min=1):
        why = f"PEFT leaves {left[0]} apart" if left else f"its logits would be off by {off:.2g}"
        raise ValueError(f"this adapter ({kind}) cannot be merged, as {why}: {remedy}")
    return merged


def save_merged(source: str, out: Path, dtype: str | None) -> None:
    """Writes the model of an adapter's or a whole model's folder, in a dtype if named, to ``out``;
    raises ValueError for four-bit weights, and as :func:`merge` does."""
    import torch

    from fastrl.data import reads_eos
    from fastrl.models.load import load_saved, load_tokenizer
    from fastrl.models.quantised import refuse_quantised
    from fastrl.models.value_head import read_value_head, with_value_head

    model = load_saved(source)
    refuse_quantised(
        model,
        f"the model that {source} is merged into",
        "serve the adapter beside them; or load it on the whole base, where its log-probs are "
        "others (from_pretrained(..., quantization_config=None)), and call merge_and_unload()",
    )
    reads_eos.load_from_adapter(model, source)
    merged = merge(model) if hasattr(model, "peft_config") else model
    if dtype is not None:
        merged.to(getattr(torch, dtype))
    head = read_value_head(source, {})
    saved = with_value_head(merged, head) if head else merged
    try:
        tokenizer = load_tokenizer(source)
    except FileNotFoundError as error:
        tokenizer = None
        run_console().print(plain(f"without a tokenizer: {error}"), soft_wrap=True)

    def save(folder: Path) -> None:
        saved.save_pretrained(folder)
        write_processor(merged, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_model_card(folder, out.absolute().name, saved, recorded_training(source))

    with new_folder(out.absolute()) as folder:
        save(folder)
