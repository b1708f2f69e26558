"""An export on the Hugging Face hub: `thinwire export --push REPO`."""

from __future__ import annotations

from pathlib import Path

from thinwire.errors.calls import first_line
from thinwire.launch.shared.exit_codes import FailedError
from thinwire.models import hub
from thinwire.pipeline.errors import OptionsError


def check_repository(name: str) -> None:
    """Raise OptionsError unless a repository is there, as its owner made it: public or private."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if get_token() is None:
        raise OptionsError("--push needs a token of the hub that may write: run hf auth login, or set HF_TOKEN")
    if (trouble := hub.unreachable()) is not None:
        raise OptionsError(f"--push needs the hub, and {trouble}; export without it, and push the folder later")
    try:
        HfApi().repo_info(name)
    except HFValidationError:
        raise OptionsError(f"--push must name a repository as OWNER/NAME, got {name}") from None
    except RepositoryNotFoundError:
        raise OptionsError(
            f"--push must name a repository that is on the hub and that your token may see, got {name}; make it with "
            f"hf repos create {name} --private, or without --private for all to see"
        ) from None
    except Exception as error:  # the client's own errors have no root among Python's
        raise OptionsError(f"--push cannot read {name} on the hub: {first_line(error)}") from error


def push(folder: Path, name: str) -> str:
    """Put an export into a repository as one commit, and return its address.

    Raises:
        FailedError: that failed; the folder stays.
    """
    from huggingface_hub import HfApi

    try:
        return str(HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="An export of Thinwire"))
    except Exception as error:
        raise FailedError(
            f"{folder} is written, but could not be pushed to {name}: {first_line(error)}; try again with "
            f"hf upload {name} {folder}"
        ) from error
