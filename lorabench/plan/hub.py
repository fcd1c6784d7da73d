"""The Hugging Face hub, asked once and briefly: where it does not answer, its cache on this machine is what there is.

Its own client tries for half a minute before it says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from lorabench.contract.hooks import first_line

TIMEOUT_S = 10.0


class HubError(ValueError):
    """What cannot be had from the hub; the message says why, and what was expected."""


def is_name(text: str) -> bool:
    """Whether a hub could have it: ORG/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return "/" in text


def fetch(name: str, file: str) -> Path:
    """A file of a model's repository, out of the cache where it is there and still the same. Raises HubError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError

    try:
        with connected(name):
            return Path(hf_hub_download(name, file))
    except GatedRepoError:
        raise HubError(f"{name} is gated: ask for access on its page, then log in (hf auth login)") from None
    except LocalEntryNotFoundError:
        raise HubError(missing(name)) from None
    except EntryNotFoundError:
        raise HubError(f"{name} on the hub has no {file}; expected a model as transformers saves it") from None
    except HubError:
        raise
    except Exception as error:  # a server that fails, a full disk: its client raises what its transport raises
        raise HubError(f"{name}: {file} cannot be downloaded: {first_line(error)}") from None


def missing(name: str) -> str:
    return f"{name} is no folder here, and the hub cannot be reached; expected a folder, a network, or a filled cache"


@contextmanager
def connected(name: str, kind: str = "model") -> Iterator[bool]:
    """Whether the hub answers for the repository ("model" or "dataset"); where it does not, its clients look into the
    cache alone. Raises HubError where it answers that there is none."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    answers = not before and answered(name, kind)
    constants.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE = before


@cache
def answered(name: str, kind: str = "model") -> bool:
    """Whether the hub answered when it was asked for the repository. Raises HubError where it has none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT_S)
    except GatedRepoError:
        return True
    except RepositoryNotFoundError:
        what = {"model": "model", "dataset": "data set"}[kind]
        raise HubError(f"the hub has no {what} {name}, or none that you may see (hf auth login)") from None
    except Exception:  # no network, a proxy, a server that fails: its clients raise what their transport raises
        return False
    return True
