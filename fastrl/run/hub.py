"""Uploads to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OF_REPOSITORY = ("private", "token")
_OF_UPLOAD = (
    "commit_message",
    "commit_description",
    "revision",
    "create_pr",
    "parent_commit",
    "path_in_repo",
    "allow_patterns",
    "ignore_patterns",
    "delete_patterns",
)
OPTIONS = (*_OF_REPOSITORY, *_OF_UPLOAD)


def check_options(options: Mapping[str, Any]) -> None:
    """
    Raises:
        TypeError: an argument that :func:`upload` does not have.
    """
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
        private: visibility of a repository that does not exist and is created; None: the Hub's
            default for the namespace.
        token: of the Hub; by default that of the logged-in user.
        options: of ``HfApi.upload_folder``: commit_message, commit_description, revision,
            create_pr, parent_commit, path_in_repo, allow_patterns, ignore_patterns,
            delete_patterns.

    Returns:
        the commit, from ``HfApi.upload_folder``.

    Raises:
        TypeError: another option.
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
