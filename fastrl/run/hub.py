"""Uploads to the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

_OF_REPOSITORY = ("private", "token")
_OF_UPLOAD = (
    *("commit_message", "commit_description", "revision", "create_pr", "parent_commit"),
    *("path_in_repo", "allow_patterns", "ignore_patterns", "delete_patterns"),
)
OPTIONS = (*_OF_REPOSITORY, *_OF_UPLOAD)
# Files that a trainer keeps in a folder beside its model: texts of its data and of the policy
# (tables, reports), the state and the logs of the run, pickles, hidden files.
_NOT_UPLOADED = (
    "completions", "ledger", "*.parquet", "*.jsonl", "report.html", "report.png",
    "checkpoint-*", "process-*", "manifest.json", "trainer_state.json", "*_results.json",
    "runs", "logs", "events.out.tfevents*",
    "training_args.bin", "optimizer*", "scheduler*", "*.pt", "*.pth", ".*",
)  # fmt: skip


def uploaded_files(folder: str | Path) -> dict[str, int]:
    """The files of a model's folder that :func:`upload_folder` uploads, and their bytes."""
    files = {x.relative_to(folder): x for x in sorted(Path(folder).rglob("*")) if x.is_file()}
    return {
        name.as_posix(): file.stat().st_size
        for name, file in files.items()
        if not any(fnmatch(part, x) for part in name.parts for x in _NOT_UPLOADED)
    }


def upload_folder(folder: str | Path, repo_id: str, card: Any, **options: Any) -> Any:
    """Uploads :func:`uploaded_files` of a folder by :func:`upload`; returns what that returns.

    Args:
        card: uploaded in place of the folder's ``README.md``, which stays as it is; None: the
            folder's ``README.md``, if any, is uploaded.
    """
    with tempfile.TemporaryDirectory() as holder:
        for name in uploaded_files(folder):
            link = Path(holder, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(folder, name).absolute())
        if card is not None:
            readme = Path(holder, "README.md")
            readme.unlink(missing_ok=True)
            readme.write_text(str(card), encoding="utf-8")
        return upload(holder, repo_id, **options)


def check_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument that :func:`upload` does not have."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise TypeError(
            f"push_to_hub has no argument {', '.join(map(repr, unknown))}: it takes repo_id, "
            f"{', '.join(OPTIONS)}"
        )


def upload(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    **options: Any,
) -> Any:
    """Uploads a folder to a model repository, in one commit.

    Args:
        private: visibility of a repository that is created; None: the namespace's default.
        token: the token for the Hub; by default that of the logged-in user.
        options: options of ``HfApi.upload_folder``, those of :data:`OPTIONS`.

    Returns:
        the commit, from ``HfApi.upload_folder``.

    Raises:
        TypeError: an option outside :data:`OPTIONS`.
        ValueError: ``private=True``, but the repository exists and is public.
    """
    from huggingface_hub import HfApi

    check_options(options)
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.repo_info(repo_id).private:
        raise ValueError(
            f"{repo_id} exists and is public, which private=True does not change: nothing was "
            "uploaded; make it private on the Hub, or choose another repo_id"
        )
    return api.upload_folder(repo_id=repo_id, folder_path=folder, **options)
